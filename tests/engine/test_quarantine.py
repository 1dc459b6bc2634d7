"""What must not be reused yet, and why."""

from __future__ import annotations

import trio
import trio.testing

from kvferry.engine import Quarantine, QuarantineEntry, Span, TransferFailed
from kvferry.engine.quarantine import held_blocks
from kvferry.engine.spans import as_array


def entry(request_id, blocks) -> QuarantineEntry:
    """An entry."""
    return QuarantineEntry(request_id, "p", TransferFailed("x"), 1.0, blocks)


async def test_blocks_are_held_as_often_as_they_were_left(autojump_clock) -> None:
    """Two entries with one block: it is safe after the second."""
    quarantine = Quarantine()
    first = entry("a", {"full": (1, 2)})
    second = entry("b", {"full": (2, 3), "state": (0,)})
    quarantine.hold(first)
    quarantine.hold(second)
    assert [held.request_id for held in quarantine] == ["a", "b"]
    assert quarantine.blocks("full") == {1, 2, 3}
    assert quarantine.blocks("state") == {0}
    assert quarantine.blocks("other") == set()
    quarantine.reclaim(first)
    assert quarantine.blocks("full") == {2, 3}
    assert len(quarantine) == 1
    quarantine.reclaim(second)
    assert len(quarantine) == 0


async def test_two_entries_that_look_the_same_are_two(autojump_clock) -> None:
    """A request may fail twice and leave the same blocks."""
    quarantine = Quarantine()
    entries = [entry("a", {"full": (1,)}) for _ in range(2)]
    for one in entries:
        quarantine.hold(one)
    quarantine.reclaim(entries[0])
    assert quarantine.blocks("full") == {1}


async def test_waiting_ends_with_the_last_entry(autojump_clock) -> None:
    """Not with the first one that goes; and at once if there is none."""
    quarantine = Quarantine()
    await quarantine.wait_empty()
    entries = [entry(name, {"full": (1,)}) for name in "ab"]
    for one in entries:
        quarantine.hold(one)
    done = []
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            await quarantine.wait_empty()
            done.append(True)

        nursery.start_soon(wait)
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        quarantine.reclaim(entries[0])
        await trio.testing.wait_all_tasks_blocked()
        assert not done
        quarantine.reclaim(entries[1])
    assert done == [True, True]


async def test_a_scheduler_can_wait_for_the_blocks_that_it_wants(
    autojump_clock,
) -> None:
    """Of one group, and whatever else is still held; at once for blocks that are free."""
    quarantine = Quarantine()
    first = entry("a", {"full": (1, 2), "state": (5,)})
    second = entry("b", {"full": (3,)})
    quarantine.hold(first)
    quarantine.hold(second)
    done: list[str] = []

    async def wait(name: str, group: str, blocks: list[int]) -> None:
        await quarantine.wait_free(group, blocks)
        done.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "free", "full", [4, 5])
        nursery.start_soon(wait, "none", "full", [])
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(done) == ["free", "none"]
        nursery.start_soon(wait, "of the first", "full", [2, 4])
        nursery.start_soon(wait, "of both", "full", [2, 3])
        await trio.testing.wait_all_tasks_blocked()
        assert len(done) == 2
        quarantine.reclaim(first)
        await trio.testing.wait_all_tasks_blocked()
        assert done[2:] == ["of the first"]
        quarantine.reclaim(second)
    assert done[3:] == ["of both"]


def test_a_dropped_block_is_none_of_the_held_ones() -> None:
    """As a list tells it and as an array does: a window has given it back long ago."""
    plain = Span([None, 3, 7], 0)
    array = as_array(plain, group="full", side="producer")
    for span in (plain, array):
        assert held_blocks({"full": span}) == {"full": (3, 7)}
