"""Large transfers between processes of one host: threads beside the loop copy them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.nixl.engines import engine, open_in, pull, restartable, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.processes import Child, Restartable

pytestmark = pytest.mark.nixl

MIB = 1 << 20
EACH = 8
"""Blocks of a pull, 4 MiB each."""
PULLS = 6
FIRST = PULLS * EACH
POOL = {"blocks": FIRST + EACH, "block_size": 16, "layers": 2, "heads": 16, "dim": 512}
SETTINGS = {"pool": POOL, "lease_s": 60.0, "wave_bytes": 4 * MIB}
LEARNING = list(range(FIRST, FIRST + EACH))
CACHE, REUSED = 3.0, 5.0
KILLS = 6
LANDING_S = 0.2
"""How long we look for bytes that land late: a copy takes a thousandth of it."""


@pytest.fixture(scope="module")
def consumer() -> Iterator[Child]:
    with engine("decode", **SETTINGS) as consumer:
        consumer.hear()
        yield consumer


@pytest.fixture(scope="module")
def producer() -> Iterator[Restartable]:
    with restartable(env={}) as producer:
        producer.hear()
        yield producer


def learn(producer: Child, consumer: Child, name: str) -> None:
    """Pull until threads copy; each of the pulls is exact."""
    before = consumer.ask("copies")
    for n in range(50):
        ticket = producer.ask("offer", f"{name} {n}", LEARNING, EACH * 16, n)
        assert "error" not in pull(consumer, ticket, LEARNING)
        assert consumer.ask("holds", LEARNING, EACH * 16, n)
        if consumer.ask("copies") > before:
            return
    raise AssertionError("nothing is copied beside the loop")


def learn_to_push(producer: Child, consumer: Child, name: str) -> None:
    """Push until threads copy; each of the pushes is exact."""
    before, contact = producer.ask("copies"), producer.ask("contact")
    producer.ask("stamp", LEARNING, EACH * 16)
    for n in range(50):
        consumer.ask("wipe")
        consumer.tell("expect", f"{name} {n}", contact, LEARNING, {})
        assert "error" not in producer.ask("push", f"{name} {n}", LEARNING, EACH * 16)
        assert "error" not in consumer.hear()
        assert consumer.ask("holds", LEARNING, EACH * 16, 0)
        if producer.ask("copies") > before:
            return
    raise AssertionError("nothing is copied beside the loop")


@pytest.mark.parametrize("learn_by", [learn, learn_to_push])
def test_large_pulls_and_pushes_are_copied_beside_the_loop(
    producer: Restartable,
    consumer: Child,
    learn_by: Callable[[Child, Child, str], None],
) -> None:
    """Byte for byte, and nothing is left of them."""
    open_in(producer, "prefill", **SETTINGS)
    learn_by(producer, consumer, learn_by.__name__)
    learn_by(producer, consumer, f"{learn_by.__name__} again")
    for side in (producer, consumer):
        assert side.ask("statistics")["unsettled_transfers"] == 0
    producer.kill()


def test_producers_killed_under_copies(producer: Restartable, consumer: Child) -> None:
    """Each pull is right or fails as its peer is lost; what is given back then stays
    as its next owner has written it, and the next start is copied from like the first."""
    outcomes: Counter[str] = Counter()
    for number in range(KILLS):
        open_in(producer, "prefill", **SETTINGS)
        producer.ask("fill", list(range(FIRST)), CACHE)
        learn(producer, consumer, f"learn {number}")
        names = [f"pull {number} {n}" for n in range(PULLS)]
        blocks = [list(range(n * EACH, (n + 1) * EACH)) for n in range(PULLS)]
        for name, ids in zip(names, blocks, strict=True):
            ticket = producer.ask("offer_as_is", name, ids, EACH * 16)
            consumer.ask("begin", ticket, ids)
        until(consumer, lambda live, n=number: live["pulls"] <= PULLS - n, "statistics")
        producer.kill()
        for name, ids in zip(names, blocks, strict=True):
            outcomes[consumer.ask("result", name).get("error", "done")] += 1
            consumer.ask("refill_reclaimed", ids, CACHE, REUSED)
        consumer.ask("let_pass", LANDING_S)
        assert consumer.ask("others", list(range(FIRST)), REUSED) == 0
        live = consumer.ask("statistics")
        assert (live["unsettled_transfers"], live["quarantine"]) == (0, 0)
        assert live["fabric_transfers"] == 0
    assert outcomes.keys() == {"done", "PeerLost"}
