"""What a rank advertises: round trips and the bounds of what a peer may claim."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import CacheError
from kvferry.protocol.layout import (
    MAX_PARTS,
    SHARD_AXIS,
    TOKEN_AXIS,
    Axis,
    CacheLayout,
    FieldLayout,
    GroupLayout,
    PartLayout,
    Region,
    Shard,
)

names = st.text("aé中.0", min_size=1, max_size=16)
counts = st.integers(0, 2**40)
addresses = st.integers(0, 2**62 - 1)
strides = st.integers(-(2**62) + 1, 2**62 - 1)
memories = st.sampled_from(["DRAM", "VRAM"])
devices = st.integers(0, 2**16 - 1)
axes = st.builds(
    Axis, names | st.sampled_from([SHARD_AXIS, TOKEN_AXIS]), counts, strides
)
parts = st.builds(
    PartLayout,
    names,
    st.builds(Shard, counts, counts, counts),
    addresses,
    st.lists(axes, max_size=4).map(tuple),
)
fields = st.builds(
    FieldLayout,
    layer=names,
    name=names,
    dtype=names,
    element_bytes=st.integers(1, 64),
    memory=memories,
    device=devices,
    blocks=counts,
    block_stride=strides,
    block_tokens=counts,
    parts=st.lists(parts, min_size=1, max_size=2).map(tuple),
)
groups = st.builds(
    GroupLayout,
    name=names,
    block_size=counts,
    blocks=counts,
    fields=st.lists(fields, max_size=2).map(tuple),
    window=st.none() | st.integers(1, 2**20),
)
layouts = st.builds(
    CacheLayout,
    st.lists(st.builds(Region, memories, devices, addresses, counts), max_size=3).map(
        tuple
    ),
    st.lists(groups, max_size=2).map(tuple),
)

FIELD = FieldLayout(
    layer="layers.0",
    name="kv",
    dtype="bfloat16",
    element_bytes=2,
    memory="VRAM",
    device=1,
    blocks=113,
    block_stride=8192,
    block_tokens=16,
    parts=(PartLayout("kv", Shard(8, 4, 8), 4096, (Axis("h", 4, 256),)),),
)
LAYOUT = CacheLayout(
    (Region("VRAM", 1, 4096, 925_696),), (GroupLayout("full", 16, 113, (FIELD,)),)
)


def decoded(plain: object) -> CacheLayout:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=CacheLayout)


@given(layouts)
def test_round_trip(layout: CacheLayout) -> None:
    """Every layout within the bounds arrives as it was sent."""
    assert decoded(layout) == layout


def test_a_shard_counts_its_units() -> None:
    """The range is half-open."""
    assert Shard(8, 4, 8).size == 4
    assert Shard(1, 0, 1).size == 1


def with_value(path: str, value: object) -> Any:
    """The plain layout with another value at a dotted path."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(LAYOUT))
    *steps, last = path.split(".")
    node = plain
    for step in steps:
        node = node[int(step)] if step.isdigit() else node[step]
    node[last] = value
    return plain


FIELD_PATH = "groups.0.fields.0"
PART_PATH = f"{FIELD_PATH}.parts.0"
OUT_OF_BOUNDS: list[tuple[str, object]] = [
    ("regions.0.memory", "TAPE"),
    ("regions.0.device", -1),
    ("regions.0.device", 2**16),
    ("regions.0.address", -1),
    ("regions.0.address", 2**62),
    ("regions.0.size", -1),
    ("regions.0.size", 2**40 + 1),
    ("groups.0.name", ""),
    ("groups.0.name", "x" * 257),
    ("groups.0.block_size", -1),
    ("groups.0.blocks", -1),
    ("groups.0.blocks", 2**40 + 1),
    ("groups.0.window", 0),
    ("groups.0.window", 2**40 + 1),
    ("groups.0.context_interleave", 2**40 + 1),
    ("regions", [{"memory": "DRAM", "device": 0, "address": 1, "size": 1}] * 16_385),
    ("groups.0.context_size", 0),
    ("groups.0.context_rank", -1),
    ("groups.0.context_interleave", 0),
    (f"{FIELD_PATH}.layer", ""),
    (f"{FIELD_PATH}.dtype", ""),
    (f"{FIELD_PATH}.element_bytes", 0),
    (f"{FIELD_PATH}.element_bytes", 65),
    (f"{FIELD_PATH}.memory", "dram"),
    (f"{FIELD_PATH}.block_stride", 2**62),
    (f"{FIELD_PATH}.block_stride", -(2**62)),
    (f"{FIELD_PATH}.block_tokens", -1),
    (f"{FIELD_PATH}.parts", []),
    (f"{PART_PATH}.address", -1),
    (f"{PART_PATH}.axes", [{"name": "h", "size": 1, "stride": 0}] * 9),
    (f"{PART_PATH}.axes", [{"name": "h", "size": -1, "stride": 0}]),
    (f"{PART_PATH}.axes", [{"name": "", "size": 1, "stride": 0}]),
    (f"{PART_PATH}.shard", {"total": -1, "first": 0, "last": 0}),
    (f"{PART_PATH}.shard", {"total": 8, "first": 0.0, "last": 4}),
    (f"{PART_PATH}.shard", {"total": 8, "first": 0, "last": 4, "step": 2}),
]


@pytest.mark.parametrize(
    ("path", "value"), OUT_OF_BOUNDS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_h1_a_claim_out_of_its_bounds_is_refused(path: str, value: object) -> None:
    """No card makes a layout that costs memory or time by its numbers alone."""
    with pytest.raises(msgspec.ValidationError):
        decoded(with_value(path, value))


def test_the_bounds_are_above_any_real_model() -> None:
    """A field of a terabyte pool with negative strides is still described."""
    plain = with_value(f"{FIELD_PATH}.block_stride", -(2**40))
    assert decoded(plain).groups[0].fields[0].block_stride == -(2**40)


def test_h1_a_layout_of_too_many_parts_is_refused_whoever_makes_it() -> None:
    """However they are spread over groups and fields: each would be looked at."""

    def spread(parts: int) -> dict[str, Any]:
        plain = with_value("regions", [])
        (field,) = plain["groups"][0]["fields"]
        field = {**field, "parts": field["parts"] * 8}
        fields = [field] * (parts // 16)
        plain["groups"] = [{**plain["groups"][0], "fields": fields}] * 2
        return plain

    assert len(decoded(spread(MAX_PARTS)).groups) == 2
    with pytest.raises(msgspec.ValidationError, match="parts"):
        decoded(spread(MAX_PARTS + 16))
    fields = (msgspec.structs.replace(FIELD, parts=FIELD.parts * 64),) * 129
    with pytest.raises(CacheError, match="8256 parts"):
        CacheLayout((), (GroupLayout("full", 16, 113, fields),))


def test_a_layout_from_a_peer_is_no_work_for_the_garbage_collector() -> None:
    """It is hundreds of objects, and there is one of each peer."""
    part = PartLayout("kv", Shard(1, 0, 1), 0, (Axis(SHARD_AXIS, 1, 0),))
    field = FieldLayout("layers.0", "kv", "uint8", 1, "DRAM", 0, 1, 1, 1, (part,))
    group = GroupLayout("full", 1, 1, (field,))
    layout = CacheLayout((Region("DRAM", 0, 0, 1),), (group,))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=CacheLayout)
    (group,) = decoded.groups
    (field,) = group.fields
    (part,) = field.parts
    found = (decoded, *decoded.regions, group, field, part, part.shard, *part.axes)
    assert not any(gc.is_tracked(each) for each in found)
