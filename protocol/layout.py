"""What a rank advertises about its cache: where the bytes of (layer, field, unit, token) live.

All of it is plain numbers: base addresses, strides and sizes in bytes, shards
in global units. An axis order, a head split, a kernel block or a padded page is
not a kind here, only another set of numbers. This file holds no policy: what
two layouts have in common is `kvferry.engine.plan`'s business, what must agree
is `kvferry.protocol.identity`'s.

Addresses in a layout are the owner's virtual addresses. They mean nothing on
another host but as operands of a transfer, and are never dereferenced here.

A layout is hundreds of objects, and there is one of each peer: no collector has to
look at them (``gc=False``), as numbers and names in tuples cannot form a cycle.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvferry.protocol.errors import CacheError

__all__ = (
    "MAX_PARTS",
    "SHARD_AXIS",
    "TOKEN_AXIS",
    "Axis",
    "CacheLayout",
    "FieldLayout",
    "GroupLayout",
    "Memory",
    "PartLayout",
    "Region",
    "Shard",
)

SHARD_AXIS = "h"
"""The axis of a part that is split between ranks: heads, channels, head groups."""

TOKEN_AXIS = "n"
"""The axis of a part that counts the tokens inside one kernel block."""

Memory = Literal["DRAM", "VRAM"]
"""Where a field lives, in NIXL's words: host or device memory."""

MAX_PARTS = 8192
"""Most parts in all groups of a layout: 1,000 layers of two fields of four parts each.

Whoever compares or plans looks at each of them, so this bounds what a peer's layout
costs before anything of it is believed.
"""

# Bounds of what a peer may claim, far above any real model: they keep a
# hostile card from costing memory or time.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Address = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Stride = Annotated[int, msgspec.Meta(gt=-(2**62), lt=2**62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The half-open range ``[first, last)`` of ``total`` global units that a rank holds."""

    total: Count
    first: Count
    last: Count

    @property
    def size(self) -> int:
        """How many units the rank holds."""
        return self.last - self.first


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One axis inside a block: ``size`` steps of ``stride`` bytes each.

    The stride may be negative or larger than anything inside the block: key and
    value in two tensors are one axis of size 2 whose stride is the distance
    between the tensors.
    """

    name: Name
    size: Count
    stride: Stride


class PartLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A piece of a field that is sharded by itself.

    Attributes:
        name: Unique in its field; both sides pair parts by name.
        shard: The global units of `SHARD_AXIS` held here; their number is that
            axis's size. A replicated part says ``Shard(1, 0, 1)``.
        address: Of the element at index 0 of every axis, in block 0.
        axes: Every axis but the block axis, the element axis included. Exactly
            one is `SHARD_AXIS`; attention parts have exactly one `TOKEN_AXIS`.
    """

    name: Name
    shard: Shard
    address: Address
    axes: Annotated[tuple[Axis, ...], msgspec.Meta(max_length=8)]


class FieldLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor family inside a layer: ``kv``, ``latent``, ``conv``, ``ssm``.

    Attributes:
        layer: The layer's name; both sides pair fields by (layer, name).
        element_bytes: Width of one element of ``dtype``.
        blocks: Kernel blocks (for a state: slots) in the pool.
        block_stride: Bytes from one kernel block to the next; padding shows as a
            stride larger than the block's own bytes.
        block_tokens: Tokens in a kernel block; 0 for a state, which is not
            addressed by token.
    """

    layer: Name
    name: Name
    dtype: Name
    element_bytes: Annotated[int, msgspec.Meta(ge=1, le=64)]
    memory: Memory
    device: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    blocks: Count
    block_stride: Stride
    block_tokens: Count
    parts: Annotated[tuple[PartLayout, ...], msgspec.Meta(min_length=1, max_length=64)]


class GroupLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Layers that share one block table.

    Attributes:
        block_size: Tokens in a logical block, the unit of the scheduler's block
            ids; 0 for a state group, whose ids are slots.
        blocks: Logical blocks (slots) in the pool: ids are in ``[0, blocks)``.
        window: The attention reaches back over this many tokens, the current one
            included; None reaches back to token 0.
        context_size, context_rank, context_interleave: Context parallelism: this
            rank holds token ``t`` if ``t // interleave % size == rank``, and only
            tokens it holds take up places in its blocks.
    """

    name: Name
    block_size: Count
    blocks: Count
    fields: Annotated[tuple[FieldLayout, ...], msgspec.Meta(max_length=MAX_PARTS)]
    window: Annotated[int, msgspec.Meta(ge=1, le=2**40)] | None = None
    context_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 1
    context_rank: Annotated[int, msgspec.Meta(ge=0, lt=2**16)] = 0
    context_interleave: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 1


class Region(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, order=True
):
    """One stretch of registered memory."""

    memory: Memory
    device: Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
    address: Address
    size: Count


class CacheLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Everything one rank holds: its registered memory and its groups."""

    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=2**14)]
    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(max_length=256)]

    def __post_init__(self) -> None:
        """Refuse more parts than anybody is to look at.

        Raises:
            CacheError: There are more than `MAX_PARTS`.
        """
        parts = sum(len(f.parts) for group in self.groups for f in group.fields)
        if parts > MAX_PARTS:
            raise CacheError(
                f"a layout of {parts} parts, at most {MAX_PARTS} are taken"
            )
