"""The landing machine: its table, row by row, and its invariants against a ledger."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.protocol.errors import (
    DeadlineExceeded,
    FerryInternalError,
    PeerLost,
    ProtocolViolation,
    PushAborted,
    TransferFailed,
)
from kvferry.protocol.lifecycle.landing import (
    EVENTS,
    OVER,
    AwaitBlocks,
    BlocksReady,
    CancelRequested,
    Claimed,
    Connect,
    DeclinePush,
    FinishEnded,
    FinishFailed,
    LandingFailed,
    LandingMachine,
    LandingStarted,
    LandingState,
    LandingTicked,
    PartArrived,
    QuarantineBlocks,
    ReclaimBlocks,
    RunFinish,
    SendExtend,
    SendLanded,
    SendRegister,
    SendRevoke,
    SourceFailed,
    SourceFinished,
    SourceLost,
    SourceRevoked,
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

S = LandingState
DEADLINE_AT = 100.0
EXTEND_EVERY_S = 10.0
GRACE_S = 15.0
MAX_PARTS = 3

FAILED = TransferFailed("a wave failed")
LOST = PeerLost("nobody answers")
CLOSED = TransferFailed("the engine closes")

TABLE = """
            started claimed ready part finished failing lost revoked ended unended failed cancel tick
new         move    BUG     BUG   BUG  BUG      BUG     BUG  BUG     BUG   BUG     BUG    move   BUG
connecting  BUG     move    BUG   late late     late    late late    BUG   BUG     move   move   move
planned     BUG     BUG     move  late late     move    move late    BUG   BUG     move   move   move
registered  BUG     BUG     BUG   move move     move    move move    BUG   BUG     move   move   move
finishing   BUG     BUG     BUG   late late     late    late late    move  move    late   late   move
revoking    BUG     late    late  move move     move    move move    BUG   BUG     late   move   move
done        BUG     late    late  late late     late    late late    late  late    late   late   late
failed      BUG     late    late  late late     late    late late    late  late    late   late   late
cancelled   BUG     late    late  late late     late    late late    late  late    late   late   late
quarantined BUG     late    late  late late     late    late move    move  move    late   late   late
reclaimed   BUG     late    late  late late     late    late late    late  late    late   late   late
"""
SAMPLES: dict[str, Event] = {
    "started": LandingStarted(),
    "claimed": Claimed(2),
    "ready": BlocksReady(),
    "part": PartArrived(0, 0),
    "finished": SourceFinished(0, 2),
    "failing": SourceFailed(0, FAILED),
    "lost": SourceLost(0, LOST),
    "revoked": SourceRevoked(0),
    "ended": FinishEnded(),
    "unended": FinishFailed(FAILED),
    "failed": LandingFailed(CLOSED),
    "cancel": CancelRequested(),
    "tick": LandingTicked(),
}
ROWS = read(TABLE, S, SAMPLES)
KIND = {(state, type(SAMPLES[name])): kind for state, name, kind in ROWS}

TO_CONNECTING = (LandingStarted(),)
TO_PLANNED = (*TO_CONNECTING, Claimed(2))
TO_REGISTERED = (*TO_PLANNED, BlocksReady())
# Source 0 writes parts 0 and 1, source 1 part 0.
ZERO_WRITTEN = (
    *TO_REGISTERED,
    PartArrived(0, 1),
    SourceFinished(0, 2),
    PartArrived(0, 0),
)
TO_FINISHING = (*ZERO_WRITTEN, SourceFinished(1, 1), PartArrived(1, 0))
TO_CANCELLING = (*TO_REGISTERED, CancelRequested())
TO_FAILING = (*TO_REGISTERED, SourceFailed(0, FAILED))
ONE_LEFT = (*TO_FAILING, SourceRevoked(0))  # source 1 has not answered
TO_QUARANTINED = (*ONE_LEFT, SourceLost(1, LOST))
TO_HUNG = (*TO_FINISHING, LandingTicked())  # the tick comes at the end of the grace
PATHS: dict[LandingState, tuple[Event, ...]] = {
    S.NEW: (),
    S.CONNECTING: TO_CONNECTING,
    S.PLANNED: TO_PLANNED,
    S.REGISTERED: TO_REGISTERED,
    S.FINISHING: TO_FINISHING,
    S.REVOKING: TO_CANCELLING,
    S.DONE: (*TO_FINISHING, FinishEnded()),
    S.FAILED: (*TO_CONNECTING, LandingFailed(CLOSED)),
    S.CANCELLED: (CancelRequested(),),
    S.QUARANTINED: TO_QUARANTINED,
    S.RECLAIMED: (*TO_QUARANTINED, SourceRevoked(1)),
}


def landing(*events: Event) -> LandingMachine:
    """A machine after these events, all at time 0."""
    machine = LandingMachine(
        deadline_at=DEADLINE_AT,
        extend_every_s=EXTEND_EVERY_S,
        grace_s=GRACE_S,
        max_parts=MAX_PARTS,
    )
    for event in events:
        is_hung = machine.state is S.FINISHING and isinstance(event, LandingTicked)
        machine.step(event, GRACE_S if is_hung else 0.0)
    return machine


# The table.


def test_the_table_is_total_and_every_pair_is_what_it_is_meant_to_be() -> None:
    """Each (state, event) is a move, ignored or a misuse, as written down above."""
    assert set(KIND) == set(itertools.product(S, EVENTS))
    assert kinds(LandingMachine) == KIND


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_the_path_to_each_state_leads_there(state: LandingState) -> None:
    """Every state can be reached by a run, so that the tests below mean something."""
    assert landing(*PATHS[state]).state is state


@pytest.mark.parametrize(
    ("state", "name", "kind"), ROWS, ids=lambda x: getattr(x, "value", x)
)
def test_every_pair_behaves_as_the_table_says(
    state: LandingState, name: str, kind: str
) -> None:
    """A move goes to a declared target, the late change nothing, a bug poisons."""
    machine = landing(*PATHS[state])
    event, before, ignored = SAMPLES[name], facts(machine), machine.ignored
    if kind == "BUG":
        with pytest.raises(FerryInternalError, match=f"misuse in {state.value}"):
            machine.step(event, 0.0)
        with pytest.raises(FerryInternalError, match="poisoned"):
            machine.step(LandingTicked(), 0.0)
    elif kind == "late":
        assert machine.step(event, 0.0) == []
        assert facts(machine) == before
        assert machine.ignored == ignored + 1
    else:
        machine.step(event, 0.0)
        assert (state, type(event), machine.state) in arrows(LandingMachine)


BOTH = (0, 1)
REVOKE = SendRevoke(BOTH)
EXAMPLES = [
    Example("a start connects", (), LandingStarted(), S.CONNECTING, [Connect()]),
    Example(
        "a cancel before the start declines",
        (),
        CancelRequested(),
        S.CANCELLED,
        [DeclinePush()],
    ),
    Example(
        "connected, it waits for the caller's event",
        TO_CONNECTING,
        Claimed(2),
        S.PLANNED,
        [AwaitBlocks()],
    ),
    Example(
        "a connection that fails",
        TO_CONNECTING,
        LandingFailed(LOST),
        S.FAILED,
        [DeclinePush()],
    ),
    Example(
        "a cancel while connecting",
        TO_CONNECTING,
        CancelRequested(),
        S.CANCELLED,
        [DeclinePush()],
    ),
    Example(
        "an early tick while connecting",
        TO_CONNECTING,
        LandingTicked(),
        S.CONNECTING,
        [],
    ),
    Example(
        "the deadline while connecting",
        TO_CONNECTING,
        LandingTicked(),
        S.FAILED,
        [DeclinePush()],
        DEADLINE_AT,
    ),
    Example(
        "l8: the caller's event registers the blocks",
        TO_PLANNED,
        BlocksReady(),
        S.REGISTERED,
        [SendRegister()],
    ),
    Example(
        "a source gives up before it knows the blocks",
        TO_PLANNED,
        SourceFailed(0, FAILED),
        S.FAILED,
        [DeclinePush()],
    ),
    Example(
        "a source is lost before it knows the blocks",
        TO_PLANNED,
        SourceLost(0, LOST),
        S.FAILED,
        [DeclinePush()],
    ),
    Example(
        "no such source gives up", TO_PLANNED, SourceFailed(2, FAILED), S.PLANNED, []
    ),
    Example("no such source is lost", TO_PLANNED, SourceLost(-1, LOST), S.PLANNED, []),
    Example(
        "the engine closes before registering",
        TO_PLANNED,
        LandingFailed(CLOSED),
        S.FAILED,
        [DeclinePush()],
    ),
    Example(
        "a cancel before registering",
        TO_PLANNED,
        CancelRequested(),
        S.CANCELLED,
        [DeclinePush()],
    ),
    Example(
        "an early tick while planned",
        TO_PLANNED,
        LandingTicked(),
        S.PLANNED,
        [],
        EXTEND_EVERY_S,
    ),
    Example(
        "the deadline while planned",
        TO_PLANNED,
        LandingTicked(),
        S.FAILED,
        [DeclinePush()],
        DEADLINE_AT,
    ),
    Example("a part arrives", TO_REGISTERED, PartArrived(0, 0), S.REGISTERED, []),
    Example(
        "the last part of the last source arrives",
        TO_FINISHING[:-1],
        PartArrived(1, 0),
        S.FINISHING,
        [RunFinish()],
    ),
    Example(
        "a source has written all, and another has not",
        TO_REGISTERED,
        SourceFinished(0, 0),
        S.REGISTERED,
        [],
    ),
    Example(
        "the last source says so behind its parts",
        (*ZERO_WRITTEN, PartArrived(1, 0)),
        SourceFinished(1, 1),
        S.FINISHING,
        [RunFinish()],
    ),
    Example(
        "a source with more parts than can be counted",
        TO_REGISTERED,
        SourceFinished(0, MAX_PARTS + 1),
        S.REVOKING,
        [REVOKE],
    ),
    Example(
        "n4: a source gives up",
        TO_REGISTERED,
        SourceFailed(0, FAILED),
        S.REVOKING,
        [REVOKE],
    ),
    Example(
        "a source that has written all gives up with the others",
        ZERO_WRITTEN,
        SourceFailed(0, FAILED),
        S.REVOKING,
        [REVOKE],
    ),
    Example(
        "no such source gives up while registered",
        TO_REGISTERED,
        SourceFailed(2, FAILED),
        S.REGISTERED,
        [],
    ),
    Example(
        "a source that has written all is lost",
        ZERO_WRITTEN,
        SourceLost(0, LOST),
        S.REGISTERED,
        [],
    ),
    Example(
        "a source is lost, and another can answer",
        TO_REGISTERED,
        SourceLost(0, LOST),
        S.REVOKING,
        [REVOKE],
    ),
    Example(
        "l4: the last that could write is lost",
        ZERO_WRITTEN,
        SourceLost(1, LOST),
        S.QUARANTINED,
        [REVOKE, QuarantineBlocks((1,))],
    ),
    Example(
        "a source revokes unasked",
        TO_REGISTERED,
        SourceRevoked(0),
        S.REVOKING,
        [REVOKE],
    ),
    Example(
        "the last that could write revokes unasked",
        ZERO_WRITTEN,
        SourceRevoked(1),
        S.FAILED,
        [REVOKE],
    ),
    Example(
        "no such source revokes", TO_REGISTERED, SourceRevoked(2), S.REGISTERED, []
    ),
    Example(
        "the engine closes",
        TO_REGISTERED,
        LandingFailed(CLOSED),
        S.REVOKING,
        [REVOKE],
    ),
    Example(
        "a cancel asks for the blocks",
        TO_REGISTERED,
        CancelRequested(),
        S.REVOKING,
        [REVOKE],
    ),
    Example(
        "it extends, also with those that have written all",
        ZERO_WRITTEN,
        LandingTicked(),
        S.REGISTERED,
        [SendExtend(BOTH)],
        EXTEND_EVERY_S,
    ),
    Example(
        "the deadline asks for the blocks",
        TO_REGISTERED,
        LandingTicked(),
        S.REVOKING,
        [REVOKE],
        DEADLINE_AT,
    ),
    Example(
        "the finish stage is through",
        TO_FINISHING,
        FinishEnded(),
        S.DONE,
        [SendLanded()],
    ),
    Example(
        "the finish stage failed",
        TO_FINISHING,
        FinishFailed(FAILED),
        S.FAILED,
        [REVOKE],
    ),
    Example(
        "it extends while the finish stage runs: the sources wait for its word",
        TO_FINISHING,
        LandingTicked(),
        S.FINISHING,
        [SendExtend(BOTH)],
        EXTEND_EVERY_S,
    ),
    Example(
        "a finish stage that hangs leaves its blocks in quarantine",
        TO_FINISHING,
        LandingTicked(),
        S.QUARANTINED,
        [REVOKE, QuarantineBlocks(())],
        GRACE_S,
    ),
    Example(
        "a part arrives while revoking",
        TO_CANCELLING,
        PartArrived(0, 0),
        S.REVOKING,
        [],
    ),
    Example(
        "the last part of a failing landing arrives",
        (*ONE_LEFT, SourceFinished(1, 1)),
        PartArrived(1, 0),
        S.FAILED,
        [],
    ),
    Example(
        "the last part of a cancelled landing arrives",
        (*TO_CANCELLING, SourceRevoked(0), SourceFinished(1, 1)),
        PartArrived(1, 0),
        S.CANCELLED,
        [],
    ),
    Example(
        "the last part of all but the lost arrives",
        (*TO_CANCELLING, SourceLost(0, LOST), SourceFinished(1, 1)),
        PartArrived(1, 0),
        S.QUARANTINED,
        [QuarantineBlocks((0,))],
    ),
    Example(
        "a source finishes while revoking, and another has not answered",
        TO_CANCELLING,
        SourceFinished(0, 0),
        S.REVOKING,
        [],
    ),
    Example(
        "the last of a failing landing finishes instead of revoking",
        (*ONE_LEFT, PartArrived(1, 0)),
        SourceFinished(1, 1),
        S.FAILED,
        [],
    ),
    Example(
        "the last of a cancelled landing finishes instead of revoking",
        (*TO_CANCELLING, SourceRevoked(0)),
        SourceFinished(1, 0),
        S.CANCELLED,
        [],
    ),
    Example(
        "all but the lost finish instead of revoking",
        (*TO_CANCELLING, SourceLost(0, LOST)),
        SourceFinished(1, 0),
        S.QUARANTINED,
        [QuarantineBlocks((0,))],
    ),
    Example(
        "a source gives up while revoking",
        TO_CANCELLING,
        SourceFailed(0, FAILED),
        S.REVOKING,
        [],
    ),
    Example(
        "one of two is lost while revoking",
        TO_CANCELLING,
        SourceLost(0, LOST),
        S.REVOKING,
        [],
    ),
    Example(
        "the last that has not answered is lost",
        ONE_LEFT,
        SourceLost(1, LOST),
        S.QUARANTINED,
        [QuarantineBlocks((1,))],
    ),
    Example("one of two answers", TO_CANCELLING, SourceRevoked(0), S.REVOKING, []),
    Example("the last of two answers", ONE_LEFT, SourceRevoked(1), S.FAILED, []),
    Example(
        "the last of a cancelled landing answers",
        (*TO_CANCELLING, SourceRevoked(1)),
        SourceRevoked(0),
        S.CANCELLED,
        [],
    ),
    Example(
        "the last but the lost one answers",
        (*TO_CANCELLING, SourceLost(0, LOST)),
        SourceRevoked(1),
        S.QUARANTINED,
        [QuarantineBlocks((0,))],
    ),
    Example(
        "a cancel of a failing landing", TO_FAILING, CancelRequested(), S.REVOKING, []
    ),
    Example(
        "an early tick while revoking", TO_FAILING, LandingTicked(), S.REVOKING, [], 9.0
    ),
    Example(
        "l4: who does not answer in the grace leaves the blocks in quarantine",
        ONE_LEFT,
        LandingTicked(),
        S.QUARANTINED,
        [QuarantineBlocks((1,))],
        GRACE_S,
    ),
    Example(
        "one of two quarantined sources answers",
        (*TO_CANCELLING, SourceLost(0, LOST), SourceLost(1, LOST)),
        SourceRevoked(1),
        S.QUARANTINED,
        [],
    ),
    Example(
        "a lost source answers after all",
        TO_QUARANTINED,
        SourceRevoked(1),
        S.RECLAIMED,
        [ReclaimBlocks()],
    ),
    Example(
        "a finish stage that never ran frees no source",
        TO_QUARANTINED,
        FinishEnded(),
        S.QUARANTINED,
        [],
    ),
    Example(
        "a finish stage that never ran, and failed, frees no source",
        TO_QUARANTINED,
        FinishFailed(FAILED),
        S.QUARANTINED,
        [],
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
        "a source's answer does not end a finish stage that hangs",
        TO_HUNG,
        SourceRevoked(0),
        S.QUARANTINED,
        [],
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.says)
def test_row(example: Example) -> None:
    """The row of the table does what the example says."""
    machine = landing(*example.given)
    assert machine.step(example.event, example.at) == example.effects
    assert machine.state is example.state


def test_every_arrow_of_the_table_has_an_example() -> None:
    """No row leads to a state that no example reaches, and none is without one."""
    shown = {(landing(*e.given).state, type(e.event), e.state) for e in EXAMPLES}
    assert arrows(LandingMachine) == shown


# Causes, counts, cases.


@pytest.mark.parametrize(
    ("given", "event", "at", "cause"),
    [
        (TO_CONNECTING, LandingFailed(CLOSED), 0.0, TransferFailed),
        (TO_PLANNED, LandingTicked(), DEADLINE_AT, DeadlineExceeded),
        (TO_REGISTERED, LandingTicked(), DEADLINE_AT, DeadlineExceeded),
        (TO_REGISTERED, SourceLost(0, LOST), 0.0, PeerLost),
        (TO_REGISTERED, SourceRevoked(0), 0.0, PushAborted),
        (TO_REGISTERED, SourceFinished(0, 4), 0.0, ProtocolViolation),
        (TO_FINISHING, FinishFailed(FAILED), 0.0, TransferFailed),
        (TO_FINISHING, LandingTicked(), GRACE_S, DeadlineExceeded),
        (TO_FAILING, SourceLost(0, LOST), 0.0, TransferFailed),
        (TO_FAILING, CancelRequested(), 0.0, TransferFailed),
        (TO_CANCELLING, SourceFailed(0, FAILED), 0.0, type(None)),
        (TO_CANCELLING, LandingFailed(CLOSED), 0.0, type(None)),
        (TO_FINISHING, FinishEnded(), 0.0, type(None)),
    ],
)
def test_the_first_cause_is_the_cause(
    given: tuple[Event, ...], event: Event, at: float, cause: type
) -> None:
    """What went wrong first is kept; a cancelled or good landing has no cause."""
    machine = landing(*given)
    machine.step(event, at)
    assert type(machine.cause) is cause


def test_a_failure_that_came_first_stays_the_outcome() -> None:
    """A landing that fails, and is cancelled while it revokes, has failed."""
    machine = landing(*ONE_LEFT, CancelRequested(), SourceRevoked(1))
    assert machine.state is S.FAILED


@pytest.mark.parametrize(
    ("given", "event"),
    [
        (ZERO_WRITTEN, PartArrived(0, 0)),
        (ZERO_WRITTEN, PartArrived(0, 2)),
        (TO_REGISTERED, PartArrived(0, MAX_PARTS)),
        (TO_REGISTERED, PartArrived(0, -1)),
        (ZERO_WRITTEN, SourceFinished(0, 2)),
        (ZERO_WRITTEN, SourceFinished(0, 0)),
        ((*ZERO_WRITTEN, SourceLost(0, LOST)), SourceLost(0, LOST)),
        (ONE_LEFT, SourceFinished(0, 1)),
        (ONE_LEFT, SourceFinished(1, MAX_PARTS + 1)),
        (ONE_LEFT, SourceRevoked(0)),
        (ONE_LEFT, SourceFailed(0, FAILED)),
        ((*TO_CANCELLING, SourceLost(0, LOST)), SourceLost(0, LOST)),
        (
            (
                *TO_CANCELLING,
                SourceLost(0, LOST),
                SourceLost(1, LOST),
                SourceRevoked(0),
            ),
            SourceRevoked(0),
        ),
        *(
            (given, event)
            for given in (TO_REGISTERED, TO_CANCELLING)
            for source in (-1, 2)
            for event in (
                PartArrived(source, 0),
                SourceFinished(source, 0),
                SourceFailed(source, FAILED),
                SourceLost(source, LOST),
                SourceRevoked(source),
            )
        ),
        (TO_QUARANTINED, SourceRevoked(2)),
    ],
)
def test_unknown_late_and_doubled_events_are_counted_and_change_nothing(
    given: tuple[Event, ...], event: Event
) -> None:
    """Invariant 5: an event about no known source or part has no effect but a count."""
    machine = landing(*given)
    before, ignored = facts(machine), machine.ignored
    assert machine.step(event, 0.0) == []
    assert facts(machine) == before
    assert machine.ignored == ignored + 1


def test_a_landing_without_sources_poisons() -> None:
    """There is nobody that could ever complete it."""
    with pytest.raises(FerryInternalError):
        landing(LandingStarted(), Claimed(0))


def test_parts_told_before_the_source_finished_count_and_made_up_ones_do_not() -> None:
    """Notices overtake the link: those below the number are there, others never were."""
    machine = landing(LandingStarted(), Claimed(1), BlocksReady())
    for part in (2, 0):
        machine.step(PartArrived(0, part), 0.0)
    assert machine.arrived == 2
    assert machine.step(SourceFinished(0, 2), 0.0) == []
    assert machine.arrived == 1
    assert machine.step(PartArrived(0, 1), 0.0) == [RunFinish()]


@pytest.mark.parametrize("order", list(itertools.permutations(range(8)))[::331])
def test_o7_all_but_one_are_not_done_and_the_last_makes_it_done_once(
    order: tuple[int, ...],
) -> None:
    """Two sources of three parts each, and their words, in any order, all twice."""
    events = [PartArrived(source, part) for source in (0, 1) for part in range(3)]
    events += [SourceFinished(source, 3) for source in (0, 1)]
    machine = landing(*TO_REGISTERED)
    for place in order[:-1]:
        assert machine.step(events[place], 0.0) == []
        assert machine.step(events[place], 0.0) == []
    assert machine.state is S.REGISTERED
    assert machine.step(events[order[-1]], 0.0) == [RunFinish()]
    assert machine.step(events[order[0]], 0.0) == []
    assert machine.step(FinishEnded(), 0.0) == [SendLanded()]


@pytest.mark.parametrize("missing", range(len(PATHS[S.DONE])))
def test_fail_closed_no_step_of_a_good_run_can_be_left_out(missing: int) -> None:
    """A good run less any one of its events is not done."""
    machine = landing()
    for i, event in enumerate(PATHS[S.DONE]):
        if i != missing and KIND[machine.state, type(event)] != "BUG":
            machine.step(event, 0.0)
    assert machine.state is not S.DONE


# Deadlines (case o5).

WITHOUT_DEADLINE = {S.NEW}
"""Nothing has been asked of anyone yet."""


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_o5_every_state_that_waits_for_others_has_a_deadline(
    state: LandingState,
) -> None:
    """A state has a deadline exactly if it is not over and waits for others."""
    machine = landing(*PATHS[state])
    assert (machine.deadline is None) == (state in OVER | WITHOUT_DEADLINE)


@pytest.mark.parametrize("state", [s for s in S if s not in OVER | WITHOUT_DEADLINE])
def test_o5_time_alone_ends_every_state_without_new_work(state: LandingState) -> None:
    """Nothing comes in but ticks: it ends, and registers nothing on the way."""
    machine = landing(*PATHS[state])
    now, effects = 0.0, []
    while (deadline := machine.deadline) is not None:
        assert deadline > now, "a deadline that has passed must have been dealt with"
        now = deadline
        effects += machine.step(LandingTicked(), now)
    is_risky = state in {S.REGISTERED, S.REVOKING, S.FINISHING}
    assert machine.state is (S.QUARANTINED if is_risky else S.FAILED) or (
        state is S.REVOKING and machine.state is S.QUARANTINED
    )
    assert not any(isinstance(e, SendRegister | RunFinish | Connect) for e in effects)
    assert now <= DEADLINE_AT + GRACE_S


def test_extensions_come_one_interval_after_the_last() -> None:
    """A late tick does not make the next one early, and none is made up for."""
    machine = landing(*TO_REGISTERED)
    assert machine.deadline == EXTEND_EVERY_S
    assert machine.step(LandingTicked(), 37.0) == [SendExtend(BOTH)]
    assert machine.deadline == 47.0
    assert machine.step(LandingTicked(), 46.9) == []


def test_a_finish_stage_that_takes_long_wakes_up_to_extend() -> None:
    """Else the sources' leases would run out before they hear that it has landed."""
    machine = landing(*TO_FINISHING)
    assert machine.deadline == EXTEND_EVERY_S
    assert machine.step(LandingTicked(), EXTEND_EVERY_S) == [SendExtend(BOTH)]
    assert machine.deadline == GRACE_S


# The ledger: what the outside world knows of a landing, kept apart from the machine.


class Ledger:
    """What was told to whom, and what each source has said and written."""

    def __init__(self, sources: int) -> None:
        self.is_told = False  # the sources know the blocks
        self.said: list[int | None] = [None] * sources
        self.seen: list[set[int]] = [set() for _ in range(sources)]
        self.has_answered = [False] * sources
        self.is_finishing = False
        self.is_finished = False
        self.is_over = False
        self.asked = 0

    def may_write(self, source: int) -> bool:
        return self.is_told and not (
            self.has_answered[source] or self.is_written(source)
        )

    def is_written(self, source: int) -> bool:
        said = self.said[source]
        return said is not None and self.seen[source] >= set(range(said))

    @property
    def writers(self) -> set[int]:
        return {s for s in range(len(self.said)) if self.may_write(s)}

    def see_event(self, event: Event) -> None:
        match event:
            # What is in quarantine waits for the source's answer.
            case PartArrived(source=s, part=part) if self.is_told and not self.is_over:
                self.seen[s].add(part)
            case SourceFinished(source=s, parts=parts) if not self.is_over:
                if self.is_told and self.said[s] is None and parts <= MAX_PARTS:
                    self.said[s] = parts
            case SourceRevoked(source=s) if self.is_told:
                self.has_answered[s] = True
            case FinishEnded() if self.is_finishing:
                self.is_finishing, self.is_finished = False, True
            case FinishFailed():
                self.is_finishing = False

    def see_effect(self, effect: Effect) -> None:
        everyone = range(len(self.said))
        match effect:
            case SendRegister():
                assert not self.is_told, "registered twice"
                assert not self.asked, "registered after it had begun to end"
                self.is_told = True
            case DeclinePush():
                assert not self.is_told, "declined what is registered"
            case SendExtend(sources=sources):
                assert self.is_told
                assert not self.asked, "extended what was asked back"
                assert sources == tuple(everyone)
            case RunFinish():
                assert all(map(self.is_written, everyone)), "finished too early"
                assert not self.asked
                assert not self.is_finishing
                assert not self.is_finished
                self.is_finishing = True
            case SendLanded():
                assert self.is_finished
                assert not self.asked
            case SendRevoke(sources=sources):
                assert self.is_told
                self.asked += 1
                assert self.asked == 1, "asked twice"
                assert sources == tuple(everyone)
            case QuarantineBlocks(sources=sources):
                assert set(sources) == self.writers
            case ReclaimBlocks():
                assert self.is_over

    def check(self, machine: LandingMachine) -> None:
        state = machine.state
        if state in OVER - {S.QUARANTINED}:
            assert not self.writers, "blocks given back under a source"
            assert not self.is_finishing, "blocks given back under the finish stage"
        if state is S.QUARANTINED:
            assert self.writers or self.is_finishing, "blocks kept back for nothing"
        if state in {S.REVOKING, S.QUARANTINED, S.FAILED, S.CANCELLED}:
            assert self.asked or not self.is_told, "the sources do not know of the end"
        if state in {S.FINISHING, S.DONE}:
            assert all(map(self.is_written, range(len(self.said))))
            assert self.is_finished == (state is S.DONE)
        if self.is_told and not self.is_over:
            assert set(machine.writers) == self.writers
        self.is_over = self.is_over or state in OVER


def drive(machine: LandingMachine, ledger: Ledger, event: Event, now: float) -> None:
    before = machine.state
    ledger.see_event(event)
    for effect in machine.step(event, now):
        ledger.see_effect(effect)
    ledger.check(machine)
    if before in OVER:
        assert machine.state in {before, S.RECLAIMED}, "a second outcome"


def alphabet(sources: int, parts: int) -> Iterator[tuple[Event, float]]:
    """Every event there can be, with every source and part there can be."""
    events: list[Event] = [
        LandingStarted(),
        Claimed(sources),
        BlocksReady(),
        FinishEnded(),
        FinishFailed(FAILED),
        LandingFailed(CLOSED),
        CancelRequested(),
    ]
    for source in range(sources):
        events += [PartArrived(source, part) for part in range(parts)]
        events += [SourceFinished(source, count) for count in range(parts + 1)]
        events += [SourceFinished(source, MAX_PARTS + 1)]
        events += [
            SourceFailed(source, FAILED),
            SourceLost(source, LOST),
            SourceRevoked(source),
        ]
    yield from ((event, 0.0) for event in events)
    yield from (
        (LandingTicked(), at) for at in (0.0, EXTEND_EVERY_S, GRACE_S, DEADLINE_AT)
    )


@pytest.mark.parametrize(("sources", "parts"), [(1, 2), (2, 1)])
def test_fail_closed_in_every_state_that_any_sequence_of_events_can_reach(
    sources: int, parts: int
) -> None:
    """An exhaustive walk: whatever comes in whatever order, the ledger agrees."""
    events = list(alphabet(sources, parts))
    frontier, seen, reached = [(landing(), Ledger(sources))], set(), set()
    while frontier:
        machine, ledger = frontier.pop()
        reached.add(machine.state)
        for event, now in events:
            if KIND[machine.state, type(event)] == "BUG":
                continue
            twin, book = clone(machine), clone(ledger)
            book.seen = [set(parts_seen) for parts_seen in ledger.seen]
            drive(twin, book, event, now)
            # Every clock reads 0 but for a tick: what a state does depends on the
            # rest alone.
            twin._extend_at = min(twin._extend_at, EXTEND_EVERY_S)
            twin._grace_at = min(twin._grace_at, GRACE_S)
            key = (
                twin.state,
                frozenset(book.writers),
                book.is_finishing,
                twin.state in OVER or (twin.cause is None, twin._is_cancelled),
                twin.state in OVER
                or [*map(repr, twin._sources), *map(repr, book.seen)],
            )
            key = repr(key)
            if key not in seen:
                seen.add(key)
                frontier.append((twin, book))
    assert reached == set(S)


class LandingModel(RuleBasedStateMachine):
    """Long random runs with more sources and parts, against the ledger."""

    @initialize(parts=st.lists(st.integers(0, MAX_PARTS), min_size=1, max_size=4))
    def open(self, parts: list[int]) -> None:
        self.parts = parts
        self.machine, self.ledger = landing(), Ledger(len(parts))
        self.now = 0.0
        self.let_in(LandingStarted())
        self.let_in(Claimed(len(parts)))
        self.let_in(BlocksReady())

    def let_in(self, event: Event) -> None:
        if KIND[self.machine.state, type(event)] != "BUG":
            drive(self.machine, self.ledger, event, self.now)

    def source(self, pick: int) -> int:
        return pick % len(self.parts)

    @rule(pick=st.integers(0, 3), part=st.integers(0, MAX_PARTS - 1))
    def a_part_arrives(self, pick: int, part: int) -> None:
        source = self.source(pick)
        if part < self.parts[source]:
            self.let_in(PartArrived(source, part))

    @rule(pick=st.integers(0, 3))
    def a_source_finishes(self, pick: int) -> None:
        source = self.source(pick)
        self.let_in(SourceFinished(source, self.parts[source]))

    @rule(
        pick=st.integers(0, 3),
        kind=st.sampled_from(["failed", "lost", "revoked"]),
        is_likely=st.integers(0, 3),
    )
    def a_source_goes_wrong(self, pick: int, kind: str, is_likely: int) -> None:
        source = self.source(pick)
        if kind == "revoked" and self.ledger.asked:
            self.let_in(SourceRevoked(source))
        elif not is_likely:
            wrong = (
                SourceFailed(source, FAILED)
                if kind == "failed"
                else SourceLost(source, LOST)
            )
            self.let_in(wrong)

    @rule(is_good=st.booleans())
    def the_finish_stage_answers(self, *, is_good: bool) -> None:
        self.let_in(FinishEnded() if is_good else FinishFailed(FAILED))

    @rule(is_cancel=st.booleans(), is_likely=st.integers(0, 4))
    def the_world_changes(self, *, is_cancel: bool, is_likely: int) -> None:
        if not is_likely:
            self.let_in(CancelRequested() if is_cancel else LandingFailed(CLOSED))

    @rule(passed=st.sampled_from([0.0, 1.0, 4.0, 9.0, 40.0]))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.let_in(LandingTicked())

    @invariant()
    def a_good_run_from_here_is_done_exactly_if_nothing_went_wrong(self) -> None:
        if not hasattr(self, "machine") or self.machine.state in OVER:
            return
        machine, ledger = clone(self.machine), clone(self.ledger)
        ledger.seen = [set(seen) for seen in self.ledger.seen]
        for source, parts in enumerate(self.parts):
            for part in range(parts):
                drive(machine, ledger, PartArrived(source, part), self.now)
            drive(machine, ledger, SourceFinished(source, parts), self.now)
        if machine.state is S.FINISHING:
            drive(machine, ledger, FinishEnded(), self.now)
        assert machine.state in OVER
        assert (machine.state is S.DONE) == (self.ledger.asked == 0)

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            while (deadline := self.machine.deadline) is not None:
                self.now = max(self.now, deadline)
                self.let_in(LandingTicked())
            assert self.machine.state in OVER
            if self.machine.state is S.QUARANTINED:
                self.let_in(FinishEnded())
                for source in range(len(self.parts)):
                    self.let_in(SourceRevoked(source))
                assert self.machine.state is S.RECLAIMED


TestLandingModel = LandingModel.TestCase
TestLandingModel.settings = settings(max_examples=25, stateful_step_count=40)
