"""Requests under way: each name once, and a wait for the end of all."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import RequestInUse
from kvferry.engine.active import Active


def test_a_request_is_there_by_name_while_it_runs() -> None:
    """In the order in which they began; afterwards it is gone, whatever ended it."""
    active = Active[tuple[str, int], str]("pull")
    with active.entered(("r", 0), "first", request_id="r"):
        with active.entered(("r", 1), "second", request_id="r"):
            assert dict(active) == {("r", 0): "first", ("r", 1): "second"}
        with pytest.raises(ZeroDivisionError), active.entered("s", "", request_id="s"):
            1 / 0  # noqa: B018 - to fail
        assert active["r", 0] == "first"
        assert list(active) == [("r", 0)]
    assert len(active) == 0
    assert active.get(("r", 0)) is None


def test_a_name_is_one_request_s_at_a_time() -> None:
    """The second is refused by kind and name, and the first stays; then it is free."""
    active = Active[str, int]("landing")
    with active.entered("r", 1, request_id="r"):
        with (
            pytest.raises(
                RequestInUse, match=r"a landing of it is under way.*request=r"
            ),
            active.entered("r", 2, request_id="r"),
        ):
            pytest.fail("it was let in")
        assert active["r"] == 1
    with active.entered("r", 2, request_id="r"):
        assert active["r"] == 2


async def test_all_who_wait_are_woken_by_the_end_of_the_last() -> None:
    """Not by that of another, nor while one has begun in the meantime."""
    active = Active[str, int]("pull")
    await active.wait_idle()  # there is none
    woken = []

    async def wait() -> None:
        await active.wait_idle()
        woken.append(len(active))

    async with trio.open_nursery() as nursery:
        with active.entered("r", 1, request_id="r"):
            with active.entered("s", 2, request_id="s"):
                nursery.start_soon(wait)
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
            await trio.testing.wait_all_tasks_blocked()
            assert not woken
        with active.entered("t", 3, request_id="t"):
            await trio.testing.wait_all_tasks_blocked()
            assert not woken
    assert woken == [0, 0]
