"""Remote ranks: who they are, the link to them, and everything prepared for them.

One `Peer` owns everything known of one start of one rank, and one `Sources` what
is prepared for reading from a set of them; forgetting a peer is one call. A peer
that comes back at the same address is a new peer with a key of its own.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import trio

from kvferry.engine.guard import guarded
from kvferry.engine.handshake import greet
from kvferry.engine.link import FramedStream, Link
from kvferry.engine.plan import prepare_plan
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    FerryInternalError,
    MisuseError,
    PeerLost,
    PeerUnreachable,
    ProtocolViolation,
)
from kvferry.protocol.identity import EngineKey
from kvferry.protocol.link import (
    Aborted,
    Confirmed,
    Decline,
    Finished,
    OfferReady,
    Refused,
    Registered,
    Renewed,
    Revoked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.agents import Agents
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric, Prepared
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.images import BulkSection
    from kvferry.engine.plan import Plan
    from kvferry.engine.sections import Rows, Section
    from kvferry.engine.staging import Staging
    from kvferry.engine.streams import Streams
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.link import LinkMessage
    from kvferry.protocol.ticket import Contact, RankAddress, RankOffer, Ticket

__all__ = ("Answer", "Peer", "Peers", "Sources", "Subscriber")

Answer = (
    Confirmed
    | OfferReady
    | Refused
    | Renewed
    | Registered
    | Finished
    | Aborted
    | Revoked
)


class Subscriber:
    """One pull's ear on one peer; the calls must not raise or block."""

    def __init__(
        self,
        on_answer: Callable[[Answer], None],
        on_lost: Callable[[FerryError], None],
    ) -> None:
        self.on_answer = on_answer
        self.on_lost = on_lost


class Peer:
    """One start of one remote rank, connected.

    Attributes:
        key: Who it is.
        card: What it told in the handshake.
        link: The open link to it.
        agent: Its name in the fabric.
        strays: Answers to pulls that are not (or no longer) under way.
    """

    def __init__(self, key: EngineKey, card: Card, link: Link) -> None:
        self.key = key
        self.card = card
        self.link = link
        self.agent = ""
        self.strays = 0
        self._subscribers: dict[int, Subscriber] = {}

    @property
    def users(self) -> int:
        """Pulls under way."""
        return len(self._subscribers)

    def subscribe(self, attempt: int, subscriber: Subscriber) -> None:
        """Hear the answers to one attempt, and the end of the link."""
        self._subscribers[attempt] = subscriber

    def unsubscribe(self, attempt: int) -> None:
        """Hear no more."""
        self._subscribers.pop(attempt, None)

    def deliver(self, message: LinkMessage) -> None:
        """Hand an answer to the attempt that it is for.

        Raises:
            ProtocolViolation: Only a consumer sends such a message, or somebody
                else's name is in it.
        """
        if not isinstance(message, Answer):
            raise ProtocolViolation(f"{type(message).__name__} from a producer")
        if isinstance(message, Confirmed) and message.engine != self.key:
            raise ProtocolViolation(f"{self.key} confirms as {message.engine}")
        subscriber = self._subscribers.get(message.attempt)
        if subscriber is None:
            self.strays += 1
            return
        subscriber.on_answer(message)

    def lose(self, cause: FerryError) -> None:
        """Tell everybody under way, together and at once."""
        for subscriber in tuple(self._subscribers.values()):
            subscriber.on_lost(cause)


@dataclass(eq=False)
class Sources:
    """A set of producer ranks, with a plan and its rows prepared.

    Attributes:
        peers: In the order in which waves number them.
        prepared: By peer and section of its plan, those in bulk last, the two
            sides: ours, theirs.
        users: Pulls that may still make transfers of it, or have one in flight.
        is_stale: One of its peers is gone: discard it when nobody uses it.
    """

    peers: tuple[Peer, ...]
    plan: Plan[EngineKey]
    prepared: list[list[tuple[Prepared, Prepared]]]
    users: int = 0
    is_stale: bool = False


@dataclass
class _Dial:
    """One handshake under way, however many tasks wait for it."""

    ended: trio.Event = field(default_factory=trio.Event)
    error: FerryError | None = None


class Peers:
    """All remote ranks that this engine reads from."""

    def __init__(  # noqa: PLR0913 - built in one place, from its parts
        self,
        config: EngineConfig,
        ours: Credentials,
        fabric: Fabric,
        streams: Streams,
        nursery: trio.Nursery,
        *,
        agents: Agents,
        staging: Staging,
        log: FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._ours = ours
        self._fabric = fabric
        self._agents = agents
        self._staging = staging
        self._streams = streams
        self._nursery = nursery
        self._log = log
        self._peers: dict[EngineKey, Peer] = {}
        self._dials: dict[EngineKey, _Dial] = {}
        self._sources: dict[tuple[EngineKey, ...], Sources] = {}
        self._undiscarded: set[Sources] = set()
        self._is_closed = False
        self.handshakes = 0
        """Handshakes begun."""

    def __len__(self) -> int:
        """How many are connected."""
        return len(self._peers)

    async def sources(self, ticket: Ticket) -> Sources:
        """Connect the ticket's ranks and prepare reading from them.

        Counts the caller as a user: call `leave` when it makes no more transfers
        and none is in flight.

        Raises:
            PeerError: A rank cannot be reached, refuses, or is somebody else.
            ImpossiblePlan: The layouts cannot be paired.
            EngineClosed: The engine is closing.
        """
        offers = addressed(ticket)
        await self._connect_all(offers)
        keys = tuple(key for key, _ in offers)
        sources = self._sources.get(keys) or self._prepare(keys)
        sources.users += 1
        return sources

    async def connected(self, contact: Contact) -> tuple[Peer, ...]:
        """Connect all ranks of a contact.

        Raises:
            PeerError: A rank cannot be reached, refuses, or is somebody else.
            EngineClosed: The engine is closing.
        """
        found = [
            (EngineKey(contact.engine_id, address.generation, address.rank), address)
            for address in contact.ranks
        ]
        await self._connect_all(found)
        return self._known(tuple(key for key, _ in found))

    async def reach(self, key: EngineKey, address: RankAddress) -> Peer:
        """Connect one rank.

        Raises:
            PeerError: It cannot be reached, refuses, or is somebody else.
        """
        await self._connect(key, address)
        return self._known((key,))[0]

    @contextmanager
    def holding(self, contact: Contact) -> Iterator[None]:
        """Keep these ranks while inside."""
        yield

    async def decline(self, ticket: Ticket, detail: str) -> None:
        """Tell every rank of a ticket that it will not be read, or not further.

        Raises:
            PeerError: A rank could not be told; its lease will end.
        """
        errors: list[FerryError] = []

        async def tell(key: EngineKey, offer: RankOffer) -> None:
            try:
                await self._connect(key, offer)
                (peer,) = self._known((key,))
                peer.link.post(
                    Decline(
                        ticket.request_id,
                        offer.offer_id,
                        self._config.rank.instance(),
                        detail[:1024],
                    )
                )
            except FerryError as error:
                errors.append(error)

        # Each by itself: a rank that is gone must not keep the word from the others.
        async with trio.open_nursery() as nursery:
            for key, offer in addressed(ticket):
                nursery.start_soon(tell, key, offer)
        if errors:
            raise errors[0]

    def leave(self, sources: Sources) -> None:
        """The caller makes no more transfers of these sources, and none is in flight."""
        sources.users -= 1
        self._discard_unused(sources)

    async def close(self, *, within_s: float) -> None:
        """Say goodbye to everybody, and take no new dials."""
        self._is_closed = True
        async with trio.open_nursery() as nursery:
            for peer in tuple(self._peers.values()):
                nursery.start_soon(_close, peer.link, within_s)

    async def _connect_all(
        self, offers: Sequence[tuple[EngineKey, RankAddress | RankOffer]]
    ) -> None:
        missing = [item for item in offers if item[0] not in self._peers]
        if len(missing) <= 1:
            for key, address in missing:
                await self._connect(key, address)
            return
        errors: list[FerryError] = []

        async def connect(key: EngineKey, address: RankAddress | RankOffer) -> None:
            try:
                await self._connect(key, address)
            except FerryError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for key, address in missing:
                nursery.start_soon(connect, key, address)
        if errors:
            raise errors[0]

    async def _connect(self, key: EngineKey, address: RankAddress | RankOffer) -> None:
        """One handshake per peer, in a task of the engine's: a caller that gives up
        does not take it from the others (case e4)."""
        if key in self._peers:
            return  # since the caller looked, by somebody else's dial
        if self._is_closed:
            raise EngineClosed("the engine is closing")
        dial = self._dials.get(key)
        if dial is None:
            dial = self._dials[key] = _Dial()
            self._nursery.start_soon(self._dial, key, address, dial)
        await dial.ended.wait()
        if dial.error is not None:
            # A copy each: an exception raised in two tasks mixes their tracebacks.
            raise copy.copy(dial.error) from dial.error

    async def _dial(
        self, key: EngineKey, address: RankAddress | RankOffer, dial: _Dial
    ) -> None:
        self.handshakes += 1
        where = f"{key}@{address.host}:{address.port}"
        log = self._log.bind(peer=where)

        def failed(error: FerryError) -> None:
            error.peer = error.peer or where
            error.phase = "connecting"
            dial.error = error
            log.warning("connect_failed", error=str(error))

        async def connect_and_serve() -> None:
            peer = await self._greet(key, address)
            log.info("peer_connected")
            self._peers[key] = peer
            self._settle(key, dial)
            await self._serve(peer)

        try:
            await guarded(connect_and_serve, on_failure=failed, log=log)
        except trio.Cancelled:
            failed(EngineClosed("the engine closed"))
            raise
        finally:
            self._settle(key, dial)

    def _settle(self, key: EngineKey, dial: _Dial) -> None:
        if self._dials.get(key) is dial:
            del self._dials[key]
        dial.ended.set()

    async def _greet(self, key: EngineKey, address: RankAddress | RankOffer) -> Peer:
        try:
            with trio.fail_after(self._config.connect_timeout_s):
                stream = await self._streams.dial(address.host, address.port)
                return await self._introduce(FramedStream(stream), key)
        except OSError as exc:
            raise PeerUnreachable(f"nobody answers: {exc}") from exc
        except trio.TooSlowError as exc:
            raise PeerUnreachable(
                f"no handshake within {self._config.connect_timeout_s} s"
            ) from exc

    async def _introduce(self, framed: FramedStream, key: EngineKey) -> Peer:
        try:
            card = await greet(framed, self._ours, key)
            peer = Peer(key, card, Link(framed, key))
            peer.agent = self._agents.connect(card.metadata, peer)
        except BaseException:
            await framed.aclose()
            raise
        return peer

    async def _serve(self, peer: Peer) -> None:
        """Run the peer's link; whatever ends it, the peer is gone with it."""
        cause: FerryError = EngineClosed("the engine closed")
        try:
            cause = await peer.link.run(peer.deliver)
        except Exception as exc:
            cause = FerryInternalError(f"the link's task failed: {exc}")
            raise
        finally:
            self._forget(peer, cause)

    def _forget(self, peer: Peer, cause: FerryError) -> None:
        if self._peers.get(peer.key) is peer:
            del self._peers[peer.key]
        lost = PeerLost(cause.detail, peer=str(peer.key))
        lost.__cause__ = cause
        peer.lose(lost)
        for keys, sources in tuple(self._sources.items()):
            if peer in sources.peers:
                del self._sources[keys]
                sources.is_stale = True
                self._discard_unused(sources)
        self._disconnect_unused(peer)
        self._log.info("peer_forgotten", peer=str(peer.key), cause=str(cause))

    def _prepare(self, keys: tuple[EngineKey, ...]) -> Sources:
        peers = self._known(keys)
        plan = self._plan(peers)
        sources = Sources(peers, plan, [[] for _ in peers])
        try:
            for peer, pairs in zip(peers, sources.prepared, strict=True):
                for section in plan.peers[peer.key].sections:
                    rows = section.local_rows
                    pairs.append(self._prepare_section(peer, section, rows))
                for bulk in plan.peers[peer.key].bulk:
                    rows = self._staging.rows(bulk)
                    pairs.append(self._prepare_section(peer, bulk, rows))
        except FerryError:
            self._discard(sources)
            raise
        self._sources[keys] = sources
        self._undiscarded.add(sources)
        return sources

    def _plan(self, peers: Sequence[Peer]) -> Plan[EngineKey]:
        """Plan, without bulk landings if there is no memory for them."""
        while True:
            policy = self._staging.policy()
            plan = prepare_plan(
                self._ours.card.layout,
                {peer.key: peer.card.layout for peer in peers},
                reader=self._config.rank.tp,
                skip_groups=self._config.skip_groups,
                policy=policy,
            )
            try:
                for peer in peers:
                    self._staging.make_room(plan.peers[peer.key].bulk)
            except MisuseError as error:
                self._log.warning("no_staging", error=str(error))
                self._staging.switch_off()
            else:
                return plan

    def _prepare_section(
        self, peer: Peer, section: Section | BulkSection, rows: Rows
    ) -> tuple[Prepared, Prepared]:
        ours = self._fabric.prepare(None, section.local_memory, rows)
        try:
            theirs = self._fabric.prepare(
                peer.agent, section.remote_memory, section.remote_rows
            )
        except FerryError:
            self._fabric.discard(ours)
            raise
        return ours, theirs

    def _known(self, keys: tuple[EngineKey, ...]) -> tuple[Peer, ...]:
        peers = tuple(self._peers.get(key) for key in keys)
        known = tuple(peer for peer in peers if peer is not None)
        if len(known) < len(keys):
            raise PeerLost("a rank was lost while others were being connected")
        return known

    def _discard_unused(self, sources: Sources) -> None:
        if sources.users or not sources.is_stale:
            return
        self._discard(sources)
        self._undiscarded.discard(sources)
        for peer in sources.peers:
            self._disconnect_unused(peer)

    def _discard(self, sources: Sources) -> None:
        for prepared in chain.from_iterable(chain.from_iterable(sources.prepared)):
            self._let_go(partial(self._fabric.discard, prepared))
        sources.prepared.clear()

    def _disconnect_unused(self, peer: Peer) -> None:
        """Let the fabric forget its agent, once nothing of it is in use."""
        peers = chain(
            self._peers.values(), *(sources.peers for sources in self._undiscarded)
        )
        if all(other is not peer for other in peers):
            self._agents.let_go(peer.agent, peer)

    def _let_go(self, call: Callable[[], None]) -> None:
        """What the transport does not give back costs memory, and no request."""
        try:
            call()
        except FerryError as error:
            self._log.warning("let_go_failed", error=str(error))


def addressed(ticket: Ticket) -> list[tuple[EngineKey, RankOffer]]:
    """Every rank's offer of a ticket, and who holds it."""
    return [
        (EngineKey(ticket.engine_id, offer.generation, offer.rank), offer)
        for offer in ticket.ranks
    ]


async def _close(link: Link, within_s: float) -> None:
    await link.close("the engine is closing", within_s=within_s)
