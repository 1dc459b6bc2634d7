"""JSON lines over Unix sockets: how the processes of the example talk to each other.

A stack of its own has HTTP, ZMQ or whatever it likes here; nothing of kvferry's depends
on it. No secret passes, and no byte of a cache.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

__all__ = ("Line", "dial", "listen")

_DIAL_S = 90.0
_AGAIN_S = 0.05


class Line:
    """One connection. What is said to somebody who has gone is lost."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._heard = bytearray()
        self._turn = trio.Lock()

    async def say(self, **message: object) -> None:
        """Sends one message."""
        async with self._turn:
            try:
                await self._stream.send_all(json.dumps(message).encode() + b"\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return  # closed: whoever hears has noticed it before us

    async def hear(self) -> dict[str, Any] | None:
        """Waits for a message; None when the other side has gone."""
        try:
            while b"\n" not in self._heard:
                more = await self._stream.receive_some()
                if not more:
                    return None
                self._heard += more
        except trio.BrokenResourceError:
            return None
        line, _, self._heard = self._heard.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    async def aclose(self) -> None:
        """Ends the connection."""
        await self._stream.aclose()


async def dial(path: Path) -> Line:
    """Connects to whoever listens there, as soon as somebody does.

    Raises:
        TimeoutError: Nobody did.
    """
    with trio.move_on_after(_DIAL_S):
        while True:
            try:
                return Line(await trio.open_unix_socket(str(path)))
            except OSError:
                await trio.sleep(_AGAIN_S)
    raise TimeoutError(f"nobody listens at {path}")


async def listen(
    path: Path,
    serve: Callable[[Line], Awaitable[None]],
    *,
    task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves everybody who connects, until cancelled."""
    socket = trio.socket.socket(trio.socket.AF_UNIX)
    await socket.bind(str(path))
    socket.listen()
    await trio.serve_listeners(
        partial(_served, serve),
        [trio.SocketListener(socket)],
        task_status=task_status,
    )


async def _served(
    serve: Callable[[Line], Awaitable[None]], stream: trio.abc.Stream
) -> None:
    await serve(Line(stream))
