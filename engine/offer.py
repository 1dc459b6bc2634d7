"""The offer service: what this engine holds for others to read.

Drives one `OfferMachine` for each offer: messages from links and the clock go
in, answers on the links and released blocks come out.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import secrets
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from kvferry.engine.after import check_after, is_over, wait_for
from kvferry.engine.guard import guarded
from kvferry.engine.pump import Cadence
from kvferry.engine.spans import ABSENT, Placement, Side, Span, span_ids
from kvferry.protocol.errors import (
    ConfigError,
    FerryInternalError,
    MisuseError,
    PeerLost,
    ProtocolViolation,
    RequestInUse,
    UnknownBlock,
)
from kvferry.protocol.lifecycle.offer import (
    BlocksComputed,
    ConfirmRead,
    EndOffer,
    NoteReader,
    OfferDeclined,
    OfferMachine,
    OfferState,
    OfferTicked,
    ReadEnded,
    ReaderLost,
    RefuseReader,
    RenewArrived,
    ReportReady,
    WithdrawRequested,
)
from kvferry.protocol.link import (
    Confirmed,
    Decline,
    OfferReady,
    ReadFinished,
    Refused,
    RefusedReason,
    Renew,
)
from kvferry.protocol.ticket import RankOffer, Ticket, TicketSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.after import After
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.link import Link
    from kvferry.engine.pump import Pump
    from kvferry.engine.trust import Trust
    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.layout import CacheLayout, GroupLayout
    from kvferry.protocol.lifecycle.machine import Effect, Event
    from kvferry.protocol.link import LinkMessage

__all__ = ("Offer", "OfferOutcome", "Offers", "ticket_spans")

ENDED_OFFERS = 4096
"""Ended offers that are remembered, so that a late reader learns why."""


SPARE_DEADLINES = 1024
"""Deadlines of ended offers that may be left: each clearing looks at all of them."""


class OfferOutcome(enum.Enum):
    """How an offer ended; in each case its blocks are the caller's again."""

    RELEASED = "released"
    """Every reader has read it, or has declined."""
    LOST = "lost"
    """A reader went away before it was done; others, if any, have read or declined.

    Reads of it may still be in flight. They harm no one: that reader can never be
    told that it succeeded, and what it reads now it cannot trust.
    """
    EXPIRED = "expired"
    """Nobody renewed its lease."""
    WITHDRAWN = "withdrawn"
    """The producer took it back; readers under way will fail."""


@dataclass(eq=False)
class _Held:
    """An offer's inside: its machine, and what ends with it.

    Attributes:
        claims: On the pump's cadence, while blocks are held.
        awaits: Around the wait for the producer's event.
        cause: Why that failed.
        readers: Where those that have accepted, or renewed, did so: link and attempt.
    """

    ticket: Ticket
    machine: OfferMachine
    claims: ExitStack = field(default_factory=ExitStack)
    ended: trio.Event = field(default_factory=trio.Event)
    awaits: trio.CancelScope = field(default_factory=trio.CancelScope)
    cause: FerryError | None = None
    readers: dict[EngineKey, tuple[Link, int]] = field(default_factory=dict)


class Offer:
    """The producer's hold on a request's blocks while its ticket is out.

    The blocks must not be written or freed until `wait` has returned, or
    `withdraw` has been called.

    Attributes:
        ticket: For the consumer, through the router.
    """

    def __init__(self, held: _Held, withdraw: Callable[[], None]) -> None:
        self.ticket = held.ticket
        self._held = held
        self._withdraw = withdraw

    @property
    def outcome(self) -> OfferOutcome | None:
        """How it ended; None while it is open."""
        return _outcome(self._held.machine)

    @property
    def cause(self) -> FerryError | None:
        """Why ``after`` failed, which has withdrawn the offer; None otherwise."""
        return self._held.cause

    async def wait(self) -> OfferOutcome:
        """Wait for the end; cancelling the wait does not touch the offer.

        Returns:
            The one outcome; the blocks are the caller's again.
        """
        await self._held.ended.wait()
        return OfferOutcome(self._held.machine.state.value)

    def withdraw(self) -> None:
        """Take the blocks back at once; readers under way will fail their fence."""
        self._withdraw()


def _outcome(machine: OfferMachine) -> OfferOutcome | None:
    if machine.state is OfferState.OPEN:
        return None
    return OfferOutcome(machine.state.value)


def _offer_id(held: _Held) -> str:
    return held.ticket.ranks[0].offer_id  # an engine's own ticket has one rank


class Offers:
    """All offers of one engine.

    Invariant: an offer is active (its blocks are held) exactly while its machine
    is open; ended ones are kept, without a hold, until they are forgotten.
    """

    def __init__(
        self,
        key: EngineKey,
        config: EngineConfig,
        pump: Pump,
        nursery: trio.Nursery,
        *,
        trust: Trust,
        log: FilteringBoundLogger,
    ) -> None:
        self._key = key
        self._config = config
        self._pump = pump
        self._nursery = nursery
        self._trust = trust
        self._log = log
        self._active: dict[str, _Held] = {}  # by request id
        self._ended: OrderedDict[str, _Held] = OrderedDict()  # by offer id
        self._deadlines: list[tuple[float, int, _Held]] = []
        self._order = itertools.count()  # ties in the heap
        self._read_on: dict[
            Link, dict[_Held, None]
        ] = {}  # as in `_Held`, the other way
        self._changed = trio.Event()
        self.strays = 0
        """Messages about offers that nobody knows."""

    def __len__(self) -> int:
        """How many are open."""
        return len(self._active)

    def open(
        self,
        request_id: str,
        spans: Mapping[str, TicketSpan],
        *,
        num_tokens: int,
        address: tuple[str, int] | None,
        after: After | None = None,
    ) -> Offer:
        """Hold blocks for a reader, who may read them once ``after`` has completed.

        Raises:
            RequestInUse: The request has an open offer.
            MisuseError: The engine has as many offers open as its config allows, or
                ``after`` is nothing to wait for.
            ConfigError: The engine has no listener: nobody could read.
        """
        if request_id in self._active:
            raise RequestInUse("the request has an open offer", request_id=request_id)
        if len(self._active) >= self._config.max_offers:
            raise MisuseError(
                f"{len(self._active)} offers are open, max_offers allows no more",
                request_id=request_id,
            )
        if address is None:
            raise ConfigError("an engine with listen=None cannot offer")
        if after is not None:
            check_after(after)
        is_ready = after is None or is_over(after)
        lease_s = self._config.lease_s
        machine = OfferMachine(
            now=trio.current_time(), lease_s=lease_s, is_ready=is_ready
        )
        offer = RankOffer(
            self._key.rank,
            self._key.generation,
            secrets.token_hex(16),
            *address,
            lease_s=lease_s,
            expires_at=self._trust.expires_at(),
            ready=is_ready,
        )
        ticket = Ticket(
            engine_id=self._key.engine_id,
            request_id=request_id,
            num_tokens=num_tokens,
            ranks=(offer,),
            spans=dict(spans),
        )
        held = _Held(self._trust.sign(ticket), machine)
        held.claims.enter_context(self._pump.claim(Cadence.OFFERED))
        self._active[request_id] = held
        self._watch(held)
        if after is not None and not is_ready:
            self._nursery.start_soon(self._compute, held, after)
        self._log.info("offer_opened", request=request_id, tokens=num_tokens)
        return Offer(held, partial(self._step, held, WithdrawRequested()))

    def on_open(self, link: Link, card: Card) -> None:
        """A reader has connected; it is met when it accepts a ticket."""

    def on_end(self, link: Link, cause: FerryError) -> None:  # noqa: ARG002 - logged
        """Free what a reader held that is gone (its pulls end with its link)."""
        for held in self._read_on.pop(link, {}):
            # Not if it has come back over another link since.
            if held.readers.get(link.peer, (None, 0))[0] is link:
                del held.readers[link.peer]
                self._step(held, ReaderLost(link.peer))

    def on_message(self, link: Link, message: LinkMessage) -> None:
        """Answer one message from a reader.

        Raises:
            ProtocolViolation: Only a producer sends such a message.
        """
        match message:
            case Renew():
                event: Event = RenewArrived(link.peer, message.readers)
                attempt = message.attempt
            case ReadFinished():
                event, attempt = ReadEnded(link.peer), message.attempt
            case Decline():
                event, attempt = OfferDeclined(link.peer, message.readers), 0
            case _:
                raise ProtocolViolation(f"{type(message).__name__} from a reader")
        held = self._find(message.request_id, message.offer_id)
        if held is None:
            self.strays += 1
            if not isinstance(message, Decline):
                refused = Refused(message.request_id, attempt, RefusedReason.UNKNOWN)
                self._answer(link, refused)
            return
        self._step(held, event, link=link, attempt=attempt)

    async def sweep(self) -> None:
        """Expire what nobody renews, for ever."""
        while True:
            changed = self._changed
            due_at = self._deadlines[0][0] if self._deadlines else float("inf")
            with trio.move_on_at(due_at):
                await changed.wait()
            self._expire_due(trio.current_time())

    def withdraw_all(self) -> None:
        """Take everything back: the engine is closing."""
        for held in tuple(self._active.values()):
            self._step(held, WithdrawRequested())

    def _step(
        self, held: _Held, event: Event, *, link: Link | None = None, attempt: int = 0
    ) -> None:
        """Let an event into an offer and carry out what follows."""
        was_read = held.machine.is_read
        for effect in held.machine.step(event, trio.current_time()):
            if isinstance(effect, EndOffer):
                self._end(held)
            elif isinstance(effect, ReportReady):
                reader, its_attempt = held.readers[effect.reader]
                self._answer(reader, OfferReady(held.ticket.request_id, its_attempt))
            elif isinstance(effect, NoteReader) and link is not None:
                held.readers[effect.reader] = link, attempt
                self._read_on.setdefault(link, {})[held] = None
            elif link is not None:
                self._answer(link, self._message(held, effect, attempt))
        if held.machine.is_read and not was_read and not held.ended.is_set():
            # Somebody reads now: over tcp their bytes move only when we look.
            held.claims.enter_context(self._pump.claim(Cadence.BUSY))

    async def _compute(self, held: _Held, after: After) -> None:
        """Wait for the producer's event, for as long as the offer is open."""

        async def wait() -> None:
            await wait_for(after)
            self._step(held, BlocksComputed())

        def failed(error: FerryError) -> None:
            request_id = held.ticket.request_id
            self._log.error("offer_not_computed", request=request_id, error=str(error))
            if not held.ended.is_set():
                held.cause = error.about(request_id=request_id)
                self._step(held, WithdrawRequested())

        with held.awaits:
            await guarded(wait, on_failure=failed, log=self._log)

    def _expire_due(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            held = heapq.heappop(self._deadlines)[2]
            if not held.ended.is_set():
                self._step(held, OfferTicked())
                self._watch(held)  # if it was renewed since

    def _watch(self, held: _Held) -> None:
        deadline = held.machine.deadline
        if deadline is None:
            return
        heapq.heappush(self._deadlines, (deadline, next(self._order), held))
        self._changed.set()
        self._changed = trio.Event()

    def _tidy_deadlines(self) -> None:
        """Ended offers do not stay until their leases would have run out: with long
        leases these are many more than are open."""
        if len(self._deadlines) > 2 * len(self._active) + SPARE_DEADLINES:
            self._deadlines = [e for e in self._deadlines if not e[2].ended.is_set()]
            heapq.heapify(self._deadlines)

    def _find(self, request_id: str, offer_id: str) -> _Held | None:
        held = self._active.get(request_id)
        if held is None or _offer_id(held) != offer_id:
            held = self._ended.get(offer_id)
        return held if held and held.ticket.request_id == request_id else None

    def _end(self, held: _Held) -> None:
        ticket, machine = held.ticket, held.machine
        del self._active[ticket.request_id]
        # Remembered without its blocks: a ticket may name a million.
        held.ticket = msgspec.structs.replace(ticket, spans={})
        self._ended[_offer_id(held)] = held
        if len(self._ended) > ENDED_OFFERS:
            self._ended.popitem(last=False)
        for link, _ in held.readers.values():
            self._read_on.get(link, {}).pop(held, None)
        held.claims.close()
        held.awaits.cancel()
        held.readers.clear()
        held.ended.set()
        self._tidy_deadlines()
        self._log.info(
            "offer_ended",
            request=ticket.request_id,
            outcome=machine.state.value,
            epoch=machine.epoch,
        )

    def _message(self, held: _Held, effect: Effect, attempt: int) -> LinkMessage:
        request_id = held.ticket.request_id
        match effect:
            case ConfirmRead():
                return Confirmed(self._key, request_id, attempt, effect.epoch)
            case RefuseReader():
                return Refused(request_id, attempt, effect.reason)
            case _:
                raise FerryInternalError(f"no message says {type(effect).__name__}")

    def _answer(self, link: Link, message: LinkMessage) -> None:
        try:
            link.post(message)
        except PeerLost as error:
            # Its own end of the link tells the reader; its lease ends the rest.
            self._log.warning("answer_lost", peer=str(link.peer), error=str(error))


def ticket_spans(
    layout: CacheLayout, spans: Mapping[str, Span], *, num_tokens: int
) -> dict[str, TicketSpan]:
    """The producer's blocks as the ticket tells them, after a check.

    Whether a ``None`` or a late beginning is in the way of a consumer depends on
    what it has already: its plan tells (case p5).

    Raises:
        MisuseError: No tokens.
        UnknownBlock: An id outside its pool, or a span that ends too early.
        ImpossiblePlan: A span does not begin at a block boundary.
    """
    if num_tokens < 1:
        raise MisuseError(f"num_tokens must be at least 1, not {num_tokens}")
    groups = {group.name: group for group in layout.groups}
    return {
        name: _ticket_span(groups[name], span, num_tokens)
        for name, span in spans.items()
    }


def _ticket_span(group: GroupLayout, span: Span, num_tokens: int) -> TicketSpan:
    side, name = Side.of(group), group.name
    ids = span_ids(span, group=name, side="producer")
    placement = Placement.of(side, span, ids, group=name, name="producer")
    last = placement.first_token + ids.size * side.span_grain
    if group.block_size and last < num_tokens:
        raise UnknownBlock(
            f"group {name!r}: {ids.size} producer blocks from token"
            f" {placement.first_token} on end at token {last}, {num_tokens} are offered"
        )
    plain = (None if block == ABSENT else block for block in ids.tolist())
    return TicketSpan(tuple(plain), span.first_token)
