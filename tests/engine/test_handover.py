"""Calls beside the loop: in order, told on the loop, by few threads."""

from __future__ import annotations

from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
import trio

from kvferry.engine import handover
from kvferry.engine.handover import Handover

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Scenario = Callable[[trio.Nursery], Awaitable[None]]


@pytest.fixture(autouse=True)
def _no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "LINGER_S", 0.001)


def play(scenario: Scenario) -> None:
    """On real time: virtual time does not wait for threads."""

    async def main() -> None:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                await scenario(nursery)

    trio.run(main)


async def settle(beside: Handover) -> None:
    """Until the last thread has ended."""
    while beside._threads:  # noqa: ASYNC110 - where milliseconds do
        await trio.sleep(0.001)


def test_calls_are_made_in_order_beside_the_loop_and_told_on_it() -> None:
    """Each is told once, after it was made."""
    story: list[tuple[str, int, bool]] = []

    def note(what: str, number: int) -> None:
        story.append((what, number, trio.lowlevel.in_trio_run()))

    async def scenario(nursery: trio.Nursery) -> None:
        beside = Handover(nursery, threads=1)
        for number in range(20):
            beside.hand(partial(note, "made", number), partial(note, "told", number))
        await settle(beside)

    play(scenario)
    for what, on_loop in (("made", False), ("told", True)):
        assert [n for w, n, _ in story if w == what] == list(range(20))
        assert {is_on for w, _, is_on in story if w == what} == {on_loop}
    for number in range(20):
        assert story.index(("made", number, False)) < story.index(
            ("told", number, True)
        )


def test_a_thread_takes_the_next_call_without_the_loop() -> None:
    """The loop may be in the middle of a post, for as long as that takes."""
    made: SimpleQueue[int] = SimpleQueue()

    async def scenario(nursery: trio.Nursery) -> None:
        beside = Handover(nursery, threads=1)
        told = trio.Event()
        beside.hand(int, told.set)
        await told.wait()
        for number in range(3):
            beside.hand(partial(made.put, number), int)
        # No checkpoint: the loop stands still.
        assert [made.get(timeout=5) for _ in range(3)] == [0, 1, 2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handover, "LINGER_S", 1.0)
        play(scenario)


def test_another_thread_begins_only_when_those_there_are_busy() -> None:
    """And never more than are allowed."""
    gate: SimpleQueue[None] = SimpleQueue()

    async def scenario(nursery: trio.Nursery) -> None:
        beside = Handover(nursery, threads=2)
        beside.expect()
        beside.expect()
        assert beside._threads == 1
        found = []
        for _ in range(4):
            beside.hand(gate.get, int)
            found.append(beside._threads)
        assert found == [1, 2, 2, 2]
        for _ in range(4):
            gate.put(None)
        await settle(beside)
        assert beside._under_way == 0

    play(scenario)


def test_a_thread_without_calls_ends_and_a_later_call_finds_another() -> None:
    """So an engine at rest has none."""
    told: list[int] = []

    async def scenario(nursery: trio.Nursery) -> None:
        beside = Handover(nursery, threads=2)
        for number in range(5):
            beside.hand(int, partial(told.append, number))
            await settle(beside)
            assert not nursery.child_tasks

    play(scenario)
    assert told == list(range(5))


def test_what_comes_as_a_thread_ends_is_made_all_the_same() -> None:
    """It had given up waiting, and the loop had not heard of it yet."""
    told: list[int] = []

    async def scenario(nursery: trio.Nursery) -> None:
        beside = Handover(nursery, threads=1)
        waits = beside._make_all

        def late() -> None:
            waits()
            beside._make_all = waits  # type: ignore[method-assign]
            trio.from_thread.run_sync(beside.hand, int, partial(told.append, 1))

        beside._make_all = late  # type: ignore[method-assign]
        beside.expect()
        await settle(beside)

    play(scenario)
    assert told == [1]


def test_a_call_that_has_begun_is_waited_for() -> None:
    """Also if the engine is cancelled: it touches somebody's memory."""
    begun: SimpleQueue[None] = SimpleQueue()
    gate: SimpleQueue[None] = SimpleQueue()
    is_made = []

    def call() -> None:
        begun.put(None)
        gate.get()
        is_made.append(True)

    async def scenario(outer: trio.Nursery) -> None:
        async def let_go() -> None:
            await trio.sleep(0.01)
            assert not is_made
            gate.put(None)

        async with trio.open_nursery() as nursery:
            beside = Handover(nursery, threads=1)
            beside.hand(call, int)
            await trio.to_thread.run_sync(begun.get)
            outer.start_soon(let_go)
            nursery.cancel_scope.cancel()
        assert is_made

    play(scenario)
