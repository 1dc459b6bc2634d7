"""A plan, or two layouts that make none, in words for a terminal.

Equal layers are one line, and ranks that differ in nothing but their range of
units are told together: a model of 61 layers fits on a screen.

Owned here: phrasing. What is told comes from `shares`.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.engine.explain.folding import (
    bytes_of,
    fold_names,
    folded,
    plural,
    ranks,
    tokens,
)
from kvferry.engine.explain.shares import Share, shares_of
from kvferry.engine.images import BulkSection
from kvferry.engine.spans import Span
from kvferry.protocol.errors import FerryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.engine.cost import Estimate
    from kvferry.engine.plan import Plan
    from kvferry.engine.sections import PeerPlan, Section, Stratum, StratumKey
    from kvferry.protocol.layout import (
        CacheLayout,
        FieldLayout,
        GroupLayout,
        PartLayout,
    )

__all__ = (
    "SHORT_RUN_BYTES",
    "describe",
    "explain",
    "fold_names",
    "ranks",
    "why_it_ends",
)

SHORT_RUN_BYTES = 8192
"""Shorter runs cost more to post than to move: about 0.3 us a descriptor (nixl-facts
row 32), in which a link of 25 GB/s carries this much."""

_RANGES = 4
_LANDS = {"bulk": "in bulk", "direct": "directly"}


def explain(plan: Plan[Any], *, num_tokens: int | None = None) -> str:
    """What a plan does, in words: who feeds whom, in which runs, and why they end.

    Args:
        plan: From `kvferry.engine.plan.prepare_plan`.
        num_tokens: Also tells what a request of so many tokens moves, when nothing of
            it is there already.

    Returns:
        Lines for a terminal, without a newline at the end.
    """
    lines = [*_overview(plan), ""]
    for members in _alike(plan):
        lines += [*_of_ranks(members), ""]
    if num_tokens is not None:
        lines += [*_of_request(plan, num_tokens), ""]
    return "\n".join(lines[:-1])


def describe(layout: CacheLayout) -> str:
    """A layout, shortened: equal layers are one line."""
    size = sum(region.size for region in layout.regions)
    lines = [f"{len(layout.regions):,} registered regions, {bytes_of(size)}"]
    for group in layout.groups:
        lines.append(_group_line(group))
        for fields in folded(group.fields, _field_lines):
            head, *parts = _field_lines(fields[0])
            layers = fold_names([field.layer for field in fields])
            lines += [f"  {layers} {head}", *parts]
    return "\n".join(lines)


def _field_lines(field: FieldLayout) -> tuple[str, ...]:
    blocks = (
        f"kernel blocks of {tokens(field.block_tokens)}"
        if field.block_tokens
        else "slots"
    )
    head = (
        f"{field.name}: {field.dtype}, {field.memory} {field.device},"
        f" {field.blocks:,} {blocks}, {field.block_stride:,} bytes apart"
    )
    return (head, *(_part_line(part) for part in field.parts))


def _part_line(part: PartLayout) -> str:
    axes = ", ".join(f"{a.name} {a.size:,} x {a.stride:,}" for a in part.axes)
    shard = part.shard
    return f"    {part.name}: h [{shard.first}, {shard.last}) of {shard.total}; {axes}"


# --- the overview ----------------------------------------------------------------


def _overview(plan: Plan[Any]) -> Iterator[str]:
    feeding = [key for key, peer in plan.peers.items() if _feeds(peer)]
    idle = [key for key, peer in plan.peers.items() if not _feeds(peer)]
    held = sum(peer.rows_bytes for peer in plan.peers.values())
    yield (
        f"{len(feeding)} of {len(plan.peers)} producer ranks feed this consumer;"
        f" the plan holds {bytes_of(held)}"
    )
    if idle:
        yield f"nothing is read from {ranks(idle)}"
    for group in plan.groups.values():
        yield _group_line(group)


def _feeds(peer: PeerPlan[Any]) -> bool:
    return bool(peer.sections or peer.bulk)


def _group_line(group: GroupLayout) -> str:
    layers = len({field.layer for field in group.fields})
    parts = [f"group {group.name}: {layers} {plural('layer', layers)}"]
    if group.block_size:
        parts.append(f"{group.blocks:,} blocks of {tokens(group.block_size)}")
    else:
        parts.append(f"{group.blocks:,} state slots")
    if group.window is not None:
        parts.append(f"a window of {tokens(group.window)}")
    if group.context_size > 1:
        parts.append(
            f"context rank {group.context_rank} of {group.context_size}, in turns of"
            f" {tokens(group.context_interleave)}"
        )
    return ", ".join(parts)


# --- ranks -----------------------------------------------------------------------


class _Rank(NamedTuple):
    """One rank, with what it provides: folded shares, one tuple for equal layers."""

    peer: PeerPlan[Any]
    folds: list[list[Share]]

    @property
    def shape(self) -> list[object]:
        """Equal for ranks that are told together."""
        layers = [[share.field.layer for share in fold] for fold in self.folds]
        shapes = [fold[0].shape for fold in self.folds]
        sections: list[Section | BulkSection] = [*self.peer.sections, *self.peer.bulk]
        sizes = [
            (s.local_memory, s.remote_memory, len(s.remote_rows)) for s in sections
        ]
        return [layers, shapes, sizes]


def _alike(plan: Plan[Any]) -> Iterator[list[_Rank]]:
    ranks = [
        _Rank(
            peer,
            list(folded(shares_of(plan, peer), lambda s: (s.shape, s.first))),
        )
        for peer in plan.peers.values()
        if _feeds(peer)
    ]
    for _, members in groupby(ranks, key=lambda rank: rank.shape):
        yield list(members)


def _of_ranks(members: Sequence[_Rank]) -> Iterator[str]:
    names = ranks([member.peer.key for member in members])
    yield f"from {names}" + (", alike:" if len(members) > 1 else ":")
    for section in members[0].peer.sections:
        yield (
            f"  {section.remote_memory} to {section.local_memory},"
            f" {len(section.remote_rows):,} rows there,"
            f" {len(section.local_rows):,} here"
        )
        for stratum in section.strata:
            yield from _of_stratum(stratum)
            yield from _of_folds(members, section, stratum.key)
    yield from _of_bulk(members)


def _of_folds(
    members: Sequence[_Rank], section: Section | BulkSection, key: StratumKey
) -> Iterator[str]:
    is_bulk = isinstance(section, BulkSection)
    for number, fold in enumerate(members[0].folds):
        share = fold[0]
        if (share.stratum, share.is_bulk, share.field.memory) == (
            key,
            is_bulk,
            section.local_memory,
        ):
            yield from _of_fold([rank.folds[number] for rank in members])


def _of_bulk(members: Sequence[_Rank]) -> Iterator[str]:
    """What lands in a staging buffer, and why, if there was a choice."""
    peer = members[0].peer
    alike = folded(peer.bulk, lambda bulk: (bulk.key, bulk.local_memory))
    for sections in alike:
        bulk = sections[0]
        images = sum(len(section.images) for section in sections)
        lengths = sorted({section.image_bytes for section in sections})
        yield (
            f"  group {bulk.key.group} in bulk, {bulk.remote_memory} to"
            f" {bulk.local_memory}: {images:,} {plural('image', images)} a kernel block"
            f" there, {_between(lengths)} each, rearranged here"
        )
        yield from _of_folds(members, bulk, bulk.key)
    for choice in peer.choices:
        if choice.bulk is not None:
            yield (
                f"  group {choice.group} lands {_LANDS[choice.landing]}; the cost model"
                f" says for a kernel block there: direct {_estimate(choice.direct)},"
                f" bulk {_estimate(choice.bulk)}"
            )


def _estimate(estimate: Estimate) -> str:
    return (
        f"{estimate.seconds * 1e6:,.0f} us ({estimate.descriptors:,}"
        f" {plural('descriptor', estimate.descriptors)},"
        f" {bytes_of(estimate.bytes)})"
    )


def _of_stratum(stratum: Stratum) -> Iterator[str]:
    key, runs = stratum.key, stratum.run_bytes
    length = _between([int(runs.min()), int(runs.max())])
    if not key.unit_tokens:
        yield (
            f"  group {key.group}: {runs.size:,} {plural('descriptor', runs.size)} a"
            f" slot, {length} each; {stratum.unit_bytes:,} bytes a slot"
        )
        return
    units = key.local.block_size // key.unit_tokens
    yield (
        f"  group {key.group}: units of {tokens(key.unit_tokens)} (kernel blocks of"
        f" {key.local.kernel_tokens} here, {key.remote.kernel_tokens} there)"
    )
    yield (
        f"    {runs.size:,} {plural('descriptor', runs.size)} a unit,"
        f" {runs.size * units:,} a block, {length}"
        f" each; {stratum.unit_bytes // key.unit_tokens:,} bytes a token"
    )


def _between(lengths: Sequence[int]) -> str:
    first, last = lengths[0], lengths[-1]
    return f"{first:,} bytes" if first == last else f"{first:,} to {last:,} bytes"


def _of_fold(folds: Sequence[Sequence[Share]]) -> Iterator[str]:
    """Equal layers of equal ranks: ``folds[rank][layer]``."""
    share = folds[0][0]
    name = share.field.name
    if share.part.name != name:
        name = f"{name}.{share.part.name}"
    layers = fold_names([each.field.layer for each in folds[0]])
    yield (
        f"    {layers} {name} {share.field.dtype}:"
        f" {_held([fold[0] for fold in folds])}; {share.runs:,}"
        f" {plural('run', share.runs)} of {share.run_bytes:,} bytes a"
        f" {'unit' if share.stratum.unit_tokens else 'slot'}"
    )
    yield f"      {why_it_ends(share)}"


def _held(shares: Sequence[Share]) -> str:
    total = shares[0].part.shard.total
    if total == 1:
        return "replicated"
    ranges = dict.fromkeys((share.first, share.last) for share in shares)
    if len(ranges) > _RANGES:
        sizes = sorted({last - first for first, last in ranges})
        each = " or ".join(map(str, sizes))
        (first, _), (_, last) = min(ranges), max(ranges)
        return f"h [{first}, {last}) of {total}, {each} a rank"
    return f"h {' '.join(f'[{first}, {last})' for first, last in ranges)} of {total}"


def why_it_ends(share: Share) -> str:
    """Which axis ends a run, with its steps on both sides; "short" if it matters."""
    short = "short: " if share.posted_bytes < SHORT_RUN_BYTES else ""
    if share.is_bulk and share.run_bytes < SHORT_RUN_BYTES:
        short = "short, so in bulk: "
    elif share.posted_bytes > share.run_bytes:
        return f"{short}joined with its neighbours to {share.posted_bytes:,} bytes"
    stopper = share.stopper()
    if stopper is None:
        return short + _whole_unit(share)
    here, there = stopper.local_stride, stopper.remote_stride
    if share.run_bytes == here:
        side = "it goes on here, not there"
    elif share.run_bytes == there:
        side = "it goes on there, not here"
    else:
        side = "neither side goes on"
    return (
        f"{short}ends at axis {stopper.axis}: {here:,} bytes here, {there:,} there"
        f" ({side})"
    )


def _whole_unit(share: Share) -> str:
    key = share.stratum
    if not key.unit_tokens:
        return "the whole share of a slot"
    here, there = key.local.kernel_tokens, key.remote.kernel_tokens
    if here == there == key.unit_tokens:
        return "the whole share of a kernel block"
    return (
        f"the whole unit: {tokens(key.unit_tokens)} are what blocks of {here} here and"
        f" {there} there have in common"
    )


# --- a request -------------------------------------------------------------------


def _of_request(plan: Plan[Any], num_tokens: int) -> Iterator[str]:
    head = f"a request of {tokens(num_tokens)}"
    local, remote = _spans(plan, num_tokens)
    try:
        selection = plan.select(num_tokens=num_tokens, local=local, remote=remote)
    except FerryError as exc:
        yield f"{head} is refused: {exc}"
        return
    yield (
        f"{head}: {selection.descriptors:,} descriptors, {bytes_of(selection.bytes)},"
        f" shortest run {selection.shortest_run:,} bytes;"
        f" {selection.zeroed_slots:,} token {plural('slot', selection.zeroed_slots)}"
        " zeroed behind it"
    )
    moved = {
        key: (sum(p.descriptors for p in parts), sum(p.bytes for p in parts))
        for key, parts in selection.peers.items()
    }
    for keys in folded(moved, moved.__getitem__):
        descriptors, size = moved[keys[0]]
        each = "each of " if len(keys) > 1 else ""
        yield f"  from {each}{ranks(keys)}: {descriptors:,} descriptors, {bytes_of(size)}"


def _spans(plan: Plan[Any], num_tokens: int) -> tuple[dict[str, Span], dict[str, Span]]:
    """The first blocks of both pools, one slot of a state."""
    local = {
        name: _first_blocks(group.block_size * group.context_size, num_tokens)
        for name, group in plan.groups.items()
    }
    remote = {
        key.group: _first_blocks(key.remote.span_grain, num_tokens)
        for peer in plan.peers.values()
        for key in _keys(peer)
    }
    return local, remote


def _keys(peer: PeerPlan[Any]) -> Iterator[StratumKey]:
    for section in peer.sections:
        yield from (stratum.key for stratum in section.strata)
    yield from (bulk.key for bulk in peer.bulk)


def _first_blocks(block_tokens: int, num_tokens: int) -> Span:
    return Span(range(-(-num_tokens // block_tokens) if block_tokens else 1))
