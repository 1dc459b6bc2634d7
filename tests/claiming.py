"""A `planning.Case` pushed instead of pulled: shared out, planned rank by rank, written.

The stamp oracle decides, as for a pull. `push` writes everything at once, `stream`
range by range, as the producer's ranks get ready.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from kvferry.engine.claims import of_layer, share_out
from kvferry.engine.plan import Clip, Plan, prepare_plan
from kvferry.engine.readiness import Readiness, wanted_tokens
from tests.oracle import (
    Counts,
    expect,
    fill_garbage,
    fill_producer,
    fill_ready,
    write,
    zero_tails,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.engine.plan import Selection
    from kvferry.engine.readiness import Step
    from kvferry.protocol.layout import CacheLayout
    from tests.oracle import RankPool
    from tests.planning import Case

Key = tuple[int, int, int]
Claims = dict[Key, tuple["CacheLayout", ...]]


class Pushed(NamedTuple):
    """What came of it.

    Attributes:
        wrong: What the oracle finds wrong.
        bytes: Bytes written, of all ranks.
        pulled_bytes: Bytes that a pull would have read.
        most: How often the byte was written that was written most often.
        selections: How many selections moved something.
    """

    wrong: list[str]
    bytes: int
    pulled_bytes: int
    most: int
    selections: int

    @property
    def is_exact(self) -> bool:
        """Every byte is right, and was written once, if it was to be written."""
        return not self.wrong and self.bytes == self.pulled_bytes and self.most <= 1


class Sides:
    """Both sides of a case, and one producer rank's plans.

    Args:
        case: What to push.
        change: A planted fault in the claims.
    """

    def __init__(
        self, case: Case, change: Callable[[Claims], Claims] = lambda claims: claims
    ) -> None:
        self.case = case
        self.consumer, self.producers = case.consumer_pool(), case.producer_pools()
        self.layout = self.consumer.cache.layout
        self.remotes = {k: pool.cache.layout for k, pool in self.producers.items()}
        shared = share_out(self.layout, self.remotes, reader=case.consumer_rank)
        self.claims = change(shared)
        self.written = Counts(self.consumer)
        self._plans: dict[tuple[Key, str | None], list[Plan[Key]]] = {}

    def plans(self, key: Key, layer: str | None = None) -> list[Plan[Key]]:
        """What a rank prepares for its claim, or for one layer of it."""
        if (key, layer) not in self._plans:
            sheets = [replace(s, regions=self.layout.regions) for s in self.claims[key]]
            if layer is not None:
                sheets = [s for s in (of_layer(s, layer) for s in sheets) if s]
            self._plans[key, layer] = [
                prepare_plan(sheet, {key: self.remotes[key]}, is_partial=True)
                for sheet in sheets
            ]
        return self._plans[key, layer]

    def select(self, plan: Plan[Key], clip: Clip | None = None) -> Selection[Key]:
        request = self.case.request
        return plan.select(
            num_tokens=request.num_tokens,
            computed_tokens=request.computed_tokens,
            local=request.local,
            remote=request.remote,
            clip=clip,
        )

    def outcome(self, moved: list[int]) -> Pushed:
        """Zero the tails, as the consumer does, and let the oracle look."""
        pulled = self.select(
            prepare_plan(self.layout, self.remotes, reader=self.case.consumer_rank)
        )
        zero_tails(self.consumer.cache, pulled)
        slack = {name: unit - 1 for name, unit in self.case.units().items()}
        wrong = expect(self.consumer, self.case.request, slack_tokens=slack)
        return Pushed(
            wrong, sum(moved), pulled.bytes, self.written.most, sum(map(bool, moved))
        )


def push(
    case: Case, change: Callable[[Claims], Claims] = lambda claims: claims
) -> Pushed:
    """Every rank writes its whole claim."""
    sides = Sides(case, change)
    chosen = [
        (plan, sides.select(plan)) for key in sides.claims for plan in sides.plans(key)
    ]
    for number, pool in enumerate(sides.producers.values()):
        fill_producer(pool, case.request, seed=number)
    moved = [write(plan, selection, sides.written) for plan, selection in chosen]
    assert moved == [selection.bytes for _, selection in chosen]
    return sides.outcome(moved)


def stream(
    case: Case, *, seed: int, change: Callable[[Clip], Clip] = lambda clip: clip
) -> Pushed:
    """Every rank writes what gets ready, in an order of its own.

    Nothing is stamped before it is ready: what leaves too early is garbage. A rank
    commits, at the latest, when nothing that must be ready is missing.

    Args:
        case: One that is not refused.
        seed: Of the order.
        change: A planted fault in the clips.
    """
    sides, moved = Sides(case), []
    for number, (key, pool) in enumerate(sides.producers.items()):
        fill_garbage(pool, seed=number)
        rng = random.Random(seed * 1000 + number)
        for step in _steps(case, pool, sides.remotes[key], rng):
            for plan in sides.plans(key, step.layer):
                selection = sides.select(plan, change(step.clip))
                moved.append(write(plan, selection, sides.written))
    return sides.outcome(moved)


def _steps(
    case: Case, pool: RankPool, layout: CacheLayout, rng: random.Random
) -> Iterator[Step]:
    """What one rank lets go, step by step, to a consumer that may come late."""
    request = case.request
    wanted = wanted_tokens(layout.groups, request.remote, num_tokens=request.num_tokens)
    readiness = Readiness(wanted, num_tokens=request.num_tokens)
    told = list(_told(tuple(wanted), request.num_tokens, rng))
    joined_at = rng.choice((0, 0, rng.randrange(len(told))))
    for index, (layers, tokens) in enumerate(told):
        for layer in layers or wanted:
            fill_ready(pool, request, layer, tokens)
        steps = readiness.add(layers, tokens)
        if index < joined_at:
            continue
        yield from (readiness.so_far() if index == joined_at else steps)
        if not readiness.missing() and rng.random() < 0.7:
            return


def _told(
    layers: tuple[str, ...], num_tokens: int, rng: random.Random
) -> Iterator[tuple[tuple[str, ...] | None, tuple[int, int]]]:
    """All tokens of all layers, some ranges of all layers at once, others by layer."""
    inner = rng.sample(range(num_tokens), min(num_tokens, rng.randrange(6)))
    ranges = list(pairwise(sorted({0, num_tokens, *inner})))
    if rng.random() < 0.6:
        rng.shuffle(ranges)
    together = rng.randint(0, len(ranges))
    yield from ((None, tokens) for tokens in ranges[:together])
    rest = [((layer,), tokens) for layer in layers for tokens in ranges[together:]]
    if rng.random() < 0.6:
        rng.shuffle(rest)
    yield from rest
