"""Random schedules of small instances on the memory network, and what must hold in each.

`play(seed)` draws who there is, who gets what from whom, how many requests, and lets
a `Schedule` do its worst: engines are killed and come back at the same address,
frozen, cut off; pulls, pushes and landings are cancelled and tried again, offers
withdrawn or left to expire, streams left by an error. Four oracles watch: the ledger
of blocks, the stamps of every element that a done request has moved, the consumer's
lease whenever a wave of a push is posted, and the base state at the end.
"""

from __future__ import annotations

import io
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog
import trio
import trio.testing

from kvferry.engine import (
    EngineConfig,
    FerryError,
    FerryInternalError,
    MisuseError,
    OfferOutcome,
    Rank,
    RequestInUse,
    Span,
)
from kvferry.engine.testing import Hold, Host, Ledger, Schedule, ScheduleFailed
from kvferry.protocol import Ticket
from tests.engine.schedule_pushes import Pushing
from tests.engine.sites import (
    BLOCK_TOKENS,
    BLOCKS,
    BOUNDS,
    SHAPES,
    TIMES,
    WAYS,
    Pages,
    Site,
    Start,
)
from tests.kit import GROUP, IDENTITY, at_base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.engine import Offer, TransferEngine
    from kvferry.engine.quarantine import QuarantineEntry
    from kvferry.engine.testing import Rates

KINDS = {"pulls": 0.0, "pushes": 1.0, "mixed": 0.5}
"""Which share of the requests is pushed."""
HANGS_S = 60.0
"""Virtual: everything in a schedule has a deadline, and they are far shorter."""


@dataclass(frozen=True)
class Request:
    """What was offered.

    Attributes:
        salt: Its number: ids are used again, stamps are not.
    """

    salt: int
    tokens: int
    ticket: Ticket
    offers: tuple[Offer, ...]

    @property
    def name(self) -> str:
        """For the ledger and the story."""
        return f"{self.ticket.request_id}#{self.salt}"


class Play:
    """One run."""

    def __init__(
        self, seed: int, *, kind: str = "pulls", rates: Rates | None = None
    ) -> None:
        self.schedule = Schedule(seed, rates=rates)
        self.ledger = Ledger(self.schedule.network)
        draw = self.schedule.draw
        self.shape_name = list(SHAPES)[draw(len(SHAPES))]
        self.shape = SHAPES[self.shape_name]
        self._layers = 1 + draw(2)
        self._way = WAYS[draw(len(WAYS))]
        self._bounds = BOUNDS[draw(len(BOUNDS))]
        self._ends_left = draw(3)
        self._requests = 2 + draw(3)
        self._starts = 0
        self._sites = [
            Site(name, Rank(tp=tp, tp_size=size), 40_000 + 10 * i + tp)
            for i, (name, size) in enumerate(self.shape.ranks.items())
            for tp in range(size)
        ]
        self._pushed = KINDS[kind]
        self._pushing = Pushing(self.schedule, self.ledger, self._sites)
        self._over = trio.Event()
        self._ended: set[str] = set()
        self.released = 0  # entries that only their caller could take back
        self.errors: Counter[str] = Counter()  # what engines logged as such
        self._internal_errors: list[dict[str, Any]] = []
        self._logger = self._make_logger()

    def run(self) -> None:
        """From the beginning to the end; raises `ScheduleFailed`."""
        self.schedule.play(self._scenario)

    async def _scenario(self) -> None:
        trio.lowlevel.add_instrument(self.ledger)
        try:
            with trio.fail_after(HANGS_S):
                async with trio.open_nursery() as lives:
                    for site in self._sites:
                        lives.start_soon(self._live, site)
                    async with trio.open_nursery() as nursery:
                        for number in range(self._requests):
                            nursery.start_soon(self._request, number)
                    self.schedule.calm()
                    await self._back_to_base()
                    self._over.set()
        finally:
            trio.lowlevel.remove_instrument(self.ledger)
        self._after_the_end()

    # One rank: started again whenever it is killed.

    async def _live(self, site: Site) -> None:
        while not self._over.is_set():
            self._starts += 1
            host = Host(self.schedule, f"{site.name}-{self._starts}")
            await self._live_once(site, host)
            if host.engine is not None and host.engine._pump.unsettled:
                # Its own transfers it cuts only if it says so (case l6).
                assert host.is_killed or len(host.engine.quarantine)
            if not self._over.is_set():
                self.ledger.close(host.name)
                await trio.sleep(0.01 * self.schedule.draw(30))

    async def _live_once(self, site: Site, host: Host) -> None:
        tp = (site.rank.tp, site.rank.tp_size)
        pages = Pages(layers=self._layers, tp=tp, pattern=-1.0 - self._starts)
        config = EngineConfig(
            engine_id=site.instance,
            identity=IDENTITY,
            rank=site.rank,
            listen=("127.0.0.1", site.port),
            **{**TIMES, **self._way, **self._bounds},  # type: ignore[arg-type]
        )

        async def body(engine: TransferEngine) -> None:
            self._pushing.watch(engine)
            account = self.ledger.open(
                host.name,
                GROUP,
                pages.extents(),
                engine.quarantine,
                on_free=pages.reuse,
            )
            async with trio.open_nursery() as nursery:
                site.start = Start(host, pages, engine, account, nursery)
                site.came_up.set()
                site.came_up = trio.Event()
                await self._over.wait()

        with ExitStack() as acts:
            self._open_to_acts(acts, host)
            await host.run(config, pages.cache, body, logger=self._logger)

    def _open_to_acts(self, acts: ExitStack, host: Host) -> None:
        may = self.schedule.may
        if self._ends_left:
            acts.enter_context(may(f"kill {host.name}", lambda: self._kill(host)))
            acts.enter_context(may(f"leave {host.name}", lambda: self._leave(host)))
        acts.enter_context(may(f"freeze {host.name}", host.freeze, undo=host.thaw))
        acts.enter_context(may(f"cut {host.name}", host.cut))

    def _kill(self, host: Host) -> None:
        if self._ends_left and host.engine is not None:
            self._ends_left -= 1
            self._ended.add(host.name)
            host.kill()

    def _leave(self, host: Host) -> None:
        """End it in good order, as far as the others let it."""
        for site in self._sites:
            start = site.start
            if self._ends_left and start is not None and start.host is host:
                self._ends_left -= 1
                self._ended.add(host.name)
                start.is_leaving = True
                if self.schedule.draw(2):
                    start.nursery.cancel_scope.cancel()
                else:
                    host.cancel()

    # One request: offered by all ranks of an instance, read by those of others.

    async def _request(self, number: int) -> None:
        draw = self.schedule.draw
        await trio.sleep(0.01 * draw(60))
        flow = self.shape.flows[draw(len(self.shape.flows))]
        if self.schedule.chance(self._pushed):
            await self._pushing.request(number + 1, *flow)
        else:
            await self._pulled(number, *flow)

    async def _pulled(self, number: int, producer: str, consumer: str) -> None:
        draw = self.schedule.draw
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                starts = [await site.up() for site in self._sites_of(producer)]
                request = self._offer(number + 1, starts, nursery)
                if request is not None:
                    break
                await trio.sleep(0.1)
            else:
                return
            if self.schedule.chance(0.2):  # the router takes its time
                await trio.sleep(0.1 * draw(14))
            readers = self._sites_of(consumer)
            if self.schedule.chance(0.1):  # somebody else has the ticket, too
                readers = self._sites
            for site in readers:
                nursery.start_soon(self._read_somewhere, site, request)

    def _sites_of(self, instance: str) -> list[Site]:
        return [site for site in self._sites if site.instance == instance]

    def _offer(
        self, salt: int, starts: Sequence[Start], nursery: trio.Nursery
    ) -> Request | None:
        """All ranks offer the same blocks: they have one scheduler."""
        tokens = 1 + self.schedule.draw(3 * BLOCK_TOKENS)
        count = -(-tokens // BLOCK_TOKENS)
        free = set.intersection(*(set(start.account.free) for start in starts))
        if len(free) < count or any(start.is_over for start in starts):
            return None
        request_id = f"r{self.schedule.draw(2)}"  # at times one that was used before
        if any(request_id in start.engine._offers._active for start in starts):
            return None
        name = f"{request_id}#{salt}"
        blocks = sorted(free)[:count]
        offers = []
        for start in starts:
            assert start.pages.is_reused(blocks), "written to while free"
            start.account.take(name, Hold.OFFERED, blocks)
            start.pages.stamp(blocks, tokens=tokens, salt=salt)
            offer = start.engine.offer(request_id, {GROUP: blocks}, num_tokens=tokens)
            offers.append(offer)
            nursery.start_soon(start.run, self._hold, name, start, offer, blocks)
        ticket = Ticket.merge(offer.ticket for offer in offers)
        return Request(salt, tokens, ticket, tuple(offers))

    async def _hold(
        self, name: str, start: Start, offer: Offer, blocks: Sequence[int]
    ) -> None:
        with self.schedule.may(f"withdraw {name}", offer.withdraw, weight=0.5):
            outcome = await offer.wait()
        self.ledger.settle(f"{name} offered by {start.host.name}", outcome.value)
        start.account.give_back(name, blocks)

    async def _read_somewhere(self, site: Site, request: Request) -> None:
        for attempt in range(2 if self.schedule.chance(0.3) else 1):
            if attempt:  # by then the request may be offered anew, under its old id
                await trio.sleep(0.1 * self.schedule.draw(6))
            start = await site.up()
            await start.run(self._read, start, request, attempt)

    async def _read(self, start: Start, request: Request, attempt: int) -> None:
        draw = self.schedule.draw
        name = f"{request.name} read by {start.host.name}, attempt {attempt}"
        computed = 0
        if self.schedule.chance(0.2):  # a prefix hit; at times all of it
            computed = min(draw(4) * BLOCK_TOKENS, request.tokens)
        first_token = -(-computed // BLOCK_TOKENS) * BLOCK_TOKENS
        # At times a block more than the tokens need.
        count = -(-max(request.tokens - first_token, 0) // BLOCK_TOKENS) + draw(2)
        blocks = start.account.free[-count:] if count else ()
        if len(blocks) < count:
            return
        assert start.pages.is_reused(blocks), "written to while free"
        start.account.take(name, Hold.DESTINATION, blocks)
        try:
            span = Span(blocks, first_token)
            outcome = await self._pull(name, start, request, span, computed)
        finally:
            if not start.host.is_killed:
                start.account.give_back(name, blocks)
        self.ledger.settle(name, outcome)

    async def _pull(
        self,
        name: str,
        start: Start,
        request: Request,
        span: Span,
        computed: int,
    ) -> str:
        draw, outcome = self.schedule.draw, "cancelled"
        with (
            trio.CancelScope() as scope,
            self.schedule.may(f"cancel {name}", scope.cancel),
        ):
            try:
                if self.schedule.chance(0.05):
                    outcome = await self._decline(start, request)
                else:
                    hurry_s = 0.01 * draw(50) if self.schedule.chance(0.1) else None
                    report = await start.engine.pull(
                        request.ticket,
                        {GROUP: span},
                        computed_tokens=computed,
                        deadline_s=hurry_s,
                        priority=draw(2),
                    )
                    outcome = "done in bulk" if report.bulk_bytes else "done"
            except FerryError as error:
                outcome = type(error).__name__
                self._check_failure(error, request.ticket.request_id)
        if outcome.startswith("done"):
            self._check_done(start, request, span, computed)
        return outcome

    async def _decline(self, start: Start, request: Request) -> str:
        try:
            await start.engine.decline(request.ticket)
        except FerryError:  # it names no request
            return "not declined"
        return "declined"

    # The oracles.

    def _check_failure(self, error: FerryError, request_id: str) -> None:
        assert error.request_id == request_id, repr(error)
        if not isinstance(error, RequestInUse):
            assert not isinstance(error, FerryInternalError | MisuseError), repr(error)
            assert error.peer, repr(error)

    def _check_done(
        self, start: Start, request: Request, span: Span, computed: int
    ) -> None:
        wrong = start.pages.wrong(
            span.block_ids,
            first_token=span.first_token,
            tokens=request.tokens,
            salt=request.salt,
        )
        assert not wrong, f"{request.name}: done, and {wrong} elements are wrong"
        if computed < request.tokens and start.engine.config.rank.tp_size == 1:
            # Not a done pull whose producer says otherwise (invariant 4).
            outcomes = {offer.outcome for offer in request.offers}
            assert outcomes == {OfferOutcome.RELEASED}, outcomes

    async def _back_to_base(self) -> None:
        starts = [await site.up() for site in self._sites]
        alive_names = {str(start.engine.key) for start in starts}
        for start in starts:
            while len(start.engine.quarantine):
                for entry in start.engine.quarantine:
                    if self._is_left_by_the_dead(start, entry, alive_names):
                        self.released += 1
                        start.engine.quarantine.release(entry)
                await trio.sleep(0.5)
        # What nobody could tell anybody ends by time alone, and so do the transfers
        # of one that has left.
        rates = self.schedule.rates
        await trio.sleep(max(TIMES["lease_s"], rates.stalled_s + rates.late_s) + 0.2)
        await trio.testing.wait_all_tasks_blocked()
        self.ledger.check(is_over=True)
        alive = {start.engine.key for start in starts}
        for start in starts:
            at_base(start.engine)
            assert start.pages.is_reused(range(BLOCKS)), "written to while free"
            peers = start.engine._peers
            assert peers._peers.keys() <= alive, "a dead peer is still known"
            assert peers._undiscarded.keys() == set(peers._sources.values())
            assert not peers._dials
            self._check_agents(start.engine)

    def _is_left_by_the_dead(
        self, start: Start, entry: QuarantineEntry, alive: set[str]
    ) -> bool:
        """Whether nobody is left who could say that a landing's blocks are safe.

        Their writes may be under way yet: what the caller has to know for itself.
        """
        if alive.issuperset(entry.peer.split(", ")):
            return False
        extents = start.pages.extents()
        return not any(
            self.schedule.network.may_write(*extent)
            for block in entry.blocks[GROUP]
            for extent in extents[block]
        )

    def _check_agents(self, engine: TransferEngine) -> None:
        """An agent is known for a peer or a target that there is, and for no other."""
        pushes = engine._pushes
        agents = pushes._writer.agents
        holders = set(engine._peers._peers.values())
        holders |= {t for t in pushes._targets.values() if t._agent is not None}
        assert set().union(*agents._holders.values()) == holders
        assert engine.statistics()["fabric_peers"] == len(agents._holders)

    def _after_the_end(self) -> None:
        # Somebody may still have read from one that left, or was killed.
        assert self._ended >= set(self.schedule.network.closed_in_flight)
        assert not self._internal_errors, self._internal_errors

    def _make_logger(self) -> Any:
        def keep(_logger: object, _level: str, entry: dict[str, Any]) -> Any:
            self.errors[entry["event"]] += 1
            if entry["event"] == "internal_error":
                self._internal_errors.append(entry)
            raise structlog.DropEvent

        return structlog.wrap_logger(
            structlog.PrintLogger(io.StringIO()),
            processors=[keep],
            wrapper_class=structlog.make_filtering_bound_logger(40),
        )


def play(seed: int, *, kind: str = "pulls", rates: Rates | None = None) -> Play:
    """One run, to its end, of one of the `KINDS`."""
    one = Play(seed, kind=kind, rates=rates)
    one.run()
    return one


def tally(plays: Sequence[Play]) -> Counter[str]:
    """How often each outcome was seen, each kind of fault, and each logged error."""
    seen: Counter[str] = Counter()
    for one in plays:
        seen.update(one.ledger.outcomes.values())
        seen.update(one.errors)
        for line in one.schedule.story:
            _at, what, *_rest = line.replace(":", " ").split()
            seen[what] += 1
    return seen


def first_found(kind: str, *, seeds: int = 400) -> int | None:
    """The first seed under which something is wrong."""
    for seed in range(seeds):
        try:
            play(seed, kind=kind)
        except ScheduleFailed:
            return seed
    return None
