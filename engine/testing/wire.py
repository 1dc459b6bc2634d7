"""`Wire`: the links of one host, late, doubled and broken as a schedule draws it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import trio

from kvferry.engine.streams import BoundListener, Streams

if TYPE_CHECKING:
    from kvferry.engine.fabric.memory_streams import MemoryListener, MemoryStream
    from kvferry.engine.testing.schedule import Schedule

__all__ = ("Wire",)


class Wire(Streams):
    """What one host dials and accepts on the schedule's streams."""

    def __init__(self, schedule: Schedule, name: str) -> None:
        self.schedule = schedule
        self.name = name
        self._open: dict[_WireStream, None] = {}
        self._ports: list[tuple[str, int]] = []
        self.is_dead = False
        self._flows = trio.Event()
        self._flows.set()

    async def dial(self, host: str, port: int) -> trio.abc.Stream:
        """Connect, or be refused."""
        await self.wait_flowing()
        what = f"{self.name} to {port}"
        if self.is_dead or self.schedule.happens("broken_dials", what):
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{what} is refused")
        return self.wrap(await self.schedule.streams.dial(host, port))

    async def listen(self, host: str, port: int) -> BoundListener:
        """Bind."""
        listener = await self.schedule.streams.listen(host, port)
        self._ports.append((listener.host, listener.port))
        return _WireListener(self, listener)

    def wrap(self, stream: MemoryStream) -> trio.abc.Stream:
        """Put a stream under the schedule."""
        wrapped = _WireStream(self, stream)
        self._open[wrapped] = None
        return wrapped

    def drop(self, stream: _WireStream) -> None:
        """Know a closed stream no more."""
        self._open.pop(stream, None)

    def cut(self) -> None:
        """Break one of the open streams."""
        streams = list(self._open)
        if streams:
            streams[self.schedule.draw(len(streams))].sever()

    def kill(self) -> None:
        """Break all streams, and open no more."""
        self.is_dead = True
        for port in self._ports:
            self.schedule.streams.kill(*port)
        for stream in list(self._open):
            stream.sever()
        self.thaw()

    def freeze(self) -> None:
        """Neither take nor send anything until `thaw`."""
        if self._flows.is_set():
            self._flows = trio.Event()

    def thaw(self) -> None:
        """Go on."""
        self._flows.set()

    async def wait_flowing(self) -> None:
        """Wait until it is not frozen."""
        while not self._flows.is_set():
            await self._flows.wait()


class _WireListener(BoundListener):
    def __init__(self, wire: Wire, listener: MemoryListener) -> None:
        self.host, self.port = listener.host, listener.port
        self._wire = wire
        self._listener = listener

    async def accept(self) -> trio.abc.Stream:
        try:
            return self._wire.wrap(await self._listener.accept())
        except trio.ClosedResourceError:
            if not self._wire.is_dead:
                raise
            # The dead hear nothing, not even that they are.
            await trio.sleep_forever()
            raise

    async def aclose(self) -> None:
        await self._listener.aclose()


class _WireStream(trio.abc.Stream):
    """One end of a link."""

    def __init__(self, wire: Wire, stream: MemoryStream) -> None:
        self._wire = wire
        self._stream = stream
        self._kept = b""  # until it is delivered: a cancellation loses nothing

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._wire.wait_flowing()
        await self._stream.send_all(data)
        if self._wire.schedule.happens("doubled_messages", f"from {self._wire.name}"):
            await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._wire.wait_flowing()
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._kept:
            self._kept = bytes(await self._stream.receive_some(max_bytes))
        what = f"to {self._wire.name}"
        if delay_s := self._wire.schedule.delay_s("late_messages", what):
            await trio.sleep(delay_s)
        await self._wire.wait_flowing()
        size = len(self._kept) if max_bytes is None else max_bytes
        piece, self._kept = self._kept[:size], self._kept[size:]
        return piece

    def sever(self) -> None:
        """End it for both sides, at once."""
        self._stream.send_stream._pipe.sever()
        self._stream.receive_stream._pipe.sever()

    async def aclose(self) -> None:
        self._wire.drop(self)
        await self._stream.aclose()
