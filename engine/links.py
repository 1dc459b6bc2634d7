"""`Links`: what consumers bring over their links, to whom it is for.

The listener's `LinkService`. Pushes see a message before offers do; a word that others
of our instance are not needed is passed on to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvferry.protocol.errors import FerryError
from kvferry.protocol.link import Claim, Spare

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.instance import Instance
    from kvferry.engine.link import Link
    from kvferry.engine.offer import Offers
    from kvferry.engine.pushes import Pushes
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import Rank
    from kvferry.protocol.link import LinkMessage

__all__ = ("Links",)


class Links:
    """All links that consumers have opened to this engine."""

    def __init__(
        self,
        offers: Offers,
        pushes: Pushes,
        instance: Instance,
        *,
        log: FilteringBoundLogger,
    ) -> None:
        self._offers = offers
        self._pushes = pushes
        self._instance = instance
        self._log = log

    def on_open(self, link: Link, card: Card) -> None:
        """A rank has connected."""
        self._offers.on_open(link, card)
        self._pushes.on_open(link, card)

    def on_message(self, link: Link, message: LinkMessage) -> Awaitable[None] | None:
        """Take a message.

        Returns:
            What must be over before the link takes another; None if nothing.

        Raises:
            ProtocolViolation: It is nothing that a consumer says, or contradicts what
                came before it.
        """
        if isinstance(message, Claim):
            return self._pushes.on_claim(link, message)
        if isinstance(message, Spare):
            self._pass_on(message)
        elif not self._pushes.on_message(link, message):
            self._offers.on_message(link, message)
        return None

    def _pass_on(self, message: Spare) -> None:
        """Tell each rank that is named, ourselves perhaps among them."""
        for rank in message.ranks:
            its_own = msgspec.structs.replace(message, ranks=(rank,))
            try:
                self._instance.send(rank, its_own)
            except FerryError as error:
                # Nobody waits for it: its lease, or its deadline, ends it.
                self._log.debug("not_passed_on", rank=str(rank), error=str(error))

    def on_relayed(self, rank: Rank, message: Spare) -> None:  # noqa: ARG002 - whoever
        """A rank of ours has been told that we are not needed."""
        if message.offer is None:
            self._pushes.spare(message.request_id)
        else:
            self._offers.spare(message)

    def on_end(self, link: Link, cause: FerryError) -> None:
        """A link has ended, and with it what needs it."""
        self._offers.on_end(link, cause)
        self._pushes.on_end(link, cause)
