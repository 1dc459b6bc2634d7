"""Offers: what can be offered, how many, and what is remembered of them."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import (
    FerryError,
    MisuseError,
    OfferOutcome,
    OfferSpent,
    Span,
    UnknownBlock,
    UnknownOffer,
)
from kvferry.engine.offer import ENDED_OFFERS, SPARE_DEADLINES
from kvferry.engine.pump import Cadence
from kvferry.protocol import Ticket
from tests.kit import GROUP, Pool, World, at_base


@pytest.mark.parametrize("request_id", ["", "x" * 257, "\ud800"])
async def test_an_id_that_cannot_be_sent_is_refused(autojump_clock, request_id) -> None:
    """At the offer, and not when its ticket cannot be read."""
    async with World().engine("p", Pool()) as prefill:
        with pytest.raises(MisuseError):
            prefill.offer(request_id, {GROUP: [1]}, num_tokens=4)
        at_base(prefill)


@pytest.mark.parametrize(
    "request_id", ["x", "x" * 256, "\u00e9" * 256, "\U0001f600" * 256]
)
async def test_the_longest_ids_work(autojump_clock, request_id) -> None:
    """Up to 256 characters, whatever they are."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([1], num_tokens=4)
        offer = prefill.offer(request_id, blocks, num_tokens=4)
        ticket = Ticket.from_dict(offer.ticket.to_dict())
        assert ticket == offer.ticket == Ticket.from_bytes(ticket.to_bytes())
        await decode.pull(ticket, {GROUP: [2]})
    consumer.check([2], num_tokens=4)


@pytest.mark.parametrize(
    "blocks",
    [
        [16],
        [-1],
        [1, 99],
        [],
        Span([1], first_token=2),
    ],
    ids=str,
)
async def test_blocks_that_do_not_hold_the_tokens(autojump_clock, blocks) -> None:
    """Refused when offered, and nothing is held."""
    async with World().engine("p", Pool(16)) as prefill:
        with pytest.raises(MisuseError):
            prefill.offer("r", {GROUP: blocks}, num_tokens=4)
        at_base(prefill)


@pytest.mark.parametrize("num_tokens", [0, -1, 5])
async def test_tokens_that_the_blocks_do_not_hold(autojump_clock, num_tokens) -> None:
    """None at all, or more than there is room for."""
    async with World().engine("p", Pool()) as prefill:
        with pytest.raises((MisuseError, UnknownBlock)):
            prefill.offer("r", {GROUP: [1]}, num_tokens=num_tokens)


async def test_no_more_offers_than_allowed(autojump_clock) -> None:
    """One too many is the caller's error; an ended one makes room."""
    async with World().engine("p", Pool(), max_offers=2) as prefill:
        offers = [prefill.offer(str(i), {GROUP: [i]}, num_tokens=4) for i in range(2)]
        with pytest.raises(MisuseError, match="max_offers"):
            prefill.offer("2", {GROUP: [2]}, num_tokens=4)
        offers[0].withdraw()
        prefill.offer("2", {GROUP: [2]}, num_tokens=4)


async def test_the_pump_is_claimed_while_blocks_are_held(autojump_clock) -> None:
    """Slowly while nobody reads, fast from the first renewal on, not at all at the end."""
    world, producer, consumer = World(latency_s=0.5), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        claims = prefill._pump._claims
        assert claims == {Cadence.OFFERED: 0, Cadence.BUSY: 0}
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        assert claims == {Cadence.OFFERED: 1, Cadence.BUSY: 0}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.pull, offer.ticket, {GROUP: [2]})
            await trio.sleep(0.2)
            assert claims == {Cadence.OFFERED: 1, Cadence.BUSY: 1}
        assert claims == {Cadence.OFFERED: 0, Cadence.BUSY: 0}


async def test_ended_offers_are_forgotten_in_the_end(autojump_clock) -> None:
    """A late reader learns why, as long as that is remembered; memory is bounded."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([1], num_tokens=4)
        first = prefill.offer("first", blocks, num_tokens=4)
        await decode.pull(first.ticket, {GROUP: [2]})
        with pytest.raises(OfferSpent):
            await decode.pull(first.ticket, {GROUP: [2]})
        for number in range(ENDED_OFFERS):
            prefill.offer(str(number), blocks, num_tokens=4).withdraw()
        assert len(prefill._offers._ended) == ENDED_OFFERS
        with pytest.raises(UnknownOffer):
            await decode.pull(first.ticket, {GROUP: [2]})
        await trio.sleep(60)
        assert not prefill._offers._deadlines
        assert first.outcome is OfferOutcome.RELEASED


async def test_long_leases_of_ended_offers_cost_nothing(autojump_clock) -> None:
    """Their deadlines go long before they would have come; the others still come."""
    async with World().engine("p", Pool(), lease_s=60.0) as prefill:
        held = prefill.offer("held", {GROUP: [1]}, num_tokens=4)
        for number in range(2 * SPARE_DEADLINES):
            prefill.offer(str(number), {GROUP: [2]}, num_tokens=4).withdraw()
        assert len(prefill._offers._deadlines) <= SPARE_DEADLINES + 2
        assert await held.wait() is OfferOutcome.EXPIRED


async def test_an_ended_offer_is_remembered_without_its_blocks(autojump_clock) -> None:
    """Thousands are remembered, and a ticket may name a million blocks."""
    producer = Pool()
    async with World().engine("p", producer) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        offer.withdraw()
        (share,) = prefill._offers._ended.values()
        assert share.ticket.spans == {}
        assert offer.ticket.spans[GROUP].block_ids == (1,)


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_odd_deadlines_of_a_pull(autojump_clock, deadline_s) -> None:
    """One that has passed fails by name, none at all works, and no number is a misuse."""
    producer, consumer = Pool(), Pool()
    world = World()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        if deadline_s == float("inf"):
            await decode.pull(offer.ticket, {GROUP: [2]}, deadline_s=deadline_s)
        else:
            with pytest.raises(FerryError) as caught:
                await decode.pull(offer.ticket, {GROUP: [2]}, deadline_s=deadline_s)
            assert "Internal" not in type(caught.value).__name__
            offer.withdraw()
    assert not world.logged("internal_error")


async def test_a_negative_prefix_is_a_misuse(autojump_clock) -> None:
    """And not an internal error."""
    producer, consumer = Pool(), Pool()
    world = World()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        with pytest.raises(MisuseError):
            await decode.pull(offer.ticket, {GROUP: [2]}, computed_tokens=-4)
        offer.withdraw()
    assert not world.logged("internal_error")
    assert consumer.is_untouched()
