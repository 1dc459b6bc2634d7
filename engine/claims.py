"""Claims: a consumer's layout, shared out among the producer ranks that are to fill it.

A claim is a layout like any other: the consumer's own parts, narrowed to the units
that one producer rank provides. A producer plans against it as against a whole
layout, and the proof that its plan fills it, with the proof here that the claims
fill the consumer's layout, is the proof of coverage of a push.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvferry.engine.plan import Pairing
from kvferry.engine.validity import check_layout
from kvferry.protocol.layout import SHARD_AXIS, CacheLayout, Shard

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from kvferry.engine.plan import Share
    from kvferry.protocol.layout import FieldLayout, GroupLayout, PartLayout

__all__ = ("layers_of", "of_layer", "share_out")

KeyT = TypeVar("KeyT", bound="Hashable")


def share_out(
    local: CacheLayout,
    remotes: Mapping[KeyT, CacheLayout],
    *,
    reader: int,
    skip_groups: frozenset[str] = frozenset(),
) -> dict[KeyT, tuple[CacheLayout, ...]]:
    """What each producer rank is to fill of a consumer's layout.

    Args:
        local: The consumer's layout.
        remotes: All ranks of the producer's instance.
        reader: As in `kvferry.engine.plan.prepare_plan`.
        skip_groups: Local groups that are not transferred.

    Returns:
        By rank its sheets, without regions: one, unless it provides two stretches
        of one part that are no neighbours; none, if it provides nothing.

    Raises:
        ImpossiblePlan: Nobody holds a unit, or the layouts cannot be paired.
    """
    for key, remote in remotes.items():
        check_layout(remote, side=f"producer {key}")
    pairing = Pairing(remotes, reader)
    sheets: dict[KeyT, list[list[GroupLayout]]] = {key: [] for key in remotes}
    for group in local.groups:
        if group.name in skip_groups:
            continue
        by_key: dict[KeyT, list[Share[KeyT]]] = defaultdict(list)
        for share in pairing.shares(group):
            by_key[share.holder.key].append(share)
        for key, shares in by_key.items():
            for number, fields in enumerate(_fields(shares)):
                if number == len(sheets[key]):
                    sheets[key].append([])
                narrowed = msgspec.structs.replace(group, fields=tuple(fields))
                sheets[key][number].append(narrowed)
    return {
        key: tuple(CacheLayout((), tuple(groups)) for groups in found)
        for key, found in sheets.items()
    }


def _fields(shares: Iterable[Share[KeyT]]) -> list[list[FieldLayout]]:
    """The narrowed fields, on as many sheets as one part has stretches."""
    found: list[dict[tuple[str, str], list[PartLayout]]] = []
    fields = {}
    for field, part, _, overlap in shares:
        place = (field.layer, field.name)
        fields[place] = field
        narrowed = _narrowed(part, overlap.first, overlap.last)
        for sheet in found:
            parts = sheet.setdefault(place, [])
            if all(other.name != part.name for other in parts):
                parts.append(narrowed)
                break
        else:
            found.append({place: [narrowed]})
    return [
        [
            msgspec.structs.replace(fields[place], parts=tuple(parts))
            for place, parts in sheet.items()
        ]
        for sheet in found
    ]


def _narrowed(part: PartLayout, first: int, last: int) -> PartLayout:
    """The part, reduced to the global units ``[first, last)``."""
    if (first, last) == (part.shard.first, part.shard.last):
        return part
    stride = next(axis.stride for axis in part.axes if axis.name == SHARD_AXIS)
    return msgspec.structs.replace(
        part,
        shard=Shard(part.shard.total, first, last),
        address=part.address + (first - part.shard.first) * stride,
        axes=tuple(
            msgspec.structs.replace(axis, size=last - first)
            if axis.name == SHARD_AXIS
            else axis
            for axis in part.axes
        ),
    )


def layers_of(sheets: Iterable[CacheLayout]) -> tuple[str, ...]:
    """All layers, in order."""
    return tuple(
        dict.fromkeys(
            field.layer
            for sheet in sheets
            for group in sheet.groups
            for field in group.fields
        )
    )


def of_layer(sheet: CacheLayout, layer: str) -> CacheLayout | None:
    """What a sheet has of one layer; None if it has nothing."""
    groups = []
    for group in sheet.groups:
        fields = tuple(field for field in group.fields if field.layer == layer)
        if fields:
            groups.append(msgspec.structs.replace(group, fields=fields))
    return CacheLayout(sheet.regions, tuple(groups)) if groups else None
