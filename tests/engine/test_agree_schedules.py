"""Hundreds of random schedules over an instance that agrees: killed, frozen, cut, late."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial

import pytest
import trio

from kvferry.engine import EngineConfig, FerryError, Rank, TransferFailed
from kvferry.engine.agreements import Agreements
from kvferry.engine.ballots import Ballots
from kvferry.engine.testing import Host, Rates, Schedule, ScheduleFailed
from tests.kit import IDENTITY, Pool, at_base

RANKS = Rank(tp_size=3).instance()
LEAD = ("127.0.0.1", 45_000)
KEYS = 12
CALM = Rates(
    failing_calls=0.0, broken_dials=0.0, doubled_messages=0.0, acts=0.0, late_s=0.3
)
ROUGH = Rates(failing_calls=0.0, broken_dials=0.1, acts=0.004, stalled_s=6.0)
TIMES = {
    "keepalive_s": 0.5,
    "silence_s": 2.0,
    "redial_s": 0.1,
    "connect_timeout_s": 5.0,
    "handshake_timeout_s": 5.0,
    "idle_poll_s": 5.0,
}


class Run:
    """One schedule, and its books.

    Attributes:
        well: By key the starts whose work has ended well.
        heard: By key what each start heard: "done", or the error's class.
    """

    def __init__(self, seed: int, rates: Rates) -> None:
        self.schedule = Schedule(seed, rates=rates)
        self.well: defaultdict[str, set[str]] = defaultdict(set)
        self.heard: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._next = [0] * len(RANKS)
        self._all_through = trio.Event()
        self._is_calm = rates is CALM

    def play(self) -> Counter[str]:
        """Play it; how often what was heard."""
        self.schedule.play(self._scenario)
        return Counter(o for heard in self.heard.values() for o in heard.values())

    async def _scenario(self) -> None:
        with trio.fail_after(5000.0):
            async with trio.open_nursery() as nursery:
                for tp in range(len(RANKS)):
                    nursery.start_soon(self._rank, tp)
        for key, heard in self.heard.items():
            if "done" in heard.values():
                # Nobody is told so who, or for whom, not all was done.
                assert {start[0] for start in self.well[key]} == set("012"), key
                done = {start for start, o in heard.items() if o == "done"}
                assert done <= self.well[key], key
            if self._is_calm:
                assert len(heard) == len(RANKS)
                assert len(set(heard.values())) == 1, (key, heard)

    async def _rank(self, tp: int) -> None:
        """One rank over all its starts: a killed one is started anew."""
        place = {"listen": LEAD} if tp == 0 else {"join": LEAD}
        config = EngineConfig(
            engine_id="p", identity=IDENTITY, rank=RANKS[tp], **place, **TIMES
        )
        for number in range(100):
            name = f"{tp}-{number}"
            host = Host(self.schedule, name)
            with (
                self.schedule.may("kill " + name, host.kill, weight=0.2),
                self.schedule.may("cut " + name, host.cut),
                self.schedule.may("freeze " + name, host.freeze, undo=host.thaw),
            ):
                await host.run(
                    config, Pool(2, layers=1).cache, partial(self._use, tp, name)
                )
            if not host.is_killed:
                return

    async def _use(self, tp: int, name: str, engine) -> None:
        while self._next[tp] < KEYS:
            key = str(self._next[tp])
            self._next[tp] += 1
            try:
                await engine.instance_ready(60.0)
                work = partial(self._work, key, name)
                outcome = await engine.agree(key, work, deadline_s=3.0)
            except FerryError as error:
                outcome = type(error).__name__
            self.heard[key][name] = outcome
            await trio.sleep(0.0 if self._is_calm else 2.0)
        if min(self._next) == KEYS:
            self._all_through.set()
        await self._all_through.wait()
        self.schedule.calm()
        await trio.sleep(30.0)
        at_base(engine)

    async def _work(self, key: str, name: str) -> str:
        await trio.sleep(self.schedule.draw(100) / 100)
        if self.schedule.chance(0.05):
            raise TransferFailed("drawn")
        self.well[key].add(name)
        return "done"


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_late_messages_change_no_outcome(first) -> None:
    """While nobody is lost, all ranks hear the same of every key."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + 20):
        seen += Run(seed, CALM).play()
    assert seen.keys() == {"done", "TransferFailed"}
    assert seen["done"] > 400


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_done_is_never_said_alone(first) -> None:
    """Whoever is killed, frozen or cut off: done means that all were, and all ends."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + 20):
        seen += Run(seed, ROUGH).play()
    for outcome in ("done", "TransferFailed", "PeerLost", "DeadlineExceeded"):
        assert seen[outcome] > 5, seen
    assert seen["done"] > 100, seen


def too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three are enough."""
    original = Ballots._settle

    def vote(self, rank, vote, now):
        told = original_vote(self, rank, vote, now)
        ballot = self._open.get(vote.key)
        if ballot is not None and len(ballot.done) == 2:
            return [original(self, vote.key)]
        return told

    original_vote = Ballots.vote
    monkeypatch.setattr(Ballots, "vote", vote)


def done_without_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that loses its lead takes its own work for everybody's."""

    def lose(self, *_: object, **__: object) -> None:
        for agreement in self._open.values():
            agreement.conclude(None)

    monkeypatch.setattr(Agreements, "lose", lose)


@pytest.mark.parametrize("plant", [too_few, done_without_the_lead])
def test_planted_faults_are_found(monkeypatch, plant) -> None:
    """Some schedule fails with each of them."""
    plant(monkeypatch)
    with pytest.raises(ScheduleFailed):
        for seed in range(100):
            Run(seed, ROUGH).play()
