"""The handshake server: accepts diallers, and runs the links they open.

Owns no offers and no memory: what a link brings goes to `on_message`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio

from kvferry.engine.guard import guarded
from kvferry.engine.handshake import answer
from kvferry.engine.link import FramedStream, Link
from kvferry.protocol.errors import HandshakeRefused, PeerLost

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.streams import BoundListener
    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.link import LinkMessage

__all__ = ("LinkService", "Listener")


class LinkService(Protocol):
    """What hears of the links that others open; its calls never block."""

    def on_open(self, link: Link, card: Card) -> None:
        """Somebody has proved who they are."""

    def on_message(self, link: Link, message: LinkMessage) -> None:
        """A message came; a FerryError ends the link."""

    def on_end(self, link: Link, cause: FerryError) -> None:
        """The link has ended, for whatever reason; nothing follows."""


class Listener:
    """Serves handshakes and links.

    Attributes:
        refused: Handshakes that failed.
    """

    def __init__(
        self,
        config: EngineConfig,
        ours: Credentials,
        *,
        service: LinkService,
        log: FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._ours = ours
        self._service = service
        self._log = log
        self._links: set[Link] = set()
        self._serving = 0
        self.refused = 0

    def __len__(self) -> int:
        """How many links are open."""
        return len(self._links)

    async def run(self, bound: BoundListener) -> None:
        """Accept for ever; each dialler gets a task, and its failure ends it alone."""
        await trio.serve_listeners(self._serve, [bound])

    async def close(self, *, within_s: float) -> None:
        """Say goodbye on every link."""
        async with trio.open_nursery() as nursery:
            for link in tuple(self._links):
                nursery.start_soon(_close, link, within_s)

    async def _serve(self, stream: trio.abc.Stream) -> None:
        def failed(error: FerryError) -> None:
            self.refused += 1
            self._log.warning("handshake_failed", error=str(error))

        if self._serving >= self._config.max_links:
            self._log.warning("link_refused", reason="max_links")
            await trio.aclose_forcefully(stream)
            return
        self._serving += 1
        try:
            await guarded(
                lambda: self._welcome(stream), on_failure=failed, log=self._log
            )
        finally:
            self._serving -= 1
            await trio.aclose_forcefully(stream)

    async def _welcome(self, stream: trio.abc.Stream) -> None:
        framed = FramedStream(stream)
        try:
            with trio.fail_after(self._config.handshake_timeout_s):
                key, card = await answer(framed, self._ours)
        except trio.TooSlowError as exc:
            raise HandshakeRefused("the dialler took too long") from exc
        link = Link(framed, key)
        self._links.add(link)
        self._log.info("link_opened", peer=str(key))
        cause: FerryError = PeerLost("the engine closed")
        try:
            self._service.on_open(link, card)
            cause = await link.run(partial(self._service.on_message, link))
        finally:
            self._links.discard(link)
            self._service.on_end(link, cause)
        self._log.info("link_ended", peer=str(key), cause=str(cause))


async def _close(link: Link, within_s: float) -> None:
    await link.close("the engine is closing", within_s=within_s)
