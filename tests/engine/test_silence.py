"""Peers that are gone without a word, and peers that nobody needs (case e6).

Nothing ever happens in these tests but time: no end of a stream, no error, no request.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    FerryError,
    MisuseError,
    OfferOutcome,
    OfferSpent,
    PeerLost,
    Rank,
)
from kvferry.engine.fabric.faults import TransferFault
from kvferry.engine.link import FramedStream
from kvferry.protocol.link import (
    ReadFinished,
    Registered,
    Renew,
    decode_message,
    encode_message,
)
from tests.engine.test_listener import READER, connected
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

TIMES = {"keepalive_s": 5.0, "silence_s": 20.0}
FOREVER = {"lease_s": 80_000.0, "pull_deadline_s": 80_000.0, "drain_grace_s": 5.0}
"""Nothing but the silence ends anything."""
SLOW = {"poll_s": 0.1, "offered_poll_s": 1.0, "idle_poll_s": 1.0}


def offered(engine, pool, request_id="r", block=1):
    """An offer of one block."""
    blocks = pool.stamp([block], num_tokens=4)
    return engine.offer(request_id, blocks, num_tokens=4)


async def lose(engine, ticket, error, block=2) -> FerryError:
    """A pull that fails."""
    with pytest.raises(error) as caught:
        await engine.pull(ticket, {GROUP: [block]})
    return caught.value


# Silence.


async def test_e6_an_idle_producer_gone_without_a_word(autojump_clock) -> None:
    """Its link, agent and rows are freed by time alone, and so is the reader's link."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, **TIMES, **FOREVER) as (prefill, decode):
        await decode.pull(offered(prefill, producer).ticket, {GROUP: [2]})
        world.streams.freeze(*address(prefill))
        world.network.freeze(agent(prefill))
        await trio.sleep(19)
        assert decode.statistics()["peers"] == prefill.statistics()["links"] == 1
        assert decode.statistics()["fabric_prepared"] > 0
        await trio.sleep(2)
        is_bare(decode)
        assert prefill.statistics()["links"] == 0
        # It wakes, and everything works again.
        world.streams.thaw(*address(prefill))
        world.network.thaw(agent(prefill))
        await decode.pull(offered(prefill, producer).ticket, {GROUP: [2]})
    consumer.check([2], num_tokens=4)
    assert not world.logged("internal_error")


async def test_e6_a_reader_gone_without_a_word_frees_the_producer(
    autojump_clock,
) -> None:
    """Its offers do not wait for a lease of 22 hours, nor does a later ticket."""
    world, producer = World(), Pool()
    async with world.engine("p", producer, **TIMES, **FOREVER) as prefill:
        offers = [offered(prefill, producer, f"r{i}", i) for i in range(4)]
        framed = await connected(world, prefill)
        for number, offer in enumerate(offers[:3]):
            offer_id = offer.ticket.ranks[0].offer_id
            renew = Renew(f"r{number}", offer_id, number, (READER.rank,))
            await framed.send(encode_message(renew))
            await trio.testing.wait_all_tasks_blocked()
        # One was confirmed before; then the reader neither speaks nor reads.
        done = ReadFinished("r0", offers[0].ticket.ranks[0].offer_id, 0)
        await framed.send(encode_message(done))
        await trio.sleep(19)
        assert [offer.outcome for offer in offers[1:3]] == [None, None]
        await trio.sleep(2)
        assert [offer.outcome for offer in offers] == [
            OfferOutcome.RELEASED,
            OfferOutcome.LOST,
            OfferOutcome.LOST,
            None,
        ]
        assert await offers[1].wait() is OfferOutcome.LOST
        assert prefill.statistics()["links"] == 0
        assert not prefill._offers._read_on
        offers[3].withdraw()
        at_base(prefill)
        assert set(prefill._pump._claims.values()) == {0}


async def test_e6_a_producer_that_falls_silent_in_a_read(autojump_clock) -> None:
    """The pull fails, typed, by the silence; its blocks stay in quarantine."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("c", consumer, **TIMES, **FOREVER, **SLOW) as decode,
    ):
        process = await world.start(nursery, "p", producer, **TIMES, **FOREVER, **SLOW)
        offer = offered(process.engine, producer)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=1.0))
        started = trio.current_time()

        async def freeze() -> None:
            await trio.sleep(0.5)
            process.freeze()

        nursery.start_soon(freeze)
        error = await lose(decode, offer.ticket, PeerLost)
        assert trio.current_time() - started == pytest.approx(20 + 5, abs=0.1)
        assert "nothing was heard" in str(error)
        assert error.untrusted
        assert decode.statistics()["peers"] == 0
        # What is prepared stays as long as its bytes may move, and no longer.
        assert decode.quarantine.blocks(GROUP) == {2}
        assert decode.statistics()["fabric_prepared"] > 0
        assert decode.statistics()["fabric_peers"] == 1
        await trio.sleep(100)
        assert decode.quarantine.blocks(GROUP) == {2}
        process.thaw()
        await decode.quarantine.wait_empty()
        is_bare(decode)
        # The producer had noticed as well, in its own sleep so to say.
        assert offer.outcome is OfferOutcome.LOST
        await process.leave()


async def test_a_quiet_link_is_kept_alive_for_days(autojump_clock) -> None:
    """A peer that answers is no silent one, however little there is to say."""
    world, producer, consumer = World(), Pool(), Pool()
    slow = {"poll_s": 0.1, "offered_poll_s": 60.0, "idle_poll_s": 60.0}
    times = {"keepalive_s": 100.0, "silence_s": 300.0}
    others = {"keepalive_s": 2e5, "silence_s": 4e5, "peer_idle_s": 1e9}
    async with (
        world.engine("p", producer, **slow, **times) as prefill,
        # The two sides need not agree on any time.
        world.engine("c", consumer, **slow, **others) as decode,
    ):
        await decode.pull(offered(prefill, producer).ticket, {GROUP: [2]})
        await trio.sleep(2 * 86_400)
        assert decode.statistics()["peers"] == prefill.statistics()["links"] == 1
        assert decode._peers.dials.handshakes == 1


async def test_a_busy_link_is_not_asked(autojump_clock) -> None:
    """Renewals and their answers say enough."""
    world, producer, consumer = World(), Pool(), Pool()
    asked = []

    async def count(framed) -> None:
        while True:
            message = decode_message(await framed.receive())
            asked.append(type(message).__name__)
            if isinstance(message, Renew):
                answer = Registered(message.request_id, message.attempt)
                await framed.send(encode_message(answer))

    impostor = Impostor(world, producer)

    async def follow(stream) -> None:
        framed = FramedStream(stream)
        await impostor.answer(framed)
        with trio.move_on_after(49):
            await count(framed)
        await trio.sleep_forever()

    async with (
        trio.open_nursery() as nursery,
        world.engine(
            "c", consumer, keepalive_s=11.0, pull_deadline_s=50.0, **SLOW
        ) as decode,
    ):
        await nursery.start(impostor.serve, follow)
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=100.0))
        await lose(decode, impostor.ticket("r", [1], 4), DeadlineExceeded)
        nursery.cancel_scope.cancel()
    assert asked == ["Renew"] * 5


# Readers that go away.


async def test_producers_free_early_when_a_reader_dies(autojump_clock) -> None:
    """The end of its link ends what it read, and nothing that others read."""
    world, producer = World(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("p", producer, **FOREVER) as prefill,
        world.engine("d", Pool(), **FOREVER) as other,
    ):
        reader = await world.start(nursery, "c", Pool(), **FOREVER)
        world.network.faults.add(TransferFault(fabric="*", nth=None, delay_s=10.0))
        first, second = (
            offered(prefill, producer, name, block)
            for name, block in (("r", 1), ("s", 2))
        )
        nursery.start_soon(lose_quietly, reader.engine, first.ticket)
        nursery.start_soon(other.pull, second.ticket, {GROUP: [2]})
        await trio.sleep(5)
        assert first.outcome is None
        reader.kill()
        with trio.fail_after(0.1):
            assert await first.wait() is OfferOutcome.LOST
        assert second.outcome is None
        assert await second.wait() is OfferOutcome.RELEASED
        nursery.cancel_scope.cancel()


async def test_one_of_two_reader_ranks_dies(autojump_clock) -> None:
    """The other reads on, and is done; only then are the blocks given back, as LOST."""
    world, producer = World(), Pool()
    pools = [Pool(tp=(i, 2)) for i in range(2)]
    async with (
        trio.open_nursery() as nursery,
        world.engine("p", producer, **FOREVER) as prefill,
    ):
        first, second = [
            await world.start(nursery, "c", pool, rank=Rank(tp=i, tp_size=2))
            for i, pool in enumerate(pools)
        ]
        world.network.faults.add(TransferFault(fabric="c-*", nth=None, delay_s=10.0))
        offer = offered(prefill, producer)
        nursery.start_soon(lose_quietly, first.engine, offer.ticket)

        async def kill() -> None:
            await trio.sleep(5)
            first.kill()
            await trio.sleep(1)
            assert prefill.statistics()["links"] == 1
            assert offer.outcome is None

        nursery.start_soon(kill)
        await second.engine.pull(offer.ticket, {GROUP: [2]})
        pools[1].check([2], num_tokens=4)
        assert offer.outcome is OfferOutcome.LOST
        at_base(second.engine)
        await second.leave()


async def lose_quietly(engine, ticket) -> None:
    """A pull that somebody's end takes away."""
    try:
        await engine.pull(ticket, {GROUP: [2]})
    except FerryError:
        return


async def test_a_second_link_of_a_reader_ends_the_first(autojump_clock) -> None:
    """And with it what was read over it; what comes over the second is heard."""
    world, producer = World(), Pool()
    async with world.engine("p", producer, **FOREVER) as prefill:
        offers = [offered(prefill, producer, name) for name in ("a", "b")]
        links = []
        for offer in offers:
            links.append(await connected(world, prefill))
            offer_id = offer.ticket.ranks[0].offer_id
            name = offer.ticket.request_id
            renew = Renew(name, offer_id, 1, (READER.rank,))
            await links[-1].send(encode_message(renew))
            await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["links"] == 1
        assert [o.outcome for o in offers] == [OfferOutcome.LOST, None]
        await links[-1].aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert offers[1].outcome is OfferOutcome.LOST
        assert not prefill._offers._read_on


async def test_a_lost_offer_is_spent(autojump_clock) -> None:
    """Its reader may come back; the ticket is good for nothing any more."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=1.0))
        offer = offered(prefill, producer)

        async def cut() -> None:
            await trio.sleep(0.5)
            world.streams.cut(*address(prefill))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut)
            error = await lose(decode, offer.ticket, PeerLost)
        assert error.untrusted
        assert offer.outcome is OfferOutcome.LOST
        # A peer that is lost knows it: no dial was made to tell it.
        assert decode._peers.dials.handshakes == 1
        await lose(decode, offer.ticket, OfferSpent)
        producer.fill([1], 9.0)  # and the blocks are the caller's again


# Idle peers.


async def test_e6_an_idle_producer_is_let_go(autojump_clock) -> None:
    """With a goodbye, after its time, on both sides; a pull meets it again."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, peer_idle_s=50.0) as (prefill, decode):
        for _ in range(3):
            await decode.pull(offered(prefill, producer).ticket, {GROUP: [2]})
            await trio.sleep(49)
            assert decode.statistics()["peers"] == 1
        await trio.sleep(2)
        is_bare(decode)
        assert prefill.statistics()["links"] == 0
        assert decode._peers.dials.handshakes == 1
        await decode.pull(offered(prefill, producer).ticket, {GROUP: [2]})
        assert decode._peers.dials.handshakes == 2
    ends = [str(entry["cause"]) for entry in world.logged("link_ended")]
    assert "goodbye: nobody has needed" in ends[0]
    consumer.check([2], num_tokens=4)


async def test_a_peer_in_use_is_not_idle(autojump_clock) -> None:
    """Neither while it is read from, nor while bytes of it may still land."""
    world, producer, consumer = World(), Pool(), Pool()
    times = {**FOREVER, **SLOW, "peer_idle_s": 10.0, "drain_grace_s": 1.0}
    async with world.pair(producer, consumer, **times) as (prefill, decode):
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=100.0))
        await decode.pull(offered(prefill, producer).ticket, {GROUP: [2]})
        assert decode._peers.dials.handshakes == 1
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=100.0))
        with trio.move_on_after(5):
            await decode.pull(offered(prefill, producer).ticket, {GROUP: [3]})
        assert decode.quarantine.blocks(GROUP) == {3}
        await trio.sleep(80)
        assert decode.statistics()["peers"] == 1
        await decode.quarantine.wait_empty()
        await trio.sleep(11)
        is_bare(decode)


@pytest.mark.parametrize("name", ["engine id", "key"])
async def test_forgotten_by_name(autojump_clock, name) -> None:
    """Its pulls fail now and drain, others go on, and rows stay until the last byte."""
    world, consumer = World(), Pool()
    pools = {"p": Pool(), "q": Pool()}
    async with (
        world.engine("p", pools["p"], **FOREVER, **SLOW) as prefill,
        world.engine("q", pools["q"], **FOREVER, **SLOW) as other,
        world.engine("c", consumer, drain_grace_s=30.0, **SLOW) as decode,
    ):
        world.network.faults.add(TransferFault(fabric="c-*", nth=None, delay_s=9.0))
        offers = [offered(prefill, pools["p"]), offered(other, pools["q"], "s")]
        times: list[float] = []
        started = trio.current_time()

        async def one() -> None:
            error = await lose(decode, offers[0].ticket, PeerLost)
            assert "told to forget" in str(error)
            times.append(trio.current_time() - started)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(decode.pull, offers[1].ticket, {GROUP: [3]})
            await trio.sleep(4)
            decode.forget("p" if name == "engine id" else prefill.key)
            decode.forget("nobody")
            assert decode.statistics()["peers"] == 1
            assert decode.statistics()["fabric_peers"] == 2
            with trio.fail_after(0.1):
                assert await offers[0].wait() is OfferOutcome.LOST
        assert times == [pytest.approx(9, abs=0.1)]
        assert decode.statistics()["fabric_peers"] == 1
        assert not world.may_touch(consumer, [2])
        # It may come back at once.
        again = offered(prefill, pools["p"])
        await decode.pull(again.ticket, {GROUP: [2]})
        assert consumer.holds([2], num_tokens=4)
        at_base(decode)


async def test_a_producer_forgets_a_reader(autojump_clock) -> None:
    """Its links end, and with them what it reads."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer, **FOREVER) as (prefill, decode):
        world.network.faults.add(TransferFault(fabric="c-*", delay_s=2.0))
        offer = offered(prefill, producer)

        async def forget() -> None:
            await trio.sleep(1)
            prefill.forget("d")
            await trio.testing.wait_all_tasks_blocked()
            assert offer.outcome is None
            prefill.forget("c")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(forget)
            await lose(decode, offer.ticket, PeerLost)
        assert offer.outcome is OfferOutcome.LOST
        assert prefill.statistics()["links"] == 0


# Bounds.


async def test_the_longest_idle_peer_makes_room(autojump_clock) -> None:
    """Three may be known, five come by."""
    world, consumer = World(), Pool()
    pools = [Pool() for _ in range(5)]
    async with (
        world.instance("p", pools) as producers,
        world.engine("c", consumer, max_peers=3) as decode,
    ):
        known = []
        for number in (0, 1, 2, 0, 3, 0, 4):
            await connect_to(decode, producers[number])
            await trio.sleep(1)
            known.append({key.rank.tp for key in decode._peers._peers})
        assert known == [
            {0},
            {0, 1},
            {0, 1, 2},
            {0, 1, 2},
            {0, 2, 3},
            {0, 2, 3},
            {0, 3, 4},
        ]
        await trio.sleep(2)
        assert [producer.statistics()["links"] for producer in producers] == [
            1, 0, 0, 1, 1,
        ]  # fmt: skip


async def connect_to(decode, producer) -> None:
    """Get to know a rank by declining its ticket."""
    offer = producer.offer("r", {GROUP: [1]}, num_tokens=4)
    await decode.decline(offer.ticket)
    await offer.wait()


async def test_no_more_peers_in_use_than_allowed(autojump_clock) -> None:
    """One too many is the caller's error, and harms none of those in use."""
    world, consumer = World(), Pool()
    pools = [Pool() for _ in range(3)]
    async with (
        world.engine("p0", pools[0]) as first,
        world.engine("p1", pools[1]) as second,
        world.engine("p2", pools[2]) as third,
        world.engine("c", consumer, max_peers=2) as decode,
    ):
        world.network.faults.add(TransferFault(fabric="c-*", nth=None, delay_s=5.0))
        async with trio.open_nursery() as nursery:
            for number, engine in enumerate((first, second)):
                offer = offered(engine, pools[number])
                ticket = offered(engine, pools[number], f"r{number}", 2).ticket
                nursery.start_soon(decode.pull, ticket, {GROUP: [number]})
                offer.withdraw()
            await trio.sleep(1)
            error = await lose(decode, offered(third, pools[2]).ticket, MisuseError)
            assert "max_peers" in str(error)
            assert decode.statistics()["pulls"] == 2
        # Now they are idle, and one of them makes room.
        await decode.pull(offered(third, pools[2], "s").ticket, {GROUP: [4]})
        assert decode.statistics()["peers"] == 2
        at_base(decode)


async def test_the_ranks_of_one_ticket_do_not_push_each_other_out(
    autojump_clock,
) -> None:
    """While some are dialled the others are wanted, though nobody reads from them yet."""
    world, consumer, other = World(), Pool(), Pool()
    pools = [Pool(tp=(i, 2)) for i in range(2)]
    async with (
        world.instance("p", pools) as ranks,
        world.engine("q", other) as third,
        world.engine("c", consumer, max_peers=2) as decode,
    ):
        # The first rank is known, longest idle, and wanted; the other engine is not.
        await connect_to(decode, ranks[0])
        await trio.sleep(1)
        await connect_to(decode, third)
        await trio.sleep(1)
        _, ticket = offer_all(ranks, pools, "r", [1], num_tokens=4)
        await decode.pull(ticket, {GROUP: [2]})
        assert {key.engine_id for key in decode._peers._peers} == {"p"}
        assert decode._peers.dials.handshakes == 3
        assert not decode._peers._wanted
    consumer.check([2], num_tokens=4)


async def test_e5_a_thousand_peers_come_and_go(autojump_clock) -> None:
    """Without a goodbye, known by no more than fit, and gone by time alone."""
    world, consumer = World(), Pool()
    producer = Pool(4)
    impostor = Impostor(world, producer)
    gone, peers = 0, 1000

    async def follow(stream) -> None:
        nonlocal gone
        framed = FramedStream(stream)
        await impostor.answer(framed)
        gone += 1
        await trio.sleep_forever()

    async with (
        trio.open_nursery() as nursery,
        world.engine(
            "c", consumer, max_peers=50, idle_poll_s=5.0, handshake_timeout_s=1e6
        ) as decode,
    ):
        await nursery.start(impostor.serve, follow)
        await trio.testing.wait_all_tasks_blocked()
        base = decode.statistics()
        for number in range(peers):
            impostor.key = type(impostor.key)("p", str(number), impostor.key.rank)
            await decode.decline(impostor.ticket("r", [1], 4))
            assert decode.statistics()["peers"] <= 50
        assert gone == peers
        await trio.sleep(25)
        is_bare(decode)
        assert decode.statistics() == base
        assert not decode._peers._wanted
        nursery.cancel_scope.cancel()
