"""`MemoryNetwork` and its `MemoryFabric`s: a transport inside one process, for tests.

It moves real bytes between host memory, as NIXL does where that hurts: late, out
of order, in pieces, and still after a peer is forgotten. Time is the caller's
clock and nothing happens between calls: each call on any fabric of the network
first applies what has become due, so a run is as deterministic as its calls.
What goes wrong is in `kvferry.engine.fabric.faults`.
"""

from __future__ import annotations

import ctypes
import heapq
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
import trio

from kvferry.engine.fabric.base import (
    Fabric,
    Notice,
    Operation,
    Prepared,
    Progress,
    Transfer,
)
from kvferry.engine.fabric.checks import check_notice, check_pair, check_rows
from kvferry.engine.fabric.faults import Faults, TransferFault
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    ImpossiblePlan,
    MisuseError,
    PeerLost,
    PeerUnreachable,
    ProtocolViolation,
    TransferFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from kvferry.engine.fabric.faults import Fault
    from kvferry.protocol.layout import Memory, Region

__all__ = ("MemoryFabric", "MemoryNetwork")

METADATA_MARK = b"kvferry-memory-agent:"
BATCHES = 8
"""Most instants at which the pieces of one transfer move."""


class MemoryNetwork:
    """What the fabrics of one process share: the bytes under way, and the faults.

    Attributes:
        faults: The rules in force.
        closed_in_flight: Fabrics that were closed while a transfer of theirs or to
            them was not settled. On a real one that can end the peer's process
            (nixl-facts rows 7 and 23).
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = trio.current_time,
        seed: int = 0,
        latency_s: float = 0.001,
        bytes_per_s: float = 1e9,
        faults: Faults | Iterable[Fault] = (),
    ) -> None:
        """Make a network without fabrics.

        Args:
            now: The clock, in seconds from anywhere.
            seed: Of the order and the sizes of what moves.
            latency_s: Before the first piece of a transfer or a notice arrives;
                each may take up to twice as long.
            bytes_per_s: Of each transfer.
            faults: The first rules, or what decides instead of rules.
        """
        self.faults = faults if isinstance(faults, Faults) else Faults(faults)
        self.closed_in_flight: list[str] = []
        self._now = now
        self._rng = np.random.default_rng(seed)
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._fabrics: dict[str, MemoryFabric] = {}
        self._gone: set[str] = set()
        self._frozen: set[str] = set()
        self._due: list[tuple[float, int, _Arrival]] = []
        self._held: list[tuple[float, int, _Arrival]] = []
        self._sent = 0

    def fabric(self, name: str) -> MemoryFabric:
        """Add a fabric.

        Raises:
            MisuseError: The name was used before (nixl-facts row 28).
        """
        if name in self._fabrics:
            raise MisuseError(f"the agent name {name!r} was used before")
        self._fabrics[name] = MemoryFabric(self, name)
        return self._fabrics[name]

    def names(self, pattern: str = "*") -> tuple[str, ...]:
        """The fabrics whose names match a shell pattern, closed ones included."""
        return tuple(name for name in self._fabrics if fnmatchcase(name, pattern))

    def settle(self) -> None:
        """Apply everything that is due by now."""
        while self._due and self._due[0][0] <= self._now():
            entry = heapq.heappop(self._due)
            arrival = entry[2]
            if not self._gone.isdisjoint(arrival.ends):
                continue
            if self._frozen.isdisjoint(arrival.ends):
                arrival.apply()
            else:
                self._held.append(entry)

    def kill(self, pattern: str) -> None:
        """End fabrics as SIGKILL does: nothing moves from, to or for them any more."""
        self.settle()
        self._gone.update(self._expect(pattern))

    def freeze(self, pattern: str) -> None:
        """Stop fabrics as SIGSTOP does: what would move from or to them waits."""
        self.settle()
        self._frozen.update(self._expect(pattern))

    def thaw(self, pattern: str) -> None:
        """Let frozen fabrics go on: what is overdue moves at once."""
        self._frozen.difference_update(self._expect(pattern))
        for entry in self._held:
            heapq.heappush(self._due, entry)
        self._held.clear()
        self.settle()

    def may_touch(self, address: int, size: int) -> bool:
        """Whether bytes still under way would read or write there, frozen or not."""
        return any(
            arrival.reads(address, size) or arrival.writes(address, size)
            for arrival in self._under_way()
        )

    def may_write(self, address: int, size: int) -> bool:
        """Whether bytes still under way would land there, frozen or not."""
        return any(arrival.writes(address, size) for arrival in self._under_way())

    def may_send(self, name: str, address: int, size: int) -> bool:
        """Whether writes of a fabric to others would still read there."""
        return any(
            arrival.ends[0] == name != arrival.ends[1] and arrival.reads(address, size)
            for arrival in self._under_way()
        )

    # The rest is for the network's own fabrics.

    def enter(self, name: str, method: str) -> None:
        """Begin a call of a fabric: catch up with the clock, then let faults happen."""
        self.settle()
        self.faults.on_call(name, method)

    def is_cut(self, name: str, peer: str) -> bool:
        """Whether one of two fabrics is killed, closed or was never there."""
        return not {name, peer} <= self._fabrics.keys() - self._gone

    def regions_of(self, name: str) -> Sequence[Region]:
        """What a fabric has registered."""
        return self._fabrics[name].regions

    def leave(self, name: str) -> None:
        """Take a closed fabric off the network: its memory may be gone by now."""
        if any(isinstance(a, _Pieces) and name in a.ends for a in self._under_way()):
            self.closed_in_flight.append(name)
        self._gone.add(name)

    def move(self, transfer: _MemoryTransfer, copies: npt.NDArray[np.uint64]) -> None:
        """Send the bytes of a transfer on their way, cut in pieces and shuffled."""
        pieces = self._rng.permutation(_cut(copies, self._rng))
        moving = pieces[: round(len(pieces) * transfer.fault.moved)]
        batches = np.array_split(moving, min(BATCHES, max(len(moving), 1)))
        transfer.batches_left = len(batches)
        delay_s = transfer.fault.delay_s
        for batch in batches:
            delay_s += float(batch[:, 2].sum()) / self._bytes_per_s
            self._schedule(_Pieces(transfer.ends, transfer, batch), delay_s)

    def carry(self, sender: str, peer: str, payload: bytes) -> None:
        """Send a notice on its way."""
        fault = self.faults.on_notice(sender)
        inbox = self._fabrics[peer].inbox
        for _ in range(fault.copies):
            arrival = _Letter((sender, peer), inbox, Notice(sender, payload))
            self._schedule(arrival, fault.delay_s)

    def _schedule(self, arrival: _Arrival, delay_s: float) -> None:
        latency_s = self._latency_s * (1 + self._rng.random())
        self._sent += 1
        entry = (self._now() + latency_s + delay_s, self._sent, arrival)
        heapq.heappush(self._due, entry)

    def _under_way(self) -> Iterator[_Arrival]:
        for _due, _order, arrival in (*self._due, *self._held):
            if self._gone.isdisjoint(arrival.ends):
                yield arrival

    def _expect(self, pattern: str) -> tuple[str, ...]:
        names = self.names(pattern)
        if not names:
            raise MisuseError(f"no fabric is called {pattern!r}")
        return names


class MemoryFabric(Fabric):
    """One agent of a `MemoryNetwork`; host memory only.

    Attributes:
        regions: What it has registered.
        inbox: Notices that arrived and were not taken.
    """

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.name = name
        self.regions: list[Region] = []
        self.inbox: list[Notice] = []
        self._network = network
        self._peers: dict[str, object] = {}
        self._prepared: set[_MemoryPrepared] = set()
        self._transfers: set[_MemoryTransfer] = set()
        self._is_closed = False

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory."""
        self._enter("register")
        for region in regions:
            if region.memory != "DRAM" or not region.address or not region.size:
                raise MisuseError(f"only host memory can be registered, not {region}")
        self.regions.extend(regions)

    def metadata(self) -> bytes:
        """The agent's name, marked as such."""
        self._enter("metadata")
        return METADATA_MARK + self.name.encode()

    def connect(self, metadata: bytes) -> str:
        """Look the peer up on the network."""
        self._enter("connect")
        if not metadata.startswith(METADATA_MARK):
            raise ProtocolViolation("not a memory agent's metadata")
        peer = metadata.removeprefix(METADATA_MARK).decode(errors="replace")
        if self._network.is_cut(self.name, peer):
            raise PeerUnreachable(f"{peer} does not answer", peer=peer)
        # Rows and transfers of the time before a disconnect stay of that time.
        self._peers.setdefault(peer, object())
        return peer

    def disconnect(self, peer: str) -> None:
        """Forget a peer; its transfers go on and are LOST (nixl-facts row 30)."""
        self._enter("disconnect")
        self._peers.pop(peer, None)

    def prepare(
        self, peer: str | None, memory: Memory, rows: npt.NDArray[np.uint64]
    ) -> Prepared:
        """Keep the rows, if each lies in one registered region as a whole."""
        self._enter("prepare")
        descriptors = check_rows(rows)
        session = None if peer is None else self._session(peer)
        regions = self._network.regions_of(peer or self.name)
        if not _are_inside(rows, [r for r in regions if r.memory == memory]):
            side = "our" if peer is None else "the peer's"
            raise ImpossiblePlan(
                f"not all rows lie in {side} registered {memory} memory"
            )
        prepared = _MemoryPrepared(peer, session, rows.copy(), descriptors)
        self._prepared.add(prepared)
        return prepared

    def discard(self, prepared: Prepared) -> None:
        """Forget the rows."""
        self._enter("discard")
        self._prepared.discard(self._own_prepared(prepared))

    def post(
        self,
        operation: Operation,
        local: Prepared,
        local_ids: npt.NDArray[np.int32],
        remote: Prepared,
        remote_ids: npt.NDArray[np.int32],
        *,
        notice: bytes = b"",
    ) -> Transfer:
        """Send the bytes on their way."""
        self._enter("post")
        ours, theirs = self._own_prepared(local), self._own_prepared(remote)
        if ours.peer is not None or theirs.peer is None:
            raise ImpossiblePlan("the local side is ours, the remote side a peer's")
        check_pair(local_ids, ours.descriptors, remote_ids, theirs.descriptors)
        check_notice(notice)
        copies = _pair(operation, ours, local_ids, theirs, remote_ids)
        self._expect_reachable(theirs.peer, theirs.session)
        fault = self._network.faults.on_transfer(self.name)
        ends = (self.name, theirs.peer)
        transfer = _MemoryTransfer(ends, theirs.session, fault, notice)
        self._network.move(transfer, copies)
        self._transfers.add(transfer)
        return transfer

    def poll(self, transfer: Transfer) -> Progress:
        """Look; the first look at a finished one sends its notice (row 25)."""
        if isinstance(transfer, _MemoryTransfer) and transfer.verdict is not None:
            return transfer.verdict
        own = self._own_transfer(transfer)
        self._network.enter(self.name, "poll")
        progress, own.cause = self._look(own)
        if progress.is_settled or self._is_forgotten(own):
            own.verdict = progress
        if progress is Progress.DONE and own.notice:
            self._network.carry(*own.ends, own.notice)
        return progress

    def release(self, transfer: Transfer) -> None:
        """Forget a settled transfer.

        Raises:
            MisuseError: It has not settled.
        """
        self._enter("release")
        own = self._own_transfer(transfer)
        if own.verdict is None or not own.verdict.is_settled:
            raise MisuseError("released a transfer that has not settled")
        self._transfers.discard(own)

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notice on its way."""
        self._enter("notify")
        check_notice(payload)
        self._expect_reachable(peer, self._session(peer))
        self._network.carry(self.name, peer, payload)

    def take_notices(self) -> list[Notice]:
        """Empty the inbox."""
        self._network.enter(self.name, "take_notices")
        taken = self.inbox.copy()
        self.inbox.clear()
        return taken

    def close(self) -> None:
        """Leave the network; the memory is not touched any more."""
        if self._is_closed:
            return
        self._network.enter(self.name, "close")
        self._is_closed = True
        for transfer in self._transfers:
            transfer.verdict = transfer.verdict or Progress.LOST
        self._network.leave(self.name)
        self._peers.clear()
        self._prepared.clear()
        self._transfers.clear()

    def counts(self) -> dict[str, int]:
        """Live resources by kind."""
        return {
            "peers": len(self._peers),
            "prepared": len(self._prepared),
            "transfers": len(self._transfers),
            "dropped_notices": 0,
        }

    def _enter(self, method: str) -> None:
        self._network.enter(self.name, method)
        if self._is_closed:
            raise EngineClosed("the fabric is closed")

    def _look(self, transfer: _MemoryTransfer) -> tuple[Progress, FerryError | None]:
        peer = transfer.ends[1]
        fault = transfer.fault
        failure = fault.cause or TransferFailed("an injected fault", peer=peer)
        if self._is_forgotten(transfer):
            return Progress.LOST, TransferFailed(f"{peer} was forgotten", peer=peer)
        if self._network.is_cut(*transfer.ends):
            return Progress.FAILED, PeerLost(f"{peer} is gone", peer=peer)
        if fault.progress is Progress.LOST and not (
            fault.recovers and transfer.has_landed
        ):
            return Progress.LOST, failure
        if fault.progress is Progress.ACTIVE or not transfer.has_landed:
            return Progress.ACTIVE, None
        if fault.progress is Progress.FAILED:
            return Progress.FAILED, failure
        return Progress.DONE, None

    def _is_forgotten(self, transfer: _MemoryTransfer) -> bool:
        return self._peers.get(transfer.ends[1]) is not transfer.session

    def _session(self, peer: str) -> object:
        if peer not in self._peers:
            raise PeerLost(f"{peer} is not connected", peer=peer)
        return self._peers[peer]

    def _expect_reachable(self, peer: str, session: object) -> None:
        if self._session(peer) is not session:
            raise PeerLost(f"{peer} was connected anew", peer=peer)
        if self._network.is_cut(self.name, peer):
            raise PeerLost(f"{peer} is gone", peer=peer)

    def _own_prepared(self, prepared: Prepared) -> _MemoryPrepared:
        if not isinstance(prepared, _MemoryPrepared) or prepared not in self._prepared:
            raise MisuseError("these rows are discarded, or another fabric's")
        return prepared

    def _own_transfer(self, transfer: Transfer) -> _MemoryTransfer:
        if not isinstance(transfer, _MemoryTransfer) or transfer not in self._transfers:
            raise MisuseError("this transfer is released, or another fabric's")
        return transfer


@dataclass(eq=False)
class _MemoryPrepared(Prepared):
    peer: str | None
    session: object
    rows: npt.NDArray[np.uint64]
    descriptors: int

    def resolve(
        self, ids: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Addresses and lengths of descriptors."""
        address, run, _device, stride, count = self.rows.T
        ends = np.cumsum(count)
        wide = ids.astype(np.uint64)
        row = np.searchsorted(ends, wide, side="right")
        place = wide - (ends - count)[row]
        return address[row] + stride[row] * place, run[row]


@dataclass(eq=False)
class _MemoryTransfer(Transfer):
    """A posted transfer.

    Attributes:
        batches_left: How many of its batches have not moved.
        verdict: What `poll` says from now on.
    """

    ends: tuple[str, str]
    session: object
    fault: TransferFault
    notice: bytes
    batches_left: int = 0
    cause: FerryError | None = None
    verdict: Progress | None = None

    @property
    def has_landed(self) -> bool:
        """Whether all moved that its fault lets move."""
        return self.batches_left == 0


@dataclass(frozen=True)
class _Arrival:
    """Something under way between two fabrics."""

    ends: tuple[str, str]

    def apply(self) -> None:
        """Arrive."""
        raise NotImplementedError

    def reads(self, address: int, size: int) -> bool:  # noqa: ARG002 - for the subclass
        """Whether it reads from a stretch of memory."""
        return False

    def writes(self, address: int, size: int) -> bool:  # noqa: ARG002 - for the subclass
        """Whether it writes to a stretch of memory."""
        return False


@dataclass(frozen=True)
class _Letter(_Arrival):
    inbox: list[Notice]
    notice: Notice

    def apply(self) -> None:
        self.inbox.append(self.notice)


@dataclass(frozen=True)
class _Pieces(_Arrival):
    """Copies ``(to, source, size)`` of a transfer that move at one instant."""

    transfer: _MemoryTransfer
    copies: npt.NDArray[np.uint64]

    def apply(self) -> None:
        for to, source, size in self.copies.tolist():
            ctypes.memmove(to, source, size)
        self.transfer.batches_left -= 1

    def reads(self, address: int, size: int) -> bool:
        return self._meets(self.copies[:, 1], address, size)

    def writes(self, address: int, size: int) -> bool:
        return self._meets(self.copies[:, 0], address, size)

    def _meets(self, starts: npt.NDArray[np.uint64], address: int, size: int) -> bool:
        ends = starts + self.copies[:, 2]
        return bool(((starts < address + size) & (ends > address)).any())


def _are_inside(rows: npt.NDArray[np.uint64], regions: Sequence[Region]) -> bool:
    """Whether each row lies as a whole in one of the regions, as NIXL wants it."""
    address, run, device, stride, count = rows.T
    end = address + stride * (count - np.uint64(1)) + run
    inside = np.zeros(len(rows), bool)
    for region in regions:
        inside |= (
            (device == region.device)
            & (address >= region.address)
            & (end <= region.address + region.size)
        )
    return bool(inside.all())


def _pair(
    operation: Operation,
    local: _MemoryPrepared,
    local_ids: npt.NDArray[np.int32],
    remote: _MemoryPrepared,
    remote_ids: npt.NDArray[np.int32],
) -> npt.NDArray[np.uint64]:
    """The copies ``(to, source, size)`` of a transfer, neighbours merged."""
    here, here_runs = local.resolve(local_ids)
    there, there_runs = remote.resolve(remote_ids)
    if (here_runs != there_runs).any():
        raise ImpossiblePlan("the two sides' descriptors do not pair: runs differ")
    to, source = (here, there) if operation is Operation.READ else (there, here)
    follows = (to[:-1] + here_runs[:-1] == to[1:]) & (
        source[:-1] + here_runs[:-1] == source[1:]
    )
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    return np.stack((to[first], source[first], np.add.reduceat(here_runs, first)), 1)


def _cut(
    copies: npt.NDArray[np.uint64], rng: np.random.Generator
) -> npt.NDArray[np.uint64]:
    """Cut each copy in a random place, and a few long ones in more of them."""
    parts = -(-BATCHES // len(copies))
    # Bounds of the parts of each copy: its start, random places, its end.
    cuts = rng.integers(0, copies[:, 2:], (len(copies), parts), np.uint64)
    firsts = np.sort(np.concatenate((np.zeros_like(copies[:, 2:]), cuts), 1), axis=1)
    lasts = np.concatenate((firsts[:, 1:], copies[:, 2:]), 1)
    pieces = np.repeat(copies, parts + 1, axis=0)
    pieces[:, :2] += firsts.reshape(-1, 1)
    pieces[:, 2] = (lasts - firsts).reshape(-1)
    return pieces[pieces[:, 2] > 0]
