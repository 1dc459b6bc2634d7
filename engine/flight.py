"""`Flights`: the waves of one request, from their post until they touch nothing more.

What a machine believes to be in flight is told by events, and after a bug of ours
it hears none. What is in flight is known here, whatever became of the request.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvferry.engine.fabric.base import Progress
from kvferry.engine.guard import contained
from kvferry.engine.traffic import Lane, Turn
from kvferry.protocol.errors import FerryError, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.fabric.base import Fabric, Transfer
    from kvferry.engine.pump import Pump
    from kvferry.engine.traffic import Traffic

__all__ = ("Flights",)


class Flights:
    """What of one request may still touch memory.

    Invariant: a wave is in flight from when it asks to be posted until `settle`, and
    each is told as settled exactly once, before that as lost at most once.

    Attributes:
        in_flight: The numbers of these waves.
    """

    def __init__(  # noqa: PLR0913 - what it works with, and whom it tells
        self,
        fabric: Fabric,
        pump: Pump,
        traffic: Traffic,
        *,
        on_settled: Callable[[int, FerryError | None], None],
        on_lost: Callable[[int, FerryError], None],
        log: FilteringBoundLogger,
        priority: int = 0,
    ) -> None:
        """Nothing in flight; the calls must not raise or block.

        Args:
            fabric: Transfers are posted on it.
            pump: Follows them to their end.
            traffic: Says when a wave may be posted.
            on_settled: Nothing of the wave touches memory any more; with the cause
                if not all of its bytes arrived.
            on_lost: Nobody knows the wave any more, and its bytes may still land.
            log: Bound to the request.
            priority: Waves of a higher number are posted first.
        """
        self.in_flight: set[int] = set()
        self._fabric = fabric
        self._pump = pump
        self._traffic = traffic
        self._lane = Lane(priority)
        self._posted: dict[int, Turn] = {}  # what the traffic counts
        self._on_settled = on_settled
        self._on_lost = on_lost
        self._log = log

    def post(
        self,
        wave: int,
        start: Callable[[Fabric], Transfer],
        *,
        peer: str,
        size: int,
        on_landed: Callable[[], None] | None = None,
    ) -> None:
        """Post a wave when it is its turn; it is told how it goes, now or later.

        Args:
            wave: Its number, not in flight.
            start: Posts it. A FerryError of it says that nothing was posted;
                after any other exception nobody knows, and it stays in flight.
            peer: Whom it is from or for.
            size: About how many bytes it has.
            on_landed: Told instead of the end of a wave whose bytes have all
                arrived: whoever does more with them calls `settle` then.
        """
        self.in_flight.add(wave)
        go = partial(self._go, wave, start, on_landed)
        self._traffic.ask(self._lane, Turn(wave, peer, size, go))

    def drop_waiting(self) -> None:
        """What has not been posted yet never will be: it settles now."""
        for turn in self._traffic.drop(self._lane):
            self.settle(turn.wave, TransferFailed("the request ended before its turn"))

    def settle(self, wave: int, cause: FerryError | None = None) -> None:
        """Nothing touches memory for this wave any more."""
        self.in_flight.discard(wave)
        self._on_settled(wave, cause)

    def _go(
        self,
        wave: int,
        start: Callable[[Fabric], Transfer],
        on_landed: Callable[[], None] | None,
        turn: Turn,
    ) -> None:
        """It is the wave's turn, perhaps in somebody else's step: nothing gets out."""
        self._posted[wave] = turn
        contained(
            partial(self._start, wave, start, on_landed),
            on_failure=partial(self._lose, wave),
            log=self._log,
        )

    def _start(
        self,
        wave: int,
        start: Callable[[Fabric], Transfer],
        on_landed: Callable[[], None] | None,
    ) -> None:
        try:
            transfer = start(self._fabric)
        except FerryError as error:
            self._leave(wave)
            self.settle(wave, error)
        else:
            self._pump.track(transfer, partial(self._progressed, wave, on_landed))

    def _lose(self, wave: int, bug: FerryError) -> None:
        self._leave(wave)
        self._on_lost(wave, bug)

    def _leave(self, wave: int) -> None:
        """Make room for others; a wave that is lost keeps none for ever."""
        turn = self._posted.pop(wave, None)
        if turn is not None:
            self._traffic.leave(turn.peer, turn.size)

    def _progressed(
        self,
        wave: int,
        on_landed: Callable[[], None] | None,
        progress: Progress,
        cause: FerryError | None,
    ) -> None:
        self._leave(wave)
        if progress is Progress.LOST and cause is not None:
            self._on_lost(wave, cause)
        elif cause is None and on_landed is not None:
            on_landed()
        else:
            self.settle(wave, cause)
