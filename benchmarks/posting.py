"""Where to post from: the loop itself, a worker thread for each wave, or one thread;
and whether NIXL is to copy in threads of its own.

Raw NIXL between two processes, no engine: 256 MB read in bounded waves, a few of them
in flight, by three ways to make the same calls, and by the first one with an agent that
spreads each post over two threads ("copiers"). Beside the time it takes, a task on
the loop measures how late it is woken at worst: what everybody else on the loop feels.
`engine/traffic.py` and `engine/fabric/` are built on the answer.

    python -m benchmarks.posting [--short] [--json FILE]
"""

from __future__ import annotations

import ast
import os
import queue
import statistics
import subprocess
import sys
import threading  # noqa: TID251 - a way that is measured
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import trio

from benchmarks.measure import Progress, parser, table, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 64 * 1024
TOTAL = 256 * 1024 * 1024
WINDOW = 4
POLL_S = 0.0002
STOP = object()
MARK = "posting-producer"
WAYS = ("loop", "worker", "thread", "copiers")
COPIERS = 2
TRANSPORTS = {"same host": None, "tcp": "tcp"}


class Passed(NamedTuple):
    """One read of everything.

    Attributes:
        took_s: How long it took.
        stall_s: How late the loop woke a task that sleeps a millisecond, at worst.
    """

    took_s: float
    stall_s: float


def _agent(name: str, *, is_shared: bool, copiers: int = 0) -> Any:  # noqa: ANN401 - the bindings are untyped
    from nixl._api import (  # noqa: PLC0415 - seconds to load, and per process
        nixl_agent,
        nixl_agent_config,
        nixl_thread_sync_t,
    )

    mode = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if is_shared else None
    if copiers:
        mode = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    config = nixl_agent_config(enable_prog_thread=False, sync_mode=mode, backends=[])
    agent = nixl_agent(name, config)
    options = {"num_threads": str(copiers), "split_batch_size": "1"}
    agent.create_backend("UCX", options if copiers else {})
    return agent


def serve() -> None:
    """The producer: registered memory, and progress until stdin ends."""
    agent = _agent("producer", is_shared=False)
    memory = np.ones(TOTAL, np.uint8)
    row = np.array([[memory.ctypes.data, TOTAL, 0]], np.uint64)
    agent.register_memory(row, "DRAM")
    metadata = agent.get_agent_metadata()
    sys.stdout.write(f"{MARK} {memory.ctypes.data} {metadata.hex()}\n")
    sys.stdout.flush()
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True).start()
    while not is_over.wait(POLL_S):
        agent.get_new_notifs()


class Reader:
    """The consumer's agent, and the calls that one wave takes."""

    def __init__(
        self, address: int, metadata: bytes, wave: int, *, copiers: int = 0
    ) -> None:
        self._agent = _agent("consumer", is_shared=True, copiers=copiers)
        self._memory = np.zeros(TOTAL, np.uint8)
        ours = self._memory.ctypes.data
        self._agent.register_memory(np.array([[ours, TOTAL, 0]], np.uint64), "DRAM")
        self._peer = self._agent.add_remote_agent(metadata).decode()
        count = TOTAL // BLOCK
        rows = [
            np.array([[at, BLOCK, 0, BLOCK, count]], np.uint64)
            for at in (ours, address)
        ]
        self._ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows[0], "DRAM")
        self._theirs = self._agent.prep_xfer_dlist(self._peer, rows[1], "DRAM")
        per_wave = wave // BLOCK
        self.waves = [
            np.arange(first, first + per_wave, dtype=np.int32)
            for first in range(0, count, per_wave)
        ]

    def post(self, ids: Any) -> Any:  # noqa: ANN401 - a handle of the untyped bindings
        """Post one wave."""
        handle = self._agent.make_prepped_xfer(
            "READ", self._ours, ids, self._theirs, ids, b""
        )
        self._agent.transfer(handle)
        return handle

    def is_done(self, handle: Any) -> bool:  # noqa: ANN401
        """Look at one, and let it go if it is done."""
        if self._agent.check_xfer_state(handle) != "DONE":
            return False
        handle.release()
        return True


async def _by_loop(reader: Reader) -> None:
    flying: list[Any] = []
    for ids in reader.waves:
        flying.append(reader.post(ids))
        await trio.lowlevel.checkpoint()
        flying = await _below(WINDOW, flying, reader)
    await _below(1, flying, reader)


async def _below(limit: int, flying: list[Any], reader: Reader) -> list[Any]:
    while len(flying := [h for h in flying if not reader.is_done(h)]) >= limit:  # noqa: ASYNC110 - NIXL can only be polled
        await trio.sleep(POLL_S)
    return flying


async def _by_worker(reader: Reader) -> None:
    flying: list[Any] = []
    for ids in reader.waves:
        flying.append(await trio.to_thread.run_sync(reader.post, ids))
        flying = await _below(WINDOW, flying, reader)
    await _below(1, flying, reader)


async def _by_thread(reader: Reader) -> None:
    """One thread makes every call, and wakes the loop when a wave is done."""
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    slots = trio.Semaphore(WINDOW)
    token = trio.lowlevel.current_trio_token()

    def work() -> None:
        flying: list[Any] = []
        while True:
            try:
                ids = asked.get(timeout=POLL_S) if flying else asked.get()
            except queue.Empty:
                ids = None
            if ids is STOP:
                return
            if ids is not None:
                flying.append(reader.post(ids))
            left = [h for h in flying if not reader.is_done(h)]
            for _ in range(len(flying) - len(left)):
                token.run_sync_soon(slots.release)
            flying = left

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for ids in reader.waves:
        await slots.acquire()
        asked.put(ids)
    for _ in range(WINDOW):
        await slots.acquire()
    asked.put(STOP)
    await trio.to_thread.run_sync(thread.join)


async def _pass(read: Callable[[Reader], Any], reader: Reader) -> Passed:
    worst = 0.0

    async def beat() -> None:
        nonlocal worst
        while True:
            due = perf_counter() + 0.001
            await trio.sleep(0.001)
            worst = max(worst, perf_counter() - due)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(beat)
        await trio.sleep(0.005)
        worst, started = 0.0, perf_counter()
        await read(reader)
        took = perf_counter() - started
        nursery.cancel_scope.cancel()
    return Passed(took, worst)


def run(transport: str, wave: int, rounds: int) -> dict[str, list[Passed]]:
    """All ways in turns over one transport; in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "UCX_TLS"}
    if (tls := TRANSPORTS[transport]) is not None:
        environment["UCX_TLS"] = os.environ["UCX_TLS"] = tls
    producer = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.posting", "--serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    found: dict[str, list[Passed]] = {way: [] for way in WAYS}
    try:
        # NIXL's bindings write to stdout as well.
        lines = producer.stdout or ()
        _, address, metadata = next(x for x in lines if x.startswith(MARK)).split()
        about = int(address), bytes.fromhex(metadata), wave
        plain, spread = Reader(*about), Reader(*about, copiers=COPIERS)
        ways = {
            "loop": (_by_loop, plain),
            "worker": (_by_worker, plain),
            "thread": (_by_thread, plain),
            "copiers": (_by_loop, spread),
        }
        for number in range(rounds + 1):
            for way, (read, reader) in ways.items():
                passed = trio.run(partial(_pass, read, reader))
                if number:  # the first brings the pages in
                    found[way].append(passed)
    finally:
        producer.communicate("")
    return found


def main() -> None:
    """Print the table."""
    options = parser(__doc__ or "")
    options.add_argument("--serve", action="store_true")
    options.add_argument("--one", nargs=3, metavar=("TRANSPORT", "WAVE", "ROUNDS"))
    arguments = options.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.one:
        transport, wave, rounds = arguments.one
        found = run(transport, int(wave), int(rounds))
        plain = {way: [tuple(p) for p in passes] for way, passes in found.items()}
        sys.stdout.write(f"\n{plain!r}\n")
        return
    rounds = 3 if arguments.short else 9
    waves = (2,) if arguments.short else (1, 2, 4, 8)
    lines: list[list[object]] = []
    progress = Progress(len(waves) * len(TRANSPORTS))
    for transport in TRANSPORTS:
        for wave in waves:
            progress.step(f"{transport}, waves of {wave} MiB")
            for way, passes in _apart(transport, wave * 1024 * 1024, rounds).items():
                took = statistics.median(p.took_s for p in passes)
                stall = statistics.median(p.stall_s for p in passes)
                speed, stall_ms = round(TOTAL / took / 1e9, 2), round(stall * 1e3, 1)
                lines.append([transport, wave, way, speed, stall_ms])
    progress.end()
    head = ["transport", "wave, MiB", "posted by", "GB/s", "worst stall, ms"]
    sys.stdout.write(table(head, lines) + "\n")
    if arguments.json:
        write_json(arguments.json, (), (), head=head, rows=lines)


def _apart(transport: str, wave: int, rounds: int) -> dict[str, list[Passed]]:
    """UCX reads its environment when a process's first agent is made."""
    done = subprocess.run(  # noqa: S603 - our own file
        [
            sys.executable,
            "-m",
            "benchmarks.posting",
            "--one",
            transport,
            str(wave),
            str(rounds),
        ],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, "UCX_LOG_FILE": "stderr"},
    )
    found = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    return {way: [Passed(*p) for p in passes] for way, passes in found.items()}


if __name__ == "__main__":
    main()
