"""Bulk landing passes the tests that direct runs pass, on the same random pairs."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, seed, settings

from kvferry.engine.fabric import MemoryNetwork, MemoryStreams
from tests.crossing import cross
from tests.planning import Case, cases


def cross_in_bulk(case: Case, **config):
    async def main():
        network = MemoryNetwork(seed=case.seed)
        settings = {"landing": "bulk", "wave_bytes": 1 << 16, **config}
        found = await cross(
            case, fabric=network.fabric, streams=MemoryStreams(), **settings
        )
        assert not network.closed_in_flight
        return found

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@seed(5)
@settings(
    max_examples=500, derandomize=False, suppress_health_check=[HealthCheck.too_slow]
)
@given(cases())
def test_random_pairs_in_bulk(case: Case) -> None:
    """Forced to land in bulk wherever it can, every pair is as exact as in runs."""
    if case.refusal is None:
        wrong, _ = cross_in_bulk(case)
        assert wrong == []
    else:
        error, reason = case.refusal
        with pytest.raises(error, match=reason):
            cross_in_bulk(case)
