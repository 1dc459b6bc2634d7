"""The lifecycle of a pull, on the consumer.

::

    new -> connecting -> planned -> queued -> reading -> confirming -> finishing -> done

    new -> planned -> finishing    a full prefix hit: nothing is read
    connecting, planned, queued, reading, confirming -> draining
    draining -> failed | cancelled | quarantined -> reclaimed

Owned here: "done" is reached only when every wave has settled and every source
has confirmed *after* its read was finished (invariants 1 and 4); a pull is over
with its blocks in hand only when no wave is unsettled (invariant 3).

Not here: which bytes a wave has, who a source is, what time it is.
"""

from __future__ import annotations

from kvferry.protocol.errors import (
    DeadlineExceeded,
    FerryError,
    FerryInternalError,
)
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
    "AwaitBlocks",
    "BlocksReady",
    "CancelRequested",
    "ConfirmArrived",
    "Connect",
    "DeclineOffer",
    "DeclineSource",
    "FinishEnded",
    "FinishFailed",
    "Planned",
    "PostWave",
    "PullFailed",
    "PullMachine",
    "PullStarted",
    "PullState",
    "PullTicked",
    "QuarantineBlocks",
    "ReclaimBlocks",
    "RenewLease",
    "RoomTaken",
    "RunFinish",
    "SendReadFinished",
    "SourceFailed",
    "SourceReady",
    "TakeRoom",
    "WaveLost",
    "WaveSettled",
)


class PullState(State):
    """Where a pull is."""

    NEW = "new"
    CONNECTING = "connecting"
    PLANNED = "planned"
    """What is to be read is known; the caller's event, or a source's, has not come."""
    QUEUED = "queued"
    """Nothing is missing but room to land in; nobody waits for anything else in it."""
    READING = "reading"
    CONFIRMING = "confirming"
    """Every wave has settled; some source has not confirmed."""
    FINISHING = "finishing"
    DRAINING = "draining"
    """It will fail or be cancelled, once no wave is unsettled."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    """It failed or was cancelled, and some wave may still touch its blocks."""
    RECLAIMED = "reclaimed"
    """The last of those waves has settled: the blocks are safe again."""


OVER = frozenset(
    {
        PullState.DONE,
        PullState.FAILED,
        PullState.CANCELLED,
        PullState.QUARANTINED,
        PullState.RECLAIMED,
    }
)
"""The states in which the request has its outcome."""

_DUE = frozenset({PullState.CONNECTING, PullState.CONFIRMING})
_RENEWED = frozenset({PullState.PLANNED, PullState.QUEUED, PullState.READING})
_GRACED = frozenset({PullState.DRAINING, PullState.FINISHING})
"""What limits the time in a state: the deadline; leases, too; a grace of its own."""


class PullStarted(Event, frozen=True):
    """The caller asked for the pull.

    Attributes:
        has_work: Whether any byte is wanted; after a full prefix hit none is.
    """

    has_work: bool = True


class Planned(Event, frozen=True):
    """The sources are connected, and the plan is made and proved.

    Attributes:
        wave_sources: For each wave, in posting order, the index of its source.
        sources: How many sources there are; one without waves is let go at once.
        unready: Sources whose blocks do not hold their bytes yet, by the ticket.
    """

    wave_sources: tuple[int, ...]
    sources: int
    unready: tuple[int, ...] = ()


class BlocksReady(Event, frozen=True):
    """The caller's event has come: the destination may be written."""


class SourceReady(Event, frozen=True):
    """The producer's event has come: the source's blocks hold their bytes."""

    source: int


class RoomTaken(Event, frozen=True):
    """There is room for every wave to land in."""


class WaveSettled(Event, frozen=True):
    """Nothing of the wave touches memory any more.

    Attributes:
        cause: Why not all of its bytes arrived; None if they did.
    """

    wave: int
    cause: FerryError | None = None


class WaveLost(Event, frozen=True):
    """The transport no longer knows the wave; its bytes may still land."""

    wave: int
    cause: FerryError


class ConfirmArrived(Event, frozen=True):
    """A source held its blocks up to the last byte."""

    source: int


class SourceFailed(Event, frozen=True):
    """A source refused us, or is gone; it matters while we still need its word."""

    source: int
    cause: FerryError


class FinishEnded(Event, frozen=True):
    """The finish stage has zeroed what it should."""


class FinishFailed(Event, frozen=True):
    """The finish stage could not."""

    cause: FerryError


class PullFailed(Event, frozen=True):
    """Something outside the waves went wrong: a connection, the plan, the engine."""

    cause: FerryError


class CancelRequested(Event, frozen=True):
    """The caller does not want it any more."""


class PullTicked(Event, frozen=True):
    """The machine's deadline has come."""


EVENTS: tuple[type[Event], ...] = (
    PullStarted,
    Planned,
    BlocksReady,
    SourceReady,
    RoomTaken,
    WaveSettled,
    WaveLost,
    ConfirmArrived,
    SourceFailed,
    FinishEnded,
    FinishFailed,
    PullFailed,
    CancelRequested,
    PullTicked,
)


class Connect(Effect, frozen=True):
    """Connect the sources and make the plan; answer `Planned` or `PullFailed`."""


class RenewLease(Effect, frozen=True):
    """Ask these sources to hold their blocks on; the first time accepts the ticket.

    A source that has been told of its finished read is not among them: it is done
    with us, and would refuse.
    """

    sources: tuple[int, ...]


class AwaitBlocks(Effect, frozen=True):
    """Wait for the caller's event; answer `BlocksReady` or `PullFailed`."""


class DeclineSource(Effect, frozen=True):
    """Tell one source that nothing is read from it."""

    source: int


class TakeRoom(Effect, frozen=True):
    """Take what room the waves need to land in; answer `RoomTaken` or `PullFailed`."""


class PostWave(Effect, frozen=True):
    """Post the wave; answer `WaveSettled` or `WaveLost` once, now or later."""

    wave: int


class SendReadFinished(Effect, frozen=True):
    """Tell the source that nothing more will be read, and ask whether it held on."""

    source: int


class RunFinish(Effect, frozen=True):
    """Run the finish stage; answer `FinishEnded` or `FinishFailed`."""


class DeclineOffer(Effect, frozen=True):
    """Tell every source that we are not going to read on."""


class QuarantineBlocks(Effect, frozen=True):
    """Keep the destination blocks back: these waves may still touch them."""

    waves: tuple[int, ...]


class ReclaimBlocks(Effect, frozen=True):
    """Let the quarantined blocks go."""


_Decision = tuple[State, list[Effect]]


class PullMachine(Machine[PullState]):
    """One pull.

    Args:
        window: Waves in flight at once; at least 1.
        deadline_at: When the pull fails if it has not got to its finish stage.
        renew_every_s: Seconds between two renewals.
        grace_s: How long a drain may take before the blocks are quarantined.
    """

    def __init__(
        self, *, window: int, deadline_at: float, renew_every_s: float, grace_s: float
    ) -> None:
        super().__init__(PullState.NEW)
        self.cause: FerryError | None = None
        """Why it failed; None while it has not, and when it was cancelled."""
        self.posted = 0
        """Waves posted so far; they are posted in order."""
        self._window = window
        self._deadline_at = deadline_at
        self._renew_every_s = renew_every_s
        self._renew_at = deadline_at
        self._grace_s = grace_s
        self._grace_at = deadline_at
        self._is_cancelled = False
        self._is_finishing = False  # after the finish stage outran its grace
        self._is_declined = False  # the whole offer
        self._is_blocked = True  # by the caller's event
        self._unready: set[int] = set()  # sources to be read that wait for theirs
        self._wave_sources: tuple[int, ...] = ()
        self._unsettled: set[int] = set()  # posted, may touch memory
        self._lost: set[int] = set()  # part of _unsettled
        self._unread: list[int] = []  # per source: waves not settled yet
        self._needed: set[int] = set()  # sources not told yet that we have read
        self._unconfirmed: set[int] = set()  # sources

    @property
    def deadline(self) -> float | None:
        """When the next `PullTicked` is due."""
        if self.state in _RENEWED:
            return min(self._deadline_at, self._renew_at)
        if self.state in _DUE:
            return self._deadline_at
        return self._grace_at if self.state in _GRACED else None

    @property
    def unsettled(self) -> frozenset[int]:
        """Waves that may still touch memory."""
        return frozenset(self._unsettled)

    # Decisions: each is one row's `decide` and runs inside `step` alone.

    def _start(self, event: PullStarted, _now: float) -> _Decision:
        if event.has_work:
            return PullState.CONNECTING, [Connect()]
        # Nothing will be read, so nothing needs the fence: the producer is told in
        # the background, and whether that works changes nothing here (case p4).
        # Tails are zeroed all the same, and that waits for the caller's event.
        return PullState.PLANNED, [*self._decline(), AwaitBlocks()]

    def _decline(self) -> list[Effect]:
        if self._is_declined:
            return []
        self._is_declined = True
        return [DeclineOffer()]

    def _run_finish(self, now: float, effects: list[Effect]) -> _Decision:
        self._grace_at = now + self._grace_s
        return PullState.FINISHING, [*effects, RunFinish()]

    def _plan(self, event: Planned, now: float) -> _Decision:
        sources, read = range(event.sources), set(event.wave_sources)
        if not sources or not read | set(event.unready) <= set(sources):
            raise FerryInternalError(
                f"a plan of {event.sources} sources has waves of {event.wave_sources},"
                f" and {event.unready} are not ready"
            )
        self._wave_sources = event.wave_sources
        self._unread = [0] * event.sources
        for source in event.wave_sources:
            self._unread[source] += 1
        self._needed = set(read)
        self._unconfirmed = set(read)
        self._unready = read & set(event.unready)
        self._renew_at = now + self._renew_every_s
        others = [DeclineSource(source) for source in sources if source not in read]
        return PullState.PLANNED, [*self._renew(), *others, AwaitBlocks()]

    def _renew(self) -> list[Effect]:
        return [RenewLease(tuple(sorted(self._needed)))] if self._needed else []

    def _unblock(self, _event: BlocksReady, now: float) -> _Decision:
        self.ignored += not self._is_blocked
        self._is_blocked = False
        return self._queue(now)

    def _ready_source(self, event: SourceReady, now: float) -> _Decision:
        if event.source not in self._unready:
            self.ignored += 1  # told again, or not needed
            return PullState.PLANNED, []
        self._unready.discard(event.source)
        return self._queue(now)

    def _queue(self, now: float) -> _Decision:
        """Room is taken last: whoever holds it waits for nobody."""
        if self._is_blocked or self._unready:
            return PullState.PLANNED, []
        if not self._wave_sources:
            return self._run_finish(now, [])
        return PullState.QUEUED, [TakeRoom()]

    def _read(self, _event: RoomTaken, _now: float) -> _Decision:
        return PullState.READING, self._post()

    def _ask(self, source: int) -> list[Effect]:
        """Ask the source whether it held on, if nothing of it is unread."""
        if self._unread[source]:
            return []
        self._needed.discard(source)
        return [SendReadFinished(source)]

    def _post(self) -> list[Effect]:
        room = self._window - len(self._unsettled)
        last = min(self.posted + room, len(self._wave_sources))
        waves = range(self.posted, last)
        self.posted = last
        self._unsettled.update(waves)
        return [PostWave(wave) for wave in waves]

    def _settle(self, event: WaveSettled, now: float) -> _Decision:
        if event.wave not in self._unsettled:
            self.ignored += 1  # a completion delivered twice
            return self.state, []
        self._unsettled.discard(event.wave)
        self._lost.discard(event.wave)
        if event.cause is not None:
            return self._fail(event.cause, now)
        source = self._wave_sources[event.wave]
        self._unread[source] -= 1
        effects = self._ask(source)
        if any(self._unread):
            return PullState.READING, [*effects, *self._post()]
        return PullState.CONFIRMING, effects

    def _lose(self, event: WaveLost, now: float) -> _Decision:
        if event.wave not in self._unsettled:
            self.ignored += 1  # it has settled before
            return self.state, []
        self._lost.add(event.wave)
        return self._fail(event.cause, now)

    def _confirm(self, event: ConfirmArrived, now: float) -> _Decision:
        """Count a source's confirmation; one that was not asked for changes nothing."""
        if event.source not in self._unconfirmed - self._needed:
            self.ignored += 1
            return self.state, []
        self._unconfirmed.discard(event.source)
        if self.state is PullState.CONFIRMING and not self._unconfirmed:
            return self._run_finish(now, [])
        return self.state, []

    def _fail_source(self, event: SourceFailed, now: float) -> _Decision:
        """One whose word we have, or do not need, changes nothing by going."""
        if event.source not in self._unconfirmed:
            self.ignored += 1
            return self.state, []
        return self._fail(event.cause, now)

    def _finish(self, _event: FinishEnded, _now: float) -> _Decision:
        return PullState.DONE, []

    def _fail_finish(self, event: FinishFailed, _now: float) -> _Decision:
        self.cause = event.cause
        return PullState.FAILED, []

    def _fail_outside(self, event: PullFailed, now: float) -> _Decision:
        return self._fail(event.cause, now)

    def _cancel(self, _event: CancelRequested, now: float) -> _Decision:
        self._is_cancelled = True
        return self._end(now)

    def _fail(self, cause: FerryError, now: float) -> _Decision:
        self.cause = cause
        return self._end(now)

    def _end(self, now: float) -> _Decision:
        self._grace_at = now + self._grace_s
        state, effects = self._drained()
        return state, [*self._decline(), *effects]

    def _drained(self) -> _Decision:
        """Where a drain stands: over, hopeless, or to be waited for."""
        if not self._unsettled:
            over = PullState.CANCELLED if self._is_cancelled else PullState.FAILED
            return over, []
        if self._unsettled == self._lost:
            return self._quarantine()
        return PullState.DRAINING, []

    def _quarantine(self) -> _Decision:
        return PullState.QUARANTINED, [QuarantineBlocks(tuple(sorted(self._unsettled)))]

    def _drain(self, event: WaveSettled, _now: float) -> _Decision:
        self.ignored += event.wave not in self._unsettled
        self._unsettled.discard(event.wave)
        self._lost.discard(event.wave)
        return self._drained()

    def _drain_lost(self, event: WaveLost, _now: float) -> _Decision:
        if event.wave not in self._unsettled - self._lost:
            self.ignored += 1
            return PullState.DRAINING, []
        self._lost.add(event.wave)
        return self._drained()

    def _drain_cancelled(self, _event: CancelRequested, _now: float) -> _Decision:
        # A failure that came first stays the outcome.
        self._is_cancelled = self._is_cancelled or self.cause is None
        return self._drained()

    def _tick_finishing(self, _event: PullTicked, now: float) -> _Decision:
        if now < self._grace_at:
            return PullState.FINISHING, []
        self.cause = DeadlineExceeded("the finish stage did not end in its grace")
        self._is_finishing = True
        return self._quarantine()

    def _reclaim(self, event: WaveSettled, _now: float) -> _Decision:
        self.ignored += event.wave not in self._unsettled
        self._unsettled.discard(event.wave)
        return self._reclaimed()

    def _reclaim_finished(
        self, _event: FinishEnded | FinishFailed, _now: float
    ) -> _Decision:
        self.ignored += not self._is_finishing
        self._is_finishing = False
        return self._reclaimed()

    def _reclaimed(self) -> _Decision:
        if self._unsettled or self._is_finishing:
            return PullState.QUARANTINED, []
        return PullState.RECLAIMED, [ReclaimBlocks()]

    def _tick(self, _event: PullTicked, now: float) -> _Decision:
        if now >= self._deadline_at:
            return self._fail(
                DeadlineExceeded(
                    f"the pull did not end in its deadline, {self.state.value}"
                ),
                now,
            )
        if now < self._renew_at:
            return self.state, []
        self._renew_at = now + self._renew_every_s
        return self.state, self._renew()

    def _tick_draining(self, _event: PullTicked, now: float) -> _Decision:
        if now >= self._grace_at:
            return self._quarantine()
        return PullState.DRAINING, []


_S = PullState
_M = PullMachine
# While nothing is in flight (all but READING) there is nothing to drain.
_FAIL = Row(_M._fail_outside, (_S.FAILED,))
_CANCEL = Row(_M._cancel, (_S.CANCELLED,))
_LATE = frozenset(EVENTS) - {PullStarted}

PullMachine.table = total_table(
    PullState,
    EVENTS,
    moves={
        _S.NEW: {
            PullStarted: Row(_M._start, (_S.CONNECTING, _S.PLANNED)),
            CancelRequested: _CANCEL,
        },
        _S.CONNECTING: {
            Planned: Row(_M._plan, (_S.PLANNED,)),
            PullFailed: _FAIL,
            CancelRequested: _CANCEL,
            PullTicked: Row(_M._tick, (_S.CONNECTING, _S.FAILED)),
        },
        _S.PLANNED: {
            BlocksReady: Row(_M._unblock, (_S.PLANNED, _S.QUEUED, _S.FINISHING)),
            SourceReady: Row(_M._ready_source, (_S.PLANNED, _S.QUEUED)),
            SourceFailed: Row(_M._fail_source, (_S.PLANNED, _S.FAILED)),
            PullFailed: _FAIL,
            CancelRequested: _CANCEL,
            PullTicked: Row(_M._tick, (_S.PLANNED, _S.FAILED)),
        },
        _S.QUEUED: {
            RoomTaken: Row(_M._read, (_S.READING,)),
            SourceFailed: Row(_M._fail_source, (_S.QUEUED, _S.FAILED)),
            PullFailed: _FAIL,
            CancelRequested: _CANCEL,
            PullTicked: Row(_M._tick, (_S.QUEUED, _S.FAILED)),
        },
        _S.READING: {
            WaveSettled: Row(
                _M._settle, (_S.READING, _S.CONFIRMING, _S.DRAINING, _S.FAILED)
            ),
            WaveLost: Row(_M._lose, (_S.READING, _S.DRAINING, _S.QUARANTINED)),
            ConfirmArrived: Row(_M._confirm, (_S.READING,)),
            SourceFailed: Row(_M._fail_source, (_S.READING, _S.DRAINING)),
            PullFailed: Row(_M._fail_outside, (_S.DRAINING,)),
            CancelRequested: Row(_M._cancel, (_S.DRAINING,)),
            PullTicked: Row(_M._tick, (_S.READING, _S.DRAINING)),
        },
        _S.CONFIRMING: {
            ConfirmArrived: Row(_M._confirm, (_S.CONFIRMING, _S.FINISHING)),
            SourceFailed: Row(_M._fail_source, (_S.CONFIRMING, _S.FAILED)),
            PullFailed: _FAIL,
            CancelRequested: _CANCEL,
            PullTicked: Row(_M._tick, (_S.CONFIRMING, _S.FAILED)),
        },
        _S.FINISHING: {
            FinishEnded: Row(_M._finish, (_S.DONE,)),
            FinishFailed: Row(_M._fail_finish, (_S.FAILED,)),
            PullTicked: Row(_M._tick_finishing, (_S.FINISHING, _S.QUARANTINED)),
        },
        _S.DRAINING: {
            WaveSettled: Row(
                _M._drain, (_S.DRAINING, _S.FAILED, _S.CANCELLED, _S.QUARANTINED)
            ),
            WaveLost: Row(_M._drain_lost, (_S.DRAINING, _S.QUARANTINED)),
            CancelRequested: Row(_M._drain_cancelled, (_S.DRAINING,)),
            PullTicked: Row(_M._tick_draining, (_S.DRAINING, _S.QUARANTINED)),
        },
        _S.QUARANTINED: {
            WaveSettled: Row(_M._reclaim, (_S.QUARANTINED, _S.RECLAIMED)),
            FinishEnded: Row(_M._reclaim_finished, (_S.QUARANTINED, _S.RECLAIMED)),
            FinishFailed: Row(_M._reclaim_finished, (_S.QUARANTINED, _S.RECLAIMED)),
        },
    },
    ignored={
        # A source that spoke too early, or an answer to what is already decided.
        _S.CONNECTING: {ConfirmArrived, SourceFailed, SourceReady},
        _S.PLANNED: {ConfirmArrived},
        _S.QUEUED: {ConfirmArrived, SourceReady},
        _S.READING: {SourceReady},
        # Completions delivered again.
        _S.CONFIRMING: {WaveSettled, WaveLost, SourceReady},
        # The bytes are proved: a peer that goes now, or a cancellation that the
        # caller's scope delivers anyway, changes nothing.
        _S.FINISHING: {
            WaveSettled,
            WaveLost,
            ConfirmArrived,
            SourceFailed,
            SourceReady,
            PullFailed,
            CancelRequested,
        },
        _S.DRAINING: {
            ConfirmArrived,
            SourceFailed,
            SourceReady,
            BlocksReady,
            RoomTaken,
            Planned,
            PullFailed,
        },
        _S.QUARANTINED: _LATE - {WaveSettled, FinishEnded, FinishFailed},
        **dict.fromkeys(OVER - {_S.QUARANTINED}, _LATE),
    },
)
