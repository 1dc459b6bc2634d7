"""The messages of an open link.

The link is ordered and belongs to two known engines, so a message names only
the request. ``attempt`` is the consumer's number for one `pull`: an answer to an
earlier attempt at the same request changes nothing. Durations cross the wire,
instants never do.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from kvferry.protocol.errors import ProtocolViolation
from kvferry.protocol.failure import Detail, Failure, as_detail
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.manifest import Manifest
from kvferry.protocol.notices import TOKEN_BYTES
from kvferry.protocol.ticket import TicketSpan

__all__ = (
    "Aborted",
    "AbortedReason",
    "Claim",
    "Confirmed",
    "Decline",
    "Extend",
    "Finished",
    "Goodbye",
    "Landed",
    "LinkMessage",
    "OfferReady",
    "Ping",
    "Pong",
    "ReadFinished",
    "Refused",
    "RefusedReason",
    "Register",
    "Registered",
    "Relay",
    "Renew",
    "Revoke",
    "Revoked",
    "Roster",
    "Spare",
    "Verdict",
    "Vote",
    "as_detail",
    "decode_message",
    "encode_message",
)

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
OfferId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Attempt = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Readers = Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, max_length=1024)]


class Sought(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An offer of a rank whose ticket does not tell its id: one that a sibling made.

    Attributes:
        digest: Of what is offered (`Ticket.digest`): it is this, or it is refused.
        share: Which share of it.
        origin: The id of the offer that the ticket does tell: of two offers that are
            alike it tells which one is meant.
    """

    digest: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    share: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    origin: OfferId


class RefusedReason(enum.Enum):
    """Why the producer does not hold the offer for this reader."""

    UNKNOWN = "unknown"
    SPENT = "spent"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"
    NOT_READY = "not_ready"
    """A reader said that it had read what was still being computed."""
    DIFFERS = "differs"
    """Under the same request id this rank offers something else."""


class Renew(msgspec.Struct, frozen=True, tag="renew", forbid_unknown_fields=True):
    """Consumer: hold the blocks on; the first one accepts the ticket.

    It has no answer, unless it is refused: nobody waits for one.

    Attributes:
        offer: Its id; until that is known, what it is of. It may not be made yet.
        readers: The consumer's ranks that read from this producer rank; it
            releases after exactly these.
    """

    request_id: RequestId
    offer: OfferId | Sought
    attempt: Attempt
    readers: Readers


class OfferReady(
    msgspec.Struct, frozen=True, tag="offer_ready", forbid_unknown_fields=True
):
    """Producer: the blocks hold their bytes now; told to a reader whose ticket does not
    say so, when it happens and after each of its later renewals.

    Attributes:
        offer_id: How it is called from now on.
    """

    request_id: RequestId
    attempt: Attempt
    offer_id: OfferId


class ReadFinished(
    msgspec.Struct, frozen=True, tag="read_finished", forbid_unknown_fields=True
):
    """Consumer: my last byte has been read; were the blocks held until now?"""

    request_id: RequestId
    offer_id: OfferId
    attempt: Attempt


class Confirmed(
    msgspec.Struct, frozen=True, tag="confirmed", forbid_unknown_fields=True
):
    """Producer: the blocks were held when your last byte had been read.

    Attributes:
        engine: Who confirms, generation included.
        epoch: How often the lease had been renewed.
    """

    engine: EngineKey
    request_id: RequestId
    attempt: Attempt
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """Producer: the offer is not held for you."""

    request_id: RequestId
    attempt: Attempt
    reason: RefusedReason


class Decline(msgspec.Struct, frozen=True, tag="decline", forbid_unknown_fields=True):
    """Consumer: I am not going to read, or to go on reading.

    Attributes:
        offer, readers: As in `Renew`: it may be the first that the producer hears of us.
    """

    request_id: RequestId
    offer: OfferId | Sought
    readers: Readers
    detail: Detail = ""


class Claim(msgspec.Struct, frozen=True, tag="claim", forbid_unknown_fields=True):
    """Consumer: my share of what you hold, if you push to me.

    Sent once for each set of producer ranks; `Register` refers to it by number.
    Of a unit that several producer ranks hold, exactly one finds it in its claim.

    Attributes:
        number: Anything that the consumer has not used on this link.
        sheets: Layouts of the consumer's own memory, reduced to what this rank is
            to write; nothing is in two of them. Their regions are empty: those of
            the handshake count.
    """

    number: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    sheets: Annotated[tuple[CacheLayout, ...], msgspec.Meta(max_length=16)]


class Register(msgspec.Struct, frozen=True, tag="register", forbid_unknown_fields=True):
    """Consumer: write here what you push for this request.

    Attributes:
        lease_s: Seconds that we hold the blocks from now, and from each `Extend`.
        claim: Number of the `Claim` that says which part is yours.
        token: What your notices show, unguessable for anyone else.
        computed_tokens: Nothing before this position is written.
        spans: Per group the consumer's blocks.
        readers: All ranks of the consumer's instance; the push is over when each
            has landed.
    """

    request_id: RequestId
    attempt: Attempt
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]
    claim: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    token: Annotated[
        bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)
    ]
    computed_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
    spans: Annotated[dict[RequestId, TicketSpan], msgspec.Meta(max_length=256)]
    readers: Readers


class Registered(
    msgspec.Struct, frozen=True, tag="registered", forbid_unknown_fields=True
):
    """Producer: your lease runs anew."""

    request_id: RequestId
    attempt: Attempt


class Extend(msgspec.Struct, frozen=True, tag="extend", forbid_unknown_fields=True):
    """Consumer: I hold the blocks on."""

    request_id: RequestId
    attempt: Attempt


class Finished(msgspec.Struct, frozen=True, tag="finished", forbid_unknown_fields=True):
    """Producer: every byte of your claim has been written.

    Attributes:
        num_tokens: Tokens in the cache.
        parts: Waves that it came in; a notice tells the arrival of each.
        bytes: How many bytes that were.
    """

    request_id: RequestId
    attempt: Attempt
    num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]
    parts: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Landed(msgspec.Struct, frozen=True, tag="landed", forbid_unknown_fields=True):
    """Consumer: it is all there, from every rank."""

    request_id: RequestId
    attempt: Attempt


class AbortedReason(enum.Enum):
    """Why a push does not come, or not to its end."""

    EXPIRED = "expired"
    """The consumer's registration was not extended in time."""
    SPENT = "spent"
    """The push is over, or is another instance's."""
    MISFIT = "misfit"
    """The blocks that were registered cannot take it; nothing was written."""
    INCOMPLETE = "incomplete"
    """The producer committed it with a part missing."""
    FAILED = "failed"


class Aborted(msgspec.Struct, frozen=True, tag="aborted", forbid_unknown_fields=True):
    """Producer: the rest will not come. What is in flight may still land: `Revoke`."""

    request_id: RequestId
    attempt: Attempt
    reason: AbortedReason
    detail: Detail = ""


class Revoke(msgspec.Struct, frozen=True, tag="revoke", forbid_unknown_fields=True):
    """Consumer: I want my blocks back, or do not want the push at all."""

    request_id: RequestId
    attempt: Attempt


class Revoked(msgspec.Struct, frozen=True, tag="revoked", forbid_unknown_fields=True):
    """Producer: nothing of this attempt touches your blocks, and nothing will."""

    request_id: RequestId
    attempt: Attempt


class Spare(msgspec.Struct, frozen=True, tag="spare", forbid_unknown_fields=True):
    """Consumer: of these ranks of yours none of ours reads anything for the request.

    Attributes:
        offer: What it is of; None for a push.
        ranks: Of the producer's instance: whoever gets it tells the others.
    """

    request_id: RequestId
    offer: Sought | None
    ranks: Readers


class Relay(msgspec.Struct, frozen=True, tag="relay", forbid_unknown_fields=True):
    """Between ranks of one instance, through its lead.

    Attributes:
        rank: To the lead, whom it is for; from the lead, whom it is from.
    """

    rank: Rank
    message: Spare


class Roster(msgspec.Struct, frozen=True, tag="roster", forbid_unknown_fields=True):
    """Lead: this is our instance now.

    Attributes:
        manifest: All of it, when it is complete.
        missing: Who has not joined, when it is not.
        cause: Of whom was lost, when it has been complete before.
    """

    manifest: Manifest | None
    missing: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=1024)] = ()
    cause: Failure | None = None


class Vote(msgspec.Struct, frozen=True, tag="vote", forbid_unknown_fields=True):
    """Member: what became of my part of an agreement.

    Attributes:
        instance: Id of the manifest that it was begun under.
        wait_s: How long I wait for the others.
        failure: None if it is done.
    """

    key: RequestId
    instance: Annotated[str, msgspec.Meta(max_length=64)]
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)]
    failure: Failure | None = None


class Verdict(msgspec.Struct, frozen=True, tag="verdict", forbid_unknown_fields=True):
    """Lead: what became of an agreement, the same for all ranks.

    Attributes:
        failure: None if every rank's part is done.
    """

    key: RequestId
    failure: Failure | None = None


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", forbid_unknown_fields=True):
    """Either side: this engine is closing; nothing follows."""

    detail: Detail = ""


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Either side: I have heard nothing for a while; are you there?"""


class Pong(msgspec.Struct, frozen=True, tag="pong", forbid_unknown_fields=True):
    """Either side: I am here."""


LinkMessage = (
    Renew
    | OfferReady
    | ReadFinished
    | Confirmed
    | Refused
    | Decline
    | Claim
    | Register
    | Registered
    | Extend
    | Finished
    | Landed
    | Aborted
    | Revoke
    | Revoked
    | Spare
    | Relay
    | Roster
    | Vote
    | Verdict
    | Goodbye
    | Ping
    | Pong
)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LinkMessage] = msgspec.msgpack.Decoder(LinkMessage)


def encode_message(message: LinkMessage) -> bytes:
    """The message as msgpack, without a frame."""
    return _encoder.encode(message)


def decode_message(payload: bytes) -> LinkMessage:
    """The message in one frame.

    Raises:
        ProtocolViolation: It is not a message of an open link.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolViolation(f"not a link message: {exc}") from exc
