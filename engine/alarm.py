"""`Alarm`: sleeps that may be shorter than the event loop can count, and can be ended.

`epoll_wait` takes whole milliseconds, and Python rounds up: a `trio.sleep` of 50 us
takes 1.1 ms. A transfer that is looked at so seldom is seen late to have ended, and the
transport runs dry meanwhile. A timer of the kernel wakes the loop when it is due, as a
socket would. Where there is none (it is Linux's), and on a test's virtual clock, the
sleep is the loop's own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from typing import Any

import trio

__all__ = ("Alarm",)

CLOCK_MONOTONIC = 1
"""Of time.h."""


class Alarm:
    """For one task that sleeps, and whoever wakes it."""

    def __init__(self) -> None:
        """Not set; inside of trio, whose clock says which kind is needed."""
        self._rung = trio.Event()
        self._is_waiting = False
        self._libc: Any = None
        self._fd = -1
        if sys.platform == "linux" and _is_real_clock():
            self._libc = ctypes.CDLL(None)
            # The flags of sys/timerfd.h are those of open(2).
            flags = os.O_NONBLOCK | os.O_CLOEXEC
            self._fd = self._libc.timerfd_create(CLOCK_MONOTONIC, flags)

    async def wait(self, seconds: float) -> None:
        """Sleep so long, or until it rings; at once if it has rung since the last time."""
        if self._fd < 0 or self._rung.is_set():
            with trio.move_on_after(seconds):
                await self._rung.wait()
        else:
            await self._wait_for_timer(seconds)
        self._rung = trio.Event()

    def ring(self) -> None:
        """End the sleep, or the next one."""
        self._rung.set()
        if self._is_waiting:
            self._set(0.0)

    def close(self) -> None:
        """Give the timer back; nobody may wait."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def _wait_for_timer(self, seconds: float) -> None:
        self._set(seconds)
        self._is_waiting = True
        try:
            await trio.lowlevel.wait_readable(self._fd)
        finally:
            self._is_waiting = False
        with suppress(BlockingIOError):  # rung just now, and set anew
            os.read(self._fd, 8)  # else it stays readable

    def _set(self, seconds: float) -> None:
        nanoseconds = max(int(seconds * 1e9), 1)  # 0 would unset it
        whole, rest = divmod(nanoseconds, 1_000_000_000)
        # A struct itimerspec: no interval, and the first time.
        spec = (ctypes.c_long * 4)(0, 0, whole, rest)
        self._libc.timerfd_settime(self._fd, 0, spec, None)


def _is_real_clock() -> bool:
    """Whether a second on it is a second."""
    clock = trio.lowlevel.current_clock()
    wait_s = clock.deadline_to_sleep_time(clock.current_time() + 1.0)
    return 0.5 < wait_s <= 1.0
