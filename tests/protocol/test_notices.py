"""The notices: round trips and bounds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import ProtocolViolation
from kvferry.protocol.notices import (
    AHEAD,
    TOKEN_BYTES,
    Written,
    decode_notice,
    encode_notice,
)

TOKEN = bytes(range(TOKEN_BYTES))


@given(
    st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES), st.integers(AHEAD, 2**31 - 1)
)
def test_round_trip(token: bytes, part: int) -> None:
    """Every notice within the bounds arrives as it was sent, and is small."""
    notice = Written(token, part)
    payload = encode_notice(notice)
    assert decode_notice(payload) == notice
    assert len(payload) < 100


@pytest.mark.parametrize(
    "notice",
    [
        Written(b"", 0),
        Written(TOKEN[:-1], 0),
        Written(TOKEN + b"x", 0),
        Written(TOKEN, AHEAD - 1),
        Written(TOKEN, 2**31),
    ],
    ids=repr,
)
def test_a_value_out_of_its_bounds_is_refused(notice: Written) -> None:
    """A token of another size, or a part that cannot be counted, is no notice."""
    with pytest.raises(ProtocolViolation):
        decode_notice(encode_notice(notice))


def test_a_notice_of_another_version_is_refused() -> None:
    """A field that this version does not know is not skipped, and none is left out."""
    plain = {"type": "written", "token": TOKEN, "part": 3}
    assert decode_notice(msgspec.msgpack.encode(plain)) == Written(TOKEN, 3)
    for other in (
        plain | {"parts": 4},
        plain | {"type": "confirmed"},
        {"type": "written", "token": TOKEN},
        {"type": "written", "part": 3},
    ):
        with pytest.raises(ProtocolViolation):
            decode_notice(msgspec.msgpack.encode(other))


def test_no_prefix_of_a_notice_is_one() -> None:
    """Truncated at every byte, and with something behind it."""
    payload = encode_notice(Written(TOKEN, 2**31 - 1))
    for cut in (*(payload[:n] for n in range(len(payload))), payload + b"\x00"):
        with pytest.raises(ProtocolViolation):
            decode_notice(cut)
