"""What one small pull takes, by phase, and how soon its first bytes are asked for.

One block in each of 32 layers, pulled again and again, in turns with the bare READ of
the same pages and with a bare notice's round trip. Then, with nothing waited for that a
peer does, the time from `pull()` to the first post, of 64 blocks in 16 layers, from one
rank and from two that share the heads. Same host and tcp.

    python -m benchmarks.latency [--short] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.measure import (
    Bar,
    Point,
    Progress,
    conclude,
    parser,
    percentile,
    plot,
    table,
)
from benchmarks.sides import TRANSPORTS, Pool, pair, run, scattered
from kvferry.engine.fabric import Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Result = dict[str, Any]

NAME = "benchmarks.latency"
PERCENTS = (50, 95, 99)

SMALL_PULL = Bar(
    "small pull",
    "1 block x 32 layers, p50: at most raw read + one notice round trip + 250 us",
    "us",
)
FIRST_POST = Bar(
    "first post",
    "pull() to the first post, 64 blocks x 16 layers, p50: at most 200 us, from two"
    " ranks 300 us",
    "us",
)
ALLOWED_POST_US = {1: 200.0, 2: 300.0}
OWN_US = 250.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    options = parser("Latency of a small pull, by phase.").parse_args(arguments)
    plan = {"pulls": 100 if options.short else 1000}
    progress = Progress(3 * len(TRANSPORTS))
    results: list[Result] = []
    for transport, tls in TRANSPORTS.items():
        for result in run(NAME, plan, tls=tls):
            progress.step(f"{transport}: {result['case']}")
            results.append({"transport": transport, **result})
    progress.end()
    plot(options.plot, lambda axes: draw(axes, results))
    points = [point(result) for result in results]
    return conclude(
        options, (SMALL_PULL, FIRST_POST), points, report(results), results=results
    )


def point(result: Result) -> Point:
    """A result against its bar."""
    p50 = {name: percentile(times, 50) for name, times in result["us"].items()}
    case = f"{result['transport']}, {result['case']}"
    if result["ranks"]:
        return Point(
            FIRST_POST.name, case, p50["first post"], ALLOWED_POST_US[result["ranks"]]
        )
    allowed = p50["raw read"] + p50["raw notice"] + OWN_US
    return Point(SMALL_PULL.name, case, p50["pull"], allowed)


def report(results: Sequence[Result]) -> str:
    """One table."""
    head = ("transport", "case", "of it", *(f"p{percent} us" for percent in PERCENTS))
    rows = [
        (
            result["transport"],
            result["case"],
            name,
            *(percentile(times, percent) for percent in PERCENTS),
        )
        for result in results
        for name, times in result["us"].items()
    ]
    return table(head, rows)


def draw(axes: Any, results: Sequence[Result]) -> None:  # noqa: ANN401 - matplotlib
    """How many of the small pulls were as fast."""
    for result in results:
        for name in ("pull", "raw read", "raw notice"):
            if times := sorted(result["us"].get(name, ())):
                share = [n / len(times) for n in range(len(times))]
                axes.semilogx(times, share, label=f"{result['transport']}, {name}")
    axes.set(xlabel="us", ylabel="share as fast")


# --- in the consumer -------------------------------------------------------------


async def measure(plan: dict[str, Any], say: Callable[[Result], None]) -> None:
    """The small pull, then the first posts."""
    say(await _small_pull(plan["pulls"]))
    for ranks in ALLOWED_POST_US:
        say(await _first_post(plan["pulls"], ranks))


async def _small_pull(pulls: int) -> Result:
    pool = Pool(64, layers=32, heads=1, head_bytes=128)
    us: dict[str, list[float]] = defaultdict(list)
    async with pair(pool, raw=pool) as both:
        for n in range(-10, pulls):
            ours, theirs = [n % 64], [(7 * n) % 64]
            ticket = await both.ticket(theirs, num_tokens=16)
            report, seconds = await both.pull(ticket, ours)
            async with both.raw_served() as raw:
                raw_s = raw.move(Operation.READ, ours, theirs)
                notice_s = raw.round_trip()
            both.check(ours, theirs)
            times = {"pull": seconds, "raw read": raw_s, "raw notice": notice_s}
            for name, time in (times | dict(report.phases_s)).items():
                if n >= 0:  # those before warm up
                    us[name].append(time * 1e6)
    return {"case": "1 block x 32 layers", "ranks": 0, "us": us}


async def _first_post(pulls: int, ranks: int) -> Result:
    pool = Pool(256, heads=8, head_bytes=32)
    us: dict[str, list[float]] = {"first post": [], "whole pull": []}
    async with pair(pool, ranks=ranks) as both:
        for n in range(-10, pulls):
            ours = scattered(pool.blocks, 64, seed=2 * n + 100)
            theirs = scattered(pool.blocks, 64, seed=2 * n + 101)
            ticket = await both.ticket(theirs, num_tokens=64 * 16)
            both.fabric.clear()
            begin = perf_counter()
            _, seconds = await both.pull(ticket, ours)
            if n >= 0:
                us["first post"].append((both.fabric.posted_at[0] - begin) * 1e6)
                us["whole pull"].append(seconds * 1e6)
    case = f"64 blocks x 16 layers, {ranks} rank{'s' * (ranks > 1)}"
    return {"case": case, "ranks": ranks, "us": us}


if __name__ == "__main__":
    raise SystemExit(main())
