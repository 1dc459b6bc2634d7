"""`Custody`: real threads, which wait for each other and for nothing else."""

from __future__ import annotations

import itertools
import threading  # noqa: TID251 - real threads
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from time import perf_counter

import pytest
import trio
import trio.testing

from kvferry.engine.fabric import custody
from kvferry.engine.fabric.custody import WORK_S, Custody
from kvferry.engine.fabric.looks import TELLING_LOOKS
from kvferry.protocol.errors import MisuseError, PeerLost
from tests.kit import World

ALWAYS, NEVER = -1.0, 1e9
"""What counts as a long look, and how long without one: no clock decides here."""
DEADLINE_S = 60.0
LOOP, THREAD = "loop", "thread"


class Guarded:
    """A custody whose looks are the test's, one at a time or without end.

    Attributes:
        looks, threads: How many have begun.
        done: The jobs, with who did them, in the order in which they were.
        news: How often the loop was told of some.
    """

    def __init__(self, *, long_s=NEVER, home_s=NEVER, enter_thread=None) -> None:
        self.world = World()
        self.custody = Custody(
            self._look,
            enter_thread=partial(self._enter, enter_thread or (lambda: None)),
            long_s=long_s,
            home_s=home_s,
            log=self.world.logger(),
        )
        self.looks = self.threads = self._gone = 0
        self.done: list[tuple[object, str]] = []
        self.news = 0
        self.has_news = False
        self.error: Exception | None = None
        self.in_each_look = lambda: None
        self._gate = threading.Lock()
        self._is_held = threading.Event()
        self._loop = threading.get_ident()

    def _enter(self, enter_thread) -> None:
        self.threads += 1
        enter_thread()

    def _look(self) -> bool:
        self.looks += 1
        if self._gate.locked():
            self._is_held.set()
            assert self._gate.acquire(timeout=DEADLINE_S)
            self._gate.release()
        self.in_each_look()
        if self.error is not None:
            raise self.error
        return self.has_news

    def who(self) -> str:
        return LOOP if threading.get_ident() == self._loop else THREAD

    def job(self, name, error=None):
        """Notes who does it; then raises."""
        self.done.append((name, self.who()))
        if error is not None:
            raise error

    def do(self, *names) -> None:
        for name in names:
            self.custody.do(partial(self.job, name))

    def wait_for(self, name, error=None):
        return self.custody.wait_for(lambda: self.job(name, error) or name)

    def hear(self) -> None:
        assert self.who() == LOOP
        self.news += 1

    async def attend(self) -> None:
        await self.custody.attend(self.hear)

    def want(self) -> None:
        """As long looks do."""
        self.custody._go_aside()

    async def until(self, is_so) -> None:
        while not is_so():
            await trio.lowlevel.checkpoint()

    @property
    def has_it(self) -> bool:
        """The thread."""
        return self.custody._has_it.done()

    async def until_aside(self) -> None:
        await self.until(lambda: self.has_it)

    async def until_home(self) -> None:
        await self.until(lambda: not self.custody.is_aside)
        self._gone = self.threads

    async def stays_at_home(self) -> None:
        """No thread has had it since it came home, and none is on its way."""
        await trio.testing.wait_all_tasks_blocked()
        assert not self.custody.is_aside
        assert self.threads == self._gone

    @contextmanager
    def in_a_look(self):
        """The thread is in one, and does no job meanwhile."""
        self._is_held.clear()
        with self._gate:
            assert self._is_held.wait(DEADLINE_S)
            yield

    def warnings(self) -> list[str]:
        return [entry["event"] for entry in self.world.events]


class Way:
    """A thread's, which is held up on it until the test lets it go on."""

    def __init__(self) -> None:
        self.is_begun, self.is_free = threading.Event(), threading.Event()

    def go(self) -> None:
        self.is_begun.set()
        assert self.is_free.wait(DEADLINE_S)


@asynccontextmanager
async def attended(guarded: Guarded, *, wanted=True):
    """Aside when this begins, if that is wanted; and cancelled when it ends."""
    scope = trio.CancelScope()

    async def attend() -> None:
        with scope:
            await guarded.attend()

    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attend)
            await guarded.until(lambda: guarded.custody._is_attended)
            if wanted:
                guarded.want()
                await guarded.until_aside()
            yield scope
            scope.cancel()
    assert not guarded.custody.is_aside


async def test_jobs_are_done_in_order_by_whoever_has_it():
    """By the loop at once, by the thread soon, and by the loop what it has left."""
    guarded = Guarded()
    guarded.do(0, 1)
    assert guarded.done == [(0, LOOP), (1, LOOP)]
    async with attended(guarded):
        for n in range(2, 50):
            guarded.do(n)
            if n % 7 == 0:
                await guarded.until(lambda n=n: len(guarded.done) > n)
        assert guarded.wait_for("last") == "last"
    guarded.do("home")
    assert [name for name, _ in guarded.done] == [*range(50), "last", "home"]
    assert {who for _, who in guarded.done[2:51]} == {THREAD}
    assert guarded.done[-1] == ("home", LOOP)
    assert not guarded.warnings()


async def test_what_the_loop_waits_for_it_does_itself_until_the_thread_is_there():
    """Whatever holds the thread up on its way; behind what was asked for before."""
    way = Way()
    guarded = Guarded(enter_thread=way.go)
    async with attended(guarded, wanted=False):
        guarded.want()
        await guarded.until(way.is_begun.is_set)
        guarded.do("before")
        assert not guarded.done
        assert guarded.wait_for("asked before") == "asked before"
        way.is_free.set()
        await guarded.until_aside()
        guarded.wait_for("behind")
    assert guarded.done == [
        ("before", LOOP),
        ("asked before", LOOP),
        ("behind", THREAD),
    ]


async def test_a_thread_that_is_sent_away_before_it_is_there_does_not_stay():
    """Though the loop does meanwhile what it would have done on its way out."""
    way = Way()
    guarded = Guarded(enter_thread=way.go)
    async with attended(guarded, wanted=False):
        guarded.want()
        await guarded.until(way.is_begun.is_set)
        guarded.do("before")
        guarded.custody.leave()
        guarded.do("behind")
        assert guarded.wait_for("asked") == "asked"
        guarded.do("left behind")
        way.is_free.set()
        await guarded.until_home()
    assert guarded.done == [
        (name, LOOP) for name in ("before", "behind", "asked", "left behind")
    ]
    assert not guarded.looks


async def test_long_looks_of_the_loop_want_a_thread_and_short_ones_do_not():
    """One may be the first ever; the next wants another, after that has gone."""
    guarded = Guarded()
    async with attended(guarded, wanted=False):
        for _ in range(3):
            guarded.custody.note(0.0)
        await guarded.stays_at_home()
        guarded.custody._looks.long_s = ALWAYS
        guarded.custody.note(0.0)
        await guarded.stays_at_home()
        for _ in range(2):
            guarded.custody.note(0.0)
            await guarded.until_aside()
            guarded.custody.leave()
            await guarded.until_home()
            await guarded.stays_at_home()


async def test_long_looks_far_apart_are_chance_unless_there_have_been_many():
    """Then the transport is known for them."""
    guarded = Guarded(long_s=ALWAYS, home_s=0.0)
    async with attended(guarded, wanted=False):
        for _ in range(3):
            guarded.custody.note(0.0)
        await guarded.stays_at_home()
        guarded.custody._looks.are_long = True
        guarded.custody.note(0.0)
        await guarded.until_aside()


async def test_long_looks_while_the_thread_comes_want_no_second_one():
    """It comes for all of them."""
    way = Way()
    guarded = Guarded(enter_thread=way.go, long_s=ALWAYS)
    async with attended(guarded, wanted=False):
        for _ in range(2):
            guarded.custody.note(0.0)
        await guarded.until(way.is_begun.is_set)
        guarded.custody.note(0.0)
        way.is_free.set()
        await guarded.until_aside()
        guarded.custody.leave()
        await guarded.until_home()
        await guarded.stays_at_home()


async def test_it_comes_home_after_a_while_without_a_long_look():
    """With what is asked for meanwhile done; it is told, and works at home again."""
    guarded = Guarded(home_s=0.0)
    async with attended(guarded):
        n = itertools.count()
        while guarded.custody.is_aside:
            guarded.do(next(n))
            await trio.lowlevel.checkpoint()
        guarded.do("home")
        assert guarded.done[-1] == ("home", LOOP)
        names = [name for name, _ in guarded.done[:-1]]
        assert names == list(range(len(names)))
        assert guarded.news
        guarded.want()
        await guarded.until_aside()


async def test_it_stays_aside_while_looks_are_long():
    """However short the time without one may be."""
    guarded = Guarded(home_s=0.0, long_s=ALWAYS)
    async with attended(guarded):
        await guarded.until(lambda: guarded.looks > 50)
        assert guarded.custody.is_aside
        guarded.custody._looks.long_s = NEVER
        await guarded.until_home()


async def test_large_transfers_go_aside_at_once_until_looks_are_known_to_be_short():
    """Nothing is a call of the loop's from the moment on; and no thread afterwards."""
    guarded = Guarded()
    custody = guarded.custody
    async with attended(guarded, wanted=False):
        custody.expect(large=True)
        guarded.do("first")
        assert not guarded.done
        await guarded.until(lambda: guarded.looks > 2 * TELLING_LOOKS)
        assert custody.is_aside
        guarded.has_news = True
        await guarded.until_home()
        await guarded.stays_at_home()
        custody.expect(large=False)
        custody.expect(large=True)
        await guarded.stays_at_home()
    assert guarded.done == [("first", THREAD)]


async def test_large_transfers_go_aside_for_good_once_many_looks_were_long():
    """However many are short then; not longer than they are expected."""
    guarded = Guarded(home_s=0.0, long_s=ALWAYS)
    custody = guarded.custody
    guarded.has_news = True
    async with attended(guarded):
        await guarded.until(lambda: guarded.looks > TELLING_LOOKS)
        custody._looks.long_s = NEVER
        await guarded.until_home()
        custody.expect(large=True)
        await guarded.until_aside()
        before, threads = guarded.looks, guarded.threads
        await guarded.until(lambda: guarded.looks > before + 3 * TELLING_LOOKS)
        assert guarded.threads == threads
        custody.expect(large=False)
        await guarded.until_home()
        await guarded.stays_at_home()


async def test_others_go_on_while_somebody_waits_for_a_result():
    """Which comes from the loop, a thread, or the loop after it; errors, too."""
    guarded = Guarded()

    async def wait_for(name, error=None):
        job = partial(guarded.job, name, error)
        return await guarded.custody.result_of(lambda: job() or name)

    assert await wait_for("home") == "home"
    async with attended(guarded) as scope:
        with pytest.raises(PeerLost):
            await wait_for("refused", PeerLost("gone"))
        answers, waiting = [], trio.CancelScope()

        async def keep(name, waiting) -> None:
            with waiting:
                answers.append(await wait_for(name))

        async with trio.open_nursery() as nursery:
            with guarded.in_a_look():
                nursery.start_soon(keep, "aside", waiting)
                await trio.testing.wait_all_tasks_blocked()
                assert not answers
                waiting.cancel()  # it is done all the same
                scope.cancel()
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(keep, "left behind", trio.CancelScope())
                await trio.testing.wait_all_tasks_blocked()
                assert not answers
    assert answers == ["aside", "left behind"]
    assert guarded.done[2:] == [("aside", THREAD), ("left behind", LOOP)]
    assert not guarded.warnings()


async def test_the_loop_hears_of_news_and_only_of_news():
    """On the loop; and once more when it has the agent again."""
    guarded = Guarded()
    guarded.custody._looks.are_long = True  # and news say nothing of it
    async with attended(guarded):
        await guarded.until(lambda: guarded.looks > 10)
        assert not guarded.news
        guarded.has_news = True
        await guarded.until(lambda: guarded.news > 2)
        guarded.has_news = False
        with guarded.in_a_look():
            await trio.testing.wait_all_tasks_blocked()
            before = guarded.news
    assert guarded.news == before + 1


async def test_what_a_cancelled_thread_leaves_the_loop_does():
    """The thread ends its look and goes; nothing is lost, and nothing overtakes."""
    guarded = Guarded()
    async with attended(guarded) as scope:
        with guarded.in_a_look():
            guarded.do("before")
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            guarded.do("behind 1", "behind 2")
            assert guarded.custody.is_aside
            assert not guarded.done
        await guarded.until_home()
    assert guarded.done == [("before", THREAD), ("behind 1", LOOP), ("behind 2", LOOP)]


@pytest.mark.parametrize("checkpoints", range(8))
async def test_attending_may_be_cancelled_at_any_time(checkpoints):
    """Before there is a thread, before it is handed the agent, and right behind that."""
    guarded = Guarded(long_s=ALWAYS)
    guarded.custody.expect(large=True)
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(guarded.attend)
            for n in range(checkpoints):
                guarded.do(n)
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        guarded.do("home")
    assert [name for name, _ in guarded.done] == [*range(checkpoints), "home"]
    assert guarded.done[-1] == ("home", LOOP)
    assert not guarded.warnings()


async def test_whoever_waits_hears_what_the_job_answers_or_raises():
    """At home and aside, and the thread goes on."""
    guarded = Guarded()
    for _ in range(2):
        with pytest.raises(MisuseError):
            guarded.wait_for("refused", MisuseError("no"))
        assert guarded.wait_for("fine") == "fine"
        async with attended(guarded):
            for error in (PeerLost("gone"), ValueError("a bug"), SystemExit()):
                with pytest.raises(type(error)):
                    guarded.wait_for("refused", error)
            assert guarded.wait_for("fine") == "fine"
            assert guarded.done[-1] == ("fine", THREAD)
            assert guarded.custody.is_aside
    assert not guarded.warnings()


async def test_the_loop_waits_for_a_thread_that_has_just_been_sent_away():
    """It does the job itself then, behind all others."""
    guarded = Guarded()
    async with attended(guarded):
        guarded.do("thread's")
        guarded.custody.leave()
        guarded.do("left behind")
        for name in ("asked", "asked again"):
            assert guarded.wait_for(name) == name
            # Once only it comes home, and then whoever wants a thread will have one.
            assert guarded.custody.is_aside
        assert guarded.done == [
            ("thread's", THREAD),
            ("left behind", LOOP),
            ("asked", LOOP),
            ("asked again", LOOP),
        ]
        await guarded.until_home()
        guarded.want()
        await guarded.until_aside()
        assert guarded.wait_for("again") == "again"
    assert guarded.done[-1] == ("again", THREAD)


async def test_the_loop_waits_for_a_thread_that_dies():
    """In the look that it waits for the end of."""
    guarded = Guarded()

    def die() -> None:
        while not guarded.custody._is_awaited:
            pass
        raise RuntimeError("broken")

    async with attended(guarded):
        with guarded.in_a_look():
            guarded.do("left behind")
            guarded.in_each_look = die
        assert guarded.wait_for("asked") == "asked"
        await guarded.until(guarded.warnings)
        assert not guarded.custody.is_aside
    assert guarded.done == [("left behind", LOOP), ("asked", LOOP)]
    assert guarded.warnings() == ["looks_stay_in_the_loop"]


async def test_while_the_loop_waits_the_thread_does_not_look():
    """After each few jobs it would hold the loop up for one more look; as it does else."""
    guarded = Guarded()
    looks = set()

    def be_awaited() -> None:
        while not guarded.custody._is_awaited:
            pass

    def take_long() -> None:
        begin = perf_counter()
        while perf_counter() < begin + 2 * WORK_S:
            pass
        looks.add(guarded.looks)

    async with attended(guarded):
        guarded.custody.do(be_awaited)
        for _ in range(10):
            guarded.custody.do(take_long)
        guarded.custody.wait_for(lambda: None)
        assert len(looks) == 1
        looks.clear()
        for _ in range(3):
            guarded.custody.do(take_long)
        await guarded.until(lambda: len(looks) == 3)


def test_no_nap_is_without_end(monkeypatch):
    """Also one that is over before it begins, as any may be on a busy machine."""
    monkeypatch.setattr(custody, "WORK_S", -1.0)
    guarded = Guarded()
    for n in range(20_000):
        guarded.custody._jobs.put(partial(guarded.job, n))
        assert guarded.custody._work(0.0)
        assert guarded.custody._work(1e-9)
    assert len(guarded.done) == 20_000


@pytest.mark.parametrize("when", ["start", "enter", "first look", "look", "cancelled"])
async def test_the_loop_keeps_it_when_the_thread_fails(when, monkeypatch):
    """Warned of once, told of news, and all jobs are done; the engine runs as ever."""
    error = RuntimeError("broken")

    async def start(*_: object, **__: object) -> None:
        raise error

    if when == "start":
        monkeypatch.setattr(trio.to_thread, "run_sync", start)

    def enter() -> None:
        if when == "enter":
            raise error

    guarded = Guarded(enter_thread=enter)
    if when == "first look":
        guarded.error = error
    with trio.fail_after(DEADLINE_S):
        async with trio.open_nursery() as nursery:
            guarded.custody.expect(large=True)
            nursery.start_soon(guarded.attend)
            if when in {"look", "cancelled"}:
                await guarded.until_aside()
                with guarded.in_a_look():
                    guarded.do("left behind")
                    guarded.error = error
                    if when == "cancelled":
                        nursery.cancel_scope.cancel()
            else:
                guarded.do("left behind")
        assert not guarded.custody.is_aside
        assert guarded.warnings() == ["looks_stay_in_the_loop"]
        assert "broken" in guarded.world.events[0]["error"]
        assert guarded.news == 1
        guarded.custody.expect(large=True)  # nobody starts threads any more
        assert not guarded.custody.is_aside
        guarded.do("home")
        assert guarded.wait_for("asked") == "asked"
    assert [name for name, _ in guarded.done] == ["left behind", "home", "asked"]
    assert guarded.done[-1] == ("asked", LOOP)


async def test_a_job_that_fails_keeps_none_from_being_done():
    """Its caller does not hear of it any more, the log does; and so at home-coming."""
    guarded = Guarded()
    errors = [PeerLost("gone"), ValueError("a bug")]
    async with attended(guarded):
        with guarded.in_a_look():
            for error in errors:
                guarded.custody.do(partial(guarded.job, str(error), error))
            guarded.do("thread's")
            guarded.custody.leave()
            for error in errors:
                guarded.custody.do(partial(guarded.job, str(error), error))
            guarded.do("loop's")
        await guarded.until_home()
        await trio.testing.wait_all_tasks_blocked()
        guarded.want()
        await guarded.until_aside()
    names = ["gone", "a bug"]
    assert [name for name, _ in guarded.done] == [*names, "thread's", *names, "loop's"]
    assert guarded.warnings() == ["refused_aside", "internal_error"] * 2
