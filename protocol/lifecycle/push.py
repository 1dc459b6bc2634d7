"""The lifecycle of a push, on the producer: one request to all its consumer ranks.

::

    open -> committed -> done

    open, committed -> ending -> failed | cancelled

Bytes may leave as soon as a range of the blocks is ready; a consumer may have
registered before the push began. Owned here: "done" is reached only when all was
ready, the producer has said so, and every rank of the consumer has said that it
landed; one rank's failure fails the request, and ends its other deliveries.

Not here: the waves and their draining (each `delivery` has its own), which ranges
are ready, what time it is.
"""

from __future__ import annotations

from kvferry.protocol.errors import (
    DeadlineExceeded,
    FerryError,
    IncompletePush,
    PushAborted,
    PushRevoked,
)
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.lifecycle.machine import (
    Effect,
    Event,
    Machine,
    Row,
    State,
    total_table,
)

__all__ = (
    "EVENTS",
    "OVER",
    "AbortDeliveries",
    "CommitDelivery",
    "CommitRequested",
    "PushCancelled",
    "PushFailed",
    "PushMachine",
    "PushState",
    "PushTicked",
    "ReaderDeclined",
    "ReaderEnded",
    "ReaderJoined",
    "ReaderLanded",
    "RefuseReader",
    "StartDelivery",
)


class PushState(State):
    """Where a push is."""

    OPEN = "open"
    """Ranges become ready; what is ready is written to whoever has registered."""
    COMMITTED = "committed"
    """All is ready; some rank of the consumer has not said that it landed."""
    ENDING = "ending"
    """It will fail or be cancelled, once every delivery has ended."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


OVER = frozenset({PushState.DONE, PushState.FAILED, PushState.CANCELLED})
"""The states in which the push has its outcome."""


class ReaderJoined(Event, frozen=True):
    """A rank of the consumer has registered.

    Attributes:
        reader: Which.
        readers: All ranks of its instance.
    """

    reader: EngineKey
    readers: tuple[Rank, ...]


class ReaderLanded(Event, frozen=True):
    """A rank of the consumer has all of it."""

    reader: EngineKey


class ReaderEnded(Event, frozen=True):
    """A delivery ended without having landed; what it left behind is in quarantine."""

    reader: EngineKey
    cause: FerryError


class ReaderDeclined(Event, frozen=True):
    """A rank of the consumer does not want it; it had not registered."""

    reader: EngineKey


class CommitRequested(Event, frozen=True):
    """The producer says that it is all there.

    Attributes:
        missing: What never became ready, in words.
    """

    missing: tuple[str, ...] = ()


class PushFailed(Event, frozen=True):
    """Something outside the deliveries went wrong: the producer, the plan, the engine."""

    cause: FerryError


class PushCancelled(Event, frozen=True):
    """The producer does not want it any more."""


class PushTicked(Event, frozen=True):
    """The machine's deadline has come."""


EVENTS: tuple[type[Event], ...] = (
    ReaderJoined,
    ReaderLanded,
    ReaderEnded,
    ReaderDeclined,
    CommitRequested,
    PushFailed,
    PushCancelled,
    PushTicked,
)


class StartDelivery(Effect, frozen=True):
    """Plan for this rank, and write whatever is ready."""

    reader: EngineKey


class CommitDelivery(Effect, frozen=True):
    """No more follows for this rank."""

    reader: EngineKey


class RefuseReader(Effect, frozen=True):
    """Tell the rank that this push is not for it."""

    reader: EngineKey


class AbortDeliveries(Effect, frozen=True):
    """End every delivery of it; each answers `ReaderEnded`."""

    cause: FerryError


_Decision = tuple[State, list[Effect]]


class PushMachine(Machine[PushState]):
    """One push.

    Args:
        deadline_at: When it fails if not every rank has landed.
        grace_s: Longest time that the deliveries take to end; longer than the grace
            that each of them has itself, which ends with what it holds in quarantine.
    """

    def __init__(self, *, deadline_at: float, grace_s: float) -> None:
        super().__init__(PushState.OPEN)
        self.cause: FerryError | None = None
        """Why it failed; None while it has not, and when it was cancelled."""
        self._deadline_at = deadline_at
        self._grace_s = grace_s
        self._grace_at = deadline_at
        self._is_cancelled = False
        self._expected: frozenset[Rank] | None = None
        self._instance: str | None = None  # the readers' engine id
        self._joined: dict[Rank, EngineKey] = {}
        self._live: dict[EngineKey, None] = {}  # in the order in which they joined
        self._landed: set[Rank] = set()

    @property
    def deadline(self) -> float | None:
        """When the next `PushTicked` is due."""
        match self.state:
            case PushState.OPEN | PushState.COMMITTED:
                return self._deadline_at
            case PushState.ENDING:
                return self._grace_at
            case _:
                return None

    @property
    def live(self) -> frozenset[EngineKey]:
        """Readers whose deliveries have not ended; empty with the outcome.

        Unless one has not answered in the grace: what it holds is not safe to reuse.
        """
        return frozenset(self._live)

    # Decisions: each is one row's `decide` and runs inside `step` alone.

    def _join(self, event: ReaderJoined, _now: float) -> _Decision:
        reader = event.reader
        if not self._is_awaited(reader):
            return self.state, [RefuseReader(reader)]
        self._instance = reader.engine_id
        if self._expected is None:
            self._expected = frozenset(event.readers) | {reader.rank}
        self._joined[reader.rank] = reader
        self._live[reader] = None
        effects: list[Effect] = [StartDelivery(reader)]
        if self.state is PushState.COMMITTED:
            effects.append(CommitDelivery(reader))
        return self.state, effects

    def _is_awaited(self, reader: EngineKey) -> bool:
        """One of the instance's ranks, as the first of them listed them, and new.

        A rank outside that list would be written to, and not be waited for.
        """
        return (
            self._instance in {None, reader.engine_id}
            and (self._expected is None or reader.rank in self._expected)
            and reader.rank not in self._joined
        )

    def _commit(self, event: CommitRequested, now: float) -> _Decision:
        if event.missing:
            named = ", ".join(event.missing[:8])
            return self._fail(
                IncompletePush(f"committed, but these never became ready: {named}"), now
            )
        effects = [CommitDelivery(reader) for reader in self._live]
        return PushState.COMMITTED, [*effects]

    def _land(self, event: ReaderLanded, _now: float) -> _Decision:
        if event.reader not in self._live:
            self.ignored += 1
            return self.state, []
        self._live.pop(event.reader, None)
        self._landed.add(event.reader.rank)
        if self._expected is not None and self._expected <= self._landed:
            return PushState.DONE, []
        return self.state, []

    def _lose(self, event: ReaderEnded, now: float) -> _Decision:
        if event.reader not in self._live:
            self.ignored += 1
            return self.state, []
        self._live.pop(event.reader, None)
        return self._fail(event.cause, now)

    def _decline(self, event: ReaderDeclined, now: float) -> _Decision:
        if not self._is_awaited(event.reader):
            self.ignored += 1
            return self.state, []
        return self._fail(PushRevoked(f"{event.reader} does not want it"), now)

    def _fail_outside(self, event: PushFailed, now: float) -> _Decision:
        return self._fail(event.cause, now)

    def _cancel(self, _event: PushCancelled, now: float) -> _Decision:
        self._is_cancelled = True
        return self._end(PushAborted("the producer cancelled the push"), now)

    def _tick(self, _event: PushTicked, now: float) -> _Decision:
        if now < self._deadline_at:
            return self.state, []
        waiting = sorted(self._expected or (), key=str)
        missing = [str(rank) for rank in waiting if rank not in self._landed]
        return self._fail(
            DeadlineExceeded(
                "the push did not land in its deadline; not landed:"
                f" {', '.join(missing[:8]) or 'nobody had registered'}"
            ),
            now,
        )

    def _fail(self, cause: FerryError, now: float) -> _Decision:
        self.cause = cause
        return self._end(cause, now)

    def _end(self, cause: FerryError, now: float) -> _Decision:
        self._grace_at = now + self._grace_s
        state, effects = self._ended()
        return state, [AbortDeliveries(cause), *effects]

    def _ended(self) -> _Decision:
        if self._live:
            return PushState.ENDING, []
        return self._outcome(), []

    def _outcome(self) -> PushState:
        return PushState.CANCELLED if self._is_cancelled else PushState.FAILED

    def _count_ended(self, event: ReaderLanded | ReaderEnded, _now: float) -> _Decision:
        self.ignored += event.reader not in self._live
        self._live.pop(event.reader, None)
        return self._ended()

    def _refuse(self, event: ReaderJoined, _now: float) -> _Decision:
        return self.state, [RefuseReader(event.reader)]

    def _cancel_ending(self, _event: PushCancelled, _now: float) -> _Decision:
        # A failure that came first stays the outcome.
        self._is_cancelled = self._is_cancelled or self.cause is None
        return PushState.ENDING, []

    def _tick_ending(self, _event: PushTicked, now: float) -> _Decision:
        return (self._outcome() if now >= self._grace_at else PushState.ENDING), []


_S = PushState
_M = PushMachine
_END = (_S.ENDING, _S.FAILED)

PushMachine.table = total_table(
    PushState,
    EVENTS,
    moves={
        _S.OPEN: {
            ReaderJoined: Row(_M._join, (_S.OPEN,)),
            ReaderEnded: Row(_M._lose, (_S.OPEN, *_END)),
            ReaderDeclined: Row(_M._decline, (_S.OPEN, *_END)),
            CommitRequested: Row(_M._commit, (_S.COMMITTED, *_END)),
            PushFailed: Row(_M._fail_outside, _END),
            PushCancelled: Row(_M._cancel, (_S.ENDING, _S.CANCELLED)),
            PushTicked: Row(_M._tick, (_S.OPEN, *_END)),
        },
        _S.COMMITTED: {
            ReaderJoined: Row(_M._join, (_S.COMMITTED,)),
            ReaderLanded: Row(_M._land, (_S.COMMITTED, _S.DONE)),
            ReaderEnded: Row(_M._lose, (_S.COMMITTED, *_END)),
            ReaderDeclined: Row(_M._decline, (_S.COMMITTED, *_END)),
            PushFailed: Row(_M._fail_outside, _END),
            PushCancelled: Row(_M._cancel, (_S.ENDING, _S.CANCELLED)),
            PushTicked: Row(_M._tick, (_S.COMMITTED, *_END)),
        },
        _S.ENDING: {
            ReaderJoined: Row(_M._refuse, (_S.ENDING,)),
            ReaderLanded: Row(_M._count_ended, (_S.ENDING, _S.FAILED, _S.CANCELLED)),
            ReaderEnded: Row(_M._count_ended, (_S.ENDING, _S.FAILED, _S.CANCELLED)),
            PushCancelled: Row(_M._cancel_ending, (_S.ENDING,)),
            PushTicked: Row(_M._tick_ending, (_S.ENDING, _S.FAILED, _S.CANCELLED)),
        },
        **{over: {ReaderJoined: Row(_M._refuse, (over,))} for over in OVER},
    },
    ignored={
        # A rank that says it landed before it was told that all is written.
        _S.OPEN: {ReaderLanded},
        # The stream's caller commits what a failure has ended meanwhile.
        _S.ENDING: {CommitRequested, PushFailed, ReaderDeclined},
        **dict.fromkeys(OVER, frozenset(EVENTS) - {ReaderJoined}),
    },
)
