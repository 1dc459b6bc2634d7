"""How many bytes blocks hold, by the layout alone."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine import AttentionGroup, KVCache, PagedTensor, Span, tp_shard
from kvferry.engine.sizes import Sizes
from kvferry.protocol.ticket import TicketSpan
from tests.kit import GROUP, STATE, Pool


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("tp", [(0, 1), (1, 2)])
def test_a_block_is_as_large_as_its_tensors_make_it(tokens_first, tp):
    """Of this rank, over all layers; ours and a ticket's are counted alike."""
    pool = Pool(blocks=6, layers=3, tp=tp, tokens_first=tokens_first)
    block = sum(tensor[0].nbytes for tensor in pool.tensors)
    sizes = Sizes(pool.cache.layout)
    assert sizes.of({GROUP: Span([4, 1, 2])}) == 3 * block
    assert sizes.of({GROUP: TicketSpan((0, 5), 8)}) == 2 * block
    assert sizes.of({GROUP: Span([])}) == sizes.of({}) == 0


def test_groups_are_added_up_and_unknown_ones_count_nothing():
    """A peer's ticket may name any."""
    pool = Pool(slots=3)
    sizes = Sizes(pool.cache.layout)
    block, slot = (sizes.of({group: Span([0])}) for group in (GROUP, STATE))
    assert min(block, slot) > 0
    assert block != slot
    spans = {GROUP: Span([1, 2]), STATE: Span([0]), "elsewhere": Span([7])}
    assert sizes.of(spans) == 2 * block + slot


def test_a_tensor_of_all_layers_is_counted_once():
    """Each layer's blocks are as far apart as those of all of them are long."""
    tensor = torch.zeros((6, 3, 2, 2, 4, 5))
    layers = {
        f"layers.{n}": PagedTensor(tensor[:, n], "b k h n d", tp_shard(2, 0, 1))
        for n in range(3)
    }
    cache = KVCache([AttentionGroup(GROUP, block_size=4, layers=layers)])
    assert Sizes(cache.layout).of({GROUP: Span([0, 1])}) == tensor[:2].nbytes
