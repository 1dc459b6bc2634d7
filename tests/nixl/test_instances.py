"""Whole instances over real NIXL, in processes of their own: ranks of one read and write
those of another, whatever the sizes and layouts."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.protocol import Ticket
from tests.nixl.engines import TCP, engine
from tests.processes import Child

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.nixl

SCRIPT = Path(__file__).with_name("instance_child.py")
TOKENS = 41
THEIRS = [9, 3, 7, 1, 12, 5]
OURS = [2, 11, 4, 8, 6, 10]
NHD = {"tokens_first": True}

SHAPES = {
    "3:1": (3, 1, 3, {}, {}),
    "1:3": (1, 3, 3, {}, {}),
    "4:2": (4, 2, 4, {}, {}),
    "2:4": (2, 4, 4, {}, {}),
    "g1 4:8 of 4 heads": (4, 8, 4, {}, {}),
    "g2 1:4 of 2 heads": (1, 4, 2, {}, {}),
    "g3 8:1 of 4 heads": (8, 1, 4, {}, {}),
    "g3 8:4 of 4 heads": (8, 4, 4, {}, {}),
    "g4 6:4 of 2 heads": (6, 4, 2, {}, {}),
    "g4 2:3 of 6 heads": (2, 3, 6, {"block_size": 16}, {}),
    "g5 2:4 HND to NHD": (2, 4, 4, {}, NHD),
    "g5 4:2 NHD to HND": (4, 2, 4, NHD, {"block_size": 16}),
    "g5 2:2 NHD to HND": (2, 2, 4, NHD, {}),
}
"""Producer ranks, consumer ranks, heads, and what else either pool is like."""


@pytest.fixture(scope="module")
def children() -> Iterator[tuple[Child, Child]]:
    """Two processes, each for one instance after another."""
    with Child(SCRIPT) as producer, Child(SCRIPT) as consumer:
        producer.hear()
        consumer.hear()
        yield producer, consumer


@contextmanager
def opened(
    children: tuple[Child, Child], name: str, **settings: Any
) -> Iterator[tuple[Child, Child]]:
    """Both instances, as long as the block runs."""
    theirs, ours, heads, producer_pool, consumer_pool = SHAPES[name]
    producer, consumer = children
    pool = {"blocks": 16, "block_size": 8, "heads": heads}
    producer.tell("open", "p", theirs, {**pool, **producer_pool}, settings)
    consumer.tell("open", "c", ours, {**pool, **consumer_pool}, settings)
    assert [producer.hear(), consumer.hear()] == ["ready", "ready"]
    try:
        yield children
    finally:
        consumer.tell("close")
        assert consumer.hear() == "closed"
        producer.tell("close")
        assert producer.hear() == "closed"


@pytest.mark.parametrize("name", SHAPES)
def test_instances_pull_and_push(children: tuple[Child, Child], name: str) -> None:
    """One ticket, one contact; every byte is right, and only those talk who need to."""
    theirs, ours, heads, *_ = SHAPES[name]
    wanted = OURS if "block_size" not in SHAPES[name][4] else OURS[:3]
    sent = THEIRS if "block_size" not in SHAPES[name][3] else THEIRS[:3]
    with opened(children, name) as (producer, consumer):
        ticket = producer.ask("offer", "r", sent, TOKENS, theirs - 1)
        assert len(ticket["ranks"]) == theirs
        answers = consumer.ask("pull", ticket, wanted)
        assert not any("error" in answer for answer in answers), answers
        assert producer.ask("outcomes", "r") == ["released"] * theirs
        consumer.ask("check", wanted, TOKENS)

        contact = producer.ask("contact")
        producer.tell("push", "s", sent, TOKENS)
        answers = consumer.ask("expect", contact, "s", wanted)
        assert not any("error" in answer for answer in answers), answers
        written_to = producer.hear()
        consumer.ask("check", wanted, TOKENS)

        connected = consumer.ask("connected")
        for tp in range(theirs):
            assert written_to[tp] == sum(tp in ranks for ranks, _ in connected)
        for ranks, handshakes in connected:
            assert handshakes == len(ranks)
        # Of several holders of a head one is read by each: never more than heads.
        assert all(len(ranks) <= min(theirs, heads) for ranks, _ in connected)
        if theirs > ours:
            assert sum(len(ranks) for ranks, _ in connected) <= max(heads, ours)


def test_a_killed_rank_fails_the_request_on_every_rank() -> None:
    """Each producer rank is a process: one is killed under the reads of its own reader,
    and the other consumer rank, whose bytes were all there, is told the same."""
    pool = {"blocks": 64, "block_size": 16, "heads": 16, "dim": 64}
    config = {"lease_s": 30.0, "poll_s": 0.005, "env": TCP}
    with (
        engine(
            "p", rank={"tp": 0, "tp_size": 2}, pool={**pool, "tp": [0, 2]}, **config
        ) as first,
        Child(SCRIPT, env=TCP) as readers,
    ):
        join = first.hear()["address"]
        one = {
            "rank": {"tp": 1, "tp_size": 2},
            "join": join,
            "pool": {**pool, "tp": [1, 2]},
        }
        with engine("p", **one, **config) as second:
            second.hear()
            first.ask("ready")
            readers.hear()
            readers.tell("open", "c", 2, pool, {"wave_bytes": 1 << 18})
            assert readers.hear() == "ready"
            warm = offered((first, second), "warm", [1])
            answers = readers.ask("pull", warm, [1])
            assert not any("error" in answer for answer in answers), answers

            ticket = offered((first, second), "r", list(range(48)))
            second.stop()
            readers.tell("pull", ticket, list(range(48)))
            assert first.ask("outcome", "r") == "released"  # rank 0 has all it needs
            second.kill()
            answers = readers.hear()
        assert {answer["error"] for answer in answers} == {"PeerLost"}, answers
        causes = {answer["detail"].partition(" [")[0] for answer in answers}
        assert len(causes) == 1
        assert "tp1of2" in causes.pop()


def offered(ranks: tuple[Child, Child], request_id: str, blocks: list[int]) -> Any:
    """What each rank offers, merged: so that a rank that is stopped need not tell its
    id."""
    tickets = [
        rank.ask("offer", request_id, blocks, 16 * len(blocks)) for rank in ranks
    ]
    assert [len(ticket["ranks"]) for ticket in tickets] == [2, 2]
    return Ticket.merge(map(Ticket.from_dict, tickets)).to_dict()
