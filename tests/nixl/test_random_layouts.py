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
from kvferry.protocol import Contact, Ticket
from tests.crossing import expected, pulled
from tests.planning import Case, cases
from tests.processes import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def all_of(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """So many examples, slow as they are."""
    return settings(
        max_examples=count,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.function_scoped_fixture,
        ],
    )


@all_of(200)
@given(case=cases())
def test_200_random_pairs_are_exact(producer: Child, case: Case) -> None:
    """Every element is the right stamp, a zero that is due, or untouched.

    Half of them land run by run, the others in bulk as far as they can.
    """
    assume(case.refusal is None and ranks(case) <= MOST_RANKS)
    ticket = Ticket.from_dict(producer.ask("offer", repr(case)))
    fabric = NixlFabric(f"consumer-{next(numbers)}")
    try:
        landing = ("direct", "bulk")[case.seed % 2]
        pull = partial(pulled, landing=landing)
        wrong, _ = trio.run(pull, case, ticket, fabric, None)
    finally:
        producer.tell("next")
        assert producer.hear() == "closed"
    assert wrong == []


@all_of(150)
@given(case=cases())
def test_150_random_pairs_pushed_are_exact(producer: Child, case: Case) -> None:
    """The same the other way round: whole, by layers, or by layers and tokens."""
    assume(case.refusal is None and ranks(case) <= MOST_RANKS)
    contact = Contact.from_dict(producer.ask("push", repr(case)))
    fabric = NixlFabric(f"consumer-{next(numbers)}")
    try:
        wrong = trio.run(expected, case, contact, fabric, None)
        assert producer.hear() == "pushed"
    finally:
        producer.tell("next")
        assert producer.hear() == "closed"
    assert wrong == []
