"""`TransferReport` and `PushReport`: what a request that is done says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("PushReport", "TransferReport")


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """A done pull or landing: its coverage was proved, its producers have confirmed.

    Attributes:
        request_id: The request.
        peers: The producer ranks that were read from.
        num_tokens: Tokens the destination now holds; a state group's slots hold
            the state after exactly this many.
        computed_tokens: Tokens the consumer had before.
        bytes: Bytes that were read.
        bulk_bytes: How many of them landed in a staging buffer first; they may have
            holes that nobody needed.
        descriptors: Runs that they came in.
        waves: Bounded posts that the runs were posted in.
        zeroed_tokens: Token slots that the finish stage zeroed, summed over groups.
        phases_s: Seconds spent in each state of the pull (``connecting``,
            ``planned``, ``queued``, ``reading``, ``confirming``, ``finishing``), and of
            ``connecting`` the part that planned, as ``plan``.
        skipped_groups: Groups that the configuration left out.
    """

    request_id: str
    peers: tuple[str, ...]
    num_tokens: int
    computed_tokens: int
    bytes: int
    descriptors: int
    waves: int
    zeroed_tokens: int
    phases_s: Mapping[str, float]
    bulk_bytes: int = 0
    skipped_groups: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """A done push: its coverage was proved, and every rank has said that it landed.

    Attributes:
        request_id: The request.
        peers: The consumer ranks that were written to.
        num_tokens: Tokens in the cache.
        bytes: Bytes that were written, to all of them.
        descriptors: Runs that they went in.
        waves: Bounded posts that the runs were posted in.
        phases_s: Seconds spent in each state of the push: ``open`` until the last
            range was ready, ``committed`` until the last rank had it.
    """

    request_id: str
    peers: tuple[str, ...]
    num_tokens: int
    bytes: int
    descriptors: int
    waves: int
    phases_s: Mapping[str, float]
