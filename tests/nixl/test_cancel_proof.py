"""A cancelled pull of 512 MB in flight, over tcp: what is given back stays untouched.

The same read with its handles released in flight shows what that is worth: bytes
land (nixl-facts row 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.nixl.engines import TCP, engine, pull, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes import Child

pytestmark = pytest.mark.nixl

MIB = 1 << 20
BLOCKS = 64
"""Of the big pull: 8 MiB each, over all layers."""
POOL = {"blocks": 80, "block_size": 16, "layers": 4, "heads": 16, "dim": 512}
ALL = list(range(BLOCKS))
BESIDE = list(range(BLOCKS, 80))
CACHE, REUSED, REUSED_AGAIN = 3.0, 5.0, 7.0
LANDING_S = 2.0
"""How long we look for bytes that land late: the control sees them in far less."""


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Child, Child]]:
    """A producer, all of its pool filled, and a consumer that is connected to it.

    The consumer ends last: were it to go with a read in flight, it could take the
    producer with it (nixl-facts row 23).
    """
    settings = {
        "pool": POOL,
        "env": TCP,
        "lease_s": 60.0,
        "wave_bytes": 16 * MIB,
        "window": 8,
        "drain_grace_s": 1.0,
    }
    with (
        engine("decode", **settings) as consumer,
        engine("prefill", **settings) as producer,
    ):
        producer.hear()
        consumer.hear()
        producer.ask("fill", [*ALL, *BESIDE], CACHE)
        read_beside(producer, consumer, "connect")
        yield producer, consumer


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
    pair: tuple[Child, Child],
) -> None:
    """Its peer lives: it drains, and its blocks are reused at that very moment."""
    producer, consumer = pair
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
    pair: tuple[Child, Child],
) -> None:
    """Nothing is given back before the peer has sent it all; then nothing changes.

    Bytes do land in quarantine: what is in it is written over, to see them.
    """
    producer, consumer = pair
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


def test_control_bytes_land_behind_a_released_handle(pair: tuple[Child, Child]) -> None:
    """The same read, its handles released in flight: the blocks do change."""
    producer, consumer = pair
    ticket = producer.ask("offer_as_is", "r", ALL, BLOCKS * 16)
    producer.stop()
    assert consumer.ask("read_and_release", ticket, ALL) > 0
    consumer.ask("fill", ALL, REUSED)
    producer.resume()
    consumer.ask("let_pass", LANDING_S)
    assert consumer.ask("others", ALL, REUSED) > 0
