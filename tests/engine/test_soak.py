"""Soaks: ten thousand pulls cancelled, and many more done; nothing grows.

The normal run does a share of those that are done; ``KVFERRY_SOAK=1`` does all
hundred thousand.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import trio
import trio.testing

from kvferry.engine.fabric import MemoryStreams
from tests.kit import GROUP, Pool, Steps, World, at_base, is_bare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvferry.engine import TransferEngine

CANCELLED = 10_000
DONE = 100_000 if os.environ.get("KVFERRY_SOAK") == "1" else 6_000
PEERS = 1_000
OURS = [3]
REUSED = 7.0
LOOKS = {"poll_s": 0.002, "offered_poll_s": 0.05, "idle_poll_s": 0.5, "lease_s": 5.0}
REMEMBERED = 4_096
"""Ended offers that an engine keeps, to tell a late reader why."""
GROWTH_BLOCKS = 1_000
"""Of Python's allocator: what comes and goes, and far from one for each pull."""
PEER_BLOCKS = 120
"""What a peer leaves behind for good reasons: its name on the memory network, its port,
and the offer that it read, which is remembered."""
GROWTH_MIB = 16


class Quiet(World):
    """A world that keeps no log: it would be all that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = MemoryStreams(seed=None)

    def logger(self) -> Any:
        return structlog.wrap_logger(
            None, processors=[], wrapper_class=structlog.make_filtering_bound_logger(50)
        )


async def held() -> tuple[int, int]:
    """Blocks of Python's allocator and resident MiB, once the last leases are over."""
    await trio.sleep(6)
    await trio.testing.wait_all_tasks_blocked()
    gc.collect()
    return sys.getallocatedblocks(), resident_mib()


def resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


async def grows_not(
    engines: tuple[TransferEngine, ...],
    one: Callable[[int], Awaitable[None]],
    *,
    rounds: int,
    warm_up: int = REMEMBERED + 500,
    blocks: int = GROWTH_BLOCKS,
) -> None:
    """Statistics, tasks and memory are the same after the rounds as before them."""
    for number in range(warm_up):
        await one(number)
    before = await held()
    base = [engine.statistics() for engine in engines]
    tasks = trio.lowlevel.current_statistics().tasks_living
    for number in range(rounds):
        await one(number)
    after = await held()
    assert [engine.statistics() for engine in engines] == base
    assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert after[0] - before[0] < blocks
    assert after[1] - before[1] < GROWTH_MIB
    for engine in engines:
        at_base(engine)


def small() -> Pool:
    return Pool(8, layers=1, block_size=2, dim=1)


async def test_l7_ten_thousand_cancelled_pulls(autojump_clock) -> None:
    """At each of their steps, hundreds of times: handles, rows, tasks, memory at base."""
    world, producer, consumer = Quiet(), small(), small()
    blocks = producer.stamp([1], num_tokens=2)
    cancelled = 0
    async with world.pair(producer, consumer, **LOOKS) as (prefill, decode):

        async def one(number: int) -> None:
            nonlocal cancelled
            offer = prefill.offer("r", blocks, num_tokens=2)
            with trio.CancelScope() as scope, Steps(number % 29 + 1, scope.cancel):
                await decode.pull(offer.ticket, {GROUP: OURS})
            cancelled += scope.cancelled_caught
            consumer.fill(OURS, REUSED)
            await offer.wait()
            assert consumer.is_filled(OURS, REUSED)

        await grows_not((prefill, decode), one, rounds=CANCELLED)
        assert cancelled > CANCELLED
        assert decode._peers.dials.handshakes == 1


async def test_many_thousand_pulls_done(autojump_clock) -> None:
    """Small ones, one after the other, each of them right."""
    world, producer, consumer = Quiet(), small(), small()
    blocks = producer.stamp([1], num_tokens=2)
    async with world.pair(producer, consumer, **LOOKS) as (prefill, decode):

        async def one(number: int) -> None:
            offer = prefill.offer(f"r{number}", blocks, num_tokens=2)
            await decode.pull(offer.ticket, {GROUP: OURS})
            await offer.wait()
            if number % 100 == 0:
                consumer.check(OURS, num_tokens=2)
                consumer.fill(OURS, REUSED)

        await grows_not((prefill, decode), one, rounds=DONE)
        assert decode._peers.dials.handshakes == 1


async def test_e5_a_thousand_peers_come_and_go(autojump_clock) -> None:
    """Producers at one consumer, consumers at one producer; nothing of them stays."""
    world = Quiet()
    async with (
        world.engine("c", small(), **LOOKS) as decode,
        world.engine("p", small(), **LOOKS) as prefill,
    ):
        pool = small()
        blocks = pool.stamp([1], num_tokens=2)

        async def one(_number: int) -> None:
            async with world.engine("x", pool, **LOOKS) as peer:
                offer = peer.offer("r", blocks, num_tokens=2)
                await decode.pull(offer.ticket, {GROUP: [2]})
                offer = prefill.offer("r", {GROUP: [3]}, num_tokens=2)
                await peer.pull(offer.ticket, {GROUP: [2]})

        await grows_not(
            (decode, prefill), one, rounds=PEERS, warm_up=50, blocks=PEER_BLOCKS * PEERS
        )
        is_bare(decode)
        is_bare(prefill)
        assert decode._peers.dials.handshakes == PEERS + 50
