"""Layouts of real models as numbers alone: no tensors, so that a pool may have any size.

Each layer has a tensor of its own at an address of its own, in the axis order that
is asked for, as `kvferry.engine.KVCache` would describe it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from kvferry.engine import tp_shard
from kvferry.protocol.layout import (
    Axis,
    CacheLayout,
    FieldLayout,
    GroupLayout,
    PartLayout,
    Region,
    Shard,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("GROUP", "Model", "gqa", "mla")

GROUP = "full"
"""The one group of every model here."""

_BASE = 2**40
_GAP = 2**21
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Model:
    """What both sides agree on.

    Attributes:
        heads: KV heads of the whole model; 0 for one replicated unit (MLA).
        inner: Sizes of the axes that no side splits.
    """

    name: str
    layers: int
    heads: int
    inner: Mapping[str, int]

    def layout(
        self,
        order: str,
        *,
        blocks: int,
        block_tokens: int,
        tp: int = 1,
        rank: int = 0,
    ) -> CacheLayout:
        """One rank's cache: bfloat16, axes in ``order``, slowest first."""
        shard = tp_shard(self.heads, rank, tp) if self.heads else Shard(1, 0, 1)
        sizes = {"b": blocks, "n": block_tokens, **self.inner}
        if self.heads:
            sizes["h"] = shard.size
        strides = _strides(order, sizes)
        axes = [Axis(a, sizes[a], strides[a]) for a in order.split() if a != "b"]
        if not self.heads:
            axes.append(Axis("h", 1, 0))
        pool_bytes = prod(sizes.values()) * _ELEMENT_BYTES
        pitch = -(-pool_bytes // _GAP) * _GAP + _GAP
        addresses = [_BASE + n * pitch for n in range(self.layers)]
        return CacheLayout(
            regions=tuple(Region("VRAM", 0, at, pool_bytes) for at in addresses),
            groups=(
                GroupLayout(
                    GROUP,
                    block_tokens,
                    blocks,
                    tuple(
                        FieldLayout(
                            layer=f"layers.{n}",
                            name="kv",
                            dtype="bfloat16",
                            element_bytes=_ELEMENT_BYTES,
                            memory="VRAM",
                            device=0,
                            blocks=blocks,
                            block_stride=strides["b"],
                            block_tokens=block_tokens,
                            parts=(PartLayout("kv", shard, at, tuple(axes)),),
                        )
                        for n, at in enumerate(addresses)
                    ),
                ),
            ),
        )


def _strides(order: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes a step of each axis of a dense tensor."""
    strides, stride = {}, _ELEMENT_BYTES
    for name in reversed(order.split()):
        strides[name] = stride
        stride *= sizes[name]
    return strides


def mla(layers: int = 61) -> Model:
    """One latent of 512 and a rotary part of 64 a token, the same on all ranks."""
    return Model("MLA", layers, 0, {"d": 576})


def gqa(layers: int = 61, heads: int = 8) -> Model:
    """Keys and values of 128 a head and token."""
    return Model(f"GQA {heads} heads", layers, heads, {"k": 2, "d": 128})
