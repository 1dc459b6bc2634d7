"""`AsideFabric`: an agent that a thread serves while its looks would hold up the loop.

Over tcp a look at an agent moves bytes for as long as any peer has some to send or to
take: for one peer's 24 MiB some 10 ms, with three readers at once a third of a second.
So does a post. On the loop everybody else waits meanwhile, on both sides. Where a device
moves the bytes, or the call that posts (nixl-facts row 2), looks are over at once, and a
thread would only be a detour. Which it is follows from what has been seen: a thread has
the agent while large transfers are on their way, unless looks have been short, and after
long ones (`Custody`).

Meanwhile whatever the transport itself refuses is told later: a post that is refused has
FAILED, as has one of rows that could not be prepared.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING

import structlog

from kvferry.engine.fabric.base import Fabric, Notice, Prepared, Progress, Transfer
from kvferry.engine.fabric.checks import check_notice, check_pair, check_rows
from kvferry.engine.fabric.custody import Custody
from kvferry.engine.fabric.looks import HOME_S, LONG_S
from kvferry.protocol.errors import (
    FerryError,
    FerryInternalError,
    MisuseError,
    PeerLost,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt
    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.fabric.base import Operation
    from kvferry.protocol.layout import Memory, Region

__all__ = ("AsideFabric",)

LOOKS = 16
"""At so many transfers before the next notices and jobs; any one drives all of them."""


class _Rows(Prepared):
    """Rows that are prepared, or will be, or could not be."""

    def __init__(self, peer: str | None, descriptors: int) -> None:
        self.peer = peer
        self.descriptors = descriptors
        self.inner: Prepared | None = None
        self.error: FerryError | None = None

    def live(self) -> Prepared:
        """As the agent has prepared them."""
        if self.inner is None:
            raise self.error or MisuseError("these rows are discarded")
        return self.inner


class _Move(Transfer):
    """A transfer that is posted, or will be, or was refused.

    Attributes:
        inner: As the agent has posted it.
        progress: As it was seen last.
    """

    def __init__(self) -> None:
        self.inner: Transfer | None = None
        self.progress = Progress.ACTIVE

    def end(self, progress: Progress, cause: FerryError | None) -> None:
        """Say how far it is; the cause first, for the loop may look at any time."""
        self.cause = cause
        self.progress = progress


class AsideFabric(Fabric):
    """One agent, the loop's or a thread's."""

    def __init__(
        self,
        inner: Fabric,
        *,
        enter_thread: Callable[[], None] | None = None,
        long_s: float = LONG_S,
        home_s: float = HOME_S,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """The agent is the loop's.

        Args:
            inner: The agent; closed with this.
            enter_thread: As for `Custody`.
            long_s, home_s: As for `Looks`.
            log: Hears what no caller can be told.
        """
        self.name = inner.name
        self._inner = inner
        self._custody = Custody(
            self._look,
            enter_thread=enter_thread,
            long_s=long_s,
            home_s=home_s,
            log=(log or structlog.get_logger("kvferry")).bind(agent=self.name),
        )
        self._peers: set[str] = set()
        self._rows: set[_Rows] = set()  # not discarded
        self._moves: dict[_Move, None] = {}  # not released, the oldest first
        self._turn = 0
        self._has_ended = False  # some post, by a job of the thread's
        self._arrived: deque[Notice] = deque()

    @property
    def drives_itself(self) -> bool:
        """While a thread has it."""
        return self._custody.is_aside

    async def attend(self, on_news: Callable[[], None]) -> None:
        """Give the agent to a thread when that is better."""
        await self._custody.attend(on_news)

    def expect(self, *, large: bool) -> None:
        """A thread may be better then."""
        self._custody.expect(large=large)

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory: holds the loop until a thread's look is over."""
        self._custody.wait_for(partial(self._inner.register, tuple(regions)))

    def metadata(self) -> bytes:
        """Of the agent."""
        return self._custody.wait_for(self._inner.metadata)

    def connect(self, metadata: bytes) -> str:
        """Make a peer known: holds the loop until a thread's look is over."""
        name = self._custody.wait_for(partial(self._inner.connect, metadata))
        self._peers.add(name)
        return name

    async def connect_aside(self, metadata: bytes) -> str:
        """Make a peer known, after a thread's look if one has it."""
        name = await self._custody.result_of(partial(self._inner.connect, metadata))
        self._peers.add(name)
        return name

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        self._peers.discard(peer)
        self._custody.do(partial(self._inner.disconnect, peer))

    def prepare(
        self, peer: str | None, memory: Memory, rows: npt.NDArray[np.uint64]
    ) -> Prepared:
        """Prepare rows; if a thread does so and cannot, posts of them fail."""
        prepared = _Rows(peer, check_rows(rows))
        if self._custody.is_aside:
            self._expect(peer)
            self._custody.do(partial(self._prepare_aside, prepared, memory, rows))
        else:
            prepared.inner = self._inner.prepare(peer, memory, rows)
        self._rows.add(prepared)
        return prepared

    def _prepare_aside(
        self, prepared: _Rows, memory: Memory, rows: npt.NDArray[np.uint64]
    ) -> None:
        try:
            prepared.inner = self._inner.prepare(prepared.peer, memory, rows)
        except FerryError as error:
            prepared.error = error
        except Exception as exc:  # noqa: BLE001 - they are not prepared, for whatever reason
            prepared.error = FerryInternalError(f"rows are not prepared: {exc!r}")

    def discard(self, prepared: Prepared) -> None:
        """Give rows back."""
        own = self._own_rows(prepared)
        self._rows.discard(own)
        self._custody.do(partial(self._discard, own))

    def _discard(self, rows: _Rows) -> None:
        inner, rows.inner = rows.inner, None
        if inner is not None:
            self._inner.discard(inner)

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
        """Post; if a thread does so and is refused, it has FAILED."""
        ours, theirs = self._own_rows(local), self._own_rows(remote)
        move = _Move()

        def post() -> None:
            move.inner = self._inner.post(
                operation,
                ours.live(),
                local_ids,
                theirs.live(),
                remote_ids,
                notice=notice,
            )

        if self._custody.is_aside:
            check_pair(local_ids, ours.descriptors, remote_ids, theirs.descriptors)
            check_notice(notice)
            self._expect(theirs.peer)
            self._custody.do(partial(self._post_aside, move, post))
        else:
            post()
        self._moves[move] = None
        return move

    def _post_aside(self, move: _Move, post: Callable[[], None]) -> None:
        try:
            post()
        except FerryError as error:
            move.end(Progress.FAILED, error)
        except Exception as exc:  # noqa: BLE001 - nobody knows what is under way
            move.end(Progress.LOST, FerryInternalError(f"a post failed: {exc!r}"))
        self._has_ended |= move.inner is None

    def poll(self, transfer: Transfer) -> Progress:
        """Look at it, or at what a thread has seen of it."""
        if isinstance(transfer, _Move) and transfer.progress.is_settled:
            return transfer.progress
        move = self._own_move(transfer)
        if not self._custody.is_aside:
            begin = thread_time()
            self._look_at(move)
            self._custody.note(begin)
        return move.progress

    def release(self, transfer: Transfer) -> None:
        """Free it."""
        move = self._own_move(transfer)
        if not move.progress.is_settled:
            raise MisuseError("released a transfer that has not settled")
        del self._moves[move]
        if move.inner is not None:
            self._custody.do(partial(self._inner.release, move.inner))

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notice; if a thread does so, nobody hears that the peer has gone."""
        check_notice(payload)
        if self._custody.is_aside:
            self._expect(peer)
        self._custody.do(partial(self._inner.notify, peer, payload))

    def take_notices(self) -> list[Notice]:
        """Look for notices, or at what a thread has found."""
        notices = [self._arrived.popleft() for _ in range(len(self._arrived))]
        if not self._custody.is_aside:
            begin = thread_time()
            notices += self._inner.take_notices()
            self._custody.note(begin)
        return notices

    def close(self) -> None:
        """Destroy the agent; a thread's last act if it has it."""
        self._custody.do(self._inner.close)
        self._custody.leave()
        self._peers.clear()
        self._rows.clear()
        self._moves.clear()

    def counts(self) -> dict[str, int]:
        """Of what the caller has not given back yet."""
        return {
            **self._inner.counts(),
            "peers": len(self._peers),
            "prepared": len(self._rows),
            "transfers": len(self._moves),
        }

    def _look(self) -> bool:
        """A thread's look; whether there is something to tell."""
        has_ended, self._has_ended = self._has_ended, False
        changed = [move for move in self._next() if self._look_at(move)]
        notices = self._inner.take_notices()
        self._arrived.extend(notices)
        return bool(has_ended or changed or notices)

    def _next(self) -> Sequence[_Move]:
        """Those whose turn it is."""
        # At one stroke, for the loop adds and takes away: a tuple would be made after
        # its iterator, and a garbage collection, in which others may run, in between.
        moves = list(self._moves)
        if len(moves) <= LOOKS:
            return moves
        first = self._turn % len(moves)
        self._turn = first + LOOKS
        return (moves + moves)[first : first + LOOKS]

    def _look_at(self, move: _Move) -> bool:
        """Whether something has become of it."""
        if move.inner is None or move.progress.is_settled:
            return False
        before = move.progress
        progress = self._inner.poll(move.inner)
        move.end(progress, move.inner.cause)
        return progress is not before

    def _expect(self, peer: str | None) -> None:
        """The agent would say so later."""
        if peer is not None and peer not in self._peers:
            raise PeerLost(f"{peer} is not connected", peer=peer)

    def _own_rows(self, prepared: Prepared) -> _Rows:
        if not isinstance(prepared, _Rows) or prepared not in self._rows:
            raise MisuseError("these rows are discarded, or another fabric's")
        return prepared

    def _own_move(self, transfer: Transfer) -> _Move:
        if not isinstance(transfer, _Move) or transfer not in self._moves:
            raise MisuseError("this transfer is released, or another fabric's")
        return transfer
