"""Bugs of ours with transfers in flight: nothing is given back too early, or never."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from kvferry.engine import FerryInternalError, OfferOutcome
from kvferry.engine.fabric import Progress
from kvferry.engine.fabric.faults import TransferFault
from kvferry.protocol.lifecycle.landing import BlocksReady as LandingReady
from kvferry.protocol.lifecycle.pull import BlocksReady, PullState, RoomTaken
from tests.kit import GROUP, Pool, World, at_base
from tests.pushing import begin_landing, begin_push

if TYPE_CHECKING:
    from kvferry.engine import TransferEngine
    from kvferry.protocol import Ticket

OURS = [5, 6]
REUSED = 7.0
DIRECT = {"wave_bytes": 200, "window": 2}
BULK = {"landing": "bulk", "wave_bytes": 400, "window": 2, "staging_bytes": 800}


def break_pull(engine: TransferEngine) -> None:
    """Feed an event that the table forbids once blocks are ready: a misuse."""
    engine._pulls._active["r", 0].feed(BlocksReady())


async def broken_pull(engine: TransferEngine, ticket: Ticket) -> FerryInternalError:
    """Pull, and break it after a second."""
    errors = []
    async with trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(1)
            break_pull(engine)

        nursery.start_soon(later)
        with pytest.raises(FerryInternalError, match="misuse") as caught:
            await engine.pull(ticket, {GROUP: OURS})
        errors.append(caught.value)
    return errors[0]


@pytest.mark.parametrize("config", [DIRECT, BULK], ids=["direct", "bulk"])
@pytest.mark.parametrize("first", [Progress.DONE, Progress.FAILED])
async def test_after_a_bug_the_blocks_come_back_when_their_transfers_settle(
    autojump_clock, config, first
) -> None:
    """As after any other end: in quarantine, in plain sight, until the last has settled."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, **config) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1, 2], num_tokens=7), num_tokens=7)
        for nth, delay_s, ends in ((1, 3.0, first), (2, 5.0, Progress.DONE)):
            world.network.faults.add(
                TransferFault(fabric="c-*", nth=nth, delay_s=delay_s, progress=ends)
            )
        started = trio.current_time()
        error = await broken_pull(decode, offer.ticket)
        assert trio.current_time() - started == pytest.approx(1, abs=0.1)
        assert error.untrusted
        (entry,) = decode.quarantine
        assert entry.request_id == "r"
        assert entry.peer == str(prefill.key)
        assert isinstance(entry.reason, FerryInternalError)
        assert entry.since == pytest.approx(started + 1, abs=0.1)
        assert entry.blocks == {GROUP: tuple(OURS)}
        assert decode.statistics()["staging_berths_taken"] == (config is BULK)
        # The producer is told as of any other failure.
        with trio.fail_after(1):
            assert await offer.wait() is OfferOutcome.RELEASED
        # The last of two settles at 5 s.
        await trio.sleep_until(started + 4.5)
        assert decode.quarantine.blocks(GROUP) == set(OURS)
        await decode.quarantine.wait_free(GROUP, OURS)
        assert trio.current_time() - started == pytest.approx(5, abs=0.1)
        assert not world.may_touch(consumer, OURS)
        consumer.fill(OURS, REUSED)
        await trio.sleep(5)
        assert consumer.is_filled(OURS, REUSED)
        at_base(decode)
        again = prefill.offer("r", producer.stamp([3, 4], num_tokens=8), num_tokens=8)
        await decode.pull(again.ticket, {GROUP: OURS})
        assert consumer.holds(OURS, num_tokens=8)
    assert len(world.logged("pull_reclaimed")) == 1


async def test_a_bug_without_transfers_in_flight_keeps_nothing(autojump_clock) -> None:
    """The blocks are the caller's with the error."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer(
            "r",
            producer.stamp([1, 2], num_tokens=7),
            num_tokens=7,
            after=trio.sleep_forever,
        )
        async with trio.open_nursery() as nursery:

            async def later() -> None:
                await trio.sleep(1)
                pull = decode._pulls._active["r", 0]
                assert pull._machine.state is PullState.PLANNED
                pull.feed(RoomTaken())  # before anybody has asked for it

            nursery.start_soon(later)
            with pytest.raises(FerryInternalError):
                await decode.pull(offer.ticket, {GROUP: OURS})
        assert not decode.quarantine
        assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.is_untouched()


async def test_a_bug_while_the_finish_stage_runs_keeps_the_blocks_until_it_ends(
    autojump_clock,
) -> None:
    """It zeroes them still, in a task of the engine's."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1, 2], num_tokens=7), num_tokens=7)
        finish = decode._pulls._services.finish
        run = finish.run

        async def slow(tails) -> None:
            await trio.sleep(3)
            await run(tails)

        finish.run = slow  # type: ignore[method-assign]
        started = trio.current_time()
        await broken_pull(decode, offer.ticket)
        (entry,) = decode.quarantine
        assert entry.peer == "p"
        await decode.quarantine.wait_empty()
        assert trio.current_time() - started == pytest.approx(3, abs=0.1)


async def test_every_entry_says_what_why_since_when_and_from_whom(
    autojump_clock,
) -> None:
    """A cancelled pull has no reason but its caller; of two ranks the stuck one is named."""
    world, consumer = World(), Pool()
    pools = [Pool(tp=(i, 2)) for i in range(2)]
    grace_s = 1.0
    async with (
        world.instance("p", pools) as ranks,
        world.engine("c", consumer, drain_grace_s=grace_s) as decode,
    ):
        for is_cancelled in (True, False):
            offers = [
                engine.offer("r", pool.stamp([1, 2], num_tokens=7), num_tokens=7)
                for engine, pool in zip(ranks, pools, strict=True)
            ]
            ticket = type(offers[0].ticket).merge(offer.ticket for offer in offers)
            stuck = ranks[is_cancelled]
            world.network.freeze(stuck._fabric.name)
            started = trio.current_time()
            if is_cancelled:
                with trio.move_on_after(2):
                    await decode.pull(ticket, {GROUP: OURS})
            else:
                with pytest.raises(Exception, match="deadline"):
                    await decode.pull(ticket, {GROUP: OURS}, deadline_s=2.0)
            (entry,) = decode.quarantine
            assert entry.peer == str(stuck.key)
            assert (entry.reason is None) == is_cancelled
            assert entry.since == pytest.approx(started + 2 + grace_s, abs=0.1)
            assert entry.blocks == {GROUP: tuple(OURS)}
            world.network.thaw(stuck._fabric.name)
            await decode.quarantine.wait_empty()
            await trio.sleep(1)


async def test_after_a_bug_in_a_landing_its_blocks_come_back_when_all_have_answered(
    autojump_clock,
) -> None:
    """In quarantine until the producer has said that nothing of it is in flight."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        world.pair(producer, consumer, **DIRECT) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        world.network.faults.add(TransferFault(fabric="p-*", delay_s=3.0))
        landing = begin_landing(nursery, decode, prefill)
        push = begin_push(nursery, prefill, producer)
        await trio.sleep(1)
        decode._landings._active["r"].feed(LandingReady())
        await landing.over.wait()
        assert isinstance(landing.error, FerryInternalError)
        assert decode.quarantine
        await decode.quarantine.wait_empty()
        assert not world.may_touch(consumer, [5, 6, 1])
        await push.over.wait()
        assert push.error is not None
