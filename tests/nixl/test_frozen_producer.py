"""A producer that freezes past its lease and reuses its blocks on waking, over tcp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.nixl.engines import TCP, engine, pull, until

if TYPE_CHECKING:
    from tests.processes import Child

pytestmark = pytest.mark.nixl

RUNS = 20
READERS = 5
"""Pulls in each freeze."""
MOST_FREEZES = 8
"""A pull that is through before the freeze does not count; see that they end."""
EACH = 16
"""Blocks of a pull, 4 MiB each."""
LEASE_S = 3.0
POOL = {
    "blocks": READERS * EACH,
    "block_size": 16,
    "layers": 2,
    "heads": 16,
    "dim": 512,
}
SETTINGS = {
    "pool": POOL,
    "env": TCP,
    "lease_s": LEASE_S,
    "window": 64,  # the whole of a read is in flight at once
    "poll_s": 0.001,
}
CACHE, REUSED = 3.0, 5.0


def blocks(reader: int) -> list[int]:
    return list(range(reader * EACH, (reader + 1) * EACH))


def frozen_under_readers(
    producer: Child, consumer: Child, freeze: int
) -> list[tuple[str, int]]:
    """The outcome and the wrong elements of each pull that was in flight meanwhile."""
    names = [f"{freeze}.{reader}" for reader in range(READERS)]
    producer.ask("fill", list(range(POOL["blocks"])), CACHE)
    tickets = []
    for reader, name in enumerate(names):
        tickets.append(producer.ask("offer_as_is", name, blocks(reader), EACH * 16))
        producer.ask("reuse", name, blocks(reader), REUSED)
    for reader, ticket in enumerate(tickets):
        consumer.tell("begin", ticket, blocks(reader))  # without a wait in between
    for _ in tickets:
        consumer.hear()
    until(consumer, lambda flying: names[-1] in flying, "in_flight")
    producer.stop()
    frozen = consumer.ask("in_flight")
    consumer.ask("let_pass", LEASE_S + 0.5)
    producer.resume()
    results = {name: consumer.ask("result", name) for name in names}
    for name in frozen:
        assert producer.ask("outcome", name) == "expired"
    return [
        (
            results[name].get("error", "done"),
            consumer.ask("others", blocks(names.index(name)), CACHE),
        )
        for name in frozen
    ]


def test_a_read_that_outlived_its_lease_is_never_done() -> None:
    """Twenty of twenty fail as expired, and most of them do have wrong bytes."""
    with (
        engine("decode", **SETTINGS) as consumer,
        engine("prefill", **SETTINGS) as producer,
    ):
        producer.hear()
        consumer.hear()
        ticket = producer.ask("offer_as_is", "connect", [0], 16)
        assert "error" not in pull(consumer, ticket, [0])
        seen: list[tuple[str, int]] = []
        for freeze in range(MOST_FREEZES):
            seen += frozen_under_readers(producer, consumer, freeze)
            if len(seen) >= RUNS:
                break
        assert len(seen) >= RUNS
        assert {outcome for outcome, _ in seen} == {"LeaseExpired"}
        assert sum(wrong > 0 for _, wrong in seen) > len(seen) / 2, seen
        assert consumer.ask("quarantined") == []
