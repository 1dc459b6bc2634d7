"""Many pushes at once under random faults, cancellations and cuts: the ledger holds."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from kvferry.engine import FerryError
from kvferry.engine.fabric import Progress
from kvferry.engine.fabric.faults import CallFault, NoticeFault, TransferFault
from kvferry.protocol.errors import TransferFailed
from tests.kit import GROUP, Pool, World, address, at_base, is_bare
from tests.pushing import begin_landing, begin_push, contact_of

if TYPE_CHECKING:
    from kvferry.engine import TransferEngine

BLOCKS = 3
REUSED = 7.0


class Ledger:
    """Who owns which of a consumer's blocks; nobody else's bytes land in them."""

    def __init__(self, pool: Pool, engine: TransferEngine, world: World) -> None:
        self.pool = pool
        self.engine = engine
        self.world = world
        self.free = list(range(len(pool.tensors[0])))

    def take(self) -> list[int]:
        """Blocks for one request; they were not touched since they were given back."""
        taken, self.free = self.free[:BLOCKS], self.free[BLOCKS:]
        return taken

    async def give_back(self, blocks: list[int]) -> None:
        """Reuse them, once they are out of quarantine."""
        await self.engine.quarantine.wait_free(GROUP, blocks)
        assert not self.world.may_touch(self.pool, blocks), blocks
        self.pool.fill(blocks, REUSED)
        await trio.sleep(3)
        assert self.pool.is_filled(blocks, REUSED), blocks
        self.free += blocks


@pytest.mark.parametrize("seed", range(212))
async def test_a_storm_of_pushes(autojump_clock, seed) -> None:
    """One outcome each, no byte in a block that was given back, everything at base."""
    rng = random.Random(seed)
    world = World(seed=seed)
    shape = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
    sources = [Pool(60, tp=(i, shape[0])) for i in range(shape[0])]
    targets = [Pool(60, tp=(i, shape[1])) for i in range(shape[1])]
    settings: dict[str, Any] = {
        "wave_bytes": rng.choice([100, 200, 2000]),
        "window": rng.choice([1, 2, 4]),
        "drain_grace_s": 2.0,
        "lease_s": 6.0,
        "poll_s": 0.005,
        "offered_poll_s": 0.02,
    }
    async with (
        world.instance("p", sources, **settings) as producers,
        world.instance("c", targets, **settings) as consumers,
    ):
        ledgers = [
            Ledger(pool, engine, world)
            for pool, engine in zip(targets, consumers, strict=True)
        ]
        done = failed = 0

        async def request(number: int) -> None:
            nonlocal done, failed
            await trio.sleep(rng.random() * 3)
            taken = [ledger.take() for ledger in ledgers]
            theirs = [3 * number, 3 * number + 1, 3 * number + 2]
            name = f"r{number}"
            async with trio.open_nursery() as nursery:
                calls = [
                    partial(
                        begin_push,
                        nursery,
                        engine,
                        pool,
                        name,
                        blocks=theirs,
                        salt=number,
                        deadline_s=10,
                    )
                    for engine, pool in zip(producers, sources, strict=True)
                ] + [
                    partial(
                        begin_landing,
                        nursery,
                        engine,
                        contact_of(producers),
                        name,
                        blocks={GROUP: blocks},
                        deadline_s=10,
                    )
                    for engine, blocks in zip(consumers, taken, strict=True)
                ]
                order = rng.sample(range(len(calls)), len(calls))
                outcomes = {}
                for place in order:
                    outcomes[place] = calls[place]()
                    if rng.random() < 0.5:
                        await trio.sleep(rng.random() * 0.05)
                if rng.random() < 0.4:
                    await trio.sleep(rng.random() * 0.04)
                    outcomes[rng.choice(order)].scope.cancel()
            landings = [outcomes[len(producers) + n] for n in range(len(consumers))]
            pushes = [outcomes[n] for n in range(len(producers))]
            for landing, ledger, blocks in zip(landings, ledgers, taken, strict=True):
                if landing.report is not None:
                    done += 1
                    assert ledger.pool.holds(blocks, num_tokens=10, salt=number)
                else:
                    failed += 1
                    assert landing.is_cancelled or isinstance(landing.error, FerryError)
            if any(push.report is not None for push in pushes):
                assert all(
                    ledger.pool.holds(blocks, num_tokens=10, salt=number)
                    for ledger, blocks in zip(ledgers, taken, strict=True)
                )
            async with trio.open_nursery() as nursery:
                for ledger, blocks in zip(ledgers, taken, strict=True):
                    nursery.start_soon(ledger.give_back, blocks)

        async def trouble() -> None:
            for _ in range(12):
                await trio.sleep(rng.random() * 0.4)
                where = rng.choice(producers)
                match rng.randrange(6):
                    case 0:
                        world.streams.cut(*address(where))
                    case 1:
                        world.streams.freeze(*address(where))
                        await trio.sleep(rng.random() * 4)
                        world.streams.thaw(*address(where))
                    case 2:
                        progress = rng.choice([Progress.FAILED, Progress.DONE])
                        world.network.faults.add(
                            TransferFault(fabric="p-*", progress=progress, delay_s=2.5)
                        )
                    case 3:
                        copies = rng.choice([0, 2])
                        world.network.faults.add(
                            NoticeFault(fabric="p-*", copies=copies)
                        )
                    case 4:
                        method = rng.choice(["post", "prepare", "connect", "poll"])
                        world.network.faults.add(
                            CallFault(
                                fabric="*",
                                method=method,
                                nth=rng.randint(1, 5),
                                error=TransferFailed("injected"),
                            )
                        )
                    case _:
                        world.network.faults.add(
                            TransferFault(
                                fabric="p-*",
                                progress=Progress.LOST,
                                recovers=True,
                                delay_s=3.0,
                            )
                        )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trouble)
            for number in range(16):
                nursery.start_soon(request, number)
        assert done + failed == 16 * len(consumers)
        assert not world.logged("internal_error"), world.logged("internal_error")
        await trio.sleep(70)
        for engine in (*producers, *consumers):
            at_base(engine)
        for engine in producers:
            world.streams.cut(*address(engine))
        await trio.sleep(1)
        for engine in (*producers, *consumers):
            is_bare(engine)
