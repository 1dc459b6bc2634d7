"""What a peer costs in memory, by the size of the pools and by the number of peers.

A consumer connects to 1 to 256 peers with pools of 1,000 to 1,000,000 blocks, and
prepares reading from each, as its first pull would. Resident memory is what the kernel
counts, NIXL's and UCX's included, traced what Python and numpy have allocated; both are
counted from before the first of them. The pools are never touched, so they are not in
it. The peers' engines share a few processes.

    python -m benchmarks.memory [--short] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Bar, Point, Progress, conclude, parser, plot, table
from benchmarks.sides import Pool, engine_over, producer, run
from kvferry.protocol import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.sides import Other

    Result = dict[str, Any]

NAME = "benchmarks.memory"
PROCESSES = 2
MB = 2**20

TRACED = Bar("memory of a peer", "at most 1 MB traced, whatever the pool", "MB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    options = parser("Memory of peers.").parse_args(arguments)
    pools = (1000, 1_000_000) if options.short else (1000, 10_000, 100_000, 1_000_000)
    steps = [2, 16] if options.short else [2, 16, 64, 256]
    progress = Progress(len(pools) * len(steps))
    results: list[Result] = []
    for blocks in pools:
        for result in run(NAME, {"blocks": blocks, "steps": steps}, tls="tcp"):
            progress.step(f"{blocks:,} blocks, {result['peers']} peers")
            results.append({"blocks": blocks, **result})
    progress.end()
    plot(options.plot, lambda axes: draw(axes, results))
    points = [
        Point(TRACED.name, _case(r), r["traced"] / r["peers"] / MB, 1.0)
        for r in results
    ]
    return conclude(options, (TRACED,), points, report(results), results=results)


def _case(result: Result) -> str:
    return f"pools of {result['blocks']:,}, {result['peers']} peers"


def report(results: Sequence[Result]) -> str:
    """One table."""
    head = ("pool", "peers", "resident MB", "MB a peer", "traced MB", "MB a peer")
    rows = [
        (
            f"{r['blocks']:,}",
            r["peers"],
            r["resident"] / MB,
            r["resident"] / MB / r["peers"],
            r["traced"] / MB,
            r["traced"] / MB / r["peers"],
        )
        for r in results
    ]
    return table(head, rows)


def draw(axes: Any, results: Sequence[Result]) -> None:  # noqa: ANN401 - matplotlib
    """Memory of a peer by peers, a line for each pool."""
    for blocks in sorted({r["blocks"] for r in results}):
        line = sorted(
            (r["peers"], r["resident"] / r["peers"] / MB)
            for r in results
            if r["blocks"] == blocks
        )
        axes.loglog(*zip(*line, strict=True), "o-", label=f"pools of {blocks:,}")
    axes.set(xlabel="peers", ylabel="resident MB a peer")


# --- in the consumer -------------------------------------------------------------


async def measure(plan: dict[str, Any], say: Callable[[Result], None]) -> None:
    """First what is resident, then what is traced: tracing costs memory itself."""
    pool = Pool(plan["blocks"], heads=1, head_bytes=2)
    with ExitStack() as stack:
        tickets: list[Ticket] = []
        for n in range(PROCESSES):
            other = stack.enter_context(producer())
            engines = max(plan["steps"]) // PROCESSES
            tickets += await _offered(other, f"peer{n}-", engines, pool)
        # The first engine of a process fills caches of its own.
        await _grown(pool, tickets[:1], [1], _resident)
        resident = await _grown(pool, tickets, plan["steps"], _resident)
        tracemalloc.start()
        traced = await _grown(pool, tickets, plan["steps"], _traced)
    for peers in plan["steps"]:
        say({"peers": peers, "resident": resident[peers], "traced": traced[peers]})


async def _grown(
    pool: Pool, tickets: Sequence[Ticket], steps: Sequence[int], held: Callable[[], int]
) -> dict[int, int]:
    """How much more a fresh engine holds with so many peers than without any."""
    found = {}
    async with engine_over(pool, pool.tensor(touched=False)) as engine:
        # What a first pull does, and stays.
        peers, routes = engine._peers, engine._routes  # noqa: SLF001
        before, met = held(), 0
        for step in steps:
            for ticket in tickets[met:step]:
                peers.leave(await peers.sources(await routes.find(ticket)))
            met = step
            found[step] = held() - before
    return found


def _resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def _offered(other: Other, name: str, engines: int, pool: Pool) -> list[Ticket]:
    """So many peers in one process, an offer of each."""
    settings = {"idle_poll_s": 0.1, "offered_poll_s": 0.1, "lease_s": 600.0}
    shape = asdict(pool)
    contacts = await other.ask(
        "open", pool=shape, engines=engines, settings=settings, name=name, touched=False
    )
    tickets = []
    for n in range(len(contacts)):
        (text,) = await other.ask("offer", offers=[("r", [0])], num_tokens=16, engine=n)
        tickets.append(Ticket.from_dict(text))
    return tickets


if __name__ == "__main__":
    raise SystemExit(main())
