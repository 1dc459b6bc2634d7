"""Block ids as arrays, and the units of a span."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.engine import UnknownBlock
from kvferry.engine.spans import (
    ABSENT,
    Context,
    Placement,
    Side,
    Span,
    are_inside,
    as_array,
    span_ids,
)


@pytest.mark.parametrize(
    "given",
    [
        [5, 9, 2],
        (5, 9, 2),
        np.array([5, 9, 2], np.int16),
        [np.int32(5), 9, 2],
        range(5, 6),
        [],
    ],
)
def test_ids_of_any_kind_are_one_array(given) -> None:
    ids = span_ids(Span(given), group="g", side="consumer")
    assert ids.dtype == np.int64
    assert ids.tolist() == [int(i) for i in given]


def test_an_array_is_made_once() -> None:
    made = as_array(Span([5, None, 2], 16), group="g", side="consumer")
    assert made.first_token == 16
    assert span_ids(made, group="g", side="consumer") is made.block_ids
    assert made.block_ids.tolist() == [5, ABSENT, 2]


def test_an_array_of_the_caller_is_not_its_own() -> None:
    given = np.array([5, 9, 2])
    made = as_array(Span(given), group="g", side="consumer")
    given[:] = 0
    assert list(made.block_ids) == [5, 9, 2]


@pytest.mark.parametrize(
    "given",
    [[1.0], ["1"], [2**64], [[1]], "12", [None, 1.5], [True, False], (True,)],
)
def test_what_is_no_list_of_integers_is_refused(given) -> None:
    with pytest.raises(UnknownBlock, match="not a list of integers"):
        span_ids(Span(given), group="g", side="consumer")


@pytest.mark.parametrize("context", [Context(), Context(2, 1, 8), Context(3, 0, 16)])
@pytest.mark.parametrize(
    ("block", "kernel", "unit"), [(8, 8, 8), (8, 4, 2), (16, 8, 4)]
)
def test_units_lie_where_their_tokens_do(context, block, kernel, unit) -> None:
    """Against the same, token by token."""
    side = Side(block, 100, kernel, 100 * block // kernel, context)
    ids = [7, 3, 99, 0, 12, 5, 41, 8]
    span = Span(ids, side.span_grain)
    array = span_ids(span, group="g", side="consumer")
    placement = Placement.of(side, span, array, group="g", name="consumer")
    first = side.span_grain + 3 * unit if context.size == 1 else side.span_grain
    tokens = context.held(range(first, side.span_grain * 6, unit))
    expected = []
    for token in list(tokens):
        own = context.own_before(int(token))
        index, rest = divmod(own - block, block)
        at, place = divmod(rest, kernel)
        number = ids[index] * (block // kernel) + at
        expected.append(place // unit * side.kernel_blocks + number)
    assert placement.units(tokens, unit).tolist() == expected


@pytest.mark.parametrize("ids", [[], [0], [6], [6, 0]])
def test_ids_inside_their_pool_are(ids) -> None:
    """The first and the last block, and none at all."""
    assert are_inside(np.array(ids, dtype=np.int64), blocks=7)


@pytest.mark.parametrize("wrong", [7, -1, ABSENT, 2**62, -(2**63)])
def test_an_id_outside_its_pool_is_seen(wrong) -> None:
    """Behind the last block, before the first, or no block."""
    assert not are_inside(np.array([0, wrong], dtype=np.int64), blocks=7)
