"""What a model caches, in plain numbers: groups of layers that share a block table.

Plain data, the same in every process; no torch here, and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("CacheGroup", "PagedGroup", "StateGroup")


@dataclass(frozen=True)
class PagedGroup:
    """Attention layers: something for each token.

    Attributes:
        name: Of the group.
        layers: Their numbers in the model.
        heads: KV heads of the whole model; 0 if the layers cache latents.
        sizes: Elements of a key and of a value, alike; or of a latent and of its
            rotary part.
        window: Tokens that a query sees, itself included; None for all.
        dtype: Of the elements.
    """

    name: str
    layers: tuple[int, ...]
    heads: int
    sizes: tuple[int, int]
    window: int | None = None
    dtype: str = "float32"

    def first_needed(self, tokens: int) -> int:
        """The first token in the cache that the next one, at ``tokens``, looks at."""
        return max(0, tokens - self.window + 1) if self.window else 0


@dataclass(frozen=True)
class StateGroup:
    """Layers of a delta rule: a convolution state and a recurrent state.

    Attributes:
        name: Of the group.
        layers: Their numbers in the model.
        channels: The parts of the convolution's channels, in order, each of which
            tensor parallelism cuts by itself.
        width: Inputs that the convolution remembers per channel.
        heads: Heads of the recurrent state, which is always fp32.
        head_sizes: Rows and columns of a head.
        dtype: Of the convolution state.
    """

    name: str
    layers: tuple[int, ...]
    channels: Mapping[str, int]
    width: int
    heads: int
    head_sizes: tuple[int, int]
    dtype: str = "float32"


CacheGroup = PagedGroup | StateGroup
