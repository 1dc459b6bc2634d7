"""Whether a layout makes sense in itself, before anything is computed from it.

A layout may come from a peer: everything the planner's arithmetic relies on is
checked here, once per peer, and nothing is trusted because of where it came
from. Whether two layouts fit together is the planner's question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.protocol.errors import ImpossiblePlan
from kvferry.protocol.layout import SHARD_AXIS, TOKEN_AXIS

if TYPE_CHECKING:
    from kvferry.protocol.layout import (
        Axis,
        CacheLayout,
        FieldLayout,
        GroupLayout,
        PartLayout,
    )

__all__ = ("check_layout",)

_LIMIT = 2**61
"""Bound of every extent in bytes: sums of a few of them stay inside 64 bits."""


def check_layout(layout: CacheLayout, *, side: str) -> None:
    """Sizes, axes, shards and names agree with each other.

    Args:
        layout: Ours or a peer's.
        side: Whose, for the message.

    Raises:
        ImpossiblePlan: With the first number that contradicts another.
    """
    names = [group.name for group in layout.groups]
    if len(set(names)) != len(names):
        raise ImpossiblePlan(f"{side}: a group name is used twice: {names!s:.256}")
    known: set[tuple[object, ...]] = set()
    for group in layout.groups:
        _check_group(group, side)
        for field in group.fields:
            for part in field.parts:
                # Equal layers are looked at once.
                geometry = (part.axes, part.shard, *field_numbers(field))
                if geometry not in known:
                    _check_part(field, part, f"{side}: {_where(group, field, part)}")
                    known.add(geometry)


def field_numbers(field: FieldLayout) -> tuple[int, ...]:
    """What of a field bears on its parts' geometry."""
    return field.element_bytes, field.blocks, field.block_stride, field.block_tokens


def _where(group: GroupLayout, field: FieldLayout, part: PartLayout) -> str:
    return f"group {group.name!r} layer {field.layer!r} {field.name!r}.{part.name!r}"


def _check_group(group: GroupLayout, side: str) -> None:
    where = f"{side}: group {group.name!r}"
    if group.context_rank >= group.context_size:
        raise ImpossiblePlan(
            f"{where}: context rank {group.context_rank} of {group.context_size}"
        )
    if group.context_size > 1 and group.block_size % group.context_interleave:
        # Else a span that begins at a block would not begin at a turn of the ranks.
        raise ImpossiblePlan(
            f"{where}: the block size {group.block_size} is not a multiple of the"
            f" context interleave {group.context_interleave}"
        )
    if not group.block_size and (group.context_size > 1 or group.window is not None):
        raise ImpossiblePlan(f"{where}: a state has neither window nor context ranks")
    seen = set()
    for field in group.fields:
        if (field.layer, field.name) in seen:
            raise ImpossiblePlan(
                f"{where}: layer {field.layer!r} field {field.name!r} is there twice"
            )
        seen.add((field.layer, field.name))
        names = [part.name for part in field.parts]
        if len(set(names)) != len(names):
            raise ImpossiblePlan(
                f"{where}: layer {field.layer!r}: a part name is used twice:"
                f" {names!s:.256}"
            )
        _check_blocks(group, field, where)


def _check_blocks(group: GroupLayout, field: FieldLayout, where: str) -> None:
    where = f"{where} layer {field.layer!r} field {field.name!r}"
    if (group.block_size == 0) != (field.block_tokens == 0):
        raise ImpossiblePlan(
            f"{where}: kernel blocks of {field.block_tokens} tokens in logical blocks of"
            f" {group.block_size}"
        )
    ratio = 1
    if group.block_size:
        ratio, rest = divmod(group.block_size, field.block_tokens)
        if rest:
            raise ImpossiblePlan(
                f"{where}: the block size {group.block_size} is not a multiple of the"
                f" kernel block's {field.block_tokens} tokens"
            )
    if not 0 < field.blocks == group.blocks * ratio:
        raise ImpossiblePlan(
            f"{where}: {field.blocks} kernel blocks for {group.blocks} blocks of"
            f" {ratio} each"
        )
    if field.block_stride < min(field.blocks - 1, 1):
        raise ImpossiblePlan(f"{where}: a block stride of {field.block_stride} bytes")


def _check_part(field: FieldLayout, part: PartLayout, where: str) -> None:
    axes = {axis.name: axis for axis in part.axes}
    if len(axes) != len(part.axes):
        raise ImpossiblePlan(
            f"{where}: an axis name is used twice: {list(axes)!s:.256}"
        )
    shard = part.shard
    if not 0 <= shard.first < shard.last <= shard.total:
        raise ImpossiblePlan(
            f"{where}: shard [{shard.first}, {shard.last}) of {shard.total}"
        )
    _check_size(axes, SHARD_AXIS, shard.size, where)
    if field.block_tokens:
        _check_size(axes, TOKEN_AXIS, field.block_tokens, where)
    elif TOKEN_AXIS in axes:
        raise ImpossiblePlan(f"{where}: a state has no axis {TOKEN_AXIS!r}")
    extents = [abs(axis.stride) * axis.size for axis in part.axes]
    if sum(extents) + abs(field.block_stride) * field.blocks >= _LIMIT:
        raise ImpossiblePlan(
            f"{where}: strides reach beyond any memory: {part.axes!s:.512}"
        )
    if min(axis.size for axis in part.axes) < 1:
        raise ImpossiblePlan(f"{where}: an axis without elements: {part.axes!s:.512}")


def _check_size(axes: dict[str, Axis], name: str, size: int, where: str) -> None:
    if name not in axes:
        raise ImpossiblePlan(f"{where}: no axis {name!r} among {list(axes)!s:.256}")
    if axes[name].size != size:
        raise ImpossiblePlan(
            f"{where}: axis {name!r} has {axes[name].size} steps, not {size}"
        )
