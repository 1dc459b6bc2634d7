"""`Peers`: the remote ranks that are known, and everything prepared for them.

One `Peer` owns everything known of one start of one rank; forgetting it is one
call, also for whoever is let go because nobody has needed it for long. What is
prepared of it goes when its last user ends. A peer that comes back at the same
address is a new peer with a key of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import trio

from kvferry.engine.dials import Dials
from kvferry.engine.guard import guarded
from kvferry.engine.handshake import greet
from kvferry.engine.link import GOODBYE_S, Link
from kvferry.engine.peer import Peer
from kvferry.engine.sources import Preparer
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    MisuseError,
    PeerLost,
    PeerUnreachable,
)
from kvferry.protocol.link import (
    Decline,
    Sought,
    Spare,
    as_detail,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.agents import Agents
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.link import FramedStream
    from kvferry.engine.party import Party
    from kvferry.engine.sources import Sources
    from kvferry.engine.staging import Staging
    from kvferry.engine.streams import Streams
    from kvferry.engine.trust import Trust
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.ticket import RankAddress, RankOffer, Ticket

__all__ = ("Peers", "sought")

SWEEP_S = 60.0
"""Back-offs that nobody cares for any more are looked for at least as often."""


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
        trust: Trust,
        agents: Agents,
        staging: Staging,
        log: FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._ours = ours
        self._agents = agents
        self._preparer = Preparer(
            config, ours.card.layout, fabric, staging=staging, log=log
        )
        self._nursery = nursery
        self._log = log
        self._peers: dict[EngineKey, Peer] = {}
        self._dials = Dials(
            config,
            streams,
            nursery,
            trust=trust,
            talk=self._greet,
            rng=random.Random(fabric.name),  # noqa: S311 - no secret
            log=log,
        )
        self._wanted: Counter[EngineKey] = Counter()  # by whoever dials now
        self._sources: dict[tuple[EngineKey, ...], Sources] = {}
        self._undiscarded: dict[Sources, None] = {}
        self._is_closed = False
        self.on_forgotten: Callable[[EngineKey], None] = _unheard
        """Hears of everybody who is let go."""

    def __len__(self) -> int:
        """How many are connected."""
        return len(self._peers)

    @property
    def dials(self) -> Dials[EngineKey, None]:
        """How they are reached."""
        return self._dials

    def sources_now(self, party: Party[RankOffer]) -> Sources | None:
        """As `sources`, if all of them are connected; None if not."""
        sources = self._sources.get(party.keys)
        if sources is None:
            if not all(key in self._peers for key in party.keys):
                return None
            sources = self._prepare(party)
        sources.users += 1
        return sources

    async def sources(self, party: Party[RankOffer]) -> Sources:
        """Connect the ranks and prepare reading from them.

        Counts the caller as a user: call `leave` when it makes no more transfers
        and none is in flight.

        Raises:
            PeerError: A rank cannot be reached, refuses, or is somebody else.
            ImpossiblePlan: The layouts cannot be paired.
            MisuseError: As many peers as ``max_peers`` allows are in use.
            EngineClosed: The engine is closing.
        """
        with self._wanting(party.keys):
            await self._connect_all(party)
            sources = self._sources.get(party.keys) or self._prepare(party)
            sources.users += 1
        return sources

    def hold(self, keys: Sequence[EngineKey]) -> Callable[[], None]:
        """Keep these ranks, once they are connected, until the result is called."""
        self._wanted.update(keys)
        return partial(self._let_idle, keys)

    async def connected(self, party: Party[RankAddress]) -> tuple[Peer, ...]:
        """Connect all of them.

        Raises:
            PeerError: A rank cannot be reached, refuses, or is somebody else.
            MisuseError: As many peers as ``max_peers`` allows are in use.
            EngineClosed: The engine is closing.
        """
        await self._connect_all(party)
        return self._known(party.keys)

    def known(self, keys: Iterable[EngineKey]) -> list[Peer]:
        """Those that are connected now."""
        return [self._peers[key] for key in keys if key in self._peers]

    async def reach(self, key: EngineKey, address: RankAddress) -> Peer:
        """Connect one rank.

        Raises:
            PeerError: As in `connected`.
        """
        await self._connect(key, address)
        return self._known((key,))[0]

    async def decline(
        self,
        ticket: Ticket,
        party: Party[RankOffer],
        detail: str,
        *,
        may_dial: bool = True,
    ) -> None:
        """Tell the ranks that a ticket will not be read, or not further.

        Args:
            ticket: The ticket.
            party: Whom it is about; the first that hears of it passes on who is spare.
            detail: Why.
            may_dial: Dial ranks that are not connected, rather than pass them over.

        Raises:
            PeerError: A rank could not be told; its lease will end.
        """
        errors: list[FerryError] = []
        spare = list(party.spare)
        # After that nothing is held any more that could be freed.
        limit_s = min(ticket.lease_s, self._config.pull_deadline_s)

        async def tell(number: int) -> None:
            key, offer = party.keys[number], party.ranks[number]
            try:
                with trio.fail_after(limit_s):
                    await self._connect(key, offer)
                (peer,) = self._known((key,))
                named, readers = offer.offer_id or sought(ticket), party.readers[number]
                peer.link.post(
                    Decline(ticket.request_id, named, readers, as_detail(detail))
                )
                if spare:
                    peer.link.post(
                        Spare(ticket.request_id, sought(ticket), tuple(spare))
                    )
                    spare.clear()
            except FerryError as error:
                errors.append(error)
            except trio.TooSlowError:
                errors.append(PeerUnreachable("not told in time", peer=str(key)))

        # Each by itself: a rank that is gone must not keep the word from the others.
        with self._wanting(party.keys):
            async with trio.open_nursery() as nursery:
                for number, key in enumerate(party.keys):
                    if may_dial or key in self._peers:
                        nursery.start_soon(tell, number)
        if errors:
            raise errors[0]

    def leave(self, sources: Sources) -> None:
        """The caller makes no more transfers of these sources, and none is in flight."""
        sources.users -= 1
        self._touch(sources.peers)
        self._discard_unused(sources)

    async def sweep(self) -> None:
        """Let go of whom nobody has needed for long, for ever (case e6)."""
        while True:
            now, idle_s = trio.current_time(), self._config.peer_idle_s
            # Whoever is in use now can be due one idle time from now at the earliest.
            due_at = now + min(idle_s, SWEEP_S)
            for peer in self._idle():
                if now >= peer.used_at + idle_s:
                    self._let_go(peer, "nobody has needed the peer for long")
                else:
                    due_at = min(due_at, peer.used_at + idle_s)
            self._dials.forget_old()
            await trio.sleep_until(due_at)

    def forget(self, wanted: Callable[[EngineKey], bool]) -> None:
        """Let go of peers now; pulls from them fail, and drain as ever."""
        self._dials.forget(wanted)
        for peer in tuple(self._peers.values()):
            if wanted(peer.key):
                self._let_go(peer, "this engine was told to forget the peer")

    async def close(self, *, within_s: float) -> None:
        """Say goodbye to everybody, and take no new dials."""
        self._is_closed = True
        async with trio.open_nursery() as nursery:
            for peer in tuple(self._peers.values()):
                nursery.start_soon(_close, peer.link, "the engine is closing", within_s)

    async def _connect_all(self, party: Party[RankOffer] | Party[RankAddress]) -> None:
        named: Iterable[tuple[EngineKey, RankOffer | RankAddress]] = zip(
            party.keys, party.ranks, strict=True
        )
        missing = [item for item in named if item[0] not in self._peers]
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
        if key in self._peers:
            return  # since the caller looked, by somebody else's dial
        if self._is_closed:
            raise EngineClosed("the engine is closing")
        if key not in self._dials:
            self._dials.check(key, address)
            self._make_room()
        await self._dials.reach(key, address)

    def _make_room(self) -> None:
        """Let the longest idle peer go, if there is no place for one more."""
        if len(self._peers) + len(self._dials) < self._config.max_peers:
            return
        idle = self._idle()
        if not idle:
            raise MisuseError(
                f"{len(self._peers)} peers are in use and {len(self._dials)} being"
                " dialled, max_peers allows no more"
            )
        longest = min(idle, key=lambda peer: peer.used_at)
        self._let_go(longest, "another peer takes its place")

    def _idle(self) -> list[Peer]:
        """Peers that no pull needs now, and no transfer that may still be in flight."""
        used = {peer for s in self._undiscarded if s.users for peer in s.peers}
        return [
            peer
            for peer in self._peers.values()
            if peer not in used and peer.key not in self._wanted
        ]

    @contextmanager
    def _wanting(self, keys: Sequence[EngineKey]) -> Iterator[None]:
        """Keep these ranks while inside, and while some are still being dialled."""
        self._wanted.update(keys)
        try:
            yield
        finally:
            self._let_idle(keys)

    def _let_idle(self, keys: Sequence[EngineKey]) -> None:
        self._wanted -= Counter(keys)
        self._touch(self._peers[key] for key in keys if key in self._peers)

    def _touch(self, peers: Iterable[Peer]) -> None:
        now = trio.current_time()
        for peer in peers:
            peer.used_at = now

    async def _greet(self, key: EngineKey, framed: FramedStream) -> None:
        card = await greet(framed, self._ours, key)
        link = Link(
            framed,
            key,
            keepalive_s=self._config.keepalive_s,
            silence_s=self._config.silence_s,
        )
        peer = Peer(key, card, link)
        peer.agent = await self._agents.connect(card.metadata, peer)
        self._peers[key] = peer
        self._log.info("peer_connected", peer=str(key))
        self._nursery.start_soon(self._serve, peer)

    async def _serve(self, peer: Peer) -> None:
        """Run the peer's link; whatever ends it, the peer is gone with it."""

        async def run() -> None:
            self._forget(peer, await peer.link.run(peer.deliver))

        try:
            await guarded(run, on_failure=partial(self._forget, peer), log=self._log)
        finally:
            self._forget(peer, EngineClosed("the engine closed"))

    def _let_go(self, peer: Peer, detail: str) -> None:
        """Part with a peer that still lives."""
        self._forget(peer, PeerLost(detail))
        self._nursery.start_soon(_close, peer.link, detail, GOODBYE_S)

    def _forget(self, peer: Peer, cause: FerryError) -> None:
        """Know the peer no more; what is prepared of it stays until its users end."""
        if peer.is_forgotten:
            return
        peer.is_forgotten = True
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
        self.on_forgotten(peer.key)
        self._log.info("peer_forgotten", peer=str(peer.key), cause=str(cause))

    def _prepare(self, party: Party[RankOffer]) -> Sources:
        sources = self._preparer.prepare(self._known(party.keys), party.layouts)
        self._sources[party.keys] = sources
        self._undiscarded[sources] = None
        return sources

    def _known(self, keys: tuple[EngineKey, ...]) -> tuple[Peer, ...]:
        peers = tuple(self._peers.get(key) for key in keys)
        known = tuple(peer for peer in peers if peer is not None)
        if len(known) < len(keys):
            raise PeerLost("a rank was lost while others were being connected")
        return known

    def _discard_unused(self, sources: Sources) -> None:
        if sources.users or not sources.is_stale:
            return
        self._preparer.discard(sources)
        self._undiscarded.pop(sources, None)
        for peer in sources.peers:
            self._disconnect_unused(peer)

    def _disconnect_unused(self, peer: Peer) -> None:
        """Let the fabric forget its agent, once nothing of it is in use."""
        peers = chain(
            self._peers.values(), *(sources.peers for sources in self._undiscarded)
        )
        if all(other is not peer for other in peers):
            self._agents.let_go(peer.agent, peer)


def _unheard(_key: EngineKey) -> None:
    pass


def sought(ticket: Ticket) -> Sought:
    """The offers that a ticket does not tell the ids of."""
    return Sought(ticket.digest, ticket.share, ticket.origin)


async def _close(link: Link, detail: str, within_s: float) -> None:
    await link.close(detail, within_s=within_s)
