"""Every request ends in exactly one outcome, and it is the right one (cases o1 to o8)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    FerryError,
    HandshakeRefused,
    LeaseExpired,
    MisuseError,
    OfferOutcome,
    OfferSpent,
    PeerLost,
    PeerUnreachable,
    Span,
    TransferFailed,
    UnknownBlock,
    UnknownOffer,
    WrongPeer,
)
from kvferry.engine.fabric import Progress
from kvferry.engine.fabric.faults import CallFault, TransferFault
from kvferry.protocol.lifecycle.pull import ConfirmArrived, WaveSettled
from kvferry.protocol.link import Confirmed
from kvferry.protocol.ranges import Ranges
from kvferry.protocol.ticket import TicketSpan
from tests.kit import (
    GROUP,
    IDENTITY,
    POISON,
    Pool,
    Steps,
    World,
    address,
    agent,
    at_base,
    offer_all,
)

SLOW = {"poll_s": 0.02, "offered_poll_s": 0.2, "idle_poll_s": 0.5}


# o1: five typed failures, never "done".


async def test_o1_a_request_that_nobody_offered(autojump_clock) -> None:
    """The producer has never heard of the offer: UnknownOffer."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        ticket = msgspec.structs.replace(offer.ticket, request_id="another")
        with pytest.raises(UnknownOffer) as caught:
            await decode.pull(ticket, {GROUP: [2]})
        assert offer.outcome is None
        # A guessed offer id is no better than a guessed request.
        rank = msgspec.structs.replace(offer.ticket.ranks[0], offer_id="guessed")
        ticket = msgspec.structs.replace(offer.ticket, ranks=(rank,))
        with pytest.raises(UnknownOffer):
            await decode.pull(ticket, {GROUP: [2]})
        assert offer.outcome is None
        offer.withdraw()
    assert caught.value.request_id == "another"
    assert caught.value.peer is not None


@pytest.mark.parametrize("bad", [16, 99, 2**31 - 1])
async def test_o1_consumer_ids_out_of_range(autojump_clock, bad) -> None:
    """A block id beyond the consumer's pool: UnknownBlock, and nothing was written."""
    world, producer, consumer = World(), Pool(), Pool(16)
    async with world.pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([1, 2], num_tokens=8)
        offer = prefill.offer("r", blocks, num_tokens=8)
        with pytest.raises(UnknownBlock, match=str(bad)) as caught:
            await decode.pull(offer.ticket, {GROUP: [2, bad]})
        assert await offer.wait() is OfferOutcome.RELEASED
    assert not caught.value.untrusted
    assert consumer.is_untouched()


@pytest.mark.parametrize("bad", [16, 2**31 - 1])
async def test_o1_producer_ids_out_of_range(autojump_clock, bad) -> None:
    """A ticket with a block id beyond the producer's pool: UnknownBlock."""
    world, producer, consumer = World(), Pool(16), Pool(99)
    async with world.pair(producer, consumer) as (prefill, decode):
        blocks = producer.stamp([1, 2], num_tokens=8)
        with pytest.raises(UnknownBlock, match=str(bad)):
            prefill.offer("r", {GROUP: [1, bad]}, num_tokens=8)
        offer = prefill.offer("r", blocks, num_tokens=8)
        spans = {GROUP: TicketSpan((1, bad))}
        ticket = msgspec.structs.replace(offer.ticket, spans=spans)
        with pytest.raises(UnknownBlock, match=str(bad)):
            await decode.pull(ticket, {GROUP: [2, 3]})
        assert await offer.wait() is OfferOutcome.RELEASED
    assert consumer.is_untouched()


async def test_o1_a_ticket_that_was_used_before(autojump_clock) -> None:
    """A ticket is read once: OfferSpent, and what it brought before stays."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        await decode.pull(offer.ticket, {GROUP: [2]})
        with pytest.raises(OfferSpent) as caught:
            await decode.pull(offer.ticket, {GROUP: [3]})
        assert offer.outcome is OfferOutcome.RELEASED
    assert caught.value.request_id == "r"
    assert consumer.holds([2], num_tokens=4)


async def test_o1_a_ticket_of_an_earlier_generation(autojump_clock) -> None:
    """The producer was started anew at the same address: WrongPeer."""
    world, consumer = World(), Pool()
    async with world.engine("c", consumer) as decode:
        producer = Pool()
        blocks = producer.stamp([1], num_tokens=4)
        async with world.engine("p", producer) as prefill:
            ticket = prefill.offer("r", blocks, num_tokens=4).ticket
            where = address(prefill)
        async with world.engine("p", producer, listen=where) as prefill:
            again = prefill.offer("r", blocks, num_tokens=4)
            assert address(prefill) == where
            with pytest.raises(WrongPeer, match="started anew") as caught:
                await decode.pull(ticket, {GROUP: [2]})
            assert again.outcome is None
            await decode.pull(again.ticket, {GROUP: [2]})
        await trio.testing.wait_all_tasks_blocked()
        at_base(decode)
    assert caught.value.phase == "connecting"
    consumer.check([2], num_tokens=4)


@pytest.mark.parametrize("is_known", [False, True])
async def test_o1_a_lease_that_has_expired(autojump_clock, is_known) -> None:
    """Nobody accepted the ticket in time: LeaseExpired, also over an open link."""
    producer, consumer = Pool(), Pool()
    async with World().pair(producer, consumer, lease_s=5.0) as (prefill, decode):
        if is_known:
            warm = prefill.offer("w", producer.stamp([1], num_tokens=4), num_tokens=4)
            await decode.pull(warm.ticket, {GROUP: [2]})
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        await trio.sleep(5)
        with pytest.raises(LeaseExpired):
            await decode.pull(offer.ticket, {GROUP: [2]})
        assert offer.outcome is OfferOutcome.EXPIRED


async def test_o1_the_five_failures_are_five_types() -> None:
    """None of them is a kind of another."""
    five = (UnknownOffer, UnknownBlock, OfferSpent, WrongPeer, LeaseExpired)
    assert not any(
        issubclass(one, another) for one in five for another in five if one != another
    )


# o8: a handshake that fails never reaches the finish stage.


@pytest.mark.parametrize("how", ["refused", "unreachable", "secret", "silent"])
@pytest.mark.parametrize("tokens", [1, 5])
async def test_o8_no_handshake_no_finish_stage(autojump_clock, how, tokens) -> None:
    """The destination is untouched: not even the tails are zeroed."""
    world, producer, consumer = World(), Pool(), Pool()
    theirs = {"secret": b"1", "identity": IDENTITY}
    # Or the ticket itself would be refused, and nobody dialled.
    ours = {**theirs, "trusted": ["127.0.0.1"]}
    if how == "refused":
        ours["identity"] = msgspec.structs.replace(IDENTITY, revision="2")
    elif how == "secret":
        ours["secret"] = b"2"
    async with (
        world.engine("p", producer, **theirs) as prefill,
        world.engine("c", consumer, **ours) as decode,
    ):
        blocks = producer.stamp([1, 2], num_tokens=tokens)
        offer = prefill.offer("r", blocks, num_tokens=tokens)
        ticket = offer.ticket
        if how == "unreachable":
            rank = msgspec.structs.replace(ticket.ranks[0], port=1)
            ticket = msgspec.structs.replace(ticket, ranks=(rank,))
        elif how == "silent":
            world.streams.freeze(*address(prefill))
        with pytest.raises((HandshakeRefused, PeerUnreachable)) as caught:
            await decode.pull(ticket, {GROUP: Span([3, 4, 5])})
        await trio.sleep(30)
        assert caught.value.phase == "connecting"
        assert not caught.value.untrusted
        at_base(decode)
        assert decode.statistics()["peers"] == 0
    assert consumer.is_untouched()


# o2: a read that outlived its lease.


@pytest.mark.parametrize("is_renewed", [True, False])
async def test_o2_a_read_longer_than_its_lease(autojump_clock, is_renewed) -> None:
    """Read from 20 to 51 s of a lease of 30 s: done only if it was renewed in time."""
    world, producer, consumer = World(), Pool(), Pool()
    # Left to the lease alone; the silence of a link would end it earlier.
    times = {"lease_s": 30.0, "silence_s": 100.0}
    async with world.pair(producer, consumer, **times, **SLOW) as (
        prefill,
        decode,
    ):
        warm = prefill.offer("w", producer.stamp([9], num_tokens=4), num_tokens=4)
        await decode.pull(warm.ticket, {GROUP: [9]})
        consumer.fill([9], POISON)
        started = trio.current_time()
        offer = prefill.offer("r", producer.stamp([1, 2], num_tokens=8), num_tokens=8)
        await trio.sleep(20)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=31.0))
        if not is_renewed:
            world.streams.freeze(*address(prefill))

        async def producer_reuses() -> None:
            await trio.sleep_until(started + 30.001)
            assert (offer.outcome is None) is is_renewed
            if not is_renewed:
                assert offer.outcome is OfferOutcome.EXPIRED
            await trio.sleep_until(started + 51.1)
            assert not world.may_touch(consumer, [3, 4])  # all bytes have arrived
            world.streams.thaw(*address(prefill))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(producer_reuses)
            if is_renewed:
                await decode.pull(offer.ticket, {GROUP: [3, 4]})
            else:
                with pytest.raises(LeaseExpired) as caught:
                    await decode.pull(offer.ticket, {GROUP: [3, 4]})
        assert trio.current_time() - started == pytest.approx(51.1, abs=0.2)
    if is_renewed:
        consumer.check([3, 4], num_tokens=8)
        assert offer.outcome is OfferOutcome.RELEASED
    else:
        assert caught.value.untrusted == {GROUP: Ranges.of([(0, 8)])}
        assert offer.outcome is OfferOutcome.EXPIRED


# o3: one part of many fails.

O3_WAVES = 6


@pytest.mark.parametrize("how", [Progress.FAILED, Progress.LOST, "post"])
@pytest.mark.parametrize("k", range(1, O3_WAVES + 1))
async def test_o3_part_k_of_n_fails(autojump_clock, how, k) -> None:
    """Failed once, naming what cannot be trusted; the producer is free at once."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(
        producer, consumer, wave_bytes=2 * 2 * 4 * 3 * 8, window=3
    ) as (prefill, decode):
        blocks = producer.stamp([1, 2, 3, 4], num_tokens=15)
        offer = prefill.offer("r", blocks, num_tokens=15)
        if how == "post":
            error = TransferFailed("an injected fault")
            rule = CallFault(fabric="c-*", method="post", nth=k, error=error)
        else:
            rule = TransferFault(fabric="c-*", nth=k, progress=how, recovers=True)
        world.network.faults.add(rule)
        with pytest.raises(TransferFailed, match="an injected fault") as caught:
            await decode.pull(offer.ticket, {GROUP: [5, 6, 7]}, computed_tokens=4)
        if how != Progress.LOST:
            assert not world.may_touch(consumer, [5, 6, 7])
        await trio.sleep(0.5)
        # Whatever was in flight has landed by now, and nothing was posted since.
        assert offer.outcome is OfferOutcome.RELEASED
    assert caught.value.untrusted == {GROUP: Ranges.of([(4, 16)])}  # whole units
    assert caught.value.phase == "reading"
    assert caught.value.request_id == "r"
    assert len(world.logged("pull_failed")) == 1
    assert not world.logged("pull_done")


async def test_o3_a_pull_of_so_many_parts_is_done(autojump_clock) -> None:
    """The same without the fault has exactly as many parts as were tried."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(
        producer, consumer, wave_bytes=2 * 2 * 4 * 3 * 8, window=3
    ) as (prefill, decode):
        blocks = producer.stamp([1, 2, 3, 4], num_tokens=15)
        offer = prefill.offer("r", blocks, num_tokens=15)
        report = await decode.pull(offer.ticket, {GROUP: [5, 6, 7]}, computed_tokens=4)
    assert report.waves == O3_WAVES
    assert world.network.faults.calls[agent(decode), "post"] == report.waves


# o5: stop all input, in every phase.

O5 = {
    "lease_s": 4.0,
    "pull_deadline_s": 3.0,
    "connect_timeout_s": 2.0,
    "handshake_timeout_s": 2.0,
    "drain_grace_s": 1.0,
    "wave_bytes": 200,
    "window": 2,
    **SLOW,
}


async def starved(at_step: int, *, is_cancelled: bool) -> tuple[int, str]:
    """Freeze everything at one step of a pull, and let time pass.

    Returns:
        Steps of the pull up to its outcome, and where it was when it failed.
    """
    world, producer, consumer = World(), Pool(), Pool()
    ours = [5, 6]
    async with world.pair(producer, consumer, **O5) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1, 2], num_tokens=7), num_tokens=7)
        posts_before = []
        scope = trio.CancelScope()

        def stop_all_input() -> None:
            world.network.freeze("*")
            world.streams.freeze(*address(prefill))
            world.streams.freeze(*address(decode))
            posts_before.append(world.network.faults.calls[agent(decode), "post"])
            if is_cancelled:
                scope.cancel()

        phase = "done"
        started = trio.current_time()
        with Steps(at_step, stop_all_input) as steps, scope:
            try:
                await decode.pull(offer.ticket, {GROUP: ours})
            except FerryError as error:
                phase = f"{error.phase}: {type(error).__name__}"
        taken = steps.taken
        if scope.cancelled_caught:
            phase = "cancelled"
        # By time: the deadline, and the grace of a drain.
        assert trio.current_time() - started <= 3.0 + 1.0 + 0.01
        if posts_before:
            posts = world.network.faults.calls[agent(decode), "post"]
            assert posts - posts_before[0] <= O5["window"]  # those of that very step
        held = decode.quarantine.blocks(GROUP)
        assert world.may_touch(consumer, ours) <= bool(held)
        if not held and phase != "done":
            consumer.fill(ours, 7.0)
        # The producer is free by time alone.
        await trio.sleep(8)
        assert offer.outcome is not None
        assert decode.quarantine.blocks(GROUP) == held
        if posts_before:
            world.network.thaw("*")
            world.streams.thaw(*address(prefill))
            world.streams.thaw(*address(decode))
        await decode.quarantine.wait_empty()
        if not held and phase != "done":
            assert consumer.is_filled(ours, 7.0)
        await trio.sleep(5)
    return taken, phase


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_o5_all_input_stops_at_any_step(autojump_clock, is_cancelled) -> None:
    """It ends by time, submits nothing new, and gives everything back."""
    steps, phase = await starved(0, is_cancelled=is_cancelled)
    assert phase == "done"
    phases = set()
    for at_step in range(1, steps + 1):
        _, phase = await starved(at_step, is_cancelled=is_cancelled)
        phases.add(phase)
    if is_cancelled:
        assert phases >= {"cancelled"}
    else:
        assert phases >= {
            "connecting: PeerUnreachable",
            "reading: DeadlineExceeded",
            "confirming: DeadlineExceeded",
        }


# o6 and o7: counting.


async def test_o6_one_completion_three_times_and_another_never(autojump_clock) -> None:
    """Three of one are not one of each: not done."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(
        producer, consumer, wave_bytes=1, window=4, pull_deadline_s=8.0, **SLOW
    ) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        world.network.faults.add(TransferFault(fabric="c-*", nth=2, delay_s=12.0))

        async def doubles() -> None:
            await trio.sleep(4)
            pull = decode._pulls._active["r", 0]
            for _ in range(3):
                pull.feed(WaveSettled(0))
                pull.feed(ConfirmArrived(0))
            await trio.sleep(1)
            assert offer.outcome is None

        async with trio.open_nursery() as nursery:
            nursery.start_soon(doubles)
            with pytest.raises(DeadlineExceeded) as caught:
                await decode.pull(offer.ticket, {GROUP: [3]})
        assert not world.may_touch(consumer, [3])
    assert caught.value.phase == "reading"
    assert caught.value.untrusted


async def test_o6_one_source_confirms_three_times_and_the_other_never(
    autojump_clock,
) -> None:
    """Each source's own word is needed: not done."""
    world, consumer = World(), Pool()
    pools = [Pool(tp=(i, 2)) for i in range(2)]
    async with (
        world.instance("p", pools, **SLOW) as ranks,
        world.engine("c", consumer, pull_deadline_s=8.0, **SLOW) as decode,
    ):
        _, warm = offer_all(ranks, pools, "w", [1], num_tokens=4)
        await decode.pull(warm, {GROUP: [9]})
        offers, ticket = offer_all(ranks, pools, "r", [1], num_tokens=4)
        world.streams.freeze(*address(ranks[1]))

        async def doubles() -> None:
            await trio.sleep(4)
            (peer,) = (p for p in decode._peers._peers.values() if p.key.rank.tp == 0)
            for _ in range(3):
                peer.deliver(Confirmed(peer.key, "r", 1, 1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(doubles)
            with pytest.raises(DeadlineExceeded) as caught:
                await decode.pull(ticket, {GROUP: [3]})
        world.streams.thaw(*address(ranks[1]))
        await trio.sleep(1)
        assert [o.outcome for o in offers] == [OfferOutcome.RELEASED] * 2
        for engine in (*ranks, decode):
            at_base(engine)
    assert caught.value.phase == "confirming"


@pytest.mark.parametrize("last", range(6))
@pytest.mark.parametrize("seed", range(2))
async def test_o7_five_of_six_parts_are_not_done(autojump_clock, last, seed) -> None:
    """3 layers x 2 sources in any order: done with the sixth, and once."""
    world, consumer = World(seed=seed), Pool(layers=3)
    pools = [Pool(layers=3, tp=(i, 2)) for i in range(2)]
    part_bytes = 2 * 2 * 4 * 3 * 8  # of a layer and a rank: 2 blocks
    async with (
        world.instance("p", pools, **SLOW) as ranks,
        world.engine("c", consumer, wave_bytes=part_bytes, window=6, **SLOW) as decode,
    ):
        offers, ticket = offer_all(ranks, pools, "r", [1, 2], num_tokens=8)
        order = np.random.default_rng(seed).permutation(6)
        for number in range(6):
            late = 9.0 if number == last else float(order[number])
            world.network.faults.add(
                TransferFault(fabric="c-*", nth=number + 1, delay_s=late)
            )
        done_at: list[float] = []

        async def pull() -> None:
            report = await decode.pull(ticket, {GROUP: [3, 4]})
            assert report.waves == 6
            done_at.append(trio.current_time() - started)

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pull)
            await trio.sleep(8.9)
            # No source but the one with the sixth part has been asked.
            assert not done_at
            assert sum(offer.outcome is None for offer in offers) == 1
        assert done_at == [pytest.approx(9.0, abs=0.1)]
        await trio.testing.wait_all_tasks_blocked()
        for engine in (*ranks, decode):
            at_base(engine)
    consumer.check([3, 4], num_tokens=8)
    assert len(world.logged("pull_done")) == 1


# o4: an exception in any fabric call, at any position.


async def two_requests(world, fault=None) -> tuple[dict[str, object], list[str]]:
    """Two pulls at once from two producers, a third afterwards, then all peers go.

    Returns:
        The outcome of each request, and which of the first two were exact.
    """
    pools = {"p": Pool(), "q": Pool()}
    consumer = Pool()
    outcomes: dict[str, object] = {}
    blocks = {"p": [1, 2], "q": [3, 4], "after": [5, 6]}
    async with world.engine("c", consumer, wave_bytes=100, **O4_LOOKS) as decode:
        async with (
            world.engine("p", pools["p"], **O4_LOOKS) as first,
            world.engine("q", pools["q"], **O4_LOOKS) as second,
        ):
            engines = {"p": first, "q": second}
            if fault is not None:
                world.network.faults.add(fault)

            async def request(name, whose, salt) -> None:
                given = pools[whose].stamp([7, 8], num_tokens=7, salt=salt)
                offer = engines[whose].offer(name, given, num_tokens=7)
                try:
                    await decode.pull(offer.ticket, {GROUP: blocks[name]})
                except FerryError as error:
                    outcomes[name] = error
                    if error.phase == "connecting":
                        # Who could not be reached is not dialled for a decline.
                        offer.withdraw()
                else:
                    outcomes[name] = "done"
                    assert consumer.holds(blocks[name], num_tokens=7, salt=salt)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(request, "p", "p", 1)
                nursery.start_soon(request, "q", "q", 2)
            await trio.sleep(1)
            at_base_but(
                decode, "fabric_transfers" if fault_is(fault, "release") else ""
            )
            await request("after", "q", 3)
            await trio.sleep(0.5)
            for engine in engines.values():
                at_base(engine)
        await trio.sleep(1)
        live = decode.statistics()
        assert live["peers"] == 0, live
        assert live["pulls"] == live["quarantine"] == live["unsettled_transfers"] == 0
        if fault_is(fault, "discard"):
            assert live["fabric_prepared"] <= 1  # the one that could not be discarded
        elif not fault_is(fault, "release"):
            assert live["fabric_prepared"] == 0, live
        if not fault_is(fault, "disconnect"):
            assert live["fabric_peers"] == 0, live
        assert not decode._peers._undiscarded
    return outcomes, [name for name in ("p", "q") if outcomes[name] == "done"]


O4_LOOKS = {"poll_s": 0.002, "offered_poll_s": 0.05, "idle_poll_s": 0.1}


def fault_is(fault, method) -> bool:
    return fault is not None and fault.method == method


def at_base_but(engine, exempt) -> None:
    """At base, except for what the fault itself has kept the fabric from giving back."""
    if exempt:
        live = engine.statistics()
        assert live[exempt] <= 1, live
        assert live["pulls"] == live["quarantine"] == live["unsettled_transfers"] == 0
    else:
        at_base(engine)


O4_METHODS = ("connect", "prepare", "post", "poll", "release", "take_notices")
O4_LATE = ("discard", "disconnect")


@pytest.mark.parametrize("method", [*O4_METHODS, *O4_LATE])
async def test_o4_an_exception_in_any_call_of_the_consumer(
    autojump_clock, method
) -> None:
    """One request fails at most, by type; the others are done and exact; the pump lives."""
    clean = World()
    outcomes, _ = await two_requests(clean)
    assert outcomes == {"p": "done", "q": "done", "after": "done"}
    (name,) = clean.network.names("c-*")
    calls = clean.network.faults.calls[name, method]
    assert calls >= 2
    failures = 0
    for nth in range(1, calls + 1, 1 if calls < 60 else calls // 40):
        error = PeerLost("an injected fault")
        fault = CallFault(fabric="c-*", method=method, nth=nth, error=error)
        outcomes, done = await two_requests(World(), fault)
        bad = [outcome for outcome in outcomes.values() if outcome != "done"]
        assert len(bad) <= 1, (nth, outcomes)
        failures += len(bad)
        for failure in bad:
            assert isinstance(failure, PeerLost), (nth, failure)
            assert failure.request_id in outcomes
        assert done or bad
    if method in {"connect", "prepare", "post"}:
        assert failures >= 2
    if method in {"release", "take_notices", *O4_LATE}:
        assert failures == 0


@pytest.mark.parametrize("method", ["take_notices", "poll", "notify"])
async def test_o4_an_exception_in_every_call_of_the_producer(
    autojump_clock, method
) -> None:
    """A producer only looks for notices: it serves on."""
    world, producer, consumer = World(), Pool(), Pool()
    error = PeerLost("an injected fault")
    world.network.faults.add(
        CallFault(fabric="p-*", method=method, nth=None, error=error)
    )
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        await decode.pull(offer.ticket, {GROUP: [3]})
    consumer.check([3], num_tokens=4)


@pytest.mark.parametrize("method", ["register", "metadata"])
async def test_o4_an_exception_while_opening(autojump_clock, method) -> None:
    """The engine does not open, says why as itself, and leaves the network."""
    world = World()
    error = MisuseError("an injected fault")
    world.network.faults.add(CallFault(method=method, error=error))
    with pytest.raises(MisuseError, match="an injected fault"):
        async with world.engine("p", Pool()):
            pytest.fail("it opened")
    (name,) = world.network.names()
    assert world.network.faults.calls[name, "close"] == 1


async def test_o4_a_transfer_that_is_lost_for_good(autojump_clock) -> None:
    """Its blocks are in quarantine, named, for as long as nobody knows more."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.engine("p", producer) as prefill:
        async with world.engine("c", consumer) as decode:
            world.network.faults.add(
                TransferFault(fabric="c-*", progress=Progress.LOST)
            )
            offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
            with pytest.raises(TransferFailed):
                await decode.pull(offer.ticket, {GROUP: [3]})
            (entry,) = decode.quarantine
            assert decode.quarantine.blocks(GROUP) == {3}
            assert entry.request_id == "r"
            assert isinstance(entry.reason, TransferFailed)
            assert "p/" in entry.peer
            # Others are not held up.
            offer = prefill.offer("s", producer.stamp([2], num_tokens=4), num_tokens=4)
            await decode.pull(offer.ticket, {GROUP: [4]})
            await trio.sleep(60)
            assert decode.quarantine.blocks(GROUP) == {3}
        (closed,) = world.logged("closed_undrained")
        assert closed["blocks"] == {GROUP: [3]}
        at_base(prefill)
