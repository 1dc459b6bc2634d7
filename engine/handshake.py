"""Both sides of the handshake over a framed stream; `protocol.handshake` says what.

Each side compares the two cards by itself, so that each can name every factor
that differs in its own terms. No deadline here: the callers have one around it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.protocol.errors import HandshakeRefused, WrongPeer
from kvferry.protocol.framing import MAX_CARD_BYTES
from kvferry.protocol.handshake import (
    NONCE_BYTES,
    Card,
    Hello,
    Refusal,
    RefusalReason,
    Role,
    decode_hello,
    decode_introduction,
    encode,
    introduce,
    verify,
)
from kvferry.protocol.identity import EngineKey, compare, compare_layouts
from kvferry.protocol.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.engine.link import FramedStream
    from kvferry.protocol.identity import Difference

__all__ = ("Credentials", "answer", "greet", "turn_away")


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
    secret: bytes
    skip_groups: frozenset[str]

    def differences(self, theirs: Card) -> tuple[Difference, ...]:
        """Everything that should agree and does not, seen from here."""
        return (
            *compare(self.card.identity, theirs.identity),
            *compare_layouts(
                self.card.layout, theirs.layout, skip_groups=self.skip_groups
            ),
        )

    def hello(self, wanted: str) -> bytes:
        """A fresh hello, encoded."""
        nonce = os.urandom(NONCE_BYTES)
        return encode(Hello(PROTOCOL_VERSION, self.key, wanted, nonce))


async def greet(framed: FramedStream, ours: Credentials, wanted: EngineKey) -> Card:
    """The dialler's side.

    Returns:
        The card of the peer, who is `wanted` and whom nothing keeps from us.

    Raises:
        WrongPeer: Another engine, rank or generation answers.
        HandshakeRefused: Secrets or facts differ, or the peer refuses.
        ProtocolViolation: The peer spoke nonsense.
        PeerLost: The stream ended.
    """
    mine = ours.hello(wanted.engine_id)
    await framed.send(mine)
    theirs = await framed.receive()
    hello = decode_hello(theirs)
    _check_wanted(hello.engine, wanted)
    hellos = (mine, theirs)
    await framed.send(
        introduce(ours.card, role=Role.DIALLER, secret=ours.secret, hellos=hellos),
        limit_bytes=MAX_CARD_BYTES,
    )
    introduction = decode_introduction(await framed.receive(limit_bytes=MAX_CARD_BYTES))
    card = verify(introduction, role=Role.LISTENER, secret=ours.secret, hellos=hellos)
    if differences := ours.differences(card):
        raise _refused(differences)
    return card


async def answer(
    framed: FramedStream,
    ours: Credentials,
    *,
    admit: Callable[[], RefusalReason | None] = lambda: None,
) -> tuple[EngineKey, Card]:
    """The listener's side.

    Args:
        framed: The stream.
        ours: What we show.
        admit: Asked last, about a dialler with whom nothing is wrong: why there is
            no place for it, if there is none.

    Returns:
        Who dialled, and its card.

    Raises:
        HandshakeRefused: As in `greet`; the dialler has been told why.
        ProtocolViolation: The dialler spoke nonsense.
        PeerLost: The stream ended.
    """
    theirs = await framed.receive()
    try:
        hello = decode_hello(theirs)
    except HandshakeRefused as error:
        await _refuse(framed, RefusalReason.VERSION, error)
        raise
    if hello.wanted != ours.key.engine_id:
        stranger = HandshakeRefused(
            f"the dialler wants {hello.wanted!r}, this is {ours.key.engine_id!r}"
        )
        await _refuse(framed, RefusalReason.WRONG_ENGINE, stranger)
        raise stranger
    mine = ours.hello("")
    await framed.send(mine)
    card = await _introduced(framed, ours, (theirs, mine))
    if reason := admit():
        no_place = HandshakeRefused(f"no place for {hello.engine}: {reason.value}")
        await _refuse(framed, reason, no_place)
        raise no_place
    await framed.send(
        introduce(
            ours.card, role=Role.LISTENER, secret=ours.secret, hellos=(theirs, mine)
        ),
        limit_bytes=MAX_CARD_BYTES,
    )
    return hello.engine, card


async def turn_away(framed: FramedStream, reason: RefusalReason) -> None:
    """The listener's side when it has no place even for a handshake.

    Raises:
        PeerLost: The stream ended.
    """
    # Read first: closed with something unread, a TCP stream takes our words along.
    await framed.receive()
    await _refuse(framed, reason, HandshakeRefused("no place for a dialler now"))


async def _introduced(
    framed: FramedStream, ours: Credentials, hellos: tuple[bytes, bytes]
) -> Card:
    payload = await framed.receive(limit_bytes=MAX_CARD_BYTES)
    introduction = decode_introduction(payload)
    try:
        card = verify(
            introduction, role=Role.DIALLER, secret=ours.secret, hellos=hellos
        )
    except HandshakeRefused as error:
        await _refuse(framed, RefusalReason.SECRET, error)
        raise
    if differences := ours.differences(card):
        # The dialler hears the facts as facts, and turns them to its own side.
        refusal = HandshakeRefused("the two sides differ")
        await _refuse(framed, RefusalReason.DIFFERENCES, refusal, differences)
        raise _refused(differences)
    return card


async def _refuse(
    framed: FramedStream,
    reason: RefusalReason,
    error: HandshakeRefused,
    differences: tuple[Difference, ...] = (),
) -> None:
    # The lists are bounded on the wire: 256 factors tell enough.
    refusal = Refusal(reason, error.detail[:4096], differences[:256])
    await framed.send(encode(refusal), limit_bytes=MAX_CARD_BYTES)


def _refused(differences: tuple[Difference, ...]) -> HandshakeRefused:
    named = tuple(str(difference) for difference in differences)
    return HandshakeRefused(
        f"the two sides differ: {'; '.join(named[:8])}", differences=named
    )


def _check_wanted(found: EngineKey, wanted: EngineKey) -> None:
    if found == wanted:
        return
    if found.engine_id == wanted.engine_id and found.rank == wanted.rank:
        raise WrongPeer(
            f"{wanted.engine_id} was started anew: the ticket is of generation "
            f"{wanted.generation}, {found.generation} answers; ask for a new ticket"
        )
    raise WrongPeer(f"{found} answers where the ticket names {wanted}")
