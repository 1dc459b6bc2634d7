"""No byte is read or written before the caller's event (case l8)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    EngineClosed,
    FerryError,
    LeaseExpired,
    MisuseError,
    OfferOutcome,
    OfferWithdrawn,
    ProtocolViolation,
    Span,
)
from kvferry.engine.after import wait_for
from kvferry.protocol import Ticket
from kvferry.protocol.link import OfferReady
from tests.kit import GROUP, POISON, Pool, World, agent, at_base

if TYPE_CHECKING:
    from collections.abc import Sequence

THEIRS, OURS = [1, 2], [5, 6]


class Gate:
    """A callable for ``after`` that is over when it is opened.

    Attributes:
        calls: How often it was called.
        running: How many of these calls have not ended.
        error: Raised by it once it is open.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls = self.running = 0
        self.error = error
        self._event = trio.Event()

    def open(self) -> None:
        """Let whoever waits go on."""
        self._event.set()

    async def __call__(self) -> object:
        """Wait for it."""
        self.calls += 1
        self.running += 1
        try:
            await self._event.wait()
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        return "whatever it returns is of no interest"


class FakeEvent(torch.cuda.Event):
    """A CUDA event that is over at a moment of the virtual clock."""

    device = torch.device("cuda:1")

    def __new__(cls, *_args, **_kwargs):
        """Around the dummy class of builds without CUDA, which cannot be made."""
        if torch.version.cuda:
            return super().__new__(cls)
        return object.__new__(cls)

    def __init__(self, at: float) -> None:
        self.at = at
        self.looks: list[float] = []

    def query(self) -> bool:
        self.looks.append(trio.current_time())
        return trio.current_time() >= self.at

    def synchronize(self) -> None:
        raise AssertionError("the loop was blocked")


@pytest.fixture
def guarded_devices(monkeypatch) -> list[torch.device]:
    """The devices that were made current, as no GPU is needed for that here."""
    devices: list[torch.device] = []

    @contextlib.contextmanager
    def guard(device: torch.device):
        devices.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", guard)
    return devices


def posts(world: World, engine) -> int:
    """How many transfers an engine has posted."""
    return world.network.faults.calls[agent(engine), "post"]


def offered(engine, pool: Pool, request_id="r", **options):
    """An offer of seven tokens in two blocks."""
    blocks = pool.stamp(THEIRS, num_tokens=7)
    return engine.offer(request_id, blocks, num_tokens=7, **options)


async def failure(
    engine, ticket: Ticket, blocks: Sequence[int] = OURS, **options
) -> FerryError:
    """The error of a pull that fails."""
    with pytest.raises(FerryError) as caught:
        await engine.pull(ticket, {GROUP: blocks}, **options)
    assert caught.value.request_id == ticket.request_id
    assert caught.value.peer
    return caught.value


# Pulls.


async def test_l8_nothing_is_posted_before_the_pulls_event(autojump_clock) -> None:
    """The ticket is accepted and the lease renewed, and no byte moves until then."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=3.0) as (prefill, decode):
        offer, gate = offered(prefill, producer), Gate()
        async with trio.open_nursery() as nursery:

            async def pull() -> None:
                await decode.pull(offer.ticket, {GROUP: OURS}, after=gate)

            nursery.start_soon(pull)
            await trio.sleep(10)
            assert offer.outcome is None
            assert posts(world, decode) == 0
            assert consumer.is_untouched()
            # Work of the caller's own that was queued on them before.
            consumer.fill(OURS, POISON)
            gate.open()
        assert gate.calls == 1
        assert posts(world, decode) > 0
    consumer.check(OURS, num_tokens=7)


async def test_l8_the_zeroing_of_a_full_hit_waits_as_well(autojump_clock) -> None:
    """Nothing is read, the producer is free at once, and tails are zeroed later."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer, gate = offered(prefill, producer), Gate()
        span = {GROUP: Span(OURS, first_token=0)}
        async with trio.open_nursery() as nursery:

            async def pull() -> None:
                report = await decode.pull(
                    offer.ticket, span, computed_tokens=7, after=gate
                )
                assert report.zeroed_tokens == 1

            nursery.start_soon(pull)
            with trio.fail_after(1):
                assert await offer.wait() is OfferOutcome.RELEASED
            await trio.sleep(5)
            assert consumer.is_untouched()
            gate.open()
        assert float(consumer.tensors[0][6, :, :, 3].abs().sum()) == 0
        assert posts(world, decode) == 0


@pytest.mark.parametrize("computed", [0, 7], ids=["read", "full hit"])
async def test_a_pull_whose_event_never_comes_ends_by_its_deadline(
    autojump_clock, computed
) -> None:
    """In the phase that waits; the callable does not outlive it."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer, gate = offered(prefill, producer), Gate()
        started = trio.current_time()
        error = await failure(
            decode,
            offer.ticket,
            Span(OURS, 0),
            computed_tokens=computed,
            after=gate,
            deadline_s=4.0,
        )
        assert isinstance(error, DeadlineExceeded)
        assert error.phase == "planned"
        assert not error.untrusted
        assert trio.current_time() - started == pytest.approx(4)
        assert gate.running == 0
        assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.is_untouched()


@pytest.mark.parametrize("computed", [0, 7], ids=["read", "full hit"])
async def test_a_pull_cancelled_while_it_waits_ends_at_once(
    autojump_clock, computed
) -> None:
    """Nothing is in flight: no drain, and the blocks are the caller's."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer, gate = offered(prefill, producer), Gate()
        started = trio.current_time()
        with trio.move_on_after(2) as scope:
            await decode.pull(
                offer.ticket,
                {GROUP: Span(OURS, 0)},
                computed_tokens=computed,
                after=gate,
            )
        assert scope.cancelled_caught
        assert trio.current_time() - started == 2
        assert gate.running == 0
        assert await offer.wait() is OfferOutcome.RELEASED
        gate.open()
        await trio.sleep(1)
        at_base(decode)
    assert consumer.is_untouched()


@pytest.mark.parametrize("computed", [0, 7], ids=["read", "full hit"])
async def test_a_pull_whose_event_fails_fails_with_it(autojump_clock, computed) -> None:
    """The caller's own failure, with its exception as the cause; and that pull alone."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer, gate = offered(prefill, producer), Gate(ZeroDivisionError("their bug"))
        gate.open()
        error = await failure(
            decode,
            offer.ticket,
            Span(OURS, 0),
            computed_tokens=computed,
            after=gate,
        )
        assert isinstance(error, MisuseError)
        assert "ZeroDivisionError: their bug" in error.detail
        assert isinstance(error.__cause__, ZeroDivisionError)
        assert error.phase == "planned"
        assert await offer.wait() is OfferOutcome.RELEASED
        assert consumer.is_untouched()
        again = offered(prefill, producer)
        await decode.pull(again.ticket, {GROUP: OURS})
    consumer.check(OURS, num_tokens=7)
    # It is no bug of ours.
    assert not world.logged("internal_error")


async def test_a_pull_fails_when_its_engine_closes_while_it_waits(
    autojump_clock,
) -> None:
    """At once; leaving the engine does not wait for anybody's event."""
    world, producer, consumer = World(), Pool(), Pool()
    gate = Gate()
    async with world.engine("p", producer) as prefill, trio.open_nursery() as nursery:
        offer = offered(prefill, producer)
        process = await world.start(nursery, "c", consumer)
        errors: list[FerryError] = []

        async def pull() -> None:
            errors.append(await failure(process.engine, offer.ticket, after=gate))

        nursery.start_soon(pull)
        await trio.sleep(1)
        started = trio.current_time()
        await process.leave()
        assert trio.current_time() - started < 0.5
        assert isinstance(errors[0], EngineClosed)
        assert gate.running == 0
        assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.is_untouched()


async def test_room_in_the_staging_buffer_is_not_kept_by_who_waits(
    autojump_clock,
) -> None:
    """One berth, and a pull that waits for its event: another pull goes first."""
    pools = (Pool(32, block_size=4), Pool(32, block_size=4))
    bulk = {"landing": "bulk", "wave_bytes": 800, "window": 1, "staging_bytes": 800}
    world = World()
    async with world.pair(*pools, **bulk) as (prefill, decode):
        assert decode._staging.berths == 1
        first, gate = offered(prefill, pools[0]), Gate()
        producer_gate = Gate()
        second = prefill.offer("s", {GROUP: [3]}, num_tokens=4, after=producer_gate)
        third = prefill.offer("t", pools[0].stamp([4], num_tokens=4), num_tokens=4)
        async with trio.open_nursery() as nursery:

            async def pull_first() -> None:
                await decode.pull(first.ticket, {GROUP: OURS}, after=gate)

            nursery.start_soon(pull_first)
            nursery.start_soon(decode.pull, second.ticket, {GROUP: [8]})
            await trio.sleep(1)
            with trio.fail_after(1):
                await decode.pull(third.ticket, {GROUP: [9]})
            gate.open()
            producer_gate.open()


# Offers.


async def test_l8_nothing_is_read_before_the_offers_event(autojump_clock) -> None:
    """The ticket goes out at once; what is read is what was written just before."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=3.0) as (prefill, decode):
        gate = Gate()
        offer = prefill.offer("r", {GROUP: THEIRS}, num_tokens=7, after=gate)
        ticket = Ticket.from_dict(offer.ticket.to_dict())
        assert [rank.ready for rank in ticket.ranks] == [False]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.pull, ticket, {GROUP: OURS})
            # Longer than the lease: the reader renews while it waits.
            await trio.sleep(10)
            assert offer.outcome is None
            assert posts(world, decode) == 0
            producer.stamp(THEIRS, num_tokens=7)
            gate.open()
        assert await offer.wait() is OfferOutcome.RELEASED
        assert offer.cause is None
    consumer.check(OURS, num_tokens=7)


async def test_l8_an_offer_that_is_ready_before_it_is_accepted(autojump_clock) -> None:
    """A ticket that was made too early to say so: the first renewal is told."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        gate = Gate()
        offer = offered(prefill, producer, after=gate)
        gate.open()
        await trio.testing.wait_all_tasks_blocked()
        assert not offer.ticket.ranks[0].ready
        with trio.fail_after(1):
            await decode.pull(offer.ticket, {GROUP: OURS})
    consumer.check(OURS, num_tokens=7)


async def test_a_ready_offer_costs_no_message_more(autojump_clock) -> None:
    """Only a ticket that says that its blocks are not ready is followed by a word."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        warm = offered(prefill, producer)
        await decode.pull(warm.ticket, {GROUP: OURS})
        (served,) = prefill._listener._links
        post, sent = served.post, []

        def record(message) -> None:
            sent.append(type(message))
            post(message)

        served.post = record
        for after, told in ((None, 0), (Gate(), 1)):
            sent.clear()
            offer = offered(prefill, producer, after=after)
            if after is not None:
                after.open()
            await decode.pull(offer.ticket, {GROUP: OURS})
            assert sent.count(OfferReady) == told, sent


async def test_l8_two_ranks_that_become_ready_at_different_times(
    autojump_clock,
) -> None:
    """Nothing is read before the last of them; the merged ticket keeps each flag."""
    world, consumer = World(), Pool()
    pools = [Pool(tp=(i, 2)) for i in range(2)]
    async with (
        world.instance("p", pools, lease_s=3.0) as ranks,
        world.engine("c", consumer) as decode,
    ):
        gates: list[Gate | None] = [Gate(), None]
        for order in ([0, 1], [1, 0], [0], [1]):
            gates = [Gate() if i in order else None for i in range(2)]
            offers = [
                rank.offer(
                    "r", pool.stamp(THEIRS, num_tokens=7), num_tokens=7, after=gate
                )
                for rank, pool, gate in zip(ranks, pools, gates, strict=True)
            ]
            ticket = Ticket.merge(offer.ticket for offer in offers)
            assert [r.ready for r in ticket.ranks] == [g is None for g in gates]
            before = posts(world, decode)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(decode.pull, ticket, {GROUP: OURS})
                for rank in order:
                    await trio.sleep(4)
                    assert posts(world, decode) == before
                    gate = gates[rank]
                    assert gate is not None
                    gate.open()
            consumer.check(OURS, num_tokens=7)
            consumer.fill(OURS, POISON)
        at_base(decode)


async def test_l8_both_sides_have_an_event(autojump_clock) -> None:
    """The later one counts, whichever it is."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        for producer_first in (True, False):
            theirs, ours = Gate(), Gate()
            offer = offered(prefill, producer, after=theirs)
            before = posts(world, decode)
            async with trio.open_nursery() as nursery:

                async def pull(offer=offer, gate=ours) -> None:
                    await decode.pull(offer.ticket, {GROUP: OURS}, after=gate)

                nursery.start_soon(pull)
                await trio.sleep(1)
                (theirs if producer_first else ours).open()
                await trio.sleep(1)
                assert posts(world, decode) == before
                (ours if producer_first else theirs).open()


async def test_an_offer_whose_event_fails_is_withdrawn(autojump_clock) -> None:
    """Readers fail, the producer's caller learns why, and its engine goes on."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        gate = Gate(ZeroDivisionError("their bug"))
        offer = offered(prefill, producer, after=gate)
        errors: list[FerryError] = []
        async with trio.open_nursery() as nursery:

            async def pull() -> None:
                errors.append(await failure(decode, offer.ticket))

            nursery.start_soon(pull)
            await trio.sleep(1)
            gate.open()
            await trio.sleep(0.1)
            assert offer.outcome is OfferOutcome.WITHDRAWN
            # Its reader learns it with its next renewal, or its deadline.
        assert await offer.wait() is OfferOutcome.WITHDRAWN
        assert isinstance(errors[0], OfferWithdrawn)
        assert errors[0].phase == "planned"
        assert isinstance(offer.cause, MisuseError)
        assert offer.cause.request_id == "r"
        assert isinstance(offer.cause.__cause__, ZeroDivisionError)
        assert len(world.logged("offer_not_computed")) == 1
        assert posts(world, decode) == 0
        again = offered(prefill, producer)
        await decode.pull(again.ticket, {GROUP: OURS})


async def test_an_offer_that_nobody_accepts_expires_while_it_waits(
    autojump_clock,
) -> None:
    """The lease runs all the same, and the callable does not outlive it."""
    world, producer = World(), Pool()
    async with world.engine("p", producer, lease_s=3.0) as prefill:
        gate = Gate()
        offer = offered(prefill, producer, after=gate)
        await trio.sleep(2.9)
        assert gate.running == 1
        assert await offer.wait() is OfferOutcome.EXPIRED
        await trio.testing.wait_all_tasks_blocked()
        assert gate.running == 0
        assert offer.cause is None
        at_base(prefill)


async def test_a_lease_that_runs_out_while_the_reader_waits(autojump_clock) -> None:
    """A reader whose renewals are lost fails; nothing was read."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=3.0) as (prefill, decode):
        warm = offered(prefill, producer, "warm")
        await decode.pull(warm.ticket, {GROUP: [9, 10]})
        before = posts(world, decode)
        offer = offered(prefill, producer, after=Gate())
        (peer,) = decode._peers._peers.values()
        queue = peer.link.queue
        renewed_at: list[float] = []

        def but_some_renewals(message) -> None:
            if type(message).__name__ == "Renew":
                renewed_at.append(trio.current_time())
                if 1 < len(renewed_at) < 6:
                    return
            queue(message)

        peer.link.queue = but_some_renewals
        error = await failure(decode, offer.ticket)
        assert isinstance(error, LeaseExpired)
        assert error.phase == "planned"
        assert not error.untrusted
        assert await offer.wait() is OfferOutcome.EXPIRED
        assert posts(world, decode) == before


async def test_a_reader_that_gives_up_frees_an_offer_that_waits(
    autojump_clock,
) -> None:
    """Cancelled or timed out: the producer may stop computing at once."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        for options in ({"deadline_s": 1.0}, {}):
            gate = Gate()
            offer = offered(prefill, producer, after=gate)
            with trio.move_on_after(2), contextlib.suppress(DeadlineExceeded):
                await decode.pull(offer.ticket, {GROUP: OURS}, **options)
            with trio.fail_after(0.5):
                assert await offer.wait() is OfferOutcome.RELEASED
            await trio.testing.wait_all_tasks_blocked()
            assert gate.running == 0
    assert consumer.is_untouched()


async def test_an_offer_withdrawn_while_it_waits(autojump_clock) -> None:
    """The producer changes its mind: the reader fails, the callable is cancelled."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, lease_s=3.0) as (prefill, decode):
        gate = Gate()
        offer = offered(prefill, producer, after=gate)
        async with trio.open_nursery() as nursery:

            async def withdraw() -> None:
                await trio.sleep(1.5)
                offer.withdraw()
                await trio.testing.wait_all_tasks_blocked()
                assert gate.running == 0

            nursery.start_soon(withdraw)
            error = await failure(decode, offer.ticket)
        assert isinstance(error, OfferWithdrawn)
        assert await offer.wait() is OfferOutcome.WITHDRAWN
        assert offer.cause is None
    assert consumer.is_untouched()


async def test_a_producer_that_closes_while_its_offer_waits(autojump_clock) -> None:
    """It does not wait for the event of an offer that nobody can read any more."""
    world, producer, consumer = World(), Pool(), Pool()
    gate = Gate()
    async with world.engine("c", consumer) as decode, trio.open_nursery() as nursery:
        process = await world.start(nursery, "p", producer)
        offer = offered(process.engine, producer, after=gate)
        errors: list[FerryError] = []

        async def pull() -> None:
            errors.append(await failure(decode, offer.ticket))

        nursery.start_soon(pull)
        await trio.sleep(1)
        started = trio.current_time()
        await process.leave()
        assert trio.current_time() - started < 1.5
        assert gate.running == 0
        assert offer.outcome is OfferOutcome.WITHDRAWN
        await trio.sleep(1)
        at_base(decode)
    assert len(errors) == 1
    assert consumer.is_untouched()


async def test_a_callable_that_fails_in_its_cancellation_harms_no_engine(
    autojump_clock,
) -> None:
    """Also as one of several tasks, beside the cancellation itself."""
    world, producer, consumer = World(), Pool(), Pool()

    async def clumsy() -> None:
        async def fail_late() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise ZeroDivisionError("while cancelled")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail_late)
            await trio.sleep_forever()

    async with world.pair(producer, consumer) as (prefill, decode):
        offer = offered(prefill, producer, after=clumsy)
        await trio.sleep(1)
        offer.withdraw()
        await trio.sleep(1)
        assert offer.cause is None
        offer = offered(prefill, producer)
        with trio.move_on_after(1) as scope:
            await decode.pull(offer.ticket, {GROUP: OURS}, after=clumsy)
        assert scope.cancelled_caught
        again = offered(prefill, producer, "again")
        await decode.pull(again.ticket, {GROUP: OURS})


async def test_a_reader_that_does_not_wait_is_not_believed(autojump_clock) -> None:
    """A forged ticket that says ready: refused, whatever it read, and not released."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = offered(prefill, producer, after=Gate())
        plain = offer.ticket.to_dict()
        plain["ranks"][0]["ready"] = True
        error = await failure(decode, Ticket.from_dict(plain))
        assert isinstance(error, ProtocolViolation)
        assert error.phase == "confirming"
        assert error.untrusted
        offer.withdraw()


# What can be given.


@pytest.mark.parametrize("after", [1.0, "event", object(), True])
async def test_what_is_neither_is_refused_before_anything_begins(
    autojump_clock, after
) -> None:
    """By both calls, naming what they got."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        name = type(after).__name__
        with pytest.raises(MisuseError, match=f"not a {name}"):
            offered(prefill, producer, after=after)
        offer = offered(prefill, producer)
        with pytest.raises(MisuseError, match=f"not a {name}"):
            await decode.pull(offer.ticket, {GROUP: OURS}, after=after)
        with pytest.raises(MisuseError, match=f"not a {name}"):
            await wait_for(after)
        assert decode._peers.dials.handshakes == 0
        offer.withdraw()


async def test_a_callable_that_returns_nothing_to_wait_for_is_its_own_failure(
    autojump_clock,
) -> None:
    """A function where a coroutine function was meant has not waited for anything."""
    with pytest.raises(MisuseError, match="TypeError") as caught:
        await wait_for(lambda: None)  # type: ignore[arg-type,return-value]
    assert isinstance(caught.value.__cause__, TypeError)


# CUDA events.


async def test_a_cuda_event_is_looked_at_and_never_waited_for(
    autojump_clock, guarded_devices
) -> None:
    """With its device current; often at first, more rarely later, never late by much."""
    event = FakeEvent(at=trio.current_time() + 3.0)
    started = trio.current_time()
    await wait_for(event)
    late_s = trio.current_time() - event.at
    assert 0 <= late_s <= 0.002
    assert set(guarded_devices) == {event.device}
    gaps = [b - a for a, b in zip(event.looks, event.looks[1:], strict=False)]
    assert gaps[0] == pytest.approx(0.0002)
    assert max(gaps) == pytest.approx(0.002)
    assert event.looks[0] == started


async def test_l8_cuda_events_on_both_sides(autojump_clock, guarded_devices) -> None:
    """The same as with callables."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        now = trio.current_time()
        theirs, ours = FakeEvent(at=now + 2.0), FakeEvent(at=now + 5.0)
        offer = offered(prefill, producer, after=theirs)
        assert not offer.ticket.ranks[0].ready
        async with trio.open_nursery() as nursery:

            async def pull() -> None:
                await decode.pull(offer.ticket, {GROUP: OURS}, after=ours)

            nursery.start_soon(pull)
            await trio.sleep(4.9)
            assert posts(world, decode) == 0
        assert trio.current_time() - now < 5.1
    consumer.check(OURS, num_tokens=7)


async def test_a_cuda_event_that_is_over_already_makes_a_ready_ticket(
    autojump_clock, guarded_devices
) -> None:
    """No task, no message: as without an event."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = offered(prefill, producer, after=FakeEvent(at=0.0))
        assert offer.ticket.ranks[0].ready
        await decode.pull(offer.ticket, {GROUP: OURS}, after=FakeEvent(at=0.0))
    consumer.check(OURS, num_tokens=7)


async def test_a_cuda_event_that_was_never_recorded_is_refused(
    autojump_clock, guarded_devices
) -> None:
    """CUDA calls it complete, and its caller has ordered nothing by it."""
    event = FakeEvent(at=0.0)
    event.device = None  # type: ignore[assignment]
    with pytest.raises(MisuseError, match="never recorded"):
        await wait_for(event)


async def test_a_cuda_event_that_fails_fails_the_pull(
    autojump_clock, guarded_devices, monkeypatch
) -> None:
    """A kernel that crashed says so when its event is looked at."""
    world, producer, consumer = World(), Pool(), Pool()

    def crash(_self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async with world.pair(producer, consumer) as (prefill, decode):
        offer, event = offered(prefill, producer), FakeEvent(at=0.0)
        monkeypatch.setattr(FakeEvent, "query", crash)
        error = await failure(decode, offer.ticket, after=event)
        assert isinstance(error, MisuseError)
        assert "illegal memory access" in error.detail
        with pytest.raises(MisuseError, match="illegal memory access"):
            offered(prefill, producer, "s", after=event)
        assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.is_untouched()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_a_real_cuda_event_is_waited_for() -> None:
    """Recorded behind a kernel that takes its time: over only when that is."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with pytest.raises(MisuseError, match="never recorded"):
        await wait_for(torch.cuda.Event())  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    assert not event.query()  # type: ignore[no-untyped-call]
    await wait_for(event)
    assert event.query()  # type: ignore[no-untyped-call]
