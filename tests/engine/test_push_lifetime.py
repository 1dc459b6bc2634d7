"""No byte of a push lands in a block that was given back (cases l1 to l7), and revocation."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    EngineClosed,
    FerryError,
    LeaseExpired,
    MisuseError,
    PeerLost,
    PushAborted,
    PushRevoked,
    TransferFailed,
)
from kvferry.engine.fabric import Progress
from kvferry.engine.fabric.faults import CallFault, TransferFault
from tests.kit import GROUP, LOOKS, Pool, Steps, World, address, agent, at_base, is_bare
from tests.pushing import OURS, THEIRS, Outcome, begin_landing, begin_push

REUSED = 7.0
SLICED = {"wave_bytes": 200, "window": 2}


# l1: abort while the producer is stopped; it goes on 3 s later.


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("grace_s", [1.0, 10.0])
async def test_l1_abort_while_the_producer_is_stopped(
    autojump_clock, grace_s, how
) -> None:
    """Held in the drain or in quarantine until it has answered; then nothing lands."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", target, drain_grace_s=grace_s) as decode,
    ):
        process = await world.start(nursery, "p", source, lease_s=60.0, **SLICED)
        # In the middle of the writing: some waves have landed, some are in flight.
        world.network.faults.add(
            CallFault(fabric="p-*", method="post", nth=3, action=process.freeze)
        )
        push = begin_push(nursery, process.engine, source)
        options = {"deadline_s": 0.2} if how == "deadline" else {}
        landing = begin_landing(nursery, decode, process.engine, **options)
        await trio.sleep(0.2)
        assert world.may_touch(target, OURS)
        landing.scope.cancel() if how == "cancel" else None
        frozen_at = trio.current_time()

        async def thaw() -> None:
            await trio.sleep(3)
            process.thaw()

        nursery.start_soon(thaw)
        await landing.over.wait()
        held = decode.quarantine.blocks(GROUP)
        if grace_s < 3:
            assert held == set(OURS)
            assert landing.at - frozen_at == pytest.approx(grace_s, abs=0.1)
            with pytest.raises(MisuseError, match="in quarantine"):
                await decode.expect(
                    process.engine.contact, {GROUP: OURS}, request_id="s"
                )
        else:
            assert not held
            assert landing.at - frozen_at == pytest.approx(3, abs=0.1)
        if how == "deadline":
            assert isinstance(landing.error, DeadlineExceeded)
            assert landing.error.untrusted
        else:
            assert landing.is_cancelled
        await decode.quarantine.wait_empty()
        assert trio.current_time() - frozen_at == pytest.approx(3, abs=0.1)
        assert not world.may_touch(target, OURS)
        target.fill(OURS, REUSED)
        await trio.sleep(10)
        assert target.is_filled(OURS, REUSED)
        assert isinstance(push.error, PushRevoked)
        at_base(decode)
        at_base(process.engine)
        await process.leave()


# l2: several waves of one push; one fails first.


@pytest.mark.parametrize("first", range(1, 5))
async def test_l2_both_sides_blocks_stay_held_until_the_last_is_terminal(
    autojump_clock, first
) -> None:
    """One of four fails at 1 s, the last lands at 5 s: failed once on each side, at 5 s."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target, wave_bytes=400, window=4) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        for number in range(1, 5):
            fails = number == first
            world.network.faults.add(
                TransferFault(
                    fabric="p-*",
                    nth=number,
                    delay_s=1.0 if fails else 5.0,
                    progress=Progress.FAILED if fails else Progress.DONE,
                )
            )
        push = begin_push(nursery, prefill, source)
        landing = begin_landing(nursery, decode, prefill)
        started = trio.current_time()
        await landing.over.wait()
        assert isinstance(landing.error, PushAborted)
        assert trio.current_time() - started == pytest.approx(5, abs=0.1)
        assert not world.may_touch(target, OURS)
        target.fill(OURS, REUSED)
        await push.over.wait()
        assert isinstance(push.error, TransferFailed)
        assert world.network.faults.calls[agent(prefill), "post"] == 4
        await trio.sleep(5)
        assert target.is_filled(OURS, REUSED)
    assert len(world.logged("push_failed")) == 1
    assert len(world.logged("landing_failed")) == 1


# l3: a write deferred past the lease.


async def test_l3_a_write_past_the_lease_is_refused_at_posting(autojump_clock) -> None:
    """Blocks of 40 s later, a lease of 30 s that nobody extends: no post, both told."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("p", source, silence_s=300.0) as prefill,
    ):
        # A consumer that hangs after it has registered, and does not extend.
        process = await world.start(nursery, "c", target, silence_s=300.0)
        landing = begin_landing(nursery, process.engine, prefill, deadline_s=200)
        ready = trio.Event()
        push = begin_push(nursery, prefill, source, after=ready.wait, deadline_s=200)
        await trio.sleep(1)
        # The consumer's messages are held back; its memory can be reached.
        world.streams.freeze(*address(prefill))
        await trio.sleep(40)
        ready.set()
        await push.over.wait()
        assert isinstance(push.error, LeaseExpired)
        assert not world.network.faults.calls[agent(prefill), "post"]
        assert not landing.over.is_set()
        world.streams.thaw(*address(prefill))
        await landing.over.wait()
        assert isinstance(landing.error, LeaseExpired)
        assert landing.error.request_id == "r"
        assert target.is_untouched()
        await trio.sleep(1)
        at_base(prefill)
        at_base(process.engine)
        await process.leave()


async def test_l3_a_push_far_longer_than_the_lease_lands_when_it_is_extended(
    autojump_clock,
) -> None:
    """Ten leases pass before the producer has anything."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target, lease_s=3.0) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        landing = begin_landing(nursery, decode, prefill)
        await trio.sleep(30)
        begin_push(nursery, prefill, source)
        await landing.over.wait()
        assert landing.error is None
        target.check(OURS, num_tokens=10)


async def test_a_wave_in_the_middle_is_not_posted_after_the_lease(
    autojump_clock,
) -> None:
    """The first waves take longer than the lease: no other follows them."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.engine("p", source, **SLICED) as prefill,
        world.engine("c", target, lease_s=3.0) as decode,
        trio.open_nursery() as nursery,
    ):
        world.network.faults.add(TransferFault(fabric="p-*", nth=None, delay_s=5))
        push = begin_push(nursery, prefill, source)
        landing = begin_landing(nursery, decode, prefill)
        await trio.sleep(0.5)
        world.streams.freeze(*address(prefill))
        await push.over.wait()
        assert isinstance(push.error, LeaseExpired)
        assert world.network.faults.calls[agent(prefill), "post"] == 2
        world.streams.thaw(*address(prefill))
        await landing.over.wait()
        assert isinstance(landing.error, LeaseExpired)
        await trio.testing.wait_all_tasks_blocked()
        at_base(prefill)
        at_base(decode)


# l4: the producer is silent for ever, or answers late.


@pytest.mark.parametrize("how", ["cancel", "deadline", "leave"])
async def test_l4_abort_while_registered_and_the_producer_silent_for_ever(
    autojump_clock, how
) -> None:
    """The blocks stay in quarantine, visible, for as long as one looks."""
    world, source, target = World(), Pool(), Pool()
    async with trio.open_nursery() as nursery:
        process = await world.start(nursery, "p", source)
        consumer = await world.start(nursery, "c", target, drain_grace_s=2.0)
        decode = consumer.engine
        options = {"deadline_s": 1.0} if how == "deadline" else {"deadline_s": 1e6}
        landing = begin_landing(nursery, decode, process.engine, **options)
        await trio.sleep(0.5)
        process.freeze()
        if how == "cancel":
            landing.scope.cancel()
        elif how == "leave":
            nursery.start_soon(consumer.leave)
        await landing.over.wait()
        if how == "leave":
            assert isinstance(landing.error, EngineClosed)
            await consumer.ended.wait()
            (entry,) = world.logged("closed_undrained")
            assert entry["blocks"] == {GROUP: OURS}
            assert entry["request"] == "r"
        else:
            for _ in range(10):
                (entry,) = decode.quarantine
                assert entry.request_id == "r"
                assert str(process.engine.key) in entry.peer
                assert decode.quarantine.blocks(GROUP) == set(OURS)
                await trio.sleep(60)
        process.kill()
        if how != "leave":
            # Nobody can say now what its memory writes did: the caller decides.
            await trio.sleep(100)
            assert decode.quarantine.blocks(GROUP) == set(OURS)
            await consumer.leave()
            assert len(world.logged("closed_undrained")) == 1


async def test_l4_a_producer_that_answers_later_gives_them_back(autojump_clock) -> None:
    """Ten minutes later, over a new link: it is asked again at intervals."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", target, drain_grace_s=2.0) as decode,
    ):
        process = await world.start(nursery, "p", source)
        landing = begin_landing(nursery, decode, process.engine)
        await trio.sleep(0.5)
        process.freeze()
        landing.scope.cancel()
        await landing.over.wait()
        await trio.sleep(600)
        assert decode.quarantine.blocks(GROUP) == set(OURS)
        process.thaw()
        with trio.fail_after(130):
            await decode.quarantine.wait_free(GROUP, OURS)
        assert not process.engine.statistics()["deliveries"]
        await process.leave()
        await trio.sleep(1)
        is_bare(decode)


async def test_blocks_of_a_dead_producer_come_back_on_the_callers_word(
    autojump_clock,
) -> None:
    """Only its operator can know that the process is gone; nobody is asked any more."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", target, drain_grace_s=2.0) as decode,
    ):
        process = await world.start(nursery, "p", source)
        landing = begin_landing(nursery, decode, process.engine)
        await trio.sleep(0.5)
        process.kill()
        await landing.over.wait()
        (entry,) = decode.quarantine
        decode.quarantine.release(entry)
        decode.quarantine.release(entry)
        assert not decode.quarantine
        await trio.sleep(400)
        is_bare(decode)


# l5: both in one process: each engine pushes to and expects from the other.


@pytest.mark.parametrize("order", ["push", "landing", "both"])
async def test_l5_abort_with_push_and_landing_pending_for_one_request(
    autojump_clock, order
) -> None:
    """Of the same name in both directions; any order of completion: no crash."""
    for first_s in (0.001, 2.0):
        world, left, right = World(), Pool(), Pool()
        async with (
            world.pair(left, right, **SLICED) as (a, b),
            trio.open_nursery() as nursery,
        ):
            world.network.faults.add(
                TransferFault(fabric="p-*", nth=None, delay_s=first_s)
            )
            world.network.faults.add(TransferFault(fabric="c-*", nth=None, delay_s=1.0))
            push = begin_push(nursery, a, left, "r", blocks=[0, 1, 2])
            landing = begin_landing(nursery, a, b, "r", blocks={GROUP: [3, 4, 5]})
            others = [
                begin_push(nursery, b, right, "r", blocks=[0, 1, 2]),
                begin_landing(nursery, b, a, "r", blocks={GROUP: [3, 4, 5]}),
            ]
            await trio.sleep(0.5)
            if order != "landing":
                push.scope.cancel()
            if order != "push":
                landing.scope.cancel()
            for outcome in (push, landing, *others):
                await outcome.over.wait()
            assert not world.may_touch(left, [3, 4, 5])
            assert not world.may_touch(right, [3, 4, 5])


# l6: leaving the engine with pushes in flight.


@pytest.mark.parametrize("state", ["alive", "dead", "stopped"])
@pytest.mark.parametrize("who", ["producer", "consumer"])
@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_l6_a_side_leaves_with_a_push_in_flight(
    autojump_clock, state, who, how
) -> None:
    """It drains, names what it could not drain, and a live peer serves on."""
    world, pools = World(), {"p": Pool(), "c": Pool()}
    async with trio.open_nursery() as nursery:
        both = {
            name: await world.start(nursery, name, pool, drain_grace_s=2.0)
            for name, pool in pools.items()
        }
        world.network.faults.add(TransferFault(fabric="p-*", delay_s=1.0))
        prefill, decode = both["p"], both["c"]
        push = begin_push(nursery, prefill.engine, pools["p"])
        landing = begin_landing(nursery, decode.engine, prefill.engine)
        await trio.sleep(0.5)
        assert prefill.engine.statistics()["unsettled_transfers"] == 1
        goes, stays = (prefill, decode) if who == "producer" else (decode, prefill)
        ended, other = (push, landing) if who == "producer" else (landing, push)
        if state == "dead":
            stays.kill()
        elif state == "stopped":
            stays.freeze()
        started = trio.current_time()
        if how == "leave":
            await goes.leave()
        else:
            goes.scope.cancel()
            await goes.ended.wait()
        took_s = trio.current_time() - started
        assert isinstance(ended.error, EngineClosed | PeerLost)
        undrained = [
            entry
            for entry in world.logged("closed_undrained")
            if entry["engine"] == str(goes.engine.key)
        ]
        blocks = {GROUP: THEIRS if who == "producer" else OURS}
        if state == "stopped" or (state == "dead" and who == "consumer"):
            assert took_s < 2 + 4.5
            assert [entry["blocks"] for entry in undrained] == [blocks]
        else:
            assert took_s < 1.1
            assert not undrained
        if state == "alive":
            await other.over.wait()
            assert isinstance(other.error, FerryError)
            assert not world.network.closed_in_flight
            assert not world.may_touch(pools["c"], OURS)
            await trio.sleep(5)
            at_base(stays.engine)
            await stays.leave()
        elif state == "stopped":
            stays.thaw()
            await trio.sleep(5)
            await stays.leave()


# l7: many cancelled ones.


async def test_l7_hundreds_of_cancelled_pushes_and_landings(autojump_clock) -> None:
    """Cancelled at all sorts of moments, on either side: back to base."""
    world, source, target = World(), Pool(), Pool()
    looks = {"poll_s": 0.0005, "wave_bytes": 200, "window": 2}
    async with world.pair(source, target, **looks) as (prefill, decode):

        async def once(request_id: str, number: int) -> tuple[bool, bool]:
            async with trio.open_nursery() as nursery:
                push = begin_push(nursery, prefill, source, request_id)
                landing = begin_landing(nursery, decode, prefill, request_id)
                delay_s = number % 37 * 0.0006
                who = (push, landing)[number % 2]
                if number:
                    who.scope.deadline = trio.current_time() + delay_s
                if number % 2 == 0 and number:
                    # The producer does not push any more: or it was faster.
                    await push.over.wait()
                    landing.scope.deadline = trio.current_time() + 0.05
            assert not world.may_touch(target, OURS)
            target.fill(OURS, REUSED)
            await trio.sleep(0.01)
            assert target.is_filled(OURS, REUSED)
            return landing.report is not None, push.report is not None

        assert await once("warm", 0) == (True, True)
        await trio.testing.wait_all_tasks_blocked()
        base = decode.statistics(), prefill.statistics()
        tasks = trio.lowlevel.current_statistics().tasks_living
        done = [await once(f"r{n}", n) for n in range(1, 301)]
        # The word that it landed may be the one that is lost.
        assert all(landed for landed, pushed in done if pushed)
        assert 20 < sum(landed for landed, _ in done) < 280
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        strays = ("stray_messages", "stray_notices")
        for before, engine in zip(base, (decode, prefill), strict=True):
            now = engine.statistics()
            assert {k: v for k, v in now.items() if k not in strays} == {
                k: v for k, v in before.items() if k not in strays
            }
            assert set(engine._pump._claims.values()) == {0}
        assert not decode._landings.intake.tokens
        assert not prefill._pushes._registered
        assert not prefill._pushes._waiting


# Revocation at every step.


class Ends:
    """How often each end was seen."""

    def __init__(self) -> None:
        self.done = self.cancelled = self.failed = 0

    def count(self, outcome) -> None:
        self.done += outcome.report is not None
        self.cancelled += outcome.is_cancelled
        self.failed += outcome.error is not None


async def cut_short(
    at_step: int, *, who: str, first: str
) -> tuple[int, Ends, Ends, bool]:
    """A push ended at one step, by one or both sides; everything is at base afterwards."""
    world, source, target = World(), Pool(), Pool()
    ends = Ends(), Ends()
    async with world.pair(source, target, **SLICED, **LOOKS_SLOW) as (prefill, decode):
        async with trio.open_nursery() as nursery:
            calls = {}

            def end() -> None:
                for name in ("push", "landing"):
                    if who in {name, "both"} and name in calls:
                        calls[name].scope.cancel()

            with Steps(at_step, end) as steps:
                for name in (
                    ("push", "landing")
                    if first == "push"
                    else (
                        "landing",
                        "push",
                    )
                ):
                    calls[name] = (
                        begin_push(nursery, prefill, source)
                        if name == "push"
                        else begin_landing(nursery, decode, prefill)
                    )
                push, landing = calls["push"], calls["landing"]
                with trio.move_on_after(0.5):
                    await push.over.wait()
                with trio.move_on_after(0.5):
                    await landing.over.wait()
                taken = steps.taken
            # Whoever was left alone: the other had not been heard of.
            assert who != "landing" or landing.over.is_set()
            assert who != "push" or push.over.is_set()
            has_landed = target.holds(OURS, num_tokens=10)
            if landing.over.is_set():
                assert not decode.quarantine.blocks(GROUP)
                assert not world.may_touch(target, OURS)
                target.fill(OURS, REUSED)
            push.scope.cancel()
            landing.scope.cancel()
        ends[0].count(push)
        ends[1].count(landing)
        assert not world.may_touch(target, OURS)
        target.fill(OURS, REUSED)
        await trio.sleep(0.1)
        assert target.is_filled(OURS, REUSED)
        at_base(prefill)
        at_base(decode)
        # And the same works right away, under another name.
        async with trio.open_nursery() as nursery:
            begin_push(nursery, prefill, source, "again", salt=3)
            begin_landing(nursery, decode, prefill, "again")
        assert target.holds(OURS, num_tokens=10, salt=3)
    assert not world.logged("internal_error"), world.logged("internal_error")
    return taken, *ends, has_landed


LOOKS_SLOW = {**LOOKS, "poll_s": 0.002}


@pytest.mark.parametrize("first", ["push", "landing"])
@pytest.mark.parametrize("who", ["push", "landing", "both"])
async def test_a_push_ended_at_every_step(autojump_clock, who, first) -> None:
    """Before, while and after it writes, at whichever checkpoint of whichever task."""
    steps, push, landing, _ = await cut_short(0, who=who, first=first)
    assert push.done == landing.done == 1
    assert steps > 50
    seen = Ends()
    for at_step in range(1, steps + 1, 2):
        _, push, landing, has_landed = await cut_short(at_step, who=who, first=first)
        mine = push if who == "push" else landing
        assert push.done + push.cancelled + push.failed == 1
        assert landing.done + landing.cancelled + landing.failed == 1
        # Never done on the producer where the consumer has nothing: it has it all,
        # even if its caller's cancellation came at the very end.
        assert landing.done or has_landed or not push.done
        seen.done += mine.done
        seen.cancelled += mine.cancelled
    assert seen.cancelled > steps // 4


# Killed, restarted, cut off.


async def test_a_producer_killed_in_the_middle_leaves_the_quarantine_to_the_caller(
    autojump_clock,
) -> None:
    """The landing fails at once; the next start is another, and does not answer for it."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", target) as decode,
    ):
        process = await world.start(nursery, "p", source, **SLICED)
        world.network.faults.add(
            CallFault(fabric="p-*", method="post", nth=3, action=process.kill)
        )
        begin_push(nursery, process.engine, source)
        landing = begin_landing(nursery, decode, process.engine)
        await landing.over.wait()
        assert isinstance(landing.error, PeerLost)
        assert landing.error.untrusted
        assert decode.quarantine.blocks(GROUP) == set(OURS)
        again = await world.start(nursery, "p", source, listen=address(process.engine))
        push = begin_push(nursery, again.engine, source, salt=2)
        landing = begin_landing(
            nursery, decode, again.engine, blocks={GROUP: [8, 9, 10]}
        )
        await landing.over.wait()
        await push.over.wait()
        assert (push.error, landing.error) == (None, None)
        assert target.holds([8, 9, 10], num_tokens=10, salt=2)
        await trio.sleep(300)
        assert decode.quarantine.blocks(GROUP) == set(OURS)
        await again.leave()


async def test_a_consumer_killed_in_the_middle_fails_the_push(autojump_clock) -> None:
    """At once, and nothing is left on the producer."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("p", source, **SLICED) as prefill,
    ):
        process = await world.start(nursery, "c", target)

        def kill() -> None:
            process.kill()
            # Its end of the link goes with it.
            world.streams.cut(*address(prefill))

        world.network.faults.add(
            CallFault(fabric="p-*", method="post", nth=3, action=kill)
        )
        push = begin_push(nursery, prefill, source)
        begin_landing(nursery, process.engine, prefill)
        started = trio.current_time()
        await push.over.wait()
        assert isinstance(push.error, PeerLost)
        assert trio.current_time() - started < 1
        assert not prefill.quarantine
        await trio.testing.wait_all_tasks_blocked()
        is_bare(prefill)


async def test_a_consumer_frozen_and_then_killed_frees_the_producer(
    autojump_clock,
) -> None:
    """Its lease ends the push, its blocks are in quarantine until the transport knows."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("p", source, drain_grace_s=1.0, **SLICED) as prefill,
    ):
        process = await world.start(nursery, "c", target, lease_s=5.0)

        def freeze() -> None:
            process.freeze()
            world.streams.freeze(*address(prefill))

        world.network.faults.add(
            CallFault(fabric="p-*", method="post", nth=3, action=freeze)
        )
        push = begin_push(nursery, prefill, source)
        # That it does not stand still itself is no matter, as it hears nothing.
        begin_landing(nursery, process.engine, prefill, deadline_s=5.0)
        await push.over.wait()
        assert isinstance(push.error, LeaseExpired)
        assert prefill.quarantine.blocks(GROUP) == set(THEIRS)
        await trio.sleep(20)
        assert prefill.quarantine.blocks(GROUP) == set(THEIRS)
        process.kill()
        world.streams.thaw(*address(prefill))
        world.streams.cut(*address(prefill))
        await prefill.quarantine.wait_empty()
        await trio.sleep(1)
        is_bare(prefill)


@pytest.mark.parametrize("refused_s", [0.0, 20.0])
async def test_a_link_cut_in_the_middle_of_a_push(autojump_clock, refused_s) -> None:
    """Both fail; the same producer is found again, and gives the blocks back."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.engine("p", source, **SLICED) as prefill,
        world.engine("c", target, drain_grace_s=2.0) as decode,
        trio.open_nursery() as nursery,
    ):
        world.network.faults.add(TransferFault(fabric="p-*", delay_s=3.0))

        def cut() -> None:
            world.streams.cut(*address(prefill))
            if refused_s:
                world.streams.freeze(*address(prefill))

        world.network.faults.add(
            CallFault(fabric="p-*", method="post", nth=2, action=cut)
        )
        push = begin_push(nursery, prefill, source)
        landing = begin_landing(nursery, decode, prefill)
        started = trio.current_time()
        await landing.over.wait()
        assert isinstance(landing.error, PeerLost)
        assert decode.quarantine.blocks(GROUP) == set(OURS)
        await push.over.wait()
        assert isinstance(push.error, PeerLost)
        if refused_s:
            await trio.sleep(refused_s)
            assert decode.quarantine.blocks(GROUP) == set(OURS)
            world.streams.thaw(*address(prefill))
        with trio.fail_after(130):
            await decode.quarantine.wait_empty()
        # Not before its last wave has settled.
        assert trio.current_time() - started >= 3
        assert not world.may_touch(target, OURS)
        target.fill(OURS, REUSED)
        await trio.sleep(30)
        assert target.is_filled(OURS, REUSED)
        at_base(prefill)
        at_base(decode)
        # Nobody asks any more.
        tasks = trio.lowlevel.current_statistics().tasks_living
        await trio.sleep(300)
        assert trio.lowlevel.current_statistics().tasks_living <= tasks


# A whole engine cancelled at every step of its life.


@pytest.mark.parametrize("side", ["c", "p"])
async def test_an_engine_cancelled_at_every_step_of_a_push(
    autojump_clock, side
) -> None:
    """Opening, pushing, closing: the other side ends, and nothing lands afterwards."""
    steps = await engine_cut_short(0, side)
    for at_step in range(1, steps + 1, 2):
        await engine_cut_short(at_step, side)


async def engine_cut_short(at_step: int, side: str) -> int:
    """Cancel one engine from around at one step of its life.

    Returns:
        The steps of a whole life.
    """
    world, pools = World(), {"p": Pool(), "c": Pool()}
    scope = trio.CancelScope()
    contacts, opened, gone = [], trio.Event(), trio.Event()
    outcomes: dict[str, Outcome] = {}
    with Steps(at_step, scope.cancel) as steps:
        async with trio.open_nursery() as nursery:

            async def produce() -> None:
                with scope if side == "p" else trio.CancelScope():
                    async with world.engine("p", pools["p"], **QUICK) as prefill:
                        contacts.append(prefill.contact)
                        opened.set()
                        spans = pools["p"].stamp(THEIRS, num_tokens=10)
                        await outcomes.setdefault("push", Outcome()).follow(
                            lambda: prefill.push(
                                "r", spans, num_tokens=10, deadline_s=3
                            )
                        )
                        await gone.wait()
                        await trio.sleep(5)
                        is_bare(prefill)
                opened.set()

            async def consume() -> None:
                with scope if side == "c" else trio.CancelScope():
                    async with world.engine("c", pools["c"], **QUICK) as decode:
                        await opened.wait()
                        for contact in contacts:
                            await outcomes.setdefault("landing", Outcome()).follow(
                                lambda contact=contact: decode.expect(
                                    contact,
                                    {GROUP: OURS},
                                    request_id="r",
                                    deadline_s=3,
                                )
                            )
                        await trio.sleep(0.1)
                        # An engine that leaves in good order has answered for all.
                        assert not decode.quarantine
                        at_base(decode)
                gone.set()

            nursery.start_soon(produce)
            nursery.start_soon(consume)
        taken = steps.taken
    assert not world.network.closed_in_flight
    assert not world.may_touch(pools["c"], OURS)
    if "landing" in outcomes and outcomes["landing"].report is not None:
        assert pools["c"].holds(OURS, num_tokens=10)
    for name in world.network.names():
        assert world.network.faults.calls[name, "close"] == 1
    assert not world.logged("internal_error"), world.logged("internal_error")
    assert not world.logged("closed_undrained"), world.logged("closed_undrained")
    return taken


QUICK = {**LOOKS_SLOW, **SLICED, "connect_timeout_s": 2.0}


async def test_a_registration_that_never_left_leaves_no_quarantine(
    autojump_clock, monkeypatch
) -> None:
    """Too long for the link: nobody knows the blocks, and they are the caller's."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        begin_push(nursery, prefill, source, "warm")
        landing = begin_landing(nursery, decode, prefill, "warm")
        await landing.over.wait()
        monkeypatch.setattr("kvferry.engine.link.MAX_LINK_BYTES", 100)
        landing = begin_landing(nursery, decode, prefill)
        await landing.over.wait()
        assert isinstance(landing.error, MisuseError)
        assert landing.error.request_id == "r"
        assert "Register" in str(landing.error)
        assert not decode.quarantine
    assert not world.logged("internal_error")


async def test_a_producer_that_leaves_while_a_consumer_connects_says_so(
    autojump_clock,
) -> None:
    """Whenever it is: a registration that nobody took leaves nothing in quarantine."""
    for step in range(1, 70):
        world, source, target = World(), Pool(), Pool()
        async with trio.open_nursery() as nursery:
            producer = await world.start(nursery, "p", source)
            async with world.engine("c", target) as decode:
                with Steps(step, producer._leave.set):
                    landing = begin_landing(
                        nursery, decode, producer.engine, deadline_s=5.0
                    )
                    await landing.over.wait()
                assert landing.error is not None
                assert not len(decode.quarantine), (step, landing.error)
                if not producer.ended.is_set():
                    await producer.leave()


async def test_a_producer_that_leaves_gives_all_blocks_back_first(
    autojump_clock,
) -> None:
    """Registered and not yet pushed: no later start of it could answer for them."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", target) as decode,
    ):
        process = await world.start(nursery, "p", source)
        landings = [
            begin_landing(nursery, decode, process.engine, f"r{n}", blocks={GROUP: [n]})
            for n in range(8)
        ]
        await trio.sleep(1)
        await process.leave()
        for landing in landings:
            await landing.over.wait()
            assert isinstance(landing.error, PushAborted)
        assert not decode.quarantine
        await trio.sleep(1)
        is_bare(decode)
