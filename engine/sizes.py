"""`Sizes`: about how many bytes blocks hold, without planning anything."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.engine.spans import Span
    from kvferry.protocol.layout import CacheLayout, FieldLayout, GroupLayout
    from kvferry.protocol.ticket import TicketSpan

__all__ = ("Sizes",)


class Sizes:
    """Of one rank's cache."""

    def __init__(self, layout: CacheLayout) -> None:
        self._block_bytes = {g.name: _block_bytes(g) for g in layout.groups}

    def of(self, spans: Mapping[str, Span] | Mapping[str, TicketSpan]) -> int:
        """Of a request's blocks, dropped ones and padding included."""
        return sum(
            len(span.block_ids) * self._block_bytes.get(group, 0)
            for group, span in spans.items()
        )


def _block_bytes(group: GroupLayout) -> int:
    # Not by strides: where one tensor holds all layers, each layer's is over all.
    pool_bytes = sum(field.blocks * _bytes(field) for field in group.fields)
    return pool_bytes // max(group.blocks, 1)


def _bytes(field: FieldLayout) -> int:
    """Of a kernel block, or of a slot."""
    elements = (prod(axis.size for axis in part.axes) for part in field.parts)
    return sum(elements) * field.element_bytes
