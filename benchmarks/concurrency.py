"""Many pulls at once: how fast, how fair, how the loop lives, and how soon they end.

- Small pulls (1 block in 16 layers, 64 KB) with 1 to 1,000 of them open at once: how
  many a second, and the consumer's CPU of each, all of it.
- 1,000 pulls of 1 MB begun at once: when the slowest and the median one have finished.
- A pull of 1 MB among two of 1 GB: its time beyond what it takes alone, in *waves*: the
  median time from the post of a wave of the large ones until it was seen settled.
- A heartbeat of a millisecond while 1 GB moves: how late it was at worst, on either
  side, against the worst of an idle loop.
- One round of the pump with 1,000 transfers open (tcp alone: on one host a post has
  copied when it returns).
- A pull of 1 GB that is cancelled on the way: when its blocks are back, in waves.

    python -m benchmarks.concurrency [--short] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from contextlib import asynccontextmanager
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import structlog
import trio

from benchmarks.measure import Bar, Point, Progress, conclude, parser, plot, table
from benchmarks.sides import GROUP, TRANSPORTS, Pair, Pool, heart, pair, run
from kvferry.engine import FerryError
from kvferry.engine.fabric import Operation
from kvferry.engine.pump import Pump

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvferry.protocol import Ticket

    Result = dict[str, Any]

NAME = "benchmarks.concurrency"
MANY = 1000
WAVES = 3.0

COMPLETE = Bar("completeness", "1,000 pulls open at once: all complete", "begun/done")
SMALL_RATE = Bar(
    "small pulls, rate", "1,000 open at once over tcp: at least 900 a second", "us each"
)
SMALL_CPU = Bar(
    "small pulls, CPU",
    "1,000 open at once: at most 400 us of the consumer's CPU each",
    "us",
)
FAIR = Bar("fairness", "1,000 x 1 MB: slowest at most 2.5 x the median", "times")
AMONG_LARGE = Bar(
    "small among large", "its time alone and at most 3 waves of 1 GB pulls", "ms"
)
STALL = Bar(
    "loop stall",
    "either side's worst while 1 GB moves: at most 5 ms beyond an idle loop's",
    "ms",
)
ROUND = Bar("pump round", "1,000 open transfers: at most 1 ms on the loop", "ms")
CANCEL = Bar("cancelling", "1 GB, peer alive: blocks back within 3 waves' time", "ms")
BARS = (COMPLETE, SMALL_RATE, SMALL_CPU, FAIR, AMONG_LARGE, STALL, ROUND, CANCEL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    options = parser("Many pulls at once.").parse_args(arguments)
    plan = {
        "open": [1, MANY] if options.short else [1, 4, 16, 64, 256, MANY],
        "rounds": 5 if options.short else 9,
    }
    progress = Progress(len(TRANSPORTS) * (len(plan["open"]) + 6))
    results: list[Result] = []
    for transport, tls in TRANSPORTS.items():
        for result in run(NAME, plan, tls=tls):
            progress.step(f"{transport}: {result['what']}")
            results.append({"transport": transport, **result})
    progress.end()
    plot(options.plot, lambda axes: draw(axes, results))
    points = [found for result in results for found in judged(result)]
    return conclude(options, BARS, points, report(results), results=results)


def judged(result: Result) -> list[Point]:
    """A result against its bars."""
    where, what = result["transport"], result["what"]
    if what == "small pulls":
        if result["open"] < MANY:
            return []
        points = [
            _complete(result),
            Point(SMALL_CPU.name, where, result["cpu_us"], 400.0),
        ]
        if where == "tcp":
            case = f"{result['rate']:,.0f} a second"
            points.append(Point(SMALL_RATE.name, case, 1e6 / result["rate"], 1e6 / 900))
        return points
    if what == FAIR.name:
        ratio = math.inf  # it is not fair to lose some
        if not result["failures"]:
            ratio = result["slowest_s"] / result["median_s"]
        return [_complete(result), Point(what, where, ratio, 2.5)]
    value, allowed = result["ms"], result["allowed_ms"]
    return [Point(what, f"{where}, {result['detail']}", value, allowed)]


def _complete(result: Result) -> Point:
    """How many were begun for each that was done."""
    failures = Counter(result["failures"])
    case = f"{result['transport']}, {result['what']}, {failures.total()} failed"
    if failures:
        case += f": {failures.most_common(1)[0][0]}"
    begun = result["begun"]
    return Point(COMPLETE.name, case, begun / max(begun - failures.total(), 1), 1.0)


def report(results: Sequence[Result]) -> str:
    """Small pulls, and the rest."""
    small = [
        (r["transport"], r["open"], r["rate"], r["cpu_us"], r["theirs_us"], r["p50_ms"])
        for r in results
        if r["what"] == "small pulls"
    ]
    head = ("small pulls", "open", "a second", "CPU us", "producer's", "p50 ms")
    fair = [
        (r["transport"], r["median_s"], r["slowest_s"], r["slowest_s"] / r["median_s"])
        for r in results
        if r["what"] == FAIR.name
    ]
    fair_head = ("1,000 x 1 MB", "median s", "slowest s", "slowest/median")
    rest = [
        (r["what"], r["transport"], r["ms"], r["allowed_ms"], r["detail"])
        for r in results
        if "ms" in r
    ]
    rest_head = ("what", "transport", "ms", "allowed ms", "of it")
    tables = ((head, small), (fair_head, fair), (rest_head, rest))
    return "\n\n".join(table(*each) for each in tables) + "\n"


def draw(axes: Any, results: Sequence[Result]) -> None:  # noqa: ANN401 - matplotlib
    """Small pulls a second by how many are open."""
    for transport in TRANSPORTS:
        line = [
            r
            for r in results
            if (r["transport"], r["what"]) == (transport, "small pulls")
        ]
        opened = [r["open"] for r in line]
        axes.semilogx(opened, [r["rate"] for r in line], "o-", label=transport)
    axes.set(xlabel="small pulls open at once", ylabel="a second")


# --- in the consumer -------------------------------------------------------------


async def measure(plan: dict[str, Any], say: Callable[[Result], None]) -> None:
    """All of it; one pair for what is small, one for what is large."""
    small = Pool(MANY, heads=1, head_bytes=128)
    async with pair(small, raw=small) as both:
        await _small_pulls(both, 8, 8)  # hands are shaken, plans are made
        for opened in plan["open"]:
            say(await _small_pulls(both, opened, max(opened, 300)))
        if rounds := await _pump_rounds(both):
            say(rounds)
    # One pull's worth more of ours: no two requests may write one block.
    async with pair(Pool(2 * MANY + 1), Pool(MANY + 1)) as both:
        await _large(both)
        say(await _many_at_once(both))
        say(await _among_large(both, plan["rounds"]))
        for stall in await _stalls(both, plan["rounds"]):
            say(stall)
        say(await _cancelled(both, plan["rounds"]))


async def _small_pulls(both: Pair, opened: int, pulls: int) -> Result:
    """So many pulls of one block, never more than `opened` of them at a time."""
    blocks = [[n % both.theirs.blocks] for n in range(pulls)]
    waiting = list(zip(blocks, await both.tickets(blocks, num_tokens=16), strict=True))
    times: list[float] = []
    failures: list[str] = []

    async def work() -> None:
        while waiting:
            where, ticket = waiting.pop()
            try:
                _, seconds = await both.pull(ticket, where)
            except FerryError as error:
                failures.append(error.detail)
            else:
                times.append(seconds)

    theirs_s = await both.others[0].ask("cpu")
    begin, begin_cpu_s = perf_counter(), process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(opened):
            nursery.start_soon(work)
    took_s, cpu_s = perf_counter() - begin, process_time() - begin_cpu_s
    return {
        "what": "small pulls",
        "open": opened,
        "failures": failures,
        "begun": pulls,
        "rate": max(len(times), 1) / took_s,
        "cpu_us": cpu_s / max(len(times), 1) * 1e6,
        "theirs_us": (await both.others[0].ask("cpu") - theirs_s) / pulls * 1e6,
        "p50_ms": statistics.median(times or [math.inf]) * 1e3,
    }


async def _pump_rounds(both: Pair) -> Result | None:
    """A pump of its own, over bare transfers that a silent peer keeps open.

    Returns:
        None where bytes move without the peer.
    """
    raw = both.live_raw()
    log = structlog.get_logger("benchmarks")
    config = both.engine.config
    pump = Pump(raw.fabric, config, on_notice=lambda _: None, log=log)
    for n in range(MANY):
        transfer = raw.post(Operation.READ, [n], [n])
        pump.track(transfer, lambda _progress, _cause: None)
    times = []
    for _ in range(300):
        begin = perf_counter()
        pump.round()
        times.append(perf_counter() - begin)
    still = pump.unsettled
    async with both.raw_served():
        while pump.unsettled:
            pump.round()
    if still < MANY:
        return None
    detail = f"median of 300 rounds, worst {max(times) * 1e3:.2f} ms"
    return _timed(ROUND, statistics.median(times), 0.001, detail)


def _timed(bar: Bar, seconds: float, allowed_s: float, detail: str) -> Result:
    return {
        "what": bar.name,
        "ms": seconds * 1e3,
        "allowed_ms": allowed_s * 1e3,
        "detail": detail,
    }


async def _many_at_once(both: Pair) -> Result:
    """All begin together; when does each end?"""
    blocks = [[n] for n in range(MANY)]
    tickets = await both.tickets(blocks, num_tokens=16)
    ended: list[float] = []
    failures: list[str] = []
    both.wipe()
    begin = perf_counter()

    async def one(where: list[int], ticket: Ticket) -> None:
        try:
            await both.pull(ticket, where)
        except FerryError as error:
            failures.append(error.detail)
        else:
            ended.append(perf_counter() - begin)

    async with trio.open_nursery() as nursery:
        for where, ticket in zip(blocks, tickets, strict=True):
            nursery.start_soon(one, where, ticket)
    if not failures:
        both.check(range(MANY), range(MANY))
    return {
        "what": FAIR.name,
        "failures": failures,
        "begun": MANY,
        "median_s": statistics.median(ended or [math.inf]),
        "slowest_s": max(ended, default=math.inf),
        "ended_s": ended,
    }


async def _large(both: Pair) -> float:
    """One pull of 1 GB; its seconds."""
    blocks = list(range(MANY))
    ticket = await both.ticket(blocks, num_tokens=16 * MANY)
    return (await both.pull(ticket, blocks))[1]


@asynccontextmanager
async def _under_way(both: Pair, pulls: int) -> AsyncIterator[trio.CancelScope]:
    """Pulls of 1 GB, well under way; left by cancelling them."""
    blocks = list(range(MANY))
    tickets = await both.tickets([blocks] * pulls, num_tokens=16 * MANY)
    both.fabric.clear()
    async with trio.open_nursery() as nursery:
        for n, ticket in enumerate(tickets):
            nursery.start_soon(
                both.pull, ticket, [n * MANY + block for block in blocks]
            )
        await both.fabric.settled(32)
        yield nursery.cancel_scope
        nursery.cancel_scope.cancel()


async def _among_large(both: Pair, rounds: int) -> Result:
    """One block, while two large pulls have more waves than the engine may post."""

    async def small() -> float:
        ticket = await both.ticket([MANY], num_tokens=16)
        return (await both.pull(ticket, [2 * MANY]))[1]

    alone, among, waves = [], [], []
    for _ in range(rounds):
        alone += [await small() for _ in range(5)]
        async with _under_way(both, 2):
            among.append(await small())
            waves.append(statistics.median(both.fabric.waves_s))
    alone_s, wave_s = statistics.median(alone), statistics.median(waves)
    took_s = statistics.median(among)
    detail = (
        f"alone {alone_s * 1e3:.2f} ms, a wave {wave_s * 1e3:.2f} ms,"
        f" all of it {took_s / wave_s:.1f} waves"
    )
    return _timed(AMONG_LARGE, took_s, alone_s + WAVES * wave_s, detail)


async def _stalls(both: Pair, rounds: int) -> list[Result]:
    """The worst lateness of either loop while a large pull runs, and of an idle one."""
    blocks = list(range(MANY))
    producer = both.others[0]
    late_s: dict[str, list[float]] = {"consumer": [], "producer": [], "idle": []}
    for _ in range(rounds):
        ticket = await both.ticket(blocks, num_tokens=16 * MANY)
        await producer.ask("beat")
        async with heart() as beats_s:
            _, took_s = await both.pull(ticket, blocks)
        late_s["consumer"].append(max(beats_s))
        late_s["producer"].append(await producer.ask("worst_beat"))
        async with heart() as beats_s:
            await trio.sleep(took_s)
        late_s["idle"].append(max(beats_s))
    idle_s = statistics.median(late_s["idle"])
    results = []
    for side in ("consumer", "producer"):
        detail = f"{side}, idle {idle_s * 1e3:.1f} ms"
        detail += f"; worst of all {max(late_s[side]) * 1e3:.1f} ms"
        busy_s = statistics.median(late_s[side])
        results.append(_timed(STALL, busy_s, idle_s + 0.005, detail))
    return results


async def _cancelled(both: Pair, rounds: int) -> Result:
    """From the cancellation until the call has returned, nothing in quarantine."""
    times, waves, in_flight = [], [], []
    for n in range(rounds):
        begin = 0.0
        async with _under_way(both, 1):
            # Not always when a look of the pump has just found all waves settled.
            await trio.sleep(0.002 * n)
            in_flight.append(both.engine.statistics()["bytes_in_flight"])
            waves.append(statistics.median(both.fabric.waves_s))
            begin = perf_counter()
        times.append(perf_counter() - begin)
        if both.engine.quarantine.blocks(GROUP):
            raise ValueError("a cancelled pull has left blocks in quarantine")
    wave_s = statistics.median(waves)
    detail = (
        f"a wave {wave_s * 1e3:.2f} ms, {statistics.mean(in_flight) / 2**20:.1f} MB in"
        f" flight, worst of all {max(times) * 1e3:.2f} ms"
    )
    return _timed(CANCEL, statistics.median(times), WAVES * wave_s, detail)


if __name__ == "__main__":
    raise SystemExit(main())
