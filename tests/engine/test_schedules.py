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
from kvferry.engine.dialogue import Dialogue
from kvferry.engine.fabric import Progress
from kvferry.engine.finish import FinishStage
from kvferry.engine.flight import Flights
from kvferry.engine.offer import Offers
from kvferry.engine.peer import Peer
from kvferry.engine.peers import Peers
from kvferry.engine.quarantine import Quarantine
from kvferry.engine.rearrange import Rearranger
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
from tests.engine.schedules import first_found, play, tally
from tests.engine.sites import SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable

SEEDS = {"pulls": 2_000, "pushes": 1_500, "mixed": 1_500}
CHUNK = 250
FAULTS = (
    *("kill", "leave", "freeze", "cut", "cancel", "failing_calls"),
    *("late_messages", "doubled_messages", "broken_dials", "late_transfers"),
    *("stalled_transfers", "failing_transfers", "lost_transfers"),
)
NOTICES = ("late_notices", "lost_notices", "doubled_notices")
PULLED = (
    *("done", "released", "expired", "withdrawn", "withdraw"),
    *("done in bulk", "pull_quarantined", "OfferSpent"),
)
PUSHED = (
    *("pushed", "streamed", "landed", "body failed", "IncompletePush"),
    *("PushRevoked", "PushAborted", "DeadlineExceeded", "OfferSpent"),
    *("landing_quarantined", "push_quarantined"),
)
SEEN = {
    "pulls": FAULTS + PULLED,
    "pushes": FAULTS + NOTICES + PUSHED,
    "mixed": FAULTS + NOTICES + PULLED + PUSHED,
}
"""Each outcome and each kind of fault: it is not by everything failing, or nothing."""
DONE = {"pulls": ("done", 1.0), "pushes": ("landed", 1.0), "mixed": ("landed", 0.4)}
"""How often the most usual end is seen in a schedule, at least."""


@pytest.mark.parametrize(
    ("kind", "first"),
    [(kind, first) for kind, n in SEEDS.items() for first in range(0, n, CHUNK)],
)
def test_random_schedules(kind: str, first: int) -> None:
    """One outcome each, done is right, no block in two hands, everything back to base."""
    seen: Counter[str] = Counter()
    shapes = set()
    for seed in range(first, first + CHUNK):
        one = play(seed, kind=kind)
        shapes.add(one.shape_name)
        seen.update(tally([one]))
    assert shapes == set(SHAPES)
    for what in (
        *SEEN[kind],
        "cancelled",
        "PeerLost",
        "LeaseExpired",
        "TransferFailed",
    ):
        assert seen[what], (what, seen)
    done, often = DONE[kind]
    assert seen[done] > often * CHUNK, seen


def told(seeds: range) -> str:
    """All that the runs did and came to."""
    plays = [play(seed, kind=kind) for kind in SEEDS for seed in seeds]
    return "\n".join(
        line
        for one in plays
        for line in (*one.schedule.story, *map(str, one.ledger.outcomes.items()))
    )


def test_the_seed_alone_brings_a_run_back() -> None:
    """In this process and in another: the same faults, at the same instants."""
    here = told(range(10))
    assert here.count("\n") > 200
    code = "from tests.engine.test_schedules import told; print(told(range(10)))"
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
    original = Flights._progressed

    def progressed(self, wave, on_landed, progress, cause):
        original(self, wave, on_landed, progress, cause)
        if progress is Progress.LOST:
            self.settle(wave, cause)

    monkeypatch.setattr(Flights, "_progressed", progressed)


def lost_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or even for done."""
    original = Flights._progressed

    def progressed(self, wave, on_landed, progress, cause):
        cause = None if progress is Progress.LOST else cause
        original(self, wave, on_landed, progress, cause)

    monkeypatch.setattr(Flights, "_progressed", progressed)


def failed_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer is over, so its bytes are there."""
    original = Flights._progressed

    def progressed(self, wave, on_landed, progress, cause):
        cause = None if progress is Progress.FAILED else cause
        original(self, wave, on_landed, progress, cause)

    monkeypatch.setattr(Flights, "_progressed", progressed)


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
    original = Dialogue._answered

    def answered(self, source, answer):
        if isinstance(answer, Refused):
            self._feed(ConfirmArrived(source))
        else:
            original(self, source, answer)

    monkeypatch.setattr(Dialogue, "_answered", answered)


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

    def put(self, selected, wave, cell, *, on_end, log):
        on_end(None)

    monkeypatch.setattr(Rearranger, "put", put)


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


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, plant) -> None:
    """Within some hundreds of schedules, which without it are all in order."""
    plant(monkeypatch)
    assert first_found("pulls") is not None
