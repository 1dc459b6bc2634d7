"""Pulls between two processes over real NIXL: right, and wrong in every typed way."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.nixl.engines import POOL, TCP, engine, pull, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes import Child

pytestmark = pytest.mark.nixl


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Child, Child]]:
    """A producer and a consumer of the default transport, started side by side."""
    with engine("prefill") as producer, engine("decode") as consumer:
        producer.hear()
        consumer.hear()
        yield producer, consumer


@pytest.fixture
def producer(pair: tuple[Child, Child]) -> Child:
    return pair[0]


@pytest.fixture
def consumer(pair: tuple[Child, Child]) -> Child:
    """The consumer, its pool all poison: a failed pull may have written to it."""
    pair[1].ask("wipe")
    return pair[1]


def test_a_pull_is_exact(producer: Child, consumer: Child) -> None:
    """Scattered blocks, a partial last one and look-ahead blocks, byte for byte."""
    ticket = producer.ask("offer", "exact", [40, 3, 17, 5], 61)
    assert pull(consumer, ticket, [8, 60, 2, 33, 1])["waves"] >= 1
    consumer.ask("check", [8, 60, 2, 33, 1], 61, 0)
    assert producer.ask("outcome", "exact") == "released"


def test_p1_a_partial_prefix_hit_is_exact(producer: Child, consumer: Child) -> None:
    """Only tokens from computed_tokens on are written."""
    ticket = producer.ask("offer", "prefix", [1, 2, 3, 4], 60)
    pull(consumer, ticket, [9, 7], computed_tokens=32)
    consumer.ask("check", [9, 7], 60, 32)


def test_p4_a_full_hit_releases_without_a_data_operation(
    producer: Child, consumer: Child
) -> None:
    """Nothing is written, and the producer is free."""
    ticket = producer.ask("offer", "full", [1, 2], 32)
    assert pull(consumer, ticket, [], computed_tokens=32) == {"bytes": 0, "waves": 0}
    assert producer.ask("outcome", "full") == "released"
    assert consumer.ask("is_untouched")


def altered(ticket: Any, **rank: Any) -> Any:
    """The ticket with its one rank's facts changed."""
    return {**ticket, "ranks": [{**ticket["ranks"][0], **rank}]}


def test_o1_an_unknown_request(producer: Child, consumer: Child) -> None:
    """A ticket that its producer never made is refused as unknown."""
    ticket = producer.ask("offer", "known", [1], 5)
    failed = pull(consumer, {**ticket, "request_id": "unknown"}, [1])
    assert failed["error"] == "UnknownOffer"
    assert failed["request"] == "unknown"
    producer.ask("withdraw", "known")


def test_o1_a_block_id_out_of_range(producer: Child, consumer: Child) -> None:
    """Refused before any byte moves, and the producer is freed at once."""
    ticket = producer.ask("offer", "range", [1], 5)
    assert pull(consumer, ticket, [64])["error"] == "UnknownBlock"
    assert producer.ask("outcome", "range") == "released"
    assert consumer.ask("is_untouched")


def test_o1_a_ticket_that_was_used_before(producer: Child, consumer: Child) -> None:
    """A ticket is read once."""
    ticket = producer.ask("offer", "once", [1], 5)
    pull(consumer, ticket, [1])
    assert pull(consumer, ticket, [2])["error"] == "OfferSpent"


def test_o1_a_ticket_of_an_earlier_generation(producer: Child, consumer: Child) -> None:
    """The engine at the address is a later start of the one that made the ticket."""
    ticket = producer.ask("offer", "old", [1], 5)
    failed = pull(consumer, altered(ticket, generation="earlier"), [1])
    assert failed["error"] == "WrongPeer"
    assert "started anew" in failed["detail"]
    producer.ask("withdraw", "old")


def test_o1_a_withdrawn_offer(producer: Child, consumer: Child) -> None:
    """The producer took it back before it was read."""
    ticket = producer.ask("offer", "back", [1], 5)
    producer.ask("withdraw", "back")
    assert pull(consumer, ticket, [1])["error"] == "OfferWithdrawn"


def test_a_wrong_engine_at_the_address(producer: Child, consumer: Child) -> None:
    """Whoever answers says who it is, and it is not the one in the ticket."""
    ticket = producer.ask("offer", "whose", [1], 5)
    failed = pull(consumer, {**ticket, "engine_id": "somebody-else"}, [1])
    assert failed["error"] == "HandshakeRefused"
    assert "'somebody-else'" in failed["detail"]
    producer.ask("withdraw", "whose")


def test_a_dead_port(producer: Child, consumer: Child) -> None:
    """Nobody answers there."""
    ticket = producer.ask("offer", "dead", [1], 5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = altered(ticket, port=free.getsockname()[1], generation="other")
        failed = pull(consumer, nowhere, [1])
    assert failed["error"] == "PeerUnreachable"
    assert failed["phase"] == "connecting"
    producer.ask("withdraw", "dead")


def test_e3_a_peer_that_accepts_and_never_answers(
    producer: Child, consumer: Child
) -> None:
    """Ends by its own deadline; another pull at the same time is not disturbed."""
    silent, good = (producer.ask("offer", name, [1], 5) for name in ("quiet", "loud"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = altered(silent, port=server.getsockname()[1], generation="x")
        consumer.tell("pull", silent, [1], {"deadline_s": 1.0})
        consumer.tell("pull", good, [2], {})
        first, second = consumer.hear(), consumer.hear()
    assert "error" not in first
    assert second["error"] == "DeadlineExceeded"
    producer.ask("withdraw", "quiet")


@pytest.mark.parametrize(
    ("settings", "error", "names"),
    [
        (
            {"identity": {"revision": "2"}},
            "HandshakeRefused",
            "revision: 2 here, 1 there",
        ),
        (
            {"secret": "another", "trusted": ["127.0.0.1"]},
            "HandshakeRefused",
            "secret",
        ),
        ({"secret": "another"}, "UntrustedTicket", "signed"),
    ],
    ids=["revision", "secret", "unsigned"],
)
def test_c1_o8_a_mismatch_is_refused_before_any_data(
    producer: Child, settings: dict[str, Any], error: str, names: str
) -> None:
    """The factor is named with both values; no finish stage runs either."""
    ticket = producer.ask("offer", "differs", [1], 5)
    with engine("stranger", **settings) as stranger:
        stranger.hear()
        failed = pull(stranger, ticket, [1, 2])
        assert failed["error"] == error
        assert names in failed["detail"]
        assert failed["untrusted"] == {}
        assert stranger.ask("is_untouched")
    producer.ask("withdraw", "differs")


def test_c1_another_head_count_is_refused_with_both_values(producer: Child) -> None:
    """A layout that no plan can bridge is named like any other factor."""
    ticket = producer.ask("offer", "heads", [1], 5)
    with engine("wide", pool={**POOL, "heads": 4}) as wide:
        wide.hear()
        failed = pull(wide, ticket, [1])
    assert failed["error"] == "HandshakeRefused"
    assert "total units: 4 here, 2 there" in failed["detail"]
    producer.ask("withdraw", "heads")


def test_an_expired_lease(producer: Child) -> None:
    """Nobody renewed it: the offer has ended, and a late reader is told so."""
    with engine("brief", lease_s=0.2) as brief, engine("late") as late:
        brief.hear()
        late.hear()
        ticket = brief.ask("offer", "gone", [1], 5)
        assert brief.ask("outcome", "gone") == "expired"
        assert pull(late, ticket, [1])["error"] == "LeaseExpired"


def test_a_producer_killed_while_it_is_read_from() -> None:
    """Over tcp the read is really in flight: one typed error, well before the deadline."""
    big = {"blocks": 2048, "block_size": 16, "layers": 4, "heads": 8, "dim": 8}
    blocks = list(range(2048))
    with (
        engine("prefill", pool=big, env=TCP, lease_s=60.0) as producer,
        engine("decode", pool=big, env=TCP) as consumer,
    ):
        producer.hear()
        consumer.hear()
        first = producer.ask("offer", "first", [1], 5)
        pull(consumer, first, [1])  # connected, the transport too
        ticket = producer.ask("offer", "second", blocks, 2048 * 16)
        producer.stop()  # nothing moves any more, nothing has ended
        consumer.tell("pull", ticket, blocks, {"deadline_s": 20.0})
        producer.kill()
        failed = consumer.hear(within_s=15.0)
        assert failed["error"] == "PeerLost"
        assert failed["untrusted"] in ({}, {"full": "[0,32768)"})
        live = consumer.ask("statistics")
        assert (live["pulls"], live["unsettled_transfers"]) == (0, 0)
        # The end of the link may be heard of after the transport has failed.
        until(
            consumer,
            lambda live: (live["peers"], live["fabric_prepared"]) == (0, 0),
            "statistics",
        )
