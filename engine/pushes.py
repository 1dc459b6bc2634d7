"""The push service: requests of this engine that are written to their consumers.

Takes what consumers say of it over their links. Registrations and finished blocks come
in either order: whoever comes first waits, for as long as its lease or its deadline
allows. What becomes of one request is in `kvferry.engine.push`, of one registration in
`kvferry.engine.delivery`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from kvferry.engine.budget import SeldomLog
from kvferry.engine.delivery import Delivery, aborted
from kvferry.engine.push import Push, PushStream
from kvferry.engine.spans import Span, as_array
from kvferry.engine.targets import Target, Writer
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    MisuseError,
    OfferSpent,
    PeerLost,
    PushAborted,
    PushRevoked,
    RequestInUse,
)
from kvferry.protocol.lifecycle.push import PushFailed, PushSpared, ReaderDeclined
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
    from collections.abc import AsyncIterator

    from kvferry.engine.agents import Agents
    from kvferry.engine.link import Link
    from kvferry.engine.push import PushRequest
    from kvferry.engine.services import Services
    from kvferry.engine.targets import ClaimPlans
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.link import LinkMessage

__all__ = ("Pushes",)

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
        self._active: dict[str, Push] = {}
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

    def _open(self, request: PushRequest) -> Push:
        request_id = request.request_id
        if request_id in self._active:
            raise RequestInUse("a push of it is under way", request_id=request_id)
        self._ended.pop(request_id, None)
        push = Push(self._services, request, on_over=self._forget_push)
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

    def _forget_push(self, push: Push) -> None:
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
