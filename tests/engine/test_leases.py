"""What holds a producer's blocks, and what frees them (cases n1 to n3)."""

from __future__ import annotations

import msgspec
import pytest
import trio
import trio.testing

from kvferry.engine import (
    ImpossiblePlan,
    LeaseExpired,
    OfferOutcome,
    OfferWithdrawn,
    PeerUnreachable,
    UnknownBlock,
)
from kvferry.engine.fabric.faults import TransferFault
from tests.kit import GROUP, Pool, World, address, at_base

SLOW = {"poll_s": 0.1, "offered_poll_s": 0.5, "idle_poll_s": 0.5}


def offered(engine, pool, request_id="r"):
    """An offer of one block."""
    return engine.offer(request_id, pool.stamp([1], num_tokens=4), num_tokens=4)


async def outcome_at(offer) -> tuple[OfferOutcome, float]:
    """How an offer ended, and when."""
    return await offer.wait(), trio.current_time()


async def test_n1_renewed_for_120_s_and_then_freed_by_time(autojump_clock) -> None:
    """Alive while it is renewed; freed one lease after the last renewal got through."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=30.0, **SLOW) as (
        prefill,
        decode,
    ):
        offer = offered(prefill, producer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=115.0))
        started = trio.current_time()
        await decode.pull(offer.ticket, {GROUP: [3]}, deadline_s=200.0)
        assert trio.current_time() - started == pytest.approx(115, abs=1)
        assert offer.outcome is OfferOutcome.RELEASED
    consumer.check([3], num_tokens=4)


async def test_n1_a_consumer_that_falls_silent(autojump_clock) -> None:
    """Renewals stop at 40 s: alive then, freed 30 s after the last one."""
    world, producer, consumer = World(), Pool(), Pool()
    # Left to the lease alone; the silence of a link would free it earlier.
    times = {"lease_s": 30.0, "keepalive_s": 100.0, "silence_s": 200.0}
    async with world.pair(producer, consumer, **times, **SLOW) as (
        prefill,
        decode,
    ):
        offer = offered(prefill, producer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=115.0))
        started = trio.current_time()
        ended: list[tuple[OfferOutcome, float]] = []

        async def watch() -> None:
            ended.append(await outcome_at(offer))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)

            async def silence() -> None:
                await trio.sleep_until(started + 41)
                assert offer.outcome is None
                world.streams.freeze(*address(prefill))
                await trio.sleep_until(started + 110)
                world.streams.thaw(*address(prefill))

            nursery.start_soon(silence)
            with pytest.raises(LeaseExpired):
                await decode.pull(offer.ticket, {GROUP: [3]}, deadline_s=200.0)
        ((outcome, at),) = ended
        assert outcome is OfferOutcome.EXPIRED
        # Three renewals a lease: the last one left at 40 s.
        assert at - started == pytest.approx(40 + 30, abs=0.1)


async def test_n2_one_is_renewed_and_99_expire(autojump_clock) -> None:
    """The 99 are freed as soon as their lease is over; the one goes on."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=10.0, **SLOW) as (
        prefill,
        decode,
    ):
        others = [offered(prefill, producer, f"o{i}") for i in range(99)]
        offer = offered(prefill, producer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=50.0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.pull, offer.ticket, {GROUP: [3]})
            await trio.sleep(9.9)
            assert all(other.outcome is None for other in others)
            assert prefill.statistics()["offers"] == 100
            await trio.sleep(0.2)
            assert {other.outcome for other in others} == {OfferOutcome.EXPIRED}
            assert prefill.statistics()["offers"] == 1
            await trio.sleep(30)
            assert offer.outcome is None
        assert offer.outcome is OfferOutcome.RELEASED


async def test_n3_a_declined_ticket_frees_the_producer_at_once(autojump_clock) -> None:
    """One small message, without any data operation."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = offered(prefill, producer)
        await decode.decline(offer.ticket)
        with trio.fail_after(0.1):
            assert await offer.wait() is OfferOutcome.RELEASED
        # Twice is as good as once.
        await decode.decline(offer.ticket)
        await trio.testing.wait_all_tasks_blocked()
        assert decode.statistics()["fabric_prepared"] == 0
    assert consumer.is_untouched()


async def test_n3_an_impossible_plan_frees_the_producer_at_once(autojump_clock) -> None:
    """So does any failure before the first byte."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        for request_id, blocks, computed, error in (
            ("prefix", [3], 2, ImpossiblePlan),
            ("unknown", [99], 0, UnknownBlock),
            ("twice", [3, 3], 0, UnknownBlock),
            ("few", [], 0, UnknownBlock),
        ):
            offer = offered(prefill, producer, request_id)
            with pytest.raises((error, ImpossiblePlan)):
                await decode.pull(
                    offer.ticket, {GROUP: blocks}, computed_tokens=computed
                )
            with trio.fail_after(0.1):
                assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.is_untouched()


async def test_n3_a_decline_to_a_dead_producer_is_an_error(autojump_clock) -> None:
    """Whoever declines hears that nobody listened."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.engine("c", consumer) as decode:
        async with world.engine("p", producer) as prefill:
            offer = offered(prefill, producer)
        with pytest.raises(PeerUnreachable):
            await decode.decline(offer.ticket)


async def test_n3_a_decline_by_a_stranger_frees_nothing(autojump_clock) -> None:
    """An offer has one reader: the instance that accepted its ticket first."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        world.pair(producer, consumer) as (prefill, decode),
        world.engine("d", Pool()) as stranger,
    ):
        offer = offered(prefill, producer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=2.0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.pull, offer.ticket, {GROUP: [3]})
            await trio.sleep(1)
            await stranger.decline(offer.ticket)
            await trio.sleep(0.5)
            assert offer.outcome is None
        assert offer.outcome is OfferOutcome.RELEASED
    consumer.check([3], num_tokens=4)


async def test_withdrawn_during_a_read(autojump_clock) -> None:
    """The blocks are the producer's at once; the reader fails, whatever arrived."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = offered(prefill, producer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=2.0))

        async def withdraw() -> None:
            await trio.sleep(1)
            offer.withdraw()
            offer.withdraw()  # twice is as good as once
            assert offer.outcome is OfferOutcome.WITHDRAWN
            producer.fill([1], 5.0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(withdraw)
            with pytest.raises(OfferWithdrawn) as caught:
                await decode.pull(offer.ticket, {GROUP: [3]})
        assert await offer.wait() is OfferOutcome.WITHDRAWN
    assert caught.value.untrusted
    assert caught.value.phase in {"reading", "confirming"}


async def test_withdrawn_before_a_read(autojump_clock) -> None:
    """The ticket is refused by its reason."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = offered(prefill, producer)
        offer.withdraw()
        with pytest.raises(OfferWithdrawn):
            await decode.pull(offer.ticket, {GROUP: [3]})


async def test_withdrawing_a_released_offer_changes_nothing(autojump_clock) -> None:
    """One outcome."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = offered(prefill, producer)
        await decode.pull(offer.ticket, {GROUP: [3]})
        offer.withdraw()
        assert await offer.wait() is OfferOutcome.RELEASED


@pytest.mark.parametrize("tick", range(-6, 7))
async def test_expiry_and_release_race(autojump_clock, tick) -> None:
    """Around the very instant of expiry both sides tell the same story."""
    world, producer, consumer = World(latency_s=0.0005), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=2.0) as (prefill, decode):
        warm = offered(prefill, producer, "warm")
        await decode.pull(warm.ticket, {GROUP: [9]})
        offer = offered(prefill, producer)
        await trio.sleep(2.0 + tick * 0.0005)
        try:
            await decode.pull(offer.ticket, {GROUP: [3]})
        except LeaseExpired:
            assert await offer.wait() is OfferOutcome.EXPIRED
            assert tick >= 0
        else:
            assert await offer.wait() is OfferOutcome.RELEASED
            assert tick < 0
            assert consumer.holds([3], num_tokens=4)


@pytest.mark.parametrize("tick", range(-8, 9))
async def test_expiry_and_the_fence_race(autojump_clock, tick) -> None:
    """The read ends around the instant of expiry, without a renewal in between."""
    world, producer, consumer = World(latency_s=0), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=0.2, poll_s=0.0001) as (
        prefill,
        decode,
    ):
        warm = offered(prefill, producer, "warm")
        await decode.pull(warm.ticket, {GROUP: [9]})
        offer = offered(prefill, producer)
        # Its renewals are lost on the way; its read ends when the lease does.
        started = trio.current_time()
        delay_s = 0.2 + tick * 0.0001
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=delay_s))
        link = next(iter(decode._peers._peers.values())).link
        queue = link.queue

        def but_renewals(message) -> None:
            if type(message).__name__ != "Renew":
                queue(message)

        link.queue = but_renewals
        try:
            await decode.pull(offer.ticket, {GROUP: [3]})
        except LeaseExpired:
            assert await offer.wait() is OfferOutcome.EXPIRED
            assert trio.current_time() - started >= 0.2
        else:
            assert await offer.wait() is OfferOutcome.RELEASED
            assert trio.current_time() - started < 0.2 + 0.001
            assert consumer.holds([3], num_tokens=4)
        if abs(tick) > 2:
            assert (offer.outcome is OfferOutcome.RELEASED) == (tick < 0)


async def test_a_producer_that_was_stopped_past_the_lease_confirms_nothing(
    autojump_clock,
) -> None:
    """Renewals that queued up meanwhile come too late, and it knows."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=6.0, **SLOW) as (prefill, decode):
        warm = offered(prefill, producer, "warm")
        await decode.pull(warm.ticket, {GROUP: [9]})
        offer = offered(prefill, producer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=9.0))

        async def stop() -> None:
            await trio.sleep(1)
            world.streams.freeze(*address(prefill))
            await trio.sleep(7)
            world.streams.thaw(*address(prefill))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stop)
            with pytest.raises(LeaseExpired):
                await decode.pull(offer.ticket, {GROUP: [3]})
        assert offer.outcome is OfferOutcome.EXPIRED


async def test_the_lease_of_the_ticket_counts_not_the_readers(autojump_clock) -> None:
    """A consumer with another lease of its own renews as the producer needs it."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        world.engine("p", producer, lease_s=3.0, **SLOW) as prefill,
        world.engine("c", consumer, lease_s=300.0, **SLOW) as decode,
    ):
        offer = offered(prefill, producer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=20.0))
        await decode.pull(offer.ticket, {GROUP: [3]})
        at_base(decode)
    consumer.check([3], num_tokens=4)


async def test_a_ticket_with_an_absurd_lease_does_not_flood_the_link(
    autojump_clock,
) -> None:
    """Whoever can write a ticket cannot make the reader spin."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, **SLOW) as (prefill, decode):
        offer = offered(prefill, producer)
        entry = msgspec.structs.replace(offer.ticket.ranks[0], lease_s=1e-9)
        ticket = msgspec.structs.replace(offer.ticket, ranks=(entry,))
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=2.0))
        await decode.pull(ticket, {GROUP: [3]})
        (ended,) = [e for e in world.logged("offer_ended") if e["request"] == "r"]
        assert ended["epoch"] < 1000
    consumer.check([3], num_tokens=4)
