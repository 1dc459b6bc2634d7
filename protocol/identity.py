"""Who the two sides are, and what must agree for a transfer to make sense.

`compare` looks at what the tensors mean (model, revision, dtype, quantisation),
`compare_layouts` at their shapes where no planner can bridge a difference. Both
name every factor that differs, with both values. Block sizes, axis orders,
strides, pool sizes and head splits are not compared: those are the planner's.
"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.layout import SHARD_AXIS, TOKEN_AXIS
from kvferry.protocol.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvferry.protocol.layout import (
        CacheLayout,
        FieldLayout,
        GroupLayout,
        PartLayout,
    )

__all__ = (
    "MAX_DIFFERENCES",
    "MAX_RANKS",
    "Difference",
    "EngineKey",
    "ModelIdentity",
    "Rank",
    "compare",
    "compare_layouts",
)

Text = Annotated[str, msgspec.Meta(max_length=1024)]
MAX_RANKS = 1024
"""Most ranks of one instance."""

MAX_DIFFERENCES = 256
"""Most factors that a comparison names; who differs in so many differs in all."""

Coordinate = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**16)]


class Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """Coordinates of one engine inside its instance."""

    tp: Coordinate = 0
    tp_size: Size = 1
    pp: Coordinate = 0
    pp_size: Size = 1

    def __post_init__(self) -> None:
        """Refuse coordinates of no rank, and instances that nobody could list.

        Raises:
            ConfigError: It is outside its own sizes, or these are too large.
        """
        if self.tp >= self.tp_size or self.pp >= self.pp_size:
            raise ConfigError(f"rank {self} is outside its own sizes")
        if self.tp_size * self.pp_size > MAX_RANKS:
            raise ConfigError(f"rank {self}: an instance has at most {MAX_RANKS} ranks")

    def instance(self) -> tuple[Rank, ...]:
        """All ranks of its instance, itself included."""
        return tuple(
            Rank(tp, self.tp_size, pp, self.pp_size)
            for pp in range(self.pp_size)
            for tp in range(self.tp_size)
        )

    def __str__(self) -> str:
        """``tp0of2.pp0of1``."""
        return f"tp{self.tp}of{self.tp_size}.pp{self.pp}of{self.pp_size}"


class EngineKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """The identity of one start of one rank; never an address.

    Attributes:
        generation: Fresh and random at each start of the engine, so that a peer
            that comes back at the same address is a new peer.
    """

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    generation: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    rank: Rank

    def __str__(self) -> str:
        """``prefill-0/tp0of1.pp0of1#3f2a``; what does not print is escaped: it is
        for logs, and a peer's own word."""
        engine_id, generation = printable(self.engine_id), printable(self.generation)
        return f"{engine_id}/{self.rank}#{generation[:8]}"


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the cache's numbers mean.

    Attributes:
        model: Name of the model.
        revision: Its exact revision; two revisions have different caches.
        dtype: The dtype the cache was computed in.
        quantization: How cache elements are quantised; ``none`` if they are not.
        extra: Any further fact that must agree (rope scaling, adapters, ...).
    """

    model: Text
    revision: Text
    dtype: Text
    quantization: Text = "none"
    extra: Annotated[dict[Text, Text], msgspec.Meta(max_length=64)] = {}


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One factor that should agree and does not; both values as text."""

    factor: Text
    local: Text
    remote: Text

    def __str__(self) -> str:
        """``dtype: bfloat16 here, float16 there``."""
        return f"{self.factor}: {self.local} here, {self.remote} there"


ABSENT = "absent"


def compare(local: ModelIdentity, remote: ModelIdentity) -> tuple[Difference, ...]:
    """Every factor of the identity that differs; there are few."""
    return tuple(_differing(_facts(local), _facts(remote)))


def compare_layouts(
    local: CacheLayout,
    remote: CacheLayout,
    *,
    skip_groups: frozenset[str] = frozenset(),
) -> tuple[Difference, ...]:
    """The factors of the layouts that differ and that no plan can bridge.

    At most `MAX_DIFFERENCES` of them. A layer that only one side has is no difference here: pipeline stages hold
    different layers. The planner refuses a layer that nobody has.

    Args:
        local: Our layout.
        remote: The peer's.
        skip_groups: Groups that the caller has agreed not to transfer.
    """
    ours = {g.name: g for g in local.groups if g.name not in skip_groups}
    theirs = {g.name: g for g in remote.groups if g.name not in skip_groups}
    found = [
        *_differing(
            {f"group {name}": "present" for name in ours},
            {f"group {name}": "present" for name in theirs},
        )
    ]
    for name in ours.keys() & theirs.keys():
        found += _differing(*_group_facts(ours[name], theirs[name]))
    return tuple(sorted(found, key=lambda d: d.factor)[:MAX_DIFFERENCES])


def _differing(
    local: Mapping[str, str], remote: Mapping[str, str]
) -> Iterator[Difference]:
    if local == remote:
        return  # as mostly
    for factor in ChainMap(dict(local), dict(remote)):
        ours, theirs = local.get(factor, ABSENT), remote.get(factor, ABSENT)
        if ours != theirs or (factor in local) != (factor in remote):
            yield Difference(factor[:1024], ours[:1024], theirs[:1024])


def _facts(identity: ModelIdentity) -> dict[str, str]:
    return {
        "model": identity.model,
        "revision": identity.revision,
        "dtype": identity.dtype,
        "quantization": identity.quantization,
        **{f"extra.{name}": value for name, value in identity.extra.items()},
    }


def _group_facts(
    local: GroupLayout, remote: GroupLayout
) -> tuple[dict[str, str], dict[str, str]]:
    """What is to agree, in words; but not of fields that agree, which mostly all do."""
    ours = {(f.layer, f.name): f for f in local.fields}
    unlike = []
    for field in remote.fields:
        place = (field.layer, field.name)
        if not _do_agree(ours.pop(place, None), field):
            unlike.append(place)
    unlike += ours  # nothing of the other side's has met these
    shared = {f.layer for f in local.fields} & {f.layer for f in remote.fields}
    told = {place for place in unlike if place[0] in shared}
    return _one_group_facts(local, told), _one_group_facts(remote, told)


def _do_agree(local: FieldLayout | None, remote: FieldLayout) -> bool:
    """Whether the facts of two fields are the same."""
    return (
        local is not None
        and local.dtype == remote.dtype
        and local.element_bytes == remote.element_bytes
        and len(local.parts) == len(remote.parts)
        and all(map(_do_parts_agree, local.parts, remote.parts))
    )


def _do_parts_agree(local: PartLayout, remote: PartLayout) -> bool:
    return (
        local.name == remote.name
        and local.shard.total == remote.shard.total
        and (local.axes == remote.axes or _unbridged(local) == _unbridged(remote))
    )


def _one_group_facts(
    group: GroupLayout, places: set[tuple[str, str]]
) -> dict[str, str]:
    where = f"group {group.name}"
    facts = {
        f"{where} addressed by": "token" if group.block_size else "slot",
        f"{where} window": str(group.window),
    }
    for field in group.fields:
        if (field.layer, field.name) in places:
            facts |= _field_facts(field, f"{where} {field.layer}.{field.name}")
    return facts


def _field_facts(field: FieldLayout, where: str) -> dict[str, str]:
    facts = {
        where: "present",
        f"{where} dtype": field.dtype,
        f"{where} element bytes": str(field.element_bytes),
    }
    for part in field.parts:
        facts |= _part_facts(part, f"{where}.{part.name}")
    return facts


def _part_facts(part: PartLayout, where: str) -> dict[str, str]:
    return {
        where: "present",
        f"{where} total units": str(part.shard.total),
        **{
            f"{where} axis {name}": str(size) for name, size in _unbridged(part).items()
        },
    }


def _unbridged(part: PartLayout) -> dict[str, int]:
    """The axes whose sizes no plan bridges."""
    bridged = {SHARD_AXIS, TOKEN_AXIS}
    return {axis.name: axis.size for axis in part.axes if axis.name not in bridged}
