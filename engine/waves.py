"""Waves: a request's descriptors cut into slices that are posted at once.

Bounded, because a post can block the loop for as long as its bytes take
(nixl-facts row 2), and because a cancelled pull waits for what is in flight.
"""

from __future__ import annotations

from itertools import chain, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from kvferry.engine.selection import BulkSelection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.engine.selection import SectionSelection, Selection
    from kvferry.protocol.identity import EngineKey

__all__ = ("Wave", "cut")


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


def cut(
    selection: Selection[EngineKey], keys: Sequence[EngineKey], *, max_bytes: int
) -> tuple[Wave, ...]:
    """Cut a selection into waves, taking turns between its peers.

    Args:
        selection: Keyed by the peers of `keys`; it may lack some.
        keys: The peers, in the order that numbers them.
        max_bytes: Bound of one wave; a longer single run is a wave of its own.
    """
    lanes = [
        list(_lane(source, selection.peers.get(key, ()), max_bytes))
        for source, key in enumerate(keys)
    ]
    turns = chain.from_iterable(zip_longest(*lanes))
    return tuple(wave for wave in turns if wave is not None)


def _lane(
    source: int, parts: Sequence[SectionSelection], max_bytes: int
) -> Iterator[Wave]:
    for part in parts:
        for piece in part.waves(max_bytes):
            yield Wave(source, part, piece)
