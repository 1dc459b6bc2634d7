"""A destination block is one request's at a time."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from kvferry.engine import BlocksInUse, Span
from tests.kit import GROUP, POISON, STATE, Pool, World, at_base


async def test_a_block_of_a_pull_under_way_is_not_another_s(autojump_clock) -> None:
    """The second is refused by name, the first unaffected; afterwards it is free."""
    world, producer, consumer = World(latency_s=1.0), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        first = prefill.offer("r", producer.stamp([1, 2], num_tokens=8), num_tokens=8)
        second = prefill.offer("s", producer.stamp([3], num_tokens=4), num_tokens=4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.pull, first.ticket, {GROUP: [5, 6]})
            await trio.sleep(0.5)
            for call in (
                decode.pull(second.ticket, {GROUP: [6]}),
                decode.expect(prefill.contact, {GROUP: [6]}, request_id="x"),
            ):
                with pytest.raises(BlocksInUse, match=r"\[6\].*request=[sx]"):
                    await call
            # One that was drained is free at once.
            with trio.move_on_after(0.1):
                await decode.pull(second.ticket, {GROUP: [7]})
        await decode.decline(second.ticket)
        assert consumer.holds([5, 6], num_tokens=8)
        third = prefill.offer("t", producer.stamp([3], num_tokens=4), num_tokens=4)
        await decode.pull(third.ticket, {GROUP: [7]})
        at_base(decode)


async def test_a_shared_prefix_is_no_destination(autojump_clock) -> None:
    """Two requests list the same first block, which both have already."""
    world, producer, consumer = World(latency_s=1.0), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        async with trio.open_nursery() as nursery:
            for number in range(2):
                blocks = producer.stamp([1, 2 + number], num_tokens=8)
                ticket = prefill.offer(f"r{number}", blocks, num_tokens=8).ticket
                ours = {GROUP: Span([5, 6 + number], first_token=0)}
                nursery.start_soon(
                    lambda t=ticket, o=ours: decode.pull(t, o, computed_tokens=4)
                )
        for here, there in zip(consumer.tensors, producer.tensors, strict=True):
            assert here[6:8].equal(there[2:4])


async def test_a_slot_of_a_state_is_a_destination(autojump_clock) -> None:
    """Whole, whatever was computed."""
    world = World(latency_s=1.0)
    producer, consumer = Pool(slots=4), Pool(slots=4)
    async with world.pair(producer, consumer) as (prefill, decode):
        tickets = [
            prefill.offer(
                name, {**producer.stamp([1], num_tokens=4), STATE: [slot]}, num_tokens=4
            ).ticket
            for name, slot in (("r", 1), ("s", 2))
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.pull, tickets[0], {GROUP: [5], STATE: [3]})
            await trio.sleep(0.5)
            with pytest.raises(BlocksInUse, match=STATE):
                await decode.pull(tickets[1], {GROUP: [6], STATE: [3]})
        await decode.decline(tickets[1])


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("kind", [list, np.array])
async def test_ids_that_change_afterwards_change_nothing(
    autojump_clock, kind, way
) -> None:
    """A request has the blocks that were given, tail and all, and touches no others."""
    world, producer, consumer = World(latency_s=1.0), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        theirs = {GROUP: kind(producer.stamp([1, 2], num_tokens=5)[GROUP])}
        ours = {GROUP: kind([5, 6])}
        async with trio.open_nursery() as nursery:
            if way == "pull":
                ticket = prefill.offer("r", theirs, num_tokens=5).ticket
                nursery.start_soon(decode.pull, ticket, ours)
            else:
                nursery.start_soon(
                    lambda: decode.expect(prefill.contact, ours, request_id="r")
                )
                nursery.start_soon(lambda: prefill.push("r", theirs, num_tokens=5))
            for _ in range(2):  # both calls have begun then, and are not further
                await trio.lowlevel.checkpoint()
            theirs[GROUP][:] = ours[GROUP][:] = [8, 9]
        assert consumer.holds([5, 6], num_tokens=5)
        assert all((t[8:10] == POISON).all() for t in consumer.tensors)
        at_base(decode)
