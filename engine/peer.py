"""`Peer`: one start of one remote rank, the link to it, and who hears what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kvferry.protocol.errors import FerryError, ProtocolViolation
from kvferry.protocol.link import (
    Aborted,
    Confirmed,
    Finished,
    OfferReady,
    Refused,
    Registered,
    Revoked,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.engine.link import Link
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.link import LinkMessage

__all__ = ("Answer", "Peer", "Subscriber")

Answer = Confirmed | OfferReady | Refused | Registered | Finished | Aborted | Revoked


class Subscriber:
    """One pull's ear on one peer; the calls must not raise or block."""

    def __init__(
        self,
        on_answer: Callable[[Answer], None],
        on_lost: Callable[[FerryError], None],
    ) -> None:
        self.on_answer = on_answer
        self.on_lost = on_lost


class Peer:
    """One start of one remote rank, connected.

    Attributes:
        key: Who it is.
        name: The same, to be read.
        card: What it told in the handshake.
        link: The open link to it.
        agent: Its name in the fabric.
        strays: Answers to pulls that are not (or no longer) under way.
        used_at: When somebody last needed it, in `trio.current_time`.
        is_forgotten: It is not, or no longer, among those we know.
    """

    def __init__(self, key: EngineKey, card: Card, link: Link) -> None:
        self.key = key
        self.name = str(key)
        self.card = card
        self.link = link
        self.agent = ""
        self.strays = 0
        self.used_at = trio.current_time()
        self.is_forgotten = False
        self._subscribers: dict[int, Subscriber] = {}

    @property
    def users(self) -> int:
        """Pulls under way."""
        return len(self._subscribers)

    def subscribe(self, attempt: int, subscriber: Subscriber) -> None:
        """Hear the answers to one attempt, and the end of the link."""
        self._subscribers[attempt] = subscriber

    def unsubscribe(self, attempt: int) -> None:
        """Hear no more."""
        self._subscribers.pop(attempt, None)

    def deliver(self, message: LinkMessage) -> None:
        """Hand an answer to the attempt that it is for.

        Raises:
            ProtocolViolation: Only a consumer sends such a message, or somebody
                else's name is in it.
        """
        if not isinstance(message, Answer):
            raise ProtocolViolation(f"{type(message).__name__} from a producer")
        if isinstance(message, Confirmed) and message.engine != self.key:
            raise ProtocolViolation(f"{self.key} confirms as {message.engine}")
        subscriber = self._subscribers.get(message.attempt)
        if subscriber is None:
            self.strays += 1
            return
        subscriber.on_answer(message)

    def lose(self, cause: FerryError) -> None:
        """Tell everybody under way, together and at once."""
        for subscriber in tuple(self._subscribers.values()):
            subscriber.on_lost(cause)
