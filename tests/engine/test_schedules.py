"""Thousands of random schedules, and faults planted in the engine that they must find.

A failure says its seed: ``play(seed)`` of `tests.engine.schedules` brings it back.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import trio

from kvferry.engine import pull as pull_service
from kvferry.engine.fabric import Progress
from kvferry.engine.finish import FinishStage
from kvferry.engine.offer import Offers
from kvferry.engine.peers import Peer, Peers
from kvferry.engine.pull import _Pull
from kvferry.engine.quarantine import Quarantine
from kvferry.engine.testing import ScheduleFailed
from kvferry.protocol.lifecycle.machine import Row
from kvferry.protocol.lifecycle.offer import (
    ConfirmRead,
    NoteReader,
    OfferMachine,
    OfferState,
    ReadEnded,
    RenewArrived,
)
from kvferry.protocol.lifecycle.pull import (
    OVER,
    ConfirmArrived,
    PullMachine,
    PullState,
    ReclaimBlocks,
    WaveSettled,
)
from kvferry.protocol.link import Refused
from tests.engine.schedules import SHAPES, play, tally

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = 5_000
CHUNK = 250


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_schedules(first: int) -> None:
    """One outcome each, done is right, no block in two hands, everything back to base."""
    seen: Counter[str] = Counter()
    shapes = set()
    for seed in range(first, first + CHUNK):
        one = play(seed)
        shapes.add(one.shape_name)
        seen.update(tally([one]))
    # Not by everything failing, or nothing: each outcome and each kind of fault.
    assert shapes == set(SHAPES)
    for what in (
        *("done", "cancelled", "released", "expired", "withdrawn"),
        *("done in bulk", "pull_quarantined"),
        *("PeerLost", "OfferSpent", "LeaseExpired", "TransferFailed"),
        *("kill", "leave", "freeze", "cut", "cancel", "withdraw", "failing_calls"),
        *("late_messages", "doubled_messages", "broken_dials", "late_transfers"),
        *("stalled_transfers", "failing_transfers", "lost_transfers"),
    ):
        assert seen[what], (what, seen)
    assert seen["done"] > CHUNK, seen


def told(seeds: range) -> str:
    """All that the runs did and came to."""
    plays = [play(seed) for seed in seeds]
    return "\n".join(
        line
        for one in plays
        for line in (*one.schedule.story, *map(str, one.ledger.outcomes.items()))
    )


def test_the_seed_alone_brings_a_run_back() -> None:
    """In this process and in another: the same faults, at the same instants."""
    here = told(range(20))
    assert here.count("\n") > 200
    code = "from tests.engine.test_schedules import told; print(told(range(20)))"
    there = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert there.stdout.strip().splitlines() == here.splitlines()


# Teeth: each of these is found.


def blocks_given_back_undrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull that ends early does not wait for its transfers."""
    monkeypatch.setattr(pull_service, "OVER", OVER | {PullState.DRAINING})


def lost_taken_for_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the transport lost track of is taken for over."""
    original = _Pull._progressed

    def progressed(self, number, progress, cause):
        if progress is Progress.LOST:
            self._settle(number, cause)
        else:
            original(self, number, progress, cause)

    monkeypatch.setattr(_Pull, "_progressed", progressed)


def lost_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or even for done."""

    def progressed(self, number, progress, cause):
        self._settle(number, None if progress is Progress.LOST else cause)

    monkeypatch.setattr(_Pull, "_progressed", progressed)


def failed_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer is over, so its bytes are there."""
    original = _Pull._progressed

    def progressed(self, number, progress, cause):
        cause = None if progress is Progress.FAILED else cause
        original(self, number, progress, cause)

    monkeypatch.setattr(_Pull, "_progressed", progressed)


def confirmed_after_the_end(state: OfferState) -> Callable:
    """The producer answers as if it held the blocks, and does not any more."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def confirm(machine, event, _now):
            return machine.state, [ConfirmRead(event.reader, machine.epoch)]

        def renew(machine, event, _now):
            return machine.state, [NoteReader(event.reader)]

        for event, decide in ((ReadEnded, confirm), (RenewArrived, renew)):
            row = Row(decide, (state,))
            monkeypatch.setitem(OfferMachine.table, (state, event), row)

    plant.__name__ = f"confirmed_after_{state.value}"
    return plant


def refused_taken_for_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any answer of the producer will do."""
    original = _Pull._answered

    def answered(self, source, answer):
        if isinstance(answer, Refused):
            self.feed(ConfirmArrived(source))
        else:
            original(self, source, answer)

    monkeypatch.setattr(_Pull, "_answered", answered)


def done_without_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Done when the last byte has come, whoever held the blocks."""
    original = PullMachine._settle

    def settle(self, event, now):
        state, effects = original(self, event, now)
        if state is PullState.CONFIRMING:
            return self._run_finish(now, effects)
        return state, effects

    old = PullMachine.table[PullState.READING, WaveSettled]
    row = Row(settle, (*old.targets, PullState.FINISHING))
    monkeypatch.setitem(PullMachine.table, (PullState.READING, WaveSettled), row)


def quarantine_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not drain is given back all the same."""
    monkeypatch.setattr(Quarantine, "hold", lambda *_: None)
    monkeypatch.setattr(Quarantine, "reclaim", lambda *_: None)


def quarantine_left_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the transfers to settle frees the blocks."""

    def reclaimed(self):
        self._unsettled.clear()
        return PullState.RECLAIMED, [ReclaimBlocks()]

    monkeypatch.setattr(PullMachine, "_reclaimed", reclaimed)


def tails_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finish stage does nothing."""

    async def run(self, tails):
        pass

    monkeypatch.setattr(FinishStage, "run", run)


def rows_never_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared for a peer stays, though nobody uses it any more."""
    monkeypatch.setattr(Peers, "leave", lambda *_: None)


def rows_let_go_under_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared for a peer goes with its link, whoever still uses it."""
    original = Peers._discard_unused

    def discard(self, sources):
        users, sources.users = sources.users, 0
        original(self, sources)
        sources.users = users

    monkeypatch.setattr(Peers, "_discard_unused", discard)


def answers_to_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is taken for one to whichever pull is under way."""

    def deliver(self, message):
        for subscriber in tuple(self._subscribers.values()):
            subscriber.on_answer(message)

    monkeypatch.setattr(Peer, "deliver", deliver)


def offers_known_by_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket of an earlier offer of the same request is good for the next one."""
    monkeypatch.setattr(
        Offers,
        "_find",
        lambda self, request_id, _offer_id: self._active.get(request_id),
    )


def bulk_done_when_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has landed in the staging buffer is never put in its place."""

    async def rearrange(self, number):
        self._settle(number)

    monkeypatch.setattr(_Pull, "_rearrange", rearrange)


def leases_never_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that has run out ends only if somebody asks."""

    async def sweep(self):
        await trio.sleep_forever()

    monkeypatch.setattr(Offers, "sweep", sweep)


PLANTED = (
    blocks_given_back_undrained,
    lost_taken_for_settled,
    lost_taken_for_done,
    failed_taken_for_done,
    confirmed_after_the_end(OfferState.EXPIRED),
    confirmed_after_the_end(OfferState.WITHDRAWN),
    refused_taken_for_confirmed,
    done_without_the_fence,
    quarantine_skipped,
    quarantine_left_too_early,
    tails_not_zeroed,
    rows_never_let_go,
    rows_let_go_under_transfers,
    answers_to_anybody,
    offers_known_by_request_alone,
    bulk_done_when_landed,
    leases_never_swept,
)
SEEDS_TO_FIND = 400


def first_found() -> int | None:
    """The first seed under which something is wrong."""
    for seed in range(SEEDS_TO_FIND):
        try:
            play(seed)
        except ScheduleFailed:
            return seed
    return None


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, plant) -> None:
    """Within some hundreds of schedules, which without it are all in order."""
    plant(monkeypatch)
    assert first_found() is not None
