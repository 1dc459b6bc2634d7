"""`CopyingFabric`: which of the two agents posts, and what the second one is told."""

# ruff: noqa: ARG002 - a stand-in takes what it is given

from __future__ import annotations

import numpy as np
import pytest
import trio

from kvferry.engine.fabric import Operation, Prepared, Progress, Transfer
from kvferry.engine.fabric.base import Fabric
from kvferry.engine.fabric.copying import LARGE_BYTES, LATE_POSTS, CopyingFabric
from kvferry.protocol.errors import MisuseError, PeerUnreachable
from kvferry.protocol.layout import Region

REGION = Region("DRAM", 0, 4096, 1 << 30)
LARGE = np.array([[4096, LARGE_BYTES, 0, LARGE_BYTES, 8]], np.uint64)
SMALL = np.array([[4096, LARGE_BYTES // 16, 0, LARGE_BYTES, 8]], np.uint64)
ONE = np.zeros(1, np.int32)


class Agent(Fabric):
    """Notes what it is asked; its posts are done at once if they are to be."""

    def __init__(self) -> None:
        self.name = "agent"
        self.progress = Progress.DONE
        self.refuses = False
        self.is_closed = False
        self.posts = 0
        self.registered: list[Region] = []
        self.peers: list[str] = []
        self.prepared: list[Prepared] = []
        self.open: list[Transfer] = []

    def register(self, regions):
        if self.refuses:
            raise MisuseError("not this memory")
        self.registered += regions

    def metadata(self):
        return b"agent"

    def connect(self, metadata):
        if self.refuses:
            raise PeerUnreachable("not this way")
        self.peers.append(metadata.decode())
        return self.peers[-1]

    def disconnect(self, peer):
        self.peers.remove(peer)

    def prepare(self, peer, memory, rows):
        self.prepared.append(Prepared())
        return self.prepared[-1]

    def discard(self, prepared):
        self.prepared.remove(prepared)

    def post(self, operation, local, local_ids, remote, remote_ids, *, notice=b""):
        assert local in self.prepared
        assert remote in self.prepared
        self.posts += 1
        self.open.append(Transfer())
        return self.open[-1]

    def poll(self, transfer):
        assert transfer in self.open
        return self.progress

    def release(self, transfer):
        self.open.remove(transfer)

    def notify(self, peer, payload):
        raise NotImplementedError

    def take_notices(self):
        return []

    def close(self):
        self.is_closed = True

    def counts(self):
        return {"peers": len(self.peers), "prepared": len(self.prepared),
                "transfers": len(self.open), "dropped_notices": 0}  # fmt: skip


class World:
    """A fabric of two such agents, with a peer, and posts of any size to it."""

    def __init__(self, late_s: float = 0.0) -> None:
        self.first, self.second = Agent(), Agent()
        self.made = 0
        self.fabric = CopyingFabric(self.first, self.make, late_s=late_s)
        self.fabric.register([REGION])
        self.fabric.connect(b"peer")
        self.sides = {
            id(rows): (
                self.fabric.prepare(None, "DRAM", rows),
                self.fabric.prepare("peer", "DRAM", rows),
            )
            for rows in (SMALL, LARGE)
        }

    def make(self) -> Agent:
        self.made += 1
        return self.second

    def post(self, rows=LARGE) -> None:
        local, remote = self.sides[id(rows)]
        transfer = self.fabric.post(Operation.READ, local, ONE, remote, ONE)
        assert self.fabric.poll(transfer) in set(Progress)
        self.fabric.release(transfer)

    def learn(self) -> None:
        for _ in range(LATE_POSTS):
            self.post()

    async def attend(self) -> None:
        with trio.fail_after(5):
            await self.fabric.attend(lambda: None)


@pytest.fixture
def world() -> World:
    """In which every post is late."""
    return World()


async def test_large_posts_go_to_the_second_once_some_were_copied_here(world):
    """Small ones stay; the second knows memory, peer and rows then, and not before."""
    world.learn()
    assert world.fabric.is_wanted
    assert world.first.posts == LATE_POSTS
    await world.attend()
    assert world.second.registered == [REGION]
    assert not world.second.peers
    world.post()
    world.post(SMALL)
    assert (world.first.posts, world.second.posts) == (LATE_POSTS + 1, 1)
    assert world.second.peers == ["peer"]
    assert world.fabric.copies == 1
    assert world.made == 1


@pytest.mark.parametrize("progress", [Progress.ACTIVE, Progress.FAILED])
async def test_a_post_that_is_not_done_when_it_is_back_teaches_nothing(world, progress):
    """However late: over a network, one may be done at once by chance, and never so many."""
    for _ in range(3):
        for _ in range(LATE_POSTS - 1):
            world.post()
        world.first.progress = progress
        world.post()
        world.first.progress = Progress.DONE
    assert not world.fabric.is_wanted


async def test_posts_that_are_back_soon_teach_nothing():
    """Whoever moves the bytes, it was not this thread."""
    world = World(late_s=1e9)
    world.learn()
    assert not world.fabric.is_wanted


async def test_small_posts_teach_nothing(world):
    """They stay with the first anyway."""
    for _ in range(LATE_POSTS):
        world.post(SMALL)
    assert not world.fabric.is_wanted


async def test_device_memory_stays_with_the_first(world):
    """What a device moves needs no thread of ours, though the peer's host memory does."""
    local = world.fabric.prepare(None, "VRAM", LARGE)
    remote = world.fabric.prepare("peer", "DRAM", LARGE)
    for _ in range(LATE_POSTS):
        world.fabric.post(Operation.READ, local, ONE, remote, ONE)
    assert not world.fabric.is_wanted
    world.learn()
    await world.attend()
    world.fabric.post(Operation.READ, local, ONE, remote, ONE)
    assert not world.second.posts
    world.post()
    assert world.second.posts == 1


async def test_a_peer_that_the_second_cannot_meet_stays_with_the_first(world):
    """Nothing is lost, and it is not tried for every post."""
    world.learn()
    await world.attend()
    world.second.refuses = True
    world.post()
    world.second.refuses = False
    world.post()
    assert (world.first.posts, world.second.posts) == (LATE_POSTS + 2, 0)


@pytest.mark.parametrize(
    "error", [PeerUnreachable("no second one"), RuntimeError("can't start new thread")]
)
async def test_a_second_agent_that_cannot_be_made_is_done_without(world, error):
    """The engine runs as ever."""

    def fail() -> Agent:
        raise error

    world.fabric._make_second = fail
    world.learn()
    await world.attend()
    world.post()
    assert world.first.posts == LATE_POSTS + 1


async def test_a_second_agent_that_cannot_have_the_memory_is_closed(world):
    """It is no use, and its threads are not left behind."""
    world.learn()
    world.second.refuses = True
    await world.attend()
    assert world.second.is_closed
    world.post()
    assert (world.first.posts, world.second.posts) == (LATE_POSTS + 1, 0)


@pytest.mark.parametrize("is_made", [False, True])
async def test_memory_that_the_second_does_not_take_later_is_the_first_s(
    world, is_made
):
    """A staging buffer comes while the second is made, or afterwards."""
    world.learn()
    if is_made:
        await world.attend()
    else:
        # Registered in the worker thread, behind the regions that it was told of.
        made_second = world.fabric._made_second

        def and_one_more(regions):
            made = made_second(regions)
            world.second.refuses = True
            trio.from_thread.run_sync(world.fabric.register, [REGION])
            return made

        world.fabric._made_second = and_one_more
        await world.attend()
    world.second.refuses = True
    world.fabric.register([REGION])
    assert len(world.first.registered) == 2 + (not is_made)
    assert world.second.registered == [REGION]
    assert not world.second.is_closed


async def test_both_forget_what_is_forgotten(world):
    """Peers, rows, and memory that comes later: no resource stays behind."""
    world.learn()
    await world.attend()
    world.post()
    world.fabric.register([REGION])
    assert world.second.registered == [REGION] * 2
    assert world.fabric.counts()["prepared"] == 4 + 2
    for sides in world.sides.values():
        for prepared in sides:
            world.fabric.discard(prepared)
            with pytest.raises(MisuseError):
                world.fabric.discard(prepared)
    world.fabric.disconnect("peer")
    for agent in (world.first, world.second):
        assert not agent.peers
        assert not agent.prepared
    world.fabric.close()
    assert world.first.is_closed
    assert world.second.is_closed


async def test_a_peer_that_comes_back_is_learnt_anew(world):
    """Its next start may be on another host."""
    world.learn()
    await world.attend()
    world.post()
    world.fabric.disconnect("peer")
    world.fabric.connect(b"peer")
    world.post()
    assert (world.first.posts, world.second.posts) == (LATE_POSTS + 1, 1)


async def test_a_peer_is_met_aside_if_the_first_can(world):
    """And the second meets it as any other, when it is to copy."""
    first, connect = world.first, world.first.connect

    async def connect_aside(metadata: bytes) -> str:
        await trio.lowlevel.checkpoint()
        return connect(metadata)

    world.fabric.disconnect("peer")
    first.connect, first.connect_aside = None, connect_aside
    assert await world.fabric.connect_aside(b"peer") == "peer"
    assert first.peers == ["peer"]
    world.learn()
    await world.attend()
    world.post()
    assert world.second.peers == ["peer"]


async def test_a_second_agent_that_comes_too_late_is_closed(world):
    """The engine may have ended while it was made."""
    world.learn()
    world.fabric.close()
    await world.attend()
    assert world.second.is_closed
    assert not world.second.posts
