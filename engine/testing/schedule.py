"""`Schedule`: everything that goes wrong in one run, drawn from one integer.

It decides for a memory network's calls, transfers and notices, for links, and for
whatever a test says that it `may` do: kill, freeze, cancel, withdraw. `play` runs
a scenario under it on virtual time, in an order of tasks that is drawn too, so
that the seed alone brings a failure back. It tells what it did in its `story`.
"""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

import trio
import trio._core._run as trio_run
import trio.testing

from kvferry.engine.fabric.base import Progress
from kvferry.engine.fabric.faults import Faults, NoticeFault, TransferFault
from kvferry.engine.fabric.memory import MemoryNetwork
from kvferry.engine.fabric.memory_streams import MemoryStreams
from kvferry.protocol.errors import PeerLost, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = ("Rates", "Schedule", "ScheduleFailed")

FALLIBLE = ("connect", "prepare", "post", "poll", "notify", "take_notices")
"""Calls that may fail. One that gives something back is not among them: its
failure is a leak of the transport, and everything could not be back to base."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How often things go wrong: chances from 0 to 1, each time that they could.

    Attributes:
        failing_calls: A call of a fabric raises, and has no effect.
        late_transfers: A transfer takes up to ``late_s`` longer.
        stalled_transfers: It takes up to ``stalled_s`` longer.
        failing_transfers: It fails in the end; a part of its bytes has moved.
        lost_transfers: The fabric loses track of it; its bytes land all the same.
        lost_notices, doubled_notices, late_notices: A notice does not arrive, comes
            twice, or later than others.
        late_messages: What arrived on a link is delivered up to ``late_s`` later.
        doubled_messages: What is sent on a link is sent twice.
        broken_dials: A dial is refused.
        streams_in_pieces: In the whole run, streams hand out bytes in random pieces.
        acts: One of the things that the schedule `may` do is done after a step of
            any task.
        late_s, stalled_s: Durations in seconds.
    """

    failing_calls: float = 0.005
    late_transfers: float = 0.3
    stalled_transfers: float = 0.1
    failing_transfers: float = 0.05
    lost_transfers: float = 0.05
    lost_notices: float = 0.1
    doubled_notices: float = 0.1
    late_notices: float = 0.3
    late_messages: float = 0.1
    doubled_messages: float = 0.02
    broken_dials: float = 0.05
    streams_in_pieces: float = 0.5
    acts: float = 0.01
    late_s: float = 0.1
    stalled_s: float = 2.0

    def thinned(self, rng: random.Random) -> Self:
        """Half of the kinds, at random: few at once reach what all at once hide."""
        kept = {
            field.name: getattr(self, field.name)
            if field.name.endswith("_s") or rng.random() < 0.5
            else 0.0
            for field in fields(self)
        }
        return type(self)(**kept)


@dataclass(frozen=True)
class _Act:
    what: str
    do: Callable[[], object]
    undo: Callable[[], object] | None
    weight: float


class ScheduleFailed(AssertionError):
    """A scenario failed under a schedule; says which, and what it had done by then."""


class Schedule(trio.abc.Instrument):
    """What goes wrong in one run.

    Attributes:
        seed: All that it depends on, with the rates and the scenario.
        rates: How often things go wrong.
        network: A memory network whose faults it decides.
        streams: Where links come from; `Host` makes them late, double and broken.
        story: What it did, with the time.
    """

    def __init__(self, seed: int, *, rates: Rates | None = None) -> None:
        """Make a schedule, a network and its streams.

        Args:
            seed: Any integer.
            rates: Half of the kinds of the usual ones by default.
        """
        self.seed = seed
        self._rng = random.Random(seed)
        self.rates = rates or Rates().thinned(self._rng)
        self.network = MemoryNetwork(
            seed=self.draw(2**32), latency_s=0.01, faults=_DrawnFaults(self)
        )
        in_pieces = self.chance(self.rates.streams_in_pieces)
        self.streams = MemoryStreams(seed=self.draw(2**32) if in_pieces else None)
        self.story: list[str] = []
        self._possible: dict[int, _Act] = {}
        self._numbers = itertools.count()
        self._undone: list[tuple[float, _Act]] = []
        self._is_calm = False
        self._bug: Exception | None = None
        self._steps_left = self._steps_to_act()

    # What a scenario uses.

    def play(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run a scenario on virtual time, from the beginning to its end.

        Raises:
            ScheduleFailed: The scenario raised, or one of the acts did.
        """
        try:
            self._run(scenario)
        except Exception as exc:
            told = "\n  ".join(self.story)
            raise ScheduleFailed(f"seed {self.seed}: {exc!r}\n  {told}") from exc

    def _run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        with _ordered_by(self._rng):
            trio.run(
                scenario,
                clock=trio.testing.MockClock(autojump_threshold=0),
                instruments=[self],
            )
        if self._bug is not None:
            raise self._bug

    @contextmanager
    def may(
        self,
        what: str,
        do: Callable[[], object],
        *,
        undo: Callable[[], object] | None = None,
        weight: float = 1.0,
    ) -> Iterator[None]:
        """While inside, the schedule may do this, after any step of any task.

        Args:
            what: For the story.
            do: Must not block; may be done more than once.
            undo: Done some time later, at the latest when it becomes `calm`.
            weight: How likely it is among the others.
        """
        number = next(self._numbers)
        self._possible[number] = _Act(what, do, undo, weight)
        try:
            yield
        finally:
            del self._possible[number]

    def calm(self) -> None:
        """From now on nothing goes wrong; what has gone wrong takes its course."""
        self._is_calm = True
        for _, act in self._undone:
            self._undo(act)
        self._undone.clear()

    def draw(self, limit: int) -> int:
        """A number in ``[0, limit)`` for the scenario."""
        return self._rng.randrange(limit)

    def chance(self, share: float) -> bool:
        """Yes, so often."""
        return self._rng.random() < share

    def tell(self, what: str) -> None:
        """Add to the story."""
        self.story.append(f"{trio.current_time():.3f} {what}")

    # What its network and its hosts ask.

    def happens(self, kind: str, what: str) -> bool:
        """Whether something of a kind of `Rates` goes wrong now."""
        if self._is_calm or not self.chance(getattr(self.rates, kind)):
            return False
        self.tell(f"{kind}: {what}")
        return True

    def delay_s(self, kind: str, what: str) -> float:
        """How late something is; 0 is in time."""
        if not self.happens(kind, what):
            return 0.0
        longest_s = self.rates.stalled_s if "stalled" in kind else self.rates.late_s
        return self._rng.uniform(0, longest_s)

    def transfer_fault(self, fabric: str) -> TransferFault:
        """How a transfer goes."""
        delay_s = self.delay_s("late_transfers", fabric)
        delay_s += self.delay_s("stalled_transfers", fabric)
        if self.happens("failing_transfers", fabric):
            moved = self._rng.random()
            return TransferFault(progress=Progress.FAILED, moved=moved, delay_s=delay_s)
        if self.happens("lost_transfers", fabric):
            return TransferFault(progress=Progress.LOST, recovers=True, delay_s=delay_s)
        return TransferFault(delay_s=delay_s)

    def notice_fault(self, fabric: str) -> NoticeFault:
        """How a notice goes."""
        if self.happens("lost_notices", fabric):
            return NoticeFault(copies=0)
        copies = 2 if self.happens("doubled_notices", fabric) else 1
        return NoticeFault(copies=copies, delay_s=self.delay_s("late_notices", fabric))

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        """Act, when it is time; trio's call."""
        try:
            if self._undone:
                self._undo_due()
            self._steps_left -= 1
            if self._steps_left < 0 and not self._is_calm:
                self._steps_left = self._steps_to_act()
                self._act()
        except Exception as exc:  # noqa: BLE001 - trio would log it and go on without us
            self._bug = self._bug or exc

    def _steps_to_act(self) -> int:
        rate = self.rates.acts
        return 2**62 if not rate else int(self._rng.expovariate(rate))

    def _act(self) -> None:
        acts = list(self._possible.values())
        if not acts:
            return
        (act,) = self._rng.choices(acts, [act.weight for act in acts])
        self.tell(act.what)
        act.do()
        if act.undo is not None:
            until = trio.current_time() + self._rng.uniform(0, self.rates.stalled_s)
            self._undone.append((until, act))

    def _undo_due(self) -> None:
        now = trio.current_time()
        for entry in [entry for entry in self._undone if entry[0] <= now]:
            self._undone.remove(entry)
            self._undo(entry[1])

    def _undo(self, act: _Act) -> None:
        self.tell(f"no more: {act.what}")
        if act.undo is not None:
            act.undo()


class _DrawnFaults(Faults):
    """Faults that a schedule draws, on top of rules that a test adds."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def on_call(self, fabric: str, method: str) -> None:
        super().on_call(fabric, method)
        what = f"{method} of {fabric}"
        if method in FALLIBLE and self._schedule.happens("failing_calls", what):
            raise (PeerLost if self._schedule.chance(0.5) else TransferFailed)(
                "a fault of the schedule"
            )

    def on_transfer(self, fabric: str) -> TransferFault:
        fault = super().on_transfer(fabric)
        if fault != TransferFault():
            return fault
        return self._schedule.transfer_fault(fabric)

    def on_notice(self, fabric: str) -> NoticeFault:
        fault = super().on_notice(fabric)
        return fault if fault != NoticeFault() else self._schedule.notice_fault(fabric)


@contextmanager
def _ordered_by(rng: random.Random) -> Iterator[None]:
    """Let trio order the tasks of a batch by our numbers.

    By default the order depends on addresses. trio has this switch for
    hypothesis; it is not public, and a test of ours holds what it does.
    """
    was, state = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r.getstate()
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio_run._r.seed(rng.getrandbits(64))
    try:
        yield
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = was  # type: ignore[misc]
        trio_run._r.setstate(state)
