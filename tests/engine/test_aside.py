"""What a request does beside its machine ends with the request."""

from __future__ import annotations

from functools import partial

import structlog
import trio
import trio.testing

from kvferry.engine import FerryInternalError, MisuseError
from kvferry.engine.aside import Aside


def aside(nursery: trio.Nursery, failures: list) -> Aside:
    return Aside(nursery, on_failure=failures.append, log=structlog.get_logger())


async def test_the_end_cancels_what_is_left_and_waits_for_it(
    autojump_clock, nursery
) -> None:
    """Also for what takes its time to end, and however the request was cancelled."""
    failures, ended = [], []
    beside = aside(nursery, failures)

    async def slow(number: int) -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(number)
            ended.append(number)

    for number in (1, 3):
        beside.start(partial(slow, number))
    await trio.testing.wait_all_tasks_blocked()
    with trio.CancelScope() as scope:
        scope.cancel()
        await beside.end()
    assert ended == [1, 3]
    assert failures == []


async def test_a_request_without_tasks_ends_at_once(autojump_clock, nursery) -> None:
    """Most have none, or have none left."""
    beside = aside(nursery, [])
    await beside.end()
    beside.start(trio.lowlevel.checkpoint)
    await trio.testing.wait_all_tasks_blocked()
    await beside.end()


async def test_a_failure_is_told_and_harms_nobody(autojump_clock, nursery) -> None:
    """A caller's failure as it is, and a bug of ours as one."""
    failures = []
    beside = aside(nursery, failures)

    async def fail(error: Exception) -> None:
        raise error

    beside.start(partial(fail, MisuseError("yours")))
    beside.start(partial(fail, ZeroDivisionError()))
    await trio.testing.wait_all_tasks_blocked()
    await beside.end()
    assert {type(error) for error in failures} == {MisuseError, FerryInternalError}
