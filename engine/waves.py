"""Waves: a request's descriptors cut into slices that are posted at once.

Bounded, because a post can block the loop for as long as its bytes take
(nixl-facts row 2), and because a cancelled pull waits for what is in flight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, overload

from kvferry.engine.selection import BulkSelection

if TYPE_CHECKING:
    from kvferry.engine.selection import SectionSelection, Selection
    from kvferry.protocol.identity import EngineKey

__all__ = ("Wave", "Waves")


class Wave(NamedTuple):
    """Descriptors to post at once.

    Attributes:
        source: Number of the peer that they are read from.
        selected: The descriptors of a section, of which this wave is a slice.
        slice: Which of them.
    """

    source: int
    selected: SectionSelection
    slice: slice

    @property
    def is_bulk(self) -> bool:
        """Whether it lands in the staging buffer."""
        return isinstance(self.selected, BulkSelection)

    @property
    def bytes(self) -> int:
        """How many bytes it moves."""
        return self.selected.bytes_of(self.slice)


class Waves(Sequence[Wave]):
    """A selection cut into waves that take turns between its peers.

    Made where they are asked for: there may be thousands, and the loop waits for none.

    Args:
        selection: Keyed by the peers of `keys`; it may lack some.
        keys: The peers, in the order that numbers them.
        max_bytes: Bound of one wave; a longer single run is a wave of its own.

    Attributes:
        sources: The number of each wave's peer.
    """

    def __init__(
        self,
        selection: Selection[EngineKey],
        keys: Sequence[EngineKey],
        *,
        max_bytes: int,
    ) -> None:
        self._lanes = [_Lane(selection.peers.get(key, ()), max_bytes) for key in keys]
        counts = [len(lane) for lane in self._lanes]
        self._rounds: list[_Round] = []
        sources: list[int] = []
        before = 0
        for count in sorted({*counts} - {0}):
            members = [n for n, waves in enumerate(counts) if waves > before]
            self._rounds.append(_Round(len(sources), before, members))
            sources += members * (count - before)
            before = count
        self.sources = tuple(sources)

    @property
    def are_bulk(self) -> bool:
        """Whether any of them lands in the staging buffer."""
        for lane in self._lanes:
            # Numbered behind the others.
            if lane.parts and isinstance(lane.parts[-1], BulkSelection):
                return True
        return False

    def __len__(self) -> int:
        return len(self.sources)

    @overload
    def __getitem__(self, number: int) -> Wave: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Wave]: ...

    def __getitem__(self, number: int | slice) -> Wave | Sequence[Wave]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        number = range(len(self))[number]  # also one counted from the end
        at = bisect_right(self._rounds, number, key=attrgetter("first")) - 1
        first, turn, members = self._rounds[at]
        source = self.sources[number]
        turn += (number - first) // len(members)
        return Wave(source, *self._lanes[source].wave(turn))


class _Round(NamedTuple):
    """Waves in which the same lanes take turns.

    Attributes:
        first: Number of the first of them.
        turn: Which of its lane's waves that is.
        members: Whose turns they are.
    """

    first: int
    turn: int
    members: Sequence[int]


class _Lane:
    """The waves of one peer, part by part."""

    def __init__(self, parts: Sequence[SectionSelection], max_bytes: int) -> None:
        self.parts = parts
        self._ends = [part.wave_ends(max_bytes) for part in parts]
        self._firsts = [0, *accumulate(map(len, self._ends))]

    def __len__(self) -> int:
        return self._firsts[-1]

    def wave(self, number: int) -> tuple[SectionSelection, slice]:
        at = bisect_right(self._firsts, number) - 1
        ends, turn = self._ends[at], number - self._firsts[at]
        first = ends[turn - 1] if turn else 0
        return self.parts[at], slice(first, ends[turn])
