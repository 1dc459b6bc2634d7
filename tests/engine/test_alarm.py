"""Sleeps that can be ended, on the loop's clock or on a timer of the kernel."""

from __future__ import annotations

import os
import sys
from time import perf_counter

import pytest
import trio
import trio.testing

from kvferry.engine.alarm import Alarm


async def test_it_sleeps_as_long_as_it_is_told(autojump_clock) -> None:
    """On virtual time, too."""
    alarm = Alarm()
    started = trio.current_time()
    await alarm.wait(3.0)
    assert trio.current_time() - started == 3.0
    alarm.close()


async def test_a_ring_ends_the_sleep_or_the_next_one(autojump_clock, nursery) -> None:
    """Whoever rings while nobody sleeps is heard all the same, and once."""
    alarm = Alarm()
    started = trio.current_time()
    alarm.ring()
    alarm.ring()
    await alarm.wait(10.0)
    assert trio.current_time() == started

    async def later() -> None:
        await trio.sleep(1)
        alarm.ring()

    nursery.start_soon(later)
    await alarm.wait(10.0)
    assert trio.current_time() - started == 1
    await alarm.wait(2.0)
    assert trio.current_time() - started == 3


@pytest.mark.skipif(sys.platform != "linux", reason="timerfd is Linux's")
async def test_the_kernel_s_timer_rings_and_can_be_rung() -> None:
    """In real time; a sleep that is rung does not wait for its end."""
    alarm = Alarm()
    assert alarm._fd >= 0
    for _ in range(3):
        await alarm.wait(0.0002)
    started = perf_counter()

    async def ring() -> None:
        await trio.testing.wait_all_tasks_blocked()
        alarm.ring()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ring)
        await alarm.wait(3600.0)
    alarm.ring()
    await alarm.wait(3600.0)
    await alarm.wait(0.0)
    with trio.move_on_after(0) as scope:
        await alarm.wait(3600.0)
    assert scope.cancelled_caught
    await alarm.wait(0.0001)
    assert perf_counter() - started < 600
    fd = alarm._fd
    alarm.close()
    alarm.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
