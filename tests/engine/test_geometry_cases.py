"""The geometry cases g1 to g17: unequal layouts that went wrong elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvferry.engine.cache import (
    AttentionGroup,
    KVCache,
    PagedTensor,
    Shard,
    Span,
    tp_shard,
)
from kvferry.engine.plan import prepare_plan
from kvferry.engine.spans import kernel_ids
from kvferry.protocol.errors import CacheError, ImpossiblePlan, UnknownBlock
from tests.oracle import FieldModel, GroupModel, GroupShape, Request
from tests.planning import Case, run

HND, NHD = "b k h n d", "b k n h d"
LAYERS = ("layers.0", "layers.1")


def kv_model(
    heads: int, *, window: int | None = None, name: str = "full"
) -> GroupModel:
    field = FieldModel("kv", {"k": 2, "d": 4}, heads, dtype=torch.bfloat16)
    return GroupModel(name, LAYERS, (field,), window)


def paged(
    block_size: int, kernel: int | None = None, axes: str = HND, **numbers
) -> GroupShape:
    numbers.setdefault("blocks", 24)
    return GroupShape(block_size, kernel or block_size, axes={"kv": axes}, **numbers)


def scattered(blocks: int, first_token: int = 0, *, seed: int, pool: int = 24) -> Span:
    order = np.random.default_rng(seed).permutation(pool)[:blocks]
    return Span([int(block) for block in order], first_token)


def one_group(
    model: GroupModel,
    consumer: GroupShape,
    producer: GroupShape,
    *,
    tp: tuple[int, int] = (1, 1),
    rank: int = 0,
    num_tokens: int = 37,
    computed_tokens: int = 0,
) -> Case:
    """A case of one attention group; ``tp`` is the producer's, then the consumer's."""
    spans = {}
    for side, shape in (("local", consumer), ("remote", producer)):
        blocks = -(-num_tokens // shape.block_size)
        spans[side] = {
            model.name: scattered(blocks, seed=blocks + len(side), pool=shape.blocks)
        }
    return Case(
        (model,),
        {model.name: consumer},
        {model.name: producer},
        producer_tp=tp[0],
        consumer_tp=tp[1],
        consumer_rank=rank,
        consumer_context=0,
        producer_stages=1,
        producer_contexts=1,
        request=Request(num_tokens, computed_tokens=computed_tokens, **spans),
        seed=rank,
    )


def test_g1_each_head_replicated_on_two_consumer_ranks() -> None:
    """H=4, TP 4 to 8: ranks 2k and 2k+1 both hold head k, read from rank k."""
    for rank in range(8):
        case = one_group(kv_model(4), paged(16), paged(16), tp=(4, 8), rank=rank)
        outcome = run(case)
        assert outcome.wrong == []
        assert outcome.readers == {(0, rank // 2, 0)}


def test_g2_every_slice_lies_inside_its_region() -> None:
    """H=2, TP 1 to 4: exact, and the proof has seen every row inside its region."""
    for rank in range(4):
        assert (
            run(
                one_group(kv_model(2), paged(16), paged(16), tp=(1, 4), rank=rank)
            ).wrong
            == []
        )


def test_g3_a_replicated_head_is_read_once() -> None:
    """H=4, TP 8 to 1: four of the eight ranks are read, and nothing is left out."""
    case = one_group(kv_model(4), paged(16), paged(16), tp=(8, 1))
    outcome = run(case)
    assert outcome.wrong == []
    assert len(outcome.readers) == 4
    assert {tp // 2 for _, tp, _ in outcome.readers} == {0, 1, 2, 3}
    assert outcome.bytes == 2 * 2 * 4 * 48 * 4 * 2  # layers, k, heads, tokens, d, width


def test_g3_readers_spread_over_the_holders() -> None:
    """Two readers of one head do not both read from the same holder."""
    readers = [
        run(one_group(kv_model(1), paged(16), paged(16), tp=(2, 2), rank=rank)).readers
        for rank in range(2)
    ]
    assert readers == [{(0, 0, 0)}, {(0, 1, 0)}]


SIZES = (1, 2, 3, 4, 6, 8, 16)


def splits(heads: int, size: int) -> bool:
    return heads % size == 0 or size % heads == 0


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8])
def test_g4_sweep_of_heads_and_ranks(heads: int) -> None:
    """Every pair of splits is exact; a number of ranks without a split is refused."""
    for producer_tp, consumer_tp in itertools.product(SIZES, SIZES):
        if not (splits(heads, producer_tp) and splits(heads, consumer_tp)):
            unsplit = producer_tp if not splits(heads, producer_tp) else consumer_tp
            with pytest.raises(CacheError, match=f"{heads} units over {unsplit}"):
                tp_shard(heads, 0, unsplit)
            continue
        for rank in {0, consumer_tp // 2, consumer_tp - 1}:
            case = one_group(
                kv_model(heads),
                paged(4, blocks=6),
                paged(4, axes=NHD, blocks=6),
                tp=(producer_tp, consumer_tp),
                rank=rank,
                num_tokens=7,
            )
            assert run(case).wrong == [], (producer_tp, consumer_tp, rank)


def test_g4_a_head_that_nobody_holds_is_refused_with_both_shares() -> None:
    """Shards given by hand that leave a gap: the message has the units and the holders."""

    def cache(shard: Shard) -> KVCache:
        tensor = torch.zeros(6, 2, shard.size, 4, 4)
        layers = {"a": PagedTensor(tensor, HND, shard)}
        return KVCache([AttentionGroup("full", 4, layers)])

    local = cache(Shard(6, 0, 6)).layout
    remotes = {0: cache(Shard(6, 0, 2)).layout, 1: cache(Shard(6, 3, 6)).layout}
    with pytest.raises(
        ImpossiblePlan, match=r"units \[2, 3\) of 6.*\(0, 2\), \(3, 6\)"
    ):
        prepare_plan(local, remotes)


@pytest.mark.parametrize(
    "axes", list(itertools.product((HND, NHD, "k b n h d", "b h n k d"), repeat=2))
)
@pytest.mark.parametrize("tp", [(2, 4), (4, 2), (2, 2)])
def test_g5_axis_orders(axes: tuple[str, str], tp: tuple[int, int]) -> None:
    """Any storage order on either side, also at equal TP."""
    model = kv_model(8)
    consumer, producer = (paged(16, axes=order) for order in axes)
    for rank in range(tp[1]):
        assert run(one_group(model, consumer, producer, tp=tp, rank=rank)).wrong == []


def test_g5_a_contradicting_axis_order_is_refused() -> None:
    """Axes that name other sizes than the tensor has do not describe it."""
    contradicting = PagedTensor(torch.zeros(6, 2, 16, 8, 4), HND, Shard(8, 0, 8))
    group = AttentionGroup("full", 8, {"a": contradicting})
    with pytest.raises(CacheError, match="has 16"):
        KVCache([group])


@pytest.mark.parametrize(
    "sizes", [(16, 16), (16, 64), (64, 16), (48, 32), (16, 128), (1, 16)]
)
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (2, 4)])
@pytest.mark.parametrize("num_tokens", [1, 37, 150])
def test_g6_unequal_blocks(
    sizes: tuple[int, int], tp: tuple[int, int], num_tokens: int
) -> None:
    """Exact in both directions, heads split or not, for prompts that fit neither."""
    for ours, theirs in (sizes, sizes[::-1]):
        case = one_group(
            kv_model(4),
            paged(ours, axes=HND, blocks=160),
            paged(theirs, axes=NHD, blocks=160),
            tp=tp,
            num_tokens=num_tokens,
        )
        assert run(case).wrong == []


def test_g7_logical_ids_expand_to_kernel_ids() -> None:
    """Logical 128, kernel 64: [5, 9] is [10, 11, 18, 19]."""
    ids = kernel_ids(np.array([5, 9]), ratio=2)
    assert ids.tolist() == [10, 11, 18, 19]


def test_g7_an_id_beyond_the_logical_pool_is_refused() -> None:
    """There is a kernel block 13, but no logical block 13."""
    case = one_group(kv_model(2), paged(16, 8, blocks=12), paged(16, blocks=12))
    local = {"full": Span([5, 9, 12])}
    with pytest.raises(UnknownBlock, match=r"block id 12 at index 2.* pool of 12"):
        run(replace(case, request=replace(case.request, local=local)))


def test_g8_each_side_has_its_own_ratio() -> None:
    """64 = 4 x 16 on the producer, 64 = 2 x 32 on the consumer."""
    case = one_group(kv_model(4), paged(64, 32), paged(64, 16), num_tokens=150)
    assert run(case).wrong == []


def test_g9_pools_of_different_sizes() -> None:
    """113 and 211 blocks: a pool's size is a number like any other."""
    case = one_group(kv_model(2), paged(16, blocks=113), paged(16, blocks=211))
    assert run(case).wrong == []


def test_g10_kernel_blocks_that_the_ratio_does_not_divide() -> None:
    """101 kernel blocks cannot be logical blocks of 4: refused with the numbers."""
    tensor = torch.zeros(101, 2, 2, 4, 4)
    with pytest.raises(CacheError, match=r"101 kernel blocks.*4 each"):
        KVCache(
            [
                AttentionGroup(
                    "full", 16, {"a": PagedTensor(tensor, HND, Shard(2, 0, 2))}
                )
            ]
        )


def state_model(scale: int, name: str = "state") -> GroupModel:
    parts = (("x", 6144 // scale), ("B", 1024 // scale), ("C", 1024 // scale))
    return GroupModel(
        name,
        LAYERS,
        (
            FieldModel("conv", {"w": 3}, parts=parts, dtype=torch.bfloat16),
            FieldModel("ssm", {"p": 5}, parts=(("ssm", 8),)),
        ),
    )


def state_case(
    model: GroupModel, axes: tuple[str, str], tp: tuple[int, int], rank: int
) -> Case:
    shapes = [
        {model.name: GroupShape(0, 0, 4, {"conv": order, "ssm": "b c p"})}
        for order in axes
    ]
    return Case(
        (model,),
        *shapes,
        producer_tp=tp[0],
        consumer_tp=tp[1],
        consumer_rank=rank,
        consumer_context=0,
        producer_stages=1,
        producer_contexts=1,
        request=Request(9, {model.name: Span([2, 0])}, {model.name: Span([3, 1])}),
        seed=0,
    )


@pytest.mark.parametrize("axes", list(itertools.product(("b c w", "b w c"), repeat=2)))
@pytest.mark.parametrize("tp", [(1, 2), (4, 2), (2, 2)])
def test_g11_each_part_of_a_state_is_split_by_itself(axes, tp) -> None:
    """x, B and C of unequal width, channels outside or inside the rows."""
    for rank in range(tp[1]):
        assert run(state_case(state_model(16), axes, tp, rank)).wrong == []


def test_g11_at_full_width() -> None:
    """6,144 + 1,024 + 1,024 channels: contiguous parts travel as one run each."""
    model = GroupModel(
        "state",
        ("layers.0",),
        (FieldModel("conv", {"w": 3}, parts=(("x", 6144), ("B", 1024), ("C", 1024))),),
    )
    case = state_case(model, ("b c w", "b c w"), (1, 2), 1)
    for shapes in (case.consumer, case.producer):
        shapes["state"] = replace(shapes["state"], axes={"conv": "b c w"})
    outcome = run(case)
    assert outcome.wrong == []
    assert outcome.descriptors == 3 * 2


def test_g12_latent_beside_a_sharded_state() -> None:
    """MLA is read from one rank, the state from every rank that holds a needed part."""
    latent = GroupModel("mla", ("layers.0",), (FieldModel("latent", {"d": 9}),))
    state = state_model(64)
    for rank in range(2):
        case = Case(
            (latent, state),
            *(
                {
                    "mla": GroupShape(block, block, 9, {"latent": "b n d"}),
                    "state": GroupShape(0, 0, 3, {"conv": "b c w", "ssm": "b c p"}),
                }
                for block in (8, 16)
            ),
            producer_tp=4,
            consumer_tp=2,
            consumer_rank=rank,
            consumer_context=0,
            producer_stages=1,
            producer_contexts=1,
            request=Request(
                20,
                {"mla": Span([4, 0, 7]), "state": Span([1])},
                {"mla": Span([3, 5]), "state": Span([0])},
            ),
            seed=0,
        )
        outcome = run(case)
        assert outcome.wrong == []
        state_bytes = 2 * (64 * 3 * 2 + 4 * 5 * 4)
        assert outcome.bytes == 24 * 9 * 4 + state_bytes
        assert {tp for _, tp, _ in outcome.readers} >= {2 * rank, 2 * rank + 1}
        assert len(outcome.readers) <= 3


def test_g13_two_kinds_of_layer_in_one_allocation() -> None:
    """Pages of 40,960 and 9,216 bytes over the same memory, each with its own stride."""
    memory = torch.zeros(40_960 * 9, dtype=torch.uint8)
    big = memory.view(9, 40_960).view(torch.bfloat16).view(9, 2, 8, 16, 80)
    small = memory[: 9_216 * 40].view(torch.bfloat16).view(40, 16, 288)
    cache = KVCache(
        [
            AttentionGroup("full", 16, {"a": PagedTensor(big, HND, Shard(8, 0, 8))}),
            AttentionGroup("mla", 16, {"b": PagedTensor(small, "b n d")}),
        ]
    )
    strides = [group.fields[0].block_stride for group in cache.layout.groups]
    assert strides == [40_960, 9_216]
    assert len(cache.layout.regions) == 1
    plan = prepare_plan(cache.layout, {0: cache.layout})
    rows = plan.peers[0].sections[0].local_rows
    assert rows[:, 1].tolist() == rows[:, 3].tolist() == [40_960, 9_216]


@pytest.mark.parametrize("together", ["layer", "group"])
def test_g14_interleaved_against_separate_pools(together: str) -> None:
    """Key, value and index in one pool on one side: paired by layer and field name."""
    model = GroupModel(
        "full",
        LAYERS,
        (
            FieldModel("kv", {"k": 2, "d": 4}, 4, dtype=torch.bfloat16),
            FieldModel("index", {"d": 3}, dtype=torch.uint8),
        ),
    )
    pooled = GroupShape(
        16,
        16,
        9,
        {"kv": "b n h d", "index": "b n d"},
        pair=frozenset({"kv"}),
        together=together,
    )
    separate = GroupShape(16, 16, 9, {"kv": HND, "index": "b n d"})
    for consumer, producer in (
        (pooled, separate),
        (separate, pooled),
        (pooled, pooled),
    ):
        assert (
            run(one_group(model, _small(consumer), _small(producer), tp=(2, 1))).wrong
            == []
        )


def _small(shape: GroupShape) -> GroupShape:
    return replace(shape, blocks=24)


def test_g15_padding_is_neither_copied_nor_zeroed() -> None:
    """Blocks, heads and tokens padded, differently on each side."""
    consumer = paged(16, pads={"b": 5, "n": 3})
    producer = paged(8, axes=NHD, pads={"b": 9, "h": 2, "k": 1})
    assert run(one_group(kv_model(4), consumer, producer, tp=(2, 1))).wrong == []


def fp8_model(*fields: str) -> tuple[GroupModel, GroupModel]:
    known = {
        "kv": FieldModel("kv", {"k": 2, "d": 8}, 4, dtype=torch.float8_e4m3fn),
        "scale": FieldModel("scale", {"k": 2}, 4, dtype=torch.float32),
    }
    state = FieldModel("ssm", {"p": 3}, parts=(("ssm", 8),), dtype=torch.float16)
    return (
        GroupModel("full", LAYERS, tuple(known[name] for name in fields)),
        GroupModel("state", LAYERS, (state,)),
    )


def fp8_case(ours: tuple[GroupModel, ...]) -> Case:
    shapes = [
        {
            "full": GroupShape(block, block, 9, {"kv": HND, "scale": "b k h n"}),
            "state": GroupShape(0, 0, 3, {"ssm": "b c p"}),
        }
        for block in (8, 16)
    ]
    return Case(
        ours,
        *shapes,
        producer_tp=2,
        consumer_tp=1,
        consumer_rank=0,
        consumer_context=0,
        producer_stages=1,
        producer_contexts=1,
        request=Request(
            11,
            {"full": Span([4, 7]), "state": Span([2])},
            {"full": Span([8]), "state": Span([0])},
        ),
        seed=0,
    )


def test_g16_each_field_has_its_own_width() -> None:
    """fp8 KV, fp32 scales and fp16 state: registered in any order, all exact."""
    for names in (("kv", "scale"), ("scale", "kv")):
        model = fp8_model(*names)
        assert run(fp8_case(model)).wrong == []
        assert run(fp8_case(model[::-1])).wrong == []


def test_g16_registration_order_may_differ_between_the_sides() -> None:
    """Paired by name: the other side's order does not matter."""
    consumer = fp8_case(fp8_model("kv", "scale")).consumer_pool().cache.layout
    producers = fp8_case(fp8_model("scale", "kv")[::-1]).producer_pools()
    layouts = {key: pool.cache.layout for key, pool in producers.items()}
    assert prepare_plan(consumer, layouts).peers.keys() == layouts.keys()


def test_g16_a_field_that_only_one_side_has_is_refused_by_name() -> None:
    """The consumer wants scales and no producer rank has them."""
    consumer = fp8_case(fp8_model("kv", "scale")).consumer_pool().cache.layout
    producers = fp8_case(fp8_model("kv")).producer_pools()
    layouts = {key: pool.cache.layout for key, pool in producers.items()}
    with pytest.raises(ImpossiblePlan, match=r"layers.0.*'scale'"):
        prepare_plan(consumer, layouts)


def test_g16_unequal_dtypes_are_refused_with_both() -> None:
    """Equal widths are not enough: fp8 is no uint8."""

    def cache(dtype: torch.dtype) -> KVCache:
        tensor = torch.zeros(6, 2, 2, 4, 4, dtype=dtype)
        layers = {"a": PagedTensor(tensor, HND, Shard(2, 0, 2))}
        return KVCache([AttentionGroup("full", 4, layers)])

    with pytest.raises(ImpossiblePlan, match="dtype: uint8 here, float8_e4m3fn there"):
        prepare_plan(cache(torch.uint8).layout, {0: cache(torch.float8_e4m3fn).layout})


def test_g17_full_attention_beside_a_window() -> None:
    """A window of 128 in one model with full attention, TP 4 to 2."""
    models = (kv_model(4), kv_model(4, window=128, name="window"))
    for rank in range(2):
        case = Case(
            models,
            {"full": paged(16), "window": paged(16)},
            {"full": paged(32), "window": paged(32, axes=NHD)},
            producer_tp=4,
            consumer_tp=2,
            consumer_rank=rank,
            consumer_context=0,
            producer_stages=1,
            producer_contexts=1,
            request=Request(
                250,
                {"full": scattered(16, seed=1), "window": scattered(16, seed=2)},
                {
                    "full": scattered(8, seed=3),
                    # Reaches back to token 123: the blocks before it were dropped.
                    "window": Span([None, None, None, *scattered(5, seed=4).block_ids]),
                },
            ),
            seed=0,
        )
        outcome = run(case)
        assert outcome.wrong == []
        # Tokens 112 to 255 of the window, in layers, k, heads, d and width.
        assert outcome.bytes == 2 * 2 * 2 * 4 * 2 * (256 + 144)
