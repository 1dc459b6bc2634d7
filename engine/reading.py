"""`Reading`: the waves of one pull, and how their bytes get into place.

Most land where they belong. Those in bulk land in a cell of the staging buffer
and are rearranged from there; until that has ended they count as in flight.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvferry.engine.fabric.base import Operation
from kvferry.engine.flight import Flights
from kvferry.engine.selection import BulkSelection
from kvferry.engine.waves import Waves
from kvferry.protocol.errors import FerryInternalError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.fabric.base import Fabric, Transfer
    from kvferry.engine.selection import Selection
    from kvferry.engine.services import Services
    from kvferry.engine.sources import Sources
    from kvferry.engine.staging import Berth
    from kvferry.engine.waves import Wave
    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.identity import EngineKey

__all__ = ("Reading",)


class Reading:
    """One pull's waves.

    Attributes:
        waves: In posting order.
        in_flight: Numbers of those that may still touch our blocks or the berth.
    """

    def __init__(  # noqa: PLR0913 - what a pull knows after its plan
        self,
        services: Services,
        sources: Sources,
        selection: Selection[EngineKey],
        *,
        is_wanted: Callable[[], bool],
        on_settled: Callable[[int, FerryError | None], None],
        on_lost: Callable[[int, FerryError], None],
        priority: int,
        log: FilteringBoundLogger,
    ) -> None:
        """Cut the selection into waves; nothing is posted yet.

        Args:
            services: The engine's.
            sources: Held by the pull until nothing is in flight.
            selection: What is read.
            is_wanted: Whether bytes that landed in bulk are still to be put in place.
            on_settled: As in `Flights`.
            on_lost: As in `Flights`.
            priority: As in `Flights`.
            log: Bound to the request.
        """
        self.waves = Waves(
            selection,
            [peer.key for peer in sources.peers],
            max_bytes=services.config.wave_bytes,
        )
        self._services = services
        self._prepared = sources.prepared
        self._agents = [peer.agent for peer in sources.peers]
        self._is_wanted = is_wanted
        self._log = log
        self._berth: Berth | None = None
        self._on_settled = on_settled
        self._flights = Flights(
            services.fabric,
            services.pump,
            services.traffic,
            on_settled=self._settled,
            on_lost=on_lost,
            log=log,
            priority=priority,
        )
        self.in_flight = self._flights.in_flight

    @property
    def needs_berth(self) -> bool:
        """Whether any wave lands in bulk."""
        return self.waves.are_bulk

    def take_berth_now(self) -> bool:
        """Take room in the staging buffer if there is some; whether that is so."""
        self._berth = self._services.staging.take_now()
        return self._berth is not None

    async def take_berth(self) -> None:
        """Wait for room in the staging buffer; no wave ever waits after this."""
        self._berth = await self._services.staging.take()

    def give_back_berth(self) -> None:
        """Let the next pull have it; nothing may be in flight."""
        if self._berth is not None:
            self._services.staging.give_back(self._berth)
            self._berth = None

    def drop_waiting(self) -> None:
        """What has not been posted yet never will be."""
        self._flights.drop_waiting()

    def post(self, number: int) -> None:
        """Post one wave when it is its turn; it is told how it goes, now or later."""
        wave = self.waves[number]
        local_ids = self._local_ids(number, wave)
        self._flights.post(
            number,
            partial(self._start, wave, local_ids),
            peer=self._agents[wave.source],
            size=wave.bytes,
            on_landed=partial(self._landed, number) if wave.is_bulk else None,
        )

    def _start(
        self, wave: Wave, local_ids: npt.NDArray[np.int32], fabric: Fabric
    ) -> Transfer:
        ours, theirs = self._prepared[wave.source][wave.selected.index]
        remote_ids = wave.selected.remote_ids[wave.slice]
        return fabric.post(Operation.READ, ours, local_ids, theirs, remote_ids)

    def _local_ids(self, number: int, wave: Wave) -> npt.NDArray[np.int32]:
        selected = wave.selected
        if not isinstance(selected, BulkSelection):
            return selected.local_ids[wave.slice]
        cell = self._held_berth().enter(number)
        self._services.rearranger.expect(wave.bytes)
        images = selected.remote_ids[wave.slice]
        return self._services.staging.ids(selected.section, cell, images)

    def _landed(self, number: int) -> None:
        _, selected, wave = self.waves[number]
        if self._is_wanted() and isinstance(selected, BulkSelection):
            cell = self._held_berth().of(number)
            self._services.rearranger.put(
                selected,
                wave,
                self._services.staging.cell(selected.section, cell),
                on_end=partial(self._flights.settle, number),
                log=self._log,
            )
        else:
            self._flights.settle(number)

    def _settled(self, number: int, cause: FerryError | None) -> None:
        if self._berth is not None:
            self._berth.leave(number)
        self._on_settled(number, cause)

    def _held_berth(self) -> Berth:
        if self._berth is None:
            raise FerryInternalError("a wave landed in bulk without a berth")
        return self._berth
