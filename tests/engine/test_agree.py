"""One outcome for what every rank of an instance does its part of."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from functools import partial

import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    EngineClosed,
    FerryError,
    InstanceIncomplete,
    MisuseError,
    OfferOutcome,
    PeerLost,
    Rank,
    RequestInUse,
    TransferError,
    TransferFailed,
)
from kvferry.engine.fabric import CallFault, TransferFault
from tests.kit import GROUP, Pool, Steps, World, address, at_base, offer_all

RANKS = Rank(tp_size=3).instance()


class Part:
    """One rank's part in an agreement, and what became of it.

    Attributes:
        outcome: What the call returned or raised.
        may_end: Let the work end.
        is_cancelled: Whether the work was.
    """

    def __init__(self, engine, *, fails: Exception | None = None, drain_s=0.0) -> None:
        self.engine = engine
        self.outcome: object = None
        self.may_end = trio.Event()
        self.is_cancelled = False
        self.ended_at = 0.0
        self.scope = trio.CancelScope()
        self._fails = fails
        self._drain_s = drain_s

    async def work(self) -> str:
        try:
            await self.may_end.wait()
        except trio.Cancelled:
            self.is_cancelled = True
            with trio.CancelScope(shield=True):
                await trio.sleep(self._drain_s)
            raise
        if self._fails is not None:
            raise self._fails
        return str(self.engine.key.rank)

    async def run(self, key="k", deadline_s=50.0) -> None:
        with self.scope:
            try:
                self.outcome = await self.engine.agree(
                    key, self.work, deadline_s=deadline_s
                )
            except (FerryError, ZeroDivisionError) as error:
                self.outcome = error
        self.ended_at = trio.current_time()


def same(*parts: Part, kind: type[FerryError], origin: Rank | None) -> FerryError:
    """All have raised the same."""
    first = parts[0].outcome
    assert isinstance(first, FerryError), first
    for part in parts:
        error = part.outcome
        assert type(error) is kind, error
        assert error.detail == first.detail
        assert error.peer == first.peer
        assert error.origin == (None if origin is None else str(origin))
    return first


async def settled(*engines) -> None:
    """Nothing of an agreement is left anywhere."""
    await trio.testing.wait_all_tasks_blocked()
    for engine in engines:
        at_base(engine)


@pytest.mark.parametrize("last", [0, 1, 2])
async def test_done_when_all_are(autojump_clock, last) -> None:
    """Nobody returns before the last rank's work has ended."""
    world = World()
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [Part(engine) for engine in engines]
        for part in parts:
            nursery.start_soon(part.run)
        for place, part in enumerate(parts):
            if place != last:
                part.may_end.set()
        await trio.sleep(5.0)
        assert [part.outcome for part in parts] == [None] * 3
        parts[last].may_end.set()
        await trio.sleep(0.01)
        assert [part.outcome for part in parts] == [str(rank) for rank in RANKS]
        await settled(*engines)


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_the_first_failure_is_everybody_s(autojump_clock, failing) -> None:
    """The others cancel their work, drain, and raise the same, which names the rank."""
    world = World()
    error = TransferFailed("no", peer="x", request_id="r", phase="reading")
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [
            Part(engine, fails=error if place == failing else None, drain_s=2.0)
            for place, engine in enumerate(engines)
        ]
        for part in parts:
            nursery.start_soon(part.run)
        done = parts[(failing + 1) % 3]
        done.may_end.set()
        await trio.sleep(1.0)
        parts[failing].may_end.set()
        started = trio.current_time()
        await trio.sleep(0.01)
        assert parts[failing].outcome is error
        assert done.outcome is not None
        await trio.sleep(5.0)
        same(*parts, kind=TransferFailed, origin=RANKS[failing])
        (other,) = [part for part in parts if part.is_cancelled]
        assert other.outcome.request_id == "r"
        assert other.outcome.phase == "reading"
        assert other.ended_at == pytest.approx(started + 2.0, abs=0.1)
        await settled(*engines)


async def test_two_fail_at_once_and_there_is_one_verdict(autojump_clock) -> None:
    """Whoever lost the race has its own error as context."""
    world = World()
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [
            Part(engine, fails=TransferFailed(f"no {place}"))
            for place, engine in enumerate(engines)
        ]
        for part in parts:
            part.may_end.set()
            nursery.start_soon(part.run)
        await trio.sleep(0.1)
        details = {part.outcome.detail for part in parts}
        assert len(details) == 1
        assert len({part.outcome.origin for part in parts}) == 1
        (detail,) = details
        losers = [part for part in parts if part.outcome is not part._fails]
        assert len(losers) == 2
        for part in losers:
            assert part.outcome.__context__ is part._fails
            assert part._fails.detail != detail
        await settled(*engines)


async def test_what_is_no_error_of_ours_fails_the_others_too(autojump_clock) -> None:
    """It goes on where it was raised; the others hear what it was."""
    world = World()
    bug = ZeroDivisionError("a bug of the caller's")
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [Part(engines[0]), Part(engines[1], fails=bug), Part(engines[2])]
        for part in parts:
            nursery.start_soon(part.run)
        parts[1].may_end.set()
        await trio.sleep(0.1)
        assert parts[1].outcome is bug
        error = same(parts[0], parts[2], kind=TransferError, origin=RANKS[1])
        assert "ZeroDivisionError" in str(error)
        await settled(*engines)


@pytest.mark.parametrize("when", ["working", "waiting"])
@pytest.mark.parametrize("cancelled", [0, 1])
async def test_a_caller_that_is_cancelled_fails_all(
    autojump_clock, cancelled, when
) -> None:
    """While it works, and while it waits for the others; the cancellation goes on."""
    world = World()
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [Part(engine) for engine in engines]
        for part in parts:
            nursery.start_soon(part.run)
        if when == "waiting":
            parts[cancelled].may_end.set()
        await trio.sleep(1.0)
        parts[cancelled].scope.cancel()
        await trio.sleep(0.1)
        assert parts[cancelled].scope.cancelled_caught
        others = [part for part in parts if part is not parts[cancelled]]
        error = same(*others, kind=TransferError, origin=RANKS[cancelled])
        assert "cancelled" in error.detail
        await settled(*engines)


async def test_a_rank_that_never_calls_is_named_at_the_deadline(autojump_clock) -> None:
    """Nobody waits longer than the first who voted."""
    world = World()
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [Part(engine) for engine in engines[:2]]
        started = trio.current_time()
        for part in parts:
            part.may_end.set()
            nursery.start_soon(partial(part.run, deadline_s=7.0))
        await trio.sleep(6.99)
        assert [part.outcome for part in parts] == [None] * 2
        await trio.sleep(0.1)
        error = same(*parts, kind=DeadlineExceeded, origin=RANKS[0])
        assert str(RANKS[2]) in error.detail
        assert str(RANKS[1]) not in error.detail
        assert parts[1].ended_at == pytest.approx(started + 7.0, abs=0.01)
        # It comes after all: at once, without any work.
        late = Part(engines[2])
        started = trio.current_time()
        await late.run()
        same(*parts, late, kind=DeadlineExceeded, origin=RANKS[0])
        assert late.ended_at == started
        await settled(*engines)


async def test_work_that_does_not_end_fails_at_the_deadline(autojump_clock) -> None:
    """The rank whose work it was is named."""
    world = World()
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [Part(engine) for engine in engines]
        for part in parts:
            nursery.start_soon(partial(part.run, deadline_s=9.0))
            await trio.sleep(0.1)
        for part in parts[1:]:
            part.may_end.set()
        await trio.sleep(20.0)
        assert parts[0].is_cancelled
        same(*parts, kind=DeadlineExceeded, origin=RANKS[0])
        await settled(*engines)


@pytest.mark.parametrize("how", ["killed", "left"])
@pytest.mark.parametrize("has_voted", [False, True])
async def test_the_death_of_a_rank_is_the_verdict(
    autojump_clock, how, has_voted
) -> None:
    """Whether its part was done or not; the others name it."""
    world = World()
    async with trio.open_nursery() as nursery:
        lead = await world.start(nursery, "p", Pool(), rank=RANKS[0])
        others = [
            await world.start(
                nursery, "p", Pool(), rank=rank, join=address(lead.engine)
            )
            for rank in RANKS[1:]
        ]
        processes = [lead, *others]
        for process in processes:
            await process.engine.instance_ready(5.0)
        parts = [Part(process.engine) for process in processes]
        for part in parts:
            nursery.start_soon(part.run)
        if has_voted:
            parts[2].may_end.set()
        parts[1].may_end.set()
        await trio.sleep(1.0)
        if how == "killed":
            processes[2].kill()
        else:
            await processes[2].leave()
            assert isinstance(parts[2].outcome, EngineClosed)
        await trio.sleep(0.1)
        for part in parts[:2]:
            assert type(part.outcome) is PeerLost
            assert part.outcome.origin == str(RANKS[2])
            assert part.outcome.peer == str(processes[2].engine.key)
        await settled(lead.engine, processes[1].engine)
        for process in (processes[1], lead):
            await process.leave()


async def test_nobody_waits_for_a_rank_that_was_started_anew(autojump_clock) -> None:
    """It never votes under the old key, and is back before anybody else has voted."""
    world = World()
    async with trio.open_nursery() as nursery:
        lead = await world.start(nursery, "p", Pool(), rank=RANKS[0])
        join = address(lead.engine)
        one, two = [
            await world.start(nursery, "p", Pool(), rank=rank, join=join)
            for rank in RANKS[1:]
        ]
        for process in (lead, one, two):
            await process.engine.instance_ready(5.0)
        # Two ranks have begun and not voted: the lead knows of no such key.
        parts = [Part(one.engine), Part(lead.engine)]
        for part in parts:
            nursery.start_soon(part.run)
        await trio.sleep(0.1)
        two.kill()
        again = await world.start(nursery, "p", Pool(), rank=RANKS[2], join=join)
        await again.engine.instance_ready(5.0)
        await trio.sleep(0.1)
        error = same(*parts, kind=PeerLost, origin=RANKS[2])
        assert two.engine.key.generation[:8] in error.detail
        # The new start does not know the key: the failure is its, too.
        late = Part(again.engine)
        late.may_end.set()
        await late.run()
        assert isinstance(late.outcome, PeerLost)
        # The next try has another key, and is done.
        parts = [Part(process.engine) for process in (lead, one, again)]
        for part in parts:
            part.may_end.set()
            nursery.start_soon(part.run, "next")
        await trio.sleep(0.1)
        assert [part.outcome for part in parts] == [str(rank) for rank in RANKS]
        await settled(lead.engine, one.engine, again.engine)
        for process in (again, one, lead):
            await process.leave()


async def test_the_word_of_a_rank_dies_with_it(autojump_clock) -> None:
    """It had voted, alone; its next start and the others do not make that "done"."""
    world = World()
    async with trio.open_nursery() as nursery:
        lead = await world.start(nursery, "p", Pool(), rank=RANKS[0])
        join = address(lead.engine)
        one, two = [
            await world.start(nursery, "p", Pool(), rank=rank, join=join)
            for rank in RANKS[1:]
        ]
        for process in (lead, one, two):
            await process.engine.instance_ready(5.0)
        early = Part(two.engine)
        early.may_end.set()
        nursery.start_soon(early.run)
        await trio.sleep(0.1)
        two.kill()
        again = await world.start(nursery, "p", Pool(), rank=RANKS[2], join=join)
        await again.engine.instance_ready(5.0)
        await trio.sleep(0.1)
        parts = [Part(process.engine) for process in (lead, one)]
        async with trio.open_nursery() as inner:
            for part in parts:
                part.may_end.set()
                inner.start_soon(part.run)
        same(*parts, kind=PeerLost, origin=RANKS[2])
        for process in (again, one, lead):
            await process.leave()


@pytest.mark.parametrize("how", ["killed", "left", "frozen"])
async def test_the_lead_is_lost(autojump_clock, how) -> None:
    """Every member fails by itself, at once or after the silence; none says done."""
    world = World()
    async with trio.open_nursery() as nursery:
        lead = await world.start(nursery, "p", Pool(), rank=RANKS[0])
        members = [
            await world.start(
                nursery, "p", Pool(), rank=rank, join=address(lead.engine)
            )
            for rank in RANKS[1:]
        ]
        for process in (lead, *members):
            await process.engine.instance_ready(5.0)
        parts = [Part(member.engine) for member in members]
        for part in parts:
            nursery.start_soon(part.run)
        parts[0].may_end.set()
        await trio.sleep(0.1)
        if how == "left":
            await lead.leave()
        elif how == "killed":
            lead.kill()
        else:
            lead.freeze()
            parts[1].may_end.set()
        await trio.sleep(30.0 if how == "frozen" else 0.1)
        same(*parts, kind=PeerLost, origin=RANKS[0])
        if how == "frozen":
            lead.thaw()
            await lead.leave()
        for member in members:
            await settled(member.engine)
            await member.leave()


async def test_an_incomplete_instance_agrees_on_nothing(autojump_clock) -> None:
    """Missing ranks are named, no work is done, and those who wait hear of it."""
    world = World()
    async with world.engine("p", Pool(), rank=RANKS[0]) as lead:
        async with world.engine(
            "p", Pool(), rank=RANKS[1], join=address(lead)
        ) as member:
            await trio.sleep(1.0)
            for engine in (lead, member):
                part = Part(engine)
                await part.run()
                assert isinstance(part.outcome, InstanceIncomplete)
                assert str(RANKS[2]) in str(part.outcome)
                with pytest.raises(MisuseError):
                    await engine.agree("k", part.work)
        await settled(lead)


async def test_a_rank_that_cannot_begin_tells_the_others(autojump_clock) -> None:
    """It has not heard yet that all have joined; they need not wait for it."""
    world = World()
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [Part(engine) for engine in engines]
        engines[1]._instance.manifest = None
        for part in parts:
            nursery.start_soon(part.run)
        await trio.sleep(0.1)
        assert isinstance(parts[1].outcome, InstanceIncomplete)
        same(parts[0], parts[2], kind=InstanceIncomplete, origin=RANKS[1])
        await settled(*engines)


async def test_a_key_names_one_try(autojump_clock) -> None:
    """In use, or used: refused before any work, and the first is not disturbed."""
    world = World()
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        parts = [Part(engine) for engine in engines]
        for part in parts:
            nursery.start_soon(part.run)
        await trio.sleep(0.1)
        for engine in engines:
            with pytest.raises(RequestInUse):
                await engine.agree("k", parts[0].work)
            with pytest.raises(MisuseError):
                await engine.agree("", parts[0].work)
        for part in parts:
            part.may_end.set()
        await trio.sleep(0.1)
        assert [part.outcome for part in parts] == [str(rank) for rank in RANKS]
        for engine in engines:
            with pytest.raises(MisuseError, match="used before"):
                await engine.agree("k", parts[0].work)
        # Also by whoever has forgotten that it was.
        engines[1]._instance._agreements._spent.clear()
        with pytest.raises(MisuseError, match="agreed on before"):
            await engines[1].agree("k", parts[0].work)
        await settled(*engines)


async def test_a_closed_engine_agrees_on_nothing(autojump_clock) -> None:
    """Nor does one that is closing; the work is not begun."""
    world = World()
    async with world.engine("p", Pool()) as engine:
        pass
    with pytest.raises(EngineClosed):
        await engine.agree("k", Part(engine).work)


async def test_one_rank_agrees_with_itself(autojump_clock) -> None:
    """Whoever writes for many ranks need not tell one of one apart."""
    world = World()
    async with world.engine("p", Pool()) as engine:
        part = Part(engine)
        part.may_end.set()
        await part.run("a")
        assert part.outcome == str(Rank())
        failing = Part(engine, fails=TransferFailed("no"))
        failing.may_end.set()
        await failing.run("b")
        assert failing.outcome is failing._fails
        await settled(engine)


async def test_a_slow_rank_keeps_nobody_s_other_agreements(autojump_clock) -> None:
    """Keys have nothing to do with each other."""
    world = World()
    async with (
        world.joined("p", [Pool()] * 3) as engines,
        trio.open_nursery() as nursery,
    ):
        slow = [Part(engine) for engine in engines]
        for part in slow:
            nursery.start_soon(part.run, "slow")
        for key in map(str, range(20)):
            quick = [Part(engine) for engine in engines]
            async with trio.open_nursery() as inner:
                for part in quick:
                    part.may_end.set()
                    inner.start_soon(part.run, key)
            assert [part.outcome for part in quick] == [str(rank) for rank in RANKS]
        assert [part.outcome for part in slow] == [None] * 3
        for part in slow:
            part.may_end.set()
        await trio.sleep(0.1)
        await settled(*engines)


@pytest.mark.parametrize("seed", range(30))
async def test_outcomes_agree_whatever_happens(autojump_clock, seed) -> None:
    """Work that ends, fails, hangs or is cancelled, at any time, in any order.

    All that were not cancelled have one outcome, and if any has "done", every rank's
    work had ended well.
    """
    rng, world = random.Random(seed), World()
    async with world.joined("p", [Pool()] * 4) as engines:
        for key in map(str, range(10)):
            parts = [
                Part(
                    engine,
                    fails=TransferFailed(str(rng.random()))
                    if rng.random() < 0.1
                    else None,
                    drain_s=rng.choice([0.0, 3.0]),
                )
                for engine in engines
            ]

            async def play(part: Part, key: str = key) -> None:
                await trio.sleep(rng.choice([0.0, 0.0, rng.random()]))
                playing.start_soon(partial(part.run, key, deadline_s=8.0))
                await trio.sleep(rng.choice([0.0, rng.random(), 9.0 * rng.random()]))
                if rng.random() < 0.95:
                    part.may_end.set()
                if rng.random() < 0.05:
                    await trio.sleep(rng.choice([0.0, 0.001, rng.random()]))
                    part.scope.cancel()

            async with trio.open_nursery() as playing:
                for part in parts:
                    playing.start_soon(play, part)
            heard = [p for p in parts if not p.scope.cancelled_caught]
            assert all(part.outcome is not None for part in heard)
            done = [p for p in heard if not isinstance(p.outcome, FerryError)]
            if done:
                assert len(done) == len(heard)
                assert all(p.may_end.is_set() and p._fails is None for p in parts)
            else:
                assert len({(p.outcome.detail, p.outcome.origin) for p in heard}) <= 1
        await settled(*engines)


async def test_an_agreement_cancelled_at_every_step(autojump_clock) -> None:
    """Wherever it is cut off, the others hear one thing, and nothing is left."""
    outcomes: set[str] = set()
    for at in itertools.count(1, 3):
        world = World()
        async with (
            world.joined("p", [Pool()] * 2) as engines,
            trio.open_nursery() as nursery,
        ):
            parts = [Part(engine) for engine in engines]
            with Steps(at, parts[1].scope.cancel) as steps:
                for part in parts:
                    part.may_end.set()
                    nursery.start_soon(part.run)
                await trio.sleep(0.1)
            other, cut = parts
            outcomes.add(f"{type(other.outcome).__name__} {type(cut.outcome).__name__}")
            assert cut.scope.cancelled_caught or not isinstance(cut.outcome, FerryError)
            if isinstance(other.outcome, FerryError):
                assert cut.outcome is None
                assert "cancelled" in other.outcome.detail
            await settled(*engines)
        if steps.taken < at:
            break
    assert outcomes == {"TransferError NoneType", "str NoneType", "str str"}


async def test_ten_thousand_agreements_leave_nothing_behind(autojump_clock) -> None:
    """Done and failed ones: what is remembered is bounded, nothing else is there."""
    world = World()
    async with world.joined("p", [Pool()] * 2) as engines:

        async def one(engine, key: str) -> None:
            async def work() -> None:
                if key.endswith("7") and engine is engines[1]:
                    raise TransferFailed("no")

            try:
                await engine.agree(key, work)
            except TransferFailed:
                assert key.endswith("7")

        async def many(first: int, last: int) -> None:
            for key in map(str, range(first, last)):
                async with trio.open_nursery() as nursery:
                    for engine in engines:
                        nursery.start_soon(one, engine, key)

        await many(0, 5000)
        tracemalloc.start()
        await many(5000, 6000)
        before, _ = tracemalloc.get_traced_memory()
        await many(6000, 10_000)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert after - before < 2_000_000
        await settled(*engines)
        for engine in engines:
            agreements = engine._instance._agreements
            assert len(agreements._spent) <= 4096
            assert len(agreements._early) <= 4096


async def test_a_pull_that_fails_on_one_rank_is_done_on_none(autojump_clock) -> None:
    """What it is for: rank 1's read fails, so the request counts as failed on rank 0."""
    world = World()
    producers = [Pool(tp=(i, 2)) for i in range(2)]
    consumers = [Pool(tp=(i, 2)) for i in range(2)]
    async with (
        world.instance("p", producers) as prefill,
        world.joined("c", consumers, wave_bytes=64) as decode,
    ):
        offers, ticket = offer_all(prefill, producers, "r", [1, 2], num_tokens=8)
        world.network.faults.add(TransferFault(fabric="c-2", nth=None, delay_s=2.0))
        world.network.faults.add(
            CallFault(fabric="c-3", method="post", nth=2, error=PeerLost("injected"))
        )
        errors: list[FerryError] = []

        async def one(engine) -> None:
            pull = partial(engine.pull, ticket, {GROUP: [5, 6]})
            try:
                await engine.agree("pull r", pull)
            except FerryError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for engine in decode:
                nursery.start_soon(one, engine)
        assert [type(error) for error in errors] == [PeerLost] * 2
        assert {error.origin for error in errors} == {str(decode[1].key.rank)}
        assert {error.request_id for error in errors} == {"r"}
        for pool in consumers:
            assert not world.may_touch(pool, [5, 6])
        for offer in offers:
            assert await offer.wait() is OfferOutcome.RELEASED
        await settled(*prefill, *decode)
