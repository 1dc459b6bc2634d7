"""`Routes`: which ranks of a producer's instance a request of ours is about.

A ticket or contact of a whole instance names more ranks than one of ours may need. Its
manifest, asked for once, tells what each of them holds; from that and our own manifest
follows which of them we read from, who of us reads from each, and which are spare.

Where that cannot be told (no manifest on either side) a request is about all ranks that
are named, and each of them hears of each of us.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import trio

from kvferry.engine.party import Party
from kvferry.engine.readers import reader_table
from kvferry.protocol.errors import (
    BadTicket,
    FerryError,
    ImpossiblePlan,
    InstanceIncomplete,
    WrongPeer,
)
from kvferry.protocol.identity import EngineKey

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.engine.asking import Asks
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.instance import Instance
    from kvferry.engine.party import Layouts, Named
    from kvferry.protocol.identity import Rank
    from kvferry.protocol.layout import CacheLayout
    from kvferry.protocol.manifest import Manifest, Member
    from kvferry.protocol.ticket import RankAddress, RankOffer

__all__ = ("Route", "Routes")

ASK_NEXT_S = 0.5
"""A rank that has not answered for so long may hang: another one is asked as well."""

RankT = TypeVar("RankT", bound="RankOffer | RankAddress")


@dataclass(frozen=True)
class Route:
    """What one of our ranks has to do with one producer's instance.

    Attributes:
        places: Where among all ranks of the instance those of ``keys`` are.
        keys, readers, layouts, spare: As in `Party`.
    """

    places: tuple[int, ...]
    keys: tuple[EngineKey, ...]
    readers: tuple[tuple[Rank, ...], ...]
    layouts: Layouts
    spare: tuple[Rank, ...]

    def party(self, source: Named[RankT]) -> Party[RankT]:
        """The same for one ticket or contact.

        Raises:
            BadTicket: It names other ranks than its instance has.
        """
        ranks = [
            _entry(source.ranks, place, key)
            for place, key in zip(self.places, self.keys, strict=True)
        ]
        return Party(ranks, self.keys, self.readers, self.layouts, self.spare)


class Routes:
    """The routes of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout,
        *,
        instance: Instance,
        asks: Asks,
    ) -> None:
        self._config = config
        self._layout = layout
        self._instance = instance
        self._asks = asks
        self._all = config.rank.instance()
        self._routes: OrderedDict[tuple[str, str], Route | None] = OrderedDict()
        self._made_for: Manifest | None = None  # our own
        self._finding: dict[tuple[str, str], trio.Event] = {}

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._routes)

    def now(self, source: Named[RankT]) -> Party[RankT] | None:
        """Whom a request is about; None if that has to be found out.

        Raises:
            BadTicket: As `find`.
        """
        if not source.instance or not self._knows_us:
            return self.everybody(source)
        if self._instance.manifest is not self._made_for:
            self._made_for = self._instance.manifest
            self._routes.clear()
        name = (source.engine_id, source.instance)
        if name not in self._routes:
            return None
        route = self._routes[name]
        return self.everybody(source) if route is None else route.party(source)

    async def find(self, source: Named[RankT]) -> Party[RankT]:
        """Whom a request is about; asks one of the ranks if it has to (case e4: once).

        Raises:
            BadTicket: The source names other ranks than its instance has.
            PeerError: No rank answers, or its instance is another start or incomplete.
            EngineClosed: The engine is closing.
        """
        name = (source.engine_id, source.instance)
        while (party := self.now(source)) is None:
            if name in self._finding:
                await self._finding[name].wait()
                continue  # or find it ourselves, if that one has failed
            self._finding[name] = trio.Event()
            try:
                route = await self._make(await self._ask(source))
                self._remember(name, route)
            finally:
                self._finding.pop(name).set()
        return party

    def everybody(self, source: Named[RankT]) -> Party[RankT]:
        """All ranks that are named, each for each of us."""
        keys = tuple(
            EngineKey(source.engine_id, rank.generation, rank.rank)
            for rank in source.ranks
        )
        return Party(source.ranks, keys, (self._all,) * len(keys))

    def forget(self, key: EngineKey) -> None:
        """A rank has been let go: with its instance one begins anew."""
        for name in [name for name in self._routes if name[0] == key.engine_id]:
            del self._routes[name]

    @property
    def _knows_us(self) -> bool:
        return len(self._all) == 1 or self._instance.manifest is not None

    def _ours(self) -> dict[Rank, CacheLayout]:
        manifest = self._instance.manifest
        if manifest is None or len(self._all) == 1:
            return {self._config.rank: self._layout}
        return {m.rank: m.layout for m in sorted(manifest.members, key=_rank)}

    async def _ask(self, source: Named[RankT]) -> Manifest:
        """Ask its ranks, each of ours beginning with another one, until one answers.

        One that hangs keeps the question from the next one for a moment alone.
        """
        first = self._all.index(self._config.rank) % len(source.ranks)
        answers: list[Manifest] = []
        errors: list[FerryError] = []

        async def ask(rank: RankT, ended: trio.Event) -> None:
            try:
                answer = await self._asks.fetch(source.engine_id, rank.host, rank.port)
            except FerryError as error:
                errors.append(error)
            else:
                answers.append(answer)
                nursery.cancel_scope.cancel()
            ended.set()

        async with trio.open_nursery() as nursery:
            for rank in (*source.ranks[first:], *source.ranks[:first]):
                ended = trio.Event()
                nursery.start_soon(ask, rank, ended)
                with trio.move_on_after(ASK_NEXT_S):
                    await ended.wait()
        if not answers:
            # Whoever answers knows more than who does not.
            errors.sort(key=lambda error: not isinstance(error, InstanceIncomplete))
            raise errors[0]
        if answers[0].id != source.instance:
            raise WrongPeer(
                "the instance is another one by now: one of its ranks was restarted",
                peer=source.engine_id,
            )
        return answers[0]

    async def _make(self, manifest: Manifest) -> Route | None:
        """None if the layouts do not fit: the handshakes tell why."""
        layouts = {
            EngineKey(manifest.engine_id, member.generation, member.rank): member.layout
            for member in sorted(manifest.members, key=_rank)
        }
        table: dict[Rank, frozenset[EngineKey]] = {}
        try:
            rows = reader_table(
                self._ours(), layouts, skip_groups=self._config.skip_groups
            )
            for rank, read in rows:
                table[rank] = read
                await trio.lowlevel.checkpoint()  # a large instance takes its time
        except ImpossiblePlan:
            return None
        return _route(self._config.rank, layouts, table)

    def _remember(self, name: tuple[str, str], route: Route | None) -> None:
        self._routes[name] = route
        if len(self._routes) > self._config.max_peers:
            self._routes.popitem(last=False)


def _route(
    rank: Rank, layouts: Layouts, table: Mapping[Rank, frozenset[EngineKey]]
) -> Route | None:
    """One of our ranks' part in the table of all of them."""
    places = tuple(
        place for place, key in enumerate(layouts) if key in table.get(rank, ())
    )
    if not places:
        return None  # it reads from nobody, and tells so to everybody
    readers = {
        key: tuple(ours for ours, read in table.items() if key in read)
        for key in layouts
    }
    keys = tuple(layouts)
    speaker = next(ours for ours, read in table.items() if read)
    spare = tuple(key.rank for key in keys if not readers[key])
    return Route(
        places,
        tuple(keys[place] for place in places),
        tuple(readers[keys[place]] for place in places),
        layouts,
        spare if speaker == rank else (),
    )


def _entry(ranks: Sequence[RankT], place: int, key: EngineKey) -> RankT:
    """How a rank is named; at its place, unless somebody has sorted them anew."""
    if place < len(ranks) and _is_of(ranks[place], key):
        return ranks[place]
    for rank in ranks:
        if _is_of(rank, key):
            return rank
    raise BadTicket(f"it is for a whole instance, and {key} is not in it")


def _is_of(rank: RankOffer | RankAddress, key: EngineKey) -> bool:
    return rank.rank == key.rank and rank.generation == key.generation


def _rank(member: Member) -> Rank:
    return member.rank
