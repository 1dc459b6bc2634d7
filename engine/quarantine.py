"""`Quarantine`: memory that no one may reuse yet, and why.

An entry is made when a pull ends while a transfer of it could still write to
its blocks, and goes away by itself when the last of those transfers settles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvferry.engine.spans import ABSENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from kvferry.engine.spans import Span
    from kvferry.protocol.errors import FerryError

__all__ = ("Quarantine", "QuarantineEntry", "held_blocks")


@dataclass(frozen=True, eq=False)
class QuarantineEntry:
    """Blocks that a transfer may still touch.

    Attributes:
        request_id: The pull that left them.
        peer: Whose transfers have not settled.
        reason: Why the pull ended; None when its caller cancelled it.
        since: When, in `trio.current_time`.
        blocks: Per group the logical block ids (for a state group: slots).
    """

    request_id: str
    peer: str
    reason: FerryError | None
    since: float
    blocks: Mapping[str, tuple[int, ...]]


def held_blocks(spans: Mapping[str, Span]) -> dict[str, tuple[int, ...]]:
    """The blocks of a request, as an entry has them, without those that a window dropped."""
    return {
        name: tuple(
            int(block) for block in span.block_ids if block not in {None, ABSENT}
        )
        for name, span in spans.items()
    }


def _nothing() -> None:
    pass


class Quarantine:
    """All entries of one engine."""

    def __init__(self) -> None:
        self._entries: dict[QuarantineEntry, Callable[[], None]] = {}
        self._changed = trio.Event()

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._entries)

    def __iter__(self) -> Iterator[QuarantineEntry]:
        """The entries, oldest first."""
        return iter(tuple(self._entries))

    def blocks(self, group: str) -> frozenset[int]:
        """The ids of one group that must not be reused now."""
        return frozenset(
            block for entry in self._entries for block in entry.blocks.get(group, ())
        )

    async def wait_empty(self) -> None:
        """Wait until every block is safe again."""
        while self._entries:
            await self._changed.wait()

    async def wait_free(self, group: str, block_ids: Iterable[int]) -> None:
        """Wait until none of these blocks of a group is held; at once if none is."""
        wanted = frozenset(block_ids)
        while wanted & self.blocks(group):
            await self._changed.wait()

    def release(self, entry: QuarantineEntry) -> None:
        """Take blocks back on your own word that nothing can touch them any more.

        For what nobody else can know: that the process of a producer which was pushing
        is dead, and its network quiet. Whoever is wrong gets another request's bytes
        into these blocks. An entry that has gone by itself changes nothing.
        """
        on_release = self._entries.get(entry)
        if on_release is not None:
            self.reclaim(entry)
            on_release()

    def hold(
        self, entry: QuarantineEntry, *, on_release: Callable[[], None] = _nothing
    ) -> None:
        """Add an entry. For the engine's own use."""
        self._entries[entry] = on_release

    def reclaim(self, entry: QuarantineEntry) -> None:
        """Let an entry go: its last transfer has settled. For the engine's own use."""
        if self._entries.pop(entry, None) is None:
            return  # the caller has released it
        self._changed.set()
        self._changed = trio.Event()
