"""`Pull`: one request's blocks, read from those who offer them.

Drives a `PullMachine`, in its caller's task. The machine decides, this file acts:
events from peers, transfers, the clock and the caller go in, effects are carried out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvferry.engine.after import wait_for
from kvferry.engine.aside import Aside
from kvferry.engine.dialogue import Dialogue
from kvferry.engine.drive import Driver
from kvferry.engine.guard import guarded
from kvferry.engine.quarantine import QuarantineEntry, held_blocks
from kvferry.engine.reading import Reading
from kvferry.engine.report import TransferReport
from kvferry.engine.selector import Selector
from kvferry.engine.spans import Span
from kvferry.protocol.errors import (
    EngineClosed,
    FerryError,
    FerryInternalError,
    PeerLost,
)
from kvferry.protocol.lifecycle.pull import (
    OVER,
    AwaitBlocks,
    BlocksReady,
    CancelRequested,
    Connect,
    DeclineOffer,
    DeclineSource,
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
    RoomTaken,
    RunFinish,
    SendReadFinished,
    TakeRoom,
    WaveLost,
    WaveSettled,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.engine.after import After
    from kvferry.engine.party import Party
    from kvferry.engine.selection import Selection, Tail
    from kvferry.engine.services import Services
    from kvferry.engine.sources import Sources
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.lifecycle.machine import Effect
    from kvferry.protocol.ranges import Ranges
    from kvferry.protocol.ticket import RankOffer, Ticket

__all__ = ("Pull", "PullRequest")

RENEWALS_PER_LEASE = 3
"""So that two renewals may be late before a lease runs out."""

LONG_BLOCKS = 16_384
"""In a ticket's spans: more take milliseconds to plan, and do not hold up the loop."""

SHORTEST_RENEWAL_S = 0.01
"""A ticket may name any lease: nobody's ticket makes us flood a link."""


@dataclass(frozen=True)
class PullRequest:
    """What the caller asked for.

    Attributes:
        spans: Our blocks, by group, as arrays: several look at them.
        deadline_at: In `trio.current_time`.
        after: What must be over before the blocks are written.
    """

    ticket: Ticket
    spans: Mapping[str, Span]
    computed_tokens: int
    deadline_at: float
    after: After | None = None
    priority: int = 0


class Pull:
    """One pull.

    Owns: the machine with its driver, and what the plan made of the request.

    Args:
        attempt: Its number; no other pull or landing has it.

    Attributes:
        feed: Takes an event of the machine's.
    """

    def __init__(self, services: Services, request: PullRequest, attempt: int) -> None:
        config, ticket = services.config, request.ticket
        self._services = services
        self._request = request
        self._ticket = ticket
        self._log = services.log.bind(request=ticket.request_id)
        self._machine = PullMachine(
            window=config.window,
            deadline_at=request.deadline_at,
            renew_every_s=max(ticket.lease_s / RENEWALS_PER_LEASE, SHORTEST_RENEWAL_S),
            grace_s=config.drain_grace_s,
        )
        self._driver = Driver(
            self._machine,
            over=OVER,
            draining=PullState.DRAINING,
            cancel=CancelRequested(),
            tick=PullTicked(),
            carry_out=self._carry_out,
            on_bug=self._abandon,
            on_draining=self._drop_waiting,
            log=self._log,
        )
        self.feed = self._driver.feed
        self._dialogue = Dialogue(
            services, ticket, attempt, feed=self.feed, log=self._log
        )
        self._aside = Aside(services.nursery, on_failure=self._fail, log=self._log)
        self._sources: Sources | None = None
        self._selection: Selection[EngineKey] | None = None
        self._reading: Reading | None = None
        self._plan_s = 0.0
        self._entry: QuarantineEntry | None = None
        self._is_finishing = False

    @property
    def _may_touch(self) -> bool:
        """Whether anything of ours may still touch the destination blocks."""
        return self._is_finishing or bool(self._reading and self._reading.in_flight)

    async def run(self) -> TransferReport:
        """To the one outcome: a report, an error, or the caller's cancellation."""
        has_work = self._request.computed_tokens < self._ticket.num_tokens
        try:
            await self._driver.run(PullStarted(has_work))
        finally:
            await self._aside.end()
            # Only now: in its very last step a task may still have come by sources.
            self._leave()
        if self._machine.state is not PullState.DONE:
            raise self._error()
        return self._report()

    def _abandon(self) -> None:
        """A bug of ours: whatever may still be touched stays in quarantine."""
        self._drop_waiting()
        if self._may_touch:
            self._quarantine()
        self._decline()

    def _drop_waiting(self) -> None:
        if self._reading is not None:
            self._reading.drop_waiting()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Connect():
                self._connect()
            case AwaitBlocks():
                self._await_blocks()
            case RenewLease() | DeclineSource() | SendReadFinished():
                self._dialogue.say(effect)
            case TakeRoom():
                self._take_room()
            case PostWave(wave=number):
                self._post(number)
            case RunFinish():
                self._run_finish()
            case DeclineOffer():
                self._decline()
            case QuarantineBlocks():
                self._quarantine()
            case ReclaimBlocks():
                self._reclaim()
            case _:
                raise FerryInternalError(f"no one does {type(effect).__name__}")

    def _post(self, number: int) -> None:
        reading = self._held_reading()
        # Over tcp the bytes move when the producer looks, and it looks when it has
        # heard of us. Each source by itself: the first post waits for one word alone.
        self._dialogue.flush(reading.waves.sources[number])
        reading.post(number)
        if number == 0:
            self._log.debug("pull_reading")

    def _fail(self, error: FerryError) -> None:
        self.feed(PullFailed(error))

    def _connect(self) -> None:
        """Peers that are there already cost no task."""
        try:
            party = self._services.routes.now(self._ticket)
            sources = None
            if party is not None and not self._is_long():
                sources = self._services.peers.sources_now(party)
            if party is None or sources is None:
                self._aside.start(self._reach)
            else:
                self._sources = sources
                begun_at = trio.current_time()
                self._plan(sources, party, self._select(sources), begun_at)
        except FerryError as error:
            self._fail(error)

    async def _reach(self) -> None:
        party = await self._services.routes.find(self._ticket)
        sources = await self._services.peers.sources(party)
        self._sources = sources  # to be left, whatever follows
        begun_at = trio.current_time()
        if self._is_long():
            selection = await trio.to_thread.run_sync(self._select, sources)
            if any(peer.is_forgotten for peer in sources.peers):
                # Meanwhile: nobody would tell us again.
                raise PeerLost("a rank was lost while its plan was made")
        else:
            selection = self._select(sources)
        self._plan(sources, party, selection, begun_at)

    def _is_long(self) -> bool:
        """Whether the loop cannot wait for its plan."""
        spans = self._ticket.spans.values()
        return sum(len(span.block_ids) for span in spans) > LONG_BLOCKS

    def _select(self, sources: Sources) -> Selection[EngineKey]:
        """Pure: it may run beside the loop."""
        return sources.plan.select(
            num_tokens=self._ticket.num_tokens,
            computed_tokens=self._request.computed_tokens,
            local=self._request.spans,
            remote={
                name: Span(span.block_ids, span.first_token)
                for name, span in self._ticket.spans.items()
            },
        )

    def _plan(
        self,
        sources: Sources,
        party: Party[RankOffer],
        selection: Selection[EngineKey],
        begun_at: float,
    ) -> None:
        self._dialogue.begin(sources.peers, party)
        self._selection = selection
        self._reading = Reading(
            self._services,
            sources,
            selection,
            is_wanted=self._is_reading,
            on_settled=self._settled,
            on_lost=self._lost,
            priority=self._request.priority,
            log=self._log,
        )
        self._plan_s = trio.current_time() - begun_at
        offers = party.ranks
        self.feed(
            Planned(
                wave_sources=self._reading.waves.sources,
                sources=len(sources.peers),
                unready=tuple(
                    i for i, offer in enumerate(offers) if not offer.may_be_read
                ),
            )
        )

    def _await_blocks(self) -> None:
        if self._request.after is None:
            self.feed(BlocksReady())
        else:
            self._aside.start(partial(self._await_event, self._request.after))

    async def _await_event(self, after: After) -> None:
        await wait_for(after)
        self.feed(BlocksReady())

    def _take_room(self) -> None:
        """In the staging buffer if any is needed there: no wave ever waits for it."""
        reading = self._held_reading()
        if not reading.needs_berth or reading.take_berth_now():
            self.feed(RoomTaken())
        else:
            self._aside.start(self._take_berth)

    async def _take_berth(self) -> None:
        await self._held_reading().take_berth()
        self.feed(RoomTaken())

    def _held_reading(self) -> Reading:
        if self._reading is None:
            raise FerryInternalError("there are no waves before the plan")
        return self._reading

    def _is_reading(self) -> bool:
        return self._machine.state is PullState.READING and not self._driver.bug

    def _settled(self, number: int, cause: FerryError | None) -> None:
        told = None if cause is None else self._about_wave(number, cause)
        self.feed(WaveSettled(number, told))
        self._clear_up()

    def _lost(self, number: int, cause: FerryError) -> None:
        self.feed(WaveLost(number, self._about_wave(number, cause)))

    def _about_wave(self, number: int, cause: FerryError) -> FerryError:
        source = self._held_reading().waves.sources[number]
        return cause.about(peer=self._dialogue.name([source]))

    def _run_finish(self) -> None:
        """In the engine's nursery: a pull that is cancelled now is done all the same."""
        if self._selection is None:  # a full prefix hit: nothing was planned
            self._selection = self._select_nothing()
        if self._selection.tails:
            self._is_finishing = True
            self._services.nursery.start_soon(self._finish, self._selection.tails)
        else:
            self.feed(FinishEnded())

    async def _finish(self, tails: Sequence[Tail]) -> None:
        def failed(error: FerryError) -> None:
            self.feed(FinishFailed(error))

        async def finish() -> None:
            await self._services.finish.run(tails)
            self.feed(FinishEnded())

        try:
            await guarded(finish, on_failure=failed, log=self._log)
        except trio.Cancelled:
            failed(EngineClosed("the engine closed before the finish stage ended"))
            raise
        finally:
            self._is_finishing = False
            self._clear_up()

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
        # A peer that was connected and is not any more has noticed the same: it is
        # not dialled for this word.
        self._dialogue.decline(self._machine.cause, may_dial=self._sources is None)

    def _quarantine(self) -> None:
        self._entry = QuarantineEntry(
            self._ticket.request_id,
            self._unsettled_peers(),
            self._driver.bug or self._machine.cause,
            trio.current_time(),
            held_blocks(self._request.spans),
        )
        self._services.quarantine.hold(self._entry)
        self._log.error(
            "pull_quarantined",
            peer=self._entry.peer,
            blocks={name: len(ids) for name, ids in self._entry.blocks.items()},
        )

    def _unsettled_peers(self) -> str:
        """Who may still be moving bytes; the instance if it is only our finish stage."""
        reading = self._reading
        if reading is None or not reading.in_flight:
            return self._ticket.engine_id
        return self._dialogue.name(
            {reading.waves.sources[number] for number in reading.in_flight}
        )

    def _reclaim(self) -> None:
        if self._entry is not None:
            self._services.quarantine.reclaim(self._entry)
            self._entry = None
            self._log.info("pull_reclaimed")
        self._leave()

    def _clear_up(self) -> None:
        """After a bug of ours no machine says when its blocks are safe again."""
        if self._driver.bug is not None and not self._may_touch:
            self._reclaim()

    def _leave(self) -> None:
        """Hear no more, and let go of what is prepared once nothing uses it."""
        self._dialogue.end()
        if self._reading is not None and self._reading.in_flight:
            return
        if self._reading is not None:
            self._reading.give_back_berth()
        if self._sources is not None:
            self._services.peers.leave(self._sources)
            self._sources = None

    def _error(self) -> FerryError:
        """The failure, with what is known of it around it (invariant 9)."""
        cause = self._driver.bug or self._machine.cause
        if cause is None:
            cause = FerryInternalError(f"a pull ended {self._machine.state.value}")
        error = cause.about(
            request_id=self._ticket.request_id,
            peer=self._ticket.engine_id,
            phase=self._driver.failed_in.value,
            untrusted=self._untrusted(),
        )
        self._log.warning("pull_failed", error=type(error).__name__, detail=str(error))
        return error

    def _untrusted(self) -> Mapping[str, Ranges]:
        """What the destination no longer holds for sure; nothing before the first post."""
        if self._selection is None or not self._machine.posted:
            return {}
        return self._selection.untrusted

    def _report(self) -> TransferReport:
        selection, config = self._selection, self._services.config
        if selection is None:
            raise FerryInternalError("a done pull has no selection")
        report = TransferReport(
            request_id=self._ticket.request_id,
            peers=self._dialogue.names(selection.peers),
            num_tokens=self._ticket.num_tokens,
            computed_tokens=self._request.computed_tokens,
            bytes=selection.bytes,
            bulk_bytes=selection.bulk_bytes,
            descriptors=selection.descriptors,
            waves=0 if self._reading is None else len(self._reading.waves),
            zeroed_tokens=selection.zeroed_slots,
            phases_s={**self._driver.phases_s, "plan": self._plan_s},
            skipped_groups=tuple(sorted(config.skip_groups)),
        )
        self._log.info(
            "pull_done",
            bytes=report.bytes,
            descriptors=report.descriptors,
            waves=report.waves,
            phases_s=report.phases_s,
        )
        return report
