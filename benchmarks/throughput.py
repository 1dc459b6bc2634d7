"""How fast bytes go through the engine, against bare NIXL with the same descriptors.

Pull against one bare READ, push against one bare WRITE, of 1 block (1 MB) to 1 GB, in
turns within one run, same host and tcp. A bare turn is one post of every page and looks
at it from time to time; the engine's goes from the call to its return, fence included.
A push is timed at the producer, when its consumer has registered.

Then 256 MB of heads-first pages between blocks of 64 and of 16 tokens, either way,
against one bare post of pages of equal blocks.

    python -m benchmarks.throughput [--short] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Bar, Point, Progress, conclude, parser, plot, table
from benchmarks.sides import TRANSPORTS, Pool, pair, run, scattered

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.sides import Pair

    Result = dict[str, Any]
    Turn = Callable[[], Awaitable[float]]

BARRED_BYTES = 64 * 10**6
MB = 2**20

BANDWIDTH = Bar(
    "bandwidth",
    "from 64 MB on at least 0.97 of a bare post's bandwidth: raw/engine in time",
    "times as long",
)
UNEQUAL = Bar(
    "unequal blocks",
    "64:16 heads first, 256 MB: at most 1.15 x a bare post of equal blocks",
    "times as long",
)
ALLOWED = {BANDWIDTH.name: 1 / 0.97, UNEQUAL.name: 1.15}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    options = parser("Bandwidth of the engine and of bare NIXL.").parse_args(arguments)
    if options.short:
        plan = {"blocks": [1, 64, 256], "pool": 272, "rounds": 5, "unequal_mb": 256}
    else:
        sizes = [1, 4, 16, 64, 256, 1024]
        plan = {"blocks": sizes, "pool": 1100, "rounds": 9, "unequal_mb": 256}
    progress = Progress(len(TRANSPORTS) * (2 * len(plan["blocks"]) + 2))
    results: list[Result] = []
    for transport, tls in TRANSPORTS.items():
        for result in run(NAME, plan, tls=tls):
            progress.step(f"{transport}: {result['case']}, {result['bytes'] // MB} MB")
            results.append({"transport": transport, **result})
    progress.end()
    plot(options.plot, lambda axes: draw(axes, results))
    points = [point(result) for result in results if result["bar"]]
    return conclude(
        options, (BANDWIDTH, UNEQUAL), points, report(results), results=results
    )


NAME = "benchmarks.throughput"


def point(result: Result) -> Point:
    """A result that has a bar."""
    case = f"{result['transport']}, {result['case']}, {result['bytes'] // MB} MB"
    return Point(result["bar"], case, 1 / result["ratio"], ALLOWED[result["bar"]])


def report(results: Sequence[Result]) -> str:
    """One table."""
    head = ("transport", "case", "MB", "descriptors", "raw ms", "engine ms", "raw GB/s",
            "engine GB/s", "of raw", "least", "most")  # fmt: skip
    rows = [
        (
            r["transport"],
            r["case"],
            r["bytes"] // MB,
            r["descriptors"],
            r["raw_s"] * 1e3,
            r["engine_s"] * 1e3,
            r["bytes"] / r["raw_s"] / 1e9,
            r["bytes"] / r["engine_s"] / 1e9,
            r["ratio"],
            r["least_ratio"],
            r["most_ratio"],
        )
        for r in results
    ]
    return table(head, rows)


def draw(axes: Any, results: Sequence[Result]) -> None:  # noqa: ANN401 - matplotlib
    """Bandwidth by size."""
    for transport in TRANSPORTS:
        for case in ("pull", "push"):
            line = [
                r for r in results if (r["transport"], r["case"]) == (transport, case)
            ]
            sizes = [r["bytes"] for r in line]
            for who, style in (("raw", "s--"), ("engine", "o-")):
                speeds = [r["bytes"] / r[f"{who}_s"] / 1e9 for r in line]
                axes.semilogx(sizes, speeds, style, label=f"{transport}, {case}, {who}")
    axes.set(xlabel="bytes", ylabel="GB/s")


# --- in the consumer -------------------------------------------------------------


async def measure(plan: dict[str, Any], say: Callable[[Result], None]) -> None:
    """Every size, then the unequal blocks."""
    pool = Pool(plan["pool"])
    async with pair(pool, raw=pool) as both:
        for blocks in plan["blocks"]:
            case = _Case(both, blocks)
            rounds = plan["rounds"] if blocks < 1024 else plan["rounds"] // 2
            for name in ("pull", "push"):
                timed = await _in_turns(case.raw(name), case.engine(name), rounds)
                barred = case.bytes >= BARRED_BYTES
                say(
                    {
                        **case.told(name),
                        **timed,
                        "bar": BANDWIDTH.name if barred else "",
                    }
                )
    blocks = plan["unequal_mb"]
    small = Pool(blocks + blocks // 4)
    large = Pool(small.blocks // 4, block_tokens=64)
    for ours, theirs in ((small, large), (large, small)):
        async with pair(ours, theirs, raw=small) as both:
            case = _Case(both, blocks)
            timed = await _in_turns(
                case.raw("pull"), case.engine("pull"), plan["rounds"]
            )
            name = f"pull {ours.block_tokens} from {theirs.block_tokens}"
            say({**case.told(name), **timed, "bar": UNEQUAL.name})


class _Case:
    """So many blocks of 16 tokens, scattered on both sides."""

    def __init__(self, both: Pair, blocks: int) -> None:
        self._both = both
        self._tokens = blocks * 16
        self._ours = self._scattered(both.ours, seed=1)
        self._theirs = self._scattered(both.theirs, seed=2)
        # Bare agents see blocks of 16 tokens on both sides.
        equal = max(both.ours.blocks, both.theirs.blocks)
        self._raw_ours = scattered(equal, blocks, seed=1)
        self._raw_theirs = scattered(equal, blocks, seed=2)
        self.bytes = blocks * min(both.ours, both.theirs, key=_tokens).block_bytes
        self.descriptors = 0

    def _scattered(self, pool: Pool, *, seed: int) -> list[int]:
        return scattered(pool.blocks, self._tokens // pool.block_tokens, seed=seed)

    def told(self, name: str) -> Result:
        """Which case it is."""
        return {"case": name, "bytes": self.bytes, "descriptors": self.descriptors}

    def raw(self, name: str) -> Turn:
        """A bare turn."""
        move = self._both.raw_read if name == "pull" else self._both.raw_write

        async def turn() -> float:
            return await move(self._raw_ours, self._raw_theirs)

        return turn

    def engine(self, name: str) -> Turn:
        """The engine's; once of them is looked at byte by byte."""

        async def pull() -> float:
            ticket = await self._both.ticket(self._theirs, num_tokens=self._tokens)
            report, seconds = await self._both.pull(ticket, self._ours)
            self.descriptors = report.descriptors
            return seconds

        async def push() -> float:
            return await self._both.push(
                self._ours, self._theirs, num_tokens=self._tokens
            )

        move = pull if name == "pull" else push

        async def turn() -> float:
            if self.descriptors and self._checked == name:
                return await move()
            self._both.wipe()
            seconds = await move()
            self._both.check(self._ours, self._theirs)
            self._checked = name
            return seconds

        return turn

    _checked = ""


def _tokens(pool: Pool) -> int:
    return pool.block_tokens


async def _in_turns(raw: Turn, engine: Turn, rounds: int) -> Result:
    """Both in turns after a warm-up; the ratios are of neighbouring turns."""
    await raw()
    await engine()
    raws: list[float] = []
    engines: list[float] = []
    for round_ in range(rounds):
        # First one of the two, then the other: what comes second finds caches warm.
        first, second = ((raw, raws), (engine, engines))[:: 1 if round_ % 2 else -1]
        for turn, times in (first, second):
            times.append(await turn())
    ratios = [raw_s / engine_s for raw_s, engine_s in zip(raws, engines, strict=True)]
    return {
        "raw_s": statistics.median(raws),
        "engine_s": statistics.median(engines),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "turns": {"raw": raws, "engine": engines},
    }


if __name__ == "__main__":
    raise SystemExit(main())
