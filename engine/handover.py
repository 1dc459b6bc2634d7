"""`Handover`: calls that worker threads make beside the loop, without a hop for each.

A call that is handed over waits for no turn of the loop, which may be in the middle of
a post: while a thread is at work it takes the next one by itself. What comes of a call
is told on the loop. Here, as in the fabric, is a place for threads.
"""

from __future__ import annotations

from queue import Empty, Queue
from typing import TYPE_CHECKING, NamedTuple

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("Handover",)

LINGER_S = 0.02
"""How long a thread waits for more before it ends: waves come every few milliseconds."""


class _Call(NamedTuple):
    """What to do beside the loop, and what to do on it then."""

    make: Callable[[], None]
    on_end: Callable[[], None]


class Handover:
    """Calls in the order they came, and the threads that make them.

    Invariant: while there are calls there is a thread, or a task that starts one.
    """

    def __init__(self, nursery: trio.Nursery, *, threads: int) -> None:
        """No thread yet.

        Args:
            nursery: The engine's: it ends after the last call that has begun.
            threads: How many may be at work at once.
        """
        self._nursery = nursery
        self._most = threads
        self._limiter = trio.CapacityLimiter(threads)
        # Not a SimpleQueue, whose `get` may forget its timeout (CPython 3.11).
        self._calls: Queue[_Call] = Queue()
        self._threads = self._under_way = 0
        self._token = trio.lowlevel.current_trio_token()

    def expect(self) -> None:
        """Calls are near: have a thread ready for them."""
        if not self._threads:
            self._start()

    def hand(self, make: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Have a call made, as soon as a thread is free.

        Args:
            make: Called in a thread; must not raise.
            on_end: Called on the loop thereafter; must not raise.
        """
        self._under_way += 1
        self._calls.put(_Call(make, on_end))
        if self._threads < min(self._under_way, self._most):
            self._start()

    def _start(self) -> None:
        self._threads += 1
        self._nursery.start_soon(self._work)

    async def _work(self) -> None:
        while True:
            await trio.to_thread.run_sync(self._make_all, limiter=self._limiter)
            # What came after the thread had given up waiting.
            if self._calls.empty():
                self._threads -= 1
                return

    def _make_all(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=LINGER_S)
            except Empty:
                return
            call.make()
            self._token.run_sync_soon(self._ended, call)

    def _ended(self, call: _Call) -> None:
        self._under_way -= 1
        call.on_end()
