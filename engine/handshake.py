"""Both sides of the handshake over a framed stream; `protocol.handshake` says what.

`call` and `receive_call` serve any purpose, and leave what is in the bodies to their
callers; `greet` calls to link two ranks. Each side compares the two cards by itself,
so that each can name every factor that differs in its own terms. No deadline here:
the callers have one around it.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Generic, TypeVar

from kvferry.engine.tls import TlsFailed
from kvferry.protocol.errors import HandshakeRefused, PeerLost, WrongPeer
from kvferry.protocol.framing import MAX_CARD_BYTES
from kvferry.protocol.handshake import (
    NONCE_BYTES,
    Card,
    Hello,
    Purpose,
    Refusal,
    RefusalReason,
    Role,
    Transcript,
    decode_card,
    decode_hello,
    encode,
    encode_card,
)
from kvferry.protocol.identity import EngineKey, compare, compare_layouts
from kvferry.protocol.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.engine.link import FramedStream
    from kvferry.protocol.identity import Difference

__all__ = (
    "Credentials",
    "Welcome",
    "call",
    "greet",
    "receive_call",
    "turn_away",
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Welcome(Generic[_T]):
    """A listener's yes to a dialler that has proved the secret.

    Attributes:
        body: What it is answered with.
        visit: What the listener's side makes of its coming.
    """

    body: bytes
    visit: _T


@dataclass(frozen=True)
class Credentials:
    """What this engine shows in a handshake.

    Attributes:
        key: Who we are.
        card: What we tell a peer that has proved the secret.
        secret: The shared secret.
        skip_groups: Groups that need not exist on both sides; not transferred.
    """

    key: EngineKey
    card: Card
    secret: bytes = field(repr=False)
    skip_groups: frozenset[str]

    @cached_property
    def card_body(self) -> bytes:
        """The card, encoded: the same for everybody, and tens of kilobytes."""
        return encode_card(self.card)

    def differences(self, theirs: Card) -> tuple[Difference, ...]:
        """Everything that should agree and does not, seen from here."""
        return (
            *compare(self.card.identity, theirs.identity),
            *compare_layouts(
                self.card.layout, theirs.layout, skip_groups=self.skip_groups
            ),
        )

    def read_card(self, body: bytes) -> Card | Refusal:
        """A dialler's card, or what it hears if the two sides differ.

        Raises:
            ProtocolViolation: It is not a card.
        """
        card = decode_card(body)
        if differences := self.differences(card):
            return _differing(differences)
        return card

    def hello(self, wanted: str, purpose: Purpose) -> bytes:
        """A fresh hello, encoded."""
        nonce = os.urandom(NONCE_BYTES)
        return encode(Hello(PROTOCOL_VERSION, self.key, wanted, purpose, nonce))


async def call(
    framed: FramedStream,
    ours: Credentials,
    wanted: EngineKey | str,
    purpose: Purpose,
    body: bytes,
    *,
    decode: Callable[[bytes], _T],
) -> tuple[EngineKey, _T]:
    """The dialler's side, for any purpose.

    Args:
        framed: The stream.
        ours: Who we are, and the secret.
        wanted: Who should answer; only the engine id, if any rank and start will do.
        purpose: What we come for.
        body: What we have to say; sent once the listener has proved the secret.
        decode: Of the listener's body, which is known to be its own.

    Returns:
        Who answered, and its body.

    Raises:
        WrongPeer: Another engine, rank or generation answers.
        HandshakeRefused: The secrets differ, the peer refuses, or one of the two does
            not accept the other's certificate.
        ProtocolViolation: The peer spoke nonsense.
        PeerLost: The stream ended.
    """
    engine_id = wanted if isinstance(wanted, str) else wanted.engine_id
    mine = ours.hello(engine_id, purpose)
    with _naming_tls():
        await framed.send(mine)
        theirs = await framed.receive()
    hello = decode_hello(theirs)
    _check_wanted(hello.engine, wanted)
    transcript = Transcript(ours.secret, (mine, theirs))
    await framed.send(transcript.proof(Role.DIALLER))
    transcript.check_proof(await framed.receive(), Role.LISTENER)
    introduction = transcript.introduction(body, Role.DIALLER)
    await framed.send(introduction, limit_bytes=MAX_CARD_BYTES)
    answered = await framed.receive(limit_bytes=MAX_CARD_BYTES)
    return hello.engine, decode(transcript.body(answered, Role.LISTENER))


async def receive_call(
    framed: FramedStream,
    ours: Credentials,
    reception: Callable[[EngineKey, Purpose, bytes], Welcome[_T] | Refusal],
) -> _T:
    """The listener's side, for any purpose.

    Args:
        framed: The stream.
        ours: Who we are, and the secret.
        reception: Asked last, about a dialler with whom nothing else is wrong, what it
            comes for, and its body. May raise a FerryError, never blocks.

    Returns:
        The visit that the reception has made of it.

    Raises:
        HandshakeRefused: As in `call`; the dialler has been told why.
        ProtocolViolation: The dialler spoke nonsense.
        PeerLost: The stream ended.
    """
    with _naming_tls():
        theirs = await framed.receive()
    hello = await _heard(framed, ours, theirs)
    mine = ours.hello("", hello.purpose)
    await framed.send(mine)
    transcript = Transcript(ours.secret, (theirs, mine))
    proof = await framed.receive()
    try:
        transcript.check_proof(proof, Role.DIALLER)
    except HandshakeRefused as error:
        await _refuse(framed, Refusal(RefusalReason.SECRET, error.detail))
        raise
    await framed.send(transcript.proof(Role.LISTENER))
    introduction = await framed.receive(limit_bytes=MAX_CARD_BYTES)
    body = transcript.body(introduction, Role.DIALLER)
    answer = reception(hello.engine, hello.purpose, body)
    if isinstance(answer, Refusal):
        await _refuse(framed, answer)
        raise _refused(answer, peer=hello.engine)
    introduction = transcript.introduction(answer.body, Role.LISTENER)
    await framed.send(introduction, limit_bytes=MAX_CARD_BYTES)
    return answer.visit


async def greet(framed: FramedStream, ours: Credentials, wanted: EngineKey) -> Card:
    """The dialler's side of a link.

    Returns:
        The card of the peer, who is `wanted` and whom nothing keeps from us.

    Raises:
        PeerError: As in `call`, or the facts differ.
    """
    _, card = await call(
        framed, ours, wanted, Purpose.LINK, ours.card_body, decode=decode_card
    )
    if differences := ours.differences(card):
        raise _refused(_differing(differences), peer=wanted)
    return card


async def turn_away(framed: FramedStream, reason: RefusalReason) -> None:
    """The listener's side when it has no place even for a handshake.

    Raises:
        PeerLost: The stream ended.
    """
    # Read first: closed with something unread, a TCP stream takes our words along.
    await framed.receive()
    await _refuse(framed, Refusal(reason, "no place for a dialler now"))


async def _heard(framed: FramedStream, ours: Credentials, payload: bytes) -> Hello:
    """The dialler's hello, if it is for us."""
    try:
        hello = decode_hello(payload)
    except HandshakeRefused as error:
        await _refuse(framed, Refusal(RefusalReason.VERSION, error.detail))
        raise
    if hello.wanted != ours.key.engine_id:
        detail = f"the dialler wants {hello.wanted!r}, this is {ours.key.engine_id!r}"
        refusal = Refusal(RefusalReason.WRONG_ENGINE, detail)
        await _refuse(framed, refusal)
        raise _refused(refusal, peer=hello.engine)
    return hello


async def _refuse(framed: FramedStream, refusal: Refusal) -> None:
    # Both are bounded on the wire: 256 factors tell enough.
    bounded = Refusal(refusal.reason, refusal.detail[:4096], refusal.differences[:256])
    await framed.send(encode(bounded), limit_bytes=MAX_CARD_BYTES)


def _differing(differences: tuple[Difference, ...]) -> Refusal:
    # The peer hears the facts as facts, and turns them to its own side.
    return Refusal(RefusalReason.DIFFERENCES, "the two sides differ", differences)


def _refused(refusal: Refusal, *, peer: EngineKey) -> HandshakeRefused:
    """What we refuse, as an error on our own side."""
    factors = tuple(str(difference) for difference in refusal.differences)
    named = f": {'; '.join(factors[:8])}" if factors else ""
    return HandshakeRefused(
        f"{refusal.detail}{named}",
        reason=refusal.reason.value,
        differences=factors,
        peer=str(peer),
    )


@contextmanager
def _naming_tls() -> Iterator[None]:
    """Over TLS its own handshake goes first, with the first words of either side."""
    try:
        yield
    except PeerLost as error:
        if not isinstance(error.__cause__, TlsFailed):
            raise
        is_certificate = error.__cause__.is_about_certificates
        reason = "certificate" if is_certificate else "tls"
        raise HandshakeRefused(error.detail, reason=reason) from error


def _check_wanted(found: EngineKey, wanted: EngineKey | str) -> None:
    if isinstance(wanted, str):
        if found.engine_id != wanted:
            raise WrongPeer(f"{found} answers where {wanted!r} should be")
        return
    if found == wanted:
        return
    if found.engine_id == wanted.engine_id and found.rank == wanted.rank:
        raise WrongPeer(
            f"{wanted.engine_id} was started anew: the ticket is of generation "
            f"{wanted.generation}, {found.generation} answers; ask for a new ticket"
        )
    raise WrongPeer(f"{found} answers where the ticket names {wanted}")
