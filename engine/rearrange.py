"""Bulk landing, carried out: from the images in the staging buffer to the destination.

For every image of a wave one indexed copy, on the device where the destination is: no
loop over blocks, tokens or runs. The strides are those of the plan's loop nest, so a
copy writes the same bytes that direct runs would, and no others.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import trio

from kvferry.engine.finish import EVENT_POLL_S
from kvferry.protocol.errors import FerryInternalError, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvferry.engine.images import BulkSection, Image
    from kvferry.engine.runs import Loop
    from kvferry.engine.selection import BulkSelection, Piece

__all__ = ("Rearranger",)

THREAD_BYTES = 1024 * 1024
"""Copied in a worker thread from this size on: a hop costs 50 us (nixl-facts row 15),
and the next wave is read meanwhile, which on one host takes the loop's own thread."""

THREADS = 2
"""So that one goes on while the loop hears of the other's end; more would share one
memory bus, and take cores from whoever computes."""

# By width, to copy: widest first. No value is looked at, so any type will do.
_WIDTHS = {
    16: torch.complex128,
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}


class Rearranger:
    """Puts what has landed in bulk in its place.

    Args:
        storages: The bytes of every allocation of the cache.
    """

    def __init__(self, storages: Sequence[torch.Tensor]) -> None:
        self._storages = storages
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._threads = trio.CapacityLimiter(THREADS)

    async def run(
        self, selected: BulkSelection, wave: slice, cell: torch.Tensor
    ) -> None:
        """Put a wave that has landed in a cell in place.

        Returns when the cell may be used again.

        Raises:
            TransferFailed: Torch could not.
        """
        copy = partial(self._put, selected, wave, cell)
        try:
            if cell.device.type == "cuda":
                await self._run_cuda(cell.device, copy)
            elif selected.bytes_of(wave) < THREAD_BYTES:
                copy()
            else:
                await trio.to_thread.run_sync(copy, limiter=self._threads)
        except RuntimeError as exc:
            raise TransferFailed(f"could not put landed bytes in place: {exc}") from exc

    def _put(self, selected: BulkSelection, wave: slice, cell: torch.Tensor) -> None:
        """All copies of a wave; only queues them on a GPU."""
        for piece in selected.pieces(wave):
            for copy in self._copies(selected.section, piece, cell):
                copy.upload(cell.device)
                copy.apply()

    async def _run_cuda(self, device: torch.device, copy: Callable[[], None]) -> None:
        """On a stream of its own: like the bytes of a direct read, these wait for
        nothing that a caller has queued."""
        with torch.cuda.device(device):
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                copy()
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(stream)
        while not done.query():  # type: ignore[no-untyped-call]  # noqa: ASYNC110 - an event can only be polled
            await trio.sleep(EVENT_POLL_S)

    def _copies(
        self, section: BulkSection, piece: Piece, cell: torch.Tensor
    ) -> Iterator[_Copy]:
        for nest in self._nests(section, piece.image):
            image = piece.image
            grain = math.gcd(
                *(n for i in nest.loops for n in (i.local_stride, i.remote_stride)),
                *(i.local_stride + i.remote_stride for i in image.places),
                *(nest.address, nest.offset, image.run_bytes, image.image_bytes),
                *(nest.storage.data_ptr(), cell.data_ptr()),
                image.local_stride,
            )
            width = next(width for width in _WIDTHS if grain % width == 0)
            sizes = [i.size for i in nest.loops]
            local = _strided(
                nest.storage,
                nest.address - nest.storage.data_ptr(),
                (section.key.local.kernel_blocks, image.places[0].size, *sizes),
                (
                    image.local_stride,
                    image.places[0].local_stride,
                    *(i.local_stride for i in nest.loops),
                ),
                (image.run_bytes, width),
            )
            landed = _strided(
                cell,
                piece.slot * image.image_bytes + nest.offset,
                (piece.blocks, image.places[1].size, *sizes),
                (
                    image.image_bytes,
                    image.places[1].remote_stride,
                    *(i.remote_stride for i in nest.loops),
                ),
                (image.run_bytes, width),
            )
            yield _Copy(local, landed, piece)

    def _nests(self, section: BulkSection, image: Image) -> Iterator[_Nest]:
        """The image's loops, cut where one tensor cannot go: backwards, or from one
        allocation into another (a key and a value tensor)."""
        blocks = section.key.local.kernel_blocks
        span = (blocks - 1) * image.local_stride + image.run_bytes
        span += (image.places[0].size - 1) * image.places[0].local_stride
        loops = [i for i in image.loops if min(i.local_stride, i.remote_stride) >= 0]
        cut = [i for i in image.loops if min(i.local_stride, i.remote_stride) < 0]
        loops.sort(key=lambda i: i.local_stride * i.size)
        while True:
            reach = span + sum((i.size - 1) * i.local_stride for i in loops)
            starts = [
                (image.local_address + here, image.offset + there)
                for here, there in _corners(cut)
            ]
            storages = [self._storage_of(at, reach) for at, _ in starts]
            if all(storage is not None for storage in storages):
                break
            if not loops:
                raise FerryInternalError("a copy goes to none of the cache's tensors")
            cut.append(loops.pop())
        for (address, offset), storage in zip(starts, storages, strict=True):
            if storage is not None:
                yield _Nest(address, offset, tuple(loops), storage)

    def _storage_of(self, address: int, size: int) -> torch.Tensor | None:
        for storage in self._storages:
            first = storage.data_ptr()
            if first <= address and address + size <= first + storage.numel():
                return storage
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Nest:
    """Loops that one tensor can go along."""

    address: int
    offset: int
    loops: tuple[Loop, ...]
    storage: torch.Tensor


class _Copy:
    """One indexed copy: ``[block, place, loops..., run]`` on both sides."""

    def __init__(self, local: torch.Tensor, landed: torch.Tensor, piece: Piece) -> None:
        self._local = local
        self._landed = landed
        self._piece = piece
        self._at: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []

    def upload(self, device: torch.device) -> None:
        """Bring the indices to the device."""
        piece = self._piece
        self._at = [torch.as_tensor(ids, device=device) for ids in piece.local]
        if piece.is_whole:
            shape = (piece.blocks, -1)
            self._at = [ids.reshape(shape) for ids in self._at]
        else:
            self._from = [torch.as_tensor(ids, device=device) for ids in piece.remote]

    def apply(self) -> None:
        """Copy; only queues it on a GPU."""
        at, places = self._at, self._local.shape[1]
        local = self._local.select(1, 0) if places == 1 else self._local
        # Gathering what is whole would copy it once more.
        landed = self._landed[tuple(self._from)] if self._from else self._landed
        local.index_put_(tuple(at[:1] if places == 1 else at), landed)


def _corners(loops: Sequence[Loop]) -> Iterator[tuple[int, int]]:
    """Where each step of the loops begins, on both sides."""
    for steps in itertools.product(*(range(loop.size) for loop in loops)):
        pairs = list(zip(steps, loops, strict=True))
        yield (
            sum(n * i.local_stride for n, i in pairs),
            sum(n * i.remote_stride for n, i in pairs),
        )


def _strided(
    flat: torch.Tensor,
    offset: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    run: tuple[int, int],
) -> torch.Tensor:
    """A view of bytes, all numbers in bytes; a run is its length and the elements' width."""
    length, width = run
    elements = flat[: flat.numel() // width * width].view(_WIDTHS[width])
    return elements.as_strided(
        (*sizes, length // width),
        (*(stride // width for stride in strides), 1),
        elements.storage_offset() + offset // width,
    )
