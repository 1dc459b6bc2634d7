"""Both sides of the overlap benchmark: a producer with a model, a consumer of its cache.

Each is a process of its own; they are started by `benchmarks.overlap`, which says by
the environment what UCX may use. The model and its paged cache are those of
`examples/pd_pair`. All times are of the host's one monotonic clock, which both
processes read.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import trio

PD_PAIR = Path(__file__).parents[1] / "examples" / "pd_pair"
sys.path.insert(0, str(PD_PAIR))  # its files are scripts, not a package

from generate import prefill  # noqa: E402
from models import MODELS  # noqa: E402
from paged import paged_cache  # noqa: E402
from pools import Pools, SideShape  # noqa: E402
from streaming import prefill_streamed  # noqa: E402

from kvferry.engine import EngineConfig, TransferEngine, open_engine  # noqa: E402
from kvferry.protocol import Contact, ModelIdentity, Ticket  # noqa: E402

if TYPE_CHECKING:
    from kvferry.engine import TransferReport

__all__ = ("MODEL", "MODES", "PD_PAIR", "start")

MODES = ("pull", "push", "stream")
MODEL = MODELS["smollm2"]
IDENTITY = ModelIdentity(model="overlap", revision="1", dtype="float32")
BLOCK = 16
WARM_TOKENS = 128
VOCABULARY = 32_000


def start(
    role: str, environment: dict[str, str], *arguments: str
) -> subprocess.Popen[str]:
    """Start this file in a process of its own."""
    return subprocess.Popen(  # noqa: S603 - our own file
        [sys.executable, "-m", "benchmarks.overlap_sides", role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _blocks(tokens: int, seed: int, pools: Pools) -> dict[str, list[int]]:
    """A request's blocks, scattered over the pool."""
    found = {}
    for name, pool in pools.paged.items():
        ids = np.random.default_rng(seed).permutation(pool.blocks)
        found[name] = [int(n) for n in ids[: pool.blocks_for(tokens)]]
    return found


class _Line:
    """JSON objects, one a line, in and out, without a thread between."""

    def __init__(self, into: int, out: int) -> None:
        self._into = trio.lowlevel.FdStream(into)
        self._out = out
        self._rest = b""

    def say(self, what: dict[str, Any]) -> None:
        os.write(self._out, json.dumps(what).encode() + b"\n")

    async def hear(self) -> dict[str, Any] | None:
        while b"\n" not in self._rest:
            more = await self._into.receive_some(65536)
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    async def expect(self) -> dict[str, Any]:
        heard = await self.hear()
        if heard is None:
            raise EOFError("the other side has ended")
        return heard


# --- the producer ----------------------------------------------------------------


class _Producer:
    def __init__(
        self, line: _Line, pools: Pools, engine: TransferEngine, chunk: int
    ) -> None:
        self._line = line
        self._pools = pools
        self._engine = engine
        self._chunk = chunk
        self._model = MODEL.load()

    async def serve(self) -> None:
        """Run what each line says."""
        self._line.say({"contact": self._engine.contact.to_dict()})
        while (order := await self._line.hear()) is not None:
            token_ids = np.random.default_rng(5).integers(
                VOCABULARY, size=order["tokens"]
            )
            ids = [int(n) for n in token_ids]
            blocks = _blocks(len(ids), 2, self._pools)
            run = getattr(self, order["mode"])
            begin, begin_cpu = perf_counter(), process_time()
            told = await run(order["request"], ids, blocks)
            told["cpu_s"] = told.pop("end_cpu") - begin_cpu
            self._line.say({"begin": begin, **told})

    async def pull(self, request: str, ids: list[int], blocks: Any) -> Any:  # noqa: ANN401
        await self._prefill(ids, blocks)
        ended = _now()
        offer = self._engine.offer(request, blocks, num_tokens=len(ids))
        return {**ended, "ticket": offer.ticket.to_dict()}

    async def push(self, request: str, ids: list[int], blocks: Any) -> Any:  # noqa: ANN401
        await self._prefill(ids, blocks)
        ended = _now()
        report = await self._engine.push(request, blocks, num_tokens=len(ids))
        return {**ended, "phases_s": dict(report.phases_s)}

    async def stream(self, request: str, ids: list[int], blocks: Any) -> Any:  # noqa: ANN401
        async with self._engine.push_stream(
            request, blocks, num_tokens=len(ids)
        ) as stream:
            await prefill_streamed(
                self._model, self._pools, blocks, ids, stream, chunk=self._chunk
            )
            ended = _now()
            written = stream.written_bytes
        return {
            **ended,
            "written": written,
            "phases_s": dict(stream.report.phases_s),
        }

    async def _prefill(self, ids: list[int], blocks: Any) -> None:  # noqa: ANN401
        cache = paged_cache(self._pools, blocks)
        await trio.to_thread.run_sync(prefill, self._model, cache, ids, self._chunk)


async def _produce(line: _Line, room: int, chunk: int) -> None:
    pools = Pools(MODEL.groups(), SideShape(room, BLOCK), (0, 1))
    config = EngineConfig(engine_id="producer", identity=IDENTITY)
    async with open_engine(config, pools.described()) as engine:
        await _Producer(line, pools, engine, chunk).serve()


def _now() -> dict[str, float]:
    """The end of a prefill, and what the process has computed until then."""
    return {"end": perf_counter(), "end_cpu": process_time()}


# --- the consumer ----------------------------------------------------------------


class _Landed(NamedTuple):
    report: TransferReport
    at: float


class _Consumer:
    def __init__(self, line: _Line, pools: Pools, engine: TransferEngine) -> None:
        self._line = line
        self._pools = pools
        self._engine = engine
        self._requests = 0
        self._found: dict[int, dict[str, torch.Tensor]] = {}

    async def meet(self) -> None:
        """Wait for the producer."""
        told = await self._line.expect()
        self._contact = Contact.from_dict(told["contact"])

    async def measure(self, mode: str, tokens: int) -> dict[str, Any]:
        """One request, and what came of it must be what the others brought."""
        self._requests += 1
        order = {"mode": mode, "tokens": tokens, "request": f"r{self._requests}"}
        blocks = _blocks(tokens, 3, self._pools)
        for name, pool in self._pools.paged.items():
            pool.poison(blocks[name])
        call = self._pull if mode == "pull" else self._expect
        begin_cpu = process_time()
        landed, told = await call(order, blocks)
        found = self._pools.copied_out(blocks)
        first = self._found.setdefault(tokens, found)
        if any(not torch.equal(found[key], first[key]) for key in first):
            raise ValueError(f"{order}: another cache than before")
        return {
            "mode": mode,
            "tokens": tokens,
            "bytes": landed.report.bytes,
            "waves": landed.report.waves,
            "ready_s": landed.at - told["end"],
            "prefill_s": told["end"] - told["begin"],
            "producer_cpu_s": told["cpu_s"],
            "consumer_cpu_s": process_time() - begin_cpu,
            "hidden": told.get("written", 0) / landed.report.bytes,
            "phases_s": dict(landed.report.phases_s),
            "push_phases_s": told.get("phases_s", {}),
        }

    async def _pull(self, order: dict[str, Any], blocks: Any) -> Any:  # noqa: ANN401
        self._line.say(order)
        told = await self._line.expect()
        report = await self._engine.pull(Ticket.from_dict(told["ticket"]), blocks)
        return _Landed(report, perf_counter()), told

    async def _expect(self, order: dict[str, Any], blocks: Any) -> Any:  # noqa: ANN401
        self._line.say(order)
        report = await self._engine.expect(
            self._contact, blocks, request_id=order["request"]
        )
        at = perf_counter()
        return _Landed(report, at), await self._line.expect()


async def _consume(plan: dict[str, Any], answers: int) -> None:
    room = 2 * max(plan["tokens"])
    arguments = (str(room), str(plan["chunk"]))
    # A pipe's end is all that a producer waits for: starting it may block.
    with start("produce", dict(os.environ), *arguments) as process:
        try:
            if process.stdin is None or process.stdout is None:
                raise OSError("a process without pipes")
            line = _Line(os.dup(process.stdout.fileno()), process.stdin.fileno())
            pools = Pools(MODEL.groups(), SideShape(room, BLOCK), (0, 1))
            config = EngineConfig(
                engine_id="consumer", identity=IDENTITY, pull_deadline_s=300.0
            )
            async with open_engine(config, pools.described()) as engine:
                consumer = _Consumer(line, pools, engine)
                await consumer.meet()
                for mode in MODES:  # hands are shaken, plans are made
                    await consumer.measure(mode, WARM_TOKENS)
                for tokens in plan["tokens"]:
                    for _ in range(plan["rounds"]):
                        for mode in MODES:
                            result = await consumer.measure(mode, tokens)
                            os.write(answers, json.dumps(result).encode() + b"\n")
        finally:
            process.kill()


def main() -> None:
    """``produce ROOM CHUNK``, or ``consume`` with the plan as a line on stdin."""
    logging.disable(logging.WARNING)
    # UCX's own log goes to descriptor 1 whatever Python does.
    answers = os.dup(1)
    os.dup2(2, 1)
    role, *arguments = sys.argv[1:]
    if role == "produce":
        room, chunk = (int(number) for number in arguments)

        async def produce() -> None:
            await _produce(_Line(os.dup(0), answers), room, chunk)

        trio.run(produce)
    else:
        trio.run(_consume, json.loads(sys.stdin.readline()), answers)


if __name__ == "__main__":
    main()
