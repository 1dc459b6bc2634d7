"""What all benchmarks share: timing, a progress bar, tables, bars and their verdicts.

No benchmark decides by itself what a pass is: it names a `Bar`, hands over each
`Point`, and `verdicts` says for each bar the worst ratio of measured to allowed.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = (
    "Bar",
    "Memory",
    "Point",
    "Progress",
    "Timing",
    "conclude",
    "host",
    "measure",
    "memory_of",
    "parser",
    "percentile",
    "plot",
    "table",
    "verdicts",
    "write_json",
)


class Timing(NamedTuple):
    """Of many repetitions, in seconds.

    Attributes:
        typical_s: The median of the quietest of several batches: a neighbour that takes
            the core for a while spoils a batch, not the figure.
        median_s, least_s: Of all repetitions.
    """

    typical_s: float
    median_s: float
    least_s: float
    repetitions: int


_BATCHES = 5
_ROUNDS = 3


def measure(
    call: Callable[[], object],
    *,
    budget_s: float,
    least: int = 5,
    allowed_s: float = float("inf"),
) -> Timing:
    """Time a call again and again, after a warm-up.

    The garbage collector stays on, as it is in a server, but starts with a clean
    slate: what has been allocated until now is frozen out of its sight for good.

    Args:
        call: Its result is dropped at once.
        budget_s: Roughly how long to repeat, all batches together.
        least: Repetitions in a batch even if that takes longer.
        allowed_s: A call that seems slower is measured three times before it counts.
    """
    gc.collect()
    gc.freeze()
    for _ in range(3):
        call()
    batches: list[list[float]] = []
    for _ in range(_ROUNDS):
        batches += [_batch(call, budget_s / _BATCHES, least) for _ in range(_BATCHES)]
        if _quietest(batches) <= allowed_s:
            break
    times = [time for batch in batches for time in batch]
    return Timing(_quietest(batches), statistics.median(times), min(times), len(times))


def _quietest(batches: Iterable[Sequence[float]]) -> float:
    return min(statistics.median(batch) for batch in batches)


def _batch(call: Callable[[], object], budget_s: float, least: int) -> list[float]:
    times: list[float] = []
    total = 0.0
    while len(times) < least or total < budget_s:
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
        total += times[-1]
    return times


class Memory(NamedTuple):
    """What a call's result holds, and the most that was held on the way."""

    held_bytes: int
    peak_bytes: int


def memory_of(call: Callable[[], object]) -> Memory:
    """Python's and numpy's allocations of one call, its result alive at the end."""
    call()
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    result = call()
    _, peak = tracemalloc.get_traced_memory()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del result
    return Memory(held - before, peak - before)


# --- bars ------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """Something a benchmark holds the code to."""

    name: str
    text: str
    unit: str


@dataclass(frozen=True)
class Point:
    """One measured value against what its bar allows there, in the bar's unit."""

    bar: str
    case: str
    value: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Above 1 the bar is missed."""
        return self.value / self.allowed


def verdicts(bars: Sequence[Bar], points: Sequence[Point]) -> list[str]:
    """For each bar: pass or falls short, by which ratio, and where it is worst."""
    lines = []
    for bar in bars:
        of_bar = [point for point in points if point.bar == bar.name]
        if not of_bar:
            lines.append(f"{bar.name}: not measured; {bar.text}")
            continue
        worst = max(of_bar, key=lambda point: point.ratio)
        missed = sum(point.ratio > 1 for point in of_bar)
        verdict = f"FALLS SHORT in {missed} of {len(of_bar)}" if missed else "pass"
        lines.append(
            f"{bar.name}: {verdict}, worst {worst.ratio:.2f} of the bar"
            f" ({worst.value:,.4g} of {worst.allowed:,.4g} {bar.unit}: {worst.case});"
            f" {bar.text}"
        )
    return lines


# --- what a reader sees ----------------------------------------------------------


class Progress:
    """A bar on stderr while a benchmark runs; nothing if stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._shown = sys.stderr.isatty()

    def step(self, what: str) -> None:
        """One more case begins."""
        if self._shown:
            filled = 30 * self._done // max(self._total, 1)
            bar = "#" * filled + "." * (30 - filled)
            sys.stderr.write(f"\r[{bar}] {self._done}/{self._total} {what:<44.44}")
            sys.stderr.flush()
        self._done += 1

    def end(self) -> None:
        """Wipe the line."""
        if self._shown:
            sys.stderr.write("\r" + " " * 96 + "\r")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as they need to be; numbers to the right."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(text.rjust(w) for text, w in rest)]
        lines.append("  ".join(aligned).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def host() -> dict[str, object]:
    """What the numbers were measured on."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of all are not above."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def conclude(
    options: argparse.Namespace,
    bars: Sequence[Bar],
    points: Sequence[Point],
    tables: str,
    **more: object,
) -> int:
    """Print the tables and the verdicts, and write what the options ask for.

    Returns:
        The exit status: 1 if any bar is missed.
    """
    told = ", ".join(f"{name}: {value}" for name, value in host().items())
    print(tables, told, *verdicts(bars, points), sep="\n")
    if options.json is not None:
        write_json(options.json, bars, points, short=options.short, **more)
    return int(any(point.ratio > 1 for point in points))


def plot(path: Path | None, draw: Callable[[Any], None]) -> None:
    """Let something be drawn into matplotlib's axes, if it is installed and wanted."""
    if path is None:
        return
    try:
        from matplotlib import pyplot as plt  # noqa: PLC0415 - optional
    except ImportError:
        sys.stderr.write("no plot: matplotlib is not installed\n")
        return
    figure, axes = plt.subplots()
    draw(axes)
    axes.legend(fontsize="small")
    figure.savefig(path)


def write_json(
    path: Path, bars: Sequence[Bar], points: Sequence[Point], **more: object
) -> None:
    """Everything a benchmark has measured, for machines."""
    document = {
        "host": host(),
        "bars": [asdict(bar) for bar in bars],
        "points": [{**asdict(point), "ratio": point.ratio} for point in points],
        **more,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--short", action="store_true", help="a coarse run of seconds")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write JSON")
    made.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="also draw, if matplotlib is installed",
    )
    return made
