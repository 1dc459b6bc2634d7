"""The pushed requests of a random schedule: whole or as streams, early and late.

A producer's blocks hold garbage until it says that they are final, and are used again
as soon as its call has returned: whatever leaves too early or too late shows in what
a landing calls done.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from kvferry.engine import FerryError, FerryInternalError, MisuseError, Span
from kvferry.engine.fabric.base import Operation
from kvferry.engine.testing import Hold
from kvferry.protocol.lifecycle.delivery import DeliveryState
from kvferry.protocol.notices import decode_notice
from kvferry.protocol.ticket import Contact
from tests.engine.sites import BLOCK_TOKENS
from tests.kit import GROUP

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvferry.engine import PushStream, TransferEngine
    from kvferry.engine.testing import Ledger, Schedule
    from tests.engine.sites import Site, Start

STEPS = ("whole", "chunks", "layers", "layers of chunks")


class BodyFailed(Exception):
    """What the block of a stream raises."""


@dataclass(frozen=True)
class Pushed:
    """What is pushed.

    Attributes:
        salt: Its number: ids are used again, stamps are not.
        blocks: Of all ranks of the producer.
        done: Starts whose push has returned a report.
        landed: Starts of ranks whose landing was done, or may have been.
        readers: Starts that expected it.
    """

    salt: int
    request_id: str
    tokens: int
    blocks: Sequence[int]
    contact: Contact
    starts: Sequence[Start]
    done: list[Start] = field(default_factory=list)
    landed: list[tuple[Site, Start]] = field(default_factory=list)
    readers: list[Start] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For the ledger and the story."""
        return f"{self.request_id}#{self.salt}"


class Pushing:
    """All pushed requests of one run."""

    def __init__(
        self, schedule: Schedule, ledger: Ledger, sites: Sequence[Site]
    ) -> None:
        self._schedule = schedule
        self._ledger = ledger
        self._sites = sites
        self._live: set[str] = set()  # an id is one request's at a time
        self._posts: Counter[tuple[str, str]] = Counter()  # by reader and request

    async def request(self, number: int, producer: str, consumer: str) -> None:
        """One request: pushed by all ranks of an instance, expected by another's."""
        draw, chance = self._schedule.draw, self._schedule.chance
        producers = [site for site in self._sites if site.instance == producer]
        readers = [site for site in self._sites if site.instance == consumer]
        if chance(0.1):  # somebody else knows of it, too
            readers = list(self._sites)
        for _ in range(8):
            starts = [await site.up() for site in producers]
            pushed = self._begin(number, starts)
            if pushed is not None:
                break
            await trio.sleep(0.1)
        else:
            return
        try:
            async with trio.open_nursery() as nursery:
                for start in starts:
                    wait_s = 0.01 * draw(30)
                    nursery.start_soon(start.run, self._push, start, pushed, wait_s)
                for site in readers:
                    wait_s = 0.01 * draw(30)
                    nursery.start_soon(self._land_somewhere, site, pushed, wait_s)
        finally:
            self._live.discard(pushed.request_id)
        self._check_ranks(pushed)

    def _begin(self, salt: int, starts: Sequence[Start]) -> Pushed | None:
        """All ranks push the same blocks: they have one scheduler."""
        tokens = 1 + self._schedule.draw(3 * BLOCK_TOKENS)
        count = -(-tokens // BLOCK_TOKENS)
        free = set.intersection(*(set(start.account.free) for start in starts))
        request_id = f"s{self._schedule.draw(3)}"
        if len(free) < count or any(start.is_over for start in starts):
            return None
        if request_id in self._live:
            return None
        self._live.add(request_id)
        blocks = sorted(free)[:count]
        contact = Contact.merge(start.engine.contact for start in starts)
        pushed = Pushed(salt, request_id, tokens, blocks, contact, starts)
        for start in starts:
            assert start.pages.is_reused(blocks), "written to while free"
            start.account.take(self._of(pushed, start), Hold.PUSHED, blocks)
            start.pages.spoil(blocks)
        return pushed

    def _of(self, pushed: Pushed, start: Start) -> str:
        return f"{pushed.name} pushed by {start.host.name}"

    def watch(self, engine: TransferEngine) -> None:
        """Count what an engine writes, and look whether it still may (case l3)."""
        post = engine._fabric.post

        def watched(operation: Operation, *args: Any, notice: bytes = b"") -> Any:
            if operation is Operation.WRITE:
                self._check_post(engine, decode_notice(notice).token)
            return post(operation, *args, notice=notice)

        engine._fabric.post = watched  # type: ignore[method-assign]

    def _check_post(self, engine: TransferEngine, token: bytes) -> None:
        """The consumer has not revoked, and holds its blocks as far as it has told."""
        known = engine._pushes._deliveries.values()
        (delivery,) = (each for each in known if each.register.token == token)
        machine = delivery._machine
        assert machine.state is DeliveryState.WRITING, machine.state
        assert trio.current_time() < machine._lease_at, "the lease had run out"
        self._posts[str(delivery.reader), delivery.register.request_id] += 1

    # The producer.

    async def _push(self, start: Start, pushed: Pushed, wait_s: float) -> None:
        name, outcome = self._of(pushed, start), "cancelled"
        try:
            with (
                trio.CancelScope() as scope,
                self._schedule.may(f"cancel {name}", scope.cancel),
            ):
                await trio.sleep(wait_s)
                try:
                    outcome = await self._push_somehow(start, pushed)
                except BodyFailed:
                    outcome = "body failed"
                except FerryError as error:
                    outcome = type(error).__name__
                    check_failure(error, pushed.request_id)
        finally:
            if not start.host.is_killed:
                start.account.give_back(name, pushed.blocks)
        self._ledger.settle(name, outcome)
        if outcome in {"pushed", "streamed"}:
            pushed.done.append(start)

    async def _push_somehow(self, start: Start, pushed: Pushed) -> str:
        draw, chance = self._schedule.draw, self._schedule.chance
        hurry_s = 0.01 * draw(50) if chance(0.05) else None
        blocks = {GROUP: pushed.blocks}
        if chance(0.4):
            await start.engine.push(
                pushed.request_id,
                blocks,
                num_tokens=pushed.tokens,
                deadline_s=hurry_s,
                after=self._final(start, pushed, None, None),
            )
            return "pushed"
        async with start.engine.push_stream(
            pushed.request_id, blocks, num_tokens=pushed.tokens, deadline_s=hurry_s
        ) as stream:
            await self._compute(start, pushed, stream)
        return "streamed"

    async def _compute(self, start: Start, pushed: Pushed, stream: PushStream) -> None:
        """Let the blocks become final, step by step, in whatever order."""
        draw, chance = self._schedule.draw, self._schedule.chance
        steps = self._steps(start, pushed.tokens)
        if chance(0.1):
            steps.pop(draw(len(steps)))  # and the commit finds it missing
        breaks_at = draw(len(steps) + 1) if chance(0.1) else None
        while steps:
            if breaks_at == len(steps):
                raise BodyFailed
            layers, part = steps.pop(draw(len(steps)))
            final = self._final(start, pushed, layers, part)
            await stream.ready(layers=layers, tokens=part, after=final)
            if chance(0.3):
                await trio.sleep(0.01 * draw(10))
            elif chance(0.1):  # longer than a lease, at times
                await trio.sleep(0.1 * draw(15))

    def _steps(
        self, start: Start, tokens: int
    ) -> list[tuple[tuple[str, ...] | None, tuple[int, int] | None]]:
        draw = self._schedule.draw
        how = STEPS[draw(len(STEPS))]
        edges = {0, tokens}
        if "chunks" in how:
            edges |= {draw(tokens + 1) for _ in range(2)}
        cuts = sorted(edges)
        parts = list(itertools.pairwise(cuts))
        if "layers" in how:
            return [((name,), part) for part in parts for name in start.pages.layers]
        return [(None, part) for part in parts]

    def _final(
        self,
        start: Start,
        pushed: Pushed,
        layers: tuple[str, ...] | None,
        part: tuple[int, int] | None,
    ) -> Callable[[], Awaitable[None]] | None:
        """Stamp now, or in what must be over before a byte is read."""
        stamp = partial(
            start.pages.stamp,
            pushed.blocks,
            tokens=pushed.tokens,
            salt=pushed.salt,
            layers=layers,
            part=part,
        )
        if self._schedule.chance(0.5):
            stamp()
            return None

        async def computed() -> None:
            await trio.sleep(0.01 * self._schedule.draw(20))
            stamp()

        return computed

    # The consumer.

    async def _land_somewhere(self, site: Site, pushed: Pushed, wait_s: float) -> None:
        await trio.sleep(wait_s)
        for attempt in range(2 if self._schedule.chance(0.3) else 1):
            start = await site.up()
            pushed.readers.append(start)
            await start.run(self._land, site, start, pushed, attempt)

    async def _land(
        self, site: Site, start: Start, pushed: Pushed, attempt: int
    ) -> None:
        draw = self._schedule.draw
        name = f"{pushed.name} landing on {start.host.name}, attempt {attempt}"
        computed = 0
        if self._schedule.chance(0.2):  # a prefix hit; at times all of it
            computed = min(draw(4) * BLOCK_TOKENS, pushed.tokens)
        first_token = -(-computed // BLOCK_TOKENS) * BLOCK_TOKENS
        # At times a block more than the tokens need.
        count = -(-max(pushed.tokens - first_token, 0) // BLOCK_TOKENS) + draw(2)
        blocks = start.account.free[-count:] if count else ()
        if len(blocks) < count:
            return
        assert start.pages.is_reused(blocks), "written to while free"
        start.account.take(name, Hold.DESTINATION, blocks)
        try:
            span = Span(blocks, first_token)
            outcome = await self._expect(name, start, pushed, span, computed)
        finally:
            if not start.host.is_killed:
                start.account.give_back(name, blocks)
        self._ledger.settle(name, outcome)
        # A cancellation may come when all is done, and only its caller does not know.
        if outcome in {"landed", "cancelled"}:
            pushed.landed.append((site, start))

    async def _expect(
        self, name: str, start: Start, pushed: Pushed, span: Span, computed: int
    ) -> str:
        draw, outcome = self._schedule.draw, "cancelled"
        place = str(start.engine.key), pushed.request_id
        self._posts.pop(place, None)

        async def computed_before() -> None:
            await trio.sleep(0.01 * draw(20))

        with (
            trio.CancelScope() as scope,
            self._schedule.may(f"cancel {name}", scope.cancel),
        ):
            try:
                hurry_s = 0.01 * draw(50) if self._schedule.chance(0.05) else None
                report = await start.engine.expect(
                    pushed.contact,
                    {GROUP: span},
                    request_id=pushed.request_id,
                    computed_tokens=computed,
                    deadline_s=hurry_s,
                    after=computed_before if self._schedule.chance(0.2) else None,
                )
                outcome = "landed"
                # Each of its waves was seen to arrive: a lost notice is no success.
                assert report.waves == self._posts[place], f"{name}: {report}"
            except FerryError as error:
                outcome = type(error).__name__
                check_failure(error, pushed.request_id)
        if outcome == "landed":
            wrong = start.pages.wrong(
                span.block_ids,
                first_token=span.first_token,
                tokens=pushed.tokens,
                salt=pushed.salt,
            )
            assert not wrong, f"{name}: done, and {wrong} elements are wrong"
        return outcome

    # The oracles.

    def _check_ranks(self, pushed: Pushed) -> None:
        """A push is done when every rank of one instance has it, and not before."""
        if not pushed.done or any(start.is_over for start in pushed.readers):
            return  # its last word may have been lost with it
        ranks: dict[str, int] = defaultdict(int)
        for site, _start in dict.fromkeys(pushed.landed):
            ranks[site.instance] += 1
        whole = [
            name
            for name, count in ranks.items()
            if count == sum(site.instance == name for site in self._sites)
        ]
        assert whole, f"{pushed.name}: pushed, and landed on {ranks}"


def check_failure(error: FerryError, request_id: str) -> None:
    """It names its request, and is nobody's mistake."""
    assert error.request_id == request_id, repr(error)
    assert error.phase, repr(error)
    assert not isinstance(error, FerryInternalError | MisuseError), repr(error)
