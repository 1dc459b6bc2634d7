"""The error tree of kvferry, sorted by what the caller should do about it.

::

    FerryError
    |-- MisuseError            you: the call can never work as it was made
    |   |-- ConfigError          a configuration that contradicts itself
    |   |-- CacheError           tensors, axes or blocks that do not describe a cache
    |   |-- ImpossiblePlan       two layouts, or two spans, that cannot be paired
    |   |-- UnknownBlock         a block id outside its pool, or listed twice
    |   |-- RequestInUse         a request id that is already active here
    |   |-- BlocksInUse          a destination block that is written for another request
    |   `-- BadTicket            bytes or a dict that are not a ticket
    |       `-- UntrustedTicket      it names an address that we have no reason to dial
    |-- PeerError              they: look at the peer
    |   |-- PeerUnreachable      nobody answers at the address
    |   |-- HandshakeRefused     the two sides differ; `differences` names every factor
    |   |-- WrongPeer            somebody else, or a later start, answers at the address
    |   |-- PeerLost             the link or the transport to the peer ended
    |   |-- InstanceIncomplete   not every rank of an instance has joined
    |   |-- ProtocolViolation    the peer spoke nonsense
    |   `-- OfferRefused         the producer has no such offer for this reader
    |       |-- UnknownOffer       never heard of, or long forgotten
    |       |-- OfferSpent         this reader is already done with it
    |       |-- OfferWithdrawn     the producer took it back
    |       `-- OfferDiffers       its ranks offer different things under one id
    |-- TransferError          the bytes: the request failed, a new one may work
    |   |-- TransferFailed       the transport reported a failure
    |   |-- TicketExpired        the ticket is too old to be used
    |   |-- LeaseExpired         the blocks were not held to the last byte
    |   |-- PushAborted          the producer gave up a push before all was there
    |   |-- PushRevoked          the consumer took its blocks back under a push
    |   |-- IncompletePush       a push was committed, and a part never became ready
    |   `-- DeadlineExceeded     it took longer than the caller allows
    |-- EngineClosed           the engine is closing or closed
    `-- FerryInternalError     we: please report it

Lives in `protocol/` because it raises too and may not import `engine/`;
`kvferry.engine` re-exports all of it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from kvferry.protocol.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

    from kvferry.protocol.ranges import Ranges

__all__ = (
    "BadTicket",
    "BlocksInUse",
    "CacheError",
    "ConfigError",
    "DeadlineExceeded",
    "EngineClosed",
    "FerryError",
    "FerryInternalError",
    "HandshakeRefused",
    "ImpossiblePlan",
    "IncompletePush",
    "InstanceIncomplete",
    "LeaseExpired",
    "MisuseError",
    "OfferDiffers",
    "OfferRefused",
    "OfferSpent",
    "OfferWithdrawn",
    "PeerError",
    "PeerLost",
    "PeerUnreachable",
    "ProtocolViolation",
    "PushAborted",
    "PushRevoked",
    "RequestInUse",
    "TicketExpired",
    "TransferError",
    "TransferFailed",
    "UnknownBlock",
    "UnknownOffer",
    "UntrustedTicket",
    "WrongPeer",
)


class FerryError(Exception):
    """The root: every error that kvferry lets out is one of these.

    Attributes:
        detail: What went wrong and what would be right, without the context below.
        request_id: The request it ended, if it ended one.
        peer: The other side, as ``engine_id/tp.pp@host:port``, as far as known.
        phase: The phase of the request (``connecting``, ``reading``, ...).
        untrusted: Per group the token ranges whose destination blocks may hold
            anything; for a state group the range is of the slots' list positions.
            Empty when no byte was written.
        origin: The rank of our own instance where it began, if ranks have agreed
            on it.
    """

    def __init__(
        self,
        detail: str,
        *,
        request_id: str | None = None,
        peer: str | None = None,
        phase: str | None = None,
        untrusted: Mapping[str, Ranges] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.request_id = request_id
        self.peer = peer
        self.phase = phase
        self.untrusted: dict[str, Ranges] = dict(untrusted or {})
        self.origin: str | None = None

    def about(
        self,
        *,
        request_id: str | None = None,
        peer: str | None = None,
        phase: str | None = None,
        untrusted: Mapping[str, Ranges] | None = None,
    ) -> Self:
        """A copy with more context; what this one says already stays.

        A copy, because one peer's end is told to many requests.
        """
        error = copy.copy(self)
        error.__cause__ = self.__cause__
        error.request_id = self.request_id or request_id
        error.peer = self.peer or peer
        error.phase = self.phase or phase
        error.untrusted = dict(self.untrusted or untrusted or {})
        return error

    def __str__(self) -> str:
        """One line: the detail, then whatever context is known.

        A peer may have written parts of it: what does not print is escaped.
        """
        context = [
            f"{name}={value}"
            for name, value in (
                ("request", self.request_id),
                ("peer", self.peer),
                ("phase", self.phase),
                ("rank", self.origin),
            )
            if value is not None
        ]
        if self.untrusted:
            spans = (f"{group}:{ranges}" for group, ranges in self.untrusted.items())
            context.append(f"untrusted={' '.join(spans)}")
        return printable(
            f"{self.detail} [{', '.join(context)}]" if context else self.detail
        )


class MisuseError(FerryError):
    """You: the call can never work as it was made."""


class ConfigError(MisuseError, ValueError):
    """A configuration that contradicts itself or is not safe to run.

    A `ValueError`, too, like `CacheError`: what a value's constructor refuses is
    nonsense of the peer's when it came from one, and decoders tell it by that.
    """


class CacheError(MisuseError, ValueError):
    """Tensors, axes, shards or block counts that do not describe a cache."""


class ImpossiblePlan(MisuseError):
    """Two layouts, or two spans, that cannot be paired; nothing was transferred."""


class UnknownBlock(MisuseError):
    """A block id outside its pool, listed twice, or missing where it is needed."""


class RequestInUse(MisuseError):
    """The request id is already active on this engine; the first one goes on."""


class BlocksInUse(MisuseError):
    """A destination block is being written for another request, which goes on."""


class BadTicket(MisuseError):
    """Bytes or a dict that are not a ticket of this protocol version."""


class UntrustedTicket(BadTicket):
    """A ticket or contact of an address that nobody whom we trust has named."""


class PeerError(FerryError):
    """They: look at the peer."""


class PeerUnreachable(PeerError):
    """Nobody answers at the address, or not in time."""


class HandshakeRefused(PeerError):
    """The two sides differ, or the peer did not prove the shared secret.

    Attributes:
        reason: In one word, as the protocol has it: ``secret``, ``busy``,
            ``incomplete``, ``certificate``, ...; empty when there is none for it.
        differences: Each factor that differs, with both values; empty when the
            refusal is not about a comparison.
    """

    def __init__(
        self,
        detail: str,
        *,
        reason: str = "",
        differences: Sequence[str] = (),
        peer: str | None = None,
    ) -> None:
        super().__init__(detail, peer=peer)
        self.reason = reason
        self.differences = tuple(differences)


class WrongPeer(PeerError):
    """Another engine, or a later start of the same one, answers at the address."""


class PeerLost(PeerError):
    """The link or the transport to the peer ended under the request."""


class InstanceIncomplete(PeerError):
    """Not every rank of an instance has joined, or one has gone; the detail names them."""


class ProtocolViolation(PeerError):
    """The peer sent what this protocol does not allow."""


class OfferRefused(PeerError):
    """The producer does not hold the offer for this reader."""


class UnknownOffer(OfferRefused):
    """The producer has never heard of the offer, or has long forgotten it."""


class OfferSpent(OfferRefused):
    """This reader is already done with the offer: a ticket is read once."""


class OfferWithdrawn(OfferRefused):
    """The producer took the offer back before it was read."""


class OfferDiffers(OfferRefused):
    """The producer's ranks offer different things under one request id."""


class TransferError(FerryError):
    """The bytes: this request failed, a new one may work."""


class TransferFailed(TransferError):
    """The transport reported a failure."""


class TicketExpired(TransferError):
    """The ticket is too old to be used; nothing was transferred."""


class LeaseExpired(TransferError):
    """The producer did not hold the blocks up to the last byte."""


class PushAborted(TransferError):
    """The producer gave up its push before every byte was there."""


class PushRevoked(TransferError):
    """The consumer took its blocks back before the push had landed."""


class IncompletePush(TransferError):
    """A push was committed although some of its blocks had never become ready."""


class DeadlineExceeded(TransferError):
    """The request took longer than its caller allows."""


class EngineClosed(FerryError):
    """The engine is closing or closed."""


class FerryInternalError(FerryError):
    """We: an invariant of kvferry does not hold. Please report it."""
