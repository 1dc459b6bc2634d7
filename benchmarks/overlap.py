"""How much of a transfer a push hides behind the prefill, over real NIXL.

SmolLM2 prefills prompts in one process, and another one wants the cache: it pulls when
the prefill has ended, or it is pushed to then, or each layer of each chunk is pushed as
soon as it is computed. In turns, and what lands is compared byte by byte. The figure is
the time from the end of the prefill, taken where it runs, to the return of `pull` or
`expect`, taken in the consumer: one host, and one monotonic clock for both processes. The CPU
seconds are the producer's until the prefill has ended, and the consumer's until it has
the cache: what the overlap costs.

    python -m benchmarks.overlap [--short] [--rounds N] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any

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
from benchmarks.overlap_sides import MODEL, MODES, PD_PAIR, start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    Result = dict[str, Any]

TOKENS = (512, 1024, 2048)
SHORT_TOKENS = (512,)
CHUNK = 256
ROUNDS = 5
TRANSPORTS = {"same host": "", "tcp": "tcp"}
BARRED_TOKENS = 1024
CPU = ("producer_cpu_s", "consumer_cpu_s")

HIDING = Bar(
    "hiding",
    f"a stream is ready after at most 0.35 of a pull's time, from {BARRED_TOKENS:,}"
    " tokens on",
    "of a pull",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if a stream hides too little."""
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, help="how often each way takes its turn")
    options = made.parse_args(arguments)
    if not MODEL.is_ready():
        convert = [sys.executable, str(PD_PAIR / "convert.py"), "smollm2"]
        subprocess.run(convert, check=True)  # noqa: S603 - our own file
    tokens = SHORT_TOKENS if options.short else TOKENS
    rounds = options.rounds or (1 if options.short else ROUNDS)
    progress = Progress(len(TRANSPORTS) * len(tokens) * rounds * len(MODES))
    turns = []
    for name, tls in TRANSPORTS.items():
        for turn in run(tokens, rounds, tls=tls):
            progress.step(f"{name}: {turn['tokens']} tokens, {turn['mode']}")
            turns.append({"transport": name, **turn})
    progress.end()
    results = [median(list(group)) for _, group in grouped(turns)]
    sys.stdout.write(report(results))
    points = list(compared(results))
    if points:
        sys.stdout.write("\n".join(verdicts([HIDING], points)) + "\n")
    if options.json:
        write_json(options.json, [HIDING], points, results=results, turns=turns)
    if options.plot:
        plot(results, options.plot)
    return int(any(point.ratio > 1 for point in points))


def run(tokens: Sequence[int], rounds: int, *, tls: str) -> Iterator[Result]:
    """All turns over one transport."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        **({"UCX_TLS": tls} if tls else {}),
    }
    with start("consume", environment) as process:
        if process.stdin is None or process.stdout is None:
            raise OSError("a process without pipes")
        plan = {"tokens": tokens, "rounds": rounds, "chunk": CHUNK}
        process.stdin.write(json.dumps(plan) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise OSError(f"the consumer ended with {process.returncode}")


def grouped(turns: Sequence[Result]) -> Iterator[tuple[Any, Iterator[Result]]]:
    """By transport, tokens and mode."""

    def key(turn: Result) -> tuple[int, int, int]:
        return (
            list(TRANSPORTS).index(turn["transport"]),
            turn["tokens"],
            MODES.index(turn["mode"]),
        )

    return groupby(sorted(turns, key=key), key=key)


def median(turns: Sequence[Result]) -> Result:
    """What several turns of one way come to."""
    measured = ("ready_s", "prefill_s", "hidden", *CPU)
    return {
        **turns[0],
        **{name: statistics.median(t[name] for t in turns) for name in measured},
        "least_s": min(t["ready_s"] for t in turns),
        "most_s": max(t["ready_s"] for t in turns),
        "turns": len(turns),
    }


def compared(results: Sequence[Result]) -> Iterator[Point]:
    """Streams against pulls, where there is a bar."""
    pulls = {
        (r["transport"], r["tokens"]): r["ready_s"]
        for r in results
        if r["mode"] == "pull"
    }
    for result in results:
        where = (result["transport"], result["tokens"])
        if result["mode"] == "stream" and result["tokens"] >= BARRED_TOKENS:
            case = f"{where[0]}, {where[1]:,} tokens"
            yield Point("hiding", case, result["ready_s"] / pulls[where], 0.35)


def report(results: Sequence[Result]) -> str:
    """A table for each transport."""
    found = [f"{json.dumps(host())}\n"]
    head = ("tokens", "mode", "MB", "waves", "ready ms", "least", "most", "of pull",
            "hidden %", "prefill s", "CPU s", "consumer's")  # fmt: skip
    for transport, members in groupby(results, key=lambda r: r["transport"]):
        rows = []
        pull_s = 0.0
        for r in members:
            pull_s = r["ready_s"] if r["mode"] == "pull" else pull_s
            rows.append(
                (
                    f"{r['tokens']:,}",
                    r["mode"],
                    r["bytes"] / 1e6,
                    r["waves"],
                    r["ready_s"] * 1e3,
                    r["least_s"] * 1e3,
                    r["most_s"] * 1e3,
                    r["ready_s"] / pull_s,
                    r["hidden"] * 100,
                    r["prefill_s"],
                    *(r[name] for name in CPU),
                )
            )
        turns = results[0]["turns"]
        found.append(f"\n{transport}, medians of {turns}\n{table(head, rows)}\n")
    return "".join(found)


def plot(results: Sequence[Result], path: Path) -> None:
    """Time to ready by tokens, if matplotlib is installed."""
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415 - optional
    except ImportError:
        sys.stderr.write("no plot: matplotlib is not installed\n")
        return
    figure, axes = plt.subplots()
    lines: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        lines.setdefault((result["transport"], result["mode"]), []).append(result)
    for (transport, mode), line in lines.items():
        style = "o-" if transport == "tcp" else "s--"
        tokens, ready_ms = (
            [r["tokens"] for r in line],
            [r["ready_s"] * 1e3 for r in line],
        )
        axes.semilogy(tokens, ready_ms, style, label=f"{mode}, {transport}")
    axes.set(xlabel="prompt tokens", ylabel="ms from the end of prefill to ready")
    axes.legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
