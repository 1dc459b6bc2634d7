"""`Link`: the authenticated stream that stays open between two connected ranks.

Owns framing over a trio stream, a bounded queue outwards and the order of
messages. What they mean is its owner's business: `run` hands each one over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kvferry.protocol.errors import FerryError, MisuseError, PeerLost
from kvferry.protocol.framing import (
    MAX_HELLO_BYTES,
    MAX_LINK_BYTES,
    FrameDecoder,
    encode_frame,
)
from kvferry.protocol.link import Goodbye, decode_message, encode_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.link import LinkMessage

__all__ = ("FramedStream", "Link")

QUEUE_FRAMES = 1024
"""Frames that wait to be sent. A peer that reads none of so many is as good as gone."""


class FramedStream:
    """Whole payloads over a byte stream."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._decoder = FrameDecoder(limit_bytes=MAX_HELLO_BYTES)

    async def receive(self, *, limit_bytes: int = MAX_HELLO_BYTES) -> bytes:
        """The next payload.

        Raises:
            PeerLost: The stream has ended or broken.
            ProtocolViolation: The next frame is longer than the limit.
        """
        self._decoder.limit_bytes = limit_bytes
        while (payload := self._decoder.next_payload()) is None:
            try:
                chunk = await self._stream.receive_some()
            except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
                raise PeerLost("the link broke") from exc
            if not chunk:
                raise PeerLost("the peer closed the link")
            self._decoder.feed(chunk)
        return payload

    async def send(self, payload: bytes, *, limit_bytes: int = MAX_HELLO_BYTES) -> None:
        """Send one payload.

        Raises:
            PeerLost: The stream has broken.
            MisuseError: The payload is longer than the limit.
        """
        frame = encode_frame(payload, limit_bytes=limit_bytes)
        try:
            await self._stream.send_all(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise PeerLost("the link broke") from exc

    async def aclose(self) -> None:
        """Close the stream, without waiting for the other side."""
        await trio.aclose_forcefully(self._stream)


class Link:
    """One open link.

    Attributes:
        peer: Who is at the other end, as the handshake has proved.
        has_goodbye: The peer has said that nothing follows: it takes nothing, either.
    """

    def __init__(self, framed: FramedStream, peer: EngineKey) -> None:
        self.peer = peer
        self.has_goodbye = False
        self._framed = framed
        self._outwards, self._queue = trio.open_memory_channel[bytes](QUEUE_FRAMES)
        self._flushed = trio.Event()
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        self._cause: FerryError | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages may still go out."""
        return self._cause is None

    def post(self, message: LinkMessage) -> None:
        """Queue a message; never blocks.

        Raises:
            PeerLost: The link has ended, or the peer has not read for so long
                that the queue is full, which ends the link.
            MisuseError: The message is longer than any peer would take.
        """
        if self._cause is not None:
            raise PeerLost(self._cause.detail, peer=str(self.peer))
        payload = encode_message(message)
        if len(payload) > MAX_LINK_BYTES:
            raise MisuseError(
                f"a {type(message).__name__} of {len(payload)} bytes is over the limit"
                f" of {MAX_LINK_BYTES}"
            )
        try:
            self._outwards.send_nowait(payload)
        except trio.ClosedResourceError as exc:
            raise PeerLost("the link is closing", peer=str(self.peer)) from exc
        except trio.WouldBlock as exc:
            error = PeerLost("the peer does not read its link", peer=str(self.peer))
            self.end(error)
            raise error from exc

    def end(self, cause: FerryError) -> None:
        """End the link; `run` returns. The first cause stays."""
        self._cause = self._cause or cause
        self._scope.cancel()

    async def close(self, detail: str, *, within_s: float) -> None:
        """Say goodbye, send what is queued, and end the link once the peer has read it.

        The peer hangs up then. A stream that is closed while the peer still writes
        would take away what it has not read: that its blocks are safe, for one.
        """
        if self._cause is None:
            with trio.move_on_after(within_s):
                await self._outwards.send(encode_message(Goodbye(detail)))
                self._outwards.close()
                await self._flushed.wait()
                await self._ended.wait()
        self.end(PeerLost("this side closed the link", peer=str(self.peer)))

    async def run(self, deliver: Callable[[LinkMessage], None]) -> FerryError:
        """Send and receive until the link ends.

        Args:
            deliver: Gets each message in order; a FerryError from it ends the link.

        Returns:
            Why it ended.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                if self._cause is not None:
                    nursery.cancel_scope.cancel()
                nursery.start_soon(self._write)
                await self._read(deliver)
        finally:
            self._cause = self._cause or PeerLost("cancelled", peer=str(self.peer))
            self._ended.set()
            with trio.CancelScope(shield=True):  # closing forcefully does not wait
                await self._framed.aclose()
        return self._cause

    async def _read(self, deliver: Callable[[LinkMessage], None]) -> None:
        try:
            while True:
                message = decode_message(
                    await self._framed.receive(limit_bytes=MAX_LINK_BYTES)
                )
                if isinstance(message, Goodbye):
                    self.has_goodbye = True
                    self.end(PeerLost(f"the peer said goodbye: {message.detail}"))
                    return
                deliver(message)
        except FerryError as error:
            error.peer = str(self.peer)
            self.end(error)

    async def _write(self) -> None:
        try:
            async for payload in self._queue:
                await self._framed.send(payload, limit_bytes=MAX_LINK_BYTES)
            self._flushed.set()
        except FerryError as error:
            error.peer = str(self.peer)
            self.end(error)
