"""Engines on one memory network and virtual time, and pools whose every element is known.

`World` opens engines that share a `MemoryNetwork`, a `MemoryStreams` and a log;
`Pool` is a small dense cache whose elements are stamps: a function of (layer,
key/value, head, token, element), so that a wrong byte shows wherever it is.
"""

from __future__ import annotations

import io
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog
import torch
import trio

from kvferry.engine import (
    AttentionGroup,
    EngineConfig,
    KVCache,
    PagedTensor,
    TransferEngine,
    open_engine,
    tp_shard,
)
from kvferry.engine.fabric import MemoryNetwork, MemoryStreams
from kvferry.protocol import ModelIdentity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

IDENTITY = ModelIdentity(model="org/tiny", revision="1", dtype="float64")
POISON = -1.0
GROUP = "full"


class Pool:
    """A dense cache of stamps; float64 holds each of them exactly."""

    def __init__(
        self,
        blocks: int = 16,
        *,
        layers: int = 2,
        block_size: int = 4,
        heads: int = 2,
        dim: int = 3,
    ) -> None:
        self.block_size = block_size
        shape = (blocks, 2, heads, block_size, dim)
        self.tensors = [
            torch.full(shape, POISON, dtype=torch.float64) for _ in range(layers)
        ]
        shard = tp_shard(total=heads, rank=0, size=1)
        self.cache = KVCache(
            [
                AttentionGroup(
                    GROUP,
                    block_size=block_size,
                    layers={
                        f"layers.{i}": PagedTensor(tensor, "b k h n d", shard)
                        for i, tensor in enumerate(self.tensors)
                    },
                )
            ]
        )

    def stamp(
        self, block_ids: Sequence[int], *, num_tokens: int, salt: int = 0
    ) -> dict[str, list[int]]:
        """Fill a request's tokens, and garbage behind them; the ids as `offer` takes them."""
        for layer in range(len(self.tensors)):
            for token in range(len(block_ids) * self.block_size):
                block, slot = divmod(token, self.block_size)
                stale = token >= num_tokens
                self.tensors[layer][block_ids[block], :, :, slot] = (
                    1e12 + token if stale else self._stamps(layer, token, salt)
                )
        return {GROUP: list(block_ids)}

    def check(
        self,
        block_ids: Sequence[int],
        *,
        num_tokens: int,
        first_token: int = 0,
        salt: int = 0,
    ) -> None:
        """Stamps in `[first_token, num_tokens)`, zeros behind, poison everywhere else.

        The listed blocks begin at ``first_token``.
        """
        for layer, tensor in enumerate(self.tensors):
            expected = torch.full_like(tensor, POISON)
            for place, block in enumerate(block_ids):
                for slot in range(self.block_size):
                    token = first_token + place * self.block_size + slot
                    expected[block, :, :, slot] = (
                        self._stamps(layer, token, salt) if token < num_tokens else 0
                    )
            assert torch.equal(tensor, expected), f"layer {layer}"

    def is_untouched(self) -> bool:
        """Whether every element is still poison."""
        return all(bool((tensor == POISON).all()) for tensor in self.tensors)

    def _stamps(self, layer: int, token: int, salt: int) -> torch.Tensor:
        _, pair, heads, _, dim = self.tensors[layer].shape
        element = torch.arange(pair * heads * dim, dtype=torch.float64)
        place = (salt * 64 + layer) * 100_000 + token + 1
        return (place * 4096 + element).reshape(pair, heads, dim)


class World:
    """Engines that can reach each other, and everything they log."""

    def __init__(self, **network: Any) -> None:
        self.network = MemoryNetwork(**network)
        self.streams = MemoryStreams()
        self.events: list[dict[str, Any]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def engine(
        self, engine_id: str, pool: Pool, **config: Any
    ) -> AsyncIterator[TransferEngine]:
        """Open an engine; its fabric is called ``<engine_id>-<number>``."""
        settings = {"engine_id": engine_id, "identity": IDENTITY, **config}
        async with open_engine(
            EngineConfig(**settings),
            pool.cache,
            fabric=self.network.fabric(f"{engine_id}-{next(self._numbers)}"),
            streams=self.streams,
            logger=self._logger(),
        ) as engine:
            yield engine

    @asynccontextmanager
    async def pair(
        self, producer: Pool, consumer: Pool, **config: Any
    ) -> AsyncIterator[tuple[TransferEngine, TransferEngine]]:
        """A producer ``p`` and a consumer ``c``, both back to base at the end."""
        async with (
            self.engine("p", producer, **config) as prefill,
            self.engine("c", consumer, **config) as decode,
        ):
            yield prefill, decode
            await trio.testing.wait_all_tasks_blocked()
            at_base(prefill)
            at_base(decode)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """All log entries of one name."""
        return [entry for entry in self.events if entry["event"] == event]

    def _logger(self) -> Any:
        def keep(_logger: object, level: str, entry: dict[str, Any]) -> Any:
            self.events.append({"level": level, **entry})
            raise structlog.DropEvent

        return structlog.wrap_logger(
            structlog.PrintLogger(io.StringIO()),
            processors=[keep],
            wrapper_class=structlog.make_filtering_bound_logger(0),
        )


def at_base(engine: TransferEngine) -> None:
    """Nothing is under way, held or left over (invariant 8)."""
    live = engine.statistics()
    for name in ("pulls", "offers", "quarantine", "unsettled_transfers"):
        assert live[name] == 0, live
    assert live["fabric_transfers"] == 0, live
