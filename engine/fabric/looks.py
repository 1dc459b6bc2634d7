"""`Looks`: whether looks at an agent are long, as far as has been seen.

Until it is known, those at large transfers are taken to be: the first may be as long as
all that several peers have to send. Whoever has the agent tells of its looks, the loop
or a thread, and never both at once.
"""

from __future__ import annotations

from math import inf
from time import perf_counter

__all__ = ("HOME_S", "LONG_S", "TELLING_LOOKS", "Looks")

LONG_S = 0.001
"""Looks that take longer are a thread's. It is measured by the looking thread's own
time: what another process takes from a short look is no reason."""

HOME_S = 1.0
"""Two long looks within it want a thread: one comes by itself when an agent is first
met. After so long without one the loop has the agent again: a thread costs small
transfers half a millisecond each."""

TELLING_LOOKS = 8
"""Of one thread. After so many long ones the transport is known for them, for good;
after so many in a row that were not, each with news, for the contrary."""


class Looks:
    """What is known of them.

    Attributes:
        are_long: They are, or they are not; None as long as neither is known.
        long_s: A look that takes longer is long.
        home_s: For how long one is of importance.
    """

    def __init__(self, *, long_s: float = LONG_S, home_s: float = HOME_S) -> None:
        """Nothing is known."""
        self.are_long: bool | None = None
        self.long_s = long_s
        self.home_s = home_s
        self._long_at = -inf  # the last one
        self._long = self._quick = 0  # the thread's

    @property
    def _is_quiet(self) -> bool:
        """There has been no long one for a while."""
        return perf_counter() > self._long_at + self.home_s

    def loop_took(self, took_s: float) -> bool:
        """A look of the loop's is over; whether the next is to be a thread's."""
        if took_s <= self.long_s:
            return False
        is_first = self._is_quiet
        self._long_at = perf_counter()
        return bool(self.are_long) or not is_first

    def begin_aside(self) -> None:
        """The looks are a thread's from now on."""
        self._long_at = perf_counter()
        self._long = self._quick = 0

    def thread_took(self, took_s: float, *, has_news: bool) -> bool:
        """One of its looks is over; whether the next may be the loop's."""
        if took_s > self.long_s:
            self._long_at = perf_counter()
            self._long, self._quick = self._long + 1, 0
            if self._long == TELLING_LOOKS:
                self.are_long = True
            return False
        self._quick += has_news
        if self._quick == TELLING_LOOKS and self.are_long is None:
            self.are_long = False
            self._long_at = -inf
        return self._is_quiet
