"""The conformance kit: what every `Fabric` must do, as checks that take a `Rig`.

`CHECKS` leave a rig as they found it; `LAST_CHECKS` ruin its peer or its agent.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.engine.fabric import (
    MAX_NOTICE_BYTES,
    Notice,
    Operation,
    Prepared,
    Progress,
    Transfer,
)
from kvferry.protocol.errors import (
    EngineClosed,
    ImpossiblePlan,
    MisuseError,
    PeerLost,
    PeerUnreachable,
    ProtocolViolation,
)
from tests.fabric.rigs import GAP, SIZE, Rig, pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

READ, WRITE = Operation.READ, Operation.WRITE
ROWS = ((GAP, 96, 256, 40), (3 * SIZE // 4, 96, 96, 7), (SIZE // 2, 96, 1000, 100))
"""(offset, run, stride, count): padded, dense and unaligned, of unequal counts."""
DESCRIPTORS = 147


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def array(address: int, rows: Iterable[tuple[int, int, int, int]]) -> np.ndarray:
    """Rows in the form that `Fabric.prepare` takes, from offsets."""
    return np.array(
        [(address + at, run, 0, stride, n) for at, run, stride, n in rows], np.uint64
    )


def both_sides(rig: Rig, ours=ROWS, theirs=ROWS) -> tuple[Prepared, Prepared]:
    return (
        rig.fabric.prepare(None, "DRAM", array(rig.address, ours)),
        rig.fabric.prepare(rig.name, "DRAM", array(rig.peer.address, theirs)),
    )


def places(rows, chosen) -> list[slice]:
    """Where in the memory the descriptors of some ids lie, worked out the slow way."""
    every = [
        slice(at + i * stride, at + i * stride + run)
        for at, run, stride, n in rows
        for i in range(n)
    ]
    return [every[i] for i in chosen]


def settle(rig: Rig, transfer: Transfer) -> Progress:
    """Poll to the end, then release."""
    progress = rig.until(
        lambda: (p := rig.fabric.poll(transfer)).is_settled and p, "settled"
    )
    rig.fabric.release(transfer)
    return progress


def move(rig, operation, ours, our_ids, theirs, their_ids, notice=b"") -> None:
    """Move with prepared rows that exist only as long."""
    local, remote = both_sides(rig, ours, theirs)
    transfer = rig.fabric.post(
        operation, local, our_ids, remote, their_ids, notice=notice
    )
    assert settle(rig, transfer) is Progress.DONE
    rig.fabric.discard(local)
    rig.fabric.discard(remote)


def expect_moved(rig, operation, ours, our_ids, theirs, their_ids) -> None:
    """Move between two patterns: the bytes asked for have moved and no others."""
    rig.memory[:] = pattern(1)
    rig.peer.load(2)
    here, there = pattern(1), pattern(2)
    pairs = zip(places(ours, our_ids), places(theirs, their_ids), strict=True)
    for mine, its in pairs:
        if operation is READ:
            here[mine] = there[its]
        else:
            there[its] = here[mine]
    move(rig, operation, ours, our_ids, theirs, their_ids)
    assert np.array_equal(rig.memory, here)
    assert np.array_equal(rig.peer.dump(), there)


def read_is_byte_exact(rig: Rig) -> None:
    """Scattered ids over strided rows: padding and neighbours stay untouched."""
    chosen = np.random.default_rng(3).permutation(DESCRIPTORS)[:60].astype(np.int32)
    other = np.random.default_rng(4).permutation(DESCRIPTORS)[:60].astype(np.int32)
    expect_moved(rig, READ, ROWS, chosen, ROWS, other)


def write_is_byte_exact(rig: Rig) -> None:
    """The same the other way."""
    chosen = np.random.default_rng(5).permutation(DESCRIPTORS)[:60].astype(np.int32)
    other = np.random.default_rng(6).permutation(DESCRIPTORS)[:60].astype(np.int32)
    expect_moved(rig, WRITE, ROWS, chosen, ROWS, other)


def ids_pair_in_order(rig: Rig) -> None:
    """The i-th id of one side goes with the i-th of the other, sorted or not."""
    expect_moved(rig, READ, ROWS, ids(5, 0, 146, 7), ROWS, ids(146, 1, 0, 100))


def ids_run_through_the_rows(rig: Rig) -> None:
    """Row after row, each as long as its own count, unlike on the two sides."""
    theirs = tuple(reversed(ROWS))
    edges = ids(0, 39, 40, 46, 47, 146)
    expect_moved(rig, READ, ROWS, edges, theirs, ids(146, 107, 106, 100, 99, 0))


def one_source_feeds_many(rig: Rig) -> None:
    """A remote id may come twice in a read."""
    expect_moved(rig, READ, ROWS, ids(1, 2, 3), ROWS, ids(9, 9, 9))


def many_descriptors(rig: Rig) -> None:
    """Thousands at once, in order and backwards."""
    rows = ((SIZE // 2, 16, 64, 8000),)
    forwards = np.arange(8000, dtype=np.int32)
    expect_moved(rig, READ, rows, forwards, rows, forwards[::-1].copy())
    expect_moved(rig, WRITE, rows, forwards, rows, forwards)


def one_descriptor_without_stride(rig: Rig) -> None:
    """A row of one descriptor may have any stride that is not shorter than it."""
    rows = ((SIZE // 2, 64, 1 << 50, 1),)
    expect_moved(rig, READ, rows, ids(0), rows, ids(0))


def prepared_rows_serve_many_transfers(rig: Rig) -> None:
    """Several in flight from the same rows, settling in any order."""
    rig.memory[:] = 0
    rig.peer.load(7)
    local, remote = both_sides(rig)
    flying = [
        rig.fabric.post(READ, local, ids(i), remote, ids(i)) for i in range(DESCRIPTORS)
    ]
    assert rig.fabric.counts()["transfers"] == DESCRIPTORS
    assert {settle(rig, transfer) for transfer in flying} == {Progress.DONE}
    rig.fabric.discard(local)
    rig.fabric.discard(remote)
    for place in places(ROWS, range(DESCRIPTORS)):
        assert np.array_equal(rig.memory[place], pattern(7)[place])


def attached_notice_follows_the_bytes(rig: Rig) -> None:
    """When the peer has the notice of a write, it has the bytes."""
    rig.memory[:] = pattern(8)
    rig.peer.load(9)
    local, remote = both_sides(rig)
    all_ids = np.arange(DESCRIPTORS, dtype=np.int32)
    transfer = rig.fabric.post(WRITE, local, all_ids, remote, all_ids, notice=b"it is")

    def arrived() -> list[Notice]:
        rig.fabric.poll(transfer)
        return rig.peer.notices()

    assert rig.until(arrived, "notice") == [Notice(rig.fabric.name, b"it is")]
    there = rig.peer.dump()
    for place in places(ROWS, all_ids):
        assert np.array_equal(there[place], rig.memory[place])
    assert settle(rig, transfer) is Progress.DONE
    rig.fabric.discard(local)
    rig.fabric.discard(remote)


def standalone_notice_arrives(rig: Rig) -> None:
    """Any bytes, up to the longest."""
    payloads = {b"\0\xff one", b"n" * MAX_NOTICE_BYTES}
    for payload in payloads:
        rig.fabric.notify(rig.name, payload)
    arrived: list[Notice] = []

    def all_here() -> bool:
        arrived.extend(rig.peer.notices())
        return len(arrived) == len(payloads)

    rig.until(all_here, "notices")
    assert {notice.payload for notice in arrived} == payloads
    assert {notice.sender for notice in arrived} == {rig.fabric.name}


def oversize_notice_is_refused(rig: Rig) -> None:
    """By itself or attached: the peer would drop it."""
    with pytest.raises(MisuseError, match="4097"):
        rig.fabric.notify(rig.name, b"n" * (MAX_NOTICE_BYTES + 1))
    expect_refused(rig, MisuseError, ids(0), ids(0), notice=b"n" * 5000)


def unknown_peer_is_lost(rig: Rig) -> None:
    """For rows and for notices; forgetting it is no error."""
    with pytest.raises(PeerLost, match="nobody"):
        rig.fabric.prepare("nobody", "DRAM", array(rig.peer.address, ROWS))
    with pytest.raises(PeerLost, match="nobody"):
        rig.fabric.notify("nobody", b"hello")
    rig.fabric.disconnect("nobody")


def garbage_is_not_metadata(rig: Rig) -> None:
    """Whatever is not an agent's metadata is the peer's nonsense."""
    for garbage in (b"", b"garbage", b"\0" * 300, rig.peer.metadata()[:10]):
        with pytest.raises(ProtocolViolation):
            rig.fabric.connect(garbage)


def rows_out_of_bounds_are_refused(rig: Rig) -> None:
    """On either side: before, behind, between and across the registered regions."""
    half = SIZE // 2
    outside = {
        "before": (GAP - 1, 64, 64, 2),
        "behind": (SIZE - GAP - 64, 64, 65, 2),
        "between": (half - GAP, 64, 64, 1),
        "into the gap": (half - GAP - 64, 64, 64, 2),
        "across the gap": (GAP, 64, half, 2),
    }
    for row in outside.values():
        for side, address in ((None, rig.address), (rig.name, rig.peer.address)):
            expect_rows_refused(rig, side, "DRAM", array(address, [ROWS[0], row]))


def expect_rows_refused(rig, side, memory, rows) -> None:
    """By `prepare`, or by the first post if somebody else prepares them."""
    try:
        bad = rig.fabric.prepare(side, memory, rows)
    except ImpossiblePlan:
        return
    local, remote = both_sides(rig)
    good = remote if side is None else local
    sides = (bad, ids(0), good, ids(0)) if side is None else (good, ids(0), bad, ids(0))
    expect_post_refused(rig, ImpossiblePlan, *sides)
    for prepared in (bad, local, remote):
        rig.fabric.discard(prepared)


def rows_that_make_no_sense_are_refused(rig: Rig) -> None:
    """Empty, overlapping or wrapping rows, wrong shapes, another memory or device."""
    good = array(rig.address, ROWS)
    nonsense = [
        array(rig.address, [(GAP, *rest)])
        for rest in (
            (0, 64, 2),
            (64, 64, 0),
            (64, 63, 2),
            (64, 0, 2),
            (64, 2**63, 3),
            (64, 2**64 - 64, 2),
            (2**63, 2**63, 1),
            (1, 1, 2**40),
        )
    ]
    nonsense += [good[:0], good[0], good[:, :4].copy(), good.astype(np.int64)]
    elsewhere = good.copy()
    elsewhere[:, 2] = 5
    for rows in nonsense:
        with pytest.raises(ImpossiblePlan):
            rig.fabric.prepare(None, "DRAM", rows)
    expect_rows_refused(rig, None, "DRAM", elsewhere)
    expect_rows_refused(rig, None, "VRAM", good)


def expect_post_refused(rig, error, *sides, **more) -> None:
    """At once, or by a transfer that fails if somebody else posts it."""
    try:
        transfer = rig.fabric.post(READ, *sides, **more)
    except error:
        return
    assert settle(rig, transfer) is Progress.FAILED
    assert isinstance(transfer.cause, error)


def expect_refused(rig, error, our_ids, their_ids, *, swap=False, **more) -> None:
    """A post is refused, and neither side's memory nor the counts change."""
    rig.memory[:] = pattern(10)
    rig.peer.load(11)
    local, remote = both_sides(rig)
    sides = (
        (remote, their_ids, local, our_ids)
        if swap
        else (local, our_ids, remote, their_ids)
    )
    expect_post_refused(rig, error, *sides, **more)
    assert rig.fabric.counts()["transfers"] == 0
    rig.fabric.discard(local)
    rig.fabric.discard(remote)
    for _ in range(50):
        rig.tick()
    assert np.array_equal(rig.memory, pattern(10))


def ids_out_of_range_are_refused(rig: Rig) -> None:
    """On either side, below and above, among good ones."""
    for bad in (-1, DESCRIPTORS, 2**31 - 1):
        expect_refused(rig, ImpossiblePlan, ids(0, bad), ids(0, 1))
        expect_refused(rig, ImpossiblePlan, ids(0, 1), ids(bad, 0))


def ids_that_do_not_pair_are_refused(rig: Rig) -> None:
    """Unequal lengths, none at all, swapped sides."""
    expect_refused(rig, ImpossiblePlan, ids(0, 1), ids(0))
    expect_refused(rig, ImpossiblePlan, ids(), ids())
    expect_refused(rig, ImpossiblePlan, ids(0), ids(0), swap=True)


def ids_of_another_form_are_refused(rig: Rig) -> None:
    """Not int32, not contiguous, not one-dimensional."""
    every_second = np.arange(8, dtype=np.int32)[::2]
    for bad in (
        ids(0, 1).astype(np.int64),
        ids(0, 1, 2, 3).reshape(2, 2),
        every_second,
    ):
        expect_refused(rig, ImpossiblePlan, bad, np.arange(len(bad), dtype=np.int32))


def runs_that_differ_are_refused(rig: Rig) -> None:
    """A descriptor goes to one of its own length only."""
    local, remote = both_sides(rig, ((GAP, 32, 64, 4),), ((GAP, 64, 64, 4),))
    expect_post_refused(rig, ImpossiblePlan, local, ids(0), remote, ids(0))
    rig.fabric.discard(local)
    rig.fabric.discard(remote)


def discarded_rows_are_refused(rig: Rig) -> None:
    """And cannot be discarded twice."""
    local, remote = both_sides(rig)
    rig.fabric.discard(local)
    with pytest.raises(MisuseError):
        rig.fabric.post(READ, local, ids(0), remote, ids(0))
    with pytest.raises(MisuseError):
        rig.fabric.discard(local)
    rig.fabric.discard(remote)


def release_comes_once_and_last(rig: Rig) -> None:
    """Not before the transfer has settled, and not twice."""
    local, remote = both_sides(rig)
    transfer = rig.fabric.post(READ, local, ids(0), remote, ids(0))
    with pytest.raises(MisuseError):
        rig.fabric.release(transfer)
    assert settle(rig, transfer) is Progress.DONE
    with pytest.raises(MisuseError):
        rig.fabric.release(transfer)
    assert rig.fabric.poll(transfer) is Progress.DONE
    rig.fabric.discard(local)
    rig.fabric.discard(remote)


def connecting_twice_changes_nothing(rig: Rig) -> None:
    """Rows that were prepared before go on to work."""
    local, remote = both_sides(rig)
    assert rig.fabric.connect(rig.peer.metadata()) == rig.name
    transfer = rig.fabric.post(READ, local, ids(0), remote, ids(0))
    assert settle(rig, transfer) is Progress.DONE
    rig.fabric.discard(local)
    rig.fabric.discard(remote)


def reconnecting_makes_old_rows_useless(rig: Rig) -> None:
    """Rows are of one connection: after the next they say so and can be discarded."""
    local, remote = both_sides(rig)
    rig.fabric.disconnect(rig.name)
    expect_post_refused(rig, PeerLost, local, ids(0), remote, ids(0))
    assert rig.fabric.connect(rig.peer.metadata()) == rig.name
    expect_post_refused(rig, PeerLost, local, ids(0), remote, ids(0))
    rig.fabric.discard(local)
    rig.fabric.discard(remote)
    read_is_byte_exact(rig)


def a_new_agent_takes_over(rig: Rig) -> None:
    """The peer starts anew under another name over the same memory."""
    old = rig.name
    rig.fabric.disconnect(old)
    rig.peer.restart()
    rig.name = rig.fabric.connect(rig.peer.metadata())
    assert rig.name != old
    read_is_byte_exact(rig)
    standalone_notice_arrives(rig)


CHECKS: tuple[Callable[[Rig], None], ...] = (
    read_is_byte_exact,
    write_is_byte_exact,
    ids_pair_in_order,
    ids_run_through_the_rows,
    one_source_feeds_many,
    many_descriptors,
    one_descriptor_without_stride,
    prepared_rows_serve_many_transfers,
    attached_notice_follows_the_bytes,
    standalone_notice_arrives,
    oversize_notice_is_refused,
    unknown_peer_is_lost,
    garbage_is_not_metadata,
    rows_out_of_bounds_are_refused,
    rows_that_make_no_sense_are_refused,
    ids_out_of_range_are_refused,
    ids_that_do_not_pair_are_refused,
    ids_of_another_form_are_refused,
    runs_that_differ_are_refused,
    discarded_rows_are_refused,
    release_comes_once_and_last,
    connecting_twice_changes_nothing,
    reconnecting_makes_old_rows_useless,
    a_new_agent_takes_over,
)


def run(check: Callable[[Rig], None], rig: Rig) -> None:
    """Run a check, and see everything back to base."""
    base = rig.fabric.counts()
    check(rig)
    assert rig.fabric.counts() == base
    assert rig.fabric.take_notices() == []


BIG = ((SIZE // 2, 4096, 4096, 120),)
BIG_IDS = np.arange(120, dtype=np.int32)
BIG_BYTES = slice(SIZE // 2, SIZE // 2 + 120 * 4096)


def post_to_a_paused_peer(rig: Rig) -> Transfer:
    """A read that cannot end by itself: its target does not progress."""
    rig.memory[:] = 0
    rig.peer.load(12)
    local, remote = both_sides(rig, BIG, BIG)
    rig.peer.pause()
    transfer = rig.fabric.post(READ, local, BIG_IDS, remote, BIG_IDS)
    for _ in range(100):
        rig.tick()
        assert rig.fabric.poll(transfer) is Progress.ACTIVE
    return transfer


def a_hung_peer_is_waited_for(rig: Rig) -> None:
    """A transfer with a peer that does not move is ACTIVE, then DONE when it does."""
    transfer = post_to_a_paused_peer(rig)
    rig.peer.resume()
    assert settle(rig, transfer) is Progress.DONE
    assert np.array_equal(rig.memory[BIG_BYTES], pattern(12)[BIG_BYTES])


def a_killed_peer_fails_what_is_in_flight(rig: Rig) -> None:
    """With PeerLost as the cause; whatever is tried with it afterwards raises."""
    metadata = rig.peer.metadata()
    transfer = post_to_a_paused_peer(rig)
    rig.peer.kill()
    assert (
        rig.until(
            lambda: (p := rig.fabric.poll(transfer)) is not Progress.ACTIVE and p,
            "failed",
        )
        is Progress.FAILED
    )
    assert isinstance(transfer.cause, PeerLost)
    rig.fabric.release(transfer)
    local, remote = (p for p in prepared_now(rig))
    expect_post_refused(rig, PeerLost, local, BIG_IDS, remote, BIG_IDS)
    assert rig.fabric.counts()["transfers"] == 0
    with suppress(PeerLost) if rig.fabric.drives_itself else pytest.raises(PeerLost):
        rig.fabric.notify(rig.name, b"are you there")
    rig.fabric.discard(local)
    rig.fabric.discard(remote)
    rig.fabric.disconnect(rig.name)
    with pytest.raises(PeerUnreachable):
        rig.fabric.connect(metadata)


def prepared_now(rig: Rig) -> tuple[Prepared, Prepared]:
    """Rows of a peer can be prepared although it is gone: what it registered is known."""
    return both_sides(rig, BIG, BIG)


def disconnect_is_no_fence(rig: Rig) -> None:
    """A read goes on landing after its peer was forgotten (nixl-facts row 6).

    This documents what transports do, and that `poll` does not call it settled.
    """
    transfer = post_to_a_paused_peer(rig)
    rig.fabric.disconnect(rig.name)
    rig.until(lambda: rig.fabric.poll(transfer) is Progress.LOST, "lost")
    assert not rig.memory.any()
    rig.peer.resume()

    def lands() -> bool:
        rig.fabric.take_notices()
        return bool(rig.memory.any())

    rig.until(lands, "bytes landed after the disconnect")
    assert rig.fabric.poll(transfer) is Progress.LOST
    with pytest.raises(MisuseError):
        rig.fabric.release(transfer)


def a_closed_fabric_says_so(rig: Rig) -> None:
    """Closing gives everything back; a second close does nothing."""
    both_sides(rig)
    rig.fabric.close()
    rig.fabric.close()
    assert rig.fabric.counts() == {
        "peers": 0,
        "prepared": 0,
        "transfers": 0,
        "dropped_notices": 0,
    }
    with pytest.raises(EngineClosed):
        rig.fabric.metadata()
    with pytest.raises(EngineClosed):
        rig.fabric.notify(rig.name, b"x")
    assert rig.fabric.take_notices() == []


LAST_CHECKS: tuple[Callable[[Rig], None], ...] = (
    a_hung_peer_is_waited_for,
    a_killed_peer_fails_what_is_in_flight,
    disconnect_is_no_fence,
    a_closed_fabric_says_so,
)
