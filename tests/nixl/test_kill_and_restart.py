"""A producer killed under open pulls and started anew at the same address, over tcp."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.nixl.engines import TCP, engine, open_in, pull, restartable, until

if TYPE_CHECKING:
    from tests.processes import Child

pytestmark = pytest.mark.nixl

ROUNDS = 20
MOST_ROUNDS = 25
"""One in which fewer than `PULLS` were open at the kill does not count."""
PULLS = 20
BRIEF = 4
"""Further pulls of one block, begun first: in every other round the kill waits until
one of all is done, so that there are some which must be right."""
EACH = 8
"""Blocks of a pull, 512 KiB each: a wave is one block, and four are in flight."""
FIRST = BRIEF + PULLS * EACH
"""The block of the first pull after a restart."""
POOL = {"blocks": FIRST + 1, "block_size": 16, "layers": 2, "heads": 16, "dim": 64}
SETTINGS = {"pool": POOL, "lease_s": 60.0, "wave_bytes": 1 << 19}
PRODUCER = {**SETTINGS, "poll_s": 0.005}  # it looks seldom, so the reads are slow
WARM_ROUNDS = 5
GROWTH_BYTES = 8 << 20
"""Most that a consumer's memory may grow from there on: 1 MB is seen, of 15 x 24
pulls and 15 peers. It is far less than the bytes of one pull, and half a
megabyte for each peer."""
LIVE = ("pulls", "peers", "quarantine", "unsettled_transfers", "staging_berths_taken")
ONE_PEER = (0, 1, 0, 0, 0)


class Round:
    """One round's pulls: the brief ones first."""

    def __init__(self, number: int) -> None:
        self._salt = number * (BRIEF + PULLS)
        self.blocks = [
            *([block] for block in range(BRIEF)),
            *(list(range(at, at + EACH)) for at in range(BRIEF, FIRST, EACH)),
        ]

    def begin(self, producer: Child, consumer: Child) -> None:
        """Have all of them in flight, by stopping the producer meanwhile."""
        producer.ask("stay_home")
        tickets = [
            producer.ask("offer", f"r{salt}", blocks, len(blocks) * 16, salt)
            for salt, blocks in enumerate(self.blocks, self._salt)
        ]
        producer.stop()
        for ticket, blocks in zip(tickets, self.blocks, strict=True):
            consumer.ask("begin", ticket, blocks)
        until(consumer, lambda flying: len(flying) == len(tickets), "in_flight")
        producer.resume()

    def outcomes(self, consumer: Child) -> Counter[str]:
        """How they ended; one that is done is right, byte by byte."""
        seen: Counter[str] = Counter()
        for salt, blocks in enumerate(self.blocks, self._salt):
            result = consumer.ask("result", f"r{salt}")
            if "error" not in result:
                assert consumer.ask("holds", blocks, len(blocks) * 16, salt)
            seen[result.get("error", "done")] += 1
        return seen


def kill(producer: Child, consumer: Child, *, most_open: int) -> int:
    """Kill the producer under so many open pulls; how many they were."""
    until(consumer, lambda live: live["pulls"] <= most_open, "statistics")
    producer.stop()  # so that the count is true when it dies
    open_pulls = consumer.ask("statistics")["pulls"]
    producer.kill()
    return open_pulls


def first_pull(producer: Child, consumer: Child, name: str) -> None:
    """A small one, exact."""
    ticket = producer.ask("offer", name, [FIRST], 16, 1)
    assert "error" not in pull(consumer, ticket, [FIRST])
    assert consumer.ask("holds", [FIRST], 16, 1)


def footprint(consumer: Child) -> tuple[Any, ...]:
    """What is live; the transport's share last."""
    live = consumer.ask("statistics")
    kept = (live[f"fabric_{kind}"] for kind in ("peers", "prepared", "transfers"))
    return (*(live[name] for name in LIVE), *kept)


def test_20_times_killed_and_restarted_under_20_open_pulls() -> None:
    """Each pull fails as its peer is lost or is right, the first new one works, and
    nothing grows: no handle, peer, prepared row, quarantine nor resident memory."""
    outcomes: Counter[str] = Counter()
    resident_bytes = []
    counted = 0
    with engine("decode", **SETTINGS, env=TCP) as consumer, restartable() as producer:
        consumer.hear()
        producer.hear()
        address = open_in(producer, "prefill", **PRODUCER)
        first_pull(producer, consumer, "first")
        base = footprint(consumer)
        assert base[:5] == ONE_PEER
        for number in range(MOST_ROUNDS):
            pulls = Round(number)
            pulls.begin(producer, consumer)
            most_open = PULLS + BRIEF - number % 2
            counted += kill(producer, consumer, most_open=most_open) >= PULLS
            assert open_in(producer, "prefill", listen=address, **PRODUCER) == address
            first_pull(producer, consumer, f"first after {number}")
            outcomes += pulls.outcomes(consumer)
            assert footprint(consumer) == base
            resident_bytes.append(consumer.resident_bytes())
            if counted == ROUNDS:
                break
    assert counted == ROUNDS
    assert outcomes.keys() == {"done", "PeerLost"}
    assert resident_bytes[-1] - resident_bytes[WARM_ROUNDS - 1] < GROWTH_BYTES
