"""`Selection`: what one request moves and zeroes, by peer and section, and its waves.

Numbers only, made by `kvferry.engine.selector`. Owned here: how descriptors are cut into
waves. Not here: posting, waves in flight, or the zeroing itself.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from kvferry.protocol.ranges import Ranges

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from kvferry.engine.descriptors import DescriptorIds
    from kvferry.engine.images import BulkSection

    Ids = npt.NDArray[np.int64]

__all__ = ("BulkSelection", "Piece", "SectionSelection", "Selection", "Tail")

KeyT = TypeVar("KeyT", bound="Hashable")


class Tail(NamedTuple):
    """Token slots to zero once a transfer is confirmed.

    Attributes:
        group: An attention group.
        block_ids: Logical ids of the local blocks, int64, in token order.
        first_slot: First own token slot to zero in the first of them; the others are
            zeroed whole.
        slots: How many token slots that is.
    """

    group: str
    block_ids: Ids
    first_slot: int
    slots: int


@dataclass(frozen=True, eq=False)
class SectionSelection:
    """The descriptors of one section that a request needs, in the order to post them.

    Attributes:
        index: Which of the `PeerPlan.sections` it belongs to, those in bulk counted
            behind the others.
        local_ids, remote_ids: ``[D]``, paired.
        stretches: Neighbouring descriptors of equal runs: bytes of each, and how many.
    """

    index: int
    local_ids: DescriptorIds
    remote_ids: DescriptorIds
    stretches: Sequence[tuple[int, int]]

    @property
    def descriptors(self) -> int:
        """How many descriptors."""
        return self.remote_ids.size

    @cached_property
    def bytes(self) -> int:
        """How many bytes they move."""
        return sum([run * count for run, count in self.stretches])

    @cached_property
    def shortest_run(self) -> int:
        """Bytes of the shortest descriptor."""
        return min(run for run, _ in self.stretches)

    def run_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each descriptor, ``[D]``; built anew at each call."""
        runs, counts = zip(*self.stretches, strict=True)
        return np.repeat(np.array(runs), counts)

    def mirrored(self) -> SectionSelection:
        """Seen from the producer, which then is the local side: for a push."""
        return replace(self, local_ids=self.remote_ids, remote_ids=self.local_ids)

    def wave_ends(self, max_bytes: int) -> list[int]:
        """Cut into waves of as many descriptors as fit: where each of them ends.

        A descriptor longer than ``max_bytes`` is a wave of its own. Costs some
        microseconds a stretch of equal runs, and next to nothing a wave.
        """
        ends: list[int] = []
        at = room = 0  # where we are, and what the wave that is open there still takes
        for run, count in self.stretches:
            stop = at + count
            if at:
                fit = max(room, 0) // run
                if at + fit >= stop:
                    at, room = stop, room - run * (stop - at)
                    continue
                at += fit
                ends.append(at)
            size = max(max_bytes // run, 1)
            before = (stop - at - 1) // size  # the last one may take more than these
            ends.extend(range(at + size, at + size * before + 1, size))
            at, room = stop, max_bytes - run * (stop - at - size * before)
        ends.append(at)
        return ends

    def waves(self, max_bytes: int) -> Iterator[slice]:
        """These waves as slices of the ids."""
        first = 0
        for last in self.wave_ends(max_bytes):
            yield slice(first, last)
            first = last

    def bytes_of(self, wave: slice) -> int:
        """Bytes that one of its waves moves."""
        if wave.stop - wave.start == self.descriptors:
            return self.bytes  # most requests are one wave
        return self._bytes_before(wave.stop) - self._bytes_before(wave.start)

    def _bytes_before(self, first: int) -> int:
        ends, byte_ends = self._ends
        at = bisect_right(ends, first)
        if at == len(ends):
            return self.bytes
        return byte_ends[at] - (ends[at] - first) * self.stretches[at][0]

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """Of each stretch: descriptors and bytes up to its end."""
        return (
            list(accumulate(count for _, count in self.stretches)),
            list(accumulate(run * count for run, count in self.stretches)),
        )


class Piece(NamedTuple):
    """What a wave brings of one image of a bulk section: some blocks, all their units.

    Attributes:
        number: Which of the section's images.
        slot: Of the first block, counted from the wave's first.
        blocks: How many blocks.
        local: Kernel block and place here of each unit, ``[U]`` each.
        remote: Its block, counted from the first, and its place there.
        is_whole: Every place of every block is wanted, in order.
    """

    number: int
    slot: int
    blocks: int
    local: tuple[Ids, Ids]
    remote: tuple[Ids, Ids]
    is_whole: bool


@dataclass(frozen=True, eq=False)
class BulkSelection(SectionSelection):
    """The images of one bulk section that a request needs: each at each block.

    There are no local ids before a wave has been given room in the staging buffer.

    Attributes:
        section: The section.
        firsts: Number of the first unit of each block, and of all units, ``[B + 1]``.
        local, remote: Block and place of each unit, on either side, ``[U]`` each.
    """

    section: BulkSection
    firsts: Ids
    local: tuple[Ids, Ids]
    remote: tuple[Ids, Ids]

    def pieces(self, wave: slice) -> Iterator[Piece]:
        """What a wave consists of."""
        blocks = self.firsts.size - 1
        at = wave.start
        while at < wave.stop:
            number, first = divmod(at, blocks)
            last = min(blocks, first + wave.stop - at)
            units = slice(self.firsts[first], self.firsts[last])
            count = units.stop - units.start
            yield Piece(
                number,
                at - wave.start,
                last - first,
                (self.local[0][units], self.local[1][units]),
                (self.remote[0][units] - first, self.remote[1][units]),
                count == (last - first) * self.section.key.remote_places,
            )
            at += last - first


@dataclass(frozen=True, slots=True, eq=False)
class Selection(Generic[KeyT]):
    """Everything one request moves and zeroes.

    Attributes:
        peers: By remote rank; ranks that this request reads nothing from are left out.
        written: Of each part of a group, the tokens (for a state: list positions)
            whose local bytes change.
        tails: What to zero after the confirmation; due even if nothing moves.
    """

    peers: Mapping[KeyT, tuple[SectionSelection, ...]]
    written: Sequence[tuple[str, tuple[int, int]]]
    tails: tuple[Tail, ...]

    @property
    def untrusted(self) -> dict[str, Ranges]:
        """Per group what is written, of no worth until the request is confirmed.

        Groups that get nothing are left out.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for group, tokens in self.written:
            found.setdefault(group, []).append(tokens)
        return {group: Ranges.of(pairs) for group, pairs in found.items()}

    @property
    def bytes(self) -> int:
        """Bytes to move, of all peers."""
        return sum([part.bytes for parts in self.peers.values() for part in parts])

    @property
    def bulk_bytes(self) -> int:
        """How many of them land in bulk."""
        return sum(
            [
                part.bytes
                for parts in self.peers.values()
                for part in parts
                if isinstance(part, BulkSelection)
            ]
        )

    @property
    def descriptors(self) -> int:
        """Descriptors of all peers."""
        parts = [part for parts in self.peers.values() for part in parts]
        return sum([part.descriptors for part in parts])

    @property
    def shortest_run(self) -> int:
        """Bytes of the shortest descriptor; 0 if nothing moves."""
        parts = (part for parts in self.peers.values() for part in parts)
        return min((part.shortest_run for part in parts), default=0)

    @property
    def zeroed_slots(self) -> int:
        """Token slots to zero, of all attention groups."""
        return sum([tail.slots for tail in self.tails])
