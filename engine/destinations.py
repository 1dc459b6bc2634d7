"""`Destinations`: which of our blocks requests under way write to.

A block is one request's at a time (invariant 3). Which blocks are free is the business
of the caller's scheduler; should it err, as is easily done where one scheduler gives out
the blocks of several ranks, two requests would both be told that they are done, and one
of them would hold the other's bytes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvferry.engine.spans import Side, are_inside, span_ids
from kvferry.protocol.errors import BlocksInUse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

    from kvferry.engine.spans import Span
    from kvferry.protocol.layout import CacheLayout

    Ids = npt.NDArray[np.int64]

__all__ = ("Destinations",)


class Destinations:
    """All destination blocks of one engine that are in use."""

    def __init__(self, layout: CacheLayout) -> None:
        self._grains = {g.name: Side.of(g).span_grain for g in layout.groups}
        self._taken = {
            g.name: np.zeros(g.blocks, dtype=np.bool_) for g in layout.groups
        }

    @contextmanager
    def held(
        self, spans: Mapping[str, Span], *, computed_tokens: int
    ) -> Iterator[None]:
        """Keep a request's blocks from others; those before it are shared by many.

        Args:
            spans: Of known groups, as arrays of the request's own. Ids that do not exist
                are the plan's to refuse.
            computed_tokens: Nothing before this position is written.

        Raises:
            BlocksInUse: Another request has one of them.
        """
        wanted = {
            name: self._written(name, span, computed_tokens)
            for name, span in spans.items()
        }
        for name, ids in wanted.items():
            is_busy = self._taken[name][ids]
            if np.count_nonzero(is_busy):
                busy = ids[is_busy]
                raise BlocksInUse(
                    f"group {name!r}: blocks {busy[:8].tolist()} are being written for"
                    " another request; give others, or wait until it has ended"
                )
        for name, ids in wanted.items():
            self._taken[name][ids] = True
        try:
            yield
        finally:
            for name, ids in wanted.items():
                self._taken[name][ids] = False

    def _written(self, name: str, span: Span, computed_tokens: int) -> Ids:
        ids = span_ids(span, group=name, side="consumer")
        if grain := self._grains[name]:
            ids = ids[max(computed_tokens - span.first_token, 0) // grain :]
        if are_inside(ids, blocks=self._taken[name].size):
            return ids
        return ids[(ids >= 0) & (ids < self._taken[name].size)]
