"""Driving a lifecycle machine: events, its deadline, cancellation, and bugs of ours."""

from __future__ import annotations

import enum
import io

import pytest
import structlog
import trio

from kvferry.engine.drive import Driver
from kvferry.protocol.errors import FerryInternalError
from kvferry.protocol.lifecycle.machine import (
    Effect,
    Event,
    Machine,
    Row,
    total_table,
)


class State(enum.Enum):
    NEW = "new"
    WORKING = "working"
    DRAINING = "draining"
    DONE = "done"
    ENDED = "ended"


class Begun(Event, frozen=True): ...


class Landed(Event, frozen=True): ...


class Cancelled(Event, frozen=True): ...


class Ticked(Event, frozen=True): ...


class Work(Effect, frozen=True): ...


class Job(Machine[State]):
    """Works until something lands; is told to end after 10 s, drains until 20 s."""

    def __init__(self) -> None:
        super().__init__(State.NEW)
        self.began_at = trio.current_time()

    @property
    def deadline(self) -> float | None:
        limit_s = {State.WORKING: 10.0, State.DRAINING: 20.0}.get(self.state)
        return None if limit_s is None else self.began_at + limit_s

    def _begin(self, _event, _now):
        return State.WORKING, [Work()]

    def _land(self, _event, _now):
        return (State.DONE if self.state is State.WORKING else State.ENDED), []

    def _end(self, _event, now):
        if self.state is State.DRAINING:
            return (State.ENDED if now >= self.began_at + 20 else State.DRAINING), []
        return State.DRAINING, []

    def _stay(self, _event, _now):
        return self.state, [Work()]


_DRAIN = Row(Job._end, (State.DRAINING, State.ENDED))
Job.table = total_table(
    State,
    (Begun, Landed, Cancelled, Ticked),
    moves={
        State.NEW: {Begun: Row(Job._begin, (State.WORKING,))},
        State.WORKING: {
            Landed: Row(Job._land, (State.DONE,)),
            Cancelled: _DRAIN,
            Ticked: _DRAIN,
        },
        State.DRAINING: {
            Landed: Row(Job._land, (State.ENDED,)),
            Cancelled: _DRAIN,
            Ticked: _DRAIN,
        },
        State.ENDED: {Landed: Row(Job._stay, (State.ENDED,))},
    },
    ignored={State.DONE: {Landed, Cancelled}},
)


class Owner:
    """A driver's owner: keeps what it was told to do."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.bugs = 0
        self.events: list[str] = []
        self.driver = Driver(
            Job(),
            over=frozenset({State.DONE, State.ENDED}),
            draining=State.DRAINING,
            cancel=Cancelled(),
            tick=Ticked(),
            carry_out=self.carry_out,
            on_bug=self.count_bug,
            log=structlog.wrap_logger(
                structlog.PrintLogger(io.StringIO()), processors=[self.keep]
            ),
        )

    def keep(self, _logger, _level, entry):
        self.events.append(entry["event"])
        raise structlog.DropEvent

    def carry_out(self, effect) -> None:
        self.effects.append(effect)

    def count_bug(self) -> None:
        self.bugs += 1


async def test_events_lead_to_the_outcome_one_at_a_time(autojump_clock) -> None:
    """Late ones are counted by the machine; each phase has its time."""
    owner = Owner()
    driver = owner.driver

    async def land() -> None:
        await trio.sleep(3)
        driver.feed(Landed())
        driver.feed(Landed())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(land)
        driver.feed(Begun())
        await driver.run()
    assert driver.is_over
    assert driver.machine.state is State.DONE
    assert driver.machine.ignored == 1
    assert owner.effects == [Work()]
    assert driver.phases_s == {"new": 0.0, "working": 3.0}
    assert driver.failed_in is State.WORKING


async def test_a_deadline_of_the_machine_is_a_tick(autojump_clock) -> None:
    """Each state's own; nothing else has to happen."""
    owner = Owner()
    started = trio.current_time()
    owner.driver.feed(Begun())
    await owner.driver.run()
    assert trio.current_time() - started == 20
    assert owner.driver.machine.state is State.ENDED
    # The drain is no phase that anything fails in.
    assert owner.driver.failed_in is State.WORKING


@pytest.mark.parametrize(("lands_s", "took_s"), [(4.0, 4.0), (99.0, 20.0)])
async def test_a_cancellation_drains_first_and_goes_on_then(
    autojump_clock, lands_s, took_s
) -> None:
    """Under a shield that ends with the machine's own deadline."""
    owner = Owner()
    started = trio.current_time()

    async def land() -> None:
        await trio.sleep(lands_s)
        owner.driver.feed(Landed())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(land)
        with trio.move_on_after(1) as scope:
            owner.driver.feed(Begun())
            await owner.driver.run()
        assert scope.cancelled_caught
        assert owner.driver.machine.state is State.ENDED
        assert trio.current_time() - started == took_s
        nursery.cancel_scope.cancel()


async def test_what_comes_after_the_outcome_is_carried_out_at_once(
    autojump_clock,
) -> None:
    """Nobody drives any more, and what is in quarantine still changes."""
    owner = Owner()
    owner.driver.feed(Begun())
    await owner.driver.run()
    owner.driver.feed(Landed())
    assert owner.effects == [Work(), Work()]


async def test_a_misuse_ends_the_drive_and_is_told_once(autojump_clock) -> None:
    """Whatever is fed afterwards is dropped: the machine is poisoned."""
    owner = Owner()
    owner.driver.feed(Begun())
    owner.driver.feed(Begun())
    owner.driver.feed(Landed())
    await owner.driver.run()
    assert isinstance(owner.driver.bug, FerryInternalError)
    assert "misuse in working" in owner.driver.bug.detail
    owner.driver.feed(Landed())
    assert owner.driver.machine.state is State.WORKING
    assert owner.bugs == 1


@pytest.mark.parametrize("is_over", [False, True])
async def test_an_effect_that_raises_harms_nobody_who_feeds(
    autojump_clock, is_over
) -> None:
    """The pump feeds from its own task: an owner's bug must not reach it."""
    owner = Owner()

    def fail(_effect) -> None:
        raise ZeroDivisionError("a bug")

    if is_over:
        owner.driver.feed(Begun())
        await owner.driver.run()
        owner.driver._carry_out = fail
        owner.driver.feed(Landed())
    else:
        owner.driver._carry_out = fail
        owner.driver.feed(Begun())
        await owner.driver.run()
    assert isinstance(owner.driver.bug, FerryInternalError)
    assert isinstance(owner.driver.bug.__cause__, ZeroDivisionError)
    assert owner.events[-1] == "internal_error"
    assert owner.bugs == 1
