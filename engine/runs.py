"""Two parts of a field to runs: what is contiguous on both sides, and what is not.

The heart of the planner and deliberately small: a loop nest over all axes, each
with a local and a remote stride, out of which every axis that continues the run
on both sides is absorbed. No kind of layout is known here; a mismatch is a
number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.protocol.errors import ImpossiblePlan
from kvferry.protocol.layout import SHARD_AXIS, TOKEN_AXIS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvferry.protocol.layout import Axis, FieldLayout, PartLayout

__all__ = ("MAX_PIECES", "Loop", "Overlap", "Pieces", "check_pair", "pair_parts")

MAX_PIECES = 2**20
"""Most rows of one part: what a peer's layout may cost us."""


class Loop(NamedTuple):
    """One axis of the nest: its steps, and what a step is on either side, in bytes."""

    size: int
    local_stride: int
    remote_stride: int


class Overlap(NamedTuple):
    """Global shard units ``[first, last)`` that one source provides."""

    first: int
    last: int


class Pieces(NamedTuple):
    """The runs of one unit of one part, equally long.

    Attributes:
        local, remote: Offset of each run from its part's address, ``[P]``.
        run_bytes: Length of each.
        local_step, remote_step: Bytes from a unit to the next in the same kernel
            block; 0 for a state.
        loops: What is left of the nest around a run; unrolled, it is the offsets.
    """

    local: npt.NDArray[np.int64]
    remote: npt.NDArray[np.int64]
    run_bytes: int
    local_step: int
    remote_step: int
    loops: tuple[Loop, ...]


def check_pair(
    local: FieldLayout, ours: PartLayout, remote: FieldLayout, theirs: PartLayout
) -> None:
    """Both parts hold the same elements, but for the share of each.

    Raises:
        ImpossiblePlan: Naming the fact and both values.
    """
    where = f"layer {local.layer!r} field {local.name!r} part {ours.name!r}"
    facts: list[tuple[str, object, object]] = [
        ("dtype", local.dtype, remote.dtype),
        ("element bytes", local.element_bytes, remote.element_bytes),
        ("total units of the shard", ours.shard.total, theirs.shard.total),
    ]
    if ours.axes != theirs.axes:
        axes = (_plain_axes(ours.axes), _plain_axes(theirs.axes))
        facts.append(("plain axes", *axes))
    for fact, here, there in facts:
        if here != there:
            raise ImpossiblePlan(
                f"{where}: {fact}: {here!s:.512} here, {there!s:.512} there"
            )


def _plain_axes(axes: Sequence[Axis]) -> dict[str, int]:
    # An axis of one step says nothing: "b k n d" with one k is "b n d".
    special = {SHARD_AXIS, TOKEN_AXIS}
    return {a.name: a.size for a in axes if a.name not in special and a.size != 1}


def pair_parts(
    local: PartLayout,
    remote: PartLayout,
    overlap: Overlap,
    *,
    element_bytes: int,
    unit_tokens: int,
) -> Pieces:
    """The runs of one unit, as long as both sides allow.

    Args:
        local, remote: Checked by `check_pair`.
        overlap: Held by both.
        element_bytes: Where the run begins to grow.
        unit_tokens: Tokens in a unit; 0 for a state.

    Raises:
        ImpossiblePlan: More than `MAX_PIECES` runs in a unit.
    """
    ours = {axis.name: axis for axis in local.axes}
    theirs = {axis.name: axis for axis in remote.axes}
    sizes = {name: axis.size for name, axis in ours.items()}
    sizes[SHARD_AXIS] = overlap.last - overlap.first
    if unit_tokens:
        sizes[TOKEN_AXIS] = unit_tokens
    nest = [
        Loop(size, ours[name].stride, theirs[name].stride)
        for name, size in sizes.items()
        if size != 1
    ]
    run, rest = absorb(nest, element_bytes)
    if math.prod(loop.size for loop in rest) > MAX_PIECES:
        raise ImpossiblePlan(
            f"part {local.name!r} falls into more than {MAX_PIECES} runs a unit:"
            f" {rest} around {run} bytes"
        )
    local_head, remote_head = ours[SHARD_AXIS], theirs[SHARD_AXIS]
    return Pieces(
        (overlap.first - local.shard.first) * local_head.stride
        + unroll([(loop.size, loop.local_stride) for loop in rest]),
        (overlap.first - remote.shard.first) * remote_head.stride
        + unroll([(loop.size, loop.remote_stride) for loop in rest]),
        run,
        unit_tokens * ours[TOKEN_AXIS].stride if unit_tokens else 0,
        unit_tokens * theirs[TOKEN_AXIS].stride if unit_tokens else 0,
        tuple(rest),
    )


def absorb(nest: Sequence[Loop], run_bytes: int) -> tuple[int, list[Loop]]:
    """Grow the run by every axis that continues it on both sides, again and again."""
    rest = list(nest)
    while True:
        for loop in rest:
            if loop.local_stride == loop.remote_stride == run_bytes:
                run_bytes *= loop.size
                rest.remove(loop)
                break
        else:
            return run_bytes, rest


def unroll(loops: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Offsets of all index combinations of ``(size, stride)`` loops, the last fastest."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in loops:
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return offsets
