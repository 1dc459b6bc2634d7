"""Case h1: the fuzzing targets in their short form, the same at every run."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

each_target = pytest.mark.parametrize("name", list(TARGETS))


@each_target
def test_h1_seeds_and_everything_close_to_them(name: str) -> None:
    """Whole, cut at every byte, and with single bytes flipped."""
    target, rng = TARGETS[name], random.Random(1)
    for seed in target.seeds:
        target.run(seed)
        # Of many that are slow one place each, not the same one, and one way.
        places = rng.sample(range(len(seed)), 1) if target.is_slow else range(len(seed))
        for place in places:
            cut, flips = seed[:place], (0x01, 0x80, 0xFF)
            near = [cut, *(_flipped(seed, place, flip) for flip in flips)]
            for data in rng.sample(near, 1) if target.is_slow else near:
                target.run(data)


def _flipped(seed: bytes, place: int, flip: int) -> bytes:
    return seed[:place] + bytes([seed[place] ^ flip]) + seed[place + 1 :]


@each_target
def test_h1_bytes_of_any_kind(name: str) -> None:
    """Noise, pieces of what is valid, and one put into the other."""
    target = TARGETS[name]
    seeds = st.sampled_from(target.seeds)
    places = st.integers(0, 300)

    def spliced(a: bytes, b: bytes, noise: bytes, first: int, last: int) -> bytes:
        return a[:first] + noise + b[last:]

    @settings(
        max_examples=15 if target.is_slow else 150,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.binary(max_size=200)
        | st.builds(spliced, seeds, seeds, st.binary(max_size=8), places, places)
    )
    def check(data: bytes) -> None:
        target.run(data)

    check()
