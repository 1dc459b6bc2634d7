"""The cases that hold for a pull hold for a push: geometry and token positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
import trio.testing

from kvferry.engine import Span
from kvferry.engine.fabric import MemoryNetwork, MemoryStreams
from kvferry.protocol.errors import ImpossiblePlan, UnknownBlock
from tests.crossing import cross_pushed
from tests.engine.test_geometry_cases import HND, NHD, kv_model, one_group, paged
from tests.engine.test_token_cases import case as token_case
from tests.engine.test_token_cases import scattered
from tests.kit import GROUP, STATE, Pool, World, at_base
from tests.oracle import FieldModel, GroupModel, GroupShape, Request
from tests.planning import RICH, Case
from tests.pushing import OURS, THEIRS, begin, begin_landing, begin_push, contact_of


def pushed(case: Case) -> tuple[list[str], list[BaseException]]:
    """What the oracle finds wrong, and all errors."""

    async def main() -> tuple[list[str], list[BaseException]]:
        network = MemoryNetwork(seed=case.seed)
        found = await cross_pushed(case, fabric=network.fabric, streams=MemoryStreams())
        assert not network.closed_in_flight
        return found

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def exact(case: Case) -> None:
    """Whoever comes first, in one step or in many."""
    for seed in range(4):
        assert pushed(replace(case, seed=seed)) == ([], [])


# Geometry.


@pytest.mark.parametrize("rank", range(8))
def test_g1_a_replicated_head_is_written_to_every_rank_that_holds_it(rank) -> None:
    """H=4, TP 4 to 8: consumer ranks 2k and 2k+1 both get head k."""
    exact(one_group(kv_model(4), paged(16), paged(16), tp=(4, 8), rank=rank))


def test_g3_a_head_with_two_holders_is_written_by_one() -> None:
    """H=4, TP 8 to 1: the bytes of four ranks, no poison left."""
    exact(one_group(kv_model(4), paged(16), paged(16), tp=(8, 1)))


@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (64, 16), (48, 32), (1, 16)])
@pytest.mark.parametrize("tp", [(1, 1), (1, 4), (4, 1), (4, 2), (2, 4), (3, 1), (1, 3)])
def test_g6_any_blocks_and_any_ranks(blocks, tp) -> None:
    """Heads split or not, axes turned, a prompt that is no multiple of anything."""
    consumer, producer = blocks
    pools = (-(-37 // consumer) + 3, -(-37 // producer) + 3)
    heads = 12
    exact(
        one_group(
            kv_model(heads),
            paged(consumer, axes=HND, blocks=pools[0]),
            paged(producer, axes=NHD, blocks=pools[1]),
            tp=tp,
            rank=tp[1] - 1,
        )
    )


def test_g8_kernel_blocks_of_either_side() -> None:
    """Producer 64 = 4 x 16, consumer 64 = 2 x 32."""
    exact(one_group(kv_model(4), paged(64, 32), paged(64, 16), tp=(2, 1)))


def test_g9_pools_of_different_sizes() -> None:
    """113 blocks against 211."""
    exact(one_group(kv_model(2), paged(16, blocks=113), paged(16, blocks=211)))


def test_g12_a_latent_beside_a_sharded_state() -> None:
    """Producer TP 4, consumer TP 2: the latent once, the state from two ranks."""
    latent = FieldModel("latent", {"d": 6}, heads=0)
    conv = FieldModel("conv", {"w": 3}, parts=(("x", 8), ("B", 4)))
    made = Case(
        model=(
            GroupModel("mla", ("layers.0",), (latent,)),
            GroupModel("state", ("layers.1",), (conv,)),
        ),
        consumer={
            "mla": GroupShape(16, 16, 6, {"latent": "b n d"}),
            "state": GroupShape(0, 0, 3, {"conv": "b c w"}),
        },
        producer={
            "mla": GroupShape(8, 8, 9, {"latent": "b n d"}),
            "state": GroupShape(0, 0, 3, {"conv": "b w c"}),
        },
        consumer_tp=2,
        consumer_rank=1,
        consumer_context=0,
        producer_tp=4,
        producer_stages=1,
        producer_contexts=1,
        request=Request(
            21,
            {"mla": Span([4, 1]), "state": Span([2])},
            {"mla": Span([8, 0, 3]), "state": Span([1])},
        ),
        seed=0,
    )
    exact(made)


def test_one_of_each_kind() -> None:
    """Unequal blocks, padding, a prefix hit, a window, a state, two sources."""
    for seed in range(20):
        assert pushed(replace(RICH, seed=seed)) == ([], []), seed


# Token positions.


def test_p1_only_what_the_consumer_lacks() -> None:
    """96 of 250 tokens are there already, blocks of 16 against 64."""
    exact(
        token_case(
            scattered(10, 96, seed=1),
            scattered(4, seed=2),
            num_tokens=250,
            computed_tokens=96,
            blocks=(16, 64),
        )
    )


@pytest.mark.parametrize("extra", [(1, 0), (3, 0), (0, 3), (2, 2)])
def test_p2_p3_blocks_more_than_needed_on_either_side(extra) -> None:
    """They get no bytes, are zeroed here, and shift nothing."""
    ours, theirs = extra
    exact(
        token_case(
            scattered(3 + ours, seed=1), scattered(3 + theirs, seed=2), num_tokens=41
        )
    )


@pytest.mark.parametrize("computed_tokens", [41, 48, 100])
def test_p4_a_full_prefix_hit_moves_nothing(computed_tokens) -> None:
    """Done all the same."""
    exact(
        token_case(
            scattered(4, seed=1),
            scattered(3, seed=2),
            num_tokens=41,
            computed_tokens=computed_tokens,
        )
    )


def test_p5_dropped_blocks_are_never_read() -> None:
    """A window of 20 needs tokens 22 to 40; the producer has dropped block 0."""
    theirs = Span([None, *scattered(2, seed=2).block_ids])
    exact(token_case(scattered(3, seed=1), theirs, num_tokens=41, window=20))


def test_p5_a_none_where_data_is_needed_names_it() -> None:
    """Both sides fail, and say which block."""
    made = token_case(
        scattered(3, seed=1), Span([None, None, 7]), num_tokens=41, window=20
    )
    for seed in range(6):
        _, errors = pushed(replace(made, seed=seed))
        assert {type(error) for error in errors} <= {UnknownBlock, ImpossiblePlan}
        assert all("producer block at index 1" in str(error) for error in errors)


def test_p6_the_rest_of_the_last_block_is_zero() -> None:
    """1,003 tokens in blocks of 16: 11 of the last block arrive."""
    exact(
        one_group(
            kv_model(2), paged(16, blocks=70), paged(16, blocks=70), num_tokens=1003
        )
    )


async def test_p7_blocks_before_the_registered_ones_are_not_written(
    autojump_clock,
) -> None:
    """Ten blocks of 16 pushed to a consumer that has 96 tokens: 6 to 9 arrive."""
    world, source, target = World(), Pool(16, block_size=16), Pool(block_size=16)
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        theirs = [12, 3, 7, 1, 0, 9, 4, 14, 2, 8]
        push = begin_push(nursery, prefill, source, blocks=theirs, num_tokens=160)
        landing = begin_landing(
            nursery, decode, prefill, blocks={GROUP: [5, 2, 9, 11]}, computed_tokens=96
        )
        await landing.over.wait()
        assert landing.error is None
        target.check([5, 2, 9, 11], num_tokens=160, first_token=96)
        assert landing.report.bytes == 4 * 2 * 2 * 2 * 16 * 3 * 8
        await push.over.wait()
        assert push.report.bytes == landing.report.bytes


# Whole instances: every rank on both sides, and all of them are done.


@pytest.mark.parametrize("tp", [(1, 4), (4, 1), (4, 2), (2, 4), (3, 1), (8, 4), (2, 2)])
@pytest.mark.parametrize("first", ["push", "expect"])
async def test_every_rank_of_both_sides_is_done(autojump_clock, tp, first) -> None:
    """A push is done when each rank of the consumer has it from all that it needs."""
    world, heads = World(), 12 if 3 in tp else 4
    sources = [Pool(heads=heads, tp=(i, tp[0])) for i in range(tp[0])]
    targets = [Pool(heads=heads, tp=(i, tp[1])) for i in range(tp[1])]
    async with (
        world.instance("p", sources) as producers,
        world.instance("c", targets) as consumers,
    ):
        contact = contact_of(producers)
        async with trio.open_nursery() as nursery:
            late = {"push": 0.0, "expect": 1.0}[first]

            async def push() -> list:
                await trio.sleep(1.0 - late)
                return [
                    begin_push(nursery, engine, pool)
                    for engine, pool in zip(producers, sources, strict=True)
                ]

            async def land() -> list:
                await trio.sleep(late)
                return [begin_landing(nursery, c, contact) for c in consumers]

            calls = begin(nursery, push), begin(nursery, land)
        for call in calls:
            assert [outcome.error for outcome in call.report] == [None] * len(
                call.report
            )
        for target in targets:
            target.check(OURS, num_tokens=10)
        pushes, landings = (call.report for call in calls)
        moved = sum(outcome.report.bytes for outcome in pushes)
        assert moved == sum(outcome.report.bytes for outcome in landings)
        await trio.testing.wait_all_tasks_blocked()
        for engine in (*producers, *consumers):
            at_base(engine)


async def test_a_hybrid_of_states_and_attention(autojump_clock) -> None:
    """The state of a request lands with its tokens."""
    world, source, target = World(), Pool(slots=3), Pool(slots=5)
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        spans = source.stamp(THEIRS, num_tokens=10) | source.stamp_state(2)
        push = begin(nursery, lambda: prefill.push("r", spans, num_tokens=10))
        landing = begin_landing(
            nursery, decode, prefill, blocks={GROUP: OURS, STATE: [4]}
        )
        await push.over.wait()
        await landing.over.wait()
        assert (push.error, landing.error) == (None, None)
        target.check(OURS, num_tokens=10)
        target.check_state(4)
