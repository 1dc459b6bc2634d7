"""Pushes between two processes over real NIXL: exact, and safe to take back."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.nixl.engines import TCP, engine, until
from tests.nixl.push_commands import FILLED
from tests.processes import Child

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.nixl

TRANSPORTS = {"same_host": None, "tcp": TCP}
RAW = Path(__file__).with_name("raw_child.py")
STILL_S = 0.2
names = count()


def unique(stem: str) -> str:
    """A request id that was never used."""
    return f"{stem}-{next(names)}"


@pytest.fixture(scope="module", params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Child, Child]]:
    """A producer and a consumer, started side by side."""
    env = TRANSPORTS[request.param]
    with engine("prefill", env=env) as producer, engine("decode", env=env) as consumer:
        producer.hear()
        consumer.hear()
        yield producer, consumer


@pytest.fixture
def producer(pair: tuple[Child, Child]) -> Child:
    return pair[0]


@pytest.fixture
def consumer(pair: tuple[Child, Child]) -> Child:
    pair[1].ask("wipe")
    return pair[1]


def expect(
    consumer: Child, producer: Child, request: str, blocks: list[int], **settings: Any
) -> None:
    """Let the consumer expect a push; `hear` how it went."""
    contact = producer.ask("contact")
    consumer.tell("expect", request, contact, blocks, settings)


def test_a_push_is_exact(producer: Child, consumer: Child) -> None:
    """Scattered blocks, a partial last one and look-ahead blocks, byte for byte."""
    request = unique("exact")
    producer.ask("stamp", [40, 3, 17, 5], 61)
    expect(consumer, producer, request, [8, 60, 2, 33, 1])
    pushed = producer.ask("push", request, [40, 3, 17, 5], 61)
    assert consumer.hear()["bytes"] == pushed["bytes"] > 0
    consumer.ask("check", [8, 60, 2, 33, 1], 61, 0)


def test_a_push_before_anybody_expects_it_is_exact(
    producer: Child, consumer: Child
) -> None:
    """It waits for its consumer."""
    request = unique("early")
    producer.ask("stamp", [9, 2], 20)
    producer.tell("push", request, [9, 2], 20)
    consumer.tell("expect", request, producer.ask("contact"), [4, 5], {})
    producer_said = producer.hear()
    assert consumer.hear()["bytes"] == producer_said["bytes"] > 0
    consumer.ask("check", [4, 5], 20, 0)


def test_p7_a_push_to_a_partial_prefix_hit_is_exact(
    producer: Child, consumer: Child
) -> None:
    """Only tokens from computed_tokens on are written."""
    request = unique("prefix")
    producer.ask("stamp", [1, 2, 3, 4], 60)
    expect(consumer, producer, request, [9, 7], computed_tokens=32)
    producer.ask("push", request, [1, 2, 3, 4], 60)
    consumer.hear()
    consumer.ask("check", [9, 7], 60, 32)


@pytest.mark.parametrize("chunk", [61, 16, 7])
def test_a_stream_by_layer_and_by_tokens_is_exact(
    producer: Child, consumer: Child, chunk: int
) -> None:
    """Each piece is written to the producer's blocks only just before it is ready."""
    request = unique("stream")
    expect(consumer, producer, request, [8, 60, 2, 33, 1])
    pushed = producer.ask("stream", request, [40, 3, 17, 5], 61, chunk)
    assert consumer.hear()["bytes"] == pushed["bytes"] > 0
    consumer.ask("check", [8, 60, 2, 33, 1], 61, 0)


BLOCKS = 512
BIG = {"blocks": BLOCKS, "block_size": 16, "layers": 4, "heads": 8, "dim": 128}
"""A block of a layer has 256 KiB, all blocks 512 MiB."""
TOKENS = 16 * BLOCKS
ALL = list(range(BLOCKS))
IN_FLIGHT = {"wave_bytes": 64 << 20, "window": 8}
"""So that all of the push is in flight at once."""


@pytest.mark.parametrize("grace_s", [0.3, 20.0], ids=["quarantine", "drain"])
def test_l1_l4_no_byte_lands_in_a_block_that_was_given_back(grace_s: float) -> None:
    """The producer is stopped under a push of 512 MiB, which is then cancelled.

    Nothing is given back while it is silent: either the drain waits for its answer,
    or all is in quarantine until it answers. What is given back is refilled at once.
    A second push behind the first shows that nothing of the first is left on its way.
    """
    with (
        engine("prefill", pool=BIG, env=TCP, **IN_FLIGHT) as producer,
        engine("decode", pool=BIG, env=TCP, drain_grace_s=grace_s) as consumer,
    ):
        producer.hear()
        consumer.hear()
        producer.ask("fill", ALL, 1.0)
        expect(consumer, producer, "big", ALL)
        producer.tell("push", "big", ALL, TOKENS)
        until(producer, is_writing, "statistics")
        producer.stop()
        assert consumer.ask("arrived", ALL) < len(ALL) * BIG["layers"] - 100
        consumer.ask("revoke", "big")
        if grace_s < 1:
            assert consumer.hear() == {"given_back": [], "held": ALL}
            assert consumer.ask("statistics")["quarantine"] == 1
            producer.resume()
            consumer.ask("refill_reclaimed", ALL, FILLED, FILLED)
        else:
            producer.resume()
            assert consumer.hear() == {"given_back": ALL, "held": []}
        assert producer.hear()["error"] == "PushRevoked"
        until(producer, lambda live: not is_writing(live), "statistics")
        expect(consumer, producer, "small", ALL[:1])
        producer.ask("push", "small", ALL[:1], 16)
        assert consumer.hear()["bytes"] > 0
        assert consumer.ask("others", ALL[1:], FILLED) == 0
        live = consumer.ask("statistics")
        assert (live["quarantine"], live["landings"]) == (0, 0)


def is_writing(live: dict[str, int]) -> bool:
    """Whether anything of an engine may touch memory."""
    return live["unsettled_transfers"] > 0


def test_control_without_asking_the_bytes_of_a_stopped_writer_land_later() -> None:
    """Why a consumer asks: what it merely decides does not stop a WRITE."""
    size = 512 << 20
    with (
        Child(RAW, str(size), env=TCP) as writer,
        Child(RAW, str(size), env=TCP) as target,
    ):
        writer.hear()
        metadata, address = target.hear()
        writer.ask("write", metadata, address)
        writer.stop()
        still(target)
        target.ask("refill")
        writer.resume()
        until(writer, bool, "settled")
        assert target.ask("written") > 100


def still(target: Child) -> None:
    """Wait until what sits in a stopped writer's sockets has arrived."""
    before = -1
    while (now := target.ask("written")) != before:
        before = now
        target.ask("rest", STILL_S)
