"""`Ranges` against Python's own sets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.ranges import Ranges

pairs = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), max_size=8)
several = st.builds(Ranges.of, pairs)


def members(ranges: Ranges) -> set[int]:
    return {value for first, last in ranges for value in range(first, last)}


def is_normal(ranges: Ranges) -> bool:
    ends = [end for span in ranges for end in span]
    return all(a < b for a, b in itertools.pairwise(ends))


@given(pairs)
def test_of_is_the_union_of_its_pairs(given_pairs: list[tuple[int, int]]) -> None:
    """Unsorted, overlapping, adjacent and empty pairs make one normal set."""
    ranges = Ranges.of(given_pairs)
    assert members(ranges) == {v for a, b in given_pairs for v in range(a, b)}
    assert is_normal(ranges)


@given(several, several)
def test_operators_are_those_of_sets(a: Ranges, b: Ranges) -> None:
    """Union, intersection and difference agree with sets, and stay normal."""
    for ours, theirs in (
        (a | b, members(a) | members(b)),
        (a & b, members(a) & members(b)),
        (a - b, members(a) - members(b)),
    ):
        assert members(ours) == theirs
        assert is_normal(ours)


@given(several, several)
def test_equal_sets_are_equal_values(a: Ranges, b: Ranges) -> None:
    """Two sets of integers are equal exactly when their ranges are."""
    assert (a == b) == (members(a) == members(b))
    assert Ranges.of((v, v + 1) for v in members(a)) == a
    assert hash(Ranges.of(a)) == hash(a)


@given(several)
def test_sizes_and_questions_are_those_of_sets(ranges: Ranges) -> None:
    """Total, emptiness and membership agree with sets."""
    assert ranges.total == len(members(ranges))
    assert ranges.is_empty == (not members(ranges))
    assert {v for v in range(-25, 25) if v in ranges} == members(ranges)


@given(several)
def test_laws(a: Ranges) -> None:
    """A set and itself, and a set and nothing."""
    nothing = Ranges()
    assert a | a == a & a == a | nothing == a - nothing == a
    assert a - a == a & nothing == nothing - a == nothing


def test_a_truth_value_is_refused() -> None:
    """It could mean any or all: nobody can get it wrong by accident."""
    with pytest.raises(TypeError, match="is_empty"):
        bool(Ranges.of([(0, 1)]))


def test_text_shows_half_open_ranges() -> None:
    """As mathematicians write them."""
    assert str(Ranges.of([(32, 48), (0, 8), (8, 16)])) == "[0,16)+[32,48)"
    assert str(Ranges()) == "[)"
