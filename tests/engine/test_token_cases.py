"""The token cases p1 to p7 at the planner: positions rule, never counts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvferry.engine.cache import Span
from kvferry.engine.plan import prepare_plan
from kvferry.protocol.errors import ImpossiblePlan, UnknownBlock
from kvferry.protocol.ranges import Ranges
from tests.engine.test_geometry_cases import NHD, kv_model, one_group, paged, scattered
from tests.oracle import GroupModel, fill_producer
from tests.planning import Case, run

TOKEN_BYTES = 2 * 2 * 2 * 4 * 2  # layers, k, heads, d, width
HEADS = 2


def case(
    local: Span,
    remote: Span,
    *,
    num_tokens: int,
    computed_tokens: int = 0,
    blocks: tuple[int, int] = (16, 16),
    window: int | None = None,
) -> Case:
    """One group with the given spans; ``blocks`` are the consumer's, the producer's."""
    model = kv_model(HEADS, window=window)
    made = one_group(
        model,
        paged(blocks[0]),
        paged(blocks[1], axes=NHD),
        num_tokens=num_tokens,
        computed_tokens=computed_tokens,
    )
    request = replace(made.request, local={"full": local}, remote={"full": remote})
    return replace(made, request=request)


def selected(made: Case):
    """The selection alone."""
    layouts = {k: pool.cache.layout for k, pool in made.producer_pools().items()}
    request = made.request
    return prepare_plan(made.consumer_pool().cache.layout, layouts).select(
        num_tokens=request.num_tokens,
        computed_tokens=request.computed_tokens,
        local=request.local,
        remote=request.remote,
    )


@pytest.mark.parametrize("first_token", [0, 64, 96])
def test_p1_only_what_the_consumer_lacks(first_token: int) -> None:
    """96 of 250 tokens are there already, blocks of 16 against 64: 96 to 249 move."""
    made = case(
        scattered(16 - first_token // 16, first_token, seed=1),
        scattered(4, seed=2),
        num_tokens=250,
        computed_tokens=96,
        blocks=(16, 64),
    )
    outcome = run(made)
    assert outcome.wrong == []
    assert outcome.bytes == (256 - 96) * TOKEN_BYTES
    assert selected(made).untrusted == {"full": Ranges.of([(96, 256)])}


def test_p2_one_block_more_than_the_producer_filled() -> None:
    """The extra block gets no bytes and is zeroed; the pairing does not shift."""
    made = case(scattered(4, seed=1), scattered(3, seed=2), num_tokens=48)
    outcome = run(made)
    assert outcome.wrong == []
    assert outcome.bytes == 48 * TOKEN_BYTES
    (tail,) = selected(made).tails
    assert (len(tail.block_ids), tail.first_slot, tail.slots) == (1, 0, 16)


@pytest.mark.parametrize("ours", [0, 1, 3])
@pytest.mark.parametrize("theirs", [0, 1, 3])
def test_p3_look_ahead_blocks_are_ignored(ours: int, theirs: int) -> None:
    """One to three blocks more on either side move nothing more."""
    made = case(
        scattered(3 + ours, seed=1), scattered(3 + theirs, seed=2), num_tokens=41
    )
    outcome = run(made)
    assert outcome.wrong == []
    assert outcome.bytes == 48 * TOKEN_BYTES


@pytest.mark.parametrize("computed_tokens", [41, 48, 100])
def test_p4_a_full_prefix_hit_moves_nothing(computed_tokens: int) -> None:
    """No descriptor; what lies behind the known tokens is still zeroed."""
    made = case(
        scattered(4, seed=1),
        Span([]),
        num_tokens=41,
        computed_tokens=computed_tokens,
    )
    assert run(made).wrong == []
    selection = selected(made)
    assert (selection.descriptors, selection.bytes, selection.shortest_run) == (0, 0, 0)
    assert selection.untrusted == {}
    assert selection.zeroed_slots == max(64 - computed_tokens, 0)


def test_p5_dropped_blocks_are_never_read() -> None:
    """A window of 20 needs tokens 22 to 40; the producer has dropped block 0."""
    remote = Span([None, *scattered(2, seed=2).block_ids])
    made = case(scattered(3, seed=1), remote, num_tokens=41, window=20)
    assert run(made).wrong == []


def test_p5_a_none_where_data_is_needed_names_it() -> None:
    """The block at index 1 holds token 22, which the window still reaches."""
    remote = Span([None, None, 7])
    made = case(scattered(3, seed=1), remote, num_tokens=41, window=20)
    with pytest.raises(
        UnknownBlock, match=r"'full'.*token 16.*producer.*index 1 is None"
    ):
        run(made)


def test_p6_the_last_block_is_zero_behind_the_prompt() -> None:
    """1,003 tokens in blocks of 16: 11 tokens of the last block, five zero slots."""
    made = case(Span(list(range(63))[::-1]), Span(list(range(63))), num_tokens=1003)
    larger = {name: replace(shape, blocks=63) for name, shape in made.consumer.items()}
    made = replace(
        made,
        consumer=larger,
        producer={n: replace(s, blocks=63) for n, s in made.producer.items()},
    )
    assert run(made).wrong == []
    (tail,) = selected(made).tails
    assert (tail.block_ids.tolist(), tail.first_slot, tail.slots) == ([0], 11, 5)


def test_p7_a_push_writes_the_blocks_from_the_registered_token_on() -> None:
    """Ten producer blocks, a consumer that registered from token 96: blocks 6 to 9."""
    ours, theirs = scattered(4, 96, seed=1), scattered(10, seed=2)
    made = case(ours, theirs, num_tokens=160, computed_tokens=96)
    assert run(made).wrong == []
    ((part,),) = selected(made).peers.values()
    pushed = part.mirrored()
    assert pushed.local_ids is part.remote_ids
    assert pushed.remote_ids is part.local_ids
    blocks = {int(i) % 24 for i in pushed.local_ids.tolist()}
    assert blocks == set(theirs.block_ids[6:])


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"computed_tokens": 40}, ImpossiblePlan, "40 is not a multiple of 16"),
        ({"num_tokens": -1}, ImpossiblePlan, "-1"),
        ({"local": {}}, UnknownBlock, "'full'.*no consumer blocks"),
        ({"remote": {}}, UnknownBlock, "'full'.*no producer blocks"),
        ({"local": {"full": Span([0, 1], 8)}}, ImpossiblePlan, "token 8.*16"),
        ({"local": {"full": Span([0, 1], -16)}}, ImpossiblePlan, "token -16.*16"),
        (
            {"local": {"full": Span([0, 1])}},
            UnknownBlock,
            r"consumer span of 2.*\[0, 32\)",
        ),
        ({"remote": {"full": Span([0, 1])}}, UnknownBlock, "producer span of 2"),
        (
            {"local": {"full": Span([0, 1, 1])}},
            UnknownBlock,
            "consumer block id 1.*twice",
        ),
        ({"local": {"full": Span([0, 1, -1])}}, UnknownBlock, "id -1 at index 2"),
        ({"remote": {"full": Span([0, 1, 24])}}, UnknownBlock, "id 24 at index 2.*24"),
        (
            {"remote": {"full": Span([0, 1, 2**70])}},
            UnknownBlock,
            "not a list of integers",
        ),
        (
            {"remote": {"full": Span([0, 1, 1.5])}},
            UnknownBlock,
            "not a list of integers",
        ),
        ({"remote": {"full": Span(["a"])}}, UnknownBlock, "not a list of integers"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(change, error, says) -> None:
    """Every span and count is checked before a descriptor is made."""
    made = case(scattered(3, seed=1), scattered(3, seed=2), num_tokens=48)
    with pytest.raises(error, match=says):
        run(replace(made, request=replace(made.request, **change)))


@pytest.mark.parametrize("max_bytes", [1, 100, 1000, 4096, 10**9])
def test_waves_partition_the_descriptors(max_bytes: int) -> None:
    """Every descriptor in one wave, every wave inside its bounds or a single run."""
    made = case(
        scattered(5, seed=1), scattered(2, seed=2), num_tokens=70, blocks=(16, 48)
    )
    ((part,),) = selected(made).peers.values()
    runs = part.run_bytes()
    assert runs.sum() == part.bytes
    waves = list(part.waves(max_bytes))
    assert waves[0].start == 0
    assert waves[-1].stop == part.descriptors
    for wave, following in itertools.pairwise(waves):
        assert wave.stop == following.start
        assert runs[wave].sum() + runs[wave.stop] > max_bytes
    for wave in waves:
        assert wave.stop - wave.start == 1 or runs[wave].sum() <= max_bytes


def test_a_producer_block_may_be_read_for_two_blocks() -> None:
    """Only the destination must be distinct: a shared prefix may be listed twice."""
    made = case(Span([1, 2]), Span([3, 3]), num_tokens=32)
    assert selected(made).descriptors > 0


def test_extra_groups_in_spans_are_ignored() -> None:
    """Spans of a group that was skipped may still be given."""
    made = case(scattered(3, seed=1), scattered(3, seed=2), num_tokens=48)
    request = made.request
    local = {**request.local, "draft": Span([0])}
    made = replace(made, request=replace(request, local=local))
    assert selected(made).descriptors > 0


def test_skipped_groups_are_left_alone() -> None:
    """A group that the caller skips gets neither bytes nor zeros."""
    made = case(scattered(3, seed=1), scattered(3, seed=2), num_tokens=41)
    draft = GroupModel("draft", ("draft.0",), made.model[0].fields)
    both = replace(
        made,
        model=(*made.model, draft),
        consumer={**made.consumer, "draft": made.consumer["full"]},
    )
    consumer = both.consumer_pool()
    producers = made.producer_pools()
    fill_producer(next(iter(producers.values())), made.request)
    layouts = {key: pool.cache.layout for key, pool in producers.items()}
    with pytest.raises(ImpossiblePlan, match="'draft'"):
        prepare_plan(consumer.cache.layout, layouts)
    plan = prepare_plan(
        consumer.cache.layout, layouts, skip_groups=frozenset({"draft"})
    )
    selection = plan.select(
        num_tokens=41, local=made.request.local, remote=made.request.remote
    )
    assert [tail.group for tail in selection.tails] == ["full"]
    assert set(selection.untrusted) == {"full"}
