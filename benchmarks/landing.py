"""Direct runs against bulk landing, over real NIXL between two processes.

For each shape of mismatch and each length of run the same request is pulled both
ways, in turns, and the result compared byte by byte. Says where the switch pays, and
whether the cost model's own choice was the faster one, within what the repetitions
scatter.

    python -m benchmarks.landing [--short] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

from benchmarks.landing_sides import Case, Side, pipes, start
from benchmarks.measure import (
    Bar,
    Point,
    Progress,
    host,
    parser,
    table,
    verdicts,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    Result = dict[str, Any]

NHD, HND = "b k n h d", "b k h n d"
RUNS = (64, 256, 1024, 4096, 16_384, 65_536)
SHORT_RUNS = (64, 1024, 16_384)
TRANSPORTS = {"same host": "", "tcp": "tcp"}
IMAGE_BYTES = 2**20
"""Most that one block of one layer has: less than a wave."""

CHOOSING = Bar(
    "choosing", "auto is at most 1.25 times as slow as the faster way", "times"
)


def cases(*, short: bool) -> Iterator[Case]:
    """Every series at every length of run."""
    needed = 2**22 if short else 2**24
    for run in SHORT_RUNS if short else RUNS:
        # As many heads and tokens as a block of bounded size has room for.
        heads = 8 if 256 * run <= IMAGE_BYTES else 2
        block = 16 if 32 * heads * run <= IMAGE_BYTES else 4

        wide, slim = Side(NHD, block), Side(HND, block)
        of_run = (needed, run, heads)
        yield _case(of_run, "NHD to HND", slim, wide)
        yield _case(of_run, "NHD head slice, TP 2 of 1", Side(NHD, block, 2), wide)
        yield _case(of_run, "NHD blocks of 1 to HND of 16", Side(HND, 16), Side(NHD, 1))
        yield _case(of_run, "HND blocks of 16 to NHD of 1", Side(NHD, 1), slim)


def _case(
    of_run: tuple[int, int, int], series: str, consumer: Side, producer: Side
) -> Case:
    """As many tokens as make the bytes that the consumer needs."""
    needed, run, heads = of_run
    layers = 4
    # A head slice is contiguous on both sides over the heads that it has.
    head = run // (heads // consumer.tp) if consumer.tp > 1 else run
    token = layers * 2 * heads * head // consumer.tp
    tokens = max(needed // token // 64, 1) * 64
    return Case(series, run, producer, consumer, heads, head, layers, tokens)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the cost model chose much worse than it could."""
    options = parser(__doc__ or "").parse_args(arguments)
    todo = sorted(cases(short=options.short), key=lambda case: case.series)
    progress = Progress(len(todo) * len(TRANSPORTS))
    results = []
    for name, tls in TRANSPORTS.items():
        for result in run(todo, rounds=1 if options.short else 2, tls=tls):
            progress.step(f"{name}: {result['series']}, {result['run_bytes']}")
            results.append({"transport": name, **result})
    progress.end()
    sys.stdout.write(report(results))
    points = [point(result) for result in results]
    sys.stdout.write("\n".join(verdicts([CHOOSING], points)) + "\n")
    if options.json:
        write_json(options.json, [CHOOSING], points, results=results)
    if options.plot:
        plot(results, options.plot)
    return int(any(p.ratio > 1 for p in points))


def run(todo: Sequence[Case], *, rounds: int, tls: str) -> Iterator[Result]:
    """The cases over one transport, one result each."""
    environment = {**os.environ, **({"UCX_TLS": tls} if tls else {})}
    with start("consume", environment) as process:
        to, answers = pipes(process)
        told = {"cases": [asdict(case) for case in todo], "rounds": rounds}
        to.write(json.dumps(told) + "\n")
        to.flush()
        for line in answers:
            yield json.loads(line)
    if process.returncode:
        raise OSError(f"the consumer ended with {process.returncode}")


def point(result: Result) -> Point:
    """What auto chose against the faster way, least time each: noise only adds."""
    chosen, fastest = result["least"][result["auto"]], min(result["least"].values())
    case = f"{result['transport']}, {result['series']}, {result['run_bytes']}"
    return Point("choosing", case, chosen / fastest, 1.25)


def report(results: Sequence[Result]) -> str:
    """A table for each transport, and where the switch pays."""
    found = [f"{json.dumps(host())}\n"]
    head = ("series", "run", "MB", "MB bulk", "runs", "images", "direct ms", "bulk ms",
            "ratio", "auto", "best")  # fmt: skip
    for transport, members in groupby(results, key=lambda r: r["transport"]):
        of_transport = list(members)
        rows = [
            (
                r["series"],
                r["run_bytes"],
                r["bytes"] / 1e6,
                r["bulk_bytes"] / 1e6,
                r["descriptors"]["direct"],
                r["descriptors"]["bulk"],
                r["seconds"]["direct"] * 1e3,
                r["seconds"]["bulk"] * 1e3,
                r["seconds"]["direct"] / r["seconds"]["bulk"],
                r["auto"],
                min(r["least"], key=r["least"].__getitem__),
            )
            for r in of_transport
        ]
        found.append(f"\n{transport}\n{table(head, rows)}\n")
        for series, same in groupby(of_transport, key=lambda r: r["series"]):
            paying = [
                r["run_bytes"]
                for r in same
                if r["seconds"]["bulk"] < r["seconds"]["direct"]
            ]
            upto = f"up to runs of {max(paying):,} bytes" if paying else "nowhere"
            found.append(f"{transport}, {series}: bulk pays {upto}\n")
    return "".join(found)


def plot(results: Sequence[Result], path: Path) -> None:
    """Direct over bulk by length of run, if matplotlib is installed."""
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415 - optional
    except ImportError:
        sys.stderr.write("no plot: matplotlib is not installed\n")
        return
    figure, axes = plt.subplots()
    lines: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        lines.setdefault((result["transport"], result["series"]), []).append(result)
    for (transport, series), line in lines.items():
        runs = [r["run_bytes"] for r in line]
        ratios = [r["seconds"]["direct"] / r["seconds"]["bulk"] for r in line]
        style = "o-" if transport == "tcp" else "s--"
        axes.loglog(runs, ratios, style, label=f"{series}, {transport}", base=2)
    axes.axhline(1, color="black")
    axes.set(xlabel="bytes of a direct run", ylabel="times as fast in bulk")
    axes.legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
