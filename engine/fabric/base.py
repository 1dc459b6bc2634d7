"""`Fabric`: the narrow interface between the engine and a transport.

Everything here but `Fabric.attend` is synchronous, and all of it belongs to one thread,
the one trio runs in.
An implementation translates every failure of its transport into kvferry's
errors; nothing above this folder sees a foreign exception.

What an implementation must keep (the conformance kit in `tests/fabric` checks it):

- A posted transfer may touch its memory until `poll` has returned a settled
  progress (`Progress.is_settled`). `release`, `disconnect` and `close` are no
  fences (nixl-facts rows 5 to 7).
- `post` raises only if nothing at all was posted; whatever goes wrong later is
  told by `poll`. While a fabric drives itself it may accept what the transport then
  refuses, rows included: a post of these has FAILED, with what would have been raised.
- A notice attached to a transfer reaches the peer after the transfer's bytes.
"""

from __future__ import annotations

import abc
import enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from kvferry.protocol.errors import FerryError
    from kvferry.protocol.layout import Memory, Region

__all__ = (
    "LARGE_BYTES",
    "MAX_NOTICE_BYTES",
    "ROW_COLUMNS",
    "Fabric",
    "Notice",
    "Operation",
    "Prepared",
    "Progress",
    "Transfer",
)

MAX_NOTICE_BYTES = 4096
"""Longest notice sent; longer ones that arrive are dropped and counted."""

LARGE_BYTES = 1 << 20
"""A smaller transfer is over before another thread has begun."""

ROW_COLUMNS = ("address", "run_bytes", "device", "stride_bytes", "count")
"""Columns of a row array: one strided descriptor row per row, uint64.

The descriptors of a `Prepared` are numbered through its rows in order: row 0
has ids ``0 .. count-1``, row 1 goes on from there.
"""


class Operation(enum.Enum):
    """Which way the bytes go, seen from the initiator."""

    READ = "READ"
    WRITE = "WRITE"


class Progress(enum.Enum):
    """How far a posted transfer is."""

    ACTIVE = "active"
    """Bytes may be moving."""
    DONE = "done"
    """Every byte has arrived; nothing touches the memory any more."""
    FAILED = "failed"
    """Not every byte arrived; nothing touches the memory any more."""
    LOST = "lost"
    """The transport no longer knows; bytes may still land (nixl-facts row 10)."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing touches the memory any more."""
        # Not by a set: an enum's hash is Python's, and each look at a transfer asks.
        return self is Progress.DONE or self is Progress.FAILED


class Notice(NamedTuple):
    """Bytes from a peer; the sender's name is the sender's own claim (row 26)."""

    sender: str
    payload: bytes


class Prepared:
    """Rows that the transport has checked and resolved; `discard` when unused."""


class Transfer:
    """A posted transfer, opaque but for its failure.

    Attributes:
        cause: Why the last `poll` said FAILED or LOST; None before.
    """

    cause: FerryError | None = None


class Fabric(abc.ABC):
    """One agent of a transport: registered memory, peers, transfers and notices.

    Attributes:
        name: The agent's name, unique for ever (it contains the generation:
            a transport may remember names, nixl-facts row 28).
    """

    name: str

    def expect(self, *, large: bool) -> None:  # noqa: B027 - most need not know
        """Transfers of `LARGE_BYTES` and more, of ours or of peers, are on their way
        from now on, or no more."""

    @property
    def drives_itself(self) -> bool:
        """Whether it goes on without being looked at, for now, and tells of news."""
        return False

    async def attend(  # noqa: B027 - most have nothing to attend to
        self, on_news: Callable[[], None]
    ) -> None:
        """What is to be done beside the loop: runs while the engine does, or ends.

        Nothing, by default.

        Args:
            on_news: Called on the loop when there is something to look at, if it
                `drives_itself`.
        """

    @abc.abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Register memory: before `metadata` what peers are to reach. What comes
        later is there for our own side of transfers alone.

        The memory stays the caller's and must outlive `close`.

        Raises:
            MisuseError: The transport cannot register one of the regions.
        """

    @abc.abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to `connect`: whoever holds it can read and write all
        registered memory (nixl-facts row 18), so it leaves only through the handshake.
        """

    @abc.abstractmethod
    def connect(self, metadata: bytes) -> str:
        """Make a peer known and return its agent name.

        Takes tens of milliseconds at most on a reachable network. Never call it
        for two peers at once (nixl-facts row 29).

        Raises:
            PeerUnreachable: The peer's transport does not answer.
            ProtocolViolation: The metadata is not metadata.
        """

    async def connect_aside(self, metadata: bytes) -> str:
        """As `connect`, and others go on while it has to wait for another call.

        Never cancelled half way: a name that is not wanted any more is the caller's
        to `disconnect`.
        """
        return self.connect(metadata)

    @abc.abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget a peer; unknown names do nothing. No fence: drain first."""

    @abc.abstractmethod
    def prepare(
        self, peer: str | None, memory: Memory, rows: npt.NDArray[np.uint64]
    ) -> Prepared:
        """Check and resolve strided rows, ``[N, 5]`` as in `ROW_COLUMNS`.

        Args:
            peer: Whose memory the rows lie in; None is our own.
            memory: Where all of the rows lie.
            rows: At least one row.

        Raises:
            ImpossiblePlan: A row is outside registered memory, or there is none.
            PeerLost: The peer is not known (any more).
        """

    @abc.abstractmethod
    def discard(self, prepared: Prepared) -> None:
        """Give prepared rows back; only after every transfer made of them has settled."""

    @abc.abstractmethod
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
        """Start moving: pairs ``local_ids[i]`` with ``remote_ids[i]``, equal lengths.

        May block for as long as the bytes take (nixl-facts row 2): bound them.

        Args:
            operation: READ brings remote bytes here, WRITE sends local ones.
            local, local_ids: Our side; ids are int32, C-contiguous (row 13), and the
                fabric's until the transfer has settled.
            remote, remote_ids: The peer's side.
            notice: Delivered to the peer behind the bytes, if not empty.

        Raises:
            ImpossiblePlan: Ids out of range, or the two sides do not match.
            PeerLost: The peer's transport is gone. Nothing was posted.
            TransferFailed: The transport refused. Nothing was posted.
        """

    @abc.abstractmethod
    def poll(self, transfer: Transfer) -> Progress:
        """Look at a transfer, and drive its progress. Never raises."""

    @abc.abstractmethod
    def release(self, transfer: Transfer) -> None:
        """Free a settled transfer's resources; call exactly once, and only then."""

    @abc.abstractmethod
    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notice on its own: fire and forget, unordered with transfers.

        Raises:
            MisuseError: Longer than `MAX_NOTICE_BYTES`.
            PeerLost: The peer is not known, or its transport is gone.
        """

    @abc.abstractmethod
    def take_notices(self) -> list[Notice]:
        """All notices that arrived since the last call; drives progress. Never raises."""

    @abc.abstractmethod
    def close(self) -> None:
        """Destroy the agent; with transfers in flight that can take down the peer's
        process (nixl-facts rows 7 and 23): drain first. A second call does nothing.
        """

    @abc.abstractmethod
    def counts(self) -> dict[str, int]:
        """Live resources by kind, for leak checks: ``peers``, ``prepared``,
        ``transfers`` (posted and not released), ``dropped_notices``.
        """
