"""The memory fabric: the conformance kit, then what only it can do."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvferry.engine.fabric import (
    CallFault,
    Fabric,
    MemoryNetwork,
    NoticeFault,
    Operation,
    Progress,
    TransferFault,
)
from kvferry.protocol.errors import (
    MisuseError,
    PeerLost,
    PeerUnreachable,
    TransferFailed,
)
from kvferry.protocol.layout import Region
from tests.fabric.conformance import (
    BIG,
    BIG_BYTES,
    BIG_IDS,
    CHECKS,
    LAST_CHECKS,
    both_sides,
    ids,
    run,
    settle,
)
from tests.fabric.rigs import MemoryRig, pattern

BYTES = BIG_BYTES.stop - BIG_BYTES.start


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, seed):
    """Each check of the kit, on different orders of arrival."""
    rig = MemoryRig(seed=seed)
    run(check, rig)
    rig.close()


@pytest.mark.parametrize("check", LAST_CHECKS, ids=lambda check: check.__name__)
def test_conformance_of_endings(check):
    """The checks that leave nothing to go on with."""
    rig = MemoryRig()
    check(rig)
    rig.close()


@pytest.fixture
def rig():
    rig = MemoryRig()
    rig.peer.load(1)
    return rig


def start(rig, operation=Operation.READ, notice=b""):
    """Post all of the big rows."""
    local, remote = both_sides(rig, BIG, BIG)
    return rig.fabric.post(operation, local, BIG_IDS, remote, BIG_IDS, notice=notice)


def pass_time(rig, seconds):
    rig.clock.now_s += seconds
    rig.network.settle()


def landed(rig) -> int:
    """Bytes that arrived; the pattern has a zero in 256."""
    return int(np.count_nonzero(rig.memory))


def everything() -> int:
    return int(np.count_nonzero(pattern(1)[BIG_BYTES]))


class TestTime:
    def test_bytes_move_late_and_by_and_by(self, rig):
        """Nothing at the post, then more and more, all at last."""
        transfer = start(rig)
        seen = [landed(rig)]
        while rig.fabric.poll(transfer) is Progress.ACTIVE:
            rig.tick()
            seen.append(landed(rig))
        assert seen[0] == 0
        assert seen == sorted(seen)
        assert len(set(seen)) > 4
        assert seen[-1] == everything()

    def test_bytes_are_read_when_they_move(self, rig):
        """A source that changes in flight gives what it holds by then."""
        transfer = start(rig)
        rig.peer.load(2)
        assert settle(rig, transfer) is Progress.DONE
        assert np.array_equal(rig.memory[BIG_BYTES], pattern(2)[BIG_BYTES])

    def test_the_same_seed_moves_the_same_way(self):
        """Bytes half-way through are a function of the seed alone."""
        halves = []
        for _ in range(2):
            rig = MemoryRig(seed=9)
            rig.peer.load(1)
            start(rig)
            pass_time(rig, 0.0016)
            halves.append(rig.memory.copy())
        assert 0 < np.count_nonzero(halves[0]) < everything()
        assert np.array_equal(*halves)

    def test_no_latency_is_done_at_once(self):
        """As NIXL copies inside the post on one host (nixl-facts row 2)."""
        rig = MemoryRig(latency_s=0)
        rig.network._bytes_per_s = float("inf")
        assert rig.fabric.poll(start(rig)) is Progress.DONE

    def test_may_touch_tells_what_is_under_way(self, rig):
        """Both ends of a copy, until it has moved."""
        sides = (rig.address + BIG_BYTES.start, rig.peer.address + BIG_BYTES.start)
        assert not any(rig.network.may_touch(side, BYTES) for side in sides)
        transfer = start(rig)
        assert all(rig.network.may_touch(side, BYTES) for side in sides)
        assert not rig.network.may_touch(rig.address, BIG_BYTES.start)
        settle(rig, transfer)
        assert not any(rig.network.may_touch(side, BYTES) for side in sides)


class TestCallFaults:
    def test_raises_at_the_nth_call_and_posts_nothing(self, rig):
        """The calls before and after it are as ever."""
        error = TransferFailed("no")
        rig.network.faults.add(
            CallFault(fabric="initiator*", method="post", nth=2, error=error)
        )
        settle(rig, start(rig))
        with pytest.raises(TransferFailed) as caught:
            start(rig)
        assert caught.value is error
        assert rig.fabric.counts()["transfers"] == 0
        settle(rig, start(rig))

    def test_leaves_other_fabrics_alone(self, rig):
        """A pattern that does not match does not count."""
        rig.network.faults.add(
            CallFault(fabric="peer*", method="metadata", error=TransferFailed("no"))
        )
        rig.fabric.metadata()
        with pytest.raises(TransferFailed):
            rig.peer.metadata()

    def test_every_call(self, rig):
        """Without a count it never ends, until it is cleared."""
        rig.network.faults.add(
            CallFault(method="notify", nth=None, error=PeerLost("no"))
        )
        for _ in range(3):
            with pytest.raises(PeerLost):
                rig.fabric.notify(rig.name, b"")
        rig.network.faults.clear()
        rig.fabric.notify(rig.name, b"")

    def test_an_action_comes_before_the_call(self, rig):
        """So a peer can die in the middle of anything."""
        kill = partial(rig.network.kill, rig.name)
        rig.network.faults.add(CallFault(method="post", action=kill))
        with pytest.raises(PeerLost):
            start(rig)

    def test_calls_are_counted(self, rig):
        """For sweeps over every n."""
        before = rig.network.faults.calls[rig.fabric.name, "poll"]
        transfer = start(rig)
        rig.fabric.poll(transfer)
        rig.fabric.poll(transfer)
        assert rig.network.faults.calls[rig.fabric.name, "poll"] - before == 2

    @pytest.mark.parametrize("method", sorted(Fabric.__abstractmethods__))
    def test_every_method_can_have_one(self, method):
        """Each method passes by the rules."""
        network = MemoryNetwork(now=lambda: 0.0)
        fabric, other = network.fabric("a"), network.fabric("b")
        memory = np.zeros(64, np.uint8)
        for each in (fabric, other):
            each.register([Region("DRAM", 0, memory.ctypes.data, 64)])
        fabric.connect(other.metadata())
        rows = np.array([[memory.ctypes.data, 8, 0, 8, 8]], np.uint64)
        local = fabric.prepare(None, "DRAM", rows)
        remote = fabric.prepare("b", "DRAM", rows)
        calls = {
            "register": lambda: fabric.register([]),
            "metadata": fabric.metadata,
            "connect": lambda: fabric.connect(b""),
            "disconnect": lambda: fabric.disconnect("b"),
            "prepare": lambda: fabric.prepare(None, "DRAM", rows),
            "discard": lambda: fabric.discard(local),
            "post": lambda: fabric.post(Operation.READ, local, ids(0), remote, ids(0)),
            "poll": lambda: fabric.poll(flying),
            "release": lambda: fabric.release(flying),
            "notify": lambda: fabric.notify("b", b""),
            "take_notices": fabric.take_notices,
            "close": fabric.close,
        }
        flying = fabric.post(Operation.READ, local, ids(0), remote, ids(0))
        network.faults.add(CallFault(method=method, error=TransferFailed("here")))
        if method == "counts":
            fabric.counts()
            return
        with pytest.raises(TransferFailed, match="here"):
            calls[method]()

    def test_rules_that_never_fire_are_refused(self):
        """A misspelt method or a count from 0 would be a test of nothing."""
        with pytest.raises(MisuseError, match="pst"):
            CallFault(method="pst")
        with pytest.raises(MisuseError, match="nth=0"):
            TransferFault(nth=0)


class TestTransferFaults:
    def test_delay(self, rig):
        """All of it later."""
        rig.network.faults.add(TransferFault(delay_s=5))
        transfer = start(rig)
        pass_time(rig, 4.9)
        assert (rig.fabric.poll(transfer), landed(rig)) == (Progress.ACTIVE, 0)
        assert settle(rig, transfer) is Progress.DONE

    def test_stall(self, rig):
        """A part moves, and it is ACTIVE for ever."""
        rig.network.faults.add(TransferFault(progress=Progress.ACTIVE, moved=0.5))
        transfer = start(rig)
        pass_time(rig, 1e6)
        assert rig.fabric.poll(transfer) is Progress.ACTIVE
        assert 0 < landed(rig) < everything()

    def test_failed_comes_after_the_last_byte(self, rig):
        """Settled means that nothing moves any more, though not all arrived."""
        rig.network.faults.add(TransferFault(progress=Progress.FAILED, moved=0.5))
        transfer = start(rig)
        assert settle(rig, transfer) is Progress.FAILED
        assert isinstance(transfer.cause, TransferFailed)
        before = rig.memory.copy()
        pass_time(rig, 1e6)
        assert np.array_equal(rig.memory, before)
        assert 0 < landed(rig) < everything()

    @pytest.mark.parametrize("recovers", [True, False])
    def test_lost(self, rig, recovers):
        """Said at once while bytes move; DONE afterwards only if it recovers."""
        cause = TransferFailed("who knows")
        rig.network.faults.add(
            TransferFault(progress=Progress.LOST, cause=cause, recovers=recovers)
        )
        transfer = start(rig)
        assert (rig.fabric.poll(transfer), landed(rig)) == (Progress.LOST, 0)
        assert transfer.cause is cause
        pass_time(rig, 1e6)
        assert landed(rig) == everything()
        expected = Progress.DONE if recovers else Progress.LOST
        assert rig.fabric.poll(transfer) is expected

    def test_only_the_nth(self, rig):
        """Others go their way."""
        rig.network.faults.add(TransferFault(nth=2, progress=Progress.FAILED))
        outcomes = [settle(rig, start(rig)) for _ in range(3)]
        assert outcomes == [Progress.DONE, Progress.FAILED, Progress.DONE]


class TestNoticeFaults:
    def send(self, rig, *faults, count=3):
        for fault in faults:
            rig.network.faults.add(fault)
        for i in range(count):
            rig.fabric.notify(rig.name, bytes([i]))
            pass_time(rig, 0.01)
        pass_time(rig, 10)
        return [notice.payload[0] for notice in rig.peer.notices()]

    def test_in_time(self, rig):
        """Without a rule each comes once."""
        assert self.send(rig) == [0, 1, 2]

    def test_dropped(self, rig):
        """No copy arrives."""
        assert self.send(rig, NoticeFault(nth=2, copies=0)) == [0, 2]

    def test_doubled(self, rig):
        """Two copies arrive."""
        assert self.send(rig, NoticeFault(nth=2, copies=2)) == [0, 1, 1, 2]

    def test_overtaken(self, rig):
        """A late one comes behind those sent after it."""
        assert self.send(rig, NoticeFault(delay_s=1)) == [1, 2, 0]

    def test_attached_ones_count_too(self, rig):
        """And leave only when the initiator polls the end (nixl-facts row 25)."""
        rig.network.faults.add(NoticeFault(nth=2, copies=0))
        transfers = [start(rig, notice=bytes([i])) for i in range(3)]
        pass_time(rig, 10)
        pass_time(rig, 10)
        assert rig.peer.notices() == []
        for transfer in transfers:
            settle(rig, transfer)
        pass_time(rig, 10)
        assert sorted(n.payload[0] for n in rig.peer.notices()) == [0, 2]


class TestWholeFabrics:
    def test_kill_stops_the_bytes(self, rig):
        """What has not moved never does; the transfer failed for that reason."""
        transfer = start(rig)
        pass_time(rig, 0.0016)
        rig.network.kill("peer*")
        before = rig.memory.copy()
        pass_time(rig, 10)
        assert np.array_equal(rig.memory, before)
        assert not rig.network.may_touch(rig.address, len(rig.memory))
        assert rig.fabric.poll(transfer) is Progress.FAILED
        assert isinstance(transfer.cause, PeerLost)

    def test_killed_initiators_stop_too(self, rig):
        """Nobody writes for the dead."""
        start(rig)
        rig.network.kill("initiator*")
        pass_time(rig, 10)
        assert landed(rig) == 0

    def test_frozen_bytes_move_when_thawed(self, rig):
        """Whoever of the two is frozen; what is overdue then moves at once."""
        transfer = start(rig)
        rig.network.freeze("initiator*")
        pass_time(rig, 10)
        assert (landed(rig), rig.fabric.poll(transfer)) == (0, Progress.ACTIVE)
        assert rig.network.may_touch(rig.address + BIG_BYTES.start, BYTES)
        rig.network.thaw("*")
        assert (landed(rig), rig.fabric.poll(transfer)) == (everything(), Progress.DONE)

    def test_frozen_peers_answer_a_connect_and_hear_later(self, rig):
        """As a kernel does for a stopped process."""
        rig.network.freeze(rig.name)
        rig.fabric.connect(rig.peer.metadata())
        rig.fabric.notify(rig.name, b"later")
        pass_time(rig, 10)
        assert rig.peer.notices() == []
        rig.network.thaw(rig.name)
        assert [n.payload for n in rig.peer.notices()] == [b"later"]

    def test_closing_in_flight_is_told(self, rig):
        """And nothing touches the closed one's memory afterwards."""
        start(rig)
        rig.fabric.close()
        assert rig.network.closed_in_flight == [rig.fabric.name]
        pass_time(rig, 10)
        assert landed(rig) == 0

    def test_closing_when_settled_is_quiet(self, rig):
        """The others see it as gone."""
        settle(rig, start(rig))
        rig.peer.close()
        assert rig.network.closed_in_flight == []
        with pytest.raises(PeerLost):
            rig.fabric.notify(rig.name, b"")
        with pytest.raises(PeerUnreachable):
            rig.fabric.connect(b"kvferry-memory-agent:" + rig.name.encode())

    def test_names_are_unique_for_ever(self, rig):
        """As NIXL remembers them (nixl-facts row 28)."""
        rig.peer.close()
        with pytest.raises(MisuseError, match="used before"):
            rig.network.fabric(rig.name)

    def test_unknown_names_are_refused(self, rig):
        """A fault that hits nobody is a mistake of the test."""
        for method in (rig.network.kill, rig.network.freeze, rig.network.thaw):
            with pytest.raises(MisuseError, match="nobody"):
                method("nobody")
        assert rig.network.names("nobody") == ()


@pytest.mark.parametrize(
    "region",
    [Region("VRAM", 0, 4096, 1), Region("DRAM", 0, 0, 1), Region("DRAM", 0, 4096, 0)],
    ids=["device", "null", "empty"],
)
def test_only_host_memory_is_registered(rig, region):
    """Device addresses cannot be copied from here."""
    with pytest.raises(MisuseError, match="host memory"):
        rig.fabric.register([region])
