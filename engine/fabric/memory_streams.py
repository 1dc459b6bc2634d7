"""`MemoryStreams`: byte streams inside one process, for links without sockets.

Bounded like a socket's buffers, and it hands bytes out in pieces of any size:
whoever reads messages off it has to put them together. All streams of a
listener can be severed, frozen or killed at once.
"""

from __future__ import annotations

import errno
import operator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import trio

from kvferry.engine.streams import BoundListener, Streams
from kvferry.protocol.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ("MemoryListener", "MemoryStreams")

CHUNK_BYTES = 16384
CHUNKS = 4
"""With `CHUNK_BYTES` what one direction holds before its sender waits."""

BACKLOG = 64
"""Connections that a listener leaves unaccepted before it refuses more."""

FIRST_PORT = 40000


class _Pipe:
    """One direction of a stream: what its two halves and the network share."""

    def __init__(self) -> None:
        self.send, self.receive = trio.open_memory_channel[bytes](CHUNKS)
        self.is_severed = False
        self.is_over = False
        self._flows = trio.Event()
        self._flows.set()

    def freeze(self) -> None:
        if self._flows.is_set() and not self.is_severed:
            self._flows = trio.Event()

    def thaw(self) -> None:
        self._flows.set()

    def sever(self) -> None:
        """End it for both halves, also in the middle of a wait."""
        self.is_severed = self.is_over = True
        self.send.close()
        self.thaw()

    async def wait_flowing(self) -> None:
        # It may have been frozen anew before the waiting task came to run.
        while not self._flows.is_set():
            await self._flows.wait()


class _Half:
    """What both halves of a pipe have: they can be closed, and used by one task."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._is_busy = False
        self._is_closed = False

    @contextmanager
    def _use(self) -> Iterator[None]:
        if self._is_closed:
            raise trio.ClosedResourceError("this side of the stream is closed")
        if self._is_busy:
            raise trio.BusyResourceError("another task uses this side of the stream")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


class _SendHalf(_Half, trio.abc.SendStream):
    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        with self._use():
            for start in range(0, len(data), CHUNK_BYTES):
                await self._send(bytes(data[start : start + CHUNK_BYTES]))

    async def _send(self, chunk: bytes) -> None:
        try:
            await self._pipe.send.send(chunk)
        except trio.ClosedResourceError as exc:
            if self._is_closed:
                raise
            raise trio.BrokenResourceError("the stream was severed") from exc

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
        with self._use():
            return

    async def aclose(self) -> None:
        self._is_closed = True
        self._pipe.send.close()
        await trio.lowlevel.checkpoint()


class _ReceiveHalf(_Half, trio.abc.ReceiveStream):
    def __init__(self, pipe: _Pipe, rng: np.random.Generator | None) -> None:
        super().__init__(pipe)
        self._rng = rng
        self._rest = b""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        limit = CHUNK_BYTES if max_bytes is None else operator.index(max_bytes)
        if limit < 1:
            raise ValueError("max_bytes must be at least 1")
        await trio.lowlevel.checkpoint()
        with self._use():
            await self._fill()
        limit = min(limit, len(self._rest))
        if limit == 0 or self._pipe.is_severed:
            return b""
        size = limit
        if self._rng is not None:
            size = int(self._rng.integers(1, limit, endpoint=True))
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece

    async def _fill(self) -> None:
        """Have bytes that may be delivered, or none at the end."""
        if not self._rest:
            # Kept before the next wait, so that a cancellation loses nothing.
            with suppress(trio.EndOfChannel):
                self._rest = await self._pipe.receive.receive()
        await self._pipe.wait_flowing()

    async def aclose(self) -> None:
        self._is_closed = self._pipe.is_over = True
        self._pipe.receive.close()
        await trio.lowlevel.checkpoint()


MemoryStream = trio.StapledStream[_SendHalf, _ReceiveHalf]


@dataclass
class _Port:
    """An address: who listens there, and the streams that came through it."""

    connect: trio.MemorySendChannel[MemoryStream] | None = None
    is_frozen: bool = False
    pipes: list[_Pipe] = field(default_factory=list)

    def new_pipe(self) -> _Pipe:
        self.pipes = [pipe for pipe in self.pipes if not pipe.is_over]
        pipe = _Pipe()
        if self.is_frozen:
            pipe.freeze()
        self.pipes.append(pipe)
        return pipe


class MemoryListener(BoundListener):
    """Where others on the same `MemoryStreams` can dial."""

    def __init__(
        self, host: str, port: int, arrivals: trio.MemoryReceiveChannel[MemoryStream]
    ) -> None:
        self.host = host
        self.port = port
        self._arrivals = arrivals

    async def accept(self) -> MemoryStream:
        """Wait for the next connection.

        Raises:
            trio.ClosedResourceError: The listener is closed, or was killed.
        """
        try:
            return await self._arrivals.receive()
        except trio.EndOfChannel as exc:
            raise trio.ClosedResourceError("the listener was killed") from exc

    async def aclose(self) -> None:
        """Stop listening; streams that were accepted stay."""
        self._arrivals.close()
        await trio.lowlevel.checkpoint()


class MemoryStreams(Streams):
    """All addresses of one network.

    Args:
        seed: Of the sizes in which bytes are handed out; None hands them out as
            they were sent, which takes fewer steps.
    """

    def __init__(self, *, seed: int | None = 0) -> None:
        self._rng = None if seed is None else np.random.default_rng(seed)
        self._ports: dict[tuple[str, int], _Port] = {}
        self._next_port = FIRST_PORT

    async def dial(self, host: str, port: int) -> MemoryStream:
        """Connect; to a frozen listener too, as its kernel would answer."""
        await trio.lowlevel.checkpoint()
        at = self._ports.get((host, port), _Port())
        if at.connect is None:
            raise _refused(host, port)
        outward, homeward = at.new_pipe(), at.new_pipe()
        try:
            at.connect.send_nowait(self._stream(homeward, outward))
        except (trio.WouldBlock, trio.BrokenResourceError) as exc:
            raise _refused(host, port) from exc
        return self._stream(outward, homeward)

    async def listen(self, host: str, port: int) -> MemoryListener:
        """Bind; port 0 picks the next free one."""
        await trio.lowlevel.checkpoint()
        if port == 0:
            port = self._next_port
            self._next_port += 1
        at = self._ports.setdefault((host, port), _Port())
        if _is_bound(at):
            raise OSError(errno.EADDRINUSE, f"{host}:{port} is in use")
        at.connect, arrivals = trio.open_memory_channel[MemoryStream](BACKLOG)
        return MemoryListener(host, port, arrivals)

    def cut(self, host: str, port: int) -> None:
        """Sever all streams of a listener: reads see the end, writes are broken."""
        at = self._at(host, port)
        for pipe in at.pipes:
            pipe.sever()
        at.pipes.clear()

    def kill(self, host: str, port: int) -> None:
        """Cut, and refuse whoever dials until somebody listens there again."""
        self.cut(host, port)
        at = self._at(host, port)
        if at.connect is not None:
            at.connect.close()
            at.connect = None

    def freeze(self, host: str, port: int) -> None:
        """Deliver nothing, either way, until `thaw`; also on streams yet to come."""
        at = self._at(host, port)
        at.is_frozen = True
        for pipe in at.pipes:
            pipe.freeze()

    def thaw(self, host: str, port: int) -> None:
        """Deliver again, what was held back first."""
        at = self._at(host, port)
        at.is_frozen = False
        for pipe in at.pipes:
            pipe.thaw()

    def _at(self, host: str, port: int) -> _Port:
        try:
            return self._ports[host, port]
        except KeyError:
            raise MisuseError(f"nobody ever listened at {host}:{port}") from None

    def _stream(self, send: _Pipe, receive: _Pipe) -> MemoryStream:
        return trio.StapledStream(_SendHalf(send), _ReceiveHalf(receive, self._rng))


def _is_bound(at: _Port) -> bool:
    return at.connect is not None and (
        at.connect.statistics().open_receive_channels > 0
    )


def _refused(host: str, port: int) -> ConnectionRefusedError:
    return ConnectionRefusedError(
        errno.ECONNREFUSED, f"nobody listens at {host}:{port}"
    )
