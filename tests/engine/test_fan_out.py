"""Fan-out: one hold on a request's blocks, offered to several consumers at once."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import (
    LeaseExpired,
    MisuseError,
    OfferOutcome,
    OfferSpent,
    OfferWithdrawn,
    PeerLost,
    RequestInUse,
)
from kvferry.engine.pump import Cadence
from kvferry.protocol import BadTicket, Ticket
from tests.kit import GROUP, Pool, World, address, at_base

CONSUMERS = 3


async def test_released_after_the_last_of_several_consumers(autojump_clock) -> None:
    """Each reads by its own ticket; the blocks are held until the last is done."""
    world, producer = World(), Pool()
    pools = [Pool() for _ in range(CONSUMERS)]
    async with world.engine("p", producer) as prefill:
        blocks = producer.stamp([1, 2], num_tokens=7)
        offer = prefill.offer("r", blocks, num_tokens=7, consumers=CONSUMERS)
        assert len(offer.tickets) == CONSUMERS
        assert offer.ticket is offer.tickets[0]
        for number, pool in enumerate(pools):
            # Several instances: each is a stranger to the others' shares.
            async with world.engine(f"c{number}", pool) as decode:
                assert offer.outcome is None
                ticket = Ticket.from_dict(offer.tickets[number].to_dict())
                await decode.pull(ticket, {GROUP: [5, 6]})
                pool.check([5, 6], num_tokens=7)
                with pytest.raises(OfferSpent):
                    await decode.pull(ticket, {GROUP: [7, 8]})
        assert await offer.wait() is OfferOutcome.RELEASED
        at_base(prefill)


async def test_one_consumer_may_read_all_its_samples(autojump_clock) -> None:
    """The shares are of one request; the same reader is done with each by itself."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([1], num_tokens=4)
        offer = prefill.offer("r", blocks, num_tokens=4, consumers=2)
        await decode.pull(offer.tickets[0], {GROUP: [2]})
        assert offer.outcomes == (OfferOutcome.RELEASED, None)
        await decode.pull(offer.tickets[1], {GROUP: [3]})
        assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.holds([2], num_tokens=4)
    assert consumer.holds([3], num_tokens=4)


async def test_one_consumer_may_read_its_samples_at_once(autojump_clock) -> None:
    """The same share twice is refused all the same (case h3)."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([1], num_tokens=4)
        offer = prefill.offer("r", blocks, num_tokens=4, consumers=2)
        async with trio.open_nursery() as nursery:
            for place, ticket in enumerate(offer.tickets):
                nursery.start_soon(decode.pull, ticket, {GROUP: [2 + place]})
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RequestInUse):
                await decode.pull(offer.tickets[1], {GROUP: [4]})
        assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.holds([2], num_tokens=4)
    assert consumer.holds([3], num_tokens=4)


async def test_a_declined_share_leaves_the_others(autojump_clock) -> None:
    """Done or declined, each counts; the last one ends the hold at once (case n3)."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([1], num_tokens=4)
        offer = prefill.offer("r", blocks, num_tokens=4, consumers=2)
        await decode.decline(offer.tickets[1])
        await trio.testing.wait_all_tasks_blocked()
        assert offer.outcomes == (None, OfferOutcome.RELEASED)
        await decode.pull(offer.tickets[0], {GROUP: [2]})
        assert await offer.wait() is OfferOutcome.RELEASED


async def test_each_share_has_a_lease_of_its_own(autojump_clock) -> None:
    """One that nobody reads expires, whatever another is renewed to; the worst is told."""
    world, producer, consumer = World(latency_s=20.0), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=6.0) as (prefill, decode):
        blocks = producer.stamp([1], num_tokens=4)
        offer = prefill.offer("r", blocks, num_tokens=4, consumers=2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.pull, offer.tickets[0], {GROUP: [2]})
            await trio.sleep(10.0)
            assert offer.outcomes == (None, OfferOutcome.EXPIRED)
            assert offer.outcome is None
            assert prefill._pump._claims[Cadence.OFFERED] == 1
        assert await offer.wait() is OfferOutcome.EXPIRED
        assert offer.outcomes[0] is OfferOutcome.RELEASED
        with pytest.raises(LeaseExpired):
            await offer.released()


async def test_withdrawing_ends_all_that_are_open(autojump_clock) -> None:
    """And leaves the outcome of those that were done."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([1], num_tokens=4)
        offer = prefill.offer("r", blocks, num_tokens=4, consumers=2)
        await decode.pull(offer.tickets[0], {GROUP: [2]})
        offer.withdraw()
        assert await offer.wait() is OfferOutcome.WITHDRAWN
        assert offer.outcomes == (OfferOutcome.RELEASED, OfferOutcome.WITHDRAWN)
        with pytest.raises(OfferWithdrawn, match="request=r"):
            await offer.released()
        with pytest.raises(OfferWithdrawn):
            await decode.pull(offer.tickets[1], {GROUP: [3]})


async def test_released_says_nothing_when_all_went_well(autojump_clock) -> None:
    """And names a reader's loss, for those who go by what is raised."""
    producer, consumer = Pool(), Pool()
    world = World()
    async with world.engine("p", producer) as prefill:
        blocks = producer.stamp([1], num_tokens=4)
        async with world.engine("c", consumer) as decode:
            offer = prefill.offer("r", blocks, num_tokens=4)
            await decode.pull(offer.ticket, {GROUP: [2]})
            await offer.released()
            lost = prefill.offer("s", blocks, num_tokens=4, after=trio.sleep_forever)

            async def read() -> None:
                with pytest.raises(PeerLost):
                    await decode.pull(lost.ticket, {GROUP: [3]})

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                await trio.sleep(1.0)
                world.streams.cut(*address(prefill))
                with pytest.raises(PeerLost, match="reader"):
                    await lost.released()


async def test_all_shares_wait_for_the_blocks_to_be_computed(autojump_clock) -> None:
    """One event makes all of them ready."""
    computed = trio.Event()
    producer, consumer = Pool(), Pool()
    async with (
        World().pair(producer, consumer) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        blocks = producer.stamp([1], num_tokens=4)
        offer = prefill.offer(
            "r", blocks, num_tokens=4, consumers=2, after=computed.wait
        )
        await decode.decline(offer.tickets[0])  # which nothing has to be ready for
        nursery.start_soon(decode.pull, offer.tickets[1], {GROUP: [2]})
        await trio.sleep(1.0)
        assert consumer.is_untouched()
        computed.set()
        assert await offer.wait() is OfferOutcome.RELEASED


async def test_tickets_of_two_shares_are_not_of_one_request(autojump_clock) -> None:
    """Merged by mistake, a consumer would read one share of one rank, another of another."""
    async with World().engine("p", Pool()) as prefill:
        offer = prefill.offer("r", {GROUP: [1]}, num_tokens=4, consumers=2)
        with pytest.raises(BadTicket, match="share"):
            Ticket.merge(offer.tickets)
        offer.withdraw()


@pytest.mark.parametrize("consumers", [0, -1, 5, 1.5])
async def test_as_many_consumers_as_there_is_room_for(
    autojump_clock, consumers
) -> None:
    """At least one, and no more than ``max_offers`` allows; refused, nothing is held."""
    async with World().engine("p", Pool(), max_offers=4) as prefill:
        with pytest.raises(MisuseError):
            prefill.offer("r", {GROUP: [1]}, num_tokens=4, consumers=consumers)
        at_base(prefill)
        prefill.offer("r", {GROUP: [1]}, num_tokens=4, consumers=4).withdraw()
