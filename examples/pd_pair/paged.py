"""A transformers cache that lives in the blocks of a rank's pools.

The paged pool is the model's cache, not a staging area: the model writes keys and
values straight into the blocks that kvferry reads from or writes to, and after a
pull the decode goes on in the very blocks that were pulled.

States are the opposite. A model advances its state in place, so it works in a copy:
`paged_cache` copies a slot into it, `save_states` copies it back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

if TYPE_CHECKING:
    from models.groups import StateGroup
    from pools import Blocks, PagedPool, Pools, Tables

__all__ = ("Written", "paged_cache", "save_states", "states_of")


Written = Callable[[int, int, int], None]
"""Told of a layer and its tokens ``[first, last)``, whose keys and values are final."""


def paged_cache(
    pools: Pools,
    tables: Tables,
    *,
    tokens: int = 0,
    on_written: Written | None = None,
) -> Cache:
    """A cache for one request that reads and writes the tables' blocks.

    Args:
        pools: With all heads of the model.
        tables: By group the request's blocks, from token 0 on, or its slot.
        tokens: How many tokens they hold already, be they pulled, shared with an
            earlier request, or none.
        on_written: Called in the middle of a forward pass, in the model's thread, each
            time that a layer has written its new tokens into the blocks.
    """
    layers: dict[int, Any] = {}
    for name, pool in pools.paged.items():
        for layer in pool.group.layers:
            layers[layer] = PagedLayer(pool, layer, tables[name], tokens, on_written)
    for states in pools.states.values():
        layers |= {layer: LinearAttentionLayer() for layer in states.group.layers}
    cache = Cache(layers=[layers[layer] for layer in sorted(layers)])
    if tokens:
        for name, states in pools.states.items():
            _load_states(cache, states.group, states.copied_out(tables[name]))
    return cache


def save_states(cache: Cache, pools: Pools, tables: Tables) -> None:
    """Copies the model's states into the request's slots."""
    for name, pool in pools.states.items():
        pool.copy_in(tables[name], states_of(cache, pool.group))


def states_of(cache: Cache, group: StateGroup) -> dict[str, torch.Tensor]:
    """The states of a cache, by the names that the pools use."""
    states: dict[str, torch.Tensor] = {}
    for layer in group.layers:
        held: Any = cache.layers[layer]
        sizes = list(group.channels.values())
        parts = held.conv_states[0][0].split(sizes)
        named = dict(zip(group.channels, parts, strict=True))
        named["recurrent"] = held.recurrent_states[0][0]
        states |= {f"{group.name}/{layer}/{name}": t for name, t in named.items()}
    return states


def _load_states(
    cache: Cache, group: StateGroup, states: dict[str, torch.Tensor]
) -> None:
    """Gives a fresh cache its states; transformers copies them."""
    for layer in group.layers:
        where = f"{group.name}/{layer}"
        parts = [states[f"{where}/{name}"] for name in group.channels]
        conv, recurrent = torch.cat(parts)[None], states[f"{where}/recurrent"][None]
        cache.update_conv_state(conv, layer, conv_kernel_size=group.width)
        cache.update_recurrent_state(recurrent, layer)


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of one request's cache, in the blocks of a pool.

    Each layer counts its own tokens, because a forward pass updates one layer
    after the other.
    """

    def __init__(
        self,
        pool: PagedPool,
        layer: int,
        block_ids: Blocks,
        tokens: int,
        on_written: Written | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = pool.group.window is not None
        self.is_initialized = True
        self._group = pool.group
        self._planes = pool.planes[layer]
        self._block_size = pool.block_size
        self._block_ids = torch.tensor([-1 if i is None else i for i in block_ids])
        self._tokens = tokens
        self._layer = layer
        self._on_written = on_written

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Nothing to allocate: the pool is there before the request is."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401, ARG002 - the signature is transformers'
        **kwargs: Any,  # noqa: ANN401, ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens into their slots and returns all that may be looked at.

        Args:
            key_states: ``[1, head, new token, payload]``, after RoPE; or latents.
            value_states: Likewise; or rotary parts.
        """
        first, last = self._tokens, self._tokens + key_states.shape[-2]
        positions = torch.arange(first, last)
        blocks = self._present(first, last)[positions // self._block_size]
        places = positions % self._block_size
        for plane, states in zip(self._planes, (key_states, value_states), strict=True):
            # Two index arrays around a slice: the indexed axis comes first.
            plane[blocks, :, places] = states[0].transpose(0, 1)
        self._tokens = last
        if self._on_written is not None:
            self._on_written(self._layer, first, last)
        seen = self._group.first_needed(first)
        key, value = (self._gathered(plane, seen, last) for plane in self._planes)
        return key, value

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the queries may look at."""
        first = self._group.first_needed(self._tokens)
        return self._tokens + query_length - first, first

    def get_seq_length(self) -> int:
        """Tokens seen; a window may hold fewer."""
        return self._tokens

    def get_max_length(self) -> int:
        """Tokens that fit into the request's blocks."""
        return len(self._block_ids) * self._block_size

    def _gathered(self, plane: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Tokens ``[first, last)`` of one plane, as the model wants to see them."""
        skipped = first // self._block_size
        used = self._present(first, last)[skipped : math.ceil(last / self._block_size)]
        tokens = plane[used].transpose(0, 1).flatten(1, 2)
        offset = skipped * self._block_size
        return tokens[None, :, first - offset : last - offset]

    def _present(self, first: int, last: int) -> torch.Tensor:
        """The block ids, of which those of tokens ``[first, last)`` are there.

        Raises:
            ValueError: They are not: dropped, or never allocated.
        """
        needed = slice(first // self._block_size, math.ceil(last / self._block_size))
        found = self._block_ids[needed]
        if len(found) < needed.stop - needed.start or bool((found < 0).any()):
            raise ValueError(f"tokens [{first}, {last}) are not all in the blocks")
        return self._block_ids
