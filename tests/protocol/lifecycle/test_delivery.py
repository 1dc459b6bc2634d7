"""The delivery machine: its table, row by row, and its invariants against a ledger."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvferry.protocol.errors import (
    FerryInternalError,
    LeaseExpired,
    PeerLost,
    PushAborted,
    PushRevoked,
    TransferFailed,
)
from kvferry.protocol.lifecycle.delivery import (
    EVENTS,
    OVER,
    ConsumerLost,
    DeliveryAborted,
    DeliveryCommitted,
    DeliveryMachine,
    DeliveryState,
    DeliveryTicked,
    EndDelivery,
    ExtendArrived,
    LandedArrived,
    PostWave,
    PushJoined,
    QuarantineWaves,
    ReclaimWaves,
    ReportRegistered,
    RevokeArrived,
    SendFailed,
    SendFinished,
    SendRevoked,
    WavesReady,
    WriteLost,
    WriteSettled,
)
from tests.protocol.lifecycle.tables import (
    Example,
    arrows,
    clone,
    facts,
    kinds,
    read,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.protocol.lifecycle.machine import Effect, Event

S = DeliveryState
LEASE_S = 30.0
GRACE_S = 5.0
WINDOW = 2

FAILED = TransferFailed("a wave failed")
LOST = PeerLost("the transport forgot the wave")
ABORTED = PushAborted("another rank failed")

TABLE = """
            join waves commit settled lost extend landed revoke gone abort tick
waiting     move BUG   BUG    BUG     BUG  move   late   move   move move  move
writing     BUG  move  move   move    move move   late   move   move move  move
confirming  BUG  BUG   BUG    late    late move   move   move   move move  move
draining    BUG  late  late   move    move late   late   move   late late  move
landed      late late  late   late    late late   late   move   late late  late
ended       late late  late   late    late late   late   move   late late  late
quarantined late late  late   move    late late   late   move   late late  late
reclaimed   late late  late   late    late late   late   move   late late  late
"""
SAMPLES: dict[str, Event] = {
    "join": PushJoined(),
    "waves": WavesReady(1),
    "commit": DeliveryCommitted(),
    "settled": WriteSettled(0),
    "lost": WriteLost(0, LOST),
    "extend": ExtendArrived(),
    "landed": LandedArrived(),
    "revoke": RevokeArrived(),
    "gone": ConsumerLost(LOST),
    "abort": DeliveryAborted(ABORTED),
    "tick": DeliveryTicked(),
}
ROWS = read(TABLE, S, SAMPLES)
KIND = {(state, type(SAMPLES[name])): kind for state, name, kind in ROWS}

TO_WRITING = (PushJoined(), WavesReady(2))  # both are in flight
TO_LAST = (PushJoined(), WavesReady(1), DeliveryCommitted())
TO_CONFIRMING = (*TO_LAST, WriteSettled(0))
TO_FAILING = (*TO_WRITING, WriteSettled(1, FAILED))  # wave 0 is in flight
TO_REVOKING = (*TO_WRITING, RevokeArrived())
TO_QUARANTINED = (*TO_FAILING, WriteLost(0, LOST))
PATHS: dict[DeliveryState, tuple[Event, ...]] = {
    S.WAITING: (),
    S.WRITING: TO_WRITING,
    S.CONFIRMING: TO_CONFIRMING,
    S.DRAINING: TO_FAILING,
    S.LANDED: (*TO_CONFIRMING, LandedArrived()),
    S.ENDED: (RevokeArrived(),),
    S.QUARANTINED: TO_QUARANTINED,
    S.RECLAIMED: (*TO_QUARANTINED, WriteSettled(0)),
}


def delivery(*events: Event, window: int = WINDOW) -> DeliveryMachine:
    """A machine after these events, all at time 0."""
    machine = DeliveryMachine(now=0.0, lease_s=LEASE_S, window=window, grace_s=GRACE_S)
    for event in events:
        machine.step(event, 0.0)
    return machine


# The table.


def test_the_table_is_total_and_every_pair_is_what_it_is_meant_to_be() -> None:
    """Each (state, event) is a move, ignored or a misuse, as written down above."""
    assert set(KIND) == set(itertools.product(S, EVENTS))
    assert kinds(DeliveryMachine) == KIND


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_the_path_to_each_state_leads_there(state: DeliveryState) -> None:
    """Every state can be reached by a run, so that the tests below mean something."""
    assert delivery(*PATHS[state]).state is state


@pytest.mark.parametrize(
    ("state", "name", "kind"), ROWS, ids=lambda x: getattr(x, "value", x)
)
def test_every_pair_behaves_as_the_table_says(
    state: DeliveryState, name: str, kind: str
) -> None:
    """A move goes to a declared target, the late change nothing, a bug poisons."""
    machine = delivery(*PATHS[state])
    event, before, ignored = SAMPLES[name], facts(machine), machine.ignored
    if kind == "BUG":
        with pytest.raises(FerryInternalError, match=f"misuse in {state.value}"):
            machine.step(event, 0.0)
        with pytest.raises(FerryInternalError, match="poisoned"):
            machine.step(DeliveryTicked(), 0.0)
    elif kind == "late":
        assert machine.step(event, 0.0) == []
        assert facts(machine) == before
        assert machine.ignored == ignored + 1
    else:
        machine.step(event, 0.0)
        assert (state, type(event), machine.state) in arrows(DeliveryMachine)


def failed(*effects: Effect) -> list[Effect]:
    return [SendFailed(), *effects]


END = EndDelivery()
POSTED = (PostWave(0), PostWave(1))
JOINED = (PushJoined(),)
EXAMPLES = [
    Example("a push joins a registration", (), PushJoined(), S.WRITING, []),
    Example(
        "l3: a push joins too late", (), PushJoined(), S.ENDED, failed(END), LEASE_S
    ),
    Example(
        "a waiting consumer extends",
        (),
        ExtendArrived(),
        S.WAITING,
        [ReportRegistered()],
        29.0,
    ),
    Example(
        "a waiting consumer extends too late",
        (),
        ExtendArrived(),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example("an early tick while waiting", (), DeliveryTicked(), S.WAITING, [], 29.0),
    Example(
        "the lease runs out while waiting",
        (),
        DeliveryTicked(),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example(
        "a waiting consumer revokes",
        (),
        RevokeArrived(),
        S.ENDED,
        [SendRevoked(), END],
    ),
    Example("a waiting consumer is lost", (), ConsumerLost(LOST), S.ENDED, [END]),
    Example(
        "a push that fails before it joined",
        (),
        DeliveryAborted(ABORTED),
        S.ENDED,
        failed(END),
    ),
    Example("ready waves are posted", JOINED, WavesReady(2), S.WRITING, [*POSTED]),
    Example(
        "no more than the window",
        JOINED,
        WavesReady(5),
        S.WRITING,
        [*POSTED],
    ),
    Example(
        "l3: waves ready too late are not posted",
        JOINED,
        WavesReady(1),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example(
        "more waves ready too late beside some in flight",
        TO_WRITING,
        WavesReady(1),
        S.DRAINING,
        failed(),
        LEASE_S,
    ),
    Example(
        "a commit with waves in flight",
        TO_WRITING,
        DeliveryCommitted(),
        S.WRITING,
        [],
    ),
    Example(
        "a commit of nothing at all",
        JOINED,
        DeliveryCommitted(),
        S.CONFIRMING,
        [SendFinished(0)],
    ),
    Example(
        "a commit after the last wave",
        (*TO_WRITING, WriteSettled(0), WriteSettled(1)),
        DeliveryCommitted(),
        S.CONFIRMING,
        [SendFinished(2)],
    ),
    Example(
        "a commit too late",
        JOINED,
        DeliveryCommitted(),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example(
        "a commit too late beside waves in flight",
        TO_WRITING,
        DeliveryCommitted(),
        S.DRAINING,
        failed(),
        LEASE_S,
    ),
    Example(
        "a settled wave makes room for the next",
        (*JOINED, WavesReady(3)),
        WriteSettled(0),
        S.WRITING,
        [PostWave(2)],
    ),
    Example(
        "the last wave of all is told",
        TO_LAST,
        WriteSettled(0),
        S.CONFIRMING,
        [SendFinished(1)],
    ),
    Example(
        "n4: a wave that failed beside another is told at once",
        TO_WRITING,
        WriteSettled(0, FAILED),
        S.DRAINING,
        failed(),
    ),
    Example(
        "a wave that failed alone",
        TO_LAST,
        WriteSettled(0, FAILED),
        S.ENDED,
        failed(END),
    ),
    Example(
        "the last wave settles after the lease",
        TO_LAST,
        WriteSettled(0),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example(
        "o6: a completion delivered again",
        (*TO_WRITING, WriteSettled(0)),
        WriteSettled(0),
        S.WRITING,
        [],
    ),
    Example(
        "a loss told of a settled wave is late",
        (*TO_WRITING, WriteSettled(0)),
        WriteLost(0, LOST),
        S.WRITING,
        [],
    ),
    Example(
        "a lost wave beside another drains",
        TO_WRITING,
        WriteLost(0, LOST),
        S.DRAINING,
        failed(),
    ),
    Example(
        "a lost wave alone is hopeless",
        TO_LAST,
        WriteLost(0, LOST),
        S.QUARANTINED,
        failed(QuarantineWaves((0,)), END),
    ),
    Example(
        "an extension while writing",
        TO_WRITING,
        ExtendArrived(),
        S.WRITING,
        [ReportRegistered()],
        29.0,
    ),
    Example(
        "an extension too late with waves in flight",
        TO_WRITING,
        ExtendArrived(),
        S.DRAINING,
        failed(),
        LEASE_S,
    ),
    Example(
        "an extension too late with none in flight",
        JOINED,
        ExtendArrived(),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example(
        "l4: a revocation waits for what is in flight",
        TO_WRITING,
        RevokeArrived(),
        S.DRAINING,
        [],
    ),
    Example(
        "a revocation between two waves",
        JOINED,
        RevokeArrived(),
        S.ENDED,
        [SendRevoked(), END],
    ),
    Example(
        "the consumer is lost with waves in flight",
        TO_WRITING,
        ConsumerLost(LOST),
        S.DRAINING,
        [],
    ),
    Example(
        "the consumer is lost between two waves",
        JOINED,
        ConsumerLost(LOST),
        S.ENDED,
        [END],
    ),
    Example(
        "another rank fails with waves in flight",
        TO_WRITING,
        DeliveryAborted(ABORTED),
        S.DRAINING,
        failed(),
    ),
    Example(
        "another rank fails between two waves",
        JOINED,
        DeliveryAborted(ABORTED),
        S.ENDED,
        failed(END),
    ),
    Example("an early tick while writing", TO_WRITING, DeliveryTicked(), S.WRITING, []),
    Example(
        "the lease runs out with waves in flight",
        TO_WRITING,
        DeliveryTicked(),
        S.DRAINING,
        failed(),
        LEASE_S,
    ),
    Example(
        "the lease runs out between two waves",
        JOINED,
        DeliveryTicked(),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example(
        "an extension while confirming",
        TO_CONFIRMING,
        ExtendArrived(),
        S.CONFIRMING,
        [ReportRegistered()],
    ),
    Example(
        "an extension too late while confirming",
        TO_CONFIRMING,
        ExtendArrived(),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example("it has landed", TO_CONFIRMING, LandedArrived(), S.LANDED, [END]),
    Example(
        "an early tick while confirming",
        TO_CONFIRMING,
        DeliveryTicked(),
        S.CONFIRMING,
        [],
    ),
    Example(
        "the consumer never says that it landed",
        TO_CONFIRMING,
        DeliveryTicked(),
        S.ENDED,
        failed(END),
        LEASE_S,
    ),
    Example(
        "a consumer whose finish stage failed revokes",
        TO_CONFIRMING,
        RevokeArrived(),
        S.ENDED,
        [SendRevoked(), END],
    ),
    Example(
        "the consumer is lost while confirming",
        TO_CONFIRMING,
        ConsumerLost(LOST),
        S.ENDED,
        [END],
    ),
    Example(
        "another rank fails while confirming",
        TO_CONFIRMING,
        DeliveryAborted(ABORTED),
        S.ENDED,
        failed(END),
    ),
    Example(
        "one of two drained waves settles",
        TO_REVOKING,
        WriteSettled(0),
        S.DRAINING,
        [],
    ),
    Example(
        "the last drained wave settles, and the revocation is answered",
        (*TO_REVOKING, WriteSettled(1, FAILED)),
        WriteSettled(0),
        S.ENDED,
        [SendRevoked(), END],
    ),
    Example(
        "the last but the lost ones settles",
        (*TO_WRITING, WriteLost(0, LOST)),
        WriteSettled(1),
        S.QUARANTINED,
        [QuarantineWaves((0,)), END],
    ),
    Example(
        "one of two drained waves is lost",
        TO_REVOKING,
        WriteLost(1, LOST),
        S.DRAINING,
        [],
    ),
    Example(
        "the last drained wave is lost: a revocation is not answered",
        (*TO_REVOKING, WriteSettled(1)),
        WriteLost(0, LOST),
        S.QUARANTINED,
        [QuarantineWaves((0,)), END],
    ),
    Example(
        "a revocation of a failing delivery waits",
        TO_FAILING,
        RevokeArrived(),
        S.DRAINING,
        [],
    ),
    Example(
        "an early tick while draining", TO_FAILING, DeliveryTicked(), S.DRAINING, []
    ),
    Example(
        "what does not drain in its grace is quarantined",
        TO_REVOKING,
        DeliveryTicked(),
        S.QUARANTINED,
        [QuarantineWaves((0, 1)), END],
        GRACE_S,
    ),
    Example(
        "one of two quarantined waves settles",
        (*TO_WRITING, WriteLost(0, LOST), WriteLost(1, LOST)),
        WriteSettled(0),
        S.QUARANTINED,
        [],
    ),
    Example(
        "the last quarantined wave settles",
        TO_QUARANTINED,
        WriteSettled(0, FAILED),
        S.RECLAIMED,
        [ReclaimWaves()],
    ),
    Example(
        "the last quarantined wave settles, and the revocation is answered",
        (*TO_QUARANTINED, RevokeArrived()),
        WriteSettled(0),
        S.RECLAIMED,
        [ReclaimWaves(), SendRevoked()],
    ),
    Example(
        "a revocation while in quarantine is not answered",
        TO_QUARANTINED,
        RevokeArrived(),
        S.QUARANTINED,
        [],
    ),
    *(
        Example(
            f"a revocation is answered when it is {state.value}",
            PATHS[state],
            RevokeArrived(),
            state,
            [SendRevoked()],
        )
        for state in (S.LANDED, S.ENDED, S.RECLAIMED)
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.says)
def test_row(example: Example) -> None:
    """The row of the table does what the example says."""
    machine = delivery(*example.given)
    assert machine.step(example.event, example.at) == example.effects
    assert machine.state is example.state


def test_every_arrow_of_the_table_has_an_example() -> None:
    """No row leads to a state that no example reaches, and none is without one."""
    shown = {(delivery(*e.given).state, type(e.event), e.state) for e in EXAMPLES}
    assert arrows(DeliveryMachine) == shown


# Causes, counts, cases.


@pytest.mark.parametrize(
    ("given", "event", "at", "cause"),
    [
        ((), PushJoined(), LEASE_S, LeaseExpired),
        ((), RevokeArrived(), 0.0, PushRevoked),
        (TO_WRITING, WriteSettled(0, FAILED), 0.0, TransferFailed),
        (TO_WRITING, WriteLost(0, LOST), 0.0, PeerLost),
        (TO_WRITING, ConsumerLost(LOST), 0.0, PeerLost),
        (TO_WRITING, DeliveryAborted(ABORTED), 0.0, PushAborted),
        (TO_WRITING, DeliveryTicked(), LEASE_S, LeaseExpired),
        (TO_FAILING, RevokeArrived(), 0.0, TransferFailed),
        (TO_FAILING, WriteLost(0, LOST), 0.0, TransferFailed),
        (TO_REVOKING, WriteSettled(0, FAILED), 0.0, PushRevoked),
        (TO_CONFIRMING, LandedArrived(), 0.0, type(None)),
    ],
)
def test_the_first_cause_is_the_cause(
    given: tuple[Event, ...], event: Event, at: float, cause: type
) -> None:
    """What went wrong first is kept; a delivery that landed has no cause."""
    machine = delivery(*given)
    machine.step(event, at)
    assert type(machine.cause) is cause


@pytest.mark.parametrize(
    ("given", "event"),
    [
        ((*TO_WRITING, WriteSettled(0)), WriteSettled(0)),
        (TO_WRITING, WriteSettled(7, FAILED)),
        (TO_WRITING, WriteSettled(-1)),
        (TO_WRITING, WriteLost(7, LOST)),
        (TO_FAILING, WriteSettled(1)),
        (TO_FAILING, WriteLost(7, LOST)),
        ((*TO_REVOKING, WriteLost(0, LOST)), WriteLost(0, LOST)),
        (TO_QUARANTINED, WriteSettled(7)),
    ],
)
def test_unknown_late_and_doubled_events_are_counted_and_change_nothing(
    given: tuple[Event, ...], event: Event
) -> None:
    """Invariant 5: an event about no wave in flight has no effect but a count."""
    machine = delivery(*given)
    before, ignored = facts(machine), machine.ignored
    assert machine.step(event, 0.0) == []
    assert facts(machine) == before
    assert machine.ignored == ignored + 1


@pytest.mark.parametrize(
    "events", [(*TO_LAST, WavesReady(1)), (PushJoined(), WavesReady(-1))]
)
def test_waves_behind_a_commit_and_fewer_than_none_poison(
    events: tuple[Event, ...],
) -> None:
    """What was told to be all is all."""
    with pytest.raises(FerryInternalError, match="waves more"):
        delivery(*events)


def test_l3_each_extension_holds_for_one_lease() -> None:
    """Extended at 20 s, a lease of 30 s runs out at 50 s, and not before."""
    machine = delivery(*TO_WRITING)
    machine.step(ExtendArrived(), 20.0)
    assert machine.deadline == 50.0
    assert machine.step(WavesReady(1), 49.0) == []
    assert machine.step(WriteSettled(0), 49.9) == [PostWave(2)]
    assert machine.step(DeliveryTicked(), 50.0) == failed()


@pytest.mark.parametrize("event", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("late_s", [0.0, 0.001, 1e9])
def test_l3_a_producer_stopped_past_the_lease_posts_nothing(
    event: Event, late_s: float
) -> None:
    """Whatever had queued up comes in first: no wave leaves."""
    for state in (S.WAITING, S.WRITING):
        machine = delivery(*PATHS[state], window=5)
        if KIND[state, type(event)] == "move":
            effects = machine.step(event, LEASE_S + late_s)
            assert not any(isinstance(e, PostWave) for e in effects)
            assert machine.state not in {S.WAITING, S.WRITING, S.CONFIRMING}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_l4_a_revocation_is_answered_behind_the_last_of_four_waves(
    order: tuple[int, ...],
) -> None:
    """In any order, asked twice: one answer, and none before the last has settled."""
    machine = delivery(PushJoined(), WavesReady(4), window=4)
    assert machine.step(RevokeArrived(), 0.0) == []
    for wave in order[:-1]:
        assert machine.step(WriteSettled(wave), 0.0) == []
        assert machine.step(RevokeArrived(), 0.0) == []
    assert machine.step(WriteSettled(order[-1]), 0.0) == [SendRevoked(), END]


# Deadlines (case o5).


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_o5_every_state_that_waits_for_others_has_a_deadline(
    state: DeliveryState,
) -> None:
    """A state has a deadline exactly if it is not over."""
    assert (delivery(*PATHS[state]).deadline is None) == (state in OVER)


@pytest.mark.parametrize("state", [s for s in S if s not in OVER])
def test_o5_time_alone_ends_every_state_without_new_work(state: DeliveryState) -> None:
    """Nothing comes in but ticks: it ends, posts nothing, and says what it leaves."""
    machine = delivery(*PATHS[state])
    now, effects = 0.0, []
    while (deadline := machine.deadline) is not None:
        assert deadline > now, "a deadline that has passed must have been dealt with"
        now = deadline
        effects += machine.step(DeliveryTicked(), now)
    assert (machine.state is S.QUARANTINED) == bool(machine.unsettled)
    assert machine.state in {S.ENDED, S.QUARANTINED}
    assert effects.count(END) == 1
    assert not any(isinstance(e, PostWave) for e in effects)
    assert now <= LEASE_S + GRACE_S


# The ledger: what the outside world knows of a delivery, kept apart from the machine.


class Ledger:
    """What was posted, said and asked, as the owner of a machine sees it."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.held_until = LEASE_S
        self.ready = 0
        self.posted = 0
        self.in_flight: set[int] = set()
        self.is_committed = False
        self.is_finished = False  # the consumer was told that all is written
        self.is_dead = False  # nothing may be posted any more
        self.is_owed = False  # a revocation that has no answer yet
        self.has_failed = False
        self.ends = 0

    def see_event(self, event: Event, now: float) -> None:
        is_late = self.ends == 0 and not self.is_dead and now >= self.held_until
        match event:
            case WavesReady(count=count) if not self.is_dead:
                self.ready += count
            case DeliveryCommitted():
                self.is_committed = True
            case WriteSettled(wave=wave, cause=cause) if wave in self.in_flight:
                self.in_flight.discard(wave)
                self.is_dead |= cause is not None
            case WriteLost(wave=wave) if wave in self.in_flight:
                self.is_dead = True
            case RevokeArrived():
                self.is_owed = self.is_dead = True
            case ConsumerLost() | DeliveryAborted():
                self.is_dead = True
            case ExtendArrived() if not (self.is_dead or is_late):
                self.held_until = now + LEASE_S

    def see_effect(self, effect: Effect, now: float) -> None:
        assert self.ends == 0 or isinstance(effect, ReclaimWaves | SendRevoked)
        match effect:
            case PostWave(wave=wave):
                assert not self.is_dead, "posted after it had begun to end"
                assert now < self.held_until, "posted after the lease"
                assert wave == self.posted < self.ready, "posted out of order"
                self.posted += 1
                self.in_flight.add(wave)
                assert len(self.in_flight) <= self.window, "over the window"
            case SendFinished(waves=waves):
                assert self.is_committed
                assert not self.is_finished
                assert not self.is_dead
                assert not self.in_flight
                assert waves == self.ready == self.posted
                self.is_finished = True
            case SendRevoked():
                assert self.is_owed, "answered what nobody asked"
                assert not self.in_flight, "answered under a wave"
                self.is_owed = False
            case SendFailed():
                assert not self.has_failed, "failed twice"
                self.has_failed = self.is_dead = True
            case EndDelivery():
                self.ends += 1
            case QuarantineWaves(waves=waves):
                assert set(waves) == self.in_flight != set()
            case ReclaimWaves():
                assert not self.in_flight

    def check(self, machine: DeliveryMachine) -> None:
        assert machine.unsettled == self.in_flight
        assert (machine.state in OVER) == (self.ends == 1)
        assert (machine.deadline is None) == (self.ends == 1)
        assert not self.is_owed or self.in_flight, "a revocation left unanswered"
        if machine.state in {S.LANDED, S.ENDED, S.RECLAIMED}:
            assert not self.in_flight, "blocks given back under a wave"
        if machine.state is S.QUARANTINED:
            assert self.in_flight, "blocks kept back for nothing"
        if machine.state in {S.LANDED, S.CONFIRMING}:
            assert self.is_finished
            assert not self.has_failed
        is_going = machine.state in {S.WAITING, S.WRITING, S.CONFIRMING}
        assert not is_going or not self.is_dead
        assert is_going or machine.state is S.LANDED or machine.cause is not None


def drive(
    machine: DeliveryMachine, ledger: Ledger, event: Event, now: float
) -> list[Effect]:
    before = machine.state
    ledger.see_event(event, now)
    effects = machine.step(event, now)
    for effect in effects:
        ledger.see_effect(effect, now)
    ledger.check(machine)
    if SendFailed() in effects:
        assert effects[0] == SendFailed(), "the consumer is told first"
    elif before not in OVER | {S.DRAINING} and machine.state not in {before, S.LANDED}:
        # n4: whatever the consumer does not know itself, it is told at once.
        is_going = machine.state in {S.WRITING, S.CONFIRMING}
        assert is_going or isinstance(event, RevokeArrived | ConsumerLost)
    if before in OVER:
        assert machine.state in {before, S.RECLAIMED}, "a second outcome"
    return effects


def alphabet(waves: int) -> Iterator[tuple[Event, float]]:
    """Every event there can be, in time and too late."""
    events: list[Event] = [
        event
        for event in SAMPLES.values()
        if not isinstance(event, WriteSettled | WriteLost)
    ]
    events.append(WavesReady(2))
    for wave in range(waves):
        events += [
            WriteSettled(wave),
            WriteSettled(wave, FAILED),
            WriteLost(wave, LOST),
        ]
    yield from ((event, now) for event in events for now in (0.0, LEASE_S))
    yield DeliveryTicked(), GRACE_S


@pytest.mark.parametrize(("window", "most"), [(1, 2), (2, 3)])
def test_fail_closed_in_every_state_that_any_sequence_of_events_can_reach(
    window: int, most: int
) -> None:
    """An exhaustive walk: whatever comes in whatever order, the ledger agrees."""
    events = list(alphabet(most))
    frontier, seen, reached = [(delivery(window=window), Ledger(window))], set(), set()
    while frontier:
        machine, ledger = frontier.pop()
        reached.add(machine.state)
        for event, now in events:
            more = event.count if isinstance(event, WavesReady) else 0
            if KIND[machine.state, type(event)] == "BUG" or ledger.ready + more > most:
                continue
            if more and ledger.is_committed:
                continue
            twin, book = clone(machine), clone(ledger)
            drive(twin, book, event, now)
            # What a state does depends on which of its instants has passed alone.
            twin._grace_at = min(twin._grace_at, GRACE_S)
            key = (
                twin.state,
                frozenset(twin._lost),
                frozenset(book.in_flight),
                twin.cause is None or (book.is_owed, book.has_failed),
                twin.cause is None and (book.ready, book.posted, book.is_committed),
            )
            if key not in seen:
                seen.add(key)
                frontier.append((twin, book))
    assert reached == set(S)


class DeliveryModel(RuleBasedStateMachine):
    """Long random runs with more waves and a clock, against the ledger."""

    @initialize(window=st.integers(1, 5))
    def open(self, window: int) -> None:
        self.machine, self.ledger = delivery(window=window), Ledger(window)
        self.now = 0.0

    def let_in(self, event: Event) -> None:
        if KIND[self.machine.state, type(event)] != "BUG":
            drive(self.machine, self.ledger, event, self.now)

    @rule()
    def a_push_joins(self) -> None:
        self.let_in(PushJoined())

    @rule(count=st.integers(0, 6))
    def waves_are_ready(self, count: int) -> None:
        if not self.ledger.is_committed:
            self.let_in(WavesReady(count))

    @rule(is_likely=st.integers(0, 3))
    def it_is_committed(self, is_likely: int) -> None:
        if not is_likely:
            self.let_in(DeliveryCommitted())

    @rule(pick=st.integers(0, 11))
    def a_posted_wave_settles(self, pick: int) -> None:
        if waves := sorted(self.ledger.in_flight):
            self.let_in(WriteSettled(waves[pick % len(waves)]))

    @rule(wave=st.integers(-1, 12), is_lost=st.booleans(), is_likely=st.integers(0, 4))
    def a_wave_goes_wrong(self, *, wave: int, is_lost: bool, is_likely: int) -> None:
        if not is_likely:
            self.let_in(
                WriteLost(wave, LOST) if is_lost else WriteSettled(wave, FAILED)
            )

    @rule()
    def the_consumer_extends(self) -> None:
        self.let_in(ExtendArrived())

    @rule()
    def the_consumer_says_that_it_landed(self) -> None:
        self.let_in(LandedArrived())

    @rule(
        event=st.sampled_from(
            [RevokeArrived(), ConsumerLost(LOST), DeliveryAborted(ABORTED)]
        ),
        is_likely=st.integers(0, 5),
    )
    def the_world_changes(self, event: Event, is_likely: int) -> None:
        if not is_likely:
            self.let_in(event)

    @rule(passed=st.sampled_from([0.0, 1.0, 4.0, 12.0, 40.0]), is_ticking=st.booleans())
    def time_passes(self, *, passed: float, is_ticking: bool) -> None:
        self.now += passed
        if is_ticking:
            self.let_in(DeliveryTicked())

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            while (deadline := self.machine.deadline) is not None:
                self.now = max(self.now, deadline)
                self.let_in(DeliveryTicked())
            for wave in sorted(self.ledger.in_flight):
                self.let_in(WriteSettled(wave))
            self.let_in(RevokeArrived())
            assert not self.ledger.is_owed


TestDeliveryModel = DeliveryModel.TestCase
TestDeliveryModel.settings = settings(max_examples=25, stateful_step_count=40)
