"""The proof that rows write what was asked: every byte once, inside registered memory.

Independent of how the rows were made: it looks at the local layout alone,
enumerates the bytes of one block of every field, and compares them with the
bytes of the rows. Both are brought into one normal form first (sorted, joined
runs), so equal sets of bytes are equal arrays.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from kvferry.protocol.errors import FerryInternalError, ImpossiblePlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from kvferry.protocol.layout import Axis, FieldLayout, Memory, Region

    Rows = npt.NDArray[np.uint64]
    Offsets = npt.NDArray[np.int64]

__all__ = (
    "are_outside",
    "block_rows",
    "normal_form",
    "prove_coverage",
    "prove_inside",
    "region_edges",
)

Geometry = tuple[int, tuple["Axis", ...]]


def prove_coverage(
    fields: Sequence[FieldLayout], rows: Sequence[Rows], *, what: str
) -> None:
    """The rows write exactly the bytes of every block of the fields, each once.

    Args:
        fields: All of one memory kind.
        rows: The local rows of every source that together fill them.
        what: Whose rows, for the message.

    Raises:
        FerryInternalError: A byte is missing, written twice, or not a field's.
    """
    if not rows:
        raise FerryInternalError(f"{what}: the plan has no rows at all")
    written = normal_form(np.concatenate(rows), what=what)
    wanted = normal_form(block_rows(fields), what=what)
    if not np.array_equal(written, wanted):
        raise FerryInternalError(
            f"{what}: the plan writes {_total(written)} bytes a block in"
            f" {len(written)} stretches, {_total(wanted)} bytes in {len(wanted)} were"
            " asked, and they are not the same"
        )


def block_rows(fields: Iterable[FieldLayout]) -> Rows:
    """The bytes of all fields' blocks, as rows: one per stretch of the block.

    Equal geometries are enumerated once: 61 equal layers cost as one.
    """
    alike: dict[Geometry, list[tuple[int, ...]]] = defaultdict(list)
    for field in fields:
        placing = field.device, field.block_stride, field.blocks
        for part in field.parts:
            alike[field.element_bytes, part.axes].append((part.address, *placing))
    found = []
    for geometry, placings in alike.items():
        offsets, run = _stretches(*geometry)
        placed = np.array(placings, dtype=np.int64)[:, None]
        rows = np.empty((len(placings), offsets.size, 5), dtype=np.uint64)
        rows[:, :, 0] = placed[:, :, 0] + offsets
        rows[:, :, 1] = run
        rows[:, :, 2:] = placed[:, :, 1:]
        found.append(rows.reshape(-1, 5))
    return np.concatenate(found)


def _stretches(element_bytes: int, axes: Sequence[Axis]) -> tuple[Offsets, int]:
    """Offsets of one part's bytes in a block, and the length of each stretch."""
    offsets, run = np.zeros(1, dtype=np.int64), element_bytes
    for axis in sorted(axes, key=lambda axis: abs(axis.stride)):
        if axis.stride == run and offsets.size == 1:
            run *= axis.size
        else:
            steps = np.arange(axis.size, dtype=np.int64) * axis.stride
            offsets = (offsets[:, None] + steps).ravel()
    return offsets, run


def normal_form(rows: Rows, *, what: str) -> Rows:
    """Rows sorted by device and address, neighbours joined.

    Raises:
        FerryInternalError: Two rows share a byte of their first block.
    """
    rows = rows[np.lexsort((rows[:, 0], rows[:, 2]))]
    rows[rows[:, 4] == 1, 3] = 0  # the stride of a single block says nothing
    ends = rows[:-1, 0] + rows[:-1, 1]
    same_device = rows[1:, 2] == rows[:-1, 2]
    twice = np.flatnonzero(same_device & (rows[1:, 0] < ends))
    if twice.size:
        address = int(rows[twice[0] + 1, 0])
        raise FerryInternalError(f"{what}: byte {address:#x} would be written twice")
    joins = (rows[1:, 0] == ends) & (rows[1:, 2:] == rows[:-1, 2:]).all(axis=1)
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    merged = rows[heads]
    merged[:, 1] = np.add.reduceat(rows[:, 1], heads)
    return merged


def _total(rows: Rows) -> int:
    return int(rows[:, 1].sum())


def prove_inside(
    rows: Rows, regions: Iterable[Region], *, memory: Memory, side: str
) -> None:
    """Every descriptor of every row lies inside one registered region.

    Raises:
        ImpossiblePlan: With the first row that does not. The side advertised
            fields that it has not registered.
    """
    wrong = np.flatnonzero(are_outside(rows, regions, memory=memory))
    if wrong.size:
        address, run, device, stride, count = rows[wrong[0]].tolist()
        raise ImpossiblePlan(
            f"{side} {memory} {device}: {count} runs of {run} bytes from {address:#x},"
            f" {stride} apart, are not inside one registered region"
        )


def are_outside(
    rows: Rows, regions: Iterable[Region], *, memory: Memory
) -> npt.NDArray[np.bool_]:
    """Which rows have a descriptor that does not lie inside one registered region."""
    outside = np.ones(len(rows), dtype=np.bool_)
    by_device: dict[int, list[Region]] = defaultdict(list)
    for region in sorted(region for region in regions if region.memory == memory):
        by_device[region.device].append(region)
    # Row by row at its own device: a peer may name as many devices as it likes.
    order = np.argsort(rows[:, 2], kind="stable")
    devices, firsts = np.unique(rows[order, 2], return_index=True)
    for device, its_rows in zip(
        devices.tolist(), np.split(order, firsts[1:]), strict=True
    ):
        if here := by_device.get(device):
            outside[its_rows] = _are_outside(rows[its_rows], here)
    return outside


def _are_outside(rows: Rows, regions: Sequence[Region]) -> npt.NDArray[np.bool_]:
    """As `are_outside`, all on one device, the regions sorted."""
    starts = np.array([region.address for region in regions], dtype=np.uint64)
    ends = np.array([r.address + r.size for r in regions], dtype=np.uint64)
    at = np.searchsorted(starts, rows[:, 0], side="right") - 1
    last = rows[:, 0] + rows[:, 1] + rows[:, 3] * (rows[:, 4] - np.uint64(1))
    # A peer's address may be anything: without the second test it could wrap.
    outside: npt.NDArray[np.bool_] = (
        (at < 0) | (rows[:, 0] > ends[at]) | (last > ends[at])
    )
    return outside


def region_edges(regions: Iterable[Region]) -> npt.NDArray[np.int64]:
    """Where regions begin."""
    return np.array([region.address for region in regions], dtype=np.int64)
