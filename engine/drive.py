"""`Driver`: drives one lifecycle machine in the task of the request it belongs to.

The machine decides, its owner carries out; what lies between is here, and knows
nothing of pulls, pushes or landings: the inbox, the wait for an event or the
machine's deadline, the drain under a shield, the time that each phase took, and
what happens when an invariant of ours breaks on the way.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from kvferry.engine.guard import contained
from kvferry.protocol.errors import FerryInternalError
from kvferry.protocol.lifecycle.machine import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.lifecycle.machine import Effect, Event, Machine

__all__ = ("Driver",)

StateT = TypeVar("StateT", bound=State)


def _nothing() -> None:
    pass


class Driver(Generic[StateT]):
    """One machine, its inbox and its clock.

    Attributes:
        machine: Only the driver steps it.
        bug: Why it can be driven no further: a step or an effect of it raised. The
            machine's word counts for nothing from then on, and events are dropped;
            what its owner still has in flight, its owner must follow by itself.
        failed_in: The last state before it began to end.
        phases_s: Seconds spent in each state that has been left, by its value.
    """

    def __init__(  # noqa: PLR0913 - what a machine does not know of itself
        self,
        machine: Machine[StateT],
        *,
        over: frozenset[StateT],
        draining: StateT,
        cancel: Event,
        tick: Event,
        carry_out: Callable[[Effect], None],
        on_bug: Callable[[], None],
        on_draining: Callable[[], None] = _nothing,
        log: FilteringBoundLogger,
    ) -> None:
        """Drive nothing yet.

        Args:
            machine: In its first state.
            over: The states in which the request has its outcome.
            draining: The state that only waits for what is in flight.
            cancel: What a cancellation of the caller's task is to the machine.
            tick: What the machine is told when its deadline has come.
            carry_out: Does one effect; must not block, and may feed.
            on_bug: Told once, when `bug` has been set.
            on_draining: Told when it begins to drain, before the effects of the step.
            log: Bound to the request.
        """
        self.machine = machine
        self.bug: FerryError | None = None
        self.failed_in = machine.state
        self.phases_s: dict[str, float] = {}
        self._over = over
        self._draining = draining
        self._cancel = cancel
        self._tick = tick
        self._carry_out = carry_out
        self._on_bug = on_bug
        self._on_draining = on_draining
        self._log = log
        self._inbox: deque[Event] = deque()
        self._is_stepping = False
        self._changed: trio.Event | None = None  # while its task waits
        self._now = trio.lowlevel.current_clock().current_time  # asked at each step
        self._due_at = self._deadline()
        self._waits_until = float("inf")
        self._phase = machine.state
        self._phase_at = self._now()

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to drive to."""
        return self.bug is not None or self.machine.state in self._over

    def feed(self, event: Event) -> None:
        """Let an event in, and carry out what follows; never blocks or raises.

        At once, in whoever's task brings it: a wave that settles in the pump's round
        has the next one posted there, and the request's own task is not woken for it.
        Only an event that an effect brings waits until its step has ended.
        """
        self._inbox.append(event)
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            contained(self._work_off, on_failure=self._give_up, log=self._log)
        finally:
            self._is_stepping = False
        if self._changed is None:
            return
        if self.is_over or self._due_at < self._waits_until:
            self._changed.set()

    async def run(self, first: Event | None = None) -> None:
        """Wait for the outcome, and let the machine have its ticks; a cancellation
        drains first, and goes on then.

        The shield has no end of its own: a machine that drains has a deadline.

        Args:
            first: Let in first, unless the task is cancelled already.
        """
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            if first is not None:
                self.feed(first)
            await self._wait()
        except trio.Cancelled:
            self.feed(self._cancel)
            with trio.CancelScope(shield=True):
                await self._wait()
            raise

    async def _wait(self) -> None:
        while not self.is_over:
            self._changed = trio.Event()
            self._waits_until = self._due_at
            with trio.move_on_at(self._waits_until):
                await self._changed.wait()
            now = self._now()
            if now >= self._due_at:
                self.feed(self._tick)
                if self._due_at <= now:
                    # It would be ticked for ever, and nobody else would run.
                    self._give_up(FerryInternalError("a tick left its deadline behind"))

    def _deadline(self) -> float:
        deadline = self.machine.deadline
        return float("inf") if deadline is None else deadline

    def _work_off(self) -> None:
        while self._inbox:
            event, now = self._inbox.popleft(), self._now()
            if self.bug is not None:
                continue
            if now >= self._due_at and event is not self._tick:
                # What comes behind a deadline finds it passed, however late we look.
                self._step(self._tick, now)
            self._step(event, now)

    def _step(self, event: Event, now: float) -> None:
        effects = self.machine.step(event, now)
        self._due_at = self._deadline()
        if self.machine.state is not self._phase:
            self._note_phase(now)
        for effect in effects:
            self._carry_out(effect)

    def _give_up(self, bug: FerryError) -> None:
        if self.bug is None:  # an effect that fed a machine that was over
            self.bug = bug
            self._on_bug()

    def _note_phase(self, now: float) -> None:
        state = self.machine.state
        name = self._phase.value
        self.phases_s[name] = self.phases_s.get(name, 0.0) + now - self._phase_at
        self._phase, self._phase_at = state, now
        if state in self._over:
            return
        if state is self._draining:
            self._on_draining()
        else:
            self.failed_in = state
