"""`Dialogue`: what one pull says to its sources, and what it hears of them.

Answers become the machine's events here, and whoever fails is named in its error.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

from kvferry.engine.guard import guarded
from kvferry.engine.peer import Subscriber
from kvferry.engine.peers import sought
from kvferry.protocol.errors import (
    FerryError,
    FerryInternalError,
    LeaseExpired,
    OfferDiffers,
    OfferSpent,
    OfferWithdrawn,
    PeerLost,
    ProtocolViolation,
    UnknownOffer,
)
from kvferry.protocol.lifecycle.pull import (
    ConfirmArrived,
    DeclineSource,
    RenewLease,
    SendReadFinished,
    SourceFailed,
    SourceReady,
)
from kvferry.protocol.link import (
    Confirmed,
    Decline,
    OfferReady,
    ReadFinished,
    Refused,
    RefusedReason,
    Renew,
    Spare,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.party import Party
    from kvferry.engine.peer import Answer, Peer
    from kvferry.engine.services import Services
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.lifecycle.machine import Event
    from kvferry.protocol.link import LinkMessage, Sought
    from kvferry.protocol.ticket import RankOffer, Ticket

__all__ = ("Dialogue",)


class Dialogue:
    """One pull's words with the producer's ranks, numbered as its sources are.

    Attributes:
        peers: Its sources; nobody before `begin`.
    """

    def __init__(
        self,
        services: Services,
        ticket: Ticket,
        attempt: int,
        *,
        feed: Callable[[Event], None],
        log: FilteringBoundLogger,
    ) -> None:
        self.peers: tuple[Peer, ...] = ()
        self._services = services
        self._ticket = ticket
        self._attempt = attempt
        self._party: Party[RankOffer] | None = None
        self._learnt: dict[int, str] = {}  # ids that the ticket does not tell
        self._feed = feed
        self._log = log

    def begin(self, peers: tuple[Peer, ...], party: Party[RankOffer]) -> None:
        """Listen to these; and tell who is spare."""
        self.peers = peers
        self._party = party
        for number, peer in enumerate(peers):
            subscriber = Subscriber(
                partial(self._answered, number), partial(self._fail, number)
            )
            peer.subscribe(self._attempt, subscriber)
        if party.spare:
            spare = Spare(self._ticket.request_id, self._sought, party.spare)
            self._send(0, spare)

    def end(self) -> None:
        """Listen no more."""
        for peer in self.peers:
            peer.unsubscribe(self._attempt)

    def name(self, sources: Iterable[int]) -> str:
        """Who these sources are."""
        return ", ".join(self.peers[source].name for source in sorted(sources))

    def names(self, keys: Container[EngineKey]) -> tuple[str, ...]:
        """Who those are that are among these."""
        return tuple(peer.name for peer in self.peers if peer.key in keys)

    def say(self, effect: RenewLease | DeclineSource | SendReadFinished) -> None:
        """Carry out an effect that is a word to some of them."""
        request_id = self._ticket.request_id
        match effect:
            case RenewLease(sources=sources):
                for source in sources:
                    offer = self._offer(source)
                    readers = self._held_party().readers[source]
                    renew = Renew(request_id, offer, self._attempt, readers)
                    self._send(source, renew, is_urgent=False)
            case DeclineSource(source=source):
                offer = self._offer(source)
                readers = self._held_party().readers[source]
                decline = Decline(request_id, offer, readers, "not needed")
                self._send(source, decline)
            case SendReadFinished(source=source):
                offer_id = self._offer_id(source)
                finished = ReadFinished(request_id, offer_id, self._attempt)
                self._send(source, finished)

    def flush(self, source: int) -> None:
        """Let out at once what has been said to a source."""
        self.peers[source].link.flush()

    def decline(self, cause: FerryError | None, *, may_dial: bool) -> None:
        """Free all of them; if that fails, their leases do. In the engine's nursery.

        At once, not behind the drain, which may never end: what the reads still
        bring is trusted by nobody, and the producer may as well reuse its blocks.

        Args:
            cause: Why; None if it is just not needed.
            may_dial: Dial ranks that are not connected, rather than pass them over.
        """
        detail = "not needed" if cause is None else type(cause).__name__
        decline = partial(self._decline, detail, may_dial=may_dial)
        self._services.nursery.start_soon(
            partial(guarded, decline, on_failure=self._not_told, log=self._log)
        )

    async def _decline(self, detail: str, *, may_dial: bool) -> None:
        if self._party is None:
            party = await self._services.routes.find(self._ticket)
        else:
            party = self._party._replace(spare=())  # they have been told
        await self._services.peers.decline(
            self._ticket, party, detail, may_dial=may_dial
        )

    def _not_told(self, error: FerryError) -> None:
        self._log.warning("decline_lost", error=str(error))

    def _offer(self, source: int) -> str | Sought:
        return self._offer_id(source) or self._sought

    def _offer_id(self, source: int) -> str:
        """Empty as long as the source has not told it."""
        offer_id = self._held_party().ranks[source].offer_id
        return offer_id or self._learnt.get(source, "")

    def _held_party(self) -> Party[RankOffer]:
        if self._party is None:
            raise FerryInternalError("nothing is said before it is known to whom")
        return self._party

    @cached_property
    def _sought(self) -> Sought:
        return sought(self._ticket)

    def _send(
        self, source: int, message: LinkMessage, *, is_urgent: bool = True
    ) -> None:
        link = self.peers[source].link
        try:
            if is_urgent:
                link.post(message)
            else:
                link.queue(message)
        except PeerLost as error:
            self._fail(source, error)

    def _answered(self, source: int, answer: Answer) -> None:
        match answer:
            case Confirmed():
                self._feed(ConfirmArrived(source))
            case OfferReady(offer_id=offer_id):
                self._learnt.setdefault(source, offer_id)
                self._feed(SourceReady(source))
            case Refused():
                self._fail(source, _REFUSALS[answer.reason]())
            case _:
                pass  # renewed: its lease runs on the producer's clock

    def _fail(self, source: int, cause: FerryError) -> None:
        self._feed(SourceFailed(source, cause.about(peer=self.name([source]))))


_REFUSALS: dict[RefusedReason, Callable[[], FerryError]] = {
    RefusedReason.UNKNOWN: lambda: UnknownOffer(
        "the producer knows no such offer: it was never made there, or long ago"
    ),
    RefusedReason.SPENT: lambda: OfferSpent(
        "the ticket has been used before, by this reader or by another instance"
    ),
    RefusedReason.WITHDRAWN: lambda: OfferWithdrawn("the producer took the offer back"),
    RefusedReason.EXPIRED: lambda: LeaseExpired(
        "the producer did not hold the blocks until the last byte had been read"
    ),
    RefusedReason.DIFFERS: lambda: OfferDiffers(
        "under this request id the rank offers something else than the ticket says"
    ),
    RefusedReason.NOT_READY: lambda: ProtocolViolation(
        "the producer says that its blocks were read before it had computed them"
    ),
}
