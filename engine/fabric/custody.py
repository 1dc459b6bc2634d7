"""`Custody`: who has an agent, the loop or a thread.

An agent belongs to one thread at a time. On the loop a call is over as soon as it is
made; while the agent is aside, calls are jobs for a thread, done in order, and between
them the thread looks at the agent as the pump would.

Only the loop moves the agent: it hands it over once the thread waits for it, sends the
thread away with the last of its jobs, and takes it back after the thread has gone. So
each job is done, by the thread that will come to it or by the loop that follows.

A thread has it while looks are long, or may be (`Looks`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from queue import Empty, Queue
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import trio

from kvferry.engine.fabric.looks import HOME_S, LONG_S, Looks
from kvferry.protocol.errors import FerryError

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ("Custody",)

Job = Callable[[], None]
T = TypeVar("T")

NAP_S = 0.0001
LONGEST_NAP_S = 0.001
"""Between two looks: a spinning thread takes the core that the transport needs
(nixl-facts row 14). Each look that found nothing makes it twice as long."""

IDLE_LOOK_S = 0.00005
"""A look that moves bytes takes longer."""

WORK_S = 0.0002
"""Of jobs before the next look: whoever waits for what the first posts have moved waits
for all of them otherwise."""


class Custody:
    """Who has one agent.

    Attributes:
        is_aside: Calls are jobs for a thread that has it, or is on its way.
    """

    def __init__(
        self,
        look: Callable[[], bool],
        *,
        enter_thread: Callable[[], None] | None = None,
        long_s: float = LONG_S,
        home_s: float = HOME_S,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """The loop has it.

        Args:
            look: The thread's look at the agent; whether the loop should hear of it.
            enter_thread: Called first in each thread that is to have it.
            long_s, home_s: As for `Looks`.
            log: Hears what jobs raise, and why there is no thread.
        """
        self.is_aside = False
        self._look = look
        self._enter_thread = enter_thread
        self._looks = Looks(long_s=long_s, home_s=home_s)
        self._log = log or structlog.get_logger("kvferry")
        self._is_attended = False  # somebody starts threads
        self._wanted = trio.Event()
        self._is_expected = False  # something large
        # None sends the thread away. No `SimpleQueue`: its `get` waits for ever if the
        # time is over before it has begun to wait (CPython 3.11), as under load it is.
        self._jobs: Queue[Job | None] = Queue()
        self._is_awaited = False  # by the loop, which stands still
        self._is_leaving = False
        self._has_it = Future[None]()  # the thread, as long as it is there
        self._has_gone = Future[None]()

    # The loop's.

    def do(self, job: Job) -> None:
        """At once, or as soon as the thread can."""
        if self.is_aside:
            self._jobs.put(job)
        else:
            job()

    def wait_for(self, job: Callable[[], T]) -> T:
        """At once, or as soon as the thread can: the loop stands still until then."""
        answer = Future[T]()
        self._is_awaited = True
        self._jobs.put(partial(_answer, answer, job))
        if self._has_it.done():
            either: tuple[Future[Any], ...] = answer, self._has_gone
            wait(either, return_when=FIRST_COMPLETED)
        self._is_awaited = False
        if not answer.done():
            self._work_off()
        return answer.result()

    async def result_of(self, job: Callable[[], T]) -> T:
        """At once, or as soon as the thread can: others go on until then.

        Cannot be cancelled meanwhile: the caller hears what has become of the job.
        """
        if not self.is_aside:
            return job()
        answer, told = Future[T](), trio.Event()
        run_soon = trio.lowlevel.current_trio_token().run_sync_soon
        answer.add_done_callback(lambda _: run_soon(told.set))
        self._jobs.put(partial(_answer, answer, job))
        with trio.CancelScope(shield=True):
            await told.wait()
        return answer.result()

    def note(self, begin: float) -> None:
        """The loop's look that began then, by `thread_time`, is over."""
        if self._looks.loop_took(thread_time() - begin):
            self._go_aside()

    def expect(self, *, large: bool) -> None:
        """Whether large transfers are on their way, of which looks may be long."""
        self._is_expected = large
        if self._is_to_stay:
            self._go_aside()

    @property
    def _is_to_stay(self) -> bool:
        return self._is_expected and self._looks.are_long is not False

    def _go_aside(self) -> None:
        """Calls are a thread's from now on."""
        if self._is_attended and not self.is_aside:
            self.is_aside = True
            self._is_leaving = False
            self._wanted.set()

    async def attend(self, on_news: Callable[[], None]) -> None:
        """Give the agent to a thread after long looks, and before such as are to be
        expected."""
        self._is_attended = True
        try:
            while True:
                if self._is_to_stay:
                    self._go_aside()
                await self._wanted.wait()
                await self._be_aside(on_news)
        # Also what comes together with a cancellation.
        except* Exception as errors:  # noqa: BLE001 - no engine ends for want of a thread
            reasons = ", ".join(repr(error) for error in errors.exceptions)
            self._log.warning("looks_stay_in_the_loop", error=reasons)
        finally:
            self._is_attended = False
            self._come_home()

    async def _be_aside(self, on_news: Callable[[], None]) -> None:
        run_soon = trio.lowlevel.current_trio_token().run_sync_soon
        soon = partial(partial, run_soon, idempotent=True)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._leave_when_cancelled)
                await trio.to_thread.run_sync(
                    self._serve,
                    soon(self._hand_over),
                    soon(on_news),
                    soon(self.leave),
                    limiter=trio.CapacityLimiter(1),  # nobody's work waits for it
                    thread_name="kvferry transport",
                )
                nursery.cancel_scope.cancel()
        finally:
            self._come_home()
            on_news()

    async def _leave_when_cancelled(self) -> None:
        """A thread does not hear of it by itself."""
        try:
            await trio.sleep_forever()
        finally:
            self.leave()

    def _hand_over(self) -> None:
        """The thread is there: it may begin."""
        self._has_it.set_result(None)

    def leave(self) -> None:
        """The thread goes when it has done all jobs until here."""
        if self.is_aside and not self._is_leaving:
            self._is_leaving = True
            self._jobs.put(None)

    def _come_home(self) -> None:
        """There is no thread any more: what it has left is done here."""
        self.is_aside = False
        self._wanted = trio.Event()
        self._has_it, self._has_gone = Future(), Future()
        self._work_off()

    def _work_off(self) -> None:
        """Do what waits for a thread; none is at work, not yet or not any more."""
        while not self._jobs.empty():
            self._try(self._jobs.get())
        if self.is_aside and self._is_leaving:
            self._jobs.put(None)  # it was among them

    # The thread's.

    def _serve(self, be_handed_it: Job, tell: Job, ask_to_be_sent_away: Job) -> None:
        """Work and look until sent away."""
        try:
            if self._enter_thread is not None:
                self._enter_thread()
            be_handed_it()
            self._has_it.result()
            self._looks.begin_aside()
            nap_s = NAP_S
            is_staying = self._work(0.0)
            while is_staying:
                begin = thread_time()
                has_news = self._look()
                took_s = thread_time() - begin
                may_leave = self._looks.thread_took(took_s, has_news=has_news)
                if may_leave and not self._is_to_stay:
                    ask_to_be_sent_away()
                if has_news:
                    tell()
                is_idle = not has_news and took_s < IDLE_LOOK_S
                nap_s = min(2 * nap_s, LONGEST_NAP_S) if is_idle else NAP_S
                is_staying = self._work(0.0 if has_news else nap_s)
        finally:
            self._has_gone.set_result(None)

    def _work(self, wait_s: float) -> bool:
        """Do some of what is asked for, or wait so long for it; False: go.

        All of it while the loop stands still for the last of it: after each few jobs
        it would wait for another look.
        """
        try:
            job = self._jobs.get(wait_s != 0.0, wait_s)
            look_at = perf_counter() + WORK_S
            while job is not None:
                self._try(job)
                if perf_counter() > look_at and not self._is_awaited:
                    return True
                job = self._jobs.get_nowait()
        except Empty:
            return True
        return False

    def _try(self, job: Job | None) -> None:
        """What a job raises, its caller does not hear any more."""
        try:
            if job is not None:
                job()
        except FerryError as error:
            self._log.warning("refused_aside", error=str(error))
        except Exception:  # noqa: BLE001 - a bug, and no reason to leave others undone
            self._log.exception("internal_error")


def _answer(answer: Future[T], job: Callable[[], T]) -> None:
    try:
        answer.set_result(job())
    except BaseException as error:  # noqa: BLE001 - it is the caller's, who waits
        answer.set_exception(error)
