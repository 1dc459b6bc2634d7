"""Prepared rows: the pieces of many layers as row arrays that a fabric can prepare.

A `Section` is one pair of row arrays, one memory kind on each side. Inside it a
`Stratum` holds the pieces of one group whose blocks are divided alike on both
sides, so that a request's descriptor ids are one outer sum per stratum:
``base of the piece + place * kernel blocks + kernel block``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from kvferry.protocol.errors import ImpossiblePlan

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from kvferry.engine.images import BulkSection, Choice
    from kvferry.engine.runs import Pieces
    from kvferry.engine.spans import Side
    from kvferry.protocol.layout import Memory

    Rows = npt.NDArray[np.uint64]

__all__ = (
    "MAX_DESCRIPTORS",
    "MAX_ROWS",
    "Contribution",
    "PeerPlan",
    "Section",
    "Stratum",
    "StratumKey",
    "build_sections",
    "joined_runs",
)

MAX_DESCRIPTORS = 2**31 - 1
"""Most descriptors of one prepared list: ids are int32 (nixl-facts row 12)."""

MAX_ROWS = 2**20
"""Most rows of one plan: what peers' layouts may cost us, in memory and in time.

They are counted before runs are joined, and before anything is made of them: so many
take a second and a quarter of a gigabyte. Head by head and token by token, 128 layers
of 16 heads in blocks of 128 tokens come to half of it.
"""

KeyT = TypeVar("KeyT", bound="Hashable")


class StratumKey(NamedTuple):
    """What the fields of a stratum have in common; ``unit_tokens`` is 0 for a state."""

    group: str
    local: Side
    remote: Side
    unit_tokens: int

    @property
    def local_places(self) -> int:
        """Units in a local kernel block."""
        return self.local.kernel_tokens // self.unit_tokens if self.unit_tokens else 1

    @property
    def remote_places(self) -> int:
        """Units in a remote kernel block."""
        return self.remote.kernel_tokens // self.unit_tokens if self.unit_tokens else 1


class Contribution(NamedTuple):
    """The pieces of one part of one layer's field, with what places them in memory."""

    stratum: StratumKey
    memories: tuple[Memory, Memory]
    pieces: Pieces
    local_address: int
    remote_address: int
    local_device: int
    remote_device: int
    local_stride: int
    remote_stride: int

    @property
    def most_descriptors(self) -> int:
        """Descriptors on the side that has more of them."""
        key = self.stratum
        local = key.local_places * key.local.kernel_blocks
        remote = key.remote_places * key.remote.kernel_blocks
        return self.pieces.local.size * max(local, remote)

    @property
    def most_rows(self) -> int:
        """Rows on the side that has more of them, before any are joined."""
        key = self.stratum
        return self.pieces.local.size * max(key.local_places, key.remote_places)

    @property
    def placing(self) -> tuple[int, ...]:
        """Pieces that agree in this lie alike relative to each other at every unit."""
        steps = (self.pieces.local_step, self.pieces.remote_step)
        return (*steps, *self[5:])


@dataclass(frozen=True, slots=True, eq=False)
class Stratum:
    """Pieces of one group that are at the same units of their blocks.

    Attributes:
        key: Group, sides and unit.
        local_base, remote_base: Descriptor id of each piece at place 0 of kernel
            block 0, int32 ``[P]``.
        run_bytes: Length of each piece, int64 ``[P]``.
        stretches: Neighbouring pieces of one length: it, and how many they are.
        unit_bytes: Bytes of all pieces at one unit.
    """

    key: StratumKey
    local_base: npt.NDArray[np.int32]
    remote_base: npt.NDArray[np.int32]
    run_bytes: npt.NDArray[np.int64]
    stretches: tuple[tuple[int, int], ...]
    unit_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """Two row arrays to prepare, and what their descriptors mean.

    Attributes:
        local_rows, remote_rows: uint64 ``[N, 5]``, columns as in
            `kvferry.engine.fabric.base.ROW_COLUMNS`.
    """

    local_memory: Memory
    remote_memory: Memory
    local_rows: Rows
    remote_rows: Rows
    strata: tuple[Stratum, ...]

    def local_rows_by_stratum(self) -> Iterator[tuple[Stratum, Rows]]:
        """Each stratum with its local rows: they lie one behind the other."""
        first = 0
        for stratum in self.strata:
            last = first + stratum.run_bytes.size * stratum.key.local_places
            yield stratum, self.local_rows[first:last]
            first = last

    def mirrored(self) -> Section:
        """Seen from the producer, which then is the local side: for a push.

        For preparing only; requests are selected on the plan as it was made.
        """
        return Section(
            self.remote_memory,
            self.local_memory,
            self.remote_rows,
            self.local_rows,
            self.strata,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PeerPlan(Generic[KeyT]):
    """Everything to prepare for one remote rank; no sections if nothing is read there.

    Attributes:
        key: The rank.
        sections: What lands at its place.
        bulk: What lands in a staging buffer; numbered behind the sections.
        choices: Why, if there was a choice.
    """

    key: KeyT
    sections: tuple[Section, ...]
    bulk: tuple[BulkSection, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def rows(self) -> int:
        """How many rows there are to prepare, on the side that has more."""
        return sum(
            max(len(section.local_rows), len(section.remote_rows))
            for section in self.sections
        ) + sum(len(section.remote_rows) for section in self.bulk)

    @property
    def rows_bytes(self) -> int:
        """Memory of the row and base arrays."""
        return sum(
            section.local_rows.nbytes
            + section.remote_rows.nbytes
            + sum(
                s.local_base.nbytes + s.remote_base.nbytes + s.run_bytes.nbytes
                for s in section.strata
            )
            for section in self.sections
        ) + sum(section.remote_rows.nbytes for section in self.bulk)


def build_sections(
    contributions: Iterable[Contribution],
    *,
    local_edges: npt.NDArray[np.int64],
    remote_edges: npt.NDArray[np.int64],
) -> tuple[Section, ...]:
    """Pack contributions into sections.

    Args:
        contributions: In any order.
        local_edges, remote_edges: Where registered regions begin: no run is joined
            across them.

    Raises:
        ImpossiblePlan: A piece with too many descriptors.
    """
    return tuple(
        _build_section(memories, bucket, (local_edges, remote_edges))
        for memories, bucket in _buckets(contributions)
    )


def _buckets(
    contributions: Iterable[Contribution],
) -> Iterator[tuple[tuple[Memory, Memory], list[Contribution]]]:
    by_memory: dict[tuple[Memory, Memory], list[Contribution]] = defaultdict(list)
    for contribution in contributions:
        by_memory[contribution.memories].append(contribution)
    for memories, members in by_memory.items():
        bucket: list[Contribution] = []
        total = 0
        for member in members:
            most = member.most_descriptors
            if most > MAX_DESCRIPTORS:
                raise ImpossiblePlan(
                    f"group {member.stratum.group!r}: one part needs {most}"
                    f" descriptors, at most {MAX_DESCRIPTORS} can be numbered"
                )
            if total + most > MAX_DESCRIPTORS:
                yield memories, bucket
                bucket, total = [], 0
            bucket.append(member)
            total += most
        yield memories, bucket


class _Columns(NamedTuple):
    """The pieces of a stratum, one element each: ``[P]`` int64."""

    local: npt.NDArray[np.int64]
    remote: npt.NDArray[np.int64]
    run: npt.NDArray[np.int64]
    placing: npt.NDArray[np.int64]


def _build_section(
    memories: tuple[Memory, Memory],
    bucket: Sequence[Contribution],
    edges: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> Section:
    by_stratum: dict[StratumKey, list[Contribution]] = defaultdict(list)
    for member in bucket:
        by_stratum[member.stratum].append(member)
    strata, local_rows, remote_rows = [], [], []
    local_first = remote_first = 0
    for key, members in by_stratum.items():
        placings = list(dict.fromkeys(member.placing for member in members))
        columns = _joined(_columns(members, placings), edges)
        pieces = columns.run.size
        # local step, remote step, local device, remote device, local and remote stride
        placing = np.array(placings, dtype=np.int64)[columns.placing]
        local_count = key.local_places * key.local.kernel_blocks
        remote_count = key.remote_places * key.remote.kernel_blocks
        local_rows.append(
            _rows(columns, columns.local, placing[:, 0::2], key.local_places, key.local)
        )
        remote_rows.append(
            _rows(
                columns, columns.remote, placing[:, 1::2], key.remote_places, key.remote
            )
        )
        steps = np.arange(pieces, dtype=np.int64)
        strata.append(
            Stratum(
                key,
                (local_first + steps * local_count).astype(np.int32),
                (remote_first + steps * remote_count).astype(np.int32),
                columns.run,
                tuple(
                    (run, len(list(same)))
                    for run, same in groupby(columns.run.tolist())
                ),
                int(columns.run.sum()),
            )
        )
        local_first += pieces * local_count
        remote_first += pieces * remote_count
    return Section(
        *memories,
        np.concatenate(local_rows),
        np.concatenate(remote_rows),
        tuple(strata),
    )


def _columns(
    members: Sequence[Contribution], placings: Sequence[tuple[int, ...]]
) -> _Columns:
    numbers = {placing: number for number, placing in enumerate(placings)}
    sizes = [member.pieces.local.size for member in members]
    return _Columns(
        np.concatenate([m.pieces.local for m in members])
        + np.repeat([m.local_address for m in members], sizes),
        np.concatenate([m.pieces.remote for m in members])
        + np.repeat([m.remote_address for m in members], sizes),
        np.repeat([m.pieces.run_bytes for m in members], sizes),
        np.repeat([numbers[m.placing] for m in members], sizes),
    )


def _joined(
    columns: _Columns, edges: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
) -> _Columns:
    """Join neighbours that are contiguous on both sides, in order of local address.

    Layers or parts that lie behind each other in one block on both sides become
    one run. Two pieces of one placing that are neighbours at one unit are so at
    every unit.
    """
    order = np.lexsort((columns.local, columns.placing))
    local, remote, run, placing = (column[order] for column in columns)
    continues = (
        (placing[1:] == placing[:-1])
        & (local[1:] == local[:-1] + run[:-1])
        & (remote[1:] == remote[:-1] + run[:-1])
    )
    if not continues.any():
        return _Columns(local, remote, run, placing)
    continues &= ~np.isin(local[1:], edges[0]) & ~np.isin(remote[1:], edges[1])
    heads = np.flatnonzero(np.concatenate(([True], ~continues)))
    return _Columns(
        local[heads], remote[heads], np.add.reduceat(run, heads), placing[heads]
    )


def joined_runs(
    members: Sequence[Contribution],
    edges: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> npt.NDArray[np.int64]:
    """Lengths of the runs that some contributions of one stratum come to at a unit."""
    placings = list(dict.fromkeys(member.placing for member in members))
    return _joined(_columns(members, placings), edges).run


def _rows(
    columns: _Columns,
    addresses: npt.NDArray[np.int64],
    placing: npt.NDArray[np.int64],
    places: int,
    side: Side,
) -> Rows:
    """One row per piece and place, places fastest; placing is step, device, stride."""
    rows = np.empty((addresses.size, places, 5), dtype=np.uint64)
    rows[:, :, 0] = addresses[:, None] + placing[:, :1] * np.arange(places)
    rows[:, :, 1] = columns.run[:, None]
    rows[:, :, 2] = placing[:, 1:2]
    # The stride of a pool of one block says nothing, and transports refuse one
    # that is shorter than the run.
    one = side.kernel_blocks == 1
    rows[:, :, 3] = columns.run[:, None] if one else placing[:, 2:3]
    rows[:, :, 4] = side.kernel_blocks
    return rows.reshape(-1, 5)
