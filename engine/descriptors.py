"""`DescriptorIds`: which descriptors a section's waves post, computed wave by wave."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

__all__ = ("DescriptorIds",)

IntT = TypeVar("IntT", bound="np.integer")


class DescriptorIds:
    """int32 descriptor ids ``[D]`` that are computed where a wave needs them.

    A request of 40 GB has half a million; all at once they would hold up the loop.
    Slices of it, and `numpy.asarray` of it, are arrays of their own.

    Args:
        grids: Pairs of int32 arrays ``[R]`` and ``[U]``: each is the ids
            ``rows[:, None] + units``, one grid behind the other.
    """

    def __init__(
        self,
        grids: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = (),
    ) -> None:
        self._grids = grids
        # Lists: what a generator costs, a small request pays a dozen times.
        sizes = [rows.size * units.size for rows, units in grids]
        self._ends = list(accumulate(sizes)) or [0]

    @property
    def size(self) -> int:
        """How many there are."""
        return self._ends[-1]

    def __getitem__(self, wave: slice) -> npt.NDArray[np.int32]:
        """The ids of a slice without a step."""
        first, last, _ = wave.indices(self.size)
        found: list[npt.NDArray[np.int32]] = []
        at = bisect_right(self._ends, first)
        while first < last:
            begin, stop = self._ends[at - 1] if at else 0, min(last, self._ends[at])
            found.append(_grid_ids(*self._grids[at], first - begin, stop - begin))
            first, at = stop, at + 1
        return _joined(found) if found else np.empty(0, dtype=np.int32)

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001 - numpy's protocol
    ) -> npt.NDArray[Any]:
        """All of them."""
        return np.asarray(self[:], dtype=dtype)

    def tolist(self) -> list[int]:
        """All of them."""
        ids: list[int] = self[:].tolist()
        return ids


def _grid_ids(
    rows: npt.NDArray[np.int32], units: npt.NDArray[np.int32], first: int, last: int
) -> npt.NDArray[np.int32]:
    row, at = divmod(first, units.size)
    if last <= (row + 1) * units.size:
        few: npt.NDArray[np.int32] = units[at : at + last - first] + rows[row]
        return few
    some = rows[row : -(-last // units.size)]
    return (some[:, None] + units).ravel()[at : at + last - first]


def _joined(arrays: Sequence[npt.NDArray[IntT]]) -> npt.NDArray[IntT]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
