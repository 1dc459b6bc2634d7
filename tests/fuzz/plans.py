"""The planner on layouts that a peer may have made up, and requests on the plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvferry.engine.plan import prepare_plan
from kvferry.engine.spans import Span
from kvferry.protocol.layout import (
    Axis,
    CacheLayout,
    FieldLayout,
    GroupLayout,
    PartLayout,
    Region,
    Shard,
)
from tests.fuzz.reader import FAR, Reader
from tests.fuzz.rules import refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BASE = 2**30
BLOCKS, TOKENS = 8, 4
AXES = (Axis("k", 2, 128), Axis("h", 2, 64), Axis("n", TOKENS, 16), Axis("d", 4, 4))


def _attention(layer: str, address: int) -> FieldLayout:
    part = PartLayout("kv", Shard(4, 1, 3), address, AXES)
    return FieldLayout(
        layer, "kv", "f4", 4, "DRAM", 0, BLOCKS, 256, TOKENS, parts=(part,)
    )


def _state(layer: str, address: int) -> FieldLayout:
    parts = (
        PartLayout("x", Shard(8, 0, 4), address, (Axis("h", 4, 8), Axis("w", 2, 4))),
        PartLayout("B", Shard(1, 0, 1), address + 32, (Axis("h", 1, 0),)),
    )
    return FieldLayout(layer, "conv", "f4", 4, "DRAM", 0, 4, 64, 0, parts=parts)


OURS = CacheLayout(
    (Region("DRAM", 0, BASE, 8192),),
    (
        GroupLayout(
            "full",
            TOKENS,
            BLOCKS,
            (_attention("l0", BASE), _attention("l1", BASE + 2048)),
        ),
        GroupLayout("state", 0, 4, (_state("l2", BASE + 4096),)),
    ),
)


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every number of a plain layout is."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from paths(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from paths(value, (*path, index))
    elif isinstance(node, int):
        yield path


PLAIN: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(OURS))
PLACES = tuple(paths(PLAIN))


def hostile(reader: Reader) -> CacheLayout | None:
    """Our own layout with some of its numbers changed; None if no decoder takes it."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(PLAIN))
    for _ in range(reader.below(6)):
        *steps, last = PLACES[int.from_bytes(reader.take(2), "big") % len(PLACES)]
        node = plain
        for step in steps:
            node = node[step]
        node[last] = reader.number(node[last])
    if reader.below(4) == 3:
        group = plain["groups"][0]
        group["fields"] = group["fields"][: reader.below(3)]
        group["window"] = reader.number(8)
    if reader.below(8) == 7:
        _stretch(plain, reader)
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=CacheLayout)
    except (msgspec.ValidationError, OverflowError):
        return None


def _stretch(plain: Any, reader: Reader) -> None:
    """Numbers that agree with each other, and are too large all the same."""
    tokens, blocks = 1 << reader.below(41), 1 << reader.below(41)
    group = plain["groups"][0]
    group.update(block_size=tokens, blocks=blocks)
    for field in group["fields"]:
        field.update(block_tokens=tokens, blocks=blocks, block_stride=tokens * 64)
        for part in field["parts"]:
            part["axes"][2]["size"] = tokens
    plain["regions"][0]["size"] = 2**40


def plan(data: bytes) -> None:
    """Refused, or proved: whatever is planned lies in registered memory on both sides."""
    reader = Reader(data)
    theirs, is_push = hostile(reader), bool(reader.below(2))
    if theirs is None:
        return
    local, remote = (theirs, OURS) if is_push else (OURS, theirs)
    made = refused(partial(prepare_plan, local, {0: remote}, is_partial=is_push))
    if made is None:
        return
    for section in made.peers[0].sections:
        inside(section.local_rows, local.regions)
        inside(section.remote_rows, remote.regions)
    _select(made, reader)


def inside(rows: np.ndarray, regions: Iterable[Region]) -> None:
    """In Python's whole numbers, which do not wrap."""
    for address, run, device, stride, count in rows[
        :: max(1, len(rows) // 64)
    ].tolist():
        last = address + (count - 1) * stride + run
        assert any(
            r.device == device and r.address <= address and last <= r.address + r.size
            for r in regions
        ), (address, run, device, stride, count)


def _select(made: Any, reader: Reader) -> None:
    """A request whose numbers are a peer's."""

    def span(near: int) -> Span:
        ids: list[int | None] = [
            None if reader.below(8) == 7 else reader.below(10)
            for _ in range(reader.below(10))
        ]
        return Span(ids, reader.number(near) if reader.below(3) else near)

    sides = [{name: span(0) for name in made.groups} for _ in range(2)]
    tokens = [reader.number(near) for near in (9, 0)]
    select = partial(
        made.select,
        num_tokens=tokens[0],
        computed_tokens=tokens[1],
        local=sides[0],
        remote=sides[1],
    )
    selection = refused(select)
    if selection is None:
        return
    for parts in selection.peers.values():
        for part in parts:
            section = made.peers[0].sections[part.index]
            for told, rows in (
                (part.local_ids, section.local_rows),
                (part.remote_ids, section.remote_rows),
            ):
                ids = np.asarray(told)
                assert ids.dtype == np.int32
                assert ids.min() >= 0
                assert ids.max() < int(rows[:, 4].sum())


# Seeds: one number changed at a time, and a request that reaches every block.

PLAIN_SPAN = bytes([3, 0, 1, 0, 2, 0, 7, 0])
FAR_SPAN = bytes([3, 0, 1, 0, 9, 0, 8, 0])
SLOTS = bytes([1, 0, 3, 0])
GOOD_TOKENS = bytes([5, 5])


def _request(span: bytes) -> bytes:
    return bytes([0, 0]) + (span + SLOTS) * 2 + GOOD_TOKENS


def _seeds() -> Iterator[bytes]:
    numbers = (
        *(bytes([0, n]) for n in (0, 1, 12)),
        *(bytes([1, n, 0]) for n in range(len(FAR))),
        *(bytes([2, n]) for n in (0, 7, 9, 16)),
        bytes([3, 0, 0]),
    )
    for is_push in (0, 1):
        yield bytes([0, 0, 0, is_push]) + _request(PLAIN_SPAN)[2:]
        for tokens in range(0, 41, 5):
            stretch = bytes([7, tokens, 40 - tokens])
            yield bytes([0, 0]) + stretch + bytes([is_push]) + _request(PLAIN_SPAN)[2:]
        for place in range(len(PLACES)):
            for number in numbers:
                change = bytes([1]) + place.to_bytes(2, "big") + number
                yield change + bytes([0, 0, is_push]) + _request(FAR_SPAN)[2:]


# Was found: tokens far beyond the span of the other side, each to be looked at.
FOUND = bytes.fromhex("00fdff008cff3f0307070707071300000000000000070720")
SEEDS = (FOUND, *_seeds())
