"""Many ranks, one instance: they find each other in any order, and say who is missing."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    EngineConfig,
    HandshakeRefused,
    InstanceIncomplete,
    PeerLost,
    PeerUnreachable,
    Rank,
)
from kvferry.engine.streams import Streams
from kvferry.protocol import ModelIdentity
from kvferry.protocol.link import Spare
from tests.kit import IDENTITY, Pool, World, address

LEAD = ("127.0.0.1", 45_000)
"""Where the lead of these instances listens, started or not."""


def ranks(size: int) -> tuple[Rank, ...]:
    return Rank(tp_size=size).instance()


def joining(rank: Rank, **config):
    """The configuration of a rank that joins, or leads if it is the first."""
    place = {"listen": LEAD} if rank.tp == 0 else {"join": LEAD}
    return {"rank": rank, "redial_s": 0.5, **place, **config}


async def is_ready(*engines) -> None:
    """All of them know the same manifest."""
    for engine in engines:
        await engine.instance_ready(10.0)
    assert len({engine.contact for engine in engines}) == 1


async def test_one_rank_is_an_instance(autojump_clock) -> None:
    """It is ready at once, and tells of itself."""
    world = World()
    async with world.engine("p", Pool()) as alone, world.engine("c", Pool()) as other:
        await alone.instance_ready(0.0)
        assert alone.contact.instance == alone._instance.manifest.id
        assert await other.discover("p", address(alone)) == alone.contact
        with pytest.raises(ConfigError):
            EngineConfig(engine_id="p", identity=IDENTITY, join=LEAD)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
async def test_ranks_start_in_any_order(autojump_clock, order) -> None:
    """Those who come before the lead try again, and log why once."""
    world, engines = World(), {}
    async with trio.open_nursery() as nursery:
        for number in order:
            rank = ranks(3)[number]
            process = await world.start(nursery, "p", Pool(), **joining(rank))
            engines[number] = process
            await trio.sleep(5.0)
            if len(engines) < 3:
                assert process.engine._instance.manifest is None
        every = [engines[number].engine for number in range(3)]
        await is_ready(*every)
        contact = every[0].contact
        assert [a.rank for a in contact.ranks] == list(ranks(3))
        assert [(a.host, a.port) for a in contact.ranks] == [
            engine.address for engine in every
        ]
        assert [a.generation for a in contact.ranks] == [
            e.key.generation for e in every
        ]
        before = order.index(0)
        assert len(world.logged("joining_failed")) == before
        for process in engines.values():
            await process.leave()


async def test_who_is_missing_is_named(autojump_clock) -> None:
    """By coordinates, on the lead and on those who have joined."""
    world = World()
    async with (
        world.engine("p", Pool(), **joining(ranks(3)[0])) as lead,
        world.engine("p", Pool(), **joining(ranks(3)[2])) as member,
    ):
        started = trio.current_time()
        for engine in (lead, member):
            with pytest.raises(InstanceIncomplete) as caught:
                await engine.instance_ready(2.0)
            assert str(ranks(3)[1]) in str(caught.value)
            assert str(ranks(3)[2]) not in str(caught.value)
            # It knows that it is not alone, and does not pass for the instance.
            with pytest.raises(InstanceIncomplete, match=str(ranks(3)[1])):
                _ = engine.contact
        assert trio.current_time() - started == pytest.approx(4.0)
        with pytest.raises(InstanceIncomplete):
            await member.discover("p", address(lead))


async def test_a_rank_without_a_lead_says_what_keeps_it(autojump_clock) -> None:
    """Nobody listens there."""
    world = World()
    async with world.engine("p", Pool(), **joining(ranks(2)[1])) as member:
        with pytest.raises(InstanceIncomplete) as caught:
            await member.instance_ready(20.0)
        assert "45000" in str(caught.value)
        assert "nobody answers" in str(caught.value)
    assert len(world.logged("joining_failed")) == 1


async def test_ranks_twice_are_refused_until_the_first_is_gone(autojump_clock) -> None:
    """Both generations are named; the second takes over once the first has ended."""
    world = World()
    async with trio.open_nursery() as nursery:
        processes = []
        for rank in (ranks(3)[0], ranks(3)[1], ranks(3)[1]):
            process = await world.start(nursery, "p", Pool(), **joining(rank))
            processes.append(process)
            await trio.sleep(5.0)
        lead, first, second = processes
        for process in (lead, second):
            with pytest.raises(InstanceIncomplete) as caught:
                await process.engine.instance_ready(0.0)
            told = str(caught.value)
            assert "twice" in told
            assert str(ranks(3)[1]) in told
            assert first.engine.key.generation[:8] in told
            assert second.engine.key.generation[:8] in told
        assert len(world.logged("joining_failed")) == 1
        await first.leave()
        third = await world.start(nursery, "p", Pool(), **joining(ranks(3)[2]))
        await is_ready(lead.engine, second.engine, third.engine)
        for process in (second, third, lead):
            await process.leave()


async def test_who_was_refused_is_named_no_longer_than_that(autojump_clock) -> None:
    """Its place is free: it is missing, not there twice."""
    world = World()
    async with trio.open_nursery() as nursery:
        processes = []
        for rank in (ranks(3)[0], ranks(3)[1], ranks(3)[1]):
            process = await world.start(nursery, "p", Pool(), **joining(rank))
            processes.append(process)
            await trio.sleep(5.0)
        lead, first, second = processes
        await second.leave()
        assert "twice" in lead.engine._instance.incomplete().detail
        await first.leave()
        told = lead.engine._instance.incomplete().detail
        assert "twice" not in told
        assert str(ranks(3)[1]) in told
        await lead.leave()


async def test_a_second_lead_is_no_member(autojump_clock) -> None:
    """A rank with the lead's own coordinates is there twice."""
    world = World()
    async with (
        world.engine("p", Pool(), **joining(ranks(2)[0])),
        world.engine("p", Pool(), rank=ranks(2)[0], join=LEAD) as twice,
    ):
        with pytest.raises(InstanceIncomplete, match="twice"):
            await twice.instance_ready(2.0)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"rank": Rank(tp=1, tp_size=4)}, "tp_size: 4 here, 2 there"),
        ({"rank": Rank(tp_size=2, pp=1, pp_size=2)}, "pp_size: 2 here, 1 there"),
        (
            {"identity": ModelIdentity("org/other", "1", "float64")},
            "model: org/other here, org/tiny there",
        ),
    ],
)
async def test_ranks_that_do_not_belong_are_refused(
    autojump_clock, config, factor
) -> None:
    """Sizes that contradict, another model: named on both sides, and nobody is let in."""
    world = World()
    async with (
        world.engine("p", Pool(), **joining(ranks(2)[0])) as lead,
        world.engine("p", Pool(), **{**joining(ranks(2)[1]), **config}) as stranger,
    ):
        with pytest.raises(InstanceIncomplete) as caught:
            await stranger.instance_ready(2.0)
        assert factor in str(caught.value)
        with pytest.raises(InstanceIncomplete) as caught:
            await lead.instance_ready(2.0)
        assert factor.split(":")[0] in str(caught.value)
        assert lead.statistics()["ranks_joined"] == 0


async def test_another_instance_is_not_joined(autojump_clock) -> None:
    """The engine id is part of the greeting."""
    world = World()
    async with (
        world.engine("q", Pool(), **joining(ranks(2)[0])),
        world.engine("p", Pool(), **joining(ranks(2)[1])) as member,
    ):
        with pytest.raises(InstanceIncomplete, match="wrong_engine"):
            await member.instance_ready(2.0)


async def test_only_the_lead_is_joined(autojump_clock) -> None:
    """A member says who it is, and that it does not lead."""
    world = World()
    async with (
        world.engine("p", Pool(), **joining(ranks(3)[0])),
        world.engine("p", Pool(), **joining(ranks(3)[1])) as member,
        world.engine("p", Pool(), rank=ranks(3)[2], join=address(member)) as lost,
    ):
        with pytest.raises(InstanceIncomplete, match="does not lead"):
            await lost.instance_ready(2.0)


async def test_a_member_needs_no_listener(autojump_clock) -> None:
    """Nobody can be pushed to from it, which is said where it matters."""
    world = World()
    async with (
        world.engine("c", Pool(), **joining(ranks(2)[0])) as lead,
        world.engine("c", Pool(), listen=None, **joining(ranks(2)[1])) as member,
        world.engine("d", Pool()) as other,
    ):
        with pytest.raises(InstanceIncomplete):
            _ = member.contact  # before it has joined
        for engine in (lead, member):
            await engine.instance_ready(5.0)
            with pytest.raises(ConfigError, match=str(ranks(2)[1])):
                _ = engine.contact
        with pytest.raises(ConfigError, match=str(ranks(2)[1])):
            await other.discover("c", address(lead))


async def test_any_rank_tells_of_all(autojump_clock) -> None:
    """Whoever is asked, the answer is the same; nothing of the asking is left."""
    world = World()
    async with (
        world.joined("p", [Pool() for _ in range(4)]) as engines,
        world.engine("c", Pool()) as consumer,
    ):
        found = [await consumer.discover("p", address(engine)) for engine in engines]
        assert found == [engines[0].contact] * 4
        with pytest.raises(HandshakeRefused):
            await consumer.discover("q", address(engines[0]))
        await trio.testing.wait_all_tasks_blocked()
        assert [len(engine._listener) for engine in engines] == [3, 0, 0, 0]
        assert consumer.statistics()["asks"] == 0


async def test_eight_who_ask_at_once_ask_once(autojump_clock) -> None:
    """And an address that does not answer is left alone for a while."""
    world = World()
    async with (
        world.joined("p", [Pool(), Pool()]) as engines,
        world.engine("c", Pool()) as consumer,
    ):
        found = []

        async def ask() -> None:
            found.append(await consumer.discover("p", address(engines[1])))

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
        assert found == [engines[0].contact] * 8
        assert consumer._asks._dials.handshakes == 1
        for _ in range(8):
            with pytest.raises(PeerUnreachable):
                await consumer.discover("p", ("127.0.0.1", 9))
        assert consumer._asks._dials.handshakes == 2
        await trio.sleep(200.0)
        assert consumer._asks._dials.held_back == 0


class Unplugged(Streams):
    """The network of one host, whose cable can be pulled: nothing ends, nothing comes."""

    def __init__(self, streams: Streams) -> None:
        self.is_unplugged = False
        self._streams = streams

    async def dial(self, host, port):
        """Connect, by a stream that can fall silent."""
        return Silent(self, await self._streams.dial(host, port))

    async def listen(self, host, port):
        """Listen as ever."""
        return await self._streams.listen(host, port)


class Silent(trio.abc.Stream):
    """A stream that neither brings nor takes anything once the cable is pulled."""

    def __init__(self, cable: Unplugged, inner: trio.abc.Stream) -> None:
        self._cable = cable
        self._inner = inner

    async def send_all(self, data) -> None:
        """Lose it, or send it."""
        if self._cable.is_unplugged:
            await trio.lowlevel.checkpoint()
        else:
            await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        """It never does."""
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes=None):
        """Wait for ever, or for what comes."""
        chunk = await self._inner.receive_some(max_bytes)
        if self._cable.is_unplugged:
            await trio.sleep_forever()
        return chunk

    async def aclose(self) -> None:
        """The other side does not hear of it."""
        if not self._cable.is_unplugged:
            await self._inner.aclose()


async def test_whoever_asks_too_early_may_ask_again_at_once(autojump_clock) -> None:
    """An instance that is not whole yet has answered: it is not left alone for it."""
    world = World()
    async with (
        world.engine("p", Pool(), **joining(ranks(2)[0])) as lead,
        world.engine("c", Pool(), redial_s=30.0) as consumer,
    ):
        for _ in range(3):
            with pytest.raises(InstanceIncomplete, match=str(ranks(2)[1])) as caught:
                await consumer.discover("p", address(lead))
            assert caught.value.peer == "p@127.0.0.1:45000"
        async with world.engine("p", Pool(), **joining(ranks(2)[1])):
            await lead.instance_ready(5.0)
            assert await consumer.discover("p", address(lead)) == lead.contact
        assert world.logged("connect_failed") == []


async def test_asking_ends_at_its_deadline(autojump_clock) -> None:
    """Somebody is there and does not answer; whoever is sooner fed up says so."""
    world = World()
    async with (
        world.engine("p", Pool()) as other,
        world.engine("c", Pool()) as consumer,
    ):
        world.streams.freeze(*address(other))
        started = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await consumer.discover("p", address(other), deadline_s=3.0)
        assert trio.current_time() - started == pytest.approx(3.0)
        with pytest.raises(PeerUnreachable):
            await consumer.discover("p", address(other))
        assert trio.current_time() - started == pytest.approx(10.0)
        world.streams.thaw(*address(other))


@pytest.mark.parametrize("end", ["killed", "left", "unplugged"])
async def test_a_member_is_lost_and_comes_back(autojump_clock, end) -> None:
    """All know at once, or after the silence; with the new start it is another manifest."""
    world = World()
    cable = Unplugged(world.streams)
    async with trio.open_nursery() as nursery:
        lead, stays = [
            await world.start(nursery, "p", Pool(), **joining(rank))
            for rank in ranks(3)[:2]
        ]
        goes = await world.start(
            nursery, "p", Pool(), streams=cable, **joining(ranks(3)[2])
        )
        await is_ready(lead.engine, stays.engine, goes.engine)
        before = lead.engine.contact
        if end == "left":
            await goes.leave()
        else:
            cable.is_unplugged = end == "unplugged"
            goes.kill()
        again = await world.start(nursery, "p", Pool(), **joining(ranks(3)[2]))
        await trio.sleep(1.0)
        if end == "unplugged":
            # The old link ends by silence alone; whoever comes meanwhile is refused.
            assert stays.engine.contact == before
            assert world.logged("rank_refused")
            await trio.sleep(30.0)
            assert len(world.logged("joining_failed")) == 1
        await is_ready(lead.engine, stays.engine, again.engine)
        assert lead.engine.contact.instance != before.instance
        assert len(world.logged("rank_lost")) == 1
        for process in (again, stays, lead):
            await process.leave()


async def test_a_gap_is_known_to_all(autojump_clock) -> None:
    """Whoever stays has no contact to give, and names who is lost."""
    world = World()
    async with trio.open_nursery() as nursery:
        every = [
            await world.start(nursery, "p", Pool(), **joining(rank))
            for rank in ranks(3)
        ]
        await is_ready(*(process.engine for process in every))
        every[1].kill()
        await trio.sleep(0.01)
        for process in (every[0], every[2]):
            with pytest.raises(InstanceIncomplete, match=str(ranks(3)[1])):
                _ = process.engine.contact
            with pytest.raises(InstanceIncomplete, match=str(ranks(3)[1])):
                await process.engine.instance_ready(0.0)
            await process.leave()


@pytest.mark.parametrize("end", ["killed", "left"])
async def test_the_lead_is_started_anew(autojump_clock, end) -> None:
    """Members join again by themselves; it is another manifest."""
    world = World()
    async with trio.open_nursery() as nursery:
        lead, *members = [
            await world.start(nursery, "p", Pool(), **joining(rank))
            for rank in ranks(3)
        ]
        await is_ready(lead.engine, *(member.engine for member in members))
        before = lead.engine.contact
        if end == "left":
            await lead.leave()
        else:
            lead.kill()
        await trio.sleep(10.0)
        for member in members:
            with pytest.raises(InstanceIncomplete, match="nobody answers"):
                await member.engine.instance_ready(0.0)
        again = await world.start(nursery, "p", Pool(), **joining(ranks(3)[0]))
        await is_ready(again.engine, *(member.engine for member in members))
        assert again.engine.contact.instance != before.instance
        assert len(world.logged("lead_lost")) == 2
        assert len(world.logged("joining_failed")) == 2
        for process in (*members, again):
            await process.leave()


async def test_the_network_between_ranks_breaks_and_heals(autojump_clock) -> None:
    """The same starts at the same addresses are the same manifest again."""
    world = World()
    async with (
        world.engine("p", Pool(), **joining(ranks(2)[0])) as lead,
        world.engine("p", Pool(), **joining(ranks(2)[1])) as member,
    ):
        await is_ready(lead, member)
        before = lead.contact
        world.streams.cut(*LEAD)
        await trio.sleep(0.01)
        for engine in (lead, member):
            with pytest.raises(InstanceIncomplete):
                _ = engine.contact
        await is_ready(lead, member)
        assert lead.contact == before


async def test_a_rank_that_joins_over_a_new_link_takes_its_own_seat(
    autojump_clock,
) -> None:
    """It has noticed first that the old link is dead: the lead believes it."""
    world = World()
    cable = Unplugged(world.streams)
    async with (
        world.engine("p", Pool(), **joining(ranks(2)[0])) as lead,
        world.engine("p", Pool(), streams=cable, **joining(ranks(2)[1])) as member,
    ):
        await is_ready(lead, member)
        cable.is_unplugged = True
        member._instance._role._link.end(PeerLost("noticed"))
        await trio.testing.wait_all_tasks_blocked()
        cable.is_unplugged = False
        await trio.sleep(1.0)
        await is_ready(lead, member)
        assert lead.statistics()["ranks_joined"] == 1
        assert [e["cause"] for e in world.logged("rank_lost")] == [
            "it lost its link and joined anew"
        ]


async def test_waiting_ends_with_the_engine(autojump_clock) -> None:
    """Whoever waits for the others hears that there is nothing to wait for."""
    world = World()
    async with trio.open_nursery() as nursery:
        process = await world.start(nursery, "p", Pool(), **joining(ranks(2)[1]))

        async def wait() -> None:
            with pytest.raises(EngineClosed):
                await process.engine.instance_ready()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        await process.leave()


async def test_ranks_send_to_each_other(autojump_clock) -> None:
    """Any to any, itself included, through the lead; nobody is there, nobody hears."""
    world = World()
    async with world.joined("p", [Pool() for _ in range(3)]) as engines:
        heard: list[tuple[int, int]] = []
        for place, engine in enumerate(engines):

            def hear(rank, message, place=place) -> None:
                heard.append((rank.tp, place))

            engine._instance.on_relayed = hear
        for engine in engines:
            for other in engines:
                engine._instance.send(other.key.rank, Spare("r", None, (Rank(),)))
        await trio.sleep(1.0)
        assert sorted(heard) == [(a, b) for a in range(3) for b in range(3)]
        world.streams.cut(*address(engines[0]))
        await trio.sleep(0.01)
        for engine, error in ((engines[0], InstanceIncomplete), (engines[1], PeerLost)):
            with pytest.raises(error):
                engine._instance.send(ranks(3)[2], Spare("r", None, (Rank(),)))


async def test_what_a_message_breaks_ends_nothing(autojump_clock) -> None:
    """A hook that fails is logged; the link and the instance stay."""
    world = World()
    async with world.joined("p", [Pool(), Pool()]) as (lead, member):
        for engine in (lead, member):
            engine._instance.on_relayed = lambda *_: 1 / 0
        lead._instance.send(ranks(2)[1], Spare("r", None, (Rank(),)))
        member._instance.send(ranks(2)[0], Spare("r", None, (Rank(),)))
        await trio.sleep(1.0)
        assert len(world.logged("relay_failed")) == 2
        await is_ready(lead, member)


async def test_sixteen_start_at_once(autojump_clock) -> None:
    """All know all; the lead does not tell each of each."""
    world = World()
    async with trio.open_nursery() as nursery:
        processes = []

        async def one(rank: Rank) -> None:
            processes.append(
                await world.start(nursery, "p", Pool(heads=1), **joining(rank))
            )

        async with trio.open_nursery() as starting:
            for rank in reversed(ranks(16)):
                starting.start_soon(one, rank)
        await is_ready(*(process.engine for process in processes))
        for process in processes:
            await process.leave()
    assert len(world.logged("instance_complete")) == 16
