"""Large transfers over tcp: a thread has the agent meanwhile, on both sides."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.nixl.engines import TCP, engine, open_in, pull, restartable, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes import Child, Restartable

pytestmark = pytest.mark.nixl

BLOCKS, BESIDE = list(range(128)), list(range(128, 136))
"""Half a MiB each, of small layers."""
POOL = {"blocks": 136, "block_size": 16, "layers": 16, "heads": 4, "dim": 32}
SETTINGS = {"pool": POOL, "lease_s": 60.0}
PULLS = 8
EACH = len(BLOCKS) // PULLS
CACHE, REUSED, LATER = 3.0, 5.0, 7.0
TRIES, STEPS, WANTED = 100, 10, 5
"""Of pulls, each of which is cancelled so many checkpoints later than the one before it;
so many in the middle are enough."""
GONE_S = 20.0
"""An engine that closes drains its pulls, which takes a part of a second."""


@pytest.fixture(scope="module")
def producer() -> Iterator[Restartable]:
    """A process, with an engine."""
    with restartable() as producer:
        producer.hear()
        open_in(producer, "prefill", **SETTINGS)
        yield producer


@pytest.fixture(scope="module")
def consumer(producer: Restartable) -> Iterator[Restartable]:
    """A process, with an engine that lives as long."""
    with restartable() as consumer:
        consumer.hear()
        open_in(consumer, "decode", **SETTINGS)
        yield consumer


def begin(
    producer: Child, consumer: Child, stem: str, refill: float | None = None
) -> dict[str, list[int]]:
    """Several pulls of all blocks; which blocks each of them has."""
    parts = {f"{stem} {n}": BLOCKS[n * EACH :][:EACH] for n in range(PULLS)}
    for name, ids in parts.items():
        ticket = producer.ask("offer_as_is", name, ids, EACH * 16)
        consumer.ask("begin", ticket, ids, refill)
    return parts


def results(consumer: Child, names: object) -> Counter[str]:
    """How they have ended."""
    ends: Counter[str] = Counter()
    for name in names:
        result = consumer.ask("result", name)
        ends[result.get("error") or ("done" if "bytes" in result else "cancelled")] += 1
    return ends


def pull_small(producer: Child, consumer: Child, name: str, salt: int) -> None:
    """One that is exact, into blocks that no other test uses."""
    ticket = producer.ask("offer", name, BESIDE[:2], 20, salt)
    assert "error" not in pull(consumer, ticket, BESIDE[-2:])
    assert consumer.ask("holds", BESIDE[-2:], 20, salt)


def assert_nothing_is_left(*sides: Child) -> None:
    for side in sides:
        live = side.ask("statistics")
        assert (live["unsettled_transfers"], live["quarantine"]) == (0, 0)
        assert live["fabric_transfers"] == 0


@contextmanager
def both_aside(*sides: Child) -> Iterator[None]:
    """Threads have both agents all the while; afterwards the loops have them."""
    for side in sides:
        side.ask("be_aside")
    yield
    for side in sides:
        assert side.ask("is_aside")
        side.ask("come_home")


def test_a_large_pull_goes_aside_and_small_ones_come_home(
    producer: Restartable, consumer: Restartable
) -> None:
    """By themselves, on both sides; each is exact, before, meanwhile and afterwards."""
    pull_small(producer, consumer, "before", 1)
    have_gone: set[str] = set()
    for number in range(TRIES):  # how long a look takes is the host's affair
        name = f"large {number}"
        ticket = producer.ask("offer", name, BLOCKS, len(BLOCKS) * 16, number)
        consumer.ask("begin", ticket, BLOCKS)
        pull_small(producer, consumer, f"beside {number}", number)
        sides = {"consumer": consumer, "producer": producer}
        have_gone |= {side for side in sides if sides[side].ask("is_aside")}
        assert results(consumer, [name]) == {"done": 1}
        assert consumer.ask("holds", BLOCKS, len(BLOCKS) * 16, number)
        if have_gone == sides.keys():
            break
    assert have_gone == sides.keys()
    for side in (consumer, producer):
        until(side, lambda is_aside: not is_aside, "is_aside")
    pull_small(producer, consumer, "afterwards", 4)
    assert_nothing_is_left(producer, consumer)


def test_a_push_is_exact_aside(producer: Restartable, consumer: Restartable) -> None:
    """Written by one thread, and its notices found by another."""
    producer.ask("stamp", BLOCKS, len(BLOCKS) * 16)
    consumer.ask("wipe")
    with both_aside(producer, consumer):
        contact = producer.ask("contact")
        consumer.tell("expect", "push", contact, BLOCKS, {})
        assert "error" not in producer.ask("push", "push", BLOCKS, len(BLOCKS) * 16)
        assert "error" not in consumer.hear()
    assert consumer.ask("holds", BLOCKS, len(BLOCKS) * 16, 0)
    assert_nothing_is_left(producer, consumer)


def test_what_is_cancelled_aside_never_changes_again(
    producer: Restartable, consumer: Restartable
) -> None:
    """In the middle of reading: what is given back stays as its owner writes it."""
    producer.ask("fill", BLOCKS, CACHE)
    phases: Counter[str] = Counter()
    with both_aside(producer, consumer):
        for n in range(TRIES):
            ticket = producer.ask("offer_as_is", f"c{n}", BLOCKS, len(BLOCKS) * 16)
            consumer.ask("begin", ticket, BLOCKS, REUSED, n * STEPS)
            phases[consumer.ask("result", f"c{n}").get("cancelled", "done")] += 1
            assert producer.ask("outcome", f"c{n}") == "released"
            pull_small(producer, consumer, f"behind {n}", n)
            assert consumer.ask("others", BLOCKS, REUSED) == 0
            if phases["reading"] == WANTED:
                break
    assert phases["reading"] == WANTED
    assert_nothing_is_left(producer, consumer)


def test_producers_killed_aside(producer: Restartable, consumer: Restartable) -> None:
    """Pulls end as their peer is lost; the next start is met by the thread, and read."""
    outcomes: Counter[str] = Counter()
    consumer.ask("be_aside")
    for number in range(3):
        producer.kill()
        open_in(producer, "prefill", **SETTINGS)
        producer.ask("fill", [*BLOCKS, *BESIDE], CACHE)
        producer.ask("be_aside")
        pull_small(producer, consumer, f"met {number}", number)
        parts = begin(producer, consumer, f"killed {number}")
        producer.kill()
        outcomes += results(consumer, parts)
        consumer.ask("refill_reclaimed", BLOCKS, CACHE, LATER)
        open_in(producer, "prefill", **SETTINGS)
        pull_small(producer, consumer, f"next {number}", number)
        assert consumer.ask("others", BLOCKS, LATER) == 0
    assert consumer.ask("is_aside")
    consumer.ask("come_home")
    assert outcomes["PeerLost"]
    assert outcomes.keys() <= {"done", "PeerLost"}
    assert_nothing_is_left(producer, consumer)


@pytest.mark.parametrize("closes", ["consumer", "producer"])
def test_an_engine_is_closed_aside_with_transfers_under_way(
    producer: Restartable, consumer: Restartable, closes: str
) -> None:
    """It drains, ends in order and in time, and takes nobody with it."""
    producer.ask("be_aside")
    consumer.ask("be_aside")
    with engine(closes, env=TCP, **SETTINGS) as closing:
        closing.hear()
        closing.ask("be_aside")
        reading = closing if closes == "consumer" else consumer
        giving = closing if closes == "producer" else producer
        giving.ask("fill", BLOCKS, CACHE)
        pull_small(giving, reading, f"{closes} is met", 5)
        parts = begin(giving, reading, f"{closes} closes")
        assert closing.close(within_s=GONE_S) == 0
        if reading is consumer:
            # Whether the offers end first, or the link, is a matter of moments.
            ends = {"done", "OfferWithdrawn", "PeerLost"}
            assert results(consumer, parts).keys() <= ends
        else:
            outcomes = {producer.ask("outcome", name) for name in parts}
            assert outcomes == {"released"}
    for side in (producer, consumer):
        assert side.ask("is_aside")
        side.ask("come_home")
    pull_small(producer, consumer, f"after the {closes}", 6)
    assert_nothing_is_left(producer, consumer)
