"""The handshake: who is there, proof of the shared secret, and the rank card.

Four messages, two round trips; the dialler speaks first::

    dialler                             listener
      Hello            ------------->
                       <-------------     Hello | Refusal
      Introduction     ------------->
                       <-------------     Introduction | Refusal

A `Hello` is small and tells the version before anything else is decoded. An
`Introduction` carries the rank's `Card` and a MAC over both hellos and the card,
keyed with the shared secret: a card is decoded only after its MAC holds, and the
listener shows its own (whose metadata opens its memory, nixl-facts row 18) only
to a dialler that has proved the secret. Sans-IO: bytes in, bytes out.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import Annotated, TypeVar

import msgspec

from kvferry.protocol.errors import HandshakeRefused, ProtocolViolation
from kvferry.protocol.identity import Difference, EngineKey, ModelIdentity
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.version import PROTOCOL_VERSION

__all__ = (
    "NONCE_BYTES",
    "Card",
    "Hello",
    "Introduction",
    "Refusal",
    "RefusalReason",
    "Role",
    "decode_hello",
    "decode_introduction",
    "encode",
    "introduce",
    "verify",
)

NONCE_BYTES = 32
MAC_BYTES = 32


class Role(enum.Enum):
    """Who speaks; part of the MAC, so that a proof cannot be played back."""

    DIALLER = "dialler"
    LISTENER = "listener"


class RefusalReason(enum.Enum):
    """Why a handshake ends before it is done."""

    VERSION = "version"
    WRONG_ENGINE = "wrong_engine"
    SECRET = "secret"  # noqa: S105 - a reason, not a password
    DIFFERENCES = "differences"
    BUSY = "busy"
    CLOSING = "closing"


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The first message of either side.

    Attributes:
        wanted: The engine id that the dialler expects; empty from a listener.
        nonce: Fresh random bytes, so that no two handshakes have the same MAC.
    """

    protocol: int
    engine: EngineKey
    wanted: Annotated[str, msgspec.Meta(max_length=256)]
    nonce: Annotated[
        bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)
    ]


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank tells a peer that has proved the secret.

    Attributes:
        metadata: The transport's agent metadata.
    """

    identity: ModelIdentity
    layout: CacheLayout
    metadata: bytes


class Introduction(
    msgspec.Struct, frozen=True, tag="introduction", forbid_unknown_fields=True
):
    """An encoded `Card` and its MAC."""

    card: bytes
    mac: Annotated[bytes, msgspec.Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]


class Refusal(msgspec.Struct, frozen=True, tag="refusal", forbid_unknown_fields=True):
    """The end of a handshake that fails, with the factors that differ."""

    reason: RefusalReason
    detail: Annotated[str, msgspec.Meta(max_length=4096)]
    differences: Annotated[tuple[Difference, ...], msgspec.Meta(max_length=256)] = ()


class _Envelope(msgspec.Struct):
    """The part of a hello that every version has; the rest is not looked at."""

    protocol: int


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(_Envelope)
_hello = msgspec.msgpack.Decoder(Hello | Refusal)
_introduction = msgspec.msgpack.Decoder(Introduction | Refusal)
_card = msgspec.msgpack.Decoder(Card)

_Message = TypeVar("_Message")


def encode(message: Hello | Introduction | Refusal) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode_hello(payload: bytes) -> Hello:
    """The other side's hello.

    Raises:
        HandshakeRefused: It speaks another version, or it refuses us.
        ProtocolViolation: It is not a hello.
    """
    try:
        version = _envelope.decode(payload).protocol
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # A refusal has no version; anything else fails below.
        version = PROTOCOL_VERSION
    if version != PROTOCOL_VERSION:
        difference = Difference("protocol", str(PROTOCOL_VERSION), str(version))
        raise HandshakeRefused(str(difference), differences=(str(difference),))
    return _accepted(_decoded(_hello, payload))


def decode_introduction(payload: bytes) -> Introduction:
    """The other side's introduction; `verify` it before use.

    Raises:
        HandshakeRefused: It refuses us.
        ProtocolViolation: It is not an introduction.
    """
    return _accepted(_decoded(_introduction, payload))


def introduce(
    card: Card, *, role: Role, secret: bytes, hellos: tuple[bytes, bytes]
) -> bytes:
    """Our encoded introduction.

    Args:
        card: Our card.
        role: Which side we are.
        secret: The shared secret; empty means that anyone may connect.
        hellos: The encoded hellos, the dialler's first.
    """
    body = _encoder.encode(card)
    return encode(Introduction(body, _mac(body, role, secret, hellos)))


def verify(
    introduction: Introduction,
    *,
    role: Role,
    secret: bytes,
    hellos: tuple[bytes, bytes],
) -> Card:
    """The card of an introduction made by `role`, after its MAC has been checked.

    Raises:
        HandshakeRefused: The MAC was made with another secret.
        ProtocolViolation: The card is not a card.
    """
    expected = _mac(introduction.card, role, secret, hellos)
    if not hmac.compare_digest(expected, introduction.mac):
        raise HandshakeRefused("the peer did not prove the shared secret")
    return _decoded(_card, introduction.card)


def _mac(body: bytes, role: Role, secret: bytes, hellos: tuple[bytes, bytes]) -> bytes:
    parts = (role.value.encode(), *hellos, body)
    # Lengths first: without them two different splits would have one MAC.
    lengths = b"".join(len(part).to_bytes(8, "big") for part in parts)
    # Hashed first: HMAC pads its key with zeros, so that a secret and the same
    # with zeros behind it, or none and zeros alone, would have one MAC.
    key = hashlib.sha256(secret).digest()
    return hmac.digest(key, lengths + b"".join(parts), hashlib.sha256)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes) -> _Message:
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolViolation(f"not a handshake message: {exc}") from exc


def _accepted(message: _Message | Refusal) -> _Message:
    if isinstance(message, Refusal):
        raise _refusal_seen_from_here(message)
    return message


def _refusal_seen_from_here(refusal: Refusal) -> HandshakeRefused:
    # The peer writes from its own side: its `local` is our remote.
    differences = tuple(
        str(Difference(d.factor, d.remote, d.local)) for d in refusal.differences
    )
    named = f": {'; '.join(differences[:8])}" if differences else ""
    return HandshakeRefused(
        f"the peer refused ({refusal.reason.value}): {refusal.detail}{named}",
        differences=differences,
    )
