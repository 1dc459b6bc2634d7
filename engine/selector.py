"""One request against a plan: spans to index arrays, numpy only, no loop over blocks.

Pairs units by absolute token position. Owned here: which tokens of a group are
wanted, which descriptors carry them, and what must be zeroed behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from kvferry.engine.descriptors import DescriptorIds
from kvferry.engine.selection import BulkSelection, SectionSelection, Selection, Tail
from kvferry.engine.spans import (
    Placement,
    Side,
    Span,
    check_distinct,
    span_ids,
)
from kvferry.protocol.errors import FerryInternalError, ImpossiblePlan, UnknownBlock

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from kvferry.engine.images import BulkSection
    from kvferry.engine.sections import PeerPlan, Section, Stratum, StratumKey
    from kvferry.protocol.layout import GroupLayout

    Ids = npt.NDArray[np.int64]

__all__ = ("Clip", "Selector")

KeyT = TypeVar("KeyT", bound="Hashable")


class Clip(NamedTuple):
    """A part of a request: what has become ready just now.

    A request's clips, taken together, select every descriptor exactly once.

    Attributes:
        ready: Tokens ``[first, last)`` around the new ones that are all ready.
        new: Tokens ``[first, last)`` in it that were not ready before.
    """

    ready: tuple[int, int]
    new: tuple[int, int]


class _Units(NamedTuple):
    """The units of one stratum: ``place * kernel blocks + kernel block`` on each side,
    int32 by `MAX_DESCRIPTORS`."""

    local: npt.NDArray[np.int32]
    remote: npt.NDArray[np.int32]
    tokens: tuple[int, int]
    """Absolute tokens ``[first, last)``, rounded to units; list positions of a state."""


class _Blocks(NamedTuple):
    """The units of one stratum by the blocks that they are read with.

    Attributes:
        heads: Kernel block of each, on the producer; int32 ``[B]``.
        firsts: Number of the first unit of each, and of all units; ``[B + 1]``.
        local, remote: As in `BulkSelection`.
    """

    heads: npt.NDArray[np.int32]
    firsts: Ids
    local: tuple[Ids, Ids]
    remote: tuple[Ids, Ids]


class Selector:
    """One request's numbers, computed once and shared by all peers and sections.

    Single use: make one per request.
    """

    def __init__(
        self,
        groups: Mapping[str, GroupLayout],
        *,
        num_tokens: int,
        computed_tokens: int,
        local: Mapping[str, Span],
        remote: Mapping[str, Span],
        clip: Clip | None = None,
    ) -> None:
        if num_tokens < 0 or computed_tokens < 0:
            raise ImpossiblePlan(
                f"num_tokens {num_tokens} and computed_tokens {computed_tokens} must"
                " not be negative"
            )
        self._groups = groups
        self._num_tokens = num_tokens
        self._computed_tokens = computed_tokens
        self._clip = clip
        self._spans = {
            "consumer": _spans_of(local, groups, "consumer"),
            "producer": _spans_of(remote, groups, "producer")
            if computed_tokens < num_tokens
            else {},
        }
        self._placements: dict[tuple[str, str, Side], Placement] = {}
        self._units: dict[StratumKey, _Units | None] = {}
        self._blocks: dict[StratumKey, _Blocks] = {}

    def select(self, peers: Mapping[KeyT, PeerPlan[KeyT]]) -> Selection[KeyT]:
        """The descriptors of all peers, the untrusted ranges and the tails.

        Raises:
            UnknownBlock: A block is not in its pool, listed twice, or missing.
            ImpossiblePlan: Spans or token counts that do not fit the units.
        """
        for name, (_, ids) in self._spans["consumer"].items():
            check_distinct(ids, group=name, side="consumer")
        tails = tuple(self._tails())
        found: dict[KeyT, tuple[SectionSelection, ...]] = {}
        if self._computed_tokens < self._num_tokens:
            for key, peer in peers.items():
                parts = (*self._sections(peer.sections), *self._bulk(peer))
                if parts:
                    found[key] = parts
            self._check_partition()
        return Selection(found, self._written(), tails)

    def _sections(self, sections: Sequence[Section]) -> Iterator[SectionSelection]:
        for index, section in enumerate(sections):
            chosen = [(s, self._stratum_units(s.key)) for s in section.strata]
            present = [(s, units) for s, units in chosen if units is not None]
            if present:
                yield _section_selection(index, present)

    def _bulk(self, peer: PeerPlan[KeyT]) -> Iterator[SectionSelection]:
        for index, section in enumerate(peer.bulk, start=len(peer.sections)):
            units = self._stratum_units(section.key)
            if units is not None:
                yield self._bulk_selection(index, section, units)

    def _bulk_selection(
        self, index: int, section: BulkSection, units: _Units
    ) -> BulkSelection:
        key, images = section.key, len(section.images)
        if key not in self._blocks:
            self._blocks[key] = _read_blocks(key, units)
        heads, firsts, local, remote = self._blocks[key]
        pool = key.remote.kernel_blocks
        base = np.arange(0, images * pool, pool, dtype=np.int32)
        remote_ids = DescriptorIds([(base, heads)])
        return BulkSelection(
            index,
            DescriptorIds(),
            remote_ids,
            [(section.image_bytes, remote_ids.size)],
            section,
            firsts,
            local,
            remote,
        )

    def _stratum_units(self, key: StratumKey) -> _Units | None:
        if key not in self._units:
            make = self._token_units if key.unit_tokens else self._slot_units
            self._units[key] = make(key)
        return self._units[key]

    def _token_units(self, key: StratumKey) -> _Units | None:
        # Both first: a block outside its pool is refused by every rank alike, also
        # by those that hold none of the wanted tokens.
        local = self._placement("consumer", key.group, key.local)
        remote = self._placement("producer", key.group, key.remote)
        first, last = self._wanted(key)
        if first >= last:
            return None
        unit = key.unit_tokens
        for placement in (local, remote):  # blocks of either may be of any size
            placement.check_reach(first, last)
        tokens: range | Ids = range(first, last, unit)
        for side in (key.local, key.remote):
            tokens = side.context.held(tokens)
        if not len(tokens):
            return None
        return _Units(
            local.units(tokens, unit).astype(np.int32),
            remote.units(tokens, unit).astype(np.int32),
            (first, last),
        )

    def _slot_units(self, key: StratumKey) -> _Units | None:
        local = self._placement("consumer", key.group, key.local)
        remote = self._placement("producer", key.group, key.remote)
        slots = local.ids.size
        if slots != remote.ids.size:
            raise ImpossiblePlan(
                f"group {key.group!r}: {slots} consumer slots against"
                f" {remote.ids.size} producer slots"
            )
        for placement in (local, remote):
            if not placement.is_full:
                raise UnknownBlock(
                    f"group {key.group!r}: a {placement.name} slot is None"
                )
        if not slots or not self._is_all_ready():
            return None
        return _Units(
            local.ids.astype(np.int32), remote.ids.astype(np.int32), (0, slots)
        )

    def _wanted(self, key: StratumKey) -> tuple[int, int]:
        """Tokens to move, rounded to units.

        The end is rounded up: the last unit brings stale bytes of the producer,
        which the tail zeroes. The beginning is rounded down, but never into what
        the consumer has computed itself.
        """
        unit, last = key.unit_tokens, self._num_tokens
        first = self._computed_tokens
        window = self._groups[key.group].window
        if window is not None:
            reach = last - window + 1
            if reach >= last:
                return (last, last)
            first = max(first, reach // unit * unit)
        if first % unit:
            raise ImpossiblePlan(
                f"group {key.group!r}: computed_tokens {first} is not a multiple of"
                f" {unit}, the tokens that both sides' blocks have in common"
            )
        last = -(-last // unit) * unit
        if self._clip is None:
            return first, last
        return self._clipped(self._clip, (first, last), unit)

    def _clipped(
        self, clip: Clip, wanted: tuple[int, int], unit: int
    ) -> tuple[int, int]:
        """Units that are ready as a whole, and were not before.

        The last one is when all of its wanted tokens are: behind the request there is
        nothing to wait for.
        """
        first, last = wanted
        (begin, end), (new_first, new_last) = clip
        if end < self._num_tokens:
            last = min(last, end // unit * unit)
        first = max(first, -(-begin // unit) * unit, new_first // unit * unit)
        return first, min(last, -(-new_last // unit) * unit)

    def _is_all_ready(self) -> bool:
        """A state is whole: it goes when the last token of the request is there."""
        return self._clip is None or self._clip.new[1] >= self._num_tokens

    def _placement(self, name: str, group: str, side: Side) -> Placement:
        key = (name, group, side)
        if key not in self._placements:
            span, ids = self._spans[name][group]
            self._placements[key] = Placement.of(
                side, span, ids, group=group, name=name
            )
        return self._placements[key]

    def _tails(self) -> Iterator[Tail]:
        # Beyond what the consumer computed itself, should that be more than asked.
        token = max(self._num_tokens, self._computed_tokens)
        for name, group in self._groups.items():
            placement = self._placement("consumer", name, Side.of(group))
            if group.block_size:
                ids, slot = placement.tail(token)
                if ids.size:
                    slots = ids.size * group.block_size - slot
                    yield Tail(name, ids, slot, slots)

    def _check_partition(self) -> None:
        """Every wanted token that the consumer holds comes from exactly one rank.

        Raises:
            FerryInternalError: The sources' tokens are not the wanted ones.
        """
        shares: dict[tuple[object, ...], dict[int, int]] = {}
        members: dict[tuple[object, ...], StratumKey] = {}  # any one of each
        same: tuple[object, ...]
        for key, units in self._units.items():
            if key.unit_tokens:
                size, rank, interleave = key.remote.context
                same = (key.group, key.local, key.unit_tokens, size, interleave)
                tokens = units.local.size * key.unit_tokens if units else 0
                shares.setdefault(same, {})[rank] = tokens
                members[same] = key
        for same, key in members.items():
            # Ranks with other units than these have rounded elsewhere.
            if len(shares[same]) == key.remote.context.size:
                context = key.local.context
                units = self._units[key]
                first, last = units.tokens if units else self._wanted(key)
                wanted = context.own_before(last) - context.own_before(first)
                given = sum(shares[same].values())
                if given != max(wanted, 0):
                    raise FerryInternalError(
                        f"group {key.group!r}: {given} tokens planned, {wanted} wanted"
                    )

    def _written(self) -> list[tuple[str, tuple[int, int]]]:
        return [
            (key.group, units.tokens)
            for key, units in self._units.items()
            if units is not None
        ]


def _spans_of(
    spans: Mapping[str, Span], groups: Mapping[str, GroupLayout], side: str
) -> dict[str, tuple[Span, Ids]]:
    if not groups.keys() <= spans.keys():
        missing = next(name for name in groups if name not in spans)
        raise UnknownBlock(f"group {missing!r}: no {side} blocks were given")
    return {
        name: (spans[name], span_ids(spans[name], group=name, side=side))
        for name in groups
    }


def _section_selection(
    index: int, chosen: Sequence[tuple[Stratum, _Units]]
) -> SectionSelection:
    return SectionSelection(
        index,
        DescriptorIds([(s.local_base, u.local) for s, u in chosen]),
        DescriptorIds([(s.remote_base, u.remote) for s, u in chosen]),
        [
            (run, pieces * u.local.size)
            for s, u in chosen
            for run, pieces in s.stretches
        ],
    )


def _read_blocks(key: StratumKey, units: _Units) -> _Blocks:
    place, block = np.divmod(units.remote.astype(np.int64), key.remote.kernel_blocks)
    is_first = np.ones(block.size + 1, dtype=np.bool_)
    # A block that is listed again, for other tokens, is read again.
    is_first[1:-1] = (block[1:] != block[:-1]) | (place[1:] <= place[:-1])
    firsts = np.flatnonzero(is_first)
    number = np.cumsum(is_first[:-1]) - 1
    local_place, local_block = np.divmod(
        units.local.astype(np.int64), key.local.kernel_blocks
    )
    heads = block[firsts[:-1]].astype(np.int32)
    return _Blocks(heads, firsts, (local_block, local_place), (number, place))
