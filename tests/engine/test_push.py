"""Push: the producer writes into blocks that the consumer has registered."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.kit import GROUP, Pool, World

BLOCKS = [3, 7, 9]
INTO = [5, 6, 1]


async def expect(nursery: trio.Nursery, found: list[Any], call: Any) -> None:
    async def run() -> None:
        found.append(await call)

    nursery.start_soon(run)


@pytest.mark.parametrize("first", ["push", "expect"])
async def test_a_push_lands_whoever_comes_first(
    first: str, autojump_clock: Any
) -> None:
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        blocks = source.stamp(BLOCKS, num_tokens=10)
        reports: dict[str, Any] = {}

        async def push() -> None:
            reports["push"] = await prefill.push("r", blocks, num_tokens=10)

        async def landing() -> None:
            reports["expect"] = await decode.expect(
                prefill.contact, {GROUP: INTO}, request_id="r"
            )

        steps = [push, landing] if first == "push" else [landing, push]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(steps[0])
            await trio.sleep(1)
            nursery.start_soon(steps[1])
        target.check(INTO, num_tokens=10)
        assert reports["push"].bytes == reports["expect"].bytes > 0
