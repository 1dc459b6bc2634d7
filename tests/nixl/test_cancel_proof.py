"""A cancelled pull of 512 MB in flight, over tcp: what is given back stays untouched.

The same read with its handles released in flight shows what that is worth: bytes
land (nixl-facts row 5).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.nixl.engines import open_in, pull, restartable, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes import Child, Restartable

pytestmark = pytest.mark.nixl

MIB = 1 << 20
BLOCKS = 64
"""Of the big pull: 8 MiB each, over all layers."""
POOL = {"blocks": 80, "block_size": 16, "layers": 4, "heads": 16, "dim": 512}
ALL = list(range(BLOCKS))
BESIDE = list(range(BLOCKS, 80))
CACHE, REUSED, REUSED_AGAIN = 3.0, 5.0, 7.0
SETTINGS = {"pool": POOL, "lease_s": 300.0, "wave_bytes": 16 * MIB, "window": 8}
LANDING_S = 2.0
"""How long we look for bytes that land late: the control sees them in far less."""


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Restartable, Restartable]]:
    with restartable() as producer, restartable() as consumer:
        producer.hear()
        consumer.hear()
        yield producer, consumer


@contextmanager
def connected(
    processes: tuple[Restartable, Restartable], *, drain_grace_s: float
) -> Iterator[tuple[Restartable, Restartable]]:
    """A producer, all of its pool filled, and a consumer that is connected to it.

    The producer ends first: were the consumer to go with a read in flight, it could
    take the producer with it (nixl-facts row 23).
    """
    producer, consumer = processes
    open_in(producer, "prefill", **SETTINGS)
    open_in(consumer, "decode", drain_grace_s=drain_grace_s, **SETTINGS)
    try:
        producer.ask("fill", [*ALL, *BESIDE], CACHE)
        read_beside(producer, consumer, "connect")
        yield producer, consumer
    finally:
        producer.kill()
        consumer.kill()


def read_beside(producer: Child, consumer: Child, request_id: str) -> None:
    """A pull into the blocks beside; whatever was sent before has arrived after it."""
    ticket = producer.ask("offer_as_is", request_id, BESIDE, len(BESIDE) * 16)
    assert "error" not in pull(consumer, ticket, BESIDE)
    assert keeps(consumer, BESIDE, CACHE)


def begin(producer: Child, consumer: Child, request_id: str) -> None:
    """A pull of 512 MB that is in flight when this returns."""
    ticket = producer.ask("offer_as_is", request_id, ALL, BLOCKS * 16)
    consumer.ask("begin", ticket, ALL, REUSED)
    until(consumer, lambda flying: request_id in flying, "in_flight")


def keeps(consumer: Child, blocks: list[int], value: float) -> bool:
    return consumer.ask("others", blocks, value) == 0


def test_what_a_cancelled_pull_gives_back_never_changes(
    processes: tuple[Restartable, Restartable],
) -> None:
    """Its peer lives: it drains, and its blocks are reused at that very moment."""
    with connected(processes, drain_grace_s=60.0) as (producer, consumer):
        begin(producer, consumer, "r")
        consumer.ask("cancel", "r")
        assert consumer.ask("result", "r") == {"cancelled": "reading"}
        assert consumer.ask("quarantined") == []
        assert keeps(consumer, ALL, REUSED)
        read_beside(producer, consumer, "after")
        consumer.ask("let_pass", LANDING_S)
        assert keeps(consumer, ALL, REUSED)
        assert consumer.ask("statistics")["unsettled_transfers"] == 0
        assert producer.ask("outcome", "r") == "released"


def test_what_a_stopped_peer_may_still_send_is_quarantined(
    processes: tuple[Restartable, Restartable],
) -> None:
    """Nothing is given back before the peer has sent it all; then nothing changes.

    Bytes do land in quarantine: what is in it is written over, to see them.
    """
    with connected(processes, drain_grace_s=0.5) as (producer, consumer):
        begin(producer, consumer, "r")
        producer.stop()
        consumer.ask("cancel", "r")
        assert consumer.ask("result", "r") == {"cancelled": "reading"}
        assert consumer.ask("quarantined") == ALL
        assert consumer.ask("statistics")["unsettled_transfers"] > 0
        consumer.ask("fill", BESIDE, REUSED)
        consumer.ask("fill", ALL, REUSED)
        consumer.tell("refill_reclaimed", ALL, REUSED, REUSED_AGAIN)
        producer.resume()
        landed = consumer.hear()
        assert landed > 0, "nothing was in flight"
        assert consumer.ask("quarantined") == []
        assert consumer.ask("statistics")["unsettled_transfers"] == 0
        assert keeps(consumer, BESIDE, REUSED)
        read_beside(producer, consumer, "after")
        consumer.ask("let_pass", LANDING_S)
        assert keeps(consumer, ALL, REUSED_AGAIN)
        assert producer.ask("outcome", "r") == "released"


def test_control_bytes_land_behind_a_released_handle(
    processes: tuple[Restartable, Restartable],
) -> None:
    """The same read, its handles released in flight: the blocks do change."""
    with connected(processes, drain_grace_s=0.5) as (producer, consumer):
        ticket = producer.ask("offer_as_is", "r", ALL, BLOCKS * 16)
        producer.stop()
        assert consumer.ask("read_and_release", ticket, ALL) > 0
        consumer.ask("fill", ALL, REUSED)
        producer.resume()
        consumer.ask("let_pass", LANDING_S)
        assert consumer.ask("others", ALL, REUSED) > 0
