"""Length-prefixed frames: bytes in, whole payloads out.

A frame is a 4-byte big-endian length and that many bytes. Owns one invariant:
no more than one frame's limit, plus what one `feed` brought, is ever buffered;
the limit is checked at the header, before the body is awaited.
"""

from __future__ import annotations

from kvferry.protocol.errors import MisuseError, ProtocolViolation

__all__ = (
    "MAX_CARD_BYTES",
    "MAX_HELLO_BYTES",
    "MAX_LINK_BYTES",
    "FrameDecoder",
    "encode_frame",
)

HEADER_BYTES = 4

TLS_RECORDS = (b"\x15\x03", b"\x16\x03")
"""How an alert and a handshake of TLS begin: no frame is so long."""

MAX_HELLO_BYTES = 64 * 1024
"""Limit of what an unknown dialler may send first."""

MAX_LINK_BYTES = 8 * 1024 * 1024
"""Limit of a frame on an open link: a million block ids of a push's destination."""

MAX_CARD_BYTES = 16 * 1024 * 1024
"""Limit of the one large frame, the introduction with a rank's layout.

61 layers of two fields take about 30 KB; this leaves room for a thousand times that.
"""


def encode_frame(payload: bytes, *, limit_bytes: int) -> bytes:
    """The payload with its header.

    Raises:
        MisuseError: The payload is longer than the limit.
    """
    if len(payload) > limit_bytes:
        raise MisuseError(
            f"a message of {len(payload)} bytes is over the limit of {limit_bytes}"
        )
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


class FrameDecoder:
    """Cuts a byte stream into frames, whatever chunks it arrives in.

    Attributes:
        limit_bytes: The longest payload accepted from here on. May be changed
            between frames: the handshake's card is larger than all that follows.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Bytes that wait for the rest of their frame, or for `next_payload`."""
        return len(self._buffer)

    def feed(self, chunk: bytes | bytearray) -> None:
        """Take what arrived; call `next_payload` until it gives None."""
        self._buffer += chunk

    def next_payload(self) -> bytes | None:
        """The next whole payload, or None until more bytes are fed.

        Raises:
            ProtocolViolation: The header announces more than the limit. The
                stream cannot be trusted from here on: close it.
        """
        if len(self._buffer) < HEADER_BYTES:
            return None
        length = int.from_bytes(self._buffer[:HEADER_BYTES], "big")
        if length > self.limit_bytes:
            hint = "; it speaks TLS" if self._buffer[:2] in TLS_RECORDS else ""
            raise ProtocolViolation(
                f"a frame of {length} bytes is over the limit of {self.limit_bytes}"
                f"{hint}"
            )
        end = HEADER_BYTES + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[HEADER_BYTES:end])
        del self._buffer[:end]
        return payload
