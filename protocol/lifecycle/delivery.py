"""The lifecycle of a delivery, on the producer: one push to one consumer rank.

::

    waiting -> writing -> confirming -> landed

    waiting, writing, confirming -> draining -> ended | quarantined -> reclaimed

A delivery begins when the consumer registers its blocks, before or after the
producer has anything to push. Owned here: no wave is posted once the consumer's
lease has run out, or the consumer has revoked (case l3); a revocation is answered
only when no wave is unsettled, for only then are the blocks the consumer's again
(invariant 3); the consumer is told of a failure at once (case n4).

Not here: which bytes a wave has, what it is part of (`push` is), what time it is.
"""

from __future__ import annotations

from kvferry.protocol.errors import (
    FerryError,
    FerryInternalError,
    LeaseExpired,
    PushRevoked,
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
    "ConsumerLost",
    "DeliveryAborted",
    "DeliveryCommitted",
    "DeliveryMachine",
    "DeliveryState",
    "DeliveryTicked",
    "EndDelivery",
    "ExtendArrived",
    "LandedArrived",
    "PostWave",
    "PushJoined",
    "QuarantineWaves",
    "ReclaimWaves",
    "ReportRegistered",
    "RevokeArrived",
    "SendFailed",
    "SendFinished",
    "SendRevoked",
    "WavesReady",
    "WriteLost",
    "WriteSettled",
)


class DeliveryState(State):
    """Where a delivery is."""

    WAITING = "waiting"
    """The consumer has registered; nobody pushes yet."""
    WRITING = "writing"
    CONFIRMING = "confirming"
    """Every byte is written, and the consumer has been told so."""
    DRAINING = "draining"
    """It will end without having landed, once no wave is unsettled."""
    LANDED = "landed"
    """The consumer has it all."""
    ENDED = "ended"
    """It failed, or was revoked; nothing touches the consumer's blocks any more."""
    QUARANTINED = "quarantined"
    """As ENDED, but some wave may still touch blocks of either side."""
    RECLAIMED = "reclaimed"
    """The last of those waves has settled."""


OVER = frozenset(
    {
        DeliveryState.LANDED,
        DeliveryState.ENDED,
        DeliveryState.QUARANTINED,
        DeliveryState.RECLAIMED,
    }
)
"""The states in which the delivery has its outcome."""


class PushJoined(Event, frozen=True):
    """The producer pushes the request that this was registered for."""


class WavesReady(Event, frozen=True):
    """So many more waves are to be written; they are numbered on and on."""

    count: int


class DeliveryCommitted(Event, frozen=True):
    """No wave follows those that are ready."""


class WriteSettled(Event, frozen=True):
    """Nothing of the wave touches memory any more.

    Attributes:
        cause: Why not all of its bytes arrived; None if they did.
    """

    wave: int
    cause: FerryError | None = None


class WriteLost(Event, frozen=True):
    """The transport no longer knows the wave; its bytes may still land."""

    wave: int
    cause: FerryError


class ExtendArrived(Event, frozen=True):
    """The consumer holds its blocks on."""


class LandedArrived(Event, frozen=True):
    """The consumer has every byte, from all ranks that it needs."""


class RevokeArrived(Event, frozen=True):
    """The consumer wants its blocks back."""


class ConsumerLost(Event, frozen=True):
    """The link to the consumer has ended."""

    cause: FerryError


class DeliveryAborted(Event, frozen=True):
    """The push that this is part of fails, or is cancelled."""

    cause: FerryError


class DeliveryTicked(Event, frozen=True):
    """The machine's deadline has come."""


EVENTS: tuple[type[Event], ...] = (
    PushJoined,
    WavesReady,
    DeliveryCommitted,
    WriteSettled,
    WriteLost,
    ExtendArrived,
    LandedArrived,
    RevokeArrived,
    ConsumerLost,
    DeliveryAborted,
    DeliveryTicked,
)


class ReportRegistered(Effect, frozen=True):
    """Tell the consumer that the lease runs anew."""


class PostWave(Effect, frozen=True):
    """Post the wave; answer `WriteSettled` or `WriteLost` once, now or later."""

    wave: int


class SendFinished(Effect, frozen=True):
    """Tell the consumer that all has been written, and in how many waves."""

    waves: int


class SendFailed(Effect, frozen=True):
    """Tell the consumer that the rest will not come."""


class SendRevoked(Effect, frozen=True):
    """Tell the consumer that nothing touches its blocks any more."""


class QuarantineWaves(Effect, frozen=True):
    """Keep the source blocks back: these waves may still touch them."""

    waves: tuple[int, ...]


class ReclaimWaves(Effect, frozen=True):
    """Let the quarantined blocks go."""


class EndDelivery(Effect, frozen=True):
    """It has its outcome: the machine's state and cause say which."""


_Decision = tuple[State, list[Effect]]


class DeliveryMachine(Machine[DeliveryState]):
    """One delivery.

    Args:
        now: When the consumer registered.
        lease_s: How long it holds its blocks from now, and from each extension.
        window: Waves in flight at once; at least 1.
        grace_s: How long a drain may take before the blocks are quarantined.
    """

    def __init__(
        self, *, now: float, lease_s: float, window: int, grace_s: float
    ) -> None:
        super().__init__(DeliveryState.WAITING)
        self.cause: FerryError | None = None
        """Why it did not land; None while nothing has failed."""
        self.posted = 0
        """Waves posted so far; they are posted in order."""
        self._lease_s = lease_s
        self._lease_at = now + lease_s
        self._window = window
        self._grace_s = grace_s
        self._grace_at = now
        self._ready = 0
        self._is_committed = False
        self._is_revoked = False
        self._unsettled: set[int] = set()  # posted, may touch memory
        self._lost: set[int] = set()  # part of _unsettled

    @property
    def deadline(self) -> float | None:
        """When the next `DeliveryTicked` is due."""
        match self.state:
            case (
                DeliveryState.WAITING | DeliveryState.WRITING | DeliveryState.CONFIRMING
            ):
                return self._lease_at
            case DeliveryState.DRAINING:
                return self._grace_at
            case _:
                return None

    @property
    def unsettled(self) -> frozenset[int]:
        """Waves that may still touch memory."""
        return frozenset(self._unsettled)

    def is_held(self, now: float) -> bool:
        """Whether the consumer still holds its blocks, as far as it has told."""
        return not self._has_run_out(now)

    # Decisions: each is one row's `decide` and runs inside `step` alone.

    def _join(self, _event: PushJoined, now: float) -> _Decision:
        if self._has_run_out(now):
            return self._expire(now)
        return DeliveryState.WRITING, []

    def _add(self, event: WavesReady, now: float) -> _Decision:
        if self._is_committed or event.count < 0:
            raise FerryInternalError(f"{event.count} waves more after a commit")
        self._ready += event.count
        return self._go_on(now)

    def _commit(self, _event: DeliveryCommitted, now: float) -> _Decision:
        self._is_committed = True
        return self._go_on(now)

    def _settle(self, event: WriteSettled, now: float) -> _Decision:
        if event.wave not in self._unsettled:
            self.ignored += 1  # a completion delivered twice
            return self.state, []
        self._forget(event.wave)
        if event.cause is not None:
            return self._fail(event.cause, now)
        return self._go_on(now)

    def _go_on(self, now: float) -> _Decision:
        """Post what there is room for; at the end say so."""
        if self._has_run_out(now):
            return self._expire(now)
        room = self._window - len(self._unsettled)
        last = min(self.posted + room, self._ready)
        waves = range(self.posted, last)
        self.posted = last
        self._unsettled.update(waves)
        if self._is_committed and not self._unsettled:
            return DeliveryState.CONFIRMING, [SendFinished(self._ready)]
        return DeliveryState.WRITING, [PostWave(wave) for wave in waves]

    def _lose(self, event: WriteLost, now: float) -> _Decision:
        if event.wave not in self._unsettled:
            self.ignored += 1  # it has settled before
            return self.state, []
        self._lost.add(event.wave)
        return self._fail(event.cause, now)

    def _extend(self, _event: ExtendArrived, now: float) -> _Decision:
        if self._has_run_out(now):
            return self._expire(now)
        self._lease_at = now + self._lease_s
        return self.state, [ReportRegistered()]

    def _land(self, _event: LandedArrived, _now: float) -> _Decision:
        return DeliveryState.LANDED, [EndDelivery()]

    def _revoke(self, _event: RevokeArrived, now: float) -> _Decision:
        self._is_revoked = True
        self.cause = PushRevoked("the consumer took its blocks back")
        return self._end(now)

    def _lose_consumer(self, event: ConsumerLost, now: float) -> _Decision:
        self.cause = event.cause
        return self._end(now)

    def _abort(self, event: DeliveryAborted, now: float) -> _Decision:
        return self._fail(event.cause, now)

    def _tick(self, _event: DeliveryTicked, now: float) -> _Decision:
        return self._expire(now) if self._has_run_out(now) else (self.state, [])

    def _has_run_out(self, now: float) -> bool:
        return now >= self._lease_at

    def _expire(self, now: float) -> _Decision:
        error = LeaseExpired("the consumer did not hold its blocks until all was there")
        return self._fail(error, now)

    def _fail(self, cause: FerryError, now: float) -> _Decision:
        self.cause = cause
        state, effects = self._end(now)
        return state, [SendFailed(), *effects]

    def _end(self, now: float) -> _Decision:
        self._grace_at = now + self._grace_s
        return self._drained()

    def _drained(self) -> _Decision:
        """Where a drain stands: over, hopeless, or to be waited for."""
        if not self._unsettled:
            return DeliveryState.ENDED, [*self._told(), EndDelivery()]
        if self._unsettled == self._lost:
            return self._quarantine()
        return DeliveryState.DRAINING, []

    def _told(self) -> list[Effect]:
        return [SendRevoked()] if self._is_revoked else []

    def _quarantine(self) -> _Decision:
        waves = QuarantineWaves(tuple(sorted(self._unsettled)))
        return DeliveryState.QUARANTINED, [waves, EndDelivery()]

    def _forget(self, wave: int) -> None:
        self.ignored += wave not in self._unsettled
        self._unsettled.discard(wave)
        self._lost.discard(wave)

    def _drain(self, event: WriteSettled, _now: float) -> _Decision:
        self._forget(event.wave)
        return self._drained()

    def _drain_lost(self, event: WriteLost, _now: float) -> _Decision:
        if event.wave not in self._unsettled - self._lost:
            self.ignored += 1
            return DeliveryState.DRAINING, []
        self._lost.add(event.wave)
        return self._drained()

    def _revoke_later(self, _event: RevokeArrived, _now: float) -> _Decision:
        """The answer waits until the last wave has settled."""
        self._is_revoked = True
        return self.state, []

    def _revoke_now(self, _event: RevokeArrived, _now: float) -> _Decision:
        return self.state, [SendRevoked()]

    def _tick_draining(self, _event: DeliveryTicked, now: float) -> _Decision:
        if now >= self._grace_at:
            return self._quarantine()
        return DeliveryState.DRAINING, []

    def _reclaim(self, event: WriteSettled, _now: float) -> _Decision:
        self._forget(event.wave)
        if self._unsettled:
            return DeliveryState.QUARANTINED, []
        return DeliveryState.RECLAIMED, [ReclaimWaves(), *self._told()]


_S = DeliveryState
_M = DeliveryMachine
_LATE = frozenset(EVENTS) - {RevokeArrived}
# Nothing is in flight there: there is nothing to drain.
_STILL: dict[type[Event], Row] = {
    RevokeArrived: Row(_M._revoke, (_S.ENDED,)),
    ConsumerLost: Row(_M._lose_consumer, (_S.ENDED,)),
    DeliveryAborted: Row(_M._abort, (_S.ENDED,)),
}

DeliveryMachine.table = total_table(
    DeliveryState,
    EVENTS,
    moves={
        _S.WAITING: {
            PushJoined: Row(_M._join, (_S.WRITING, _S.ENDED)),
            ExtendArrived: Row(_M._extend, (_S.WAITING, _S.ENDED)),
            DeliveryTicked: Row(_M._tick, (_S.WAITING, _S.ENDED)),
            **_STILL,
        },
        _S.WRITING: {
            WavesReady: Row(_M._add, (_S.WRITING, _S.DRAINING, _S.ENDED)),
            DeliveryCommitted: Row(
                _M._commit, (_S.WRITING, _S.CONFIRMING, _S.DRAINING, _S.ENDED)
            ),
            WriteSettled: Row(
                _M._settle, (_S.WRITING, _S.CONFIRMING, _S.DRAINING, _S.ENDED)
            ),
            WriteLost: Row(_M._lose, (_S.WRITING, _S.DRAINING, _S.QUARANTINED)),
            ExtendArrived: Row(_M._extend, (_S.WRITING, _S.DRAINING, _S.ENDED)),
            RevokeArrived: Row(_M._revoke, (_S.DRAINING, _S.ENDED)),
            ConsumerLost: Row(_M._lose_consumer, (_S.DRAINING, _S.ENDED)),
            DeliveryAborted: Row(_M._abort, (_S.DRAINING, _S.ENDED)),
            DeliveryTicked: Row(_M._tick, (_S.WRITING, _S.DRAINING, _S.ENDED)),
        },
        _S.CONFIRMING: {
            ExtendArrived: Row(_M._extend, (_S.CONFIRMING, _S.ENDED)),
            LandedArrived: Row(_M._land, (_S.LANDED,)),
            DeliveryTicked: Row(_M._tick, (_S.CONFIRMING, _S.ENDED)),
            **_STILL,
        },
        _S.DRAINING: {
            WriteSettled: Row(_M._drain, (_S.DRAINING, _S.ENDED, _S.QUARANTINED)),
            WriteLost: Row(_M._drain_lost, (_S.DRAINING, _S.QUARANTINED)),
            RevokeArrived: Row(_M._revoke_later, (_S.DRAINING,)),
            DeliveryTicked: Row(_M._tick_draining, (_S.DRAINING, _S.QUARANTINED)),
        },
        _S.QUARANTINED: {
            WriteSettled: Row(_M._reclaim, (_S.QUARANTINED, _S.RECLAIMED)),
            RevokeArrived: Row(_M._revoke_later, (_S.QUARANTINED,)),
        },
        **{
            over: {RevokeArrived: Row(_M._revoke_now, (over,))}
            for over in (_S.LANDED, _S.ENDED, _S.RECLAIMED)
        },
    },
    ignored={
        # The consumer cannot have what was never said to be finished.
        _S.WAITING: {LandedArrived},
        _S.WRITING: {LandedArrived},
        _S.CONFIRMING: {WriteSettled, WriteLost},
        _S.DRAINING: {
            WavesReady,
            DeliveryCommitted,
            ExtendArrived,
            LandedArrived,
            ConsumerLost,
            DeliveryAborted,
        },
        _S.QUARANTINED: _LATE - {WriteSettled},
        **dict.fromkeys(OVER - {_S.QUARANTINED}, _LATE),
    },
)
