"""`Push`: one request's blocks, written into those that its consumer has registered.

Drives a `PushMachine` in the engine's nursery. Each rank of the consumer that has
registered is a `Delivery`; blocks that become final meanwhile are told to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from kvferry.engine.after import wait_for
from kvferry.engine.delivery import Cargo
from kvferry.engine.drive import Driver
from kvferry.engine.readiness import Readiness, wanted_tokens
from kvferry.engine.report import PushReport
from kvferry.engine.spans import as_array
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    FerryInternalError,
    MisuseError,
    OfferSpent,
    PushAborted,
)
from kvferry.protocol.lifecycle.push import (
    OVER,
    AbortDeliveries,
    CommitDelivery,
    CommitRequested,
    PushCancelled,
    PushFailed,
    PushMachine,
    PushState,
    PushTicked,
    ReaderEnded,
    ReaderJoined,
    ReaderLanded,
    RefuseReader,
    StartDelivery,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kvferry.engine.after import After
    from kvferry.engine.delivery import Delivery
    from kvferry.engine.services import Services
    from kvferry.engine.spans import Span
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.lifecycle.machine import Effect

__all__ = ("Push", "PushRequest", "PushStream")


@dataclass(frozen=True)
class PushRequest:
    """What the caller asked for.

    Attributes:
        spans: Our blocks, by group.
        deadline_at: In `trio.current_time`.
    """

    request_id: str
    spans: Mapping[str, Span]
    num_tokens: int
    deadline_at: float


class Push:
    """One push, driven in the engine's nursery; its caller waits for its end.

    Args:
        on_over: Called once, when it has its outcome.

    Attributes:
        request: As given.
        feed: Takes an event of the machine's.
    """

    def __init__(
        self,
        services: Services,
        request: PushRequest,
        *,
        on_over: Callable[[Push], None],
    ) -> None:
        config = services.config
        self.request = request
        self._log = services.log.bind(request=request.request_id)
        self._on_over = on_over
        self._machine = PushMachine(
            deadline_at=request.deadline_at, grace_s=2 * config.drain_grace_s
        )
        self._driver = Driver(
            self._machine,
            over=OVER,
            draining=PushState.ENDING,
            cancel=PushFailed(EngineClosed("the engine is closing")),
            tick=PushTicked(),
            carry_out=self._carry_out,
            on_bug=self._abandon,
            log=self._log,
        )
        self.feed = self._driver.feed
        groups = [g for g in services.layout.groups if g.name not in config.skip_groups]
        self._readiness = Readiness(
            wanted_tokens(groups, request.spans, num_tokens=request.num_tokens),
            num_tokens=request.num_tokens,
        )
        # Arrays once: each step of a stream plans with them anew.
        spans = {
            name: as_array(span, group=name, side="producer")
            for name, span in request.spans.items()
        }
        self._cargo = Cargo(spans, request.num_tokens)
        self._deliveries: dict[EngineKey, Delivery] = {}
        self._started: dict[EngineKey, None] = {}
        self._over = trio.Event()

    @property
    def written_bytes(self) -> int:
        """Bytes whose writes have ended well."""
        return sum(each.written_bytes for each in self._deliveries.values())

    async def run(self) -> None:
        """Drive it to its outcome."""
        try:
            await self._driver.run()
        finally:
            self._on_over(self)
            self._over.set()

    def join(self, delivery: Delivery) -> None:
        """A rank of the consumer has registered."""
        known = self._deliveries.setdefault(delivery.reader, delivery)
        if known is not delivery:
            delivery.abort(OfferSpent("this rank is in the push already"))
            return
        self.feed(ReaderJoined(delivery.reader, delivery.register.readers))

    def note_over(self, delivery: Delivery) -> None:
        """A delivery has its outcome."""
        if self._deliveries.get(delivery.reader) is not delivery:
            return
        if delivery.has_landed:
            self.feed(ReaderLanded(delivery.reader))
        else:
            cause = delivery.cause or FerryInternalError("a delivery ended for nothing")
            self.feed(ReaderEnded(delivery.reader, cause))

    def ready(
        self, layers: Collection[str] | None, tokens: tuple[int, int] | None
    ) -> None:
        """Blocks have become final.

        Raises:
            MisuseError: As `Readiness.add` says.
            FerryError: The push has failed.
        """
        self._check_open()
        if self._machine.state is not PushState.OPEN:
            raise MisuseError(
                "the push is committed: nothing more can become ready",
                request_id=self.request.request_id,
            )
        steps = self._readiness.add(layers, tokens)
        for reader in self._started:
            self._deliveries[reader].add(steps)

    async def commit(self) -> PushReport:
        """All is ready: wait until it has landed; cancelled, it ends on both sides.

        Raises:
            FerryError: It has failed.
        """
        self.feed(CommitRequested(self._readiness.missing()))
        try:
            await self._over.wait()
        except trio.Cancelled:
            self.feed(PushCancelled())
            await self.wait_over()
            raise
        if self._machine.state is not PushState.DONE:
            raise self._error()
        return self._report()

    def give_up(self, exc: BaseException) -> None:
        """The caller has left the block by an error, or was cancelled."""
        if isinstance(exc, trio.Cancelled):
            self.feed(PushCancelled())
        else:
            what = f"{type(exc).__name__}: {exc}"
            error = PushAborted(f"the producer failed: {what:.256}")
            self.feed(PushFailed(error))

    async def wait_over(self) -> None:
        """Wait for the drain, whatever is cancelled; the machine's deadlines bound it."""
        with trio.CancelScope(shield=True):
            await self._over.wait()

    async def while_open(self, after: After) -> None:
        """Wait for the caller's event, but no longer than the push lives."""
        failure: FerryError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_over, nursery.cancel_scope)
            try:
                await wait_for(after)
            except FerryError as error:
                failure = error  # and not in a group
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _cancel_when_over(self, scope: trio.CancelScope) -> None:
        await self._over.wait()
        scope.cancel()

    def _check_open(self) -> None:
        has_failed = self._driver.is_over and self._machine.state is not PushState.DONE
        if has_failed or self._machine.state is PushState.ENDING:
            raise self._error()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartDelivery(reader=reader):
                self._start(reader)
            case CommitDelivery(reader=reader):
                self._deliveries[reader].commit()
            case RefuseReader(reader=reader):
                self._refuse(reader)
            case AbortDeliveries(cause=cause):
                for delivery in self._deliveries.values():
                    delivery.abort(cause)
            case _:
                raise FerryInternalError(f"no one does {type(effect).__name__}")

    def _start(self, reader: EngineKey) -> None:
        delivery = self._deliveries[reader]
        delivery.join(self._cargo)
        delivery.add(self._readiness.so_far())
        self._started[reader] = None

    def _refuse(self, reader: EngineKey) -> None:
        self._deliveries[reader].abort(
            OfferSpent("the push is over, or is for another instance")
        )

    def _abandon(self) -> None:
        """A bug of ours: the deliveries end, and each drains by itself."""
        error = self._driver.bug or FerryInternalError("a push was abandoned")
        for delivery in self._deliveries.values():
            delivery.abort(error)

    def _error(self) -> FerryError:
        cause = self._driver.bug or self._machine.cause
        if cause is None:
            cause = FerryInternalError(f"a push ended {self._machine.state.value}")
        error = cause.about(
            request_id=self.request.request_id,
            peer=", ".join(str(reader) for reader in self._deliveries) or None,
            phase=self._driver.failed_in.value,
        )
        self._log.warning("push_failed", error=type(error).__name__, detail=str(error))
        return error

    def _report(self) -> PushReport:
        # Not those that were refused.
        deliveries = [d for d in self._deliveries.values() if d.has_landed]
        report = PushReport(
            request_id=self.request.request_id,
            peers=tuple(str(delivery.reader) for delivery in deliveries),
            num_tokens=self.request.num_tokens,
            bytes=sum(delivery.bytes for delivery in deliveries),
            descriptors=sum(delivery.descriptors for delivery in deliveries),
            waves=sum(delivery.waves for delivery in deliveries),
            phases_s=dict(self._driver.phases_s),
        )
        self._log.info("push_done", bytes=report.bytes, waves=report.waves)
        return report


class PushStream:
    """A push whose blocks become final step by step; see `TransferEngine.push_stream`.

    Attributes:
        report: What was pushed; None until the block has been left in good order.
    """

    def __init__(self, push: Push) -> None:
        self.report: PushReport | None = None
        self._push = push

    @property
    def written_bytes(self) -> int:
        """Bytes that have been written so far, to all ranks of the consumer.

        A progress: nobody has confirmed them before the block has been left.
        """
        return self._push.written_bytes

    async def ready(
        self,
        *,
        layers: Collection[str] | None = None,
        tokens: tuple[int, int] | None = None,
        after: After | None = None,
    ) -> None:
        """These blocks are final: they leave at once.

        Args:
            layers: Names of layers; all of them by default.
            tokens: Absolute positions ``[first, last)``; all of them by default. The
                state of a state layer leaves with the request's last token.
            after: A CUDA event, or a callable that returns an awaitable: nothing is
                read from the blocks before it has completed.

        Raises:
            MisuseError: A layer or tokens that there are not, or that were ready
                before. The push goes on.
            FerryError: The push has failed meanwhile.
        """
        if after is not None:
            await self._push.while_open(after)
        else:
            await trio.lowlevel.checkpoint()
        self._push.ready(layers, tokens)
