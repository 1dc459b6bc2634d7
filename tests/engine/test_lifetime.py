"""No byte lands in a block that was given back, and nothing is left over (cases l1 to l7)."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    EngineClosed,
    FerryError,
    LeaseExpired,
    MisuseError,
    OfferOutcome,
    PeerLost,
    TransferFailed,
)
from kvferry.engine.fabric import Progress
from kvferry.engine.fabric.faults import CallFault, TransferFault
from kvferry.engine.opening import _KEPT
from tests.kit import GROUP, Pool, World, address, agent, at_base, is_bare

REUSED = 7.0
OURS = [5, 6]


async def pull(engine, ticket, *, blocks=OURS, **options) -> FerryError | None:
    """Pull; the error, if it fails."""
    try:
        await engine.pull(ticket, {GROUP: blocks}, **options)
    except FerryError as error:
        return error
    return None


def offered(engine, pool, request_id="r"):
    """An offer of seven tokens in two blocks."""
    return engine.offer(request_id, pool.stamp([1, 2], num_tokens=7), num_tokens=7)


# l1: abort while the peer is stopped; it goes on 3 s later.


async def abort_frozen(*, grace_s: float, how: str) -> None:
    """Cancel a pull from a frozen peer, reuse what is given back, let the peer go on."""
    world, consumer = World(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine(
            "c", consumer, drain_grace_s=grace_s, wave_bytes=200, window=2
        ) as decode,
    ):
        producer = Pool()
        process = await world.start(nursery, "p", producer, lease_s=60.0)
        offer = offered(process.engine, producer)
        frozen_at: list[float] = []

        def freeze() -> None:
            frozen_at.append(trio.current_time())
            process.freeze()

        # In the middle of the read: some waves have landed, some are in flight.
        world.network.faults.add(
            CallFault(fabric="c-*", method="post", nth=3, action=freeze)
        )

        async def thaw() -> None:
            await trio.sleep(3.2)
            assert world.may_touch(consumer, OURS) or grace_s > 3
            process.thaw()

        nursery.start_soon(thaw)
        given_back_at = []
        if how == "cancel":
            with trio.move_on_after(0.2) as scope:
                await pull(decode, offer.ticket)
            assert scope.cancelled_caught
        else:
            error = await pull(decode, offer.ticket, deadline_s=0.2)
            assert isinstance(error, DeadlineExceeded)
        given_back_at.append(trio.current_time() - frozen_at[0])
        held = decode.quarantine.blocks(GROUP)
        if grace_s < 3:
            assert held == set(OURS)
            assert given_back_at[0] == pytest.approx(0.2 + grace_s, abs=0.1)
            assert world.may_touch(consumer, OURS)
        else:
            assert not held
            assert given_back_at[0] == pytest.approx(3.2, abs=0.1)
        await decode.quarantine.wait_empty()
        assert trio.current_time() - frozen_at[0] == pytest.approx(3.2, abs=0.1)
        # Now they are the caller's, who reuses them at once.
        assert not world.may_touch(consumer, OURS)
        consumer.fill(OURS, REUSED)
        await trio.sleep(10)
        assert consumer.is_filled(OURS, REUSED)
        assert offer.outcome is OfferOutcome.RELEASED
        at_base(decode)
        at_base(process.engine)
        await process.leave()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("grace_s", [1.0, 10.0])
async def test_l1_abort_while_the_peer_is_stopped(autojump_clock, grace_s, how) -> None:
    """Held in the drain or in quarantine until the last byte has landed."""
    await abort_frozen(grace_s=grace_s, how=how)


async def test_l1_a_peer_that_dies_while_stopped_frees_the_quarantine(
    autojump_clock,
) -> None:
    """Dead transports settle: the blocks come back without a thaw."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", consumer, drain_grace_s=1.0) as decode,
    ):
        process = await world.start(nursery, "p", producer)
        offer = offered(process.engine, producer)
        world.network.faults.add(
            CallFault(fabric="c-*", method="poll", action=process.freeze)
        )
        assert isinstance(
            await pull(decode, offer.ticket, deadline_s=1.0), DeadlineExceeded
        )
        assert decode.quarantine.blocks(GROUP) == set(OURS)
        await trio.sleep(5)
        assert decode.quarantine.blocks(GROUP) == set(OURS)
        # Not even the engine itself may land anything else in them.
        with pytest.raises(MisuseError, match="in quarantine"):
            await decode.pull(offer.ticket, {GROUP: OURS})
        process.kill()
        await decode.quarantine.wait_empty()
        consumer.fill(OURS, REUSED)
        await trio.sleep(5)
        assert consumer.is_filled(OURS, REUSED)
        is_bare(decode)


# l2: several transfers of one request; one fails first.


@pytest.mark.parametrize("first", range(1, 5))
async def test_l2_blocks_stay_held_until_the_last_is_terminal(
    autojump_clock, first
) -> None:
    """One of four fails at 1 s, the last lands at 5 s: failed once, at 5 s."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, wave_bytes=100, window=4) as (
        prefill,
        decode,
    ):
        offer = offered(prefill, producer)
        for number in range(1, 5):
            fails = number == first
            world.network.faults.add(
                TransferFault(
                    fabric="c-*",
                    nth=number,
                    delay_s=1.0 if fails else 5.0,
                    progress=Progress.FAILED if fails else Progress.DONE,
                )
            )
        started = trio.current_time()
        error = await pull(decode, offer.ticket)
        assert isinstance(error, TransferFailed)
        assert trio.current_time() - started == pytest.approx(5, abs=0.1)
        assert not world.may_touch(consumer, OURS)
        assert world.network.faults.calls[agent(decode), "post"] == 4
        consumer.fill(OURS, REUSED)
        await trio.sleep(5)
        assert consumer.is_filled(OURS, REUSED)
        assert offer.outcome is OfferOutcome.RELEASED
    assert len(world.logged("pull_failed")) == 1


async def test_l2_two_failures_are_one_outcome(autojump_clock) -> None:
    """The first cause stays, however many follow."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, wave_bytes=100, window=4) as (
        prefill,
        decode,
    ):
        for number in range(1, 5):
            world.network.faults.add(
                TransferFault(
                    fabric="c-*",
                    nth=number,
                    delay_s=float(5 - number),
                    progress=Progress.FAILED,
                    cause=TransferFailed(f"number {number}"),
                )
            )
        error = await pull(decode, offered(prefill, producer).ticket)
        assert isinstance(error, TransferFailed)
        assert error.detail == "number 4"
    assert len(world.logged("pull_failed")) == 1


# l6: leaving the engine with transfers in flight.


@pytest.mark.parametrize("state", ["alive", "dead", "stopped"])
@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_l6_the_consumer_leaves_with_transfers_in_flight(
    autojump_clock, state, how
) -> None:
    """It drains, names what it could not drain, and a live peer serves on."""
    world, producer, consumer = World(), Pool(), Pool()
    errors: list[FerryError | None] = []
    async with trio.open_nursery() as nursery:
        prefill = await world.start(nursery, "p", producer, lease_s=30.0)
        process = await world.start(nursery, "c", consumer, drain_grace_s=2.0)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=1.0))
        offer = offered(prefill.engine, producer)

        async def pulls() -> None:
            errors.append(await pull(process.engine, offer.ticket))

        nursery.start_soon(pulls)
        await trio.sleep(0.5)
        assert process.engine.statistics()["unsettled_transfers"] == 1
        if state == "dead":
            prefill.kill()
        elif state == "stopped":
            prefill.freeze()
        started = trio.current_time()
        if how == "leave":
            await process.leave()
        else:
            process.scope.cancel()
            await process.ended.wait()
        took_s = trio.current_time() - started
        assert isinstance(errors[0], EngineClosed | PeerLost)
        undrained = world.logged("closed_undrained")
        if state == "stopped":
            assert took_s == pytest.approx(2, abs=1.2)
            assert [entry["blocks"] for entry in undrained] == [{GROUP: OURS}]
            assert [entry["request"] for entry in undrained] == ["r"]
            kept = world.logged("agent_kept")
            assert [entry["requests"] for entry in kept] == [["r"]]
            assert prefill.engine.key.engine_id in kept[0]["peers"][0]
        else:
            assert took_s < 1.1
            assert not undrained
            assert not world.logged("agent_kept")
        # Whatever happens, no agent is destroyed under a transfer.
        assert not world.network.closed_in_flight
        if state == "alive":
            # It was told at once, and serves the next one.
            await trio.sleep(0.1)
            assert offer.outcome is OfferOutcome.RELEASED
            async with world.engine("d", Pool()) as another:
                offer = offered(prefill.engine, producer, "s")
                assert await pull(another, offer.ticket) is None
            at_base(prefill.engine)
            await prefill.leave()
        elif state == "stopped":
            # The engine is gone, and the bytes land all the same: in memory that is
            # still there, and still said not to be safe.
            assert process.engine in _KEPT
            assert process.engine.quarantine.blocks(GROUP) == set(OURS)
            assert world.may_touch(consumer, OURS)
            consumer.fill(OURS, REUSED)
            prefill.thaw()
            assert not consumer.is_filled(OURS, REUSED)
            await prefill.leave()
    consumer.fill(OURS, REUSED)
    assert not world.may_touch(consumer, OURS)


async def test_l6_the_producer_leaves_while_it_is_read(autojump_clock) -> None:
    """The offer is withdrawn, the reader fails, and nobody's process is lost."""
    world, producer, consumer = World(), Pool(), Pool()
    async with trio.open_nursery() as nursery:
        prefill = await world.start(nursery, "p", producer)
        process = await world.start(nursery, "c", consumer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=1.0))
        offer = offered(prefill.engine, producer)
        nursery.start_soon(prefill.leave)
        error = await pull(process.engine, offer.ticket)
        assert isinstance(error, FerryError)
        assert offer.outcome is OfferOutcome.WITHDRAWN
        await trio.sleep(2)
        is_bare(process.engine)
        await process.leave()


async def test_l6_the_producer_leaves_while_a_stopped_reader_reads(
    autojump_clock,
) -> None:
    """It waits no longer than its goodbyes may take, and its agent had no transfers."""
    world, producer, consumer = World(), Pool(), Pool()
    async with trio.open_nursery() as nursery:
        prefill = await world.start(nursery, "p", producer)
        process = await world.start(nursery, "c", consumer, drain_grace_s=1.0)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=1.0))
        offer = offered(prefill.engine, producer)
        nursery.start_soon(pull, process.engine, offer.ticket)
        await trio.sleep(0.5)
        world.network.freeze(agent(process.engine))
        world.streams.freeze(*address(prefill.engine))
        started = trio.current_time()
        await prefill.leave()
        assert trio.current_time() - started < 2
        assert offer.outcome is OfferOutcome.WITHDRAWN
        assert not [e for e in world.logged("agent_kept") if "p/" in e["engine"]]
        world.network.thaw(agent(process.engine))
        world.streams.thaw(*address(prefill.engine))
        await trio.sleep(30)
        is_bare(process.engine)
        await process.leave()


async def test_l6_what_was_in_quarantine_before(autojump_clock) -> None:
    """Had its grace: the engine leaves at once, says what it leaves, and keeps it."""
    world, producer, consumer = World(), Pool(), Pool()
    async with trio.open_nursery() as nursery:
        prefill = await world.start(nursery, "p", producer)
        process = await world.start(nursery, "c", consumer, drain_grace_s=2.0)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=60.0))
        offer = offered(prefill.engine, producer)
        error = await pull(process.engine, offer.ticket, deadline_s=1.0)
        assert isinstance(error, DeadlineExceeded)
        assert process.engine.quarantine.blocks(GROUP) == set(OURS)
        started = trio.current_time()
        await process.leave()
        assert trio.current_time() - started < 0.1
        (undrained,) = world.logged("closed_undrained")
        assert undrained["blocks"] == {GROUP: OURS}
        (kept,) = world.logged("agent_kept")
        assert kept["agent"] == agent(process.engine)
        assert kept["unsettled_transfers"] == 1
        calls = world.network.faults.calls
        assert calls[agent(process.engine), "close"] == 0
        assert process.engine in _KEPT
        await prefill.leave()


async def test_a_closing_engine_takes_nothing_new(autojump_clock) -> None:
    """Offers, pulls and declines are EngineClosed, while and after it closes."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.engine("p", producer) as prefill:
        offer = offered(prefill, producer)
        async with world.engine("c", consumer) as decode:
            pass
        with pytest.raises(EngineClosed):
            await decode.pull(offer.ticket, {GROUP: OURS})
        with pytest.raises(EngineClosed):
            await decode.decline(offer.ticket)
        with pytest.raises(EngineClosed):
            decode.offer("s", {GROUP: [1]}, num_tokens=1)


async def test_an_error_in_the_body_comes_out_as_itself(autojump_clock) -> None:
    """The engine's nurseries are its own business."""
    world = World()
    with pytest.raises(LeaseExpired, match="mine"):
        async with world.engine("p", Pool()):
            raise LeaseExpired("mine")
    with pytest.raises(ExceptionGroup, match="mine") as caught:
        async with world.engine("p", Pool()):
            raise ExceptionGroup("mine", [ValueError("1")])
    assert [type(error) for error in caught.value.exceptions] == [ValueError]


# l7: many cancelled pulls.


async def test_l7_hundreds_of_cancelled_pulls(autojump_clock) -> None:
    """Cancelled at all sorts of moments: handles, rows, tasks are back to base."""
    world, producer, consumer = World(), Pool(), Pool()
    looks = {"poll_s": 0.0005, "wave_bytes": 100, "window": 2}
    async with world.pair(producer, consumer, **looks) as (prefill, decode):
        warm = offered(prefill, producer, "warm")
        assert await pull(decode, warm.ticket) is None
        await trio.testing.wait_all_tasks_blocked()
        base = decode.statistics(), prefill.statistics()
        tasks = trio.lowlevel.current_statistics().tasks_living
        outcomes = {True: 0, False: 0}
        for number in range(300):
            offer = offered(prefill, producer, f"r{number}")
            with trio.move_on_after(number % 37 * 0.0004) as scope:
                await pull(decode, offer.ticket)
            outcomes[scope.cancelled_caught] += 1
            assert not world.may_touch(consumer, OURS)
            consumer.fill(OURS, REUSED)
            with trio.fail_after(0.01):
                await offer.wait()
            assert consumer.is_filled(OURS, REUSED)
        assert min(outcomes.values()) > 20
        await trio.testing.wait_all_tasks_blocked()
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert (decode.statistics(), prefill.statistics()) == base
        assert not decode._pump._active
        assert not decode._pump._lost
        assert set(decode._pump._claims.values()) == {0}
        assert set(prefill._pump._claims.values()) == {0}
        assert len(decode._peers._undiscarded) == 1
        await trio.sleep(60)  # the leases of the ended ones are forgotten, too
        assert not prefill._offers._deadlines
    assert address(prefill)
