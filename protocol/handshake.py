"""The handshake: who is there and what for, proof of the shared secret, the bodies.

Six messages, three round trips; the dialler speaks first::

    dialler                             listener
      Hello            ------------->
                       <-------------     Hello | Refusal
      Proof            ------------->
                       <-------------     Proof | Refusal
      Introduction     ------------->
                       <-------------     Introduction | Refusal

A `Hello` is small and tells the version before anything else is decoded, and the
`Purpose` of the call. A `Proof` is a MAC over both hellos, keyed with the shared
secret. An `Introduction` carries a body and a MAC over both hellos and the body. What
the body is depends on the purpose; for a link it is the rank's `Card`.

Nobody is sent a body, or has a large frame buffered, who has not proved the secret:
the metadata in a card opens the memory of the one who shows it (nixl-facts row 18).
Sans-IO: bytes in, bytes out.
"""

from __future__ import annotations

import enum
import hmac
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, TypeVar

import msgspec

from kvferry.protocol.errors import HandshakeRefused, ProtocolViolation
from kvferry.protocol.identity import Difference, EngineKey, ModelIdentity
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.signing import MAC_BYTES, derived_key, mac
from kvferry.protocol.version import PROTOCOL_VERSION

__all__ = (
    "NONCE_BYTES",
    "Card",
    "Hello",
    "Introduction",
    "Proof",
    "Purpose",
    "Refusal",
    "RefusalReason",
    "Role",
    "Transcript",
    "decode_card",
    "decode_hello",
    "encode",
    "encode_card",
)

NONCE_BYTES = 32

Mac = Annotated[bytes, msgspec.Meta(min_length=MAC_BYTES, max_length=MAC_BYTES)]


class Role(enum.Enum):
    """Who speaks; part of the MAC, so that a proof cannot be played back."""

    DIALLER = "dialler"
    LISTENER = "listener"


class Purpose(enum.Enum):
    """What a dialler comes for."""

    LINK = "link"
    """To transfer: both sides show their `Card`, and the link stays."""

    JOIN = "join"
    """A rank joins its instance: the link stays."""

    ASK = "ask"
    """What ranks has this instance? One answer, and that was all."""


class RefusalReason(enum.Enum):
    """Why a handshake ends before it is done."""

    VERSION = "version"
    WRONG_ENGINE = "wrong_engine"
    SECRET = "secret"  # noqa: S105 - a reason, not a password
    DIFFERENCES = "differences"
    BUSY = "busy"
    CLOSING = "closing"
    PURPOSE = "purpose"
    """This engine does not serve what the dialler came for."""

    INCOMPLETE = "incomplete"
    """Not all ranks of the instance have joined."""

    DOUBLED = "doubled"
    """Another rank has joined with the same coordinates."""

    STRANGER = "stranger"
    """It does not belong into this instance: another identity, or other sizes."""


class Hello(msgspec.Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The first message of either side.

    Attributes:
        wanted: The engine id that the dialler expects; empty from a listener.
        purpose: What the dialler comes for; a listener repeats it.
        nonce: Fresh random bytes, so that no two handshakes have the same MAC.
    """

    protocol: int
    engine: EngineKey
    wanted: Annotated[str, msgspec.Meta(max_length=256)]
    purpose: Purpose
    nonce: Annotated[
        bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)
    ]


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank tells a peer that has proved the secret.

    Attributes:
        metadata: The transport's agent metadata; tens of kilobytes in practice.
    """

    identity: ModelIdentity
    layout: CacheLayout
    metadata: Annotated[bytes, msgspec.Meta(max_length=4 * 1024 * 1024)]


class Proof(msgspec.Struct, frozen=True, tag="proof", forbid_unknown_fields=True):
    """The MAC of the two hellos: whoever made it knows the secret."""

    mac: Mac


class Introduction(
    msgspec.Struct, frozen=True, tag="introduction", forbid_unknown_fields=True
):
    """What a side has to say for the purpose, encoded, and its MAC."""

    body: bytes
    mac: Mac


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
_proof = msgspec.msgpack.Decoder(Proof | Refusal)
_introduction = msgspec.msgpack.Decoder(Introduction | Refusal)
_card = msgspec.msgpack.Decoder(Card)

_Message = TypeVar("_Message")


def encode(message: Hello | Proof | Introduction | Refusal) -> bytes:
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
        raise HandshakeRefused(
            str(difference),
            reason=RefusalReason.VERSION.value,
            differences=(str(difference),),
        )
    return _accepted(_decoded(_hello, payload))


def encode_card(card: Card) -> bytes:
    """The body of a `Purpose.LINK` introduction."""
    return _encoder.encode(card)


def decode_card(body: bytes) -> Card:
    """The card in an introduction that has been checked.

    Raises:
        ProtocolViolation: It is not a card.
    """
    return _decoded(_card, body)


@dataclass(frozen=True)
class Transcript:
    """The two hellos of one handshake, and the secret that is proved over them.

    Attributes:
        secret: The shared secret; empty means that anyone may connect.
        hellos: The encoded hellos, the dialler's first.
    """

    secret: bytes = field(repr=False)
    hellos: tuple[bytes, bytes]

    def proof(self, role: Role) -> bytes:
        """The encoded proof of `role`."""
        return encode(Proof(self._mac("proof", role)))

    def check_proof(self, payload: bytes, role: Role) -> None:
        """Whether `role` has proved the secret.

        Raises:
            HandshakeRefused: It has another secret, or it refuses us.
            ProtocolViolation: The payload is not a proof.
        """
        proof = _accepted(_decoded(_proof, payload))
        self._check(proof.mac, "proof", role)

    def introduction(self, body: bytes, role: Role) -> bytes:
        """The encoded introduction of `role`."""
        return encode(Introduction(body, self._mac("introduction", role, body)))

    def body(self, payload: bytes, role: Role) -> bytes:
        """The body of an introduction made by `role`, not decoded yet.

        Raises:
            HandshakeRefused: The MAC was made with another secret, or it refuses us.
            ProtocolViolation: The payload is not an introduction.
        """
        introduction = _accepted(_decoded(_introduction, payload))
        self._check(introduction.mac, "introduction", role, introduction.body)
        return introduction.body

    def _check(self, shown: bytes, what: str, role: Role, body: bytes = b"") -> None:
        if not hmac.compare_digest(self._mac(what, role, body), shown):
            raise HandshakeRefused(
                "the peer did not prove the shared secret",
                reason=RefusalReason.SECRET.value,
            )

    def _mac(self, what: str, role: Role, body: bytes = b"") -> bytes:
        return mac(self._key, what.encode(), role.value.encode(), *self.hellos, body)

    @cached_property
    def _key(self) -> bytes:
        return derived_key(self.secret, "handshake")


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
    # The peer writes from its own side: its `local` is our remote. Cut short, because
    # a back-off remembers it.
    differences = tuple(
        str(Difference(d.factor, d.remote, d.local))[:256] for d in refusal.differences
    )
    named = f": {'; '.join(differences[:8])}" if differences else ""
    return HandshakeRefused(
        f"the peer refused ({refusal.reason.value}): {refusal.detail}{named}",
        reason=refusal.reason.value,
        differences=differences,
    )
