"""The notices: messages that travel as NIXL notifications.

A notice is not authenticated and its sender's name is the sender's own claim
(nixl-facts rows 17 and 26). It proves itself by carrying the token that the
receiver chose for one landing and told one peer over their link; anything else
is counted and changes nothing.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.protocol.errors import ProtocolViolation

__all__ = (
    "AHEAD",
    "TOKEN_BYTES",
    "Written",
    "decode_notice",
    "encode_notice",
    "shown_token",
)

TOKEN_BYTES = 16

AHEAD = -1
"""Stands for a part when none has been written yet, and the first is on its way: whoever
looks often from now on makes it come faster."""


class Written(msgspec.Struct, frozen=True, tag="written", forbid_unknown_fields=True):
    """The bytes of part ``part`` have arrived; `link.Finished` says how many there are.
    Or, with `AHEAD`, the first ones have left.

    Attributes:
        token: What the consumer chose for this landing and this producer rank,
            unguessable for anyone else.
    """

    token: Annotated[
        bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)
    ]
    part: Annotated[int, msgspec.Meta(ge=AHEAD, lt=2**31)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Written)


def encode_notice(notice: Written) -> bytes:
    """The notice as msgpack."""
    return _encoder.encode(notice)


_PLACE = encode_notice(Written(bytes(TOKEN_BYTES), 0)).index(bytes(TOKEN_BYTES))
_LONGEST = len(encode_notice(Written(bytes(TOKEN_BYTES), 2**31 - 1)))


def shown_token(payload: bytes) -> bytes | None:
    """What stands where a notice has its token: whether it is worth decoding.

    A look at fixed bytes, because anybody may send as many as he likes. Payloads of
    other lengths than a notice's show none.
    """
    if not _PLACE + TOKEN_BYTES < len(payload) <= _LONGEST:
        return None
    return payload[_PLACE : _PLACE + TOKEN_BYTES]


def decode_notice(payload: bytes) -> Written:
    """The notice in a notification's bytes.

    Raises:
        ProtocolViolation: It is not a notice.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolViolation(f"not a notice: {exc}") from exc
