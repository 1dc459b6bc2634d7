"""Both sides of the landing benchmark over real NIXL: a producer, and a consumer of it.

Each is a process of its own; they are started by `benchmarks.landing`, which says by
the environment what UCX may use. A line of JSON per case goes to the producer, which
answers with a ticket for every line it gets after that.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
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
from kvferry.protocol import ModelIdentity, Ticket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    from kvferry.engine import TransferReport

__all__ = ("Case", "Side", "pipes", "start")

GROUP = "full"
IDENTITY = ModelIdentity(model="org/landing", revision="1", dtype="uint8")
MODES = ("direct", "bulk", "auto")


@dataclass(frozen=True)
class Side:
    """How one side stores its heads.

    Attributes:
        tp: Ranks that share the heads; rank 0 takes part.
    """

    axes: str
    block_tokens: int
    tp: int = 1


@dataclass(frozen=True)
class Case:
    """One pull, of about so many needed bytes, whose direct runs have one length."""

    series: str
    run_bytes: int
    producer: Side
    consumer: Side
    heads: int
    head_bytes: int
    layers: int
    tokens: int

    def cache(self, side: Side, *, seed: int | None) -> tuple[KVCache, torch.Tensor]:
        """A pool of twice the request's size, and all its bytes."""
        shard = tp_shard(total=self.heads, rank=0, size=side.tp)
        sizes = {
            "b": 2 * self.tokens // side.block_tokens,
            "k": 2,
            "n": side.block_tokens,
            "h": shard.size,
            "d": self.head_bytes,
        }
        shape = (self.layers, *(sizes[axis] for axis in side.axes.split()))
        pool = torch.zeros(shape, dtype=torch.uint8)
        if seed is not None:
            pool.random_(generator=torch.Generator().manual_seed(seed))
        layers = {
            f"layers.{n}": PagedTensor(pool[n], side.axes, shard)
            for n in range(self.layers)
        }
        return KVCache([AttentionGroup(GROUP, side.block_tokens, layers)]), pool

    def blocks(self, side: Side, *, seed: int) -> list[int]:
        """The request's blocks, scattered over the pool."""
        pool = 2 * self.tokens // side.block_tokens
        ids = np.random.default_rng(seed).permutation(pool)
        return [int(n) for n in ids[: self.tokens // side.block_tokens]]


def _case(text: dict[str, Any]) -> Case:
    sides = {name: Side(**text.pop(name)) for name in ("producer", "consumer")}
    return Case(**text, **sides)


# --- the producer ----------------------------------------------------------------


async def _produce(answers: IO[str]) -> None:
    """A case, then lines until an empty one: each is answered with a ticket."""
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        case = _case(json.loads(line))
        cache, _ = case.cache(case.producer, seed=1)
        config = EngineConfig(engine_id="producer", identity=IDENTITY)
        async with open_engine(config, cache) as engine:
            blocks = {GROUP: case.blocks(case.producer, seed=2)}
            while request := (
                await trio.to_thread.run_sync(sys.stdin.readline)
            ).strip():
                offer = engine.offer(request, blocks, num_tokens=case.tokens)
                answers.write(json.dumps(offer.ticket.to_dict()) + "\n")
                answers.flush()


# --- the consumer ----------------------------------------------------------------


def start(role: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start this file in a process of its own."""
    return subprocess.Popen(  # noqa: S603 - our own file
        [sys.executable, "-m", "benchmarks.landing_sides", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """To it and from it."""
    if process.stdin is None or process.stdout is None:
        raise OSError("a process without pipes")
    return process.stdin, process.stdout


class _Producer:
    """The other process, as the consumer talks to it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._to, self._from = pipes(process)
        self._requests = 0

    async def ask(self, line: str) -> str:
        """Send a line and wait for the answer."""
        self.tell(line)
        answer = await trio.to_thread.run_sync(self._from.readline)
        if not answer:
            raise EOFError("the producer has ended")
        return answer

    def tell(self, line: str) -> None:
        """Send a line that has no answer."""
        self._to.write(line + "\n")
        self._to.flush()

    async def ticket(self) -> Ticket:
        """A ticket for one more request."""
        self._requests += 1
        return Ticket.from_dict(json.loads(await self.ask(f"r{self._requests}")))


async def _consume(cases: list[Case], rounds: int, answers: IO[str]) -> None:
    # A pipe's end is all that a producer waits for: starting it may block.
    with start("produce", dict(os.environ)) as process:
        try:
            producer = _Producer(process)
            for case in cases:
                producer.tell(json.dumps(asdict(case)))
                answers.write(json.dumps(await _measure(case, producer, rounds)) + "\n")
                answers.flush()
                producer.tell("")
        finally:
            process.kill()


async def _measure(case: Case, producer: _Producer, rounds: int) -> dict[str, Any]:
    """Direct and bulk in turns; one pull of auto tells what it chooses."""
    times: dict[str, list[float]] = {mode: [] for mode in MODES[:2]}
    reports: dict[str, TransferReport] = {}
    found: dict[str, torch.Tensor] = {}
    for mode in _turns(rounds):
        cache, pool = case.cache(case.consumer, seed=None)
        config = EngineConfig(
            engine_id="consumer", identity=IDENTITY, listen=None, landing=mode
        )
        async with open_engine(config, cache) as engine:
            taken = []
            for _ in range(1 if mode == "auto" else 3):
                reports[mode], seconds = await _pull(case, engine, producer)
                taken.append(seconds)
            if mode != "auto":
                times[mode] += taken[1:]  # the first one shook hands and planned
            found[mode] = pool
    for mode in MODES[1:]:
        if not torch.equal(found[mode], found["direct"]):
            raise ValueError(f"{case}: {mode} is not what direct reads brought")
    return {
        "series": case.series,
        "run_bytes": case.run_bytes,
        "bytes": reports["direct"].bytes,
        "bulk_bytes": reports["bulk"].bytes,
        "in_bulk": reports["bulk"].bulk_bytes > 0,
        "descriptors": {mode: reports[mode].descriptors for mode in MODES[:2]},
        "seconds": {mode: statistics.median(t) for mode, t in times.items()},
        "least": {mode: min(t) for mode, t in times.items()},
        "most": {mode: max(t) for mode, t in times.items()},
        "auto": "bulk" if reports["auto"].bulk_bytes else "direct",
    }


def _turns(rounds: int) -> Iterator[str]:
    for _ in range(rounds):
        yield from MODES[:2]
    yield MODES[2]


async def _pull(
    case: Case, engine: TransferEngine, producer: _Producer
) -> tuple[TransferReport, float]:
    ticket = await producer.ticket()
    blocks = {GROUP: case.blocks(case.consumer, seed=3)}
    begin = trio.current_time()
    report = await engine.pull(ticket, blocks)
    return report, trio.current_time() - begin


def main() -> None:
    """``produce``, or ``consume`` with the cases and rounds on the first line of stdin."""
    logging.disable(logging.WARNING)
    # UCX's own log goes to descriptor 1 whatever Python does.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if sys.argv[1] == "produce":
        trio.run(_produce, answers)
    else:
        told = json.loads(sys.stdin.readline())
        cases = [_case(text) for text in told["cases"]]
        trio.run(_consume, cases, told["rounds"], answers)


if __name__ == "__main__":
    main()
