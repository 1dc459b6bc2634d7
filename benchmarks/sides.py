"""The processes that benchmarks measure in: producers, and a consumer of them.

A benchmark's `main` starts a consumer with `run`, once for each transport, because UCX
reads its environment once. The consumer imports the benchmark again and runs its
``measure``, which opens a `pair`: an engine here, engines in processes of their own
there, real NIXL between them, and beside each engine a bare NIXL agent over the same
memory, which is what the engine is compared with.

All processes talk in lines of JSON. All times are of the host's one monotonic clock.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import secrets
import select
import subprocess
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import trio

from kvferry.engine import (
    AttentionGroup,
    EngineConfig,
    KVCache,
    PagedTensor,
    Rank,
    TransferEngine,
    open_engine,
    tp_shard,
)
from kvferry.engine.fabric import Operation
from kvferry.engine.fabric.aside import AsideFabric
from kvferry.engine.fabric.copying import CopyingFabric
from kvferry.engine.fabric.nixl import NixlFabric
from kvferry.protocol import Contact, ModelIdentity, Ticket
from kvferry.protocol.layout import Region

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from kvferry.engine import TransferReport
    from kvferry.engine.fabric import Fabric, Transfer

__all__ = (
    "GROUP",
    "TRANSPORTS",
    "Pair",
    "Pool",
    "Raw",
    "TimedFabric",
    "engine_over",
    "heart",
    "pair",
    "run",
    "scattered",
)

GROUP = "full"
AXES = "b k h n d"
IDENTITY = ModelIdentity(model="org/benchmark", revision="1", dtype="uint8")
TRANSPORTS = {"same host": "", "tcp": "tcp"}
NAP_S = 0.00005
"""Between two looks of a bare agent; a kernel makes about 0.12 ms of it. Spinning
takes the core from UCX (nixl-facts row 14)."""


# --- a cache ---------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """One side's cache: uint8, every layer alike, the layers one behind the other.

    Attributes:
        tp, rank: Ranks that share the heads, and which of them this is.
    """

    blocks: int
    layers: int = 16
    block_tokens: int = 16
    heads: int = 8
    head_bytes: int = 256
    tp: int = 1
    rank: int = 0

    @property
    def page_bytes(self) -> int:
        """One block of one layer."""
        return 2 * self.block_tokens * (self.heads // self.tp) * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """One block of all layers."""
        return self.layers * self.page_bytes

    def tensor(self, *, touched: bool = True) -> torch.Tensor:
        """Its bytes, in memory that has been touched: every page its own value."""
        page = (2, self.heads // self.tp, self.block_tokens, self.head_bytes)
        pool = torch.empty((self.layers, self.blocks, *page), dtype=torch.uint8)
        if not touched:
            return pool
        values = self.stamps().reshape(self.layers, self.blocks, 1)
        pool.view(self.layers, self.blocks, -1).copy_(values)
        return pool

    def stamps(self) -> torch.Tensor:
        """What the bytes of each page are, by layer and block; never zero."""
        layer = torch.arange(self.layers).reshape(-1, 1)
        block = torch.arange(self.blocks).reshape(1, -1)
        return ((31 * block + 7 * layer) % 251 + 1).to(torch.uint8)

    def cache(self, tensor: torch.Tensor) -> KVCache:
        """The engine's view of it."""
        shard = tp_shard(total=self.heads, rank=self.rank, size=self.tp)
        layers = {
            f"layers.{n}": PagedTensor(tensor[n], AXES, shard)
            for n in range(self.layers)
        }
        return KVCache([AttentionGroup(GROUP, self.block_tokens, layers)])

    def rows(self, base: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Every page as a descriptor, for a bare agent."""
        page, layer = self.page_bytes, self.blocks * self.page_bytes
        return np.array(
            [
                [base + n * layer, page, 0, page, self.blocks]
                for n in range(self.layers)
            ],
            np.uint64,
        )

    def ids(self, blocks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The descriptors of these blocks in all layers."""
        first = np.arange(self.layers, dtype=np.int32).reshape(-1, 1) * self.blocks
        return (first + np.array(blocks, np.int32)).reshape(-1)


def scattered(pool: int, count: int, *, seed: int) -> list[int]:
    """So many blocks, all over the pool."""
    ids = np.random.default_rng(seed).permutation(pool)
    return [int(n) for n in ids[:count]]


# --- NIXL as it is ---------------------------------------------------------------


class TimedFabric(CopyingFabric):
    """The default transport; notes when something is posted, and how long it is under way.

    Attributes:
        posted_at: The begin of each post.
        waves_s: From the post of each until it was seen to have settled.
    """

    def __init__(self) -> None:
        name, threads = f"timed-{secrets.token_hex(8)}", EngineConfig.copy_threads
        second = partial(NixlFabric, name, copy_threads=threads)
        super().__init__(AsideFabric(NixlFabric(name)), second)
        self.posted_at: list[float] = []
        self.waves_s: list[float] = []
        self._began: dict[Transfer, float] = {}

    def post(self, *args: Any, **options: Any) -> Transfer:  # noqa: ANN401 - passed on
        """As ever."""
        begin = perf_counter()
        transfer = super().post(*args, **options)
        self.posted_at.append(begin)
        self._began[transfer] = begin
        return transfer

    def release(self, transfer: Transfer) -> None:
        """As ever."""
        self.waves_s.append(perf_counter() - self._began.pop(transfer))
        super().release(transfer)

    async def settled(self, waves: int) -> None:
        """Wait until so many have settled."""
        while len(self.waves_s) < waves:  # noqa: ASYNC110 - where milliseconds do
            await trio.sleep(0.001)

    def clear(self) -> None:
        """Forget what has been noted."""
        self.posted_at.clear()
        self.waves_s.clear()


class Raw:
    """A bare agent over a pool's memory, and one peer of it."""

    def __init__(self, pool: Pool, tensor: torch.Tensor) -> None:
        self.fabric = NixlFabric(f"raw-{secrets.token_hex(8)}")
        self.base = tensor.data_ptr()
        self.fabric.register([Region("DRAM", 0, self.base, tensor.numel())])
        self._pool = pool
        self._peer = ""

    @property
    def card(self) -> dict[str, Any]:
        """What the other side needs for `connect`."""
        return {"metadata": self.fabric.metadata().hex(), "base": self.base}

    def connect(self, metadata: str, base: int) -> None:
        """Meet the other side, whose pool is laid out like ours."""
        self._peer = self.fabric.connect(bytes.fromhex(metadata))
        self._ours = self.fabric.prepare(None, "DRAM", self._pool.rows(self.base))
        self._theirs = self.fabric.prepare(self._peer, "DRAM", self._pool.rows(base))

    def post(
        self, operation: Operation, ours: Sequence[int], theirs: Sequence[int]
    ) -> Transfer:
        """Post all layers of these blocks at once."""
        ids = self._pool.ids(ours), self._pool.ids(theirs)
        return self.fabric.post(operation, self._ours, ids[0], self._theirs, ids[1])

    def move(
        self, operation: Operation, ours: Sequence[int], theirs: Sequence[int]
    ) -> float:
        """Post, and look until it is done; the seconds it took."""
        ids = self._pool.ids(ours), self._pool.ids(theirs)
        begin = perf_counter()
        transfer = self.fabric.post(operation, self._ours, ids[0], self._theirs, ids[1])
        while not self.fabric.poll(transfer).is_settled:
            nap()
        seconds = perf_counter() - begin
        self.fabric.release(transfer)
        if transfer.cause is not None:
            raise transfer.cause
        return seconds

    def round_trip(self) -> float:
        """A notice to the other side, which answers; the seconds it took."""
        begin = perf_counter()
        self.fabric.notify(self._peer, b"ping")
        while not self.fabric.take_notices():
            nap()
        return perf_counter() - begin

    def serve(self, until_readable: int) -> None:
        """Progress, and answer every notice, until somebody says something."""
        while not select.select([until_readable], [], [], 0)[0]:
            for notice in self.fabric.take_notices():
                self.fabric.notify(notice.sender, notice.payload)
            nap()


@asynccontextmanager
async def heart() -> AsyncIterator[list[float]]:
    """A heartbeat of a millisecond on this loop; how late each beat was, in seconds."""
    late_s = [0.0]

    async def beat() -> None:
        while True:
            due = trio.current_time() + 0.001
            await trio.sleep_until(due)
            late_s.append(trio.current_time() - due)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(beat)
        yield late_s
        nursery.cancel_scope.cancel()


def nap() -> None:
    """Let the other core's process have the transport."""
    time.sleep(NAP_S)  # noqa: TID251 - a bare agent has no loop


# --- lines -----------------------------------------------------------------------


class Line:
    """JSON objects, one a line, in and out."""

    def __init__(self, into: int, out: int) -> None:
        self.into = into
        self._stream = trio.lowlevel.FdStream(os.dup(into))
        self._out = out
        self._rest = b""

    def say(self, what: object) -> None:
        """Send one."""
        text = memoryview(json.dumps(what).encode() + b"\n")
        while text:
            try:
                text = text[os.write(self._out, text) :]
            except BlockingIOError:
                select.select([], [self._out], [])

    async def hear(self) -> Any:  # noqa: ANN401 - JSON
        """The next one; None at the end."""
        while b"\n" not in self._rest:
            more = await self._stream.receive_some(1 << 20)
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)


def _start(*arguments: str, tls: str | None = None) -> subprocess.Popen[bytes]:
    """This file in a process of its own; without a word on `tls` as here."""
    # A peer that has gone is nothing to report here.
    environment = {"UCX_LOG_LEVEL": "fatal", **os.environ}
    if tls is not None:
        environment.pop("UCX_TLS", None)
        environment |= {"UCX_TLS": tls} if tls else {}
    return subprocess.Popen(  # noqa: S603 - our own file
        [sys.executable, "-m", "benchmarks.sides", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _pipes(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Where it is heard, and where it listens."""
    if process.stdin is None or process.stdout is None:
        raise OSError("a process without pipes")
    return process.stdout.fileno(), process.stdin.fileno()


def run(benchmark: str, plan: object, *, tls: str) -> Iterator[dict[str, Any]]:
    """What a benchmark's ``measure`` says, in a consumer process of its own.

    Args:
        benchmark: Name of a module with ``async def measure(plan, say)``.
        plan: Handed over as JSON.
        tls: Transports that UCX may use; empty for whatever it finds.
    """
    with _start("consume", benchmark, tls=tls) as process:
        if process.stdin is None or process.stdout is None:
            raise OSError("a process without pipes")
        process.stdin.write(json.dumps(plan).encode() + b"\n")
        process.stdin.flush()
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise OSError(f"{benchmark}: its consumer ended with {process.returncode}")


# --- the producer ----------------------------------------------------------------


class _Producer:
    """Does what each line says, and answers it."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._engines: list[TransferEngine] = []
        self._raw: Raw | None = None

    async def serve(self) -> None:
        async with AsyncExitStack() as stack:
            self._stack = stack
            while (order := await self._line.hear()) is not None:
                self._line.say(await getattr(self, f"do_{order.pop('do')}")(**order))

    async def do_open(
        self,
        pool: dict[str, Any],
        engines: int,
        settings: dict[str, Any],
        name: str,
        *,
        touched: bool = True,
    ) -> Any:  # noqa: ANN401 - JSON
        """Engines that share one pool, each an instance of its own."""
        shape = Pool(**pool)
        self._tensor = shape.tensor(touched=touched)
        cache = shape.cache(self._tensor)
        for n in range(engines):
            config = EngineConfig(
                engine_id=f"{name}{n}" if engines > 1 else name,
                identity=IDENTITY,
                rank=Rank(tp=shape.rank, tp_size=shape.tp),
                **settings,
            )
            self._engines.append(
                await self._stack.enter_async_context(open_engine(config, cache))
            )
        return [engine.contact.to_dict() for engine in self._engines]

    async def do_raw(self, pool: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
        self._raw = Raw(Pool(**pool), self._tensor)
        return self._raw.card

    async def do_meet(self, metadata: str, base: int) -> Any:  # noqa: ANN401 - JSON
        self._live_raw().connect(metadata, base)
        return "met"

    async def do_serve(self) -> Any:  # noqa: ANN401 - JSON
        """Let the bare agent progress until the next line; answered at once."""
        self._line.say("serving")
        self._live_raw().serve(self._line.into)
        return "served"

    async def do_raw_write(self, ours: list[int], theirs: list[int]) -> Any:  # noqa: ANN401 - JSON
        return self._live_raw().move(Operation.WRITE, ours, theirs)

    async def do_offer(
        self, offers: list[tuple[str, list[int]]], num_tokens: int, engine: int
    ) -> Any:  # noqa: ANN401 - JSON
        held = self._engines[engine]
        return [
            held.offer(request, {GROUP: blocks}, num_tokens=num_tokens).ticket.to_dict()
            for request, blocks in offers
        ]

    async def do_push(self, request: str, blocks: list[int], num_tokens: int) -> Any:  # noqa: ANN401 - JSON
        begin = perf_counter()
        await self._engines[0].push(request, {GROUP: blocks}, num_tokens=num_tokens)
        return perf_counter() - begin

    async def do_beat(self) -> Any:  # noqa: ANN401 - JSON
        """Begin to measure how late this loop is."""
        self._heart = AsyncExitStack()
        self._late_s = await self._heart.enter_async_context(heart())
        return "beating"

    async def do_worst_beat(self) -> Any:  # noqa: ANN401 - JSON
        """End that."""
        await self._heart.aclose()
        return max(self._late_s)

    async def do_cpu(self) -> Any:  # noqa: ANN401 - JSON
        return process_time()

    def _live_raw(self) -> Raw:
        if self._raw is None:
            raise ValueError("no bare agent was asked for")
        return self._raw


class Other:
    """A producer process, as the consumer talks to it."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def ask(self, do: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """An order, and the answer."""
        self._line.say({"do": do, **arguments})
        return await self.heard()

    async def heard(self) -> Any:  # noqa: ANN401 - JSON
        """The next answer."""
        answer = await self._line.hear()
        if answer is None:
            raise EOFError("a producer has ended")
        return answer

    def tell(self, do: str, **arguments: object) -> None:
        """An order whose answer is heard later."""
        self._line.say({"do": do, **arguments})

    @property
    def readable(self) -> int:
        """What can be read when it has answered."""
        return self._line.into


@contextmanager
def producer() -> Iterator[Other]:
    """A producer process; it is killed at the end, engines and all."""
    # A pipe's end is all that a producer waits for: starting it may block.
    with _start("produce") as process:
        try:
            yield Other(Line(*_pipes(process)))
        finally:
            process.kill()


# --- both ------------------------------------------------------------------------


@dataclass
class Pair:
    """A consumer's engine here, and the ranks of one producer.

    Attributes:
        engine: Ours; without a listener.
        fabric: Ours.
        others: The producer's ranks.
        contacts: Where they listen.
        ours, theirs: The two pools.
        tensor: Our memory.
        raw: A bare agent of ours that knows one beside the first rank; None without.
    """

    engine: TransferEngine
    fabric: TimedFabric
    others: list[Other]
    contact: Contact
    ours: Pool
    theirs: Pool
    tensor: torch.Tensor
    raw: Raw | None
    _requests: int = 0

    async def tickets(
        self, blocks: Sequence[Sequence[int]], *, num_tokens: int
    ) -> list[Ticket]:
        """One for each request, from all ranks."""
        names = [f"r{self._requests + n}" for n in range(len(blocks))]
        self._requests += len(blocks)
        offers = list(zip(names, blocks, strict=True))
        found = [
            await other.ask("offer", offers=offers, num_tokens=num_tokens, engine=0)
            for other in self.others
        ]
        return [
            Ticket.merge(Ticket.from_dict(text) for text in of_request)
            for of_request in zip(*found, strict=True)
        ]

    async def ticket(self, blocks: Sequence[int], *, num_tokens: int) -> Ticket:
        """One, from all ranks."""
        return (await self.tickets([blocks], num_tokens=num_tokens))[0]

    async def pull(
        self, ticket: Ticket, blocks: Sequence[int]
    ) -> tuple[TransferReport, float]:
        """Its report, and the seconds it took."""
        begin = perf_counter()
        report = await self.engine.pull(ticket, {GROUP: blocks})
        return report, perf_counter() - begin

    async def push(
        self, ours: Sequence[int], theirs: Sequence[int], *, num_tokens: int
    ) -> float:
        """The producer's seconds, when we have registered before."""
        self._requests += 1
        request = f"r{self._requests}"
        async with trio.open_nursery() as nursery:

            async def expect() -> None:
                await self.engine.expect(
                    self.contact, {GROUP: ours}, request_id=request
                )

            nursery.start_soon(expect)
            await trio.sleep(0.03)
            seconds: float = await self.others[0].ask(
                "push", request=request, blocks=theirs, num_tokens=num_tokens
            )
        return seconds

    def live_raw(self) -> Raw:
        """The bare agent.

        Raises:
            ValueError: The pair was opened without.
        """
        if self.raw is None:
            raise ValueError("a pair without bare agents")
        return self.raw

    async def raw_read(self, ours: Sequence[int], theirs: Sequence[int]) -> float:
        """One bare post; the seconds it took."""
        async with self.raw_served():
            return self.live_raw().move(Operation.READ, ours, theirs)

    @asynccontextmanager
    async def raw_served(self) -> AsyncIterator[Raw]:
        """Inside, the other side's bare agent does nothing but progress."""
        other = self.others[0]
        await other.ask("serve")
        yield self.live_raw()
        other.tell("cpu")  # any word will do
        await other.heard()  # it has served
        await other.heard()

    async def raw_write(self, ours: Sequence[int], theirs: Sequence[int]) -> float:
        """One bare post of the producer's; the seconds it took there."""
        self.others[0].tell("raw_write", ours=theirs, theirs=ours)
        self.live_raw().serve(self.others[0].readable)
        seconds: float = await self.others[0].heard()
        return seconds

    def wipe(self) -> None:
        """Forget what landed."""
        self.tensor.zero_()

    def check(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Look whether their bytes are in our blocks, at both ends of each token.

        Raises:
            ValueError: They are not.
        """
        due = self.theirs.stamps()[:, list(theirs)]
        due = due.repeat_interleave(self.theirs.block_tokens, dim=1)
        blocks = self.tensor[:, list(ours)]
        for end in (0, -1):
            found = blocks[:, :, end, end, :, end].reshape(self.ours.layers, -1)
            if not torch.equal(found, due):
                raise ValueError("other bytes have landed than were sent")


@asynccontextmanager
async def pair(
    ours: Pool,
    theirs: Pool | None = None,
    *,
    ranks: int = 1,
    raw: Pool | None = None,
    producer_settings: dict[str, Any] | None = None,
    **settings: Any,  # noqa: ANN401 - of EngineConfig
) -> AsyncIterator[Pair]:
    """Open both sides.

    Args:
        ours: Our pool.
        theirs: The producer's, of all ranks; like ours if it is not given.
        ranks: Of the producer, which share the heads.
        raw: How bare agents on both sides see the memory; None without.
        producer_settings: Of the producers' configuration.
        settings: Of ours.
    """
    theirs = theirs or ours
    tensor = ours.tensor()
    async with AsyncExitStack() as stack:
        others = [stack.enter_context(producer()) for _ in range(ranks)]
        contacts = []
        for rank, other in enumerate(others):
            shape = replace(theirs, tp=ranks, rank=rank)
            (text,) = await other.ask(
                "open",
                pool=asdict(shape),
                engines=1,
                settings=producer_settings or {},
                name="producer",
            )
            contacts.append(Contact.from_dict(text))
        bare = None
        if raw is not None:
            bare = Raw(raw, tensor)
            bare.connect(**await others[0].ask("raw", pool=asdict(raw)))
            await others[0].ask("meet", **bare.card)
        fabric = TimedFabric()
        engine = await stack.enter_async_context(
            engine_over(ours, tensor, fabric=fabric, **settings)
        )
        yield Pair(
            engine, fabric, others, Contact.merge(contacts), ours, theirs, tensor, bare
        )


@asynccontextmanager
async def engine_over(
    pool: Pool,
    tensor: torch.Tensor,
    *,
    fabric: Fabric | None = None,
    **settings: Any,  # noqa: ANN401 - of EngineConfig
) -> AsyncIterator[TransferEngine]:
    """An engine around a pool, in this process."""
    settings = {"listen": None, "pull_deadline_s": 300.0, **settings}
    config = EngineConfig(engine_id="consumer", identity=IDENTITY, **settings)
    async with open_engine(config, pool.cache(tensor), fabric=fabric) as engine:
        yield engine


def main() -> None:
    """``produce``, or ``consume BENCHMARK`` with its plan as the first line of stdin."""
    logging.disable(logging.WARNING)
    # UCX's own log goes to descriptor 1 whatever Python does.
    answers = os.dup(1)
    os.dup2(2, 1)
    # As a serving process does: a full collection of what torch has loaded takes 0.1 s.
    gc.collect()
    gc.freeze()
    if sys.argv[1] == "produce":

        async def produce() -> None:
            await _Producer(Line(os.dup(0), answers)).serve()

        trio.run(produce)
        return
    plan = json.loads(sys.stdin.readline())
    measure = importlib.import_module(sys.argv[2]).measure

    def say(what: object) -> None:
        os.write(answers, json.dumps(what).encode() + b"\n")

    trio.run(measure, plan, say)


if __name__ == "__main__":
    main()
