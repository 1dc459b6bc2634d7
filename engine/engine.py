"""`TransferEngine`: the public face of one rank.

Calls are checked here as far as that needs no peer; what they do is done in the
services (`kvferry.engine.assembly`). How an engine begins and ends is in
`kvferry.engine.opening`.
"""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import trio

from kvferry.engine.after import check_after
from kvferry.engine.arguments import check_request_id, plain_span, whole
from kvferry.engine.holds import Offer, ticket_spans
from kvferry.engine.instance import contact_of
from kvferry.engine.landing import LandingRequest
from kvferry.engine.pull import PullRequest
from kvferry.engine.push import PushRequest
from kvferry.engine.spans import as_array
from kvferry.protocol.errors import (
    DeadlineExceeded,
    EngineClosed,
    FerryError,
    FerryInternalError,
    MisuseError,
    UnknownBlock,
)
from kvferry.protocol.ticket import Contact, Ticket

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Mapping,
        Sequence,
    )

    from kvferry.engine.after import After
    from kvferry.engine.assembly import Assembly
    from kvferry.engine.cache import KVCache
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.push import PushStream
    from kvferry.engine.report import PushReport, TransferReport
    from kvferry.engine.spans import Span
    from kvferry.protocol.identity import EngineKey

__all__ = ("TransferEngine",)

T = TypeVar("T")


class TransferEngine:
    """One rank's engine; made by `open_engine`.

    Attributes:
        config: As given.
        key: Who this start of the engine is.
        address: Where it listens; None without a listener.
        quarantine: Destination blocks that must not be reused yet.
    """

    def __init__(
        self, config: EngineConfig, key: EngineKey, cache: KVCache, assembly: Assembly
    ) -> None:
        self.config = config
        self.key = key
        self.address: tuple[str, int] | None = None
        self.quarantine = assembly.quarantine
        self._assembly = assembly
        self._cache = cache
        self._groups = {g.name for g in cache.layout.groups} - config.skip_groups
        self._fabric = assembly.fabric
        self._pump = assembly.pump
        self._traffic = assembly.traffic
        self._staging = assembly.staging
        self._trust = assembly.trust
        self._peers = assembly.peers
        self._instance = assembly.instance
        self._asks = assembly.asks
        self._routes = assembly.routes
        self._offers = assembly.offers
        self._pulls = assembly.pulls
        self._pushes = assembly.pushes
        self._landings = assembly.landings
        self._listener = assembly.listener

    def offer(
        self,
        request_id: str,
        blocks: Mapping[str, Sequence[int | None] | Span],
        *,
        num_tokens: int,
        after: After | None = None,
        consumers: int = 1,
    ) -> Offer:
        """Hold a request's blocks for one consumer to read, or for several.

        The blocks must hold the cache of the first ``num_tokens`` tokens, now or when
        ``after`` has completed, and must not be written then or freed until the
        offer has ended. Transfers are not ordered with GPU streams: give an event
        that was recorded behind the work that fills the blocks, or synchronise
        before.

        Args:
            request_id: Unique among the open offers of this engine.
            blocks: Per group the logical block ids in token order, or a `Span`; a
                plain list begins at token 0, ``None`` stands for a block that a
                window dropped. For a state group, its slots.
            num_tokens: Tokens in the cache; a state has advanced exactly so far.
            after: What must be over before a byte is read: a recorded
                ``torch.cuda.Event``, or a callable that returns an awaitable, called
                once in a task that is cancelled when the offer ends. The ticket is
                good at once, and its lease runs meanwhile. If it fails, the offer is
                withdrawn, and ``offer.cause`` says why.
            consumers: How many read it, each by a ticket and under a lease of its own.
                The offer ends when each of its tickets has been read or declined, or
                has expired.

        Returns:
            The offer, with its tickets. Once our instance is complete, they are good
            for all its ranks: give any one rank's to the consumer, and call this on
            each of them, at any time, with the same request, blocks and counts.

        Raises:
            UnknownBlock: A group or a block id that the cache does not have.
            RequestInUse: The request has an open offer.
            InstanceIncomplete: A rank of our instance has gone.
            MisuseError: As its detail says.
            EngineClosed: The engine is closing.
        """
        with _Naming(request_id):
            check_request_id(request_id)
            num_tokens = whole(num_tokens, "num_tokens")
            consumers = whole(consumers, "consumers")
            spans = self._spans(blocks, first_token=0, after=after)
            return self._offers.open(
                request_id,
                ticket_spans(self._cache.layout, spans, num_tokens=num_tokens),
                num_tokens=num_tokens,
                address=self.address,
                after=after,
                consumers=consumers,
            )

    async def pull(
        self,
        ticket: Ticket,
        blocks: Mapping[str, Sequence[int | None] | Span],
        *,
        computed_tokens: int = 0,
        deadline_s: float | None = None,
        after: After | None = None,
        priority: int = 0,
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
            after: What must be over before a byte is written, zeros included: a
                recorded ``torch.cuda.Event`` behind the last work on the blocks, or
                a callable that returns an awaitable, called once in a task that is
                cancelled when the pull ends. If it fails, so does the pull.
            priority: Of its waves among those that wait for their turn: a higher
                number goes first, equal ones take turns.

        Returns:
            The report: coverage was proved, and the producer has confirmed that it
            held its blocks until the last byte had been read. Every token slot of
            the spans behind ``num_tokens`` is zero.

        Raises:
            MisuseError: The call can never work; nothing was transferred. So with a
                ticket of an address that nobody whom we trust has named
                (`UntrustedTicket`): nothing is dialled, then.
            PeerError: The producer cannot be reached, differs, refuses, or was lost.
            TransferError: The bytes did not all arrive, the lease ran out, the ticket
                is too old, or the deadline passed.
            EngineClosed: The engine is closing.
        """
        with _Naming(ticket.request_id, ticket.engine_id):
            computed_tokens = whole(computed_tokens, "computed_tokens")
            priority = whole(priority, "priority")
            spans = self._destinations(blocks, computed_tokens, after=after)
            deadline_at = self._deadline_at(deadline_s)
            self._trust.check(ticket)
            self._trust.check_fresh(ticket)
            return await self._pulls.run(
                PullRequest(
                    ticket, spans, computed_tokens, deadline_at, after, priority
                )
            )

    @property
    def contact(self) -> Contact:
        """Where our instance listens: for consumers that expect a push from it.

        Of all its ranks, once they have joined; of this rank alone, if it knows of no
        others: contacts of such ranks are merged by hand.

        Raises:
            ConfigError: A rank has no listener.
            InstanceIncomplete: A rank was lost, or has not joined yet.
        """
        return self._trust.sign(self._instance.contact(self.address))

    async def instance_ready(self, deadline_s: float | None = None) -> None:
        """Wait until all ranks of our instance have joined, in whatever order.

        Args:
            deadline_s: Seconds until it fails; ``instance_deadline_s`` of the
                configuration by default.

        Raises:
            InstanceIncomplete: They have not; the detail names who is missing, there
                twice, or of another size or model.
            EngineClosed: The engine is closing.
        """
        limit_s = self.config.instance_deadline_s if deadline_s is None else deadline_s
        await self._instance.wait_ready(self._deadline_at(limit_s))

    async def discover(
        self,
        engine_id: str,
        address: tuple[str, int],
        *,
        deadline_s: float | None = None,
    ) -> Contact:
        """Ask any one rank of another instance where all of its ranks are.

        Without a secret only an address is asked that is trusted, as with a ticket.

        Args:
            engine_id: Of the instance.
            address: Host and port of one of its ranks.
            deadline_s: Seconds until it fails; ``connect_timeout_s`` from when it is
                its turn by default.

        Raises:
            InstanceIncomplete: Ranks of it have not joined yet; the detail names them.
            UntrustedTicket: The address is none that may be dialled.
            PeerError: Nobody answers, or not the right one, or it refuses.
            ConfigError: A rank of it has no listener.
            DeadlineExceeded: The deadline has passed.
            EngineClosed: The engine is closing.
        """
        self._check_open()
        host, port = address
        limit_s = math.inf if deadline_s is None else deadline_s
        with trio.move_on_at(self._deadline_at(limit_s)):
            manifest = await self._asks.fetch(engine_id, host, port)
            # What the handshake has proved, whoever has the secret may know.
            return self._trust.sign(contact_of(manifest))
        raise DeadlineExceeded(
            "the instance did not answer in time", peer=f"{engine_id}@{host}:{port}"
        )

    async def agree(
        self,
        key: str,
        work: Callable[[], Awaitable[T]],
        *,
        deadline_s: float | None = None,
    ) -> T:
        """Do this rank's part of what all ranks of our instance do, for one outcome.

        ::

            pull = partial(engine.pull, ticket, blocks)
            report = await engine.agree(f"pull {request_id}", pull)

        Called on every rank with the same key. It returns when every rank's work is
        done; the first failure is told to all at once: they cancel their work, which
        drains as ever, and all raise the same error, whose ``origin`` names the rank.
        A rank raises when its own work has drained: others may still be at it. Where
        ranks share block ids, a block is free when it is on all of them.
        So do they if a rank is lost, or if its caller cancels it. If it is the link
        between a rank and the lead that ends, just when the last is done, that rank
        alone can hear of a failure; none hears "done" that was not.

        Args:
            key: Names this one try; never used again, whatever comes of it.
            work: Called once, in this task.
            deadline_s: Seconds until it fails, naming the ranks that were not heard;
                ``pull_deadline_s`` by default. The work's own deadline is another one:
                give both for what takes longer, such as `Offer.released`.

        Returns:
            What the work returned.

        Raises:
            FerryError: What the work of the rank that failed first has raised. What
                is no error of kvferry's is raised as it is where it was, and as a
                TransferError on the others.
            PeerLost: A rank was lost.
            DeadlineExceeded: As above.
            InstanceIncomplete: Not all ranks have joined.
            MisuseError: The key was used before, or is in use.
            EngineClosed: The engine is closing.
        """
        with _Naming(None, phase="agreeing"):
            check_request_id(key)
            return await self._instance.agree(
                key, work, deadline_at=self._deadline_at(deadline_s)
            )

    async def expect(
        self,
        source: Ticket | Contact,
        blocks: Mapping[str, Sequence[int | None] | Span],
        *,
        request_id: str | None = None,
        computed_tokens: int = 0,
        deadline_s: float | None = None,
        after: After | None = None,
    ) -> TransferReport:
        """Let a producer push a request's cache into our own blocks.

        The producer may push before or after this is called. From the call until it
        returns or raises, the blocks belong to the engine, and the producer may write
        them; then they are the caller's again, except those that ``engine.quarantine``
        names. One that ends early, or is cancelled, asks every producer rank for the
        blocks first, for ``drain_grace_s`` at most: a rank that does not answer leaves
        them in quarantine, and is asked again until it does.

        Args:
            source: Who pushes: the contacts of all its ranks, merged, or a ticket of
                them.
            blocks: As in `pull`.
            request_id: As the producer calls it; a ticket's own by default.
            computed_tokens: As in `pull`.
            deadline_s: Seconds until it fails; ``pull_deadline_s`` by default.
            after: A CUDA event, or a callable that returns an awaitable: nothing is
                written to the blocks before it has completed.

        Returns:
            The report: every producer rank has confirmed its last byte, each was seen
            to arrive, and they are the bytes that were asked for. Every token slot of
            the spans behind the request's tokens is zero.

        Raises:
            MisuseError: The call can never work, or the producer's cache does not fit;
                nothing was transferred.
            PeerError: A producer rank cannot be reached, differs, or was lost.
            TransferError: The producer gave up, or the deadline passed.
            EngineClosed: The engine is closing.
        """
        ticket = source if isinstance(source, Ticket) else None
        contact = source.contact if isinstance(source, Ticket) else source
        if request_id is None:
            if ticket is None:
                raise MisuseError("with a contact, say which request_id is expected")
            request_id = ticket.request_id
        with _Naming(request_id, contact.engine_id):
            check_request_id(request_id)
            computed_tokens = whole(computed_tokens, "computed_tokens")
            spans = self._destinations(blocks, computed_tokens, after=after)
            self._trust.check(source)
            if ticket is not None:
                self._trust.check_fresh(ticket)
            return await self._landings.run(
                LandingRequest(
                    request_id,
                    contact,
                    spans,
                    computed_tokens,
                    self._deadline_at(deadline_s),
                    None if ticket is None else ticket.num_tokens,
                    after,
                )
            )

    async def push(
        self,
        request_id: str,
        blocks: Mapping[str, Sequence[int | None] | Span],
        *,
        num_tokens: int,
        deadline_s: float | None = None,
        after: After | None = None,
    ) -> PushReport:
        """Write a request's cache into the blocks of those who expect it.

        The blocks must not be written or freed until it has returned or raised; then
        they are the caller's again, except those that ``engine.quarantine`` names.

        Args:
            request_id: Not in another push of this engine.
            blocks: As in `offer`.
            num_tokens: As in `offer`.
            deadline_s: Seconds until it fails if not every rank of the consumer has
                registered and has it all; ``pull_deadline_s`` by default.
            after: A CUDA event, or a callable that returns an awaitable: nothing is
                read from the blocks before it has completed.

        Returns:
            The report: every rank of the consumer has said that it landed.

        Raises:
            MisuseError: The call can never work, or the consumer's blocks do not fit.
            PeerError: A consumer rank was lost.
            TransferError: The bytes did not all arrive, the consumer took its blocks
                back, or the deadline passed.
            EngineClosed: The engine is closing.
        """
        async with self.push_stream(
            request_id, blocks, num_tokens=num_tokens, deadline_s=deadline_s
        ) as stream:
            await stream.ready(after=after)
        if stream.report is None:
            raise FerryInternalError("a push ended without a report")
        return stream.report

    @asynccontextmanager
    async def push_stream(
        self,
        request_id: str,
        blocks: Mapping[str, Sequence[int | None] | Span],
        *,
        num_tokens: int,
        deadline_s: float | None = None,
    ) -> AsyncIterator[PushStream]:
        """Push while the cache is still being computed: step by step as it gets final.

        ::

            async with engine.push_stream("req-1", blocks, num_tokens=700) as stream:
                for first in range(0, 700, 256):
                    ...  # compute a chunk
                    await stream.ready(tokens=(first, min(first + 256, 700)))

        Leaving the block commits: it waits until every rank of the consumer has it
        all, and fails on both sides if anything never became ready. Leaving it by an
        error or a cancellation aborts on both sides. The consumer sees nothing before
        the commit.

        Args:
            request_id, blocks, deadline_s: As in `push`.
            num_tokens: As in `offer`; of the whole request.

        Raises:
            IncompletePush: Something never became ready; it is named.
            FerryError: As in `push`.
        """
        with _Naming(request_id):
            check_request_id(request_id)
            num_tokens = whole(num_tokens, "num_tokens")
            spans = self._spans(blocks, first_token=0)
            # Only for its checks: what may be offered may be pushed.
            ticket_spans(self._cache.layout, spans, num_tokens=num_tokens)
            deadline_at = self._deadline_at(deadline_s)
            request = PushRequest(request_id, spans, num_tokens, deadline_at)
        async with self._pushes.stream(request) as stream:
            yield stream

    async def decline(self, ticket: Ticket) -> None:
        """Tell the producer that a ticket will not be read: it is freed at once.

        With several ranks, once each of them has said so.

        Raises:
            UntrustedTicket: As in `pull`.
            PeerError: The producer could not be told; its lease will end the offer.
            EngineClosed: The engine is closing.
        """
        with _Naming(ticket.request_id, ticket.engine_id, phase="declining"):
            self._check_open()
            self._trust.check(ticket)
            party = await self._routes.find(ticket)
            await self._peers.decline(ticket, party, "declined")

    @property
    def backlog_bytes(self) -> int:
        """About how many bytes wait for their turn, because as much is in flight as
        the configuration allows."""
        return self._traffic.bytes_waiting

    async def wait_backlog(self, limit_bytes: int = 0) -> None:
        """Wait until no more than so many bytes wait for their turn."""
        await self._traffic.wait_backlog(limit_bytes)

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
            "pushes": len(self._pushes),
            "deliveries": self._pushes.deliveries,
            "targets": self._pushes.targets,
            "landings": len(self._landings),
            "peers": len(self._peers),
            "links": len(self._listener),
            "dials": len(self._peers.dials),
            "peers_held_back": self._peers.dials.held_back,
            "quarantine": len(self.quarantine),
            "unsettled_transfers": self._pump.unsettled,
            "bytes_in_flight": self._traffic.bytes_in_flight,
            "bytes_waiting": self._traffic.bytes_waiting,
            "staging_berths_taken": self._staging.taken_berths,
            "handshakes_refused": self._listener.refused,
            "parked_messages": self._offers.parked,
            "stray_messages": self._offers.strays + self._pushes.strays,
            "stray_notices": self._landings.intake.strays,
            "asks": len(self._asks),
            **self._instance.statistics(),
            **{f"fabric_{k}": v for k, v in self._fabric.counts().items()},
        }

    def _deadline_at(self, deadline_s: float | None) -> float:
        limit_s = self.config.pull_deadline_s if deadline_s is None else deadline_s
        if math.isnan(limit_s):
            raise MisuseError("a deadline that is no number")
        return trio.current_time() + limit_s

    def _spans(
        self,
        blocks: Mapping[str, Sequence[int | None] | Span],
        *,
        first_token: int,
        after: After | None = None,
    ) -> dict[str, Span]:
        """A request's blocks, after all checks that need no peer and no counts."""
        self._check_open()
        spans = {
            name: plain_span(given, first_token=first_token)
            for name, given in blocks.items()
        }
        self._check_groups(spans)
        self._check_free(spans)
        if after is not None:
            check_after(after)
        return spans

    def _destinations(
        self,
        blocks: Mapping[str, Sequence[int | None] | Span],
        computed_tokens: int,
        *,
        after: After | None,
    ) -> dict[str, Span]:
        """The same of blocks that are written to: whatever becomes of the caller's lists
        meanwhile, no others are."""
        spans = self._spans(blocks, first_token=computed_tokens, after=after)
        return {
            name: as_array(span, group=name, side="consumer")
            for name, span in spans.items()
        }

    def _check_open(self) -> None:
        if self._assembly.is_closing:
            raise EngineClosed("the engine is closing")

    def _check_groups(self, spans: Mapping[str, Span]) -> None:
        """Blocks are given for every group that is transferred, and for no other."""
        known = self._groups
        if known == spans.keys():
            return
        for name in sorted(known ^ spans.keys()):
            what = "no blocks were given for" if name in known else "there is no"
            raise UnknownBlock(
                f"{what} group {name!r}; blocks are due for {sorted(known)}"
            )

    def _check_free(self, spans: Mapping[str, Span]) -> None:
        """A block that an earlier transfer may still write to holds nobody's cache."""
        if not self.quarantine:
            return
        for name, span in spans.items():
            held = self.quarantine.blocks(name).intersection(span.block_ids)
            if held:
                raise MisuseError(
                    f"group {name!r}: blocks {sorted(held)[:8]} are in quarantine;"
                    " await engine.quarantine.wait_free(group, ids), or give others"
                )


class _Naming:
    """What fails before it has a context of its own names request, peer and phase."""

    def __init__(
        self, request_id: str | None, peer: str | None = None, *, phase: str = "new"
    ) -> None:
        self._request_id = request_id
        self._peer = peer
        self._phase = phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _at: object) -> None:
        if isinstance(error, FerryError):
            error.request_id = error.request_id or self._request_id
            error.peer = error.peer or self._peer
            error.phase = error.phase or self._phase
