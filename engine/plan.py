"""The planner: any layout to any layout, once per peer; any request, in microseconds.

::

    plan = prepare_plan(local_layout, {key: remote_layout, ...}, reader=0,
                        skip_groups=frozenset())          -> Plan[key]
    plan.peers[key].sections[i].local_rows / .remote_rows  # prepare these, once
    plan.peers[key].sections[i].local_memory / .remote_memory
    selection = plan.select(num_tokens=37, computed_tokens=16,
                            local={group: Span}, remote={group: Span})  -> Selection
    for key, parts in selection.peers.items():
        for part in parts:                                 # part.index: the section
            for wave in part.waves(max_bytes):             # slices
                part.local_ids[wave], part.remote_ids[wave]
    selection.untrusted, selection.tails, selection.bytes, selection.descriptors

*Local* is the consumer, where the bytes end up, and *remote* the producer's
ranks. A producer that pushes plans the same way, from the consumer's layout, reduced
to its own share by `kvferry.engine.claims`, and its own; it prepares the sections
mirrored, and posts writes.

Owned here: who provides what (`Holder`, replicas, missing layers), and that no
plan leaves without its proof of coverage. Runs are made in `runs`, rows in
`sections`, proofs in `coverage`, requests in `selection`.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, TypeVar

from kvferry.engine.cost import LandingPolicy
from kvferry.engine.coverage import prove_coverage, prove_inside, region_edges
from kvferry.engine.images import choose
from kvferry.engine.runs import Overlap, Pieces, check_pair, pair_parts
from kvferry.engine.sections import (
    MAX_ROWS,
    Contribution,
    PeerPlan,
    Section,
    StratumKey,
    build_sections,
)
from kvferry.engine.selection import SectionSelection, Selection, Tail
from kvferry.engine.selector import Clip, Selector
from kvferry.engine.spans import Context, Side, Span
from kvferry.engine.validity import check_layout, field_numbers
from kvferry.protocol.errors import ImpossiblePlan

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from kvferry.engine.coverage import Rows
    from kvferry.engine.images import BulkSection
    from kvferry.protocol.layout import (
        CacheLayout,
        FieldLayout,
        GroupLayout,
        Memory,
        PartLayout,
        Shard,
    )

__all__ = (
    "Clip",
    "Pairing",
    "PeerPlan",
    "Plan",
    "Section",
    "SectionSelection",
    "Selection",
    "Span",
    "Tail",
    "prepare_plan",
)

KeyT = TypeVar("KeyT", bound="Hashable")


@dataclass(frozen=True, slots=True, eq=False)
class Plan(Generic[KeyT]):
    """One consumer rank against all ranks of one producer instance.

    Attributes:
        peers: By remote rank, in the order given; ranks that nothing is read from
            have no sections.
        groups: The local groups that take part, by name.
    """

    peers: Mapping[KeyT, PeerPlan[KeyT]]
    groups: Mapping[str, GroupLayout]

    def select(
        self,
        *,
        num_tokens: int,
        local: Mapping[str, Span],
        remote: Mapping[str, Span],
        computed_tokens: int = 0,
        clip: Clip | None = None,
    ) -> Selection[KeyT]:
        """What one request moves and zeroes.

        Args:
            num_tokens: Tokens in the producer's cache.
            local, remote: Spans of every group of the plan, the consumer's and the
                producer's. Blocks beyond ``num_tokens`` get no bytes. ``remote`` is
                not looked at when nothing is to be moved.
            computed_tokens: The consumer holds the tokens before this one already.
            clip: Only what has become ready just now; everything by default.

        Raises:
            UnknownBlock: A block is not in its pool, listed twice on the consumer's
                side, ``None`` where data is needed, or missing.
            ImpossiblePlan: A span or ``computed_tokens`` does not begin where both
                sides' blocks allow it.
        """
        selector = Selector(
            self.groups,
            num_tokens=num_tokens,
            computed_tokens=computed_tokens,
            local=local,
            remote=remote,
            clip=clip,
        )
        return selector.select(self.peers)


def prepare_plan(
    local: CacheLayout,
    remotes: Mapping[KeyT, CacheLayout],
    *,
    reader: int = 0,
    skip_groups: frozenset[str] = frozenset(),
    policy: LandingPolicy = LandingPolicy(),  # noqa: B008 - frozen
    is_partial: bool = False,
) -> Plan[KeyT]:
    """Pair a consumer's layout with its producers', and prove that it is covered.

    Pure; costs milliseconds and is done once per pair of starts.

    Args:
        local: Where the bytes end up.
        remotes: All ranks of the producer's instance.
        reader: The consumer rank's number: readers of a replicated unit spread over
            its holders by it.
        skip_groups: Local groups that the caller has agreed not to transfer.
        policy: Whether short runs may land in bulk; by default all land directly.
        is_partial: ``remotes`` are not all ranks, and ``local`` is what these are to
            fill (`kvferry.engine.claims`): tokens of other context ranks are theirs.

    Raises:
        ImpossiblePlan: The layouts cannot be paired, or one of them contradicts
            itself; names the fact and both values.
        FerryInternalError: The proof of coverage failed.
    """
    check_layout(local, side="consumer")
    for key, remote in remotes.items():
        check_layout(remote, side=f"producer {key}")
    groups = {g.name: g for g in local.groups if g.name not in skip_groups}
    pairing = Pairing(remotes, reader, is_partial=is_partial)
    contributions: dict[KeyT, list[Contribution]] = {key: [] for key in remotes}
    rows = 0
    for group in groups.values():
        for key, contribution in pairing.of_group(group):
            rows += contribution.most_rows
            if rows > MAX_ROWS:
                raise ImpossiblePlan(f"a plan of more than {MAX_ROWS} rows")
            contributions[key].append(contribution)
    local_edges = region_edges(local.regions)
    peers = {}
    for key, remote in remotes.items():
        edges = (local_edges, region_edges(remote.regions))
        chosen = choose(contributions[key], policy, edges=edges, regions=remote.regions)
        sections = build_sections(
            chosen.direct, local_edges=edges[0], remote_edges=edges[1]
        )
        peers[key] = PeerPlan(key, sections, chosen.bulk, chosen.choices)
    _prove(local, remotes, groups, peers)
    return Plan(peers, groups)


class Holder(NamedTuple, Generic[KeyT]):
    """One remote rank's share of one part."""

    key: KeyT
    group: GroupLayout
    field: FieldLayout
    part: PartLayout


class Share(NamedTuple, Generic[KeyT]):
    """The units of a local part that one remote rank provides."""

    field: FieldLayout
    part: PartLayout
    holder: Holder[KeyT]
    overlap: Overlap


class Pairing(Generic[KeyT]):
    """Finds, for every local part, who provides which units of it.

    Lives for one plan; remembers geometries, so that equal layers cost one look-up.

    Args:
        remotes: As in `prepare_plan`.
        reader: As in `prepare_plan`.
        is_partial: As in `prepare_plan`.
    """

    def __init__(
        self,
        remotes: Mapping[KeyT, CacheLayout],
        reader: int,
        *,
        is_partial: bool = False,
    ) -> None:
        self._reader = reader
        self._is_partial = is_partial
        self._holders: dict[tuple[str, ...], list[Holder[KeyT]]] = defaultdict(list)
        self._known: dict[tuple[object, ...], tuple[StratumKey, Pieces]] = {}
        self._contexts: dict[str, dict[Context, set[KeyT]]] = defaultdict(dict)
        for key, layout in remotes.items():
            for group in layout.groups:
                context = Side.of(group).context
                self._contexts[group.name].setdefault(context, set()).add(key)
                for field in group.fields:
                    for part in field.parts:
                        place = (group.name, field.layer, field.name, part.name)
                        self._holders[place].append(Holder(key, group, field, part))

    def of_reader(self, reader: int) -> Self:
        """The same for another consumer rank."""
        other = copy.copy(self)
        other._reader = reader  # noqa: SLF001 - one of us
        other._known = {}  # noqa: SLF001 - of the groups of one rank, which may differ
        return other

    def of_group(self, group: GroupLayout) -> Iterator[tuple[KeyT, Contribution]]:
        """What each remote rank contributes to a local group."""
        for share in self.shares(group):
            yield share.holder.key, self._contribution(group, share)

    def shares(self, group: GroupLayout) -> Iterator[Share[KeyT]]:
        """Who provides what of a local group."""
        if not self._is_partial:
            _check_contexts(group.name, list(self._contexts[group.name]))
        for field in group.fields:
            for part in field.parts:
                for holders in self._by_context(group, field, part):
                    for holder, overlap in assign(field, part, holders, self._reader):
                        yield Share(field, part, holder, overlap)

    def _by_context(
        self, group: GroupLayout, field: FieldLayout, part: PartLayout
    ) -> Iterator[list[Holder[KeyT]]]:
        """The holders of a part, one list for each class of tokens."""
        place = (group.name, field.layer, field.name, part.name)
        holders = self._holders.get(place, [])
        if not holders:
            raise ImpossiblePlan(
                f"group {group.name!r}: no producer rank has layer {field.layer!r}"
                f" field {field.name!r} part {part.name!r}"
            )
        for holder in holders:
            check_pair(field, part, holder.field, holder.part)
        for keys in self._contexts[group.name].values():
            yield [holder for holder in holders if holder.key in keys]

    def _contribution(self, group: GroupLayout, share: Share[KeyT]) -> Contribution:
        field, part, holder, overlap = share
        geometry = (
            group.name,
            holder.key,
            *field_numbers(field),
            *field_numbers(holder.field),
            part.axes,
            part.shard,
            holder.part.axes,
            holder.part.shard,
            overlap,
        )
        if geometry not in self._known:
            self._known[geometry] = _pieces(group, share)
        key, pieces = self._known[geometry]
        return Contribution(
            key,
            (field.memory, holder.field.memory),
            pieces,
            part.address,
            holder.part.address,
            field.device,
            holder.field.device,
            field.block_stride,
            holder.field.block_stride,
        )


def _pieces(group: GroupLayout, share: Share[KeyT]) -> tuple[StratumKey, Pieces]:
    """The runs of a share, and what its field has in common with others."""
    field, part, holder, overlap = share
    key = StratumKey(
        group.name,
        Side.of(group, field),
        Side.of(holder.group, holder.field),
        _unit_tokens(group, field, holder),
    )
    return key, pair_parts(
        part,
        holder.part,
        overlap,
        element_bytes=field.element_bytes,
        unit_tokens=key.unit_tokens,
    )


def _unit_tokens(group: GroupLayout, field: FieldLayout, holder: Holder[KeyT]) -> int:
    """The grain of the pair: tokens that lie together on both sides, wherever."""
    unit = math.gcd(field.block_tokens, holder.field.block_tokens)
    if (field.block_tokens == 0) != (holder.field.block_tokens == 0):
        raise ImpossiblePlan(
            f"group {group.name!r}: blocks of {field.block_tokens} tokens on the"
            f" consumer, of {holder.field.block_tokens} on the producer: one of them is"
            " a state"
        )
    for side in (group, holder.group):
        if side.context_size > 1:
            unit = math.gcd(unit, side.context_interleave)
    return unit


def _check_contexts(group: str, contexts: Sequence[Context]) -> None:
    """The producer's ranks share the tokens between them, none missing.

    Raises:
        ImpossiblePlan: They do not.
    """
    schemes = {(context.size, context.interleave) for context in contexts}
    ranks = sorted(context.rank for context in contexts)
    if contexts and (len(schemes) > 1 or ranks != list(range(contexts[0].size))):
        raise ImpossiblePlan(
            f"group {group!r}: the producer's context ranks do not share out all"
            f" tokens: {sorted(contexts)}"
        )


def assign(
    field: FieldLayout,
    part: PartLayout,
    holders: Sequence[Holder[KeyT]],
    reader: int,
) -> list[tuple[Holder[KeyT], Overlap]]:
    """Give every unit of a part to exactly one of its holders.

    Readers of a replicated unit spread over its holders by their number.

    Raises:
        ImpossiblePlan: Nobody holds a unit.
    """
    shards = tuple(holder.part.shard for holder in holders)
    given: list[tuple[Holder[KeyT], Overlap]] = []
    for number, overlap in _shared_out(part.shard, shards, reader):
        if number is None:
            raise ImpossiblePlan(
                f"layer {field.layer!r} field {field.name!r} part {part.name!r}: nobody"
                f" holds units [{overlap.first}, {overlap.last}) of {part.shard.total};"
                f" the holders have {[(s.first, s.last) for s in shards[:64]]}"
            )
        given.append((holders[number], overlap))
    return given


@lru_cache(maxsize=32)  # layers are mostly shared out alike
def _shared_out(
    wanted: Shard, shards: tuple[Shard, ...], reader: int
) -> tuple[tuple[int | None, Overlap], ...]:
    """Which of the shards provides which of the wanted units, by its number."""
    found: list[tuple[int | None, Overlap]] = []
    for first, last, having in _stretches(wanted, shards):
        number = having[reader % len(having)] if having else None
        if found and found[-1][0] == number:
            first = found.pop()[1].first  # noqa: PLW2901 - the range grows to the left
        found.append((number, Overlap(first, last)))
    return tuple(found)


def _stretches(
    wanted: Shard, shards: Sequence[Shard]
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """The wanted units in stretches of equal holders, with the holders' numbers.

    One sweep from left to right: many holders cost about their number, not its square.
    """
    changes: dict[int, list[int]] = {wanted.first: [], wanted.last: []}
    for number, shard in enumerate(shards):
        first, last = max(shard.first, wanted.first), min(shard.last, wanted.last)
        if first < last:
            changes.setdefault(first, []).append(number)
            changes.setdefault(last, []).append(number)
    having: list[int] = []
    for first, last in pairwise(sorted(changes)):
        for number in changes[first]:
            at = bisect_left(having, number)
            if having[at : at + 1] == [number]:
                del having[at]
            else:
                having.insert(at, number)
        yield first, last, having


def _prove(
    local: CacheLayout,
    remotes: Mapping[KeyT, CacheLayout],
    groups: Mapping[str, GroupLayout],
    peers: Mapping[KeyT, PeerPlan[KeyT]],
) -> None:
    """Every row inside registered memory on its side, every wanted byte written once."""
    rows: dict[tuple[str, Context, Memory], list[Rows]] = defaultdict(list)
    for key, peer in peers.items():
        for section in peer.sections:
            _prove_inside(section, local, remotes[key], key, written=section.local_rows)
            for stratum, its_rows in section.local_rows_by_stratum():
                context = stratum.key.remote.context
                rows[stratum.key.group, context, section.local_memory].append(its_rows)
        for bulk in peer.bulk:
            bulk.prove_read()
            context, written = bulk.key.remote.context, bulk.written_rows()
            rows[bulk.key.group, context, bulk.local_memory].append(written)
            _prove_inside(bulk, local, remotes[key], key, written=written)
    for name, group in groups.items():
        # A class of tokens is written by the ranks that hold it, wholly.
        for context in _contexts(remotes.values(), name):
            for memory in {field.memory for field in group.fields}:
                prove_coverage(
                    [field for field in group.fields if field.memory == memory],
                    rows[name, context, memory],
                    what=f"group {name!r}",
                )


def _prove_inside(
    section: Section | BulkSection,
    local: CacheLayout,
    remote: CacheLayout,
    key: Hashable,
    *,
    written: Rows,
) -> None:
    prove_inside(written, local.regions, memory=section.local_memory, side="consumer")
    prove_inside(
        section.remote_rows,
        remote.regions,
        memory=section.remote_memory,
        side=f"producer {key}",
    )


def _contexts(layouts: Iterable[CacheLayout], name: str) -> set[Context]:
    groups = (group for layout in layouts for group in layout.groups)
    return {Side.of(group).context for group in groups if group.name == name}
