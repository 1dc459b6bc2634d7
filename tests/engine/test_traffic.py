"""Who may post now: bounds, turns, urgency, and bursts no longer than the loop bears."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine import EngineConfig
from kvferry.engine.fabric.base import LARGE_BYTES
from kvferry.engine.traffic import (
    BURST_BYTES,
    BURST_POSTS,
    Lane,
    Traffic,
    Turn,
)
from tests.kit import IDENTITY

if TYPE_CHECKING:
    from collections.abc import Callable


class Road:
    """A traffic whose posts are written down."""

    def __init__(self, **limits: int) -> None:
        limits = {
            "max_bytes_in_flight": 1000,
            "max_peer_bytes_in_flight": 1000,
        } | limits
        config = EngineConfig(engine_id="e", identity=IDENTITY, **limits)
        self.traffic = Traffic(config, on_large=self._count_large)
        self.large = 0
        self.large_at_posts: list[int] = []
        self.posted: list[tuple[str, int]] = []

    def ask(self, name: str, lane: Lane, wave: int, size: int = 1, peer: str = "p"):
        self.traffic.ask(lane, Turn(wave, peer, size, partial(self._go, name)))

    def _count_large(self, more: int) -> None:
        self.large += more

    def _go(self, name: str, turn: Turn) -> None:
        self.large_at_posts.append(self.large)
        self.posted.append((name, turn.wave))


@pytest.fixture
async def running(nursery) -> Callable[..., Road]:
    """Roads whose next bursts begin by themselves."""

    def make(**limits: int) -> Road:
        road = Road(**limits)
        nursery.start_soon(road.traffic.run)
        return road

    return make


async def test_requests_take_turns(autojump_clock, running) -> None:
    """One large request does not make small ones wait for its end."""
    road = running(max_waves_in_flight=1)
    large, small = Lane(), Lane()
    for wave in range(5):
        road.ask("large", large, wave)
    for wave in range(2):
        road.ask("small", small, wave)
    for _ in range(7):
        road.traffic.leave("p", 1)
    assert [name for name, _ in road.posted] == [
        "large",
        "large",
        "small",
        "large",
        "small",
        "large",
        "large",
    ]
    assert [w for n, w in road.posted if n == "large"] == list(range(5))


async def test_a_burst_that_has_ended_delays_nobody(autojump_clock, running) -> None:
    """Its last post was long ago: who asks now is served in his own step."""
    road = running()
    for name in ("first", "second"):
        road.ask(name, Lane(), 0, size=BURST_BYTES)
        assert road.posted[-1] == (name, 0)
        road.traffic.leave("p", BURST_BYTES)
        await trio.testing.wait_all_tasks_blocked()


async def test_the_more_urgent_goes_first(autojump_clock, running) -> None:
    """Among those that wait; what is in flight is not called back."""
    road = running(max_waves_in_flight=1)
    slow, quick = Lane(), Lane(priority=1)
    for wave in range(3):
        road.ask("slow", slow, wave)
    for wave in range(2):
        road.ask("quick", quick, wave)
    for _ in range(5):
        road.traffic.leave("p", 1)
    assert [n for n, _ in road.posted] == ["slow", "quick", "quick", "slow", "slow"]


async def test_any_number_of_priorities_leaves_nothing_behind(
    autojump_clock, running
) -> None:
    """A caller may number its requests by their deadlines."""
    road = running(max_waves_in_flight=1)
    road.ask("first", Lane(-1), 0)
    for number in range(1000):
        road.ask("r", Lane(number), number)
        road.traffic.leave("p", 1)
        await trio.testing.wait_all_tasks_blocked()
    assert [wave for _, wave in road.posted] == [0, *range(1000)]
    assert len(road.traffic._classes) <= 2


async def test_a_full_peer_keeps_nobody_else_back(autojump_clock, running) -> None:
    """Its waves wait; those of others pass, and its own go on when one has left."""
    road = running(max_peer_bytes_in_flight=2)
    hung, well = Lane(), Lane()
    for wave in range(4):
        road.ask("hung", hung, wave, peer="hung")
    for wave in range(2):
        road.ask("well", well, wave, peer="well")
    assert road.posted == [("hung", 0), ("hung", 1), ("well", 0), ("well", 1)]
    road.traffic.leave("hung", 1)
    assert road.posted[4:] == [("hung", 2)]


async def test_no_more_bytes_than_allowed_and_a_large_wave_goes_alone(
    autojump_clock, running
) -> None:
    """A wave longer than the bound would otherwise wait for ever."""
    road = running(max_bytes_in_flight=10, max_peer_bytes_in_flight=10)
    lane = Lane()
    for wave in range(3):
        road.ask("r", lane, wave, size=50)
    assert road.posted == [("r", 0)]
    assert road.traffic.bytes_waiting == 100
    road.traffic.leave("p", 50)
    assert road.posted == [("r", 0), ("r", 1)]


async def test_it_tells_of_each_large_wave_in_flight_and_before_its_post(
    autojump_clock, running
) -> None:
    """Not of small ones, however many, nor of those that wait or are dropped."""
    bounds = {"max_bytes_in_flight": 2**40, "max_peer_bytes_in_flight": 2**40}
    road = running(max_waves_in_flight=4, **bounds)
    lane = Lane()
    sizes = [LARGE_BYTES, LARGE_BYTES - 1, 2 * LARGE_BYTES] * 2
    for wave, size in enumerate(sizes):
        road.ask("r", lane, wave, size)
        await trio.testing.wait_all_tasks_blocked()
    assert road.large_at_posts == [1, 1, 2, 3]
    assert len(road.traffic.drop(lane)) == 2
    for left, size in zip([2, 2, 1, 0], sizes, strict=False):
        road.traffic.leave("p", size)
        assert road.large == left


async def test_a_burst_is_bounded_and_the_next_begins_behind_all_others(
    autojump_clock, running
) -> None:
    """However many ask at once, each task on the loop gets its look in between."""
    road = running(max_waves_in_flight=1000)
    looks = []
    await trio.testing.wait_all_tasks_blocked()
    for wave in range(3 * BURST_POSTS):
        road.ask("r", Lane(), wave)
    assert len(road.posted) == BURST_POSTS
    while len(road.posted) < 3 * BURST_POSTS:
        looks.append(len(road.posted))
        await trio.lowlevel.checkpoint()
    assert max(b - a for a, b in itertools.pairwise(looks)) <= BURST_POSTS


async def test_a_burst_of_large_waves_is_shorter(autojump_clock, running) -> None:
    """Bytes count as well: a post may copy them."""
    road = running(max_bytes_in_flight=2**40, max_peer_bytes_in_flight=2**40)
    for wave in range(4):
        road.ask("r", Lane(), wave, size=BURST_BYTES)
    assert len(road.posted) == 1


async def test_what_is_dropped_is_never_posted(autojump_clock, running) -> None:
    """And makes no room, for it took none."""
    road = running(max_waves_in_flight=1)
    mine, other = Lane(), Lane()
    for wave in range(3):
        road.ask("mine", mine, wave)
    road.ask("other", other, 0)
    assert [turn.wave for turn in road.traffic.drop(mine)] == [1, 2]
    assert road.traffic.drop(mine) == []
    road.traffic.leave("p", 1)
    road.traffic.leave("p", 1)
    assert road.posted == [("mine", 0), ("other", 0)]
    assert road.traffic.bytes_in_flight == road.traffic.bytes_waiting == 0


async def test_a_caller_can_wait_for_the_backlog_to_shrink(
    autojump_clock, running, nursery
) -> None:
    """So that a scheduler does not pile more upon what cannot be posted yet."""
    road = running(max_waves_in_flight=1)
    lane, over = Lane(), []
    for wave in range(4):
        road.ask("r", lane, wave, size=10)
    assert road.traffic.bytes_waiting == 30

    async def wait() -> None:
        await road.traffic.wait_backlog(10)
        over.append(road.traffic.bytes_waiting)

    nursery.start_soon(wait)
    for _ in range(2):
        await trio.testing.wait_all_tasks_blocked()
        assert over == []
        road.traffic.leave("p", 10)
    await trio.testing.wait_all_tasks_blocked()
    assert over == [10]


Wave = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 40))


@settings(max_examples=300, deadline=None)
@given(
    waves=st.lists(Wave, max_size=40),
    leaves=st.randoms(use_true_random=False),
    bound=st.integers(1, 60),
)
def test_every_wave_is_posted_once_in_its_order_and_within_the_bounds(
    waves, leaves, bound
) -> None:
    """Whatever comes and goes, in any order: nothing is forgotten, nothing overtakes."""

    async def main() -> None:
        road = Road(
            max_bytes_in_flight=bound,
            max_peer_bytes_in_flight=bound,
            max_waves_in_flight=3,
        )
        lanes = [Lane(priority=number % 2) for number in range(4)]
        sizes, flying, asked = {}, [], [0] * 4
        async with trio.open_nursery() as nursery:
            nursery.start_soon(road.traffic.run)
            for lane, peer, size in waves:
                wave, asked[lane] = asked[lane], asked[lane] + 1
                sizes[str(lane), wave] = (str(peer), size)
                seen = len(road.posted)
                road.ask(str(lane), lanes[lane], wave, size, str(peer))
                flying += road.posted[seen:]
            while flying or road.traffic.bytes_waiting:
                await trio.testing.wait_all_tasks_blocked()
                flying = [w for w in road.posted if w in sizes]
                load = [sizes[w] for w in flying]
                assert len(load) <= 3
                assert sum(size for _, size in load[:-1]) < bound
                if flying:
                    gone = leaves.choice(flying)
                    road.traffic.leave(*sizes.pop(gone))
            nursery.cancel_scope.cancel()
        for number in range(4):
            mine = [wave for name, wave in road.posted if name == str(number)]
            assert mine == list(range(asked[number]))
        assert road.traffic.bytes_in_flight == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_new_request_waits_for_one_wave_of_others_not_for_one_of_each(
    autojump_clock, running
) -> None:
    """However many large ones there are; and new ones without end do not stop these."""
    road = running(max_waves_in_flight=1)
    larges = [Lane() for _ in range(10)]
    for wave in range(9):
        for lane in larges:
            road.ask("large", lane, wave)
    for _ in range(20):
        road.traffic.leave("p", 1)
        await trio.testing.wait_all_tasks_blocked()
    for n in range(10):
        road.ask(f"small {n}", Lane(), 0)
    for _ in range(20):
        road.traffic.leave("p", 1)
        await trio.testing.wait_all_tasks_blocked()
    names = [name for name, _ in road.posted[21:]]
    assert names.count("large") == 10
    assert [name for name in names if name != "large"] == [
        f"small {n}" for n in range(10)
    ]
    assert all("large" in pair for pair in itertools.pairwise(names))
