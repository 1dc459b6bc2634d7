"""What the lifecycle machines share: a total table, one door, a state set in one place.

Two rules hold for every machine in this folder. Everything that affects a
machine's state is in its table. And a machine has no clock, no I/O, no logging
and no randomness: events and ``now`` go in through `Machine.step`, effects come
out, and its owner carries them out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

from kvferry.protocol.errors import FerryInternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = (
    "Effect",
    "Event",
    "Machine",
    "Otherwise",
    "Row",
    "State",
    "Table",
    "total_table",
)


class State(enum.Enum):
    """Where a machine can be."""

    # The members are singletons. `Enum` hashes its name, in Python, and a pull asks its
    # table and its sets of states some thirty times.
    __hash__ = object.__hash__


class Event(msgspec.Struct, frozen=True):
    """Something that happened, in the past tense."""


class Effect(msgspec.Struct, frozen=True):
    """Something the machine's owner is to do, in the imperative."""


class Otherwise(enum.Enum):
    """The rows of pairs that are no move."""

    IGNORED = "ignored"
    """Late, doubled or harmless: counted, and nothing changes."""
    MISUSE = "misuse"
    """Its owner broke the contract: a bug of ours."""


@dataclass(frozen=True)
class Row:
    """A move: what is decided, and the states it can lead to.

    Attributes:
        decide: Changes the machine's facts, returns the state it leads to and
            the effects.
        targets: Every state `decide` may return; checked on each step, and what
            the docs draw.
    """

    decide: Callable[[Any, Any, float], tuple[State, list[Effect]]]
    targets: tuple[State, ...]


Table = dict[tuple[State, type[Event]], Row | Otherwise]


def total_table(
    states: Iterable[State],
    events: Iterable[type[Event]],
    moves: Mapping[State, Mapping[type[Event], Row]],
    ignored: Mapping[State, Iterable[type[Event]]],
) -> Table:
    """A table with a row for every pair; a pair named nowhere is a misuse."""
    known = list(events)
    table: Table = {}
    for state in states:
        harmless = set(ignored.get(state, ()))
        for event in known:
            otherwise = Otherwise.IGNORED if event in harmless else Otherwise.MISUSE
            table[state, event] = moves.get(state, {}).get(event, otherwise)
    return table


StateT = TypeVar("StateT", bound=State)


class Machine(Generic[StateT]):
    """One lifecycle, driven by `step`.

    Attributes:
        state: Where it is; only `step` changes it.
        ignored: How many events were ignored.
    """

    table: ClassVar[Table]

    def __init__(self, state: StateT) -> None:
        self.state = state
        self.ignored = 0
        self._is_poisoned = False

    @property
    def deadline(self) -> float | None:
        """When it wants a tick, in the clock of ``now``; None while it waits for nothing."""
        raise NotImplementedError

    def step(self, event: Event, now: float) -> list[Effect]:
        """Let one event in.

        Args:
            event: What happened.
            now: The owner's clock, never going back.

        Returns:
            What the owner is to do, in this order.

        Raises:
            FerryInternalError: The table calls the event a misuse, or the
                machine is poisoned: a decision of it had failed before, and
                nothing it says can be trusted.
        """
        if self._is_poisoned:
            raise FerryInternalError(f"{type(self).__name__} is poisoned")
        row = self.table.get((self.state, type(event)), Otherwise.MISUSE)
        if row is Otherwise.IGNORED:
            self.ignored += 1
            return []
        self._is_poisoned = True  # until the decision has gone through
        if not isinstance(row, Row):
            raise FerryInternalError(
                f"{type(event).__name__} is a misuse in {self.state.value}"
            )
        state, effects = row.decide(self, event, now)
        if state not in row.targets:
            raise FerryInternalError(
                f"{type(event).__name__} led from {self.state.value} to {state.value}"
            )
        self.state = state  # type: ignore[assignment] # targets are of StateT
        self._is_poisoned = False
        return effects
