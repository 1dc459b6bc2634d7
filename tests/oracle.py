"""The stamp oracle: decides what a destination must hold, from what a cache *means*.

Every element of a producer's cache is a hash of (layer, field, k, global head or
channel, absolute token, payload index). The consumer's memory is poison before,
and afterwards every byte of it is the right stamp, zero where zero is due, or
untouched poison. Nothing here looks at strides, rows or plans: a pool is read
and written through torch's own indexing, token by token.

`Executor` stands in for a transport: it copies descriptors between addresses.
"""

from __future__ import annotations

import ctypes
import itertools
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvferry.engine.cache import (
    AttentionGroup,
    KVCache,
    PagedTensor,
    Shard,
    Span,
    StateGroup,
    StatePart,
    StateTensor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvferry.engine.plan import Plan, Selection

POISON = 0xA5
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- what a model caches ------------------------------------------------------


@dataclass(frozen=True)
class FieldModel:
    """One tensor family of a layer: global sizes, no layout.

    Attributes:
        inner: Sizes of the axes that are the same everywhere (``k``, ``d``, ``w``).
        heads: Global heads; 0 for a field without head axis.
        parts: For a state, (name, global channels) in order.
    """

    name: str
    inner: Mapping[str, int]
    heads: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    dtype: torch.dtype = torch.int32

    @property
    def width(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class GroupModel:
    name: str
    layers: tuple[str, ...]
    fields: tuple[FieldModel, ...]
    window: int | None = None

    @property
    def is_state(self) -> bool:
        return bool(self.fields[0].parts)


# --- how one rank stores it ---------------------------------------------------


@dataclass(frozen=True)
class GroupShape:
    """How one side stores a group.

    Attributes:
        axes: Storage order by field, outermost first, ``k`` left out where a pair
            is used.
        pads: Extra elements after each step of an axis, by axis.
        pair: Fields whose ``k`` is a pair of tensors.
        together: One allocation for all fields of a layer ("layer"), of all layers
            ("group"), or one each ("").
    """

    block_size: int
    kernel: int
    blocks: int
    axes: Mapping[str, str]
    pads: Mapping[str, int] = field(default_factory=dict)
    pair: frozenset[str] = frozenset()
    together: str = ""
    context: tuple[int, int, int] = (1, 0, 1)

    def slots(self, span: Span) -> list[tuple[int, int, int]]:
        """Every (absolute token, kernel block, slot) that a span gives a place."""
        size, rank, interleave = self.context
        held = (t for t in itertools.count() if t // interleave % size == rank)
        tokens = itertools.dropwhile(lambda t: t < span.first_token, held)
        places = []
        for block in span.block_ids:
            for slot in range(self.block_size):
                token = next(tokens)
                if block is not None:
                    ratio = self.block_size // self.kernel
                    kernel_block = block * ratio + slot // self.kernel
                    places.append((token, kernel_block, slot % self.kernel))
        return places


class Planes(NamedTuple):
    """A stored field, one array for each ``k``.

    Attributes:
        arrays: ``[block, token, head, payload...]``; ``[slot, channel, payload...]``
            of a state. Integers of the elements' width.
        units: Global (part, unit) of each head or channel.
    """

    arrays: list[np.ndarray]
    units: list[tuple[str, int]]


class RankPool:
    """One rank's tensors, poisoned, and the `KVCache` that describes them."""

    def __init__(
        self,
        model: Sequence[GroupModel],
        shapes: Mapping[str, GroupShape],
        share: Callable[[int], Shard],
        *,
        layers: Callable[[str], bool] = lambda layer: True,  # noqa: ARG005
        slack_words: int = 0,
    ) -> None:
        self.model = model
        self.shapes = shapes
        self.share = share
        self.bases: list[torch.Tensor] = []
        self.planes: dict[tuple[str, str, str], Planes] = {}
        self._slack = 8 * slack_words
        groups = [self._group(g, [n for n in g.layers if layers(n)]) for g in model]
        self.cache = KVCache([group for group in groups if group.layers])

    def _group(
        self, group: GroupModel, layers: Sequence[str]
    ) -> AttentionGroup | StateGroup:
        shape = self.shapes[group.name]
        wanted = [
            (layer, f, plane)
            for layer in layers
            for f in group.fields
            for plane in ((0, 1) if f.name in shape.pair else (None,))
        ]
        tensors = {}
        for bundle in _bundles(wanted, shape.together):
            tensors |= self._allocate(group, bundle)
        if group.is_state:
            return StateGroup(
                group.name,
                {
                    layer: tuple(
                        self._state(group, layer, f, tensors[layer, f.name, None])
                        for f in group.fields
                    )
                    for layer in layers
                },
            )
        size, rank, interleave = shape.context
        return AttentionGroup(
            group.name,
            shape.block_size,
            {
                layer: [self._paged(group, layer, f, tensors) for f in group.fields]
                for layer in layers
            },
            window=group.window,
            context_size=size,
            context_rank=rank,
            context_interleave=interleave,
        )

    def _sizes(self, group: GroupModel, f: FieldModel) -> dict[str, int]:
        shape = self.shapes[group.name]
        sizes = {**f.inner, "n": shape.kernel}
        sizes["b"] = shape.blocks * (
            1 if group.is_state else shape.block_size // shape.kernel
        )
        if f.parts:
            sizes["c"] = sum(self.share(total).size for _, total in f.parts)
        elif f.heads:
            sizes["h"] = self.share(f.heads).size
        return sizes

    def _allocate(self, group: GroupModel, bundle: Sequence[tuple]) -> dict:
        """One allocation for a bundle of tensors; block-first ones share each page."""
        shape = self.shapes[group.name]
        plans = []
        for layer, f, plane in bundle:
            sizes = self._sizes(group, f)
            order = shape.axes[f.name].split()
            strides, extent = _strided(order, sizes, shape.pads)
            page = -(-strides["b"] * f.width // 8) * 8
            plans.append(
                ((layer, f.name, plane), f, order, sizes, strides, extent, page)
            )
        page = sum(p[-1] for p in plans)
        alone = len(plans) == 1
        longest = (
            plans[0][5] * plans[0][1].width
            if alone
            else page * max(p[3]["b"] for p in plans)
        )
        # Not at the beginning of its storage: offsets must be read.
        base = torch.full(
            (self._slack + -(-longest // 8) * 8,), POISON, dtype=torch.uint8
        )
        self.bases.append(base)
        found, offset = {}, self._slack
        for key, f, order, sizes, strides, _, its_page in plans:
            steps = strides if alone else {**strides, "b": page // f.width}
            found[key] = (
                base.view(INTEGERS[f.width])
                .as_strided(
                    [sizes[a] for a in order],
                    [steps[a] for a in order],
                    offset // f.width,
                )
                .view(f.dtype)
            )
            offset += its_page
        return found

    def _paged(
        self, group: GroupModel, layer: str, f: FieldModel, tensors: Mapping
    ) -> PagedTensor:
        shape = self.shapes[group.name]
        order = shape.axes[f.name].split()
        if f.name in shape.pair:
            tensor = (tensors[layer, f.name, 0], tensors[layer, f.name, 1])
            arrays = [_canonical(t, order) for t in tensor]
        else:
            tensor = tensors[layer, f.name, None]
            whole = [tensor]
            if "k" in order:
                whole = list(tensor.unbind(order.index("k")))
            arrays = [_canonical(t, [a for a in order if a != "k"]) for t in whole]
        shard = self.share(f.heads) if f.heads else Shard(1, 0, 1)
        units = [(f.name, unit) for unit in range(shard.first, shard.last)]
        self.planes[group.name, layer, f.name] = Planes(arrays, units)
        return PagedTensor(
            tensor, shape.axes[f.name], self.share(f.heads) if f.heads else None, f.name
        )

    def _state(
        self, group: GroupModel, layer: str, f: FieldModel, tensor: torch.Tensor
    ) -> StateTensor:
        order = self.shapes[group.name].axes[f.name].split()
        axes = ["b", "c", *sorted(a for a in order if a not in "bc")]
        array = _as_integers(tensor).permute([order.index(a) for a in axes]).numpy()
        parts = tuple(StatePart(name, self.share(total)) for name, total in f.parts)
        units = [(p.name, u) for p in parts for u in range(p.shard.first, p.shard.last)]
        self.planes[group.name, layer, f.name] = Planes([array], units)
        return StateTensor(f.name, tensor, " ".join(order), parts)

    def fields(self) -> Iterator[tuple[GroupModel, str, FieldModel, Planes]]:
        for group in self.model:
            for f in group.fields:
                for layer in group.layers:
                    planes = self.planes.get((group.name, layer, f.name))
                    if planes is not None:
                        yield group, layer, f, planes


def _bundles(wanted: Sequence[tuple], together: str) -> Iterable[list[tuple]]:
    if together == "group":
        return [list(wanted)]
    if together == "layer":
        return [list(m) for _, m in itertools.groupby(wanted, key=lambda w: w[0])]
    return [[w] for w in wanted]


def _strided(
    order: Sequence[str], sizes: Mapping[str, int], pads: Mapping[str, int]
) -> tuple[dict[str, int], int]:
    strides, extent = {}, 1
    for axis in reversed(order):
        strides[axis] = extent + (pads.get(axis, 0) if extent > 1 else 0)
        extent = strides[axis] * sizes[axis]
    return strides, extent


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def _canonical(tensor: torch.Tensor, order: Sequence[str]) -> np.ndarray:
    """``[block, token, head, payload...]``, with a head axis of one if there is none."""
    tensor = _as_integers(tensor)
    rest = sorted(a for a in order if a not in "bnh")
    axes = ["b", "n", *(["h"] if "h" in order else []), *rest]
    array = tensor.permute([order.index(a) for a in axes]).numpy()
    return array if "h" in order else array[:, :, None]


# --- stamps -------------------------------------------------------------------


def stamp(
    where: tuple, k: int, unit: tuple[str, int], tokens: np.ndarray, payload: tuple
) -> np.ndarray:
    """``[token, payload...]`` uint64 hashes; never the poison, never zero, in any width."""
    seed = np.uint64(zlib.crc32(repr((where, k, unit)).encode()))
    index = np.arange(int(np.prod(payload)), dtype=np.uint64).reshape(1, *payload)
    token = tokens.astype(np.uint64).reshape(-1, *([1] * len(payload)))
    with np.errstate(over="ignore"):
        mixed = seed * np.uint64(0x9E3779B97F4A7C15) + token * np.uint64(
            0xBF58476D1CE4E5B9
        )
        mixed = mixed + index * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        mixed ^= mixed >> np.uint64(32)
    # The lowest byte alone already tells a stamp from zero and from poison.
    low = mixed & np.uint64(0xFF)
    special = (low == 0) | (low == POISON)
    return np.where(special, mixed ^ np.uint64(0x5A ^ 0x01), mixed)


def _cast(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{like.dtype.itemsize}")
    return values.astype(unsigned).view(like.dtype)


@dataclass(frozen=True)
class Request:
    """What is asked, in absolute tokens; spans by group, as both schedulers say it."""

    num_tokens: int
    local: Mapping[str, Span]
    remote: Mapping[str, Span]
    computed_tokens: int = 0


def fill_garbage(pool: RankPool, *, seed: int = 0) -> None:
    """Anything at all, everywhere."""
    rng = np.random.default_rng(seed)
    for base in pool.bases:
        base.numpy()[:] = rng.integers(0, 256, base.numel(), dtype=np.uint8)


def fill_producer(pool: RankPool, request: Request, *, seed: int = 0) -> None:
    """Garbage everywhere, then stamps where the request's tokens and states are."""
    fill_garbage(pool, seed=seed)
    for group, layer, f, planes in pool.fields():
        span = request.remote[group.name]
        if group.is_state:
            _write_state(planes, layer, f, span.block_ids)
            continue
        slots = pool.shapes[group.name].slots(span)
        _write_tokens(planes, layer, f, [s for s in slots if s[0] < request.num_tokens])


def fill_ready(
    pool: RankPool, request: Request, layer: str, tokens: tuple[int, int]
) -> None:
    """Stamps where the tokens ``[first, last)`` of a layer are; its states with the last."""
    first, last = tokens
    for group, at, f, planes in pool.fields():
        span = request.remote[group.name]
        if at != layer:
            continue
        if not group.is_state:
            slots = pool.shapes[group.name].slots(span)
            _write_tokens(planes, layer, f, [s for s in slots if first <= s[0] < last])
        elif last == request.num_tokens:
            _write_state(planes, layer, f, span.block_ids)


def _write_tokens(
    planes: Planes, layer: str, f: FieldModel, slots: Sequence[tuple[int, int, int]]
) -> None:
    if not slots:
        return
    token, block, slot = (np.array(column) for column in zip(*slots, strict=True))
    for k, array in enumerate(planes.arrays):
        for number, unit in enumerate(planes.units):
            values = stamp((layer, f.name), k, unit, token, array.shape[3:])
            array[block, slot, number] = _cast(values, array)


def _write_state(
    planes: Planes, layer: str, f: FieldModel, slots: Sequence[int | None]
) -> None:
    array = planes.arrays[0]
    for number, unit in enumerate(planes.units):
        # A slot's list position stands in for the token.
        places = np.arange(len(slots))
        values = stamp((layer, f.name), 0, unit, places, array.shape[2:])
        array[np.array(slots, dtype=int), number] = _cast(values, array)


def expect(
    pool: RankPool, request: Request, *, slack_tokens: Mapping[str, int] | None = None
) -> list[str]:
    """Everything that is wrong in a consumer's memory; empty if nothing is.

    Destroys the pool's contents: the expected ones are left there.

    Args:
        pool: After the transfer and the finish stage.
        request: What was asked.
        slack_tokens: By group, how many tokens before a window's reach may have come
            along because they share its first unit.
    """
    actual = [base.numpy().copy() for base in pool.bases]
    fields = list(pool.fields())
    before = [[array.copy() for array in planes.arrays] for *_, planes in fields]
    for base in pool.bases:
        base.fill_(POISON)
    for (group, layer, f, planes), found in zip(fields, before, strict=True):
        span = request.local[group.name]
        if not group.is_state:
            slack = (slack_tokens or {}).get(group.name, 0)
            slots = pool.shapes[group.name].slots(span)
            _expect_tokens((group, layer, f, planes), request, slots, found, slack)
        elif request.computed_tokens < request.num_tokens:
            _write_state(planes, layer, f, span.block_ids)
    return list(_differences(pool.bases, actual))


def _expect_tokens(
    where: tuple[GroupModel, str, FieldModel, Planes],
    request: Request,
    slots: Sequence[tuple[int, int, int]],
    found: Sequence[np.ndarray],
    slack: int,
) -> None:
    group, layer, f, planes = where
    computed, last = request.computed_tokens, request.num_tokens
    first = max(computed, last - group.window + 1) if group.window else computed
    _write_tokens(planes, layer, f, [s for s in slots if first <= s[0] < last])
    for _, block, slot in (s for s in slots if s[0] >= max(last, computed)):
        for array in planes.arrays:
            array[block, slot] = 0
    early = [
        s for s in slots if max(first - slack, computed) <= s[0] < min(first, last)
    ]
    if group.window:
        _accept_early(planes, found, layer, f, early)


def _differences(
    bases: Sequence[torch.Tensor], actual: Sequence[np.ndarray]
) -> Iterator[str]:
    for number, (base, found) in enumerate(zip(bases, actual, strict=True)):
        bad = np.flatnonzero(base.numpy() != found)
        if bad.size:
            at = int(bad[0])
            yield (
                f"allocation {number}: {bad.size} wrong bytes, first at {at}:"
                f" {found[at]:#x} instead of {int(base[at]):#x}"
            )


def _accept_early(
    planes: Planes,
    actual: Sequence[np.ndarray],
    layer: str,
    f: FieldModel,
    early: Sequence[tuple[int, int, int]],
) -> None:
    """Tokens of a window's first unit may be there, but then they are right."""
    for token, block, slot in early:
        for k, array in enumerate(planes.arrays):
            before = array[block, slot].copy()
            right = np.stack(
                [
                    _cast(
                        stamp(
                            (layer, f.name), k, u, np.array([token]), array.shape[3:]
                        ),
                        array,
                    )[0]
                    for u in planes.units
                ]
            )
            array[block, slot] = (
                right if (actual[k][block, slot] == right).all() else before
            )


# --- running a plan without a transport ---------------------------------------


def execute(plan: Plan, selection: Selection) -> int:
    """Copy every descriptor from remote to local memory; returns the bytes."""
    moved = 0
    for key, parts in selection.peers.items():
        for part in parts:
            section = plan.peers[key].sections[part.index]
            local = _resolve(section.local_rows, part.local_ids)
            remote = _resolve(section.remote_rows, part.remote_ids)
            for (to, size), (source, same) in zip(local, remote, strict=True):
                assert size == same, "a pair of unequal runs"
                ctypes.memmove(to, source, size)
                moved += size
    return moved


def write(plan: Plan, selection: Selection, written: Counts | None = None) -> int:
    """The same, seen from the one producer rank of a plan, which writes.

    Args:
        plan: Made by `prepare_plan`; its selection is mirrored here.
        selection: What to write.
        written: Counts how often each byte of the consumer is written.
    """
    moved = 0
    for key, parts in selection.peers.items():
        for part in parts:
            section = plan.peers[key].sections[part.index].mirrored()
            mirrored = part.mirrored()
            ours = _resolve(section.local_rows, mirrored.local_ids)
            theirs = _resolve(section.remote_rows, mirrored.remote_ids)
            for (source, size), (to, same) in zip(ours, theirs, strict=True):
                assert size == same, "a pair of unequal runs"
                ctypes.memmove(to, source, size)
                moved += size
                if written is not None:
                    written.add(to, size)
    return moved


class Counts:
    """How often each byte of a pool was written."""

    def __init__(self, pool: RankPool) -> None:
        self._starts = [base.data_ptr() for base in pool.bases]
        self.counts = [np.zeros(base.numel(), dtype=np.int64) for base in pool.bases]

    def add(self, address: int, size: int) -> None:
        for start, counts in zip(self._starts, self.counts, strict=True):
            if start <= address < start + counts.size:
                assert address + size <= start + counts.size
                counts[address - start : address - start + size] += 1
                return
        raise AssertionError("written outside the pool")

    @property
    def most(self) -> int:
        return max((int(counts.max(initial=0)) for counts in self.counts), default=0)


def _resolve(rows: np.ndarray, ids: np.ndarray) -> list[tuple[int, int]]:
    """Address and length of descriptors: ids run through the rows in order."""
    ids = np.asarray(ids)
    ends = np.cumsum(rows[:, 4].astype(np.int64))
    assert ids.dtype == np.int32
    assert ids.size == 0 or (ids.min() >= 0 and ids.max() < ends[-1])
    row = np.searchsorted(ends, ids, side="right")
    block = ids - (ends[row] - rows[row, 4].astype(np.int64))
    address = rows[row, 0].astype(np.int64) + block * rows[row, 3].astype(np.int64)
    return list(zip(address.tolist(), rows[row, 1].tolist(), strict=True))


def zero_tails(cache: KVCache, selection: Selection) -> None:
    """The finish stage, one slot at a time."""
    for tail in selection.tails:
        for view in cache.token_views(tail.group):
            size = view.ratio * view.block_tokens
            for number, block in enumerate(tail.block_ids.tolist()):
                for slot in range(tail.first_slot if number == 0 else 0, size):
                    kernel, inside = divmod(block * size + slot, view.block_tokens)
                    for tensor in view.tensors:
                        tensor[kernel, inside] = 0
