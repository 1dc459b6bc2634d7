"""Outcomes of pushes under faults (cases n4, n5, o3 to o7): failed by name, or done."""

from __future__ import annotations

import itertools

import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    FerryError,
    FerryInternalError,
    PeerLost,
    PushAborted,
    TransferFailed,
)
from kvferry.engine.fabric import Progress
from kvferry.engine.fabric.faults import CallFault, NoticeFault, TransferFault
from kvferry.protocol.notices import TOKEN_BYTES, Written, encode_notice
from kvferry.protocol.ranges import Ranges
from tests.kit import GROUP, Pool, World, address, agent, at_base
from tests.pushing import OURS, TOKENS, begin_landing, begin_push, contact_of

SIX = {"wave_bytes": 400}
"""The request's three blocks in two layers, each a wave."""
SLOW = {"poll_s": 0.05, "offered_poll_s": 0.1, "idle_poll_s": 0.5}
"""Minutes of virtual time with something in flight."""


async def faulty(world: World, *, ranks: int = 1, kept: int = 0, **options):
    """One push under the world's faults; the outcomes, on engines that are at base then.

    Args:
        kept: Transfers that the transport was told to release, and did not.
    """
    sources = [Pool(heads=2, tp=(i, ranks)) for i in range(ranks)]
    target = Pool()
    async with (
        world.instance("p", sources, **SIX) as producers,
        world.engine("c", target) as decode,
    ):
        async with trio.open_nursery() as nursery:
            landing = begin_landing(nursery, decode, contact_of(producers), **options)
            pushes = [
                begin_push(nursery, engine, pool, **options)
                for engine, pool in zip(producers, sources, strict=True)
            ]
        if not decode.quarantine:
            assert not world.may_touch(target, OURS)
        await trio.sleep(0.5)
        await trio.testing.wait_all_tasks_blocked()
        for engine in (*producers, decode):
            at_base(engine, kept=kept)
        # Others go on: the same two engines, right away.
        world.network.faults.clear()
        async with trio.open_nursery() as nursery:
            again = [begin_landing(nursery, decode, contact_of(producers), "again")]
            for engine, pool in zip(producers, sources, strict=True):
                again.append(begin_push(nursery, engine, pool, "again", salt=1))
        assert [outcome.error for outcome in again] == [None] * len(again)
        assert target.holds(OURS, num_tokens=TOKENS, salt=1)
    return landing, pushes


# n4, o3: one write of several fails.


@pytest.mark.parametrize("nth", range(1, 7))
async def test_n4_one_of_several_writes_fails_at_post(autojump_clock, nth) -> None:
    """The consumer learns it within one poll, fails, and may trust nothing."""
    world = World()
    failed_at = []
    world.network.faults.add(
        CallFault(
            fabric="p-*",
            method="post",
            nth=nth,
            error=TransferFailed("no room"),
            action=lambda: failed_at.append(trio.current_time()),
        )
    )
    landing, (push,) = await faulty(world)
    assert isinstance(landing.error, PushAborted)
    assert "no room" in str(landing.error)
    assert landing.error.untrusted == {GROUP: Ranges.of([(0, 12)])}
    assert landing.error.peer is not None
    assert landing.at - failed_at[0] < 0.01
    assert isinstance(push.error, TransferFailed)
    assert push.error.request_id == landing.error.request_id == "r"


@pytest.mark.parametrize("nth", range(1, 7))
@pytest.mark.parametrize("recovers", [True, False])
async def test_a_wave_that_is_lost_leaves_its_blocks_in_quarantine(
    autojump_clock, nth, recovers
) -> None:
    """On both sides; they come back if the transport ever says that it has settled."""
    world, source, target = World(), Pool(), Pool()
    async with trio.open_nursery() as nursery:
        process = await world.start(nursery, "p", source, drain_grace_s=1.0, **SIX)
        prefill = process.engine
        consumer = await world.start(nursery, "c", target, drain_grace_s=1.0)
        world.network.faults.add(
            TransferFault(
                fabric="p-*",
                nth=nth,
                progress=Progress.LOST,
                recovers=recovers,
                delay_s=20.0,
            )
        )
        push = begin_push(nursery, prefill, source)
        landing = begin_landing(nursery, consumer.engine, prefill)
        await push.over.wait()
        await landing.over.wait()
        assert isinstance(push.error, TransferFailed)
        assert isinstance(landing.error, PushAborted)
        assert prefill.quarantine
        assert consumer.engine.quarantine.blocks(GROUP) == set(OURS)
        await trio.sleep(60)
        if recovers:
            assert not prefill.quarantine
            with trio.fail_after(60):
                await consumer.engine.quarantine.wait_empty()
            at_base(prefill)
            at_base(consumer.engine)
        else:
            assert prefill.quarantine
            assert consumer.engine.quarantine.blocks(GROUP) == set(OURS)
        await consumer.leave()
        await process.leave()


# n5: notices that are nobody's, or come at a strange time.


@pytest.mark.parametrize("copies", [2, 3])
async def test_n5_doubled_notices_change_nothing(autojump_clock, copies) -> None:
    """Done once, of the same parts."""
    world = World()
    world.network.faults.add(NoticeFault(fabric="p-*", nth=None, copies=copies))
    landing, (push,) = await faulty(world)
    assert (landing.error, push.error) == (None, None)
    assert landing.report.waves == push.report.waves == 6


@pytest.mark.parametrize("nth", range(1, 7))
async def test_o6_one_notice_thrice_and_another_never(autojump_clock, nth) -> None:
    """Not done, though as many have come as there are parts."""
    world = World()
    for number in range(1, 7):
        copies = 0 if number == nth else 3
        world.network.faults.add(NoticeFault(fabric="p-*", nth=number, copies=copies))
    landing, (push,) = await faulty(world, deadline_s=3)
    assert isinstance(landing.error, DeadlineExceeded)
    assert isinstance(push.error, FerryError)


async def test_n5_foreign_and_late_notices_are_counted_and_change_nothing(
    autojump_clock,
) -> None:
    """Before a registration, of an unknown token, garbage, and again after the end."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target, **SIX) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        stranger = world.network.fabric("stranger")
        name = stranger.connect(decode._fabric.metadata())
        unknown = encode_notice(Written(b"?" * TOKEN_BYTES, 0))
        for payload in (unknown, b"", b"garbage", unknown + b"x"):
            stranger.notify(name, payload)
        await trio.sleep(1)
        strays = decode.statistics()["stray_notices"]
        assert strays == 4
        landing = begin_landing(nursery, decode, prefill)
        await trio.sleep(1)
        for part in range(6):
            stranger.notify(name, encode_notice(Written(b"?" * TOKEN_BYTES, part)))
        await trio.sleep(1)
        assert not landing.over.is_set()
        tokens = decode._landings.intake.tokens
        begin_push(nursery, prefill, source)
        await landing.over.wait()
        assert landing.error is None
        assert decode.statistics()["stray_notices"] == strays + 6
        target.check(OURS, num_tokens=10)
        for token, part in itertools.product(tokens, range(6)):
            stranger.notify(name, encode_notice(Written(token, part)))
        await trio.sleep(1)
        assert decode.statistics()["stray_notices"] == strays + 12
        target.check(OURS, num_tokens=10)
        assert len(world.logged("landing_done")) == 1


async def test_notices_that_are_overtaken_by_the_word_that_all_is_written(
    autojump_clock,
) -> None:
    """The link is faster than the bytes' notices: done with the last of those."""
    world = World()
    for number, delay_s in enumerate((3, 1, 2, 0, 2, 1), start=1):
        world.network.faults.add(
            NoticeFault(fabric="p-*", nth=number, delay_s=float(delay_s))
        )
    landing, (push,) = await faulty(world)
    assert (landing.error, push.error) == (None, None)
    assert landing.at == pytest.approx(3, abs=0.3)


# o4: an exception in any fabric call, at any position.


METHODS = ("connect", "prepare", "post", "poll", "release", "take_notices", "discard")


async def calls_of(side: str, method: str) -> int:
    """How often a clean run makes the call."""
    world = World()
    await faulty(world)
    return sum(
        count
        for (name, called), count in world.network.faults.calls.items()
        if called == method and name.startswith(side)
    )


@pytest.mark.parametrize("error", [TransferFailed, PeerLost, FerryInternalError])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", ["p", "c"])
async def test_o4_an_exception_in_any_fabric_call(
    autojump_clock, side, method, error
) -> None:
    """Both sides end alike or the one that knows less fails; others go on."""
    calls = min(await calls_of(side, method), 12)
    for nth in range(1, calls + 1):
        world = World()
        world.network.faults.add(
            CallFault(
                fabric=f"{side}-*", method=method, nth=nth, error=error("injected")
            )
        )
        kept = method == "release"
        landing, (push,) = await faulty(world, deadline_s=5, kept=kept)
        for outcome in (landing, push):
            assert outcome.report is not None or isinstance(outcome.error, FerryError)
        assert landing.report is not None or push.report is None, nth


# o5: no more input.


@pytest.mark.parametrize("after_posts", [0, 1, 3, 4])
@pytest.mark.parametrize("what", ["link", "network", "all"])
async def test_o5_every_state_ends_by_time_alone(
    autojump_clock, after_posts, what
) -> None:
    """Nothing comes any more from anywhere: both end, and nothing new is submitted."""
    world, source, target = World(), Pool(), Pool()
    async with trio.open_nursery() as nursery:
        process = await world.start(
            nursery,
            "p",
            source,
            drain_grace_s=2.0,
            lease_s=9.0,
            window=2,
            **SIX,
            **SLOW,
        )
        consumer = await world.start(nursery, "c", target, drain_grace_s=2.0, **SLOW)
        prefill, decode = process.engine, consumer.engine

        def stop() -> None:
            if what in {"link", "all"}:
                world.streams.freeze(*address(prefill))
            if what in {"network", "all"}:
                world.network.freeze(agent(prefill))

        landing = begin_landing(nursery, decode, prefill, deadline_s=20)
        await trio.sleep(0.1)
        if after_posts:
            world.network.faults.add(
                CallFault(fabric="p-*", method="post", nth=after_posts, action=stop)
            )
        else:
            stop()
        push = begin_push(nursery, prefill, source, deadline_s=20)
        await trio.sleep(60)
        assert landing.over.is_set()
        assert push.over.is_set()
        assert isinstance(landing.error, FerryError)
        assert isinstance(push.error, FerryError)
        posts = world.network.faults.calls[agent(prefill), "post"]
        statistics = decode.statistics()
        assert statistics["landings"] == prefill.statistics()["pushes"] == 0
        await trio.sleep(60)
        assert world.network.faults.calls[agent(prefill), "post"] == posts
        world.streams.thaw(*address(prefill))
        world.network.thaw(agent(prefill))
        with trio.fail_after(130):
            await decode.quarantine.wait_empty()
            await prefill.quarantine.wait_empty()
        target.fill(OURS, 7.0)
        await trio.sleep(10)
        assert target.is_filled(OURS, 7.0)
        at_base(decode)
        at_base(prefill)
        await consumer.leave()
        await process.leave()


# o7: several sources; done with the last part of the last of them, once.


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[:4])
@pytest.mark.parametrize("last", [0, 3])
async def test_o7_done_with_the_last_part_of_the_last_source(
    autojump_clock, order, last
) -> None:
    """Three ranks with two waves each: five of six are not enough, in any order."""
    world = World()
    sources = [Pool(heads=3, tp=(i, 3)) for i in range(3)]
    target = Pool(heads=3)
    async with (
        world.instance("p", sources, wave_bytes=600) as producers,
        world.engine("c", target) as decode,
        trio.open_nursery() as nursery,
    ):
        for place, rank in enumerate(order):
            name = agent(producers[rank])
            for number in (1, 2):
                late_s = 2.0 * place + number
                world.network.faults.add(
                    NoticeFault(fabric=name, nth=number, delay_s=late_s + last)
                )
        landing = begin_landing(nursery, decode, contact_of(producers))
        pushes = [
            begin_push(nursery, engine, pool)
            for engine, pool in zip(producers, sources, strict=True)
        ]
        await trio.sleep(5.5 + last)
        assert not landing.over.is_set()
        assert not any(push.over.is_set() for push in pushes)
        await landing.over.wait()
        assert landing.error is None
        assert landing.report.waves == 6
        target.check(OURS, num_tokens=10)
        for push in pushes:
            await push.over.wait()
            assert push.error is None
    assert len(world.logged("landing_done")) == 1


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("how", ["fails", "never comes", "is lost"])
async def test_one_of_three_ranks_does_not_deliver(autojump_clock, rank, how) -> None:
    """The landing fails, the other ranks' pushes with it, and all blocks come back."""
    world = World()
    sources = [Pool(heads=3, tp=(i, 3)) for i in range(3)]
    target = Pool(heads=3)
    async with (
        world.instance("p", sources, wave_bytes=600) as producers,
        world.engine("c", target) as decode,
    ):
        async with trio.open_nursery() as nursery:
            if how == "fails":
                world.network.faults.add(
                    TransferFault(
                        fabric=agent(producers[rank]), nth=2, progress=Progress.FAILED
                    )
                )
            landing = begin_landing(
                nursery, decode, contact_of(producers), deadline_s=3
            )
            pushes = [
                begin_push(nursery, engine, pool, deadline_s=9)
                for number, (engine, pool) in enumerate(
                    zip(producers, sources, strict=True)
                )
                if how != "never comes" or number != rank
            ]
            if how == "is lost":
                world.network.faults.add(
                    NoticeFault(fabric=agent(producers[rank]), nth=2, copies=0)
                )
        kind = PushAborted if how == "fails" else DeadlineExceeded
        assert isinstance(landing.error, kind)
        assert all(isinstance(push.error, FerryError) for push in pushes)
        assert not world.may_touch(target, OURS)
        await trio.sleep(0.1)
        for engine in (*producers, decode):
            at_base(engine)
