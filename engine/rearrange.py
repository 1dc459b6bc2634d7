"""Bulk landing, carried out: from the images in the staging buffer to the destination.

For every image of a wave one indexed copy, on the device where the destination is: no
loop over blocks, tokens or runs. The strides are those of the plan's loop nest, so a
copy writes the same bytes that direct runs would, and no others.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import trio

from kvferry.engine.finish import EVENT_POLL_S
from kvferry.engine.guard import contained, guarded
from kvferry.engine.handover import Handover
from kvferry.engine.strided import Strided, copy_on
from kvferry.protocol.errors import FerryInternalError, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.images import BulkSection, Image
    from kvferry.engine.runs import Loop
    from kvferry.engine.selection import BulkSelection, Piece
    from kvferry.engine.strided import Copy
    from kvferry.protocol.errors import FerryError

    _Nests = Sequence[Sequence["_Nest"]]

__all__ = ("Rearranger",)

THREAD_BYTES = 1024 * 1024
"""Copied in a worker thread from this size on: a hop costs 50 us (nixl-facts row 15),
and the next wave is read meanwhile, which on one host takes the loop's own thread."""

THREADS = 2
"""So that one goes on while the loop hears of the other's end; more would share one
memory bus, and take cores from whoever computes."""


class Rearranger:
    """Puts what has landed in bulk in its place.

    Args:
        storages: The bytes of every allocation of the cache.
        nursery: The engine's: until a copy ends, it may touch blocks.
    """

    def __init__(self, storages: Sequence[torch.Tensor], nursery: trio.Nursery) -> None:
        self._storages = storages
        self._nursery = nursery
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._nests: WeakKeyDictionary[BulkSection, _Nests] = WeakKeyDictionary()
        self._beside = Handover(nursery, threads=THREADS)

    def expect(self, size: int) -> None:
        """A wave of so many bytes has been posted."""
        if size >= THREAD_BYTES:
            self._beside.expect()

    def put(
        self,
        selected: BulkSelection,
        wave: slice,
        cell: torch.Tensor,
        *,
        on_end: Callable[[FerryError | None], None],
        log: FilteringBoundLogger,
    ) -> None:
        """Put a wave that has landed in a cell in place, now or soon.

        Args:
            selected: What the wave is a slice of.
            wave: Which slice.
            cell: Where it has landed.
            on_end: Told on the loop when the cell may be used again; with the cause,
                a TransferFailed, if not all is in place.
            log: Bound to the request.
        """
        job = _Job(partial(self._put, selected, wave, cell), on_end, log)
        if cell.device.type == "cuda":
            self._nursery.start_soon(self._on_device, cell.device, job)
        elif selected.bytes_of(wave) < THREAD_BYTES:
            job.make()
            job.tell()
        else:
            self._beside.hand(job.make, job.tell)

    def _put(self, selected: BulkSelection, wave: slice, cell: torch.Tensor) -> None:
        """All copies of a wave; only queues them on a GPU."""
        section, copy = selected.section, copy_on(cell.device)
        nests = self._nests_of(section)
        for piece in selected.pieces(wave):
            for nest in nests[piece.number]:
                _copy(section, piece, nest, cell, copy)

    def _nests_of(self, section: BulkSection) -> _Nests:
        """Of each of its images; found once."""
        nests = self._nests.get(section)
        if nests is None:
            nests = [tuple(self._cut(section, image)) for image in section.images]
            self._nests[section] = nests
        return nests

    async def _on_device(self, device: torch.device, job: _Job) -> None:
        await guarded(
            partial(self._run_cuda, device, job.copy), on_failure=job.fail, log=job.log
        )
        job.tell()

    async def _run_cuda(self, device: torch.device, copy: Callable[[], None]) -> None:
        """On a stream of its own: like the bytes of a direct read, these wait for
        nothing that a caller has queued."""
        with _translated(), torch.cuda.device(device):
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                copy()
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(stream)
            while not done.query():  # type: ignore[no-untyped-call]  # noqa: ASYNC110 - an event can only be polled
                await trio.sleep(EVENT_POLL_S)

    def _cut(self, section: BulkSection, image: Image) -> Iterator[_Nest]:
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


class _Job:
    """The copies of a wave, and who is told when they are made."""

    def __init__(
        self,
        copy: Callable[[], None],
        on_end: Callable[[FerryError | None], None],
        log: FilteringBoundLogger,
    ) -> None:
        self.copy = copy
        self.log = log
        self._on_end = on_end
        self._cause: FerryError | None = None

    def make(self) -> None:
        """Copy, on whatever thread."""
        contained(self._make, on_failure=self.fail, log=self.log)

    def fail(self, cause: FerryError) -> None:
        """Not all is in place."""
        self._cause = cause

    def tell(self) -> None:
        """Nothing is copied any more."""
        self._on_end(self._cause)

    def _make(self) -> None:
        with _translated():
            self.copy()


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as exc:
        raise TransferFailed(f"could not put landed bytes in place: {exc}") from exc


@dataclass(frozen=True, slots=True, eq=False)
class _Nest:
    """Loops that one tensor can go along."""

    address: int
    offset: int
    loops: tuple[Loop, ...]
    storage: torch.Tensor


def _copy(
    section: BulkSection, piece: Piece, nest: _Nest, cell: torch.Tensor, copy: Copy
) -> None:
    """Put what a wave brings of an image in place, as far as one tensor goes."""
    image = section.images[piece.number]
    here, there = image.places
    sizes = tuple(loop.size for loop in nest.loops)
    landed = Strided(
        cell,
        piece.slot * image.image_bytes + nest.offset,
        (piece.blocks, there.size, *sizes),
        (
            image.image_bytes,
            there.remote_stride,
            *(loop.remote_stride for loop in nest.loops),
        ),
        image.run_bytes,
    )
    local = Strided(
        nest.storage,
        nest.address - nest.storage.data_ptr(),
        (section.key.local.kernel_blocks, here.size, *sizes),
        (
            image.local_stride,
            here.local_stride,
            *(loop.local_stride for loop in nest.loops),
        ),
        image.run_bytes,
    )
    if piece.is_whole:
        # Gathering what is whole would copy it once more.
        at, picked = tuple(ids.reshape(piece.blocks, -1) for ids in piece.local), ()
        copy(local, at, landed, picked)
    else:
        copy(local, piece.local, landed, piece.remote)


def _corners(loops: Sequence[Loop]) -> Iterator[tuple[int, int]]:
    """Where each step of the loops begins, on both sides."""
    for steps in itertools.product(*(range(loop.size) for loop in loops)):
        pairs = list(zip(steps, loops, strict=True))
        yield (
            sum(n * i.local_stride for n, i in pairs),
            sum(n * i.remote_stride for n, i in pairs),
        )
