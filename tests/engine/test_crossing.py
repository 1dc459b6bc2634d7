"""Random pairs of layouts and spans through whole engines on the memory fabric."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, seed, settings

from kvferry.engine.fabric import MemoryNetwork, MemoryStreams
from kvferry.protocol.errors import FerryError, MisuseError
from tests.crossing import cross, cross_pushed
from tests.planning import Case, cases

if TYPE_CHECKING:
    from collections.abc import Callable


def cross_in_memory(case: Case) -> list[str]:
    """What the oracle finds wrong after a pull on virtual time."""

    async def main() -> list[str]:
        network = MemoryNetwork(seed=case.seed)
        wrong, _ = await cross(case, fabric=network.fabric, streams=MemoryStreams())
        assert not network.closed_in_flight
        return wrong

    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(main, clock=clock)


def crossing_test(number: int) -> Callable[[], None]:
    """A quarter of the 2,000 cases, each with a seed of its own."""

    @seed(number)
    @settings(
        max_examples=500,
        derandomize=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(cases())
    def crossing(case: Case) -> None:
        """Any layout to any layout, handshake to zeros: exact, or a true reason."""
        if case.refusal is None:
            assert cross_in_memory(case) == []
        else:
            error, reason = case.refusal
            with pytest.raises(error, match=reason):
                cross_in_memory(case)

    return crossing


test_random_pairs_first_quarter = crossing_test(1)
test_random_pairs_second_quarter = crossing_test(2)
test_random_pairs_third_quarter = crossing_test(3)
test_random_pairs_fourth_quarter = crossing_test(4)


@seed(6)
@settings(
    max_examples=500,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_random_pairs_pushed(case: Case) -> None:
    """The same the other way round: pushed, at once or in any steps, whoever is first."""
    wrong, errors = push_in_memory(case)
    if case.refusal is None:
        assert errors == []
        assert wrong == []
    else:
        _, reason = case.refusal
        # Whoever sees it names it; the other side is told, or had not been asked.
        assert any(
            isinstance(error, MisuseError) and re.search(reason, str(error))
            for error in errors
        ), errors


def push_in_memory(case: Case) -> tuple[list[str], list[FerryError]]:
    """What the oracle finds wrong after a push on virtual time, and all errors."""

    async def main() -> tuple[list[str], list[FerryError]]:
        network = MemoryNetwork(seed=case.seed)
        found = await cross_pushed(case, fabric=network.fabric, streams=MemoryStreams())
        assert not network.closed_in_flight
        return found

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
