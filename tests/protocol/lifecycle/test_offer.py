"""The offer machine: its table, row by row, and its invariants against a ledger."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvferry.protocol.errors import FerryInternalError
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.lifecycle.machine import Otherwise, Row
from kvferry.protocol.lifecycle.offer import (
    EVENTS,
    BlocksComputed,
    ConfirmRead,
    EndOffer,
    NoteReader,
    OfferDeclined,
    OfferMachine,
    OfferSpared,
    OfferState,
    OfferTicked,
    ReadEnded,
    ReaderLost,
    RefuseReader,
    RenewArrived,
    ReportReady,
    WithdrawRequested,
)
from kvferry.protocol.link import RefusedReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvferry.protocol.lifecycle.machine import Effect, Event

S = OfferState
LEASE_S = 30.0

RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))
FIRST, SECOND = (EngineKey("decode-0", "a1", rank) for rank in RANKS)
REBORN = EngineKey("decode-0", "b2", RANKS[0])
OTHER = EngineKey("decode-1", "a1", RANKS[1])
STRANGERS = (REBORN, OTHER)
SIBLING = EngineKey("decode-0", "c3", RANKS[1])  # each rank is a process of its own


def renewal(reader: EngineKey, readers: tuple[Rank, ...] = RANKS) -> RenewArrived:
    return RenewArrived(reader, readers)


def declined(reader: EngineKey, readers: tuple[Rank, ...] = ()) -> OfferDeclined:
    return OfferDeclined(reader, readers or (reader.rank,))


# What every pair is. "move" has a row, "late" is ignored and counted; no pair is a
# misuse, since most events come from peers, and the others race with them.
TABLE = """
           renew read  decline lost computed spared withdraw tick
open       move  move  move    move move     move   move     move
released   move  move  late    late late     late   late     late
lost       move  move  late    late late     late   late     late
expired    move  move  late    late late     late   late     late
withdrawn  move  move  late    late late     late   late     late
"""
SAMPLES: dict[str, Event] = {
    "renew": renewal(FIRST),
    "read": ReadEnded(FIRST),
    "decline": declined(FIRST),
    "computed": BlocksComputed(),
    "lost": ReaderLost(FIRST),
    "spared": OfferSpared(),
    "withdraw": WithdrawRequested(),
    "tick": OfferTicked(),
}
REASONS = {
    S.RELEASED: RefusedReason.SPENT,
    S.LOST: RefusedReason.SPENT,
    S.EXPIRED: RefusedReason.EXPIRED,
    S.WITHDRAWN: RefusedReason.WITHDRAWN,
}


def table() -> Iterator[tuple[OfferState, str, str]]:
    header, *lines = TABLE.strip("\n").splitlines()
    for line in lines:
        state, *kinds = line.split()
        for name, kind in zip(header.split(), kinds, strict=True):
            yield S(state), name, kind


def offer(*events: Event, is_ready: bool = True) -> OfferMachine:
    """A machine after these events, all at time 0."""
    machine = OfferMachine(now=0.0, lease_s=LEASE_S, is_ready=is_ready)
    for event in events:
        machine.step(event, 0.0)
    return machine


ACCEPTED = (renewal(FIRST),)
HALF_READ = (*ACCEPTED, ReadEnded(FIRST))
PATHS: dict[OfferState, tuple[Event, ...]] = {
    S.OPEN: (),
    S.RELEASED: (*HALF_READ, ReadEnded(SECOND)),
    S.LOST: (renewal(FIRST, (RANKS[0],)), ReaderLost(FIRST)),
    S.WITHDRAWN: (WithdrawRequested(),),
}


def in_state(state: OfferState) -> OfferMachine:
    if state is S.EXPIRED:
        machine = offer()
        machine.step(OfferTicked(), LEASE_S)
        return machine
    return offer(*PATHS[state])


def facts(machine: OfferMachine) -> dict[str, object]:
    """Everything a machine knows, but for the count of what it ignored."""
    return {k: copy.copy(v) for k, v in vars(machine).items() if k != "ignored"}


# The table.


def test_the_table_is_total_and_every_pair_is_what_it_is_meant_to_be() -> None:
    """Each (state, event) is a move, ignored or a misuse, as written down above."""
    expected = {(s, type(SAMPLES[name])): kind for s, name, kind in table()}
    assert set(expected) == set(itertools.product(S, EVENTS))
    kinds = {Otherwise.IGNORED: "late", Otherwise.MISUSE: "BUG"}
    found = {
        pair: "move" if isinstance(row, Row) else kinds[row]
        for pair, row in OfferMachine.table.items()
    }
    assert found == expected


@pytest.mark.parametrize(
    ("state", "name", "kind"), list(table()), ids=lambda x: getattr(x, "value", x)
)
def test_every_pair_behaves_as_the_table_says(
    state: OfferState, name: str, kind: str
) -> None:
    """A move goes to a declared target, the late change nothing."""
    machine = in_state(state)
    assert machine.state is state
    event, before, ignored = SAMPLES[name], facts(machine), machine.ignored
    effects = machine.step(event, 1.0)
    if kind == "late":
        assert effects == []
        assert facts(machine) == before
        assert machine.ignored == ignored + 1
    else:
        row = OfferMachine.table[state, type(event)]
        assert isinstance(row, Row)
        assert machine.state in row.targets


class Example(NamedTuple):
    """One row of the table at work."""

    says: str
    given: tuple[Event, ...]
    event: Event
    state: OfferState
    effects: list[Effect]
    at: float = 1.0
    is_ready: bool = True


def refused(reader: EngineKey, reason: RefusedReason) -> RefuseReader:
    return RefuseReader(reader, reason)


EXAMPLES = [
    Example(
        "the first renewal accepts",
        (),
        renewal(FIRST),
        S.OPEN,
        [NoteReader(FIRST)],
    ),
    Example(
        "the other rank of the instance renews as well",
        ACCEPTED,
        renewal(SECOND),
        S.OPEN,
        [NoteReader(SECOND)],
    ),
    Example(
        "a later start of the reader is a stranger",
        ACCEPTED,
        renewal(REBORN),
        S.OPEN,
        [refused(REBORN, RefusedReason.SPENT)],
    ),
    Example(
        "a reader that is done renews nothing",
        HALF_READ,
        renewal(FIRST),
        S.OPEN,
        [refused(FIRST, RefusedReason.SPENT)],
    ),
    Example(
        "a renewal that comes too late",
        ACCEPTED,
        renewal(FIRST),
        S.EXPIRED,
        [refused(FIRST, RefusedReason.EXPIRED), EndOffer()],
        LEASE_S,
    ),
    Example(
        "one of two readers is confirmed",
        ACCEPTED,
        ReadEnded(FIRST),
        S.OPEN,
        [ConfirmRead(FIRST, 1)],
    ),
    Example(
        "the last reader is confirmed and releases",
        HALF_READ,
        ReadEnded(SECOND),
        S.RELEASED,
        [ConfirmRead(SECOND, 1), EndOffer()],
    ),
    Example(
        "o2: a read that outlived the lease",
        ACCEPTED,
        ReadEnded(FIRST),
        S.EXPIRED,
        [refused(FIRST, RefusedReason.EXPIRED), EndOffer()],
        LEASE_S,
    ),
    Example(
        "o1: a reader asks a second time",
        HALF_READ,
        ReadEnded(FIRST),
        S.OPEN,
        [refused(FIRST, RefusedReason.SPENT)],
    ),
    Example(
        "another engine is a stranger",
        ACCEPTED,
        ReadEnded(OTHER),
        S.OPEN,
        [refused(OTHER, RefusedReason.SPENT)],
    ),
    Example(
        "n3: a rejected ticket frees the producer at once",
        (),
        declined(FIRST),
        S.RELEASED,
        [EndOffer()],
    ),
    Example("one of two readers declines", ACCEPTED, declined(FIRST), S.OPEN, []),
    Example(
        "the last reader declines",
        HALF_READ,
        declined(SECOND),
        S.RELEASED,
        [EndOffer()],
    ),
    Example(
        "a decline that comes too late",
        ACCEPTED,
        declined(FIRST),
        S.EXPIRED,
        [EndOffer()],
        LEASE_S,
    ),
    Example(
        "e6: the only reader goes away",
        (renewal(FIRST, (RANKS[0],)),),
        ReaderLost(FIRST),
        S.LOST,
        [EndOffer()],
    ),
    Example("one of two readers goes away", ACCEPTED, ReaderLost(FIRST), S.OPEN, []),
    Example(
        "one has read, the other goes away",
        (*HALF_READ, renewal(SECOND)),
        ReaderLost(SECOND),
        S.LOST,
        [EndOffer()],
    ),
    Example(
        "one went away, the other has read",
        (*ACCEPTED, ReaderLost(FIRST)),
        ReadEnded(SECOND),
        S.LOST,
        [ConfirmRead(SECOND, 1), EndOffer()],
    ),
    Example(
        "one went away, the other declines",
        (*ACCEPTED, ReaderLost(FIRST)),
        declined(SECOND),
        S.LOST,
        [EndOffer()],
    ),
    Example(
        "a reader goes away when the lease is over",
        ACCEPTED,
        ReaderLost(FIRST),
        S.EXPIRED,
        [EndOffer()],
        LEASE_S,
    ),
    Example(
        "who does not know its id is told it, however ready",
        (),
        RenewArrived(FIRST, RANKS, asks=True),
        S.OPEN,
        [NoteReader(FIRST), ReportReady(FIRST)],
    ),
    Example(
        "who does not know its id is told when it is ready",
        (RenewArrived(FIRST, RANKS, asks=True),),
        BlocksComputed(),
        S.OPEN,
        [ReportReady(FIRST)],
        is_ready=False,
    ),
    Example(
        "nobody will read from here",
        (),
        OfferSpared(),
        S.RELEASED,
        [EndOffer()],
    ),
    Example(
        "somebody reads although nobody would",
        ACCEPTED,
        OfferSpared(),
        S.OPEN,
        [],
    ),
    Example(
        "nobody would have read, but the lease is over",
        (),
        OfferSpared(),
        S.EXPIRED,
        [EndOffer()],
        LEASE_S,
    ),
    Example(
        "the producer withdraws",
        ACCEPTED,
        WithdrawRequested(),
        S.WITHDRAWN,
        [EndOffer()],
    ),
    Example(
        "what has run out cannot be withdrawn",
        ACCEPTED,
        WithdrawRequested(),
        S.EXPIRED,
        [EndOffer()],
        LEASE_S,
    ),
    Example(
        "l8: the readers that have accepted are told that the blocks are computed",
        (*ACCEPTED, renewal(SECOND)),
        BlocksComputed(),
        S.OPEN,
        [ReportReady(FIRST), ReportReady(SECOND)],
        is_ready=False,
    ),
    Example(
        "l8: blocks are computed before anybody has accepted",
        (),
        BlocksComputed(),
        S.OPEN,
        [],
        is_ready=False,
    ),
    Example(
        "l8: who renews later is told as well",
        (BlocksComputed(),),
        renewal(FIRST),
        S.OPEN,
        [NoteReader(FIRST), ReportReady(FIRST)],
        is_ready=False,
    ),
    Example(
        "l8: a renewal holds what is still being computed",
        (),
        renewal(FIRST),
        S.OPEN,
        [NoteReader(FIRST)],
        is_ready=False,
    ),
    Example(
        "l8: nobody has read what is still being computed",
        ACCEPTED,
        ReadEnded(FIRST),
        S.OPEN,
        [refused(FIRST, RefusedReason.NOT_READY)],
        is_ready=False,
    ),
    Example(
        "a reader that has declined is told nothing",
        (*ACCEPTED, declined(FIRST)),
        BlocksComputed(),
        S.OPEN,
        [],
        is_ready=False,
    ),
    Example(
        "a ticket that says so already is not repeated",
        ACCEPTED,
        BlocksComputed(),
        S.OPEN,
        [],
    ),
    Example(
        "blocks are computed after the lease",
        ACCEPTED,
        BlocksComputed(),
        S.EXPIRED,
        [EndOffer()],
        LEASE_S,
        is_ready=False,
    ),
    Example("an early tick", ACCEPTED, OfferTicked(), S.OPEN, [], LEASE_S - 0.001),
    Example("the lease runs out", (), OfferTicked(), S.EXPIRED, [EndOffer()], LEASE_S),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.says)
def test_row(example: Example) -> None:
    """The row of the table does what the example says."""
    machine = offer(*example.given, is_ready=example.is_ready)
    assert machine.step(example.event, example.at) == example.effects
    assert machine.state is example.state


@pytest.mark.parametrize("question", [renewal, ReadEnded])
@pytest.mark.parametrize("reader", [FIRST, SECOND, *STRANGERS], ids=str)
@pytest.mark.parametrize("state", REASONS, ids=lambda s: s.value)
def test_after_the_end_every_question_is_refused_with_the_right_reason(
    state: OfferState, reader: EngineKey, question: type[ReadEnded]
) -> None:
    """o1: whoever asks about an offer that is over learns how it ended."""
    machine = in_state(state)
    for now in (LEASE_S, 10 * LEASE_S):
        assert machine.step(question(reader), now) == [refused(reader, REASONS[state])]
        assert machine.state is state


def test_every_arrow_of_the_table_has_an_example() -> None:
    """No row of an open offer leads to a state that no example reaches."""
    drawn = {
        (state, event, target)
        for (state, event), row in OfferMachine.table.items()
        if isinstance(row, Row) and state is S.OPEN
        for target in row.targets
    }
    assert drawn == {(S.OPEN, type(e.event), e.state) for e in EXAMPLES}


def test_an_event_of_another_machine_is_a_misuse() -> None:
    """A type that is in no row is never taken for one that is."""

    class Foreign(OfferTicked, frozen=True):
        """Something that happened elsewhere."""

    machine = offer()
    with pytest.raises(FerryInternalError):
        machine.step(Foreign(), 0.0)
    with pytest.raises(FerryInternalError, match="poisoned"):
        machine.step(OfferTicked(), 0.0)


# Readers.


@pytest.mark.parametrize("stranger", STRANGERS, ids=str)
@pytest.mark.parametrize("given", [ACCEPTED, HALF_READ], ids=["accepted", "half read"])
def test_strangers_are_refused_and_change_nothing(
    given: tuple[Event, ...], stranger: EngineKey
) -> None:
    """Invariant 5: neither another engine nor a later start moves an offer."""
    machine = offer(*given)
    before = facts(machine)
    no = [refused(stranger, RefusedReason.SPENT)]
    assert machine.step(renewal(stranger), 1.0) == no
    assert machine.step(ReadEnded(stranger), 1.0) == no
    assert machine.step(declined(stranger), 1.0) == []
    assert machine.ignored == 1
    assert facts(machine) == before


def test_another_rank_of_the_same_instance_is_no_stranger() -> None:
    """Each rank of a consumer is a process with a generation of its own."""
    machine = offer(*ACCEPTED)
    assert machine.step(renewal(SIBLING), 1.0) == [NoteReader(SIBLING)]
    assert machine.step(renewal(SECOND), 1.0) == [refused(SECOND, RefusedReason.SPENT)]


def test_n3_one_of_two_ranks_declines_first_and_the_other_still_reads() -> None:
    """A decline names the instance's readers: it frees its own part alone."""
    machine = offer()
    assert machine.step(declined(FIRST, RANKS), 1.0) == []
    assert machine.state is S.OPEN
    assert machine.step(ReadEnded(SECOND), 1.0) == [ConfirmRead(SECOND, 0), EndOffer()]
    assert machine.state is S.RELEASED


def test_a_decline_of_a_reader_that_is_done_is_ignored() -> None:
    """A doubled decline, or one behind a confirmation, is counted and no more."""
    machine = offer(*HALF_READ)
    before = facts(machine)
    assert machine.step(declined(FIRST), 1.0) == []
    assert machine.ignored == 1
    assert facts(machine) == before


@pytest.mark.parametrize(
    ("given", "reader"),
    [((), FIRST), (ACCEPTED, SECOND), *((ACCEPTED, s) for s in STRANGERS)],
    ids=str,
)
def test_who_never_accepted_cannot_be_lost(
    given: tuple[Event, ...], reader: EngineKey
) -> None:
    """Not before anybody has, not for a sibling, and not in a stranger's name."""
    machine = offer(*given)
    before = facts(machine)
    assert machine.step(ReaderLost(reader), 1.0) == []
    assert machine.ignored == 1
    assert facts(machine) == before


def test_a_confirmed_reader_that_goes_away_changes_nothing() -> None:
    """It has what it came for: the offer is released, not lost."""
    machine = offer(*HALF_READ)
    before = facts(machine)
    assert machine.step(ReaderLost(FIRST), 1.0) == []
    assert machine.ignored == 1
    assert facts(machine) == before
    machine.step(ReadEnded(SECOND), 1.0)
    assert machine.state is S.RELEASED


def test_a_lost_reader_that_comes_back_is_refused() -> None:
    """While another rank still reads; its part is over."""
    machine = offer(*ACCEPTED, ReaderLost(FIRST))
    no = [refused(FIRST, RefusedReason.SPENT)]
    assert machine.step(renewal(FIRST), 1.0) == no
    assert machine.step(ReadEnded(FIRST), 1.0) == no
    assert machine.step(renewal(SECOND), 1.0) == [NoteReader(SECOND)]


def test_a_reader_that_never_renewed_can_be_confirmed_under_the_first_lease() -> None:
    """A read that fits into the first lease needs no renewal."""
    machine = offer()
    effects = machine.step(ReadEnded(FIRST), LEASE_S - 1)
    assert effects == [ConfirmRead(FIRST, 0), EndOffer()]
    assert machine.state is S.RELEASED


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("is_declining", [False, True])
def test_an_offer_is_released_after_exactly_the_expected_readers(
    *, count: int, is_declining: bool
) -> None:
    """Reading or declining, the last of the expected readers ends it, none before."""
    ranks = tuple(Rank(tp=tp, tp_size=count) for tp in range(count))
    keys = [EngineKey("decode-0", "a1", rank) for rank in ranks]
    machine = offer(*(renewal(key, ranks) for key in keys))
    for n, key in enumerate(keys, start=1):
        assert machine.state is S.OPEN
        machine.step(declined(key) if is_declining else ReadEnded(key), 1.0)
        assert machine.done == set(ranks[:n])
    assert machine.state is S.RELEASED


def test_a_reader_outside_the_list_is_no_expected_one() -> None:
    """A reader the list forgot is expected too if it named the list, else it is not."""
    third = EngineKey("decode-0", "a1", Rank(tp=0, tp_size=3))
    machine = offer(renewal(third))
    machine.step(ReadEnded(FIRST), 1.0)
    machine.step(ReadEnded(SECOND), 1.0)
    assert machine.state is S.OPEN
    machine.step(ReadEnded(third), 1.0)
    assert machine.state is S.RELEASED
    machine = offer(*ACCEPTED)
    machine.step(ReadEnded(third), 1.0)
    machine.step(ReadEnded(FIRST), 1.0)
    assert machine.state is S.OPEN
    assert machine.step(ReadEnded(SECOND), 1.0)[-1] == EndOffer()


def test_a_later_list_does_not_shrink_the_expected_readers() -> None:
    """The ranks that the first renewal named are the ones that count."""
    machine = offer(renewal(FIRST), renewal(FIRST, (RANKS[0],)))
    machine.step(ReadEnded(FIRST), 1.0)
    assert machine.state is S.OPEN


def test_l8_a_read_that_was_refused_too_early_is_confirmed_later() -> None:
    """The refusal ends nothing: whoever reads again in time is believed."""
    machine = offer(*ACCEPTED, is_ready=False)
    machine.step(ReadEnded(FIRST), 1.0)
    assert machine.step(BlocksComputed(), 2.0) == [ReportReady(FIRST)]
    assert machine.step(ReadEnded(FIRST), 3.0) == [ConfirmRead(FIRST, 1)]


def test_l8_readiness_is_told_once_and_with_each_renewal_after_it() -> None:
    """A doubled event is counted; the reader that missed the word hears it again."""
    machine = offer(*ACCEPTED, is_ready=False)
    assert machine.step(BlocksComputed(), 1.0) == [ReportReady(FIRST)]
    assert machine.step(BlocksComputed(), 1.0) == []
    assert machine.ignored == 1
    for now in (2.0, 3.0):
        effects = machine.step(renewal(FIRST), now)
        assert effects == [NoteReader(FIRST), ReportReady(FIRST)]


def test_has_reader_says_whether_the_ticket_was_accepted() -> None:
    """It turns with the first renewal."""
    machine = offer()
    assert not machine.has_reader
    machine.step(renewal(FIRST), 1.0)
    assert machine.has_reader


def test_it_is_read_once_somebody_has_accepted_and_it_is_ready() -> None:
    """In either order."""
    for events in itertools.permutations((renewal(FIRST), BlocksComputed())):
        machine = offer(is_ready=False)
        machine.step(events[0], 1.0)
        assert not machine.is_read
        machine.step(events[1], 1.0)
        assert machine.is_read


# Deadlines (case o5).


@pytest.mark.parametrize("is_ready", [True, False])
@pytest.mark.parametrize("state", S, ids=lambda s: s.value)
def test_o5_every_state_that_is_not_over_has_a_deadline_that_ends_it(
    *, state: OfferState, is_ready: bool
) -> None:
    """Nothing comes in any more: time alone gives the blocks back."""
    for given in ((), ACCEPTED, HALF_READ if is_ready else ()):
        machine = in_state(state)
        if state is S.OPEN:
            machine = offer(*given, is_ready=is_ready)
        assert (machine.deadline is None) == (state is not S.OPEN)
        if machine.deadline is not None:
            assert machine.step(OfferTicked(), machine.deadline) == [EndOffer()]
            assert machine.state is S.EXPIRED


# Leases (cases n1, n2, o2).


@pytest.mark.parametrize("event", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("late_s", [0.0, 0.001, 1e9])
def test_expiry_beats_whatever_is_queued(event: Event, late_s: float) -> None:
    """A producer stopped past its lease refuses everything that had queued up."""
    machine = offer(*ACCEPTED)
    effects = machine.step(event, LEASE_S + late_s)
    assert machine.state is S.EXPIRED
    assert effects.count(EndOffer()) == 1
    assert not any(isinstance(e, ConfirmRead | NoteReader) for e in effects)
    question = ReadEnded(FIRST)
    assert machine.step(question, LEASE_S + late_s) == [
        refused(FIRST, RefusedReason.EXPIRED)
    ]


def test_o2_renewed_in_time_a_long_read_is_confirmed() -> None:
    """A read from 20 s to 51 s under a lease of 30 s needs one renewal in between."""
    machine = offer()
    machine.step(renewal(FIRST, (RANKS[0],)), 20.0)
    assert machine.deadline == 50.0
    machine.step(renewal(FIRST, (RANKS[0],)), 45.0)
    assert machine.step(ReadEnded(FIRST), 51.0) == [ConfirmRead(FIRST, 2), EndOffer()]


def test_n1_renewals_keep_it_alive_and_silence_frees_it_one_lease_after_the_last() -> (
    None
):
    """Renewed until 40 s and silent then: expired at 40 s and one lease, not before."""
    machine = offer()
    for now in range(0, 50, 10):
        machine.step(renewal(FIRST), float(now))
    assert machine.epoch == 5
    assert machine.deadline == 70.0
    assert machine.step(OfferTicked(), 69.999) == []
    assert machine.step(OfferTicked(), 70.0) == [EndOffer()]
    assert machine.deadline is None


def test_n2_one_offer_renewed_for_ever_does_not_keep_the_others() -> None:
    """Of 100 offers one is renewed: the next sweep frees the 99."""
    offers = [OfferMachine(now=0.0, lease_s=LEASE_S) for _ in range(100)]
    for now in (10.0, 20.0):
        offers[17].step(renewal(FIRST), now)
    for machine in offers:
        assert machine.deadline is not None
        machine.step(OfferTicked(), LEASE_S)
    assert [i for i, m in enumerate(offers) if m.state is S.OPEN] == [17]
    assert sum(m.state is S.EXPIRED for m in offers) == 99


# The ledger: what the outside world knows of an offer, kept apart from the machine.


class Ledger:
    """Who asked, who was confirmed, and until when the blocks were held."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.is_ready = self.is_told = is_ready
        self.held_until = LEASE_S
        self.instance: str | None = None
        self.generations: dict[Rank, str] = {}
        self.expected: set[Rank] = set()
        self.done: set[Rank] = set()
        self.lost: set[Rank] = set()
        self.is_spare = False
        self.ends = 0

    def see(self, event: Event, now: float, effects: list[Effect]) -> None:
        was_held = self.ends == 0 and now < self.held_until
        self.ends += effects.count(EndOffer())
        assert self.ends <= 1, "ended twice"
        ready = [e.reader for e in effects if isinstance(e, ReportReady)]
        is_told = self.is_told and not getattr(event, "asks", False)
        assert not ready or (was_held and not is_told)
        if isinstance(event, BlocksComputed):
            told = [] if self.is_ready or not was_held else self.waiting()
            assert ready == told, "told others than those that wait"
            self.is_ready = True
            return
        if isinstance(event, WithdrawRequested | OfferTicked):
            return
        if isinstance(event, OfferSpared):
            self.is_spare |= was_held and not self.generations
            return
        reader = event.reader
        is_known = self.instance in {None, reader.engine_id}
        start = self.generations.get(reader.rank, reader.generation)
        is_known = is_known and start == reader.generation
        is_due = was_held and is_known and reader.rank not in self.done
        if isinstance(event, ReadEnded):
            is_due = is_due and self.is_ready
        if isinstance(event, ReaderLost):
            if is_due and reader.rank in self.generations:
                self.done.add(reader.rank)
                self.lost.add(reader.rank)
            return
        good = {RenewArrived: NoteReader, ReadEnded: ConfirmRead}.get(type(event))
        if good is not None:
            answer = good if is_due else RefuseReader
            assert type(effects[0]) is answer
            assert effects[0].reader == reader, "answered another reader"
        if is_due:
            self.instance = reader.engine_id
            self.generations[reader.rank] = reader.generation
            told = getattr(event, "readers", ())
            self.expected = self.expected or {*told, reader.rank}
            if isinstance(event, RenewArrived):
                self.held_until = now + LEASE_S
                due = [reader] if self.is_ready and not is_told else []
                assert ready == due, "a renewal was answered without the readiness"
            else:
                self.done.add(reader.rank)

    def waiting(self) -> list[EngineKey]:
        """Who has accepted and is not done, in the order in which they came."""
        return [
            EngineKey(self.instance or "", generation, rank)
            for rank, generation in self.generations.items()
            if rank not in self.done
        ]

    def check(self, machine: OfferMachine, now: float) -> None:
        assert (machine.state is S.OPEN) == (self.ends == 0)
        assert (machine.deadline is None) == (self.ends == 1)
        assert machine.done == self.done
        if machine.state is S.OPEN:
            assert machine.deadline == self.held_until > now
            assert not self.done or not self.expected <= self.done
        if machine.state in {S.RELEASED, S.LOST}:
            assert self.done >= self.expected
            assert self.done or self.is_spare
            assert (machine.state is S.LOST) == bool(self.lost)


def drive(machine: OfferMachine, ledger: Ledger, event: Event, now: float) -> None:
    before = machine.state
    ledger.see(event, now, machine.step(event, now))
    ledger.check(machine, now)
    if before is not S.OPEN:
        assert machine.state is before, "a second outcome"


def test_every_short_sequence_of_events_agrees_with_the_ledger() -> None:
    """An exhaustive walk: exactly one end, at most one confirmation a reader."""
    readers = (FIRST, SECOND, REBORN)
    questions = (renewal, ReadEnded, declined, ReaderLost)
    events = [question(reader) for question in questions for reader in readers]
    events += [RenewArrived(SECOND, RANKS, asks=True), OfferSpared()]
    events += [WithdrawRequested(), BlocksComputed(), OfferTicked()]
    steps = [(event, passed) for event in events for passed in (0.0, LEASE_S)]
    runs = itertools.product((True, False), itertools.product(steps, repeat=3))
    for is_ready, run in runs:
        machine, ledger = offer(is_ready=is_ready), Ledger(is_ready=is_ready)
        now = 0.0
        for event, passed in run:
            now += passed
            drive(machine, ledger, event, now)


class OfferModel(RuleBasedStateMachine):
    """Long random runs with four readers and strangers, against the ledger."""

    keys = st.builds(
        EngineKey,
        st.sampled_from(["decode-0"] * 4 + ["decode-1"]),
        st.sampled_from(["a1"] * 4 + ["b2"]),
        st.builds(Rank, tp=st.integers(0, 3), tp_size=st.just(4)),
    )

    @initialize(readers=st.sets(st.integers(0, 3), min_size=1), is_ready=st.booleans())
    def open(self, *, readers: set[int], is_ready: bool) -> None:
        self.readers = tuple(Rank(tp=tp, tp_size=4) for tp in sorted(readers))
        self.machine = offer(is_ready=is_ready)
        self.ledger, self.now = Ledger(is_ready=is_ready), 0.0

    def let_in(self, event: Event) -> None:
        drive(self.machine, self.ledger, event, self.now)

    @rule(reader=keys, asks=st.booleans())
    def a_reader_renews(self, *, reader: EngineKey, asks: bool) -> None:
        self.let_in(RenewArrived(reader, self.readers, asks))

    @rule(is_likely=st.integers(0, 3))
    def nobody_will_read(self, is_likely: int) -> None:
        if not is_likely:
            self.let_in(OfferSpared())

    @rule(reader=keys, is_declining=st.booleans())
    def a_reader_ends(self, *, reader: EngineKey, is_declining: bool) -> None:
        self.let_in(declined(reader) if is_declining else ReadEnded(reader))

    @rule()
    def the_blocks_are_computed(self) -> None:
        self.let_in(BlocksComputed())

    @rule(reader=keys)
    def a_reader_goes_away(self, reader: EngineKey) -> None:
        self.let_in(ReaderLost(reader))

    @rule(is_likely=st.integers(0, 9))
    def the_producer_withdraws(self, is_likely: int) -> None:
        if not is_likely:
            self.let_in(WithdrawRequested())

    @rule(passed=st.sampled_from([0.0, 5.0, 10.0, 29.0, 31.0]))
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.let_in(OfferTicked())

    @rule(passed=st.sampled_from([5.0, 29.0]))
    def the_producer_is_stopped(self, passed: float) -> None:
        self.now += passed

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.now += LEASE_S
            self.let_in(OfferTicked())
            assert self.ledger.ends == 1


TestOfferModel = OfferModel.TestCase
TestOfferModel.settings = settings(max_examples=25, stateful_step_count=40)
