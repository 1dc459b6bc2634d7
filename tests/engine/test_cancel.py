"""Cancellation at every step of a pull, and from around the whole engine."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    EngineClosed,
    FerryError,
    OfferOutcome,
)
from kvferry.engine.fabric.faults import TransferFault
from tests.kit import GROUP, Pool, Steps, World, address, at_base, is_bare

OURS = [5, 6]
REUSED = 7.0
LOOKS = {"poll_s": 0.002, "offered_poll_s": 0.05, "idle_poll_s": 0.1}


class Ends:
    """How often each end of a pull was seen."""

    def __init__(self) -> None:
        self.done = self.cancelled = self.failed = 0


async def cut_short(at_step: int, ends: Ends, *, how: str, ranks: int = 1) -> int:
    """A pull that is ended at one step; everything must be back to base afterwards.

    Returns:
        The steps that it took.
    """
    world, consumer = World(), Pool()
    pools = [Pool(tp=(i, ranks)) for i in range(ranks)]
    async with (
        world.instance("p", pools, **LOOKS) as producers,
        world.engine("c", consumer, wave_bytes=200, window=2, **LOOKS) as decode,
    ):
        offers = [
            producer.offer("r", pool.stamp([1, 2], num_tokens=7), num_tokens=7)
            for producer, pool in zip(producers, pools, strict=True)
        ]
        ticket = type(offers[0].ticket).merge(offer.ticket for offer in offers)
        scope = trio.CancelScope()

        def end() -> None:
            if how == "cancel":
                scope.cancel()
            elif pull := decode._pulls._active.get(("r", 0)):
                # As if this very step had come at the deadline.
                pull._machine._deadline_at = trio.current_time()
                pull._driver._changed.set()

        with Steps(at_step, end) as steps, scope:
            try:
                await decode.pull(ticket, {GROUP: OURS})
                ends.done += 1
            except DeadlineExceeded:
                ends.failed += 1
        ends.cancelled += scope.cancelled_caught
        taken = steps.taken
        assert not decode.quarantine.blocks(GROUP)
        assert not world.may_touch(consumer, OURS)
        consumer.fill(OURS, REUSED)
        # Its word reaches the producers: no lease has to run out.
        with trio.fail_after(1):
            for offer in offers:
                assert await offer.wait() is OfferOutcome.RELEASED
        await trio.testing.wait_all_tasks_blocked()
        assert consumer.is_filled(OURS, REUSED)
        for engine in (*producers, decode):
            at_base(engine)
        # And the same request works right away.
        again = [
            producer.offer("r", pool.stamp([3, 4], num_tokens=8), num_tokens=8)
            for producer, pool in zip(producers, pools, strict=True)
        ]
        ticket = type(offers[0].ticket).merge(offer.ticket for offer in again)
        await decode.pull(ticket, {GROUP: OURS})
        assert consumer.holds(OURS, num_tokens=8)
    return taken


@pytest.mark.parametrize(
    ("how", "ranks", "stride"),
    [("cancel", 1, 1), ("deadline", 1, 1), ("cancel", 2, 4)],
)
async def test_a_pull_ended_at_every_step(autojump_clock, how, ranks, stride) -> None:
    """At whichever checkpoint of whichever task: nothing is left over."""
    clean = Ends()
    steps = await cut_short(0, clean, how=how, ranks=ranks)
    assert clean.done == 1
    assert steps > 50
    ends = Ends()
    moments = range(1, steps + 1, stride)
    for at_step in moments:
        await cut_short(at_step, ends, how=how, ranks=ranks)
    assert ends.done + ends.failed + ends.cancelled == len(moments)
    assert (ends.cancelled if how == "cancel" else ends.failed) > len(moments) // 2


async def test_a_pull_in_a_cancelled_scope_does_nothing(autojump_clock) -> None:
    """The cancellation goes through, and the producer is freed."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        with trio.CancelScope() as scope:
            scope.cancel()
            await decode.pull(offer.ticket, {GROUP: [3]})
        assert scope.cancelled_caught
        assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.is_untouched()


async def test_a_cancelled_wait_does_not_touch_the_offer(autojump_clock) -> None:
    """Who waits for an offer's end may stop waiting."""
    producer = Pool()
    async with World().engine("p", producer) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        with trio.move_on_after(1) as scope:
            await offer.wait()
        assert scope.cancelled_caught
        assert offer.outcome is None


async def test_one_of_two_pulls_that_share_a_dial_is_cancelled(autojump_clock) -> None:
    """The other one does not lose its handshake (case e4)."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        first = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        second = prefill.offer("s", producer.stamp([2], num_tokens=4), num_tokens=4)
        world.streams.freeze(*address(prefill))
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def impatient() -> None:
                with scope:
                    await decode.pull(first.ticket, {GROUP: [3]})

            nursery.start_soon(impatient)
            nursery.start_soon(decode.pull, second.ticket, {GROUP: [4]})
            await trio.sleep(1)
            scope.cancel()
            await trio.sleep(1)
            world.streams.thaw(*address(prefill))
        assert scope.cancelled_caught
        assert decode._peers.dials.handshakes == 1
        assert await first.wait() is OfferOutcome.RELEASED
    consumer.check([4], num_tokens=4)


async def test_opening_in_a_cancelled_scope_ends(autojump_clock) -> None:
    """An engine that is cancelled before it is open does not wait for its pump."""
    world = World()
    with trio.CancelScope() as scope:
        scope.cancel()
        async with world.engine("p", Pool()):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    (name,) = world.network.names()
    assert world.network.faults.calls[name, "close"] == 1


# From around the engine (starting/test_pump_outlives.py shows the trap).


@pytest.mark.parametrize("lands_s", [3.0, 20.0])
async def test_the_pump_outlives_a_cancellation_from_around_the_engine(
    autojump_clock, lands_s
) -> None:
    """The drain sees its bytes land; without a pump it would wait out its grace."""
    world, producer, consumer = World(), Pool(), Pool()
    grace_s = 10.0
    async with world.engine("p", producer) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=lands_s))
        started = trio.current_time()
        with trio.move_on_after(1) as scope:
            async with world.engine("c", consumer, drain_grace_s=grace_s) as decode:
                await decode.pull(offer.ticket, {GROUP: [3]})
        took_s = trio.current_time() - started
        assert scope.cancelled_caught
        if lands_s < grace_s:
            assert took_s == pytest.approx(lands_s, abs=0.2)
            assert not decode.quarantine.blocks(GROUP)
            assert not world.network.closed_in_flight
            assert not world.logged("closed_undrained")
        else:
            assert took_s == pytest.approx(1 + grace_s, abs=2.5)
            assert decode.quarantine.blocks(GROUP) == {3}
            assert len(world.logged("closed_undrained")) == 1
        # The producer was told, also by an engine that was cancelled as a whole.
        assert offer.outcome is OfferOutcome.RELEASED
        await trio.testing.wait_all_tasks_blocked()
        at_base(prefill)
        assert prefill.statistics()["links"] == 0


async def test_pulls_of_tasks_around_the_engine_drain_as_well(autojump_clock) -> None:
    """A pull in a task that the cancellation does not reach: EngineClosed, drained."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.engine("p", producer) as prefill, trio.open_nursery() as nursery:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=3.0))
        errors: list[BaseException] = []

        async def outside(decode) -> None:
            try:
                await decode.pull(offer.ticket, {GROUP: [3]})
            except EngineClosed as error:
                errors.append(error)
                consumer.fill([3], REUSED)

        with trio.move_on_after(1):
            async with world.engine("c", consumer) as decode:
                nursery.start_soon(outside, decode)
                await trio.sleep_forever()
        assert len(errors) == 1
        assert errors[0].untrusted
        await trio.sleep(10)
        assert consumer.is_filled([3], REUSED)
        assert not world.network.closed_in_flight


@pytest.mark.parametrize("side", ["c", "p"])
async def test_an_engine_cancelled_at_every_step(autojump_clock, side) -> None:
    """Opening, pulling, closing: the other side is at base, no transfer is cut."""
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
    tickets, send = [], trio.Event()
    with Steps(at_step, scope.cancel) as steps:
        async with trio.open_nursery() as nursery:

            async def produce() -> None:
                with scope if side == "p" else trio.CancelScope():
                    async with world.engine(
                        "p", pools["p"], lease_s=3.0, **LOOKS
                    ) as prefill:
                        blocks = pools["p"].stamp([1, 2], num_tokens=7)
                        offer = prefill.offer("r", blocks, num_tokens=7)
                        tickets.append(offer.ticket)
                        send.set()
                        await offer.wait()
                        await trio.testing.wait_all_tasks_blocked()
                        at_base(prefill)
                send.set()

            async def consume() -> None:
                with scope if side == "c" else trio.CancelScope():
                    async with world.engine(
                        "c", pools["c"], connect_timeout_s=2.0, wave_bytes=200, **LOOKS
                    ) as decode:
                        await send.wait()
                        for ticket in tickets:
                            try:
                                await decode.pull(ticket, {GROUP: OURS})
                            except FerryError:
                                assert side == "p"
                        await trio.sleep(0.1)
                        at_base(decode)
                        if side == "p":
                            await trio.sleep(5)
                            is_bare(decode)

            nursery.start_soon(produce)
            nursery.start_soon(consume)
        taken = steps.taken
    # A producer may go while somebody drains a read from it; the reader may not.
    assert not [n for n in world.network.closed_in_flight if n.startswith("c")]
    assert not world.may_touch(pools["c"], OURS)
    for name in world.network.names():
        assert world.network.faults.calls[name, "close"] == 1
    assert not world.logged("internal_error"), world.logged("internal_error")
    return taken
