"""What moving bytes costs, in seconds: small sums that choose how a plan lands.

Pure arithmetic on counts. Owned here: the constants, and what an estimate is. The
choice itself is made where the counts are (`kvferry.engine.images`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ("CostModel", "Estimate", "Landing", "LandingPolicy")

Landing = Literal["auto", "direct", "bulk"]
"""How runs land: ``direct``, each at its place; ``bulk``, in a staging buffer, from
where a copy on the destination's device puts them in place; ``auto``, what the cost
model says is faster."""


class Estimate(NamedTuple):
    """What a kernel block of the producer costs in one way of landing.

    Attributes:
        bytes: Read from the producer.
        descriptors: Runs that they come in.
        shortest_run: Bytes of the shortest of them.
        seconds: By the cost model.
    """

    bytes: int
    descriptors: int
    shortest_run: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds for each thing a transfer does.

    The defaults are rounded from measurements on one host (UCX over ``cma``, host
    memory, one core; ``benchmarks/landing.py`` measures them anew). Over
    ``UCX_TLS=tcp`` a descriptor cost 5 us and a byte 0.5 ns, and over a network with
    RDMA 0.3 us a descriptor are seen: all of these have their break-even at runs of 1
    to 8 KiB, so that a constant that is off by two costs little.

    Attributes:
        byte_s: A byte that is read from the producer.
        descriptor_s: A run that is read, on top of its bytes.
        copied_byte_s: A byte that is copied from the staging buffer to its place.
        copied_run_s: A run that is copied, on top of its bytes.
        operation_s: An indexed copy, however much it copies.
    """

    byte_s: float = 0.15e-9
    descriptor_s: float = 2.5e-6
    copied_byte_s: float = 0.3e-9
    copied_run_s: float = 4e-9
    operation_s: float = 20e-6

    def read_s(self, size: int, descriptors: int) -> float:
        """Seconds to read so many bytes in so many runs."""
        return size * self.byte_s + descriptors * self.descriptor_s

    def copy_s(self, size: int, runs: int, operations: float) -> float:
        """Seconds to put so many bytes in place."""
        return (
            size * self.copied_byte_s
            + runs * self.copied_run_s
            + operations * self.operation_s
        )

    def spans(self, hole_bytes: int, joins: int) -> bool:
        """Whether reading a hole costs less than the descriptors it saves."""
        return hole_bytes * self.byte_s <= joins * self.descriptor_s


@dataclass(frozen=True, kw_only=True)
class LandingPolicy:
    """What a planner may choose from.

    Attributes:
        landing: The choice, or ``auto``.
        image_bytes: Longest stretch that the staging buffer can take; 0 has none.
    """

    landing: Landing = "direct"
    image_bytes: int = 0
    cost: CostModel = CostModel()
