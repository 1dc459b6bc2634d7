"""Bulk landing passes the tests that direct runs pass; its buffer is shared and bounded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, seed, settings

from kvferry.engine import (
    ConfigError,
    DeadlineExceeded,
    EngineConfig,
    FerryInternalError,
    ImpossiblePlan,
    Span,
    TransferFailed,
    TransferReport,
    images,
    rearrange,
)
from kvferry.engine.cost import CostModel, LandingPolicy
from kvferry.engine.fabric import MemoryNetwork, MemoryStreams
from kvferry.engine.plan import prepare_plan
from kvferry.engine.selection import BulkSelection
from kvferry.engine.staging import Berth, Staging
from kvferry.engine.strided import copy_with_torch
from kvferry.protocol.errors import MisuseError
from tests.crossing import cross
from tests.kit import GROUP, IDENTITY, Pool, World, agent
from tests.oracle import FieldModel, GroupModel, GroupShape, Request
from tests.planning import RICH, Case, cases

BULK = {"landing": "bulk", "wave_bytes": 1 << 16}
NHD, HND = "b k n h d", "b k h n d"


def cross_in_memory(case: Case, **consumer: Any) -> tuple[list[str], TransferReport]:
    """A pull on virtual time: what the oracle finds wrong, and the report."""

    async def main() -> tuple[list[str], TransferReport]:
        network = MemoryNetwork(seed=case.seed)
        found = await cross(
            case, fabric=network.fabric, streams=MemoryStreams(), **consumer
        )
        assert not network.closed_in_flight
        return found

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# The same random pairs.


@seed(5)
@settings(
    max_examples=500,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_random_pairs_land_in_bulk(case: Case) -> None:
    """Any layout to any layout with everything that can be in bulk: exact."""
    if case.refusal is None:
        wrong, _ = cross_in_memory(case, **BULK)
        assert wrong == []
    else:
        error, reason = case.refusal
        with pytest.raises(error, match=reason):
            cross_in_memory(case, **BULK)


@pytest.mark.parametrize("wave_bytes", [96, 1000, 4096])
def test_one_of_each_kind_in_waves_of_any_length(wave_bytes) -> None:
    """A wave begins and ends in the middle of an image's blocks; odd cells are no matter."""
    wrong, report = cross_in_memory(RICH, landing="bulk", wave_bytes=wave_bytes)
    assert wrong == []
    assert report.bulk_bytes > 0


# Named ones.


def pair(
    consumer: GroupShape,
    producer: GroupShape,
    *,
    tp: tuple[int, int] = (1, 1),
    rank: int = 0,
    tokens: int = 48,
    computed: int = 0,
    heads: int = 8,
) -> Case:
    """Blocks are counted from both ends of the pools, so that they are not in order."""
    ours, theirs = consumer.block_size, producer.block_size
    mine = range(consumer.blocks - 2, 0, -1)[: -(-(tokens - computed) // ours) + 1]
    his = [3 * n % producer.blocks for n in range(-(-tokens // theirs))]
    return Case(
        model=(
            GroupModel(
                "full",
                ("layers.0", "layers.1"),
                (FieldModel("kv", {"k": 2, "d": 4}, heads=heads),),
            ),
        ),
        consumer={"full": consumer},
        producer={"full": producer},
        consumer_tp=tp[0],
        consumer_rank=rank,
        consumer_context=0,
        producer_tp=tp[1],
        producer_stages=1,
        producer_contexts=1,
        request=Request(
            tokens,
            {"full": Span(list(mine), computed)},
            {"full": Span(his)},
            computed_tokens=computed,
        ),
        seed=1,
    )


def shape(axes: str, size: int = 16, kernel: int = 0, **more: Any) -> GroupShape:
    return GroupShape(size, kernel or size, 160 // size + 3, {"kv": axes}, **more)


NAMED = {
    "NHD to HND": pair(shape(HND), shape(NHD)),
    "HND to NHD": pair(shape(NHD), shape(HND)),
    "NHD head slice, TP 2 of 1": pair(shape(NHD), shape(NHD), tp=(2, 1), rank=1),
    "NHD head slices, TP 1 of 2": pair(shape(NHD), shape(NHD), tp=(1, 2)),
    "NHD head slice, TP 4 of 2": pair(shape(NHD), shape(NHD), tp=(4, 2), rank=2),
    "NHD to HND, TP 2 of 4": pair(shape(HND), shape(NHD), tp=(2, 4), rank=1),
    "replicated heads": pair(shape(HND), shape(NHD), tp=(8, 4), rank=5, heads=2),
    "blocks of 1 to 16": pair(shape(HND), shape(NHD, 1)),
    "blocks of 16 to 1": pair(shape(NHD, 1), shape(HND)),
    "blocks of 1 to 16, NHD": pair(shape(NHD), shape(NHD, 1)),
    "blocks of 12 to 8": pair(shape(HND, 12), shape(NHD, 8)),
    "kernel blocks": pair(shape(HND, 48, 12), shape(NHD, 16, 8)),
    "a pair here": pair(shape("b n h d", pair=frozenset({"kv"})), shape(HND)),
    "a pair there": pair(shape(HND), shape("b n h d", pair=frozenset({"kv"}))),
    "keys and values apart": pair(shape(HND), shape("k b n h d")),
    "payload not contiguous": pair(shape("b k h d n"), shape(NHD)),
    "padded blocks": pair(
        shape(HND, pads={"b": 6, "h": 2}), shape(NHD, pads={"b": 4, "n": 8})
    ),
    "a prefix hit": pair(shape(HND), shape(NHD), computed=32, tokens=80),
    "a prefix inside a producer's block": pair(
        shape(HND, 4), shape(NHD, 16), computed=20, tokens=50
    ),
    "a tail": pair(shape(HND), shape(NHD), tokens=37),
    "one token": pair(shape(HND), shape(NHD), tokens=1),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("wave_bytes", [1 << 16, 5_000])
def test_named_pairs_land_in_bulk(name, wave_bytes) -> None:
    """All of it in bulk, and exact: stamps, zeros behind them, poison elsewhere."""
    wrong, report = cross_in_memory(NAMED[name], landing="bulk", wave_bytes=wave_bytes)
    assert wrong == []
    assert report.bulk_bytes == report.bytes > 0


@pytest.mark.parametrize("name", NAMED)
def test_named_pairs_of_the_models_choice(name) -> None:
    """Auto is exact, too, and never reads in more runs than direct does."""
    wrong, report = cross_in_memory(NAMED[name])
    assert wrong == []
    _, direct = cross_in_memory(NAMED[name], landing="direct")
    assert report.descriptors <= direct.descriptors


def test_a_block_that_is_listed_again_is_read_again() -> None:
    """Its tokens are as many as a whole block has, and not in a block's order."""
    case = pair(shape(HND, 4), shape(NHD, 16))
    selection = plan_of(case, landing="bulk", image_bytes=1 << 16).select(
        num_tokens=24,
        computed_tokens=8,
        local={"full": Span([1, 2, 3, 4], 8)},
        remote={"full": Span([5, 5])},
    )
    ((part,),) = selection.peers.values()
    assert isinstance(part, BulkSelection)
    for piece in part.pieces(slice(0, part.descriptors)):
        assert piece.blocks == 2
        assert not piece.is_whole
        assert [ids.tolist() for ids in piece.remote] == [[0, 0, 1, 1], [2, 3, 0, 1]]


# The choice.


def plan_of(case: Case, **policy: Any):
    local = case.consumer_pool().cache.layout
    remotes = {key: p.cache.layout for key, p in case.producer_pools().items()}
    return prepare_plan(local, remotes, policy=LandingPolicy(**policy))


def test_a_plan_says_what_either_way_costs() -> None:
    """Bytes, runs, the shortest of them and seconds, of a producer's kernel block."""
    plan = plan_of(NAMED["NHD to HND"], landing="auto", image_bytes=1 << 16)
    ((choice,),) = [peer.choices for peer in plan.peers.values()]
    block = 2 * 16 * 8 * 16
    assert choice.landing == "bulk"
    # One run ends where the next begins on both sides: from the keys to the values.
    assert choice.direct[:3] == (2 * block, 2 * (2 * 16 * 8 - 1), 16)
    assert choice.bulk is not None
    assert choice.bulk[:3] == (2 * block, 2, block)
    assert choice.bulk.seconds < choice.direct.seconds


def test_what_is_contiguous_is_read_directly() -> None:
    """One run a block: nothing to gain."""
    plan = plan_of(pair(shape(NHD), shape(NHD)), landing="auto", image_bytes=1 << 16)
    (peer,) = plan.peers.values()
    assert [choice.landing for choice in peer.choices] == ["direct"]
    assert peer.sections
    assert not peer.bulk


@pytest.mark.parametrize(("per_run", "landing"), [(1e-12, "direct"), (1e-3, "bulk")])
def test_the_constants_decide(per_run, landing) -> None:
    """Runs that cost nothing are read one by one; dear ones are not."""
    plan = plan_of(
        NAMED["NHD head slice, TP 2 of 1"],
        landing="auto",
        image_bytes=1 << 16,
        cost=CostModel(descriptor_s=per_run),
    )
    assert {c.landing for p in plan.peers.values() for c in p.choices} == {landing}


def test_holes_that_cost_more_than_they_save_are_not_read() -> None:
    """Key and value of a block are then two images."""
    case = pair(shape(HND), shape(NHD, pads={"k": 50_000}))
    plan = plan_of(case, landing="bulk", image_bytes=1 << 20)
    (section,) = next(iter(plan.peers.values())).bulk
    assert section.image_bytes == 16 * 8 * 16
    assert len(section.images) == 2 * 2
    wrong, _ = cross_in_memory(case, landing="bulk", wave_bytes=1 << 20)
    assert wrong == []


def test_an_image_longer_than_a_wave_is_not_one() -> None:
    """No room for a block: direct runs, also where bulk was asked for."""
    wrong, report = cross_in_memory(NAMED["NHD to HND"], landing="bulk", wave_bytes=100)
    assert wrong == []
    assert report.bulk_bytes == 0 < report.bytes


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i._replace(local_address=i.local_address + 16),
        lambda i: i._replace(run_bytes=i.run_bytes // 2),
        lambda i: i._replace(loops=i.loops[1:]),
        lambda i: i._replace(offset=i.offset + i.run_bytes),
        lambda i: i._replace(row=(i.row[0] - 2**20, *i.row[1:])),
    ],
    ids=["elsewhere", "half", "a loop less", "outside its image", "not registered"],
)
def test_a_wrong_image_is_refused(monkeypatch, change) -> None:
    """The proofs look at what the copies do: coverage, and what they read."""
    make = images._images

    def spoilt(*args):
        return (change(image) for image in make(*args))

    case = NAMED["NHD to HND"]
    monkeypatch.setattr(images, "_images", spoilt)
    try:
        plan = plan_of(case, landing="bulk", image_bytes=1 << 16)
    except (FerryInternalError, ImpossiblePlan):
        return
    # Outside the peer's memory: such a part lands directly.
    assert not any(peer.bulk for peer in plan.peers.values())


def test_the_configuration_says_what_does_not_fit() -> None:
    """Bulk without a buffer for one pull is refused; auto does without."""
    config = partial(EngineConfig, engine_id="e", identity=IDENTITY, staging_bytes=0)
    assert config().landing == "auto"
    with pytest.raises(ConfigError, match="staging_bytes"):
        config(landing="bulk")
    with pytest.raises(ConfigError, match="landing"):
        config(landing="both")


# The buffer.


async def pull_and_check(prefill, decode, pools, number: int, **pull: Any) -> None:
    """Request number so-and-so, on blocks of its own."""
    producer, consumer = pools
    ours, theirs = [2 * number, 2 * number + 1], [2 * number + 1, 2 * number]
    offer = prefill.offer(
        f"r{number}", producer.stamp(theirs, num_tokens=7, salt=number), num_tokens=7
    )
    await decode.pull(offer.ticket, {GROUP: ours}, **pull)
    assert consumer.holds(ours, num_tokens=7, salt=number)


def two_berths(**more: Any) -> dict[str, Any]:
    settings = {"landing": "bulk", "wave_bytes": 400, "window": 2}
    return {**settings, "staging_bytes": 1600, **more}


async def test_many_pulls_share_the_buffer_in_turn(autojump_clock, monkeypatch) -> None:
    """Never more than there is room for, in the order they came, and back to base."""
    pools, seen, order = (Pool(32), Pool(32)), [], []
    take = Staging._berth

    def watched(self: Staging) -> Berth:
        berth = take(self)
        seen.append(self.taken_berths)
        return berth

    monkeypatch.setattr(Staging, "_berth", watched)
    world = World()
    async with world.pair(*pools, **two_berths()) as (prefill, decode):

        async def one(number: int) -> None:
            await trio.sleep(number * 1e-6)
            await pull_and_check(prefill, decode, pools, number)
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(one, number)
        assert decode.statistics()["staging_berths_taken"] == 0
    assert max(seen) == 2
    assert len(seen) == 16
    assert all(abs(at - number) < 4 for at, number in enumerate(order)), order


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_pull_that_waits_for_room_can_be_ended(autojump_clock, how) -> None:
    """It takes nothing with it; those behind it go on."""
    pools = (Pool(32), Pool(32))
    async with World().pair(*pools, **two_berths()) as (prefill, decode):
        held = [await decode._staging.take() for _ in range(2)]
        async with trio.open_nursery() as nursery:
            limit = trio.move_on_after(5) if how == "cancel" else None
            deadline_s = 5 if how == "deadline" else None
            pull = partial(pull_and_check, prefill, decode, pools, 0)
            if limit is not None:
                with limit:
                    await pull()
                assert limit.cancelled_caught
            else:
                with pytest.raises(DeadlineExceeded) as caught:
                    await pull(deadline_s=deadline_s)
                assert caught.value.phase == "queued"
            for berth in held:
                decode._staging.give_back(berth)
            nursery.start_soon(pull_and_check, prefill, decode, pools, 1)
        assert decode.statistics()["staging_berths_taken"] == 0


async def test_a_quarantined_pull_keeps_its_room(autojump_clock) -> None:
    """What may still be written to is nobody else's, until it has settled."""
    world, pools = World(), (Pool(32), Pool(32))
    config = two_berths(staging_bytes=800, drain_grace_s=1.0)
    async with world.pair(*pools, **config) as (prefill, decode):
        with trio.move_on_after(0.5):
            await pull_and_check(prefill, decode, pools, 3)  # the peer is known
        world.network.freeze(agent(prefill))
        with trio.move_on_after(0.5):
            await pull_and_check(prefill, decode, pools, 0)
        assert len(decode.quarantine) == 1
        assert decode.statistics()["staging_berths_taken"] == 1
        world.network.thaw(agent(prefill))
        await decode.quarantine.wait_empty()
        assert decode.statistics()["staging_berths_taken"] == 0
        await pull_and_check(prefill, decode, pools, 1)


async def test_a_cancelled_pull_puts_nothing_more_in_place(autojump_clock) -> None:
    """What settles while it drains stays where it landed; its room is free again."""
    world, pools = World(latency_s=1.0), (Pool(32), Pool(32))
    async with world.pair(*pools, **two_berths()) as (prefill, decode):
        with trio.move_on_after(0.5):
            await pull_and_check(prefill, decode, pools, 0)
        assert decode.statistics()["staging_berths_taken"] == 0
        assert pools[1].is_untouched()


def test_what_is_long_is_put_in_place_beside_the_loop(monkeypatch) -> None:
    """In a worker thread, so that the next wave is read meanwhile: the same bytes."""
    in_loop, run = [], rearrange.Rearranger._put

    def noted(*args: Any) -> None:
        in_loop.append(trio.lowlevel.in_trio_run())
        run(*args)

    monkeypatch.setattr(rearrange.Rearranger, "_put", noted)
    for threshold, found in ((1 << 20, True), (1, False)):
        monkeypatch.setattr(rearrange, "THREAD_BYTES", threshold)
        network = MemoryNetwork(seed=1)
        crossing = partial(
            cross, RICH, fabric=network.fabric, streams=MemoryStreams(), **BULK
        )
        # On real time: virtual time does not wait for threads.
        wrong, _ = trio.run(crossing)
        assert wrong == []
        assert in_loop
        assert set(in_loop) == {found}
        in_loop.clear()


def test_torch_puts_the_same_in_place(monkeypatch) -> None:
    """What copies on a device copies the same bytes as what does on the host."""
    monkeypatch.setattr(rearrange, "copy_on", lambda _: copy_with_torch)
    wrong, report = cross_in_memory(RICH, **BULK)
    assert wrong == []
    assert report.bulk_bytes > 0


async def test_what_a_copy_goes_along_is_found_once(
    autojump_clock, monkeypatch
) -> None:
    """For each image of a plan, however many waves and pulls there are."""
    cut, found = rearrange.Rearranger._cut, []

    def noted(self: Any, section: Any, image: Any) -> Any:
        found.append(image)
        return cut(self, section, image)

    monkeypatch.setattr(rearrange.Rearranger, "_cut", noted)
    pools = (Pool(32), Pool(32))
    async with World().pair(*pools, **two_berths()) as (prefill, decode):
        for number in range(3):
            await pull_and_check(prefill, decode, pools, number)
    assert found
    assert len(found) == len(set(found))


async def test_a_failing_copy_fails_the_pull(autojump_clock, monkeypatch) -> None:
    """Typed, with the ranges that cannot be trusted; and that pull alone."""
    pools = (Pool(32), Pool(32))
    async with World().pair(*pools, **two_berths()) as (prefill, decode):
        with monkeypatch.context() as patch:

            def broken(*_: object) -> None:
                raise RuntimeError("no kernel image")

            patch.setattr(rearrange.Rearranger, "_put", broken)
            with pytest.raises(TransferFailed, match="no kernel image") as caught:
                await pull_and_check(prefill, decode, pools, 0)
        assert caught.value.phase == "reading"
        assert caught.value.untrusted
        assert decode.statistics()["staging_berths_taken"] == 0
        await pull_and_check(prefill, decode, pools, 1)


async def test_without_memory_for_it_all_lands_directly(
    autojump_clock, monkeypatch
) -> None:
    """Said once in the log, and no pull fails for it."""

    def refuse(*_: object) -> None:
        raise MisuseError("no memory")

    monkeypatch.setattr(Staging, "_add_buffer", refuse)
    world, pools = World(), (Pool(32), Pool(32))
    async with world.pair(*pools, **two_berths()) as (prefill, decode):
        await pull_and_check(prefill, decode, pools, 0)
        await pull_and_check(prefill, decode, pools, 1)
    assert len(world.logged("no_staging")) == 1


async def test_who_never_needs_it_never_pays(autojump_clock) -> None:
    """Equal layouts: no buffer is allocated or registered."""
    pools = (Pool(32), Pool(32))
    async with World().pair(*pools) as (prefill, decode):
        await pull_and_check(prefill, decode, pools, 0)
        assert not decode._staging._buffers
