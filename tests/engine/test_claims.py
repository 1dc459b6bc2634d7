"""Claims: a push is a pull's plan, shared out and seen from the ranks that write it."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.engine.cache import AttentionGroup, KVCache, PagedTensor, Shard
from kvferry.engine.claims import layers_of, of_layer, share_out
from kvferry.engine.plan import Clip, prepare_plan
from kvferry.engine.readiness import Readiness, wanted_tokens
from kvferry.engine.spans import Side
from kvferry.protocol.errors import FerryError, ImpossiblePlan
from kvferry.protocol.layout import SHARD_AXIS, CacheLayout
from tests.claiming import Claims, Sides, push, stream
from tests.planning import RICH, Case, cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.protocol.layout import PartLayout

many = settings(suppress_health_check=[HealthCheck.too_slow])


# --- random pairs ------------------------------------------------------------------


@settings(many, max_examples=500)
@given(cases())
def test_random_pairs_pushed_are_what_a_pull_gives(case: Case) -> None:
    """The planner's property in the other direction: exact, or refused for the reason."""
    if case.refusal is None:
        pushed = push(case)
        assert pushed.wrong == []
        assert pushed.is_exact
    else:
        error, reason = case.refusal
        with pytest.raises(error, match=reason):
            push(case)


@settings(many, max_examples=250)
@given(cases(), st.integers(0, 2**32))
def test_random_clips_select_each_byte_once_and_none_before_it_is_ready(
    case: Case, seed: int
) -> None:
    """In whatever order tokens and layers get ready: exact, and nothing is missing.

    What is not ready yet is garbage at its producer, so that a byte which leaves too
    early is seen; the consumer may come late, and the producer commits as soon as
    nothing is missing.
    """
    if case.refusal is None:
        pushed = stream(case, seed=seed)
        assert pushed.wrong == []
        assert pushed.is_exact


@settings(many, max_examples=100)
@given(cases())
def test_random_claims_fill_the_layout_exactly_once(case: Case) -> None:
    """Every unit of every part is in one claim, for each class of the producer's tokens."""
    sides = Sides(case)
    found: dict[tuple, list[int]] = defaultdict(list)
    contexts: dict[str, set] = defaultdict(set)
    for key, layout in sides.remotes.items():
        held = {group.name: Side.of(group).context for group in layout.groups}
        for name, context in held.items():
            contexts[name].add(context)
        for sheet in sides.claims[key]:
            assert sheet.regions == ()
            for place, part in parts_of(sheet):
                shard = part.shard
                found[held[place[0]], place] += range(shard.first, shard.last)
    expected = {
        (context, place): list(range(part.shard.first, part.shard.last))
        for place, part in parts_of(sides.layout)
        for context in contexts[place[0]]
    }
    assert {where: sorted(units) for where, units in found.items()} == expected


@settings(many, max_examples=50)
@given(cases())
def test_a_claim_is_the_consumers_own_numbers(case: Case) -> None:
    """Nothing but shard, address and the number of units differs from its layout."""
    sides = Sides(case)
    whole = dict(parts_of(sides.layout))
    for part_of in (sheet for sheets in sides.claims.values() for sheet in sheets):
        for place, part in parts_of(part_of):
            ours = whole[place]
            stride = next(a.stride for a in ours.axes if a.name == SHARD_AXIS)
            moved = (part.shard.first - ours.shard.first) * stride
            axes = tuple(
                replace(a, size=part.shard.size) if a.name == SHARD_AXIS else a
                for a in ours.axes
            )
            assert part == replace(
                ours, shard=part.shard, address=ours.address + moved, axes=axes
            )


def parts_of(layout: CacheLayout) -> list[tuple[tuple[str, ...], PartLayout]]:
    return [
        ((group.name, field.layer, field.name, part.name), part)
        for group in layout.groups
        for field in group.fields
        for part in field.parts
    ]


# --- examples ----------------------------------------------------------------------


def heads(first: int, last: int, *, total: int = 6) -> CacheLayout:
    """A rank that holds some of the heads."""
    tensor = torch.zeros(4, 4, last - first, 2)
    field = PagedTensor(tensor, "b n h d", Shard(total, first, last))
    return KVCache([AttentionGroup("full", 4, {"layers.0": field})]).layout


def shares(claims: dict, key: str) -> list[list[tuple[int, int]]]:
    return [
        [(part.shard.first, part.shard.last) for _, part in parts_of(sheet)]
        for sheet in claims[key]
    ]


def test_two_stretches_of_one_part_are_two_sheets() -> None:
    """A rank that provides the outer heads, while another provides the inner ones."""
    remotes = {"all": heads(0, 6), "inner": heads(2, 4)}
    claims = share_out(heads(0, 6), remotes, reader=1)
    assert shares(claims, "all") == [[(0, 2)], [(4, 6)]]
    assert shares(claims, "inner") == [[(2, 4)]]
    claims = share_out(heads(0, 6), remotes, reader=0)
    assert shares(claims, "all") == [[(0, 6)]]
    assert shares(claims, "inner") == []


@pytest.mark.parametrize("reader", range(4))
def test_g3_of_replicas_one_is_asked_by_the_readers_number(reader: int) -> None:
    """Each head is held twice: the readers spread over its holders."""
    halves = {
        f"{half}{copy}": heads(*half) for half in ((0, 3), (3, 6)) for copy in "ab"
    }
    claims = share_out(heads(0, 6), halves, reader=reader)
    chosen = {key for key, sheets in claims.items() if sheets}
    copy = "ab"[reader % 2]
    assert chosen == {f"(0, 3){copy}", f"(3, 6){copy}"}
    assert set(claims) == set(halves)


def test_a_unit_that_nobody_holds_is_refused() -> None:
    """Before anything is registered anywhere."""
    with pytest.raises(ImpossiblePlan, match=r"nobody holds units \[4, 6\)"):
        share_out(heads(0, 6), {"a": heads(0, 4)}, reader=0)


def test_a_group_that_is_skipped_is_in_no_claim() -> None:
    """c2: what the caller agreed not to transfer is not written either."""
    sides = Sides(RICH)
    claims = share_out(
        sides.layout, sides.remotes, reader=0, skip_groups=frozenset({"window"})
    )
    names = {g.name for sheets in claims.values() for s in sheets for g in s.groups}
    assert names == {"full", "state"}


def test_a_claim_for_more_than_a_rank_holds_is_refused() -> None:
    """A producer that is asked for heads of another rank says so, and writes nothing."""
    local = heads(0, 6)
    claim = share_out(local, {"all": heads(0, 6)}, reader=0)["all"][0]
    claim = replace(claim, regions=local.regions)
    with pytest.raises(ImpossiblePlan, match="nobody holds"):
        prepare_plan(claim, {"half": heads(0, 3)}, is_partial=True)


def test_a_claim_outside_what_the_consumer_registered_is_refused() -> None:
    """The regions of the handshake count: an address beside them is never written."""
    local, remote = heads(0, 6), heads(0, 6)
    claim = share_out(local, {"all": remote}, reader=0)["all"][0]
    moved = tuple(replace(r, address=r.address + 4) for r in local.regions)
    for regions in ((), moved):
        with pytest.raises(ImpossiblePlan, match="not inside one registered region"):
            prepare_plan(
                replace(claim, regions=regions), {"all": remote}, is_partial=True
            )


def test_layers_of_a_claim_are_its_whole() -> None:
    """Layer by layer, every part is in exactly one layer's sheet, regions and all."""
    layout = Sides(RICH).layout
    layers = layers_of([layout])
    assert layers == ("layers.0", "layers.1", "layers.2", "layers.3")
    sheets = [of_layer(layout, layer) for layer in layers]
    parts = [part for sheet in sheets if sheet for part in parts_of(sheet)]
    assert parts == parts_of(layout)
    assert all(sheet and sheet.regions == layout.regions for sheet in sheets)
    assert of_layer(layout, "layers.9") is None


def test_p7_a_push_writes_from_the_first_token_that_was_not_computed() -> None:
    """The rich case registers from token 16 on: blocks before it stay untouched."""
    assert RICH.request.computed_tokens == 16
    pushed = push(RICH)
    assert pushed.is_exact
    assert pushed.selections == 2


def test_layer_by_layer_states_go_with_the_last_token() -> None:
    """A state's slots are in no clip but the one that brings the last token."""
    sides = Sides(RICH)
    (plan,) = sides.plans((0, 0, 0), "layers.3")
    last = RICH.request.num_tokens
    for ready, new in (((0, 44), (0, 44)), ((16, 40), (32, 40)), ((0, 0), (0, 0))):
        assert sides.select(plan, Clip(ready, new)).descriptors == 0
    whole = sides.select(plan)
    clipped = sides.select(plan, Clip((0, last), (44, last)))
    assert clipped.descriptors == whole.descriptors > 0


@pytest.mark.parametrize("first", [0, 16, 24, 25, 26])
def test_a_window_whose_tokens_are_all_ready_leaves_as_a_whole(first: int) -> None:
    """Nothing is missing only if the unit in which the window begins can leave, too."""
    sides, last = Sides(RICH), RICH.request.num_tokens
    groups = [g for g in sides.remotes[0, 0, 0].groups if g.name == "window"]
    wanted = wanted_tokens(groups, RICH.request.remote, num_tokens=last)
    readiness = Readiness(wanted, num_tokens=last)
    (step,) = readiness.add(("layers.2",), (first, last))
    (plan,) = sides.plans((0, 0, 0), "layers.2")
    is_whole = (
        sides.select(plan, step.clip).descriptors == sides.select(plan).descriptors
    )
    assert is_whole or readiness.missing()


# --- planted faults ------------------------------------------------------------------


def each_part(change: Callable[[PartLayout], PartLayout]) -> Callable[[Claims], Claims]:
    def of_sheet(sheet: CacheLayout) -> CacheLayout:
        groups = tuple(
            replace(
                group,
                fields=tuple(
                    replace(field, parts=tuple(change(part) for part in field.parts))
                    for field in group.fields
                ),
            )
            for group in sheet.groups
        )
        return replace(sheet, groups=groups)

    return lambda claims: {
        key: tuple(map(of_sheet, sheets)) for key, sheets in claims.items()
    }


def _stride(part: PartLayout) -> int:
    return next(axis.stride for axis in part.axes if axis.name == SHARD_AXIS)


def _one_unit_late(part: PartLayout) -> PartLayout:
    return replace(part, address=part.address + _stride(part))


def _one_unit_early(part: PartLayout) -> PartLayout:
    return replace(part, address=part.address - _stride(part))


def _shard_one_late(part: PartLayout) -> PartLayout:
    shard = part.shard
    return replace(part, shard=Shard(shard.total, shard.first + 1, shard.last + 1))


def _one_unit_too_few(part: PartLayout) -> PartLayout:
    shard = replace(part.shard, last=part.shard.last - 1)
    axes = tuple(
        replace(a, size=shard.size) if a.name == SHARD_AXIS else a for a in part.axes
    )
    return replace(part, shard=shard, axes=axes)


def _not_moved(claims: Claims) -> Claims:
    """Every rank writes to where the first one does."""
    first, second = claims
    whole = parts_of(claims[first][0])
    addresses = {(part.name, part.axes): part.address for _, part in whole}

    def moved(part: PartLayout) -> PartLayout:
        return replace(part, address=addresses[part.name, part.axes])

    return {first: claims[first]} | each_part(moved)({second: claims[second]})


def _exchanged(claims: Claims) -> Claims:
    return dict(zip(claims, reversed(claims.values()), strict=True))


def _one_forgotten(claims: Claims) -> Claims:
    return {key: sheets if n else () for n, (key, sheets) in enumerate(claims.items())}


def _sheets_doubled(claims: Claims) -> Claims:
    return {key: sheets * 2 for key, sheets in claims.items()}


WRONG_CLAIMS: dict[str, Callable[[Claims], Claims]] = {
    "one unit late": each_part(_one_unit_late),
    "one unit early": each_part(_one_unit_early),
    "shard one late": each_part(_shard_one_late),
    "one unit too few": each_part(_one_unit_too_few),
    "not moved": _not_moved,
    "exchanged": _exchanged,
    "one forgotten": _one_forgotten,
    "doubled": _sheets_doubled,
}


@pytest.mark.parametrize("fault", WRONG_CLAIMS.values(), ids=WRONG_CLAIMS)
def test_planted_fault_in_a_claim_is_caught(fault: Callable) -> None:
    """Each is refused before a byte moves, or seen by the oracle and the counts."""
    try:
        is_exact = push(RICH, fault).is_exact
    except (FerryError, AssertionError):
        is_exact = False
    assert not is_exact


def _rounded_up(clip: Clip) -> Clip:
    first, last = clip.ready
    return Clip((first, -(-last // 16) * 16), clip.new)


def _rounded_down(clip: Clip) -> Clip:
    return Clip(clip.ready, (clip.new[0], clip.new[1] // 16 * 16))


def _too_far(clip: Clip) -> Clip:
    return Clip((clip.ready[0], clip.ready[1] + 1), clip.new)


def _too_early(clip: Clip) -> Clip:
    return Clip((max(clip.ready[0] - 1, 0), clip.ready[1]), clip.new)


def _too_wide(clip: Clip) -> Clip:
    return Clip(clip.ready, (max(clip.new[0] - 16, 0), clip.new[1]))


def _new_alone(clip: Clip) -> Clip:
    return Clip(clip.new, clip.new)


WRONG_CLIPS = (
    _rounded_up,
    _rounded_down,
    _too_far,
    _too_early,
    _too_wide,
    _new_alone,
)


@pytest.mark.parametrize("fault", WRONG_CLIPS, ids=lambda fault: fault.__name__)
def test_planted_fault_in_a_clip_is_caught(fault: Callable[[Clip], Clip]) -> None:
    """Rounded the wrong way, wider or narrower than it is: some order shows it."""
    orders = random.Random(1).sample(range(1000), 12)
    assert all(stream(RICH, seed=seed).is_exact for seed in orders)
    assert not all(stream(RICH, seed=seed, change=fault).is_exact for seed in orders)
