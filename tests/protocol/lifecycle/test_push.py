"""The push machine: its table, row by row, and its invariants against a ledger."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from kvferry.protocol.errors import (
    DeadlineExceeded,
    FerryInternalError,
    IncompletePush,
    PeerLost,
    PushAborted,
    PushRevoked,
    TransferFailed,
)
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.lifecycle.push import (
    EVENTS,
    OVER,
    AbortDeliveries,
    CommitDelivery,
    CommitRequested,
    PushCancelled,
    PushFailed,
    PushMachine,
    PushSpared,
    PushState,
    PushTicked,
    ReaderDeclined,
    ReaderEnded,
    ReaderJoined,
    ReaderLanded,
    RefuseReader,
    StartDelivery,
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

    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.lifecycle.machine import Effect, Event

S = PushState
DEADLINE_AT = 100.0
GRACE_S = 15.0

FAILED = TransferFailed("a wave failed")
LOST = PeerLost("a rank of the consumer is gone")

RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))
FIRST, SECOND = (EngineKey("decode-0", "a1", rank) for rank in RANKS)
REBORN = EngineKey("decode-0", "b2", RANKS[0])
OTHER = EngineKey("decode-1", "a1", RANKS[1])
UNLISTED = EngineKey("decode-0", "a1", Rank(tp=0, tp_size=3))
STRANGERS = (REBORN, OTHER, UNLISTED)

TABLE = """
          joined landed ended declined spared commit failed cancel tick
open      move   late   move  move     move   move   move   move   move
committed move   move   move  move     move   BUG    move   move   move
ending    move   move   move  late     late   late   late   move   move
done      move   late   late  late     late   late   late   late   late
failed    move   late   late  late     late   late   late   late   late
cancelled move   late   late  late     late   late   late   late   late
"""


def joined(reader: EngineKey) -> ReaderJoined:
    return ReaderJoined(reader, RANKS)


SAMPLES: dict[str, Event] = {
    "joined": joined(SECOND),
    "landed": ReaderLanded(FIRST),
    "ended": ReaderEnded(FIRST, FAILED),
    "declined": ReaderDeclined(SECOND),
    "spared": PushSpared(),
    "commit": CommitRequested(),
    "failed": PushFailed(FAILED),
    "cancel": PushCancelled(),
    "tick": PushTicked(),
}
ROWS = read(TABLE, S, SAMPLES)
KIND = {(state, type(SAMPLES[name])): kind for state, name, kind in ROWS}

ONE = (joined(FIRST),)
TWO = (*ONE, joined(SECOND))
COMMITTED = (*TWO, CommitRequested())
CANCELLING = (*TWO, PushCancelled())
FAILING = (*TWO, PushFailed(FAILED))
PATHS: dict[PushState, tuple[Event, ...]] = {
    S.OPEN: ONE,
    S.COMMITTED: (*ONE, CommitRequested()),
    S.ENDING: (*TWO, PushFailed(FAILED)),
    S.DONE: (*COMMITTED, ReaderLanded(SECOND), ReaderLanded(FIRST)),
    S.FAILED: (PushFailed(FAILED),),
    S.CANCELLED: (PushCancelled(),),
}


def push(*events: Event) -> PushMachine:
    """A machine after these events, all at time 0."""
    machine = PushMachine(deadline_at=DEADLINE_AT, grace_s=GRACE_S)
    for event in events:
        machine.step(event, 0.0)
    return machine


# The table.


def test_the_table_is_total_and_every_pair_is_what_it_is_meant_to_be() -> None:
    """Each (state, event) is a move, ignored or a misuse, as written down above."""
    assert set(KIND) == set(itertools.product(S, EVENTS))
    assert kinds(PushMachine) == KIND


@pytest.mark.parametrize(
    ("state", "name", "kind"), ROWS, ids=lambda x: getattr(x, "value", x)
)
def test_every_pair_behaves_as_the_table_says(
    state: PushState, name: str, kind: str
) -> None:
    """A move goes to a declared target, the late change nothing, a bug poisons."""
    machine = push(*PATHS[state])
    assert machine.state is state
    event, before, ignored = SAMPLES[name], facts(machine), machine.ignored
    if kind == "BUG":
        with pytest.raises(FerryInternalError, match=f"misuse in {state.value}"):
            machine.step(event, 0.0)
        with pytest.raises(FerryInternalError, match="poisoned"):
            machine.step(PushTicked(), 0.0)
    elif kind == "late":
        assert machine.step(event, 0.0) == []
        assert facts(machine) == before
        assert machine.ignored == ignored + 1
    else:
        machine.step(event, 0.0)
        assert (state, type(event), machine.state) in arrows(PushMachine)


def abort(cause: type[FerryError]) -> AbortDeliveries:
    return AbortDeliveries(cause("whatever it says"))


def shapes(effects: list[Effect]) -> list[object]:
    """The effects, an abort by the type of its cause."""
    return [
        type(effect.cause) if isinstance(effect, AbortDeliveries) else effect
        for effect in effects
    ]


START = StartDelivery(FIRST)
COMMIT = [CommitDelivery(FIRST), CommitDelivery(SECOND)]
ABORT = AbortDeliveries(FAILED)
GONE = AbortDeliveries(LOST)
CANCEL = abort(PushAborted)
EXAMPLES = [
    Example("a rank registers", (), joined(FIRST), S.OPEN, [START]),
    Example(
        "the other rank registers", ONE, joined(SECOND), S.OPEN, [StartDelivery(SECOND)]
    ),
    Example(
        "another instance registers", ONE, joined(OTHER), S.OPEN, [RefuseReader(OTHER)]
    ),
    Example(
        "a rank outside the first one's list registers",
        ONE,
        joined(UNLISTED),
        S.OPEN,
        [RefuseReader(UNLISTED)],
    ),
    Example(
        "a rank registers twice, in another start",
        ONE,
        joined(REBORN),
        S.OPEN,
        [RefuseReader(REBORN)],
    ),
    Example(
        "a delivery that there is not ends", ONE, ReaderEnded(SECOND, LOST), S.OPEN, []
    ),
    Example("the only delivery ends", ONE, ReaderEnded(FIRST, LOST), S.FAILED, [GONE]),
    Example(
        "one of two deliveries ends",
        TWO,
        ReaderEnded(FIRST, LOST),
        S.ENDING,
        [GONE],
    ),
    Example(
        "n3: nobody has registered, and one does not want it",
        (),
        ReaderDeclined(FIRST),
        S.FAILED,
        [abort(PushRevoked)],
    ),
    Example(
        "one has registered, and the other does not want it",
        ONE,
        ReaderDeclined(SECOND),
        S.ENDING,
        [abort(PushRevoked)],
    ),
    Example("nobody needs it", (), PushSpared(), S.OPEN, []),
    Example(
        "nobody needs what is all there",
        (CommitRequested(),),
        PushSpared(),
        S.DONE,
        [],
    ),
    Example(
        "what nobody needs is all there",
        (PushSpared(),),
        CommitRequested(),
        S.DONE,
        [],
    ),
    Example(
        "somebody writes although nobody would",
        (*ONE, CommitRequested()),
        PushSpared(),
        S.COMMITTED,
        [],
    ),
    Example(
        "somebody comes although nobody would",
        (PushSpared(),),
        joined(FIRST),
        S.OPEN,
        [RefuseReader(FIRST)],
    ),
    Example("a stranger does not want it", ONE, ReaderDeclined(OTHER), S.OPEN, []),
    Example("a commit before anyone came", (), CommitRequested(), S.COMMITTED, []),
    Example("a commit is told to all", TWO, CommitRequested(), S.COMMITTED, COMMIT),
    Example(
        "a commit with a part missing, before anyone came",
        (),
        CommitRequested(("layers.3 tokens [16, 32)",)),
        S.FAILED,
        [abort(IncompletePush)],
    ),
    Example(
        "a commit with a part missing",
        TWO,
        CommitRequested(("layers.3 tokens [16, 32)",)),
        S.ENDING,
        [abort(IncompletePush)],
    ),
    Example("the engine closes", (), PushFailed(FAILED), S.FAILED, [ABORT]),
    Example(
        "the engine closes under deliveries", TWO, PushFailed(FAILED), S.ENDING, [ABORT]
    ),
    Example("a cancel", (), PushCancelled(), S.CANCELLED, [CANCEL]),
    Example("a cancel under deliveries", TWO, PushCancelled(), S.ENDING, [CANCEL]),
    Example("an early tick", ONE, PushTicked(), S.OPEN, [], DEADLINE_AT - 1),
    Example(
        "nobody came",
        (),
        PushTicked(),
        S.FAILED,
        [abort(DeadlineExceeded)],
        DEADLINE_AT,
    ),
    Example(
        "never committed",
        ONE,
        PushTicked(),
        S.ENDING,
        [abort(DeadlineExceeded)],
        DEADLINE_AT,
    ),
    Example(
        "a rank registers behind the commit",
        (*ONE, CommitRequested()),
        joined(SECOND),
        S.COMMITTED,
        [StartDelivery(SECOND), CommitDelivery(SECOND)],
    ),
    Example("one of two lands", COMMITTED, ReaderLanded(SECOND), S.COMMITTED, []),
    Example(
        "the last of two lands",
        (*COMMITTED, ReaderLanded(SECOND)),
        ReaderLanded(FIRST),
        S.DONE,
        [],
    ),
    Example(
        "one that has landed ends",
        (*COMMITTED, ReaderLanded(SECOND)),
        ReaderEnded(SECOND, LOST),
        S.COMMITTED,
        [],
    ),
    Example(
        "one that has not landed ends alone",
        (*COMMITTED, ReaderLanded(SECOND)),
        ReaderEnded(FIRST, LOST),
        S.FAILED,
        [GONE],
    ),
    Example(
        "one that has not landed ends beside another",
        COMMITTED,
        ReaderEnded(FIRST, LOST),
        S.ENDING,
        [GONE],
    ),
    Example(
        "a rank declines behind the commit",
        (*ONE, CommitRequested()),
        ReaderDeclined(SECOND),
        S.ENDING,
        [abort(PushRevoked)],
    ),
    Example(
        "a rank declines behind the commit, and the other has landed",
        (*ONE, CommitRequested(), ReaderLanded(FIRST)),
        ReaderDeclined(SECOND),
        S.FAILED,
        [abort(PushRevoked)],
    ),
    Example(
        "one that has registered declines: the delivery hears of it",
        COMMITTED,
        ReaderDeclined(SECOND),
        S.COMMITTED,
        [],
    ),
    Example(
        "the engine closes behind the commit",
        COMMITTED,
        PushFailed(FAILED),
        S.ENDING,
        [ABORT],
    ),
    Example(
        "the engine closes, and all that came have landed",
        (*ONE, CommitRequested(), ReaderLanded(FIRST)),
        PushFailed(FAILED),
        S.FAILED,
        [ABORT],
    ),
    Example(
        "a cancel behind the commit", COMMITTED, PushCancelled(), S.ENDING, [CANCEL]
    ),
    Example(
        "a cancel, committed, before anyone came",
        (CommitRequested(),),
        PushCancelled(),
        S.CANCELLED,
        [CANCEL],
    ),
    Example("an early tick, committed", COMMITTED, PushTicked(), S.COMMITTED, []),
    Example(
        "the deadline, committed, before anyone came",
        (CommitRequested(),),
        PushTicked(),
        S.FAILED,
        [abort(DeadlineExceeded)],
        DEADLINE_AT,
    ),
    Example(
        "the deadline under deliveries",
        COMMITTED,
        PushTicked(),
        S.ENDING,
        [abort(DeadlineExceeded)],
        DEADLINE_AT,
    ),
    Example(
        "a rank that comes to a failing push is refused",
        (*ONE, joined(SECOND), PushFailed(FAILED)),
        joined(SECOND),
        S.ENDING,
        [RefuseReader(SECOND)],
    ),
    Example(
        "one of two deliveries of a failing push ends",
        FAILING,
        ReaderEnded(FIRST, FAILED),
        S.ENDING,
        [],
    ),
    Example(
        "the last delivery of a failing push ends",
        (*FAILING, ReaderEnded(FIRST, FAILED)),
        ReaderEnded(SECOND, FAILED),
        S.FAILED,
        [],
    ),
    Example(
        "the last delivery of a cancelled push ends",
        (*CANCELLING, ReaderEnded(FIRST, FAILED)),
        ReaderEnded(SECOND, FAILED),
        S.CANCELLED,
        [],
    ),
    Example(
        "one of two lands while the push ends",
        (*COMMITTED, PushFailed(FAILED)),
        ReaderLanded(FIRST),
        S.ENDING,
        [],
    ),
    Example(
        "the last lands while the push ends",
        (*COMMITTED, PushFailed(FAILED), ReaderLanded(FIRST)),
        ReaderLanded(SECOND),
        S.FAILED,
        [],
    ),
    Example(
        "the last lands while the push is cancelled",
        (*COMMITTED, PushCancelled(), ReaderLanded(FIRST)),
        ReaderLanded(SECOND),
        S.CANCELLED,
        [],
    ),
    Example("a cancel of a failing push", FAILING, PushCancelled(), S.ENDING, []),
    Example("an early tick while ending", FAILING, PushTicked(), S.ENDING, []),
    Example(
        "deliveries of a failing push that never end",
        FAILING,
        PushTicked(),
        S.FAILED,
        [],
        GRACE_S,
    ),
    Example(
        "deliveries of a cancelled push that never end",
        CANCELLING,
        PushTicked(),
        S.CANCELLED,
        [],
        GRACE_S,
    ),
    *(
        Example(
            f"a rank that comes when it is {state.value} is refused",
            PATHS[state],
            joined(SECOND),
            state,
            [RefuseReader(SECOND)],
        )
        for state in sorted(OVER, key=str)
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.says)
def test_row(example: Example) -> None:
    """The row of the table does what the example says."""
    machine = push(*example.given)
    effects = machine.step(example.event, example.at)
    assert shapes(effects) == shapes(example.effects)
    assert machine.state is example.state


def test_every_arrow_of_the_table_has_an_example() -> None:
    """No row leads to a state that no example reaches, and none is without one."""
    shown = {(push(*e.given).state, type(e.event), e.state) for e in EXAMPLES}
    assert arrows(PushMachine) == shown


# Causes, counts, cases.


@pytest.mark.parametrize(
    ("given", "event", "at", "cause"),
    [
        (TWO, ReaderEnded(FIRST, LOST), 0.0, PeerLost),
        ((), ReaderDeclined(FIRST), 0.0, PushRevoked),
        (TWO, CommitRequested(("a part",)), 0.0, IncompletePush),
        (TWO, PushTicked(), DEADLINE_AT, DeadlineExceeded),
        (TWO, PushCancelled(), 0.0, type(None)),
        (FAILING, ReaderEnded(FIRST, LOST), 0.0, TransferFailed),
        (FAILING, PushCancelled(), 0.0, TransferFailed),
        (CANCELLING, ReaderEnded(FIRST, LOST), 0.0, type(None)),
        (PATHS[S.DONE], PushFailed(FAILED), 0.0, type(None)),
    ],
)
def test_the_first_cause_is_the_cause(
    given: tuple[Event, ...], event: Event, at: float, cause: type
) -> None:
    """What went wrong first is kept; a cancelled or good push has no cause."""
    machine = push(*given)
    machine.step(event, at)
    assert type(machine.cause) is cause


def test_a_failure_that_came_first_stays_the_outcome() -> None:
    """A push that fails, and is cancelled while it ends, has failed."""
    ended = [ReaderEnded(reader, FAILED) for reader in (FIRST, SECOND)]
    assert push(*FAILING, PushCancelled(), *ended).state is S.FAILED
    assert push(*CANCELLING, PushCancelled(), *ended).state is S.CANCELLED


def test_a_commit_that_is_incomplete_names_what_is_missing() -> None:
    """The first few of it: an error is a line for a log."""
    machine = push(CommitRequested(tuple(f"layers.{n}" for n in range(20))))
    assert machine.cause is not None
    assert "layers.7" in machine.cause.detail
    assert "layers.8" not in machine.cause.detail


@pytest.mark.parametrize(
    ("given", "says"),
    [((), "nobody had registered"), ((*COMMITTED, ReaderLanded(SECOND)), "tp0of2")],
)
def test_a_deadline_names_who_has_not_landed(
    given: tuple[Event, ...], says: str
) -> None:
    """Whoever reads it knows which rank to look at."""
    machine = push(*given)
    machine.step(PushTicked(), DEADLINE_AT)
    assert machine.cause is not None
    assert says in machine.cause.detail
    assert "tp1of2" not in machine.cause.detail


@pytest.mark.parametrize(
    ("given", "event"),
    [
        (ONE, ReaderEnded(SECOND, LOST)),
        (ONE, ReaderDeclined(FIRST)),
        *((TWO, ReaderEnded(stranger, LOST)) for stranger in STRANGERS),
        *((ONE, ReaderDeclined(stranger)) for stranger in STRANGERS),
        *((COMMITTED, ReaderLanded(stranger)) for stranger in STRANGERS),
        ((*COMMITTED, ReaderLanded(FIRST)), ReaderLanded(FIRST)),
        ((*COMMITTED, ReaderLanded(FIRST)), ReaderEnded(FIRST, LOST)),
        ((*FAILING, ReaderEnded(FIRST, LOST)), ReaderEnded(FIRST, LOST)),
        *((FAILING, ReaderLanded(stranger)) for stranger in STRANGERS),
    ],
)
def test_unknown_late_and_doubled_events_are_counted_and_change_nothing(
    given: tuple[Event, ...], event: Event
) -> None:
    """Invariant 5: an event about no live delivery has no effect but a count."""
    machine = push(*given)
    before, ignored = facts(machine), machine.ignored
    assert machine.step(event, 0.0) == []
    assert facts(machine) == before
    assert machine.ignored == ignored + 1


@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
@pytest.mark.parametrize("given", [ONE, COMMITTED], ids=["open", "committed"])
def test_strangers_are_refused_and_change_nothing(
    given: tuple[Event, ...], stranger: EngineKey
) -> None:
    """Nobody is written to that the push does not wait for at its end."""
    machine = push(*given)
    before = facts(machine)
    assert machine.step(joined(stranger), 1.0) == [RefuseReader(stranger)]
    assert facts(machine) == before


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("is_early", [False, True])
def test_it_is_done_when_the_last_of_the_ranks_has_landed(
    *, count: int, is_early: bool
) -> None:
    """Whether they came before the commit or behind it: all of them, none sooner."""
    ranks = tuple(Rank(tp=tp, tp_size=count) for tp in range(count))
    keys = [EngineKey("decode-0", f"g{rank.tp}", rank) for rank in ranks]
    registrations = [ReaderJoined(key, ranks) for key in keys]
    before, behind = (registrations, []) if is_early else ([], registrations)
    machine = push(*before, CommitRequested(), *behind)
    assert machine.live == set(keys)
    for key in keys:
        assert machine.state is S.COMMITTED
        machine.step(ReaderLanded(key), 0.0)
    assert machine.state is S.DONE
    assert not machine.live


# Deadlines (case o5).


@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_o5_every_state_that_waits_for_others_has_a_deadline(state: PushState) -> None:
    """A state has a deadline exactly if it is not over."""
    assert (push(*PATHS[state]).deadline is None) == (state in OVER)


@pytest.mark.parametrize("given", [(), ONE, TWO, COMMITTED, FAILING, CANCELLING])
def test_o5_time_alone_ends_every_state_without_new_work(
    given: tuple[Event, ...],
) -> None:
    """Nothing comes in but ticks: it ends, and names the deliveries that have not."""
    machine = push(*given)
    live, now, effects = machine.live, 0.0, []
    while (deadline := machine.deadline) is not None:
        assert deadline > now, "a deadline that has passed must have been dealt with"
        now = deadline
        effects += machine.step(PushTicked(), now)
    assert machine.state in {S.FAILED, S.CANCELLED}
    assert machine.live == live
    assert all(isinstance(effect, AbortDeliveries) for effect in effects)
    assert now <= DEADLINE_AT + GRACE_S


# The ledger: what the outside world knows of a push, kept apart from the machine.


class Ledger:
    """Whose deliveries were begun, committed, and how they ended."""

    def __init__(self) -> None:
        self.begun: dict[Rank, EngineKey] = {}
        self.live: set[EngineKey] = set()
        self.told: set[EngineKey] = set()  # that all is ready
        self.landed: set[Rank] = set()
        self.is_committed = False
        self.is_aborted = False

    def see_event(self, event: Event) -> None:
        match event:
            case CommitRequested(missing=()) if not self.is_aborted:
                self.is_committed = True
            case ReaderLanded(reader=reader) if reader in self.live & self.told:
                self.live.discard(reader)
                self.landed.add(reader.rank)
            case ReaderLanded(reader=reader) if self.is_aborted:
                self.live.discard(reader)
            case ReaderEnded(reader=reader):
                self.live.discard(reader)

    def see_effect(self, effect: Effect, event: Event) -> None:
        match effect:
            case StartDelivery(reader=reader):
                assert not self.is_aborted, "begun after it had begun to end"
                assert reader.rank in RANKS, "begun with a rank nobody waits for"
                assert reader.rank not in self.begun, "begun twice"
                assert {reader.engine_id} >= {k.engine_id for k in self.begun.values()}
                self.begun[reader.rank] = reader
                self.live.add(reader)
            case CommitDelivery(reader=reader):
                assert self.is_committed
                assert reader in self.live - self.told
                self.told.add(reader)
            case RefuseReader(reader=reader):
                assert event == joined(reader)
                is_due = reader in {FIRST, SECOND} and reader.rank not in self.begun
                assert not is_due or self.is_aborted, "refused one of its own"
            case AbortDeliveries():
                assert not self.is_aborted, "aborted twice"
                self.is_aborted = True

    def check(self, machine: PushMachine) -> None:
        if machine.state not in OVER:
            assert machine.live == self.live
        if machine.state is S.COMMITTED:
            assert self.is_committed
            assert self.told >= self.live, "one does not know that all is ready"
        if machine.state is S.DONE:
            assert self.is_committed
            assert not self.is_aborted
            assert self.landed == set(RANKS)
            assert not self.live
        if machine.state in {S.ENDING, S.FAILED, S.CANCELLED}:
            assert self.is_aborted
        if machine.state is S.ENDING:
            assert self.live
        if machine.state in {S.FAILED, S.CANCELLED}:
            assert (machine.cause is None) == (machine.state is S.CANCELLED)


def drive(machine: PushMachine, ledger: Ledger, event: Event, now: float) -> None:
    before = machine.state
    ledger.see_event(event)
    effects = machine.step(event, now)
    for effect in effects:
        ledger.see_effect(effect, event)
    ledger.check(machine)
    if before in OVER:
        assert machine.state is before, "a second outcome"
    elif machine.state in OVER:
        is_out = isinstance(event, PushTicked) and now >= GRACE_S
        assert is_out or not ledger.live, "over before its deliveries"
    if isinstance(event, ReaderJoined):
        answers = [e for e in effects if isinstance(e, StartDelivery | RefuseReader)]
        assert len(answers) == 1, "a rank that registered was not answered"


def alphabet() -> Iterator[tuple[Event, float]]:
    """Every event there can be, from the two ranks and three strangers."""
    for reader in (FIRST, SECOND, *STRANGERS):
        yield joined(reader), 0.0
        yield ReaderLanded(reader), 0.0
        yield ReaderEnded(reader, LOST), 0.0
        yield ReaderDeclined(reader), 0.0
    yield PushSpared(), 0.0
    yield CommitRequested(), 0.0
    yield CommitRequested(("a part",)), 0.0
    yield PushFailed(FAILED), 0.0
    yield PushCancelled(), 0.0
    yield from ((PushTicked(), at) for at in (0.0, GRACE_S, DEADLINE_AT))


def test_fail_closed_in_every_state_that_any_sequence_of_events_can_reach() -> None:
    """An exhaustive walk: whatever comes in whatever order, the ledger agrees.

    The first to come is one of the two ranks: who comes first says who is waited for.
    """
    first = [push(joined(reader)) for reader in (FIRST, SECOND)]
    frontier = []
    for machine, reader in zip(first, (FIRST, SECOND), strict=True):
        ledger = Ledger()
        ledger.begun, ledger.live = {reader.rank: reader}, {reader}
        frontier.append((machine, ledger))
    events, seen, reached = list(alphabet()), set(), set()
    while frontier:
        machine, ledger = frontier.pop()
        reached.add(machine.state)
        for event, now in events:
            if KIND[machine.state, type(event)] == "BUG":
                continue
            twin, book = clone(machine), clone(ledger)
            drive(twin, book, event, now)
            # Every clock reads 0 but for a tick.
            twin._grace_at = min(twin._grace_at, GRACE_S)
            key = (
                twin.state,
                twin.cause is None,
                twin._is_cancelled,
                frozenset(book.begun),
                frozenset(book.live),
                frozenset(book.told),
                frozenset(book.landed),
            )
            if key not in seen:
                seen.add(key)
                frontier.append((twin, book))
    assert reached == set(S)
