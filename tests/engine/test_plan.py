"""The planner against the stamp oracle, and the proof that no plan leaves without."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from kvferry.engine import coverage
from kvferry.engine import plan as planning
from kvferry.engine.cache import AttentionGroup, KVCache, PagedTensor, Span
from kvferry.engine.coverage import are_outside, prove_coverage, prove_inside
from kvferry.engine.plan import Holder, assign, prepare_plan
from kvferry.protocol.errors import FerryError, FerryInternalError, ImpossiblePlan
from kvferry.protocol.layout import (
    Axis,
    CacheLayout,
    FieldLayout,
    GroupLayout,
    PartLayout,
    Region,
    Shard,
)
from tests.planning import RICH, Case, cases, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


@settings(max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_random_pairs_are_exact_or_refused_for_a_true_reason(case: Case) -> None:
    """Any layout to any layout: every byte is right, or the reason to refuse is real."""
    if case.refusal is None:
        assert run(case).wrong == []
    else:
        error, reason = case.refusal
        with pytest.raises(error, match=reason):
            run(case)


# --- the proof of coverage -------------------------------------------------------


def _proved(change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Prove the rich case's first group with changed local rows."""
    consumer, producers = RICH.consumer_pool(), RICH.producer_pools()
    layouts = {key: pool.cache.layout for key, pool in producers.items()}
    layout = consumer.cache.layout
    plan = prepare_plan(layout, layouts)
    rows = [
        its_rows
        for peer in plan.peers.values()
        for section in peer.sections
        for stratum, its_rows in section.local_rows_by_stratum()
        if stratum.key.group == "full"
    ]
    changed = change(np.concatenate(rows))
    prove_inside(changed, layout.regions, memory="DRAM", side="consumer")
    prove_coverage(layout.groups[0].fields, [changed], what="full")


def test_the_proof_accepts_the_plan() -> None:
    """Unchanged rows pass, so what the next test sees is the change."""
    _proved(lambda rows: rows)


def _longer(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows[0, 1] += 2
    return rows


def _restrided(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows[0, 3] -= 2
    return rows


def _shorter_pool(rows: np.ndarray) -> np.ndarray:
    rows = rows.copy()
    rows[0, 4] -= 1
    return rows


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda rows: rows[1:], FerryInternalError),
        (lambda rows: np.concatenate((rows, rows[:1])), FerryInternalError),
        (_longer, FerryInternalError),
        (_restrided, FerryInternalError),
        (_shorter_pool, FerryInternalError),
        (lambda rows: rows + np.array([2**40, 0, 0, 0, 0], np.uint64), ImpossiblePlan),
        (lambda rows: rows + np.array([0, 0, 1, 0, 0], np.uint64), ImpossiblePlan),
    ],
    ids=["missing", "twice", "longer", "stride", "count", "address", "device"],
)
def test_the_proof_refuses(change: Callable, error: type[FerryError]) -> None:
    """A byte missing, doubled, foreign or unregistered never leaves the planner."""
    with pytest.raises(error):
        _proved(change)


# --- layouts that a peer may send -------------------------------------------------


def _replaced(path: str, **numbers) -> Callable[[CacheLayout], CacheLayout]:
    """Change numbers of the first group, field, part or axis called ``path``."""

    def change(layout: CacheLayout) -> CacheLayout:
        group = layout.groups[0]
        field = group.fields[0]
        part = field.parts[0]
        if path == "group":
            group = replace(group, **numbers)
        elif path == "field":
            field = replace(field, **numbers)
        elif path == "part":
            part = replace(part, **numbers)
        elif path:
            axes = (replace(a, **numbers) if a.name == path else a for a in part.axes)
            part = replace(part, axes=tuple(axes))
        if path != "group":
            field = replace(field, parts=(part, *field.parts[1:]))
            group = replace(group, fields=(field, *group.fields[1:]))
        return replace(layout, groups=(group, *layout.groups[1:]))

    return change


def _first_twice(layout: CacheLayout) -> CacheLayout:
    return replace(layout, groups=(layout.groups[0], *layout.groups))


def _field_twice(layout: CacheLayout) -> CacheLayout:
    fields = layout.groups[0].fields
    return _replaced("group", fields=(fields[0], *fields))(layout)


def _part_twice(layout: CacheLayout) -> CacheLayout:
    state = layout.groups[-1]
    field = replace(state.fields[0], parts=state.fields[0].parts[:1] * 2)
    state = replace(state, fields=(field,))
    return replace(layout, groups=(*layout.groups[:-1], state))


def _no_shard_axis(layout: CacheLayout) -> CacheLayout:
    return _replaced("h", name="heads")(layout)


HOSTILE = {
    "group-twice": (_first_twice, "used twice"),
    "field-twice": (_field_twice, "is there twice"),
    "part-twice": (_part_twice, "part name is used twice"),
    "context-rank": (_replaced("group", context_rank=3), "context rank 3 of 1"),
    "interleave": (
        _replaced("group", context_size=2, context_interleave=5),
        "context interleave 5",
    ),
    "half-of-the-tokens": (
        _replaced("group", context_size=2, context_rank=1),
        "do not share out all tokens",
    ),
    "state-with-window": (_replaced("group", block_size=0, window=4), "a state has"),
    "a-state-here": (_replaced("group", block_size=0), "kernel blocks of 16 tokens"),
    "ratio": (_replaced("group", block_size=40), "not a multiple"),
    "pool": (_replaced("field", blocks=14), "14 kernel blocks for 5"),
    "no-pool": (_replaced("field", blocks=0), "0 kernel blocks"),
    "stride-zero": (_replaced("field", block_stride=0), "block stride of 0"),
    "stride-negative": (_replaced("field", block_stride=-8), "block stride of -8"),
    "stride-huge": (_replaced("field", block_stride=2**60), "beyond any memory"),
    "axis-stride-huge": (_replaced("k", stride=2**61), "beyond any memory"),
    "axis-empty": (_replaced("d", size=0), "without elements"),
    "axis-twice": (_replaced("k", name="d"), "axis name is used twice"),
    "heads": (_replaced("h", size=3), "axis 'h' has 3 steps"),
    "tokens": (_replaced("n", size=3), "axis 'n' has 3 steps"),
    "no-shard-axis": (_no_shard_axis, "no axis 'h'"),
    "shard": (_replaced("part", shard=Shard(4, 2, 5)), r"shard \[2, 5\) of 4"),
    "shard-total": (_replaced("part", shard=Shard(8, 0, 2)), "4 here, 8 there"),
    "width": (_replaced("field", element_bytes=4), "element bytes: 2 here, 4 there"),
    "payload": (_replaced("d", size=2), "plain axes"),
    "axis-name": (_replaced("d", name="e"), "plain axes"),
    "address": (_replaced("part", address=64), "not inside one registered region"),
    "address-below": (
        _replaced("k", stride=-(2**50)),
        "not inside one registered region",
    ),
    "unregistered": (lambda layout: replace(layout, regions=()), "not inside"),
    "memory": (_replaced("field", memory="VRAM"), "VRAM 0"),
    "device": (_replaced("field", device=3), "DRAM 3"),
    "layer-gone": (_replaced("field", layer="other"), "layer 'layers.0'"),
}


@pytest.mark.parametrize(("change", "says"), HOSTILE.values(), ids=HOSTILE)
def test_a_layout_that_lies_is_refused(change: Callable, says: str) -> None:
    """A peer's numbers are checked before anything is computed from them."""
    local = RICH.consumer_pool().cache.layout
    remotes = {k: pool.cache.layout for k, pool in RICH.producer_pools().items()}
    first = next(iter(remotes))
    with pytest.raises(ImpossiblePlan, match=says):
        prepare_plan(local, {**remotes, first: change(remotes[first])})


def test_sources_may_be_none_at_all() -> None:
    """Without producers every field is missing, by name."""
    with pytest.raises(ImpossiblePlan, match="no producer rank has layer"):
        prepare_plan(RICH.consumer_pool().cache.layout, {})


def test_a_state_is_not_paired_with_an_attention_field() -> None:
    """Equal names do not make equal kinds: there is nothing to align."""
    state = RICH.consumer_pool().cache.layout
    state = replace(state, groups=state.groups[2:])
    tensor = torch.zeros(4, 4, 12, 3, dtype=torch.int32)
    part = PagedTensor(tensor, "b n h w", Shard(12, 0, 12), "conv")
    remote = KVCache([AttentionGroup("state", 4, {"layers.3": part})]).layout
    renamed = replace(
        state.groups[0].fields[0],
        parts=(replace(state.groups[0].fields[0].parts[0], name="conv"),),
    )
    group = replace(state.groups[0], fields=(renamed,))
    field = remote.groups[0].fields[0]
    other = replace(
        remote.groups[0],
        fields=(
            replace(
                field,
                parts=(
                    replace(
                        field.parts[0],
                        shard=Shard(8, 0, 8),
                        axes=tuple(
                            replace(a, size=8) if a.name == "h" else a
                            for a in field.parts[0].axes
                        ),
                    ),
                ),
            ),
        ),
    )
    with pytest.raises(ImpossiblePlan, match="one of them is a state"):
        prepare_plan(
            replace(state, groups=(group,)), {0: replace(remote, groups=(other,))}
        )


def test_more_descriptors_than_int32_become_sections() -> None:
    """A number, not a failure: ids stay below 2**31 in each section."""
    blocks = 2**29
    local, remote = (_claimed_layout(start, blocks) for start in (2**40, 2**50))
    plan = prepare_plan(local, {0: remote})
    sections = plan.peers[0].sections
    assert len(sections) == 2
    for section in sections:
        assert int(section.local_rows[:, 4].sum()) < 2**31
        assert section.mirrored().local_rows is section.remote_rows
    span = Span([blocks - 1])
    selection = plan.select(num_tokens=4, local={"g": span}, remote={"g": span})
    assert sorted(part.index for part in selection.peers[0]) == [0, 1]
    assert selection.descriptors == 4


def test_a_part_with_more_descriptors_than_int32_is_refused() -> None:
    """One row alone cannot be numbered."""
    local, remote = (_claimed_layout(start, 2**31) for start in (2**40, 2**50))
    with pytest.raises(ImpossiblePlan, match="can be numbered"):
        prepare_plan(local, {0: remote})


def test_a_block_that_falls_into_too_many_rows_is_refused() -> None:
    """A peer's block of 2**26 tokens would cost us as many rows: bounded."""
    local, remote = (_claimed_layout(start, 1) for start in (2**40, 2**50))
    tokens = 2**26
    fields = tuple(
        replace(
            f,
            block_tokens=tokens,
            parts=(
                replace(
                    f.parts[0],
                    axes=(Axis("h", 1, 0), Axis("n", tokens, 0), Axis("d", 2, 1)),
                ),
            ),
        )
        for f in remote.groups[0].fields
    )
    group = replace(remote.groups[0], block_size=tokens, fields=fields)
    with pytest.raises(ImpossiblePlan, match="more than 1048576 rows"):
        prepare_plan(local, {0: replace(remote, groups=(group,))})


def test_a_unit_that_falls_into_too_many_runs_is_refused() -> None:
    """More than a million runs in one unit are not worth a plan."""
    local, remote = (_claimed_layout(start, 1) for start in (2**40, 2**50))

    def stretched(layout: CacheLayout, stride: int) -> CacheLayout:
        axes = (Axis("h", 1, 0), Axis("n", 4, 2**30), Axis("d", 2**21, stride))
        fields = tuple(
            replace(f, parts=(replace(f.parts[0], axes=axes),))
            for f in layout.groups[0].fields
        )
        return replace(layout, groups=(replace(layout.groups[0], fields=fields),))

    with pytest.raises(ImpossiblePlan, match="more than 1048576 runs"):
        prepare_plan(stretched(local, 2), {0: stretched(remote, 3)})


def test_h1_rows_are_counted_over_all_parts_before_any_are_made() -> None:
    """No part is over a bound by itself, and their strides are of no two alike."""
    axes = (Axis("h", 1, 0), Axis("n", 4, 2**16), Axis("d", 2**16, 2))

    def stretched(layout: CacheLayout, stride: int) -> CacheLayout:
        (group,) = layout.groups
        (part,) = group.fields[0].parts
        fields = tuple(
            replace(
                group.fields[0],
                layer=f"layers.{n}",
                parts=(
                    replace(
                        part,
                        address=part.address + n * 2**20,
                        axes=(*axes[:2], replace(axes[2], stride=stride + n)),
                    ),
                ),
            )
            for n in range(64)
        )
        return replace(layout, groups=(replace(group, fields=fields),))

    local, remote = (_claimed_layout(start, 1) for start in (2**40, 2**50))
    tracemalloc.start()
    try:
        with pytest.raises(ImpossiblePlan, match="more than 1048576 rows"):
            prepare_plan(stretched(local, 2), {0: stretched(remote, 3)})
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_h1_regions_on_thousands_of_devices_cost_no_more_than_on_one() -> None:
    """Each row is looked for on its own device alone."""
    rows = np.array([[64 * n, 8, n % 4096, 64, 2] for n in range(2**16)], np.uint64)
    regions = [Region("DRAM", n, 0, 2**30) for n in range(2**14)]
    started = time.process_time()
    assert not are_outside(rows, regions, memory="DRAM").any()
    outside = are_outside(rows, regions[1:], memory="DRAM")
    assert outside.tolist() == [n % 4096 == 0 for n in range(2**16)]
    assert are_outside(rows, regions, memory="VRAM").all()
    assert time.process_time() - started < 5


def test_h1_a_part_in_thousand_overlapping_shards_is_shared_out_by_one_sweep() -> None:
    """Who gets what does not depend on how it is found, and costs no square."""
    total = 2**20
    (field,) = _claimed_layout(2**40, 1).groups[0].fields[:1]
    rng = random.Random(1)
    shards = [sorted(rng.sample(range(total + 1), 2)) for _ in range(1023)]
    shards.append([0, total])

    def part(first: int, last: int) -> PartLayout:
        return PartLayout("kv", Shard(total, first, last), 0, ())

    holders = [Holder(n, None, field, part(*s)) for n, s in enumerate(shards)]
    started = time.process_time()
    given = assign(field, part(100, total), holders, 7)
    assert time.process_time() - started < 2
    assert given[0][1].first == 100
    assert given[-1][1].last == total
    for first, last in pairwise(overlap for _, overlap in given):
        assert first.last == last.first
    for holder, overlap in given:
        for unit in (overlap.first, overlap.last - 1):
            having = [n for n, (a, b) in enumerate(shards) if a <= unit < b]
            assert holder.key == having[7 % len(having)]


def _claimed_layout(start: int, blocks: int) -> CacheLayout:
    """Four layers of padded blocks, too many to have: no memory behind them."""
    layers = 4
    fields = tuple(
        FieldLayout(
            layer=f"layers.{n}",
            name="kv",
            dtype="uint8",
            element_bytes=1,
            memory="DRAM",
            device=0,
            blocks=blocks,
            block_stride=16,
            block_tokens=4,
            parts=(
                PartLayout(
                    "kv",
                    Shard(1, 0, 1),
                    start + n * blocks * 16,
                    (Axis("h", 1, 0), Axis("n", 4, 2), Axis("d", 2, 1)),
                ),
            ),
        )
        for n in range(layers)
    )
    group = GroupLayout(name="g", block_size=4, blocks=blocks, fields=fields)
    region = Region("DRAM", 0, start, layers * blocks * 16)
    return CacheLayout(regions=(region,), groups=(group,))


def test_equal_layers_are_paired_and_their_bytes_enumerated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four layers of two ranks cost what one does; a layer of another shape its own."""
    calls: Counter[str] = Counter()

    def counted(module: ModuleType, name: str) -> None:
        call = getattr(module, name)

        def counting(*args: object, **options: object) -> object:
            calls[name] += 1
            return call(*args, **options)

        monkeypatch.setattr(module, name, counting)

    counted(planning, "pair_parts")
    counted(coverage, "_stretches")
    layout = _claimed_layout(2**40, 8)
    prepare_plan(layout, {0: layout, 1: layout})
    assert calls == {"pair_parts": 1, "_stretches": 1}
    calls.clear()
    (group,) = layout.groups
    reordered = (Axis("h", 1, 0), Axis("d", 2, 1), Axis("n", 4, 2))
    (part,) = group.fields[3].parts
    other = replace(group.fields[3], parts=(replace(part, axes=reordered),))
    mixed = replace(layout, groups=(replace(group, fields=(*group.fields[:3], other)),))
    prepare_plan(mixed, {0: layout})
    assert calls == {"pair_parts": 2, "_stretches": 2}


def test_what_is_known_of_equal_layers_is_one_reader_s() -> None:
    """Another rank may hold other tokens in as many bytes."""
    layout = _claimed_layout(2**40, 8)
    (group,) = layout.groups
    other = replace(group, context_size=2, context_rank=1)
    pairing = planning.Pairing({0: layout}, 0)
    strata = [
        {contribution.stratum.local.context.rank for _, contribution in made}
        for made in (pairing.of_group(group), pairing.of_reader(1).of_group(other))
    ]
    assert strata == [{0}, {1}]


def test_layers_in_one_block_become_one_run() -> None:
    """All layers of a block lie behind each other on both sides: one run a block."""

    def cache() -> KVCache:
        pool = torch.zeros(6, 3, 2, 4, 5)
        layers = {f"layers.{n}": PagedTensor(pool[:, n], "b k n d") for n in range(3)}
        return KVCache([AttentionGroup("full", 4, layers)])

    ours, theirs = cache(), cache()
    rows = prepare_plan(ours.layout, {0: theirs.layout}).peers[0].sections[0].local_rows
    assert rows[:, 1].tolist() == [3 * 2 * 4 * 5 * 4]


def test_no_run_crosses_from_one_registration_into_another() -> None:
    """Single-block pools that happen to touch are still two registered regions."""
    layout = _claimed_layout(2**40, 1)
    edge = 2**40 + 16
    fields = [replace(f, block_stride=8) for f in layout.groups[0].fields]
    fields = tuple(
        replace(f, parts=(replace(f.parts[0], address=2**40 + 8 * n),))
        for n, f in enumerate(fields)
    )
    group = replace(layout.groups[0], fields=fields)
    regions = (Region("DRAM", 0, 2**40, 16), Region("DRAM", 0, edge, 16))
    split = replace(layout, regions=regions, groups=(group,))
    whole = replace(layout, regions=(Region("DRAM", 0, 2**40, 32),), groups=(group,))
    plans = [
        prepare_plan(a, {0: b})
        for a, b in ((whole, whole), (split, whole), (whole, split))
    ]
    runs = [p.peers[0].sections[0].local_rows[:, 1].tolist() for p in plans]
    assert runs == [[32], [16, 16], [16, 16]]


def test_ranks_that_nobody_reads_from_are_listed() -> None:
    """A plan knows all ranks of the instance, also the idle ones."""
    pool = torch.zeros(6, 4, 5)
    layout = KVCache(
        [AttentionGroup("mla", 4, {"a": PagedTensor(pool, "b n d")})]
    ).layout
    for reader in range(5):
        plan = prepare_plan(layout, dict.fromkeys(range(3), layout), reader=reader)
        assert list(plan.peers) == [0, 1, 2]
        assert [bool(p.sections) for p in plan.peers.values()] == [
            n == reader % 3 for n in range(3)
        ]
        assert sum(p.rows_bytes for p in plan.peers.values()) > 0


def test_unequal_context_schemes_are_refused() -> None:
    """Ranks that interleave differently cannot share out the tokens."""

    def layout(rank: int, interleave: int) -> CacheLayout:
        group = AttentionGroup(
            "mla",
            4,
            {"a": PagedTensor(torch.zeros(6, 4, 5), "b n d")},
            context_size=2,
            context_rank=rank,
            context_interleave=interleave,
        )
        return KVCache([group]).layout

    local = layout(0, 1)
    with pytest.raises(ImpossiblePlan, match="do not share out"):
        prepare_plan(local, {0: layout(0, 1), 1: layout(1, 2)})


def test_the_proof_needs_rows() -> None:
    """No rows cover nothing."""
    fields = RICH.consumer_pool().cache.layout.groups[0].fields
    with pytest.raises(FerryInternalError, match="no rows"):
        prove_coverage(fields, [], what="full")
