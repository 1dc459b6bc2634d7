"""`Hold`: the blocks of one offered request, and the shares in which they are offered.

Each share has an id, readers and a lease of its own, and ends by itself; the blocks
are the caller's again with the last of them. What drives a share's machine is in
`kvferry.engine.offer`.
"""

from __future__ import annotations

import enum
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from kvferry.engine.spans import Placement, Side, plain_ids, span_ids
from kvferry.protocol.errors import (
    LeaseExpired,
    MisuseError,
    OfferWithdrawn,
    PeerLost,
    UnknownBlock,
)
from kvferry.protocol.lifecycle.offer import OfferState
from kvferry.protocol.ticket import TicketSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvferry.engine.link import Link
    from kvferry.engine.spans import Span
    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.layout import CacheLayout, GroupLayout
    from kvferry.protocol.lifecycle.offer import OfferMachine
    from kvferry.protocol.ticket import Ticket

__all__ = ("Hold", "Offer", "OfferOutcome", "Share", "ticket_spans")


class OfferOutcome(enum.Enum):
    """How an offer, or a share of it, ended; the best first."""

    RELEASED = "released"
    """Every reader has read it, or has declined."""
    LOST = "lost"
    """A reader went away before it was done; others, if any, have read or declined.

    Reads of it may still be in flight. They harm no one: that reader can never be
    told that it succeeded, and what it reads now it cannot trust.
    """
    EXPIRED = "expired"
    """Nobody renewed its lease."""
    WITHDRAWN = "withdrawn"
    """The producer took it back; readers under way will fail."""


@dataclass(eq=False)
class Share:
    """What one consumer may read: its ticket, and the machine behind it.

    Attributes:
        offer_id: Of this share, on this rank.
        origin: Of the ticket that asked for it first, if one did.
        claims: On the pump's cadence, while it is open.
        readers: Where those that have accepted, or renewed, did so: link and attempt.
    """

    hold: Hold
    offer_id: str
    ticket: Ticket
    machine: OfferMachine
    origin: str = ""
    claims: ExitStack = field(default_factory=ExitStack)
    readers: dict[EngineKey, tuple[Link, int]] = field(default_factory=dict)
    _digest: str = ""

    @property
    def name(self) -> tuple[str, int, str]:
        """Request, number and origin: what a sibling's ticket tells of it."""
        return self.hold.request_id, self.ticket.share, self.origin

    @property
    def digest(self) -> str:
        """Of its ticket; computed when somebody asks."""
        return self.keep_digest()

    def keep_digest(self) -> str:
        """Compute it now, as long as the ticket has its blocks."""
        self._digest = self._digest or self.ticket.digest
        return self._digest

    @property
    def outcome(self) -> OfferOutcome | None:
        """How it ended; None while it is open."""
        if self.is_open:
            return None
        return OfferOutcome(self.machine.state.value)

    @property
    def is_open(self) -> bool:
        """Whether the blocks are held for it."""
        return self.machine.state is OfferState.OPEN


@dataclass(eq=False)
class Hold:
    """The blocks of one request, held for all its shares.

    Attributes:
        shares: In the order of their numbers; never empty once it is out.
        open_shares: How many are open.
        ended: None is.
        awaits: Around the wait for the producer's event.
        cause: Why that failed.
    """

    request_id: str
    shares: list[Share] = field(default_factory=list)
    open_shares: int = 0
    ended: trio.Event = field(default_factory=trio.Event)
    awaits: trio.CancelScope = field(default_factory=trio.CancelScope)
    cause: FerryError | None = None

    @property
    def outcome(self) -> OfferOutcome | None:
        """The worst of its shares'; None while one is open."""
        ranked = list(OfferOutcome)
        found = [share.outcome for share in self.shares]
        return max((o for o in found if o), key=ranked.index) if all(found) else None


_ENDS: Mapping[OfferOutcome, Callable[[], FerryError]] = {
    OfferOutcome.LOST: lambda: PeerLost("a reader went away before it was done"),
    OfferOutcome.EXPIRED: lambda: LeaseExpired("nobody renewed the lease"),
    OfferOutcome.WITHDRAWN: lambda: OfferWithdrawn("the offer was taken back"),
}


class Offer:
    """The producer's hold on a request's blocks while its tickets are out.

    The blocks must not be written or freed until `wait` has returned, or
    `withdraw` has been called.

    Attributes:
        tickets: One for each consumer, through the router.
    """

    def __init__(self, hold: Hold, withdraw: Callable[[], None]) -> None:
        self.tickets = tuple(share.ticket for share in hold.shares)
        self._hold = hold
        self._withdraw = withdraw

    @property
    def ticket(self) -> Ticket:
        """The first of the tickets; with one consumer, the only one."""
        return self.tickets[0]

    @property
    def outcome(self) -> OfferOutcome | None:
        """How it ended, the worst of `outcomes`; None while it is open."""
        return self._hold.outcome

    @property
    def outcomes(self) -> tuple[OfferOutcome | None, ...]:
        """How each ticket ended, in their order; None where it is open."""
        return tuple(share.outcome for share in self._hold.shares)

    @property
    def cause(self) -> FerryError | None:
        """Why ``after`` failed, which has withdrawn the offer; None otherwise."""
        return self._hold.cause

    async def wait(self) -> OfferOutcome:
        """Wait for the end; cancelling the wait does not touch the offer.

        Returns:
            The one outcome; the blocks are the caller's again.
        """
        await self._hold.ended.wait()
        return self._hold.outcome or OfferOutcome.WITHDRAWN

    async def released(self) -> None:
        """Wait for the end, and raise if it is any other than `OfferOutcome.RELEASED`.

        For `TransferEngine.agree`, which goes by what is raised. However it ends, the
        blocks are the caller's again.

        Raises:
            PeerLost: A reader went away before it was done.
            LeaseExpired: Nobody renewed the lease.
            OfferWithdrawn: It was taken back; `cause` may say why.
        """
        outcome = await self.wait()
        if outcome is not OfferOutcome.RELEASED:
            raise _ENDS[outcome]().about(request_id=self._hold.request_id)

    def withdraw(self) -> None:
        """Take the blocks back at once; readers under way will fail their fence."""
        self._withdraw()


def ticket_spans(
    layout: CacheLayout, spans: Mapping[str, Span], *, num_tokens: int
) -> dict[str, TicketSpan]:
    """The producer's blocks as the ticket tells them, after a check.

    Whether a ``None`` or a late beginning is in the way of a consumer depends on
    what it has already: its plan tells (case p5).

    Raises:
        MisuseError: No tokens.
        UnknownBlock: An id outside its pool, or a span that ends too early.
        ImpossiblePlan: A span does not begin at a block boundary.
    """
    if num_tokens < 1:
        raise MisuseError(f"num_tokens must be at least 1, not {num_tokens}")
    groups = {group.name: group for group in layout.groups}
    return {
        name: _ticket_span(groups[name], span, num_tokens)
        for name, span in spans.items()
    }


def _ticket_span(group: GroupLayout, span: Span, num_tokens: int) -> TicketSpan:
    side, name = Side.of(group), group.name
    ids = span_ids(span, group=name, side="producer")
    placement = Placement.of(side, span, ids, group=name, name="producer")
    last = placement.first_token + ids.size * side.span_grain
    if group.block_size and last < num_tokens:
        raise UnknownBlock(
            f"group {name!r}: {ids.size} producer blocks from token"
            f" {placement.first_token} on end at token {last}, {num_tokens} are offered"
        )
    return TicketSpan(plain_ids(ids), span.first_token)
