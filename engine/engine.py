"""`open_engine` and `TransferEngine`: the nursery that holds everything together.

Owned here: the order in which things start and end. The pump ends last, in a
shielded scope, so that a drain always sees its transfers land, also when a
cancellation comes from around the engine; the links end just before it, so that
peers are told.
"""

from __future__ import annotations

import logging
import math
import secrets
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import structlog
import trio

from kvferry.engine.finish import FinishStage
from kvferry.engine.handshake import Credentials
from kvferry.engine.link import GOODBYE_S
from kvferry.engine.listener import Listener
from kvferry.engine.offer import Offer, Offers, ticket_spans
from kvferry.engine.peers import Peers
from kvferry.engine.pull import PullRequest, Pulls, Services
from kvferry.engine.pump import Pump
from kvferry.engine.quarantine import Quarantine
from kvferry.engine.rearrange import Rearranger
from kvferry.engine.spans import Span
from kvferry.engine.staging import Staging
from kvferry.engine.streams import Streams, TcpStreams
from kvferry.protocol.errors import (
    ConfigError,
    EngineClosed,
    MisuseError,
    ProtocolViolation,
    UnknownBlock,
)
from kvferry.protocol.handshake import Card
from kvferry.protocol.identity import EngineKey
from kvferry.protocol.notices import decode_notice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.cache import KVCache
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric, Notice
    from kvferry.engine.report import TransferReport
    from kvferry.engine.streams import BoundListener
    from kvferry.protocol.ticket import Ticket

__all__ = ("TransferEngine", "open_engine")

_KEPT: list[TransferEngine] = []
"""Engines that were left while transfers of theirs had not settled. Their agents are
never destroyed, which could end the peer's process (nixl-facts row 7), and neither is
the memory that may still be written to: both stay for the life of the process."""


class TransferEngine:
    """One rank's engine; made by `open_engine`.

    Attributes:
        config: As given.
        key: Who this start of the engine is.
        address: Where it listens; None without a listener.
        quarantine: Destination blocks that must not be reused yet.
    """

    def __init__(  # noqa: PLR0913 - built in one place, from its parts
        self,
        config: EngineConfig,
        key: EngineKey,
        cache: KVCache,
        fabric: Fabric,
        streams: Streams,
        nursery: trio.Nursery,
        *,
        log: FilteringBoundLogger,
    ) -> None:
        self.config = config
        self.key = key
        self.address: tuple[str, int] | None = None
        self.quarantine = Quarantine()
        self._cache = cache
        self._fabric = fabric
        self._log = log
        self._is_closing = False
        self._stray_notices = 0
        self._pump = Pump(fabric, config, on_notice=self._take_notice, log=log)
        ours = Credentials(
            key,
            Card(config.identity, cache.layout, fabric.metadata()),
            config.secret,
            config.skip_groups,
        )
        self._offers = Offers(key, config, self._pump, log=log)
        self._listener = Listener(config, ours, service=self._offers, log=log)
        self._staging = Staging(config, fabric)
        self._peers = Peers(
            config, ours, fabric, streams, nursery, staging=self._staging, log=log
        )
        self._pulls = Pulls(
            Services(
                config,
                key,
                cache.layout,
                fabric,
                pump=self._pump,
                peers=self._peers,
                staging=self._staging,
                rearranger=Rearranger(cache.storages()),
                finish=FinishStage(cache),
                quarantine=self.quarantine,
                nursery=nursery,
                log=log,
            )
        )

    def offer(
        self,
        request_id: str,
        blocks: Mapping[str, Sequence[int | None] | Span],
        *,
        num_tokens: int,
    ) -> Offer:
        """Hold a request's blocks for one consumer to read.

        The blocks must already hold the cache of the first ``num_tokens`` tokens,
        and must not be written or freed until the offer has ended. There is no
        waiting for a GPU stream yet: synchronise before.

        Args:
            request_id: Unique among the open offers of this engine.
            blocks: Per group the logical block ids in token order, or a `Span`; a
                plain list begins at token 0, ``None`` stands for a block that a
                window dropped. For a state group, its slots.
            num_tokens: Tokens in the cache; a state has advanced exactly so far.

        Returns:
            The offer, with its ticket.

        Raises:
            UnknownBlock: A group or a block id that the cache does not have.
            RequestInUse: The request has an open offer.
            MisuseError: As its detail says.
            EngineClosed: The engine is closing.
        """
        self._check_open(request_id)
        spans = {name: _span(given, first_token=0) for name, given in blocks.items()}
        self._check_groups(spans, request_id)
        return self._offers.open(
            request_id,
            ticket_spans(self._cache.layout, spans, num_tokens=num_tokens),
            num_tokens=num_tokens,
            address=self.address,
        )

    async def pull(
        self,
        ticket: Ticket,
        blocks: Mapping[str, Sequence[int | None] | Span],
        *,
        computed_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> TransferReport:
        """Read the cache that a ticket offers into our own blocks.

        From the call until it returns or raises, the destination blocks belong to
        the engine; then they are the caller's again, except those that
        ``engine.quarantine`` names. A cancelled pull drains first, for
        ``drain_grace_s`` at most, and lets the cancellation through.

        Args:
            ticket: The producer's ticket.
            blocks: Per group our logical block ids in token order, or a `Span`; a
                plain list begins at ``computed_tokens``. Every group of the cache
                that is not in ``skip_groups`` must be there.
            computed_tokens: Tokens that the blocks hold already, a prefix hit;
                nothing before this position is written.
            deadline_s: Seconds until the pull fails; ``pull_deadline_s`` of the
                configuration by default.

        Returns:
            The report: coverage was proved, and the producer has confirmed that it
            held its blocks until the last byte had been read. Every token slot of
            the spans behind ``num_tokens`` is zero.

        Raises:
            MisuseError: The call can never work; nothing was transferred.
            PeerError: The producer cannot be reached, differs, refuses, or was lost.
            TransferError: The bytes did not all arrive, the lease ran out, or the
                deadline passed.
            EngineClosed: The engine is closing.
        """
        self._check_open(ticket.request_id)
        spans = {
            name: _span(given, first_token=computed_tokens)
            for name, given in blocks.items()
        }
        self._check_groups(spans, ticket.request_id)
        self._check_free(spans, ticket.request_id)
        limit_s = self.config.pull_deadline_s if deadline_s is None else deadline_s
        if math.isnan(limit_s):
            raise MisuseError(
                "a deadline that is no number", request_id=ticket.request_id
            )
        return await self._pulls.run(
            PullRequest(ticket, spans, computed_tokens, trio.current_time() + limit_s)
        )

    async def decline(self, ticket: Ticket) -> None:
        """Tell the producer that a ticket will not be read: it is freed at once.

        Raises:
            PeerError: The producer could not be told; its lease will end the offer.
            EngineClosed: The engine is closing.
        """
        self._check_open(ticket.request_id)
        await self._peers.decline(ticket, "declined")

    def forget(self, peer: EngineKey | str) -> None:
        """Let go of a peer now, for instance because its process is known to be gone.

        Links to and from it end, its back-off is over, pulls from it fail (and drain
        as ever), and offers that it was reading end as LOST. What is prepared for
        transfers that are still in flight stays until these have settled. The peer
        may come back at any time: it is dialled when the next ticket names it.

        Args:
            peer: One start of one rank, or the engine id of a whole instance.
        """

        def is_meant(key: EngineKey) -> bool:
            return key.engine_id == peer if isinstance(peer, str) else key == peer

        self._peers.forget(is_meant)
        self._listener.forget(is_meant)

    def statistics(self) -> dict[str, int]:
        """Live resources and counters by name, for metrics and leak checks."""
        return {
            "pulls": len(self._pulls),
            "offers": len(self._offers),
            "peers": len(self._peers),
            "links": len(self._listener),
            "dials": len(self._peers.dials),
            "peers_held_back": self._peers.dials.held_back,
            "quarantine": len(self.quarantine),
            "unsettled_transfers": self._pump.unsettled,
            "staging_berths_taken": self._staging.taken_berths,
            "handshakes_refused": self._listener.refused,
            "stray_messages": self._offers.strays,
            "stray_notices": self._stray_notices,
            **{f"fabric_{k}": v for k, v in self._fabric.counts().items()},
        }

    def _check_open(self, request_id: str) -> None:
        if self._is_closing:
            raise EngineClosed("the engine is closing", request_id=request_id)

    def _check_groups(self, spans: Mapping[str, Span], request_id: str) -> None:
        """Blocks are given for every group that is transferred, and for no other."""
        known = {g.name for g in self._cache.layout.groups} - self.config.skip_groups
        for name in sorted(known ^ spans.keys()):
            what = "no blocks were given for" if name in known else "there is no"
            raise UnknownBlock(
                f"{what} group {name!r}; blocks are due for {sorted(known)}",
                request_id=request_id,
            )

    def _check_free(self, spans: Mapping[str, Span], request_id: str) -> None:
        """A block that an earlier transfer may still write to holds nobody's cache."""
        if not self.quarantine:
            return
        for name, span in spans.items():
            held = self.quarantine.blocks(name).intersection(span.block_ids)
            if held:
                raise MisuseError(
                    f"group {name!r}: blocks {sorted(held)[:8]} are in quarantine;"
                    " await engine.quarantine.wait_empty(), or give others",
                    request_id=request_id,
                )

    def _take_notice(self, notice: Notice) -> None:
        """Pulls need no notices: whatever arrives is counted, and changes nothing."""
        self._stray_notices += 1
        try:
            kind = type(decode_notice(notice.payload)).__name__
        except ProtocolViolation as error:
            kind = str(error)
        self._log.warning("stray_notice", sender=notice.sender, notice=kind)

    async def _listen(self, streams: Streams, nursery: trio.Nursery) -> None:
        if self.config.listen is None:
            return
        try:
            bound: BoundListener = await streams.listen(*self.config.listen)
        except OSError as exc:
            raise ConfigError(f"cannot listen on {self.config.listen}: {exc}") from exc
        try:
            self.config.check_bound(bound.host)
        except ConfigError:
            await bound.aclose()
            raise
        self.address = (self.config.advertise or bound.host, bound.port)
        nursery.start_soon(self._listener.run, bound)

    async def _shut_down(self) -> None:
        """Take nothing new, tell everybody, wait for what is under way.

        Shielded, with a deadline: also after a cancellation the pulls drain.
        """
        self._is_closing = True
        self._offers.withdraw_all()
        limit_s = self.config.drain_grace_s + 4 * GOODBYE_S
        with trio.move_on_after(limit_s, shield=True):
            await self._pulls.close()
            await self._listener.close(within_s=GOODBYE_S)
            await self._peers.close(within_s=GOODBYE_S)
        for entry in self.quarantine:
            self._log.error(
                "closed_undrained",
                request=entry.request_id,
                peer=entry.peer,
                blocks={name: list(ids) for name, ids in entry.blocks.items()},
            )

    async def _run_pump(self, scope: trio.CancelScope) -> None:
        with scope:
            await self._pump.run()


def _span(given: Sequence[int | None] | Span, *, first_token: int) -> Span:
    return given if isinstance(given, Span) else Span(given, first_token)


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    cache: KVCache,
    *,
    fabric: Fabric | None = None,
    streams: Streams | None = None,
    logger: Any = None,  # noqa: ANN401 - structlog's own loggers are typed as Any
) -> AsyncIterator[TransferEngine]:
    """Open an engine around a cache; a trio async context manager.

    Leaving it withdraws all offers, fails the pulls under way, drains their
    transfers and says goodbye. If transfers have not settled after the grace, it
    says so, and keeps the agent and the cache's memory for as long as the process
    lives: ``engine.quarantine`` still tells which blocks. Leave it before the process ends: an agent that
    is destroyed under a transfer can take down the peer's process (nixl-facts
    rows 7 and 23).

    Args:
        config: The configuration.
        cache: The cache, which keeps its tensors alive; they must stay in place
            until the engine is closed.
        fabric: The transport; NIXL over UCX by default, for which a cache in
            device memory makes its device this thread's current one. The engine
            closes it.
        streams: Where links come from; TCP by default.
        logger: A structlog logger; by default one that writes to the standard
            library's logger ``kvferry``, so that nothing is printed unasked.

    Raises:
        ConfigError: The engine cannot listen where it should.
        MisuseError: The transport cannot register the cache's memory.
    """
    key = EngineKey(config.engine_id, secrets.token_hex(16), config.rank)
    log = (logger or _standard_logger()).bind(engine=str(key))
    streams = streams or TcpStreams()
    fabric = fabric or _nixl(key, cache, log)
    engine: TransferEngine | None = None
    try:
        fabric.register(cache.layout.regions)
        with _ungrouped(nurseries=2):
            pump_scope = trio.CancelScope(shield=True)
            services = _Services()
            async with trio.open_nursery() as pump_nursery:
                try:
                    async with trio.open_nursery() as outer:
                        outer.start_soon(services.run)
                        try:
                            await services.opened.wait()
                            engine = TransferEngine(
                                config,
                                key,
                                cache,
                                fabric,
                                streams,
                                services.nursery,
                                log=log,
                            )
                            # Not with `start`: were it cancelled, it would wait for
                            # the shielded task, and for ever.
                            pump_nursery.start_soon(engine._run_pump, pump_scope)
                            services.nursery.start_soon(engine._offers.sweep)
                            services.nursery.start_soon(engine._peers.sweep)
                            await engine._listen(streams, services.nursery)
                            log.info("engine_opened", address=engine.address)
                            try:
                                yield engine
                            finally:
                                await engine._shut_down()
                        finally:
                            services.scope.cancel()
                finally:
                    pump_scope.cancel()
    finally:
        _part_with(fabric, engine)
        log.info("engine_closed")


def _part_with(fabric: Fabric, engine: TransferEngine | None) -> None:
    """Destroy the agent, unless bytes may still be moving though the grace is over."""
    if engine is None or not engine._pump.unsettled:
        fabric.close()
        return
    _KEPT.append(engine)
    engine._log.error(
        "agent_kept",
        agent=fabric.name,
        unsettled_transfers=engine._pump.unsettled,
        requests=[entry.request_id for entry in engine.quarantine],
        peers=sorted({entry.peer for entry in engine.quarantine}),
    )


class _Services:
    """A nursery for links, dials and what pulls leave to do.

    In a task of its own and shielded, like the pump: a cancellation from around
    the engine must take the links away neither from a pull that drains nor from
    the words that tell a peer about it.
    """

    nursery: trio.Nursery

    def __init__(self) -> None:
        self.scope = trio.CancelScope(shield=True)
        self.opened = trio.Event()

    async def run(self) -> None:
        """Keep the nursery open until the scope is cancelled."""
        with self.scope:
            async with trio.open_nursery() as self.nursery:
                self.opened.set()
                await trio.sleep_forever()


@contextmanager
def _ungrouped(*, nurseries: int) -> Iterator[None]:
    """Let one error out as itself: the nurseries around it are our own business.

    Without this an error that `pull` raises could not be caught by its type
    around the engine. Several errors at once stay a group.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        error = group
    if error is None:
        return
    for _ in range(nurseries):
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # and not the group that it was in


def _standard_logger() -> Any:  # noqa: ANN401 - structlog's own loggers are typed as Any
    return structlog.wrap_logger(
        logging.getLogger("kvferry"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _nixl(key: EngineKey, cache: KVCache, log: FilteringBoundLogger) -> Fabric:
    # Imported when needed: the bindings take seconds to load, and tests that
    # bring a fabric of their own can do without.
    from kvferry.engine.fabric.nixl import NixlFabric  # noqa: PLC0415

    return NixlFabric(str(key), enter_device=cache.enter_device, log=log)
