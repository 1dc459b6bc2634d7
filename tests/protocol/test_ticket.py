"""The ticket: to and from bytes and a plain dict, by hand and by a router."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import BadTicket
from kvferry.protocol.identity import Rank
from kvferry.protocol.ticket import (
    MAX_TICKET_BYTES,
    RankOffer,
    Ticket,
    TicketSpan,
)
from kvferry.protocol.version import PROTOCOL_VERSION

TICKET = Ticket(
    engine_id="prefill-0",
    request_id="req-1",
    num_tokens=37,
    ranks=(RankOffer(Rank(), "3f2a", "o-1", "10.0.0.1", 7000, 30.0, 1_800_000_000),),
    spans={"full": TicketSpan((3, None, 9), 16), "mamba": TicketSpan((2,))},
)

names = st.text("aé中🚢\n", min_size=1, max_size=64)
blocks = st.none() | st.integers(0, 2**31 - 1)
spans = st.builds(
    TicketSpan, st.lists(blocks, max_size=6).map(tuple), st.integers(0, 2**40 - 1)
)
ranks = st.builds(Rank, tp=st.integers(0, 2**16 - 1), tp_size=st.integers(1, 2**16))
offers = st.builds(
    RankOffer,
    ranks,
    names,
    names,
    names,
    st.integers(1, 2**16 - 1),
    lease_s=st.floats(0, 86_400, exclude_min=True),
    expires_at=st.integers(0, 2**53 - 1),
    ready=st.booleans(),
    signature=st.binary(max_size=32).map(bytes.hex),
)
tickets = st.builds(
    Ticket,
    engine_id=names,
    request_id=names,
    num_tokens=st.integers(1, 2**40 - 1),
    ranks=st.lists(offers, min_size=1, max_size=4, unique_by=lambda o: o.rank).map(
        tuple
    ),
    spans=st.dictionaries(names, spans, max_size=4),
)


@given(tickets)
def test_round_trip_as_bytes(ticket: Ticket) -> None:
    """A ticket within the bounds arrives as it was made."""
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket


@given(tickets)
def test_round_trip_through_a_routers_json(ticket: Ticket) -> None:
    """The dict is plain JSON: another library may write it down and read it back."""
    assert Ticket.from_dict(json.loads(json.dumps(ticket.to_dict()))) == ticket


def test_the_dict_is_the_same_ticket_as_the_bytes() -> None:
    """Both forms name the same fields, None and positions included."""
    plain = TICKET.to_dict()
    assert msgspec.msgpack.decode(TICKET.to_bytes()) == plain
    assert plain["spans"]["full"] == {"block_ids": [3, None, 9], "first_token": 16}
    assert plain["protocol"] == PROTOCOL_VERSION


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
def test_c1_a_ticket_of_another_version_is_told_by_its_version(version: int) -> None:
    """Whatever else is new in it, the version is what its holder hears of."""
    plain = {"protocol": version, "something": "new", "ranks": "elsewhere"}
    with pytest.raises(BadTicket, match=f"protocol {version}, .* {PROTOCOL_VERSION}"):
        Ticket.from_dict(plain)
    with pytest.raises(BadTicket, match=f"protocol {version}, .* {PROTOCOL_VERSION}"):
        Ticket.from_bytes(msgspec.msgpack.encode(plain))


OUT_OF_BOUNDS: list[tuple[str, Any]] = [
    ("engine_id", ""),
    ("engine_id", "x" * 257),
    ("generation", ""),
    ("generation", "x" * 65),
    ("request_id", ""),
    ("request_id", "x" * 257),
    ("offer_id", ""),
    ("num_tokens", 0),
    ("num_tokens", -1),
    ("num_tokens", 2**40),
    ("num_tokens", 37.5),
    ("num_tokens", "37"),
    ("num_tokens", True),
    ("ranks", []),
    ("ranks", [{"rank": {}, "host": "", "port": 1}]),
    ("ranks", [{"rank": {}, "host": "h", "port": 0}]),
    ("ranks", [{"rank": {}, "host": "h", "port": 2**16}]),
    ("ranks", [{"rank": {"tp": -1}, "host": "h", "port": 1}]),
    ("ranks", [{"rank": {"tp_size": 0}, "host": "h", "port": 1}]),
    ("spans", {"": {"block_ids": []}}),
    ("spans", {"full": {"block_ids": [-1]}}),
    ("spans", {"full": {"block_ids": [2**31]}}),
    ("spans", {"full": {"block_ids": [1.5]}}),
    ("spans", {"full": {"block_ids": "123"}}),
    ("spans", {"full": {"block_ids": [], "first_token": -1}}),
    ("spans", {"full": {"block_ids": [], "first_token": 2**40}}),
    ("spans", {f"g{i}": {"block_ids": []} for i in range(257)}),
    ("protocol", "1"),
    ("protocol", -1),
    ("protocol", 10**5000),
    ("request_id", "\ud800"),
    ("spans", {"\udfff": {"block_ids": []}}),
]


@pytest.mark.parametrize(
    ("name", "value"),
    OUT_OF_BOUNDS,
    ids=[f"{n}-{i}" for i, (n, _) in enumerate(OUT_OF_BOUNDS)],
)
def test_a_value_out_of_its_bounds_is_no_ticket(name: str, value: object) -> None:
    """Whatever the router hands over is checked before anyone acts on it."""
    with pytest.raises(BadTicket):
        Ticket.from_dict({**TICKET.to_dict(), name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("generation", ""),
        ("offer_id", "x" * 65),
        ("host", ""),
        ("host", "x" * 257),
        ("port", 0),
        ("port", 2**16),
        ("lease_s", 0),
        ("lease_s", -1),
        ("lease_s", 86_401),
        ("lease_s", float("nan")),
        ("lease_s", float("inf")),
        ("lease_s", None),
        ("expires_at", -1),
        ("expires_at", 2**53),
        ("expires_at", 1.5),
        ("expires_at", None),
        ("ready", 1),
        ("signature", "0" * 65),
        ("signature", "not hex"),
        ("signature", "é"),
        ("signature", None),
        ("something", "else"),
    ],
)
def test_an_entry_out_of_its_bounds_is_no_ticket(name: str, value: object) -> None:
    """Each rank's offer is checked as strictly."""
    plain = TICKET.to_dict()
    plain["ranks"][0][name] = value
    with pytest.raises(BadTicket):
        Ticket.from_dict(plain)


REQUIRED = TICKET.to_dict().keys() - {"share", "instance", "protocol"}


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_a_ticket_without_a_field_is_no_ticket(name: str) -> None:
    """Nothing about where the blocks are is guessed."""
    plain = TICKET.to_dict()
    del plain[name]
    with pytest.raises(BadTicket):
        Ticket.from_dict(plain)
    with pytest.raises(BadTicket):
        Ticket.from_bytes(msgspec.msgpack.encode(plain))


def test_a_ticket_that_is_too_long_is_not_decoded() -> None:
    """The bound is on the bytes; a million blocks are within it."""
    span = TicketSpan(tuple(range(1_000_000)))
    payload = msgspec.structs.replace(TICKET, spans={"full": span}).to_bytes()
    assert len(payload) < MAX_TICKET_BYTES
    with pytest.raises(BadTicket, match="over"):
        Ticket.from_bytes(bytes(MAX_TICKET_BYTES + 1))


def of_rank(tp: int, *, lease_s: float = 30.0, **changes: Any) -> Ticket:
    """What one of two ranks makes of the same request."""
    address = ("10.0.0.1", 7000 + tp)
    offer = RankOffer(Rank(tp, 2), f"g{tp}", f"o{tp}", *address, lease_s, 1_800_000_000)
    return msgspec.structs.replace(TICKET, **{"ranks": (offer,), **changes})


def test_merge_lists_every_ranks_offer_once() -> None:
    """The ranks of an instance make a ticket each; the router hands out one."""
    merged = Ticket.merge([of_rank(0, lease_s=20.0), of_rank(1)])
    assert [offer.rank.tp for offer in merged.ranks] == [0, 1]
    assert merged.lease_s == 20.0
    assert merged.spans == TICKET.spans
    assert Ticket.merge([TICKET]) == TICKET


@pytest.mark.parametrize(
    ("tickets", "fact"),
    [
        ([], "no tickets"),
        ([of_rank(0), of_rank(0)], "a rank twice"),
        ([of_rank(0), of_rank(1, engine_id="x")], "engine_id"),
        ([of_rank(0), of_rank(1, request_id="x")], "request_id"),
        ([of_rank(0), of_rank(1, num_tokens=1)], "num_tokens"),
        ([of_rank(0), of_rank(1, spans={})], "spans"),
    ],
)
def test_merge_refuses_what_is_not_one_request(
    tickets: list[Ticket], fact: str
) -> None:
    """Tickets that differ would pair blocks of different requests."""
    with pytest.raises(BadTicket, match=fact):
        Ticket.merge(tickets)


def test_a_rank_listed_twice_is_no_ticket() -> None:
    """Whoever wrote it: its bytes would be read twice."""
    plain = TICKET.to_dict()
    plain["ranks"] *= 2
    with pytest.raises(BadTicket, match="a rank twice"):
        Ticket.from_dict(plain)
    with pytest.raises(BadTicket, match="a rank twice"):
        Ticket.from_bytes(msgspec.msgpack.encode(plain))
