"""The lead's decisions about agreements: one verdict, and done only if all are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.engine.ballots import Ballots
from kvferry.engine.errors import PeerLost, TransferFailed
from kvferry.protocol.failure import failure_of
from kvferry.protocol.identity import Rank
from kvferry.protocol.link import Verdict, Vote

RANKS = Rank(tp_size=2, pp_size=2).instance()
HERE = "manifest-1"


def ballots_of(**bounds: int) -> Ballots:
    """Those of a complete instance of four."""
    ballots = Ballots(RANKS[0], **bounds)
    ballots.instance = HERE
    return ballots


def done(key="k", *, wait_s=10.0, instance=HERE) -> Vote:
    return Vote(key, instance, wait_s)


def failed(rank, key="k", detail="no") -> Vote:
    failure = failure_of(TransferFailed(detail, peer="p", phase="reading"), rank)
    return Vote(key, HERE, 10.0, failure)


def test_done_when_the_last_rank_says_so() -> None:
    """Three of four are not done; the fourth makes it done, told to all at once."""
    ballots = ballots_of()
    for rank in RANKS[:3]:
        assert ballots.vote(rank, done(), 0.0) == []
    assert len(ballots) == 1
    assert ballots.vote(RANKS[3], done(), 0.0) == [(None, Verdict("k"))]
    assert len(ballots) == 0


def test_the_first_failure_is_the_verdict_of_all() -> None:
    """Two fail at once: one verdict; the second hears the first."""
    ballots = ballots_of()
    ballots.vote(RANKS[0], done(), 0.0)
    (told,) = ballots.vote(RANKS[1], failed(RANKS[1], detail="first"), 0.0)
    assert told.rank is None
    assert told.verdict.failure is not None
    assert told.verdict.failure.detail == "first"
    assert told.verdict.failure.origin == RANKS[1]
    again = ballots.vote(RANKS[2], failed(RANKS[2], detail="second"), 0.0)
    assert again == [(RANKS[2], told.verdict)]
    assert len(ballots) == 0


def test_a_late_first_vote_hears_the_failure_and_a_second_vote_is_refused() -> None:
    """A key names one try."""
    ballots = ballots_of()
    (told,) = ballots.vote(RANKS[1], failed(RANKS[1]), 0.0)
    assert ballots.vote(RANKS[3], done(), 1.0) == [(RANKS[3], told.verdict)]
    for rank in (RANKS[1], RANKS[3]):
        ((hearer, refused),) = ballots.vote(rank, done(), 2.0)
        assert hearer == rank
        assert refused.failure is not None
        assert refused.failure.kind == "MisuseError"
    assert ballots.ignored == 2


def test_a_key_that_was_done_is_refused() -> None:
    """Whoever votes again, nobody else hears of it."""
    ballots = ballots_of()
    for rank in RANKS:
        ballots.vote(rank, done(), 0.0)
    ((hearer, verdict),) = ballots.vote(RANKS[2], done(), 0.0)
    assert hearer == RANKS[2]
    assert verdict.failure is not None
    assert verdict.failure.kind == "MisuseError"


def test_a_rank_may_take_its_word_back_before_the_verdict() -> None:
    """Its caller was cancelled while it waited for the others."""
    ballots = ballots_of()
    ballots.vote(RANKS[0], done(), 0.0)
    ((hearer, verdict),) = ballots.vote(RANKS[0], failed(RANKS[0]), 0.0)
    assert hearer is None
    assert verdict.failure is not None


def test_a_vote_twice_is_one_vote() -> None:
    """One rank cannot stand in for another."""
    ballots = ballots_of()
    for _ in range(4):
        assert ballots.vote(RANKS[0], done(), 0.0) == []
    assert ballots.ignored == 3


def test_ranks_that_are_not_heard_are_named_at_the_deadline() -> None:
    """The shortest wait counts; nothing happens before it."""
    ballots = ballots_of()
    ballots.vote(RANKS[0], done(wait_s=10.0), 100.0)
    ballots.vote(RANKS[1], done(wait_s=3.0), 101.0)
    assert ballots.deadline == 104.0
    assert ballots.tick(103.9) == []
    ((hearer, verdict),) = ballots.tick(104.0)
    assert hearer is None
    assert verdict.failure is not None
    assert verdict.failure.kind == "DeadlineExceeded"
    assert str(RANKS[2]) in verdict.failure.detail
    assert str(RANKS[3]) in verdict.failure.detail
    assert str(RANKS[1]) not in verdict.failure.detail
    assert ballots.deadline is None


def test_a_lost_rank_fails_all_that_is_open() -> None:
    """Its death is the verdict of each."""
    ballots = ballots_of()
    for key in ("a", "b"):
        ballots.vote(RANKS[0], done(key), 0.0)
    lost = failure_of(PeerLost("gone"), RANKS[2])
    assert ballots.lose(lost) == [(None, Verdict(key, lost)) for key in ("a", "b")]
    assert len(ballots) == 0


@pytest.mark.parametrize("ours", ["", "manifest-2"])
def test_a_vote_from_before_a_rank_was_lost_counts_for_nothing(ours) -> None:
    """Whoever began under another manifest may wait for a rank that never votes."""
    ballots = ballots_of()
    ballots.instance = ours
    ((hearer, verdict),) = ballots.vote(RANKS[0], done(), 0.0)
    assert hearer is None
    assert verdict.failure is not None
    assert str(RANKS[0]) in verdict.failure.detail


def test_what_is_kept_is_bounded() -> None:
    """More than so many are refused at once, told to all; settled ones are forgotten."""
    ballots = ballots_of(most_open=3, remembered=5)
    for number in range(20):
        told = ballots.vote(RANKS[0], done(str(number)), 0.0)
        assert bool(told) is (number >= 3)
    assert len(ballots) == 3
    assert len(ballots._settled) == 5
    assert ballots.vote(RANKS[1], done("0"), 0.0) == []  # of the open ones


class Walk(RuleBasedStateMachine):
    """Any votes, losses and ticks in any order, against what `agree` promises."""

    keys = st.sampled_from(["a", "b", "c"])
    ranks = st.sampled_from(RANKS)

    def __init__(self) -> None:
        super().__init__()
        self.ballots = Ballots(RANKS[0], most_open=2, remembered=100)
        self.generation = 1
        self.ballots.instance = "1"
        self.now = 0.0
        self.votes: dict[tuple[str, Rank], bool] = {}  # by the manifest of now
        self.told: dict[str, Verdict] = {}

    def hear(self, tolds, *, voter: Rank | None = None) -> None:
        for told in tolds:
            key = told.verdict.key
            if told.rank is None:
                assert key not in self.told, "a second verdict"
                self.told[key] = told.verdict
                if told.verdict.failure is None:
                    assert all(self.votes.get((key, rank)) for rank in RANKS)
            else:
                assert told.rank == voter
                assert key in self.told
                assert told.verdict.failure is not None

    @rule(key=keys, rank=ranks, is_done=st.booleans(), is_stale=st.booleans())
    def vote(self, key, rank, is_done, is_stale) -> None:
        """A rank votes, perhaps under an earlier manifest, perhaps again."""
        instance = str(self.generation - is_stale)
        vote = done(key, instance=instance) if is_done else failed(rank, key)
        if is_done and not is_stale and key not in self.told:
            self.votes[key, rank] = True
        self.hear(self.ballots.vote(rank, vote, self.now), voter=rank)
        if not is_done or is_stale:
            assert key in self.told

    @rule(rank=ranks)
    def lose(self, rank) -> None:
        """A rank is lost, and joins anew."""
        self.hear(self.ballots.lose(failure_of(PeerLost("gone"), rank)))
        assert len(self.ballots) == 0
        self.generation += 1
        self.ballots.instance = str(self.generation)
        self.votes.clear()

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds) -> None:
        """Time passes."""
        self.now += seconds
        self.hear(self.ballots.tick(self.now))
        assert self.ballots.deadline is None or self.ballots.deadline > self.now

    @invariant()
    def nothing_is_open_and_settled(self) -> None:
        """A key with a verdict waits for nobody, and the bound holds."""
        assert not self.ballots._open.keys() & self.told.keys()
        assert len(self.ballots) <= 2


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


def test_a_verdict_crosses_the_wire() -> None:
    """As every message of a link does."""
    ((_, verdict),) = ballots_of().vote(RANKS[1], failed(RANKS[1]), 0.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict) == (
        verdict
    )
