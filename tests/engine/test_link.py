"""The open link: order, bounds, and every way in which it ends."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
import trio
import trio.testing

from kvferry.engine import MisuseError, PeerLost, ProtocolViolation
from kvferry.engine.link import (
    FRAME_COST,
    MESSAGES_AT_ONCE,
    SENDS_AT_ONCE,
    FramedStream,
    Link,
)
from kvferry.engine.streams import TcpStream
from kvferry.protocol.framing import MAX_LINK_BYTES, encode_frame
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.link import (
    Goodbye,
    Ping,
    Pong,
    Registered,
    Renew,
    decode_message,
    encode_message,
)

PEEK = socket.MSG_PEEK | socket.MSG_DONTWAIT
PEER = EngineKey("p", "1", Rank())


QUEUE_BYTES = 1000 * FRAME_COST
"""Fewer than so many messages fit."""


def linked(stream, *, keepalive_s=5.0, silence_s=20.0) -> Link:
    """A link over a stream."""
    return Link(
        FramedStream(stream),
        PEER,
        keepalive_s=keepalive_s,
        silence_s=silence_s,
        queue_bytes=QUEUE_BYTES,
    )


class Ends:
    """A link on one end of a pair of streams, and the bare other end."""

    def __init__(self, nursery) -> None:
        ours, self.theirs = trio.testing.memory_stream_pair()
        self.link = linked(ours)
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


def renewed(number) -> Registered:
    """A message that can be told from others."""
    return Registered("r", number)


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


async def test_what_takes_a_while_is_waited_for_before_the_next_message(
    autojump_clock,
) -> None:
    """And is not cut short when the link ends meanwhile."""
    heard, may_end = [], trio.Event()

    async def take_a_while() -> None:
        with trio.CancelScope(shield=True):
            await may_end.wait()
        heard.append("done")

    def hear(message):
        heard.append(message)
        return take_a_while() if message != renewed(0) else None

    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.memory_stream_pair()
        link = linked(ours)
        nursery.start_soon(link.run, hear)
        for number in range(3):
            frame = encode_frame(encode_message(renewed(number)), limit_bytes=999)
            await theirs.send_all(frame)
        await trio.testing.wait_all_tasks_blocked()
        assert heard == [renewed(0), renewed(1)]
        link.end(PeerLost("enough"))
        await trio.testing.wait_all_tasks_blocked()
        assert heard == [renewed(0), renewed(1)]
        may_end.set()
        await trio.testing.wait_all_tasks_blocked()
        assert heard == [renewed(0), renewed(1), "done"]


async def test_what_takes_longer_than_the_silence_is_none_of_the_peer_s(
    autojump_clock,
) -> None:
    """Nobody has listened meanwhile, nor before it ran: what it has said is heard then."""
    heard = []

    async def take_long() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(25.0)

    def hear(message):
        heard.append(message)
        return take_long() if message == renewed(0) else None

    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.memory_stream_pair()
        link = linked(ours)
        await trio.sleep(25.0)
        nursery.start_soon(link.run, hear)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(3):
            frame = encode_frame(encode_message(renewed(number)), limit_bytes=999)
            await theirs.send_all(frame)
        await trio.sleep(26.0)
        assert heard == [renewed(number) for number in range(3)]
        assert link.is_open
        await trio.sleep(25.0)
        assert not link.is_open
        nursery.cancel_scope.cancel()


async def test_a_peer_that_reads_nothing_ends_the_link(autojump_clock) -> None:
    """The queue is bounded: whoever fills it has lost the peer, at once and for good."""
    async with trio.open_nursery() as nursery:
        ours, _theirs = trio.testing.lockstep_stream_pair()
        link = linked(ours)
        ended = []

        async def run() -> None:
            ended.append(await link.run(lambda _message: None))

        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        posted = 0
        with pytest.raises(PeerLost, match="does not read") as caught:
            for number in range(1000):
                link.post(renewed(number))
                posted += 1
        assert posted > 500
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
        link = linked(ours)
        nursery.start_soon(link.run, lambda _message: None)
        link.post(renewed(1))
        started = trio.current_time()
        await link.close("done here", within_s=2.0)
        assert trio.current_time() - started == pytest.approx(2)


async def test_ended_before_it_ran(autojump_clock) -> None:
    """The first cause stays, and nothing is sent."""
    ours, theirs = trio.testing.memory_stream_pair()
    link = linked(ours)
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


async def test_a_link_is_two_tasks(autojump_clock) -> None:
    """One that reads, and looks whether the peer is there, and one that writes: there
    are hundreds of links."""
    async with trio.open_nursery() as nursery:
        Ends(nursery)
        await trio.testing.wait_all_tasks_blocked()
        (link,) = nursery.child_tasks
        assert [len(inner.child_tasks) for inner in link.child_nurseries] == [1]
        nursery.cancel_scope.cancel()


async def test_a_handshake_message_leaves_before_others_have_a_turn() -> None:
    """There is no round of the loop between what is said and the wait for an answer."""
    ours, theirs = trio.socket.socketpair()
    framed = FramedStream(TcpStream(trio.SocketStream(ours)))
    turns = []

    async def other() -> None:
        turns.append(len(os.read(theirs.fileno(), 1 << 20)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await framed.send(b"hello")
        await framed.send(b"again")
        assert not turns
    assert turns == [18]
    await framed.aclose()
    theirs.close()


# Silence.


async def heard_at(framed, started) -> tuple[object, float]:
    """The next message, and when it came."""
    message = decode_message(await framed.receive())
    return message, trio.current_time() - started


async def test_a_quiet_peer_is_asked_and_a_silent_one_is_gone(autojump_clock) -> None:
    """Asked after each 5 s of quiet, given up at 20 s to the moment."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        started = trio.current_time()
        for asked in (5, 10, 15):
            message, at = await heard_at(ends.framed, started)
            assert (message, at) == (Ping(), pytest.approx(asked))
        await ends.ended.wait()
        assert trio.current_time() - started == pytest.approx(20)
    assert isinstance(ends.cause, PeerLost)
    assert "nothing was heard of the peer for 20.0 s" in str(ends.cause)
    assert ends.cause.peer == str(PEER)


@pytest.mark.parametrize("word", [renewed(1), Ping(), Pong()], ids=repr)
async def test_any_word_breaks_the_silence(autojump_clock, word) -> None:
    """Every message counts, and only what is meant for the owner is delivered."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        for _ in range(10):
            await trio.sleep(19)
            await ends.framed.send(encode_message(word))
        started = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        assert ends.link.is_open
        assert ends.heard == ([word] * 10 if isinstance(word, Registered) else [])
        await ends.ended.wait()
        assert trio.current_time() - started == pytest.approx(20)


async def test_half_a_message_breaks_no_silence(autojump_clock) -> None:
    """A peer that drips bytes is not there."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        started = trio.current_time()
        frame = encode_frame(encode_message(Goodbye("x" * 99)), limit_bytes=999)
        with suppress(trio.BrokenResourceError):
            for byte in frame:
                await ends.theirs.send_all(bytes([byte]))
                await trio.sleep(1)
        assert "nothing was heard" in str(ends.cause)
        assert trio.current_time() - started == pytest.approx(20, abs=1)


async def test_a_question_is_answered_at_once(autojump_clock) -> None:
    """Once each, in order with everything else."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        started = trio.current_time()
        for number in range(3):
            ends.link.post(renewed(number))
            await ends.framed.send(encode_message(Ping()))
            assert (await heard_at(ends.framed, started))[0] == renewed(number)
            assert await heard_at(ends.framed, started) == (Pong(), 0)
        nursery.cancel_scope.cancel()


async def test_two_links_keep_each_other_alive(autojump_clock) -> None:
    """For an hour, and whatever the other's times are."""
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.memory_stream_pair()
        links = [linked(ours), linked(theirs, keepalive_s=1e6, silence_s=2e6)]
        for link in links:
            nursery.start_soon(link.run, lambda _message: pytest.fail("delivered"))
        await trio.sleep(3600)
        assert all(link.is_open for link in links)
        nursery.cancel_scope.cancel()


async def test_who_slept_first_reads_what_came_meanwhile(autojump_clock) -> None:
    """A process that was stopped past the silence does not blame its peers for it."""
    frame = encode_frame(encode_message(renewed(1)), limit_bytes=999)
    heard, links = [], []
    async with trio.open_nursery() as nursery:
        pairs = [socket.socketpair() for _ in range(2)]
        for ours, _theirs in pairs:
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            links.append(linked(TcpStream(stream)))
            nursery.start_soon(links[-1].run, heard.append)
        await trio.testing.wait_all_tasks_blocked()
        # Sockets, so that the bytes and the timers show in one and the same look
        # of the event loop, in any order: nothing runs between these lines.
        for number in range(1, 11):
            for _ours, theirs in pairs:
                theirs.sendall(frame)
            autojump_clock.jump(100.0)
            await trio.testing.wait_all_tasks_blocked()
            assert len(heard) == 2 * number
            assert all(link.is_open for link in links)
        nursery.cancel_scope.cancel()
    for _ours, theirs in pairs:
        theirs.close()


async def test_thousands_of_messages_at_once_are_no_silence_of_the_peer(
    autojump_clock,
) -> None:
    """They leave in few pieces, in order, and none is lost."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        await trio.testing.wait_all_tasks_blocked()
        link = Link(FramedStream(ends.theirs), PEER, keepalive_s=5.0, silence_s=20.0)
        nursery.start_soon(link.run, lambda _message: None)
        for number in range(20_000):
            link.post(renewed(number))
        await trio.testing.wait_all_tasks_blocked()
        assert ends.heard == [renewed(number) for number in range(20_000)]
        assert link.is_open
        nursery.cancel_scope.cancel()


async def test_a_flood_of_questions_ends_the_link(autojump_clock) -> None:
    """Who asks and does not read the answers fills the queue, and is gone."""
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.lockstep_stream_pair()
        ends = []
        question = encode_frame(encode_message(Ping()), limit_bytes=99)

        async def run() -> None:
            ends.append(await linked(ours).run(lambda _message: None))

        async def flood() -> None:
            with suppress(trio.BrokenResourceError):
                while True:
                    await theirs.send_all(question)

        nursery.start_soon(run)
        nursery.start_soon(flood)
    assert "does not read" in str(ends[0])


@pytest.mark.parametrize("is_full", [False, True])
async def test_close_does_not_outwait_the_link(autojump_clock, *, is_full) -> None:
    """It returns when the link ends, whatever ends it, and not after its whole time."""
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.lockstep_stream_pair()
        link = linked(ours)
        nursery.start_soon(link.run, lambda _message: None)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(500 if is_full else 1):
            link.post(renewed(number))
        started = trio.current_time()

        async def hang_up() -> None:
            await trio.sleep(1)
            await theirs.aclose()

        nursery.start_soon(hang_up)
        await link.close("done here", within_s=10.0)
        assert trio.current_time() - started == pytest.approx(1)


async def test_two_who_close_at_once_send_one_goodbye(autojump_clock) -> None:
    """The second waits for the first, and cuts nothing off."""
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.lockstep_stream_pair()
        link = linked(ours)
        nursery.start_soon(link.run, lambda _message: None)
        await trio.testing.wait_all_tasks_blocked()
        link.post(renewed(1))
        for why in ("first", "second"):
            nursery.start_soon(partial(link.close, why, within_s=5.0))
            await trio.testing.wait_all_tasks_blocked()
        framed = FramedStream(theirs)
        assert decode_message(await framed.receive()) == renewed(1)
        assert decode_message(await framed.receive()) == Goodbye("first")
        with pytest.raises(PeerLost):
            await framed.receive()


async def test_a_question_while_closing_is_harmless(autojump_clock) -> None:
    """Nothing is answered behind a goodbye, and the goodbye still leaves."""
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.lockstep_stream_pair()
        link = linked(ours)
        nursery.start_soon(link.run, lambda _message: None)
        link.post(renewed(1))
        nursery.start_soon(partial(link.close, "done", within_s=5.0))
        await trio.testing.wait_all_tasks_blocked()
        framed = FramedStream(theirs)
        await framed.send(encode_message(Ping()))
        assert decode_message(await framed.receive()) == renewed(1)
        assert decode_message(await framed.receive()) == Goodbye("done")


# Peers that hold a link without using it.


async def test_h1_a_peer_that_asks_and_never_reads_is_gone_after_the_silence(
    autojump_clock,
) -> None:
    """It is heard all the time, and still what we say does not reach it."""
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.lockstep_stream_pair()
        link, ends = linked(ours), []

        async def run() -> None:
            ends.append(await link.run(lambda _message: None))

        async def talk() -> None:
            with suppress(trio.BrokenResourceError):
                while True:
                    await theirs.send_all(
                        encode_frame(encode_message(Pong()), limit_bytes=99)
                    )
                    await trio.sleep(1)

        nursery.start_soon(run)
        nursery.start_soon(talk)
        await trio.sleep(50)
        assert link.is_open
        started = trio.current_time()
        link.post(renewed(1))
    assert 20 <= trio.current_time() - started <= 26
    assert "read nothing" in str(ends[0])


async def test_a_peer_that_reads_slowly_is_not_one_that_never_reads(
    autojump_clock,
) -> None:
    """A large message may take longer than the silence, if it moves."""
    async with trio.open_nursery() as nursery:
        ours, theirs = trio.testing.lockstep_stream_pair()
        link = Link(FramedStream(ours), PEER, keepalive_s=5.0, silence_s=20.0)
        nursery.start_soon(link.run, lambda _message: None)

        async def talk() -> None:
            while True:
                await theirs.send_all(
                    encode_frame(encode_message(Pong()), limit_bytes=99)
                )
                await trio.sleep(4)

        nursery.start_soon(talk)
        ranks = tuple(Rank(n, 1024) for n in range(1024))
        for number in range(30):
            link.post(Renew("r", "o", number, ranks))
        received = 0
        while received < 600_000:
            received += len(await theirs.receive_some(5_000))
            await trio.sleep(0.5)
        assert trio.current_time() > 40
        assert link.is_open
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("every_s", [0.5, 4.0])
async def test_h1_half_a_frame_a_byte_at_a_time_is_silence(
    autojump_clock, every_s
) -> None:
    """Only whole messages are a sign of life; what was buffered is a part of one."""
    async with trio.open_nursery() as nursery:
        ends = Ends(nursery)
        await ends.theirs.send_all(MAX_LINK_BYTES.to_bytes(4, "big"))
        started = trio.current_time()
        with suppress(trio.BrokenResourceError):
            while not ends.ended.is_set():
                await ends.theirs.send_all(b"\x00")
                await trio.sleep(every_s)
        assert 20 <= trio.current_time() - started <= 26
    assert "nothing was heard" in str(ends.cause)
    assert not ends.heard


async def test_h1_a_flood_of_messages_takes_turns_with_other_tasks(
    autojump_clock,
) -> None:
    """However many arrive in one piece, others run between them."""
    async with trio.open_nursery() as nursery:
        ends, turns = Ends(nursery), []
        frame = encode_frame(encode_message(renewed(1)), limit_bytes=99)

        async def other() -> None:
            while True:
                turns.append(len(ends.heard))
                await trio.lowlevel.checkpoint()

        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(other)
        await ends.theirs.send_all(frame * 5000)
        while len(ends.heard) < 5000:
            await trio.lowlevel.checkpoint()
        steps = [b - a for a, b in pairwise(turns)]
        assert max(steps) <= 2 * MESSAGES_AT_ONCE
        nursery.cancel_scope.cancel()


async def test_over_a_socket_a_message_leaves_before_the_loop_comes_round() -> None:
    """A few one by one; what follows in the same step leaves together, in its order."""
    ours, theirs = trio.socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    link, bare = linked(TcpStream(trio.SocketStream(ours))), theirs.fileno()
    heard = FramedStream(TcpStream(trio.SocketStream(theirs)))

    def waiting() -> int:
        with socket.socket(fileno=os.dup(bare)) as peeking:
            return len(peeking.recv(1 << 20, PEEK))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        first = encode_frame(encode_message(renewed(0)), limit_bytes=MAX_LINK_BYTES)
        for number in range(500):
            link.post(renewed(number))
            sent = min(number + 1, SENDS_AT_ONCE)
            assert waiting() == sent * len(first)
        for number in range(500):
            assert decode_message(await heard.receive()) == renewed(number)
        await trio.testing.wait_all_tasks_blocked()
        link.post(Renew("r", "o", 1, tuple(Rank(n, 1024) for n in range(1024))))
        link.post(renewed(500))  # while a part of it is still to be sent
        assert len(decode_message(await heard.receive()).readers) == 1024
        assert decode_message(await heard.receive()) == renewed(500)
        nursery.start_soon(partial(link.close, "over", within_s=1.0))
        assert isinstance(decode_message(await heard.receive()), Goodbye)
        await heard.aclose()


async def test_what_is_queued_leaves_with_the_next_message() -> None:
    """Or when it is asked for, or when the loop comes round."""
    ours, theirs = trio.socket.socketpair()
    link, heard = linked(TcpStream(trio.SocketStream(ours))), theirs.fileno()
    frame = encode_frame(encode_message(renewed(0)), limit_bytes=MAX_LINK_BYTES)

    def arrived() -> int:
        with suppress(BlockingIOError):
            return len(os.read(heard, 1 << 20)) // len(frame)
        return 0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, lambda _: None)
        await trio.testing.wait_all_tasks_blocked()
        link.queue(renewed(0))
        assert not arrived()
        link.post(renewed(1))
        assert arrived() == 2
        link.queue(renewed(2))
        link.flush()
        assert arrived() == 1
        link.flush()
        link.queue(renewed(3))
        assert not arrived()
        await trio.testing.wait_all_tasks_blocked()
        assert arrived() == 1
        nursery.cancel_scope.cancel()
    theirs.close()
