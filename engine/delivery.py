"""`Delivery`: one push to one consumer rank, from its registration to its last wave.

Drives one `DeliveryMachine` in the engine's nursery: a consumer may register before
there is anything to push, and what is in flight outlives the push that posted it.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import trio

from kvferry.engine.drive import Driver
from kvferry.engine.fabric.base import Operation
from kvferry.engine.flight import Flights
from kvferry.engine.quarantine import QuarantineEntry, held_blocks
from kvferry.engine.waves import Waves
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    FerryInternalError,
    IncompletePush,
    LeaseExpired,
    MisuseError,
    OfferSpent,
    PeerLost,
)
from kvferry.protocol.lifecycle.delivery import (
    OVER,
    ConsumerLost,
    DeliveryAborted,
    DeliveryCommitted,
    DeliveryMachine,
    DeliveryState,
    DeliveryTicked,
    EndDelivery,
    ExtendArrived,
    LandedArrived,
    PostWave,
    PushJoined,
    QuarantineWaves,
    ReclaimWaves,
    ReportRegistered,
    RevokeArrived,
    SendFailed,
    SendFinished,
    SendRevoked,
    WavesReady,
    WriteLost,
    WriteSettled,
)
from kvferry.protocol.link import (
    Aborted,
    AbortedReason,
    Finished,
    Registered,
    Revoked,
    as_detail,
)
from kvferry.protocol.notices import Written, encode_notice
from kvferry.protocol.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvferry.engine.fabric.base import Fabric, Prepared, Transfer
    from kvferry.engine.link import Link
    from kvferry.engine.readiness import Step
    from kvferry.engine.services import Services
    from kvferry.engine.spans import Span
    from kvferry.engine.targets import ClaimPlans, Target
    from kvferry.engine.waves import Wave
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.lifecycle.machine import Effect
    from kvferry.protocol.link import LinkMessage, Register

__all__ = ("Cargo", "Delivery", "aborted")


ANNOUNCED_BYTES = 1 << 20
"""A first wave as large is announced: over tcp it comes as fast as its target looks. A
smaller one is there before."""


class Cargo(NamedTuple):
    """What is pushed: the producer's blocks of one request."""

    spans: Mapping[str, Span]
    num_tokens: int


class _Batch(NamedTuple):
    """What one step has let go of one prepared plan, made as the consumer's: our side
    of it is the remote one.

    Attributes:
        first: Number of its first wave.
    """

    first: int
    waves: Waves
    pairs: Sequence[tuple[Prepared, Prepared]]


class Delivery:
    """One delivery.

    Attributes:
        reader: Who gets it.
        register: Where to, as the consumer has told.
        cause: Why it did not land.
        bytes, descriptors, waves: Of everything that has become ready.
        written_bytes: How many of those bytes have been written.
    """

    def __init__(  # noqa: PLR0913 - built in one place, from what it was told
        self,
        services: Services,
        target: Target,
        register: Register,
        claim: ClaimPlans,
        *,
        spans: Mapping[str, Span],
        on_over: Callable[[Delivery], None],
        on_clear: Callable[[Delivery], None],
    ) -> None:
        """Nobody pushes yet.

        Args:
            services: The engine's.
            target: Who gets it.
            register: Where to, but for the blocks.
            claim: Which part is ours to write.
            spans: The blocks, which have been checked.
            on_over: Told once, when it has its outcome.
            on_clear: Told once, when nothing of it is in flight any more, either.
        """
        config = services.config
        self.reader: EngineKey = target.key
        self.register = register
        self.bytes = self.descriptors = self.written_bytes = 0
        self._services = services
        self._target = target
        self._link = target.link
        self._claim = claim
        claim.users += 1
        self._on_over = on_over
        self._on_clear = on_clear
        self._log = services.log.bind(
            request=printable(register.request_id), reader=str(target.key)
        )
        self._machine = DeliveryMachine(
            now=trio.current_time(),
            lease_s=register.lease_s,
            window=config.window,
            grace_s=config.drain_grace_s,
        )
        self._driver = Driver(
            self._machine,
            over=OVER,
            draining=DeliveryState.DRAINING,
            cancel=DeliveryAborted(EngineClosed("the engine is closing")),
            tick=DeliveryTicked(),
            carry_out=self._carry_out,
            on_bug=self._abandon,
            on_draining=self._drop_waiting,
            log=self._log,
        )
        self.feed = self._driver.feed
        self._flights = Flights(
            services.fabric,
            services.pump,
            services.traffic,
            on_settled=self._settled,
            on_lost=self._lost,
            log=self._log,
        )
        self._spans = spans
        target.blocks += self._blocks
        self._cargo: Cargo | None = None
        self._batches: list[_Batch] = []
        self.waves = 0
        self._entry: QuarantineEntry | None = None
        self._is_holding = True  # on the claim
        self._owes_revoked = False  # after a bug of ours, by hand
        self._has_told = False  # that nothing touches the consumer's blocks

    @property
    def cause(self) -> FerryError | None:
        """Why it did not land; None while nothing has failed, or if it did."""
        return self._driver.bug or self._machine.cause

    @property
    def has_landed(self) -> bool:
        """Whether the consumer has it all."""
        return self._machine.state is DeliveryState.LANDED

    @property
    def _blocks(self) -> int:
        return sum(len(span.block_ids) for span in self._spans.values())

    def start(self) -> None:
        """Tell the consumer that it is registered, and wait for a push."""
        self._send(Registered(*self._name()))
        self._services.nursery.start_soon(self._driver.run)

    def join(self, cargo: Cargo) -> None:
        """There is something to push."""
        self._cargo = cargo
        self.feed(PushJoined())

    def add(self, steps: Iterable[Step]) -> None:
        """Write what these steps let go; blocks that it does not fit abort it."""
        if self._driver.is_over:
            return  # what was prepared may have been given back
        before = self.waves
        try:
            for step in steps:
                self._plan(step)
        except FerryError as error:
            self.feed(DeliveryAborted(error))
        else:
            self.feed(WavesReady(self.waves - before))

    def commit(self) -> None:
        """No more follows."""
        self.feed(DeliveryCommitted())

    def abort(self, cause: FerryError) -> None:
        """The push that it is part of has failed."""
        self.feed(DeliveryAborted(cause))

    def extend(self) -> None:
        """The consumer holds its blocks on."""
        self.feed(ExtendArrived())

    def land(self) -> None:
        """The consumer has it all."""
        self.feed(LandedArrived())

    def revoke(self, link: Link) -> None:
        """The consumer wants its blocks back, and hears of it over this link."""
        self._link = link
        if self._driver.bug is None:
            self.feed(RevokeArrived())
        else:
            self._owes_revoked = True
            self._clear_up()

    def lose_consumer(self, cause: FerryError) -> None:
        """Its link has ended."""
        self.feed(ConsumerLost(cause))

    def _plan(self, step: Step) -> None:
        cargo = self._held_cargo()
        for prepared in self._claim.of(step.layer):
            selection = prepared.plan.select(
                num_tokens=cargo.num_tokens,
                computed_tokens=self.register.computed_tokens,
                local=self._spans,
                remote=cargo.spans,
                clip=step.clip,
            )
            waves = Waves(
                selection,
                [self._services.key],
                max_bytes=self._services.config.wave_bytes,
            )
            if waves:
                self._batches.append(_Batch(self.waves, waves, prepared.pairs))
                self.waves += len(waves)
                self.bytes += selection.bytes
                self.descriptors += selection.descriptors

    def _wave(self, number: int) -> tuple[Wave, Sequence[tuple[Prepared, Prepared]]]:
        at = bisect_right(self._batches, number, key=attrgetter("first")) - 1
        batch = self._batches[at]
        return batch.waves[number - batch.first], batch.pairs

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case PostWave(wave=number):
                self._post(number)
            case ReportRegistered():
                self._send(Registered(*self._name()))
            case SendFinished(waves=waves):
                tokens = self._held_cargo().num_tokens
                self._send(Finished(*self._name(), tokens, waves, self.bytes))
            case SendFailed():
                self._send(aborted(self.register, self._machine.cause))
            case SendRevoked():
                self._tell_revoked()
            case QuarantineWaves():
                self._quarantine()
            case ReclaimWaves():
                self._reclaim()
            case EndDelivery():
                self._end()
            case _:
                raise FerryInternalError(f"no one does {type(effect).__name__}")

    def _drop_waiting(self) -> None:
        self._flights.drop_waiting()

    def _post(self, number: int) -> None:
        self._flights.post(
            number,
            partial(self._start, number),
            peer=str(self.reader),
            size=self._wave(number)[0].bytes,
        )

    def _start(self, number: int, fabric: Fabric) -> Transfer:
        if not self._machine.is_held(trio.current_time()):
            # It was when the wave asked for its turn (case l3).
            raise LeaseExpired("the consumer's lease ran out before the wave's turn")
        wave, pairs = self._wave(number)
        ours, theirs = pairs[wave.selected.index]
        if number == 0 and wave.bytes >= ANNOUNCED_BYTES:
            self._target.announce(self.register.token)
        return fabric.post(
            Operation.WRITE,
            ours,
            wave.selected.remote_ids[wave.slice],
            theirs,
            wave.selected.local_ids[wave.slice],
            notice=encode_notice(Written(self.register.token, number)),
        )

    def _settled(self, number: int, cause: FerryError | None) -> None:
        if cause is None:
            self.written_bytes += self._wave(number)[0].bytes
        self.feed(WriteSettled(number, self._about(cause)))
        self._clear_up()

    def _lost(self, number: int, cause: FerryError) -> None:
        self.feed(WriteLost(number, cause.about(peer=str(self.reader))))

    def _about(self, cause: FerryError | None) -> FerryError | None:
        return None if cause is None else cause.about(peer=str(self.reader))

    def _name(self) -> tuple[str, int]:
        return self.register.request_id, self.register.attempt

    def _send(self, message: LinkMessage) -> None:
        try:
            self._link.post(message)
        except PeerLost as error:
            # The end of the link is told by itself, and ends the delivery.
            self._log.debug("answer_lost", error=str(error))

    def _held_cargo(self) -> Cargo:
        if self._cargo is None:
            raise FerryInternalError("a delivery without a push has nothing to write")
        return self._cargo

    def _tell_revoked(self) -> None:
        self._has_told = True
        self._send(Revoked(*self._name()))

    def _end(self) -> None:
        self._log.debug("delivery_over", state=self._machine.state.value)
        if self._machine.state is DeliveryState.ENDED and not self._has_told:
            # Unasked: an engine that closes now cannot be asked any more, and no
            # later start of it could answer.
            self._tell_revoked()
        self._on_over(self)
        self._leave()

    def _abandon(self) -> None:
        """A bug of ours: whatever may still be touched stays in quarantine."""
        self._drop_waiting()
        if self._flights.in_flight:
            self._quarantine()
        self._send(aborted(self.register, self._driver.bug))
        self._on_over(self)
        self._clear_up()

    def _quarantine(self) -> None:
        """Our blocks: the consumer's are in its own quarantine until we answer."""
        spans = self._cargo.spans if self._cargo is not None else {}
        self._entry = QuarantineEntry(
            self.register.request_id,
            str(self.reader),
            self.cause,
            trio.current_time(),
            held_blocks(spans),
        )
        self._services.quarantine.hold(self._entry)
        self._log.error("push_quarantined")

    def _reclaim(self) -> None:
        if self._entry is not None:
            self._services.quarantine.reclaim(self._entry)
            self._entry = None
            self._log.info("push_reclaimed")
        self._leave()

    def _clear_up(self) -> None:
        """After a bug of ours no machine says when blocks are safe again."""
        if self._driver.bug is None or self._flights.in_flight:
            return
        if self._owes_revoked:
            self._owes_revoked = False
            self._send(Revoked(*self._name()))
        self._reclaim()

    def _leave(self) -> None:
        """Let go of what is prepared, once nothing is in flight."""
        if self._flights.in_flight or not self._is_holding:
            return
        self._is_holding = False
        self._claim.users -= 1
        self._target.blocks -= self._blocks
        self._target.tidy()
        self._on_clear(self)


def aborted(register: Register, cause: FerryError | None) -> Aborted:
    """What the consumer is told of a failure."""
    reason = next(
        (reason for kind, reason in _REASONS.items() if isinstance(cause, kind)),
        AbortedReason.FAILED,
    )
    detail = "" if cause is None else as_detail(cause.detail)
    return Aborted(register.request_id, register.attempt, reason, detail)


_REASONS: dict[type[FerryError], AbortedReason] = {
    LeaseExpired: AbortedReason.EXPIRED,
    IncompletePush: AbortedReason.INCOMPLETE,
    OfferSpent: AbortedReason.SPENT,
    MisuseError: AbortedReason.MISFIT,
}
