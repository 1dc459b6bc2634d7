"""`Parking`: what consumers say of an offer before its rank has made it (case n5).

The ranks of an instance offer a request each in its own time, and a ticket that one
of them makes is good for all: a consumer may be faster than a rank. What it says waits
here, bounded in number and time; a later word of the same reader replaces the one
before, and does not wait longer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvferry.protocol.link import Renew, Spare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.engine.link import Link
    from kvferry.protocol.link import Decline, Sought

__all__ = ("Parked", "Parking")

MAX_PARKED = 16_384
"""Messages that wait at once; each is well under a kilobyte, or names many ranks."""

MAX_PARKED_OF_ONE = 1024
"""Of them, those that came over one link: nobody takes the room of others."""


class Parked(NamedTuple):
    """A message that waits.

    Attributes:
        link: Whom it is from; None if a rank of our own instance has passed it on.
        until_at: When it is given up.
    """

    link: Link | None
    message: Renew | Decline | Spare
    sought: Sought
    until_at: float


Offered = tuple[str, int]
"""Request and share."""


class Parking:
    """What waits for offers, the oldest first.

    Args:
        park_s: How long a message waits.
    """

    def __init__(self, park_s: float) -> None:
        self._park_s = park_s
        self._parked: OrderedDict[tuple[Offered, Link | None], Parked] = OrderedDict()
        self._readers: dict[Offered, dict[Link | None, None]] = {}
        self._counts: Counter[Link | None] = Counter()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._parked)

    @property
    def deadline(self) -> float | None:
        """When the next one is given up."""
        return next(iter(self._parked.values())).until_at if self._parked else None

    def put(
        self,
        link: Link | None,
        message: Renew | Decline | Spare,
        sought: Sought,
        now: float,
    ) -> bool:
        """Let a message wait; False if there is no room."""
        offered = (message.request_id, sought.share)
        before = self._parked.get((offered, link))
        if before is not None:
            until_at = before.until_at
        elif self._is_full(link):
            return False
        else:
            until_at = now + self._park_s
            self._readers.setdefault(offered, {})[link] = None
            self._counts[link] += 1
        self._parked[offered, link] = Parked(link, message, sought, until_at)
        return True

    def take(self, request_id: str, share: int) -> list[Parked]:
        """All that waits for an offer, in the order in which it came."""
        offered = (request_id, share)
        return [self._pop(offered, link) for link in tuple(self._of(offered))]

    def take_due(self, now: float) -> Iterator[Parked]:
        """What has waited for too long."""
        while (deadline := self.deadline) is not None and deadline <= now:
            yield self._pop(*next(iter(self._parked)))

    def leave(self, link: Link) -> None:
        """A reader is gone: it reads nothing. What it has declined stays declined."""
        if not self._counts[link]:
            return
        for (offered, other), parked in tuple(self._parked.items()):
            if other is link and isinstance(parked.message, Renew):
                self._pop(offered, link)

    def _of(self, offered: Offered) -> dict[Link | None, None]:
        return self._readers.get(offered, {})

    def _is_full(self, link: Link | None) -> bool:
        return (
            len(self._parked) >= MAX_PARKED or self._counts[link] >= MAX_PARKED_OF_ONE
        )

    def _pop(self, offered: Offered, link: Link | None) -> Parked:
        readers = self._readers[offered]
        del readers[link]
        if not readers:
            del self._readers[offered]
        self._counts[link] -= 1
        if not self._counts[link]:
            del self._counts[link]
        return self._parked.pop((offered, link))
