"""What of a request may still touch memory, whoever still asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from kvferry.engine import FerryInternalError, TransferFailed
from kvferry.engine.fabric import Progress
from kvferry.engine.flight import Flights

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.engine import FerryError
    from kvferry.engine.traffic import Turn

FAILED = TransferFailed("it failed")


class Owner:
    """The owner of some flights, with a pump that says what the test says."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, FerryError | None]] = []
        self.tracked: list[Callable[[Progress, FerryError | None], None]] = []
        self.waiting: list[Turn] = []
        self.left: list[str] = []
        self.is_full = False
        self.flights = Flights(
            fabric="the fabric",  # type: ignore[arg-type]
            pump=self,  # type: ignore[arg-type]
            traffic=self,  # type: ignore[arg-type]
            on_settled=self.settled,
            on_lost=self.lost,
            log=structlog.get_logger(),
        )

    # As the traffic: everybody's turn is at once, unless it is full.

    def ask(self, _lane, turn) -> None:
        if self.is_full:
            self.waiting.append(turn)
        else:
            turn.go(turn)

    def leave(self, peer, _size) -> None:
        self.left.append(peer)

    def drop(self, _lane) -> list[Turn]:
        dropped, self.waiting = self.waiting, []
        return dropped

    # As the pump.

    def track(self, transfer, on_progress) -> None:
        assert transfer == "a transfer on the fabric"
        self.tracked.append(on_progress)

    def settled(self, wave, cause) -> None:
        assert wave not in self.flights.in_flight, "told before it was so"
        self.told.append(("settled", wave, cause))

    def lost(self, wave, cause) -> None:
        assert wave in self.flights.in_flight
        self.told.append(("lost", wave, cause))

    def post(self, wave, **options) -> None:
        """Post a wave that nothing stands against."""
        self.flights.post(
            wave, lambda fabric: f"a transfer on {fabric}", peer="p", size=1, **options
        )


def test_a_wave_is_in_flight_until_it_has_settled() -> None:
    """Done or failed; each is told once."""
    owner = Owner()
    owner.post(3)
    owner.post(4)
    assert owner.flights.in_flight == {3, 4}
    owner.tracked[0](Progress.DONE, None)
    assert owner.flights.in_flight == {4}
    owner.tracked[1](Progress.FAILED, FAILED)
    assert owner.flights.in_flight == set()
    assert owner.told == [("settled", 3, None), ("settled", 4, FAILED)]


def test_a_lost_wave_stays_in_flight() -> None:
    """Its bytes may still land; and when they have, it has settled."""
    owner = Owner()
    owner.post(3)
    owner.tracked[0](Progress.LOST, FAILED)
    assert owner.flights.in_flight == {3}
    owner.tracked[0](Progress.DONE, None)
    assert owner.flights.in_flight == set()
    assert owner.told == [("lost", 3, FAILED), ("settled", 3, None)]


def test_a_wave_that_was_not_posted_has_settled() -> None:
    """The transport says that nothing moves."""
    owner = Owner()

    def refuse(_fabric):
        raise FAILED

    owner.flights.post(3, refuse, peer="p", size=1)
    assert owner.flights.in_flight == set()
    assert owner.told == [("settled", 3, FAILED)]
    assert not owner.tracked


def test_a_post_that_fails_in_no_known_way_leaves_the_wave_in_flight() -> None:
    """Nobody knows whether anything moves: fail closed."""
    owner = Owner()

    def break_down(_fabric):
        raise ZeroDivisionError

    owner.flights.post(3, break_down, peer="p", size=1)
    assert owner.flights.in_flight == {3}
    [(told, wave, cause)] = owner.told
    assert (told, wave) == ("lost", 3)
    assert isinstance(cause, FerryInternalError)
    assert isinstance(cause.__cause__, ZeroDivisionError)
    assert owner.left == ["p"]


def test_a_wave_makes_room_once() -> None:
    """When it is lost, and not again when it settles: no lost wave keeps others back."""
    owner = Owner()
    owner.post(3)
    owner.post(4)
    owner.tracked[0](Progress.LOST, FAILED)
    owner.tracked[0](Progress.DONE, None)
    assert owner.left == ["p"]
    owner.tracked[1](Progress.DONE, None)
    assert owner.left == ["p", "p"]


def test_what_waits_for_its_turn_is_dropped_as_settled() -> None:
    """It counts as in flight until then, and is never posted."""
    owner = Owner()
    owner.post(3)
    owner.is_full = True
    owner.post(4)
    owner.post(5)
    assert owner.flights.in_flight == {3, 4, 5}
    owner.flights.drop_waiting()
    assert owner.flights.in_flight == {3}
    assert [(told, wave) for told, wave, _ in owner.told] == [
        ("settled", 4),
        ("settled", 5),
    ]
    assert len(owner.tracked) == 1


def test_a_wave_with_more_to_do_settles_when_that_is_done() -> None:
    """Only if its bytes have arrived: of a failed one nothing is put in place."""
    owner, landed = Owner(), []
    for wave in (3, 4):
        owner.post(wave, on_landed=lambda wave=wave: landed.append(wave))
    owner.tracked[0](Progress.DONE, None)
    assert landed == [3]
    assert owner.flights.in_flight == {3, 4}
    owner.tracked[1](Progress.FAILED, FAILED)
    assert landed == [3]
    assert owner.flights.in_flight == {3}
    owner.flights.settle(3)
    assert owner.flights.in_flight == set()
    assert owner.told == [("settled", 4, FAILED), ("settled", 3, None)]
