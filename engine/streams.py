"""`Streams`: where links come from. TCP here; tests bring one on virtual time."""

from __future__ import annotations

import abc
import os

import trio

from kvferry.engine.addresses import is_literal

__all__ = ("BoundListener", "Streams", "TcpStreams", "send_nowait")


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


class TcpListener(BoundListener):
    """A bound TCP listener."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self._listener = listener
        self.host, self.port = listener.socket.getsockname()[:2]

    async def accept(self) -> trio.SocketStream:
        """Wait for the next connection."""
        return await self._listener.accept()

    async def aclose(self) -> None:
        """Stop listening."""
        await self._listener.aclose()


class TcpStreams(Streams):
    """Plain TCP."""

    async def dial(self, host: str, port: int) -> trio.SocketStream:
        """Connect, to whichever of the host's addresses answers first."""
        try:
            if is_literal(host):
                return await _connect(host, port)
            return await trio.open_tcp_stream(host, port)
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
    if not isinstance(stream, trio.SocketStream):
        return 0
    try:
        return os.write(stream.socket.fileno(), data)
    except OSError:
        return 0
