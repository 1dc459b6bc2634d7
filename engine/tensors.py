"""One tensor, or a pair, in plain numbers: addresses, strides in bytes, extents.

Reads what torch says of a tensor and checks it against the names a caller gave
its axes. What the axes mean for a cache is `kvferry.engine.cache`'s business.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvferry.protocol.errors import CacheError
from kvferry.protocol.layout import Axis, Memory, Region

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = (
    "BLOCK_AXIS",
    "PAIR_AXIS",
    "Extent",
    "Strides",
    "as_bytes",
    "as_integers",
    "check_unique",
    "merged_regions",
    "read_strides",
)

BLOCK_AXIS = "b"
PAIR_AXIS = "k"

MOST_AXES = 8
"""Of a tensor: the messages carry as many but for the block axis, and a head axis of
one step where there is none."""

# By width, for zeroing: no dtype is too exotic to be set to zero bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Extent(NamedTuple):
    """The bytes a view touches, and the storage they lie in."""

    memory: Memory
    device: int
    first: int
    last: int
    storage: int


class Strides(NamedTuple):
    """One field's tensors in plain numbers.

    Attributes:
        where: Group, layer and field, for messages.
        names: Of the tensor's axes, in the tensor's order.
        axes: By name; strides in bytes. The pair axis included.
        address: Of the element at index 0 of every axis.
    """

    where: str
    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    axes: dict[str, Axis]
    address: int
    extents: tuple[Extent, ...]

    def inner(self, *, without: Sequence[str] = ()) -> tuple[Axis, ...]:
        """All axes but the block axis and the ones named."""
        left_out = (BLOCK_AXIS, *without)
        return tuple(axis for name, axis in self.axes.items() if name not in left_out)


def read_strides(tensors: tuple[torch.Tensor, ...], axes: str, where: str) -> Strides:
    """Read axes off one tensor, or a pair of them.

    Raises:
        CacheError: The names do not fit the tensor, or the tensor is none of ours.
    """
    names = tuple(axes.split())
    first = tensors[0]
    extents = tuple(_extent(tensor, where) for tensor in tensors)
    if len(names) != first.dim():
        raise CacheError(
            f"{where}: axes {axes!r} name {len(names)} axes, the tensor of shape"
            f" {tuple(first.shape)} has {first.dim()}"
        )
    check_unique("axis", names, where)
    if BLOCK_AXIS not in names:
        raise CacheError(f"{where}: axes {axes!r} have no block axis {BLOCK_AXIS!r}")
    width = first.element_size()
    found = {
        name: Axis(name, size, stride * width)
        for name, size, stride in zip(names, first.shape, first.stride(), strict=True)
    }
    if len(tensors) > 1:
        found[PAIR_AXIS] = _pair_axis(tensors, found, where)
    if len(found) > MOST_AXES:
        raise CacheError(f"{where}: {len(found)} axes, no peer takes over {MOST_AXES}")
    strides = Strides(where, tensors, names, found, first.data_ptr(), extents)
    _check_overlap(strides, width)
    return strides


def _pair_axis(
    tensors: tuple[torch.Tensor, ...], axes: Mapping[str, Axis], where: str
) -> Axis:
    key, value = tensors
    if PAIR_AXIS in axes:
        raise CacheError(
            f"{where}: a pair of tensors makes the axis {PAIR_AXIS!r}, name the others"
        )
    for fact, ours, theirs in (
        ("shape", tuple(key.shape), tuple(value.shape)),
        ("strides", key.stride(), value.stride()),
        ("dtype", key.dtype, value.dtype),
        ("device", key.device, value.device),
    ):
        if ours != theirs:
            raise CacheError(
                f"{where}: key and value differ in {fact}: {ours} and {theirs}; give them"
                " as two fields"
            )
    return Axis(PAIR_AXIS, 2, value.data_ptr() - key.data_ptr())


def _extent(tensor: torch.Tensor, where: str) -> Extent:
    if tensor.device.type not in {"cpu", "cuda"} or tensor.layout != torch.strided:
        raise CacheError(
            f"{where}: a {tensor.layout} tensor on {tensor.device} cannot be registered"
        )
    if tensor.element_size() not in _INTEGERS:
        raise CacheError(
            f"{where}: elements of {tensor.element_size()} bytes ({tensor.dtype})"
        )
    if tensor.numel() == 0:
        raise CacheError(f"{where}: no elements in shape {tuple(tensor.shape)}")
    reach = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first = tensor.data_ptr()
    on_host = tensor.device.type == "cpu"
    return Extent(
        "DRAM" if on_host else "VRAM",
        0 if on_host else tensor.device.index or 0,
        first,
        first + (reach + 1) * tensor.element_size(),
        tensor.untyped_storage().data_ptr(),
    )


def _check_overlap(strides: Strides, width: int) -> None:
    """No two elements of the field share a byte.

    Axes in order of their strides must each step over all that the smaller ones
    span. (Views that interleave more cleverly than that are refused, too.)
    """
    span = width
    for axis in sorted(strides.axes.values(), key=lambda axis: abs(axis.stride)):
        if axis.size == 1:
            continue
        if abs(axis.stride) < span:
            raise CacheError(
                f"{strides.where}: elements overlap: axis {axis.name!r} steps"
                f" {axis.stride} bytes over {span} bytes"
            )
        span += (axis.size - 1) * abs(axis.stride)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the elements' width: zero bytes are zero."""
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the allocation that a tensor lies in, as one axis; no copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def check_unique(kind: str, names: Sequence[str], where: str) -> None:
    """No name is empty or there twice.

    Raises:
        CacheError: With the first one that is.
    """
    for name in names:
        if not name or names.count(name) > 1:
            raise CacheError(f"{where}: {kind} name {name!r} is empty or used twice")


def merged_regions(extents: Iterable[Extent]) -> Iterator[Region]:
    """Regions to register: overlapping extents joined, and adjacent ones, too.

    Adjacent device extents are joined inside one storage only: two device
    allocations that happen to touch cannot be registered as one.
    """
    for (memory, device), members in groupby(sorted(extents), key=lambda e: e[:2]):
        first, last, storage = -1, -1, -1
        for extent in members:
            joins = extent.first < last or (
                extent.first == last and (memory == "DRAM" or extent.storage == storage)
            )
            if not joins and last > first:
                yield Region(memory, device, first, last - first)
            first, last = (first, max(last, extent.last)) if joins else extent[2:4]
            storage = extent.storage
        yield Region(memory, device, first, last - first)
