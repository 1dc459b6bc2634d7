"""The staging buffer: where bulk reads land, and who may use which part of it.

Divided into *berths*, one to a pull, and each of these into *cells*, one to a wave in
flight. A pull takes its berth as a whole before it reads and waits for nothing after
that, so pulls cannot lock each other out; they are served in the order they came.

Nothing is allocated before the first plan that lands in bulk. That is early enough:
only our own side of a transfer is ever in here, so no peer needs to know of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import trio

from kvferry.engine.cost import LandingPolicy
from kvferry.protocol.errors import FerryInternalError, MisuseError
from kvferry.protocol.layout import Region

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric
    from kvferry.engine.images import BulkSection
    from kvferry.engine.sections import Rows
    from kvferry.protocol.layout import Memory

__all__ = ("Berth", "Staging")


MAX_BERTHS = 64
"""More pulls at once share one network all the same."""


class Staging:
    """One buffer for each kind of memory and device that something lands on in bulk."""

    def __init__(self, config: EngineConfig, fabric: Fabric) -> None:
        self._fabric = fabric
        self._config = config
        self._buffers: dict[tuple[Memory, int], torch.Tensor] = {}
        self._is_off = False
        berths = config.staging_bytes // (config.wave_bytes * config.window)
        self.berths = min(berths, MAX_BERTHS)
        # The one given back last is taken first: its pages are there, and warm.
        self._free = list(range(self.berths))
        self._turn = trio.Semaphore(self.berths)

    @property
    def taken_berths(self) -> int:
        """How many pulls land in bulk now, or have left something unsettled."""
        return self.berths - len(self._free)

    @property
    def cells(self) -> int:
        """How many there are on one device."""
        return self.berths * self._config.window

    def policy(self) -> LandingPolicy:
        """What plans may choose from."""
        return LandingPolicy(
            landing=self._config.landing,
            image_bytes=0
            if self._is_off
            else self._config.wave_bytes * bool(self.berths),
            cost=self._config.cost,
        )

    def switch_off(self) -> None:
        """Plan no more bulk landings: there is no memory for them."""
        self._is_off = True

    def make_room(self, sections: Iterable[BulkSection]) -> None:
        """Allocate and register the buffers that these sections land in.

        Raises:
            MisuseError: One can be neither allocated nor registered.
        """
        for section in sections:
            self._add_buffer(section.local_memory, section.local_device)

    def rows(self, section: BulkSection) -> Rows:
        """The cells, each divided for the section's images: a row for each."""
        buffer = self._buffers[section.local_memory, section.local_device]
        rows = np.empty((self.cells, 5), dtype=np.uint64)
        size = self._config.wave_bytes
        rows[:, 0] = np.arange(self.cells) * size + buffer.data_ptr()
        image = section.image_bytes
        rows[:, 1:] = image, section.local_device, image, size // image
        return rows

    def cell(self, section: BulkSection, number: int) -> torch.Tensor:
        """The bytes of one cell, on the section's device."""
        size = self._config.wave_bytes
        buffer = self._buffers[section.local_memory, section.local_device]
        return buffer[number * size : (number + 1) * size]

    def ids(
        self, section: BulkSection, cell: int, images: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Local ids for so many images, from the cell's beginning on.

        Neighbours on the producer are neighbours here: NIXL joins them (row 12).
        """
        first = cell * (self._config.wave_bytes // section.image_bytes)
        return np.arange(first, first + images.size, dtype=np.int32)

    def take_now(self) -> Berth | None:
        """A berth that nobody waits for, if there is one."""
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            return None
        return self._berth()

    async def take(self) -> Berth:
        """Wait for a berth."""
        await self._turn.acquire()
        return self._berth()

    def _berth(self) -> Berth:
        return Berth(self._free.pop(), self._config.window)

    def give_back(self, berth: Berth) -> None:
        """Let the next pull have it; nothing may land in it any more."""
        self._free.append(berth.number)
        self._turn.release()

    def _add_buffer(self, memory: Memory, device: int) -> None:
        if (memory, device) in self._buffers:
            return
        where = torch.device("cpu" if memory == "DRAM" else f"cuda:{device}")
        size = self.cells * self._config.wave_bytes
        try:
            buffer = torch.empty(size, dtype=torch.uint8, device=where)
        except RuntimeError as exc:  # torch's out-of-memory errors are such
            raise MisuseError(f"no {size} bytes for staging on {where}") from exc
        self._fabric.register([Region(memory, device, buffer.data_ptr(), size)])
        self._buffers[memory, device] = buffer


class Berth:
    """One pull's cells.

    Invariant: a cell is used by one wave at a time, from its post until its bytes
    have been put in place or it has failed.
    """

    def __init__(self, number: int, cells: int) -> None:
        self.number = number
        self._free = list(range(number * cells, (number + 1) * cells))
        self._used: dict[int, int] = {}

    def enter(self, wave: int) -> int:
        """Give a wave a cell; there are as many as waves in flight.

        Raises:
            FerryInternalError: There are not.
        """
        if not self._free:
            raise FerryInternalError("more waves are in flight than the window allows")
        self._used[wave] = self._free.pop()
        return self._used[wave]

    def of(self, wave: int) -> int:
        """The wave's cell."""
        return self._used[wave]

    def leave(self, wave: int) -> None:
        """The wave has settled; one that has no cell changes nothing."""
        if wave in self._used:
            self._free.append(self._used.pop(wave))
