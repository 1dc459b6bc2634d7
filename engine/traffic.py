"""`Traffic`: who may post now, and who waits for a turn.

Bounds what is in flight, for the whole engine and for each peer; serves requests in
turns, the more urgent ones first, then those that have not begun; and posts no more
between two looks of the loop than it can afford, because a post may block for as long
as its bytes take (nixl-facts row 2).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import trio

from kvferry.engine.fabric.base import LARGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.engine.config import EngineConfig

__all__ = ("Lane", "Traffic", "Turn")

BURST_POSTS = 8
BURST_BYTES = 4 * 1024 * 1024
"""Posted at once, before everybody else on the loop has had a look: on one host a
megabyte takes about a quarter of a millisecond, a post of few bytes some tens of
microseconds."""


class Turn(NamedTuple):
    """One wave that wants to be posted.

    Attributes:
        wave: Its number in its request.
        peer: Whom it is from or for.
        size: About how many bytes.
        go: Posts it, told of its turn; must not raise.
    """

    wave: int
    peer: str
    size: int
    go: Callable[[Turn], None]


@dataclass(eq=False)
class Lane:
    """One request's waves that wait, in order.

    Attributes:
        priority: Lanes of a higher number are served first.
        has_begun: Whether one of its waves has been posted.
    """

    priority: int = 0
    waiting: deque[Turn] = field(default_factory=deque)
    has_begun: bool = False


class _Queue:
    """Lanes that take turns, by the peer that their next wave is for.

    Invariant: a peer with lanes is in ``ready``, unless it is full.
    """

    def __init__(self) -> None:
        self.lanes: dict[str, deque[Lane]] = {}
        self.ready: dict[str, None] = {}  # in order of their turns

    def add(self, lane: Lane) -> None:
        peer = lane.waiting[0].peer
        self.lanes.setdefault(peer, deque()).append(lane)
        self.ready.setdefault(peer)

    def remove(self, lane: Lane) -> None:
        peer = lane.waiting[0].peer
        self.lanes[peer].remove(lane)
        self._tidy(peer)

    def take(self, peer: str) -> Lane:
        """The lane whose turn it is; the peer goes to the end."""
        lane = self.lanes[peer].popleft()
        self._tidy(peer)
        if self.ready.pop(peer, 0) is None:
            self.ready[peer] = None
        return lane

    def _tidy(self, peer: str) -> None:
        if not self.lanes[peer]:
            del self.lanes[peer]
            self.ready.pop(peer, None)


class _Class:
    """The lanes of one priority: those that have not begun, and the others.

    The two are served in turns: a small request does not wait until each of the large
    ones has had a wave, and a flood of small ones leaves these every second turn.

    Invariant: a lane with something to wait for is in one of them.
    """

    def __init__(self) -> None:
        self.queues = _Queue(), _Queue()  # by `Lane.has_begun`
        self._turn = False

    def __bool__(self) -> bool:
        return any(queue.lanes for queue in self.queues)

    def add(self, lane: Lane) -> None:
        self.queues[lane.has_begun].add(lane)

    def remove(self, lane: Lane) -> None:
        self.queues[lane.has_begun].remove(lane)

    def next(self) -> _Queue | None:
        """Whose turn it is of those in which somebody is ready."""
        for which in (self._turn, not self._turn):
            if self.queues[which].ready:
                return self.queues[which]
        return None

    def begin_turn(self, lane: Lane) -> None:
        """Let a lane have its turn; the next is of the other kind, if it can be."""
        self._turn = not lane.has_begun
        lane.has_begun = True

    def take(self, queue: _Queue, peer: str) -> Turn:
        """The next wave for the peer; its lane goes to the end."""
        lane = queue.take(peer)
        self.begin_turn(lane)
        turn = lane.waiting.popleft()
        if lane.waiting:
            self.add(lane)
        return turn


class Traffic:
    """All waves of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_large: Callable[[int], None] = lambda _more: None,
    ) -> None:
        """Nothing is in flight.

        Args:
            config: The bounds.
            on_large: Told, before the post, of one wave of `LARGE_BYTES` more in
                flight, or one less.
        """
        self._config = config
        self._on_large = on_large
        self._classes: dict[int, _Class] = {}  # by priority, the most urgent first
        self._bytes = 0
        self._waves = 0
        self._peer_bytes: Counter[str] = Counter()
        self._waiting_bytes = 0
        self._burst_posts = 0
        self._burst_bytes = 0
        self._spent = trio.Event()
        self._eased: trio.Event | None = None  # somebody waits for it

    @property
    def waves_in_flight(self) -> int:
        """Posted and not settled."""
        return self._waves

    @property
    def bytes_in_flight(self) -> int:
        """Of these waves."""
        return self._bytes

    @property
    def bytes_waiting(self) -> int:
        """Of waves that wait for a turn: the engine's backlog."""
        return self._waiting_bytes

    async def wait_backlog(self, limit_bytes: int) -> None:
        """Wait until no more than so much waits for its turn."""
        while self._waiting_bytes > limit_bytes:
            self._eased = self._eased or trio.Event()
            await self._eased.wait()

    def ask(self, lane: Lane, turn: Turn) -> None:
        """Post a wave, now or when it is its turn."""
        if not self._waiting_bytes and self._has_room() and self._takes(turn.peer):
            # As mostly: nobody waits for anything.
            self._class(lane.priority).begin_turn(lane)
            self._waiting_bytes += turn.size
            self._post(turn)
            return
        lane.waiting.append(turn)
        if len(lane.waiting) == 1:
            self._class(lane.priority).add(lane)
        self._waiting_bytes += turn.size
        self._serve()

    def leave(self, peer: str, size: int) -> None:
        """A wave that was posted has settled."""
        self._waves -= 1
        self._bytes -= size
        self._peer_bytes[peer] -= size
        if not self._peer_bytes[peer]:
            del self._peer_bytes[peer]
        if size >= LARGE_BYTES:
            self._on_large(-1)
        if self._waiting_bytes:
            for lanes in self._classes.values():
                for queue in lanes.queues:
                    if peer in queue.lanes:
                        queue.ready.setdefault(peer)
            self._serve()

    def drop(self, lane: Lane) -> list[Turn]:
        """Take back what has not been posted: it never will be."""
        if not lane.waiting:
            return []
        self._class(lane.priority).remove(lane)
        dropped = list(lane.waiting)
        lane.waiting.clear()
        self._ease(sum(turn.size for turn in dropped))
        return dropped

    async def run(self) -> None:
        """Let the next burst begin when everybody has had a look, for ever."""
        while True:
            await self._spent.wait()  # lets others run, also if it is set already
            self._spent = trio.Event()
            self._burst_posts = self._burst_bytes = 0
            self._serve()

    def _class(self, priority: int) -> _Class:
        if priority not in self._classes:
            # Callers may number as they like, by deadline for one: only those of
            # which something waits are kept.
            kept = {p: lanes for p, lanes in self._classes.items() if lanes}
            kept[priority] = _Class()
            self._classes = dict(sorted(kept.items(), reverse=True))
        return self._classes[priority]

    def _serve(self) -> None:
        """Post for whoever's turn it is, as far as bounds and burst allow."""
        for lanes in tuple(self._classes.values()):
            while (queue := lanes.next()) is not None and self._has_room():
                peer = next(iter(queue.ready))
                if self._takes(peer):
                    self._post(lanes.take(queue, peer))
                else:
                    del queue.ready[peer]  # until one of its waves leaves

    def _post(self, turn: Turn) -> None:
        self._waves += 1
        self._bytes += turn.size
        self._peer_bytes[turn.peer] += turn.size
        self._burst_posts += 1
        self._burst_bytes += turn.size
        if self._burst_posts >= BURST_POSTS or self._burst_bytes >= BURST_BYTES:
            # Now, not when somebody waits: who comes after that look finds room.
            self._spent.set()
        self._ease(turn.size)
        if turn.size >= LARGE_BYTES:
            self._on_large(1)
        turn.go(turn)

    def _has_room(self) -> bool:
        if self._waves and (
            self._waves >= self._config.max_waves_in_flight
            or self._bytes >= self._config.max_bytes_in_flight
        ):
            return False
        return not self._spent.is_set()

    def _takes(self, peer: str) -> bool:
        """Whether not too much is in flight from or to a peer."""
        return self._peer_bytes[peer] < self._config.max_peer_bytes_in_flight

    def _ease(self, size: int) -> None:
        self._waiting_bytes -= size
        if self._eased is not None:
            self._eased.set()
            self._eased = None
