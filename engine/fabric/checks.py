"""What every fabric checks by itself before its transport sees a row or an id.

The transports check too, but not all of it: a stride that wraps around 64 bits
passes NIXL, and ids past its own check would be a write to anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.engine.fabric.base import MAX_NOTICE_BYTES, ROW_COLUMNS
from kvferry.protocol.errors import ImpossiblePlan, MisuseError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ("MAX_DESCRIPTORS", "check_notice", "check_pair", "check_rows")

MAX_DESCRIPTORS = 2**31 - 1
"""Most descriptors of one `Prepared`: ids are int32."""

ADDRESS_LIMIT = 2**62
"""No real address is as high; sums below it cannot wrap in uint64."""


def check_rows(rows: npt.NDArray[np.uint64]) -> int:
    """Refuse rows that no registered memory can hold; return their descriptors.

    Raises:
        ImpossiblePlan: A wrong shape or type, an empty row, descriptors of one
            row that overlap, or addresses past the end of the address space.
    """
    if rows.dtype != np.uint64 or rows.ndim != 2 or rows.shape[1] != len(ROW_COLUMNS):
        raise ImpossiblePlan(
            f"rows are uint64 [N, {len(ROW_COLUMNS)}], got {rows.dtype} {rows.shape}"
        )
    if len(rows) == 0:
        raise ImpossiblePlan("no rows to prepare")
    address, run, _device, stride, count = rows.T
    if (run == 0).any() or (count == 0).any() or (stride < run).any():
        raise ImpossiblePlan("a row is empty, or its descriptors overlap")
    if (address >= ADDRESS_LIMIT).any() or (run >= ADDRESS_LIMIT).any():
        raise ImpossiblePlan("a row starts or runs past the address space")
    # Not address + stride * (count - 1) <= limit: that product wraps. NIXL takes
    # a row whose stride is 2**63, and its second descriptor is anywhere.
    steps = np.maximum(count, np.uint64(2)) - np.uint64(1)
    room = np.uint64(2 * ADDRESS_LIMIT) - address - run
    if ((stride > room // steps) & (count > 1)).any():
        raise ImpossiblePlan("a row strides past the address space")
    descriptors: int = sum(count.tolist())
    if descriptors > MAX_DESCRIPTORS:
        raise ImpossiblePlan(f"{descriptors} descriptors do not fit int32 ids")
    return descriptors


def check_ids(side: str, ids: npt.NDArray[np.int32], descriptors: int) -> None:
    """Refuse ids that are not int32, contiguous, at least one and all in range.

    Raises:
        ImpossiblePlan: One of these does not hold.
    """
    if ids.dtype != np.int32 or ids.ndim != 1 or not ids.flags.c_contiguous:
        # Others would be converted one by one, slowly (nixl-facts row 13).
        raise ImpossiblePlan(
            f"{side} ids are contiguous int32 [N], got {ids.dtype} {ids.shape}"
        )
    if len(ids) == 0:
        raise ImpossiblePlan(f"no {side} ids")
    # One look for both ends: without its sign a negative id is above all others.
    if np.maximum.reduce(ids.view(np.uint32)) >= descriptors:
        raise ImpossiblePlan(
            f"{side} ids {ids.min()} to {ids.max()} are not all in [0, {descriptors})"
        )


def check_pair(
    local_ids: npt.NDArray[np.int32],
    local_descriptors: int,
    remote_ids: npt.NDArray[np.int32],
    remote_descriptors: int,
) -> None:
    """Refuse two sides that cannot be paired one to one.

    Raises:
        ImpossiblePlan: Ids of either side are wrong, or there are more of one.
    """
    check_ids("local", local_ids, local_descriptors)
    check_ids("remote", remote_ids, remote_descriptors)
    if len(local_ids) != len(remote_ids):
        raise ImpossiblePlan(
            f"{len(local_ids)} local ids against {len(remote_ids)} remote ids"
        )


def check_notice(payload: bytes) -> None:
    """Refuse a notice that a peer would drop.

    Raises:
        MisuseError: It is longer than `MAX_NOTICE_BYTES`.
    """
    if len(payload) > MAX_NOTICE_BYTES:
        raise MisuseError(
            f"a notice of {len(payload)} bytes, the most is {MAX_NOTICE_BYTES}"
        )
