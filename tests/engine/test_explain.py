"""What is told of a plan is what it does: read back, in words, drawn, and on the command line."""

from __future__ import annotations

import runpy
import subprocess
import sys
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import kvferry.engine
from kvferry.engine.cache import (
    AttentionGroup,
    KVCache,
    PagedTensor,
    StateGroup,
    StatePart,
    StateTensor,
    tp_shard,
)
from kvferry.engine.cost import LandingPolicy
from kvferry.engine.explain import __main__ as command
from kvferry.engine.explain import describe, draw, explain
from kvferry.engine.explain.blocks import runs_of, shares_of_field
from kvferry.engine.explain.drawing import MAX_RUNS
from kvferry.engine.explain.folding import fold_names
from kvferry.engine.explain.shares import shares_of
from kvferry.engine.plan import prepare_plan
from kvferry.engine.runs import Overlap, pair_parts
from kvferry.protocol.errors import MisuseError
from kvferry.protocol.layout import CacheLayout, Shard
from tests.planning import RICH, Case, cases

if TYPE_CHECKING:
    from pathlib import Path

    from kvferry.engine.explain.shares import Share

SVG = "{http://www.w3.org/2000/svg}"


def paged(
    order: str,
    *,
    tp: int = 1,
    rank: int = 0,
    heads: int = 4,
    tokens: int = 8,
    layers: int = 2,
    blocks: int = 5,
    kernel: int = 0,
    numbers: dict | None = None,
) -> CacheLayout:
    """One rank of a model with keys and values of 16 elements of two bytes."""
    shard = tp_shard(heads, rank, tp)
    kernel = kernel or tokens
    sizes = {
        "b": blocks * tokens // kernel,
        "k": 2,
        "h": shard.size,
        "n": kernel,
        "d": 16,
    }
    shape = [sizes[axis] for axis in order.split()]
    fields = {
        f"layers.{n}": PagedTensor(
            torch.zeros(shape, dtype=torch.bfloat16),
            order,
            shard if "h" in order else None,
        )
        for n in range(layers)
    }
    return KVCache([AttentionGroup("full", tokens, fields, **numbers or {})]).layout


def told(local: CacheLayout, *remotes: CacheLayout, num_tokens: int | None = None):
    plan = prepare_plan(local, dict(enumerate(remotes)))
    return explain(plan, num_tokens=num_tokens)


# --- read back from the rows -------------------------------------------------------


BULK = LandingPolicy(landing="bulk", image_bytes=2**20)


def case_plan(case: Case, policy: LandingPolicy = LandingPolicy()):  # noqa: B008 - frozen
    local = case.consumer_pool().cache.layout
    remotes = {k: pool.cache.layout for k, pool in case.producer_pools().items()}
    plan = prepare_plan(local, remotes, reader=case.consumer_rank, policy=policy)
    return local, remotes, plan


def remote_of(share: Share, layout: CacheLayout):
    """The producer's own numbers of a share: its field and its part."""
    (group,) = (g for g in layout.groups if g.name == share.stratum.group)
    (field,) = (
        f
        for f in group.fields
        if (f.layer, f.name) == (share.field.layer, share.field.name)
    )
    (part,) = (p for p in field.parts if p.name == share.part.name)
    return field, part


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from((LandingPolicy(), BULK)))
def test_shares_are_what_the_producers_layouts_say(case: Case, policy) -> None:
    """Strides read off the rows are those of the producer's layout, which no plan keeps."""
    local, remotes, plan = case_plan(case, policy)
    covered: dict[tuple, int] = {}
    for key, peer in plan.peers.items():
        for share in shares_of(plan, peer):
            field, part = remote_of(share, remotes[key])
            pieces = pair_parts(
                share.part,
                part,
                Overlap(share.first, share.last),
                element_bytes=field.element_bytes,
                unit_tokens=share.stratum.unit_tokens,
            )
            assert (share.runs, share.run_bytes) == (
                pieces.local.size,
                pieces.run_bytes,
            )
            assert share.posted_bytes >= share.run_bytes
            axes = {axis.name: axis.stride for axis in part.axes}
            assert all(step.remote_stride == axes[step.axis] for step in share.nest)
            assert share.remote_address == part.address + (
                (share.first - part.shard.first) * axes["h"]
            )
            steps = (share.local_step, share.remote_step)
            for step, expected, places in (
                (steps[0], pieces.local_step, share.stratum.local_places),
                (steps[1], pieces.remote_step, share.stratum.remote_places),
            ):
                assert step == (expected if places > 1 else 0)
            place = (share.stratum.group, share.field.layer, share.field.name)
            place += (share.part.name, share.stratum.remote.context)
            covered[place] = covered.get(place, 0) + share.last - share.first
    sizes = {
        (group.name, field.layer, field.name, part.name): part.shard.size
        for group in local.groups
        for field in group.fields
        for part in field.parts
    }
    assert all(covered[place] == sizes[place[:4]] for place in covered)
    assert {place[:4] for place in covered} == set(sizes)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from((LandingPolicy(), BULK)))
def test_the_runs_drawn_fill_the_block_once(case: Case, policy) -> None:
    """Every byte of the consumer's block has one run, and the words and lines for it come out."""
    local, _, plan = case_plan(case, policy)
    assert explain(plan, num_tokens=case.request.num_tokens)
    for group in local.groups:
        for field in group.fields:
            shares = shares_of_field(plan, group.name, field.layer, field.name)
            runs = sorted(
                (run.local, run.local + run.run_bytes)
                for key, share in shares
                for run in runs_of(key, share)
            )
            assert all(end <= first for (_, end), (first, _) in pairwise(runs))
            wanted = sum(
                int(np.prod([axis.size for axis in part.axes])) for part in field.parts
            )
            assert sum(b - a for a, b in runs) == wanted * field.element_bytes


def test_devices_are_told_apart() -> None:
    """One address on two devices is two places: each layer is read from its own."""
    local, remote = paged("b k h n d"), paged("b k h n d")

    def moved(layout: CacheLayout, first: int) -> CacheLayout:
        (group,) = layout.groups
        fields = tuple(
            replace(
                field,
                device=device,
                memory="VRAM",
                parts=(replace(field.parts[0], address=first),),
            )
            for device, field in enumerate(group.fields)
        )
        size = 5 * fields[0].block_stride
        regions = tuple(
            replace(
                layout.regions[0], memory="VRAM", device=d, address=first, size=size
            )
            for d in range(2)
        )
        return CacheLayout(regions, (replace(group, fields=fields),))

    plan = prepare_plan(moved(local, 2**20), {0: moved(remote, 2**30)})
    shares = list(shares_of(plan, plan.peers[0]))
    assert [share.field.device for share in shares] == [0, 1]
    assert {share.remote_address for share in shares} == {2**30}


# --- in words ----------------------------------------------------------------------


def test_a_whole_model_fits_on_a_screen() -> None:
    """61 equal layers are one line, and equal ranks are told once."""
    local = paged("b k h n d", layers=61, heads=8)
    remotes = [
        paged("b k h n d", layers=61, heads=8, tp=8, rank=rank) for rank in range(8)
    ]
    text = told(local, *remotes, num_tokens=20)
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 120
    assert "8 of 8 producer ranks feed this consumer" in text
    assert "from producers 0-7 (8), alike:" in text
    assert "layers.0-60 (61) kv bfloat16: h [0, 8) of 8, 1 a rank; 2 runs" in text
    assert "a request of 20 tokens: 2,928 descriptors" in text
    assert "4 token slots zeroed behind it" in text
    assert "from each of producers 0-7 (8): 366 descriptors" in text


@pytest.mark.parametrize(
    ("local", "remotes", "reason"),
    [
        (
            paged("b k n h d"),
            [paged("b k n h d", tp=2, rank=rank) for rank in range(2)],
            "short: ends at axis n: 128 bytes here, 64 there (it goes on there, not here)",
        ),
        (
            paged("b k n h d", tp=2),
            [paged("b k n h d")],
            "short: ends at axis n: 64 bytes here, 128 there (it goes on here, not there)",
        ),
        (
            paged("b k n h d", heads=2),
            [paged("b k n d h", heads=2)],
            "short: ends at axis h: 32 bytes here, 2 there (it goes on there, not here)",
        ),
        (
            paged("b k h d n"),
            [paged("b n h d k")],
            "short: ends at axis k: 1,024 bytes here, 2 there (it goes on there, not here)",
        ),
        (
            paged("b n h d k", heads=2),
            [paged("b h n d k", heads=2)],
            "short: ends at axis n: 128 bytes here, 64 there (it goes on there, not here)",
        ),
        (
            paged("b k h n d"),
            [paged("b k h n d")],
            "short: the whole share of a kernel",
        ),
        (
            paged("b n k h d"),
            [paged("b n k h d", tokens=12)],
            "short: the whole unit: 4 tokens are what blocks of 8 here and 12 there",
        ),
        (
            paged("b k h n d", tokens=128),
            [paged("b k h n d", tokens=128)],
            "      the whole share of a kernel block",
        ),
    ],
)
def test_the_reason_for_a_runs_end_is_the_axis_and_its_steps(
    local, remotes, reason
) -> None:
    """Which axis, its step on both sides, and which side would have gone on."""
    assert reason in told(local, *remotes)


def test_neither_side_goes_on() -> None:
    """Elements that lie apart on both sides: the smallest step is named."""
    pool = torch.zeros((5, 2, 4, 8, 32), dtype=torch.bfloat16)[..., ::2]
    tensor = PagedTensor(pool, "b k h n d", Shard(4, 0, 4))
    layout = KVCache([AttentionGroup("full", 8, {"layers.0": tensor})]).layout
    reason = "short: ends at axis d: 4 bytes here, 4 there (neither side goes on)"
    assert reason in told(layout, layout)


def test_joined_layers_say_so() -> None:
    """Layers that lie in one block are posted as one descriptor."""

    def both() -> CacheLayout:
        pool = torch.zeros((5, 2, 8, 16), dtype=torch.bfloat16)
        layers = {f"layers.{n}": PagedTensor(pool[:, n], "b n d") for n in range(2)}
        return KVCache([AttentionGroup("full", 8, layers)]).layout

    text = told(both(), both())
    assert "replicated; 1 run of 256 bytes" in text
    assert "short: joined with its neighbours to 512 bytes" in text
    assert "1 descriptor a unit, 1 a block, 512 bytes each; 64 bytes a token" in text


def test_bulk_landing_is_told_with_its_cost() -> None:
    """Which group, in which images, and what either way would cost."""
    local = paged("b k n h d", tokens=64)
    remotes = {r: paged("b k n h d", tp=2, rank=r, tokens=64) for r in range(2)}
    policy = LandingPolicy(landing="auto", image_bytes=2**20)
    plan = prepare_plan(local, remotes, policy=policy)
    text = explain(plan, num_tokens=64)
    assert (
        "group full in bulk, DRAM to DRAM: 2 images a kernel block there, 8,192" in text
    )
    assert "short, so in bulk: ends at axis n: 128 bytes here, 64 there" in text
    assert "group full lands in bulk; the cost model says for a kernel block" in text
    assert "direct 642 us (256 descriptors, 16,384 bytes)" in text
    assert "a request of 64 tokens: 4 descriptors" in text
    # Long runs gain nothing; the choice is told where there was one.
    long = paged("b k h n d", tokens=512)
    whole = prepare_plan(long, {0: long}, policy=policy)
    assert "group full lands directly; the cost model" in explain(whole)
    forced = prepare_plan(long, {0: long}, policy=BULK)
    assert "      the whole share of a kernel block" in explain(forced)


def test_ranks_that_nobody_reads_are_named() -> None:
    """A consumer of the first half of the heads leaves the other ranks alone."""
    text = told(
        paged("b k h n d", tp=2),
        *(paged("b k h n d", tp=4, rank=rank) for rank in range(4)),
    )
    assert "2 of 4 producer ranks feed this consumer" in text
    assert "nothing is read from producers 2-3 (2)" in text
    assert "h [0, 1) [1, 2) of 4" in text


def test_ranks_that_differ_are_told_apart() -> None:
    """Two pipeline stages, each with its own layers."""
    local, remote = paged("b k h n d", layers=4), paged("b k h n d", layers=4)
    (group,) = remote.groups
    stages = [
        replace(remote, groups=(replace(group, fields=group.fields[a : a + 2]),))
        for a in (0, 2)
    ]
    text = told(local, *stages)
    assert "from producer 0:" in text
    assert "layers.0-1 (2) kv" in text
    assert "from producer 1:" in text
    assert "layers.2-3 (2) kv" in text


def test_windows_contexts_and_states_are_told() -> None:
    """Groups say what is special about them; states count slots, not tokens."""
    window = paged("b k h n d", numbers={"window": 100})
    assert "a window of 100 tokens" in told(window, window)
    turn = {"context_size": 2, "context_interleave": 8}
    local = paged("b k h n d", numbers={**turn, "context_rank": 1})
    text = told(local, paged("b k h n d"))
    assert "context rank 1 of 2, in turns of 8 tokens" in text
    _, _, plan = case_plan(RICH)
    text = explain(plan, num_tokens=10)
    assert "state slots" in text
    assert "group state: 18 descriptors a slot, 4 bytes each; 72 bytes a slot" in text
    assert "layers.3 conv.x int32: h [0, 4) [4, 8) of 8; 12 runs of 4 bytes" in text
    ssm = StateTensor("ssm", torch.zeros(3, 8), "b d")
    state = KVCache([StateGroup("state", {"layers.0": ssm})]).layout
    assert "short: the whole share of a slot" in told(state, state)


def test_fields_of_unlike_blocks_are_told_apart() -> None:
    """One group, two kernel block sizes: two grains."""

    def both() -> CacheLayout:
        layers = {
            f"layers.{n}": PagedTensor(torch.zeros(10 * n, 8 // n, 16), "b n d")
            for n in (1, 2)
        }
        return KVCache([AttentionGroup("full", 8, layers)]).layout

    text = told(both(), both())
    assert "units of 8 tokens (kernel blocks of 8 here, 8 there)" in text
    assert "units of 4 tokens (kernel blocks of 4 here, 4 there)" in text
    assert text.count("layers.1 kv") == text.count("layers.2 kv") == 1


def test_a_request_beyond_the_pool_says_so() -> None:
    """Not an exception: the reader asked what would happen."""
    layout = paged("b k h n d")
    text = told(layout, layout, num_tokens=1000)
    assert "a request of 1,000 tokens is refused: group 'full'" in text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["layers.0"], "layers.0"),
        (["layers.0", "layers.1"], "layers.0-1 (2)"),
        ([f"m.{n}.attn" for n in range(3, 60, 4)], "m.3-59 by 4.attn (15)"),
        (["a", "b"], "a, b (2)"),
        (["l.0", "l.5", "l.6", "l.9"], "l.0, l.5-6, l.9 (4)"),
        (["l.3", "l.1"], "l.3, l.1 (2)"),
        (["l.007"], "l.007"),
        ([f"l.{n * n}" for n in range(9)], "l.0-1, l.4, l.9, l.16, ..., l.64 (9)"),
    ],
)
def test_names_fold_into_ranges(names, text) -> None:
    """Layer names that count on are one range, and long lists are shortened."""
    assert fold_names(names) == text


def test_a_layout_is_described_shortly() -> None:
    """Regions, groups and equal layers, one line each."""
    lines = describe(paged("b k h n d", layers=61, blocks=600)).splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("MiB")
    assert lines[2].startswith("  layers.0-60 (61) kv: bfloat16, DRAM 0, 600 kernel")
    assert lines[3].endswith(
        "kv: h [0, 4) of 4; k 2 x 1,024, h 4 x 256, n 8 x 32, d 16 x 2"
    )
    state = StateTensor(
        "conv", torch.zeros(3, 8, 2), "b c w", (StatePart("x", Shard(8, 0, 8)),)
    )
    text = describe(KVCache([StateGroup("state", {"layers.0": state})]).layout)
    assert "conv: float32, DRAM 0, 3 slots, 64 bytes apart" in text


# --- drawn -------------------------------------------------------------------------


def drawn(svg: str) -> tuple[list[str], int]:
    """All texts of a picture, and its ribbons."""
    root = ET.fromstring(svg)  # noqa: S314 - our own
    texts = ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]
    return texts, len(root.findall(f".//{SVG}path"))


def test_a_picture_has_a_ribbon_for_each_run() -> None:
    """Runs say what is in them; frames are the producers' blocks."""
    local = paged("b k h n d")
    remotes = [paged("b k n h d", tp=2, rank=r, tokens=4) for r in range(2)]
    plan = prepare_plan(local, dict(enumerate(remotes)))
    texts, ribbons = drawn(draw(plan))
    assert ribbons == 64
    assert "layers.0 kv" in texts
    assert "consumer, one kernel block of 8 tokens" in texts
    assert {
        f"producer {r}, kernel block {b}" for r in range(2) for b in range(2)
    } < set(texts)
    assert texts.count("k1 h3 n7") == 2
    assert texts.count("32 B") == 128


def test_a_picture_of_many_runs_is_folded() -> None:
    """At most `MAX_RUNS` are drawn; what is left out is counted on both sides."""
    local, remote = paged("b k h n d", heads=8), paged("b k n h d", heads=8)
    texts, ribbons = drawn(draw(prepare_plan(local, {0: remote})))
    assert ribbons == MAX_RUNS
    assert "drawn: the first 32 and the last 32 runs" in texts
    assert "64 more runs" in texts
    assert "4 more runs" in texts
    # A block of which no run is drawn is left out as well.
    tokens = paged("b n k h d", tokens=1, blocks=200)
    texts, ribbons = drawn(
        draw(prepare_plan(paged("b n k h d", tokens=80), {0: tokens}))
    )
    assert ribbons == MAX_RUNS
    frames = [text for text in texts if text.startswith("producer 0, ")]
    assert len(frames) == MAX_RUNS
    assert "producer 0, kernel block 79" in frames


def test_gaps_are_named() -> None:
    """Bytes of a block that are not read stand between the boxes."""
    local = paged("b k h n d", tp=2)
    texts, _ = drawn(draw(prepare_plan(local, {0: paged("b k h n d")})))
    assert "512 other bytes" in texts


def test_states_and_contexts_are_drawn() -> None:
    """Parts of a state by name; a context rank gives the tokens that it holds."""
    _, _, plan = case_plan(RICH)
    group = next(g for g in plan.groups.values() if not g.block_size)
    field = group.fields[0]
    texts, _ = drawn(draw(plan, group=group.name, field=field.name))
    assert "consumer, one slot" in texts
    assert any(text.startswith(f"{field.parts[0].name} ") for text in texts)
    turns = [
        paged("b k h n d", numbers={"context_size": 2, "context_rank": r})
        for r in range(2)
    ]
    plan = prepare_plan(paged("b k h n d", heads=4), dict(enumerate(turns)))
    texts, ribbons = drawn(draw(plan))
    assert ribbons == 64
    assert "producer 1, kernel block 0" in texts


def test_names_are_escaped() -> None:
    """A layer's name is a caller's or a peer's: markup and controls stay text."""
    layout = paged("b k h n d", layers=1)
    (group,) = layout.groups
    field = replace(group.fields[0], layer="<a>&\x1b")
    layout = replace(layout, groups=(replace(group, fields=(field,)),))
    texts, _ = drawn(draw(prepare_plan(layout, {0: layout})))
    assert "<a>&? kv" in texts


def test_an_unknown_field_cannot_be_drawn() -> None:
    """Says which names were asked for."""
    layout = paged("b k h n d")
    with pytest.raises(MisuseError, match=r"layer 'layers\.9'"):
        draw(prepare_plan(layout, {0: layout}), layer="layers.9")


# --- the command -------------------------------------------------------------------


def written(path: Path, layout: CacheLayout | list[CacheLayout]) -> str:
    path.write_bytes(msgspec.json.encode(layout))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A consumer, and a list of two producer ranks."""
    remotes = [paged("b k h n d", tp=2, rank=rank) for rank in range(2)]
    return (
        written(tmp_path / "decode.json", paged("b k h n d")),
        written(tmp_path / "prefill.json", remotes),
    )


def test_the_command_tells_and_draws(files, tmp_path, capsys) -> None:
    """Status 0, the words on stdout, the picture in its file."""
    svg = tmp_path / "block.svg"
    assert command.main([*files, "--num-tokens", "8", "--svg", str(svg)]) == 0
    out, err = capsys.readouterr()
    assert "from producers prefill[0-1] (2), alike:" in out
    assert "a request of 8 tokens" in out
    assert err == ""
    assert drawn(svg.read_text())[1] == 4


def test_the_command_takes_a_file_for_each_rank(files, tmp_path, capsys) -> None:
    """Ranks are called by their files; equal names by their paths."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    ranks = [
        written(tmp_path / name, paged("b k h n d", tp=4, rank=rank))
        for rank, name in enumerate(("p0.json", "p1.json", "a/p.json", "b/p.json"))
    ]
    assert command.main([files[0], *ranks, "--reader", "3"]) == 0
    out, _ = capsys.readouterr()
    assert "from producers p0-1," in out
    assert ranks[3] in out


def test_the_command_may_skip_a_group(files, capsys) -> None:
    """Then nothing is left to read from anyone."""
    assert command.main([*files, "--skip-group", "full"]) == 0
    assert "0 of 2 producer ranks" in capsys.readouterr().out


def test_the_command_may_be_told_how_to_land(files, capsys) -> None:
    """As in the engine's configuration; there `auto` is the default."""
    assert command.main([*files, "--landing", "bulk"]) == 0
    assert "group full in bulk" in capsys.readouterr().out
    assert command.main([*files, "--landing", "direct"]) == 0
    assert "in bulk" not in capsys.readouterr().out


def test_an_impossible_pair_is_status_1(files, tmp_path, capsys) -> None:
    """The reason and both layouts, shortened; equal ranks once."""
    other = written(tmp_path / "other.json", [paged("b k h n d", heads=2)] * 2)
    assert command.main([files[0], other]) == 1
    out, _ = capsys.readouterr()
    assert out.startswith("impossible: layer 'layers.0' field 'kv' part 'kv': total")
    assert "consumer:\n  " in out
    assert "producer other[0]:\n  " in out
    assert "producer other[1]: like other[0]" in out


def twice(layout: CacheLayout) -> CacheLayout:
    return replace(layout, groups=layout.groups * 2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a layout: "),
        (b"{", "not a layout: "),
        (b"\xff", "not a layout: "),
        (b'{"regions": [], "groups": [], "x": 1}', "unknown field `x`"),
        (
            b'{"regions": [], "groups": 3}',
            r"Expected `array`, got `int` - at `$.groups`",
        ),
        (msgspec.json.encode(twice(paged("b k h n d"))), "group name is used twice"),
    ],
)
def test_what_is_no_layout_is_status_2(
    files, tmp_path, capsys, content, reason
) -> None:
    """Says which file and where in it."""
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    for arguments in ((files[0], str(bad)), (str(bad), files[1])):
        assert command.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert reason in err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--reader", "-1"], "--reader -1"),
        (["--num-tokens", "-5"], "--num-tokens -5"),
        (["--skip-group", "x"], "the consumer has no ['x'], but ['full']"),
        (["--svg", "/nowhere/at.svg"], "/nowhere/at.svg"),
        (["--svg", "x.svg", "--field", "x"], "field 'x'"),
    ],
)
def test_unusable_options_are_status_2(
    files, monkeypatch, tmp_path, capsys, options, reason
) -> None:
    """A number, a name or a file that cannot be."""
    monkeypatch.chdir(tmp_path)
    assert command.main([*files, *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_list_and_a_missing_file_are_status_2(files, capsys) -> None:
    """The consumer is one rank."""
    assert command.main([files[1], files[1]]) == 2
    assert "a list, where one layout is wanted" in capsys.readouterr().err
    assert command.main([files[0], "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err


def test_no_control_sequence_reaches_the_terminal(tmp_path, capsys) -> None:
    """A layer's name from a peer is shown, not obeyed."""
    layout = paged("b k h n d", layers=1)
    (group,) = layout.groups
    field = replace(group.fields[0], layer="\x1b[2J")
    layout = replace(layout, groups=(replace(group, fields=(field,)),))
    path = written(tmp_path / "a.json", layout)
    assert command.main([path, path]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_name_is_a_function_and_a_module_that_runs(files) -> None:
    """`kvferry.engine.explain(plan)` and `python -m kvferry.engine.explain`, no warning."""
    assert kvferry.engine.explain is explain
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "kvferry.engine.explain", *files],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 of 2 producer ranks" in done.stdout


def test_the_status_of_the_command_is_the_process(files, monkeypatch) -> None:
    """What `main` returns is what the shell sees."""
    monkeypatch.setattr(sys, "argv", ["explain", files[1], files[1]])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(command.__file__, run_name="__main__")
    assert left.value.code == 2
