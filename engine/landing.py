"""`Landing`: blocks of one request that producers push into.

Drives a `LandingMachine`, in its caller's task. Once a source has been told of the
blocks it may write them until it has said that it will not: a landing that ends early
asks every source for its word, and asks those that it has lost again and again, for as
long as the engine lives.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvferry.engine.after import wait_for
from kvferry.engine.drive import Driver
from kvferry.engine.guard import guarded
from kvferry.engine.peer import Subscriber
from kvferry.engine.pump import Cadence
from kvferry.engine.quarantine import QuarantineEntry, held_blocks
from kvferry.engine.report import TransferReport
from kvferry.engine.selector import Selector
from kvferry.engine.spans import plain_ids, span_ids
from kvferry.protocol.errors import (
    BadTicket,
    EngineClosed,
    FerryError,
    FerryInternalError,
    ImpossiblePlan,
    IncompletePush,
    LeaseExpired,
    OfferSpent,
    PeerLost,
    PushAborted,
    TransferFailed,
)
from kvferry.protocol.lifecycle.landing import (
    OVER,
    AwaitBlocks,
    BlocksReady,
    CancelRequested,
    Claimed,
    Connect,
    DeclinePush,
    FinishEnded,
    FinishFailed,
    LandingFailed,
    LandingMachine,
    LandingStarted,
    LandingState,
    LandingTicked,
    PartArrived,
    QuarantineBlocks,
    ReclaimBlocks,
    RunFinish,
    SendExtend,
    SendLanded,
    SendRegister,
    SendRevoke,
    SourceFailed,
    SourceFinished,
    SourceLost,
    SourceRevoked,
)
from kvferry.protocol.link import (
    Aborted,
    AbortedReason,
    Extend,
    Finished,
    Landed,
    Register,
    Registered,
    Revoke,
    Revoked,
    Spare,
)
from kvferry.protocol.notices import AHEAD, TOKEN_BYTES
from kvferry.protocol.ranges import Ranges
from kvferry.protocol.ticket import TicketSpan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from kvferry.engine.after import After
    from kvferry.engine.intake import Intake
    from kvferry.engine.party import Layouts, Party
    from kvferry.engine.peer import Answer, Peer
    from kvferry.engine.selection import Selection
    from kvferry.engine.services import Services
    from kvferry.engine.shares import Shares
    from kvferry.engine.spans import Span
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.layout import GroupLayout
    from kvferry.protocol.lifecycle.machine import Effect
    from kvferry.protocol.link import LinkMessage
    from kvferry.protocol.ticket import Contact, RankAddress

__all__ = ("Landing", "LandingRequest")

EXTENSIONS_PER_LEASE = 3
"""So that two extensions may be late before a lease runs out."""

ASK_AGAIN_S = 1.0
"""How soon a source that was lost is asked for our blocks again."""

LONGEST_ASK_S = 60.0

QUIET_S = 0.03
"""After so long without a notice the next one is no more awaited by the moment."""


@dataclass(frozen=True)
class LandingRequest:
    """What the caller asked for.

    Attributes:
        contact: All ranks that may push.
        spans: Our blocks, by group, as arrays: several look at them.
        num_tokens: Of the request, if a ticket has told.
        deadline_at: In `trio.current_time`.
    """

    request_id: str
    contact: Contact
    spans: Mapping[str, Span]
    computed_tokens: int
    deadline_at: float
    num_tokens: int | None = None
    after: After | None = None


class Landing:
    """One landing.

    Owns: the machine with its driver, the tokens that it has chosen, and what the
    sources have told of the request.

    Args:
        intake: Where the notices come in that show one of the tokens.
        share: Our layout shared out among these peers, of an instance that has told
            these layouts.

    Attributes:
        feed: Takes an event of the machine's.
    """

    def __init__(
        self,
        services: Services,
        request: LandingRequest,
        *,
        intake: Intake,
        share: Callable[[tuple[Peer, ...], Layouts | None], Shares],
    ) -> None:
        config = services.config
        self._services = services
        self._request = request
        self._intake = intake
        self._share = share
        self._attempt = next(services.attempts)
        self._log = services.log.bind(request=request.request_id)
        self._machine = LandingMachine(
            deadline_at=request.deadline_at,
            extend_every_s=config.lease_s / EXTENSIONS_PER_LEASE,
            grace_s=config.drain_grace_s,
        )
        self._driver = Driver(
            self._machine,
            over=OVER,
            draining=LandingState.REVOKING,
            cancel=CancelRequested(),
            tick=LandingTicked(),
            carry_out=self._carry_out,
            on_bug=self._abandon,
            log=self._log,
        )
        self.feed = self._driver.feed
        self._nursery: trio.Nursery | None = None
        self._party: Party[RankAddress] | None = None  # whom it is about
        self._peers: list[Peer] = []
        self._shares: Shares | None = None
        self._selection: Selection[EngineKey] | None = None
        self._num_tokens = 0
        self._tokens: list[bytes] = []
        self._untold: set[int] = set()  # sources that our registration did not reach
        self._taken: set[int] = set()  # sources that may have taken it
        self._safe: set[int] = set()  # sources that have said that they let go
        self._asking: dict[int, trio.CancelScope] = {}
        self._entry: QuarantineEntry | None = None
        self._is_hurrying = False
        self._quiet_at = 0.0
        self._hold = ExitStack()  # on its peers, until it leaves
        self._claims = ExitStack()  # on the pump, while bytes may come

    async def run(self) -> TransferReport:
        """To the one outcome: a report, an error, or the caller's cancellation."""
        try:
            self._check_spans()
        except FerryError as error:
            raise error.about(request_id=self._request.request_id) from error
        try:
            with self._claims:
                async with trio.open_nursery() as self._nursery:
                    await self._driver.run(LandingStarted())
                    self._nursery.cancel_scope.cancel()
        finally:
            self._drop_tokens()
            if self._entry is None:
                self._leave()
        if self._machine.state is not LandingState.DONE:
            raise self._error()
        return self._report()

    def _check_spans(self) -> None:
        """Refuse blocks that are not ours before anybody hears of them.

        Raises:
            UnknownBlock: A block is not in its pool, or listed twice.
            ImpossiblePlan: A span does not begin at a block.
        """
        config, layout = self._services.config, self._services.layout
        groups = {g.name: g for g in layout.groups if g.name not in config.skip_groups}
        Selector(
            groups,
            num_tokens=self._request.computed_tokens,
            computed_tokens=self._request.computed_tokens,
            local=self._request.spans,
            remote={},
        ).select({})

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Connect():
                self._start_task(self._connect)
            case AwaitBlocks():
                self._start_task(self._await_blocks)
            case SendRegister():
                self._register()
            case SendExtend(sources=sources):
                self._extend(sources)
            case RunFinish():
                self._services.nursery.start_soon(self._finish)
            case SendRevoke(sources=sources):
                self._revoke(sources)
            case SendLanded() | DeclinePush():
                self._tell_all(effect)
            case QuarantineBlocks():
                self._quarantine()
            case ReclaimBlocks():
                self._reclaim()
            case _:
                raise FerryInternalError(f"no one does {type(effect).__name__}")

    def _start_task(self, call: Callable[[], Awaitable[None]]) -> None:
        """Run a part of the landing beside it; its failure is an event."""
        if self._nursery is None:
            raise FerryInternalError("a landing's task started before the landing")
        self._nursery.start_soon(
            partial(guarded, call, on_failure=self._fail, log=self._log)
        )

    def _fail(self, error: FerryError) -> None:
        self.feed(LandingFailed(error))

    async def _connect(self) -> None:
        services, contact = self._services, self._request.contact
        party = services.routes.now(contact) or await services.routes.find(contact)
        self._party = party
        self._hold.callback(services.peers.hold(party.keys))
        peers = await services.peers.connected(party)
        self._shares = self._share(peers, party.layouts)
        self._peers = list(peers)
        for number, peer in enumerate(peers):
            self._listen(number, peer)
        self.feed(Claimed(len(peers)))

    def _listen(self, source: int, peer: Peer) -> None:
        peer.subscribe(
            self._attempt,
            Subscriber(partial(self._answered, source), partial(self._lose, source)),
        )

    async def _await_blocks(self) -> None:
        if self._request.after is not None:
            await wait_for(self._request.after)
        self.feed(BlocksReady())

    def _arrived(self, source: int, part: int) -> None:
        """A source's notice has come."""
        self._expect_more()
        if part != AHEAD:
            self.feed(PartArrived(source, part))

    def _expect_more(self) -> None:
        """Notices are near: look often. A stream has pauses, as long as it computes."""
        self._quiet_at = trio.current_time() + QUIET_S
        # Once it is over its nursery takes no tasks any more.
        if not self._is_hurrying and not self._driver.is_over:
            self._is_hurrying = True
            self._start_task(self._hurry)

    async def _hurry(self) -> None:
        with self._services.pump.claim(Cadence.BUSY):
            while trio.current_time() < self._quiet_at:  # noqa: ASYNC110 - it moves
                await trio.sleep_until(self._quiet_at)
        self._is_hurrying = False

    def _register(self) -> None:
        size = self._services.sizes.of(self._request.spans)
        self._claims.enter_context(self._services.pump.claim(Cadence.OFFERED, size))
        spans = {
            name: TicketSpan(
                plain_ids(span_ids(span, group=name, side="consumer")), span.first_token
            )
            for name, span in self._request.spans.items()
        }
        shares = self._held_shares()
        self._tell_spare(self._peers)
        for source in range(len(self._peers)):
            token = self._new_token(source)
            register = Register(
                self._request.request_id,
                self._attempt,
                self._services.config.lease_s,
                shares.number,
                token,
                self._request.computed_tokens,
                spans,
                self._held_party().readers[source],
            )
            try:
                self._peers[source].link.post(register)
            except FerryError as error:
                self._untold.add(source)
                self._lose(source, error)

    def _new_token(self, source: int) -> bytes:
        """A fresh one, for what one source writes."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._tokens.append(token)
        self._intake.expect(token, partial(self._arrived, source))
        return token

    def _drop_tokens(self) -> None:
        """No notice is expected any more."""
        for token in self._tokens:
            self._intake.forget(token)

    def _extend(self, sources: Iterable[int]) -> None:
        for source in sources:
            self._send(source, Extend(self._request.request_id, self._attempt))

    def _revocation(self) -> Revoke:
        return Revoke(self._request.request_id, self._attempt)

    def _tell_all(self, effect: SendLanded | DeclinePush) -> None:
        """As far as they can be reached: nothing here depends on it."""
        has_landed = isinstance(effect, SendLanded)
        kind = Landed if has_landed else Revoke
        message = kind(self._request.request_id, self._attempt)
        # A landing that has not got its peers tells those that are there already.
        known = self._peers or self._known_peers()
        if not self._tokens:
            self._tell_spare(known)
        for peer in known:
            try:
                peer.link.post(message)
            except PeerLost as error:
                self._log.debug("not_told", error=str(error))

    def _tell_spare(self, peers: Sequence[Peer]) -> None:
        """Ranks that none of us needs are not to wait for us: the first one says so."""
        if peers and self._party is not None and self._party.spare:
            message = Spare(self._request.request_id, None, self._party.spare)
            with suppress(PeerLost):  # as everybody hears who listens to it
                peers[0].link.post(message)

    def _known_peers(self) -> list[Peer]:
        try:
            party = self._party or self._services.routes.now(self._request.contact)
        except BadTicket:
            return []
        return [] if party is None else self._services.peers.known(party.keys)

    def _held_party(self) -> Party[RankAddress]:
        if self._party is None:
            raise FerryInternalError("there are no sources before the connection")
        return self._party

    def _revoke(self, sources: Iterable[int]) -> None:
        for source in sources:
            try:
                self._peers[source].link.post(self._revocation())
            except PeerLost as error:
                self._lose(source, error)

    def _send(self, source: int, message: LinkMessage) -> None:
        try:
            self._peers[source].link.post(message)
        except PeerLost as error:
            self._lose(source, error)

    def _lose(self, source: int, cause: FerryError) -> None:
        if not self._is_strange_to(source):
            self.feed(SourceLost(source, cause))
            return
        self.feed(SourceFailed(source, self._about(source, cause)))
        self.feed(SourceRevoked(source))

    def _is_strange_to(self, source: int) -> bool:
        """Whether a source that is lost cannot know our blocks, now or later.

        One that takes a registration says so before anything else. One that has
        said goodbye before takes none any more.
        """
        said_goodbye = self._peers[source].link.has_goodbye
        return source in self._untold or (said_goodbye and source not in self._taken)

    def _answered(self, source: int, answer: Answer) -> None:
        match answer:
            case Finished():
                self._finished(source, answer)
            case Aborted(reason=reason, detail=detail):
                cause = _ABORTED[reason](f"the producer gave up: {detail}")
                self.feed(SourceFailed(source, self._about(source, cause)))
            case Revoked():
                if source in self._asking:
                    self._asking[source].cancel()
                self.feed(SourceRevoked(source))
                self._safe.add(source)
                self._clear_up()
            case Registered():
                self._taken.add(source)  # the lease runs on the producer's clock
            case _:
                pass

    def _about(self, source: int, cause: FerryError) -> FerryError:
        return cause.about(peer=str(self._peers[source].key))

    def _finished(self, source: int, answer: Finished) -> None:
        """Check what the source says it wrote against what was asked of it."""
        self._expect_more()  # the notices of its last waves
        try:
            self._check_finished(source, answer)
        except FerryError as error:
            self.feed(SourceFailed(source, self._about(source, error)))
        else:
            self.feed(SourceFinished(source, answer.parts))

    def _check_finished(self, source: int, answer: Finished) -> None:
        told = self._request.num_tokens
        if told not in {None, answer.num_tokens}:
            raise TransferFailed(
                f"{answer.num_tokens} tokens are pushed, of {told} the ticket tells"
            )
        if self._selection is None:
            self._num_tokens = answer.num_tokens
            self._selection = self._held_shares().select(
                num_tokens=answer.num_tokens,
                computed_tokens=self._request.computed_tokens,
                spans=self._request.spans,
            )
        elif answer.num_tokens != self._num_tokens:
            raise TransferFailed(
                f"one rank pushes {answer.num_tokens} tokens, another"
                f" {self._num_tokens}"
            )
        parts = self._selection.peers.get(self._peers[source].key, ())
        wanted = sum(part.bytes for part in parts)
        if answer.bytes != wanted:
            raise TransferFailed(
                f"{answer.bytes} bytes were written where {wanted} were asked for"
            )
        if (answer.parts > 0) != (wanted > 0):
            # Else a source could be done without a single notice.
            raise TransferFailed(f"{wanted} bytes do not come in {answer.parts} parts")

    def _held_shares(self) -> Shares:
        if self._shares is None:
            raise FerryInternalError("there are no shares before the connection")
        return self._shares

    async def _finish(self) -> None:
        """In the engine's nursery: a landing that is cancelled now is done all the same."""

        def failed(error: FerryError) -> None:
            self.feed(FinishFailed(error))

        try:
            await guarded(self._run_finish, on_failure=failed, log=self._log)
        except trio.Cancelled:
            failed(EngineClosed("the engine closed before the finish stage ended"))
            raise

    async def _run_finish(self) -> None:
        if self._selection is None:
            raise FerryInternalError("a landing finished before anybody said so")
        await self._services.finish.run(self._selection.tails)
        self.feed(FinishEnded())

    def _abandon(self) -> None:
        """A bug of ours: as long as nobody has answered, the blocks are not safe."""
        self._tell_all(DeclinePush())
        if self._tokens:
            self._quarantine()

    def _clear_up(self) -> None:
        """After a bug of ours no machine says when its blocks are safe again."""
        if self._driver.bug is not None and len(self._safe) == len(self._peers):
            self._reclaim()

    def _quarantine(self) -> None:
        writers = self._machine.writers
        self._entry = QuarantineEntry(
            self._request.request_id,
            ", ".join(str(self._peers[source].key) for source in writers),
            self._driver.bug or self._machine.cause,
            trio.current_time(),
            held_blocks(self._request.spans),
        )
        self._services.quarantine.hold(self._entry, on_release=self._leave)
        self._log.error("landing_quarantined", peer=self._entry.peer)
        for source in writers:
            self._services.nursery.start_soon(self._ask_again, source)

    async def _ask_again(self, source: int) -> None:
        """Ask a source for our blocks until it answers.

        Only the same start of it can answer. After another start, or none, it is for
        the caller to say that its writes are over (`Quarantine.release`).
        """
        scope = self._asking.setdefault(source, trio.CancelScope())
        delay_s = ASK_AGAIN_S
        with scope:
            while True:
                await guarded(
                    partial(self._ask, source),
                    on_failure=self._not_asked,
                    log=self._log,
                )
                await trio.sleep(delay_s)
                delay_s = min(2 * delay_s, LONGEST_ASK_S)

    async def _ask(self, source: int) -> None:
        peer = self._peers[source]
        if not peer.link.is_open:
            address = self._held_party().ranks[source]
            peer = await self._services.peers.reach(peer.key, address)
            self._taken.add(source)  # by now it may have
            self._peers[source] = peer
            self._listen(source, peer)
        peer.link.post(self._revocation())

    def _not_asked(self, error: FerryError) -> None:
        self._log.debug("blocks_not_asked_for", error=str(error))

    def _reclaim(self) -> None:
        if self._entry is not None:
            self._services.quarantine.reclaim(self._entry)
            self._entry = None
            self._log.info("landing_reclaimed")
        self._leave()

    def _leave(self) -> None:
        """Hear no more."""
        for scope in self._asking.values():
            scope.cancel()
        for peer in self._peers:
            peer.unsubscribe(self._attempt)
        self._hold.close()

    def _error(self) -> FerryError:
        """The failure, with what is known of it around it (invariant 9)."""
        cause = self._driver.bug or self._machine.cause
        if cause is None:
            cause = FerryInternalError(f"a landing ended {self._machine.state.value}")
        error = cause.about(
            request_id=self._request.request_id,
            peer=self._request.contact.engine_id,
            phase=self._driver.failed_in.value,
            untrusted=self._untrusted(),
        )
        self._log.warning(
            "landing_failed", error=type(error).__name__, detail=str(error)
        )
        return error

    def _untrusted(self) -> Mapping[str, Ranges]:
        """What the destination no longer holds for sure: all, once it was registered."""
        if not self._tokens:
            return {}
        if self._selection is not None:
            return self._selection.untrusted
        return {
            group.name: self._whole(group, self._request.spans[group.name])
            for group in self._services.layout.groups
            if group.name in self._request.spans
        }

    def _whole(self, group: GroupLayout, span: Span) -> Ranges:
        count = len(span.block_ids)
        if not group.block_size:
            return Ranges.of([(0, count)])
        last = span.first_token + count * group.block_size * group.context_size
        first = max(span.first_token, self._request.computed_tokens)
        return Ranges.of([(first, last)])

    def _report(self) -> TransferReport:
        selection = self._selection
        if selection is None:
            raise FerryInternalError("a done landing has no selection")
        report = TransferReport(
            request_id=self._request.request_id,
            peers=tuple(str(key) for key in selection.peers),
            num_tokens=self._num_tokens,
            computed_tokens=self._request.computed_tokens,
            bytes=selection.bytes,
            descriptors=selection.descriptors,
            waves=self._machine.arrived,
            zeroed_tokens=selection.zeroed_slots,
            phases_s=dict(self._driver.phases_s),
            skipped_groups=tuple(sorted(self._services.config.skip_groups)),
        )
        self._log.info("landing_done", bytes=report.bytes, waves=report.waves)
        return report


_ABORTED: dict[AbortedReason, type[FerryError]] = {
    AbortedReason.EXPIRED: LeaseExpired,
    AbortedReason.SPENT: OfferSpent,
    AbortedReason.MISFIT: ImpossiblePlan,
    AbortedReason.INCOMPLETE: IncompletePush,
    AbortedReason.FAILED: PushAborted,
}
