"""`MemoryStreams`: streams in memory that end, hang and split as sockets do."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine.fabric import MemoryStreams
from kvferry.protocol.errors import MisuseError


async def open_pair(streams: MemoryStreams, port: int = 0):
    listener = await streams.listen("host", port)
    ours = await streams.dial(listener.host, listener.port)
    return listener, ours, await listener.accept()


async def read_exactly(stream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await stream.receive_some(size - len(data))
        assert piece
        data += piece
    return data


async def read_all(stream) -> bytes:
    return b"".join([piece async for piece in stream])


async def test_streams_keep_the_contract_of_trio():
    """trio's own kit, over a small buffer as it wants."""
    streams = MemoryStreams()

    async def maker():
        _, ours, theirs = await open_pair(streams)
        return ours, theirs

    await trio.testing.check_two_way_stream(maker, None)


async def test_bytes_arrive_in_order_and_in_pieces(nursery):
    """More than fits the buffers; pieces of any size, none lost."""
    _, ours, theirs = await open_pair(MemoryStreams())
    data = bytes(range(256)) * 1000

    async def send():
        await ours.send_all(data)
        await ours.send_eof()

    nursery.start_soon(send)
    pieces = [piece async for piece in theirs]
    assert b"".join(pieces) == data
    assert len({len(piece) for piece in pieces}) > 5


async def test_a_sender_waits_for_a_slow_reader():
    """Buffers are bounded; another task that sends meanwhile is told."""
    _, ours, theirs = await open_pair(MemoryStreams())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.send_all, bytes(1 << 20))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await ours.send_all(b"x")
        await read_exactly(theirs, 1 << 20)


async def test_ports_are_given_out_and_not_shared():
    """Port 0 is the next free one; a bound one is refused until it is closed."""
    streams = MemoryStreams()
    first, second = await streams.listen("a", 0), await streams.listen("a", 0)
    assert first.port != second.port
    with pytest.raises(OSError, match="in use"):
        await streams.listen("a", first.port)
    await first.aclose()
    again = await streams.listen("a", first.port)
    assert again.port == first.port


async def test_dialling_nobody_is_refused():
    """Never bound, closed, killed, or with a full backlog."""
    streams = MemoryStreams()
    with pytest.raises(OSError, match="nobody"):
        await streams.dial("host", 1)
    closed, killed = await streams.listen("host", 1), await streams.listen("host", 2)
    await closed.aclose()
    streams.kill("host", 2)
    streams.kill("host", 2)
    full = await streams.listen("host", 3)
    for _ in range(64):
        await streams.dial("host", full.port)
    for port in (1, 2, 3):
        with pytest.raises(OSError, match="nobody"):
            await streams.dial("host", port)
    with pytest.raises(trio.ClosedResourceError):
        await killed.accept()
    await streams.listen("host", 2)
    await streams.dial("host", 2)


async def test_cut_ends_both_ends(nursery):
    """Also for a reader and a writer that wait; what was under way is lost."""
    streams = MemoryStreams()
    listener, ours, theirs = await open_pair(streams)
    await theirs.send_all(b"never read")
    broken = trio.Event()

    async def write():
        with pytest.raises(trio.BrokenResourceError):
            await ours.send_all(bytes(1 << 20))
        broken.set()

    nursery.start_soon(write)
    await trio.testing.wait_all_tasks_blocked()
    streams.cut(listener.host, listener.port)
    await broken.wait()
    for end in (ours, theirs):
        assert await end.receive_some() == b""
        with pytest.raises(trio.BrokenResourceError):
            await end.send_all(b"x")
    fresh = await streams.dial(listener.host, listener.port)
    await fresh.send_all(b"ok")
    assert await read_exactly(await listener.accept(), 2) == b"ok"


async def test_frozen_bytes_come_when_thawed(autojump_clock):
    """Either way, on old streams and on new ones; cancelling a read loses nothing."""
    streams = MemoryStreams()
    listener, ours, theirs = await open_pair(streams)
    streams.freeze(listener.host, listener.port)
    late = await streams.dial(listener.host, listener.port)
    for stream in (ours, theirs, late):
        await stream.send_all(b"hello")
    late_theirs = await listener.accept()
    for stream in (ours, theirs, late_theirs):
        with trio.move_on_after(5) as scope:
            await stream.receive_some()
        assert scope.cancelled_caught
    streams.thaw(listener.host, listener.port)
    for stream in (ours, theirs, late_theirs):
        assert await read_exactly(stream, 5) == b"hello"


async def test_a_cut_reaches_a_frozen_reader(nursery):
    """A reset is no data: it need not wait for the thaw."""
    streams = MemoryStreams()
    listener, ours, theirs = await open_pair(streams)
    streams.freeze(listener.host, listener.port)
    await ours.send_all(b"hello")
    seen = []

    async def read():
        seen.append(await theirs.receive_some())

    nursery.start_soon(read)
    await trio.testing.wait_all_tasks_blocked()
    streams.cut(listener.host, listener.port)
    await trio.testing.wait_all_tasks_blocked()
    assert seen == [b""]


async def test_faults_of_nobody_are_refused():
    """A fault that hits nobody is a mistake of the test."""
    streams = MemoryStreams()
    for method in (streams.cut, streams.kill, streams.freeze, streams.thaw):
        with pytest.raises(MisuseError, match="nobody"):
            method("host", 1)
