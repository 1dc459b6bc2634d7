"""`CopyingFabric`: an agent, and a second one for copies between processes of one host.

Where no device moves the bytes, the transport copies them inside the call that posts
(nixl-facts row 2): one thread copies, and it is the event loop's. NIXL can spread a
post over threads of its own, which copy side by side; but they spin while bytes are
under way, and over a network, where the bytes need no thread of ours, that takes cores
from those who do the work. Which it is follows from what has been seen: large posts to
a peer go to the second agent once some have come back late, and with all copied.

Peers know nothing of the second agent: it only reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import structlog
import trio

from kvferry.engine.fabric.aside import AsideFabric
from kvferry.engine.fabric.base import (
    LARGE_BYTES,
    Fabric,
    Notice,
    Prepared,
    Progress,
    Transfer,
)
from kvferry.protocol.errors import FerryError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.fabric.base import Operation
    from kvferry.protocol.layout import Memory, Region

__all__ = ("CopyingFabric", "over_nixl")

LATE_S = 0.0002
"""A post that leaves the copying to others is back sooner, or not done when it is."""

LATE_POSTS = 8
"""In a row, until a peer counts as one that is copied from: over tcp, up to one write of
2 MiB in twenty is late and done by chance, so three in a row are a matter of hours."""


class _Both(Prepared):
    """Rows that are prepared for the first agent, and for the second when it needs them.

    Attributes:
        mean_bytes: Of a descriptor.
    """

    def __init__(
        self,
        peer: str | None,
        memory: Memory,
        rows: npt.NDArray[np.uint64],
        first: Prepared,
    ) -> None:
        self.peer = peer
        self.memory: Memory = memory
        self.rows = rows
        self.first = first
        self.second: Prepared | None = None
        runs, counts = rows[:, 1], rows[:, 4]
        self.mean_bytes = int(runs @ counts) // int(counts.sum())

    def on(self, second: Fabric) -> Prepared:
        """Prepared for the second agent.

        Raises:
            FerryError: It knows the memory or the peer no more.
        """
        if self.second is None:
            self.second = second.prepare(self.peer, self.memory, self.rows)
        return self.second


@dataclass
class _Peer:
    """What is known of one.

    Attributes:
        metadata: For the second agent.
        late_posts: In a row.
        is_met: The second agent knows it.
        is_refused: The second agent cannot.
    """

    metadata: bytes
    late_posts: int = 0
    is_met: bool = False
    is_refused: bool = False


class _Post(NamedTuple):
    """An agent and both sides prepared for it."""

    agent: Fabric
    local: Prepared
    remote: Prepared


class CopyingFabric(Fabric):
    """Two agents that are one.

    Attributes:
        copies: How many posts the second agent has made.
    """

    def __init__(
        self,
        first: Fabric,
        make_second: Callable[[], Fabric],
        *,
        large_bytes: int = LARGE_BYTES,
        late_s: float = LATE_S,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """The second agent is not made yet.

        Args:
            first: Everything goes over it until something else is known; closed with
                this.
            make_second: Called by `attend`, once at most and in a worker thread: it
                takes a tenth of a second.
            large_bytes: Smaller posts are left to the first.
            late_s: A post that is back later, and done, has copied.
            log: Hears why copies are left to the first.
        """
        self.name = first.name
        self.copies = 0
        self._first = first
        self._make_second = make_second
        self._large_bytes = large_bytes
        self._late_s = late_s
        self._log = (log or structlog.get_logger("kvferry")).bind(agent=self.name)
        self._second: Fabric | None = None
        self._wanted = trio.Event()
        self._is_closed = False
        self._regions: list[Region] = []
        self._peers: dict[str, _Peer] = {}
        self._prepared: set[_Both] = set()
        self._copied: set[Transfer] = set()  # the second agent's

    @property
    def is_wanted(self) -> bool:
        """Whether `attend` has something to do, or has done it."""
        return self._wanted.is_set()

    @property
    def drives_itself(self) -> bool:
        """As the first does; the second must be looked at."""
        return self._first.drives_itself and not self._copied

    async def attend(self, on_news: Callable[[], None]) -> None:
        """Attend to the first, and make the second as soon as it is wanted."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._first.attend, on_news)
            nursery.start_soon(self._make_copier)

    async def _make_copier(self) -> None:
        await self._wanted.wait()
        regions = tuple(self._regions)
        try:
            second = await trio.to_thread.run_sync(self._made_second, regions)
        except Exception as error:  # noqa: BLE001 - no engine ends for want of a faster way
            self._log.warning("copies_stay_in_the_loop", error=str(error))
            return
        if self._is_closed:
            second.close()
            return
        self._second = second
        self._register_late(self._regions[len(regions) :])

    def _made_second(self, regions: Sequence[Region]) -> Fabric:
        second = self._make_second()
        try:
            second.register(regions)
        except FerryError:
            second.close()
            raise
        return second

    def expect(self, *, large: bool) -> None:
        """It is the first that must know."""
        self._first.expect(large=large)

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory with both; the second can do without."""
        self._first.register(regions)
        self._regions += regions
        self._register_late(regions)

    def _register_late(self, regions: Sequence[Region]) -> None:
        """What the second does not know, it prepares no rows of: see `_by_second`."""
        if self._second is None:
            return
        try:
            self._second.register(regions)
        except FerryError as error:
            self._log.warning("copies_stay_in_the_loop", error=str(error))

    def metadata(self) -> bytes:
        """Of the first, which is the one that peers reach."""
        return self._first.metadata()

    def connect(self, metadata: bytes) -> str:
        """Make a peer known to the first."""
        name = self._first.connect(metadata)
        self._peers[name] = _Peer(metadata)
        return name

    async def connect_aside(self, metadata: bytes) -> str:
        """Make a peer known to the first, aside if that is."""
        name = await self._first.connect_aside(metadata)
        self._peers[name] = _Peer(metadata)
        return name

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        self._first.disconnect(peer)
        known = self._peers.pop(peer, None)
        if known is not None and known.is_met and self._second is not None:
            self._second.disconnect(peer)

    def prepare(
        self, peer: str | None, memory: Memory, rows: npt.NDArray[np.uint64]
    ) -> Prepared:
        """Prepare rows for the first."""
        both = _Both(peer, memory, rows, self._first.prepare(peer, memory, rows))
        self._prepared.add(both)
        return both

    def discard(self, prepared: Prepared) -> None:
        """Give rows back."""
        both = self._own(prepared)
        self._prepared.discard(both)
        self._first.discard(both.first)
        if both.second is not None and self._second is not None:
            self._second.discard(both.second)

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
        """Post with the agent that is known to be the faster one."""
        ours, theirs = self._own(local), self._own(remote)
        is_large = len(remote_ids) * theirs.mean_bytes >= self._large_bytes
        # What a device moves needs no thread.
        may_copy = is_large and ours.memory == theirs.memory == "DRAM"
        by = (may_copy and self._by_second(ours, theirs)) or _Post(
            self._first, ours.first, theirs.first
        )
        begin = perf_counter()
        transfer = by.agent.post(
            operation, by.local, local_ids, by.remote, remote_ids, notice=notice
        )
        if by.agent is not self._first:
            self.copies += 1
            self._copied.add(transfer)
        elif may_copy:
            self._learn(theirs.peer, transfer, perf_counter() - begin)
        return transfer

    def _by_second(self, ours: _Both, theirs: _Both) -> _Post | None:
        """By the second agent, if it is there and for such a peer."""
        second, peer = self._second, self._peers.get(theirs.peer or "")
        if second is None or peer is None or peer.late_posts < LATE_POSTS:
            return None
        if peer.is_refused:
            return None
        try:
            if not peer.is_met:
                second.connect(peer.metadata)
                peer.is_met = True
            return _Post(second, ours.on(second), theirs.on(second))
        except FerryError as error:
            peer.is_refused = True
            self._log.warning(
                "copies_stay_in_the_loop", peer=theirs.peer, error=str(error)
            )
            return None

    def _learn(self, name: str | None, transfer: Transfer, took_s: float) -> None:
        peer = self._peers.get(name or "")
        if peer is None or peer.late_posts == LATE_POSTS:
            return
        is_late = took_s > self._late_s and self._first.poll(transfer) is Progress.DONE
        peer.late_posts = peer.late_posts + 1 if is_late else 0
        if peer.late_posts == LATE_POSTS:
            self._wanted.set()

    def poll(self, transfer: Transfer) -> Progress:
        """Ask the agent that posted it."""
        return self._agent_of(transfer).poll(transfer)

    def release(self, transfer: Transfer) -> None:
        """Release it where it was posted."""
        self._agent_of(transfer).release(transfer)
        self._copied.discard(transfer)

    def _agent_of(self, transfer: Transfer) -> Fabric:
        if self._second is not None and transfer in self._copied:
            return self._second
        return self._first

    def _own(self, prepared: Prepared) -> _Both:
        if not isinstance(prepared, _Both) or prepared not in self._prepared:
            raise MisuseError("these rows are discarded, or another fabric's")
        return prepared

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notice from the first."""
        self._first.notify(peer, payload)

    def take_notices(self) -> list[Notice]:
        """Of the first; nobody knows how to reach the second."""
        return self._first.take_notices()

    def close(self) -> None:
        """Destroy both."""
        self._is_closed = True
        if self._second is not None:
            self._second.close()
        self._first.close()

    def counts(self) -> dict[str, int]:
        """Peers and dropped notices as the first counts them, the rest of both."""
        counts = self._first.counts()
        if self._second is not None:
            for kind in ("prepared", "transfers"):
                counts[kind] += self._second.counts()[kind]
        return counts


def over_nixl(
    name: str,
    *,
    copy_threads: int,
    enter_device: Callable[[], None] | None = None,
    log: FilteringBoundLogger | None = None,
) -> Fabric:
    """The default transport.

    Args:
        name: As for `NixlFabric`.
        copy_threads: How many threads copy between processes of one host, beside the
            loop; 0 leaves it to the loop's.
        enter_device: As for `NixlFabric`.
        log: As for `NixlFabric`.

    Raises:
        ConfigError: As for `NixlFabric`.
    """
    # Its import takes seconds (nixl-facts row 20).
    from kvferry.engine.fabric.nixl import NixlFabric  # noqa: PLC0415

    make = partial(NixlFabric, enter_device=enter_device, log=log)
    first = AsideFabric(make(name), enter_thread=enter_device, log=log)
    if not copy_threads:
        return first
    # By one name: a peer hears notices of both.
    second = partial(make, name, copy_threads=copy_threads)
    return CopyingFabric(first, second, log=log)
