"""The handshake server: accepts diallers, and runs the links they open.

Owns no offers and no memory: a `LinkService` hears of every link's beginning, of
what it brings, and of its end; an `InstanceService` of the ranks that join, and of
those who ask. Strangers have a bound of their own, so that they cannot take the
places of those who prove the secret.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, assert_never

import trio

from kvferry.engine.budget import SeldomLog
from kvferry.engine.guard import guarded
from kvferry.engine.handshake import Welcome, receive_call, turn_away
from kvferry.engine.link import GOODBYE_S, FramedStream, Link
from kvferry.protocol.errors import EngineClosed, HandshakeRefused, PeerLost
from kvferry.protocol.handshake import Purpose, Refusal, RefusalReason

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.streams import BoundListener
    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.link import LinkMessage

__all__ = ("InstanceService", "LinkService", "Listener")

TURN_AWAY_S = 1.0
"""How long somebody for whom there is no place may take to hear so."""

PATIENCE_S = 1.0
"""When all places are taken, whoever has not introduced himself after so long makes
room: those that hold places by saying nothing, or a byte at a time, shut nobody out."""

ACCEPT_AGAIN_S = 0.1
"""After a failed accept; as for running out of file descriptors, which takes time."""


class _HearsOfLinks(Protocol):
    """What hears of open links; its calls never block."""

    def on_message(self, link: Link, message: LinkMessage) -> Awaitable[None] | None:
        """A message came, as for `Link.run`; a FerryError ends the link."""

    def on_end(self, link: Link, cause: FerryError) -> None:
        """The link has ended, for whatever reason; nothing follows."""


class LinkService(_HearsOfLinks, Protocol):
    """What hears of the links that others open to transfer."""

    def on_open(self, link: Link, card: Card) -> None:
        """Somebody has proved who they are."""


class InstanceService(_HearsOfLinks, Protocol):
    """What hears of the ranks that join our instance, and of those who ask for it.

    The bodies are bytes of somebody who has proved the secret: a decoder that raises
    ends that handshake alone.
    """

    def enrol(self, key: EngineKey, body: bytes) -> bytes | Refusal:
        """Whether a rank may join, and the body it is answered with.

        Changes nothing: there may be no place for its link; `on_open` follows if so.
        """

    def describe(self, key: EngineKey, body: bytes) -> bytes | Refusal:
        """The body for somebody who asks."""

    def on_open(self, link: Link, body: bytes) -> None:
        """A rank has joined; the body is what `enrol` has seen."""


_Visit = Callable[[], Awaitable[None]]


class Listener:
    """Serves handshakes and links.

    Attributes:
        refused: Handshakes that failed.
    """

    _nursery: trio.Nursery
    """While it runs: of diallers and their links."""

    def __init__(
        self,
        config: EngineConfig,
        ours: Credentials,
        *,
        service: LinkService,
        instance: InstanceService,
        log: FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._ours = ours
        self._service = service
        self._instance = instance
        self._log = log
        self._seldom_log = SeldomLog(log)
        self._links: dict[Link, None] = {}
        self._admitted: set[FramedStream] = set()  # links, or so in a moment
        self._left = trio.Event()  # one of them, since somebody looked
        # Not introduced yet, in the order in which they came, and since when.
        self._diallers: dict[trio.CancelScope, float] = {}
        self._turned_away = 0  # hearing so now
        self._is_closing = False
        self.refused = 0

    def __len__(self) -> int:
        """How many links are open."""
        return len(self._links)

    async def run(self, bound: BoundListener) -> None:
        """Accept for ever; each dialler gets a task, and its failure ends it alone."""
        async with bound, trio.open_nursery() as self._nursery:
            await guarded(
                partial(self._accept, bound),
                on_failure=self._lose_listener,
                log=self._log,
            )

    async def _accept(self, bound: BoundListener) -> None:
        while True:
            try:
                stream = await bound.accept()
            except OSError as exc:
                self._seldom_log.warning("accept_failed", error=str(exc))
                await trio.sleep(ACCEPT_AGAIN_S)
            except trio.ClosedResourceError as exc:
                raise EngineClosed("somebody closed the listener") from exc
            else:
                self._nursery.start_soon(self._serve, stream)

    def _lose_listener(self, error: FerryError) -> None:
        """Nobody new can come; whoever is there is served on."""
        self._log.error("listener_lost", error=str(error))

    async def close(self, *, within_s: float) -> None:
        """Say goodbye on every link, and take no new ones.

        Also on one that is being opened: whoever has our card may count on us, and
        only a goodbye tells it that nothing it has said was taken.
        """
        self._is_closing = True
        async with trio.open_nursery() as nursery:
            for link in tuple(self._links):
                nursery.start_soon(_close, link, within_s)
        with trio.move_on_after(within_s):
            while self._admitted:
                await self._left.wait()

    def forget(self, wanted: Callable[[EngineKey], bool]) -> None:
        """End the links of these peers now."""
        for link in tuple(self._links):
            if wanted(link.peer):
                link.end(PeerLost("this engine was told to forget the peer"))

    async def _serve(self, stream: trio.abc.Stream) -> None:
        def failed(error: FerryError) -> None:
            self.refused += 1
            self._seldom_log.warning("handshake_failed", error=str(error))

        try:
            await guarded(
                partial(self._receive, FramedStream(stream)),
                on_failure=failed,
                log=self._log,
            )
        finally:
            await trio.aclose_forcefully(stream)

    async def _receive(self, framed: FramedStream) -> None:
        if self._is_closing or not self._has_place():
            await self._turn_away(framed)
        else:
            try:
                visit = await self._greet(framed)
                await visit()
            finally:
                self._admitted.discard(framed)
                self._left.set()
                self._left = trio.Event()

    async def _turn_away(self, framed: FramedStream) -> None:
        """Say why, if not too many have to be told at once."""
        reason = RefusalReason.CLOSING if self._is_closing else RefusalReason.BUSY
        if self._turned_away < self._config.max_diallers:
            self._turned_away += 1
            try:
                with trio.move_on_after(TURN_AWAY_S):
                    await turn_away(framed, reason)
            finally:
                self._turned_away -= 1
        raise HandshakeRefused(f"no place for a dialler: {reason.value}")

    def _has_place(self) -> bool:
        """Whether one more may introduce himself, if need be in the place of another."""
        if len(self._diallers) < self._config.max_diallers:
            return True
        scope, since = next(iter(self._diallers.items()))
        if trio.current_time() < since + PATIENCE_S:
            return False
        del self._diallers[scope]
        scope.cancel()
        return True

    async def _greet(self, framed: FramedStream) -> _Visit:
        with trio.move_on_after(self._config.handshake_timeout_s) as scope:
            self._diallers[scope] = trio.current_time()
            try:
                return await receive_call(
                    framed, self._ours, partial(self._receive_call, framed)
                )
            finally:
                self._diallers.pop(scope, None)
        raise HandshakeRefused("the dialler took too long")

    def _receive_call(
        self, framed: FramedStream, key: EngineKey, purpose: Purpose, body: bytes
    ) -> Welcome[_Visit] | Refusal:
        """What becomes of a dialler that has proved the secret."""
        if self._is_closing:
            return Refusal(RefusalReason.CLOSING, "this engine is closing")
        if purpose is Purpose.LINK:
            return self._receive_link(framed, key, body)
        if purpose is Purpose.JOIN:
            return self._receive_join(framed, key, body)
        if purpose is Purpose.ASK:
            described = self._instance.describe(key, body)
            if isinstance(described, Refusal):
                return described
            return Welcome(described, trio.lowlevel.checkpoint)
        assert_never(purpose)

    def _receive_link(
        self, framed: FramedStream, key: EngineKey, body: bytes
    ) -> Welcome[_Visit] | Refusal:
        card = self._ours.read_card(body)
        if isinstance(card, Refusal):
            return card
        if no_place := self._admit(framed):
            return no_place

        def opened(link: Link) -> None:
            self._service.on_open(link, card)

        return Welcome(
            self._ours.card_body,
            partial(self._run_link, framed, key, self._service, opened),
        )

    def _receive_join(
        self, framed: FramedStream, key: EngineKey, body: bytes
    ) -> Welcome[_Visit] | Refusal:
        instance = self._instance
        enrolled = instance.enrol(key, body)
        if isinstance(enrolled, Refusal):
            return enrolled
        if no_place := self._admit(framed):
            return no_place

        def opened(link: Link) -> None:
            instance.on_open(link, body)

        return Welcome(enrolled, partial(self._run_link, framed, key, instance, opened))

    def _admit(self, framed: FramedStream) -> Refusal | None:
        """Give a place to somebody who has proved the secret, or say why not."""
        if len(self._admitted) >= self._config.max_links:
            return Refusal(
                RefusalReason.BUSY, f"all {self._config.max_links} links are taken"
            )
        self._admitted.add(framed)
        return None

    async def _run_link(
        self,
        framed: FramedStream,
        key: EngineKey,
        service: _HearsOfLinks,
        opened: Callable[[Link], None],
    ) -> None:
        link = Link(
            framed,
            key,
            keepalive_s=self._config.keepalive_s,
            silence_s=self._config.silence_s,
        )
        self._links[link] = None
        self._log.info("link_opened", peer=str(key))
        cause: FerryError = PeerLost("the engine closed")
        try:
            opened(link)
            if self._is_closing:
                self._nursery.start_soon(_close, link, GOODBYE_S)
            cause = await link.run(partial(service.on_message, link))
        finally:
            self._links.pop(link, None)
            service.on_end(link, cause)
            self._log.info("link_ended", peer=str(key), cause=str(cause))


async def _close(link: Link, within_s: float) -> None:
    await link.close("the engine is closing", within_s=within_s)
