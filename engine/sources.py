"""`Sources`: a set of producer ranks, with everything prepared for reading from them.

`Preparer` makes them and takes them apart; who uses them, and until when, is the
business of `kvferry.engine.peers`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from kvferry.engine.plan import prepare_plan
from kvferry.protocol.errors import FerryError, MisuseError, ProtocolViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric, Prepared
    from kvferry.engine.images import BulkSection
    from kvferry.engine.peer import Peer
    from kvferry.engine.plan import Plan
    from kvferry.engine.sections import Rows, Section
    from kvferry.engine.staging import Staging
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.layout import CacheLayout

__all__ = ("Preparer", "Sources", "all_layouts", "of_these")


@dataclass(eq=False)
class Sources:
    """A set of producer ranks, with a plan and its rows prepared.

    Attributes:
        peers: In the order in which waves number them.
        prepared: By peer and section of its plan, those in bulk last, the two
            sides: ours, theirs.
        users: Pulls that may still make transfers of it, or have one in flight.
        is_stale: One of its peers is gone: discard it when nobody uses it.
    """

    peers: tuple[Peer, ...]
    plan: Plan[EngineKey]
    prepared: list[list[tuple[Prepared, Prepared]]]
    users: int = 0
    is_stale: bool = False


class Preparer:
    """Makes sources of connected peers."""

    def __init__(
        self,
        config: EngineConfig,
        layout: CacheLayout,
        fabric: Fabric,
        *,
        staging: Staging,
        log: FilteringBoundLogger,
    ) -> None:
        self._config = config
        self._layout = layout
        self._fabric = fabric
        self._staging = staging
        self._log = log

    def prepare(
        self,
        peers: tuple[Peer, ...],
        told: Mapping[EngineKey, CacheLayout] | None = None,
    ) -> Sources:
        """Plan reading from these peers, and prepare the rows of the plan.

        Args:
            peers: All that are read from.
            told: What all ranks of their instance hold, if these are not all.

        Raises:
            ImpossiblePlan: The layouts cannot be paired.
            PeerError: The transport does not know a peer any more, or a rank is not
                what its instance has told of it.
        """
        plan = self._plan(peers, told)
        sources = Sources(peers, plan, [[] for _ in peers])
        try:
            for peer, pairs in zip(peers, sources.prepared, strict=True):
                for section in plan.peers[peer.key].sections:
                    rows = section.local_rows
                    pairs.append(self._prepare_section(peer, section, rows))
                for bulk in plan.peers[peer.key].bulk:
                    rows = self._staging.rows(bulk)
                    pairs.append(self._prepare_section(peer, bulk, rows))
        except FerryError:
            self.discard(sources)
            raise
        return sources

    def discard(self, sources: Sources) -> None:
        """Give the rows back; nothing may be in flight that was made of them."""
        for prepared in chain.from_iterable(chain.from_iterable(sources.prepared)):
            self._give_back(partial(self._fabric.discard, prepared))
        sources.prepared.clear()

    def _plan(
        self, peers: Sequence[Peer], told: Mapping[EngineKey, CacheLayout] | None
    ) -> Plan[EngineKey]:
        """Plan, without bulk landings if there is no memory for them."""
        layouts = all_layouts(peers, told)
        while True:
            policy = self._staging.policy()
            plan = prepare_plan(
                self._layout,
                layouts,
                reader=self._config.rank.tp,
                skip_groups=self._config.skip_groups,
                policy=policy,
            )
            plan = of_these(plan, peers)
            try:
                for peer in peers:
                    self._staging.make_room(plan.peers[peer.key].bulk)
            except MisuseError as error:
                self._log.warning("no_staging", error=str(error))
                self._staging.switch_off()
            else:
                return plan

    def _prepare_section(
        self, peer: Peer, section: Section | BulkSection, rows: Rows
    ) -> tuple[Prepared, Prepared]:
        ours = self._fabric.prepare(None, section.local_memory, rows)
        try:
            theirs = self._fabric.prepare(
                peer.agent, section.remote_memory, section.remote_rows
            )
        except FerryError:
            self._fabric.discard(ours)
            raise
        return ours, theirs

    def _give_back(self, call: Callable[[], None]) -> None:
        """What the transport does not give back costs memory, and no request."""
        try:
            call()
        except FerryError as error:
            self._log.warning("let_go_failed", error=str(error))


def all_layouts(
    peers: Sequence[Peer], told: Mapping[EngineKey, CacheLayout] | None
) -> dict[EngineKey, CacheLayout]:
    """What every rank of an instance holds, in order: its own word counts for more."""
    cards = {peer.key: peer.card.layout for peer in peers}
    return cards if told is None else {**told, **cards}


def of_these(plan: Plan[EngineKey], peers: Sequence[Peer]) -> Plan[EngineKey]:
    """A plan that reads from these peers alone, without the others of their instance.

    Raises:
        ProtocolViolation: It reads from another one: of all ranks that are not these
            the manifest has told that they are not needed.
    """
    peer_plans = {peer.key: plan.peers[peer.key] for peer in peers}
    for key, other in plan.peers.items():
        if key not in peer_plans and (other.sections or other.bulk):
            raise ProtocolViolation(
                f"its ranks do not hold what its manifest tells: {key} would be needed",
                peer=key.engine_id,
            )
    return replace(plan, peers=peer_plans)
