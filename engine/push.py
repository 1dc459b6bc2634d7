"""The push service: writes a request's blocks into those that consumers have registered.

Drives one `PushMachine` for each push. Registrations and finished blocks come in
either order: whoever comes first waits, for as long as its lease or its deadline
allows.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from kvferry.engine.after import wait_for
from kvferry.engine.budget import SeldomLog
from kvferry.engine.delivery import Cargo, Delivery, aborted
from kvferry.engine.drive import Driver
from kvferry.engine.readiness import Readiness, wanted_tokens
from kvferry.engine.report import PushReport
from kvferry.engine.spans import Span, as_array
from kvferry.engine.targets import Target, Writer
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    FerryInternalError,
    MisuseError,
    OfferSpent,
    PeerLost,
    PushAborted,
    PushRevoked,
    RequestInUse,
)
from kvferry.protocol.lifecycle.push import (
    OVER,
    AbortDeliveries,
    CommitDelivery,
    CommitRequested,
    PushCancelled,
    PushFailed,
    PushMachine,
    PushSpared,
    PushState,
    PushTicked,
    ReaderDeclined,
    ReaderEnded,
    ReaderJoined,
    ReaderLanded,
    RefuseReader,
    StartDelivery,
)
from kvferry.protocol.link import (
    Claim,
    Extend,
    Landed,
    Register,
    Revoke,
    Revoked,
)
from kvferry.protocol.text import printable
from kvferry.protocol.ticket import MAX_SPAN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping

    from kvferry.engine.after import After
    from kvferry.engine.agents import Agents
    from kvferry.engine.link import Link
    from kvferry.engine.services import Services
    from kvferry.engine.targets import ClaimPlans
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.lifecycle.machine import Effect
    from kvferry.protocol.link import LinkMessage

__all__ = ("PushRequest", "PushStream", "Pushes")

ENDED_PUSHES = 4096
"""Ended pushes that are remembered, so that a late consumer learns of it at once;
requests that a consumer did not want before there was a push; and ended
registrations, so that a late word about one is not taken for another."""

MAX_REGISTERED_BLOCKS = 4 * MAX_SPAN_BLOCKS
"""Places in the spans of all registrations that one consumer rank holds at once; each
of its blocks is in one of them, or it has been dropped by a window."""

MAX_DELIVERIES = 65_536
"""Registrations of all ranks together, as many as there may be offers."""

MAX_DECLINERS = 1024
"""Ranks of a consumer that are remembered to have declined one request."""

NameT = TypeVar("NameT")


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


class PushStream:
    """A push whose blocks become final step by step; see `TransferEngine.push_stream`.

    Attributes:
        report: What was pushed; None until the block has been left in good order.
    """

    def __init__(self, push: _Push) -> None:
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


class Pushes:
    """All pushes of one engine, and all registrations for them."""

    def __init__(self, services: Services, agents: Agents) -> None:
        self._services = services
        self._writer = Writer(
            services.key, services.layout, services.fabric, agents, services.log
        )
        self._seldom_log = SeldomLog(services.log)
        self._targets: dict[EngineKey, Target] = {}
        self._deliveries: dict[tuple[EngineKey, int], Delivery] = {}
        self._registered: dict[EngineKey, set[str]] = {}  # requests, by consumer rank
        self._waiting: dict[str, list[Delivery]] = {}
        self._active: dict[str, _Push] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()
        self._declined: OrderedDict[str, dict[EngineKey, float]] = OrderedDict()
        self._spared: OrderedDict[str, float] = OrderedDict()
        self._cleared: OrderedDict[tuple[EngineKey, int], float] = OrderedDict()
        self._idle = trio.Event()
        self._is_closing = False
        self.strays = 0
        """Messages about deliveries that nobody knows, and of links that were replaced."""

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._active)

    @property
    def deliveries(self) -> int:
        """Registrations that are not over, or still have something in flight."""
        return len(self._deliveries)

    @property
    def targets(self) -> int:
        """Consumer ranks that are connected, or still have something in flight."""
        return len(self._targets)

    # Pushing.

    @asynccontextmanager
    async def stream(self, request: PushRequest) -> AsyncIterator[PushStream]:
        """Push while the block runs; see `TransferEngine.push_stream`."""
        push = self._open(request)
        stream = PushStream(push)
        try:
            yield stream
        except BaseException as exc:
            push.give_up(exc)
            await push.wait_over()
            raise
        stream.report = await push.commit()

    def _open(self, request: PushRequest) -> _Push:
        request_id = request.request_id
        if request_id in self._active:
            raise RequestInUse("a push of it is under way", request_id=request_id)
        self._ended.pop(request_id, None)
        push = _Push(self._services, request, on_over=self._forget_push)
        self._active[request_id] = push
        self._services.nursery.start_soon(push.run)
        for delivery in self._waiting.pop(request_id, ()):
            push.join(delivery)
        for reader, at in self._declined.pop(request_id, {}).items():
            if self._is_recent(at):
                push.feed(ReaderDeclined(reader))
        if self._is_recent(self._spared.pop(request_id, -math.inf)):
            push.feed(PushSpared())
        return push

    def spare(self, request_id: str) -> None:
        """None of the consumer's ranks wants anything of it, now or when it begins."""
        push = self._active.get(request_id)
        if push is not None:
            push.feed(PushSpared())
        elif not self._has_ended(request_id):
            self._note(self._spared, request_id)

    def _forget_push(self, push: _Push) -> None:
        request_id = push.request.request_id
        del self._active[request_id]
        self._note(self._ended, request_id)
        self._note_idle()

    async def close(self) -> None:
        """End all pushes and deliveries, and wait until each has drained or given up."""
        self._is_closing = True
        error = EngineClosed("the engine is closing")
        for push in tuple(self._active.values()):
            push.feed(PushFailed(error))
        for waiting in tuple(self._waiting.values()):
            for delivery in tuple(waiting):
                delivery.abort(error)
        while self._active or self._waiting:
            await self._idle.wait()

    def _note_idle(self) -> None:
        self._idle.set()
        self._idle = trio.Event()

    # Consumers.

    def on_open(self, link: Link, card: Card) -> None:
        """A rank has connected. It has one link: a new one ends the one before, and
        whatever that still brings is not heard, so that a `Revoke` over the new one is
        never overtaken by a `Register` over the old."""
        old = self._targets.get(link.peer)
        if old is not None and not old.is_gone:
            old.link.end(PeerLost("the peer has opened another link"))
            self.on_end(old.link, PeerLost("the peer has opened another link"))
        self._targets[link.peer] = Target(self._writer, link, card)

    def on_end(self, link: Link, cause: FerryError) -> None:
        """A link has ended: what was pushed over it fails."""
        target = self._target(link)
        if target is None or target.is_gone:
            return
        lost = PeerLost(cause.detail, peer=str(link.peer))
        lost.__cause__ = cause
        for delivery in tuple(self._deliveries.values()):
            if delivery.reader == link.peer:
                delivery.lose_consumer(lost)
        target.lose()
        del self._targets[link.peer]

    async def on_claim(self, link: Link, claim: Claim) -> None:
        """A consumer tells which part of its blocks is ours to fill.

        Raises:
            ProtocolViolation: It contradicts what came before it.
            PeerUnreachable: The consumer's transport does not answer.
        """
        target = self._target(link)
        if target is None:
            self.strays += 1
        else:
            await target.add(claim)

    def on_message(self, link: Link, message: LinkMessage) -> bool:
        """Take a message from a consumer; False if it is none of ours.

        Raises:
            ProtocolViolation: It contradicts what came before it.
        """
        if not isinstance(message, Register | Extend | Landed | Revoke):
            return False
        target = self._target(link)
        if target is None:
            self.strays += 1
        elif isinstance(message, Register):
            self._register(target, message)
        elif isinstance(message, Revoke):
            self._revoke(link, message)
        else:
            self._answer(link, message)
        return True

    def _target(self, link: Link) -> Target | None:
        target = self._targets.get(link.peer)
        return target if target is not None and target.link is link else None

    def _register(self, target: Target, message: Register) -> None:
        try:
            claim, spans = self._checked(target, message)
        except FerryError as error:
            self._seldom_log.warning(
                "registration_refused",
                request=printable(message.request_id),
                reader=str(target.key),
                error=str(error),
            )
            self._post(target.link, aborted(message, error))
            return
        delivery = Delivery(
            self._services,
            target,
            msgspec.structs.replace(message, spans={}),  # as arrays they take less
            claim,
            spans=spans,
            on_over=self._over,
            on_clear=self._clear,
        )
        self._deliveries[target.key, message.attempt] = delivery
        self._registered.setdefault(target.key, set()).add(message.request_id)
        delivery.start()
        self._declined.get(message.request_id, {}).pop(target.key, None)
        push = self._active.get(message.request_id)
        if push is not None:
            push.join(delivery)
        else:
            self._waiting.setdefault(message.request_id, []).append(delivery)

    def _checked(
        self, target: Target, message: Register
    ) -> tuple[ClaimPlans, dict[str, Span]]:
        """The claim that the registration is for, and its blocks, if we can take it.

        Raises:
            FerryError: Why we cannot.
        """
        if self._is_closing:
            raise EngineClosed("the producer is closing")
        mine = self._registered.get(target.key, ())
        if len(mine) >= self._services.config.max_registrations:
            raise PushAborted(
                f"{len(mine)} registrations of this rank, no more are allowed"
            )
        if len(self._deliveries) >= MAX_DELIVERIES:
            raise PushAborted(
                f"{len(self._deliveries)} registrations, no more are allowed"
            )
        if (target.key, message.attempt) in self._cleared:
            # The answer has been given: these blocks may be somebody else's by now.
            raise OfferSpent("this registration is over, or was revoked before it came")
        is_known = (target.key, message.attempt) in self._deliveries
        if is_known or message.request_id in mine:
            raise OfferSpent("this request is registered already")
        if self._has_ended(message.request_id):
            raise OfferSpent("the push of this request is over")
        claim = target.claim(message.claim)
        if claim is None:
            raise MisuseError(f"there is no claim {message.claim}")
        spans = self._registered_spans(target, message, sheets=len(claim.sheets))
        for prepared in claim.of(None):
            # Nothing is moved: this looks at the consumer's blocks alone.
            prepared.plan.select(
                num_tokens=message.computed_tokens,
                computed_tokens=message.computed_tokens,
                local=spans,
                remote={},
            )
        return claim, spans

    def _registered_spans(
        self, target: Target, message: Register, *, sheets: int
    ) -> dict[str, Span]:
        """The consumer's blocks as arrays: each of its sheets looks at them again.

        Raises:
            PushAborted: There are more than one rank may hold, or than there is time
                to look at.
        """
        known = {group.name for group in self._services.layout.groups}
        told = {name: s for name, s in message.spans.items() if name in known}
        blocks = sum(len(span.block_ids) for span in told.values())
        if target.blocks + blocks > MAX_REGISTERED_BLOCKS:
            raise PushAborted(
                f"{target.blocks} blocks of this rank are registered, with these"
                f" {blocks} it would be more than {MAX_REGISTERED_BLOCKS}"
            )
        target.planning.begin(blocks * (1 + sheets))
        return {
            name: as_array(
                Span(span.block_ids, span.first_token), group=name, side="consumer"
            )
            for name, span in told.items()
        }

    def _has_ended(self, request_id: str) -> bool:
        ended_at = self._ended.get(request_id)
        return ended_at is not None and self._is_recent(ended_at)

    def _is_recent(self, at: float) -> bool:
        return trio.current_time() < at + self._services.config.lease_s

    def _revoke(self, link: Link, message: Revoke) -> None:
        delivery = self._deliveries.get((link.peer, message.attempt))
        if delivery is not None:
            delivery.revoke(link)
            return
        # What is not known is not in flight.
        self._post(link, Revoked(message.request_id, message.attempt))
        if (link.peer, message.attempt) in self._cleared:
            return  # it was in a push before this one
        self._note(self._cleared, (link.peer, message.attempt))
        push = self._active.get(message.request_id)
        if push is not None:
            push.feed(ReaderDeclined(link.peer))
        else:
            self._note_declined(link.peer, message.request_id)

    def _answer(self, link: Link, message: Extend | Landed) -> None:
        delivery = self._deliveries.get((link.peer, message.attempt))
        if delivery is None:
            self.strays += 1
        elif isinstance(message, Extend):
            delivery.extend()
        else:
            delivery.land()

    def _post(self, link: Link, message: LinkMessage) -> None:
        try:
            link.post(message)
        except PeerLost as error:
            self._services.log.debug("answer_lost", error=str(error))

    def _over(self, delivery: Delivery) -> None:
        """A delivery has its outcome."""
        request_id = delivery.register.request_id
        waiting = self._waiting.get(request_id, [])
        if delivery in waiting:
            waiting.remove(delivery)
            if not waiting:
                del self._waiting[request_id]
        push = self._active.get(request_id)
        if push is not None:
            push.note_over(delivery)
        elif isinstance(delivery.cause, PushRevoked):
            self._note_declined(delivery.reader, request_id)
        self._note_idle()

    def _clear(self, delivery: Delivery) -> None:
        """Nothing of a delivery is in flight any more."""
        register = delivery.register
        self._deliveries.pop((delivery.reader, register.attempt), None)
        mine = self._registered[delivery.reader]
        mine.discard(register.request_id)
        if not mine:
            del self._registered[delivery.reader]
        self._note(self._cleared, (delivery.reader, register.attempt))
        self._note_idle()

    def _note_declined(self, reader: EngineKey, request_id: str) -> None:
        readers = self._declined.setdefault(request_id, {})
        if len(readers) < MAX_DECLINERS:
            readers[reader] = trio.current_time()
        if len(self._declined) > ENDED_PUSHES:
            self._declined.popitem(last=False)

    def _note(self, ended: OrderedDict[NameT, float], name: NameT) -> None:
        ended[name] = trio.current_time()
        if len(ended) > ENDED_PUSHES:
            ended.popitem(last=False)


class _Push:
    """One push, driven in the engine's nursery; its caller waits for its end."""

    def __init__(
        self,
        services: Services,
        request: PushRequest,
        *,
        on_over: Callable[[_Push], None],
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
