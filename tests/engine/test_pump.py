"""The pump: how often it looks, and what it tells of a transfer."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import trio
import trio.testing

from kvferry.engine import EngineConfig, MisuseError, PeerLost, TransferFailed
from kvferry.engine.fabric import (
    CallFault,
    MemoryNetwork,
    Operation,
    Progress,
    TransferFault,
)
from kvferry.engine.fabric.base import LARGE_BYTES
from kvferry.engine.fabric.memory import MemoryFabric
from kvferry.engine.pump import MISSES, Cadence, Pump
from kvferry.protocol.layout import Region
from tests.kit import IDENTITY, World

BUSY_S, OFFERED_S, IDLE_S = 0.01, 0.1, 1.0
SIZE = 64


class Rig:
    """A pump over one of two fabrics, each with a little memory."""

    def __init__(self, nursery) -> None:
        self.network = MemoryNetwork(latency_s=0.35)
        self.memory = np.zeros((2, SIZE), np.uint8)
        self.ours, self.theirs = (self.network.fabric(name) for name in "ab")
        for fabric, memory in zip((self.ours, self.theirs), self.memory, strict=True):
            fabric.register([Region("DRAM", 0, memory.ctypes.data, SIZE)])
        peer = self.ours.connect(self.theirs.metadata())
        self.sides = [
            self.ours.prepare(who, "DRAM", rows(memory))
            for who, memory in zip((None, peer), self.memory, strict=True)
        ]
        self.world = World()
        self.notices = []
        config = EngineConfig(
            engine_id="e",
            identity=IDENTITY,
            poll_s=BUSY_S,
            offered_poll_s=OFFERED_S,
            idle_poll_s=IDLE_S,
        )
        self.pump = Pump(
            self.ours, config, on_notice=self.notices.append, log=self.world.logger()
        )
        self.told = []
        self.heard = trio.Event()
        nursery.start_soon(self.pump.run)

    def post(self):
        """A transfer, tracked."""
        ids = np.arange(1, dtype=np.int32)
        transfer = self.ours.post(
            Operation.READ, self.sides[0], ids, self.sides[1], ids
        )
        self.pump.track(transfer, self.tell)
        return transfer

    def tell(self, progress, cause) -> None:
        """What the pump tells of it."""
        self.told.append((progress, cause))
        self.heard.set()

    async def rounds(self, seconds) -> int:
        """How often the pump looks in a while."""
        before = self.pump.rounds
        await trio.sleep(seconds)
        return self.pump.rounds - before


def rows(memory):
    """One row over all of it."""
    return np.array([[memory.ctypes.data, SIZE, 0, SIZE, 1]], np.uint64)


async def test_it_looks_as_often_as_is_claimed(autojump_clock) -> None:
    """Fast while bytes move, slower while blocks are on offer, slow when idle."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        await trio.sleep(0.001)
        assert await rig.rounds(10) == pytest.approx(10 / IDLE_S, abs=1)
        with rig.pump.claim(Cadence.OFFERED):
            assert await rig.rounds(10) == pytest.approx(10 / OFFERED_S, abs=2)
            with rig.pump.claim(Cadence.BUSY), rig.pump.claim(Cadence.BUSY):
                assert await rig.rounds(10) == pytest.approx(10 / BUSY_S, abs=2)
            assert await rig.rounds(10) == pytest.approx(10 / OFFERED_S, abs=2)
        assert await rig.rounds(10) == pytest.approx(10 / IDLE_S, abs=2)
        nursery.cancel_scope.cancel()


async def test_a_claim_is_noticed_at_once(autojump_clock) -> None:
    """It does not wait for the next slow look."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        await trio.sleep(0.001)
        with rig.pump.claim(Cadence.BUSY):
            assert await rig.rounds(0.5 * BUSY_S) >= 1
        nursery.cancel_scope.cancel()


class Driven(MemoryFabric):
    """Drives itself while it is to, and notes what it is to expect."""

    def __init__(self) -> None:
        super().__init__(MemoryNetwork(), "driven")
        self.is_driven = True
        self.told: list[bool] = []

    @property
    def drives_itself(self) -> bool:
        return self.is_driven

    def expect(self, *, large: bool) -> None:
        self.told.append(large)


async def test_a_fabric_that_drives_itself_is_looked_at_when_there_is_news(
    autojump_clock,
) -> None:
    """And seldom otherwise, whatever is claimed; as ever as soon as it does not."""
    async with trio.open_nursery() as nursery:
        rig, fabric = Rig(nursery), Driven()
        rig.pump._fabric = fabric
        with rig.pump.claim(Cadence.BUSY):
            await trio.sleep(0.001)
            assert await rig.rounds(10) == pytest.approx(10 / IDLE_S, abs=2)
            for _ in range(5):
                rig.pump.wake()
                assert await rig.rounds(0.01 * IDLE_S) == 1
            fabric.is_driven = False
            rig.pump.wake()
            assert await rig.rounds(10) == pytest.approx(10 / BUSY_S, abs=2)
        nursery.cancel_scope.cancel()


async def test_the_fabric_hears_once_when_large_transfers_are_to_be_expected(
    autojump_clock,
) -> None:
    """With the first claim of one, and with the end of the last."""
    async with trio.open_nursery() as nursery:
        rig, fabric = Rig(nursery), Driven()
        rig.pump._fabric, claim = fabric, rig.pump.claim
        with claim(Cadence.OFFERED, LARGE_BYTES - 1), claim(Cadence.BUSY):
            assert fabric.told == []
            with claim(Cadence.OFFERED, LARGE_BYTES), claim(Cadence.BUSY, 1 << 40):
                assert fabric.told == [True]
            assert fabric.told == [True, False]
            with suppress(ValueError), claim(Cadence.OFFERED, LARGE_BYTES):
                raise ValueError
        assert fabric.told == [True, False] * 2
        nursery.cancel_scope.cancel()


async def test_a_transfer_makes_it_busy_until_it_settles(autojump_clock) -> None:
    """Told once, within one look of its last byte; then it is slow again."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        started = trio.current_time()
        rig.post()
        assert rig.pump.unsettled == 1
        await rig.heard.wait()
        assert 0.35 <= trio.current_time() - started <= 0.7 + 2 * BUSY_S
        assert rig.told == [(Progress.DONE, None)]
        assert rig.pump.unsettled == 0
        assert rig.ours.counts()["transfers"] == 0
        assert await rig.rounds(10) == pytest.approx(10 / IDLE_S, abs=2)
        assert len(rig.told) == 1
        nursery.cancel_scope.cancel()


async def test_lost_is_told_once_and_then_settled(autojump_clock) -> None:
    """It stays unsettled, and is looked at, until the transport knows again."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        rig.network.faults.add(
            TransferFault(progress=Progress.LOST, recovers=True, delay_s=5.0)
        )
        rig.post()
        assert [progress for progress, _ in rig.told] == [Progress.LOST]
        assert isinstance(rig.told[0][1], TransferFailed)
        await trio.sleep(4)
        assert len(rig.told) == 1
        assert rig.pump.unsettled == 1
        assert rig.ours.counts()["transfers"] == 1
        assert await rig.rounds(1) == pytest.approx(1 / OFFERED_S, abs=2)
        await trio.sleep(5)
        assert [progress for progress, _ in rig.told] == [Progress.LOST, Progress.DONE]
        assert rig.pump.unsettled == 0
        assert rig.ours.counts()["transfers"] == 0
        nursery.cancel_scope.cancel()


async def test_a_failure_is_told_with_its_cause(autojump_clock) -> None:
    """And the transfer is released."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        cause = TransferFailed("this one")
        rig.network.faults.add(TransferFault(progress=Progress.FAILED, cause=cause))
        rig.post()
        await trio.sleep(2)
        assert rig.told == [(Progress.FAILED, cause)]
        assert rig.ours.counts()["transfers"] == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("method", ["poll", "release", "take_notices"])
async def test_it_survives_a_fabric_that_raises(autojump_clock, method) -> None:
    """An error is logged or told; the next transfer settles as ever."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        rig.network.faults.add(
            CallFault(fabric="a", method=method, error=PeerLost("injected"))
        )
        rig.post()
        await trio.sleep(2)
        assert rig.told[-1] == (Progress.DONE, None)
        rig.post()
        await trio.sleep(2)
        assert rig.told[-1] == (Progress.DONE, None)
        assert rig.pump.unsettled == 0
        if method == "poll":
            assert [told[0] for told in rig.told] == [
                Progress.LOST,
                Progress.DONE,
                Progress.DONE,
            ]
        else:
            assert len(rig.told) == 2
            assert len(rig.world.logged(f"{method.split('_')[-1]}_failed")) == 1
        nursery.cancel_scope.cancel()


async def test_every_notice_is_handed_over_once(autojump_clock) -> None:
    """In the order in which they arrived."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        rig.theirs.connect(rig.ours.metadata())
        for number in range(5):
            rig.theirs.notify("a", bytes([number]))
        await trio.sleep(3)
        assert sorted(notice.payload[0] for notice in rig.notices) == list(range(5))
        assert {notice.sender for notice in rig.notices} == {"b"}
        with pytest.raises(MisuseError):
            rig.theirs.notify("a", bytes(5000))
        nursery.cancel_scope.cancel()


async def test_a_round_looks_at_few_however_many_are_open(autojump_clock) -> None:
    """And yet each is looked at in its turn, the oldest in every round."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        nursery.cancel_scope.cancel()  # the rounds are the test's
        rig.network.faults.add(TransferFault(progress=Progress.ACTIVE, nth=None))
        transfers = [rig.post() for _ in range(1000)]
        polls = rig.network.faults.calls
        before = polls["a", "poll"]
        for _ in range(len(transfers)):
            seen = polls["a", "poll"]
            rig.pump.round()
            assert polls["a", "poll"] - seen <= 2 * MISSES
        assert polls["a", "poll"] - before == 2 * MISSES * len(transfers)
        rig.network.faults.clear()


async def test_all_settle_whatever_the_order_they_end_in(autojump_clock) -> None:
    """Those behind many that are stuck are found all the same, each told once."""
    async with trio.open_nursery() as nursery:
        rig = Rig(nursery)
        stuck = TransferFault(progress=Progress.ACTIVE, nth=None)
        rig.network.faults.add(stuck)
        for _ in range(4 * MISSES):
            rig.post()
        rig.network.faults.clear()
        for _ in range(200):
            rig.post()
        await trio.sleep(10)
        assert rig.told == [(Progress.DONE, None)] * 200
        assert rig.pump.unsettled == 4 * MISSES
        nursery.cancel_scope.cancel()
