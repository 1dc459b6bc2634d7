"""Frames: whole, byte by byte, cut anywhere, and never more than the limit."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import MisuseError, ProtocolViolation
from kvferry.protocol.framing import (
    MAX_CARD_BYTES,
    MAX_HELLO_BYTES,
    MAX_LINK_BYTES,
    FrameDecoder,
    encode_frame,
)

LIMIT = 64
HEADER_BYTES = 4


def drain(decoder: FrameDecoder) -> list[bytes]:
    payloads = []
    while (payload := decoder.next_payload()) is not None:
        payloads.append(payload)
    return payloads


def framed(payloads: list[bytes]) -> bytes:
    return b"".join(encode_frame(p, limit_bytes=LIMIT) for p in payloads)


payload_lists = st.lists(st.binary(max_size=LIMIT), max_size=6)


def test_a_frame_is_a_big_endian_length_and_the_payload() -> None:
    """The wire format is four bytes of length and the body."""
    assert encode_frame(b"abc", limit_bytes=3) == b"\x00\x00\x00\x03abc"


@given(payload_lists)
def test_whole_a_stream_of_frames_gives_its_payloads(payloads: list[bytes]) -> None:
    """All at once, in order, empty ones included, and nothing is left."""
    decoder = FrameDecoder(limit_bytes=LIMIT)
    decoder.feed(framed(payloads))
    assert drain(decoder) == payloads
    assert decoder.buffered_bytes == 0


@given(payload_lists)
def test_byte_by_byte_a_stream_gives_the_same_payloads(payloads: list[bytes]) -> None:
    """However it is cut, and never more than one frame is buffered."""
    decoder = FrameDecoder(limit_bytes=LIMIT)
    found = []
    for byte in framed(payloads):
        decoder.feed(bytes([byte]))
        found += drain(decoder)
        assert decoder.buffered_bytes < HEADER_BYTES + LIMIT
    assert found == payloads


@given(payload_lists, st.lists(st.integers(0, 400), max_size=8))
def test_chunks_of_any_size_give_the_same_payloads(
    payloads: list[bytes], cuts: list[int]
) -> None:
    """The cuts of the network mean nothing."""
    stream = framed(payloads)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = FrameDecoder(limit_bytes=LIMIT)
    found = []
    for first, last in itertools.pairwise(edges):
        decoder.feed(bytearray(stream[first:last]))
        found += drain(decoder)
    assert found == payloads


@given(st.binary(min_size=1, max_size=LIMIT))
def test_truncated_at_every_byte_a_frame_is_not_given_out(payload: bytes) -> None:
    """A frame that has not arrived whole is none."""
    stream = encode_frame(payload, limit_bytes=LIMIT)
    for length in range(len(stream)):
        decoder = FrameDecoder(limit_bytes=LIMIT)
        decoder.feed(stream[:length])
        assert decoder.next_payload() is None
        assert decoder.buffered_bytes == length


@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
def test_h1_a_length_over_the_limit_is_refused_at_the_header(length: int) -> None:
    """The body is not awaited, and the stream stays refused."""
    decoder = FrameDecoder(limit_bytes=LIMIT)
    header = length.to_bytes(4, "big")
    decoder.feed(header[:3])
    assert decoder.next_payload() is None
    decoder.feed(header[3:])
    for _ in range(2):
        with pytest.raises(ProtocolViolation, match=str(length)):
            decoder.next_payload()
    assert decoder.buffered_bytes == HEADER_BYTES


def test_h1_good_frames_before_a_bad_header_are_given_out() -> None:
    """What came whole before the nonsense is still a message."""
    decoder = FrameDecoder(limit_bytes=LIMIT)
    decoder.feed(framed([b"good"]) + b"\xff\xff\xff\xff")
    assert decoder.next_payload() == b"good"
    with pytest.raises(ProtocolViolation):
        decoder.next_payload()


@given(st.binary(max_size=300))
def test_h1_random_bytes_give_payloads_within_the_limit_or_a_violation(
    noise: bytes,
) -> None:
    """Noise costs no more than itself."""
    decoder = FrameDecoder(limit_bytes=LIMIT)
    decoder.feed(noise)
    try:
        payloads = drain(decoder)
    except ProtocolViolation:
        return
    assert all(len(payload) <= LIMIT for payload in payloads)
    assert decoder.buffered_bytes < HEADER_BYTES + LIMIT


def test_the_limit_may_change_between_frames() -> None:
    """A card is let through, and what follows it is held to the small limit."""
    decoder = FrameDecoder(limit_bytes=8)
    decoder.feed(encode_frame(b"x" * 9, limit_bytes=9) * 2)
    with pytest.raises(ProtocolViolation):
        decoder.next_payload()
    decoder.limit_bytes = 9
    assert decoder.next_payload() == b"x" * 9
    decoder.limit_bytes = 8
    with pytest.raises(ProtocolViolation):
        decoder.next_payload()


def test_a_payload_over_the_limit_is_not_sent() -> None:
    """Its sender hears of it, not its receiver; the limit itself is allowed."""
    assert len(encode_frame(b"x" * LIMIT, limit_bytes=LIMIT)) == LIMIT + HEADER_BYTES
    with pytest.raises(MisuseError, match="65 bytes"):
        encode_frame(b"x" * (LIMIT + 1), limit_bytes=LIMIT)


def test_the_limits_fit_the_header() -> None:
    """Lengths that four bytes can say: little from a stranger, most for a card."""
    assert MAX_HELLO_BYTES < MAX_LINK_BYTES < MAX_CARD_BYTES < 2**32
    assert MAX_HELLO_BYTES == 64 * 1024


def test_h1_a_stranger_cannot_announce_more_than_a_hello() -> None:
    """What an open link may send is refused at the header before the handshake is done."""
    decoder = FrameDecoder(limit_bytes=MAX_HELLO_BYTES)
    decoder.feed(encode_frame(bytes(MAX_HELLO_BYTES), limit_bytes=MAX_LINK_BYTES))
    assert decoder.next_payload() == bytes(MAX_HELLO_BYTES)
    decoder.feed((MAX_HELLO_BYTES + 1).to_bytes(HEADER_BYTES, "big"))
    with pytest.raises(ProtocolViolation, match="65537 bytes is over"):
        decoder.next_payload()
