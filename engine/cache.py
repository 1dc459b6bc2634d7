"""Torch tensors and axis names to a `CacheLayout`: how a caller describes its cache.

Strides, offsets and addresses come from the tensors themselves; names are never
trusted over strides. Nothing is copied and nothing computed on: the tensors stay
the caller's, who keeps them where they are until the engine that was opened with the
cache has closed.

Owned here: every check of what a caller can get wrong, made when the cache is
described. Not here: what two caches have in common (`kvferry.engine.plan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvferry.engine.coverage import block_rows, normal_form
from kvferry.engine.spans import Span
from kvferry.engine.tensors import (
    BLOCK_AXIS,
    Extent,
    Strides,
    as_bytes,
    as_integers,
    check_unique,
    merged_regions,
    read_strides,
)
from kvferry.protocol.errors import CacheError, FerryInternalError
from kvferry.protocol.layout import (
    SHARD_AXIS,
    TOKEN_AXIS,
    Axis,
    CacheLayout,
    FieldLayout,
    GroupLayout,
    PartLayout,
    Shard,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


__all__ = (
    "AttentionGroup",
    "KVCache",
    "PagedTensor",
    "Shard",
    "Span",
    "StateGroup",
    "StatePart",
    "StateTensor",
    "TokenView",
    "tp_shard",
)

STATE_SHARD_AXES = ("c", "h")
REPLICATED = Shard(1, 0, 1)


def tp_shard(total: int, rank: int, size: int) -> Shard:
    """The usual share of a tensor-parallel rank.

    An even split; with more ranks than units, each unit is held by
    ``size // total`` consecutive ranks.

    Args:
        total: Units in the whole model: KV heads, channels, head groups.
        rank: Of ``size`` ranks.
        size: Ranks that share the units.

    Raises:
        CacheError: Neither number divides the other, or the rank is not one.
    """
    if total < 1 or not 0 <= rank < size:
        raise CacheError(f"no share of {total} units for rank {rank} of {size}")
    if total % size == 0:
        each = total // size
        return Shard(total, rank * each, (rank + 1) * each)
    if size % total == 0:
        unit = rank // (size // total)
        return Shard(total, unit, unit + 1)
    raise CacheError(
        f"{total} units over {size} ranks: neither an even split nor an even"
        " replication; give each rank's Shard by hand"
    )


@dataclass(frozen=True, slots=True, eq=False)
class PagedTensor:
    """One tensor of a paged cache, block by block.

    Attributes:
        tensor: The pool; or a pair (key, value) of equally shaped and strided
            tensors, which then are one field with an axis ``k`` of two steps that
            ``axes`` does not name.
        axes: One name per tensor axis: ``b`` kernel block, ``n`` token in it, ``h``
            head; all others (``k``, ``d``, ...) are the same on both sides.
        heads: The heads held here, as many as ``h`` has steps; without an axis ``h``
            the tensor is one replicated unit and this stays None.
        name: Of the field; unique in its layer, the same on both sides.
    """

    tensor: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    axes: str = "b k h n d"
    heads: Shard | None = None
    name: str = "kv"


@dataclass(frozen=True, slots=True)
class StatePart:
    """A stretch of a state's channel axis that is sharded by itself."""

    name: str
    shard: Shard


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """One state tensor, slot by slot.

    Attributes:
        name: Of the field; unique in its layer, the same on both sides.
        tensor: The pool.
        axes: ``b`` slot, ``c`` (or ``h``) the sharded axis; all others are the same
            on both sides. Without a sharded axis the state is one replicated unit.
        parts: What the sharded axis consists of, in order, without gaps.
    """

    name: str
    tensor: torch.Tensor
    axes: str = "b c w"
    parts: tuple[StatePart, ...] = ()


Paged = PagedTensor | Sequence[PagedTensor] | Mapping[str, PagedTensor]
State = StateTensor | Sequence[StateTensor]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """Attention layers that share one block table.

    Attributes:
        name: The same on both sides.
        block_size: Tokens that this rank holds of a logical block, the unit of the
            scheduler's ids.
        layers: By layer name, one field or several; the key of a mapping of fields
            is the field's name.
        window: Tokens the attention reaches back over, the current one included.
        context_size, context_rank, context_interleave: Context parallelism; see
            `kvferry.protocol.layout.GroupLayout`.
    """

    name: str
    block_size: int
    layers: Mapping[str, Paged]
    window: int | None = None
    context_size: int = 1
    context_rank: int = 0
    context_interleave: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class StateGroup:
    """State layers that share one table of slots."""

    name: str
    layers: Mapping[str, State]


@dataclass(frozen=True, slots=True, eq=False)
class TokenView:
    """One attention field seen by token, to zero what lies behind a request.

    Attributes:
        tensors: The field's tensors as integers of the elements' width, axis 0 the
            kernel block, axis 1 the token in it. Views: no memory of their own.
        block_tokens: Tokens in a kernel block.
        ratio: Kernel blocks in a logical block.
    """

    layer: str
    name: str
    tensors: tuple[torch.Tensor, ...]
    block_tokens: int
    ratio: int


class KVCache:
    """Everything one rank holds, described.

    It keeps the tensors alive; do not resize them or swap their storage.

    Attributes:
        layout: The same in plain numbers, as peers see it.

    Raises:
        CacheError: Tensors, axes, shards or block counts that do not describe a
            cache; says the numbers.
    """

    layout: CacheLayout

    def __init__(self, groups: Iterable[AttentionGroup | StateGroup]) -> None:
        # Kept, and with them the tensors: memory that a transport has registered
        # must not be freed under it because a caller let go of a tensor.
        self._groups = tuple(groups)
        described = [_describe(group) for group in self._groups]
        names = [group.layout.name for group in described]
        if not names:
            raise CacheError("a cache without groups")
        check_unique("group", names, "the cache")
        extents = [extent for group in described for extent in group.extents]
        self._views = {group.layout.name: group.views for group in described}
        tensors = [tensor for group in described for tensor in group.tensors]
        self._storages = {t.untyped_storage().data_ptr(): t for t in tensors}
        self.layout = CacheLayout(
            regions=tuple(merged_regions(extents)),
            groups=tuple(group.layout for group in described),
        )

    def storages(self) -> tuple[torch.Tensor, ...]:
        """The bytes of every allocation that a tensor lies in, each once."""
        return tuple(as_bytes(tensor) for tensor in self._storages.values())

    def enter_device(self) -> None:
        """Make the CUDA context of the cache current in this thread.

        Nothing for a cache in host memory. A transport needs it before its agent is
        made, or it quietly does without ``cuda_ipc`` (nixl-facts row 22).
        """
        for region in self.layout.regions:
            if region.memory == "VRAM":
                torch.cuda.set_device(region.device)
                return

    def token_views(self, group: str) -> tuple[TokenView, ...]:
        """The attention fields of a group; none for a state group, which is never zeroed.

        Raises:
            CacheError: No such group.
        """
        if group not in self._views:
            raise CacheError(f"no group {group!r}; there are {sorted(self._views)}")
        return self._views[group]


class _Described(NamedTuple):
    layout: GroupLayout
    views: tuple[TokenView, ...]
    extents: tuple[Extent, ...]
    tensors: tuple[torch.Tensor, ...]


def _describe(group: AttentionGroup | StateGroup) -> _Described:
    if not group.layers:
        raise CacheError(f"group {group.name!r} has no layers")
    if isinstance(group, StateGroup):
        return _describe_states(group)
    return _describe_attention(group)


def _describe_attention(group: AttentionGroup) -> _Described:
    fields: list[FieldLayout] = []
    views: list[TokenView] = []
    extents: list[Extent] = []
    tensors: list[torch.Tensor] = []
    for layer, given in group.layers.items():
        paged = list(_named_fields(given))
        where = f"group {group.name!r} layer {layer!r}"
        check_unique("field", [name for name, _ in paged], where)
        for name, tensor in paged:
            strides = _paged_strides(tensor, f"{where} field {name!r}")
            field = _paged_field(layer, name, tensor, strides)
            ratio = _ratio(group.block_size, field, strides.where)
            fields.append(field)
            views.append(_token_view(field, strides, ratio))
            extents += strides.extents
            tensors += strides.tensors
    blocks = _common_blocks(group.name, fields, [view.ratio for view in views])
    _check_context(group)
    layout = GroupLayout(
        name=group.name,
        block_size=group.block_size,
        blocks=blocks,
        fields=tuple(fields),
        window=group.window,
        context_size=group.context_size,
        context_rank=group.context_rank,
        context_interleave=group.context_interleave,
    )
    return _Described(layout, tuple(views), tuple(extents), tuple(tensors))


def _describe_states(group: StateGroup) -> _Described:
    fields: list[FieldLayout] = []
    extents: list[Extent] = []
    tensors: list[torch.Tensor] = []
    for layer, given in group.layers.items():
        states = [given] if isinstance(given, StateTensor) else list(given)
        where = f"group {group.name!r} layer {layer!r}"
        check_unique("field", [state.name for state in states], where)
        for state in states:
            strides = read_strides(
                (state.tensor,), state.axes, f"{where} field {state.name!r}"
            )
            fields.append(_state_field(layer, state, strides))
            extents += strides.extents
            tensors += strides.tensors
    blocks = _common_blocks(group.name, fields, [1] * len(fields))
    layout = GroupLayout(
        name=group.name, block_size=0, blocks=blocks, fields=tuple(fields)
    )
    return _Described(layout, (), tuple(extents), tuple(tensors))


def _named_fields(given: Paged) -> Iterator[tuple[str, PagedTensor]]:
    if isinstance(given, PagedTensor):
        yield given.name, given
    elif isinstance(given, Mapping):
        yield from given.items()
    else:
        yield from ((paged.name, paged) for paged in given)


def _paged_strides(paged: PagedTensor, where: str) -> Strides:
    tensors = paged.tensor if isinstance(paged.tensor, tuple) else (paged.tensor,)
    if len(tensors) not in {1, 2}:
        raise CacheError(f"{where}: {len(tensors)} tensors are neither one nor a pair")
    strides = read_strides(tensors, paged.axes, where)
    if TOKEN_AXIS not in strides.axes:
        raise CacheError(
            f"{where}: axes {paged.axes!r} have no token axis {TOKEN_AXIS!r}"
        )
    return strides


def _paged_field(
    layer: str, name: str, paged: PagedTensor, strides: Strides
) -> FieldLayout:
    heads, axes = paged.heads, strides.inner()
    if SHARD_AXIS not in strides.axes:
        if heads not in {None, REPLICATED}:
            raise CacheError(
                f"{strides.where}: {heads} without an axis {SHARD_AXIS!r} in"
                f" {paged.axes!r}"
            )
        heads, axes = REPLICATED, (Axis(SHARD_AXIS, 1, 0), *axes)
    if heads is None:
        raise CacheError(f"{strides.where}: axis {SHARD_AXIS!r} needs heads=Shard(...)")
    steps = strides.axes.get(SHARD_AXIS, axes[0]).size
    _check_shard(heads, steps, strides.where)
    return _field(
        layer, name, strides, (PartLayout(name, heads, strides.address, axes),)
    )


def _state_field(layer: str, state: StateTensor, strides: Strides) -> FieldLayout:
    sharded = [name for name in STATE_SHARD_AXES if name in strides.axes]
    if TOKEN_AXIS in strides.axes or len(sharded) > 1:
        raise CacheError(
            f"{strides.where}: a state has no axis {TOKEN_AXIS!r} and one of"
            f" {STATE_SHARD_AXES}, not {state.axes!r}"
        )
    if not sharded:
        if state.parts:
            raise CacheError(
                f"{strides.where}: parts, but none of the axes {STATE_SHARD_AXES} in"
                f" {state.axes!r}"
            )
        axes = (Axis(SHARD_AXIS, 1, 0), *strides.inner())
        whole = PartLayout(state.name, REPLICATED, strides.address, axes)
        return _field(layer, state.name, strides, (whole,))
    return _field(layer, state.name, strides, tuple(_parts(state, strides, sharded[0])))


def _parts(
    state: StateTensor, strides: Strides, channel_axis: str
) -> Iterator[PartLayout]:
    channels = strides.axes[channel_axis]
    check_unique("part", [part.name for part in state.parts], strides.where)
    sizes = {part.name: part.shard.size for part in state.parts}
    if sum(sizes.values()) != channels.size:
        raise CacheError(
            f"{strides.where}: parts {sizes} are {sum(sizes.values())} units, axis"
            f" {channel_axis!r} has {channels.size}"
        )
    rest, first = strides.inner(without=(channel_axis,)), 0
    for part in state.parts:
        _check_shard(part.shard, part.shard.size, f"{strides.where} part {part.name!r}")
        yield PartLayout(
            name=part.name,
            shard=part.shard,
            address=strides.address + first * channels.stride,
            axes=(Axis(SHARD_AXIS, part.shard.size, channels.stride), *rest),
        )
        first += part.shard.size


def _field(
    layer: str, name: str, strides: Strides, parts: tuple[PartLayout, ...]
) -> FieldLayout:
    block, token = strides.axes[BLOCK_AXIS], strides.axes.get(TOKEN_AXIS)
    tensor, extent = strides.tensors[0], strides.extents[0]
    return FieldLayout(
        layer=layer,
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        element_bytes=tensor.element_size(),
        memory=extent.memory,
        device=extent.device,
        blocks=block.size,
        block_stride=block.stride,
        block_tokens=token.size if token else 0,
        parts=parts,
    )


def _token_view(field: FieldLayout, strides: Strides, ratio: int) -> TokenView:
    order = [strides.names.index(BLOCK_AXIS), strides.names.index(TOKEN_AXIS)]
    order += [axis for axis in range(len(strides.names)) if axis not in order]
    views = tuple(as_integers(t).permute(order) for t in strides.tensors)
    return TokenView(field.layer, field.name, views, field.block_tokens, ratio)


def _ratio(block_size: int, field: FieldLayout, where: str) -> int:
    ratio, rest = divmod(block_size, field.block_tokens)
    if rest or not ratio:
        raise CacheError(
            f"{where}: block size {block_size} is not a multiple of the kernel block's"
            f" {field.block_tokens} tokens"
        )
    if field.blocks % ratio:
        raise CacheError(
            f"{where}: {field.blocks} kernel blocks do not divide into logical blocks of"
            f" {ratio} each (block size {block_size}, kernel block {field.block_tokens})"
        )
    return ratio


def _common_blocks(
    group: str, fields: Sequence[FieldLayout], ratios: Sequence[int]
) -> int:
    counts = {
        f"{field.layer}/{field.name}": field.blocks // ratio
        for field, ratio in zip(fields, ratios, strict=True)
    }
    if len(set(counts.values())) > 1:
        least, most = (
            min(counts, key=counts.__getitem__),
            max(counts, key=counts.__getitem__),
        )
        raise CacheError(
            f"group {group!r}: fields of one block table need equally many blocks:"
            f" {least} has {counts[least]}, {most} has {counts[most]}"
        )
    _check_shared(group, fields)
    return next(iter(counts.values()))


def _check_shared(group: str, fields: Sequence[FieldLayout]) -> None:
    """No two fields of one block table share a byte of their first block.

    Different groups may share memory: their block ids are never the same blocks.
    """
    try:
        normal_form(block_rows(fields), what=f"group {group!r}")
    except FerryInternalError as exc:
        raise CacheError(
            f"group {group!r}: two fields share memory; leave out layers that use another"
            f" layer's cache ({exc.detail})"
        ) from exc


def _check_context(group: AttentionGroup) -> None:
    size, rank = group.context_size, group.context_rank
    if not 0 <= rank < size or group.context_interleave < 1:
        raise CacheError(
            f"group {group.name!r}: context rank {rank} of {size}, interleave"
            f" {group.context_interleave}"
        )
    if size > 1 and group.block_size % group.context_interleave:
        raise CacheError(
            f"group {group.name!r}: the block size {group.block_size} is not a multiple"
            f" of the context interleave {group.context_interleave}"
        )
    if group.window is not None and group.window < 1:
        raise CacheError(f"group {group.name!r}: a window of {group.window} tokens")


def _check_shard(shard: Shard, steps: int, where: str) -> None:
    if not 0 <= shard.first < shard.last <= shard.total:
        raise CacheError(f"{where}: {shard} is not a range of its total")
    if shard.size != steps:
        raise CacheError(
            f"{where}: {shard} is {shard.size} units, the axis has {steps}"
        )
