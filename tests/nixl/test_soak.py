"""Two thousand small pulls over real NIXL, every fourth cancelled: nothing is left."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.nixl.engines import TCP, engine

if TYPE_CHECKING:
    from tests.processes import Child

pytestmark = pytest.mark.nixl

BATCHES = 50
BATCH = 40
"""Pulls at once."""
EACH = 2
"""Blocks of a pull."""
TOKENS = 20
ONE_OF = 4
"""Pulls of which one is cancelled."""
MOST_STEPS = 8
"""A cancelled pull has lived for fewer checkpoints: from none to about all it takes."""
POOL = {"blocks": BATCH * EACH, "block_size": 16, "layers": 2, "heads": 2, "dim": 8}
SETTINGS = {"pool": POOL, "env": TCP, "lease_s": 60.0, "wave_bytes": 2048, "window": 2}
WARM_BATCHES = 10
GROWTH_BYTES = 8 << 20
"""Most that a process may grow by in the 1,600 pulls after those. A consumer is seen to
grow by 0.5 MB. A producer remembers its last 4,096 offers, of 2 to 4 KB: 5 MB."""


def blocks(place: int) -> list[int]:
    return list(range(place * EACH, (place + 1) * EACH))


def steps(salt: int) -> int | None:
    """After how many checkpoints a pull is cancelled."""
    number, rest = divmod(salt, ONE_OF)
    return None if rest else number % MOST_STEPS


def batch(producer: Child, consumer: Child, number: int) -> Counter[str]:
    """How its pulls ended, or where they were cancelled; those that are done are right."""
    salts = range(number * BATCH, (number + 1) * BATCH)
    for place, salt in enumerate(salts):
        producer.tell("offer", f"r{salt}", blocks(place), TOKENS, salt)
    tickets = [producer.hear() for _ in salts]
    for place, (salt, ticket) in enumerate(zip(salts, tickets, strict=True)):
        consumer.tell("begin", ticket, blocks(place), None, steps(salt))
    for _ in salts:
        consumer.hear()
    ends: Counter[str] = Counter()
    for place, salt in enumerate(salts):
        result = consumer.ask("result", f"r{salt}")
        if "bytes" in result:
            assert consumer.ask("holds", blocks(place), TOKENS, salt)
        ends[result.get("cancelled", "done")] += 1
        assert producer.ask("outcome", f"r{salt}") == "released"
    return ends


def test_2000_small_pulls_leave_nothing_behind() -> None:
    """Every count is back to base, and neither side's memory has grown."""
    with (
        engine("decode", **SETTINGS) as consumer,
        engine("prefill", **SETTINGS) as producer,
    ):
        both = (producer, consumer)
        for child in both:
            child.hear()
        ends = batch(producer, consumer, 0)
        base = [child.ask("statistics") for child in both]
        warm_bytes = []
        for number in range(1, BATCHES):
            if number == WARM_BATCHES:
                warm_bytes = [child.resident_bytes() for child in both]
            ends += batch(producer, consumer, number)
        now_bytes = [child.resident_bytes() for child in both]
        assert [child.ask("statistics") for child in both] == base
    assert ends.total() == BATCHES * BATCH
    assert ends["reading"] > 50, ends
    assert ends.total() - ends["done"] > 200, ends
    grown_bytes = [now - was for now, was in zip(now_bytes, warm_bytes, strict=True)]
    assert max(grown_bytes) < GROWTH_BYTES
