"""Several ranks on either side: each source is held, read, and released by itself."""

from __future__ import annotations

import pytest
import torch
import trio
import trio.testing

from kvferry.engine import (
    FerryError,
    ImpossiblePlan,
    OfferOutcome,
    OfferWithdrawn,
    PeerLost,
    Rank,
)
from kvferry.engine.fabric import CallFault, TransferFault
from kvferry.protocol import Ticket
from tests.kit import (
    GROUP,
    STATE,
    Pool,
    World,
    address,
    agent,
    at_base,
    is_bare,
    offer_all,
)

OURS = [5, 6]


def sharded(size: int, **pool) -> list[Pool]:
    """One pool for each tensor-parallel rank."""
    return [Pool(tp=(i, size), **pool) for i in range(size)]


async def all_at_base(*engines) -> None:
    """Every engine is back to base."""
    await trio.testing.wait_all_tasks_blocked()
    for engine in engines:
        at_base(engine)


@pytest.mark.parametrize("ours", [1, 2, 4])
@pytest.mark.parametrize("theirs", [1, 2, 4])
async def test_each_offer_is_released_after_exactly_its_readers(
    autojump_clock, theirs, ours
) -> None:
    """Every consumer rank reads the one ticket; the last one's word releases."""
    world = World()
    producers = sharded(theirs, heads=4, slots=3)
    consumers = sharded(ours, heads=4, slots=3)
    async with (
        world.instance("p", producers) as prefill,
        world.instance("c", consumers) as decode,
    ):
        offers = []
        for engine, pool in zip(prefill, producers, strict=True):
            blocks = pool.stamp([1, 2], num_tokens=7) | pool.stamp_state(2)
            offers.append(engine.offer("r", blocks, num_tokens=7))
        ticket = Ticket.merge(offer.ticket for offer in offers)
        # Over the router as plain JSON.
        ticket = Ticket.from_dict(ticket.to_dict())
        for engine in decode:
            assert [offer.outcome for offer in offers] == [None] * theirs
            await engine.pull(ticket, {GROUP: OURS, STATE: [0]})
        with trio.fail_after(0.1):
            for offer in offers:
                assert await offer.wait() is OfferOutcome.RELEASED
        await all_at_base(*prefill, *decode)
    for pool in consumers:
        pool.check(OURS, num_tokens=7)
        pool.check_state(0)


async def test_two_readers_at_once_and_one_fails(autojump_clock) -> None:
    """The other one is done, and the offer does not wait for a lease."""
    world, producer, consumers = World(), Pool(), sharded(2)
    async with (
        world.engine("p", producer) as prefill,
        world.instance("c", consumers) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1, 2], num_tokens=8), num_tokens=8)
        world.network.faults.add(
            CallFault(fabric="c-1", method="post", error=PeerLost("injected"))
        )
        errors: list[FerryError] = []

        async def one(engine) -> None:
            try:
                await engine.pull(offer.ticket, {GROUP: OURS})
            except PeerLost as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for engine in decode:
                nursery.start_soon(one, engine)
        assert len(errors) == 1
        with trio.fail_after(0.1):
            assert await offer.wait() is OfferOutcome.RELEASED
        await all_at_base(prefill, *decode)
    assert sum(pool.holds(OURS, num_tokens=8) for pool in consumers) == 1


async def test_a_rank_that_nobody_reads_from_is_released(autojump_clock) -> None:
    """A consumer that needs one of two holders' heads tells the other that it is done."""
    world = World()
    # Four ranks, two heads: each head is held twice.
    producers, consumers = sharded(4), sharded(2)
    async with (
        world.instance("p", producers) as prefill,
        world.instance("c", consumers) as decode,
    ):
        offers, ticket = offer_all(prefill, producers, "r", [1, 2], num_tokens=8)
        reports = [await engine.pull(ticket, {GROUP: OURS}) for engine in decode]
        assert all(len(report.peers) < 4 for report in reports)
        with trio.fail_after(0.1):
            for offer in offers:
                assert await offer.wait() is OfferOutcome.RELEASED
        await all_at_base(*prefill, *decode)
    for pool in consumers:
        pool.check(OURS, num_tokens=8)


@pytest.mark.parametrize("dead", [0, 1])
async def test_one_of_two_sources_dies_in_the_read(autojump_clock, dead) -> None:
    """One typed failure; the other producer is free at once, not by its lease."""
    world, consumer = World(), Pool()
    pools = sharded(2)
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", consumer, wave_bytes=100) as decode,
    ):
        ranks = [
            await world.start(nursery, "p", pool, rank=rank)
            for pool, rank in zip(pools, Rank(tp_size=2).instance(), strict=True)
        ]
        offers, ticket = offer_all(
            [rank.engine for rank in ranks], pools, "r", [1, 2], num_tokens=8
        )
        world.network.faults.add(TransferFault(fabric="c-*", nth=None, delay_s=1.0))
        world.network.faults.add(
            CallFault(fabric="c-*", method="post", nth=3, action=ranks[dead].kill)
        )
        with pytest.raises(PeerLost) as caught:
            await decode.pull(ticket, {GROUP: OURS})
        assert not world.may_touch(consumer, OURS)
        assert caught.value.untrusted
        assert caught.value.peer in {
            agent(ranks[dead].engine),
            str(ranks[dead].engine.key),
        }
        with trio.fail_after(0.5):
            assert await offers[1 - dead].wait() is OfferOutcome.RELEASED
        await all_at_base(decode, ranks[1 - dead].engine)
        await ranks[1 - dead].leave()
        await trio.testing.wait_all_tasks_blocked()
        is_bare(decode)
    assert len(world.logged("pull_failed")) == 1


async def test_a_source_that_has_confirmed_may_go(autojump_clock) -> None:
    """Its word is in hand: the pull waits for the other one, and is done."""
    world, consumer = World(), Pool()
    pools = sharded(2)
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", consumer, wave_bytes=4096) as decode,
    ):
        ranks = [
            await world.start(nursery, "p", pool, rank=rank)
            for pool, rank in zip(pools, Rank(tp_size=2).instance(), strict=True)
        ]
        offers, ticket = offer_all(
            [rank.engine for rank in ranks], pools, "r", [1, 2], num_tokens=8
        )
        world.network.faults.add(TransferFault(fabric="c-*", nth=2, delay_s=3.0))

        async def first_goes() -> None:
            assert await offers[0].wait() is OfferOutcome.RELEASED
            await trio.sleep(0.5)
            ranks[0].kill()

        nursery.start_soon(first_goes)
        await decode.pull(ticket, {GROUP: OURS})
        await ranks[1].leave()
    consumer.check(OURS, num_tokens=8)


async def test_a_source_that_withdraws_fails_the_whole(autojump_clock) -> None:
    """All or nothing: one rank's blocks are gone, the other's do not count."""
    world, consumer, pools = World(), Pool(), sharded(2)
    async with (
        world.instance("p", pools) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offers, ticket = offer_all(prefill, pools, "r", [1, 2], num_tokens=8)
        offers[1].withdraw()
        with pytest.raises(OfferWithdrawn) as caught:
            await decode.pull(ticket, {GROUP: OURS})
        assert caught.value.request_id == "r"
        assert offers[0].outcome is OfferOutcome.RELEASED
        await all_at_base(*prefill, decode)


async def test_a_rank_that_nobody_reads_from_has_no_say(autojump_clock) -> None:
    """It does not know its offer any more: nothing of it was needed."""
    world, consumer = World(), Pool(tp=(0, 2))
    pools = sharded(4)
    async with (
        world.instance("p", pools) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offers, ticket = offer_all(prefill, pools, "r", [1, 2], num_tokens=8)
        assert not torch.equal(pools[0].tensors[0], pools[3].tensors[0])
        offers[3].withdraw()
        await decode.pull(ticket, {GROUP: OURS})
    consumer.check(OURS, num_tokens=8)


async def test_a_ticket_of_one_rank_of_two_is_not_enough(autojump_clock) -> None:
    """Heads that nobody offers are a failure before any byte."""
    world, consumer, pools = World(), Pool(), sharded(2)
    async with (
        world.instance("p", pools) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offer = prefill[0].offer("r", pools[0].stamp([1], num_tokens=4), num_tokens=4)
        with pytest.raises(ImpossiblePlan):
            await decode.pull(offer.ticket, {GROUP: [3]})
        with trio.fail_after(0.1):
            assert await offer.wait() is OfferOutcome.RELEASED
        await all_at_base(*prefill, decode)
    assert consumer.is_untouched()


async def test_declining_reaches_the_ranks_that_live(autojump_clock) -> None:
    """One rank cannot be reached: the others are told all the same."""
    world, pools = World(), sharded(3, heads=3)
    async with (
        world.instance("p", pools) as prefill,
        world.engine("c", Pool(heads=3), connect_timeout_s=5.0) as decode,
    ):
        offers, ticket = offer_all(prefill, pools, "r", [1], num_tokens=4)
        world.streams.freeze(*address(prefill[1]))
        with pytest.raises(FerryError):
            await decode.decline(ticket)
        assert [offer.outcome for offer in offers] == [
            OfferOutcome.RELEASED,
            None,
            OfferOutcome.RELEASED,
        ]
        world.streams.thaw(*address(prefill[1]))
