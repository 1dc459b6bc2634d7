"""`Siblings`: the entries of a ticket that a rank makes for all of its instance.

A rank knows from the manifest who its siblings are and where they listen. It does not
know how they call their offers of the request, or whether they have made them: each
tells its own readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.manifest import named
from kvferry.protocol.ticket import RankOffer

if TYPE_CHECKING:
    from kvferry.engine.instance import Instance
    from kvferry.protocol.manifest import Manifest

__all__ = ("Entries", "Siblings")


class Entries(NamedTuple):
    """The ranks of a ticket: one makes it, the others follow.

    Attributes:
        mine: The one that makes it; without an id.
        before, after: The others, by their place.
        instance: `Manifest.id`; empty if these are not all of an instance of several.
    """

    mine: RankOffer
    before: tuple[RankOffer, ...] = ()
    after: tuple[RankOffer, ...] = ()
    instance: str = ""

    def with_id(self, offer_id: str) -> tuple[RankOffer, ...]:
        """All of them, in the order of the manifest."""
        mine = msgspec.structs.replace(self.mine, offer_id=offer_id)
        return (*self.before, mine, *self.after)


class Siblings:
    """The other ranks of our instance, as tickets name them."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._manifest: Manifest | None = None
        self._id = ""
        self._ranks: tuple[RankOffer, ...] = ()

    def now(self, mine: RankOffer) -> Entries:
        """Those of a ticket that is made now, by us.

        Raises:
            InstanceIncomplete: A sibling has gone, or has not joined yet.
            ConfigError: One of them has no listener.
        """
        manifest = self._instance.manifest
        if manifest is None:
            if self._instance.is_of_several:
                raise self._instance.incomplete()
            return Entries(mine)
        if manifest is not self._manifest:
            self._note(manifest)
        if len(self._ranks) < 2:
            return Entries(mine)
        place = sum(other.rank < mine.rank for other in self._ranks)
        others = [
            # As ours are: the ranks of an instance have one configuration.
            msgspec.structs.replace(
                other, lease_s=mine.lease_s, expires_at=mine.expires_at
            )
            for other in self._ranks
        ]
        before, after = others[:place], others[place + 1 :]
        return Entries(mine, tuple(before), tuple(after), self._id)

    def _note(self, manifest: Manifest) -> None:
        """The id is a digest over all ranks: computed once."""
        deaf = [m.rank for m in manifest.members if m.host is None or m.port is None]
        if deaf:
            raise ConfigError(
                f"nobody could read from {named(deaf)}: without a listener"
            )
        self._ranks = tuple(
            RankOffer(m.rank, m.generation, "", m.host, m.port, 1.0, 0, ready=False)
            for m in sorted(manifest.members, key=lambda member: member.rank)
            if m.host is not None and m.port is not None
        )
        self._id = manifest.id
        self._manifest = manifest
