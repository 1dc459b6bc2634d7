"""`Flights`: the waves of one request, from their post until they touch nothing more.

What a machine believes to be in flight is told by events, and after a bug of ours
it hears none. What is in flight is known here, whatever became of the request.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvferry.engine.fabric.base import Progress
from kvferry.protocol.errors import FerryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.engine.fabric.base import Fabric, Transfer
    from kvferry.engine.pump import Pump

__all__ = ("Flights",)


class Flights:
    """What of one request may still touch memory.

    Invariant: a wave is in flight from before its post until `settle`, and each is
    told as settled exactly once, before that as lost at most once.

    Attributes:
        in_flight: The numbers of these waves.
    """

    def __init__(
        self,
        fabric: Fabric,
        pump: Pump,
        *,
        on_settled: Callable[[int, FerryError | None], None],
        on_lost: Callable[[int, FerryError], None],
    ) -> None:
        """Nothing in flight; the calls must not raise or block.

        Args:
            fabric: Transfers are posted on it.
            pump: Follows them to their end.
            on_settled: Nothing of the wave touches memory any more; with the cause
                if not all of its bytes arrived.
            on_lost: The transport no longer knows the wave, and its bytes may
                still land.
        """
        self.in_flight: set[int] = set()
        self._fabric = fabric
        self._pump = pump
        self._on_settled = on_settled
        self._on_lost = on_lost

    def post(
        self,
        wave: int,
        start: Callable[[Fabric], Transfer],
        *,
        on_landed: Callable[[], None] | None = None,
    ) -> None:
        """Post a wave; it is told how it goes, now or later.

        Args:
            wave: Its number, not in flight.
            start: Posts it. A FerryError of it says that nothing was posted;
                after any other exception nobody knows, and it stays in flight.
            on_landed: Told instead of the end of a wave whose bytes have all
                arrived: whoever does more with them calls `settle` then.
        """
        self.in_flight.add(wave)
        try:
            transfer = start(self._fabric)
        except FerryError as error:
            self.settle(wave, error)
            return
        self._pump.track(transfer, partial(self._progressed, wave, on_landed))

    def settle(self, wave: int, cause: FerryError | None = None) -> None:
        """Nothing touches memory for this wave any more."""
        self.in_flight.discard(wave)
        self._on_settled(wave, cause)

    def _progressed(
        self,
        wave: int,
        on_landed: Callable[[], None] | None,
        progress: Progress,
        cause: FerryError | None,
    ) -> None:
        if progress is Progress.LOST and cause is not None:
            self._on_lost(wave, cause)
        elif cause is None and on_landed is not None:
            on_landed()
        else:
            self.settle(wave, cause)
