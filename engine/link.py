"""`Link`: the authenticated stream that stays open between two connected ranks.

Owns framing over a trio stream, a bounded queue outwards, the order of messages,
and the silence: a peer that is not heard for too long is gone, also when its end
of the stream never says so. What messages mean is the owner's business: `run`
hands each one over.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from kvferry.engine.streams import send_nowait
from kvferry.engine.tls import TlsFailed
from kvferry.protocol.errors import FerryError, MisuseError, PeerLost
from kvferry.protocol.framing import (
    MAX_HELLO_BYTES,
    MAX_LINK_BYTES,
    FrameDecoder,
    encode_frame,
)
from kvferry.protocol.link import Goodbye, Ping, Pong, decode_message, encode_message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.link import LinkMessage

    Deliver = Callable[[LinkMessage], Awaitable[None] | None]

__all__ = ("GOODBYE_S", "FramedStream", "Link")

GOODBYE_S = 1.0
"""How long a goodbye may take to leave."""

QUEUE_BYTES = 64 * 1024 * 1024
"""Waits to be sent at most. A peer that reads none of so much is as good as gone; some
ten thousand requests that begin at once are less."""

FRAME_COST = 64
"""Bytes that a small message takes beside its own while it waits."""

SEND_BYTES = 64 * 1024
"""Is handed to the stream at once, and one message more: a call for each of thousands
of small ones would cost more than the bytes."""


PIECE_BYTES = 2 * SEND_BYTES
"""Must leave within the silence, or the peer does not read its link."""

SENDS_AT_ONCE = 2
"""Messages of one step that are sent one by one: the word of a pull and its fence's, if
the copy is done at once; of thousands each would cost more than its bytes."""

MESSAGES_AT_ONCE = 32
"""Are taken from what has arrived before other tasks have their turn."""


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
                raise _broken(exc) from exc
            if not chunk:
                raise PeerLost("the peer closed the link")
            self._decoder.feed(chunk)
        return payload

    async def send(self, payload: bytes, *, limit_bytes: int = MAX_HELLO_BYTES) -> None:
        """Send one payload; others have a turn only if the stream does not take it.

        Raises:
            PeerLost: The stream has broken.
            MisuseError: The payload is longer than the limit.
        """
        frame = encode_frame(payload, limit_bytes=limit_bytes)
        if rest := frame[self.send_nowait(frame) :]:
            await self.send_frames(rest)

    async def send_frames(self, frames: bytes) -> None:
        """Send payloads that are encoded already; others have a turn meanwhile.

        Raises:
            PeerLost: The stream has broken.
        """
        try:
            await self._stream.send_all(frames)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise _broken(exc) from exc

    def send_nowait(self, frames: bytes) -> int:
        """Send what the stream takes at once; how many bytes that are.

        For an idle stream: nobody may be sending.
        """
        return send_nowait(self._stream, frames)

    async def aclose(self) -> None:
        """Close the stream, without waiting for the other side."""
        await trio.aclose_forcefully(self._stream)


def _broken(exc: Exception) -> PeerLost:
    if isinstance(exc, TlsFailed):
        return PeerLost(exc.detail)
    return PeerLost("the link broke")


class Link:
    """One open link.

    Each side asks by itself (`Ping`) after ``keepalive_s`` in which it heard
    nothing, so that the two need not agree on any time.

    Args:
        framed: The stream, which the link closes.
        peer: Who is at the other end.
        keepalive_s: Seconds without a message until the peer is asked for one.
        silence_s: Seconds without a whole message, or in which nothing can be sent,
            until the peer is taken for dead.
        queue_bytes: Most that waits to be sent.

    Attributes:
        peer: Who is at the other end, as the handshake has proved.
        has_goodbye: The peer has said that nothing follows: it takes nothing, either.
    """

    def __init__(
        self,
        framed: FramedStream,
        peer: EngineKey,
        *,
        keepalive_s: float,
        silence_s: float,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.peer = peer
        self.has_goodbye = False
        self._framed = framed
        self._keepalive_s = keepalive_s
        self._silence_s = silence_s
        self._heard_at = trio.current_time()
        self._sending_at: float | None = None  # since when the peer takes nothing
        self._queue: deque[bytes] = deque()  # frames
        self._queue_bytes = queue_bytes
        self._queued_bytes = 0
        self._filled = trio.Event()
        self._free_sends = 0  # none while the writer is sending
        self._is_closing = False
        self._flushed = trio.Event()
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        self._cause: FerryError | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages may still go out."""
        return self._cause is None

    @property
    def queued_bytes(self) -> int:
        """About how much waits to be sent."""
        return self._queued_bytes

    def post(self, message: LinkMessage) -> None:
        """Send a message as soon as the stream takes it; never blocks.

        Raises:
            PeerLost: The link has ended, or the peer has not read for so long
                that the queue is full, which ends the link.
            MisuseError: The message is longer than any peer would take.
        """
        self.queue(message)
        self.flush()

    def queue(self, message: LinkMessage) -> None:
        """Send a message with the next one that is posted, at the next `flush`, or when
        the loop comes round; never blocks.

        Raises:
            PeerLost: As `post`.
            MisuseError: As `post`.
        """
        if self._cause is not None:
            raise PeerLost(self._cause.detail, peer=str(self.peer))
        payload = encode_message(message)
        if len(payload) > MAX_LINK_BYTES:
            raise MisuseError(
                f"a {type(message).__name__} of {len(payload)} bytes is over the limit"
                f" of {MAX_LINK_BYTES}"
            )
        if self._is_closing:
            raise PeerLost("the link is closing", peer=str(self.peer))
        if self._queued_bytes + len(payload) > self._queue_bytes:
            error = PeerLost("the peer does not read its link", peer=str(self.peer))
            self.end(error)
            raise error
        self._put(payload)

    def _put(self, payload: bytes) -> None:
        frame = encode_frame(payload, limit_bytes=MAX_LINK_BYTES)
        self._queue.append(frame)
        self._queued_bytes += len(frame) + FRAME_COST
        self._filled.set()

    def flush(self) -> None:
        """Send now what is queued, as far as the stream takes it."""
        if not self._queue or not self._free_sends:
            return
        # Not by the writer, which runs only when the loop comes round again: two such
        # rounds are half of a fence.
        frames = self._take()
        rest = frames[self._framed.send_nowait(frames) :]
        self._free_sends -= 1
        if rest:
            self._queue.appendleft(rest)
            self._queued_bytes += len(rest) + FRAME_COST
            self._free_sends = 0

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
                if not self._is_closing:  # or another task is at it
                    self._put(encode_message(Goodbye(detail)))
                    self._is_closing = True
                    self._filled.set()  # for the writer, which may have nothing to do
                await self._flushed.wait()
                await self._ended.wait()
        self.end(PeerLost("this side closed the link", peer=str(self.peer)))

    async def run(self, deliver: Deliver) -> FerryError:
        """Send and receive until the link ends.

        Args:
            deliver: Gets each message in order. What it returns is awaited before the
                next, and must not be cancelled half way. A FerryError ends the link.

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
            self._flushed.set()  # or as good as that: nothing leaves any more
            self._queue.clear()
            self._ended.set()
            with trio.CancelScope(shield=True):  # closing forcefully does not wait
                await self._framed.aclose()
        return self._cause

    async def _read(self, deliver: Deliver) -> None:
        """Hear the peer, and look every now and then whether it is still there.

        The look interrupts the wait for the next message, so that it costs those that
        come nothing. A process that was stopped itself first reads what has come
        meanwhile: whoever has something to read is interrupted at the next wait.
        """
        self._heard_at = trio.current_time()  # nobody has listened before
        try:
            while self._cause is None:
                with trio.CancelScope(deadline=self._look()):
                    await self._hear(deliver)
        except FerryError as error:
            error.peer = str(self.peer)
            self.end(error)

    async def _hear(self, deliver: Deliver) -> None:
        """Take messages until the link ends; may be interrupted at any wait."""
        for number in itertools.count(1):
            if number % MESSAGES_AT_ONCE == 0:
                await trio.lowlevel.checkpoint()  # a flood takes turns, too
            message = decode_message(
                await self._framed.receive(limit_bytes=MAX_LINK_BYTES)
            )
            self._heard_at = trio.current_time()
            match message:
                case Goodbye():
                    self.has_goodbye = True
                    self.end(PeerLost(f"the peer said goodbye: {message.detail}"))
                    return
                case Ping():
                    self._say(Pong())
                case Pong():
                    pass
                case _:
                    if (rest := deliver(message)) is not None:
                        await rest
                        # Nobody has listened meanwhile: that was no silence.
                        self._heard_at = trio.current_time()
                        await trio.lowlevel.checkpoint_if_cancelled()

    async def _write(self) -> None:
        try:
            while self._queue or not self._is_closing:
                if not self._queue:
                    self._filled = trio.Event()
                    self._free_sends = SENDS_AT_ONCE
                    await self._filled.wait()
                else:
                    self._free_sends = 0
                    await self._send(self._take())
            self._flushed.set()
        except FerryError as error:
            error.peer = str(self.peer)
            self.end(error)

    async def _send(self, frames: bytes) -> None:
        """In pieces, so that a slow peer is told from one that reads nothing."""
        for first in range(0, len(frames), PIECE_BYTES):
            self._sending_at = trio.current_time()
            await self._framed.send_frames(frames[first : first + PIECE_BYTES])
        self._sending_at = None

    def _take(self) -> bytes:
        """What is to be sent next, whole messages."""
        taken: list[bytes] = []
        size = 0
        while self._queue and size < SEND_BYTES:
            taken.append(self._queue.popleft())
            size += len(taken[-1])
        self._queued_bytes -= size + FRAME_COST * len(taken)
        return b"".join(taken)

    def _look(self) -> float:
        """Ask a quiet peer whether it is there; end the link if it stays silent, or
        takes nothing of what we say. When to look again."""
        now, ends_at = trio.current_time(), self._ends_at()
        if now >= ends_at:
            what = "the peer read nothing"
            if now >= self._heard_at + self._silence_s:
                what = "nothing was heard of the peer"
            self.end(PeerLost(f"{what} for {self._silence_s} s", peer=str(self.peer)))
            return now
        quiet_at = self._heard_at + self._keepalive_s
        if now >= quiet_at:
            self._say(Ping())
            quiet_at = now + self._keepalive_s
        return min(quiet_at, ends_at)

    def _ends_at(self) -> float:
        """When it has been heard of for the last time for too long, as of now."""
        since = self._heard_at
        if self._sending_at is not None:
            since = min(since, self._sending_at)
        return since + self._silence_s

    def _say(self, message: Ping | Pong) -> None:
        with suppress(PeerLost):  # closing, or ended just now
            self.post(message)
