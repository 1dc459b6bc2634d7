"""A plan read back from its own rows: who provides which bytes of which field.

A plan keeps rows, not the remote layouts they were made from. But rows are a map
from local to remote bytes, so a remote stride is read off it: by how much the
remote address grows where the local one takes one step. What is told is therefore
what will be posted, not what was meant.

Owned here: `Share`, one rank's part of one field. Not here: words and pictures.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvferry.engine.runs import Loop, absorb, unroll
from kvferry.engine.spans import Side
from kvferry.protocol.layout import SHARD_AXIS, TOKEN_AXIS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kvferry.engine.images import BulkSection, Image
    from kvferry.engine.plan import Plan
    from kvferry.engine.sections import PeerPlan, Section, StratumKey
    from kvferry.protocol.layout import FieldLayout, PartLayout

    Ids = npt.NDArray[np.int64]

__all__ = ("Share", "Step", "shares_of")


class Step(NamedTuple):
    """One axis inside a unit: its steps, and what a step is on either side, in bytes."""

    axis: str
    size: int
    local_stride: int
    remote_stride: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one remote rank provides of one part of one layer's field.

    Attributes:
        stratum: Group, both sides' blocks, and the unit.
        field, part: Of the consumer.
        first, last: Global units of the shard axis.
        run_bytes: Bytes contiguous on both sides, in this part.
        nest: The axes that the run could not absorb, in the part's order.
        is_bulk: It lands in a staging buffer first.
        posted_bytes: Of the descriptor that carries the first run: longer than a run
            where neighbours, such as the next layer, are joined.
        local_address, remote_address: Of the share's first byte in block 0.
        local_step, remote_step: Bytes from a unit to the next in one kernel block; 0
            where a block is one unit.
        remote_block_stride: Bytes from a remote kernel block to the next.
    """

    stratum: StratumKey
    field: FieldLayout
    part: PartLayout
    first: int
    last: int
    run_bytes: int
    nest: tuple[Step, ...]
    is_bulk: bool
    posted_bytes: int
    local_address: int
    remote_address: int
    local_step: int
    remote_step: int
    remote_block_stride: int

    @property
    def runs(self) -> int:
        """Runs in a unit."""
        return prod(step.size for step in self.nest)

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for shares that differ in nothing but layer, place and range of units."""
        key, field, part = self.stratum, self.field, self.part
        return (
            *(key.group, key.local, key.unit_tokens),
            *(key.remote.block_size, key.remote.kernel_tokens),
            *(field.name, field.dtype, part.name, part.shard.total),
            *(self.last - self.first, self.run_bytes, self.nest),
            *(self.is_bulk, self.posted_bytes),
        )

    def stopper(self) -> Step | None:
        """The axis that ended the run; None if it is the whole unit.

        The one that goes on with the run on one side alone, if there is such an
        axis, else the one of the smallest steps.
        """

        def distance(step: Step) -> tuple[bool, int]:
            strides = (abs(step.local_stride), abs(step.remote_stride))
            return self.run_bytes not in strides, min(strides)

        return min(self.nest, key=distance, default=None)


class _Rows(NamedTuple):
    """Runs that are divided alike, one element for each, by local address.

    Attributes:
        local, remote: Addresses at place 0 of block 0.
        run: Bytes.
        posted: Bytes of the descriptor that brings it.
        bulk: Whether that is an image of a bulk section.
        local_step, remote_step: From a place to the next.
        device: Of the local side.
        block_stride: Of the remote side.
    """

    local: Ids
    remote: Ids
    run: Ids
    posted: Ids
    bulk: Ids
    local_step: Ids
    remote_step: Ids
    device: Ids
    block_stride: Ids

    def on_device(self, device: int) -> _Rows:
        """The pieces of one local device: addresses mean nothing across devices."""
        here = self.device == device
        return self if here.all() else _Rows(*(column[here] for column in self))

    def piece_at(self, addresses: Ids) -> Ids:
        """The piece that holds each local byte; -1 for none."""
        at = np.searchsorted(self.local, addresses, side="right") - 1
        holds = (at >= 0) & (addresses < self.local[at] + self.run[at])
        return np.where(holds, at, -1)

    def remote_of(self, address: int) -> int:
        """Where the byte comes from that lands at a local address."""
        (at,) = self.piece_at(np.array([address]))
        return int(self.remote[at]) + address - int(self.local[at])


def shares_of(plan: Plan[Any], peer: PeerPlan[Any]) -> Iterator[Share]:
    """What one rank provides, in the order of the local layout."""
    for section in peer.sections:
        for key, rows in _rows_by_stratum(section):
            yield from _shares_of(plan, section, key, rows)
    alike: dict[object, list[BulkSection]] = defaultdict(list)
    for bulk in peer.bulk:
        alike[bulk.key, bulk.local_memory].append(bulk)
    for members in alike.values():
        rows = _rows_of_images(members)
        yield from _shares_of(plan, members[0], members[0].key, rows)


def _shares_of(
    plan: Plan[Any], section: Section | BulkSection, key: StratumKey, rows: _Rows
) -> Iterator[Share]:
    group = plan.groups[key.group]
    for field in group.fields:
        if key.local == Side.of(group, field) and section.local_memory == field.memory:
            here = rows.on_device(field.device)
            for part in field.parts:
                yield from _shares(key, here, field, part)


def _rows_by_stratum(section: Section) -> Iterator[tuple[StratumKey, _Rows]]:
    first = 0
    for stratum, local in section.local_rows_by_stratum():
        key, pieces = stratum.key, stratum.run_bytes.size
        last = first + pieces * key.remote_places
        ours = local.astype(np.int64).reshape(pieces, key.local_places, 5)
        theirs = section.remote_rows[first:last].astype(np.int64)
        theirs = theirs.reshape(pieces, key.remote_places, 5)
        first = last
        order = np.argsort(ours[:, 0, 0], kind="stable")
        ours, theirs = ours[order], theirs[order]
        yield (
            key,
            _Rows(
                ours[:, 0, 0],
                theirs[:, 0, 0],
                ours[:, 0, 1],
                ours[:, 0, 1],
                np.zeros(pieces, dtype=np.int64),
                ours[:, min(1, key.local_places - 1), 0] - ours[:, 0, 0],
                theirs[:, min(1, key.remote_places - 1), 0] - theirs[:, 0, 0],
                ours[:, 0, 2],
                theirs[:, 0, 3],
            ),
        )


def _rows_of_images(sections: Sequence[BulkSection]) -> _Rows:
    """The runs that the copies out of all images put in place."""
    columns = [
        np.stack(_columns_of(bulk, image)) for bulk in sections for image in bulk.images
    ]
    runs = np.concatenate(columns, axis=1)
    return _Rows(*runs[:, np.argsort(runs[0], kind="stable")])


def _columns_of(bulk: BulkSection, image: Image) -> list[Ids]:
    here = unroll([(loop.size, loop.local_stride) for loop in image.loops])
    there = unroll([(loop.size, loop.remote_stride) for loop in image.loops])
    local, remote = image.places
    numbers = (
        image.run_bytes,
        image.image_bytes,
        1,
        local.local_stride if local.size > 1 else 0,
        remote.remote_stride if remote.size > 1 else 0,
        bulk.local_device,
        image.row[3],
    )
    return [
        here + image.local_address,
        there + image.row[0] + image.offset,
        *(np.full(here.size, number) for number in numbers),
    ]


def _shares(
    key: StratumKey, rows: _Rows, field: FieldLayout, part: PartLayout
) -> Iterator[Share]:
    """The ranges of a part that these rows hold: one share for each."""
    (head,) = (axis for axis in part.axes if axis.name == SHARD_AXIS)
    units = np.arange(part.shard.size)
    pieces = rows.piece_at(part.address + units * head.stride)
    held = np.flatnonzero(pieces >= 0)
    if not held.size:
        return
    for indices in np.split(held, np.flatnonzero(np.diff(held) > 1) + 1):
        yield _share(key, rows, field, part, (int(indices[0]), int(indices[-1]) + 1))


def _share(
    key: StratumKey,
    rows: _Rows,
    field: FieldLayout,
    part: PartLayout,
    units: tuple[int, int],
) -> Share:
    strides = {axis.name: axis.stride for axis in part.axes}
    sizes = {axis.name: axis.size for axis in part.axes}
    sizes[SHARD_AXIS] = units[1] - units[0]
    if key.unit_tokens:
        sizes[TOKEN_AXIS] = key.unit_tokens
    address = part.address + units[0] * strides[SHARD_AXIS]
    origin = rows.remote_of(address)
    steps = {
        Loop(
            size,
            strides[axis],
            rows.remote_of(address + strides[axis]) - origin,
        ): axis
        for axis, size in sizes.items()
        if size > 1
    }
    run_bytes, rest = absorb(list(steps), field.element_bytes)
    (piece,) = rows.piece_at(np.array([address]))
    return Share(
        stratum=key,
        field=field,
        part=part,
        first=part.shard.first + units[0],
        last=part.shard.first + units[1],
        run_bytes=run_bytes,
        nest=tuple(Step(steps[loop], *loop) for loop in rest),
        is_bulk=bool(rows.bulk[piece]),
        posted_bytes=int(rows.posted[piece]),
        local_address=address,
        remote_address=origin,
        local_step=int(rows.local_step[piece]),
        remote_step=int(rows.remote_step[piece]),
        remote_block_stride=int(rows.block_stride[piece]),
    )
