"""Remote ranks: dead, mute, lying, restarted, many at once (cases e1 to e5)."""

from __future__ import annotations

import msgspec
import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    FerryError,
    HandshakeRefused,
    OfferOutcome,
    PeerLost,
    PeerUnreachable,
    ProtocolViolation,
    RequestInUse,
    WrongPeer,
)
from kvferry.engine.fabric.faults import CallFault, TransferFault
from kvferry.engine.link import FramedStream
from kvferry.protocol.framing import MAX_CARD_BYTES, encode_frame
from kvferry.protocol.handshake import (
    Hello,
    Proof,
    Purpose,
    Role,
    Transcript,
    decode_hello,
    encode,
    encode_card,
)
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.link import Confirmed, Registered, Renew, encode_message
from kvferry.protocol.version import PROTOCOL_VERSION
from tests.kit import (
    GROUP,
    Impostor,
    Pool,
    World,
    address,
    agent,
    at_base,
    is_bare,
    offer_all,
)

# e3: what a peer may do instead of a handshake. Each gets a stream and the impostor.


async def never_answers(stream, impostor) -> None:
    """Accept, and read nothing."""
    await trio.sleep_forever()


async def reads_and_never_answers(stream, impostor) -> None:
    """Swallow everything."""
    while await stream.receive_some():
        pass


async def closes_at_once(stream, impostor) -> None:
    """Accept and hang up."""


async def answers_half(stream, impostor) -> None:
    """The first half of a hello, then silence."""
    frame = encode_frame(impostor_hello(impostor), limit_bytes=1000)
    await stream.send_all(frame[: len(frame) // 2])
    await trio.sleep_forever()


async def closes_in_a_hello(stream, impostor) -> None:
    """The first half of a hello, then the end."""
    frame = encode_frame(impostor_hello(impostor), limit_bytes=1000)
    await stream.send_all(frame[: len(frame) // 2])


async def stops_after_hello(stream, impostor) -> None:
    """A whole hello, then silence."""
    await FramedStream(stream).send(impostor_hello(impostor))
    await trio.sleep_forever()


async def closes_after_hello(stream, impostor) -> None:
    """A whole hello, then the end."""
    await FramedStream(stream).send(impostor_hello(impostor))


async def drips(stream, impostor) -> None:
    """One byte a second: always alive, never done."""
    for byte in encode_frame(impostor_hello(impostor), limit_bytes=1000):
        await stream.send_all(bytes([byte]))
        await trio.sleep(1)


async def talks_nonsense(stream, impostor) -> None:
    """A frame that is no hello."""
    await FramedStream(stream).send(b"\xc1nonsense")
    await trio.sleep_forever()


async def announces_too_much(stream, impostor) -> None:
    """The header of a frame of 4 GiB."""
    await stream.send_all(b"\xff\xff\xff\xff")
    await trio.sleep_forever()


async def greeted(framed, impostor) -> Transcript:
    """Both hellos, and the dialler's proof."""
    theirs, mine = await framed.receive(), impostor_hello(impostor)
    await framed.send(mine)
    transcript = Transcript(b"", (theirs, mine))
    transcript.check_proof(await framed.receive(), Role.DIALLER)
    return transcript


async def stops_after_its_proof(stream, impostor) -> None:
    """A proper hello and proof, then silence."""
    framed = FramedStream(stream)
    transcript = await greeted(framed, impostor)
    await framed.send(transcript.proof(Role.LISTENER))
    await trio.sleep_forever()


async def shows_half_a_card(stream, impostor) -> None:
    """A proper hello and proof, and the first half of an introduction."""
    framed = FramedStream(stream)
    transcript = await greeted(framed, impostor)
    await framed.send(transcript.proof(Role.LISTENER))
    await framed.receive(limit_bytes=MAX_CARD_BYTES)
    introduction = transcript.introduction(encode_card(impostor.card), Role.LISTENER)
    frame = encode_frame(introduction, limit_bytes=MAX_CARD_BYTES)
    await stream.send_all(frame[: len(frame) // 2])


async def proves_nothing(stream, impostor) -> None:
    """A proper hello, and the dialler's own proof, played back: the role is part of it."""
    framed = FramedStream(stream)
    transcript = await greeted(framed, impostor)
    await framed.send(transcript.proof(Role.DIALLER))
    await trio.sleep_forever()


async def proves_nothing_of_its_card(stream, impostor) -> None:
    """A proper hello and proof, and a card that somebody else has introduced."""
    framed = FramedStream(stream)
    transcript = await greeted(framed, impostor)
    await framed.send(transcript.proof(Role.LISTENER))
    introduction = await framed.receive(limit_bytes=MAX_CARD_BYTES)
    await framed.send(introduction, limit_bytes=MAX_CARD_BYTES)
    await trio.sleep_forever()


def impostor_hello(impostor: Impostor) -> bytes:
    """Its hello, encoded."""
    return encode(Hello(PROTOCOL_VERSION, impostor.key, "", Purpose.LINK, bytes(32)))


MUTE = {
    never_answers: PeerUnreachable,
    reads_and_never_answers: PeerUnreachable,
    closes_at_once: PeerLost,
    answers_half: PeerUnreachable,
    closes_in_a_hello: PeerLost,
    stops_after_hello: PeerUnreachable,
    closes_after_hello: PeerLost,
    drips: PeerUnreachable,
    talks_nonsense: ProtocolViolation,
    announces_too_much: ProtocolViolation,
    stops_after_its_proof: PeerUnreachable,
    shows_half_a_card: PeerLost,
    proves_nothing: HandshakeRefused,
    proves_nothing_of_its_card: HandshakeRefused,
}


@pytest.mark.parametrize("script", MUTE, ids=lambda script: script.__name__)
async def test_e3_a_peer_that_does_not_shake_hands(autojump_clock, script) -> None:
    """Its pull fails by the connect timeout; a pull from another peer is done meanwhile."""
    world, producer, consumer = World(), Pool(), Pool()
    impostor = Impostor(world, Pool())
    timeout_s = 7.0

    async def follow(stream) -> None:
        await script(stream, impostor)

    async with (
        trio.open_nursery() as nursery,
        world.engine("q", producer) as other,
        world.engine("c", consumer, connect_timeout_s=timeout_s) as decode,
    ):
        await nursery.start(impostor.serve, follow)
        started = trio.current_time()
        done_at: list[float] = []

        async def pull_another() -> None:
            offer = other.offer("q", producer.stamp([1], num_tokens=4), num_tokens=4)
            await decode.pull(offer.ticket, {GROUP: [2]})
            done_at.append(trio.current_time() - started)

        nursery.start_soon(pull_another)
        with pytest.raises(MUTE[script]) as caught:
            await decode.pull(impostor.ticket("r", [1], 4), {GROUP: [3]})
        assert trio.current_time() - started <= timeout_s + 1e-6
        await trio.sleep(2 * timeout_s)
        assert done_at[0] < 1
        assert not caught.value.untrusted
        assert caught.value.phase == "connecting"
        assert caught.value.request_id == "r"
        assert "p/" in (caught.value.peer or "")
        at_base(decode)
        assert decode.statistics()["peers"] == 1
        nursery.cancel_scope.cancel()
    assert (agent(decode), "connect") in world.network.faults.calls
    assert world.network.faults.calls[agent(decode), "connect"] == 1
    consumer.check([2], num_tokens=4)


async def after_handshake(world, script, **config):
    """A pull from an impostor that shakes hands first; its error, and when it came."""
    consumer = Pool()
    impostor = Impostor(world, Pool())

    async def follow(stream) -> None:
        framed = FramedStream(stream)
        await impostor.answer(framed)
        await script(framed, impostor)

    async with (
        trio.open_nursery() as nursery,
        world.engine("c", consumer, **config) as decode,
    ):
        await nursery.start(impostor.serve, follow)
        started = trio.current_time()
        with pytest.raises(FerryError) as caught:
            await decode.pull(impostor.ticket("r", [1], 4), {GROUP: [3]})
        took_s = trio.current_time() - started
        await trio.sleep(1)
        at_base(decode)
        nursery.cancel_scope.cancel()
    return caught.value, took_s


async def test_e3_a_producer_that_never_answers_its_link(autojump_clock) -> None:
    """All bytes arrived, but nobody confirms: failed at the deadline, never done."""

    async def mute(framed, _impostor) -> None:
        while True:
            await framed.receive()

    error, took_s = await after_handshake(World(), mute, pull_deadline_s=9.0)
    assert type(error) is DeadlineExceeded
    assert took_s == pytest.approx(9.0)
    assert error.phase == "confirming"
    assert error.untrusted


async def test_e3_a_producer_that_closes_its_link(autojump_clock) -> None:
    """The end of the link is told at once."""

    async def closes(framed, _impostor) -> None:
        await framed.receive()

    error, took_s = await after_handshake(World(), closes)
    assert type(error) is PeerLost
    assert took_s < 1


async def test_e3_a_producer_that_answers_half(autojump_clock) -> None:
    """Half a confirmation is none."""

    async def half(framed, impostor) -> None:
        await framed.receive()
        confirmed = encode_message(Confirmed(impostor.key, "r", 0, 1))
        frame = encode_frame(confirmed, limit_bytes=1000)
        await framed._stream.send_all(frame[:-1])
        await trio.sleep_forever()

    error, _ = await after_handshake(World(), half, pull_deadline_s=9.0)
    assert type(error) is DeadlineExceeded


@pytest.mark.parametrize("whose", ["other generation", "other engine"])
async def test_a_confirmation_in_another_name_is_none(autojump_clock, whose) -> None:
    """A producer that signs as somebody else is cut off; the pull fails."""

    async def signs(framed, impostor) -> None:
        key = (
            EngineKey("p", "2", Rank())
            if whose == "other generation"
            else EngineKey("q", impostor.key.generation, Rank())
        )
        await framed.receive()
        await framed.send(encode_message(Confirmed(key, "r", 0, 1)))
        await trio.sleep_forever()

    error, took_s = await after_handshake(World(), signs)
    assert isinstance(error, PeerLost)
    assert took_s < 1


async def test_a_confirmation_before_the_read_has_ended_is_none(autojump_clock) -> None:
    """A producer that confirms too early and then goes away: the pull fails."""

    async def hasty(framed, impostor) -> None:
        await framed.receive()
        for _ in range(3):
            await framed.send(encode_message(Confirmed(impostor.key, "r", 0, 1)))
        await trio.sleep(5)

    error, took_s = await after_handshake(World(latency_s=1.0), hasty)
    assert type(error) is PeerLost
    assert took_s == pytest.approx(5, abs=0.1)


async def test_answers_to_other_attempts_change_nothing(autojump_clock) -> None:
    """A confirmation of an earlier or unknown attempt is counted as a stray."""

    async def strays(framed, impostor) -> None:
        await framed.receive()
        await trio.sleep(3)
        for attempt in (1, 99):
            confirmed = Confirmed(impostor.key, "r", attempt, 1)
            await framed.send(encode_message(confirmed))
        await framed.send(encode_message(Registered("r", 99)))
        await trio.sleep_forever()

    error, took_s = await after_handshake(World(), strays, pull_deadline_s=6.0)
    assert type(error) is DeadlineExceeded
    assert took_s == pytest.approx(6)


async def test_a_producer_that_talks_like_a_consumer_is_cut_off(autojump_clock) -> None:
    """Only consumers renew."""

    async def renews(framed, _impostor) -> None:
        await framed.receive()
        await framed.send(encode_message(Renew("r", "offer", 0, (Rank(),))))
        await trio.sleep_forever()

    error, _ = await after_handshake(World(), renews)
    assert type(error) is PeerLost
    assert "Renew from a producer" in str(error)


# Who answers.


async def test_a_dead_port_is_unreachable(autojump_clock) -> None:
    """Nobody listens: PeerUnreachable, at once, naming the address."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        rank = msgspec.structs.replace(offer.ticket.ranks[0], port=9)
        ticket = msgspec.structs.replace(offer.ticket, ranks=(rank,))
        with pytest.raises(PeerUnreachable, match=r"127\.0\.0\.1:9"):
            await decode.pull(ticket, {GROUP: [2]})
        offer.withdraw()
    assert consumer.is_untouched()


async def test_another_engine_at_the_address(autojump_clock) -> None:
    """The listener refuses a dialler that wants somebody else."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        world.engine("p", producer) as prefill,
        world.engine("q", Pool()) as other,
        world.engine("c", consumer) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        host, port = address(other)
        rank = msgspec.structs.replace(offer.ticket.ranks[0], host=host, port=port)
        ticket = msgspec.structs.replace(offer.ticket, ranks=(rank,))
        with pytest.raises((WrongPeer, HandshakeRefused), match=r"'p'.*'q'"):
            await decode.pull(ticket, {GROUP: [2]})
        await trio.testing.wait_all_tasks_blocked()
        at_base(decode)
        assert world.network.faults.calls[agent(decode), "connect"] == 0
    assert consumer.is_untouched()


async def test_another_rank_of_the_same_engine_at_the_address(autojump_clock) -> None:
    """Two ranks' addresses mixed up: WrongPeer, naming both."""
    world, consumer = World(), Pool()
    pools = [Pool(tp=(i, 2)) for i in range(2)]
    ranks = [Rank(tp=i, tp_size=2) for i in range(2)]
    async with (
        world.engine("p", pools[0], rank=ranks[0]) as first,
        world.engine("p", pools[1], rank=ranks[1]) as second,
        world.engine("c", consumer) as decode,
    ):
        offer = first.offer("r", pools[0].stamp([1], num_tokens=4), num_tokens=4)
        host, port = address(second)
        rank = msgspec.structs.replace(offer.ticket.ranks[0], host=host, port=port)
        ticket = msgspec.structs.replace(offer.ticket, ranks=(rank,))
        with pytest.raises(WrongPeer, match=r"tp1of2.*tp0of2"):
            await decode.pull(ticket, {GROUP: [2]})
    assert consumer.is_untouched()


async def test_the_wrong_secret_sees_no_metadata(autojump_clock) -> None:
    """Refused on both sides, and the listener's card never left."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        world.engine("p", producer, secret=b"right") as prefill,
        world.engine("c", consumer, secret=b"wrong", trusted=["127.0.0.1"]) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        with pytest.raises(HandshakeRefused, match="secret") as caught:
            await decode.pull(offer.ticket, {GROUP: [2]})
        await trio.testing.wait_all_tasks_blocked()
        at_base(decode)
        assert prefill.statistics()["links"] == 0
        # The same by hand: all that comes back is a refusal.
        framed = FramedStream(await world.streams.dial(*address(prefill)))
        reader = EngineKey("c", "1", Rank())
        mine = encode(Hello(PROTOCOL_VERSION, reader, "p", Purpose.LINK, bytes(32)))
        await framed.send(mine)
        theirs = await framed.receive()
        decode_hello(theirs)
        await framed.send(Transcript(b"", (mine, theirs)).proof(Role.DIALLER))
        answer = await framed.receive()
        assert agent(prefill).encode() not in answer
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(answer, type=Proof)
        with pytest.raises(PeerLost):
            await framed.receive(limit_bytes=MAX_CARD_BYTES)
        await framed.aclose()
    assert not caught.value.differences
    assert consumer.is_untouched()


# Restarts, cuts, crowds.


async def fails(engine, ticket, blocks, errors) -> None:
    """A pull that loses its peer."""
    with pytest.raises(PeerLost) as caught:
        await engine.pull(ticket, {GROUP: blocks})
    errors.append(caught.value)


async def test_e1_killed_in_a_read_and_back_at_the_same_address(autojump_clock) -> None:
    """In-flight requests fail, the next one works, the old state is freed."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", consumer, wave_bytes=200, window=2) as decode,
    ):
        where = {}
        where: dict[str, object] = {}
        for life in range(3):
            process = await world.start(nursery, "p", producer, **where)
            good = process.engine.offer(
                f"good-{life}",
                producer.stamp([1], num_tokens=4, salt=life),
                num_tokens=4,
            )
            await decode.pull(good.ticket, {GROUP: [3]})
            assert consumer.holds([3], num_tokens=4, salt=life)
            assert decode.statistics()["peers"] == 1
            base = decode.statistics()
            where = {"listen": address(process.engine)}
            if life == 2:
                break
            offers = [
                process.engine.offer(
                    f"r{i}", producer.stamp([1, 2], num_tokens=8), num_tokens=8
                )
                for i in range(2)
            ]
            world.network.faults.add(
                CallFault(fabric="c-*", method="post", nth=4, action=process.kill)
            )
            errors: list[FerryError] = []
            async with trio.open_nursery() as pulls:
                for i, offer in enumerate(offers):
                    blocks = [4 + 2 * i, 5 + 2 * i]
                    pulls.start_soon(fails, decode, offer.ticket, blocks, errors)
            await process.ended.wait()
            assert len(errors) == 2
            assert all(error.untrusted for error in errors)
            await trio.sleep(1)
            is_bare(decode)
        assert decode.statistics() == base
        # A ticket of the first life names a generation that is gone.
        with pytest.raises(WrongPeer):
            await decode.pull(offers[0].ticket, {GROUP: [4, 5]})
        await process.leave()
        await trio.testing.wait_all_tasks_blocked()
        is_bare(decode)


@pytest.mark.parametrize("delay_s", [0.5, 3.0])
async def test_e2_the_link_is_cut_with_19_pulls_open(autojump_clock, delay_s) -> None:
    """19 failures, none done; then it is healed, without a restart."""
    world, producer, consumer = World(), Pool(44), Pool(44)
    async with world.pair(producer, consumer) as (prefill, decode):
        world.network.faults.add(TransferFault(fabric="c-*", nth=None, delay_s=delay_s))
        errors: list[FerryError] = []

        async def one(number) -> None:
            blocks = [2 * number, 2 * number + 1]
            given = producer.stamp(blocks, num_tokens=8, salt=number)
            offer = prefill.offer(f"r{number}", given, num_tokens=8)
            with pytest.raises(PeerLost) as caught:
                await decode.pull(offer.ticket, {GROUP: blocks})
            errors.append(caught.value)
            assert not world.may_touch(consumer, blocks)

        async with trio.open_nursery() as nursery:
            for number in range(19):
                nursery.start_soon(one, number)
            await trio.sleep(0.2)
            assert decode.statistics()["pulls"] == 19
            world.streams.cut(*address(prefill))
            await trio.testing.wait_all_tasks_blocked()  # it is noticed
            # Healed while the failed ones still drain; their end must not harm it.
            world.network.faults.clear()
            given = producer.stamp([40, 41], num_tokens=8, salt=40)
            offer = prefill.offer("next", given, num_tokens=8)
            world.network.faults.add(TransferFault(fabric="c-*", delay_s=2 * delay_s))
            await decode.pull(offer.ticket, {GROUP: [40, 41]})
        assert consumer.holds([40, 41], num_tokens=8, salt=40)
        assert len(errors) == len({error.request_id for error in errors}) == 19
        assert len({id(error) for error in errors}) == 19
        assert decode.statistics()["quarantine"] == 0
        assert not world.logged("pull_quarantined")
        # All 19 offers were freed when their link ended: it had been read on.
        lost = [e for e in world.logged("offer_ended") if e["outcome"] == "lost"]
        assert len(lost) == 19
        assert prefill.statistics()["offers"] == 0
        assert decode.statistics()["peers"] == 1
        given = producer.stamp([40, 41], num_tokens=8, salt=41)
        offer = prefill.offer("and next", given, num_tokens=8)
        await decode.pull(offer.ticket, {GROUP: [40, 41]})
        assert consumer.holds([40, 41], num_tokens=8, salt=41)
    assert len(world.logged("pull_done")) == 2


async def test_e4_eight_tasks_make_one_handshake(autojump_clock) -> None:
    """However many wait for a peer, it is dialled once; also when it refuses."""
    world, producer, consumer = World(), Pool(20), Pool(20)
    async with world.pair(producer, consumer) as (prefill, decode):
        async with trio.open_nursery() as nursery:
            for i in range(8):
                given = producer.stamp([i], num_tokens=4, salt=i)
                offer = prefill.offer(f"r{i}", given, num_tokens=4)
                nursery.start_soon(decode.pull, offer.ticket, {GROUP: [19 - i]})
        assert decode._peers.dials.handshakes == 1
        assert prefill.statistics()["links"] == 1
        assert all(consumer.holds([19 - i], num_tokens=4, salt=i) for i in range(8))
    (name,) = world.network.names("c-*")
    assert world.network.faults.calls[name, "connect"] == 1


async def after(steps, engine, ticket, blocks) -> None:
    """A pull that begins some steps later."""
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    await engine.pull(ticket, blocks)


async def test_e4_eight_tasks_and_two_ranks_make_two_handshakes(
    autojump_clock,
) -> None:
    """Also when one rank's handshake ends while others only begin to wait."""
    for stagger in range(12):
        world, consumer = World(seed=stagger), Pool(20)
        pools = [Pool(20, tp=(i, 2)) for i in range(2)]
        async with (
            world.instance("p", pools) as ranks,
            world.engine("c", consumer) as decode,
        ):
            async with trio.open_nursery() as nursery:
                for i in range(8):
                    _, ticket = offer_all(
                        ranks, pools, f"r{i}", [i], num_tokens=4, salt=i
                    )
                    blocks = {GROUP: [i]}
                    nursery.start_soon(after, i * stagger, decode, ticket, blocks)
            assert decode._peers.dials.handshakes == 2
            assert [len(rank._listener) for rank in ranks] == [1, 1]
            assert decode.statistics()["peers"] == 2
            for i in range(8):
                assert consumer.holds([i], num_tokens=4, salt=i)


async def test_e4_eight_waiters_of_a_dead_peer_fail_by_themselves(
    autojump_clock,
) -> None:
    """One dial, eight errors, none shared."""
    world, producer, consumer = World(), Pool(20), Pool(20)
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        rank = msgspec.structs.replace(offer.ticket.ranks[0], port=9)
        errors: list[FerryError] = []

        async def one(number) -> None:
            ticket = msgspec.structs.replace(
                offer.ticket, ranks=(rank,), request_id=f"r{number}"
            )
            with pytest.raises(PeerUnreachable) as caught:
                await decode.pull(ticket, {GROUP: [number]})
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(one, i)
        assert {error.request_id for error in errors} == {f"r{i}" for i in range(8)}
        assert len({id(error) for error in errors}) == 8
        offer.withdraw()
    assert consumer.is_untouched()


async def test_e5_hundreds_of_peers_come_and_go(autojump_clock) -> None:
    """Producers at one consumer, consumers at one producer: back to base."""
    world, pool = World(), Pool(4)
    async with world.engine("c", pool) as decode, world.engine("p", pool) as prefill:
        await trio.testing.wait_all_tasks_blocked()
        base = [decode.statistics(), prefill.statistics()]
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(150):
            other = Pool(4)
            async with world.engine("x", other) as engine:
                offer = engine.offer("r", other.stamp([1], num_tokens=4), num_tokens=4)
                await decode.pull(offer.ticket, {GROUP: [2]})
                offer = prefill.offer("r", {GROUP: [3]}, num_tokens=4)
                await engine.pull(offer.ticket, {GROUP: [2]})
        await trio.testing.wait_all_tasks_blocked()
        is_bare(decode)
        assert [decode.statistics(), prefill.statistics()] == base
        assert trio.lowlevel.current_statistics().tasks_living == tasks
        assert decode._peers.dials.handshakes == 150
        assert not decode._peers._dials
        assert not decode._pump._active
        assert prefill._listener._diallers == 0


async def test_h3_a_request_twice_at_once(autojump_clock) -> None:
    """The second is refused, the first unaffected; an id is free again at its end."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        with pytest.raises(RequestInUse):
            prefill.offer("r", {GROUP: [2]}, num_tokens=4)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode.pull, offer.ticket, {GROUP: [3]})
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(RequestInUse) as caught:
                await decode.pull(offer.ticket, {GROUP: [4]})
            assert caught.value.request_id == "r"
        assert offer.outcome is OfferOutcome.RELEASED
        consumer.check([3], num_tokens=4)
        given = producer.stamp([2], num_tokens=4, salt=2)
        again = prefill.offer("r", given, num_tokens=4)
        await decode.pull(again.ticket, {GROUP: [3]})
    consumer.check([3], num_tokens=4, salt=2)
