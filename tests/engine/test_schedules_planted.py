"""Faults planted in the push mode that random schedules must find.

Those of the pull mode are in `tests.engine.test_schedules`. Not here: a lease that
nobody looks at. What is written after it lands in blocks that the consumer keeps until
the producer has answered, so that no ledger sees it; the tests of case l3 do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvferry.engine.delivery import Delivery
from kvferry.engine.finish import FinishStage
from kvferry.engine.flight import Flights
from kvferry.engine.landing import Landing
from kvferry.engine.push import Push
from kvferry.engine.pushes import Pushes
from kvferry.engine.readiness import Readiness, Step
from kvferry.engine.selector import Clip
from kvferry.engine.traffic import Traffic
from kvferry.protocol.lifecycle.landing import LandingMachine, LandingState, _Source
from kvferry.protocol.lifecycle.machine import Row
from kvferry.protocol.lifecycle.push import PushMachine
from tests.engine.schedules import first_found

if TYPE_CHECKING:
    from collections.abc import Callable


def revoked_before_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer answers a revocation at once, whatever it has in flight."""
    original = Delivery.revoke

    def revoke(self, link):
        self._link = link
        self._tell_revoked()
        original(self, link)

    monkeypatch.setattr(Delivery, "revoke", revoke)


def landed_one_part_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source is taken for written when its last part is still missing."""

    def is_written(self):
        return self.parts is not None and len(self.arrived) >= self.parts - 1

    monkeypatch.setattr(_Source, "is_written", property(is_written))


def landed_on_the_producers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is there when the producer has said so: who needs notices."""
    monkeypatch.setattr(
        _Source, "is_written", property(lambda self: self.parts is not None)
    )


def landed_on_notices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has come, so all of them have."""
    original = LandingMachine._arrive

    def arrive(self, event, now):
        self._sources[event.source].parts = 1
        return original(self, event, now)

    _replace_row(monkeypatch, LandingMachine, original, arrive)


def _replace_row(monkeypatch, machine, original, planted) -> None:
    for key, row in list(machine.table.items()):
        decide = getattr(row, "decide", None)
        cells = getattr(decide, "__closure__", None) or ()
        if decide is original or any(c.cell_contents is original for c in cells):
            monkeypatch.setitem(machine.table, key, Row(planted, row.targets))


def dropped_waves_posted_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been told as settled still has its turn."""
    monkeypatch.setattr(Traffic, "drop", lambda _self, lane: list(lane.waiting))


def waiting_waves_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that drains goes on to post what waits."""
    monkeypatch.setattr(Delivery, "_drop_waiting", lambda _self: None)


def quarantine_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost source's blocks are given back all the same."""
    monkeypatch.setattr(Landing, "_quarantine", lambda _self: None)


def quarantine_left_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has answered, and yet the blocks are taken for safe."""

    async def ask_again(self, source):
        del source
        self._reclaim()

    monkeypatch.setattr(Landing, "_ask_again", ask_again)


def producers_quarantine_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push gives its blocks back while a wave of it may still read them."""
    monkeypatch.setattr(Delivery, "_quarantine", lambda _self: None)


def push_returns_undrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that fails does not wait for its deliveries to end."""

    def ended(self):
        return self._outcome(), []

    monkeypatch.setattr(PushMachine, "_ended", ended)


def done_with_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push is done when one of the consumer's ranks has it."""
    original = PushMachine._land

    def land(self, event, now):
        self._expected = frozenset({event.reader.rank})
        return original(self, event, now)

    _replace_row(monkeypatch, PushMachine, original, land)


def lost_taken_for_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the transport lost track of is taken for over."""
    original = Flights._progressed

    def progressed(self, wave, on_landed, progress, cause):
        original(self, wave, on_landed, progress, cause)
        if wave in self.in_flight and not progress.is_settled:
            self.settle(wave, cause)

    monkeypatch.setattr(Flights, "_progressed", progressed)


def failed_taken_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write is over, so its bytes are there; and notices come for all of them."""
    original = Delivery._settled
    monkeypatch.setattr(
        Delivery, "_settled", lambda self, number, _cause: original(self, number, None)
    )
    monkeypatch.setattr(
        _Source, "is_written", property(lambda self: self.parts is not None)
    )


def written_before_it_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes leave before the caller's event."""

    async def while_open(self, after):
        self._after = after

    monkeypatch.setattr(Push, "while_open", while_open)


def chunks_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first range that is ready takes everything along, and the others nothing."""

    def step(self, layer, new):
        whole = (0, self._num_tokens)
        is_first = self._ready[layer].total == new[1] - new[0]
        clip = Clip(whole, whole) if is_first else Clip(new, (new[0], new[0]))
        return Step(None if self._is_uniform else layer, clip)

    monkeypatch.setattr(Readiness, "_step", step)


def committed_with_something_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts what never became ready, on either side."""
    monkeypatch.setattr(Readiness, "missing", lambda _self: ())
    monkeypatch.setattr(
        Landing,
        "_check_finished",
        _select_only,
    )


def _select_only(landing, source, answer) -> None:
    del source
    landing._num_tokens = answer.num_tokens
    landing._selection = landing._held_shares().select(
        num_tokens=answer.num_tokens,
        computed_tokens=landing._request.computed_tokens,
        spans=landing._request.spans,
    )


def tails_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The finish stage does nothing."""

    async def run(self, tails):
        pass

    monkeypatch.setattr(FinishStage, "run", run)


def cancelled_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landing that is cancelled does not ask for its blocks."""

    def revoked(self):
        return self._outcome(), []

    monkeypatch.setattr(LandingMachine, "_revoked", revoked)
    for key, row in list(LandingMachine.table.items()):
        if key[0] is LandingState.REGISTERED and isinstance(row, Row):
            targets = (*row.targets, LandingState.FAILED, LandingState.CANCELLED)
            monkeypatch.setitem(LandingMachine.table, key, Row(row.decide, targets))


def claims_never_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared for a consumer stays, though nobody uses it any more."""
    monkeypatch.setattr("kvferry.engine.targets.Target.tidy", lambda _self: None)


def tokens_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landing that is over is still looked for."""
    monkeypatch.setattr(Landing, "_drop_tokens", lambda *_: None)


def registrations_never_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that is over stays known."""
    monkeypatch.setattr(Pushes, "_clear", lambda *_: None)


PLANTED = (
    revoked_before_the_drain,
    landed_one_part_early,
    landed_on_the_producers_word,
    landed_on_notices_alone,
    dropped_waves_posted_anyway,
    waiting_waves_not_dropped,
    quarantine_skipped,
    quarantine_left_by_itself,
    producers_quarantine_skipped,
    push_returns_undrained,
    done_with_the_first_rank,
    lost_taken_for_settled,
    failed_taken_for_done,
    written_before_it_is_final,
    chunks_of_the_whole,
    committed_with_something_missing,
    tails_not_zeroed,
    cancelled_without_asking,
    claims_never_let_go,
    tokens_never_dropped,
    registrations_never_cleared,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_fault_of_a_push_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Within some hundreds of schedules, which without it are all in order."""
    plant(monkeypatch)
    assert first_found("pushes") is not None
