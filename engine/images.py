"""Bulk landing, planned: stretches of a producer's blocks that are read as a whole.

Where the runs of a part are short, an *image* takes in all of them, holes included:
from the lowest to the highest byte that is needed of one kernel block. It lands in a
staging buffer, and copies with the strides of the same loop nest put its runs in
place. Where a hole costs more than the descriptors that it saves, there are several
images to a block. No kind of layout is known here either.

Owned here: which bytes an image has, and the choice between the two ways to land, by
the cost model. Not here: the buffer (`kvferry.engine.staging`) and the copying
(`kvferry.engine.rearrange`).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.engine.cost import Estimate
from kvferry.engine.coverage import are_outside
from kvferry.engine.runs import Loop, unroll
from kvferry.engine.sections import MAX_DESCRIPTORS, joined_runs
from kvferry.protocol.errors import FerryInternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from kvferry.engine.cost import Landing, LandingPolicy
    from kvferry.engine.sections import Contribution, Rows, StratumKey
    from kvferry.protocol.layout import Memory, Region

    Edges = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

__all__ = ("BulkSection", "Choice", "Chosen", "Image", "choose")

MAX_IMAGES = 64
"""Most images of one part: each is a copy of its own in every wave."""

TYPICAL_TOKENS = 1024
"""Of a request; over so many the fixed cost of a copy is spread."""


class Image(NamedTuple):
    """One stretch of every kernel block of a part, and where its runs go.

    Attributes:
        row: Where it lies on the producer, as a row of descriptors.
        local_address: Where the first run goes, at place 0 of kernel block 0.
        offset: Of the first run at place 0 in the image.
        run_bytes: Length of each run.
        loops: Around a run; inside the image the remote strides hold.
        places: From a unit to the next in its block, on both sides.
        local_stride: From a kernel block to the next, here.
    """

    row: tuple[int, int, int, int, int]
    local_address: int
    offset: int
    run_bytes: int
    loops: tuple[Loop, ...]
    places: tuple[Loop, ...]
    local_stride: int

    @property
    def image_bytes(self) -> int:
        """Its length."""
        return self.row[1]


class Choice(NamedTuple):
    """How the parts of a group that are divided alike land, and why.

    Attributes:
        landing: ``bulk`` if any of the parts does.
        direct, bulk: What a kernel block of the producer costs either way; None if
            no part can land in bulk.
    """

    group: str
    landing: Landing
    direct: Estimate
    bulk: Estimate | None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class BulkSection:
    """Images of one length that go to one device.

    Attributes:
        key: Group, sides and unit.
        local_memory, local_device: Where the runs end up, and the staging buffer is.
        image_bytes: Of each.
        images: In the order of their rows.
        remote_rows: One for each image.
    """

    key: StratumKey
    local_memory: Memory
    local_device: int
    remote_memory: Memory
    image_bytes: int
    images: tuple[Image, ...]
    remote_rows: Rows

    def written_rows(self) -> Rows:
        """What the copies write, as rows: enumerated from the loops they are made of."""
        key = self.key
        found = []
        for image in self.images:
            nest = [(i.size, i.local_stride) for i in image.loops]
            places = np.arange(key.local_places) * image.places[0].local_stride
            offsets = (unroll(nest)[:, None] + places).ravel() + image.local_address
            rows = np.empty((offsets.size, 5), dtype=np.uint64)
            rows[:, 0] = offsets
            rows[:, 1:] = (
                image.run_bytes,
                self.local_device,
                image.local_stride,
                key.local.kernel_blocks,
            )
            found.append(rows)
        return np.concatenate(found)

    def prove_read(self) -> None:
        """No copy reads outside its image.

        Raises:
            FerryInternalError: One does.
        """
        for image in self.images:
            steps = [(i.size - 1) * i.remote_stride for i in _remote_nest(image)]
            first = image.offset + sum(step for step in steps if step < 0)
            last = image.offset + sum(step for step in steps if step > 0)
            if first < 0 or last + image.run_bytes > self.image_bytes:
                raise FerryInternalError(
                    f"group {self.key.group!r}: bytes [{first},"
                    f" {last + image.run_bytes}) of an image of {self.image_bytes}"
                )


def _remote_nest(image: Image) -> tuple[Loop, ...]:
    return (*image.loops, image.places[1])


class Chosen(NamedTuple):
    """Contributions, sorted by how they land."""

    direct: list[Contribution]
    bulk: tuple[BulkSection, ...]
    choices: tuple[Choice, ...]


def choose(
    contributions: Sequence[Contribution],
    policy: LandingPolicy,
    *,
    edges: Edges,
    regions: Sequence[Region],
) -> Chosen:
    """Decide how each contribution of one peer lands.

    Args:
        contributions: In any order.
        policy: What may be chosen, and what things cost.
        edges: Where registered regions begin, here and there.
        regions: The peer's: an image must lie inside one of them.
    """
    if not policy.image_bytes or policy.landing == "direct":
        return Chosen(list(contributions), (), ())
    alike: dict[object, list[Contribution]] = defaultdict(list)
    for contribution in contributions:
        alike[contribution.stratum, contribution.memories].append(contribution)
    direct: list[Contribution] = []
    bulk: list[tuple[Contribution, tuple[Image, ...]]] = []
    choices = []
    for members in alike.values():
        able = list(_able(members, policy, regions))
        choice, landed = _choose_alike(members, able, policy, edges)
        choices.append(choice)
        bulk += landed
        in_bulk = {id(member) for member, _ in landed}
        direct += [member for member in members if id(member) not in in_bulk]
    return Chosen(direct, tuple(_sections(bulk)), tuple(choices))


_Able = tuple["Contribution", tuple[Image, ...]]


def _choose_alike(
    members: Sequence[Contribution],
    able: Sequence[_Able],
    policy: LandingPolicy,
    edges: Edges,
) -> tuple[Choice, Sequence[_Able]]:
    """By each part alone first, then by what becomes of all of them together."""
    group = members[0].stratum.group
    direct = _direct(members, policy, edges)
    if not able:
        return Choice(group, "direct", direct, None), ()
    better = able
    if policy.landing == "auto":
        better = [
            (member, images)
            for member, images in able
            if _bulk(member, images, policy).seconds < _alone(member, policy)
        ] or able
    landed = {id(member) for member, _ in better}
    rest = [member for member in members if id(member) not in landed]
    parts = [_bulk(member, images, policy) for member, images in better]
    bulk = _together([*parts, *([_direct(rest, policy, edges)] if rest else [])])
    if policy.landing == "auto" and bulk.seconds >= direct.seconds:
        return Choice(group, "direct", direct, bulk), ()
    return Choice(group, "bulk", direct, bulk), better


def _direct(
    members: Sequence[Contribution], policy: LandingPolicy, edges: Edges
) -> Estimate:
    runs = joined_runs(members, edges)
    places = members[0].stratum.remote_places
    size, count = int(runs.sum()) * places, runs.size * places
    return Estimate(size, count, int(runs.min()), policy.cost.read_s(size, count))


def _alone(member: Contribution, policy: LandingPolicy) -> float:
    count = member.pieces.local.size * member.stratum.remote_places
    return policy.cost.read_s(count * member.pieces.run_bytes, count)


def _bulk(
    member: Contribution, images: Sequence[Image], policy: LandingPolicy
) -> Estimate:
    key, longest = member.stratum, images[0].image_bytes
    # A state is a slot or two; of tokens there are many.
    blocks = TYPICAL_TOKENS // key.remote.kernel_tokens if key.unit_tokens else 1
    blocks = max(min(blocks, policy.image_bytes // longest), 1)
    runs = member.pieces.local.size * key.remote_places
    size = longest * len(images)
    seconds = policy.cost.read_s(size, len(images)) + policy.cost.copy_s(
        runs * member.pieces.run_bytes, runs, len(images) / blocks
    )
    return Estimate(size, len(images), longest, seconds)


def _together(parts: Sequence[Estimate]) -> Estimate:
    return Estimate(
        sum(part.bytes for part in parts),
        sum(part.descriptors for part in parts),
        min(part.shortest_run for part in parts),
        sum(part.seconds for part in parts),
    )


def _able(
    members: Iterable[Contribution], policy: LandingPolicy, regions: Sequence[Region]
) -> Iterator[_Able]:
    found = [(member, tuple(_images(member, policy))) for member in members]
    found = [
        (member, images)
        for member, images in found
        if images and min(image.row[0] for image in images) >= 0
    ]
    if not found:
        return
    rows = np.array([i.row for _, images in found for i in images], dtype=np.uint64)
    # Outside: two allocations with a gap between them, perhaps.
    outside = are_outside(rows, regions, memory=found[0][0].memories[1]).tolist()
    first = 0
    for member, images in found:
        last = first + len(images)
        if not any(outside[first:last]):
            yield member, images
        first = last


def _images(member: Contribution, policy: LandingPolicy) -> Iterator[Image]:
    """The images of one part; none if a block's units do not fit into one."""
    key, pieces = member.stratum, member.pieces
    places = (
        Loop(key.local_places, pieces.local_step, 0),
        Loop(key.remote_places, 0, pieces.remote_step),
    )
    # One that is longer than a block would share bytes with its neighbours.
    limit = min(policy.image_bytes, member.remote_stride)
    nest = sorted((*pieces.loops, places[1]), key=lambda i: abs(i.remote_stride))
    reach, inside, outside = pieces.run_bytes, [], []
    for loop in nest:
        longer = reach + (loop.size - 1) * abs(loop.remote_stride)
        hole = longer - loop.size * reach
        if longer <= limit and policy.cost.spans(hole, loop.size - 1):
            reach = longer
            inside.append(loop)
        else:
            outside.append(loop)
    split = math.prod(loop.size for loop in outside)
    blocks = key.remote.kernel_blocks
    if (
        places[1] in outside
        or min(pieces.local_step, pieces.remote_step) < 0
        or not reach <= limit
        or split > min(MAX_IMAGES, MAX_DESCRIPTORS // blocks)
    ):
        return
    below = sum((i.size - 1) * min(i.remote_stride, 0) for i in inside)
    inside.remove(places[1])
    first = member.remote_address + int(pieces.remote[0]) + below
    for steps in itertools.product(*(range(loop.size) for loop in outside)):
        here = sum(n * i.local_stride for n, i in zip(steps, outside, strict=True))
        there = sum(n * i.remote_stride for n, i in zip(steps, outside, strict=True))
        yield Image(
            (first + there, reach, member.remote_device, member.remote_stride, blocks),
            member.local_address + int(pieces.local[0]) + here,
            -below,
            pieces.run_bytes,
            tuple(inside),
            places,
            member.local_stride,
        )


def _sections(bulk: Iterable[_Able]) -> Iterator[BulkSection]:
    alike: dict[tuple[StratumKey, tuple[Memory, Memory], int, int], list[Image]]
    alike = defaultdict(list)
    for member, images in bulk:
        place = (member.stratum, member.memories, member.local_device)
        for image in images:
            alike[*place, image.image_bytes].append(image)
    for (key, memories, device, size), members in alike.items():
        most = MAX_DESCRIPTORS // key.remote.kernel_blocks
        for first in range(0, len(members), most):
            images = tuple(members[first : first + most])
            rows = np.array([image.row for image in images], dtype=np.uint64)
            yield BulkSection(key, memories[0], device, memories[1], size, images, rows)
