"""Soaks: ten thousand cancelled pulls and as many thousands done; nothing grows.

The normal run does a share of each; ``KVFERRY_SOAK=1`` does all of it.
"""

from __future__ import annotations

import gc
import os
import tracemalloc

import pytest
import structlog
import trio
import trio.testing

from tests.kit import GROUP, Pool, World, at_base

FULL = os.environ.get("KVFERRY_SOAK") == "1"
OURS = [3]
GROWTH_BYTES = 64 * 1024
"""What may come and go: caches of small integers, the size of a dict."""
REMEMBERED = 4_096
"""Ended offers that an engine keeps, to tell a late reader why."""


class Quiet(World):
    """A world that keeps no log: it would be all that grows."""

    def logger(self):
        return structlog.wrap_logger(
            None, processors=[], wrapper_class=structlog.make_filtering_bound_logger(50)
        )


def small() -> Pool:
    return Pool(8, layers=1, block_size=2, dim=1)


LOOKS = {"poll_s": 0.002, "offered_poll_s": 0.05, "idle_poll_s": 0.5, "lease_s": 5.0}


async def memory_bytes() -> int:
    """What Python holds, once the last leases are forgotten."""
    await trio.sleep(6)
    await trio.testing.wait_all_tasks_blocked()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def soak(rounds: int, *, cancel: bool) -> None:
    """So many pulls; statistics, tasks and memory as after the warm-up."""
    world, producer, consumer = Quiet(), small(), small()
    blocks = producer.stamp([1], num_tokens=2)
    async with world.pair(producer, consumer, **LOOKS) as (prefill, decode):
        cancelled = 0

        async def one(number: int) -> None:
            nonlocal cancelled
            offer = prefill.offer(f"r{number}", blocks, num_tokens=2)
            # At all sorts of moments of a pull that takes some milliseconds.
            limit_s = number % 41 * 0.0001 if cancel else 1.0
            with trio.move_on_after(limit_s) as scope:
                await decode.pull(offer.ticket, {GROUP: OURS})
            cancelled += scope.cancelled_caught
            await offer.wait()

        for number in range(REMEMBERED + 500):
            await one(-number)
        base = prefill.statistics(), decode.statistics()
        tasks = trio.lowlevel.current_statistics().tasks_living
        tracemalloc.start()
        try:
            held = await memory_bytes()
            cancelled = 0
            for number in range(rounds):
                await one(number)
            assert await memory_bytes() - held < GROWTH_BYTES
        finally:
            tracemalloc.stop()
        assert (prefill.statistics(), decode.statistics()) == base
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        at_base(prefill)
        at_base(decode)
        assert cancelled > 0.8 * rounds if cancel else cancelled == 0
        assert decode._peers.handshakes == 1
