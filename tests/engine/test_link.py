"""The open link: order, bounds, and every way in which it ends."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import MisuseError, PeerLost, ProtocolViolation
from kvferry.engine.link import QUEUE_FRAMES, FramedStream, Link
from kvferry.protocol.framing import MAX_LINK_BYTES, encode_frame
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.link import (
    Goodbye,
    Renew,
    Renewed,
    decode_message,
    encode_message,
)

PEER = EngineKey("p", "1", Rank())


class Ends:
    """A link on one end of a pair of streams, and the bare other end."""

    def __init__(self, nursery) -> None:
        ours, self.theirs = trio.testing.memory_stream_pair()
        self.link = Link(FramedStream(ours), PEER)
        self.framed = FramedStream(self.theirs)
        self.heard = []
        self.ended = trio.Event()
        self.cause = None
        nursery.start_soon(self._run)

    async def _run(self) -> None:
        self.cause = await self.link.run(self.hear)
        self.ended.set()

    def hear(self, message) -> None:
        """What the link delivers to."""
        self.heard.append(message)


def renewed(number) -> Renewed:
    """A message that can be told from others."""
    return Renewed("r", number, 1.0)


async def test_messages_arrive_in_order_both_ways(autojump_clock) -> None:
    """In whatever pieces the stream hands them out."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        for number in range(50):
            ends.link.post(renewed(number))
        for number in range(50):
            assert decode_message(await ends.framed.receive()) == renewed(number)
        frames = b"".join(
            encode_frame(encode_message(renewed(n)), limit_bytes=999) for n in range(5)
        )
        for byte in frames:
            await ends.theirs.send_all(bytes([byte]))
        await trio.testing.wait_all_tasks_blocked()
        assert ends.heard == [renewed(number) for number in range(5)]
        assert ends.link.is_open
        nursery.cancel_scope.cancel()


async def test_a_peer_that_reads_nothing_ends_the_link(autojump_clock) -> None:
    """The queue is bounded: whoever fills it has lost the peer, at once and for good."""
    async with trio.open_nursery() as nursery:
        ours, _theirs = trio.testing.lockstep_stream_pair()
        link = Link(FramedStream(ours), PEER)
        ended = []

        async def run() -> None:
            ended.append(await link.run(lambda _message: None))

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(QUEUE_FRAMES + 1):  # one is with the stream
            link.post(renewed(number))
        with pytest.raises(PeerLost, match="does not read") as caught:
            link.post(renewed(QUEUE_FRAMES))
        assert caught.value.peer == str(PEER)
        assert not link.is_open
        with pytest.raises(PeerLost):
            link.post(renewed(0))
        await trio.testing.wait_all_tasks_blocked()
        assert "does not read" in str(ended[0])


async def test_a_goodbye_ends_the_link(autojump_clock) -> None:
    """With the other side's words as the cause; nothing behind it is heard."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        for message in (renewed(1), Goodbye("closing down"), renewed(2)):
            await ends.framed.send(encode_message(message))
        await ends.ended.wait()
    assert ends.heard == [renewed(1)]
    assert isinstance(ends.cause, PeerLost)
    assert "closing down" in str(ends.cause)
    assert not ends.link.is_open
    with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
        await ends.theirs.send_all(b"more")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x00\x00\x01\xc1",
        b"\x00\x00\x00\x00",
        (MAX_LINK_BYTES + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        encode_frame(encode_message(renewed(1))[:-1], limit_bytes=999),
        encode_frame(encode_message(renewed(1)) + b"\x00", limit_bytes=999),
    ],
)
async def test_garbage_ends_the_link(autojump_clock, garbage) -> None:
    """ProtocolViolation, naming the peer, without waiting for what was announced."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        await ends.theirs.send_all(garbage)
        await ends.ended.wait()
    assert isinstance(ends.cause, ProtocolViolation)
    assert ends.cause.peer == str(PEER)
    assert not ends.heard


@pytest.mark.parametrize("sent", range(1, 12, 3))
async def test_the_end_in_the_middle_of_a_frame(autojump_clock, sent) -> None:
    """Half a message is none."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        frame = encode_frame(encode_message(renewed(1)), limit_bytes=999)
        await ends.theirs.send_all(frame[:sent])
        await ends.theirs.aclose()
        await ends.ended.wait()
    assert isinstance(ends.cause, PeerLost)
    assert not ends.heard


@pytest.mark.parametrize("error", [ProtocolViolation, MisuseError, PeerLost])
async def test_an_error_of_the_owner_ends_the_link(autojump_clock, error) -> None:
    """Whatever FerryError `deliver` raises is the cause."""

    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)

        def refuse(_message) -> None:
            raise error("not from you")

        ends.hear = refuse
        await ends.framed.send(encode_message(renewed(1)))
        await ends.ended.wait()
    assert type(ends.cause) is error


async def test_close_sends_what_is_queued_first(autojump_clock) -> None:
    """Then a goodbye, then the end."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        for number in range(20):
            ends.link.post(renewed(number))
        await ends.link.close("done here", within_s=1.0)
        received = [decode_message(await ends.framed.receive()) for _ in range(21)]
        assert received[:20] == [renewed(number) for number in range(20)]
        assert received[20] == Goodbye("done here")
        with pytest.raises(PeerLost):
            await ends.framed.receive()
        await ends.ended.wait()
    with pytest.raises(PeerLost):
        ends.link.post(renewed(0))
    await ends.link.close("again", within_s=1.0)


async def test_close_gives_up_on_a_peer_that_does_not_read(autojump_clock) -> None:
    """Within its time."""
    async with trio.open_nursery() as nursery:
        ours, _theirs = trio.testing.lockstep_stream_pair()
        link = Link(FramedStream(ours), PEER)
        nursery.start_soon(link.run, lambda _message: None)
        link.post(renewed(1))
        started = trio.current_time()
        await link.close("done here", within_s=2.0)
        assert trio.current_time() - started == pytest.approx(2)


async def test_ended_before_it_ran(autojump_clock) -> None:
    """The first cause stays, and nothing is sent."""
    ours, theirs = trio.testing.memory_stream_pair()
    link = Link(FramedStream(ours), PEER)
    link.post(renewed(1))
    link.end(PeerLost("first"))
    link.end(PeerLost("second"))
    cause = await link.run(lambda _message: None)
    assert cause.detail == "first"
    assert await theirs.receive_some() == b""


async def test_cancelled_from_outside(autojump_clock) -> None:
    """The stream is closed, and later posts hear of it."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert not ends.link.is_open
    with pytest.raises(PeerLost):
        ends.link.post(Renew("r", "o", 1, (Rank(),)))
    assert await ends.theirs.receive_some() == b""
