"""What must agree: each fact is named with both values, and nothing else is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import ConfigError
from kvferry.protocol.identity import (
    MAX_DIFFERENCES,
    Difference,
    EngineKey,
    ModelIdentity,
    Rank,
    compare,
    compare_layouts,
)
from kvferry.protocol.layout import (
    Axis,
    CacheLayout,
    FieldLayout,
    GroupLayout,
    PartLayout,
    Region,
    Shard,
)

OURS = ModelIdentity("org/name", "abc123", "bfloat16", extra={"rope": "yarn"})


def changed(struct: Any, **values: object) -> Any:
    return msgspec.structs.replace(struct, **values)


# The model.


def test_c1_equal_identities_have_no_difference() -> None:
    """The order of the extra facts means nothing."""
    a = changed(OURS, extra={"rope": "yarn", "adapter": "none"})
    b = changed(OURS, extra={"adapter": "none", "rope": "yarn"})
    assert compare(a, b) == ()


@pytest.mark.parametrize(
    ("name", "local", "remote"),
    [
        ("model", "org/name", "org/other"),
        ("revision", "abc123", "abc124"),
        ("dtype", "bfloat16", "float16"),
        ("quantization", "none", "fp8_e4m3"),
    ],
)
def test_c1_a_model_fact_that_differs_is_named_alone_with_both_values(
    name: str, local: str, remote: str
) -> None:
    """Exactly that fact, ours first."""
    theirs = changed(OURS, **{name: remote})
    assert compare(OURS, theirs) == (Difference(name, local, remote),)
    assert compare(theirs, OURS) == (Difference(name, remote, local),)


def test_c1_an_extra_fact_that_differs_is_named() -> None:
    """Whatever else the caller said must agree."""
    theirs = changed(OURS, extra={"rope": "linear"})
    assert compare(OURS, theirs) == (Difference("extra.rope", "yarn", "linear"),)


@pytest.mark.parametrize("value", ["lora-7", "absent", ""])
def test_c1_an_extra_fact_that_one_side_does_not_know_is_named(value: str) -> None:
    """Also when its value reads like the word for a missing one."""
    theirs = changed(OURS, extra={"rope": "yarn", "adapter": value})
    assert compare(OURS, theirs) == (Difference("extra.adapter", "absent", value),)
    assert compare(theirs, OURS) == (Difference("extra.adapter", value, "absent"),)


def test_c1_every_fact_that_differs_is_named() -> None:
    """One refusal tells all, not the first only."""
    theirs = ModelIdentity("m", "r", "d", "q", {"x": "1"})
    assert {d.factor for d in compare(OURS, theirs)} == {
        "model",
        "revision",
        "dtype",
        "quantization",
        "extra.rope",
        "extra.x",
    }


def test_a_difference_always_fits_its_bounds() -> None:
    """However long the values are, the refusal can be sent."""
    local, remote = (changed(OURS, model=letter * 5000) for letter in "ab")
    (difference,) = compare(local, remote)
    payload = msgspec.msgpack.encode(difference)
    assert msgspec.msgpack.decode(payload, type=Difference) == difference


# The layout.


def attention(**changes: Any) -> FieldLayout:
    """A field of 4 of 8 heads, 16 tokens in a block, 64 elements of 2 bytes."""
    axes = (
        Axis("k", 2, 16384),
        Axis("h", 4, 4096),
        Axis("n", 16, 256),
        Axis("d", 64, 2),
    )
    field = FieldLayout(
        layer="layers.0",
        name="kv",
        dtype="bfloat16",
        element_bytes=2,
        memory="DRAM",
        device=0,
        blocks=113,
        block_stride=32768,
        block_tokens=16,
        parts=(PartLayout("kv", Shard(8, 0, 4), 4096, axes),),
    )
    return changed(field, **changes)


def cache(field: FieldLayout, **changes: Any) -> CacheLayout:
    group = GroupLayout("full", 16, 113, (field,))
    region = Region("DRAM", 0, 4096, 113 * 32768)
    return CacheLayout((region,), (changed(group, **changes),))


def part(field: FieldLayout) -> PartLayout:
    return field.parts[0]


def with_axis(field: FieldLayout, name: str, size: int) -> FieldLayout:
    axes = tuple(
        changed(a, size=size) if a.name == name else a for a in part(field).axes
    )
    return changed(field, parts=(changed(part(field), axes=axes),))


FIELD = attention()
STATE = attention(block_tokens=0)
WHERE = "group full layers.0.kv"


@pytest.mark.parametrize(
    ("theirs", "factor", "local", "remote"),
    [
        (
            cache(changed(FIELD, parts=(changed(part(FIELD), shard=Shard(4, 0, 4)),))),
            f"{WHERE}.kv total units",
            "8",
            "4",
        ),
        (cache(with_axis(FIELD, "d", 128)), f"{WHERE}.kv axis d", "64", "128"),
        (cache(with_axis(FIELD, "k", 1)), f"{WHERE}.kv axis k", "2", "1"),
        (cache(attention(dtype="float16")), f"{WHERE} dtype", "bfloat16", "float16"),
        (cache(attention(element_bytes=1)), f"{WHERE} element bytes", "2", "1"),
        (cache(FIELD, window=128), "group full window", "None", "128"),
        (cache(FIELD, block_size=0), "group full addressed by", "token", "slot"),
        (CacheLayout((), ()), "group full", "present", "absent"),
    ],
    ids=[
        "heads",
        "field width",
        "keys and values",
        "field dtype",
        "quantisation",
        "window",
        "state",
        "group missing",
    ],
)
def test_c1_a_layout_fact_that_differs_is_named_alone_with_both_values(
    theirs: CacheLayout, factor: str, local: str, remote: str
) -> None:
    """Exactly that fact, ours first, whichever side we are."""
    ours = cache(FIELD)
    assert compare_layouts(ours, theirs) == (Difference(factor, local, remote),)
    assert compare_layouts(theirs, ours) == (Difference(factor, remote, local),)


def named(ours: CacheLayout, theirs: CacheLayout) -> dict[str, tuple[str, str]]:
    return {d.factor: (d.local, d.remote) for d in compare_layouts(ours, theirs)}


def test_c1_g16_a_field_missing_on_one_side_is_named() -> None:
    """Both sides have the layer, one has no scales for it: refused by name."""
    scales = attention(name="scales")
    ours = cache(FIELD, fields=(FIELD, scales))
    found = named(ours, cache(FIELD))
    assert found["group full layers.0.scales"] == ("present", "absent")
    assert all(factor.startswith("group full layers.0.scales") for factor in found)


def test_c1_a_part_missing_on_one_side_is_named() -> None:
    """A convolution state without its B channels cannot be paired."""
    b = changed(part(FIELD), name="B")
    found = named(cache(FIELD), cache(changed(FIELD, parts=(part(FIELD), b))))
    assert found[f"{WHERE}.B"] == ("absent", "present")
    assert all(factor.startswith(f"{WHERE}.B") for factor in found)


def test_c1_an_axis_missing_on_one_side_is_named() -> None:
    """One latent against keys and values is another field."""
    axes = tuple(axis for axis in part(FIELD).axes if axis.name != "k")
    theirs = changed(FIELD, parts=(changed(part(FIELD), axes=axes),))
    assert named(cache(FIELD), cache(theirs)) == {f"{WHERE}.kv axis k": ("2", "absent")}


def test_c1_one_field_that_differs_is_named_alone_among_many() -> None:
    """Whatever the order of fields and parts on either side."""
    b = changed(part(FIELD), name="B")
    fields = [attention(layer=f"layers.{n}", parts=(part(FIELD), b)) for n in range(5)]
    theirs = [changed(field, parts=field.parts[::-1]) for field in fields[::-1]]
    assert (
        compare_layouts(cache(FIELD, fields=fields), cache(FIELD, fields=theirs)) == ()
    )
    wider = part(with_axis(FIELD, "d", 128))
    theirs[1] = changed(theirs[1], parts=(b, wider))
    assert named(cache(FIELD, fields=fields), cache(FIELD, fields=theirs)) == {
        "group full layers.3.kv.kv axis d": ("64", "128")
    }


def test_c1_every_fact_of_every_group_is_named_in_order() -> None:
    """One refusal tells all, sorted, the same from both sides."""
    other = GroupLayout("draft", 16, 113, (attention(layer="draft.0"),))
    ours = cache(FIELD, window=64)
    theirs = CacheLayout((), (other, *cache(with_axis(FIELD, "d", 32)).groups))
    factors = [d.factor for d in compare_layouts(ours, theirs)]
    assert factors == ["group draft", f"{WHERE}.kv axis d", "group full window"]
    assert factors == [d.factor for d in compare_layouts(theirs, ours)]


def test_c2_a_draft_group_on_one_side_only_is_refused_by_name() -> None:
    """Unless the caller has opted to skip it."""
    draft = GroupLayout("draft", 16, 113, (attention(layer="draft.0"),))
    ours, theirs = cache(FIELD), CacheLayout((), (*cache(FIELD).groups, draft))
    assert named(ours, theirs) == {"group draft": ("absent", "present")}
    skip = frozenset({"draft"})
    assert compare_layouts(ours, theirs, skip_groups=skip) == ()
    assert compare_layouts(theirs, ours, skip_groups=skip) == ()


def test_c2_a_skipped_group_may_differ_in_anything() -> None:
    """What is not transferred need not agree; what is, must."""
    theirs = cache(with_axis(FIELD, "d", 128), window=7)
    assert compare_layouts(cache(FIELD), theirs, skip_groups=frozenset({"full"})) == ()
    assert len(compare_layouts(cache(FIELD), theirs)) == 2


def test_g9_block_sizes_pools_orders_strides_places_and_splits_are_no_difference() -> (
    None
):
    """All of these are numbers for the planner, not reasons to refuse."""
    reordered = changed(
        part(FIELD),
        address=8192,
        shard=Shard(8, 6, 8),
        axes=(
            Axis("n", 64, 1024),
            Axis("h", 2, 512),
            Axis("k", 2, -65536),
            Axis("d", 64, 4),
        ),
    )
    field = attention(
        parts=(reordered,),
        memory="VRAM",
        device=3,
        blocks=211,
        block_stride=999_424,
        block_tokens=64,
    )
    region = Region("VRAM", 3, 0, 2**30)
    group = GroupLayout("full", 128, 105, (field,), None, 2, 1, 16)
    assert compare_layouts(cache(FIELD), CacheLayout((region,), (group,))) == ()


def test_a_layer_that_only_one_side_has_is_no_difference() -> None:
    """Pipeline stages hold different layers."""
    theirs = cache(FIELD, fields=(FIELD, attention(layer="layers.1")))
    assert compare_layouts(cache(FIELD), theirs) == ()
    assert compare_layouts(cache(FIELD), cache(attention(layer="layers.1"))) == ()


@given(st.permutations([attention(name=name) for name in ("kv", "scales", "index")]))
def test_g14_the_order_of_fields_is_no_difference(fields: list[FieldLayout]) -> None:
    """Fields are matched by layer and name, never by place."""
    ours = cache(
        FIELD, fields=tuple(attention(name=n) for n in ("kv", "scales", "index"))
    )
    assert compare_layouts(ours, cache(FIELD, fields=tuple(fields))) == ()


# Words.


def test_text_names_the_rank_the_start_and_both_values() -> None:
    """What logs and errors print."""
    rank = Rank(tp=1, tp_size=4, pp=0, pp_size=2)
    assert str(rank) == "tp1of4.pp0of2"
    assert str(EngineKey("e", "0123456789abcdef", rank)) == "e/tp1of4.pp0of2#01234567"
    assert str(Difference("dtype", "a", "b")) == "dtype: a here, b there"


def test_h1_a_name_cannot_forge_a_line_of_a_log() -> None:
    """Whatever a peer calls itself, it is one printable line."""
    key = EngineKey("a\nb\x1b[31m", "g\r", Rank())
    assert str(key) == "a\\nb\\x1b[31m/tp0of1.pp0of1#g\\r"
    assert str(EngineKey("préfixe-0", "1", Rank())) == "préfixe-0/tp0of1.pp0of1#1"


@pytest.mark.parametrize(
    "rank",
    [
        {"tp": 2, "tp_size": 2},
        {"pp": 1},
        {"tp_size": 2048},
        {"tp_size": 2**16, "pp_size": 2**16},
        {"tp": 40, "tp_size": 64, "pp": 3, "pp_size": 32},
    ],
)
def test_h1_coordinates_of_no_rank_are_refused_wherever_they_come_from(
    rank: dict[str, int],
) -> None:
    """Made here or decoded: an instance that is listed has a bounded number of ranks."""
    with pytest.raises(ConfigError, match="rank"):
        Rank(**rank)
    payload = msgspec.msgpack.encode({"tp": 0, "tp_size": 1, "pp": 0, **rank})
    with pytest.raises(msgspec.ValidationError, match="rank"):
        msgspec.msgpack.decode(payload, type=Rank)
    assert len(Rank(0, 32, 31, 32).instance()) == 1024


def test_h1_a_comparison_names_a_bounded_number_of_factors() -> None:
    """Who differs in thousands of facts is refused as well by the first of them."""
    fields = tuple(attention(name=f"f{i}") for i in range(2000))
    found = compare_layouts(cache(FIELD), cache(FIELD, fields=fields))
    assert len(found) == MAX_DIFFERENCES


def test_e1_a_later_start_at_the_same_place_is_another_engine() -> None:
    """The generation is part of the identity, an address is not."""
    assert EngineKey("e", "a1", Rank()) != EngineKey("e", "b2", Rank())
    assert len({EngineKey("e", "a1", Rank()), EngineKey("e", "a1", Rank())}) == 1
