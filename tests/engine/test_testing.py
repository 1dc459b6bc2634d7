"""The fault harness by itself: what a schedule draws, what a ledger refuses, how a host ends."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import trio
import trio.testing

from kvferry.engine import EngineConfig, FerryError, PeerLost
from kvferry.engine.fabric import Operation, Progress
from kvferry.engine.quarantine import Quarantine, QuarantineEntry
from kvferry.engine.testing import (
    Hold,
    Host,
    Ledger,
    LedgerBroken,
    MemoryNetwork,
    NoticeFault,
    Rates,
    Schedule,
    ScheduleFailed,
    TransferFault,
)
from kvferry.protocol.layout import Region
from tests.kit import GROUP, IDENTITY, Pool

NOTHING = Rates(**dict.fromkeys(Rates.__dataclass_fields__, 0.0))
LOOKS = {"poll_s": 0.02, "offered_poll_s": 0.1, "idle_poll_s": 0.5}


def only(**rates: float) -> Rates:
    """Rates at which only these things happen."""
    return Rates(**{**vars(NOTHING), "late_s": 0.1, "stalled_s": 2.0, **rates})


async def nothing() -> None:
    pass


# Schedule


def test_thinned_rates_leave_some_kinds_out_and_durations_alone() -> None:
    thinned = Rates().thinned(random.Random(1))
    chances = {k: v for k, v in vars(thinned).items() if not k.endswith("_s")}
    assert 0 < sum(not chance for chance in chances.values()) < len(chances)
    assert thinned.late_s == Rates().late_s
    assert thinned.stalled_s == Rates().stalled_s


def test_a_failure_says_its_seed_and_its_story() -> None:
    schedule = Schedule(17, rates=NOTHING)

    async def scenario() -> None:
        await trio.sleep(2)
        schedule.tell("it gets dark")
        raise ValueError("no light")

    with pytest.raises(ScheduleFailed, match=r"seed 17: .*no light.*\n  2.000 it gets"):
        schedule.play(scenario)


def test_a_failing_act_fails_the_run() -> None:
    schedule = Schedule(1, rates=only(acts=1.0))

    def act() -> None:
        raise ValueError("the act")

    async def scenario() -> None:
        with schedule.may("act", act):
            await trio.sleep(1)
            await trio.sleep(1)

    with pytest.raises(ScheduleFailed, match="the act"):
        schedule.play(scenario)


def test_acts_happen_while_they_may_and_are_undone() -> None:
    """Only inside of `may`; what was done is undone in time, or with the calm."""
    schedule = Schedule(3, rates=only(acts=0.2))
    told: list[str] = []

    async def scenario() -> None:
        may = schedule.may(
            "stop", partial(told.append, "stop"), undo=partial(told.append, "go")
        )
        with may:
            for _ in range(40):
                await trio.sleep(0.5)
        before = told.count("stop")
        assert before > 2
        assert told.count("go") > 0
        for _ in range(40):
            await trio.sleep(0.01)
        assert told.count("stop") == before
        schedule.calm()
        assert told.count("go") == before

    schedule.play(scenario)
    assert sum(line.endswith(" stop") for line in schedule.story) == 2 * told.count(
        "go"
    )


def test_nothing_goes_wrong_at_rates_of_zero_or_in_the_calm() -> None:
    for schedule in (Schedule(1, rates=NOTHING), Schedule(1)):
        schedule.calm()
        faults = schedule.network.faults
        for _ in range(50):
            faults.on_call("a", "post")
            assert faults.on_transfer("a") == TransferFault()
            assert faults.on_notice("a") == NoticeFault()
        assert not schedule.story


@pytest.mark.parametrize(
    ("kind", "is_so"),
    [
        ("late_transfers", lambda fault: 0 < fault.delay_s <= 0.1),
        ("stalled_transfers", lambda fault: 0 < fault.delay_s <= 2.0),
        ("failing_transfers", lambda fault: fault.progress is Progress.FAILED),
        ("lost_transfers", lambda fault: fault.recovers),
        ("lost_notices", lambda fault: fault.copies == 0),
        ("doubled_notices", lambda fault: fault.copies == 2),
        ("late_notices", lambda fault: 0 < fault.delay_s <= 0.1),
    ],
)
def test_each_kind_of_fault_comes_by_its_rate(kind, is_so) -> None:
    schedule = Schedule(5, rates=only(**{kind: 1.0}))

    async def scenario() -> None:
        faults = schedule.network.faults
        draw = faults.on_notice if "notice" in kind else faults.on_transfer
        assert all(is_so(draw("a")) for _ in range(20))

    schedule.play(scenario)
    assert len(schedule.story) == 20


def test_a_rule_goes_before_the_draw() -> None:
    """A test may still say by counting what happens to one of them."""
    schedule = Schedule(5, rates=only(late_transfers=1.0, late_notices=1.0))

    async def scenario() -> None:
        faults = schedule.network.faults
        faults.add(TransferFault(progress=Progress.FAILED))
        faults.add(NoticeFault(copies=3))
        assert faults.on_transfer("a").progress is Progress.FAILED
        assert faults.on_notice("a").copies == 3
        assert faults.on_transfer("a").delay_s

    schedule.play(scenario)


def test_calls_fail_but_for_those_that_give_back() -> None:
    schedule = Schedule(5, rates=only(failing_calls=1.0))

    async def scenario() -> None:
        faults = schedule.network.faults
        for method in ("connect", "prepare", "post", "poll", "take_notices"):
            with pytest.raises(FerryError, match="a fault of the schedule"):
                faults.on_call("a", method)
        for method in ("discard", "release", "disconnect", "close", "register"):
            faults.on_call("a", method)

    schedule.play(scenario)


# Host and Wire


def played(schedule: Schedule, scenario) -> None:
    schedule.play(partial(scenario, schedule))


async def on_a_pair(schedule: Schedule, body) -> None:
    """Run a body beside a producer and a consumer: their hosts and engines."""
    pools = {"p": Pool(4), "c": Pool(4)}
    hosts = {name: Host(schedule, name) for name in pools}
    up = {name: trio.Event() for name in pools}

    async def live(name: str, nursery: trio.Nursery) -> None:
        async def stay(_engine) -> None:
            up[name].set()
            await trio.sleep_forever()

        config = EngineConfig(
            engine_id=name, identity=IDENTITY, connect_timeout_s=1.0, **LOOKS
        )
        await hosts[name].run(config, pools[name].cache, stay)

    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            for name in pools:
                nursery.start_soon(live, name, nursery)
            for event in up.values():
                await event.wait()
            await body(hosts, pools)
            nursery.cancel_scope.cancel()


def offered(hosts, pools):
    return hosts["p"].engine.offer(
        "r", pools["p"].stamp([1], num_tokens=4), num_tokens=4
    )


@pytest.mark.parametrize("which", ["p", "c"])
def test_a_frozen_host_neither_hears_nor_says_anything(which) -> None:
    """Either side of a link; everything goes on when it is thawed."""

    async def body(hosts, pools) -> None:
        offer = offered(hosts, pools)
        hosts[which].freeze()
        with trio.move_on_after(0.9) as scope:
            await hosts["c"].engine.pull(offer.ticket, {GROUP: [2]})
        assert scope.cancelled_caught
        hosts[which].thaw()
        hosts[which].thaw()
        await offer.wait()
        pools["c"].fill([2], -1.0)
        offer = offered(hosts, pools)
        await hosts["c"].engine.pull(offer.ticket, {GROUP: [2]})
        pools["c"].check([2], num_tokens=4)

    played(Schedule(1, rates=NOTHING), partial(on_a_pair, body=body))


def test_a_cut_link_is_dialled_anew() -> None:
    async def body(hosts, pools) -> None:
        hosts["p"].cut()  # there is none yet
        for _ in range(2):
            offer = offered(hosts, pools)
            await hosts["c"].engine.pull(offer.ticket, {GROUP: [2]})
            hosts["p"].cut()
            await trio.testing.wait_all_tasks_blocked()
            assert hosts["c"].engine.statistics()["peers"] == 0
        assert hosts["c"].engine._peers.dials.handshakes == 2

    played(Schedule(1, rates=NOTHING), partial(on_a_pair, body=body))


def test_a_killed_host_is_gone_at_once() -> None:
    """Its links end, its port refuses, its bytes do not move; and it stays so."""

    async def body(hosts, pools) -> None:
        offer = offered(hosts, pools)
        other = hosts["p"].engine.offer("s", {GROUP: [2]}, num_tokens=4)
        consumer = hosts["c"].engine
        schedule = hosts["c"]._schedule
        schedule.network.faults.add(TransferFault(fabric="c", delay_s=50))

        async def killed() -> None:
            with pytest.raises(PeerLost):
                await consumer.pull(offer.ticket, {GROUP: [2]})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(killed)
            await trio.sleep(1)
            hosts["p"].kill()
            hosts["p"].freeze()
            hosts["p"].thaw()
        with pytest.raises(FerryError, match="nobody answers"):
            await consumer.pull(other.ticket, {GROUP: [3]})
        assert pools["c"].is_untouched()

    played(Schedule(1, rates=NOTHING), partial(on_a_pair, body=body))


@pytest.mark.parametrize("kind", ["late_messages", "streams_in_pieces"])
def test_links_bear_what_comes_late_and_in_pieces(kind) -> None:
    async def body(hosts, pools) -> None:
        offer = offered(hosts, pools)
        await hosts["c"].engine.pull(offer.ticket, {GROUP: [2]})
        pools["c"].check([2], num_tokens=4)

    schedule = Schedule(1, rates=only(**{kind: 1.0}))
    played(schedule, partial(on_a_pair, body=body))
    assert bool(schedule.story) == (kind == "late_messages")


@pytest.mark.parametrize("kind", ["broken_dials", "doubled_messages"])
def test_dials_are_broken_and_messages_doubled(kind) -> None:
    """A handshake said twice is no handshake."""

    async def body(hosts, pools) -> None:
        offer = offered(hosts, pools)
        with pytest.raises(FerryError):
            await hosts["c"].engine.pull(offer.ticket, {GROUP: [2]})

    schedule = Schedule(1, rates=only(**{kind: 1.0}))
    played(schedule, partial(on_a_pair, body=body))
    assert schedule.story


def test_a_wire_hands_out_no_more_than_asked_for() -> None:
    schedule = Schedule(1, rates=only(late_messages=1.0))

    async def scenario() -> None:
        wires = [Host(schedule, name)._wire for name in "ab"]
        listener = await wires[0].listen("127.0.0.1", 0)
        ours = await wires[1].dial(listener.host, listener.port)
        theirs = await listener.accept()
        await ours.wait_send_all_might_not_block()
        await ours.send_all(b"12345")
        with trio.move_on_after(0):  # a cancellation loses nothing
            await theirs.receive_some(5)
        got = [await theirs.receive_some(2) for _ in range(3)]
        assert got == [b"12", b"34", b"5"]
        await ours.aclose()
        assert await theirs.receive_some() == b""
        await theirs.aclose()
        await listener.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await listener.accept()

    schedule.play(scenario)


# Ledger


class Books:
    """A ledger over two agents, with one transfer from b's memory to a's."""

    def __init__(self, now=lambda: 0.0) -> None:
        self.network = MemoryNetwork(now=now)
        self.memory = {name: np.zeros((4, 8), np.uint64) for name in "ab"}
        self.quarantine = Quarantine()
        self.ledger = Ledger(self.network)
        self.freed: list[int] = []
        extents = [[(row.ctypes.data, row.nbytes)] for row in self.memory["a"]]
        self.account = self.ledger.open(
            "a", "g", extents, self.quarantine, on_free=self.freed.extend
        )

    def move(self, block: int, operation: Operation = Operation.READ) -> None:
        """Bytes are under way to a block of a's, or from it."""
        fabrics = {}
        for name, memory in self.memory.items():
            fabrics[name] = self.network.fabric(name)
            region = Region("DRAM", 0, memory.ctypes.data, memory.nbytes)
            fabrics[name].register([region])
        a = fabrics["a"]
        peer = a.connect(fabrics["b"].metadata())
        rows = {
            name: np.array([[m.ctypes.data, 64, 0, 64, 4]], np.uint64)
            for name, m in self.memory.items()
        }
        ours = a.prepare(None, "DRAM", rows["a"])
        theirs = a.prepare(peer, "DRAM", rows["b"])
        ids = np.array([block], np.int32)
        a.post(operation, ours, ids, theirs, ids)


def test_blocks_are_taken_once_and_given_back_by_their_owner() -> None:
    books = Books()
    account = books.account
    account.take("r", Hold.OFFERED, [1, 2])
    assert account.free == (0, 3)
    with pytest.raises(LedgerBroken, match="block 2 of a, 'g': taken by s, owned by"):
        account.take("s", Hold.DESTINATION, [2])
    with pytest.raises(LedgerBroken, match=r"block 1 .*given back by s, owned by"):
        account.give_back("s", [1])
    with pytest.raises(LedgerBroken, match=r"block 0 .*owned by None"):
        account.give_back("r", [0])
    with pytest.raises(LedgerBroken, match="a still holds"):
        books.ledger.check(is_over=True)
    account.give_back("r", [1, 2])
    assert books.freed == [1, 2]
    books.ledger.check(is_over=True)


def test_a_block_is_not_given_back_while_bytes_can_land_in_it() -> None:
    """Nor taken; the other blocks are."""
    books = Books()
    books.account.take("r", Hold.DESTINATION, [1, 2])
    books.move(2)
    books.account.give_back("r", [1])
    with pytest.raises(LedgerBroken, match=r"block 2 .*while bytes can land"):
        books.account.give_back("r", [2])
    fresh = Books()
    fresh.move(0)
    with pytest.raises(LedgerBroken, match="taken by r while bytes can land"):
        fresh.account.take("r", Hold.DESTINATION, [0])


def test_a_block_that_is_read_from_may_be_given_back() -> None:
    """The reader's fence fails; its own blocks are another matter."""
    books = Books()
    extents = [[(row.ctypes.data, row.nbytes)] for row in books.memory["b"]]
    account = books.ledger.open("b", "g", extents, Quarantine())
    account.take("r", Hold.OFFERED, [2])
    books.move(2)
    assert books.network.may_touch(*extents[2][0])
    assert not books.network.may_write(*extents[2][0])
    account.give_back("r", [2])


def test_a_pushed_block_is_not_given_back_while_its_bytes_leave() -> None:
    """Nor does it leave the quarantine then; what others read from it is theirs."""
    books = Books()
    books.account.take("r", Hold.PUSHED, [1, 2])
    books.move(2, Operation.WRITE)
    books.account.give_back("r", [1])
    with pytest.raises(LedgerBroken, match=r"block 2 .*while bytes of it can leave"):
        books.account.give_back("r", [2])
    entry = QuarantineEntry("r", "b", None, 0.0, {"g": (2,)})
    books.quarantine.hold(entry)
    books.account.give_back("r", [2])
    books.quarantine.reclaim(entry)
    with pytest.raises(LedgerBroken, match=r"block 2 .*while bytes of it can leave"):
        books.ledger.check()


@pytest.mark.parametrize("has_landed", [True, False])
def test_what_leaves_a_quarantine_is_safe_or_found(has_landed) -> None:
    clock = [0.0]
    books = Books(now=lambda: clock[0])
    books.account.take("r", Hold.DESTINATION, [1, 2])
    books.move(2)
    entry = QuarantineEntry("r", "b", None, 0.0, {"g": (1, 2)})
    books.quarantine.hold(entry)
    books.account.give_back("r", [1, 2])
    books.ledger.check()
    assert books.account.quarantined == {1, 2}
    assert not books.freed
    if has_landed:
        clock[0] = 1.0
        books.network.settle()
    books.quarantine.reclaim(entry)
    if has_landed:
        books.ledger.check(is_over=True)
        assert books.freed == [1, 2]
    else:
        with pytest.raises(LedgerBroken, match="while bytes can land"):
            books.ledger.check()


def test_a_request_has_one_outcome() -> None:
    ledger = Books().ledger
    ledger.settle("r", "done")
    with pytest.raises(LedgerBroken, match="r is failed, and was done before"):
        ledger.settle("r", "failed")


def test_a_dead_engine_has_no_account() -> None:
    books = Books()
    books.account.take("r", Hold.DESTINATION, [1])
    books.ledger.close("a")
    books.ledger.check(is_over=True)
