"""The memory of one rank: paged pools for attention, slots for states.

A `PagedGroup` or a `StateGroup` of the *model* (in `models/`) says in plain numbers
what a group of layers caches; here it becomes tensors for one rank of a
tensor-parallel instance, in the block size and axis order of its side, and a
description in kvferry's words. Nothing below knows a model by name.

Every element starts as NaN. A slot that a transfer or the model should have
written, or zeroed, and did not, can then not pass for anything else.

Owned here: which share a rank holds, and how blocks are copied out and in, so that
shares can be put together and compared. Not here: anything about transfers.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from models.groups import PagedGroup, StateGroup

from kvferry import engine as ferry
from kvferry.engine import PagedTensor, Shard, StatePart, StateTensor, tp_shard

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from models.groups import CacheGroup

    Blocks = Sequence[int | None]
    Tables = Mapping[str, Blocks]
    Tensors = Mapping[str, torch.Tensor]

__all__ = ("FreeBlocks", "PagedPool", "Pools", "SideShape", "StatePool", "merge_shares")

# The order this file thinks in; a pool may store its axes in any other.
_CANONICAL = ("b", "k", "h", "n", "d")
_LATENT_FIELDS = ("latent", "rotary")
_PLANES = ("key", "value")


@dataclass(frozen=True)
class SideShape:
    """What the ranks of one side have in common, and may differ from the other side.

    Attributes:
        tokens: About how many tokens a pool holds.
        block_size: Tokens per block.
        axes: The storage order of a tensor with heads, outermost first, ``d`` last.
        slots: States that a pool holds.
    """

    tokens: int
    block_size: int = 16
    axes: str = "b k h n d"
    slots: int = 5


class PagedPool:
    """One group of attention layers, cut into blocks.

    Attributes:
        group: What the layers cache.
        block_size: Tokens per block.
        blocks: Blocks in the pool.
        shard: The heads held here; None for latents, which every rank holds whole.
        planes: Per layer the two things a model caches per token (keys and values,
            or latents and rotary parts), as views ``[block, head, slot, payload]``.
    """

    def __init__(
        self, group: PagedGroup, shape: SideShape, tp: tuple[int, int]
    ) -> None:
        self.group = group
        self.block_size = shape.block_size
        self.blocks = shape.tokens // shape.block_size + 1
        self.shard = _share(group.heads, tp) if group.heads else None
        self.planes: dict[int, tuple[torch.Tensor, ...]] = {}
        self._layers: dict[str, list[PagedTensor]] = {}
        for layer in group.layers:
            fields, planes = (
                self._heads(self.shard, shape.axes) if self.shard else self._latents()
            )
            self._layers[f"layers.{layer}"] = fields
            self.planes[layer] = planes

    def described(self) -> ferry.AttentionGroup:
        """The pool in kvferry's words."""
        return ferry.AttentionGroup(
            self.group.name,
            block_size=self.block_size,
            layers=self._layers,
            window=self.group.window,
        )

    def blocks_for(self, tokens: int) -> int:
        """How many blocks it takes to hold so many tokens."""
        return math.ceil(tokens / self.block_size)

    def copied_out(self, block_ids: Blocks) -> dict[str, torch.Tensor]:
        """Whole blocks in token order: ``[head, slot, payload]`` per layer and plane.

        The slots of a block that is None are NaN.
        """
        ids = torch.tensor([-1 if i is None else i for i in block_ids])
        return {key: _in_token_order(plane, ids) for key, plane in self._named_planes()}

    def copy_in(self, block_ids: Blocks, whole: Tensors) -> None:
        """Fills blocks from what `copied_out` gives on a rank that has all heads."""
        places = [place for place, i in enumerate(block_ids) if i is not None]
        ids = torch.tensor([i for i in block_ids if i is not None])
        for key, plane in self._named_planes():
            own = whole[key][_range(self.shard)]
            cut = own.view(own.shape[0], len(block_ids), self.block_size, -1)
            plane[ids] = cut[:, places].transpose(0, 1)

    def shards(self) -> dict[str, Shard | None]:
        """The heads held here, per layer and plane."""
        return {key: self.shard for key, _ in self._named_planes()}

    def poison(self, block_ids: Collection[int]) -> None:
        """Makes blocks look as the pool was made."""
        for _, plane in self._named_planes():
            plane[list(block_ids)] = math.nan

    def is_untouched_outside(self, block_ids: Collection[int]) -> bool:
        """Is every block but these still as the pool was made?"""
        planes = (plane for _, plane in self._named_planes())
        return _is_nan_outside(planes, self.blocks, block_ids)

    def _heads(
        self, shard: Shard, axes: str
    ) -> tuple[list[PagedTensor], tuple[torch.Tensor, ...]]:
        """One field: keys and values of the heads held here."""
        names = axes.split()
        if sorted(names) != sorted(_CANONICAL):
            raise ValueError(f"axes must order {_CANONICAL}, not {axes!r}")
        sizes = (self.blocks, 2, shard.size, self.block_size, self.group.sizes[0])
        extents = dict(zip(_CANONICAL, sizes, strict=True))
        tensor = self._empty([extents[name] for name in names])
        canonical = tensor.permute([names.index(name) for name in _CANONICAL])
        field = PagedTensor(tensor, axes=axes, heads=shard)
        return [field], tuple(canonical.unbind(1))

    def _latents(self) -> tuple[list[PagedTensor], tuple[torch.Tensor, ...]]:
        """Two fields without a head axis."""
        tensors = [
            self._empty([self.blocks, self.block_size, size])
            for size in self.group.sizes
        ]
        fields = [
            PagedTensor(tensor, axes="b n d", name=name)
            for name, tensor in zip(_LATENT_FIELDS, tensors, strict=True)
        ]
        return fields, tuple(tensor[:, None] for tensor in tensors)

    def _empty(self, sizes: Sequence[int]) -> torch.Tensor:
        dtype = getattr(torch, self.group.dtype)
        return torch.full(tuple(sizes), math.nan, dtype=dtype)

    def _named_planes(self) -> Iterable[tuple[str, torch.Tensor]]:
        for layer, planes in self.planes.items():
            for name, plane in zip(_PLANES, planes, strict=True):
                yield f"{self.group.name}/{layer}/{name}", plane


class StatePool:
    """One group of layers with a state each, slot by slot.

    The model never works in here: it copies a slot into a cache of its own, and
    copies the state back when it is done. A slot that was pulled, or is on offer,
    thus stays what it was.

    Attributes:
        group: What the layers cache.
        blocks: Slots in the pool.
    """

    def __init__(
        self, group: StateGroup, shape: SideShape, tp: tuple[int, int]
    ) -> None:
        self.group = group
        self.blocks = shape.slots
        self._heads = _share(group.heads, tp)
        self._parts = {n: _share(size, tp) for n, size in group.channels.items()}
        held = sum(part.size for part in self._parts.values())
        recurrent = (self._heads.size, *group.head_sizes)
        self._tensors = {
            layer: (
                self._empty(held, group.width, dtype=group.dtype),
                self._empty(*recurrent, dtype="float32"),
            )
            for layer in group.layers
        }

    def described(self) -> ferry.StateGroup:
        """The pool in kvferry's words: each part of the channels is cut by itself."""
        parts = tuple(StatePart(name, shard) for name, shard in self._parts.items())
        whole = (StatePart("heads", self._heads),)
        layers = {
            f"layers.{layer}": (
                StateTensor("conv", conv, axes="b c w", parts=parts),
                StateTensor("recurrent", recurrent, axes="b h k d", parts=whole),
            )
            for layer, (conv, recurrent) in self._tensors.items()
        }
        return ferry.StateGroup(self.group.name, layers=layers)

    def copied_out(self, block_ids: Blocks) -> dict[str, torch.Tensor]:
        """One slot, per layer and part."""
        (slot,) = block_ids
        return {key: view[slot].clone() for key, (view, _) in self._named_views()}

    def copy_in(self, block_ids: Blocks, whole: Tensors) -> None:
        """Fills a slot from what `copied_out` gives on a rank that has all heads."""
        (slot,) = block_ids
        for key, (view, shard) in self._named_views():
            view[slot] = whole[key][_range(shard)]

    def shards(self) -> dict[str, Shard | None]:
        """The channels or heads held here, per layer and part."""
        return {key: shard for key, (_, shard) in self._named_views()}

    def is_untouched_outside(self, block_ids: Collection[int]) -> bool:
        """Is every slot but these still as the pool was made?"""
        views = (view for _, (view, _) in self._named_views())
        return _is_nan_outside(views, self.blocks, block_ids)

    def _empty(self, *sizes: int, dtype: str) -> torch.Tensor:
        return torch.full((self.blocks, *sizes), math.nan, dtype=getattr(torch, dtype))

    def _named_views(self) -> Iterable[tuple[str, tuple[torch.Tensor, Shard]]]:
        for layer, (conv, recurrent) in self._tensors.items():
            where = f"{self.group.name}/{layer}"
            first = 0
            for name, shard in self._parts.items():
                yield f"{where}/{name}", (conv[:, first : first + shard.size], shard)
                first += shard.size
            yield f"{where}/recurrent", (recurrent, self._heads)


class Pools:
    """All groups of one rank.

    Attributes:
        by_group: In the model's order.
    """

    def __init__(
        self, groups: Iterable[CacheGroup], shape: SideShape, tp: tuple[int, int]
    ) -> None:
        self.by_group: dict[str, PagedPool | StatePool] = {
            group.name: PagedPool(group, shape, tp)
            if isinstance(group, PagedGroup)
            else StatePool(group, shape, tp)
            for group in groups
        }

    @property
    def paged(self) -> dict[str, PagedPool]:
        """The pools that are cut into blocks."""
        return {n: p for n, p in self.by_group.items() if isinstance(p, PagedPool)}

    @property
    def states(self) -> dict[str, StatePool]:
        """The pools of states."""
        return {n: p for n, p in self.by_group.items() if isinstance(p, StatePool)}

    def described(self) -> ferry.KVCache:
        """All of it in kvferry's words."""
        return ferry.KVCache([pool.described() for pool in self.by_group.values()])

    def copied_out(self, tables: Tables) -> dict[str, torch.Tensor]:
        """One request's blocks and state, by group, layer and plane or part."""
        copies: dict[str, torch.Tensor] = {}
        for name, pool in self.by_group.items():
            copies |= pool.copied_out(tables[name])
        return copies

    def copy_in(self, tables: Tables, whole: Tensors) -> None:
        """Fills one request's blocks and slot with this rank's share."""
        for name, pool in self.by_group.items():
            pool.copy_in(tables[name], whole)

    def shards(self) -> dict[str, Shard | None]:
        """What is held here of each tensor that `copied_out` gives."""
        shards: dict[str, Shard | None] = {}
        for pool in self.by_group.values():
            shards |= pool.shards()
        return shards

    def is_untouched_outside(self, used: Mapping[str, Collection[int]]) -> bool:
        """Is every block and slot but these still as the pools were made?"""
        return all(
            pool.is_untouched_outside(used.get(name, ()))
            for name, pool in self.by_group.items()
        )


def merge_shares(
    shares: Sequence[tuple[Tensors, Mapping[str, Shard | None]]],
) -> dict[str, torch.Tensor]:
    """Puts together what the ranks of an instance hold of one request.

    Raises:
        ValueError: Two ranks hold the same heads, and not the same bytes.
    """
    whole: dict[str, torch.Tensor] = {}
    for tensors, shards in shares:
        for key, tensor in tensors.items():
            shard = shards[key] or Shard(tensor.shape[0], 0, tensor.shape[0])
            if key not in whole:
                blank = torch.full_like(tensor[:1], math.nan)
                whole[key] = blank.repeat(shard.total, *[1] * (tensor.dim() - 1))
            place = whole[key][_range(shard)]
            is_blank = bool(place.isnan().all())
            if not is_blank and not torch.equal(_bytes(place), _bytes(tensor)):
                raise ValueError(f"{key}: two ranks differ in {shard}")
            place.copy_(tensor)
    return whole


class FreeBlocks:
    """The blocks of a pool that nobody holds, handed out in scattered order.

    Real allocators end up scattered after a while; a fixed seed starts there.
    """

    def __init__(self, blocks: int, seed: int) -> None:
        self._free = list(range(blocks))
        # Not for secrets: the order only has to be scattered, and repeatable.
        random.Random(seed).shuffle(self._free)  # noqa: S311

    def take(self, count: int) -> list[int]:
        """Takes so many blocks out.

        Raises:
            ValueError: There are not so many.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked, {len(self._free)} free")
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, block_ids: Iterable[int | None]) -> None:
        """Puts blocks back, last in line."""
        self._free.extend(i for i in block_ids if i is not None)


def _share(total: int, tp: tuple[int, int]) -> Shard:
    rank, size = tp
    return tp_shard(total=total, rank=rank, size=size)


def _range(shard: Shard | None) -> slice:
    return slice(shard.first, shard.last) if shard else slice(None)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _in_token_order(plane: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Copies blocks of one plane to ``[head, slot, payload]``."""
    picked = plane[ids]
    picked[ids < 0] = math.nan
    return picked.transpose(0, 1).flatten(1, 2).contiguous()


def _is_nan_outside(
    views: Iterable[torch.Tensor], blocks: int, block_ids: Collection[int]
) -> bool:
    rest = torch.ones(blocks, dtype=torch.bool)
    rest[list(block_ids)] = False
    return all(bool(view[rest].isnan().all()) for view in views)
