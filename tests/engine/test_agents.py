"""`Agents`: who holds which remote agent, also while connecting one takes a while."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from kvferry.engine.agents import Agents
from kvferry.protocol.errors import PeerUnreachable, ProtocolViolation
from tests.kit import World


class Slow:
    """A fabric that connects when the test lets it, by names alone.

    Attributes:
        known: The agents that are connected.
        gates: Opens for whoever connects: metadata -> event.
    """

    name = "ours"

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.gates: dict[bytes, trio.Event] = {}

    async def connect_aside(self, metadata: bytes) -> str:
        name = metadata.decode()
        self.known |= {name} - {"gone"}  # as a thread does, before the loop hears of it
        self.gates[metadata] = trio.Event()
        await self.gates[metadata].wait()
        if name not in self.known:
            raise PeerUnreachable("no answer")
        return name

    def disconnect(self, name: str) -> None:
        self.known.remove(name)


@pytest.fixture
def fabric() -> Slow:
    return Slow()


@pytest.fixture
def agents(fabric) -> Agents:
    return Agents(fabric, log=World().logger())


async def connected(nursery, agents, fabric, name, holder):
    nursery.start_soon(agents.connect, name, holder)
    await trio.testing.wait_all_tasks_blocked()
    fabric.gates[name].set()
    await trio.testing.wait_all_tasks_blocked()


async def test_an_agent_is_forgotten_when_its_last_holder_has_let_go(
    nursery, agents, fabric
) -> None:
    """Also one that has let go twice, or never held it."""
    for holder in ("reads", "pushes"):
        await connected(nursery, agents, fabric, b"peer", holder)
    for _ in range(2):
        agents.let_go("peer", "reads")
    agents.let_go("peer", "nobody")
    agents.let_go("unknown", "reads")
    assert fabric.known == {"peer"}
    agents.let_go("peer", "pushes")
    assert not fabric.known


async def test_an_agent_that_is_being_connected_again_is_not_forgotten_meanwhile(
    nursery, agents, fabric
) -> None:
    """Nobody knows its name before: what was let go of is forgotten afterwards."""
    await connected(nursery, agents, fabric, b"peer", "reads")
    await connected(nursery, agents, fabric, b"other", "reads")
    nursery.start_soon(agents.connect, b"peer", "pushes")
    await trio.testing.wait_all_tasks_blocked()
    agents.let_go("peer", "reads")
    agents.let_go("other", "reads")
    assert fabric.known == {"peer", "other"}
    fabric.gates[b"peer"].set()
    await trio.testing.wait_all_tasks_blocked()
    assert fabric.known == {"peer"}
    agents.let_go("peer", "pushes")
    assert not fabric.known


@pytest.mark.parametrize(
    ("metadata", "error"), [(b"gone", PeerUnreachable), (b"ours", ProtocolViolation)]
)
async def test_whatever_was_let_go_of_is_forgotten_after_a_failure(
    nursery, agents, fabric, metadata, error
) -> None:
    """One that cannot be reached, or shows our own agent, holds nothing."""
    await connected(nursery, agents, fabric, b"peer", "reads")

    async def fail() -> None:
        with pytest.raises(error):
            await agents.connect(metadata, "reads")

    nursery.start_soon(fail)
    await trio.testing.wait_all_tasks_blocked()
    agents.let_go("peer", "reads")
    assert "peer" in fabric.known
    fabric.gates[metadata].set()
    await trio.testing.wait_all_tasks_blocked()
    assert not fabric.known
