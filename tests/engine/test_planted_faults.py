"""Faults planted between two layouts and the planner: each classical mistake is caught.

A fault changes what the planner is told (layouts, spans, ids), never what the
oracle knows; a mistake that no check and no oracle saw would pass here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from kvferry.engine.cache import Span
from kvferry.protocol.errors import FerryError
from tests.planning import RICH, World, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.protocol.layout import CacheLayout


def _each_field(layout: CacheLayout, change: Callable, group: str) -> CacheLayout:
    def changed(g):
        if g.name != group:
            return g
        return msgspec.structs.replace(g, fields=tuple(change(f) for f in g.fields))

    return msgspec.structs.replace(
        layout, groups=tuple(changed(g) for g in layout.groups)
    )


def _each_part(change: Callable) -> Callable:
    def changed(f):
        return msgspec.structs.replace(f, parts=tuple(change(p) for p in f.parts))

    return changed


def _remote_fields(world: World, change: Callable, group: str = "full") -> World:
    remotes = {k: _each_field(v, change, group) for k, v in world.remotes.items()}
    return replace(world, remotes=remotes)


def _axis(part, name: str, **numbers):
    axes = tuple(
        msgspec.structs.replace(a, **numbers) if a.name == name else a
        for a in part.axes
    )
    return msgspec.structs.replace(part, axes=axes)


def _strides(part) -> dict[str, int]:
    return {axis.name: axis.stride for axis in part.axes}


def swapped_ratios(world: World) -> World:
    """Each side's ids expanded by the other side's ratio."""

    def regroup(layout: CacheLayout, block_size: int) -> CacheLayout:
        groups = tuple(
            msgspec.structs.replace(
                g,
                block_size=block_size,
                blocks=g.fields[0].blocks * g.fields[0].block_tokens // block_size,
            )
            if g.name == "full"
            else g
            for g in layout.groups
        )
        return msgspec.structs.replace(layout, groups=groups)

    # 16 = 2 x 8 here, 48 = 3 x 16 there; swapped: 24 = 3 x 8 here, 32 = 2 x 16.
    remotes = {key: regroup(layout, 16) for key, layout in world.remotes.items()}
    return replace(world, local=regroup(world.local, 8), remotes=remotes)


def wrong_head_offset(world: World) -> World:
    """Each source's slice is taken one head late."""

    def change(part):
        address = part.address + _strides(part)["h"]
        return msgspec.structs.replace(part, address=address)

    return _remote_fields(world, _each_part(change), "window")


def wrong_holder(world: World) -> World:
    """Two ranks mistaken for each other: equal layouts, so nothing can refuse it."""
    keys = list(world.remotes)

    def relabel(layout: CacheLayout, other: CacheLayout) -> CacheLayout:
        shard = other.groups[0].fields[0].parts[0].shard

        def change(part):
            return msgspec.structs.replace(part, shard=shard)

        return _each_field(layout, _each_part(change), "full")

    pairs = zip(keys, reversed(keys), strict=True)
    remotes = {a: relabel(world.remotes[a], world.remotes[b]) for a, b in pairs}
    return replace(world, remotes=remotes)


def suffix_by_count(world: World) -> World:
    """The last n blocks paired with the last n blocks, wherever they begin."""
    remote = dict(world.request.remote)
    remote["window"] = Span(remote["window"].block_ids, 24)
    return replace(world, request=replace(world.request, remote=remote))


def first_group_only(world: World) -> World:
    """All groups but the first get nothing."""

    def after(selection):
        def cut(part, key):
            del key
            run, first = part.stretches[0]
            return replace(
                part,
                local_ids=part.local_ids[:first],
                remote_ids=part.remote_ids[:first],
                stretches=[(run, first)],
            )

        return _each_selected(selection, cut)

    return replace(world, after=after)


def _each_selected(selection, change):
    peers = {
        key: tuple(change(part, key) for part in parts)
        for key, parts in selection.peers.items()
    }
    return replace(selection, peers=peers)


def key_and_value_swapped(world: World) -> World:
    """The pair axis walked backwards on one side."""

    def change(part):
        stride = _strides(part)["k"]
        part = _axis(part, "k", stride=-stride)
        return msgspec.structs.replace(part, address=part.address + stride)

    return _remote_fields(world, _each_part(change))


def axes_swapped(world: World) -> World:
    """Heads taken for tokens: the declared order contradicts the tensor."""

    def change(part):
        strides = _strides(part)
        return _axis(_axis(part, "h", stride=strides["n"]), "n", stride=strides["h"])

    return _remote_fields(world, _each_part(change))


def off_by_one_token(world: World) -> World:
    """Every remote token read one slot late."""

    def change(part):
        return msgspec.structs.replace(part, address=part.address + _strides(part)["n"])

    return _remote_fields(world, _each_part(change))


def wrong_block_stride(world: World) -> World:
    """The page's own bytes taken for the distance between pages: padding forgotten."""

    def change(f):
        return msgspec.structs.replace(f, block_stride=f.block_stride - 16)

    return _remote_fields(world, change)


def wrong_local_block_stride(world: World) -> World:
    """The same on the destination: padding would be written."""

    def change(f):
        return msgspec.structs.replace(f, block_stride=f.block_stride - 8)

    return replace(world, local=_each_field(world.local, change, "full"))


def tail_not_zeroed(world: World) -> World:
    """The finish stage skipped."""
    return replace(world, after=lambda selection: replace(selection, tails=()))


def tail_one_slot_late(world: World) -> World:
    """One stale slot left behind the last token."""

    def after(selection):
        late = tuple(t._replace(first_slot=t.first_slot + 1) for t in selection.tails)
        return replace(selection, tails=late)

    return replace(world, after=after)


def tail_one_slot_early(world: World) -> World:
    """The last token zeroed with the tail."""

    def after(selection):
        early = tuple(
            t._replace(first_slot=max(t.first_slot - 1, 0)) for t in selection.tails
        )
        return replace(selection, tails=early)

    return replace(world, after=after)


def one_unit_too_few(world: World) -> World:
    """The last unit of the prompt left out, tail zeroed from the right token."""
    return replace(
        world,
        request=replace(world.request, num_tokens=40),
    )


def extra_token_computed(world: World) -> World:
    """A whole unit taken for a prefix hit that is none."""
    return replace(world, request=replace(world.request, computed_tokens=24))


def window_one_token_short(world: World) -> World:
    """The oldest unit that the window still reaches is left out."""
    groups = tuple(
        msgspec.structs.replace(g, window=g.window - 4) if g.window else g
        for g in world.local.groups
    )
    return replace(world, local=msgspec.structs.replace(world.local, groups=groups))


def parts_swapped(world: World) -> World:
    """A convolution state split as one piece: x and B at each other's channels."""

    def change(f):
        x, b = f.parts
        distance = b.address - x.address
        moved = (
            msgspec.structs.replace(x, address=x.address + distance // 2),
            msgspec.structs.replace(b, address=x.address),
        )
        return msgspec.structs.replace(f, parts=moved)

    return _remote_fields(world, change, "state")


def ids_rolled(world: World) -> World:
    """Right descriptors, paired one off."""

    def after(selection):
        return _each_selected(
            selection,
            lambda part, _: replace(part, remote_ids=np.roll(part.remote_ids, 1)),
        )

    return replace(world, after=after)


PLANTED = (
    swapped_ratios,
    wrong_head_offset,
    wrong_holder,
    suffix_by_count,
    first_group_only,
    key_and_value_swapped,
    axes_swapped,
    off_by_one_token,
    wrong_block_stride,
    wrong_local_block_stride,
    tail_not_zeroed,
    tail_one_slot_late,
    tail_one_slot_early,
    one_unit_too_few,
    extra_token_computed,
    window_one_token_short,
    parts_swapped,
    ids_rolled,
)


def test_the_rich_case_is_exact_without_a_fault() -> None:
    """What the planted faults are measured against."""
    outcome = run(RICH)
    assert outcome.wrong == []
    assert outcome.readers == {(0, 0, 0), (0, 1, 0)}


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught(fault: Callable) -> None:
    """Each classical mistake is seen by the oracle, or refused before a byte moves."""
    try:
        wrong = run(RICH, fault).wrong
    except (FerryError, AssertionError) as error:
        wrong = [str(error)]
    assert wrong
