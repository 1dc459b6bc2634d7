"""`Instance`: what one rank knows of the instance that it is part of.

Owns nothing of how it comes to know: that is the lead's or a member's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.protocol.errors import InstanceIncomplete
    from kvferry.protocol.identity import Rank
    from kvferry.protocol.link import Spare
    from kvferry.protocol.manifest import Manifest

__all__ = ("Instance",)


class Instance:
    """Our own instance.

    Attributes:
        manifest: All of its ranks; None while some have not joined.
        was_complete: Whether all had joined, now or at any time before.
        on_relayed: Hears what another rank (the first argument) has sent to us; must
            not block.
    """

    manifest: Manifest | None = None
    was_complete: bool = False
    on_relayed: Callable[[Rank, Spare], None]

    def incomplete(self) -> InstanceIncomplete:
        """The error that names who is missing."""
        raise NotImplementedError

    def send(self, rank: Rank, message: Spare) -> None:
        """Send to a rank of our own instance, ourselves included; never blocks.

        There is no answer, and no word if it does not arrive: whoever waits for its
        effect has a lease.

        Raises:
            InstanceIncomplete: The rank has not joined, or we have not.
            PeerLost: The way to it has just ended.
        """
        raise NotImplementedError
