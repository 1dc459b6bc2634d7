"""The handshake server: what strangers can do to it, and what they cannot."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest
import trio
import trio.testing

from kvferry.engine import (
    HandshakeRefused,
    OfferOutcome,
    PeerLost,
    ProtocolViolation,
    WrongPeer,
    handshake,
)
from kvferry.engine.fabric import MemoryStreams
from kvferry.engine.handshake import Credentials, call, greet
from kvferry.engine.link import FramedStream
from kvferry.engine.streams import BoundListener
from kvferry.protocol.framing import MAX_CARD_BYTES, encode_frame
from kvferry.protocol.handshake import (
    Card,
    Hello,
    Purpose,
    Refusal,
    RefusalReason,
    Role,
    Transcript,
    encode,
    encode_card,
)
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.link import (
    Confirmed,
    Decline,
    Goodbye,
    ReadFinished,
    Refused,
    RefusedReason,
    Registered,
    Renew,
    decode_message,
    encode_message,
)
from kvferry.protocol.version import PROTOCOL_VERSION
from tests.kit import GROUP, IDENTITY, Impostor, Pool, World, address, at_base

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
        assert len(prefill._listener._diallers) == 20
        await trio.sleep(0.2)
        assert len(prefill._listener._diallers) == 0
        assert prefill.statistics()["handshakes_refused"] == 20
        for stream in streams:
            assert await stream.receive_some() == b""


async def test_no_more_links_than_allowed(autojump_clock) -> None:
    """One too many hears that we are busy; a place that is left can be taken."""
    world = World()
    async with world.engine("p", Pool(), max_links=3) as prefill:
        links = [
            await connected(world, prefill, key=EngineKey("c", str(i), Rank()))
            for i in range(3)
        ]
        with pytest.raises(HandshakeRefused, match="busy"):
            await connected(world, prefill)
        await links[0].aclose()
        await trio.testing.wait_all_tasks_blocked()
        another = EngineKey("c", "another", Rank())
        await connected(world, prefill, key=another)
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
            Registered("r", 0),
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
    """Confirmed, spent; unknown offers are refused and counted; a renewal has none."""
    world, producer = World(), Pool()
    async with world.engine("p", producer) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        offer_id = offer.ticket.ranks[0].offer_id
        ranks = (Rank(),)
        framed = await connected(world, prefill)
        await framed.send(encode_message(Renew("r", offer_id, 5, ranks)))
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
        prefill._offers.on_message(link, question("r", offer_id, 0, *readers))
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


async def test_a_card_is_encoded_once_for_everybody(
    autojump_clock, monkeypatch
) -> None:
    """It is the same for each peer, and tens of kilobytes."""
    encoded: list[Card] = []

    def counting(card: Card) -> bytes:
        encoded.append(card)
        return encode_card(card)

    monkeypatch.setattr(handshake, "encode_card", counting)
    world = World()
    async with world.engine("p", Pool()) as prefill:
        for n in range(3):
            await connected(world, prefill, key=EngineKey(f"c{n}", "1", Rank()))
        assert prefill.statistics()["links"] == 3
    its_own = [card for card in encoded if card.metadata]  # the others have none
    assert len(its_own) == 1


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
        hello, proof, _ = recorded
        await replay.send(hello)
        await replay.receive()
        await replay.send(proof)
        refusal = await replay.receive()
        assert b"secret" in refusal
        with pytest.raises(HandshakeRefused):
            await connected(world, prefill, secret=b"t")
        assert prefill.statistics()["links"] == 1
        with pytest.raises(PeerLost):
            await replay.receive()


async def test_two_hellos_are_no_handshake(autojump_clock) -> None:
    """The second is not a proof."""
    world = World()
    async with world.engine("p", Pool()) as prefill:
        framed = FramedStream(await world.streams.dial(*address(prefill)))
        hello = encode(Hello(PROTOCOL_VERSION, READER, "p", Purpose.LINK, bytes(32)))
        await framed.send(hello)
        await framed.receive()
        await framed.send(hello)
        with pytest.raises(PeerLost):
            await framed.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["links"] == 0


# Bounds, and what the network does to a listener.


async def test_strangers_do_not_take_the_places_of_links(autojump_clock) -> None:
    """As many as may introduce themselves at once do nothing; links go on, others wait."""
    world, producer, consumer = World(), Pool(), Pool()
    config = {"max_diallers": 4, "max_links": 2, "handshake_timeout_s": 3.0}
    async with (
        world.engine("p", producer, **config) as prefill,
        world.engine("c", consumer, redial_s=0.1) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        await decode.pull(offer.ticket, {GROUP: [2]})
        for _ in range(4):
            await world.streams.dial(*address(prefill))
        await trio.testing.wait_all_tasks_blocked()
        assert len(prefill._listener._diallers) == 4
        with pytest.raises(HandshakeRefused, match="busy"):
            await connected(world, prefill)
        # Who is there is served.
        offer = prefill.offer("s", producer.stamp([1], num_tokens=4), num_tokens=4)
        await decode.pull(offer.ticket, {GROUP: [3]})
        await trio.sleep(3.1)
        await connected(world, prefill)
        assert prefill.statistics()["links"] == 2


async def test_a_crowd_of_strangers_is_hung_up_on(autojump_clock) -> None:
    """Also those that only have to hear that there is no place are bounded."""
    world = World()
    async with world.engine("p", Pool(), max_diallers=5) as prefill:
        streams = [await world.streams.dial(*address(prefill)) for _ in range(40)]
        await trio.testing.wait_all_tasks_blocked()
        listener = prefill._listener
        assert (len(listener._diallers), listener._turned_away) == (5, 5)
        assert prefill.statistics()["handshakes_refused"] == 30
        for stream in streams[10:]:
            assert await stream.receive_some() == b""
        await trio.sleep(1.1)
        assert (len(listener._diallers), listener._turned_away) == (5, 0)
        await trio.sleep(10)
        assert prefill.statistics()["handshakes_refused"] == 40
        assert not listener._admitted


async def test_h1_those_who_hold_places_by_saying_nothing_make_room(
    autojump_clock,
) -> None:
    """All places are taken anew all the time, a byte comes now and then: who has
    something to say gets in at once, once the oldest has had a second."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        world.engine("p", producer, max_diallers=4) as prefill,
        world.engine("c", consumer, redial_s=0.05) as decode,
        trio.open_nursery() as nursery,
    ):

        async def hold() -> None:
            while True:
                stream = await world.streams.dial(*address(prefill))
                with suppress(trio.BrokenResourceError):
                    await stream.send_all((60_000).to_bytes(4, "big"))
                    while True:
                        await stream.send_all(b"\x00")
                        await trio.sleep(0.1)

        for _ in range(4):
            nursery.start_soon(hold)
        await trio.sleep(1.1)
        assert len(prefill._listener._diallers) == 4
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        await decode.pull(offer.ticket, {GROUP: [2]})
        assert trio.current_time() < 60
        nursery.cancel_scope.cancel()
    assert any("too long" in e["error"] for e in world.logged("handshake_failed"))


@pytest.mark.parametrize("sent", [0, 3, 4, 60])
async def test_h1_a_byte_at_a_time_does_not_prolong_a_handshake(
    autojump_clock, sent
) -> None:
    """The time is that of the whole, in whichever of its messages."""
    world = World()
    async with world.engine("p", Pool(), handshake_timeout_s=3.0) as prefill:
        stream = await world.streams.dial(*address(prefill))
        hello = encode(Hello(PROTOCOL_VERSION, READER, "p", Purpose.LINK, bytes(32)))
        frame = encode_frame(hello, limit_bytes=9999)
        await stream.send_all(frame[:sent])
        started = trio.current_time()
        with suppress(trio.BrokenResourceError):
            for byte in frame[sent : sent + 60]:
                await stream.send_all(bytes([byte]))
                await trio.sleep(0.2)
        assert trio.current_time() - started <= 3.3
        assert len(prefill._listener._diallers) == 0
        assert await stream.receive_some() == b""


async def test_h1_a_storm_of_diallers_is_few_lines_of_the_log(autojump_clock) -> None:
    """Each is counted; that there were more is said with the next."""
    world = World()
    async with world.engine("p", Pool()) as prefill:
        for _ in range(500):
            stream = await world.streams.dial(*address(prefill))
            await stream.send_all(b"\xff\xff\xff\xff")
            await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["handshakes_refused"] == 500
        assert len(world.logged("handshake_failed")) <= 20


async def test_a_dialler_that_hangs_up_when_admitted_leaves_no_trace(
    autojump_clock,
) -> None:
    """Its place is free again."""
    world, producer = World(), Pool()
    async with world.engine("p", producer, max_links=1) as prefill:
        for number in range(3):
            key = EngineKey("c", str(number), Rank())
            framed = await connected(world, prefill, key=key)
            await framed.aclose()
            await trio.testing.wait_all_tasks_blocked()
        assert not prefill._listener._admitted
        assert prefill.statistics()["links"] == 0


async def test_a_closing_listener_says_so(autojump_clock) -> None:
    """Whoever dials while the engine drains hears why it is turned away."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        prefill._listener._is_closing = True
        with pytest.raises(HandshakeRefused, match="closing"):
            await decode.pull(offer.ticket, {GROUP: [2]})
        prefill._listener._is_closing = False
        offer.withdraw()


async def test_closing_while_somebody_introduces_itself(autojump_clock) -> None:
    """It is not let in behind the goodbyes."""
    world, producer = World(), Pool()
    async with world.engine("p", producer) as prefill:
        framed = FramedStream(await world.streams.dial(*address(prefill)))
        mine = encode(Hello(PROTOCOL_VERSION, READER, "p", Purpose.LINK, bytes(32)))
        await framed.send(mine)
        theirs = await framed.receive()
        transcript = Transcript(b"", (mine, theirs))
        await framed.send(transcript.proof(Role.DIALLER))
        transcript.check_proof(await framed.receive(), Role.LISTENER)
        prefill._listener._is_closing = True
        card = encode_card(Card(IDENTITY, producer.cache.layout, b""))
        await framed.send(
            transcript.introduction(card, Role.DIALLER), limit_bytes=MAX_CARD_BYTES
        )
        refusal = await framed.receive(limit_bytes=MAX_CARD_BYTES)
        with pytest.raises(HandshakeRefused, match="closing"):
            transcript.body(refusal, Role.LISTENER)
        assert prefill.statistics()["links"] == 0


# The order of the handshake: who shows what to whom, and when.


def by_hand(purpose: Purpose = Purpose.LINK) -> bytes:
    """A dialler's hello."""
    return encode(Hello(PROTOCOL_VERSION, READER, "p", purpose, bytes(32)))


async def test_h1_a_large_frame_before_a_proof_is_not_buffered(autojump_clock) -> None:
    """Its header is enough to hang up, in the place of the hello and of the proof."""
    world = World()
    header = MAX_CARD_BYTES.to_bytes(4, "big")
    async with world.engine("p", Pool(), secret=b"s") as prefill:
        for hellos in ((), (by_hand(),)):
            stream = await world.streams.dial(*address(prefill))
            framed = FramedStream(stream)
            for hello in hellos:
                await framed.send(hello)
                await framed.receive()
            await stream.send_all(header)
            await trio.testing.wait_all_tasks_blocked()
            assert len(prefill._listener._diallers) == 0
            assert await stream.receive_some() == b""
        errors = [entry["error"] for entry in world.logged("handshake_failed")]
        assert len(errors) == 2
        assert all("over the limit" in error for error in errors)


async def test_h1_a_large_frame_before_the_listeners_proof_is_not_buffered(
    autojump_clock,
) -> None:
    """Nor does a dialler take one from somebody who has not proved the secret."""
    world, pool = World(), Pool()
    impostor = Impostor(world, pool)

    async def script(stream) -> None:
        framed = FramedStream(stream)
        await framed.receive()
        nonce = bytes(32)
        await framed.send(
            encode(Hello(PROTOCOL_VERSION, impostor.key, "", Purpose.LINK, nonce))
        )
        await framed.receive()
        await stream.send_all(MAX_CARD_BYTES.to_bytes(4, "big"))
        await trio.sleep_forever()

    async with world.engine("c", Pool()) as decode, trio.open_nursery() as nursery:
        await nursery.start(impostor.serve, script)
        with pytest.raises(ProtocolViolation, match="over the limit"):
            await decode.pull(impostor.ticket("r", [1], 4), {GROUP: [2]})
        nursery.cancel_scope.cancel()


async def test_h1_nobody_is_shown_a_card_who_has_not_proved_the_secret(
    autojump_clock,
) -> None:
    """Metadata opens memory: a dialler keeps its own until the listener has proved."""
    world, pool = World(), Pool()
    impostor = Impostor(world, pool)
    heard: list[bytes] = []

    async def script(stream) -> None:
        framed = FramedStream(stream)
        theirs = await framed.receive()
        nonce = bytes(32)
        mine = encode(Hello(PROTOCOL_VERSION, impostor.key, "", Purpose.LINK, nonce))
        await framed.send(mine)
        heard.append(await framed.receive())
        await framed.send(Transcript(b"guess", (theirs, mine)).proof(Role.LISTENER))
        heard.append(await framed.receive(limit_bytes=MAX_CARD_BYTES))

    async with world.engine("c", Pool()) as decode, trio.open_nursery() as nursery:
        await nursery.start(impostor.serve, script)
        with pytest.raises(HandshakeRefused, match="secret"):
            await decode.pull(impostor.ticket("r", [1], 4), {GROUP: [2]})
        nursery.cancel_scope.cancel()
    assert len(heard) == 1


@pytest.mark.parametrize("theirs", [b"t", b"", b"s\x00"], ids=repr)
async def test_h1_a_dialler_with_another_secret_hears_no_proof(
    autojump_clock, theirs
) -> None:
    """It is told why, typed, and nothing of ours that it could try secrets on."""
    world = World()
    async with world.engine("p", Pool(), secret=b"s") as prefill:
        framed = FramedStream(await world.streams.dial(*address(prefill)))
        mine = by_hand()
        await framed.send(mine)
        transcript = Transcript(theirs, (mine, await framed.receive()))
        await framed.send(transcript.proof(Role.DIALLER))
        with pytest.raises(HandshakeRefused, match="secret") as caught:
            transcript.check_proof(await framed.receive(), Role.LISTENER)
        assert caught.value.reason == "secret"
        with pytest.raises(PeerLost):
            await framed.receive()


# What diallers come for.


class Instance:
    """Takes joins and questions, and writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []
        self.says: bytes | Refusal = b"manifest"

    def enrol(self, key, body) -> bytes | Refusal:
        self.heard.append(("enrol", key, body))
        return self.says

    def describe(self, key, body) -> bytes | Refusal:
        self.heard.append(("describe", key, body))
        return self.says

    def on_open(self, link, body) -> None:
        self.heard.append(("open", link.peer, body))

    def on_message(self, link, message) -> None:
        self.heard.append(("message", link.peer, message))

    def on_end(self, link, cause) -> None:
        self.heard.append(("end", link.peer, type(cause)))


async def come(
    world, engine, purpose, body=b"body", *, wanted=None
) -> tuple[FramedStream, bytes]:
    """A dialler that comes for something; its stream, and what it is answered."""
    ours = Credentials(
        READER, Card(IDENTITY, Pool().cache.layout, b""), b"", frozenset()
    )
    framed = FramedStream(await world.streams.dial(*address(engine)))
    key, answer = await call(
        framed, ours, wanted or engine.key.engine_id, purpose, body, decode=bytes
    )
    assert key == engine.key
    return framed, answer


async def test_who_asks_is_answered_and_has_no_link(autojump_clock) -> None:
    """One question, one answer; then the stream is closed."""
    world, instance = World(), Instance()
    async with world.engine("p", Pool(), max_links=1) as prefill:
        prefill._listener._instance = instance
        await connected(world, prefill)  # asking needs no link's place
        framed, answer = await come(world, prefill, Purpose.ASK, b"")
        assert answer == b"manifest"
        with pytest.raises(PeerLost):
            await framed.receive()
        assert instance.heard == [("describe", READER, b"")]
        assert prefill.statistics()["links"] == 1


async def test_who_joins_keeps_a_link(autojump_clock) -> None:
    """The service hears of it from beginning to end."""
    world, instance = World(), Instance()
    async with world.engine("p", Pool()) as prefill:
        prefill._listener._instance = instance
        framed, answer = await come(world, prefill, Purpose.JOIN)
        assert answer == b"manifest"
        await framed.send(encode_message(Registered("r", 0)))
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["links"] == 1
        await framed.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["links"] == 0
    assert instance.heard == [
        ("enrol", READER, b"body"),
        ("open", READER, b"body"),
        ("message", READER, Registered("r", 0)),
        ("end", READER, PeerLost),
    ]


@pytest.mark.parametrize("purpose", [Purpose.JOIN, Purpose.ASK])
async def test_an_instance_may_refuse(autojump_clock, purpose) -> None:
    """The dialler hears the reason and the words."""
    world, instance = World(), Instance()
    instance.says = Refusal(RefusalReason.INCOMPLETE, "tp 1 is missing")
    async with world.engine("p", Pool()) as prefill:
        prefill._listener._instance = instance
        with pytest.raises(HandshakeRefused, match="tp 1 is missing") as caught:
            await come(world, prefill, purpose)
        assert caught.value.reason == "incomplete"
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["links"] == 0
        assert prefill.statistics()["handshakes_refused"] == 1
        assert len(instance.heard) == 1


async def test_a_join_needs_a_links_place(autojump_clock) -> None:
    """There is no more than `max_links` of both kinds."""
    world, instance = World(), Instance()
    async with world.engine("p", Pool(), max_links=1) as prefill:
        prefill._listener._instance = instance
        await come(world, prefill, Purpose.JOIN)
        with pytest.raises(HandshakeRefused, match="busy"):
            await come(world, prefill, Purpose.JOIN)
        with pytest.raises(HandshakeRefused, match="busy"):
            await connected(world, prefill)
        assert instance.heard[-1][0] == "enrol"


async def test_a_reception_that_raises_ends_that_dialler_alone(autojump_clock) -> None:
    """A body that is none is nonsense of one dialler."""
    world, instance = World(), Instance()

    def enrol(key, body) -> bytes:
        raise ProtocolViolation("no enrolment")

    instance.enrol = enrol
    async with world.engine("p", Pool()) as prefill:
        prefill._listener._instance = instance
        with pytest.raises(PeerLost):
            await come(world, prefill, Purpose.JOIN)
        await connected(world, prefill)
        assert prefill.statistics()["links"] == 1


@pytest.mark.parametrize("wanted", ["q", EngineKey("p", "another", Rank())], ids=str)
async def test_who_calls_for_another_is_told(autojump_clock, wanted) -> None:
    """By the listener if the engine is another, by itself if the start is."""
    world, instance = World(), Instance()
    async with world.engine("p", Pool()) as prefill:
        prefill._listener._instance = instance
        with pytest.raises((HandshakeRefused, WrongPeer)):
            await come(world, prefill, Purpose.ASK, wanted=wanted)
        assert not instance.heard


class Faulty(BoundListener):
    """A listener whose accept fails now and then."""

    host, port = "127.0.0.1", 7

    def __init__(self, *errors) -> None:
        self.errors = list(errors)
        self.accepts = 0

    async def accept(self):
        """The next error; then nobody comes any more."""
        self.accepts += 1
        if self.errors:
            raise self.errors.pop(0)
        await trio.sleep_forever()

    async def aclose(self) -> None:
        """Nothing to close."""


class FaultyStreams(MemoryStreams):
    """A network with a bad listener."""

    def __init__(self, listener) -> None:
        super().__init__()
        self.listener = listener

    async def listen(self, host, port):  # noqa: ARG002 - there is one
        """The bad one."""
        return self.listener


@pytest.mark.parametrize(
    ("error", "accepts", "event"),
    [
        (OSError(errno.EMFILE, "too many open files"), 4, "accept_failed"),
        (trio.ClosedResourceError("gone"), 1, "listener_lost"),
        (ValueError("a bug"), 1, "listener_lost"),
    ],
    ids=lambda x: type(x).__name__,
)
async def test_a_failing_accept_does_not_end_the_engine(
    autojump_clock, error, accepts, event
) -> None:
    """Out of file descriptors it tries again; whatever else, it says so and lives on."""
    world, producer, consumer = World(), Pool(), Pool()
    faulty = Faulty(error, error, error)
    async with world.engine("p", producer) as prefill:
        good, world.streams = world.streams, FaultyStreams(faulty)
        async with world.engine("c", consumer) as decode:
            decode._peers.dials._streams = good
            await trio.sleep(5)
            assert faulty.accepts == accepts
            offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
            await decode.pull(offer.ticket, {GROUP: [2]})
    consumer.check([2], num_tokens=4)
    assert len(world.logged(event)) == (3 if event == "accept_failed" else 1)


class Service:
    """Hears of links, and writes it down."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []

    def on_open(self, link, card) -> None:
        """A beginning."""
        self.heard.append(("open", link.peer, card))

    def on_message(self, link, message) -> None:
        """A message."""
        self.heard.append(("message", link.peer, message))

    def on_end(self, link, cause) -> None:
        """An end."""
        self.heard.append(("end", link.peer, type(cause)))


@pytest.mark.parametrize(
    "how", ["closes", "goodbye", "nonsense", "silent", "cancelled"]
)
async def test_a_service_hears_of_each_link_from_beginning_to_end(
    autojump_clock, how
) -> None:
    """Once each, whatever the end was, and with the card that was shown."""
    world = World()
    service = Service()
    async with world.engine("p", Pool(), silence_s=6.0) as prefill:
        prefill._listener._service = service
        framed = await connected(world, prefill)
        await framed.send(encode_message(Registered("r", 0)))
        await trio.testing.wait_all_tasks_blocked()
        if how == "closes":
            await framed.aclose()
        elif how == "goodbye":
            await framed.send(encode_message(Goodbye()))
        elif how == "nonsense":
            await framed.send(b"nonsense")
        elif how == "silent":
            await trio.sleep(7)
        else:
            prefill._peers._nursery.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
    (opened, said, ended) = service.heard
    assert opened[:2] == ("open", READER)
    assert opened[2].identity == IDENTITY
    assert said == ("message", READER, Registered("r", 0))
    assert ended == (
        "end",
        READER,
        ProtocolViolation if how == "nonsense" else PeerLost,
    )
