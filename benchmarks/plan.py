"""What a plan costs: preparing a peer once, planning a request each time.

61 layers, MLA and 8-head GQA, pools of 1,000 to 1,000,000 blocks, requests of 1
to 4,096 blocks, whose ids are shuffled Python lists as a scheduler has them. No
tensors: a layout is numbers. Proofs are part of what is timed, because there is no
way to plan without them. A request is planned against all of its producer ranks at
once; preparing is told a peer.

    python -m benchmarks.plan [--short] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.layouts import GROUP, Model, gqa, mla
from benchmarks.measure import (
    Bar,
    Memory,
    Point,
    Progress,
    Timing,
    host,
    measure,
    memory_of,
    parser,
    table,
    verdicts,
    write_json,
)
from kvferry.engine import EngineConfig, Span
from kvferry.engine.cost import LandingPolicy
from kvferry.engine.plan import prepare_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvferry.engine.cost import Landing
    from kvferry.engine.plan import Plan

PLANNING = Bar("planning a request", "at most 60 us + 12 ns a descriptor", "us")
PREPARING = Bar("preparing a peer, time", "at most 5 ms, whatever the pool", "ms")
HOLDING = Bar("preparing a peer, memory", "at most 1 MB held, whatever the pool", "MB")
BARS = (PLANNING, PREPARING, HOLDING)

ALLOWED_MS = 5.0
ALLOWED_MB = 1.0

POOLS = (1_000, 10_000, 100_000, 1_000_000)
REQUESTS = (1, 16, 256, 4_096)


@dataclass(frozen=True)
class Pair:
    """One consumer rank and the producer ranks that it reads from.

    Attributes:
        orders, tokens: Axis order and block size of the consumer and of the producer.
        ranks: Producer ranks, which split the heads.
        landing: As in `kvferry.engine.EngineConfig`.
    """

    name: str
    model: Model
    orders: tuple[str, str]
    tokens: tuple[int, int]
    ranks: int = 1
    landing: Landing = "direct"

    def prepare(self, blocks: int) -> partial[Plan[int]]:
        """A call that plans with pools of so many blocks on both sides."""
        (here, there), (ours, theirs) = self.orders, self.tokens
        local = self.model.layout(here, blocks=blocks, block_tokens=ours)
        remotes = {
            rank: self.model.layout(
                there, blocks=blocks, block_tokens=theirs, tp=self.ranks, rank=rank
            )
            for rank in range(self.ranks)
        }
        policy = LandingPolicy(
            landing=self.landing, image_bytes=EngineConfig.wave_bytes
        )
        return partial(prepare_plan, local, remotes, policy=policy)

    def spans(self, blocks: int, pool: int) -> tuple[Span, Span, int] | None:
        """A request of so many of the larger blocks; None if no pool holds it."""
        num_tokens = blocks * max(self.tokens)
        counts = [num_tokens // tokens for tokens in self.tokens]
        if max(counts) > pool:
            return None
        rng = np.random.default_rng(blocks)
        ours, theirs = (rng.permutation(pool)[:count].tolist() for count in counts)
        return Span(ours), Span(theirs), num_tokens


HND, NHD = "b k h n d", "b k n h d"
PAIRS = (
    Pair("MLA, equal blocks of 64", mla(), ("b n d",) * 2, (64, 64)),
    Pair("MLA, blocks of 64 from 16", mla(), ("b n d",) * 2, (64, 16)),
    Pair("GQA HND, equal blocks of 16", gqa(), (HND, HND), (16, 16)),
    Pair("GQA HND, TP 1 from TP 2", gqa(), (HND, HND), (16, 16), 2),
    Pair("GQA HND, TP 1 from TP 8 NHD", gqa(), (HND, NHD), (16, 16), 8),
    Pair("GQA NHD, TP 1 from TP 2", gqa(), (NHD, NHD), (16, 16), 2),
    Pair("GQA NHD, TP 1 from TP 2, blocks of 64", gqa(), (NHD, NHD), (64, 64), 2),
    Pair("GQA NHD, TP 1 from TP 2, in bulk", gqa(), (NHD, NHD), (16, 16), 2, "auto"),
)


def allowed_us(descriptors: int) -> float:
    """What the bar allows for planning a request of so many descriptors."""
    return 60 + 0.012 * descriptors


class Effort(NamedTuple):
    """How long each figure is measured."""

    budget_s: float
    least: int

    def measure(self, call: Callable[[], object], allowed_s: float) -> Timing:
        """Time a call that has a bar."""
        return measure(
            call, budget_s=self.budget_s, least=self.least, allowed_s=allowed_s
        )


class Prepared(NamedTuple):
    """What one pair costs once, for all of its peers."""

    pair: Pair
    pool: int
    timing: Timing
    memory: Memory
    rows: int

    def points(self) -> Iterator[Point]:
        """Against the bars, a peer."""
        ranks = self.pair.ranks
        case = f"{self.pair.name}, pool of {self.pool:,}"
        yield Point(
            PREPARING.name, case, self.timing.typical_s * 1e3 / ranks, ALLOWED_MS
        )
        yield Point(
            HOLDING.name, case, self.memory.held_bytes / 1e6 / ranks, ALLOWED_MB
        )


class Planned(NamedTuple):
    """What one request costs."""

    pair: Pair
    pool: int
    blocks: int
    descriptors: int
    timing: Timing

    def point(self) -> Point:
        """Against the bar."""
        case = (
            f"{self.pair.name}, pool of {self.pool:,}, {self.blocks:,} blocks,"
            f" {self.descriptors:,} descriptors"
        )
        return Point(
            PLANNING.name,
            case,
            self.timing.typical_s * 1e6,
            allowed_us(self.descriptors),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, judge."""
    options = parser("What a plan costs.").parse_args(arguments)
    pools = (POOLS[0], POOLS[-1]) if options.short else POOLS
    requests = REQUESTS[:-1] if options.short else REQUESTS
    effort = Effort(0.02, 3) if options.short else Effort(0.4, 5)
    prepared, planned = _measured(pools, requests, effort)
    points = [point for each in prepared for point in each.points()]
    points += [each.point() for each in planned]
    print(_prepared_table(prepared), _planned_table(planned), sep="\n\n", end="\n\n")
    print(*(f"{name}: {value}" for name, value in host().items()), sep=", ")
    print(*verdicts(BARS, points), sep="\n")
    if options.json is not None:
        write_json(options.json, BARS, points, short=options.short)
    if options.plot is not None:
        _plot(options.plot, prepared, planned)
    return 0


def _measured(
    pools: Sequence[int], requests: Sequence[int], effort: Effort
) -> tuple[list[Prepared], list[Planned]]:
    prepared: list[Prepared] = []
    planned: list[Planned] = []
    progress = Progress(len(PAIRS) * len(pools))
    for pair in PAIRS:
        for pool in pools:
            progress.step(f"{pair.name}, {pool:,}")
            prepare = pair.prepare(pool)
            plan = prepare()
            prepared.append(
                Prepared(
                    pair,
                    pool,
                    effort.measure(prepare, ALLOWED_MS * 1e-3 * pair.ranks),
                    memory_of(prepare),
                    sum(_rows(plan)),
                )
            )
            spans = {blocks: pair.spans(blocks, pool) for blocks in requests}
            planned += [
                Planned(pair, pool, blocks, *_planned(plan, request, effort))
                for blocks, request in spans.items()
                if request is not None
            ]
    progress.end()
    return prepared, planned


def _rows(plan: Plan[int]) -> Iterator[int]:
    for peer in plan.peers.values():
        yield from (len(bulk.remote_rows) for bulk in peer.bulk)
        for section in peer.sections:
            yield len(section.local_rows) + len(section.remote_rows)


def _planned(
    plan: Plan[int], request: tuple[Span, Span, int], effort: Effort
) -> tuple[int, Timing]:
    local, remote, num_tokens = request
    select = partial(
        plan.select,
        num_tokens=num_tokens,
        local={GROUP: local},
        remote={GROUP: remote},
    )
    descriptors = select().descriptors
    return descriptors, effort.measure(select, allowed_us(descriptors) * 1e-6)


def _prepared_table(prepared: Sequence[Prepared]) -> str:
    head = ("preparing", "pool", "peers", "rows", "ms", "ms/peer", "least ms/peer")
    return table(
        (*head, "held MB/peer", "peak MB/peer"),
        (
            (
                *(each.pair.name, each.pool, each.pair.ranks, each.rows),
                each.timing.typical_s * 1e3,
                each.timing.typical_s * 1e3 / each.pair.ranks,
                each.timing.least_s * 1e3 / each.pair.ranks,
                each.memory.held_bytes / 1e6 / each.pair.ranks,
                each.memory.peak_bytes / 1e6 / each.pair.ranks,
            )
            for each in prepared
        ),
    )


def _planned_table(planned: Sequence[Planned]) -> str:
    head = ("planning a request", "pool", "blocks", "descriptors", "us", "least us")
    return table(
        (*head, "ns/descriptor", "bar us", "of the bar"),
        (
            (
                *(each.pair.name, each.pool, each.blocks, each.descriptors),
                each.timing.typical_s * 1e6,
                each.timing.least_s * 1e6,
                each.timing.typical_s * 1e9 / each.descriptors,
                allowed_us(each.descriptors),
                each.point().ratio,
            )
            for each in planned
        ),
    )


def _plot(path: Path, prepared: Sequence[Prepared], planned: Sequence[Planned]) -> None:
    try:
        import matplotlib as mpl  # type: ignore[import-not-found] # noqa: PLC0415
    except ImportError:
        print(f"no matplotlib is installed: {path} was not drawn")
        return
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - optional

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for pair in PAIRS:
        pool = max(p.pool for p in planned)
        of_pair = [p for p in planned if p.pair is pair and p.pool == pool]
        left.loglog(
            [p.descriptors for p in of_pair],
            [p.timing.typical_s * 1e6 for p in of_pair],
            "o-",
            ms=4,
            lw=1,
            label=pair.name,
        )
        pools = [p for p in prepared if p.pair is pair]
        right.semilogx(
            [p.pool for p in pools],
            [p.timing.typical_s * 1e3 / pair.ranks for p in pools],
            "o-",
            ms=4,
            lw=1,
        )
    counts = np.geomspace(10, max(p.descriptors for p in planned), 50)
    left.loglog(
        counts, [allowed_us(int(n)) for n in counts], "k--", lw=1, label=PLANNING.text
    )
    right.axhline(ALLOWED_MS, color="k", ls="--", lw=1)
    left.set(title=PLANNING.name, xlabel="descriptors", ylabel="us")
    right.set(title=PREPARING.name, xlabel="blocks in the pool", ylabel="ms a peer")
    right.set_ylim(0)
    left.legend(fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
