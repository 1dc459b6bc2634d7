"""The notices: round trips and bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import ProtocolViolation
from kvferry.protocol.notices import (
    TOKEN_BYTES,
    Written,
    decode_notice,
    encode_notice,
)

TOKEN = bytes(range(TOKEN_BYTES))


@given(
    st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES),
    st.integers(1, 2**31 - 1).flatmap(
        lambda n: st.tuples(st.integers(0, n - 1), st.just(n))
    ),
)
def test_round_trip(token: bytes, part: tuple[int, int]) -> None:
    """Every notice within the bounds arrives as it was sent, and is small."""
    notice = Written(token, *part)
    payload = encode_notice(notice)
    assert decode_notice(payload) == notice
    assert len(payload) < 100


@pytest.mark.parametrize(
    "notice",
    [
        Written(b"", 0, 1),
        Written(TOKEN[:-1], 0, 1),
        Written(TOKEN + b"x", 0, 1),
        Written(TOKEN, -1, 1),
        Written(TOKEN, 0, 0),
        Written(TOKEN, 2**31, 2**31 - 1),
        Written(TOKEN, 0, 2**31),
        Written(TOKEN, 1, 1),
        Written(TOKEN, 7, 4),
    ],
    ids=repr,
)
def test_a_value_out_of_its_bounds_is_refused(notice: Written) -> None:
    """A token of another size, or a part that its write has not, is no notice."""
    with pytest.raises(ProtocolViolation):
        decode_notice(encode_notice(notice))
