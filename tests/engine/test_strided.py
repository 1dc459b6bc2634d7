"""Indexed copies of raw bytes: numpy's and torch's move the same, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kvferry.engine.strided import Strided, copy_on, copy_with_numpy, copy_with_torch

if TYPE_CHECKING:
    from kvferry.engine.strided import Copy

BLOCKS, PLACES, HEADS = 6, 4, 3

both = pytest.mark.parametrize("copy", [copy_with_numpy, copy_with_torch])


def sides(run: int, shift: int) -> tuple[torch.Tensor, Strided, Strided]:
    """A pool of ``block, head, place`` and what has landed as ``block, place, head``."""
    block = PLACES * HEADS * run
    pool = torch.zeros(BLOCKS * block + shift, dtype=torch.uint8)
    landed = torch.randint(1, 256, (2 * block + shift,), dtype=torch.uint8)
    to = (BLOCKS, PLACES, HEADS), (block, run, PLACES * run)
    source = (2, PLACES, HEADS), (block, HEADS * run, run)
    return (
        pool,
        Strided(pool, shift, *to, run),
        Strided(landed, shift, *source, run),
    )


def due(source: Strided, block: int, place: int, head: int) -> list[int]:
    """One run of what has landed."""
    steps = zip((block, place, head), source.strides, strict=True)
    first = source.offset + sum(n * stride for n, stride in steps)
    return source.flat[first : first + source.run_bytes].tolist()


@both
@pytest.mark.parametrize(("run", "shift"), [(1, 0), (6, 2), (7, 3), (16, 0), (80, 16)])
def test_whole_blocks(copy: Copy, run: int, shift: int) -> None:
    """Every place of two blocks, of runs of any length at any address."""
    pool, to, source = sides(run, shift)
    blocks = np.array([[4] * PLACES, [1] * PLACES])
    places = np.array([range(PLACES)] * 2)
    copy(to, (blocks, places), source, ())
    found = pool[shift:].reshape(BLOCKS, HEADS, PLACES, run)
    for number, block in enumerate((4, 1)):
        for place in range(PLACES):
            for head in range(HEADS):
                here = found[block, head, place].tolist()
                assert here == due(source, number, place, head)
    assert not found[[0, 2, 3, 5]].any()
    assert not pool[:shift].any()


@both
def test_some_places(copy: Copy) -> None:
    """Those that are picked go where they are said to; the rest is untouched."""
    pool, to, source = sides(8, 0)
    at = np.array([5, 0]), np.array([2, 3])
    picked = np.array([0, 1]), np.array([1, 0])
    copy(to, at, source, picked)
    found = pool.reshape(BLOCKS, HEADS, PLACES, 8)
    for head in range(HEADS):
        assert found[5, head, 2].tolist() == due(source, 0, 1, head)
        assert found[0, head, 3].tolist() == due(source, 1, 0, head)
        found[5, head, 2] = found[0, head, 3] = 0
    assert not pool.any()


@both
def test_nothing_outside_the_bytes_is_touched(copy: Copy) -> None:
    """A copy that would leave its tensor is refused, whatever was planned."""
    _, to, source = sides(8, 0)
    ids = np.zeros((2, PLACES), dtype=np.int64)
    for wrong in (to._replace(offset=8), to._replace(strides=(10_000, 8, 32))):
        with pytest.raises((RuntimeError, ValueError)):
            copy(wrong, (ids, ids), source, ())
    with pytest.raises(IndexError):
        copy(to, (ids + BLOCKS, ids), source, ())


def test_the_host_has_numpy() -> None:
    """And a device torch."""
    assert copy_on(torch.device("cpu")) is copy_with_numpy
    assert copy_on(torch.device("cuda:0")) is copy_with_torch
