"""The pull service: drives one `PullMachine` for each pull.

The machine decides, this file acts: events from peers, transfers, the clock and
the caller go in, effects are carried out. Every pull runs in its caller's task,
and its failure ends it alone.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvferry.engine.fabric.base import Operation, Progress
from kvferry.engine.guard import guarded
from kvferry.engine.peers import Subscriber
from kvferry.engine.quarantine import QuarantineEntry
from kvferry.engine.report import TransferReport
from kvferry.engine.selection import BulkSelection, Selector
from kvferry.engine.spans import Span
from kvferry.engine.waves import cut
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    FerryInternalError,
    LeaseExpired,
    OfferSpent,
    OfferWithdrawn,
    PeerLost,
    RequestInUse,
    UnknownOffer,
)
from kvferry.protocol.lifecycle.pull import (
    OVER,
    AwaitBlocks,
    BlocksReady,
    CancelRequested,
    ConfirmArrived,
    Connect,
    DeclineOffer,
    FinishEnded,
    FinishFailed,
    Planned,
    PostWave,
    PullFailed,
    PullMachine,
    PullStarted,
    PullState,
    PullTicked,
    QuarantineBlocks,
    ReclaimBlocks,
    RenewLease,
    RunFinish,
    SendReadFinished,
    SourceFailed,
    WaveLost,
    WaveSettled,
)
from kvferry.protocol.link import (
    Confirmed,
    ReadFinished,
    Refused,
    RefusedReason,
    Renew,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric
    from kvferry.engine.finish import FinishStage
    from kvferry.engine.peers import Answer, Peer, Peers
    from kvferry.engine.pump import Pump
    from kvferry.engine.quarantine import Quarantine
    from kvferry.engine.rearrange import Rearranger
    from kvferry.engine.selection import Selection
    from kvferry.engine.sources import Sources
    from kvferry.engine.staging import Berth, Staging
    from kvferry.engine.waves import Wave
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.layout import CacheLayout
    from kvferry.protocol.lifecycle.machine import Effect, Event
    from kvferry.protocol.link import LinkMessage
    from kvferry.protocol.ticket import Ticket

__all__ = ("PullRequest", "Pulls", "Services")

RENEWALS_PER_LEASE = 3
"""So that two renewals may be late before a lease runs out."""

SHORTEST_RENEWAL_S = 0.01
"""A ticket may name any lease: nobody's ticket makes us flood a link."""


@dataclass(frozen=True)
class Services:
    """What every pull of an engine works with."""

    config: EngineConfig
    key: EngineKey
    layout: CacheLayout
    fabric: Fabric
    pump: Pump
    peers: Peers
    staging: Staging
    rearranger: Rearranger
    finish: FinishStage
    quarantine: Quarantine
    nursery: trio.Nursery
    log: FilteringBoundLogger


@dataclass(frozen=True)
class PullRequest:
    """What the caller asked for.

    Attributes:
        spans: Our blocks, by group.
        deadline_at: In `trio.current_time`.
    """

    ticket: Ticket
    spans: Mapping[str, Span]
    computed_tokens: int
    deadline_at: float


class Pulls:
    """All pulls of one engine."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._active: dict[str, _Pull] = {}
        self._attempts = itertools.count()
        self._idle = trio.Event()

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._active)

    async def run(self, request: PullRequest) -> TransferReport:
        """Run one pull to its outcome; see `TransferEngine.pull`."""
        request_id = request.ticket.request_id
        if request_id in self._active:
            raise RequestInUse("a pull of it is under way", request_id=request_id)
        pull = _Pull(self._services, request, next(self._attempts))
        self._active[request_id] = pull
        try:
            return await pull.run()
        finally:
            del self._active[request_id]
            if not self._active:
                self._idle.set()
                self._idle = trio.Event()

    async def close(self) -> None:
        """End all pulls, and wait until each has drained or given up."""
        for pull in tuple(self._active.values()):
            pull.feed(PullFailed(EngineClosed("the engine is closing")))
        while self._active:
            await self._idle.wait()


class _Pull:
    """One pull.

    Owns: the machine, the inbox of events, and what the plan made of the request.
    """

    def __init__(self, services: Services, request: PullRequest, attempt: int) -> None:
        config, ticket = services.config, request.ticket
        self._services = services
        self._request = request
        self._ticket = ticket
        self._attempt = attempt
        self._log = services.log.bind(request=ticket.request_id)
        self._machine = PullMachine(
            window=config.window,
            deadline_at=request.deadline_at,
            renew_every_s=max(ticket.lease_s / RENEWALS_PER_LEASE, SHORTEST_RENEWAL_S),
            grace_s=config.drain_grace_s,
        )
        self._inbox: deque[Event] = deque()
        self._arrived = trio.Event()
        self._phase = self._failed_in = self._machine.state
        self._phase_at = trio.current_time()
        self._phases_s: dict[str, float] = {}
        self._nursery: trio.Nursery | None = None
        self._sources: Sources | None = None
        self._selection: Selection[EngineKey] | None = None
        self._waves: tuple[Wave, ...] = ()
        self._berth: Berth | None = None
        self._plan_s = 0.0
        self._entry: QuarantineEntry | None = None
        self._bug: FerryError | None = None

    def feed(self, event: Event) -> None:
        """Let an event in; never blocks or raises."""
        if self._machine.state in OVER and self._bug is None:
            # Nobody drives any more: only what is in quarantine still changes.
            self._step(event)
            return
        self._inbox.append(event)
        self._arrived.set()

    async def run(self) -> TransferReport:
        """To the one outcome: a report, an error, or the caller's cancellation."""
        has_work = self._request.computed_tokens < self._ticket.num_tokens
        try:
            async with trio.open_nursery() as self._nursery:
                self.feed(PullStarted(has_work))
                await self._drive_to_the_end()
                self._nursery.cancel_scope.cancel()
        finally:
            # Only now: in its very last step a task of the nursery may still have
            # come by sources.
            self._leave()
        if self._machine.state is not PullState.DONE:
            raise self._error()
        return self._report()

    async def _drive_to_the_end(self) -> None:
        try:
            await self._drive_guarded()
        except trio.Cancelled:
            self.feed(CancelRequested())
            # The machine's own deadlines bound the drain.
            with trio.CancelScope(shield=True):
                await self._drive_guarded()
            raise

    async def _drive_guarded(self) -> None:
        await guarded(self._drive, on_failure=self._abandon, log=self._log)

    def _abandon(self, bug: FerryError) -> None:
        """A bug of ours: whatever may still be touched stays in quarantine."""
        self._bug = bug
        if self._machine.unsettled:
            self._quarantine()

    async def _drive(self) -> None:
        while self._machine.state not in OVER:
            await self._next_input()
            now = trio.current_time()
            deadline = self._machine.deadline
            if deadline is not None and now >= deadline:
                self._step(PullTicked())
            # One event between two checkpoints: its effects may post a wave, which
            # on one host is copied inside the call and answered at once.
            if self._inbox and self._machine.state not in OVER:
                self._step(self._inbox.popleft())
        while self._inbox:  # late ones are counted
            self._step(self._inbox.popleft())

    async def _next_input(self) -> None:
        """Wait for an event or the machine's deadline; let others run in any case."""
        if self._inbox:
            await trio.lowlevel.checkpoint()
            return
        self._arrived = trio.Event()
        deadline = self._machine.deadline
        with trio.move_on_at(float("inf") if deadline is None else deadline):
            await self._arrived.wait()

    def _step(self, event: Event) -> None:
        effects = self._machine.step(event, trio.current_time())
        self._note_phase()
        for effect in effects:
            self._carry_out(effect)

    def _note_phase(self) -> None:
        state = self._machine.state
        if state is self._phase:
            return
        now = trio.current_time()
        name = self._phase.value
        self._phases_s[name] = self._phases_s.get(name, 0.0) + now - self._phase_at
        if state is not PullState.DRAINING and state not in OVER:
            self._failed_in = state
        self._phase, self._phase_at = state, now
        if state not in OVER:
            self._log.debug(f"pull_{state.value}")

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Connect():
                self._start_task(self._connect)
            case AwaitBlocks():
                self._await_blocks()
            case RenewLease(sources=sources):
                self._renew(sources)
            case PostWave(wave=number):
                self._post(number)
            case SendReadFinished(source=source):
                self._send_read_finished(source)
            case RunFinish():
                self._services.nursery.start_soon(self._finish)
            case DeclineOffer():
                self._decline()
            case QuarantineBlocks():
                self._quarantine()
            case ReclaimBlocks():
                self._reclaim()
            case _:
                raise FerryInternalError(f"no one does {type(effect).__name__}")

    def _start_task(self, call: Callable[[], Awaitable[None]]) -> None:
        """Run a part of the pull beside it; its failure is an event."""
        if self._nursery is None:
            raise FerryInternalError("a pull's task started before the pull")
        self._nursery.start_soon(
            partial(guarded, call, on_failure=self._fail, log=self._log)
        )

    def _fail(self, error: FerryError) -> None:
        self.feed(PullFailed(error))

    def _fail_source(self, source: int, cause: FerryError) -> None:
        self.feed(SourceFailed(source, cause))

    async def _connect(self) -> None:
        sources = await self._services.peers.sources(self._ticket)
        self._sources = sources
        for number, peer in enumerate(sources.peers):
            subscriber = Subscriber(
                partial(self._answered, number), partial(self._fail_source, number)
            )
            peer.subscribe(self._attempt, subscriber)
        started_at = trio.current_time()
        self._selection = sources.plan.select(
            num_tokens=self._ticket.num_tokens,
            computed_tokens=self._request.computed_tokens,
            local=self._request.spans,
            remote={
                name: Span(span.block_ids, span.first_token)
                for name, span in self._ticket.spans.items()
            },
        )
        keys = [peer.key for peer in sources.peers]
        self._waves = cut(
            self._selection, keys, max_bytes=self._services.config.wave_bytes
        )
        self._plan_s = trio.current_time() - started_at
        wave_sources = tuple(wave.source for wave in self._waves)
        self.feed(Planned(wave_sources, len(sources.peers)))

    def _await_blocks(self) -> None:
        """Take room in the staging buffer if any is needed: no wave ever waits for it."""
        if any(wave.is_bulk for wave in self._waves):
            self._start_task(self._take_berth)
        else:
            self.feed(BlocksReady())

    async def _take_berth(self) -> None:
        self._berth = await self._services.staging.take()
        self.feed(BlocksReady())

    def _answered(self, source: int, answer: Answer) -> None:
        match answer:
            case Confirmed():
                self.feed(ConfirmArrived(source))
            case Refused():
                self._fail_source(source, _REFUSALS[answer.reason]())
            case _:
                pass  # renewed: its lease runs on the producer's clock

    def _renew(self, sources: Iterable[int]) -> None:
        readers = self._services.key.rank.instance()
        for source in sources:
            offer_id = self._ticket.ranks[source].offer_id
            self._send(
                source, Renew(self._ticket.request_id, offer_id, self._attempt, readers)
            )

    def _send_read_finished(self, source: int) -> None:
        offer_id = self._ticket.ranks[source].offer_id
        self._send(
            source, ReadFinished(self._ticket.request_id, offer_id, self._attempt)
        )

    def _send(self, source: int, message: LinkMessage) -> None:
        try:
            self._peers()[source].link.post(message)
        except PeerLost as error:
            self.feed(SourceFailed(source, error))

    def _peers(self) -> tuple[Peer, ...]:
        return self._sources.peers if self._sources is not None else ()

    def _post(self, number: int) -> None:
        wave = self._waves[number]
        selected = wave.selected
        if self._sources is None:
            raise FerryInternalError("a wave was posted before the plan")
        ours, theirs = self._sources.prepared[wave.source][selected.index]
        remote_ids = selected.remote_ids[wave.slice]
        if isinstance(selected, BulkSelection):
            cell = self._held_berth().enter(number)
            local_ids = self._services.staging.ids(selected.section, cell, remote_ids)
        else:
            local_ids = selected.local_ids[wave.slice]
        try:
            transfer = self._services.fabric.post(
                Operation.READ, ours, local_ids, theirs, remote_ids
            )
        except FerryError as error:
            self._settle(number, error)
            return
        self._services.pump.track(transfer, partial(self._progressed, number))

    def _progressed(
        self, number: int, progress: Progress, cause: FerryError | None
    ) -> None:
        if progress is Progress.LOST and cause is not None:
            self.feed(WaveLost(number, cause))
        elif (
            cause is None
            and self._waves[number].is_bulk
            and self._machine.state is PullState.READING
        ):
            self._services.nursery.start_soon(self._rearrange, number)
        else:
            self._settle(number, cause)

    def _settle(self, number: int, cause: FerryError | None = None) -> None:
        if self._berth is not None:
            self._berth.leave(number)
        self.feed(WaveSettled(number, cause))

    async def _rearrange(self, number: int) -> None:
        """In the engine's nursery: until it ends, the wave may touch our blocks."""
        await guarded(
            partial(self._put_in_place, number),
            on_failure=partial(self._settle, number),
            log=self._log,
        )

    async def _put_in_place(self, number: int) -> None:
        _, selected, wave = self._waves[number]
        if isinstance(selected, BulkSelection):
            cell = self._held_berth().of(number)
            landed = self._services.staging.cell(selected.section, cell)
            await self._services.rearranger.run(selected, wave, landed)
        self._settle(number)

    def _held_berth(self) -> Berth:
        if self._berth is None:
            raise FerryInternalError("a wave landed in bulk without a berth")
        return self._berth

    async def _finish(self) -> None:
        """In the engine's nursery: a pull that is cancelled now is done all the same."""

        def failed(error: FerryError) -> None:
            self.feed(FinishFailed(error))

        try:
            await guarded(self._run_finish, on_failure=failed, log=self._log)
        except trio.Cancelled:
            failed(EngineClosed("the engine closed before the finish stage ended"))
            raise

    async def _run_finish(self) -> None:
        if self._selection is None:  # a full prefix hit: nothing was planned
            self._selection = self._select_nothing()
        await self._services.finish.run(self._selection.tails)
        self.feed(FinishEnded())

    def _select_nothing(self) -> Selection[EngineKey]:
        config, layout = self._services.config, self._services.layout
        groups = {g.name: g for g in layout.groups if g.name not in config.skip_groups}
        return Selector(
            groups,
            num_tokens=self._ticket.num_tokens,
            computed_tokens=self._request.computed_tokens,
            local=self._request.spans,
            remote={},
        ).select({})

    def _decline(self) -> None:
        """Free the producer at once; if that fails, its lease does.

        At once, not behind the drain, which may never end: what the reads still
        bring is trusted by nobody, and the producer may as well reuse its blocks.

        A peer that was connected and is not any more has noticed the same; it is
        not dialled for this word.
        """
        tell = partial(self._tell_producer, may_dial=self._sources is None)
        self._services.nursery.start_soon(
            partial(guarded, tell, on_failure=self._not_told, log=self._log)
        )

    async def _tell_producer(self, *, may_dial: bool) -> None:
        cause = self._machine.cause
        detail = "not needed" if cause is None else type(cause).__name__
        await self._services.peers.decline(self._ticket, detail, may_dial=may_dial)

    def _not_told(self, error: FerryError) -> None:
        self._log.warning("decline_lost", error=str(error))

    def _quarantine(self) -> None:
        blocks = {
            name: tuple(block for block in span.block_ids if block is not None)
            for name, span in self._request.spans.items()
        }
        self._entry = QuarantineEntry(
            self._ticket.request_id,
            ", ".join(str(peer.key) for peer in self._peers()),
            self._machine.cause,
            trio.current_time(),
            blocks,
        )
        self._services.quarantine.hold(self._entry)
        self._log.error(
            "pull_quarantined", blocks={n: len(b) for n, b in blocks.items()}
        )

    def _reclaim(self) -> None:
        if self._entry is not None:
            self._services.quarantine.reclaim(self._entry)
        self._log.info("pull_reclaimed")
        self._leave()

    def _leave(self) -> None:
        """Hear no more, and let go of what is prepared once nothing uses it."""
        for peer in self._peers():
            peer.unsubscribe(self._attempt)
        if self._sources is not None and not self._machine.unsettled:
            self._services.peers.leave(self._sources)
            self._sources = None
        if self._berth is not None and not self._machine.unsettled:
            self._services.staging.give_back(self._berth)
            self._berth = None

    def _error(self) -> FerryError:
        """The failure, with what is known of it around it (invariant 9)."""
        cause = self._bug or self._machine.cause
        if cause is None:
            cause = FerryInternalError(f"a pull ended {self._machine.state.value}")
        error = copy.copy(cause)  # a peer's end is told to many pulls
        error.__cause__ = cause.__cause__
        error.request_id = self._ticket.request_id
        error.peer = error.peer or self._ticket.engine_id
        error.phase = self._failed_in.value
        if self._machine.posted and self._selection is not None:
            error.untrusted = dict(self._selection.untrusted)
        self._log.warning("pull_failed", error=type(error).__name__, detail=str(error))
        return error

    def _report(self) -> TransferReport:
        selection, config = self._selection, self._services.config
        if selection is None:
            raise FerryInternalError("a done pull has no selection")
        report = TransferReport(
            request_id=self._ticket.request_id,
            peers=tuple(str(key) for key in selection.peers),
            num_tokens=self._ticket.num_tokens,
            computed_tokens=self._request.computed_tokens,
            bytes=selection.bytes,
            bulk_bytes=selection.bulk_bytes,
            descriptors=selection.descriptors,
            waves=len(self._waves),
            zeroed_tokens=selection.zeroed_slots,
            phases_s={**self._phases_s, "plan": self._plan_s},
            skipped_groups=tuple(sorted(config.skip_groups)),
        )
        self._log.info(
            "pull_done",
            bytes=report.bytes,
            descriptors=report.descriptors,
            waves=report.waves,
            phases_s={name: round(s, 6) for name, s in report.phases_s.items()},
        )
        return report


_REFUSALS: dict[RefusedReason, Callable[[], FerryError]] = {
    RefusedReason.UNKNOWN: lambda: UnknownOffer(
        "the producer knows no such offer: it was never made there, or long ago"
    ),
    RefusedReason.SPENT: lambda: OfferSpent(
        "the ticket has been used before, by this reader or by another instance"
    ),
    RefusedReason.WITHDRAWN: lambda: OfferWithdrawn("the producer took the offer back"),
    RefusedReason.EXPIRED: lambda: LeaseExpired(
        "the producer did not hold the blocks until the last byte had been read"
    ),
}
