"""What prefill and decode have in common: the options, the pools, the engine.

A side is an *instance*: one process, or several of which each holds its share of
the heads in a pool of its own, behind an engine of its own. Rank 0 also plays the
scheduler and the model: it decides which blocks a request gets, the same ids on all
ranks, and runs the whole model. With one rank, the pool is the model's cache. With
several, the model works in a second pool with all heads, that nobody else can see,
and shares of it go by file to the ranks, or come from them.
"""

from __future__ import annotations

import argparse
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import trio
from models import MODELS
from pools import FreeBlocks, Pools, SideShape, merge_shares
from prompts import NOTICE
from router_line import json_logger
from safetensors.torch import load_file, save_file

from kvferry.engine import (
    EngineConfig,
    FerryError,
    Rank,
    TransferEngine,
    open_engine,
)
from kvferry.protocol import ModelIdentity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    import torch
    from models import Tokenizer
    from models.groups import CacheGroup
    from pools import Tables
    from router_line import RouterLine

__all__ = (
    "PUSH_S",
    "Scheduler",
    "Side",
    "one_line",
    "open_side",
    "side_arguments",
)

T = TypeVar("T")

PUSH_S = 60.0
"""Deadline of a push on either side: a prefill, and more, lies inside it."""


@dataclass(frozen=True)
class Scheduler:
    """What only rank 0 has.

    Attributes:
        model: The whole of it.
        tokenizer: The model's.
        whole: Pools with all heads, in which the model works.
        free: By group, the blocks that no request holds.
        turn: Held by the request that runs the model.
    """

    model: Any
    tokenizer: Tokenizer
    whole: Pools
    free: dict[str, FreeBlocks]
    turn: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(1))

    def prompt(self, question: str) -> list[int]:
        """Tokenizes a prompt here; every process comes to the same tokens."""
        return self.tokenizer.prompt(NOTICE, question)

    def cache(self, tables: Tables, *, tokens: int = 0) -> Any:  # noqa: ANN401 - transformers'
        """The model's cache for one request: see `paged.paged_cache`."""
        # Imported when needed: a rank without the model does without transformers.
        from paged import paged_cache  # noqa: PLC0415

        return paged_cache(self.whole, tables, tokens=tokens)

    def save_states(self, cache: Any, tables: Tables) -> None:  # noqa: ANN401
        """Copies the model's states into the request's slots."""
        from paged import save_states  # noqa: PLC0415

        save_states(cache, self.whole, tables)

    def allocate(self, tokens: int) -> dict[str, list[int | None]]:
        """Takes blocks for so many tokens, and a slot for states."""
        pools = self.whole
        counts = {name: pool.blocks_for(tokens) for name, pool in pools.paged.items()}
        counts |= dict.fromkeys(pools.states, 1)
        return {name: [*self.free[name].take(n)] for name, n in counts.items()}

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401
        """Runs the model in a thread, for one request after the other.

        In a thread, because an engine whose loop stands still could neither renew a
        lease nor move the bytes of another request.
        """
        return await trio.to_thread.run_sync(work, *arguments, limiter=self.turn)

    def give_back(self, tables: Tables) -> None:
        """Frees the blocks of a request."""
        for name, block_ids in tables.items():
            self.free[name].give_back(block_ids)


@dataclass(frozen=True)
class Side:
    """One process of an instance, ready to work.

    Attributes:
        router: The line to the router.
        groups: What the model caches.
        tp: This rank's number, and how many there are.
        pools: The memory that kvferry moves: this rank's heads.
        engine: The kvferry engine over the pools.
        own: The scheduler's part, on rank 0.
        used: By group, the blocks that any request has had here.
    """

    router: RouterLine
    groups: tuple[CacheGroup, ...]
    tp: tuple[int, int]
    pools: Pools
    engine: TransferEngine
    own: Scheduler | None
    used: dict[str, set[int]] = field(default_factory=dict)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler's part.

        Raises:
            ValueError: Only rank 0 has it.
        """
        if self.own is None:
            raise ValueError(f"rank {self.tp[0]} takes no orders for rank 0")
        return self.own

    def note_used(self, tables: Tables) -> None:
        """Remembers whose blocks these were."""
        for name, block_ids in tables.items():
            ids = {i for i in block_ids if i is not None}
            self.used[name] = self.used.get(name, set()) | ids

    def say_ready(self) -> None:
        """Tells the router that this rank takes orders, and where it listens."""
        self.router.say("ready", contact=self.engine.contact.to_dict())

    def take_share(self, tables: Tables, path: str | None) -> None:
        """Fills this rank's pool, if the model worked in another one."""
        if path is not None:
            self.pools.copy_in(tables, load_file(path))

    def save_share(self, tables: Tables, path: str) -> None:
        """Writes what this rank holds of a request."""
        save_file(self.pools.copied_out(tables), path)

    def merged(self, paths: Sequence[str]) -> dict[str, torch.Tensor]:
        """Puts the shares of all ranks together, given in their order."""
        smallest = SideShape(tokens=0, slots=1)
        shares = []
        for rank, path in enumerate(paths):
            pools = Pools(self.groups, smallest, (rank, len(paths)))
            shares.append((load_file(path), pools.shards()))
        return merge_shares(shares)


def one_line(error: FerryError) -> str:
    """The error's type and message, whatever line breaks the message has."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def side_arguments(
    engine_id: str, *, tokens: int, seed: int
) -> argparse.ArgumentParser:
    """The options of a rank, with the given ones as defaults."""
    parser = argparse.ArgumentParser(description=f"A rank of the {engine_id} side.")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--tp", default="0/1", help="this rank / all ranks")
    parser.add_argument("--engine-id", default=engine_id)
    parser.add_argument("--listen", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--tokens", type=int, default=tokens, help="room in the pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--axes", default="b k h n d", help="storage order of a tensor")
    parser.add_argument("--seed", type=int, default=seed, help="scatters the blocks")
    parser.add_argument("--pull-deadline-s", type=float, default=30.0)
    return parser


@asynccontextmanager
async def open_side(
    router: RouterLine,
    arguments: argparse.Namespace,
    **settings: Any,  # noqa: ANN401 - of `EngineConfig`
) -> AsyncIterator[Side]:
    """Makes the pools, loads the model on rank 0, opens the engine."""
    known = MODELS[arguments.model]
    rank, ranks = (int(number) for number in arguments.tp.split("/"))
    shape = SideShape(arguments.tokens, arguments.block_size, arguments.axes)
    pools = Pools(known.groups(), shape, (rank, ranks))
    config = EngineConfig(
        engine_id=arguments.engine_id,
        identity=ModelIdentity(
            model=known.name, revision=known.revision, dtype=known.dtype
        ),
        rank=Rank(tp=rank, tp_size=ranks),
        listen=(arguments.listen, 0),
        pull_deadline_s=arguments.pull_deadline_s,
        **settings,
    )
    own = None
    if rank == 0:
        whole = pools if ranks == 1 else Pools(known.groups(), shape, (0, 1))
        free = {
            name: FreeBlocks(pool.blocks, arguments.seed + number)
            for number, (name, pool) in enumerate(pools.by_group.items())
        }
        own = Scheduler(known.load(), known.tokenizer(), whole, free)
    async with open_engine(config, pools.described(), logger=json_logger()) as engine:
        yield Side(router, known.groups(), (rank, ranks), pools, engine, own)
