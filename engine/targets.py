"""Remote ranks that we push to: who they are, and everything prepared for writing there.

One `Target` is one start of one consumer rank, known by the link that it opened. A
`ClaimPlans` is what is prepared for one of its claims, and is given back when the
link has ended and no delivery uses it any more.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvferry.engine.claims import of_layer
from kvferry.engine.plan import prepare_plan
from kvferry.protocol.errors import FerryError, ProtocolViolation

if TYPE_CHECKING:
    from collections.abc import Callable

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

__all__ = ("ClaimPlans", "PreparedPlan", "Target", "Writer")

MAX_CLAIMS = 64
"""Most claims kept of one consumer rank: one for each set of producer ranks it knows."""


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


class ClaimPlans:
    """What is prepared for one claim, as far as it was needed so far.

    Attributes:
        users: Deliveries that may still post, or have something in flight.
    """

    def __init__(
        self, writer: Writer, agent: str, sheets: tuple[CacheLayout, ...]
    ) -> None:
        self.users = 0
        self._writer = writer
        self._agent = agent
        self._sheets = sheets
        self._plans: dict[str | None, tuple[PreparedPlan, ...]] = {}

    def of(self, layer: str | None) -> tuple[PreparedPlan, ...]:
        """The plans for one layer, or for all of them at once.

        Raises:
            ImpossiblePlan: The claim is not for us to fill.
            PeerLost: The consumer's agent is gone.
        """
        if layer not in self._plans:
            sheets = self._sheets
            if layer is not None:
                narrowed = [of_layer(sheet, layer) for sheet in sheets]
                sheets = tuple(sheet for sheet in narrowed if sheet is not None)
            self._plans[layer] = tuple(self._prepare(sheet) for sheet in sheets)
        return self._plans[layer]

    def discard(self) -> None:
        """Give all rows back; only when there are no users."""
        for prepared in chain.from_iterable(self._plans.values()):
            self._discard(prepared.pairs)
        self._plans.clear()

    def _prepare(self, sheet: CacheLayout) -> PreparedPlan:
        key = self._writer.key
        plan = prepare_plan(sheet, {key: self._writer.layout}, is_partial=True)
        pairs: list[tuple[Prepared, Prepared]] = []
        try:
            # One by one: those before one that fails must be given back.
            for section in plan.peers[key].sections:
                pairs += [self._prepare_section(section.mirrored())]
        except FerryError:
            self._discard(pairs)
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
    """

    def __init__(self, writer: Writer, link: Link, card: Card) -> None:
        self.key = link.peer
        self.link = link
        self.is_gone = False
        self._writer = writer
        self._card = card
        self._agent: str | None = None
        self._claims: dict[int, ClaimPlans] = {}

    def add(self, claim: Claim) -> None:
        """Keep a claim; its agent is connected with the first of them.

        Raises:
            ProtocolViolation: The number is taken, or there are too many.
            PeerUnreachable: Its transport does not answer.
        """
        if claim.number in self._claims:
            raise ProtocolViolation(f"claim {claim.number} is there already")
        self._make_room()
        if self._agent is None:
            self._agent = self._writer.agents.connect(self._card.metadata, self)
        # What is registered was told in the handshake, and nothing else counts.
        regions = self._card.layout.regions
        sheets = tuple(
            msgspec.structs.replace(sheet, regions=regions) for sheet in claim.sheets
        )
        self._claims[claim.number] = ClaimPlans(self._writer, self._agent, sheets)

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
