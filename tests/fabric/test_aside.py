"""`AsideFabric`: what the loop and a thread do to one agent, and what is told of it."""

# ruff: noqa: ARG002 - a stand-in takes what it is given

from __future__ import annotations

import threading  # noqa: TID251 - real threads
from collections import deque
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest
import trio
import trio.testing

from kvferry.engine.fabric import Notice, Operation, Prepared, Progress, Transfer
from kvferry.engine.fabric.aside import LOOKS, AsideFabric
from kvferry.engine.fabric.base import MAX_NOTICE_BYTES, Fabric
from kvferry.protocol.errors import (
    EngineClosed,
    FerryInternalError,
    ImpossiblePlan,
    MisuseError,
    PeerLost,
    PeerUnreachable,
    TransferFailed,
)
from kvferry.protocol.layout import Region
from tests.kit import World

REGION = Region("DRAM", 0, 4096, 1 << 20)
ROWS = np.array([[4096, 64, 0, 64, 8]], np.uint64)
ONE = np.zeros(1, np.int32)
NEVER = 1e9
DEADLINE_S = 60.0
LOOP, THREAD = "loop", "thread"
REFUSALS = [
    (PeerLost("gone"), PeerLost),
    (ValueError("a bug"), FerryInternalError),
]


class Agent(Fabric):
    """Notes who asks for what; whoever does not have it, or two at once, fail the test.

    Attributes:
        calls: What was asked for, by whom; looks are not.
        arriving: The notices of the next look.
        errors: What a method raises, as long as it stands here.
    """

    def __init__(self) -> None:
        self.name = "agent"
        self.calls: list[tuple[str, str]] = []
        self.looks = 0
        self.is_closed = False
        self.peers: list[str] = []
        self.prepared: list[Prepared] = []
        self.open: list[Told] = []
        self.arriving: deque[Notice] = deque()
        self.errors: dict[str, Exception] = {}
        self.violations: list[str] = []
        self.fabric: AsideFabric | None = None
        self._busy = threading.Lock()
        self._loop = threading.get_ident()

    @contextmanager
    def asked(self, what):
        if not self._busy.acquire(blocking=False):
            self.violations.append(what)
            raise AssertionError(f"{what} while another call is under way")
        try:
            who = LOOP if threading.get_ident() == self._loop else THREAD
            if self.fabric is not None and is_served(self.fabric) != (who == THREAD):
                self.violations.append(f"{what} by the {who}")
            if what not in {"poll", "take_notices"}:
                self.calls.append((what, who))
            if what in self.errors:
                raise self.errors[what]
            if self.is_closed and what not in {"close", "take_notices"}:
                raise EngineClosed("closed")
            yield
        finally:
            self._busy.release()

    def by(self, what):
        """Who has asked for it."""
        return [who for name, who in self.calls if name == what]

    def register(self, regions):
        with self.asked("register"):
            assert regions == (REGION,)

    def metadata(self):
        with self.asked("metadata"):
            return b"agent"

    def connect(self, metadata):
        with self.asked("connect"):
            self.peers.append(metadata.decode())
            return self.peers[-1]

    def disconnect(self, peer):
        with self.asked("disconnect"):
            self.peers.remove(peer)

    def prepare(self, peer, memory, rows):
        with self.asked("prepare"):
            self.prepared.append(Prepared())
            return self.prepared[-1]

    def discard(self, prepared):
        with self.asked("discard"):
            self.prepared.remove(prepared)

    def post(self, operation, local, local_ids, remote, remote_ids, *, notice=b""):
        with self.asked("post"):
            assert local in self.prepared
            assert remote in self.prepared
            self.open.append(Told(notice))
            return self.open[-1]

    def poll(self, transfer):
        with self.asked("poll"):
            assert transfer in self.open
            transfer.looks += 1
            return transfer.progress

    def release(self, transfer):
        with self.asked("release"):
            assert transfer.progress.is_settled
            self.open.remove(transfer)

    def notify(self, peer, payload):
        with self.asked("notify"):
            assert peer in self.peers

    def take_notices(self):
        with self.asked("take_notices"):
            self.looks += 1
            return [self.arriving.popleft() for _ in range(len(self.arriving))]

    def close(self):
        with self.asked("close"):
            self.is_closed = True
            self.prepared.clear()
            self.open.clear()

    def counts(self):
        return {"peers": -1, "prepared": -1, "transfers": -1, "dropped_notices": 7}


def is_served(fabric: AsideFabric) -> bool:
    """By a thread, which is there."""
    custody = fabric._custody
    return custody._has_it.done() and not custody._has_gone.done()


class Told(Transfer):
    """Is as far as the test says."""

    def __init__(self, notice) -> None:
        self.notice = notice
        self.progress = Progress.ACTIVE
        self.looks = 0


class Place:
    """An agent of which the loop and threads take turns, with one peer."""

    def __init__(self) -> None:
        self.world = World()
        self.agent = Agent()
        self.fabric = AsideFabric(
            self.agent, long_s=NEVER, home_s=NEVER, log=self.world.logger()
        )
        self.agent.fabric = self.fabric
        self.news = 0
        self.fabric.register([REGION])
        self.fabric.connect(b"peer")
        self.sides = self.prepare(None), self.prepare("peer")

    def prepare(self, peer):
        return self.fabric.prepare(peer, "DRAM", ROWS)

    def post(self, *sides, ids=ONE, notice=b""):
        local, remote = sides or self.sides
        return self.fabric.post(Operation.READ, local, ids, remote, ids, notice=notice)

    def hear(self) -> None:
        self.news += 1

    async def until(self, is_so) -> None:
        while not is_so():
            await trio.lowlevel.checkpoint()

    async def until_polled(self, transfer, progress) -> None:
        await self.until(lambda: self.fabric.poll(transfer) is progress)

    async def until_done(self) -> None:
        """What the thread was asked for until now."""
        jobs = trio.Event()
        token = trio.lowlevel.current_trio_token()
        self.fabric._custody.do(lambda: token.run_sync_soon(jobs.set))
        await jobs.wait()

    @asynccontextmanager
    async def aside(self):
        """A thread has the agent, until this is left."""
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.fabric.attend, self.hear)
                await self.until(lambda: self.fabric._custody._is_attended)
                self.fabric._custody._go_aside()
                await self.until(lambda: is_served(self.fabric))
                yield
                nursery.cancel_scope.cancel()
        assert not self.fabric.drives_itself
        assert not self.agent.violations


@pytest.fixture
def place() -> Place:
    return Place()


async def test_what_is_posted_at_home_is_followed_aside(place):
    """And released there; the loop hears that there is news."""
    transfer = place.post()
    assert place.fabric.poll(transfer) is Progress.ACTIVE
    async with place.aside():
        looks = place.agent.open[0].looks
        await place.until(lambda: place.agent.open[0].looks > looks)
        assert place.fabric.poll(transfer) is Progress.ACTIVE
        assert not place.news
        place.agent.open[0].progress = Progress.DONE
        await place.until(lambda: place.news)
        assert place.fabric.poll(transfer) is Progress.DONE
        place.fabric.release(transfer)
        assert place.fabric.counts()["transfers"] == 0
    assert place.agent.by("release") == [THREAD]
    assert not place.agent.open


async def test_what_is_posted_aside_is_followed_at_home(place):
    """And what has settled aside is so at home, without another look."""
    async with place.aside():
        first, second = place.post(notice=b"behind"), place.post()
        assert place.fabric.counts()["transfers"] == 2
        await place.until(lambda: len(place.agent.open) == 2)
        assert [move.notice for move in place.agent.open] == [b"behind", b""]
        place.agent.open[0].progress = Progress.DONE
        await place.until_polled(first, Progress.DONE)
    looks = place.agent.open[0].looks
    assert place.fabric.poll(first) is Progress.DONE
    assert place.agent.open[0].looks == looks
    assert place.fabric.poll(second) is Progress.ACTIVE
    place.agent.open[1].cause = cause = TransferFailed("this one")
    place.agent.open[1].progress = Progress.FAILED
    assert place.fabric.poll(second) is Progress.FAILED
    assert second.cause is cause
    for transfer in (first, second):
        place.fabric.release(transfer)
    assert place.agent.by("post") == [THREAD] * 2
    assert place.agent.by("release") == [LOOP] * 2


@pytest.mark.parametrize("is_aside", [False, True])
async def test_a_lost_transfer_is_told_once_and_looked_at_on(place, is_aside):
    """It may settle yet, and must not be released before."""

    async def follow() -> None:
        transfer = place.post()
        await place.until(lambda: place.agent.open)
        (move,) = place.agent.open
        move.cause, move.progress = TransferFailed("lost"), Progress.LOST
        await place.until_polled(transfer, Progress.LOST)
        assert transfer.cause is move.cause
        with pytest.raises(MisuseError):
            place.fabric.release(transfer)
        move.cause, move.progress = None, Progress.DONE
        await place.until_polled(transfer, Progress.DONE)
        assert transfer.cause is None
        place.fabric.release(transfer)

    if is_aside:
        async with place.aside():
            await follow()
    else:
        await follow()
    assert not place.agent.open


async def test_a_post_that_is_refused_aside_has_failed(place):
    """The loop hears of it as of other news, and there is nothing to give back."""
    async with place.aside():
        place.agent.errors["post"] = cause = PeerLost("gone")
        transfer = place.post()
        await place.until(lambda: place.news)
        assert place.fabric.poll(transfer) is Progress.FAILED
        assert transfer.cause is cause
        place.fabric.release(transfer)
        del place.agent.errors["post"]
        place.post()
        await place.until(lambda: place.agent.open)
    assert place.agent.by("release") == []
    assert place.fabric.counts()["transfers"] == 1


async def test_a_post_that_is_refused_at_home_says_so(place):
    """At once, and nothing is left of it."""
    place.agent.errors["post"] = PeerLost("gone")
    with pytest.raises(PeerLost):
        place.post()
    assert place.fabric.counts()["transfers"] == 0


async def test_after_a_bug_in_a_post_aside_nobody_knows(place):
    """Bytes may be under way: it stays lost, at home too, and is never released."""
    async with place.aside():
        place.agent.errors["post"] = ValueError("a bug")
        transfer = place.post()
        await place.until(lambda: place.news)
        assert place.fabric.poll(transfer) is Progress.LOST
        assert isinstance(transfer.cause, FerryInternalError)
    assert place.fabric.poll(transfer) is Progress.LOST
    with pytest.raises(MisuseError):
        place.fabric.release(transfer)
    assert place.fabric.counts()["transfers"] == 1


@pytest.mark.parametrize(("error", "kind"), REFUSALS)
async def test_posts_of_rows_that_a_thread_cannot_prepare_fail(place, error, kind):
    """With the reason; the rows can be given back, and others are prepared."""
    async with place.aside():
        place.agent.errors["prepare"] = error
        bad = place.prepare("peer")
        await place.until_done()
        del place.agent.errors["prepare"]
        transfer = place.post(place.sides[0], bad)
        await place.until(lambda: place.news)
        assert place.fabric.poll(transfer) is Progress.FAILED
        assert isinstance(transfer.cause, kind)
        place.fabric.release(transfer)
        place.fabric.discard(bad)
        place.fabric.discard(place.prepare("peer"))
    assert place.agent.by("discard") == [THREAD]
    assert place.fabric.counts()["prepared"] == len(place.agent.prepared) == 2


async def test_what_the_loop_can_tell_it_refuses_at_once(place):
    """Also aside: nothing of it becomes a job."""
    discarded = place.prepare("peer")
    place.fabric.discard(discarded)
    before = list(place.agent.calls)
    async with place.aside():
        with pytest.raises(ImpossiblePlan):
            place.fabric.prepare(None, "DRAM", ROWS[:0])
        with pytest.raises(ImpossiblePlan):
            place.post(ids=np.array([8], np.int32))
        with pytest.raises(MisuseError):
            place.post(notice=bytes(MAX_NOTICE_BYTES + 1))
        with pytest.raises(MisuseError):
            place.fabric.notify("peer", bytes(MAX_NOTICE_BYTES + 1))
        with pytest.raises(MisuseError):
            place.post(place.sides[0], discarded)
        for call in (place.fabric.poll, place.fabric.release):
            with pytest.raises(MisuseError):
                call(Transfer())
        with pytest.raises(PeerLost):
            place.prepare("nobody")
        with pytest.raises(PeerLost):
            place.fabric.notify("nobody", b"")
        place.fabric.disconnect("peer")
        with pytest.raises(PeerLost):
            place.post()
        await place.until_done()
    assert place.agent.calls == [*before, ("disconnect", THREAD)]
    assert place.fabric.counts()["transfers"] == 0


@pytest.mark.parametrize("open_moves", [1, LOOKS, LOOKS + 1, 2 * LOOKS, 5 * LOOKS - 3])
def test_every_move_gets_its_turn(place, open_moves):
    """As soon as each other, and few of them in one look."""
    for _ in range(open_moves):
        place.post()
    moves = place.agent.open
    for looks in range(1, 20):
        place.fabric._look()
        seen = [move.looks for move in moves]
        assert sum(seen) == looks * min(open_moves, LOOKS)
        assert max(seen) - min(seen) <= 1


async def test_a_thread_sees_all_of_many_moves_settle(place):
    """Whatever the order they end in, those posted at home and those posted aside."""
    poll = place.fabric.poll
    moves = {place.post() for _ in range(2 * LOOKS)}
    async with place.aside():
        moves |= {place.post() for _ in range(LOOKS)}
        await place.until_done()
        while moves:
            younger = place.agent.open[len(place.agent.open) // 2 :]
            for told in younger:
                told.progress = Progress.DONE
            left = len(moves) - len(younger)
            await place.until(
                lambda left=left: sum(not poll(m).is_settled for m in moves) == left
            )
            for move in tuple(moves):
                if poll(move) is Progress.DONE:
                    place.fabric.release(move)
                    moves.discard(move)
            await place.until_done()
            assert len(place.agent.open) == left
    assert place.fabric.counts()["transfers"] == 0


async def test_notices_are_neither_lost_nor_doubled_nor_turned_round(place):
    """However often the agent changes hands."""
    sent, taken = [], []
    for _ in range(3):
        for _ in range(2):
            sent.append(Notice("peer", bytes([len(sent)])))
            place.agent.arriving.append(sent[-1])
            if len(sent) % 3:
                taken += place.fabric.take_notices()
        async with place.aside():
            for _ in range(4):
                before = place.news
                sent.append(Notice("peer", bytes([len(sent)])))
                place.agent.arriving.append(sent[-1])
                await place.until(lambda before=before: place.news > before)
                if len(sent) % 3:
                    taken += place.fabric.take_notices()
    taken += place.fabric.take_notices()
    assert taken == sent
    assert place.fabric.take_notices() == []


async def test_a_thread_does_all_that_is_asked_for_aside(place):
    """The loop waits for what answers, and for nothing else."""
    fabric = place.fabric
    place.agent.calls.clear()
    async with place.aside():
        fabric.register([REGION])
        assert fabric.metadata() == b"agent"
        assert fabric.connect(b"another") == "another"
        place.agent.errors["connect"] = PeerUnreachable("no answer")
        with pytest.raises(PeerUnreachable):
            fabric.connect(b"third")
        rows = place.prepare("another")
        fabric.notify("another", b"hello")
        assert fabric.counts() == {
            "peers": 2,
            "prepared": 3,
            "transfers": 0,
            "dropped_notices": 7,
        }
        fabric.discard(rows)
        fabric.disconnect("another")
        fabric.disconnect("peer")
        assert fabric.counts()["peers"] == 0
        await place.until_done()
    assert [what for what, _ in place.agent.calls] == [
        "register",
        "metadata",
        "connect",
        "connect",
        "prepare",
        "notify",
        "discard",
        "disconnect",
        "disconnect",
    ]
    assert {who for _, who in place.agent.calls} == {THREAD}
    assert not place.agent.peers
    assert not place.world.events


async def test_a_peer_is_met_aside_while_others_go_on(place):
    """It is known as soon as the loop has heard of it."""
    may_go, met = threading.Event(), []

    async def meet() -> None:
        met.append(await place.fabric.connect_aside(b"another"))

    async with place.aside(), trio.open_nursery() as nursery:
        place.fabric._custody.do(lambda: may_go.wait(DEADLINE_S))
        nursery.start_soon(meet)
        await trio.testing.wait_all_tasks_blocked()
        assert not met
        with pytest.raises(PeerLost):
            place.prepare("another")
        may_go.set()
        await place.until(lambda: met)
        assert met == ["another"]
        assert place.fabric.counts()["peers"] == 2
        place.prepare("another")
    assert place.agent.by("connect") == [LOOP, THREAD]


async def test_a_notice_that_cannot_be_sent_aside_is_logged(place):
    """Whoever wanted it sent has gone on."""
    async with place.aside():
        place.agent.errors["notify"] = PeerLost("gone")
        place.fabric.notify("peer", b"are you there")
        await place.until_done()
    assert len(place.world.logged("refused_aside")) == 1
    with pytest.raises(PeerLost):
        place.fabric.notify("peer", b"are you there")


@pytest.mark.parametrize("is_again", [False, True])
async def test_closing_aside_is_the_thread_s_last_act(place, is_again):
    """Behind all that was asked for; a second one finds it closed."""
    for _ in range(2):
        place.post()
    async with place.aside():
        place.post()
        place.fabric.close()
        if is_again:
            place.fabric.close()
        await place.until(lambda: not place.fabric.drives_itself)
        assert place.agent.is_closed
        assert place.fabric.take_notices() == []
        with pytest.raises(MisuseError):
            place.post()
    assert place.agent.by("close") == [THREAD, LOOP][: 1 + is_again]
    assert place.agent.by("post") == [LOOP, LOOP, THREAD]
    assert place.fabric.counts()["transfers"] == 0
    assert not place.world.logged("looks_stay_in_the_loop")


async def test_the_loop_looks_itself_when_the_thread_has_died(place):
    """All goes on: what was posted aside, what was asked for, and what has arrived."""
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(place.fabric.attend, place.hear)
            place.fabric.expect(large=True)
            await place.until(lambda: is_served(place.fabric))
            transfer = place.post()
            await place.until(lambda: place.agent.open)
            place.agent.errors["take_notices"] = RuntimeError("broken")
    del place.agent.errors["take_notices"]
    assert place.world.logged("looks_stay_in_the_loop")
    place.agent.arriving.append(Notice("peer", b"hello"))
    assert place.fabric.take_notices() == [Notice("peer", b"hello")]
    place.agent.open[0].progress = Progress.DONE
    assert place.fabric.poll(transfer) is Progress.DONE
    place.fabric.release(transfer)
    assert place.agent.by("release") == [LOOP]
    place.fabric.close()
    assert place.agent.by("close") == [LOOP]
