"""`Shares`: our layout shared out among the producer ranks that push to us.

Made once for each set of ranks. Each of them is told its claim over its link; what a
request comes to, in bytes and tails, is computed here as well, so that what the
producers say they wrote can be checked against what was asked of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.engine.claims import share_out
from kvferry.engine.plan import prepare_plan
from kvferry.engine.sources import all_layouts, of_these
from kvferry.engine.spans import Span
from kvferry.protocol.link import Claim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.engine.peer import Peer
    from kvferry.engine.plan import Plan
    from kvferry.engine.selection import Selection
    from kvferry.engine.services import Services
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.layout import CacheLayout, GroupLayout

__all__ = ("Shares", "share_among")

_numbers = itertools.count()


@dataclass(frozen=True)
class Shares:
    """One set of producer ranks, and who of them writes what.

    Attributes:
        peers: In the order in which landings number them.
        number: Of the claims; the same on every link.
        plan: What all of them write together, proved to be our layout.
    """

    peers: tuple[Peer, ...]
    number: int
    plan: Plan[EngineKey]

    @property
    def is_stale(self) -> bool:
        """One of the links has ended, and with it the claim."""
        return any(not peer.link.is_open for peer in self.peers)

    def select(
        self, *, num_tokens: int, computed_tokens: int, spans: Mapping[str, Span]
    ) -> Selection[EngineKey]:
        """What a request comes to.

        Raises:
            UnknownBlock: Our spans do not hold so many tokens.
            ImpossiblePlan: As in `kvferry.engine.plan.Plan.select`.
        """
        return self.plan.select(
            num_tokens=num_tokens,
            computed_tokens=computed_tokens,
            local=spans,
            remote={
                name: self._any_blocks(name, num_tokens, spans[name])
                for name in self.plan.groups
            },
        )

    def _any_blocks(self, name: str, num_tokens: int, ours: Span) -> Span:
        """We do not know the producers' blocks, and no count depends on which they are.

        ``num_tokens`` is a producer's word: what our own blocks cannot hold is not
        made room for, and refused because of them.
        """
        count, group = len(ours.block_ids), self._remote_group(name)
        grain = group.block_size * group.context_size
        if not grain:
            return Span([0] * count)
        mine = self.plan.groups[name]
        room = ours.first_token + count * mine.block_size * mine.context_size
        return Span([0] * (-(-min(num_tokens, room) // grain)))

    def _remote_group(self, name: str) -> GroupLayout:
        return next(
            group
            for peer in self.peers
            for group in peer.card.layout.groups
            if group.name == name
        )


def share_among(
    peers: tuple[Peer, ...],
    services: Services,
    told: Mapping[EngineKey, CacheLayout] | None = None,
) -> Shares:
    """Share our layout out, and tell each peer its claim.

    Args:
        peers: All that are to write.
        services: Our own.
        told: What all ranks of their instance hold, if these are not all.

    Raises:
        ImpossiblePlan: The layouts cannot be paired.
        PeerLost: A link has ended.
        ProtocolViolation: A rank is not what its instance has told of it.
    """
    layouts = all_layouts(peers, told)
    reader, skip = services.key.rank.tp, services.config.skip_groups
    plan = of_these(
        prepare_plan(services.layout, layouts, reader=reader, skip_groups=skip), peers
    )
    claims = share_out(services.layout, layouts, reader=reader, skip_groups=skip)
    number = next(_numbers)
    for peer in peers:
        peer.link.post(Claim(number, claims[peer.key]))
    return Shares(peers, number, plan)
