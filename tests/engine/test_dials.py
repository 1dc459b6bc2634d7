"""Dialling: in turns, with back-off, and never for nobody."""

from __future__ import annotations

import random

import msgspec
import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    EngineClosed,
    EngineConfig,
    FerryError,
    HandshakeRefused,
    PeerUnreachable,
    WrongPeer,
)
from kvferry.engine.dials import LONGEST_REDIAL_S, Dials
from kvferry.engine.fabric import MemoryStreams
from kvferry.engine.handshake import Credentials, greet
from kvferry.engine.trust import Trust
from kvferry.protocol.handshake import Card
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.ticket import RankOffer
from tests.kit import GROUP, IDENTITY, Impostor, Pool, World, address

HERE = RankOffer(Rank(), "1", "offer", "127.0.0.1", 9, 30.0, 2**40)


def key_of(number: int) -> EngineKey:
    """A peer that can be told from others."""
    return EngineKey("p", str(number), Rank())


class Silent(MemoryStreams):
    """A network on which every dial hangs, until it is let fail."""

    def __init__(self) -> None:
        super().__init__()
        self.dialled: list[tuple[int, float]] = []
        self.may_fail = trio.Event()

    async def dial(self, host, port):  # noqa: ARG002 - all are one
        """Wait, then nobody answers."""
        self.dialled.append((port, trio.current_time()))
        await self.may_fail.wait()
        raise OSError("nobody is there")


def dials_of(world, streams, nursery, *, seed=0, **config) -> Dials:
    """Dials that nobody has used yet; whoever is reached is a failure of the test."""
    card = Card(IDENTITY, Pool().cache.layout, b"")
    settings = EngineConfig(engine_id="c", identity=IDENTITY, **config)
    ours = Credentials(EngineKey("c", "1", Rank()), card, b"", frozenset())

    async def talk(key, framed) -> None:
        await greet(framed, ours, key)
        pytest.fail("somebody answered")

    return Dials(
        settings,
        streams,
        nursery,
        trust=Trust(settings, wall_clock=world.wall_clock),
        talk=talk,
        rng=random.Random(seed),
        log=world.logger(),
    )


async def failing_at(dials, key=None, offer=HERE) -> FerryError:
    """One request that fails, by the back-off or by a dial."""
    key = key or key_of(1)
    try:
        dials.check(key, offer)
        await dials.reach(key, offer)
    except FerryError as error:
        return error
    raise AssertionError("somebody was reached")


async def test_the_back_off_grows_is_capped_and_jittered(autojump_clock) -> None:
    """Half to whole of half a second, then twice that, up to half a minute."""
    waits: dict[int, list[float]] = {}
    for seed in (1, 1, 2):
        world, streams = World(), Silent()
        streams.may_fail.set()
        async with trio.open_nursery() as nursery:
            dials = dials_of(world, streams, nursery, seed=seed, redial_s=0.5)
            waited = []
            for failures in range(10):
                await failing_at(dials)
                assert len(streams.dialled) == failures + 1
                (back_off,) = dials._back_offs.values()
                wait_s = back_off.until_at - trio.current_time()
                longest_s = min(0.5 * 2**failures, LONGEST_REDIAL_S)
                assert longest_s / 2 <= wait_s <= longest_s
                waited.append(wait_s)
                # To the last moment nobody dials; then the first who asks does.
                await trio.sleep(wait_s * 0.999)
                error = await failing_at(dials)
                assert "not dialled again" in str(error)
                assert len(streams.dialled) == failures + 1
                await trio.sleep(wait_s * 0.0011)
        assert waits.setdefault(seed, waited) == pytest.approx(waited)
    assert waits[1] != pytest.approx(waits[2])


async def test_held_back_requests_fail_at_once_with_the_same_error(
    autojump_clock,
) -> None:
    """Its type, who, where and when again; each request has a copy of its own."""
    world, streams = World(), Silent()
    streams.may_fail.set()
    async with trio.open_nursery() as nursery:
        dials = dials_of(world, streams, nursery)
        first = await failing_at(dials)
        started = trio.current_time()
        errors = [await failing_at(dials) for _ in range(8)]
        assert trio.current_time() == started
        assert len({id(error) for error in (*errors, first)}) == 9
        for error in errors:
            assert type(error) is type(first) is PeerUnreachable
            assert "nobody is there" in str(error)
            assert "127.0.0.1:9" in str(error)
            assert error.phase == "connecting"
    assert len(streams.dialled) == dials.handshakes == 1


async def test_a_back_off_is_of_one_start_at_one_address(autojump_clock) -> None:
    """A peer that came back, or whose ticket names another port, is dialled at once."""
    world, streams = World(), Silent()
    streams.may_fail.set()
    async with trio.open_nursery() as nursery:
        dials = dials_of(world, streams, nursery)
        elsewhere = msgspec.structs.replace(HERE, port=10)
        for key, offer in (
            (key_of(1), HERE),
            (key_of(2), HERE),
            (key_of(1), elsewhere),
        ):
            await failing_at(dials, key, offer)
        assert [port for port, _ in streams.dialled] == [9, 9, 10]
        dials.forget(lambda key: key == key_of(1))
        assert dials.held_back == 1
        await failing_at(dials, key_of(1))
        assert len(streams.dialled) == 4


async def test_what_is_held_back_is_bounded_and_forgotten(autojump_clock) -> None:
    """The oldest make room; time frees the rest (case e6)."""
    world, streams = World(), Silent()
    streams.may_fail.set()
    async with trio.open_nursery() as nursery:
        dials = dials_of(world, streams, nursery, max_peers=10)
        for number in range(50):
            await failing_at(dials, key_of(number))
        assert dials.held_back == 10
        dials.check(key_of(39), HERE)
        await failing_at(dials, key_of(40))
        dials.forget_old()
        assert dials.held_back == 10
        await trio.sleep(0.5 + LONGEST_REDIAL_S)
        dials.forget_old()
        assert dials.held_back == 0


async def test_so_many_are_dialled_at_once_and_the_others_in_order(
    autojump_clock,
) -> None:
    """Each with its whole time from its own beginning."""
    world, streams = World(), Silent()
    async with trio.open_nursery() as nursery:
        dials = dials_of(
            world, streams, nursery, max_dials=3, connect_timeout_s=7.0, redial_s=60.0
        )
        started = trio.current_time()
        async with trio.open_nursery() as requests:
            for number in range(8):
                offer = msgspec.structs.replace(HERE, port=number)
                requests.start_soon(failing_at, dials, key_of(number), offer)
                await trio.testing.wait_all_tasks_blocked()
            assert len(streams.dialled) == 3
            assert len(dials) == 8
        turns: dict[int, set[int]] = {}
        for port, at in streams.dialled:
            turns.setdefault(round(at - started), set()).add(port)
        assert turns == {0: {0, 1, 2}, 7: {3, 4, 5}, 14: {6, 7}}
        assert len(dials) == 0


async def test_a_dial_for_which_nobody_waits_any_more_is_not_made(
    autojump_clock,
) -> None:
    """Those in the queue who gave up take nobody's turn."""
    world, streams = World(), Silent()
    async with trio.open_nursery() as nursery:
        dials = dials_of(world, streams, nursery, max_dials=1, connect_timeout_s=7.0)
        async with trio.open_nursery() as requests:
            requests.start_soon(failing_at, dials, key_of(0))
            await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(1) as scope:
                await dials.reach(key_of(1), HERE)
            assert scope.cancelled_caught
            assert key_of(1) in dials
        await trio.testing.wait_all_tasks_blocked()
        assert dials.handshakes == 1
        assert len(dials) == 0
        assert dials.held_back == 1


async def test_the_deadline_of_a_pull_bounds_its_wait_for_a_turn(
    autojump_clock,
) -> None:
    """It fails by its own time, and its dial is never made."""
    world, consumer = World(), Pool()
    impostor = Impostor(world, Pool())

    async def mute(_stream) -> None:
        await trio.sleep_forever()

    async with (
        trio.open_nursery() as nursery,
        world.engine("c", consumer, max_dials=1, connect_timeout_s=20.0) as decode,
    ):
        await nursery.start(impostor.serve, mute)
        ticket = impostor.ticket("r", [1], 4)
        other = msgspec.structs.replace(ticket.ranks[0], generation="later")
        waiting = msgspec.structs.replace(ticket, ranks=(other,), request_id="s")

        async def pull(ticket, block, error, **options) -> None:
            with pytest.raises(error):
                await decode.pull(ticket, {GROUP: [block]}, **options)

        async with trio.open_nursery() as pulls:
            pulls.start_soon(pull, ticket, 1, PeerUnreachable)
            await trio.testing.wait_all_tasks_blocked()
            started = trio.current_time()
            await pull(waiting, 2, DeadlineExceeded, deadline_s=2.0)
            assert trio.current_time() - started == pytest.approx(2)
        nursery.cancel_scope.cancel()


async def test_a_closing_engine_ends_the_dials(autojump_clock) -> None:
    """Whoever waits hears that it closed, and nothing is held back for it."""
    world, streams = World(), Silent()
    errors: list[FerryError] = []
    async with trio.open_nursery() as requests, trio.open_nursery() as nursery:
        dials = dials_of(world, streams, nursery, max_dials=1)

        async def one(number) -> None:
            errors.append(await failing_at(dials, key_of(number)))

        for number in range(3):
            requests.start_soon(one, number)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert [type(error) for error in errors] == [EngineClosed] * 3
    assert dials.held_back == len(dials) == 0


# In engines.


def lost(ticket, port):
    """The ticket, with a wrong port."""
    rank = msgspec.structs.replace(ticket.ranks[0], port=port)
    return msgspec.structs.replace(ticket, ranks=(rank,))


async def test_requests_to_a_dead_peer_fail_at_once_and_dial_it_once(
    autojump_clock,
) -> None:
    """The first waits for its dial, the others hear of it; nor does a decline dial."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        for _ in range(5):
            with pytest.raises(PeerUnreachable):
                await decode.pull(lost(offer.ticket, 9), {GROUP: [2]})
            await trio.testing.wait_all_tasks_blocked()
        assert decode._peers.dials.handshakes == 1
        assert decode.statistics()["peers_held_back"] == 1
        # Another address of the same peer is another matter, and so is later.
        await decode.pull(offer.ticket, {GROUP: [2]})
        assert decode._peers.dials.handshakes == 2
    consumer.check([2], num_tokens=4)


async def test_the_first_request_after_the_back_off_dials_anew(autojump_clock) -> None:
    """And succeeds, if the peer is there again: a listener that was only frozen."""
    world, producer, consumer = World(), Pool(), Pool()
    times = {"connect_timeout_s": 2.0, "redial_s": 3.0, "handshake_timeout_s": 2.0}
    async with world.pair(producer, consumer, **times) as (prefill, decode):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        world.streams.freeze(*address(prefill))
        with pytest.raises(PeerUnreachable, match="no handshake"):
            await decode.pull(offer.ticket, {GROUP: [2]})
        world.streams.thaw(*address(prefill))
        with pytest.raises(PeerUnreachable, match="not dialled again"):
            await decode.pull(offer.ticket, {GROUP: [2]})
        await trio.sleep(3)
        await decode.pull(offer.ticket, {GROUP: [2]})
        assert decode.statistics()["peers_held_back"] == 0
    consumer.check([2], num_tokens=4)


async def test_e1_a_peer_that_came_back_is_not_held_back(autojump_clock) -> None:
    """Its old start is, by name; the new one works at once, at the same address."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", consumer, redial_s=60.0) as decode,
    ):
        first = await world.start(nursery, "p", producer)
        old = first.engine.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        where = address(first.engine)
        first.kill()
        await first.ended.wait()
        with pytest.raises(PeerUnreachable):
            await decode.pull(old.ticket, {GROUP: [2]})
        second = await world.start(nursery, "p", producer, listen=where)
        new = second.engine.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        await decode.pull(new.ticket, {GROUP: [2]})
        with pytest.raises(PeerUnreachable, match="not dialled again"):
            await decode.pull(old.ticket, {GROUP: [3]})
        decode.forget("p")
        with pytest.raises(WrongPeer):
            await decode.pull(old.ticket, {GROUP: [3]})
        await second.leave()
    consumer.check([2], num_tokens=4)


async def test_a_dropped_link_is_not_held_back(autojump_clock) -> None:
    """Nothing is dialled again by itself; the next pull does so at once."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        for number in range(3):
            offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
            await decode.pull(offer.ticket, {GROUP: [2]})
            world.streams.cut(*address(prefill))
            await trio.sleep(100)
            assert decode._peers.dials.handshakes == number + 1
    consumer.check([2], num_tokens=4)


async def test_a_refused_handshake_is_held_back_with_its_factors(
    autojump_clock,
) -> None:
    """Who differs now differs in a moment: the same error, and no second handshake."""
    world, producer, consumer = World(), Pool(), Pool(block_size=2)
    other = msgspec.structs.replace(IDENTITY, revision="2")
    async with (
        world.engine("p", producer, identity=other) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        for _ in range(3):
            with pytest.raises(HandshakeRefused, match="revision") as caught:
                await decode.pull(offer.ticket, {GROUP: [2, 3]})
            assert caught.value.differences
        assert decode._peers.dials.handshakes == 1
        assert prefill.statistics()["handshakes_refused"] == 1
