"""Ranks and leads that do not behave: refused, cut off, and bounded in what they cost."""

from __future__ import annotations

from contextlib import asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    HandshakeRefused,
    InstanceIncomplete,
    PeerLost,
    ProtocolViolation,
    Rank,
)
from kvferry.engine.ballots import MOST_OPEN, REMEMBERED
from kvferry.engine.handshake import Credentials, Welcome, call, receive_call
from kvferry.engine.lead import RELAY_BYTES
from kvferry.engine.link import FramedStream, Link
from kvferry.protocol.handshake import Card, Purpose
from kvferry.protocol.identity import EngineKey
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.link import (
    Landed,
    Relay,
    Roster,
    Spare,
    Verdict,
    Vote,
    encode_message,
)
from kvferry.protocol.manifest import (
    MAX_MANIFEST_BYTES,
    Enrolment,
    Manifest,
    Member,
    decode_enrolment,
    decode_manifest,
    encode_body,
)
from tests.kit import IDENTITY, Pool, World, address, at_base

BARE = CacheLayout((), ())
LEAD, MEMBER, OTHER = Rank(tp_size=3).instance()
SPARE = Spare("r", None, (Rank(),))


def key_of(rank: Rank, generation: str = "fake") -> EngineKey:
    return EngineKey("p", generation, rank)


def creds(key: EngineKey, secret: bytes = b"") -> Credentials:
    return Credentials(key, Card(IDENTITY, BARE, b""), secret, frozenset())


def body_of(rank: Rank, generation: str = "fake", layout=BARE) -> bytes:
    return encode_body(Enrolment(IDENTITY, Member(rank, generation, "h", 1, layout)))


async def join(world, lead, rank=MEMBER, *, key=None, body=None) -> FramedStream:
    """What a rank does, by hand."""
    framed = FramedStream(await world.streams.dial(*address(lead)))
    try:
        await call(
            framed,
            creds(key or key_of(rank)),
            "p",
            Purpose.JOIN,
            body_of(rank) if body is None else body,
            decode=decode_manifest,
        )
    except BaseException:
        await framed.aclose()
        raise
    return framed


@asynccontextmanager
async def linked(world, lead, rank=MEMBER):
    """A member by hand that answers, as a link."""
    framed = await join(world, lead, rank)
    link = Link(framed, lead.key, keepalive_s=5.0, silence_s=20.0)
    heard: list = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run, heard.append)
        yield link, heard
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("key", "body"),
    [
        (None, b""),
        (None, b"\xc1"),
        (None, encode_body(Manifest("p", (Member(MEMBER, "fake", None, None, BARE),)))),
        (None, body_of(MEMBER, "other")),
        (None, body_of(OTHER)),
        (key_of(Rank(7, 3)), body_of(Rank(7, 3))),
    ],
    ids=["empty", "bytes", "manifest", "generation", "rank", "outside"],
)
async def test_h1_a_body_that_is_no_enrolment(autojump_clock, key, body) -> None:
    """The handshake ends, and nothing of it is kept."""
    world = World()
    async with world.engine("p", Pool(), rank=LEAD) as lead:
        with pytest.raises(PeerLost):
            await join(world, lead, key=key, body=body)
        await trio.testing.wait_all_tasks_blocked()
        assert lead.statistics()["ranks_joined"] == 0
        assert lead.statistics()["handshakes_refused"] == 1
        assert len(lead._listener) == 0


async def test_h1_nobody_joins_without_the_secret(autojump_clock) -> None:
    """And nobody hears who there is."""
    world = World()
    async with world.engine("p", Pool(), rank=LEAD, secret=b"right") as lead:
        for purpose in (Purpose.JOIN, Purpose.ASK):
            framed = FramedStream(await world.streams.dial(*address(lead)))
            with pytest.raises(HandshakeRefused):
                await call(
                    framed,
                    creds(key_of(MEMBER), b"wrong"),
                    "p",
                    purpose,
                    body_of(MEMBER),
                    decode=decode_manifest,
                )
            await framed.aclose()
        assert lead.statistics()["ranks_joined"] == 0


async def test_a_manifest_that_no_link_carries_is_not_made(autojump_clock) -> None:
    """A rank with a layout as long as the whole manifest may be is refused."""
    world, pool = World(), Pool()
    group = pool.cache.layout.groups[0]
    field = group.fields[0]
    size = len(msgspec.msgpack.encode(field))
    many = (field,) * (MAX_MANIFEST_BYTES // size // 2)
    large = CacheLayout((), (msgspec.structs.replace(group, fields=many),))
    async with world.engine("p", pool, rank=LEAD) as lead:
        first = await join(world, lead, MEMBER, body=body_of(MEMBER, layout=large))
        with pytest.raises(HandshakeRefused, match="manifest would be over"):
            twice = CacheLayout((), large.groups * 2)
            await join(world, lead, OTHER, body=body_of(OTHER, layout=twice))
        await first.aclose()


async def test_two_starts_of_a_rank_that_join_at_once(autojump_clock) -> None:
    """Both were told that there is a place: the first to come has it."""
    world = World()
    async with (
        world.engine("p", Pool(), rank=LEAD) as lead,
        linked(world, lead) as (first, _),
    ):
        await trio.testing.wait_all_tasks_blocked()
        stream, _ = trio.testing.memory_stream_pair()
        late = Link(
            FramedStream(stream),
            key_of(MEMBER, "late"),
            keepalive_s=5.0,
            silence_s=20.0,
        )
        lead._instance.on_open(late, body_of(MEMBER, "late"))
        assert not late.is_open
        lead._instance.on_message(late, Vote("k", "", 1.0))
        lead._instance.on_end(late, PeerLost("over"))
        await trio.sleep(1.0)
        assert first.is_open
        assert lead.statistics()["ranks_joined"] == 1
        assert lead.statistics()["ballots"] == 0


@pytest.mark.parametrize("message", [Landed("r", 1), Roster(None), Verdict("k")])
async def test_h1_a_member_that_speaks_nonsense_is_lost(
    autojump_clock, message
) -> None:
    """What only a lead, or a consumer, says."""
    world = World()
    async with (
        world.engine("p", Pool(), rank=LEAD) as lead,
        linked(world, lead) as (link, _),
    ):
        link.post(message)
        await trio.sleep(0.1)
        assert not link.is_open
        assert lead.statistics()["ranks_joined"] == 0


async def test_votes_of_one_member_are_bounded(autojump_clock) -> None:
    """More than so many open keys fail at once; of failed ones some are remembered."""
    world = World()
    async with world.engine("p", Pool(), rank=LEAD) as lead:
        async with (
            linked(world, lead, MEMBER) as (link, heard),
            linked(world, lead, OTHER),
        ):
            await lead.instance_ready(1.0)
            instance = lead.contact.instance
            for number in range(MOST_OPEN + 100):
                link.post(Vote(f"{number:0256}", instance, 50.0))
                if number % 1000 == 0:
                    await trio.sleep(0.1)
            await trio.sleep(1.0)
            assert lead.statistics()["ballots"] == MOST_OPEN
            assert sum(isinstance(message, Verdict) for message in heard) == 100
            await trio.sleep(60.0)
            assert lead.statistics()["ballots"] == 0
            assert len(lead._instance._role._ballots._settled) == REMEMBERED
            assert len(lead._instance._agreements._early) <= REMEMBERED
        at_base(lead)


async def test_a_slow_rank_gets_no_more_than_it_reads(autojump_clock) -> None:
    """What others send to it is dropped: its link does not fill, and stays."""
    world = World()
    async with (
        world.engine("p", Pool(), rank=LEAD) as lead,
        linked(world, lead, OTHER) as (busy, _),
    ):
        slow = await join(world, lead, MEMBER)
        await trio.sleep(1.0)
        spare = Spare("r", None, (Rank(),) * 1000)
        for _ in range(1000):
            busy.post(Relay(MEMBER, spare))
            await trio.sleep(0.001)
        (queued,) = [
            link.queued_bytes
            for link in lead._listener._links
            if link.peer.rank == MEMBER
        ]
        assert queued <= RELAY_BYTES + len(encode_message(Relay(OTHER, spare))) + 64
        assert lead.statistics()["relays_dropped"] > 0
        with pytest.raises(PeerLost):
            lead._instance.send(MEMBER, spare)
        busy.post(Relay(Rank(9, 10), spare))
        await trio.sleep(0.1)
        assert busy.is_open
        await slow.aclose()


async def test_strangers_that_are_remembered_are_bounded(autojump_clock) -> None:
    """A thousand that do not belong: a few are named."""
    world = World()
    async with world.engine("p", Pool(), rank=LEAD) as lead:
        for number in range(200):
            with pytest.raises(HandshakeRefused):
                stranger = Rank(0, number + 4)
                await join(world, lead, stranger)
        assert len(lead._instance._role._refused) == 64
        with pytest.raises(InstanceIncomplete) as caught:
            await lead.instance_ready(0.0)
        assert "tp0of203" in str(caught.value)


class Scripted:
    """A lead that answers as told, and says what it is told to."""

    def __init__(self, world: World, *, engine_id: str = "p") -> None:
        self.key = key_of(LEAD)
        self.members = (Member(LEAD, "fake", "h", 1, BARE),)
        self.engine_id = engine_id
        self.answer = b""
        self.says: tuple = ()
        self.heard: list = []
        self.joins = 0
        self._world = world

    async def serve(self, *, task_status=trio.TASK_STATUS_IGNORED) -> None:
        """Serve for ever."""
        listener = await self._world.streams.listen("127.0.0.1", 45_000)
        task_status.started()
        await trio.serve_listeners(self._answer, [listener])

    async def _answer(self, stream) -> None:
        framed = FramedStream(stream)
        answer = self.answer or encode_body(Manifest(self.engine_id, self.members))

        def welcome(key, *_) -> Welcome:
            return Welcome(answer, key)

        try:
            key = await receive_call(framed, creds(self.key), welcome)
        except PeerLost:
            return
        self.joins += 1
        link = Link(framed, key, keepalive_s=5.0, silence_s=20.0)
        for message in self.says:
            link.post(message)
        await link.run(self.heard.append)


class Early(Scripted):
    """A lead that knows the manifest before anybody has joined."""

    async def _answer(self, stream) -> None:
        framed = FramedStream(stream)
        answer = encode_body(Manifest("p", self.members))

        def welcome(key, _purpose, body) -> Welcome:
            member = decode_enrolment(body).member
            every = (self.members[0], member, Member(OTHER, "x", "h", 1, BARE))
            self.says = (Roster(Manifest(self.engine_id, every)),)
            return Welcome(answer, key)

        key = await receive_call(framed, creds(self.key), welcome)
        self.joins += 1
        link = Link(framed, key, keepalive_s=5.0, silence_s=20.0)
        link.post(self.says[0])
        await link.run(self.heard.append)


def whole(generation: str) -> tuple[Member, ...]:
    return tuple(
        Member(rank, name, "h", 1, BARE)
        for rank, name in ((LEAD, "fake"), (MEMBER, generation), (OTHER, "x"))
    )


@pytest.mark.parametrize(
    "case", ["engine", "generation", "gap", "not us", "not ours", "nonsense"]
)
async def test_h1_a_lead_that_speaks_nonsense_is_left(autojump_clock, case) -> None:
    """The rank does not take it for its own instance, and goes on trying."""
    world = World()
    lead = Scripted(world)
    if case == "engine":
        lead.engine_id = "q"
    elif case == "generation":
        lead.members = (Member(LEAD, "other", "h", 1, BARE),)
    elif case == "gap":
        lead.says = (Roster(Manifest("p", whole("x")[:2])),)
    elif case == "not us":
        lead.says = (Roster(Manifest("p", whole("somebody else"))),)
    elif case == "not ours":
        lead = Early(world, engine_id="q")
    else:
        lead.says = (Landed("r", 1),)
    async with trio.open_nursery() as nursery:
        await nursery.start(lead.serve)
        async with world.engine(
            "p", Pool(), rank=MEMBER, join=("127.0.0.1", 45_000)
        ) as member:
            with pytest.raises(InstanceIncomplete):
                await member.instance_ready(20.0)
            assert lead.joins > 3
            assert member.statistics()["agreements"] == 0
        nursery.cancel_scope.cancel()


async def test_a_lead_that_never_answers_is_not_waited_for(autojump_clock) -> None:
    """It is there, and says nothing of the votes: a failure, a silence after the deadline."""
    world = World()
    lead = Early(world)
    async with trio.open_nursery() as nursery:
        await nursery.start(lead.serve)
        async with world.engine(
            "p", Pool(), rank=MEMBER, join=("127.0.0.1", 45_000), silence_s=20.0
        ) as member:
            await member.instance_ready(5.0)
            started = trio.current_time()
            with pytest.raises(DeadlineExceeded, match="silent"):
                await member.agree("k", trio.lowlevel.checkpoint, deadline_s=30.0)
            assert trio.current_time() - started == pytest.approx(50.0, abs=0.1)
            await trio.sleep(1.0)
            assert [vote.failure is None for vote in lead.heard] == [True, False]
            at_base(member)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("case", ["incomplete", "other", "without itself", "bytes"])
async def test_h1_an_answer_that_cannot_be_true(autojump_clock, case) -> None:
    """Whoever asks is told of a whole instance by one of its ranks, or of nothing."""
    world = World()
    lead = Scripted(world)
    lead.members = whole("x")
    if case == "incomplete":
        lead.members = lead.members[:2]
    elif case == "other":
        lead.engine_id = "q"
    elif case == "bytes":
        lead.answer = b"\xc1"
    elif case == "without itself":
        lead.members = (
            msgspec.structs.replace(lead.members[0], generation="y"),
            *lead.members[1:],
        )
    async with trio.open_nursery() as nursery:
        await nursery.start(lead.serve)
        async with world.engine("c", Pool()) as consumer:
            with pytest.raises(ProtocolViolation):
                await consumer.discover("p", ("127.0.0.1", 45_000))
        nursery.cancel_scope.cancel()
