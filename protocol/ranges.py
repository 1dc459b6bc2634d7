"""Half-open integer ranges as a value: coverage and untrusted tokens.

Owns one invariant: the ranges of a `Ranges` are sorted, non-empty, disjoint
and not adjacent, so that two sets of integers are equal exactly when their
`Ranges` are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ("Ranges",)


class Ranges(msgspec.Struct, frozen=True):
    """A set of integers, written as half-open ranges ``(first, last)``.

    Build it with `of`, which sorts and joins; the constructor takes ranges that
    are already normal.
    """

    spans: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """The union of the pairs; empty pairs (``first >= last``) add nothing."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(pair for pair in pairs if pair[0] < pair[1]):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], last))
            else:
                joined.append((first, last))
        return cls(tuple(joined))

    @property
    def total(self) -> int:
        """How many integers are in the set."""
        return sum(last - first for first, last in self.spans)

    @property
    def is_empty(self) -> bool:
        """Whether no integer is in the set."""
        return not self.spans

    def __bool__(self) -> bool:
        """Refuse: a truth value could mean 'any' or 'all'; ask `is_empty`."""
        raise TypeError("a Ranges has no truth value: use is_empty")

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The half-open ranges, in order."""
        return iter(self.spans)

    def __or__(self, other: Ranges) -> Ranges:
        """Union."""
        return Ranges.of((*self.spans, *other.spans))

    def __and__(self, other: Ranges) -> Ranges:
        """Intersection."""
        return Ranges.of(
            (max(a, c), min(b, d)) for a, b in self.spans for c, d in other.spans
        )

    def __sub__(self, other: Ranges) -> Ranges:
        """Difference: what is in this set and not in the other."""
        left = list(self.spans)
        for first, last in other.spans:
            left = [
                piece
                for a, b in left
                for piece in ((a, min(b, first)), (max(a, last), b))
                if piece[0] < piece[1]
            ]
        return Ranges(tuple(left))

    def __contains__(self, value: int) -> bool:
        """Whether the integer is in the set."""
        return any(first <= value < last for first, last in self.spans)

    def __str__(self) -> str:
        """``[0,16)+[32,48)``."""
        return "+".join(f"[{first},{last})" for first, last in self.spans) or "[)"
