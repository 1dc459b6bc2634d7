"""The lifecycle of an offer, on the producer.

::

    open -> released | lost | expired | withdrawn

Owned here: a lease that has run out, even for an instant, ends the offer for
good, so that an offer still open when its reader asks has been held all along
(invariant 4). Every event lets the lease run out first: a producer that was
stopped past its lease refuses whatever had queued up meanwhile.

An offer may be made before its blocks are computed: then its readers are told when
they are, and none is believed to have read them before.

Not here: blocks, links, the clock.
"""

from __future__ import annotations

from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.lifecycle.machine import (
    Effect,
    Event,
    Machine,
    Row,
    State,
    total_table,
)
from kvferry.protocol.link import RefusedReason

__all__ = (
    "EVENTS",
    "BlocksComputed",
    "ConfirmRead",
    "EndOffer",
    "NoteReader",
    "OfferDeclined",
    "OfferMachine",
    "OfferState",
    "OfferTicked",
    "ReadEnded",
    "ReaderLost",
    "RefuseReader",
    "RenewArrived",
    "ReportReady",
    "WithdrawRequested",
)


class OfferState(State):
    """Where an offer is; all but OPEN are final."""

    OPEN = "open"
    RELEASED = "released"
    """Every reader is done with it."""
    LOST = "lost"
    """As released, but a reader went away before it was done."""
    EXPIRED = "expired"
    """Nobody renewed its lease."""
    WITHDRAWN = "withdrawn"
    """The producer took it back."""


class RenewArrived(Event, frozen=True):
    """A reader asks to hold on.

    Attributes:
        reader: Who asks.
        readers: The ranks of the reader's instance that read from here.
    """

    reader: EngineKey
    readers: tuple[Rank, ...]


class ReadEnded(Event, frozen=True):
    """A reader has its last byte and asks for the confirmation."""

    reader: EngineKey


class OfferDeclined(Event, frozen=True):
    """A reader does not read, or does not go on.

    Attributes:
        readers: As in `RenewArrived`.
    """

    reader: EngineKey
    readers: tuple[Rank, ...]


class BlocksComputed(Event, frozen=True):
    """The producer's event has come: the blocks hold their bytes."""


class ReaderLost(Event, frozen=True):
    """The link on which a reader had accepted the ticket has ended.

    A read ends with its link, so this one will never be confirmed: as far as the
    blocks go it is as good as a decline.
    """

    reader: EngineKey


class WithdrawRequested(Event, frozen=True):
    """The producer wants its blocks back."""


class OfferTicked(Event, frozen=True):
    """The machine's deadline has come."""


EVENTS: tuple[type[Event], ...] = (
    RenewArrived,
    ReadEnded,
    OfferDeclined,
    BlocksComputed,
    ReaderLost,
    WithdrawRequested,
    OfferTicked,
)


class NoteReader(Effect, frozen=True):
    """The reader has accepted the ticket, or renewed: this is how it is reached."""

    reader: EngineKey


class ReportReady(Effect, frozen=True):
    """Tell the reader that the blocks hold their bytes."""

    reader: EngineKey


class ConfirmRead(Effect, frozen=True):
    """Tell the reader that the blocks were held."""

    reader: EngineKey
    epoch: int


class RefuseReader(Effect, frozen=True):
    """Tell the reader that the offer is not held for it."""

    reader: EngineKey
    reason: RefusedReason


class EndOffer(Effect, frozen=True):
    """Give the blocks back to the producer; its state says why."""


_Decision = tuple[State, list[Effect]]


class OfferMachine(Machine[OfferState]):
    """One offer.

    Args:
        now: When it was made.
        lease_s: How long the blocks are held from now, and from each renewal.
        is_ready: Whether they hold their bytes, so that its ticket says so.
    """

    def __init__(self, *, now: float, lease_s: float, is_ready: bool = True) -> None:
        super().__init__(OfferState.OPEN)
        self.epoch = 0
        """How often it has been renewed."""
        self._is_ready = is_ready
        self._is_ticket_ready = is_ready
        self._lease_s = lease_s
        self._lease_at = now + lease_s
        self._instance: str | None = None  # the readers' engine id
        self._generations: dict[Rank, str] = {}  # of the readers
        self._expected: frozenset[Rank] | None = None
        self._done: set[Rank] = set()
        self._has_lost = False  # a reader, before it was done

    @property
    def deadline(self) -> float | None:
        """When the lease runs out; None once it is over."""
        return self._lease_at if self.state is OfferState.OPEN else None

    @property
    def has_reader(self) -> bool:
        """Whether somebody has accepted the ticket."""
        return self._expected is not None

    @property
    def is_read(self) -> bool:
        """Whether somebody may be reading: who has accepted reads once it is ready."""
        return self.has_reader and self._is_ready

    @property
    def done(self) -> frozenset[Rank]:
        """The readers that are done."""
        return frozenset(self._done)

    # Decisions: each is one row's `decide` and runs inside `step` alone.

    def _renew(self, event: RenewArrived, now: float) -> _Decision:
        if self._has_run_out(now):
            return self._expire(event.reader)
        if self._is_strange(event.reader) or event.reader.rank in self._done:
            return OfferState.OPEN, [RefuseReader(event.reader, RefusedReason.SPENT)]
        self._claim(event.reader, event.readers)
        self.epoch += 1
        self._lease_at = now + self._lease_s
        return OfferState.OPEN, [
            NoteReader(event.reader),
            *self._report_ready(event.reader),
        ]

    def _report_ready(self, *readers: EngineKey) -> list[Effect]:
        """Nothing to those whose ticket says it already."""
        if self._is_ticket_ready or not self._is_ready:
            return []
        return [ReportReady(reader) for reader in readers]

    def _compute(self, _event: BlocksComputed, now: float) -> _Decision:
        if self._has_run_out(now):
            return OfferState.EXPIRED, [EndOffer()]
        self.ignored += self._is_ready
        waiting = [] if self._is_ready else self._reading()
        self._is_ready = True
        return OfferState.OPEN, self._report_ready(*waiting)

    def _reading(self) -> list[EngineKey]:
        """The readers that have accepted the ticket and are not done."""
        return [
            EngineKey(self._instance, generation, rank)
            for rank, generation in self._generations.items()
            if self._instance is not None and rank not in self._done
        ]

    def _confirm(self, event: ReadEnded, now: float) -> _Decision:
        if self._has_run_out(now):
            return self._expire(event.reader)
        if self._is_strange(event.reader) or event.reader.rank in self._done:
            return OfferState.OPEN, [RefuseReader(event.reader, RefusedReason.SPENT)]
        if not self._is_ready:
            refusal = RefuseReader(event.reader, RefusedReason.NOT_READY)
            return OfferState.OPEN, [refusal]
        self._claim(event.reader, (event.reader.rank,))
        return self._count(event.reader.rank, [ConfirmRead(event.reader, self.epoch)])

    def _decline(self, event: OfferDeclined, now: float) -> _Decision:
        if self._has_run_out(now):
            return OfferState.EXPIRED, [EndOffer()]
        if self._is_strange(event.reader) or event.reader.rank in self._done:
            self.ignored += 1
            return OfferState.OPEN, []
        self._claim(event.reader, event.readers)
        return self._count(event.reader.rank, [])

    def _lose(self, event: ReaderLost, now: float) -> _Decision:
        if self._has_run_out(now):
            return OfferState.EXPIRED, [EndOffer()]
        rank = event.reader.rank
        if self._is_strange(event.reader) or rank not in self._waited_for():
            self.ignored += 1
            return OfferState.OPEN, []
        self._has_lost = True
        return self._count(rank, [])

    def _waited_for(self) -> set[Rank]:
        """Readers that have been heard and are not done."""
        return self._generations.keys() - self._done

    def _withdraw(self, _event: WithdrawRequested, now: float) -> _Decision:
        over = OfferState.EXPIRED if self._has_run_out(now) else OfferState.WITHDRAWN
        return over, [EndOffer()]

    def _tick(self, _event: OfferTicked, now: float) -> _Decision:
        if self._has_run_out(now):
            return OfferState.EXPIRED, [EndOffer()]
        return OfferState.OPEN, []

    def _refuse(self, event: RenewArrived | ReadEnded, _now: float) -> _Decision:
        return self.state, [RefuseReader(event.reader, _REASONS[self.state])]

    def _has_run_out(self, now: float) -> bool:
        return now >= self._lease_at

    def _expire(self, reader: EngineKey) -> _Decision:
        refusal = RefuseReader(reader, RefusedReason.EXPIRED)
        return OfferState.EXPIRED, [refusal, EndOffer()]

    def _is_strange(self, reader: EngineKey) -> bool:
        """Whether another instance, or another start of the rank, has come before."""
        generation = self._generations.get(reader.rank, reader.generation)
        return (self._instance or reader.engine_id, generation) != (
            reader.engine_id,
            reader.generation,
        )

    def _claim(self, reader: EngineKey, readers: tuple[Rank, ...]) -> None:
        self._instance = reader.engine_id
        self._generations[reader.rank] = reader.generation
        if self._expected is None:
            self._expected = frozenset(readers) | {reader.rank}

    def _count(self, reader: Rank, effects: list[Effect]) -> _Decision:
        self._done.add(reader)
        if self._expected is not None and self._expected <= self._done:
            over = OfferState.LOST if self._has_lost else OfferState.RELEASED
            return over, [*effects, EndOffer()]
        return OfferState.OPEN, effects


_REASONS = {
    OfferState.RELEASED: RefusedReason.SPENT,
    OfferState.LOST: RefusedReason.SPENT,
    OfferState.EXPIRED: RefusedReason.EXPIRED,
    OfferState.WITHDRAWN: RefusedReason.WITHDRAWN,
}
_S = OfferState
_M = OfferMachine

OfferMachine.table = total_table(
    OfferState,
    EVENTS,
    moves={
        _S.OPEN: {
            RenewArrived: Row(_M._renew, (_S.OPEN, _S.EXPIRED)),
            BlocksComputed: Row(_M._compute, (_S.OPEN, _S.EXPIRED)),
            ReadEnded: Row(_M._confirm, (_S.OPEN, _S.RELEASED, _S.LOST, _S.EXPIRED)),
            OfferDeclined: Row(
                _M._decline, (_S.OPEN, _S.RELEASED, _S.LOST, _S.EXPIRED)
            ),
            ReaderLost: Row(_M._lose, (_S.OPEN, _S.LOST, _S.EXPIRED)),
            WithdrawRequested: Row(_M._withdraw, (_S.WITHDRAWN, _S.EXPIRED)),
            OfferTicked: Row(_M._tick, (_S.OPEN, _S.EXPIRED)),
        },
        **{
            over: {
                RenewArrived: Row(_M._refuse, (over,)),
                ReadEnded: Row(_M._refuse, (over,)),
            }
            for over in _REASONS
        },
    },
    ignored=dict.fromkeys(
        _REASONS,
        (OfferDeclined, ReaderLost, BlocksComputed, WithdrawRequested, OfferTicked),
    ),
)
