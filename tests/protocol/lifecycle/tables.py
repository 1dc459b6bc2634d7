"""What the tests of the lifecycle tables share: reading a table, rows as examples, copies."""

from __future__ import annotations

import copy
import dataclasses
import enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvferry.protocol.lifecycle.machine import Otherwise, Row

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.protocol.lifecycle.machine import Effect, Event, Machine

T = TypeVar("T")
Kinds = dict[tuple[enum.Enum, type["Event"]], str]
KINDS = {Otherwise.IGNORED: "late", Otherwise.MISUSE: "BUG"}


class Example(NamedTuple):
    """One row of a table at work."""

    says: str
    given: tuple[Event, ...]
    event: Event
    state: enum.Enum
    effects: list[Effect]
    at: float = 0.0


def read(
    text: str, states: type[enum.Enum], samples: Mapping[str, Event]
) -> list[tuple[enum.Enum, str, str]]:
    """The (state, event, kind) of a table as the tests write it down.

    "move" has a row, "late" is ignored and counted, "BUG" is a misuse: the
    machine's owner broke the contract.
    """
    header, *lines = text.strip("\n").splitlines()
    names = header.split()
    assert set(names) == set(samples)
    return [
        (states(state), name, kind)
        for state, *kinds in map(str.split, lines)
        for name, kind in zip(names, kinds, strict=True)
    ]


def kinds(machine: type[Machine]) -> Kinds:
    """What each pair of a machine's table is."""
    return {
        pair: "move" if isinstance(row, Row) else KINDS[row]
        for pair, row in machine.table.items()
    }


def arrows(machine: type[Machine]) -> set[tuple[enum.Enum, type[Event], enum.Enum]]:
    """Every (state, event, target) that a machine's table draws."""
    return {
        (state, event, target)
        for (state, event), row in machine.table.items()
        if isinstance(row, Row)
        for target in row.targets
    }


def facts(machine: Machine) -> dict[str, object]:
    """Everything a machine knows, but for the count of what it ignored."""
    return {k: v for k, v in vars(clone(machine)).items() if k != "ignored"}


def clone(thing: T) -> T:
    """A copy that shares nothing that changes."""
    twin = copy.copy(thing)
    for name, value in vars(thing).items():
        setattr(twin, name, _copied(value))
    return twin


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, set | dict):
        return copy.copy(value)
    return clone(value) if dataclasses.is_dataclass(value) else value
