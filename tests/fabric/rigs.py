"""The places that the conformance checks run in: an initiator here, a peer somewhere.

Not a test file, and no pytest in it: `over_tcp.py` uses it in a child.
"""

from __future__ import annotations

import abc
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import trio

from kvferry.engine.fabric import Fabric, MemoryNetwork, Notice
from kvferry.engine.fabric.aside import AsideFabric
from kvferry.protocol.layout import Region
from tests.processes import Child

SIZE = 1 << 20
GAP = 4096
DEADLINE_S = 10.0
PEER = Path(__file__).with_name("peer.py")
_serial = count()


def unique(stem: str) -> str:
    """An agent name that was never used (nixl-facts row 28)."""
    return f"{stem}-{next(_serial)}"


def pattern(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def digest(memory: np.ndarray) -> str:
    return hashlib.sha256(memory.tobytes()).hexdigest()


def regions(memory: np.ndarray) -> list[Region]:
    """Two regions with unregistered memory between them and around."""
    start, half = memory.ctypes.data, SIZE // 2
    return [
        Region("DRAM", 0, start + GAP, half - 2 * GAP),
        Region("DRAM", 0, start + half, half - GAP),
    ]


def new_nixl(name: str) -> Fabric:
    # Not at the top: whoever only uses the memory rig need not wait for it.
    from kvferry.engine.fabric.nixl import NixlFabric  # noqa: PLC0415

    return NixlFabric(name)


class Served(AsideFabric):
    """An agent that a thread has from the beginning to the end; its loop is elsewhere."""

    def __init__(self, name: str) -> None:
        super().__init__(new_nixl(name))
        self.expect(large=True)
        self._scope = trio.CancelScope()
        self._loop = ThreadPoolExecutor(1).submit(trio.run, self._run)
        while not self._custody._has_it.done():
            time.sleep(0.001)  # noqa: TID251 - a real thread

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            await self.attend(lambda: None)

    def close(self) -> None:
        """Take it back before."""
        if not self._loop.done():
            trio.from_thread.run_sync(self._scope.cancel, trio_token=self._token)
            self._loop.result()
        super().close()


class Peer(abc.ABC):
    """The other side, wherever it is: an agent over ``SIZE`` bytes of memory."""

    address: int

    @abc.abstractmethod
    def metadata(self) -> bytes: ...

    @abc.abstractmethod
    def load(self, seed: int) -> None:
        """Fill its memory with `pattern`."""

    @abc.abstractmethod
    def dump(self) -> np.ndarray:
        """What its memory holds."""

    @abc.abstractmethod
    def notices(self) -> list[Notice]:
        """Those that arrived since the last call."""

    @abc.abstractmethod
    def restart(self) -> None:
        """A new agent with another name over the same memory."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def kill(self) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        """Stop its progress."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError


class Rig:
    """An initiator with memory of its own, connected to a peer."""

    def __init__(self, fabric: Fabric, peer: Peer) -> None:
        self.fabric = fabric
        self.memory = np.zeros(SIZE, np.uint8)
        self.address = self.memory.ctypes.data
        fabric.register(regions(self.memory))
        self.peer = peer
        self.name = fabric.connect(peer.metadata())

    def tick(self) -> None:
        """Let a little time go by."""
        time.sleep(0.0002)  # noqa: TID251 - paces the polling of a real transport

    def until(self, condition, what: str):
        """Poll a condition until it is true, and return it."""
        deadline = time.monotonic() + DEADLINE_S  # noqa: TID251 - real transport
        while not (found := condition()):
            if time.monotonic() > deadline:  # noqa: TID251 - real transport
                raise TimeoutError(what)
            self.tick()
        return found

    def close(self) -> None:
        self.fabric.close()
        self.peer.close()


class LocalPeer(Peer):
    """A peer in this process."""

    def __init__(self, new_fabric) -> None:
        self._new_fabric = new_fabric
        self.memory = np.zeros(SIZE, np.uint8)
        self.address = self.memory.ctypes.data
        self._arrived: list[Notice] = []
        self._start()

    def _start(self) -> None:
        self.fabric = self._new_fabric(unique("peer"))
        self.fabric.register(regions(self.memory))

    def metadata(self) -> bytes:
        return self.fabric.metadata()

    def load(self, seed: int) -> None:
        self.memory[:] = pattern(seed)

    def dump(self) -> np.ndarray:
        return self.memory.copy()

    def progress(self) -> None:
        self._arrived += self.fabric.take_notices()

    def notices(self) -> list[Notice]:
        self.progress()
        arrived, self._arrived = self._arrived, []
        return arrived

    def restart(self) -> None:
        self.fabric.close()
        self._start()

    def close(self) -> None:
        self.fabric.close()


class LocalRig(Rig):
    """Both agents in this process."""

    peer: LocalPeer

    def tick(self) -> None:
        self.peer.progress()


class MemoryPeer(LocalPeer):
    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        super().__init__(network.fabric)

    def kill(self) -> None:
        self.network.kill(self.fabric.name)

    def pause(self) -> None:
        self.network.freeze(self.fabric.name)

    def resume(self) -> None:
        self.network.thaw(self.fabric.name)


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 12345.0

    def __call__(self) -> float:
        return self.now_s


class MemoryRig(LocalRig):
    """The memory fabric, on a clock that each tick moves by 100 us."""

    peer: MemoryPeer

    def __init__(self, *, seed: int = 0, latency_s: float = 0.001) -> None:
        self.clock = HandClock()
        self.network = MemoryNetwork(now=self.clock, seed=seed, latency_s=latency_s)
        fabric = self.network.fabric(unique("initiator"))
        super().__init__(fabric, MemoryPeer(self.network))

    def tick(self) -> None:
        self.clock.now_s += 0.0001
        self.peer.progress()


class ChildPeer(Peer):
    """A peer in a process of its own, on real NIXL."""

    def __init__(self) -> None:
        self.child = Child(PEER)
        self.address = self.child.hear()

    def metadata(self) -> bytes:
        return bytes.fromhex(self.child.ask("metadata"))

    def load(self, seed: int) -> None:
        self.child.ask("load", seed)

    def dump(self) -> np.ndarray:
        return np.frombuffer(bytes.fromhex(self.child.ask("dump")), np.uint8)

    def notices(self) -> list[Notice]:
        return [
            Notice(who, bytes.fromhex(what)) for who, what in self.child.ask("notices")
        ]

    def restart(self) -> None:
        self.child.ask("restart", unique("peer"))

    def kill(self) -> None:
        self.child.kill()

    def pause(self) -> None:
        self.child.ask("pause")

    def resume(self) -> None:
        self.child.ask("resume")

    def close(self) -> None:
        self.child.reap()
