"""What a caller can describe, what it becomes in numbers, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine.cache import (
    AttentionGroup,
    KVCache,
    PagedTensor,
    Shard,
    StateGroup,
    StatePart,
    StateTensor,
    tp_shard,
)
from kvferry.protocol.errors import CacheError

ALL = Shard(2, 0, 2)


def kv(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype)


def attention(*paged: PagedTensor, block_size: int = 4, **numbers) -> KVCache:
    layers = {f"layers.{n}": each for n, each in enumerate(paged)}
    return KVCache([AttentionGroup("full", block_size, layers, **numbers)])


def states(*tensors: StateTensor) -> KVCache:
    return KVCache([StateGroup("state", {"layers.0": tensors})])


@pytest.mark.parametrize(
    ("total", "rank", "size", "share"),
    [
        (8, 0, 1, (0, 8)),
        (8, 1, 2, (4, 8)),
        (4, 3, 4, (3, 4)),
        (2, 5, 8, (1, 2)),
        (1, 3, 4, (0, 1)),
    ],
)
def test_tp_shard_splits_evenly_or_replicates(total, rank, size, share) -> None:
    """Heads are split, or each is held by several consecutive ranks."""
    assert tp_shard(total, rank, size) == Shard(total, *share)


@pytest.mark.parametrize(
    ("total", "rank", "size"), [(6, 0, 4), (4, 0, 6), (4, 4, 4), (4, -1, 4), (0, 0, 1)]
)
def test_tp_shard_refuses_what_does_not_divide(total, rank, size) -> None:
    """Six heads over four ranks have no usual share."""
    with pytest.raises(CacheError, match=str(total)):
        tp_shard(total, rank, size)


def test_strides_come_from_the_tensor() -> None:
    """A view's order, padding and offset show as numbers, whatever the axes say."""
    storage = torch.zeros(10_000, dtype=torch.bfloat16)
    view = storage.as_strided((5, 2, 2, 4, 3), (100, 6, 12, 24, 1), 7)
    layout = attention(PagedTensor(view, "b k h n d", ALL)).layout
    (field,) = layout.groups[0].fields
    (part,) = field.parts
    assert {axis.name: (axis.size, axis.stride) for axis in part.axes} == {
        "k": (2, 12),
        "h": (2, 24),
        "n": (4, 48),
        "d": (3, 2),
    }
    assert (field.block_stride, field.blocks, field.block_tokens) == (200, 5, 4)
    assert part.address == storage.data_ptr() + 14
    (region,) = layout.regions
    assert (region.address, region.size) == (part.address, 2 * (400 + 6 + 12 + 72 + 3))


def test_a_pair_is_one_field_whose_k_is_the_distance() -> None:
    """Key behind value in memory: the distance is signed."""
    storage = torch.zeros(2, 5, 4, 2, 3)
    key, value = storage[1], storage[0]
    cache = attention(PagedTensor((key, value), "b n h d", ALL))
    (part,) = cache.layout.groups[0].fields[0].parts
    (pair,) = (axis for axis in part.axes if axis.name == "k")
    assert (pair.size, pair.stride) == (2, -5 * 4 * 2 * 3 * 4)
    assert part.address == key.data_ptr()
    assert len(cache.layout.regions) == 1


def test_a_field_without_heads_is_one_replicated_unit() -> None:
    """MLA: the latent has a shard axis of one step."""
    cache = attention(PagedTensor(kv(5, 4, 9), "b n d", name="latent"))
    (part,) = cache.layout.groups[0].fields[0].parts
    assert part.shard == Shard(1, 0, 1)
    assert part.axes[0].name == "h"


def test_several_fields_by_list_or_by_name() -> None:
    """Latent and index of one layer are two fields; a mapping's key is the name."""
    latent, index = kv(5, 4, 9), kv(5, 4, 2, dtype=torch.uint8)
    by_list = [
        PagedTensor(latent, "b n d", name="latent"),
        PagedTensor(index, "b n d", name="index"),
    ]
    by_name = {
        "latent": PagedTensor(latent, "b n d"),
        "index": PagedTensor(index, "b n d"),
    }
    for given in (by_list, by_name):
        group = KVCache([AttentionGroup("mla", 4, {"layers.0": given})]).layout.groups[
            0
        ]
        assert [(f.name, f.dtype) for f in group.fields] == [
            ("latent", "float32"),
            ("index", "uint8"),
        ]


def test_state_parts_lie_one_behind_the_other() -> None:
    """x, B and C of a convolution state each begin at their own channel."""
    conv = kv(3, 8, 4)
    parts = (
        StatePart("x", Shard(8, 4, 8)),
        StatePart("B", Shard(4, 2, 4)),
        StatePart("C", Shard(2, 0, 2)),
    )
    (field,) = states(StateTensor("conv", conv, "b c w", parts)).layout.groups[0].fields
    first = [part.address - conv.data_ptr() for part in field.parts]
    assert first == [0, 4 * 16, 6 * 16]
    assert (field.block_tokens, field.blocks) == (0, 3)


def test_a_state_without_channels_is_replicated() -> None:
    """No sharded axis: every rank holds all of it."""
    (field,) = states(StateTensor("last", kv(3, 8), "b d")).layout.groups[0].fields
    assert field.parts[0].shard == Shard(1, 0, 1)


def test_logical_blocks_consist_of_kernel_blocks() -> None:
    """Eight kernel blocks of 4 tokens are four blocks of 8."""
    cache = attention(PagedTensor(kv(8, 2, 2, 4, 3), heads=ALL), block_size=8)
    assert cache.layout.groups[0].blocks == 4
    assert cache.token_views("full")[0].ratio == 2


def test_token_views_are_views_by_block_and_token() -> None:
    """Writing through a token view changes the caller's tensor, and only there."""
    tensor = torch.ones(8, 2, 2, 4, 3, dtype=torch.float8_e4m3fn)
    (view,) = attention(PagedTensor(tensor, heads=ALL)).token_views("full")
    view.tensors[0][5, 2] = 0
    zeros = (tensor.view(torch.uint8) == 0).nonzero()
    assert {(int(b), int(n)) for b, _, _, n, _ in zeros} == {(5, 2)}
    assert len(zeros) == 2 * 2 * 3


def test_state_groups_have_no_token_views() -> None:
    """A state is never zeroed by token; an unknown group is refused."""
    cache = states(StateTensor("last", kv(3, 8), "b d"))
    assert cache.token_views("state") == ()
    with pytest.raises(CacheError, match="no group 'full'"):
        cache.token_views("full")


def test_regions_are_what_the_views_touch_merged() -> None:
    """Interleaved fields are one region, a gap makes two."""
    pool = torch.zeros(5, 64)
    fields = [
        PagedTensor(pool[:, 0:24].unflatten(1, (4, 6)), "b n d", name="latent"),
        PagedTensor(pool[:, 32:40].unflatten(1, (4, 2)), "b n d", name="index"),
    ]
    cache = KVCache([AttentionGroup("mla", 4, {"layers.0": fields})])
    (region,) = cache.layout.regions
    assert (region.address, region.size) == (pool.data_ptr(), 4 * (4 * 64 + 40))
    big = torch.zeros(100, 4, 6)
    apart = [
        PagedTensor(big[:5], "b n d", name="latent"),
        PagedTensor(big[50:55], "b n d", name="index"),
    ]
    assert len(KVCache([AttentionGroup("mla", 4, {"a": apart})]).layout.regions) == 2


POOL = kv(8, 2, 2, 4, 3)
REFUSED = {
    "axes-count": (
        lambda: attention(PagedTensor(POOL, "b h n d", ALL)),
        "4 axes.*has 5",
    ),
    "axes-twice": (lambda: attention(PagedTensor(POOL, "b h h n d", ALL)), "'h'"),
    "no-block-axis": (lambda: attention(PagedTensor(POOL, "x k h n d", ALL)), "'b'"),
    "no-token-axis": (lambda: attention(PagedTensor(POOL, "b k h x d", ALL)), "'n'"),
    "heads-missing": (lambda: attention(PagedTensor(POOL)), "needs heads"),
    "heads-size": (
        lambda: attention(PagedTensor(POOL, heads=Shard(8, 0, 4))),
        "4 units.*2",
    ),
    "heads-range": (
        lambda: attention(PagedTensor(POOL, heads=Shard(2, 1, 3))),
        "range",
    ),
    "heads-without-axis": (
        lambda: attention(PagedTensor(kv(8, 4, 3), "b n d", ALL)),
        "without an axis 'h'",
    ),
    "g10-ratio": (
        lambda: attention(PagedTensor(kv(101, 2, 2, 4, 3), heads=ALL), block_size=16),
        "101 kernel blocks.*4",
    ),
    "block-size": (
        lambda: attention(PagedTensor(POOL, heads=ALL), block_size=6),
        "6.*4",
    ),
    "block-size-smaller": (
        lambda: attention(PagedTensor(POOL, heads=ALL), block_size=2),
        "2.*4",
    ),
    "block-size-zero": (
        lambda: attention(PagedTensor(POOL, heads=ALL), block_size=0),
        "0.*4",
    ),
    "unequal-blocks": (
        lambda: attention(
            PagedTensor(POOL, heads=ALL), PagedTensor(kv(9, 2, 2, 4, 3), heads=ALL)
        ),
        "8.*9",
    ),
    "empty": (
        lambda: attention(PagedTensor(kv(0, 2, 2, 4, 3), heads=ALL)),
        "no elements",
    ),
    "overlap": (
        lambda: attention(
            PagedTensor(kv(1, 2, 2, 4, 3).expand(8, 2, 2, 4, 3), heads=ALL)
        ),
        "overlap",
    ),
    "meta": (lambda: attention(PagedTensor(POOL.to("meta"), heads=ALL)), "meta"),
    "complex128": (
        lambda: attention(
            PagedTensor(kv(8, 2, 2, 4, 3, dtype=torch.complex128), heads=ALL)
        ),
        "16 bytes",
    ),
    "pair-shape": (
        lambda: attention(
            PagedTensor((kv(8, 4, 2, 3), kv(8, 4, 2, 4)), "b n h d", ALL)
        ),
        "shape",
    ),
    "pair-dtype": (
        lambda: attention(
            PagedTensor(
                (kv(8, 4, 2, 3), kv(8, 4, 2, 3, dtype=torch.int32)), "b n h d", ALL
            )
        ),
        "dtype",
    ),
    "pair-with-k": (
        lambda: attention(PagedTensor((POOL, POOL.clone()), "b k h n d", ALL)),
        "'k'",
    ),
    "pair-of-one": (
        lambda: attention(PagedTensor((POOL[:, 0], POOL[:, 0]), "b h n d", ALL)),
        "overlap",
    ),
    "triple": (
        lambda: attention(PagedTensor((POOL, POOL, POOL), "b k h n d", ALL)),  # type: ignore[arg-type]
        "3 tensors",
    ),
    "field-twice": (
        lambda: KVCache(
            [
                AttentionGroup(
                    "full",
                    4,
                    {"a": [PagedTensor(POOL, heads=ALL), PagedTensor(POOL, heads=ALL)]},
                )
            ]
        ),
        "'kv'",
    ),
    "same-memory-twice": (
        lambda: attention(PagedTensor(POOL, heads=ALL), PagedTensor(POOL, heads=ALL)),
        "share",
    ),
    "group-twice": (
        lambda: KVCache(
            [AttentionGroup("g", 4, {"a": PagedTensor(POOL, heads=ALL)})] * 2
        ),
        "'g'",
    ),
    "no-groups": (lambda: KVCache([]), "without groups"),
    "no-layers": (lambda: KVCache([AttentionGroup("g", 4, {})]), "no layers"),
    "window": (
        lambda: attention(PagedTensor(POOL, heads=ALL), window=0),
        "window of 0",
    ),
    "context-rank": (
        lambda: attention(PagedTensor(POOL, heads=ALL), context_size=2, context_rank=2),
        "rank 2 of 2",
    ),
    "context-interleave": (
        lambda: attention(
            PagedTensor(POOL, heads=ALL), context_size=2, context_interleave=3
        ),
        "interleave 3",
    ),
    "state-parts-sum": (
        lambda: states(
            StateTensor("conv", kv(3, 8, 4), "b c w", (StatePart("x", Shard(8, 0, 4)),))
        ),
        "4 units.*8",
    ),
    "state-part-twice": (
        lambda: states(
            StateTensor(
                "conv", kv(3, 8, 4), "b c w", (StatePart("x", Shard(8, 0, 4)),) * 2
            )
        ),
        "'x'",
    ),
    "state-tokens": (lambda: states(StateTensor("conv", kv(3, 8, 4), "b c n")), "'n'"),
    "state-parts-without-axis": (
        lambda: states(StateTensor("s", kv(3, 8), "b d", (StatePart("x", ALL),))),
        "none of the axes",
    ),
    "state-part-range": (
        lambda: states(
            StateTensor("s", kv(3, 8), "b c", (StatePart("x", Shard(4, 0, 8)),))
        ),
        "range",
    ),
}


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_cache_is_refused_with_the_numbers(make, says) -> None:
    """Every mistake is found when the cache is described, not in a transfer."""
    with pytest.raises(CacheError, match=says):
        make()
