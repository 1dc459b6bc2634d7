"""The messages of an open link: round trips, bounds, and one frame for each."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import ProtocolViolation
from kvferry.protocol.framing import MAX_LINK_BYTES, encode_frame
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.link import (
    Confirmed,
    Decline,
    Goodbye,
    LinkMessage,
    Ping,
    Pong,
    ReadFinished,
    Refused,
    RefusedReason,
    Renew,
    Renewed,
    decode_message,
    encode_message,
)

ids = st.text("aé中🚢\n", min_size=1, max_size=64)
attempts = st.integers(0, 2**62 - 1)
ranks = st.builds(
    Rank,
    tp=st.integers(0, 2**16 - 1),
    tp_size=st.integers(1, 2**16),
    pp=st.integers(0, 2**16 - 1),
    pp_size=st.integers(1, 2**16),
)
keys = st.builds(EngineKey, ids, ids, ranks)
readers = st.lists(ranks, min_size=1, max_size=4).map(tuple)
leases = st.floats(0, 86_400, exclude_min=True)
messages = st.one_of(
    st.builds(Renew, ids, ids, attempts, readers),
    st.builds(Renewed, ids, attempts, leases),
    st.builds(ReadFinished, ids, ids, attempts),
    st.builds(Confirmed, keys, ids, attempts, attempts),
    st.builds(Refused, ids, attempts, st.sampled_from(RefusedReason)),
    st.builds(Decline, ids, ids, readers, st.text("aé🚢", max_size=1024)),
    st.builds(Goodbye, st.text("aé🚢", max_size=1024)),
    st.sampled_from([Ping(), Pong()]),
)


@given(messages)
def test_round_trip(message: LinkMessage) -> None:
    """Every message within the bounds arrives as it was sent, in a small frame."""
    payload = encode_message(message)
    assert decode_message(payload) == message
    encode_frame(payload, limit_bytes=MAX_LINK_BYTES)


RANK = Rank()
LONG = "x" * 257
TOO_MUCH: list[LinkMessage] = [
    Renew("", "o", 0, (RANK,)),
    Renew(LONG, "o", 0, (RANK,)),
    Renew("r", "", 0, (RANK,)),
    Renew("r", "x" * 65, 0, (RANK,)),
    Renew("r", "o", -1, (RANK,)),
    Renew("r", "o", 2**62, (RANK,)),
    Renew("r", "o", 0, ()),
    Renew("r", "o", 0, (RANK,) * 1025),
    Renew("r", "o", 0, (Rank(tp=-1),)),
    Renew("r", "o", 0, (Rank(tp_size=0),)),
    Renewed("r", 0, 0.0),
    Renewed("r", 0, -1.0),
    Renewed("r", 0, 86_401.0),
    Renewed("r", 0, float("nan")),
    Renewed("r", 0, float("inf")),
    Confirmed(EngineKey("", "g", RANK), "r", 0, 0),
    Confirmed(EngineKey("e", "x" * 65, RANK), "r", 0, 0),
    Confirmed(EngineKey("e", "g", RANK), "r", 0, -1),
    Decline("r", "o", (Rank(),), "x" * 1025),
    Goodbye("x" * 1025),
]


@pytest.mark.parametrize("message", TOO_MUCH, ids=lambda m: repr(m)[:60])
def test_a_value_out_of_its_bounds_is_refused(message: LinkMessage) -> None:
    """Invariant 6: what is over a bound is the error of the one who sent it."""
    with pytest.raises(ProtocolViolation):
        decode_message(encode_message(message))


def test_the_largest_messages_fit_into_a_frame() -> None:
    """What the decoder would take, the framing lets through: no bound is a trap."""
    wide = "🚢"
    rank = Rank(2**16 - 1, 2**16, 2**16 - 1, 2**16)
    key = EngineKey(wide * 256, wide * 64, rank)
    last = 2**62 - 1
    largest = (
        Renew(wide * 256, wide * 64, last, (rank,) * 1024),
        Confirmed(key, wide * 256, last, last),
        Decline(wide * 256, wide * 64, (Rank(),), wide * 1024),
        Goodbye(wide * 1024),
    )
    for message in largest:
        payload = encode_message(message)
        assert decode_message(payload) == message
        encode_frame(payload, limit_bytes=MAX_LINK_BYTES)


def test_an_unknown_message_is_refused() -> None:
    """A tag of a later version is not skipped."""
    with pytest.raises(ProtocolViolation):
        decode_message(msgspec.msgpack.encode({"type": "register", "request_id": "r"}))


@pytest.mark.parametrize("kind", ["ping", "pong"])
def test_a_ping_carries_nothing(kind: str) -> None:
    """There is nothing in it that could grow."""
    assert decode_message(msgspec.msgpack.encode({"type": kind})) in {Ping(), Pong()}
    with pytest.raises(ProtocolViolation):
        decode_message(msgspec.msgpack.encode({"type": kind, "payload": b"x"}))


def test_a_detail_may_be_left_out() -> None:
    """Nobody owes a reason."""
    for plain in (
        {"type": "decline", "request_id": "r", "offer_id": "o", "readers": [{}]},
        {"type": "goodbye"},
    ):
        message = decode_message(msgspec.msgpack.encode(plain))
        assert isinstance(message, Decline | Goodbye)
        assert message.detail == ""
