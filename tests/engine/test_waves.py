"""A request's descriptors in bounded waves, and that the loop runs on between them."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.descriptors import DescriptorIds
from kvferry.engine.selection import SectionSelection
from kvferry.engine.traffic import BURST_POSTS
from kvferry.engine.waves import Waves
from tests.kit import GROUP, Pool, World, agent

segments = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 12)), min_size=1, max_size=5
)


def section(index, pairs, first) -> SectionSelection:
    """A section whose ids are all different: stretches of (run bytes, descriptors)."""
    count = sum(size for _, size in pairs)
    ids = np.arange(first, first + count, dtype=np.int32)
    return SectionSelection(index, ids, ids + np.int32(7), pairs)


@given(
    peers=st.lists(st.lists(segments, max_size=3), min_size=1, max_size=4),
    max_bytes=st.integers(1, 1000),
)
def test_waves_cover_every_descriptor_once(peers, max_bytes) -> None:
    """Each within its bound, in order, and the peers take turns."""
    keys = [f"peer {i}" for i in range(len(peers))]
    chosen, first = {}, 0
    for key, parts in zip(keys, peers, strict=True):
        sections = []
        for index, pairs in enumerate(parts):
            sections.append(section(index, pairs, first))
            first += sections[-1].descriptors
        if sections:  # a selection may lack a peer
            chosen[key] = tuple(sections)
    waves = Waves(SimpleNamespace(peers=chosen), keys, max_bytes=max_bytes)

    seen = {key: [] for key in keys}
    for wave in waves:
        runs = wave.selected.run_bytes()[wave.slice]
        assert runs.size >= 1
        assert runs.sum() <= max_bytes or runs.size == 1
        seen[keys[wave.source]] += wave.selected.local_ids[wave.slice].tolist()
    for key in keys:
        wanted = [i for part in chosen.get(key, ()) for i in part.local_ids.tolist()]
        assert seen[key] == wanted
    # No peer is asked for its wave n + 1 before all others had their wave n.
    counts = dict.fromkeys(range(len(keys)), 0)
    totals = {s: sum(wave.source == s for wave in waves) for s in counts}
    for wave in waves:
        turn = counts[wave.source]
        assert all(counts[s] >= min(turn, totals[s]) for s in counts)
        counts[wave.source] += 1


@given(pairs=segments, max_bytes=st.integers(1, 1000))
def test_no_wave_is_smaller_than_it_must_be(pairs, max_bytes) -> None:
    """The next descriptor would not have fitted."""
    (*full, _last), part = _waves(pairs, max_bytes)
    runs = part.run_bytes()
    for wave in full:
        assert runs[wave.slice].sum() + runs[wave.slice.stop] > max_bytes


def _waves(pairs, max_bytes):
    part = section(0, pairs, 0)
    selection = SimpleNamespace(peers={"p": (part,)})
    return Waves(selection, ["p"], max_bytes=max_bytes), part


class PostsInAStep(trio.abc.Instrument):
    """The most posts that any task makes between two checkpoints."""

    def __init__(self, world, engine) -> None:
        self.most = 0
        self._calls = world.network.faults.calls
        self._key = (agent(engine), "post")
        self._before = self._calls[self._key]

    def after_task_step(self, _task) -> None:
        """Compare."""
        now = self._calls[self._key]
        self.most = max(self.most, now - self._before)
        self._before = now


async def test_a_copy_that_is_done_at_once_does_not_hold_the_loop(
    autojump_clock,
) -> None:
    """On one host a post returns when its bytes are there: others run in between."""
    world, producer, consumer = (
        World(latency_s=0, bytes_per_s=float("inf")),
        Pool(64),
        Pool(64),
    )
    async with world.pair(producer, consumer, wave_bytes=1, window=2) as (
        prefill,
        decode,
    ):
        warm = prefill.offer("w", producer.stamp([0], num_tokens=4), num_tokens=4)
        await decode.pull(warm.ticket, {GROUP: [0]})
        given_blocks = producer.stamp(range(60), num_tokens=240)
        offer = prefill.offer("r", given_blocks, num_tokens=240)
        steps = PostsInAStep(world, decode)
        trio.lowlevel.add_instrument(steps)
        report = await decode.pull(offer.ticket, {GROUP: list(range(60))})
        trio.lowlevel.remove_instrument(steps)
        assert report.waves == 120
        assert steps.most <= BURST_POSTS
    consumer.check(range(60), num_tokens=240)


async def test_no_more_than_the_window_is_in_flight(autojump_clock) -> None:
    """Bytes in flight of one pull are bounded by window x wave_bytes."""
    world, producer, consumer = World(), Pool(64), Pool(64)
    async with world.pair(producer, consumer, wave_bytes=400, window=3) as (
        prefill,
        decode,
    ):
        given_blocks = producer.stamp(range(60), num_tokens=240)
        offer = prefill.offer("r", given_blocks, num_tokens=240)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, decode.statistics()["fabric_transfers"])
                await trio.sleep(0.0005)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await decode.pull(offer.ticket, {GROUP: list(range(60))})
            nursery.cancel_scope.cancel()
        assert most == 3


async def test_a_small_pull_is_not_held_up_by_a_large_one(autojump_clock) -> None:
    """Each pull has a window of its own: the small one is done long before."""
    world, producer, consumer = World(bytes_per_s=1e5), Pool(64), Pool(64)
    async with world.pair(producer, consumer, wave_bytes=800, window=2) as (
        prefill,
        decode,
    ):
        large = prefill.offer(
            "large", producer.stamp(range(60), num_tokens=240), num_tokens=240
        )
        small = prefill.offer("small", producer.stamp([63], num_tokens=4), num_tokens=4)
        done: list[str] = []

        async def one(offer, blocks) -> None:
            await decode.pull(offer.ticket, {GROUP: blocks})
            done.append(offer.ticket.request_id)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, large, list(range(60)))
            await trio.sleep(0.05)
            nursery.start_soon(one, small, [63])
            await trio.sleep(0.05)
            assert done == ["small"]
        assert done == ["small", "large"]


grids = st.lists(
    st.tuples(
        st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
        st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
    ),
    max_size=4,
)


@given(pairs=grids, data=st.data())
def test_ids_of_a_slice_are_those_of_the_whole(pairs, data) -> None:
    """Whatever rows and grids the slice cuts through."""
    whole = [row + unit for rows, units in pairs for row in rows for unit in units]
    arrays = [(np.array(r, np.int32), np.array(u, np.int32)) for r, u in pairs]
    ids = DescriptorIds(arrays)
    assert ids.size == len(whole)
    assert ids.tolist() == np.asarray(ids).tolist() == whole
    first, last = data.draw(st.tuples(*[st.integers(0, len(whole))] * 2))
    some = ids[first:last]
    assert some.tolist() == whole[first:last]
    assert some.dtype == np.int32
    assert some.flags.c_contiguous


def test_a_huge_request_is_neither_cut_nor_numbered_all_at_once() -> None:
    """40 GB in 80 layers: what is made before the first post does not grow with them."""
    units = np.arange(100_000, dtype=np.int32)
    ids = DescriptorIds([(np.arange(80, dtype=np.int32) * 100_000, units)])
    stretches = [(65536, 80 * 100_000)]
    tracemalloc.start()
    try:
        part = SectionSelection(0, ids, ids, stretches)
        waves = Waves(SimpleNamespace(peers={"p": (part,)}), ["p"], max_bytes=1 << 23)
        assert len(waves) == 62_500
        last = waves[-1]
        assert part.local_ids[last.slice].tolist() == list(range(7_999_872, 8_000_000))
        assert tracemalloc.get_traced_memory()[1] < 16 * 62_500 * 8
    finally:
        tracemalloc.stop()
