"""The pull machine: its table, row by row, and its invariants against a ledger."""

from __future__ import annotations

import copy
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.protocol.errors import (
    DeadlineExceeded,
    FerryInternalError,
    LeaseExpired,
    PeerLost,
    TransferFailed,
)
from kvferry.protocol.lifecycle.machine import Otherwise, Row
from kvferry.protocol.lifecycle.pull import (
    EVENTS,
    OVER,
    AwaitBlocks,
    BlocksReady,
    CancelRequested,
    ConfirmArrived,
    Connect,
    DeclineOffer,
    DeclineSource,
    FinishEnded,
    FinishFailed,
    Planned,
    PostWave,
    PullFailed,
    PullMachine,
    PullStarted,
    PullState,
    PullTicked,
    QuarantineBlocks,
    ReclaimBlocks,
    RenewLease,
    RoomTaken,
    RunFinish,
    SendReadFinished,
    SourceFailed,
    SourceReady,
    TakeRoom,
    WaveLost,
    WaveSettled,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.protocol.lifecycle.machine import Effect, Event

S = PullState
T = TypeVar("T")

DEADLINE_AT = 100.0
RENEW_EVERY_S = 10.0
GRACE_S = 5.0
WINDOW = 2

FAILED = TransferFailed("a wave failed")
LOST = PeerLost("the transport forgot the wave")
EXPIRED = LeaseExpired("the fence was refused")

# Two sources; source 0 has waves 0 and 2, source 1 has wave 1.
PLAN = Planned(wave_sources=(0, 1, 0), sources=2)
LATE_PLAN = Planned(wave_sources=(0, 1, 0), sources=2, unready=(0, 1))

# What every pair is. "move" has a row, "late" is ignored and counted, "BUG" is a
# misuse: its owner broke the contract.
TABLE = """
             started planned ready told room settled lost confirm gone ended unended failed cancel tick
new          move    BUG     BUG   BUG  BUG  BUG     BUG  BUG     BUG  BUG   BUG     BUG    move   BUG
connecting   BUG     move    BUG   late BUG  BUG     BUG  late    late BUG   BUG     move   move   move
planned      BUG     BUG     move  move BUG  BUG     BUG  late    move BUG   BUG     move   move   move
queued       BUG     BUG     BUG   late move BUG     BUG  late    move BUG   BUG     move   move   move
reading      BUG     BUG     BUG   late BUG  move    move move    move BUG   BUG     move   move   move
confirming   BUG     BUG     BUG   late BUG  late    late move    move BUG   BUG     move   move   move
finishing    BUG     BUG     BUG   late BUG  late    late late    late move  move    late   late   move
draining     BUG     late    late  late late move    move late    late BUG   BUG     late   move   move
done         BUG     late    late  late late late    late late    late late  late    late   late   late
failed       BUG     late    late  late late late    late late    late late  late    late   late   late
cancelled    BUG     late    late  late late late    late late    late late  late    late   late   late
quarantined  BUG     late    late  late late move    late late    late move  move    late   late   late
reclaimed    BUG     late    late  late late late    late late    late late  late    late   late   late
"""
SAMPLES: dict[str, Event] = {
    "started": PullStarted(),
    "planned": PLAN,
    "ready": BlocksReady(),
    "told": SourceReady(0),
    "room": RoomTaken(),
    "settled": WaveSettled(0),
    "lost": WaveLost(0, LOST),
    "confirm": ConfirmArrived(0),
    "gone": SourceFailed(0, LOST),
    "ended": FinishEnded(),
    "unended": FinishFailed(FAILED),
    "failed": PullFailed(EXPIRED),
    "cancel": CancelRequested(),
    "tick": PullTicked(),
}


def table() -> Iterator[tuple[PullState, str, str]]:
    header, *lines = TABLE.strip("\n").splitlines()
    for line in lines:
        state, *kinds = line.split()
        for name, kind in zip(header.split(), kinds, strict=True):
            yield S(state), name, kind


KIND = {(state, type(SAMPLES[name])): kind for state, name, kind in table()}

TO_CONNECTING = (PullStarted(),)
TO_PLANNED = (*TO_CONNECTING, PLAN)
TO_WAITING = (*TO_CONNECTING, LATE_PLAN)  # for the caller, and for both sources
TO_HIT = (PullStarted(has_work=False),)
TO_QUEUED = (*TO_PLANNED, BlocksReady())
TO_READING = (*TO_QUEUED, RoomTaken())
TO_CONFIRMING = (*TO_READING, WaveSettled(0), WaveSettled(1), WaveSettled(2))
TO_FINISHING = (*TO_CONFIRMING, ConfirmArrived(0), ConfirmArrived(1))
TO_CANCELLING = (*TO_READING, CancelRequested())  # waves 0 and 1 are in flight
TO_FAILING = (*TO_READING, WaveSettled(1, FAILED))  # wave 0 is in flight
TO_QUARANTINED = (*TO_FAILING, WaveLost(0, LOST))
TO_HUNG = (*TO_FINISHING, PullTicked())  # the tick comes at the end of the grace
PATHS: dict[PullState, tuple[Event, ...]] = {
    S.NEW: (),
    S.CONNECTING: TO_CONNECTING,
    S.PLANNED: TO_PLANNED,
    S.QUEUED: TO_QUEUED,
    S.READING: TO_READING,
    S.CONFIRMING: TO_CONFIRMING,
    S.FINISHING: TO_FINISHING,
    S.DRAINING: TO_CANCELLING,
    S.DONE: (*TO_FINISHING, FinishEnded()),
    S.FAILED: (*TO_CONNECTING, PullFailed(EXPIRED)),
    S.CANCELLED: (CancelRequested(),),
    S.QUARANTINED: TO_QUARANTINED,
    S.RECLAIMED: (*TO_QUARANTINED, WaveSettled(0)),
}


def pull(*events: Event, window: int = WINDOW) -> PullMachine:
    """A machine after these events, all at time 0."""
    machine = PullMachine(
        window=window,
        deadline_at=DEADLINE_AT,
        renew_every_s=RENEW_EVERY_S,
        grace_s=GRACE_S,
    )
    for event in events:
        is_hung = machine.state is S.FINISHING and isinstance(event, PullTicked)
        machine.step(event, GRACE_S if is_hung else 0.0)
    return machine


def facts(machine: PullMachine) -> dict[str, object]:
    """Everything a machine knows, but for the count of what it ignored."""
    return {k: v for k, v in vars(clone(machine)).items() if k != "ignored"}


def clone(thing: T) -> T:
    """A copy that shares nothing that changes."""
    twin = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, set | list):
            setattr(twin, name, copy.copy(value))
    return twin


# The table.


def test_the_table_is_total_and_every_pair_is_what_it_is_meant_to_be() -> None:
    """Each (state, event) is a move, ignored or a misuse, as written down above."""
    assert set(KIND) == set(itertools.product(S, EVENTS))
    kinds = {Otherwise.IGNORED: "late", Otherwise.MISUSE: "BUG"}
    found = {
        pair: "move" if isinstance(row, Row) else kinds[row]
        for pair, row in PullMachine.table.items()
    }
    assert found == KIND


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_the_path_to_each_state_leads_there(state: PullState) -> None:
    """Every state can be reached by a run, so that the tests below mean something."""
    assert pull(*PATHS[state]).state is state


@pytest.mark.parametrize(
    ("state", "name", "kind"), list(table()), ids=lambda x: getattr(x, "value", x)
)
def test_every_pair_behaves_as_the_table_says(
    state: PullState, name: str, kind: str
) -> None:
    """A move goes to a declared target, the late change nothing, a bug poisons."""
    machine = pull(*PATHS[state])
    event, before, ignored = SAMPLES[name], facts(machine), machine.ignored
    if kind == "BUG":
        with pytest.raises(FerryInternalError, match=f"misuse in {state.value}"):
            machine.step(event, 0.0)
        assert machine.state is state
        for other in SAMPLES.values():
            with pytest.raises(FerryInternalError, match="poisoned"):
                machine.step(other, 0.0)
    elif kind == "late":
        assert machine.step(event, 0.0) == []
        assert facts(machine) == before
        assert machine.ignored == ignored + 1
    else:
        machine.step(event, 0.0)
        row = PullMachine.table[state, type(event)]
        assert isinstance(row, Row)
        assert machine.state in row.targets


def test_an_event_of_another_machine_is_a_misuse() -> None:
    """A type that is in no row is never taken for one that is."""

    class Foreign(BlocksReady, frozen=True):
        """Something that happened elsewhere."""

    machine = pull(*TO_PLANNED)
    with pytest.raises(FerryInternalError):
        machine.step(Foreign(), 0.0)


class Example(NamedTuple):
    """One row of the table at work."""

    says: str
    given: tuple[Event, ...]
    event: Event
    state: PullState
    effects: list[Effect]
    at: float = 0.0


EXAMPLES = [
    Example("a start connects", (), PullStarted(), S.CONNECTING, [Connect()]),
    Example(
        "p4: a start without work lets the offer go, and waits for the caller's event",
        (),
        PullStarted(has_work=False),
        S.PLANNED,
        [DeclineOffer(), AwaitBlocks()],
    ),
    Example(
        "l8: the caller's event lets the zeroing of a full hit begin",
        TO_HIT,
        BlocksReady(),
        S.FINISHING,
        [RunFinish()],
    ),
    Example(
        "a cancelled full hit tells the offer nothing twice",
        TO_HIT,
        CancelRequested(),
        S.CANCELLED,
        [],
    ),
    Example(
        "n3: a cancel before the start declines",
        (),
        CancelRequested(),
        S.CANCELLED,
        [DeclineOffer()],
    ),
    Example(
        "a plan accepts the ticket and waits for the caller's event",
        TO_CONNECTING,
        PLAN,
        S.PLANNED,
        [RenewLease((0, 1)), AwaitBlocks()],
    ),
    Example(
        "a failed connection fails",
        TO_CONNECTING,
        PullFailed(LOST),
        S.FAILED,
        [DeclineOffer()],
    ),
    Example(
        "a cancel while connecting",
        TO_CONNECTING,
        CancelRequested(),
        S.CANCELLED,
        [DeclineOffer()],
    ),
    Example(
        "an early tick while connecting", TO_CONNECTING, PullTicked(), S.CONNECTING, []
    ),
    Example(
        "the deadline while connecting",
        TO_CONNECTING,
        PullTicked(),
        S.FAILED,
        [DeclineOffer()],
        DEADLINE_AT,
    ),
    Example(
        "l8: the caller's event leads to the queue for room",
        TO_PLANNED,
        BlocksReady(),
        S.QUEUED,
        [TakeRoom()],
    ),
    Example(
        "l8: the caller's event comes before a source's",
        (*TO_WAITING, SourceReady(1)),
        BlocksReady(),
        S.PLANNED,
        [],
    ),
    Example(
        "l8: one of two sources becomes ready",
        (*TO_WAITING, BlocksReady()),
        SourceReady(1),
        S.PLANNED,
        [],
    ),
    Example(
        "l8: the last source that was waited for becomes ready",
        (*TO_WAITING, BlocksReady(), SourceReady(1)),
        SourceReady(0),
        S.QUEUED,
        [TakeRoom()],
    ),
    Example(
        "l8: the sources are ready before the caller",
        (*TO_WAITING, SourceReady(0)),
        SourceReady(1),
        S.PLANNED,
        [],
    ),
    Example(
        "a source that is not read from is not waited for",
        (*TO_CONNECTING, Planned(wave_sources=(1,), sources=2, unready=(0,))),
        BlocksReady(),
        S.QUEUED,
        [TakeRoom()],
    ),
    Example(
        "a plan without waves needs nobody's word",
        (*TO_CONNECTING, Planned(wave_sources=(), sources=2, unready=(0,))),
        BlocksReady(),
        S.FINISHING,
        [RunFinish()],
    ),
    Example(
        "a plan without waves lets the sources go",
        TO_CONNECTING,
        Planned(wave_sources=(), sources=2),
        S.PLANNED,
        [DeclineSource(0), DeclineSource(1), AwaitBlocks()],
    ),
    Example(
        "a source without waves is let go at once",
        TO_CONNECTING,
        Planned(wave_sources=(1,), sources=2),
        S.PLANNED,
        [RenewLease((1,)), DeclineSource(0), AwaitBlocks()],
    ),
    Example(
        "room lets the first waves out",
        TO_QUEUED,
        RoomTaken(),
        S.READING,
        [PostWave(0), PostWave(1)],
    ),
    Example(
        "a source that is not needed is lost while queued",
        (
            *TO_CONNECTING,
            Planned(wave_sources=(1,), sources=2),
            BlocksReady(),
        ),
        SourceFailed(0, LOST),
        S.QUEUED,
        [],
    ),
    Example(
        "a source is lost while queued",
        TO_QUEUED,
        SourceFailed(0, LOST),
        S.FAILED,
        [DeclineOffer()],
    ),
    Example(
        "the engine closes while queued",
        TO_QUEUED,
        PullFailed(LOST),
        S.FAILED,
        [DeclineOffer()],
    ),
    Example(
        "a cancel while queued",
        TO_QUEUED,
        CancelRequested(),
        S.CANCELLED,
        [DeclineOffer()],
    ),
    Example(
        "a pull that queues for room renews",
        TO_QUEUED,
        PullTicked(),
        S.QUEUED,
        [RenewLease((0, 1))],
        RENEW_EVERY_S,
    ),
    Example(
        "the deadline while queued",
        TO_QUEUED,
        PullTicked(),
        S.FAILED,
        [DeclineOffer()],
        DEADLINE_AT,
    ),
    Example(
        "a source that is not needed is lost before reading",
        (*TO_CONNECTING, Planned(wave_sources=(1,), sources=2)),
        SourceFailed(0, LOST),
        S.PLANNED,
        [],
    ),
    Example(
        "a source is lost before reading",
        TO_PLANNED,
        SourceFailed(0, LOST),
        S.FAILED,
        [DeclineOffer()],
    ),
    Example(
        "the engine closes before reading",
        TO_PLANNED,
        PullFailed(LOST),
        S.FAILED,
        [DeclineOffer()],
    ),
    Example(
        "a cancel before reading",
        TO_PLANNED,
        CancelRequested(),
        S.CANCELLED,
        [DeclineOffer()],
    ),
    Example(
        "n1: a queueing pull renews",
        TO_PLANNED,
        PullTicked(),
        S.PLANNED,
        [RenewLease((0, 1))],
        RENEW_EVERY_S,
    ),
    Example(
        "an early tick while planned",
        TO_PLANNED,
        PullTicked(),
        S.PLANNED,
        [],
        RENEW_EVERY_S - 1,
    ),
    Example(
        "the deadline while planned",
        TO_PLANNED,
        PullTicked(),
        S.FAILED,
        [DeclineOffer()],
        DEADLINE_AT,
    ),
    Example(
        "a settled wave makes room for the next",
        TO_READING,
        WaveSettled(0),
        S.READING,
        [PostWave(2)],
    ),
    Example(
        "the last wave of a source asks that source, and the others go on",
        TO_READING,
        WaveSettled(1),
        S.READING,
        [SendReadFinished(1), PostWave(2)],
    ),
    Example(
        "the last wave of all leads to confirming",
        TO_CONFIRMING[:-1],
        WaveSettled(2),
        S.CONFIRMING,
        [SendReadFinished(0)],
    ),
    Example(
        "l2: a wave that failed beside another drains",
        TO_READING,
        WaveSettled(0, FAILED),
        S.DRAINING,
        [DeclineOffer()],
    ),
    Example(
        "a wave that failed alone fails at once",
        TO_CONFIRMING[:-1],
        WaveSettled(2, FAILED),
        S.FAILED,
        [DeclineOffer()],
    ),
    Example(
        "o6: a completion delivered again does not count twice",
        (*TO_READING, WaveSettled(0)),
        WaveSettled(0),
        S.READING,
        [],
    ),
    Example(
        "a wave that was never posted does not count",
        TO_READING,
        WaveSettled(2),
        S.READING,
        [],
    ),
    Example(
        "a lost wave beside another drains",
        TO_READING,
        WaveLost(0, LOST),
        S.DRAINING,
        [DeclineOffer()],
    ),
    Example(
        "a lost wave alone is hopeless",
        TO_CONFIRMING[:-1],
        WaveLost(2, LOST),
        S.QUARANTINED,
        [DeclineOffer(), QuarantineBlocks((2,))],
    ),
    Example(
        "a loss told of a settled wave is late",
        (*TO_READING, WaveSettled(0)),
        WaveLost(0, LOST),
        S.READING,
        [],
    ),
    Example(
        "a source that was asked confirms while others are read",
        (*TO_READING, WaveSettled(1)),
        ConfirmArrived(1),
        S.READING,
        [],
    ),
    Example(
        "a source is lost while reading",
        TO_READING,
        SourceFailed(1, LOST),
        S.DRAINING,
        [DeclineOffer()],
    ),
    Example(
        "a source that has confirmed is lost while others are read",
        (*TO_READING, WaveSettled(1), ConfirmArrived(1)),
        SourceFailed(1, LOST),
        S.READING,
        [],
    ),
    Example(
        "the engine closes while reading",
        TO_READING,
        PullFailed(LOST),
        S.DRAINING,
        [DeclineOffer()],
    ),
    Example(
        "a cancel while reading drains first",
        TO_READING,
        CancelRequested(),
        S.DRAINING,
        [DeclineOffer()],
    ),
    Example(
        "a long read renews with the sources still needed",
        (*TO_READING, WaveSettled(1)),
        PullTicked(),
        S.READING,
        [RenewLease((0,))],
        RENEW_EVERY_S,
    ),
    Example("an early tick while reading", TO_READING, PullTicked(), S.READING, []),
    Example(
        "the deadline while reading drains first",
        TO_READING,
        PullTicked(),
        S.DRAINING,
        [DeclineOffer()],
        DEADLINE_AT,
    ),
    Example(
        "one of two sources confirms",
        TO_CONFIRMING,
        ConfirmArrived(1),
        S.CONFIRMING,
        [],
    ),
    Example(
        "the last source confirms",
        (*TO_CONFIRMING, ConfirmArrived(1)),
        ConfirmArrived(0),
        S.FINISHING,
        [RunFinish()],
    ),
    Example(
        "a source that has confirmed is lost while others have not",
        (*TO_CONFIRMING, ConfirmArrived(0)),
        SourceFailed(0, LOST),
        S.CONFIRMING,
        [],
    ),
    Example(
        "o2: a source that did not hold on fails the pull",
        TO_CONFIRMING,
        SourceFailed(1, EXPIRED),
        S.FAILED,
        [DeclineOffer()],
    ),
    Example(
        "the engine closes while confirming",
        TO_CONFIRMING,
        PullFailed(EXPIRED),
        S.FAILED,
        [DeclineOffer()],
    ),
    Example(
        "a cancel while confirming",
        TO_CONFIRMING,
        CancelRequested(),
        S.CANCELLED,
        [DeclineOffer()],
    ),
    Example(
        "a tick while confirming renews nothing: every source has been asked",
        TO_CONFIRMING,
        PullTicked(),
        S.CONFIRMING,
        [],
        RENEW_EVERY_S,
    ),
    Example(
        "the deadline while confirming",
        TO_CONFIRMING,
        PullTicked(),
        S.FAILED,
        [DeclineOffer()],
        DEADLINE_AT,
    ),
    Example("the finish stage is through", TO_FINISHING, FinishEnded(), S.DONE, []),
    Example(
        "the finish stage failed", TO_FINISHING, FinishFailed(FAILED), S.FAILED, []
    ),
    Example(
        "an early tick while finishing", TO_FINISHING, PullTicked(), S.FINISHING, []
    ),
    Example(
        "a finish stage that hangs leaves its blocks in quarantine",
        TO_FINISHING,
        PullTicked(),
        S.QUARANTINED,
        [QuarantineBlocks(())],
        GRACE_S,
    ),
    Example(
        "a finish stage that hung ends after all",
        TO_HUNG,
        FinishEnded(),
        S.RECLAIMED,
        [ReclaimBlocks()],
    ),
    Example(
        "a finish stage that hung fails after all",
        TO_HUNG,
        FinishFailed(FAILED),
        S.RECLAIMED,
        [ReclaimBlocks()],
    ),
    Example(
        "a finish stage that never ran frees no wave",
        TO_QUARANTINED,
        FinishEnded(),
        S.QUARANTINED,
        [],
    ),
    Example(
        "a finish stage that never ran, and failed, frees no wave",
        TO_QUARANTINED,
        FinishFailed(FAILED),
        S.QUARANTINED,
        [],
    ),
    Example(
        "one of two drained waves settles",
        TO_CANCELLING,
        WaveSettled(0),
        S.DRAINING,
        [],
    ),
    Example(
        "the last wave of a cancelled pull settles",
        (*TO_CANCELLING, WaveSettled(0)),
        WaveSettled(1),
        S.CANCELLED,
        [],
    ),
    Example(
        "the last wave of a failing pull settles",
        TO_FAILING,
        WaveSettled(0, FAILED),
        S.FAILED,
        [],
    ),
    Example(
        "the last wave but the lost ones settles",
        (*TO_CANCELLING, WaveLost(1, LOST)),
        WaveSettled(0),
        S.QUARANTINED,
        [QuarantineBlocks((1,))],
    ),
    Example(
        "one of two drained waves is lost",
        TO_CANCELLING,
        WaveLost(1, LOST),
        S.DRAINING,
        [],
    ),
    Example(
        "the last drained wave is lost",
        TO_FAILING,
        WaveLost(0, LOST),
        S.QUARANTINED,
        [QuarantineBlocks((0,))],
    ),
    Example(
        "a lost wave that settles after all is lost no more",
        (*TO_CANCELLING, WaveLost(0, LOST), WaveSettled(0)),
        WaveLost(1, LOST),
        S.QUARANTINED,
        [QuarantineBlocks((1,))],
    ),
    Example(
        "a cancel of a failing pull drains on",
        TO_FAILING,
        CancelRequested(),
        S.DRAINING,
        [],
    ),
    Example("an early tick while draining", TO_FAILING, PullTicked(), S.DRAINING, []),
    Example(
        "what does not drain in its grace is quarantined",
        TO_CANCELLING,
        PullTicked(),
        S.QUARANTINED,
        [QuarantineBlocks((0, 1))],
        GRACE_S,
    ),
    Example(
        "one of two quarantined waves settles",
        (*TO_READING, WaveLost(0, LOST), WaveLost(1, LOST)),
        WaveSettled(0),
        S.QUARANTINED,
        [],
    ),
    Example(
        "the last quarantined wave settles",
        TO_QUARANTINED,
        WaveSettled(0, FAILED),
        S.RECLAIMED,
        [ReclaimBlocks()],
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.says)
def test_row(example: Example) -> None:
    """The row of the table does what the example says."""
    machine = pull(*example.given)
    assert machine.step(example.event, example.at) == example.effects
    assert machine.state is example.state


def test_every_arrow_of_the_table_has_an_example() -> None:
    """No row leads to a state that no example reaches, and none is without one."""
    drawn = {
        (state, event, target)
        for (state, event), row in PullMachine.table.items()
        if isinstance(row, Row)
        for target in row.targets
    }
    shown = {(pull(*e.given).state, type(e.event), e.state) for e in EXAMPLES}
    assert drawn == shown


# Causes and counts.


@pytest.mark.parametrize(
    ("given", "event", "at", "cause"),
    [
        (TO_CONNECTING, PullFailed(EXPIRED), 0.0, EXPIRED),
        (TO_READING, WaveSettled(0, FAILED), 0.0, FAILED),
        (TO_READING, WaveLost(0, LOST), 0.0, LOST),
        (TO_FINISHING, FinishFailed(FAILED), 0.0, FAILED),
        (TO_FAILING, WaveLost(0, LOST), 0.0, FAILED),
        (TO_FAILING, PullFailed(EXPIRED), 0.0, FAILED),
        (TO_FAILING, CancelRequested(), 0.0, FAILED),
        (TO_CANCELLING, WaveSettled(0, FAILED), 0.0, None),
        (TO_CANCELLING, PullFailed(EXPIRED), 0.0, None),
        (TO_FINISHING, FinishEnded(), 0.0, None),
    ],
)
def test_the_first_cause_is_the_cause(
    given: tuple[Event, ...], event: Event, at: float, cause: Exception | None
) -> None:
    """What went wrong first is kept; a cancelled or good pull has no cause."""
    machine = pull(*given)
    machine.step(event, at)
    assert machine.cause is cause


@pytest.mark.parametrize("given", [TO_CONNECTING, TO_PLANNED, TO_QUEUED, TO_READING])
def test_a_deadline_is_a_typed_cause(given: tuple[Event, ...]) -> None:
    """A pull that ran out of time says so, and in which state."""
    machine = pull(*given)
    state = machine.state
    machine.step(PullTicked(), DEADLINE_AT)
    assert isinstance(machine.cause, DeadlineExceeded)
    assert state.value in machine.cause.detail


def test_a_failure_that_came_first_stays_the_outcome() -> None:
    """A pull that fails, and is cancelled while it drains, has failed."""
    machine = pull(*TO_FAILING, CancelRequested(), WaveSettled(0))
    assert machine.state is S.FAILED


@pytest.mark.parametrize(
    ("given", "event"),
    [
        (TO_PLANNED, SourceReady(0)),
        (TO_WAITING, SourceReady(9)),
        ((*TO_WAITING, SourceReady(0)), SourceReady(0)),
        ((*TO_WAITING, BlocksReady()), BlocksReady()),
        ((*TO_READING, WaveSettled(0)), WaveSettled(0)),
        (TO_READING, WaveSettled(7, FAILED)),
        (TO_READING, WaveSettled(-1)),
        (TO_READING, WaveLost(7, LOST)),
        (TO_READING, ConfirmArrived(0)),
        (TO_READING, ConfirmArrived(9)),
        (TO_CONFIRMING, ConfirmArrived(-1)),
        ((*TO_CONFIRMING, ConfirmArrived(0)), ConfirmArrived(0)),
        (TO_CANCELLING, WaveSettled(7)),
        (TO_CANCELLING, WaveLost(7, LOST)),
        ((*TO_CANCELLING, WaveLost(0, LOST)), WaveLost(0, LOST)),
        (TO_QUARANTINED, WaveSettled(7)),
    ],
)
def test_unknown_late_and_doubled_events_are_counted_and_change_nothing(
    given: tuple[Event, ...], event: Event
) -> None:
    """Invariant 5: an event about no known wave or source has no effect but a count."""
    machine = pull(*given)
    before, ignored = facts(machine), machine.ignored
    assert machine.step(event, 0.0) == []
    assert facts(machine) == before
    assert machine.ignored == ignored + 1


@pytest.mark.parametrize(
    "plan",
    [
        Planned(wave_sources=(), sources=0),
        Planned(wave_sources=(0, 2), sources=2),
        Planned(wave_sources=(-1,), sources=1),
        Planned(wave_sources=(0,), sources=1, unready=(1,)),
    ],
)
def test_a_plan_that_contradicts_itself_poisons(plan: Planned) -> None:
    """A pull without a source, or a wave of no source, is never begun."""
    machine = pull(PullStarted())
    with pytest.raises(FerryInternalError):
        machine.step(plan, 0.0)
    with pytest.raises(FerryInternalError, match="poisoned"):
        machine.step(PullTicked(), DEADLINE_AT)


# Deadlines (case o5).

WITHOUT_DEADLINE = {S.NEW}
"""Nothing has been asked of anyone yet."""


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_o5_every_state_that_waits_for_others_has_a_deadline(state: PullState) -> None:
    """A state has a deadline exactly if it is not over and waits for others."""
    machine = pull(*PATHS[state])
    assert (machine.deadline is None) == (state in OVER | WITHOUT_DEADLINE)


@pytest.mark.parametrize("state", [s for s in S if s not in OVER | WITHOUT_DEADLINE])
def test_o5_time_alone_ends_every_state_without_new_work(state: PullState) -> None:
    """Nothing comes in but ticks: the pull ends, and posts nothing on the way."""
    machine = pull(*PATHS[state])
    now, effects = 0.0, []
    while (deadline := machine.deadline) is not None:
        assert deadline > now, "a deadline that has passed must have been dealt with"
        now = deadline
        effects += machine.step(PullTicked(), now)
    assert machine.state in {S.FAILED, S.QUARANTINED}
    expected = bool(machine.unsettled) or state is S.FINISHING
    assert (machine.state is S.QUARANTINED) == expected
    assert not any(isinstance(e, PostWave | RunFinish | Connect) for e in effects)
    assert now <= DEADLINE_AT + GRACE_S


def test_o5_renewals_stop_with_the_pull() -> None:
    """A pull that drains or is over holds no producer's blocks any more."""
    machine = pull(*TO_CANCELLING)
    assert machine.step(PullTicked(), GRACE_S - 1) == []
    assert machine.deadline == GRACE_S


def test_n1_renewals_come_one_interval_after_the_last() -> None:
    """A late tick does not make the next renewal early, and none is made up for."""
    machine = pull(*TO_PLANNED)
    assert machine.deadline == RENEW_EVERY_S
    assert machine.step(PullTicked(), 37.0) == [RenewLease((0, 1))]
    assert machine.deadline == 47.0
    assert machine.step(PullTicked(), 46.9) == []
    assert machine.step(PullTicked(), 47.0) == [RenewLease((0, 1))]


def test_the_deadline_comes_before_a_renewal_that_is_due_as_well() -> None:
    """A pull stopped for long fails rather than renew."""
    machine = pull(*TO_READING)
    assert machine.step(PullTicked(), math.inf) == [DeclineOffer()]
    assert machine.state is S.DRAINING


# Cases.


@pytest.mark.parametrize("k", range(6))
def test_o3_part_k_of_n_fails(k: int) -> None:
    """Whichever wave fails, the pull fails, once, after the others have settled."""
    waves = 6
    machine = pull(
        PullStarted(),
        Planned(wave_sources=tuple(w % 2 for w in range(waves)), sources=2),
        BlocksReady(),
        RoomTaken(),
        window=waves,
    )
    for wave in range(waves):
        machine.step(WaveSettled(wave, FAILED if wave == k else None), 0.0)
        assert (machine.state in OVER) == (wave == waves - 1)
    assert machine.state is S.FAILED
    assert machine.cause is FAILED


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_l2_blocks_are_held_until_the_last_wave_is_terminal(
    order: tuple[int, ...],
) -> None:
    """Four waves, the first to come fails: held until the last, failed once."""
    machine = pull(
        PullStarted(),
        Planned(wave_sources=(0,) * 4, sources=1),
        BlocksReady(),
        RoomTaken(),
        window=4,
    )
    effects = machine.step(WaveSettled(order[0], FAILED), 0.0)
    for wave in order[1:]:
        assert machine.state is S.DRAINING
        assert wave in machine.unsettled
        effects += machine.step(WaveSettled(wave), 0.0)
    assert machine.state is S.FAILED
    assert effects == [DeclineOffer()]


@pytest.mark.parametrize("twice", range(3))
def test_o6_a_completion_delivered_three_times_stands_for_no_other(twice: int) -> None:
    """One wave's completion comes three times and another's never: not done."""
    machine = pull(*TO_READING, window=3)
    for wave in (twice, twice, twice, (twice + 1) % 3):
        machine.step(WaveSettled(wave), 0.0)
    for source in (0, 1, 0, 1):
        machine.step(ConfirmArrived(source), 0.0)
    assert machine.state is S.READING
    assert machine.unsettled == {(twice + 2) % 3}


@pytest.mark.parametrize("order", list(itertools.permutations(range(6)))[::29])
def test_o7_five_of_six_parts_are_not_done_and_the_sixth_makes_it_done_once(
    order: tuple[int, ...],
) -> None:
    """Three fields from two sources, in any order: the last one alone completes."""
    machine = pull(
        PullStarted(),
        Planned(wave_sources=(0, 0, 0, 1, 1, 1), sources=2),
        BlocksReady(),
        RoomTaken(),
        window=6,
    )
    effects = []
    for wave in order[:-1]:
        effects += machine.step(WaveSettled(wave), 0.0)
        effects += machine.step(ConfirmArrived(0), 0.0)
        effects += machine.step(ConfirmArrived(1), 0.0)
    assert machine.state is S.READING
    effects += machine.step(WaveSettled(order[-1]), 0.0)
    for source in (0, 1, 0, 1):
        effects += machine.step(ConfirmArrived(source), 0.0)
    assert machine.state is S.FINISHING
    machine.step(FinishEnded(), 0.0)
    assert machine.state is S.DONE
    assert sorted(map(repr, effects)) == sorted(
        map(repr, [SendReadFinished(0), SendReadFinished(1), RunFinish()])
    )


@pytest.mark.parametrize("length", range(len(PATHS[S.DONE])))
def test_fail_closed_no_prefix_of_a_good_run_is_done(length: int) -> None:
    """A run that stops anywhere ends by time, and never as done."""
    machine = pull(*PATHS[S.DONE][:length])
    assert machine.state is not S.DONE
    for _ in range(2 * length + 2):
        if machine.deadline is not None:
            machine.step(PullTicked(), machine.deadline)
    assert machine.state is not S.DONE


@pytest.mark.parametrize("missing", range(len(PATHS[S.DONE])))
def test_fail_closed_no_step_of_a_good_run_can_be_left_out(missing: int) -> None:
    """A good run less any one of its events is not done."""
    machine = pull()
    for i, event in enumerate(PATHS[S.DONE]):
        if i != missing and KIND[machine.state, type(event)] != "BUG":
            machine.step(event, 0.0)
    assert machine.state is not S.DONE


# The ledger: what the outside world knows of a pull, kept apart from the machine.


class Ledger:
    """What was posted, asked and answered, as the owner of a machine sees it."""

    def __init__(self, plan: Planned, window: int) -> None:
        self.plan = plan
        self.window = window
        self.in_flight: set[int] = set()
        self.arrived: set[int] = set()
        self.asked: set[int] = set()
        self.confirmed: set[int] = set()
        self.finished = False
        self.is_finishing = False
        self.has_work = True
        self.is_ending = False
        self.waits_for = {"caller", *set(plan.unready).intersection(plan.wave_sources)}
        self.is_planned = False
        self.has_room = False
        self.declined: set[int] = set()

    @property
    def key(self) -> tuple[object, ...]:
        return (
            frozenset(self.in_flight),
            frozenset(self.arrived),
            frozenset(self.asked),
            frozenset(self.confirmed),
            self.finished,
            self.is_finishing,
            self.has_work,
            self.is_ending,
            frozenset(self.waits_for),
        )

    def see_event(self, event: Event) -> None:
        match event:
            case PullStarted(has_work=has_work):
                self.has_work = has_work
            case BlocksReady():
                self.waits_for.discard("caller")
            case Planned():
                self.is_planned = True
            case SourceReady(source=source) if self.is_planned:
                self.waits_for.discard(source)
            case RoomTaken():
                self.has_room = True
            case WaveSettled(wave=wave, cause=cause) if wave in self.in_flight:
                self.in_flight.discard(wave)
                if cause is None:
                    self.arrived.add(wave)
            case ConfirmArrived(source=source) if source in self.asked:
                self.confirmed.add(source)
            case FinishEnded() if self.is_finishing:
                self.finished = True
                self.is_finishing = False
            case FinishFailed():
                self.is_finishing = False

    def see_effect(self, effect: Effect) -> None:
        match effect:
            case PostWave(wave=wave):
                assert not self.is_ending, "posted after it had begun to end"
                assert not self.waits_for, "posted before the blocks were ready"
                assert self.has_room, "posted without room to land in"
                assert wave not in self.in_flight | self.arrived, "posted twice"
                self.in_flight.add(wave)
                assert len(self.in_flight) <= self.window, "over the window"
            case SendReadFinished(source=source):
                assert source not in self.asked, "asked twice"
                self.asked.add(source)
                assert self.waves_of(source) <= self.arrived, "asked too early"
            case RenewLease(sources=sources):
                assert sources
                assert not set(sources) & self.asked, "renewed with one that was asked"
                assert not set(sources) & self.declined, "renewed with one let go"
            case DeclineSource(source=source):
                assert not self.waves_of(source), "let one go that is read from"
                assert source not in self.declined, "let go twice"
                self.declined.add(source)
            case TakeRoom():
                assert not self.waits_for, "room was taken before it was needed"
            case RunFinish():
                assert "caller" not in self.waits_for, (
                    "zeroed before the caller's event"
                )
                assert not self.is_finishing, "finished twice"
                self.is_finishing = True
            case QuarantineBlocks(waves=waves):
                assert set(waves) == self.in_flight
            case ReclaimBlocks():
                assert not self.in_flight
                assert not self.is_finishing

    def waves_of(self, source: int) -> set[int]:
        return {w for w, s in enumerate(self.plan.wave_sources) if s == source}

    def check(self, machine: PullMachine) -> None:
        if machine.state in {S.DRAINING, S.FAILED, S.CANCELLED, S.QUARANTINED}:
            self.is_ending = True
        assert machine.unsettled == self.in_flight
        if machine.state in OVER - {S.QUARANTINED}:
            assert not self.in_flight, "blocks given back under a wave"
            assert not self.is_finishing, "blocks given back under the finish stage"
        if machine.state is S.QUARANTINED:
            held = self.in_flight or self.is_finishing
            assert held, "blocks kept back for nothing"
        if machine.state is S.DONE:
            assert self.finished
        if machine.state in {S.FINISHING, S.DONE} and self.has_work:
            assert self.arrived == set(range(len(self.plan.wave_sources)))
            assert self.confirmed >= set(self.plan.wave_sources)
        waits_for_nobody = machine.state in OVER | WITHOUT_DEADLINE
        assert (machine.deadline is None) == waits_for_nobody


def drive(machine: PullMachine, ledger: Ledger, event: Event, now: float) -> None:
    before = machine.state
    ledger.see_event(event)
    for effect in machine.step(event, now):
        ledger.see_effect(effect)
    ledger.check(machine)
    if before in OVER:
        assert machine.state in {before, S.RECLAIMED}, "a second outcome"


def alphabet(plan: Planned) -> Iterator[tuple[Event, float]]:
    """Every event there can be, with every index there can be."""
    yield from ((PullStarted(has_work=has_work), 0.0) for has_work in (True, False))
    yield from (
        (event, 0.0)
        for event in (
            plan,
            BlocksReady(),
            RoomTaken(),
            FinishEnded(),
            FinishFailed(FAILED),
            PullFailed(EXPIRED),
            CancelRequested(),
        )
    )
    for wave in range(len(plan.wave_sources)):
        yield WaveSettled(wave), 0.0
        yield WaveSettled(wave, FAILED), 0.0
        yield WaveLost(wave, LOST), 0.0
    for source in range(plan.sources):
        yield SourceReady(source), 0.0
        yield ConfirmArrived(source), 0.0
        yield SourceFailed(source, LOST), 0.0
    yield from ((PullTicked(), at) for at in (0.0, RENEW_EVERY_S, DEADLINE_AT))


@pytest.mark.parametrize(
    ("wave_sources", "sources", "unready", "window"),
    [
        ((), 1, (), 1),
        ((0, 1), 2, (1,), 1),
        ((0, 0, 1), 2, (), 2),
        ((1, 0, 1), 2, (0, 1), 3),
    ],
)
def test_fail_closed_in_every_state_that_any_sequence_of_events_can_reach(
    wave_sources: tuple[int, ...], sources: int, unready: tuple[int, ...], window: int
) -> None:
    """An exhaustive walk: whatever comes in whatever order, the ledger agrees."""
    plan = Planned(wave_sources=wave_sources, sources=sources, unready=unready)
    events = list(alphabet(plan))
    start = pull(window=window), Ledger(plan, window)
    frontier, seen, reached = [start], set(), set()
    while frontier:
        machine, ledger = frontier.pop()
        reached.add(machine.state)
        for event, now in events:
            if KIND[machine.state, type(event)] == "BUG":
                continue
            twin, book = clone(machine), clone(ledger)
            drive(twin, book, event, now)
            # Every clock reads 0 but for a tick: what a state does depends on the
            # rest alone.
            twin._renew_at = min(twin._renew_at, RENEW_EVERY_S)
            twin._grace_at = min(twin._grace_at, GRACE_S)
            key = (
                twin.state,
                frozenset(twin._lost),
                twin.cause is None,
                twin._is_cancelled,
                twin.posted,
                book.key,
            )
            if key not in seen:
                seen.add(key)
                frontier.append((twin, book))
    assert reached == set(S) if wave_sources else S.DONE in reached


class PullModel(RuleBasedStateMachine):
    """Long random runs of larger pulls, against the ledger."""

    @initialize(
        wave_sources=st.lists(st.integers(0, 3), max_size=12).map(tuple),
        unready=st.sets(st.integers(0, 3)).map(sorted).map(tuple),
        window=st.integers(1, 5),
    )
    def open(
        self, wave_sources: tuple[int, ...], unready: tuple[int, ...], window: int
    ) -> None:
        self.plan = Planned(wave_sources=wave_sources, sources=4, unready=unready)
        self.machine = pull(window=window)
        self.ledger = Ledger(self.plan, window)
        self.now = 0.0
        # Most runs that begin with a random event end there.
        self.let_in(PullStarted())
        self.let_in(self.plan)

    def let_in(self, event: Event) -> None:
        if KIND[self.machine.state, type(event)] != "BUG":
            drive(self.machine, self.ledger, event, self.now)

    @rule()
    def blocks_are_ready(self) -> None:
        self.let_in(BlocksReady())

    @rule(source=st.integers(-1, 5))
    def any_source_is_ready(self, source: int) -> None:
        self.let_in(SourceReady(source))

    @rule()
    def there_is_room(self) -> None:
        self.let_in(RoomTaken())

    @rule(wave=st.integers(0, 12))
    def any_wave_settles(self, wave: int) -> None:
        self.let_in(WaveSettled(wave))

    @rule(pick=st.integers(0, 11))
    def a_posted_wave_settles(self, pick: int) -> None:
        if waves := sorted(self.ledger.in_flight):
            self.let_in(WaveSettled(waves[pick % len(waves)]))

    @rule(wave=st.integers(0, 12), is_lost=st.booleans(), is_likely=st.integers(0, 4))
    def a_wave_goes_wrong(self, *, wave: int, is_lost: bool, is_likely: int) -> None:
        if not is_likely:
            self.let_in(WaveLost(wave, LOST) if is_lost else WaveSettled(wave, FAILED))

    @rule()
    def all_that_were_asked_confirm(self) -> None:
        for source in sorted(self.ledger.asked):
            self.let_in(ConfirmArrived(source))

    @rule(source=st.integers(-1, 5))
    def any_source_confirms(self, source: int) -> None:
        self.let_in(ConfirmArrived(source))

    @rule(source=st.integers(-1, 5), is_likely=st.integers(0, 4))
    def any_source_goes(self, source: int, is_likely: int) -> None:
        if not is_likely:
            self.let_in(SourceFailed(source, LOST))

    @rule(is_good=st.booleans())
    def the_finish_stage_answers(self, *, is_good: bool) -> None:
        self.let_in(FinishEnded() if is_good else FinishFailed(FAILED))

    @rule(is_cancel=st.booleans(), is_likely=st.integers(0, 4))
    def the_world_changes(self, *, is_cancel: bool, is_likely: int) -> None:
        if not is_likely:
            self.let_in(CancelRequested() if is_cancel else PullFailed(EXPIRED))

    @rule(passed=st.sampled_from([0.0, 1.0, 4.0, 9.0, 40.0]))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.let_in(PullTicked())

    @invariant()
    def a_good_run_from_here_is_done_exactly_if_nothing_went_wrong(self) -> None:
        if not hasattr(self, "machine") or self.machine.deadline is None:
            return
        machine, ledger = clone(self.machine), clone(self.ledger)
        was_ending = ledger.is_ending
        if machine.state is S.PLANNED:
            for source in self.plan.unready:
                drive(machine, ledger, SourceReady(source), 0.0)
        if machine.state is S.PLANNED:
            drive(machine, ledger, BlocksReady(), 0.0)
        if machine.state is S.QUEUED:
            drive(machine, ledger, RoomTaken(), 0.0)
        while ledger.in_flight:
            drive(machine, ledger, WaveSettled(min(ledger.in_flight)), 0.0)
        for source in range(4):
            if machine.state not in OVER:
                drive(machine, ledger, ConfirmArrived(source), 0.0)
        if machine.state is S.FINISHING:
            drive(machine, ledger, FinishEnded(), 0.0)
        assert machine.state in OVER
        assert (machine.state is S.DONE) == (not was_ending)

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            while (deadline := self.machine.deadline) is not None:
                self.now = max(self.now, deadline)
                self.let_in(PullTicked())
            assert self.machine.state in OVER | WITHOUT_DEADLINE


TestPullModel = PullModel.TestCase
TestPullModel.settings = settings(max_examples=25, stateful_step_count=40)
