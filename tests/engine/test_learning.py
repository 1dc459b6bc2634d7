"""Tickets for whole instances: a rank's own offer id is learnt from the rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
import trio.testing

from kvferry.engine import (
    ConfigError,
    InstanceIncomplete,
    OfferDiffers,
    OfferOutcome,
    OfferSpent,
    OfferWithdrawn,
    UnknownOffer,
)
from kvferry.engine.parking import MAX_PARKED_OF_ONE, Parking
from kvferry.engine.peer import Subscriber
from kvferry.protocol import BadTicket, Rank, Ticket
from kvferry.protocol.link import Decline, Renew, Sought, Spare
from tests.kit import GROUP, Pool, World, address, at_base

if TYPE_CHECKING:
    from kvferry.engine import Offer, TransferEngine

TOKENS = 7
OURS = [5, 6]


def sharded(size: int) -> list[Pool]:
    """One pool for each tensor-parallel rank."""
    return [Pool(tp=(i, size)) for i in range(size)]


def offered(
    engine: TransferEngine, pool: Pool, block_ids: list[int] | None = None, **kwargs
) -> Offer:
    """The offer of one rank of its part of the request."""
    blocks = pool.stamp(block_ids or [1, 2], num_tokens=TOKENS)
    return engine.offer("r", blocks, num_tokens=TOKENS, **kwargs)


@pytest.mark.parametrize("maker", [0, 1, 2])
async def test_any_ranks_ticket_is_good_for_all(autojump_clock, maker) -> None:
    """Each rank offers for itself, and nobody tells another how it calls that."""
    world, pools, consumer = World(), [Pool(heads=3, tp=(i, 3)) for i in range(3)], None
    consumer = Pool(heads=3)
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offers = [offered(*each) for each in zip(prefill, pools, strict=True)]
        ticket = Ticket.from_dict(offers[maker].ticket.to_dict())
        assert [bool(rank.offer_id) for rank in ticket.ranks] == [
            tp == maker for tp in range(3)
        ]
        assert ticket.instance
        await decode.pull(ticket, {GROUP: OURS})
        for offer in offers:
            assert await offer.wait() is OfferOutcome.RELEASED
        await trio.testing.wait_all_tasks_blocked()
        for engine in (*prefill, decode):
            at_base(engine)
    consumer.check(OURS, num_tokens=TOKENS)


async def test_n5_a_rank_that_offers_late_is_waited_for(autojump_clock) -> None:
    """What comes before the offer is parked, and then used."""
    world, pools, consumer = World(), sharded(2), Pool()
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", consumer) as decode,
        trio.open_nursery() as nursery,
    ):
        first = offered(prefill[0], pools[0])
        nursery.start_soon(decode.pull, first.ticket, {GROUP: OURS})
        await trio.sleep(20.0)
        assert prefill[1].statistics()["parked_messages"] == 1
        assert consumer.is_untouched()
        second = offered(prefill[1], pools[1])
        assert await second.wait() is OfferOutcome.RELEASED
        assert prefill[1].statistics()["parked_messages"] == 0
    consumer.check(OURS, num_tokens=TOKENS)


async def test_n5_a_rank_that_never_offers_refuses_in_the_end(autojump_clock) -> None:
    """Parked for a lease and no longer, however often it was renewed meanwhile."""
    world, pools, consumer = World(), sharded(2), Pool()
    async with (
        world.joined("p", pools, lease_s=6.0) as prefill,
        world.engine("c", consumer) as decode,
    ):
        first = offered(prefill[0], pools[0])
        started_at = trio.current_time()
        with pytest.raises(UnknownOffer):
            await decode.pull(first.ticket, {GROUP: OURS})
        assert trio.current_time() - started_at == pytest.approx(6.0, abs=0.1)
        assert await first.wait() is OfferOutcome.RELEASED
        # The pull's own decline has come as well, and is forgotten by time alone.
        await trio.sleep(7.0)
        assert prefill[1].statistics()["parked_messages"] == 0
    assert consumer.is_untouched()


async def test_n3_a_ticket_declined_before_a_rank_offers(autojump_clock) -> None:
    """The rank is freed the moment it offers."""
    world, pools = World(), sharded(2)
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", Pool()) as decode,
    ):
        first = offered(prefill[0], pools[0])
        await decode.decline(first.ticket)
        assert await first.wait() is OfferOutcome.RELEASED
        await trio.testing.wait_all_tasks_blocked()
        assert offered(prefill[1], pools[1]).outcome is OfferOutcome.RELEASED


async def test_o1_a_used_ticket_is_refused_at_once(autojump_clock) -> None:
    """Also by a rank whose id it does not tell: that is not an offer to come."""
    world, pools, consumer = World(), sharded(2), Pool(16)
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offers = [offered(*each) for each in zip(prefill, pools, strict=True)]
        await decode.pull(offers[0].ticket, {GROUP: OURS})
        renew = Renew("r", sought(offers[0].ticket), 99, (Rank(),))
        with trio.fail_after(0.1):
            assert "SPENT" in repr(await asked(decode, prefill[1], renew))
            with pytest.raises(OfferSpent):
                await decode.pull(offers[0].ticket, {GROUP: [8, 9]})


async def test_o1_an_offer_that_is_over_says_so(autojump_clock) -> None:
    """Withdrawn before anybody had asked for it: known by what it was of."""
    world, pools = World(), sharded(2)
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", Pool()) as decode,
    ):
        offers = [offered(*each) for each in zip(prefill, pools, strict=True)]
        offers[1].withdraw()
        with trio.fail_after(0.1), pytest.raises(OfferWithdrawn):
            await decode.pull(offers[0].ticket, {GROUP: OURS})


@pytest.mark.parametrize("first", [0, 1])
async def test_the_same_request_again_is_an_offer_to_come(
    autojump_clock, first
) -> None:
    """Of the same blocks under the same id: the ticket's origin tells them apart, also
    where the rank whose ticket was used has not offered again."""
    world, pools, consumer = World(), sharded(2), Pool(16)
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", consumer) as decode,
        trio.open_nursery() as nursery,
    ):
        offers = [offered(*each) for each in zip(prefill, pools, strict=True)]
        await decode.pull(offers[0].ticket, {GROUP: OURS})
        again = offered(prefill[first], pools[first])
        nursery.start_soon(decode.pull, again.ticket, {GROUP: [8, 9]})
        await trio.sleep(1.0)
        assert again.outcome is None
        late = offered(prefill[1 - first], pools[1 - first])
        assert await late.wait() is OfferOutcome.RELEASED
        assert await again.wait() is OfferOutcome.RELEASED


async def test_o1_a_used_ticket_does_not_use_up_the_next_one(autojump_clock) -> None:
    """The request is offered once more, alike: who comes with an old ticket is late.

    By a reader that asks nobody who made a ticket, and after more than one more try.
    """
    world, pools, readers = World(), sharded(2), sharded(2)
    async with (
        world.joined("p", pools) as prefill,
        world.joined("c", readers) as decode,
    ):
        tickets: list[Ticket] = []
        for place in range(3):
            offers = [offered(*each) for each in zip(prefill, pools, strict=True)]
            tickets.append(offers[0].ticket)
            for old in tickets[:-1]:
                with trio.fail_after(0.1), pytest.raises(OfferSpent):
                    await decode[1].pull(old, {GROUP: [12, 13]})
                await trio.testing.wait_all_tasks_blocked()
            assert [offer.outcome for offer in offers] == [None, None]
            blocks = {GROUP: [2 * place, 2 * place + 1]}
            for engine in decode:
                await engine.pull(offers[0].ticket, blocks)
            assert [await offer.wait() for offer in offers] == [
                OfferOutcome.RELEASED
            ] * 2


async def test_late_words_are_of_the_offer_that_they_were_for(autojump_clock) -> None:
    """The first try is withdrawn and begun anew, before its reader has heard of that."""
    world, pools, readers = World(), sharded(2), sharded(2)
    async with (
        world.joined("p", pools) as prefill,
        world.joined("c", readers) as decode,
    ):
        never = trio.Event()
        first = [
            offered(*each, after=never.wait)
            for each in zip(prefill, pools, strict=True)
        ]
        async with trio.open_nursery() as nursery:

            async def fail() -> None:
                with pytest.raises(OfferWithdrawn):
                    await decode[1].pull(first[0].ticket, {GROUP: OURS})

            nursery.start_soon(fail)  # at its next renewal: a word of the first try
            await trio.sleep(0.5)
            for offer in first:
                offer.withdraw()
            again = [offered(*each) for each in zip(prefill, pools, strict=True)]
        await trio.testing.wait_all_tasks_blocked()
        assert [offer.outcome for offer in again] == [None, None]
        for engine in decode:
            await engine.pull(again[0].ticket, {GROUP: OURS})
        assert [await offer.wait() for offer in again] == [OfferOutcome.RELEASED] * 2
    for pool in readers:
        pool.check(OURS, num_tokens=TOKENS)


@pytest.mark.parametrize("is_late", [False, True])
async def test_ranks_that_offer_different_things(autojump_clock, *, is_late) -> None:
    """One request id, other blocks: refused, whoever comes first, and nothing is read."""
    world, pools, consumer = World(), sharded(2), Pool()
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", consumer) as decode,
    ):
        first = offered(prefill[0], pools[0])

        async def offer_others() -> None:
            if is_late:
                await trio.sleep(1.0)
            offered(prefill[1], pools[1], [2, 1])

        async with trio.open_nursery() as nursery:
            await nursery.start(_started, offer_others)
            with pytest.raises(OfferDiffers):
                await decode.pull(first.ticket, {GROUP: OURS})
        prefill[1]._offers.withdraw_all()
    assert consumer.is_untouched()


async def _started(call, *, task_status) -> None:
    task_status.started()
    await call()


async def test_each_consumer_learns_the_id_of_its_share(autojump_clock) -> None:
    """The second ticket of one rank finds the second share of the other."""
    world, pools = World(), sharded(2)
    consumers = [Pool(), Pool()]
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", consumers[0]) as first,
        world.engine("d", consumers[1]) as second,
    ):
        offers = [
            offered(*each, consumers=2) for each in zip(prefill, pools, strict=True)
        ]
        await second.pull(offers[0].tickets[1], {GROUP: OURS})
        assert offers[1].outcomes == (None, OfferOutcome.RELEASED)
        await first.pull(offers[1].tickets[0], {GROUP: OURS})
        for offer in offers:
            assert await offer.wait() is OfferOutcome.RELEASED
    for pool in consumers:
        pool.check(OURS, num_tokens=TOKENS)


async def test_ranks_that_offer_to_more_consumers_than_others(autojump_clock) -> None:
    """A share that a rank has not is no offer to come while it holds the request."""
    world, pools = World(), sharded(2)
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", Pool()) as decode,
    ):
        first = offered(prefill[0], pools[0], consumers=2)
        offered(prefill[1], pools[1])
        with pytest.raises(OfferDiffers):
            await decode.pull(first.tickets[1], {GROUP: OURS})
        for engine in prefill:
            engine._offers.withdraw_all()


async def test_a_rank_is_computing_while_it_is_asked(autojump_clock) -> None:
    """Its id comes with the word that its blocks are ready."""
    world, pools, consumer = World(), sharded(2), Pool()
    computed = trio.Event()
    async with (
        world.joined("p", pools) as prefill,
        world.engine("c", consumer) as decode,
        trio.open_nursery() as nursery,
    ):
        first = offered(prefill[0], pools[0])
        second = offered(prefill[1], pools[1], after=computed.wait)
        nursery.start_soon(decode.pull, first.ticket, {GROUP: OURS})
        await trio.sleep(1.0)
        assert consumer.is_untouched()
        computed.set()
        assert await second.wait() is OfferOutcome.RELEASED
    consumer.check(OURS, num_tokens=TOKENS)


async def test_merged_tickets_tell_all_ids(autojump_clock) -> None:
    """A stack that merges them as before saves its consumers the question."""
    world, pools = World(), sharded(2)
    async with world.joined("p", pools) as prefill:
        offers = [offered(*each) for each in zip(prefill, pools, strict=True)]
        ticket = Ticket.merge(offer.ticket for offer in reversed(offers))
        assert {rank.offer_id for rank in ticket.ranks} == {
            offer.ticket.origin for offer in offers
        }
        assert len(ticket.ranks) == 2
        blank = msgspec.structs.replace(ticket.ranks[0], offer_id="")
        with pytest.raises(BadTicket, match="no rank"):
            msgspec.structs.replace(ticket, ranks=(blank,))
        prefill[0]._offers.withdraw_all()
        prefill[1]._offers.withdraw_all()


async def test_an_instance_that_has_lost_a_rank_offers_nothing(autojump_clock) -> None:
    """A ticket for a part of it would be for a cache that nobody can read."""
    world, pools = World(), sharded(2)
    async with world.joined("p", pools) as prefill:
        instance = prefill[0]._instance
        instance.manifest, instance.was_complete = None, True
        instance.incomplete = lambda: InstanceIncomplete("tp1of2 is missing")
        with pytest.raises(InstanceIncomplete):
            offered(prefill[0], pools[0])
        at_base(prefill[0])


async def test_a_rank_that_has_not_joined_yet_offers_nothing(autojump_clock) -> None:
    """Nor does a lead that others have joined: a part must not pass for the whole."""
    world, pools = World(), [Pool() for _ in range(3)]
    ranks = Rank(tp_size=3).instance()
    async with world.engine("p", pools[0], rank=ranks[0]) as lead:
        offered(lead, pools[0]).withdraw()  # it knows of nobody: a ticket to merge
        join = address(lead)
        async with world.engine("p", pools[1], rank=ranks[1], join=join) as member:
            for _ in range(2):
                with pytest.raises(InstanceIncomplete, match="tp2of3"):
                    offered(member, pools[1])
                with pytest.raises(InstanceIncomplete, match="tp2of3"):
                    _ = member.contact
                await trio.sleep(1.0)  # it has joined
            with pytest.raises(InstanceIncomplete, match="tp2of3"):
                offered(lead, pools[0])


async def test_a_rank_without_a_listener_cannot_be_read(autojump_clock) -> None:
    """It is named when its sibling offers."""
    world, pools = World(), sharded(2)
    async with world.joined("p", pools) as prefill:
        manifest = prefill[0]._instance.manifest
        first, second = manifest.members
        deaf = msgspec.structs.replace(second, host=None, port=None)
        prefill[0]._instance.manifest = msgspec.structs.replace(
            manifest, members=(first, deaf)
        )
        with pytest.raises(ConfigError, match="tp1of2"):
            offered(prefill[0], pools[0])
        at_base(prefill[0])


def sought(ticket: Ticket) -> Sought:
    """What a rank is asked for whose id the ticket does not tell."""
    return Sought(ticket.digest, ticket.share, ticket.origin)


async def asked(reader: TransferEngine, rank: TransferEngine, message: Renew) -> object:
    """The answer to a message over the link that is there."""
    send, receive = trio.open_memory_channel[object](1)
    peer = reader._peers._peers[rank.key]
    peer.subscribe(message.attempt, Subscriber(send.send_nowait, send.send_nowait))
    peer.link.post(message)
    answer = await receive.receive()
    peer.unsubscribe(message.attempt)
    return answer


def test_parking_is_bounded_and_fair() -> None:
    """Nobody takes the room of others; who has been taken, or is late, makes room."""
    parking, links = Parking(30.0), [object(), object()]
    what = Sought("d", 0, "o")

    def renew(number: int) -> Renew:
        return Renew(f"r{number}", what, number, (Rank(),))

    for number in range(MAX_PARKED_OF_ONE):
        assert parking.put(links[0], renew(number), what, float(number))
    assert not parking.put(links[0], renew(-1), what, 0.0)
    assert parking.put(links[0], renew(5), what, 9.0), "a later word of the same"
    assert parking.put(links[1], renew(5), what, 9.0)
    assert parking.put(None, Spare("r5", what, (Rank(),)), what, 9.0)
    assert [each.link for each in parking.take("r5", 0)] == [*links, None]
    assert parking.take("r5", 0) == []
    assert parking.put(links[0], renew(-1), what, 9.0)
    late = [each.message.request_id for each in parking.take_due(31.0)]
    assert late == ["r0", "r1"]
    decline = Decline("r7", what, (Rank(),))
    parking.put(links[0], decline, what, 40.0)
    parking.leave(links[0])
    assert [each.message for each in parking.take("r7", 0)] == [decline]
    assert len(parking) == 0
    assert parking.deadline is None
