"""A consumer rank against a producer instance: cases for the planner, and `run`.

Used by every test of the planner: named cases build a `Case` by hand, the random
ones come from `cases`. A `Case` says what both sides mean; what the planner is
told is a `World`, so that a fault can be planted between the two.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from hypothesis import strategies as st

from kvferry.engine.cache import Span, tp_shard
from kvferry.engine.plan import prepare_plan
from kvferry.protocol.errors import FerryError, ImpossiblePlan, UnknownBlock
from tests.oracle import (
    FieldModel,
    GroupModel,
    GroupShape,
    RankPool,
    Request,
    execute,
    expect,
    fill_producer,
    zero_tails,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvferry.protocol.layout import CacheLayout

DTYPES = (
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


@dataclass(frozen=True)
class Case:
    """A consumer rank, a producer instance, and a request."""

    model: tuple[GroupModel, ...]
    consumer: Mapping[str, GroupShape]
    producer: Mapping[str, GroupShape]
    consumer_tp: int
    consumer_rank: int
    consumer_context: int
    producer_tp: int
    producer_stages: int
    producer_contexts: int
    request: Request
    seed: int
    refusal: tuple[type[FerryError], str] | None = None

    def units(self) -> dict[str, int]:
        """The grain of each attention group, from both sides' meaning."""
        found = {}
        for group in self.model:
            if not group.is_state:
                ours, theirs = self.consumer[group.name], self.producer[group.name]
                unit = math.gcd(ours.kernel, theirs.kernel)
                for shape in (ours, theirs):
                    if shape.context[0] > 1:
                        unit = math.gcd(unit, shape.context[2])
                found[group.name] = unit
        return found

    def consumer_pool(self) -> RankPool:
        shapes = _in_context(self.consumer, self.consumer_context)
        return RankPool(
            self.model,
            shapes,
            lambda total: tp_shard(total, self.consumer_rank, self.consumer_tp),
            slack_words=self.seed % 3,
        )

    def producer_pools(self) -> dict[tuple[int, int, int], RankPool]:
        """By (stage, tp rank, context rank)."""
        return {
            (stage, tp, context): RankPool(
                self.model,
                _in_context(self.producer, context),
                lambda total, tp=tp: tp_shard(total, tp, self.producer_tp),
                layers=lambda layer, stage=stage: (
                    int(layer.rsplit(".", 1)[1]) % self.producer_stages == stage
                ),
                slack_words=(self.seed + tp) % 3,
            )
            for stage in range(self.producer_stages)
            for tp in range(self.producer_tp)
            for context in range(self.producer_contexts)
        }


def _in_context(shapes: Mapping[str, GroupShape], rank: int) -> dict[str, GroupShape]:
    return {
        name: replace(shape, context=(shape.context[0], rank, shape.context[2]))
        if shape.context[0] > 1
        else shape
        for name, shape in shapes.items()
    }


class Outcome(NamedTuple):
    wrong: list[str]
    bytes: int
    descriptors: int
    readers: set


def run(case: Case, change: Callable | None = None) -> Outcome:
    """Plan, copy, zero, and let the oracle look.

    Args:
        case: What to run.
        change: A planted fault; see `Faults`.
    """
    consumer, producers = case.consumer_pool(), case.producer_pools()
    world = World(
        consumer.cache.layout,
        {key: pool.cache.layout for key, pool in producers.items()},
        case.request,
    )
    if change is not None:
        world = change(world)
    plan = prepare_plan(world.local, world.remotes, reader=case.consumer_rank)
    selection = plan.select(
        num_tokens=world.request.num_tokens,
        computed_tokens=world.request.computed_tokens,
        local=world.request.local,
        remote=world.request.remote,
    )
    selection = world.after(selection)
    for number, pool in enumerate(producers.values()):
        fill_producer(pool, case.request, seed=number)
    moved = execute(plan, selection)
    assert moved == selection.bytes
    zero_tails(consumer.cache, selection)
    slack = {name: unit - 1 for name, unit in case.units().items()}
    wrong = expect(consumer, case.request, slack_tokens=slack)
    return Outcome(wrong, moved, selection.descriptors, set(selection.peers))


@dataclass
class World:
    """What the planner is told; a fault changes it behind the oracle's back."""

    local: CacheLayout
    remotes: dict
    request: Request
    after: Callable = lambda selection: selection


# --- random cases ---------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = random.Random(draw(st.integers(0, 2**32)))
    kinds = draw(
        st.lists(
            st.sampled_from(("full", "window", "latent", "state")),
            min_size=1,
            max_size=3,
        )
    )
    stages = draw(st.sampled_from((1, 1, 1, 2)))
    layers = tuple(f"layers.{n}" for n in range(max(stages, rng.choice((1, 2)))))
    model = tuple(
        _group_model(rng, f"{kind}{n}", kind, layers) for n, kind in enumerate(kinds)
    )
    totals = _totals(model)
    sizes = [n for n in range(1, 9) if all(t % n == 0 or n % t == 0 for t in totals)]
    consumer_tp = draw(st.sampled_from(sizes))
    small = [n for n in sizes if n <= 4]
    producer_tp = draw(st.sampled_from(small if stages > 1 else sizes))
    contexts = draw(st.sampled_from(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 3))))
    shapes = [{g.name: _shape(rng, g, size) for g in model} for size in contexts]
    num_tokens = draw(st.integers(1, 70))
    case = Case(
        model,
        *shapes,
        consumer_tp=consumer_tp,
        consumer_rank=rng.randrange(consumer_tp),
        consumer_context=rng.randrange(contexts[0]),
        producer_tp=producer_tp,
        producer_stages=stages,
        producer_contexts=contexts[1],
        request=Request(num_tokens, {}, {}),
        seed=rng.randrange(1000),
    )
    return _with_request(rng, case, draw(st.sampled_from(FAULTS)))


FAULTS = (*("",) * 8, "late", "short", "none", "twice", "beyond", "unaligned")


def _group_model(
    rng: random.Random, name: str, kind: str, layers: tuple[str, ...]
) -> GroupModel:
    heads = rng.choice((1, 2, 3, 4, 6, 8))
    payload = rng.choice((1, 2, 3, 4, 8))
    dtype = rng.choice(DTYPES)
    if kind == "state":
        each = rng.choice((4, 8, 12))
        return GroupModel(
            name,
            layers,
            (
                FieldModel(
                    "conv",
                    {"w": rng.choice((1, 2, 3))},
                    parts=(("x", 2 * each), ("B", each), ("C", each)),
                    dtype=dtype,
                ),
                FieldModel("ssm", {"p": payload}, parts=(("ssm", 8),)),
            ),
        )
    if kind == "latent":
        return GroupModel(
            name,
            layers,
            (
                FieldModel("latent", {"d": payload + 1}, dtype=dtype),
                FieldModel("index", {"d": payload}, dtype=rng.choice(DTYPES)),
            ),
        )
    fields = (FieldModel("kv", {"k": 2, "d": payload}, heads, dtype=dtype),)
    if rng.random() < 0.3:
        fields += (FieldModel("scale", {"k": 2}, heads, dtype=torch.float32),)
    return GroupModel(
        name, layers, fields, rng.randint(1, 40) if kind == "window" else None
    )


def _totals(model: Sequence[GroupModel]) -> set[int]:
    totals = {f.heads for g in model for f in g.fields if f.heads}
    return totals | {t for g in model for f in g.fields for _, t in f.parts}


def _shape(rng: random.Random, group: GroupModel, contexts: int) -> GroupShape:
    axes = {}
    pair = set()
    for f in group.fields:
        names = ["b", *f.inner]
        if group.is_state:
            names.append("c")
        else:
            names += ["n", *(["h"] if f.heads else [])]
        if "k" in names and rng.random() < 0.3:
            pair.add(f.name)
            names.remove("k")
        rng.shuffle(names)
        if "d" in names and rng.random() < 0.8:
            names.remove("d")
            names.append("d")
        axes[f.name] = " ".join(names)
    together = ""
    if rng.random() < 0.4:
        together = rng.choice(("layer", "group"))
        axes = {
            name: " ".join(["b", *(a for a in order.split() if a != "b")])
            for name, order in axes.items()
        }
    pads = {a: rng.randint(1, 3) for a in "bkhn" if rng.random() < 0.15}
    if group.is_state:
        return GroupShape(0, 0, 1, axes, pads, frozenset(pair), together)
    kernel = rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 24))
    size = kernel * rng.choice((1, 1, 2, 3))
    turns = [n for n in (1, 2, kernel, size) if size % n == 0]
    context = (contexts, 0, rng.choice(turns) if contexts > 1 else 1)
    return GroupShape(size, kernel, 1, axes, pads, frozenset(pair), together, context)


def _with_request(rng: random.Random, case: Case, fault: str) -> Case:
    num_tokens = case.request.num_tokens
    grain = math.lcm(*case.units().values(), 1)
    computed = rng.choice((0, num_tokens, num_tokens + 20))
    computed = rng.randrange(computed + 1) // grain * grain
    unaligned = []
    if fault == "unaligned":
        computed = rng.randrange(num_tokens)
    for group in case.model:
        unit = case.units().get(group.name, 1)
        first = _first_wanted(group, num_tokens, computed)
        start = max(computed, first // unit * unit)
        if computed < num_tokens and first < num_tokens and start % unit:
            unaligned.append(f"{group.name}': .*{start} is not a multiple of {unit},")
    refusal = (ImpossiblePlan, "|".join(unaligned)) if unaligned else None
    sides = []
    for shapes, context in (
        (case.consumer, case.consumer_context),
        (case.producer, 0),
    ):
        spans = {}
        for group in case.model:
            shape = _in_context(shapes, context)[group.name]
            spans[group.name] = _span(rng, group, shape, num_tokens, computed)
        sides.append(spans)
    for group in case.model:  # a state has equally many slots on both sides
        if group.is_state:
            count = len(sides[0][group.name].block_ids)
            sides[1][group.name] = Span(rng.sample(range(count + 2), count))
    sized = []
    for shapes, spans in zip((case.consumer, case.producer), sides, strict=True):
        sized.append(
            {
                name: replace(
                    shape,
                    blocks=max(
                        (b for b in spans[name].block_ids if b is not None), default=0
                    )
                    + rng.randint(1, 4),
                )
                for name, shape in shapes.items()
            }
        )
    case = replace(
        case,
        consumer=sized[0],
        producer=sized[1],
        request=Request(num_tokens, sides[0], sides[1], computed),
        refusal=refusal,
    )
    return _with_fault(rng, case, fault) if refusal is None else case


def _first_wanted(group: GroupModel, num_tokens: int, computed: int) -> int:
    reach = num_tokens - group.window + 1 if group.window else 0
    return max(computed, reach)


def _span(
    rng: random.Random,
    group: GroupModel,
    shape: GroupShape,
    num_tokens: int,
    computed: int,
) -> Span:
    if group.is_state:
        count = rng.choice((1, 1, 2, 3))
        return Span(rng.sample(range(count + 2), count))
    grain = shape.block_size * shape.context[0]
    first = _first_wanted(group, num_tokens, computed)
    start = rng.randint(0, min(first, num_tokens) // grain)
    blocks = max(-(-num_tokens // grain) - start, 0) + rng.randint(0, 2)
    ids: list[int | None] = rng.sample(range(blocks + 4), blocks)
    for index in range(blocks):
        ends = (start + index + 1) * grain
        # Blocks before what is needed, and look-ahead blocks, may be absent.
        is_idle = ends <= first or (start + index) * grain >= num_tokens
        if is_idle and rng.random() < 0.3:
            ids[index] = None
    return Span(ids, start * grain)


def _with_fault(rng: random.Random, case: Case, fault: str) -> Case:
    """Break one span in a way that must be refused, if the case has room for it."""
    request = case.request
    if not fault or fault == "unaligned":
        return case
    if request.computed_tokens >= request.num_tokens and fault not in {
        "twice",
        "beyond",
    }:
        return case
    is_local = fault == "twice" or rng.random() < 0.5
    if request.computed_tokens >= request.num_tokens:
        is_local = True
    spans = dict(request.local if is_local else request.remote)
    shapes = case.consumer if is_local else case.producer
    group = rng.choice(case.model)
    span, shape = spans[group.name], shapes[group.name]
    has_contexts = any(
        shapes[group.name].context[0] > 1 for shapes in (case.consumer, case.producer)
    )
    broken = (
        None
        if has_contexts and fault in {"late", "short", "none"}
        else _broken(fault, group, shape, span, request)
    )
    if broken is None:
        return case
    spans[group.name] = broken
    side = "local" if is_local else "remote"
    return replace(
        case,
        request=replace(request, **{side: spans}),
        refusal=(UnknownBlock, f"group {group.name!r}"),
    )


def _broken(
    fault: str,
    group: GroupModel,
    shape: GroupShape,
    span: Span,
    request: Request,
) -> Span | None:
    ids = list(span.block_ids)
    present = [i for i, block in enumerate(ids) if block is not None]
    if fault == "twice":
        if len(present) < 2:
            return None
        ids[present[1]] = ids[present[0]]
        return Span(ids, span.first_token)
    if fault == "beyond":
        if not present:
            return None
        ids[present[-1]] = shape.blocks
        return Span(ids, span.first_token)
    first = _first_wanted(group, request.num_tokens, request.computed_tokens)
    if group.is_state or first >= request.num_tokens:
        return None
    needed = range(
        (first - span.first_token) // shape.block_size,
        (request.num_tokens - 1 - span.first_token) // shape.block_size + 1,
    )
    if fault == "none":
        ids[needed[-1]] = None
        return Span(ids, span.first_token)
    if fault == "short":
        return Span(ids[: needed[-1]], span.first_token)
    return Span(
        ids[needed[0] + 1 :], span.first_token + (needed[0] + 1) * shape.block_size
    )


# One of each kind, with unequal blocks, padding, a prefix hit and two sources.
RICH = Case(
    model=(
        GroupModel(
            "full",
            ("layers.0", "layers.1"),
            (FieldModel("kv", {"k": 2, "d": 3}, heads=4, dtype=torch.bfloat16),),
        ),
        GroupModel(
            "window",
            ("layers.2",),
            (FieldModel("kv", {"k": 2, "d": 2}, heads=2),),
            window=20,
        ),
        GroupModel(
            "state",
            ("layers.3",),
            (FieldModel("conv", {"w": 3}, parts=(("x", 8), ("B", 4))),),
        ),
    ),
    consumer={
        "full": GroupShape(16, 8, 9, {"kv": "b k h n d"}, {"b": 4}),
        "window": GroupShape(8, 8, 9, {"kv": "b n h d"}, pair=frozenset({"kv"})),
        "state": GroupShape(0, 0, 3, {"conv": "b w c"}),
    },
    producer={
        "full": GroupShape(48, 16, 5, {"kv": "b k n h d"}, {"b": 8}),
        "window": GroupShape(4, 4, 20, {"kv": "b k h n d"}),
        "state": GroupShape(0, 0, 4, {"conv": "b c w"}),
    },
    consumer_tp=1,
    consumer_rank=0,
    consumer_context=0,
    producer_tp=2,
    producer_stages=1,
    producer_contexts=1,
    request=Request(
        45,
        {
            "full": Span([7, 2, 5, 8], 16),
            "window": Span([None, None, 4, 1, 8, 3]),
            "state": Span([2]),
        },
        {
            "full": Span([3, 1, 4]),
            "window": Span([10, 6, 3, 9, 12, 1, 0, 19], 20),
            "state": Span([1]),
        },
        computed_tokens=16,
    ),
    seed=1,
)
