"""The pump: the one place that polls completions and notices.

It drives the transport's progress for the whole engine (NIXL's own progress
thread burns a core, nixl-facts row 16): fast while bytes move, slower while
blocks are on offer (over tcp the target of a read must progress too), slow when
idle; and when it is told to, by a fabric that drives itself for a while. Nothing else
calls `Fabric.poll` or `Fabric.take_notices`.
"""

from __future__ import annotations

import enum
from collections import deque
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import trio

from kvferry.engine.alarm import Alarm
from kvferry.engine.budget import SeldomLog
from kvferry.engine.fabric.base import LARGE_BYTES, Progress
from kvferry.protocol.errors import FerryError, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric, Notice, Transfer

__all__ = ("Cadence", "Pump")

MISSES = 8
"""A round looks at transfers from the oldest on, until so many were still under way,
and at as many others, in turns. A look costs some microseconds, one at any of them
drives all of them on, and a round must not hold up the loop however many are open."""

MOST_LOOKS = 64
"""Of one round, if all of them have settled: what follows a settled one takes longer."""


class Cadence(enum.Enum):
    """How often the pump looks while somebody claims it."""

    BUSY = "busy"
    OFFERED = "offered"


class Pump:
    """Polls a fabric for everybody.

    Invariant: a tracked transfer is released exactly once, after it has settled,
    and its callback hears of it once as LOST at most and once as settled.
    """

    def __init__(
        self,
        fabric: Fabric,
        config: EngineConfig,
        *,
        on_notice: Callable[[Notice], None],
        hand_over: Callable[[], bool] = lambda: False,
        log: FilteringBoundLogger,
    ) -> None:
        """Poll nothing yet.

        Args:
            fabric: What is polled.
            config: How often.
            on_notice: Gets every notice; anybody may send many, so it should only
                sort them.
            hand_over: Called once a round, behind that: to act upon some of them.
                Whether there are more.
            log: The engine's.
        """
        self._fabric = fabric
        self._on_notice = on_notice
        self._hand_over = hand_over
        self._log = SeldomLog(log)
        self._intervals_s = {
            Cadence.BUSY: config.poll_s,
            Cadence.OFFERED: config.offered_poll_s,
        }
        self._idle_s = config.idle_poll_s
        self._claims = dict.fromkeys(Cadence, 0)
        self._large = 0  # transfers on their way
        self._active: dict[Transfer, Callable[[Progress, FerryError | None], None]] = {}
        self._lost: dict[Transfer, Callable[[Progress, FerryError | None], None]] = {}
        self._alarm: Alarm | None = None  # while it runs
        self._turns: deque[Transfer] = deque()  # settled ones are passed over
        self._is_behind = False
        self.rounds = 0
        """How often it has looked."""

    @property
    def unsettled(self) -> int:
        """Transfers that may still touch memory."""
        return len(self._active) + len(self._lost)

    def track(
        self,
        transfer: Transfer,
        on_progress: Callable[[Progress, FerryError | None], None],
    ) -> None:
        """Poll the transfer until it has settled, and release it then.

        Looks at it at once: a copy on one host is done when its post returns
        (nixl-facts row 2). The callback must not raise or block.
        """
        self._active[transfer] = on_progress
        if not self._look(transfer):
            self._turns.append(transfer)
            self.wake()

    @contextmanager
    def claim(self, cadence: Cadence, size: int = 0) -> Iterator[None]:
        """Look at least this often while inside, for about so many bytes."""
        self._claims[cadence] += 1
        if self._claims[cadence] == 1:  # those before this one have woken it
            self.wake()
        is_large = size >= LARGE_BYTES
        self.count_large(is_large)
        try:
            yield
        finally:
            self._claims[cadence] -= 1
            self.count_large(-is_large)

    def count_large(self, more: int) -> None:
        """So many large transfers more, or fewer, are on their way."""
        before, self._large = self._large, self._large + more
        if bool(before) != bool(self._large):
            self._fabric.expect(large=bool(self._large))

    async def run(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Poll for ever; the engine's last task to be cancelled."""
        self._alarm = Alarm()
        task_status.started()
        try:
            while True:
                self.round()
                # A claim or a post may come while a look is slow: then it has rung.
                await self._alarm.wait(self._interval_s())
        finally:
            self._alarm.close()
            self._alarm = None

    def wake(self) -> None:
        """Look now."""
        if self._alarm is not None:
            self._alarm.ring()

    def round(self) -> None:
        """Look at some transfers, and at all notices."""
        self.rounds += 1
        self._look_at_the_oldest()
        if self._lost or len(self._active) > MISSES:
            self._look_at_others()
        else:
            self._turns = deque(self._active)  # each was looked at just now
        try:
            notices = self._fabric.take_notices()
        except FerryError as error:
            self._log.warning("notices_failed", error=str(error))
            notices = []
        for notice in notices:
            self._on_notice(notice)
        self._is_behind |= self._hand_over()

    def _interval_s(self) -> float:
        if self._is_behind:
            return 0.0  # the next one may have settled as well
        if self._fabric.drives_itself:
            return self._idle_s  # it wakes us
        if self._active or self._claims[Cadence.BUSY]:
            return self._intervals_s[Cadence.BUSY]
        if self._claims[Cadence.OFFERED] or self._lost:
            return self._intervals_s[Cadence.OFFERED]
        return self._idle_s

    def _look_at_the_oldest(self) -> None:
        """Transfers mostly end in the order in which they were posted."""
        misses = looks = 0
        for transfer in tuple(islice(self._active, MOST_LOOKS)):
            misses += not self._look(transfer)
            looks += 1
            if misses == MISSES:
                break
        self._is_behind = looks == MOST_LOOKS

    def _look_at_others(self) -> None:
        """Whatever their order: each gets its turn."""
        looks = 0
        while self._turns and looks < MISSES:
            transfer = self._turns.popleft()
            if self._is_open(transfer):
                looks += 1
                if not self._look(transfer):
                    self._turns.append(transfer)

    def _is_open(self, transfer: Transfer) -> bool:
        return transfer in self._active or transfer in self._lost

    def _look(self, transfer: Transfer) -> bool:
        """Poll a transfer; whether it has settled."""
        try:
            progress, cause = self._fabric.poll(transfer), transfer.cause
        except FerryError as error:
            progress, cause = Progress.LOST, error
        if progress.is_settled:
            self._settle(transfer, progress, cause)
        elif progress is Progress.LOST and transfer in self._active:
            self._lost[transfer] = on_progress = self._active.pop(transfer)
            on_progress(progress, cause or TransferFailed("the transport lost it"))
        return progress.is_settled

    def _settle(
        self, transfer: Transfer, progress: Progress, cause: FerryError | None
    ) -> None:
        on_progress = self._active.pop(transfer, None) or self._lost.pop(transfer)
        try:
            self._fabric.release(transfer)
        except FerryError as error:
            self._log.warning("release_failed", error=str(error))
        if progress is Progress.FAILED:
            cause = cause or TransferFailed("the transport failed it")
        on_progress(progress, cause)
