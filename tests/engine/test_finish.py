"""The finish stage: zeros behind the tokens, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import trio

from kvferry.engine import AttentionGroup, KVCache, PagedTensor, tp_shard
from kvferry.engine.finish import FinishStage
from kvferry.engine.selection import Tail

SHARD = tp_shard(total=2, rank=0, size=1)
SEVEN = 7


def filled(shape, dtype, device="cpu") -> torch.Tensor:
    """A tensor whose bytes are all 7: no dtype has to know how to fill."""
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.full((size,), SEVEN, dtype=torch.uint8, device=device)
    return raw.view(dtype).reshape(shape)


def raw(tensor) -> np.ndarray:
    """The bytes of a contiguous tensor, by its first axes."""
    as_bytes = tensor.cpu().contiguous().view(torch.uint8)
    return as_bytes.numpy().reshape(*tensor.shape[:-1], -1)


def cache_of(*layers, block_size=4) -> KVCache:
    """One group of these layers."""
    named = {f"layers.{i}": layer for i, layer in enumerate(layers)}
    return KVCache([AttentionGroup("full", block_size=block_size, layers=named)])


def tail(block_ids, first_slot, *, block_size=4) -> Tail:
    """A tail of the group."""
    ids = np.array(block_ids, np.int64)
    return Tail("full", ids, first_slot, ids.size * block_size - first_slot)


DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first_slot", range(4))
async def test_tails_of_any_dtype(dtype, first_slot) -> None:
    """Exactly the slots from the tail's first on, in the listed blocks, in order."""
    tensor = filled((8, 2, 2, 4, 3), dtype)
    stage = FinishStage(cache_of(PagedTensor(tensor, "b k h n d", SHARD)))
    await stage.run([tail([6, 1, 3], first_slot)])
    expected = np.full_like(raw(tensor), SEVEN)
    expected[6, :, :, first_slot:] = 0
    expected[[1, 3]] = 0
    np.testing.assert_array_equal(raw(tensor), expected)


@pytest.mark.parametrize("axes", ["b k h n d", "b k n h d", "k b n h d", "b n d"])
@pytest.mark.parametrize("first_slot", [0, 1, 3])
async def test_tails_in_any_axis_order(axes, first_slot) -> None:
    """The token axis is found wherever it is."""
    sizes = {"b": 6, "k": 2, "h": 2, "n": 4, "d": 5}
    names = axes.split()
    tensor = filled([sizes[name] for name in names], torch.bfloat16)
    shard = SHARD if "h" in names else None
    paged = PagedTensor(tensor, axes, shard) if shard else PagedTensor(tensor, axes)
    await FinishStage(cache_of(paged)).run([tail([4, 0], first_slot)])
    expected = torch.ones([sizes[name] for name in names], dtype=torch.bool)
    view = expected.movedim((names.index("b"), names.index("n")), (0, 1))
    view[4, first_slot:] = False
    view[0] = False
    kept = (tensor == filled((1,), torch.bfloat16)).to(torch.bool)
    assert torch.equal(kept, expected)
    assert bool((tensor[~expected] == 0).all())


async def test_a_pair_of_tensors(autojump_clock) -> None:
    """Keys and values in two tensors: both are zeroed."""
    keys, values = (filled((6, 2, 4, 3), torch.float16) for _ in range(2))
    paged = PagedTensor((keys, values), "b h n d", SHARD)
    await FinishStage(cache_of(paged)).run([tail([2], 1)])
    for tensor in (keys, values):
        expected = np.full_like(raw(tensor), SEVEN)
        expected[2, :, 1:] = 0
        np.testing.assert_array_equal(raw(tensor), expected)


async def test_padding_is_not_touched(autojump_clock) -> None:
    """A view with holes: the bytes between its elements stay."""
    whole = filled((6, 2, 4, 8), torch.float32)
    paged = PagedTensor(whole[..., :5], "b h n d", SHARD)
    await FinishStage(cache_of(paged)).run([tail([2, 5], 2)])
    expected = np.full((6, 2, 4, 8, 4), SEVEN, np.uint8)
    expected[2, :, 2:, :5] = 0
    expected[5, :, :, :5] = 0
    np.testing.assert_array_equal(raw(whole).reshape(expected.shape), expected)


@pytest.mark.parametrize("first_slot", [0, 3, 4, 5, 8, 11])
async def test_kernel_blocks_smaller_than_logical_ones(first_slot) -> None:
    """Logical blocks of 12 in kernel blocks of 4: the slot's own kernel block is cut."""
    tensor = filled((18, 2, 4, 3), torch.bfloat16)
    cache = cache_of(PagedTensor(tensor, "b h n d", SHARD), block_size=12)
    await FinishStage(cache).run([tail([4, 1], first_slot, block_size=12)])
    tokens = np.full((6, 12), SEVEN)
    tokens[4, first_slot:] = 0
    tokens[1] = 0
    found = raw(tensor).transpose(0, 2, 1, 3).reshape(6, 12, -1)
    np.testing.assert_array_equal(
        found, np.broadcast_to(tokens[..., None], found.shape)
    )


async def test_no_tails_no_work() -> None:
    """Nothing is touched."""
    tensor = filled((4, 2, 4, 3), torch.int8)
    await FinishStage(cache_of(PagedTensor(tensor, "b h n d", SHARD))).run([])
    assert (raw(tensor) == SEVEN).all()


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
async def test_on_a_gpu_it_comes_after_what_the_caller_queued(dtype) -> None:
    """Work queued before does not land on the zeros; the loop runs on meanwhile."""
    tensor = filled((8, 2, 4, 64), dtype, "cuda")
    stage = FinishStage(cache_of(PagedTensor(tensor, "b h n d", SHARD)))
    late = filled((2, 4, 64), dtype, "cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # some 100 ms of the caller's stream
    tensor[3].view(torch.uint8).copy_(late.view(torch.uint8))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.sleep(0.001)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        await stage.run([tail([3], 1)])
        nursery.cancel_scope.cancel()
    expected = np.full_like(raw(tensor), SEVEN)
    expected[3, :, 1:] = 0
    np.testing.assert_array_equal(raw(tensor), expected)
    assert turns > 10


@needs_gpu
async def test_on_a_gpu_it_has_a_stream_of_its_own() -> None:
    """What the caller queues while it runs comes after it, without a wait on the host."""
    tensor = filled((8, 2, 4, 64), torch.bfloat16, "cuda")
    stage = FinishStage(cache_of(PagedTensor(tensor, "b h n d", SHARD)))
    torch.cuda._sleep(200_000_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.run, [tail([3], 1)])
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        tensor[3] = 1.0  # queued after the zeros, and lands after them
    assert bool((tensor[3] == 1).all())
    (stream,) = stage._streams.values()
    assert stream != torch.cuda.current_stream()
