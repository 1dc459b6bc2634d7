"""What an engine costs that has nothing to do, in parts of one core.

The CPU time of a process over some seconds, with one thing after the other in it and
the peer, where there is one, in another: an engine that is merely
open; one with a peer connected; one with 100 offers out; one with a landing registered
that nobody pushes to; and NIXL's own agent with its default, a progress thread.

    python -m benchmarks.idle [--short] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import trio

from benchmarks.measure import Bar, Point, Progress, conclude, parser, plot, table
from benchmarks.sides import GROUP, Pool, engine_over, pair, run
from kvferry.engine.fabric.nixl import NixlFabric

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Result = dict[str, Any]

NAME = "benchmarks.idle"
OFFERS = 100
POOL = Pool(OFFERS, heads=1, head_bytes=64)

IDLE = Bar("idle engine", "at most 2% of a core", "% of a core")
OFFERED = Bar("100 offers out", "at most 10% of a core", "% of a core")
ALLOWED = {IDLE.name: 2.0, OFFERED.name: 10.0}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    options = parser("CPU of an engine at rest.").parse_args(arguments)
    seconds = 2.0 if options.short else 15.0
    progress = Progress(len(SUBJECTS))
    results: list[Result] = []
    for result in run(NAME, {"seconds": seconds}, tls="tcp"):
        progress.step(result["subject"])
        results.append(result)
    progress.end()
    plot(options.plot, lambda axes: draw(axes, results))
    points = [
        Point(r["bar"], r["subject"], r["percent"], ALLOWED[r["bar"]])
        for r in results
        if r["bar"]
    ]
    head = ("at rest", "% of a core", "seconds")
    rows = [(r["subject"], r["percent"], r["seconds"]) for r in results]
    return conclude(
        options, (IDLE, OFFERED), points, table(head, rows), results=results
    )


def draw(axes: Any, results: Sequence[Result]) -> None:  # noqa: ANN401 - matplotlib
    """A bar for each."""
    names = [r["subject"] for r in results]
    axes.barh(names, [r["percent"] for r in results], label="% of a core")


# --- in the process that rests ---------------------------------------------------


async def measure(plan: dict[str, Any], say: Callable[[Result], None]) -> None:
    """One subject after the other."""
    for name, (bar, subject) in SUBJECTS.items():

        async def rest(name: str = name, bar: str = bar) -> None:
            await trio.sleep(0.5)  # what its beginning costs is not asked for
            begin, begin_cpu_s = perf_counter(), process_time()
            await trio.sleep(plan["seconds"])
            took_s, cpu_s = perf_counter() - begin, process_time() - begin_cpu_s
            percent = 100 * cpu_s / took_s
            say({"subject": name, "bar": bar, "seconds": took_s, "percent": percent})

        await subject(rest)


async def _merely_open(rest: Callable[[], Awaitable[None]]) -> None:
    async with engine_over(POOL, POOL.tensor(), listen=("127.0.0.1", 0)):
        await rest()


async def _connected(rest: Callable[[], Awaitable[None]]) -> None:
    async with pair(POOL) as both:
        await both.pull(await both.ticket([0], num_tokens=16), [0])
        await rest()


async def _offering(rest: Callable[[], Awaitable[None]]) -> None:
    listen = ("127.0.0.1", 0)
    async with engine_over(POOL, POOL.tensor(), listen=listen) as engine:
        for n in range(OFFERS):
            engine.offer(f"r{n}", {GROUP: [n]}, num_tokens=16)
        await rest()


async def _expecting(rest: Callable[[], Awaitable[None]]) -> None:
    async with pair(POOL) as both, trio.open_nursery() as nursery:

        async def expect() -> None:
            await both.engine.expect(both.contact, {GROUP: [0]}, request_id="never")

        nursery.start_soon(expect)
        await rest()
        if not both.engine.statistics()["landings"]:
            raise ValueError("the landing did not last")
        nursery.cancel_scope.cancel()


async def _bare_default(rest: Callable[[], Awaitable[None]]) -> None:
    fabric = NixlFabric("default", progress_thread=True)
    await rest()
    fabric.close()


async def _bare_loop(rest: Callable[[], Awaitable[None]]) -> None:
    await rest()


SUBJECTS: dict[str, tuple[str, Callable[..., Awaitable[None]]]] = {
    "trio alone": ("", _bare_loop),
    "engine": (IDLE.name, _merely_open),
    "engine, a peer connected": (IDLE.name, _connected),
    "engine, 100 offers out": (OFFERED.name, _offering),
    "engine, a landing registered": ("", _expecting),
    "NIXL's default agent": ("", _bare_default),
}


if __name__ == "__main__":
    raise SystemExit(main())
