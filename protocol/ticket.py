"""`Ticket`: what the producer's scheduler hands to the consumer through the router.

Plain data: a router may store it, log it and pass it on as JSON. It says where
blocks are by absolute token position, never by count.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from kvferry.protocol.errors import BadTicket
from kvferry.protocol.identity import Rank
from kvferry.protocol.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = (
    "MAX_TICKET_BYTES",
    "Contact",
    "RankAddress",
    "RankOffer",
    "Ticket",
    "TicketSpan",
)

MAX_TICKET_BYTES = 16 * 1024 * 1024
"""Longest encoded ticket: a million tokens in blocks of one, in a few groups."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Protocol = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ShareNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
InstanceId = Annotated[str, msgspec.Meta(max_length=64)]
Signature = Annotated[str, msgspec.Meta(max_length=64, pattern="^[0-9a-f]*$")]


class RankOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One producer rank's hold on its part of the cache, and where it listens.

    Attributes:
        generation: Which start of the rank holds the blocks.
        offer_id: Which offer of the request: a second offer is another one. Empty if
            another rank has made the ticket: then the rank tells it to whoever asks.
        lease_s: How long one renewal holds the blocks, in seconds.
        expires_at: When the ticket must not be used any more, in unix seconds: the
            one instant that crosses the wire, because tickets go through others.
        ready: Whether the blocks held their bytes when the ticket was made. If not,
            nothing may be read before the rank has said so on its link.
        signature: By somebody who knows the secret (`protocol.signing`); may be empty.
    """

    rank: Rank
    generation: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    offer_id: Annotated[str, msgspec.Meta(max_length=64)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]
    expires_at: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    ready: bool = True
    signature: Signature = ""

    @property
    def may_be_read(self) -> bool:
        """Whether nothing has to be heard of the rank before."""
        return self.ready and bool(self.offer_id)


class RankAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of an instance, and where it listens.

    Attributes:
        generation: Which start of the rank listens there.
        signature: As in `RankOffer`.
    """

    rank: Rank
    generation: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    signature: Signature = ""


class Contact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the ranks of an instance listen: for consumers that expect a push.

    Attributes:
        ranks: Every rank of the instance.
        instance: Which starts of its ranks these are (`Manifest.id`); empty if nobody
            has told.
    """

    engine_id: Name
    ranks: Annotated[
        tuple[RankAddress, ...], msgspec.Meta(min_length=1, max_length=1024)
    ]
    instance: InstanceId = ""

    def __post_init__(self) -> None:
        """Refuse a rank that is listed twice: its bytes would be expected twice."""
        if len({address.rank for address in self.ranks}) < len(self.ranks):
            listed = ", ".join(str(address.rank) for address in self.ranks[:8])
            raise BadTicket(f"a rank twice among {listed}")

    @classmethod
    def merge(cls, contacts: Iterable[Contact]) -> Contact:
        """One contact out of those of the ranks of one instance.

        Raises:
            BadTicket: There is none, they are not of one instance, or two are of the
                same rank.
        """
        contacts = tuple(contacts)
        names = {contact.engine_id for contact in contacts}
        if len(names) != 1:
            raise BadTicket(f"contacts of one instance, not of {sorted(names)}")
        ranks = tuple(rank for contact in contacts for rank in contact.ranks)
        return cls(names.pop(), ranks)

    def to_dict(self) -> dict[str, Any]:
        """The contact as plain JSON types."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Any) -> Contact:  # noqa: ANN401 - whatever the router gave
        """The contact of `to_dict`.

        Raises:
            BadTicket: Not a contact.
        """
        try:
            return msgspec.convert(plain, cls)
        except (msgspec.ValidationError, ValueError, RecursionError) as exc:
            raise BadTicket(f"not a contact: {exc}") from exc


class TicketSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Logical block ids of one group, and the token position where they begin.

    ``None`` stands for a block that a sliding window has dropped. The ids of a
    state group are slots, its ``first_token`` is 0.
    """

    block_ids: tuple[BlockId | None, ...]
    first_token: Annotated[int, msgspec.Meta(ge=0, lt=2**40)] = 0


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A producer's offer, as the consumer needs it.

    Attributes:
        engine_id: Which instance holds the blocks.
        request_id: The request, as both schedulers call it.
        num_tokens: Tokens in the cache; a state belongs to exactly this count.
        ranks: The offer of every producer rank.
        spans: Per group the producer's blocks, the same on all its ranks.
        share: Which of the offer's tickets it is, if it was made for several consumers.
        instance: As in `Contact`. Then the ranks are all of the instance, and a
            consumer can tell which of them it needs.
    """

    engine_id: Name
    request_id: Name
    num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    ranks: Annotated[tuple[RankOffer, ...], msgspec.Meta(min_length=1, max_length=1024)]
    spans: Annotated[dict[Name, TicketSpan], msgspec.Meta(max_length=256)]
    share: ShareNumber = 0
    instance: InstanceId = ""
    protocol: Protocol = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        """Refuse a rank that is listed twice: its bytes would be read twice."""
        if len({offer.rank for offer in self.ranks}) < len(self.ranks):
            listed = ", ".join(str(offer.rank) for offer in self.ranks[:8])
            raise BadTicket(f"a rank twice among {listed}", request_id=self.request_id)
        if not self.origin:
            raise BadTicket("no rank of it has an id", request_id=self.request_id)

    @property
    def origin(self) -> str:
        """The first offer id in it."""
        return next((offer.offer_id for offer in self.ranks if offer.offer_id), "")

    @property
    def digest(self) -> str:
        """Of what is offered, whoever of its ranks says so; computed at each call."""
        spans = sorted(self.spans.items())
        told = (self.request_id, self.num_tokens, self.share, spans)
        return hashlib.sha256(msgspec.msgpack.encode(told)).hexdigest()

    @classmethod
    def merge(cls, tickets: Iterable[Ticket]) -> Ticket:
        """One ticket out of those that the ranks of one instance made for a request.

        Of tickets that are for the whole instance any one is enough; merged, they are
        one in which every rank tells its id itself.

        Raises:
            BadTicket: There is none, they are not of one request, or two are of
                the same rank.
        """
        tickets = tuple(tickets)
        if not tickets:
            raise BadTicket("no tickets to merge")
        first = tickets[0]
        for other in tickets[1:]:
            _check_same_request(first, other)
        ranks = tuple(_known(offer for ticket in tickets for offer in ticket.ranks))
        return msgspec.structs.replace(first, ranks=ranks)

    @property
    def lease_s(self) -> float:
        """How long one renewal of all ranks holds the blocks, in seconds."""
        return min(offer.lease_s for offer in self.ranks)

    @property
    def contact(self) -> Contact:
        """Where its ranks listen; not signed."""
        return Contact(
            self.engine_id,
            tuple(
                RankAddress(offer.rank, offer.generation, offer.host, offer.port)
                for offer in self.ranks
            ),
            self.instance,
        )

    def to_bytes(self) -> bytes:
        """The ticket as msgpack."""
        return msgspec.msgpack.encode(self)

    def to_dict(self) -> dict[str, Any]:
        """The ticket as plain JSON types."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    @classmethod
    def from_bytes(cls, payload: bytes) -> Ticket:
        """The ticket of `to_bytes`.

        Raises:
            BadTicket: Not a ticket, too long, or of another protocol version.
        """
        if len(payload) > MAX_TICKET_BYTES:
            raise BadTicket(
                f"a ticket of {len(payload)} bytes is over {MAX_TICKET_BYTES}"
            )
        try:
            _check_version(_envelope.decode(payload))
            return _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise BadTicket(f"not a ticket: {exc}") from exc

    @classmethod
    def from_dict(cls, plain: Any) -> Ticket:  # noqa: ANN401 - whatever the router gave
        """The ticket of `to_dict`.

        Raises:
            BadTicket: Not a ticket, or of another protocol version.
        """
        try:
            _check_version(msgspec.convert(plain, _Envelope))
            ticket = msgspec.convert(plain, Ticket)
            # JSON can spell strings that have no UTF-8 (lone surrogates): such
            # an id could never be sent to the producer.
            ticket.to_bytes()
        except (msgspec.ValidationError, ValueError, RecursionError) as exc:
            raise BadTicket(f"not a ticket: {exc}") from exc
        return ticket


def _known(offers: Iterable[RankOffer]) -> list[RankOffer]:
    """Without those whose id another one tells, each once; the order stays."""
    offers = tuple(offers)
    told = {(offer.rank, offer.generation) for offer in offers if offer.offer_id}
    known: list[RankOffer] = []
    for offer in offers:
        start = (offer.rank, offer.generation)
        if offer.offer_id or start not in told:
            known.append(offer)
            told.add(start)
    return known


class _Envelope(msgspec.Struct):
    """The part of a ticket that every version has; the rest is not looked at."""

    protocol: Protocol = PROTOCOL_VERSION


_decoder = msgspec.msgpack.Decoder(Ticket)
_envelope = msgspec.msgpack.Decoder(_Envelope)


def _check_version(envelope: _Envelope) -> None:
    if envelope.protocol != PROTOCOL_VERSION:
        raise BadTicket(
            f"ticket of protocol {envelope.protocol},"
            f" this engine speaks {PROTOCOL_VERSION}"
        )


def _check_same_request(first: Ticket, other: Ticket) -> None:
    for fact in (
        "engine_id",
        "request_id",
        "share",
        "instance",
        "num_tokens",
        "spans",
    ):
        ours, theirs = getattr(first, fact), getattr(other, fact)
        if ours != theirs:
            raise BadTicket(
                f"tickets of one request differ in {fact}: {ours!s:.80} and"
                f" {theirs!s:.80}",
                request_id=first.request_id,
            )
