"""Remote ranks that we push to: who they are, and everything prepared for writing there.

One `Target` is one start of one consumer rank, known by the link that it opened. A
`ClaimPlans` is what is prepared for one of its claims, and is given back when the
link has ended and no delivery uses it any more.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvferry.engine.budget import Budget
from kvferry.engine.claims import of_layer
from kvferry.engine.plan import prepare_plan
from kvferry.engine.sections import MAX_ROWS
from kvferry.protocol.errors import (
    FerryError,
    ImpossiblePlan,
    ProtocolViolation,
    PushAborted,
)
from kvferry.protocol.notices import AHEAD, Written, encode_notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.agents import Agents
    from kvferry.engine.fabric.base import Fabric, Prepared
    from kvferry.engine.link import Link
    from kvferry.engine.plan import Plan
    from kvferry.engine.sections import Section
    from kvferry.protocol.handshake import Card
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.layout import CacheLayout
    from kvferry.protocol.link import Claim

__all__ = ("ClaimPlans", "Planning", "PreparedPlan", "Target", "Writer")

MAX_CLAIMS = 64
"""Most claims kept of one consumer rank: one for each set of producer ranks it knows."""


MAX_KEPT_ROWS = 2 * MAX_ROWS
"""Most rows that are prepared for one consumer rank: what all its claims may cost us."""

ROWS_PER_S = MAX_ROWS / 10
"""A plan of `MAX_ROWS` takes a second: a rank that has us plan at every turn takes a
tenth of our time. Real claims have some thousands, once."""

ROWS_PER_PLAN = 1024
"""What a plan costs if it has no rows."""

BLOCKS_PER_ROW = 10
"""Blocks of a registration that are checked, once for each sheet, in a row's time."""


class Writer(NamedTuple):
    """What it takes to prepare writing: ourselves."""

    key: EngineKey
    layout: CacheLayout
    fabric: Fabric
    agents: Agents
    log: FilteringBoundLogger


class PreparedPlan(NamedTuple):
    """A plan of which we are the one source, and its rows: ours, theirs."""

    plan: Plan[EngineKey]
    pairs: list[tuple[Prepared, Prepared]]


class Planning:
    """What planning for one consumer rank may cost.

    Attributes:
        kept: Rows that are prepared.
    """

    def __init__(self) -> None:
        self.kept = 0
        self._budget = Budget(burst=2 * MAX_ROWS, per_s=ROWS_PER_S)

    def begin(self, blocks: int | None = None) -> None:
        """Somebody wants a plan, or has so many blocks looked at.

        Raises:
            PushAborted: The rank has had its share of our time.
        """
        if self._budget.is_spent:
            raise PushAborted(
                "this rank claims or registers more than we have time for"
            )
        rows = ROWS_PER_PLAN if blocks is None else blocks / BLOCKS_PER_ROW
        self._budget.spend(rows)

    def keep(self, rows: int) -> None:
        """A plan has been made.

        Raises:
            ImpossiblePlan: With it there would be too many rows.
        """
        self._budget.spend(rows)
        if self.kept + rows > MAX_KEPT_ROWS:
            raise ImpossiblePlan(f"claims of more than {MAX_KEPT_ROWS} rows")
        self.kept += rows


class ClaimPlans:
    """What is prepared for one claim, as far as it was needed so far.

    Attributes:
        users: Deliveries that may still post, or have something in flight.
        sheets: Layouts of the consumer's memory; nothing is in two of them.
    """

    def __init__(
        self,
        writer: Writer,
        agent: str,
        sheets: tuple[CacheLayout, ...],
        planning: Planning,
    ) -> None:
        self.users = 0
        self.sheets = sheets
        self._planning = planning
        self._misfit: ImpossiblePlan | None = None
        self._writer = writer
        self._agent = agent
        self._plans: dict[str | None, tuple[PreparedPlan, ...]] = {}

    def of(self, layer: str | None) -> tuple[PreparedPlan, ...]:
        """The plans for one layer, or for all of them at once.

        Raises:
            ImpossiblePlan: The claim is not for us to fill; it was planned for once.
            PushAborted: The consumer claims more than there is time to plan for.
            PeerLost: The consumer's agent is gone.
        """
        if self._misfit is not None:
            raise self._misfit
        if layer not in self._plans:
            sheets = self.sheets
            if layer is not None:
                narrowed = [of_layer(sheet, layer) for sheet in sheets]
                sheets = tuple(sheet for sheet in narrowed if sheet is not None)
            self._plans[layer] = self._prepare_all(sheets)
        return self._plans[layer]

    def _prepare_all(self, sheets: tuple[CacheLayout, ...]) -> tuple[PreparedPlan, ...]:
        found: list[PreparedPlan] = []
        try:
            for sheet in sheets:
                found += [self._prepare(sheet)]
        except FerryError as error:
            # One by one: those before one that fails must be given back.
            self._give_back(found)
            if isinstance(error, ImpossiblePlan):
                self._misfit = error
            raise
        return tuple(found)

    def discard(self) -> None:
        """Give all rows back; only when there are no users."""
        self._give_back(chain.from_iterable(self._plans.values()))
        self._plans.clear()

    def _give_back(self, plans: Iterable[PreparedPlan]) -> None:
        for prepared in plans:
            self._discard(prepared.pairs)
            self._planning.kept -= prepared.plan.peers[self._writer.key].rows

    def _prepare(self, sheet: CacheLayout) -> PreparedPlan:
        key = self._writer.key
        self._planning.begin()
        plan = prepare_plan(sheet, {key: self._writer.layout}, is_partial=True)
        rows = plan.peers[key].rows
        self._planning.keep(rows)
        pairs: list[tuple[Prepared, Prepared]] = []
        try:
            # One by one: those before one that fails must be given back.
            for section in plan.peers[key].sections:
                pairs += [self._prepare_section(section.mirrored())]
        except FerryError:
            self._discard(pairs)
            self._planning.kept -= rows
            raise
        return PreparedPlan(plan, pairs)

    def _prepare_section(self, section: Section) -> tuple[Prepared, Prepared]:
        fabric = self._writer.fabric
        ours = fabric.prepare(None, section.local_memory, section.local_rows)
        try:
            theirs = fabric.prepare(
                self._agent, section.remote_memory, section.remote_rows
            )
        except FerryError:
            fabric.discard(ours)
            raise
        return ours, theirs

    def _discard(self, pairs: list[tuple[Prepared, Prepared]]) -> None:
        for prepared in chain.from_iterable(pairs):
            _let_go(partial(self._writer.fabric.discard, prepared), self._writer.log)


class Target:
    """One start of one consumer rank, connected.

    Attributes:
        key: Who it is.
        link: The link that it opened.
        is_gone: The link has ended.
        blocks: Places in the spans of all its registrations.
        planning: What it may cost us.
    """

    def __init__(self, writer: Writer, link: Link, card: Card) -> None:
        self.key = link.peer
        self.link = link
        self.is_gone = False
        self.blocks = 0
        self.planning = Planning()
        self._writer = writer
        self._card = card
        self._agent: str | None = None
        self._claims: dict[int, ClaimPlans] = {}

    async def add(self, claim: Claim) -> None:
        """Keep a claim, one after the other; our agent connects with the first of them.

        Raises:
            ProtocolViolation: The number is taken, or there are too many.
            PeerUnreachable: Its transport does not answer.
        """
        if claim.number in self._claims:
            raise ProtocolViolation(f"claim {claim.number} is there already")
        self._make_room()
        if self._agent is None:
            agents = self._writer.agents
            agent = await agents.connect(self._card.metadata, self)
            if self.is_gone:
                agents.let_go(agent, self)
                return
            self._agent = agent
        # What is registered was told in the handshake, and nothing else counts.
        regions = self._card.layout.regions
        sheets = tuple(
            msgspec.structs.replace(sheet, regions=regions) for sheet in claim.sheets
        )
        self._claims[claim.number] = ClaimPlans(
            self._writer, self._agent, sheets, self.planning
        )

    def _make_room(self) -> None:
        """A consumer that outlives many of our siblings claims many times."""
        if len(self._claims) < MAX_CLAIMS:
            return
        for number, claim in self._claims.items():  # the oldest first
            if not claim.users:
                claim.discard()
                del self._claims[number]
                return
        raise ProtocolViolation(f"{MAX_CLAIMS} claims are in use at once")

    def claim(self, number: int) -> ClaimPlans | None:
        """A claim by its number."""
        return self._claims.get(number)

    def announce(self, token: bytes) -> None:
        """Say that the first bytes are on their way: it looks often then. Nothing
        depends on it."""
        if self._agent is not None:
            with suppress(FerryError):
                notice = encode_notice(Written(token, AHEAD))
                self._writer.fabric.notify(self._agent, notice)

    def lose(self) -> None:
        """The link has ended: give everything back that nobody uses any more."""
        self.is_gone = True
        self.tidy()

    def tidy(self) -> None:
        """Give back what a lost target's last delivery has left."""
        if not self.is_gone:
            return
        for number, claim in tuple(self._claims.items()):
            if not claim.users:
                claim.discard()
                del self._claims[number]
        if not self._claims and self._agent is not None:
            self._writer.agents.let_go(self._agent, self)
            self._agent = None


def _let_go(call: Callable[[], None], log: FilteringBoundLogger) -> None:
    """What the transport does not give back costs memory, and no request."""
    try:
        call()
    except FerryError as error:
        log.warning("let_go_failed", error=str(error))
