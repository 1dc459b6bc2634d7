"""`Reader`: decisions drawn from a fuzzer's bytes; what is left out is zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

EDGES = (0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 255, 256, 2**16, 2**31 - 1, 2**31)
FAR = (2**40 - 1, 2**40, 2**61, 2**62 - 1, 2**62, 2**63, 2**64 - 1)


class Reader:
    """Hands out a fuzzer's bytes as numbers and choices."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self._at >= len(self._data)

    def take(self, size: int) -> bytes:
        """The next bytes, fewer at the end."""
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def below(self, limit: int) -> int:
        """A number in ``[0, limit)``, of one byte."""
        taken = self.take(1)
        return taken[0] % limit if taken else 0

    def choose(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[self.below(len(choices))]

    def number(self, near: int) -> int:
        """Anything: an edge, a neighbour of a good number, or noise of eight bytes."""
        kind = self.below(6)
        if kind == 0:
            return self.choose(EDGES)
        if kind == 1:
            return self.choose(FAR) * self.choose((1, -1))
        if kind == 2:
            return near + self.below(17) - 8
        if kind == 3:
            return near * self.choose((2, 3, -1, 1000)) // self.choose((1, 2, 3))
        if kind == 4:
            return int.from_bytes(self.take(8), "big", signed=True)
        return near
