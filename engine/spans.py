"""Block ids and token positions: where a group's tokens lie in one side's blocks.

Positions rule, never counts: a `Span` says at which absolute token its list of
block ids begins, and everything here is arithmetic on absolute tokens. Owned
here: what a valid list of ids is, and how a logical id becomes kernel blocks.
Not here: what the bytes of a block look like (`kvferry.engine.runs`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.protocol.errors import ImpossiblePlan, UnknownBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvferry.protocol.layout import FieldLayout, GroupLayout

    Ids = npt.NDArray[np.int64]

__all__ = (
    "ABSENT",
    "Context",
    "Placement",
    "Side",
    "Span",
    "are_inside",
    "as_array",
    "kernel_ids",
    "plain_ids",
    "span_ids",
)

INT64 = np.dtype(np.int64)

ABSENT = -(2**62)
"""Stands for ``None`` in an array of block ids; no real id comes near it."""


@dataclass(frozen=True, slots=True)
class Span:
    """The logical block ids of one group, and the token where the list begins.

    Attributes:
        block_ids: Logical ids in token order; ``None`` where a window dropped the
            block. Slots for a state group. A request reads it as it begins, and
            keeps what it was then.
        first_token: Absolute position of the first token of the first block; a
            multiple of the logical block size (times the context size).
    """

    block_ids: Sequence[int | None] | npt.NDArray[np.integer]
    first_token: int = 0


def span_ids(span: Span, *, group: str, side: str) -> Ids:
    """The ids of a span as an array, `ABSENT` for ``None``.

    Raises:
        UnknownBlock: An id is not an integer, or is beyond 64 bits.
    """
    given = span.block_ids
    if isinstance(given, np.ndarray) and given.dtype is INT64 and given.ndim == 1:
        return given  # type: ignore[return-value] # as it says; most often `as_array`'s
    if isinstance(given, list | tuple) and given and not isinstance(given[0], bool):
        # As schedulers have them, at a third of what numpy takes to find out.
        try:
            return np.asarray(array("q", given)).view(INT64)
        except (TypeError, OverflowError):  # a None, or none at all
            return _odd_ids(span, group=group, side=side)
    return _odd_ids(span, group=group, side=side)


def _odd_ids(span: Span, *, group: str, side: str) -> Ids:
    """As `span_ids`, of whatever else there is."""
    try:
        ids = np.asarray(span.block_ids)
        if ids.dtype.kind == "O":
            ids = np.asarray([ABSENT if i is None else i for i in span.block_ids])
        if ids.size == 0:
            return np.empty(0, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as exc:
        raise UnknownBlock(
            f"group {group!r}: the {side} block ids are not a list of integers: {exc}"
        ) from exc
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise UnknownBlock(
            f"group {group!r}: the {side} block ids are not a list of integers but"
            f" {ids.dtype} of {ids.ndim} axes"
        )
    return ids.astype(np.int64, copy=False, casting="unsafe")


def as_array(span: Span, *, group: str, side: str) -> Span:
    """The same span with its ids as `span_ids` has them: for many uses.

    They are its own, whatever becomes of what the caller gave.

    Raises:
        UnknownBlock: As `span_ids`.
    """
    return Span(span_ids(span, group=group, side=side).copy(), span.first_token)


def plain_ids(ids: Ids) -> tuple[int | None, ...]:
    """Ids as messages have them, ``None`` for `ABSENT`."""
    return tuple(None if block == ABSENT else block for block in ids.tolist())


def are_inside(ids: Ids, *, blocks: int) -> bool:
    """Whether every id is inside its pool, and none absent."""
    # One look for both ends: without its sign a negative id is above all others.
    # As an int of Python, which numpy's takes long to be compared with.
    return not ids.size or int(np.maximum.reduce(ids.view(np.uint64))) < blocks


def check_ids(ids: Ids, *, blocks: int, group: str, side: str) -> bool:
    """Whether every id is inside its pool; if not, those that are not are absent.

    Raises:
        UnknownBlock: With the first id that is neither, its index and the pool's size.
    """
    if are_inside(ids, blocks=blocks):
        return True
    wrong = np.flatnonzero((ids != ABSENT) & ((ids < 0) | (ids >= blocks)))
    if wrong.size:
        index = int(wrong[0])
        raise UnknownBlock(
            f"group {group!r}: {side} block id {int(ids[index])} at index {index} is"
            f" outside the pool of {blocks} blocks"
        )
    return False


def check_distinct(ids: Ids, *, group: str, side: str) -> None:
    """No block is listed twice: its bytes would be written twice.

    Raises:
        UnknownBlock: With the first id that is.
    """
    if ids.size < 2:
        return
    ordered = np.sort(ids)
    is_repeated = ordered[1:] == ordered[:-1]
    if not is_repeated.any():
        return
    repeated = ordered[1:][is_repeated & (ordered[1:] != ABSENT)]
    if repeated.size:
        raise UnknownBlock(
            f"group {group!r}: {side} block id {int(repeated[0])} is listed twice"
        )


def kernel_ids(block_ids: Ids, *, ratio: int) -> Ids:
    """Each logical block as the kernel blocks it consists of, in token order.

    ``[5, 9]`` with two kernel blocks each is ``[10, 11, 18, 19]`` (case g7).
    """
    return (block_ids[:, None] * ratio + np.arange(ratio)).ravel()


class Context(NamedTuple):
    """Context parallelism: token ``t`` is here if ``t // interleave % size == rank``.

    Only tokens that are here take up places; a token's *own* position is its
    number among them.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def held(self, tokens: range | Ids) -> range | Ids:
        """Those of the tokens that are here; a range if they all are."""
        if self.size == 1:
            return tokens
        tokens = np.asarray(tokens)
        held: Ids = tokens[tokens // self.interleave % self.size == self.rank]
        return held

    def own(self, tokens: range | Ids) -> range | Ids:
        """Own positions of tokens that are here; a range is of all there are."""
        if self.size == 1:
            return tokens
        turn = self.interleave * self.size
        tokens = np.asarray(tokens)
        return tokens // turn * self.interleave + tokens % self.interleave

    def own_before(self, token: int) -> int:
        """How many tokens before this one are here."""
        if self.size == 1:
            return token
        turns, rest = divmod(token, self.interleave * self.size)
        mine = min(max(rest - self.rank * self.interleave, 0), self.interleave)
        return turns * self.interleave + mine


class Side(NamedTuple):
    """One side's numbers for fields whose blocks are divided alike.

    Attributes:
        block_size: Own tokens in a logical block; 0 for a state.
        blocks: Logical blocks in the pool.
        kernel_tokens: Own tokens in a kernel block; 0 for a state.
        kernel_blocks: Kernel blocks in the pool.
        context: Which tokens are here.
    """

    block_size: int
    blocks: int
    kernel_tokens: int
    kernel_blocks: int
    context: Context = Context()

    @classmethod
    def of(cls, group: GroupLayout, field: FieldLayout | None = None) -> Side:
        """The numbers of a field; without one, kernel blocks are logical blocks."""
        return cls(
            group.block_size,
            group.blocks,
            field.block_tokens if field else group.block_size,
            field.blocks if field else group.blocks,
            Context(group.context_size, group.context_rank, group.context_interleave),
        )

    @property
    def span_grain(self) -> int:
        """A span's first token is a multiple of this many tokens."""
        return self.block_size * self.context.size


class Placement(NamedTuple):
    """One span, checked, against one side's numbers.

    Attributes:
        ids: Logical ids, `ABSENT` for none; inside the pool.
        first_token, end_token: Absolute; what the span holds is in between.
        origin: Blocks of this side before the first of them.
        is_full: None of them is absent.
        group, name: The group and ``local`` or ``remote``, for messages.
    """

    side: Side
    ids: Ids
    first_token: int
    end_token: int
    origin: int
    is_full: bool
    group: str
    name: str

    @classmethod
    def of(
        cls, side: Side, span: Span, ids: Ids, *, group: str, name: str
    ) -> Placement:
        """Check a span's ids and its beginning.

        Raises:
            UnknownBlock: An id outside the pool.
            ImpossiblePlan: The span does not begin at a block boundary.
        """
        is_full = check_ids(ids, blocks=side.blocks, group=group, side=name)
        first, grain = span.first_token, side.span_grain
        if first < 0 or (first % grain if grain else first):
            rule = f"a multiple of the block size {grain}" if grain else "0: a state"
            raise ImpossiblePlan(
                f"group {group!r}: the {name} span begins at token {first}, not at"
                f" {rule}"
            )
        origin = first // grain if grain else 0
        end = first + ids.size * grain
        return cls(side, ids, first, end, origin, is_full, group, name)

    def check_reach(self, first: int, last: int) -> None:
        """Refuse tokens far beyond the span before anything is made for each of them.

        How many there are may be a peer's word. `units` looks at each, and knows
        which of the last block's are here.

        Raises:
            UnknownBlock: ``last`` is more than a block behind the span.
        """
        if last > self.end_token and last - self.end_token > self.side.span_grain:
            self._refuse(first, last, max(first, self.end_token))

    def units(self, tokens: range | Ids, unit_tokens: int) -> Ids:
        """Row place and kernel block of the units that begin at ``tokens``.

        Args:
            tokens: Absolute, ascending, multiples of the unit, all of them here; a
                range if they are all that there are.
            unit_tokens: Divides the kernel block.

        Returns:
            ``place * kernel_blocks + kernel block`` for each unit.

        Raises:
            UnknownBlock: A token is outside the span, or its block is absent.
        """
        side = self.side
        own = side.context.own(tokens)
        begin = int(own[0]) // side.block_size - self.origin
        end = int(own[-1]) // side.block_size - self.origin + 1
        if begin < 0 or end > self.ids.size:
            self._refuse_outside(tokens)
        if not self.is_full:
            self._check_present(tokens, own)
        # All units of these blocks in order, and of them those that are wanted.
        ids = self._unit_ids(self.ids[begin:end], unit_tokens)
        before = (self.origin + begin) * (side.block_size // unit_tokens)
        if isinstance(own, range):
            first = own.start // unit_tokens - before
            return ids[first : first + len(own)]
        return ids[own // unit_tokens - before]

    def _unit_ids(self, block_ids: Ids, unit_tokens: int) -> Ids:
        side = self.side
        if side.block_size == unit_tokens:
            return block_ids
        places = np.arange(side.kernel_tokens // unit_tokens) * side.kernel_blocks
        ratio = side.block_size // side.kernel_tokens
        of_block = (np.arange(ratio)[:, None] + places).ravel()
        return (block_ids[:, None] * ratio + of_block).ravel()

    def tail(self, token: int) -> tuple[Ids, int]:
        """The present blocks from an absolute token to the end of the span.

        Returns:
            Logical ids, and the first slot in the first of them.
        """
        own = self.side.context.own_before(max(token, self.first_token))
        index, slot = divmod(own, self.side.block_size)
        ids = self.ids[index - self.origin :]
        if not self.is_full and ids.size:
            slot = 0 if ids[0] == ABSENT else slot
            ids = ids[ids != ABSENT]
        return ids, slot if ids.size else 0

    def _index(self, own: range | Ids) -> Ids:
        """Where in the list each of these own positions is."""
        return np.asarray(own) // self.side.block_size - self.origin

    def _refuse_outside(self, tokens: range | Ids) -> None:
        index = self._index(self.side.context.own(tokens))
        outside = (index < 0) | (index >= self.ids.size)
        missing = np.asarray(tokens)[outside]
        self._refuse(int(tokens[0]), int(tokens[-1]) + 1, int(missing[0]))

    def _check_present(self, tokens: range | Ids, own: range | Ids) -> None:
        index = self._index(own)
        absent = np.flatnonzero(self.ids[index] < 0)
        if absent.size:
            wrong = int(absent[0])
            raise UnknownBlock(
                f"group {self.group!r}: token {int(tokens[wrong])} is needed, but the"
                f" {self.name} block at index {int(index[wrong])} is None"
            )

    def _refuse(self, first: int, last: int, missing: int) -> None:
        raise UnknownBlock(
            f"group {self.group!r}: tokens [{first}, {last}) and"
            f" what shares their units are needed, but the {self.name} span of"
            f" {self.ids.size} blocks holds [{self.first_token}, {self.end_token});"
            f" token {missing} is not in it"
        )
