"""Budgets: what others may cause, and what is told of the rest."""

from __future__ import annotations

import trio

from kvferry.engine.budget import Budget, SeldomLog
from tests.kit import World


async def test_a_burst_and_then_so_much_a_second(autojump_clock) -> None:
    """What was taken comes back with time, and never more than the burst."""
    budget = Budget(burst=3, per_s=2)
    assert [budget.take() for _ in range(5)] == [True] * 3 + [False] * 2
    await trio.sleep(0.4)
    assert not budget.take()
    await trio.sleep(0.6)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    await trio.sleep(3600)
    assert [budget.take() for _ in range(5)] == [True] * 3 + [False] * 2


async def test_h1_a_flood_of_one_event_is_few_lines(autojump_clock) -> None:
    """The next line says how many were passed over."""
    world = World()
    log = SeldomLog(world.logger(), burst=2, per_s=1)
    for number in range(1000):
        log.warning("noise", number=number)
    assert [entry["number"] for entry in world.logged("noise")] == [0, 1]
    assert log.unlogged == 998
    await trio.sleep(1)
    log.warning("noise", number=1000)
    log.warning("noise", number=1001)
    (last,) = world.logged("noise")[2:]
    assert (last["number"], last["unlogged_before"]) == (1000, 998)
    assert log.unlogged == 1
