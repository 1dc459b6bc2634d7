"""Random pairs of layouts between two processes over real NIXL, the oracle looking."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import HealthCheck, assume, given, settings

from kvferry.engine.fabric.nixl import NixlFabric
from kvferry.protocol import Ticket
from tests.crossing import pulled
from tests.planning import Case, cases
from tests.processes import Child

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.nixl

SCRIPT = Path(__file__).with_name("producer_child.py")
MOST_RANKS = 4
"""Each rank is an agent, and an agent costs 30 to 100 ms (nixl-facts row 20)."""

numbers = itertools.count()


@pytest.fixture(scope="module")
def producer() -> Iterator[Child]:
    with Child(SCRIPT) as child:
        child.hear()
        yield child


def ranks(case: Case) -> int:
    return case.producer_tp * case.producer_stages * case.producer_contexts


@settings(
    max_examples=200,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(case=cases())
def test_200_random_pairs_are_exact(producer: Child, case: Case) -> None:
    """Every element is the right stamp, a zero that is due, or untouched.

    Half of them land run by run, the others in bulk as far as they can.
    """
    assume(case.refusal is None and ranks(case) <= MOST_RANKS)
    ticket = Ticket.from_dict(producer.ask("case", repr(case)))
    fabric = NixlFabric(f"consumer-{next(numbers)}")
    try:
        landing = ("direct", "bulk")[case.seed % 2]
        pull = partial(pulled, landing=landing)
        wrong, _ = trio.run(pull, case, ticket, fabric, None)
    finally:
        producer.tell("next")
        assert producer.hear() == "closed"
    assert wrong == []
