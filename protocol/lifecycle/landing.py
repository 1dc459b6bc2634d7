"""The lifecycle of a landing, on the consumer: blocks that a producer pushes into.

::

    new -> connecting -> planned -> registered -> finishing -> done

    connecting, planned -> failed | cancelled
    registered -> revoking -> failed | cancelled | quarantined -> reclaimed

Owned here: "done" is reached only when every source has said that it has written
all, and every one of its parts has been seen to arrive (invariant 1); once a source
has been told of the blocks, they come back only when it has said that nothing of
it touches them, or that all is written and all has arrived (invariant 3). A source
that cannot say so leaves them in quarantine (case l4).

Not here: which bytes a part has, who a source is, what time it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.protocol.errors import (
    DeadlineExceeded,
    FerryError,
    FerryInternalError,
    ProtocolViolation,
    PushAborted,
)
from kvferry.protocol.lifecycle.machine import (
    Effect,
    Event,
    Machine,
    Row,
    State,
    total_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = (
    "EVENTS",
    "OVER",
    "AwaitBlocks",
    "BlocksReady",
    "CancelRequested",
    "Claimed",
    "Connect",
    "DeclinePush",
    "FinishEnded",
    "FinishFailed",
    "LandingFailed",
    "LandingMachine",
    "LandingStarted",
    "LandingState",
    "LandingTicked",
    "PartArrived",
    "QuarantineBlocks",
    "ReclaimBlocks",
    "RunFinish",
    "SendExtend",
    "SendLanded",
    "SendRegister",
    "SendRevoke",
    "SourceFailed",
    "SourceFinished",
    "SourceLost",
    "SourceRevoked",
)


class LandingState(State):
    """Where a landing is."""

    NEW = "new"
    CONNECTING = "connecting"
    PLANNED = "planned"
    """The sources are connected; the caller's event has not come yet."""
    REGISTERED = "registered"
    """The sources know the blocks, and may write."""
    FINISHING = "finishing"
    REVOKING = "revoking"
    """It will fail or be cancelled, once no source can write any more."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    """It failed or was cancelled, and some source may still write."""
    RECLAIMED = "reclaimed"
    """The last of those sources has answered: the blocks are safe again."""


OVER = frozenset(
    {
        LandingState.DONE,
        LandingState.FAILED,
        LandingState.CANCELLED,
        LandingState.QUARANTINED,
        LandingState.RECLAIMED,
    }
)
"""The states in which the request has its outcome."""


class LandingStarted(Event, frozen=True):
    """The caller expects a push."""


class Claimed(Event, frozen=True):
    """The sources are connected, and each knows its share."""

    sources: int


class BlocksReady(Event, frozen=True):
    """The caller's event has come: the destination may be written."""


class PartArrived(Event, frozen=True):
    """A source's notice: the bytes of one of its waves are there."""

    source: int
    part: int


class SourceFinished(Event, frozen=True):
    """A source has written everything, in so many parts."""

    source: int
    parts: int


class SourceFailed(Event, frozen=True):
    """A source will not write the rest; it still answers."""

    source: int
    cause: FerryError


class SourceLost(Event, frozen=True):
    """Nobody answers there any more."""

    source: int
    cause: FerryError


class SourceRevoked(Event, frozen=True):
    """A source says that nothing of it touches our blocks any more."""

    source: int


class FinishEnded(Event, frozen=True):
    """The finish stage has zeroed what it should."""


class FinishFailed(Event, frozen=True):
    """The finish stage could not."""

    cause: FerryError


class LandingFailed(Event, frozen=True):
    """Something outside the sources went wrong: a connection, the plan, the engine."""

    cause: FerryError


class CancelRequested(Event, frozen=True):
    """The caller does not want it any more."""


class LandingTicked(Event, frozen=True):
    """The machine's deadline has come."""


EVENTS: tuple[type[Event], ...] = (
    LandingStarted,
    Claimed,
    BlocksReady,
    PartArrived,
    SourceFinished,
    SourceFailed,
    SourceLost,
    SourceRevoked,
    FinishEnded,
    FinishFailed,
    LandingFailed,
    CancelRequested,
    LandingTicked,
)


class Connect(Effect, frozen=True):
    """Connect the sources and tell their shares; answer `Claimed` or `LandingFailed`."""


class AwaitBlocks(Effect, frozen=True):
    """Wait for the caller's event; answer `BlocksReady` or `LandingFailed`."""


class SendRegister(Effect, frozen=True):
    """Tell every source where to write."""


class SendExtend(Effect, frozen=True):
    """Tell these sources that we hold the blocks on."""

    sources: tuple[int, ...]


class RunFinish(Effect, frozen=True):
    """Run the finish stage; answer `FinishEnded` or `FinishFailed`."""


class SendLanded(Effect, frozen=True):
    """Tell every source that all of it is there."""


class SendRevoke(Effect, frozen=True):
    """Ask these sources for the blocks; each answers `SourceRevoked`.

    One that cannot be reached is asked again for as long as it is among the
    machine's `writers`; the others are asked once, to let them go.
    """

    sources: tuple[int, ...]


class DeclinePush(Effect, frozen=True):
    """Tell every source that we do not want it; none of them knows our blocks."""


class QuarantineBlocks(Effect, frozen=True):
    """Keep the blocks back: these sources may still write."""

    sources: tuple[int, ...]


class ReclaimBlocks(Effect, frozen=True):
    """Let the quarantined blocks go."""


@dataclass
class _Source:
    """What is known of one source.

    Attributes:
        parts: How many it has written in all; None until it says so.
        arrived: Those that its notices have told of.
        is_safe: It has said that nothing of it touches our blocks.
        is_lost: Nobody answers there.
    """

    parts: int | None = None
    arrived: set[int] = field(default_factory=set)
    is_safe: bool = False
    is_lost: bool = False

    @property
    def is_written(self) -> bool:
        """All that it had to write is there: it will not write again."""
        return self.parts is not None and len(self.arrived) == self.parts

    def finish(self, parts: int) -> None:
        """It has written so many; those beyond were never its own."""
        self.parts = parts
        self.arrived = {part for part in self.arrived if part < parts}

    @property
    def may_write(self) -> bool:
        return not (self.is_safe or self.is_written)


_Decision = tuple[State, list[Effect]]


class LandingMachine(Machine[LandingState]):
    """One landing.

    Args:
        deadline_at: When it fails if it has not got to its finish stage.
        extend_every_s: Seconds between two extensions of its lease.
        grace_s: How long the sources may take to answer a revocation before the
            blocks are quarantined.
        max_parts: Most parts of one source; more is a failure of the source.
    """

    def __init__(
        self,
        *,
        deadline_at: float,
        extend_every_s: float,
        grace_s: float,
        max_parts: int = 2**20,
    ) -> None:
        super().__init__(LandingState.NEW)
        self.cause: FerryError | None = None
        """Why it failed; None while it has not, and when it was cancelled."""
        self._deadline_at = deadline_at
        self._extend_every_s = extend_every_s
        self._extend_at = deadline_at
        self._grace_s = grace_s
        self._grace_at = deadline_at
        self._max_parts = max_parts
        self._is_cancelled = False
        self._is_finishing = False  # after the finish stage outran its grace
        self._sources: list[_Source] = []

    @property
    def deadline(self) -> float | None:
        """When the next `LandingTicked` is due."""
        match self.state:
            case LandingState.CONNECTING | LandingState.PLANNED:
                return self._deadline_at
            case LandingState.REGISTERED:
                return min(self._deadline_at, self._extend_at)
            case LandingState.FINISHING:
                return min(self._grace_at, self._extend_at)
            case LandingState.REVOKING:
                return self._grace_at
            case _:
                return None

    @property
    def writers(self) -> tuple[int, ...]:
        """Sources that may still write."""
        return tuple(i for i, s in enumerate(self._sources) if s.may_write)

    def has_source(self, number: int) -> bool:
        """Whether there is a source of this number."""
        return 0 <= number < len(self._sources)

    @property
    def arrived(self) -> int:
        """Parts that have arrived, of all sources."""
        return sum(len(source.arrived) for source in self._sources)

    # Decisions: each is one row's `decide` and runs inside `step` alone.

    def _start(self, _event: LandingStarted, _now: float) -> _Decision:
        return LandingState.CONNECTING, [Connect()]

    def _claim(self, event: Claimed, _now: float) -> _Decision:
        if event.sources < 1:
            raise FerryInternalError("a landing without sources")
        self._sources = [_Source() for _ in range(event.sources)]
        return LandingState.PLANNED, [AwaitBlocks()]

    def _register(self, _event: BlocksReady, now: float) -> _Decision:
        self._extend_at = now + self._extend_every_s
        return LandingState.REGISTERED, [SendRegister()]

    def _arrive(self, event: PartArrived, now: float) -> _Decision:
        source = self._sources[event.source]
        most = self._max_parts if source.parts is None else source.parts
        if event.part in source.arrived or not 0 <= event.part < most:
            self.ignored += 1  # delivered twice, or made up
            return self.state, []
        source.arrived.add(event.part)
        return self._advance(now)

    def _finished(self, event: SourceFinished, now: float) -> _Decision:
        source = self._sources[event.source]
        if source.parts is not None or source.is_safe:
            self.ignored += 1
            return self.state, []
        if not 0 <= event.parts <= self._max_parts:
            return self._overrun(event, now)
        source.finish(event.parts)
        return self._advance(now)

    def _overrun(self, event: SourceFinished, now: float) -> _Decision:
        """More parts than were counted: no word of its can be taken for an end."""
        if self.state is LandingState.REVOKING:
            self.ignored += 1  # it has to answer the revocation
            return self.state, []
        return self._fail(
            ProtocolViolation(
                f"a push in {event.parts} parts is over the limit of {self._max_parts}"
            ),
            now,
        )

    def _advance(self, now: float) -> _Decision:
        """Go on when the last part of the last source is there."""
        if self.state is LandingState.REVOKING:
            return self._revoked()
        if not all(source.is_written for source in self._sources):
            return LandingState.REGISTERED, []
        self._grace_at = now + self._grace_s
        return LandingState.FINISHING, [RunFinish()]

    def _fail_source(self, event: SourceFailed, now: float) -> _Decision:
        return self._fail(event.cause, now)

    def _lose_source(self, event: SourceLost, now: float) -> _Decision:
        source = self._sources[event.source]
        self.ignored += source.is_lost
        source.is_lost = True
        if not source.may_write:
            # It has written all: its part is done, whatever becomes of it.
            return self.state, []
        return self._fail(event.cause, now)

    def _source_revoked(self, event: SourceRevoked, now: float) -> _Decision:
        """A source that says so unasked has given up."""
        self._set_safe(event.source)
        if self.state is LandingState.REVOKING:
            return self._revoked()
        return self._fail(PushAborted("the producer gave up without a word"), now)

    def _set_safe(self, number: int) -> None:
        source = self._sources[number]
        self.ignored += source.is_safe
        source.is_safe = True

    def _finish(self, _event: FinishEnded, _now: float) -> _Decision:
        return LandingState.DONE, [SendLanded()]

    def _fail_finish(self, event: FinishFailed, _now: float) -> _Decision:
        self.cause = event.cause
        return LandingState.FAILED, [SendRevoke(self._all())]

    def _fail_outside(self, event: LandingFailed, now: float) -> _Decision:
        return self._fail(event.cause, now)

    def _cancel(self, _event: CancelRequested, now: float) -> _Decision:
        self._is_cancelled = True
        return self._end(now)

    def _fail(self, cause: FerryError, now: float) -> _Decision:
        self.cause = cause
        return self._end(now)

    def _end(self, now: float) -> _Decision:
        self._grace_at = now + self._grace_s
        if self.state is not LandingState.REGISTERED:
            return self._outcome(), [DeclinePush()]
        # Also those that have written all: the request has failed for them, too.
        asked = SendRevoke(self._all())
        state, effects = self._revoked()
        return state, [asked, *effects]

    def _all(self) -> tuple[int, ...]:
        return tuple(range(len(self._sources)))

    def _outcome(self) -> LandingState:
        return LandingState.CANCELLED if self._is_cancelled else LandingState.FAILED

    def _revoked(self) -> _Decision:
        """Where a revocation stands: over, hopeless, or to be waited for."""
        writers = [self._sources[number] for number in self.writers]
        if not writers:
            return self._outcome(), []
        if all(source.is_lost for source in writers):
            return self._quarantine()
        return LandingState.REVOKING, []

    def _quarantine(self) -> _Decision:
        return LandingState.QUARANTINED, [QuarantineBlocks(self.writers)]

    def _fail_revoking(self, event: SourceFailed, _now: float) -> _Decision:
        """Expected: it will answer once it has drained."""
        self.ignored += not self._sources[event.source].may_write
        return LandingState.REVOKING, []

    def _lose_revoking(self, event: SourceLost, _now: float) -> _Decision:
        source = self._sources[event.source]
        self.ignored += source.is_lost
        source.is_lost = True
        return self._revoked()

    def _cancel_revoking(self, _event: CancelRequested, _now: float) -> _Decision:
        # A failure that came first stays the outcome.
        self._is_cancelled = self._is_cancelled or self.cause is None
        return LandingState.REVOKING, []

    def _tick(self, _event: LandingTicked, now: float) -> _Decision:
        if now >= self._deadline_at:
            return self._fail(
                DeadlineExceeded(
                    f"the push did not land in its deadline, {self.state.value}"
                ),
                now,
            )
        is_registered = self.state is LandingState.REGISTERED
        return self.state, self._extended(now) if is_registered else []

    def _extended(self, now: float) -> list[Effect]:
        # Also those that have written all: they wait for `SendLanded`.
        if now < self._extend_at:
            return []
        self._extend_at = now + self._extend_every_s
        return [SendExtend(self._all())]

    def _tick_finishing(self, _event: LandingTicked, now: float) -> _Decision:
        if now < self._grace_at:
            return LandingState.FINISHING, self._extended(now)
        self.cause = DeadlineExceeded("the finish stage did not end in its grace")
        self._is_finishing = True
        return LandingState.QUARANTINED, [
            SendRevoke(self._all()),
            QuarantineBlocks(()),
        ]

    def _tick_revoking(self, _event: LandingTicked, now: float) -> _Decision:
        if now >= self._grace_at:
            return self._quarantine()
        return LandingState.REVOKING, []

    def _reclaim(self, event: SourceRevoked, _now: float) -> _Decision:
        self._set_safe(event.source)
        return self._reclaimed()

    def _reclaim_finished(
        self, _event: FinishEnded | FinishFailed, _now: float
    ) -> _Decision:
        self.ignored += not self._is_finishing
        self._is_finishing = False
        return self._reclaimed()

    def _reclaimed(self) -> _Decision:
        if self.writers or self._is_finishing:
            return LandingState.QUARANTINED, []
        return LandingState.RECLAIMED, [ReclaimBlocks()]


_SourceEvent = PartArrived | SourceFinished | SourceFailed | SourceLost | SourceRevoked


def _of_source(
    decide: Callable[[LandingMachine, Any, float], _Decision],
    targets: tuple[LandingState, ...],
) -> Row:
    """A row for what a source did; of a source that there is not, it is ignored."""

    def decide_known(
        machine: LandingMachine, event: _SourceEvent, now: float
    ) -> _Decision:
        if not machine.has_source(event.source):
            machine.ignored += 1
            return machine.state, []
        return decide(machine, event, now)

    return Row(decide_known, targets)


_S = LandingState
_M = LandingMachine
_FAIL = Row(_M._fail_outside, (_S.FAILED,))
_CANCEL = Row(_M._cancel, (_S.CANCELLED,))
_REVOKED = (_S.REVOKING, _S.FAILED, _S.CANCELLED, _S.QUARANTINED)
_LATE = frozenset(EVENTS) - {LandingStarted}

LandingMachine.table = total_table(
    LandingState,
    EVENTS,
    moves={
        _S.NEW: {
            LandingStarted: Row(_M._start, (_S.CONNECTING,)),
            CancelRequested: _CANCEL,
        },
        _S.CONNECTING: {
            Claimed: Row(_M._claim, (_S.PLANNED,)),
            LandingFailed: _FAIL,
            CancelRequested: _CANCEL,
            LandingTicked: Row(_M._tick, (_S.CONNECTING, _S.FAILED)),
        },
        _S.PLANNED: {
            BlocksReady: Row(_M._register, (_S.REGISTERED,)),
            SourceFailed: _of_source(_M._fail_source, (_S.PLANNED, _S.FAILED)),
            SourceLost: _of_source(_M._lose_source, (_S.PLANNED, _S.FAILED)),
            LandingFailed: _FAIL,
            CancelRequested: _CANCEL,
            LandingTicked: Row(_M._tick, (_S.PLANNED, _S.FAILED)),
        },
        _S.REGISTERED: {
            PartArrived: _of_source(_M._arrive, (_S.REGISTERED, _S.FINISHING)),
            SourceFinished: _of_source(
                _M._finished, (_S.REGISTERED, _S.FINISHING, _S.REVOKING)
            ),
            SourceFailed: _of_source(_M._fail_source, (_S.REGISTERED, _S.REVOKING)),
            SourceLost: _of_source(
                _M._lose_source, (_S.REGISTERED, _S.REVOKING, _S.QUARANTINED)
            ),
            SourceRevoked: _of_source(
                _M._source_revoked, (_S.REGISTERED, _S.REVOKING, _S.FAILED)
            ),
            LandingFailed: Row(_M._fail_outside, (_S.REVOKING,)),
            CancelRequested: Row(_M._cancel, (_S.REVOKING,)),
            LandingTicked: Row(_M._tick, (_S.REGISTERED, _S.REVOKING)),
        },
        _S.FINISHING: {
            FinishEnded: Row(_M._finish, (_S.DONE,)),
            FinishFailed: Row(_M._fail_finish, (_S.FAILED,)),
            LandingTicked: Row(_M._tick_finishing, (_S.FINISHING, _S.QUARANTINED)),
        },
        _S.REVOKING: {
            PartArrived: _of_source(
                _M._arrive, (_S.REVOKING, _S.FAILED, _S.CANCELLED, _S.QUARANTINED)
            ),
            SourceFinished: _of_source(_M._finished, _REVOKED),
            SourceFailed: _of_source(_M._fail_revoking, (_S.REVOKING,)),
            SourceLost: _of_source(_M._lose_revoking, (_S.REVOKING, _S.QUARANTINED)),
            SourceRevoked: _of_source(_M._source_revoked, _REVOKED),
            CancelRequested: Row(_M._cancel_revoking, (_S.REVOKING,)),
            LandingTicked: Row(_M._tick_revoking, (_S.REVOKING, _S.QUARANTINED)),
        },
        _S.QUARANTINED: {
            SourceRevoked: _of_source(_M._reclaim, (_S.QUARANTINED, _S.RECLAIMED)),
            FinishEnded: Row(_M._reclaim_finished, (_S.QUARANTINED, _S.RECLAIMED)),
            FinishFailed: Row(_M._reclaim_finished, (_S.QUARANTINED, _S.RECLAIMED)),
        },
    },
    ignored={
        # A source that spoke too early, or an answer to what is already decided.
        _S.CONNECTING: {
            PartArrived,
            SourceFinished,
            SourceFailed,
            SourceLost,
            SourceRevoked,
        },
        _S.PLANNED: {PartArrived, SourceFinished, SourceRevoked},
        # Every byte is there: a source that goes now, or a cancellation that the
        # caller's scope delivers anyway, changes nothing.
        _S.FINISHING: {
            PartArrived,
            SourceFinished,
            SourceFailed,
            SourceLost,
            SourceRevoked,
            LandingFailed,
            CancelRequested,
        },
        _S.REVOKING: {BlocksReady, Claimed, LandingFailed},
        _S.QUARANTINED: _LATE - {SourceRevoked, FinishEnded, FinishFailed},
        **dict.fromkeys(OVER - {_S.QUARANTINED}, _LATE),
    },
)
