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
from kvferry.protocol.identity import EngineKey, Rank

__all__ = (
    "Confirmed",
    "Decline",
    "Goodbye",
    "LinkMessage",
    "Ping",
    "Pong",
    "ReadFinished",
    "Refused",
    "RefusedReason",
    "Renew",
    "Renewed",
    "decode_message",
    "encode_message",
)

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
OfferId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Attempt = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Readers = Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, max_length=1024)]
Detail = Annotated[str, msgspec.Meta(max_length=1024)]


class RefusedReason(enum.Enum):
    """Why the producer does not hold the offer for this reader."""

    UNKNOWN = "unknown"
    SPENT = "spent"
    WITHDRAWN = "withdrawn"
    EXPIRED = "expired"


class Renew(msgspec.Struct, frozen=True, tag="renew", forbid_unknown_fields=True):
    """Consumer: hold the blocks on; the first one accepts the ticket.

    Attributes:
        readers: The consumer's ranks that read from this producer rank; it
            releases after exactly these.
    """

    request_id: RequestId
    offer_id: OfferId
    attempt: Attempt
    readers: Readers


class Renewed(msgspec.Struct, frozen=True, tag="renewed", forbid_unknown_fields=True):
    """Producer: the blocks are held for another ``lease_s`` seconds."""

    request_id: RequestId
    attempt: Attempt
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)]


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
        readers: As in `Renew`: it may be the first that the producer hears of us.
    """

    request_id: RequestId
    offer_id: OfferId
    readers: Readers
    detail: Detail = ""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye", forbid_unknown_fields=True):
    """Either side: this engine is closing; nothing follows."""

    detail: Detail = ""


class Ping(msgspec.Struct, frozen=True, tag="ping", forbid_unknown_fields=True):
    """Either side: I have heard nothing for a while; are you there?"""


class Pong(msgspec.Struct, frozen=True, tag="pong", forbid_unknown_fields=True):
    """Either side: I am here."""


LinkMessage = (
    Renew
    | Renewed
    | ReadFinished
    | Confirmed
    | Refused
    | Decline
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
