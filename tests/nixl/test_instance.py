"""Three ranks in processes of their own, over TCP: they join, agree, and lose one."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

import pytest

from tests.nixl.engines import engine

pytestmark = pytest.mark.nixl

SHARED = {"secret": "of all"}


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_three_processes_are_one_instance() -> None:
    """In whatever order they come up; a killed one is everybody's failure, once."""
    lead = ["127.0.0.1", free_port()]

    def start(tp: int) -> Any:
        place = {"listen": lead} if tp == 0 else {"join": lead}
        rank = {"tp": tp, "tp_size": 3}
        return stack.enter_context(engine("p", **SHARED, rank=rank, **place))

    with ExitStack() as stack:
        ranks = [start(tp) for tp in (2, 1, 0)][::-1]
        other = stack.enter_context(engine("c", **SHARED))
        addresses = [rank.hear()["address"] for rank in ranks]
        other.hear()
        contacts = [rank.ask("ready") for rank in ranks]
        assert [
            [address["host"], address["port"]] for address in contacts[0]["ranks"]
        ] == addresses
        contacts += [other.ask("discover", "p", address) for address in addresses]
        assert contacts == [contacts[0]] * 6

        for rank in ranks:
            rank.tell("agree", "well", 0.1, False)
        assert [rank.hear() for rank in ranks] == ["done"] * 3
        for tp, rank in enumerate(ranks):
            rank.tell("agree", "badly", 30.0 if tp == 2 else 0.1, tp == 1)
        failure = {"error": "TransferFailed", "origin": "tp1of3.pp0of1"}
        assert [rank.hear() for rank in ranks] == [failure] * 3

        for rank in ranks:
            rank.tell("agree", "killed", 30.0, False)
        ranks[2].kill()
        lost = {"error": "PeerLost", "origin": "tp2of3.pp0of1"}
        assert [rank.hear() for rank in ranks[:2]] == [lost] * 2
        ranks[2] = start(2)
        ranks[2].hear()
        again = [rank.ask("ready") for rank in ranks]
        assert again == [again[0]] * 3
        assert again[0]["instance"] != contacts[0]["instance"]
        for rank in ranks:
            rank.tell("agree", "again", 0.0, False)
        assert [rank.hear() for rank in ranks] == ["done"] * 3
