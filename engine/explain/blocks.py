"""One block of one field, run by run: what `drawing` puts on a page.

Owned here: which bytes of one kernel block of the consumer come from which bytes
of which producers' kernel blocks, and what is in them. Not here: where a run
stands on the page.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvferry.engine.explain.shares import Share, shares_of
from kvferry.protocol.errors import MisuseError
from kvferry.protocol.layout import SHARD_AXIS, TOKEN_AXIS

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from kvferry.engine.plan import Plan
    from kvferry.engine.spans import Context, Ids

__all__ = ("Run", "runs_of", "shares_of_field")

_COUNTED = (SHARD_AXIS, TOKEN_AXIS)


class Run(NamedTuple):
    """One run of one block.

    Attributes:
        key: The rank it comes from.
        local: Address in the consumer's block 0.
        remote: Address in the producer's kernel block.
        block: Which of the producer's kernel blocks, counted from token 0.
        text: What is in it, axis by axis.
    """

    key: Hashable
    local: int
    remote: int
    block: int
    run_bytes: int
    text: str


def shares_of_field(
    plan: Plan[Any], group: str | None, layer: str | None, field: str | None
) -> list[tuple[Hashable, Share]]:
    """By rank, the shares of the first field of these names; None is any name.

    Raises:
        MisuseError: The plan has no such field.
    """
    found: dict[tuple[str, str, str], list[tuple[Hashable, Share]]] = defaultdict(list)
    for key, peer in plan.peers.items():
        for share in shares_of(plan, peer):
            names = (share.stratum.group, share.field.layer, share.field.name)
            if all(
                wanted in {None, name}
                for wanted, name in zip((group, layer, field), names, strict=True)
            ):
                found[names].append((key, share))
    if not found:
        raise MisuseError(
            f"nothing is read for group {group!r}, layer {layer!r}, field {field!r}"
            " (None is any)"
        )
    return next(iter(found.values()))


def runs_of(key: Hashable, share: Share) -> Iterator[Run]:
    """The runs of a share in the consumer's first kernel block, unit by unit."""
    stratum = share.stratum
    unit, there = stratum.unit_tokens, stratum.remote
    nest = list(product(*(range(step.size) for step in share.nest)))
    own = np.arange(stratum.local_places, dtype=np.int64) * unit
    tokens = _absolute(stratum.local.context, own)
    for place, token in enumerate(tokens.tolist()):
        held = there.context.held(tokens[place : place + 1])
        if not len(held):
            continue
        theirs = int(there.context.own(held)[0])
        block, rest = divmod(theirs, there.kernel_tokens) if unit else (0, 0)
        local = share.local_address + place * share.local_step
        remote = (
            share.remote_address + (rest // unit if unit else 0) * share.remote_step
        )
        for indices in nest:
            steps = list(zip(indices, share.nest, strict=True))
            yield Run(
                key,
                local + sum(i * step.local_stride for i, step in steps),
                remote + sum(i * step.remote_stride for i, step in steps),
                block,
                share.run_bytes,
                _contents(share, token, {step.axis: i for i, step in steps}),
            )


def _absolute(context: Context, own: Ids) -> Ids:
    """The tokens at own positions: `Context.own` the other way round."""
    turn, rest = own // context.interleave, own % context.interleave
    return (turn * context.size + context.rank) * context.interleave + rest


def _contents(share: Share, token: int, index: Mapping[str, int]) -> str:
    """``k1 h3 n0-15``: axes that the run has absorbed are ranges."""
    parts = [f"{axis}{i}" for axis, i in index.items() if axis not in _COUNTED]
    if share.part.name != share.field.name:
        parts.insert(0, share.part.name)
    if share.part.shard.total > 1:
        parts.append(_range(SHARD_AXIS, share.first, share.last, index))
    if unit := share.stratum.unit_tokens:
        parts.append(_range(TOKEN_AXIS, token, token + unit, index))
    return " ".join(parts)


def _range(axis: str, first: int, last: int, index: Mapping[str, int]) -> str:
    if axis in index:
        return f"{axis}{first + index[axis]}"
    return f"{axis}{first}" if last - first == 1 else f"{axis}{first}-{last - 1}"
