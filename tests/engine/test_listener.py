"""The handshake server: what strangers can do to it, and what they cannot."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import HandshakeRefused, OfferOutcome, PeerLost
from kvferry.engine.handshake import Credentials, greet
from kvferry.engine.link import FramedStream
from kvferry.protocol.handshake import Card, Hello, encode
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.link import (
    Confirmed,
    Decline,
    Goodbye,
    ReadFinished,
    Refused,
    RefusedReason,
    Renew,
    Renewed,
    decode_message,
    encode_message,
)
from kvferry.protocol.version import PROTOCOL_VERSION
from tests.kit import GROUP, IDENTITY, Pool, World, address, at_base

READER = EngineKey("c", "1", Rank())


async def connected(world, engine, *, secret=b"", key=READER) -> FramedStream:
    """A link to an engine, by hand."""
    card = Card(IDENTITY, Pool().cache.layout, b"")
    framed = FramedStream(await world.streams.dial(*address(engine)))
    await greet(framed, Credentials(key, card, secret, frozenset()), engine.key)
    return framed


async def ask(framed, message):
    """The answer to a message."""
    await framed.send(encode_message(message))
    return decode_message(await framed.receive())


async def test_silent_diallers_are_dropped(autojump_clock) -> None:
    """Each holds a place for no longer than the handshake may take."""
    world = World()
    async with world.engine("p", Pool(), handshake_timeout_s=3.0) as prefill:
        streams = [await world.streams.dial(*address(prefill)) for _ in range(20)]
        await trio.sleep(2.9)
        assert prefill._listener._serving == 20
        await trio.sleep(0.2)
        assert prefill._listener._serving == 0
        assert prefill.statistics()["handshakes_refused"] == 20
        for stream in streams:
            assert await stream.receive_some() == b""


async def test_no_more_links_than_allowed(autojump_clock) -> None:
    """One too many is hung up on at once; a place that is left can be taken."""
    world = World()
    async with world.engine("p", Pool(), max_links=3) as prefill:
        links = [
            await connected(world, prefill, key=EngineKey("c", str(i), Rank()))
            for i in range(3)
        ]
        with pytest.raises(PeerLost):
            await connected(world, prefill)
        await links[0].aclose()
        await trio.testing.wait_all_tasks_blocked()
        await connected(world, prefill, key=EngineKey("c", "3", Rank()))
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["links"] == 3


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x05hello",
        b"",
    ],
)
async def test_garbage_ends_that_dialler_alone(autojump_clock, garbage) -> None:
    """Others are served, and nothing is left of it."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        stream = await world.streams.dial(*address(prefill))
        if garbage:
            await stream.send_all(garbage)
        await stream.aclose()
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        await decode.pull(offer.ticket, {GROUP: [2]})
        assert prefill.statistics()["handshakes_refused"] == 1
        assert prefill.statistics()["links"] == 1
    assert not world.logged("internal_error")


async def test_what_only_a_producer_says_ends_the_link(autojump_clock) -> None:
    """A reader cannot confirm, refuse or renew itself."""
    world, producer = World(), Pool()
    async with world.engine("p", producer) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        for message in (
            Confirmed(prefill.key, "r", 0, 1),
            Renewed("r", 0, 99.0),
            Refused("r", 0, RefusedReason.SPENT),
        ):
            framed = await connected(world, prefill)
            await framed.send(encode_message(message))
            with pytest.raises(PeerLost):
                await framed.receive()
        assert offer.outcome is None
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["links"] == 0


async def test_each_question_has_its_answer(autojump_clock) -> None:
    """Renewed, confirmed, spent; unknown offers are refused and counted."""
    world, producer = World(), Pool()
    async with world.engine("p", producer) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        offer_id = offer.ticket.ranks[0].offer_id
        ranks = (Rank(),)
        framed = await connected(world, prefill)
        assert await ask(framed, Renew("r", offer_id, 5, ranks)) == Renewed(
            "r", 5, 30.0
        )
        for request, known in (("other", offer_id), ("r", "other")):
            for question in (
                Renew(request, known, 6, ranks),
                ReadFinished(request, known, 6),
            ):
                assert await ask(framed, question) == Refused(
                    request, 6, RefusedReason.UNKNOWN
                )
        # A decline of what nobody knows has no answer.
        await framed.send(encode_message(Decline("other", "other", ranks)))
        answer = await ask(framed, ReadFinished("r", offer_id, 7))
        assert answer == Confirmed(prefill.key, "r", 7, 1)
        assert prefill.statistics()["stray_messages"] == 5
        for question in (
            Renew("r", offer_id, 8, ranks),
            ReadFinished("r", offer_id, 8),
        ):
            assert await ask(framed, question) == Refused("r", 8, RefusedReason.SPENT)
        at_base(prefill)


async def test_a_second_instance_cannot_take_over_an_offer(autojump_clock) -> None:
    """Nor another start of the first reader."""
    world, producer = World(), Pool()
    async with world.engine("p", producer) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        offer_id = offer.ticket.ranks[0].offer_id
        first = await connected(world, prefill)
        await ask(first, Renew("r", offer_id, 0, (Rank(),)))
        for key in (EngineKey("d", "1", Rank()), EngineKey("c", "2", Rank())):
            other = await connected(world, prefill, key=key)
            for question in (
                Renew("r", offer_id, 0, (Rank(),)),
                ReadFinished("r", offer_id, 0),
            ):
                answer = await ask(other, question)
                assert answer == Refused("r", 0, RefusedReason.SPENT)
        assert offer.outcome is None
        answer = await ask(first, ReadFinished("r", offer_id, 0))
        assert isinstance(answer, Confirmed)
        assert offer.outcome is not None


@pytest.mark.parametrize("question", [Renew, ReadFinished])
async def test_a_producer_that_slept_past_the_lease_knows(
    autojump_clock, question
) -> None:
    """What it hears first after a pause is refused, before its own sweep has run."""
    world, producer = World(), Pool()
    async with world.engine("p", producer, lease_s=5.0) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        offer_id = offer.ticket.ranks[0].offer_id
        framed = await connected(world, prefill)
        await ask(framed, Renew("r", offer_id, 0, (Rank(),)))
        (link,) = prefill._listener._links
        readers = ((Rank(),),) if question is Renew else ()
        # No other task runs between these two lines.
        autojump_clock.jump(5.0)
        prefill._offers.handle(link, question("r", offer_id, 0, *readers))
        assert offer.outcome is OfferOutcome.EXPIRED
        answer = decode_message(await framed.receive())
        assert answer == Refused("r", 0, RefusedReason.EXPIRED)
        at_base(prefill)


async def test_a_closing_engine_says_goodbye(autojump_clock) -> None:
    """To everybody who has a link."""
    world = World()
    async with world.engine("p", Pool()) as prefill:
        links = [
            await connected(world, prefill, key=EngineKey("c", str(i), Rank()))
            for i in range(3)
        ]
    for framed in links:
        assert isinstance(decode_message(await framed.receive()), Goodbye)
        with pytest.raises(PeerLost):
            await framed.receive()


async def test_a_proof_cannot_be_played_back(autojump_clock) -> None:
    """A recorded handshake is worth nothing: the nonces are fresh."""
    world, producer = World(), Pool()
    recorded: list[bytes] = []

    class Recorder(FramedStream):
        async def send(self, payload, **limit) -> None:
            recorded.append(payload)
            await super().send(payload, **limit)

    async with world.engine("p", producer, secret=b"s") as prefill:
        framed = Recorder(await world.streams.dial(*address(prefill)))
        card = Card(IDENTITY, producer.cache.layout, b"")
        ours = Credentials(READER, card, b"s", frozenset())
        await greet(framed, ours, prefill.key)
        replay = FramedStream(await world.streams.dial(*address(prefill)))
        hello, introduction = recorded
        await replay.send(hello)
        await replay.receive()
        await replay.send(introduction, limit_bytes=2**24)
        refusal = await replay.receive(limit_bytes=2**24)
        assert b"secret" in refusal
        with pytest.raises(HandshakeRefused):
            await connected(world, prefill, secret=b"t")
        assert prefill.statistics()["links"] == 1
        with pytest.raises(PeerLost):
            await replay.receive()


async def test_two_hellos_are_no_handshake(autojump_clock) -> None:
    """The second is not an introduction."""
    world = World()
    async with world.engine("p", Pool()) as prefill:
        framed = FramedStream(await world.streams.dial(*address(prefill)))
        hello = encode(Hello(PROTOCOL_VERSION, READER, "p", bytes(32)))
        await framed.send(hello)
        await framed.receive()
        await framed.send(hello)
        with pytest.raises(PeerLost):
            await framed.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["links"] == 0
