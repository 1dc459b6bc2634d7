"""`NixlFabric`: the real transport, NIXL over UCX by default.

The one place where NIXL's exceptions, `None` and status strings become
kvferry's errors. It owns the agent and every handle made of it; it decides
nothing about deadlines, retries or pace.

NIXL's exceptions have no base of their own below `Exception`, so the handlers
here are broad on purpose: whatever the bindings raise comes out as a
`FerryError`, with the original as its cause.

Importing this module imports the bindings (seconds, nixl-facts row 20).
"""

from __future__ import annotations

import logging
import os
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import structlog
from nixl import _bindings as bindings
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

from kvferry.engine.fabric.base import (
    MAX_NOTICE_BYTES,
    Fabric,
    Notice,
    Prepared,
    Progress,
    Transfer,
)
from kvferry.engine.fabric.checks import check_notice, check_pair, check_rows
from kvferry.protocol.errors import (
    ConfigError,
    EngineClosed,
    FerryError,
    FerryInternalError,
    ImpossiblePlan,
    MisuseError,
    PeerLost,
    PeerUnreachable,
    ProtocolViolation,
    TransferFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.fabric.base import Operation
    from kvferry.protocol.layout import Memory, Region

__all__ = ("NixlFabric",)

INITIATOR: Final = "NIXL_INIT_AGENT"
"""The name under which an agent prepares its own side of a transfer."""

SPLIT_DESCRIPTORS = 1
"""With threads: every post is theirs, however few descriptors it has."""

LAST_COPY_S = 1.0
"""With threads: when a post fails for one of them, another may be copying still, a few
megabytes at most until it hears of it. That takes milliseconds; the rest is for a thread
that is kept from its core meanwhile, as a quota does for tenths of a second."""

Handle = Any
"""A handle object of the untyped bindings; None once it is given back."""


class _NixlPrepared(Prepared):
    """A prepared list of one side; ``peer`` is None for our own."""

    def __init__(self, peer: str | None, descriptors: int, handle: Handle) -> None:
        self.peer = peer
        self.descriptors = descriptors
        self.handle = handle


class _NixlTransfer(Transfer):
    """A posted request.

    Attributes:
        verdict: What `poll` says from now on without asking NIXL again.
        fails_at: When nothing moves any more though NIXL cannot be asked; by
            `perf_counter`.
    """

    def __init__(self, peer: str, handle: Handle) -> None:
        self.peer = peer
        self.handle = handle
        self.cause: FerryError | None = None
        self.verdict: Progress | None = None
        self.fails_at: float | None = None


class NixlFabric(Fabric):
    """One NIXL agent."""

    def __init__(
        self,
        name: str,
        *,
        backends: Sequence[str] = ("UCX",),
        progress_thread: bool = False,
        copy_threads: int = 0,
        enter_device: Callable[[], None] | None = None,
        log: FilteringBoundLogger | None = None,
    ) -> None:
        """Create the agent.

        Args:
            name: Unique for ever; see `Fabric`.
            backends: NIXL's names of the backends to bring up.
            progress_thread: Let NIXL progress by itself. It burns most of a core
                when idle (nixl-facts row 16), and polling does the same work.
            copy_threads: Spread each post over so many threads of NIXL's. They spin
                while its bytes are under way: for copies on one host.
            enter_device: Called first, in this thread. It makes a CUDA context
                current: UCX gives up on ``cuda_ipc`` in silence if there is none
                when the agent is first touched (nixl-facts row 22).
            log: Hears of the failures that no caller can be told of.

        Raises:
            ConfigError: NIXL does not have such a backend, or cannot bring it up.
        """
        _leave_stdout_alone()
        if enter_device is not None:
            enter_device()
        self.name = name
        self._log = (log or structlog.get_logger("kvferry")).bind(agent=name)
        self._peers: set[str] = set()
        self._prepared: set[_NixlPrepared] = set()
        self._transfers: set[_NixlTransfer] = set()
        self._dropped_notices = 0
        self._has_threads = copy_threads > 0
        self._agent: Any = _create_agent(
            name,
            backends,
            progress_thread=progress_thread,
            copy_threads=copy_threads,
        )

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory, one call to NIXL per kind of memory."""
        agent = self._live()
        by_memory: dict[Memory, list[tuple[int, int, int]]] = {}
        for region in regions:
            row = (region.address, region.size, region.device)
            by_memory.setdefault(region.memory, []).append(row)
        for memory, rows in by_memory.items():
            try:
                agent.register_memory(np.array(rows, np.uint64), memory)
            except Exception as exc:
                msg = f"NIXL cannot register {len(rows)} regions of {memory}: {exc}"
                raise MisuseError(msg) from exc

    def metadata(self) -> bytes:
        """Read the agent's addresses and the keys to its memory."""
        agent = self._live()
        try:
            return cast("bytes", agent.get_agent_metadata())
        except Exception as exc:
            raise FerryInternalError(f"NIXL gives no metadata: {exc}") from exc

    def connect(self, metadata: bytes) -> str:
        """Load a peer's metadata; this really connects (nixl-facts row 31).

        Metadata that is cut short spoils the name in it for this agent: NIXL
        refuses even the right one afterwards. A peer's next start has a new name.
        """
        agent = self._live()
        try:
            name = cast("bytes", agent.add_remote_agent(metadata)).decode()
        except (bindings.nixlBackendError, bindings.nixlRemoteDisconnectError) as exc:
            raise PeerUnreachable(
                f"the peer's transport does not answer: {exc}"
            ) from exc
        except Exception as exc:
            raise ProtocolViolation(f"not an agent's metadata: {exc}") from exc
        self._peers.add(name)
        return name

    def disconnect(self, peer: str) -> None:
        """Remove a peer. What is in flight to it is LOST for ever (row 30)."""
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        try:
            self._live().remove_remote_agent(peer)
        except Exception as exc:  # noqa: BLE001 - see the module's docstring
            self._log.warning("disconnect_failed", peer=peer, error=str(exc))

    def prepare(
        self, peer: str | None, memory: Memory, rows: npt.NDArray[np.uint64]
    ) -> Prepared:
        """Prepare all rows as one strided list (nixl-facts row 11)."""
        agent = self._live()
        descriptors = check_rows(rows)
        if peer is not None:
            self._expect_peer(peer)
        rows = np.ascontiguousarray(rows)
        try:
            handle = agent.prep_xfer_dlist(peer or INITIATOR, rows, memory)
        except Exception as exc:
            if isinstance(exc, bindings.nixlRemoteDisconnectError):
                raise PeerLost(f"{peer} is gone: {exc}", peer=peer) from exc
            side = "our" if peer is None else "the peer's"
            msg = f"not all rows lie in {side} registered {memory} memory: {exc}"
            raise ImpossiblePlan(msg) from exc
        prepared = _NixlPrepared(peer, descriptors, handle)
        self._prepared.add(prepared)
        return prepared

    def discard(self, prepared: Prepared) -> None:
        """Release the prepared list."""
        own = self._own_prepared(prepared)
        self._prepared.discard(own)
        own.handle, handle = None, own.handle
        _release(handle, self._log)

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
        """Make a request of prepared rows and post it."""
        agent = self._live()
        ours, theirs = self._own_prepared(local), self._own_prepared(remote)
        if ours.peer is not None or theirs.peer is None:
            raise ImpossiblePlan("the local side is ours, the remote side a peer's")
        self._expect_peer(theirs.peer)
        check_pair(local_ids, ours.descriptors, remote_ids, theirs.descriptors)
        check_notice(notice)
        operands = (ours.handle, local_ids, theirs.handle, remote_ids)
        try:
            handle = agent.make_prepped_xfer(operation.value, *operands, notice)
        except Exception as exc:
            raise _refusal(exc, theirs.peer) from exc
        return self._start(_NixlTransfer(theirs.peer, handle))

    def poll(self, transfer: Transfer) -> Progress:
        """Ask NIXL, which also sends an attached notice once all is done (row 25)."""
        if isinstance(transfer, _NixlTransfer) and transfer.verdict is not None:
            return transfer.verdict
        own = self._own_transfer(transfer)
        if own.fails_at is not None:
            return _end(own)
        try:
            status = self._live().check_xfer_state(own.handle)
        except Exception as exc:  # noqa: BLE001 - see the module's docstring
            return _verdict(own, exc)
        if status == "PROC":
            return Progress.ACTIVE
        if status == "DONE":
            own.verdict = Progress.DONE
            own.cause = None
            return Progress.DONE
        # Other requests of the same handle may be alive, so ask again.
        own.cause = TransferFailed(f"NIXL says {status!r}", peer=own.peer)
        return Progress.LOST

    def release(self, transfer: Transfer) -> None:
        """Release the request.

        Raises:
            MisuseError: It has not settled: NIXL would let go of the handle and
                not of the memory (nixl-facts row 5).
        """
        own = self._own_transfer(transfer)
        if own.verdict is None or not own.verdict.is_settled:
            raise MisuseError("released a transfer that has not settled")
        self._transfers.discard(own)
        own.handle, handle = None, own.handle
        _release(handle, self._log)

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a notification."""
        agent = self._live()
        check_notice(payload)
        self._expect_peer(peer)
        try:
            agent.send_notif(peer, payload)
        except Exception as exc:
            raise PeerLost(f"cannot notify {peer}: {exc}", peer=peer) from exc

    def take_notices(self) -> list[Notice]:
        """Empty NIXL's queue; we are its only consumer (nixl-facts row 27)."""
        if self._agent is None:
            return []
        try:
            arrived = self._agent.get_new_notifs()
        except Exception as exc:  # noqa: BLE001 - see the module's docstring
            # A sender's name that is not UTF-8 costs the whole batch: the
            # bindings raise UnicodeDecodeError after the queue is emptied.
            self._dropped_notices += 1
            self._say_dropped(str(exc))
            return []
        notices = [
            Notice(sender, payload)
            for sender, payloads in arrived.items()
            for payload in payloads
        ]
        kept = [n for n in notices if len(n.payload) <= MAX_NOTICE_BYTES]
        self._dropped_notices += len(notices) - len(kept)
        return kept

    def _say_dropped(self, error: str) -> None:
        """The first, second, fourth, ...: whoever causes them shall not fill the log."""
        count = self._dropped_notices
        if count & (count - 1) == 0:
            self._log.warning("notices_dropped", error=error, so_far=count)

    def close(self) -> None:
        """Give back all handles but those in flight, and destroy the agent."""
        if self._agent is None:
            return
        for transfer in self._transfers:
            self._abandon(transfer)
        for prepared in tuple(self._prepared):
            self.discard(prepared)
        self._transfers.clear()
        self._peers.clear()
        # Whatever still held the bindings' agent would keep it alive: our
        # handles are gone, so this is its last reference.
        self._agent = None

    def counts(self) -> dict[str, int]:
        """Live resources by kind."""
        return {
            "peers": len(self._peers),
            "prepared": len(self._prepared),
            "transfers": len(self._transfers),
            "dropped_notices": self._dropped_notices,
        }

    def _start(self, transfer: _NixlTransfer) -> _NixlTransfer:
        """Post a request; raise only if nothing can be in flight."""
        try:
            self._live().transfer(transfer.handle)
        except bindings.nixlRemoteDisconnectError as exc:
            lost = PeerLost(f"{transfer.peer} is gone: {exc}", peer=transfer.peer)
            if not self._has_threads:
                _release(transfer.handle, self._log)
                raise lost from exc
            lost.__cause__ = exc
            transfer.cause, transfer.fails_at = lost, perf_counter() + LAST_COPY_S
        except Exception as exc:  # noqa: BLE001 - see the module's docstring
            # A part of it may be on its way: from here on poll tells.
            _verdict(transfer, exc)
        # A status of DONE is left to poll, which sends the notice (row 25).
        self._transfers.add(transfer)
        return transfer

    def _abandon(self, transfer: _NixlTransfer) -> None:
        """Let go of a handle that `close` found, without a release under flight."""
        if transfer.verdict is not None and transfer.verdict.is_settled:
            _release(transfer.handle, self._log)
        else:
            self._log.error("closed_in_flight", peer=transfer.peer)
            # The handle's finalizer would release it, and only the end of the
            # agent stops the bytes (nixl-facts rows 5 and 7).
            transfer.handle._released = True  # noqa: SLF001
        transfer.handle = None
        transfer.verdict = Progress.LOST

    def _live(self) -> Any:  # noqa: ANN401 - the bindings are untyped
        if self._agent is None:
            raise EngineClosed("the fabric is closed")
        return self._agent

    def _expect_peer(self, peer: str) -> None:
        if peer not in self._peers:
            raise PeerLost(f"{peer} is not connected", peer=peer)

    def _own_prepared(self, prepared: Prepared) -> _NixlPrepared:
        if not isinstance(prepared, _NixlPrepared) or prepared not in self._prepared:
            raise MisuseError("these rows are discarded, or another fabric's")
        return prepared

    def _own_transfer(self, transfer: Transfer) -> _NixlTransfer:
        if not isinstance(transfer, _NixlTransfer) or transfer not in self._transfers:
            raise MisuseError("this transfer is released, or another fabric's")
        return transfer


def _leave_stdout_alone() -> None:
    """Keep NIXL and UCX from printing on the application's stdout.

    On import the bindings give their logger ``nixl`` a handler that prints INFO
    to stdout (``nixl/logging.py`` calls it ``consoleHandler``). We take that one
    away and let records propagate to where the application sends its own, from
    WARNING up unless NIXL_LOG_LEVEL asks for more. UCX writes its errors, a
    refused connection for one, to file descriptor 1 unless UCX_LOG_FILE says
    otherwise; it reads that when the first agent is made. NIXL's C++ side uses
    stderr by itself.
    """
    logger = logging.getLogger("nixl")
    for handler in tuple(logger.handlers):
        if handler.name == "consoleHandler":
            logger.removeHandler(handler)
            logger.propagate = True
            if not os.environ.get("NIXL_LOG_LEVEL"):
                logger.setLevel(logging.WARNING)
    os.environ.setdefault("UCX_LOG_FILE", "stderr")


def _create_agent(
    name: str, backends: Sequence[str], *, progress_thread: bool, copy_threads: int
) -> Any:  # noqa: ANN401 - the bindings are untyped
    sync_mode, options = None, {}
    if copy_threads:
        # UCX must lock its workers then: NIXL asks it to if the agent may be called
        # from several threads, and crashes otherwise.
        sync_mode = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        options = {
            "num_threads": str(copy_threads),
            "split_batch_size": str(SPLIT_DESCRIPTORS),
        }
    config = nixl_agent_config(
        enable_prog_thread=progress_thread, backends=[], sync_mode=sync_mode
    )
    try:
        agent = nixl_agent(name, config)
        for backend in backends:
            if backend in agent.plugin_list:
                agent.create_backend(backend, options)
    except Exception as exc:
        raise ConfigError(f"NIXL cannot create an agent: {exc}") from exc
    if missing := [b for b in backends if b not in agent.backends]:
        raise ConfigError(f"NIXL has no backend {', '.join(missing)}")
    return agent


def _refusal(exc: Exception, peer: str) -> FerryError:
    """Why a request could not be made; nothing was posted."""
    if isinstance(exc, bindings.nixlInvalidParamError):
        return ImpossiblePlan(f"the two sides' descriptors do not pair: {exc}")
    if isinstance(exc, bindings.nixlRemoteDisconnectError | bindings.nixlNotFoundError):
        # Not found: connected anew, and the rows are of the time before.
        return PeerLost(f"{peer} is gone, or was connected anew: {exc}", peer=peer)
    return TransferFailed(f"NIXL refused the request: {exc}", peer=peer)


def _end(transfer: _NixlTransfer) -> Progress:
    """What can be said about a post of several threads that failed for one of them."""
    if perf_counter() < (transfer.fails_at or 0.0):
        return Progress.LOST
    transfer.verdict = Progress.FAILED
    return Progress.FAILED


def _verdict(transfer: _NixlTransfer, exc: Exception) -> Progress:
    """What an exception from NIXL says about a transfer's memory."""
    peer = transfer.peer
    if isinstance(exc, bindings.nixlRemoteDisconnectError):
        cause: FerryError = PeerLost(f"{peer} is gone: {exc}", peer=peer)
        transfer.verdict = Progress.FAILED
    elif isinstance(exc, bindings.nixlNotPostedError):
        cause = TransferFailed(f"NIXL never posted it: {exc}", peer=peer)
        transfer.verdict = Progress.FAILED
    else:
        cause = TransferFailed(f"NIXL lost track of it: {exc}", peer=peer)
        # Not found stays so for ever, and each poll of it is a line on stderr.
        # Anything else may still turn into an answer (nixl-facts row 10).
        if isinstance(exc, bindings.nixlNotFoundError):
            transfer.verdict = Progress.LOST
    cause.__cause__ = exc
    transfer.cause = cause
    return transfer.verdict or Progress.LOST


def _release(handle: Handle, log: FilteringBoundLogger) -> None:
    """Release a handle; NIXL's refusal is a leak that nobody can help, so say it."""
    try:
        handle.release()
    except Exception as exc:  # noqa: BLE001 - see the module's docstring
        log.warning("release_refused", error=str(exc))
