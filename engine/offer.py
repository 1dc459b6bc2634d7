"""The offer service: what this engine holds for others to read.

Drives one `OfferMachine` for each share of an offer: messages from links and the
clock go in, answers on the links and released blocks come out.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import trio

from kvferry.engine.after import check_after, is_over, wait_for
from kvferry.engine.guard import guarded
from kvferry.engine.holds import Hold, Offer, Share
from kvferry.engine.parking import Parking
from kvferry.engine.pump import Cadence
from kvferry.engine.siblings import Siblings
from kvferry.protocol.errors import (
    ConfigError,
    FerryInternalError,
    MisuseError,
    PeerLost,
    ProtocolViolation,
    RequestInUse,
)
from kvferry.protocol.lifecycle.offer import (
    BlocksComputed,
    ConfirmRead,
    EndOffer,
    NoteReader,
    OfferDeclined,
    OfferMachine,
    OfferSpared,
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
    Sought,
    Spare,
)
from kvferry.protocol.ticket import RankOffer, Ticket

if TYPE_CHECKING:
    from collections.abc import Mapping

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.after import After
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.instance import Instance
    from kvferry.engine.link import Link
    from kvferry.engine.pump import Pump
    from kvferry.engine.sizes import Sizes
    from kvferry.engine.trust import Trust
    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.lifecycle.machine import Effect, Event
    from kvferry.protocol.link import LinkMessage
    from kvferry.protocol.ticket import TicketSpan

__all__ = ("Offers",)

ENDED_OFFERS = 4096
"""Ended shares that are remembered, so that a late reader learns why."""

SPARE_DEADLINES = 1024
"""Deadlines of ended shares that may be left: each clearing looks at all of them."""


class Offers:
    """All offers of one engine.

    Invariant: a hold is active exactly while one of its shares is open, and a share is
    open exactly while its machine is; ended shares are kept, without blocks, until they
    are forgotten.
    """

    def __init__(  # noqa: PLR0913 - built in one place, from its parts
        self,
        key: EngineKey,
        config: EngineConfig,
        pump: Pump,
        nursery: trio.Nursery,
        *,
        instance: Instance,
        sizes: Sizes,
        trust: Trust,
        log: FilteringBoundLogger,
    ) -> None:
        self._key = key
        self._config = config
        self._pump = pump
        self._nursery = nursery
        self._sizes = sizes
        self._trust = trust
        self._log = log
        self._siblings = Siblings(instance)
        self._active: dict[str, Hold] = {}  # by request id
        self._open: dict[str, Share] = {}  # by offer id
        self._ended: OrderedDict[str, Share] = OrderedDict()  # by offer id
        # The last ended share of each name: request, number, origin.
        self._named: dict[tuple[str, int, str], Share] = {}
        self._parking = Parking(config.lease_s)
        self._deadlines: list[tuple[float, int, Share]] = []
        self._order = itertools.count()  # ties in the heap
        # As in `Share.readers`, the other way.
        self._read_on: dict[Link, dict[Share, None]] = {}
        self._changed = trio.Event()
        self._has_siblings = len(config.rank.instance()) > 1
        self.strays = 0
        """Messages about offers that nobody knows."""

    def __len__(self) -> int:
        """How many are open."""
        return len(self._active)

    @property
    def parked(self) -> int:
        """Messages that wait for an offer that is not made yet."""
        return len(self._parking)

    def open(
        self,
        request_id: str,
        spans: Mapping[str, TicketSpan],
        *,
        num_tokens: int,
        address: tuple[str, int] | None,
        after: After | None = None,
        consumers: int = 1,
    ) -> Offer:
        """Hold blocks for readers, who may read them once ``after`` has completed.

        Raises:
            RequestInUse: The request has an open offer.
            MisuseError: The engine has as many offers open as its config allows, or
                ``after`` is nothing to wait for.
            ConfigError: The engine, or a rank of its instance, has no listener: nobody
                could read.
            InstanceIncomplete: A rank of its instance has gone.
        """
        if request_id in self._active:
            raise RequestInUse("the request has an open offer", request_id=request_id)
        if consumers < 1:
            raise MisuseError(f"consumers must be at least 1, not {consumers}")
        if len(self._open) + consumers > self._config.max_offers:
            raise MisuseError(
                f"{len(self._open)} offers are open, max_offers allows no more",
                request_id=request_id,
            )
        if address is None:
            raise ConfigError("an engine with listen=None cannot offer")
        if after is not None:
            check_after(after)
        is_ready = after is None or is_over(after)
        mine = RankOffer(
            self._key.rank,
            self._key.generation,
            "",
            *address,
            lease_s=self._config.lease_s,
            expires_at=self._trust.expires_at(),
            ready=is_ready,
        )
        siblings = self._siblings.now(mine)
        hold = Hold(request_id)
        self._active[request_id] = hold
        for number in range(consumers):
            offer_id = secrets.token_hex(16)
            ticket = Ticket(
                engine_id=self._key.engine_id,
                request_id=request_id,
                num_tokens=num_tokens,
                ranks=siblings.with_id(offer_id),
                spans=dict(spans),
                share=number,
                instance=siblings.instance,
            )
            signed = self._trust.sign(ticket)
            self._share(hold, offer_id, signed, is_ready=is_ready)
        for number, share in enumerate(tuple(hold.shares)):
            self._unpark(share, number)
        if after is not None and not is_ready:
            self._nursery.start_soon(self._compute, hold, after)
        self._log.info(
            "offer_opened", request=request_id, tokens=num_tokens, consumers=consumers
        )
        return Offer(hold, partial(self._withdraw, hold))

    def _share(
        self, hold: Hold, offer_id: str, ticket: Ticket, *, is_ready: bool
    ) -> None:
        """Make one more share of a hold."""
        machine = OfferMachine(
            now=trio.current_time(), lease_s=self._config.lease_s, is_ready=is_ready
        )
        share = Share(hold, offer_id, ticket, machine)
        size = self._sizes.of(ticket.spans)
        share.claims.enter_context(self._pump.claim(Cadence.OFFERED, size))
        hold.shares.append(share)
        hold.open_shares += 1
        self._open[offer_id] = share
        self._watch(share)

    def _withdraw(self, hold: Hold) -> None:
        for share in hold.shares:
            if share.is_open:
                self._step(share, WithdrawRequested())

    def on_open(self, link: Link, card: Card) -> None:
        """A reader has connected; it is met when it accepts a ticket."""

    def on_end(self, link: Link, cause: FerryError) -> None:  # noqa: ARG002 - logged
        """Free what a reader held that is gone (its pulls end with its link)."""
        self._parking.leave(link)
        for share in self._read_on.pop(link, {}):
            # Not if it has come back over another link since.
            if share.readers.get(link.peer, (None, 0))[0] is link:
                del share.readers[link.peer]
                self._step(share, ReaderLost(link.peer))

    def on_message(self, link: Link, message: LinkMessage) -> None:
        """Answer one message from a reader.

        Raises:
            ProtocolViolation: Only a producer sends such a message.
        """
        match message:
            case Renew() | Decline():
                self._hear(link, message, message.offer)
            case ReadFinished():
                share = self._find(message.request_id, message.offer_id)
                if share is None:
                    self._refuse(link, message, RefusedReason.UNKNOWN)
                else:
                    event = ReadEnded(link.peer)
                    self._step(share, event, link=link, attempt=message.attempt)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} from a reader")

    def spare(self, message: Spare) -> None:
        """None of the consumer's ranks reads from us what the message names."""
        if message.offer is not None:
            self._hear(None, message, message.offer)

    def _hear(
        self,
        link: Link | None,
        message: Renew | Decline | Spare,
        offer: str | Sought,
    ) -> None:
        """Take a word about an offer, which a sibling's ticket may have told of."""
        found: Share | RefusedReason | None
        if isinstance(offer, str):
            found = self._find(message.request_id, offer) or RefusedReason.UNKNOWN
        else:
            found = self._seek(message.request_id, offer)
        if isinstance(found, Share):
            self._take(found, link, message, offer)
        elif found is not None:
            self._refuse(link, message, found)
        elif isinstance(offer, str) or not self._park(link, message, offer):
            self._refuse(link, message, RefusedReason.UNKNOWN)

    def _take(
        self,
        share: Share,
        link: Link | None,
        message: Renew | Decline | Spare,
        offer: str | Sought,
    ) -> None:
        if not share.origin:
            # Who knows its id from a ticket has one that tells it: most often, ours.
            origin = offer.origin if isinstance(offer, Sought) else offer
            self._note_origin(share, origin)
        if link is None or isinstance(message, Spare):
            self._step(share, OfferSpared())
        elif isinstance(message, Decline):
            self._step(share, OfferDeclined(link.peer, message.readers), link=link)
        else:
            asks = isinstance(offer, Sought)
            event = RenewArrived(link.peer, message.readers, asks)
            self._step(share, event, link=link, attempt=message.attempt)

    def _refuse(
        self,
        link: Link | None,
        message: Renew | Decline | Spare | ReadFinished,
        reason: RefusedReason,
    ) -> None:
        self.strays += 1
        if link is not None and isinstance(message, Renew | ReadFinished):
            refused = Refused(message.request_id, message.attempt, reason)
            self._answer(link, refused)

    def _park(
        self, link: Link | None, message: Renew | Decline | Spare, sought: Sought
    ) -> bool:
        """Keep a word about an offer that is not made yet (case n5)."""
        if not self._parking.put(link, message, sought, trio.current_time()):
            self._log.warning("no_room_to_park", request=message.request_id)
            return False
        self._wake()
        return True

    def _unpark(self, share: Share, number: int) -> None:
        """Let in what came before the offer was made."""
        for parked in self._parking.take(share.hold.request_id, number):
            self._hear(parked.link, parked.message, parked.sought)

    async def sweep(self) -> None:
        """Expire what nobody renews, and what nobody offers, for ever."""
        while True:
            changed = self._changed
            with trio.move_on_at(self._due_at()):
                await changed.wait()
            now = trio.current_time()
            self._expire_due(now)
            for parked in self._parking.take_due(now):
                self._refuse(parked.link, parked.message, RefusedReason.UNKNOWN)

    def _due_at(self) -> float:
        expires_at = self._deadlines[0][0] if self._deadlines else float("inf")
        parked_until = self._parking.deadline
        return expires_at if parked_until is None else min(expires_at, parked_until)

    def withdraw_all(self) -> None:
        """Take everything back: the engine is closing."""
        for hold in tuple(self._active.values()):
            self._withdraw(hold)

    def _step(
        self, share: Share, event: Event, *, link: Link | None = None, attempt: int = 0
    ) -> None:
        """Let an event into an offer and carry out what follows."""
        was_read = share.machine.is_read
        for effect in share.machine.step(event, trio.current_time()):
            if isinstance(effect, EndOffer):
                self._end(share)
            elif isinstance(effect, ReportReady):
                reader, its_attempt = share.readers[effect.reader]
                request_id, offer_id = share.hold.request_id, share.offer_id
                self._answer(reader, OfferReady(request_id, its_attempt, offer_id))
            elif isinstance(effect, NoteReader) and link is not None:
                share.readers[effect.reader] = link, attempt
                self._read_on.setdefault(link, {})[share] = None
            elif link is not None:
                self._answer(link, self._message(share, effect, attempt))
        if share.machine.is_read and not was_read and share.is_open:
            # Somebody reads now: over tcp their bytes move only when we look.
            share.claims.enter_context(self._pump.claim(Cadence.BUSY))

    async def _compute(self, hold: Hold, after: After) -> None:
        """Wait for the producer's event, for as long as the offer is open."""

        async def wait() -> None:
            await wait_for(after)
            for share in hold.shares:
                self._step(share, BlocksComputed())

        def failed(error: FerryError) -> None:
            request_id = hold.request_id
            self._log.error("offer_not_computed", request=request_id, error=str(error))
            if not hold.ended.is_set():
                hold.cause = error.about(request_id=request_id)
                self._withdraw(hold)

        with hold.awaits:
            await guarded(wait, on_failure=failed, log=self._log)

    def _expire_due(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            share = heapq.heappop(self._deadlines)[2]
            if share.is_open:
                self._step(share, OfferTicked())
                self._watch(share)  # if it was renewed since

    def _watch(self, share: Share) -> None:
        deadline = share.machine.deadline
        if deadline is None:
            return
        entry = (deadline, next(self._order), share)
        heapq.heappush(self._deadlines, entry)
        if self._deadlines[0] is entry:  # most are due after all others
            self._wake()

    def _wake(self) -> None:
        """There is something new to expire."""
        self._changed.set()
        self._changed = trio.Event()

    def _tidy_deadlines(self) -> None:
        """Ended offers do not stay until their leases would have run out: with long
        leases these are many more than are open."""
        if len(self._deadlines) > 2 * len(self._open) + SPARE_DEADLINES:
            self._deadlines = [e for e in self._deadlines if e[2].is_open]
            heapq.heapify(self._deadlines)

    def _find(self, request_id: str, offer_id: str) -> Share | None:
        share = self._open.get(offer_id) or self._ended.get(offer_id)
        return share if share and share.hold.request_id == request_id else None

    def _seek(self, request_id: str, sought: Sought) -> Share | RefusedReason | None:
        """What a ticket that a sibling made means; None if it is not made yet."""
        # The same, offered once more under the same id, is told by the ticket's origin:
        # who comes late for the one that has ended must not use up the next.
        ended = self._seek_ended(request_id, sought, sought.origin)
        if ended is not None:
            return ended
        hold = self._active.get(request_id)
        if hold is not None:
            share = hold.shares[sought.share : sought.share + 1]
            is_it = bool(share) and share[0].digest == sought.digest
            return share[0] if is_it else RefusedReason.DIFFERS
        return self._seek_ended(request_id, sought, "")

    def _seek_ended(self, request_id: str, sought: Sought, origin: str) -> Share | None:
        share = self._named.get((request_id, sought.share, origin))
        return share if share and share.digest == sought.digest else None

    def _end(self, share: Share) -> None:
        hold, machine = share.hold, share.machine
        del self._open[share.offer_id]
        self._remember(share)
        for link, _ in share.readers.values():
            self._read_on.get(link, {}).pop(share, None)
        share.claims.close()
        share.readers.clear()
        self._tidy_deadlines()
        self._log.info(
            "offer_ended",
            request=hold.request_id,
            share=share.ticket.share,
            outcome=machine.state.value,
            epoch=machine.epoch,
        )
        hold.open_shares -= 1
        if not hold.open_shares:
            del self._active[hold.request_id]
            hold.awaits.cancel()
            hold.ended.set()

    def _remember(self, share: Share) -> None:
        """So that whoever is late learns why; without its blocks, which may be many."""
        if self._has_siblings:
            self._named[share.name] = share
            share.keep_digest()
        share.ticket = msgspec.structs.replace(share.ticket, spans={})
        self._ended[share.offer_id] = share
        if len(self._ended) > ENDED_OFFERS:
            _, forgotten = self._ended.popitem(last=False)
            self._forget_name(forgotten)

    def _note_origin(self, share: Share, origin: str) -> None:
        """The first ticket that asks for a share tells which try it is."""
        is_named = self._forget_name(share)
        share.origin = origin
        if is_named:
            self._named[share.name] = share

    def _forget_name(self, share: Share) -> bool:
        """Whether it was the one that its name leads to."""
        if self._named.get(share.name) is not share:
            return False
        del self._named[share.name]
        return True

    def _message(self, share: Share, effect: Effect, attempt: int) -> LinkMessage:
        request_id = share.hold.request_id
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
