"""`Streams`: where links come from. TCP here; tests bring one on virtual time."""

from __future__ import annotations

import abc
import os

import trio

from kvferry.engine.addresses import is_literal

__all__ = ("BoundListener", "Streams", "TcpStream", "TcpStreams", "send_nowait")

RECEIVE_BYTES = 64 * 1024
"""Taken from a socket at once."""


class BoundListener(trio.abc.Listener[trio.abc.Stream]):
    """A listener that knows where it can be reached.

    Attributes:
        host: The host it is bound to.
        port: The port it is bound to.
    """

    host: str
    port: int


class Streams(abc.ABC):
    """A way to dial and to listen."""

    @abc.abstractmethod
    async def dial(self, host: str, port: int) -> trio.abc.Stream:
        """Connect.

        Raises:
            OSError: Nobody answers there.
        """

    @abc.abstractmethod
    async def listen(self, host: str, port: int) -> BoundListener:
        """Bind; port 0 picks a free one.

        Raises:
            OSError: The address cannot be bound.
        """


class TcpStream(trio.abc.Stream):
    """A connection of trio's, with less to do for each message.

    Trio's own first tries whatever it is asked for, and lets all other tasks run when
    that went well. Whoever talks in turns mostly sends what the system takes at once,
    and then waits for an answer that cannot be there yet.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._socket = stream.socket

    def send_nowait(self, data: bytes) -> int:
        """See the function of this name."""
        try:
            return os.write(self._socket.fileno(), data)
        except OSError:
            return 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """As trio's."""
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """As trio's."""
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Wait for what comes next, and take it; empty at the end."""
        while self._socket.fileno() >= 0:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return os.read(self._socket.fileno(), max_bytes or RECEIVE_BYTES)
            except BlockingIOError:
                pass  # the kernel has thought better of it
            except OSError as exc:
                raise trio.BrokenResourceError(str(exc)) from exc
        raise trio.ClosedResourceError("this side has closed the connection")

    async def aclose(self) -> None:
        """As trio's."""
        await self._stream.aclose()


class TcpListener(BoundListener):
    """A bound TCP listener."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener
        self.host, self.port = listener.socket.getsockname()[:2]

    async def accept(self) -> TcpStream:
        """Wait for the next connection."""
        return TcpStream(await self._listener.accept())

    async def aclose(self) -> None:
        """Stop listening."""
        await self._listener.aclose()


class TcpStreams(Streams):
    """Plain TCP."""

    async def dial(self, host: str, port: int) -> TcpStream:
        """Connect, to whichever of the host's addresses answers first."""
        try:
            if is_literal(host):
                return TcpStream(await _connect(host, port))
            return TcpStream(await trio.open_tcp_stream(host, port))
        except ValueError as exc:
            # Not even a name; tickets bring what they like.
            raise OSError(f"{host!r} is not a host: {exc}") from exc

    async def listen(self, host: str, port: int) -> TcpListener:
        """Bind to the first address that the host resolves to."""
        first, *others = await trio.open_tcp_listeners(port, host=host)
        for other in others:
            await other.aclose()
        return TcpListener(first)


async def _connect(host: str, port: int) -> trio.SocketStream:
    """To the one address that there is: no tries to race, and no task for each."""
    family = trio.socket.AF_INET6 if ":" in host else trio.socket.AF_INET
    connection = trio.socket.socket(family)
    try:
        await connection.connect((host, port))
    except BaseException:
        connection.close()
        raise
    return trio.SocketStream(connection)


def send_nowait(stream: trio.abc.Stream, data: bytes) -> int:
    """Hand over what an idle stream takes at once; nobody may be in its `send_all`.

    Returns:
        How many bytes that are: 0 for a stream that cannot, such as an encrypted one, and
        for a broken one, which the next `send_all` tells.
    """
    return stream.send_nowait(data) if isinstance(stream, TcpStream) else 0
