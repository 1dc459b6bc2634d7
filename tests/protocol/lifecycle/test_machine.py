"""What all machines share: the one door, the total table, the poison."""

from __future__ import annotations

import enum
from typing import ClassVar

import pytest

from kvferry.protocol.errors import FerryInternalError, TransferFailed
from kvferry.protocol.lifecycle.machine import (
    Effect,
    Event,
    Machine,
    Otherwise,
    Row,
    Table,
    total_table,
)


class Lamp(enum.Enum):
    """Where a lamp is."""

    OFF = "off"
    ON = "on"


class Pressed(Event, frozen=True):
    """Somebody pressed the switch."""


class Dropped(Event, frozen=True):
    """Somebody dropped it."""


class Shaken(Event, frozen=True):
    """Somebody shook it."""


class Painted(Event, frozen=True):
    """Somebody painted it."""


class Shine(Effect, frozen=True):
    """Shine."""


def toggle(machine: LampMachine, _event: Pressed, _now: float) -> tuple[Lamp, list]:
    machine.presses += 1
    return (Lamp.ON, [Shine()]) if machine.state is Lamp.OFF else (Lamp.OFF, [])


def stray(_machine: LampMachine, _event: Dropped, _now: float) -> tuple[Lamp, list]:
    return Lamp.ON, []


def explode(_machine: LampMachine, _event: Shaken, _now: float) -> tuple[Lamp, list]:
    raise TransferFailed("bang")


class LampMachine(Machine[Lamp]):
    """A machine small enough to see through."""

    table: ClassVar[Table] = total_table(
        Lamp,
        (Pressed, Dropped, Shaken, Painted),
        moves={
            Lamp.OFF: {
                Pressed: Row(toggle, (Lamp.ON,)),
                Dropped: Row(stray, (Lamp.OFF,)),
                Shaken: Row(explode, (Lamp.OFF,)),
            },
            Lamp.ON: {Pressed: Row(toggle, (Lamp.OFF,))},
        },
        ignored={Lamp.ON: {Shaken}},
    )

    def __init__(self) -> None:
        super().__init__(Lamp.OFF)
        self.presses = 0


def test_a_table_has_a_row_for_every_pair() -> None:
    """What is named nowhere is a misuse."""
    table = LampMachine.table
    assert len(table) == 2 * 4
    assert table[Lamp.ON, Shaken] is Otherwise.IGNORED
    assert table[Lamp.ON, Dropped] is Otherwise.MISUSE
    assert table[Lamp.OFF, Painted] is Otherwise.MISUSE
    assert isinstance(table[Lamp.OFF, Pressed], Row)


def test_a_move_changes_the_state_and_gives_its_effects() -> None:
    """A row's decision is carried out through the door."""
    machine = LampMachine()
    assert machine.step(Pressed(), 0.0) == [Shine()]
    assert machine.state is Lamp.ON
    assert machine.step(Pressed(), 0.0) == []
    assert machine.state is Lamp.OFF
    assert machine.presses == 2


def test_an_ignored_event_is_counted_and_changes_nothing() -> None:
    """It has no effect but the count."""
    machine = LampMachine()
    machine.step(Pressed(), 0.0)
    assert machine.step(Shaken(), 0.0) == []
    assert (machine.state, machine.ignored, machine.presses) == (Lamp.ON, 1, 1)


@pytest.mark.parametrize(
    ("event", "raised"),
    [(Painted(), FerryInternalError), (Dropped(), FerryInternalError)],
    ids=["misuse", "undeclared target"],
)
def test_a_broken_contract_poisons_and_leaves_the_state(
    event: Event, raised: type[Exception]
) -> None:
    """A misuse, or a decision that leads astray, is told, and the machine stops."""
    machine = LampMachine()
    with pytest.raises(raised):
        machine.step(event, 0.0)
    assert machine.state is Lamp.OFF
    with pytest.raises(FerryInternalError, match="poisoned"):
        machine.step(Pressed(), 0.0)
    assert machine.presses == 0


def test_a_decision_that_raises_poisons() -> None:
    """A half-made decision is never followed by another one."""
    machine = LampMachine()
    with pytest.raises(TransferFailed, match="bang"):
        machine.step(Shaken(), 0.0)
    with pytest.raises(FerryInternalError, match="poisoned"):
        machine.step(Pressed(), 0.0)


def test_a_machine_has_to_say_its_deadline() -> None:
    """There is no default: a machine that forgot its deadline would wait for ever."""
    with pytest.raises(NotImplementedError):
        _ = LampMachine().deadline
