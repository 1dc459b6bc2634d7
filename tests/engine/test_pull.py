"""Pulls between engines on the memory fabric, on virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from kvferry.engine import (
    ImpossiblePlan,
    OfferOutcome,
    Span,
    UnknownBlock,
    pull,
)
from kvferry.engine.plan import Plan
from tests.kit import GROUP, Pool, World, at_base


async def test_a_pull_is_exact_and_releases_the_offer(autojump_clock) -> None:
    """Every token arrives at its place, the tail is zero, nothing else changes."""
    producer, consumer = Pool(8), Pool(12)
    async with World().pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([5, 2, 7], num_tokens=10)
        offer = prefill.offer("r", blocks, num_tokens=10)
        report = await decode.pull(offer.ticket, {GROUP: [1, 9, 4]})
        assert await offer.wait() is OfferOutcome.RELEASED
    consumer.check([1, 9, 4], num_tokens=10)
    assert report.zeroed_tokens == 2
    assert report.bytes == 2 * 3 * 4 * 2 * 2 * 3 * 8
    assert set(report.phases_s) >= {"connecting", "reading", "confirming", "finishing"}


async def test_p1_only_what_the_consumer_lacks_is_read(autojump_clock) -> None:
    """A partial prefix hit: exactly the tokens from computed_tokens on are written."""
    producer, consumer = Pool(80), Pool(80)
    ours = list(range(10, 49))
    async with World().pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer(
            "r", producer.stamp(range(63), num_tokens=250), num_tokens=250
        )
        await decode.pull(offer.ticket, {GROUP: ours}, computed_tokens=96)
    consumer.check(ours, num_tokens=250, first_token=96)


@pytest.mark.parametrize("extra", [1, 2, 3])
async def test_p2_p3_blocks_beyond_the_tokens_get_zeros(autojump_clock, extra) -> None:
    """Look-ahead blocks on either side do not shift the pairing."""
    producer, consumer = Pool(), Pool()
    ours = [7, 3, 11, 2, 9][: 2 + extra]
    async with World().pair(producer, consumer) as (prefill, decode):
        theirs = producer.stamp([4, 8, 1, 15], num_tokens=8)
        offer = prefill.offer("r", theirs, num_tokens=8)
        report = await decode.pull(offer.ticket, {GROUP: ours})
    consumer.check(ours, num_tokens=8)
    assert report.zeroed_tokens == extra * 4


async def test_p4_a_full_hit_moves_nothing_and_releases(autojump_clock) -> None:
    """No data operation at all; the producer is told in the background."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1, 2], num_tokens=8), num_tokens=8)
        report = await decode.pull(offer.ticket, {GROUP: []}, computed_tokens=8)
        assert await offer.wait() is OfferOutcome.RELEASED
    assert (report.bytes, report.waves) == (0, 0)
    assert consumer.is_untouched()
    assert not any(method == "post" for _, method in world.network.faults.calls)


async def test_p4_a_full_hit_is_done_though_the_producer_is_gone(
    autojump_clock,
) -> None:
    """That nobody can be told changes nothing for the consumer."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.engine("c", consumer) as decode:
        async with world.engine("p", producer) as prefill:
            offer = prefill.offer(
                "r", producer.stamp([1, 2], num_tokens=6), num_tokens=6
            )
        report = await decode.pull(
            offer.ticket, {GROUP: Span([3, 4])}, computed_tokens=6
        )
        await trio.testing.wait_all_tasks_blocked()
        at_base(decode)
    assert report.zeroed_tokens == 2
    assert len(world.logged("decline_lost")) == 1


async def test_p5_a_dropped_block_that_is_needed_is_named(autojump_clock) -> None:
    """None is no error in a ticket, only for a consumer that lacks those tokens."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        producer.stamp([1, 2, 3], num_tokens=12)
        offer = prefill.offer("r", {GROUP: [1, None, 3]}, num_tokens=12)
        with pytest.raises(UnknownBlock, match=r"token 4 .*producer.* is None"):
            await decode.pull(offer.ticket, {GROUP: [5, 6, 7]})
        assert consumer.is_untouched()
        offer = prefill.offer("s", {GROUP: [1, None, 3]}, num_tokens=12)
        await decode.pull(offer.ticket, {GROUP: [9]}, computed_tokens=8)
    consumer.check([9], num_tokens=12, first_token=8)


async def test_a_producer_span_that_ends_too_early_is_refused(autojump_clock) -> None:
    """Caught where it is made, not by whoever reads the ticket."""
    async with World().engine("p", Pool()) as prefill:
        with pytest.raises(UnknownBlock, match="end at token 8, 9 are offered"):
            prefill.offer("r", {GROUP: [1, 2]}, num_tokens=9)


async def test_p6_the_rest_of_the_last_block_is_zero(autojump_clock) -> None:
    """1,003 tokens in blocks of 16: 11 arrive in the last one, 5 slots are zero."""
    producer, consumer = Pool(70, block_size=16), Pool(70, block_size=16)
    ours = list(reversed(range(63)))
    async with World().pair(producer, consumer) as (prefill, decode):
        theirs = producer.stamp(range(5, 68), num_tokens=1003)
        offer = prefill.offer("r", theirs, num_tokens=1003)
        report = await decode.pull(offer.ticket, {GROUP: ours})
    consumer.check(ours, num_tokens=1003)
    assert report.zeroed_tokens == 5


async def test_a_prefix_that_splits_a_unit_is_refused(autojump_clock) -> None:
    """computed_tokens inside a unit would overwrite tokens that nobody asked for."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1, 2], num_tokens=8), num_tokens=8)
        with pytest.raises(ImpossiblePlan, match="multiple of 4") as caught:
            await decode.pull(offer.ticket, {GROUP: Span([3, 4])}, computed_tokens=2)
        # One small message has freed the producer (case n3).
        assert await offer.wait() is OfferOutcome.RELEASED
    assert caught.value.request_id == "r"
    assert not caught.value.untrusted
    assert consumer.is_untouched()


def test_a_long_request_is_planned_beside_the_loop(monkeypatch) -> None:
    """However many blocks a ticket names, the loop waits for no plan of them."""
    in_loop, select = [], Plan.select

    def noted(*args: Any, **options: Any) -> Any:
        in_loop.append(trio.lowlevel.in_trio_run())
        return select(*args, **options)

    async def main() -> None:
        producer, consumer = Pool(), Pool()
        async with World().pair(producer, consumer) as (prefill, decode):
            for name in ("r", "s"):  # not connected yet, and connected
                blocks = producer.stamp([4, 8, 1], num_tokens=12)
                offer = prefill.offer(name, blocks, num_tokens=12)
                await decode.pull(offer.ticket, {GROUP: [7, 3, 11]})
                consumer.check([7, 3, 11], num_tokens=12)

    monkeypatch.setattr(Plan, "select", noted)
    for most, found in ((3, True), (2, False)):
        monkeypatch.setattr(pull, "LONG_BLOCKS", most)
        # On real time: virtual time does not wait for threads.
        trio.run(main)
        assert in_loop == [found, found]
        in_loop.clear()


async def test_both_fabrics_hear_of_a_large_transfer_before_it_is_posted(
    autojump_clock,
) -> None:
    """From the offer on where it is read from; and when there is none any more."""
    producer, consumer = Pool(8, dim=2048), Pool(8, dim=2048)
    heard: list[tuple[str, Any]] = []

    def listen(name: str, engine: Any) -> None:
        engine._fabric.expect = lambda *, large: heard.append((name, large))
        post = engine._fabric.post

        def note(*args: Any, **settings: Any) -> Any:
            heard.append((name, "posts"))
            return post(*args, **settings)

        engine._fabric.post = note

    async with World().pair(producer, consumer) as (prefill, decode):
        listen("p", prefill)
        listen("c", decode)
        blocks = producer.stamp(range(8), num_tokens=32)
        offer = prefill.offer("r", blocks, num_tokens=32)
        await decode.pull(offer.ticket, {GROUP: list(range(8))})
        await offer.wait()
    assert [what for name, what in heard if name == "p"] == [True, False]
    assert [what for name, what in heard if name == "c"] == [True, "posts", False]
    assert heard[0] == ("p", True)
    consumer.check(range(8), num_tokens=32)
