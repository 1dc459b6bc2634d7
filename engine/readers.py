"""Who reads from whom, between all ranks of two instances.

Each consumer rank computes the whole table for itself, from the layouts in the two
manifests and by the planner's own choice among replicas, so that what one of them
tells a producer rank of its siblings is what these will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvferry.engine.plan import Pairing
from kvferry.engine.validity import check_layout

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from kvferry.protocol.identity import Rank
    from kvferry.protocol.layout import CacheLayout

__all__ = ("reader_table",)

KeyT = TypeVar("KeyT", bound="Hashable")


def reader_table(
    consumers: Mapping[Rank, CacheLayout],
    producers: Mapping[KeyT, CacheLayout],
    *,
    skip_groups: frozenset[str] = frozenset(),
) -> Iterator[tuple[Rank, frozenset[KeyT]]]:
    """Whom each consumer rank reads from, one after the other: each takes its time.

    It is what `kvferry.engine.plan.prepare_plan` will do. No layout needs regions.

    Args:
        consumers: All ranks of the consumer's instance.
        producers: All ranks of the producer's, in the plan's order.
        skip_groups: The same on all the consumer's ranks.

    Raises:
        ImpossiblePlan: Nobody holds a unit, or the layouts cannot be paired.
    """
    for key, remote in producers.items():
        check_layout(remote, side=f"producer {key}")
    pairing = Pairing(producers, 0)
    for rank, layout in consumers.items():
        yield rank, _providers(layout, pairing.of_reader(rank.tp), skip_groups)


def _providers(
    local: CacheLayout, pairing: Pairing[KeyT], skip_groups: frozenset[str]
) -> frozenset[KeyT]:
    return frozenset(
        share.holder.key
        for group in local.groups
        if group.name not in skip_groups
        for share in pairing.shares(group)
    )
