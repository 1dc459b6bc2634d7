"""Where random schedules play: small instances whose every element is known.

`Pages` is the cache of one start of a rank, `Site` a rank over all its starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import trio

from kvferry.engine import AttentionGroup, KVCache, PagedTensor, Rank, tp_shard
from tests.kit import GROUP

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvferry.engine import TransferEngine
    from kvferry.engine.testing import Account, Host

BLOCKS = 6
BLOCK_TOKENS = 2
HEADS = 2
GARBAGE = 1e12
TIMES = {
    "lease_s": 1.0,
    "pull_deadline_s": 2.0,
    "drain_grace_s": 0.3,
    "connect_timeout_s": 0.5,
    "handshake_timeout_s": 0.5,
    # Few looks of the pump: each costs real time.
    "poll_s": 0.02,
    "offered_poll_s": 0.1,
    "idle_poll_s": 0.5,
}
WAYS = (
    {},
    {"wave_bytes": 32, "window": 2},
    {"wave_bytes": 64, "window": 2, "landing": "bulk", "staging_bytes": 128},
)
"""All at once, in waves, and through a staging buffer with room for one pull."""
BOUNDS = (
    {},
    {"max_waves_in_flight": 1},
    {"max_waves_in_flight": 3, "max_peer_bytes_in_flight": 32},
    {"max_bytes_in_flight": 64},
)
"""Of what is in flight at once: the last three so small that waves wait for a turn."""


@dataclass(frozen=True)
class Shape:
    """Who there is, with how many ranks, and who reads from whom."""

    ranks: dict[str, int]
    flows: tuple[tuple[str, str], ...]


SHAPES = {
    "pair": Shape({"p": 1, "c": 1}, (("p", "c"),)),
    "two ranks to one": Shape({"p": 2, "c": 1}, (("p", "c"),)),
    "one to two ranks": Shape({"p": 1, "c": 2}, (("p", "c"),)),
    "both ways": Shape({"a": 1, "b": 1}, (("a", "b"), ("b", "a"))),
    "two producers": Shape({"p": 1, "q": 1, "c": 1}, (("p", "c"), ("q", "c"))),
    "in a ring": Shape({"a": 1, "b": 1, "c": 1}, (("a", "b"), ("b", "c"), ("c", "a"))),
}


class Pages:
    """A tiny cache of stamps, whose free blocks hold a pattern of this start alone."""

    def __init__(self, *, layers: int, tp: tuple[int, int], pattern: float) -> None:
        self._pattern = pattern
        shard = tp_shard(total=HEADS, rank=tp[0], size=tp[1])
        shape = (BLOCKS, 2, shard.size, BLOCK_TOKENS, 1)
        tensors = [
            torch.full(shape, pattern, dtype=torch.float64) for _ in range(layers)
        ]
        self._arrays = [tensor.numpy() for tensor in tensors]
        self._heads = slice(shard.first, shard.last)
        self.layers = tuple(f"layers.{i}" for i in range(layers))
        paged = {
            name: PagedTensor(tensor, "b k h n d", shard)
            for name, tensor in zip(self.layers, tensors, strict=True)
        }
        self.cache = KVCache([AttentionGroup(GROUP, BLOCK_TOKENS, layers=paged)])

    def spoil(self, blocks: Sequence[int]) -> None:
        """Fill blocks with garbage: nothing of them is final yet."""
        for array in self._arrays:
            array[list(blocks)] = GARBAGE

    def stamp(
        self,
        blocks: Sequence[int],
        *,
        tokens: int,
        salt: int,
        layers: Collection[str] | None = None,
        part: tuple[int, int] | None = None,
    ) -> None:
        """Fill a request's tokens, or a part of them, and garbage behind them."""
        first, last = part or (0, len(blocks) * BLOCK_TOKENS)
        for layer, array in enumerate(self._arrays):
            if layers is None or self.layers[layer] in layers:
                stamps = self._stamps(layer, 0, len(blocks), salt)
                stamps[:, :, tokens:] = GARBAGE
                self._put(array, blocks, stamps, first, last)

    def wrong(
        self, blocks: Sequence[int], *, first_token: int, tokens: int, salt: int
    ) -> int:
        """How many elements are neither their stamp nor, behind the tokens, zero."""
        wrong = 0
        for layer, array in enumerate(self._arrays):
            stamps = self._stamps(layer, first_token, len(blocks), salt)
            stamps[:, :, max(tokens - first_token, 0) :] = 0
            for place, block in enumerate(blocks):
                begin = place * BLOCK_TOKENS
                due = stamps[:, :, begin : begin + BLOCK_TOKENS]
                wrong += int((array[block] != due).sum())
        return wrong

    def reuse(self, blocks: Sequence[int]) -> None:
        """Write over blocks that are free."""
        for array in self._arrays:
            array[list(blocks)] = self._pattern

    def is_reused(self, blocks: Sequence[int]) -> bool:
        """Whether nobody has written there since."""
        return all(
            (array[list(blocks)] == self._pattern).all() for array in self._arrays
        )

    def extents(self) -> list[list[tuple[int, int]]]:
        """Of each block, where it lies."""
        return [
            [(array[block].ctypes.data, array[block].nbytes) for array in self._arrays]
            for block in range(BLOCKS)
        ]

    def _stamps(self, layer: int, first: int, blocks: int, salt: int) -> Any:
        tokens = np.arange(first, first + blocks * BLOCK_TOKENS)
        pair, head = np.arange(2)[:, None, None], np.arange(HEADS)[:, None]
        place = (salt * 4 + layer) * 64 + tokens
        stamps = (place * 64 + pair * 8 + head + 1).astype(np.float64)
        return stamps[:, self._heads, :, None]

    def _put(
        self, array: Any, blocks: Sequence[int], stamps: Any, first: int, last: int
    ) -> None:
        for token in range(first, last):
            place, slot = divmod(token, BLOCK_TOKENS)
            array[blocks[place]][:, :, slot] = stamps[:, :, token]


@dataclass(eq=False)
class Start:
    """One start of a rank: what dies with it."""

    host: Host
    pages: Pages
    engine: TransferEngine
    account: Account
    nursery: trio.Nursery
    is_leaving: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it was killed, or leaves."""
        return self.host.is_killed or self.is_leaving

    async def run(self, call: Any, *args: Any) -> None:
        """Do something inside the process; returns when it has ended, or was killed."""
        if self.is_over:
            return
        ended = trio.Event()

        async def inside() -> None:
            try:
                await call(*args)
            finally:
                ended.set()

        self.nursery.start_soon(inside)
        await ended.wait()


@dataclass(eq=False)
class Site:
    """One rank of an instance, over all its starts."""

    instance: str
    rank: Rank
    port: int
    start: Start | None = None
    came_up: trio.Event = field(default_factory=trio.Event)

    @property
    def name(self) -> str:
        """For the story."""
        return f"{self.instance}{self.rank.tp}"

    async def up(self) -> Start:
        """The start that is up now, or the next one."""
        while self.start is None or self.start.is_over:
            await self.came_up.wait()
        return self.start
