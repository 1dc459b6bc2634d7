"""Budgets: how much of something anybody may cause in a while, log lines for one.

What a peer or a stranger can repeat at will must not fill a disk, or take the loop's
time: the first of it is told, and of the rest how many there were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ("Budget", "SeldomLog")


class Budget:
    """So much at once, and from then on so much a second.

    Args:
        burst: Most that may be taken at once.
        per_s: How fast what was taken comes back.
    """

    def __init__(self, *, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._left = burst
        self._at = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether less than one is left."""
        now = trio.current_time()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        return self._left < 1

    def take(self) -> bool:
        """Take one, if there is one."""
        if self.is_spent:
            return False
        self._left -= 1
        return True

    def spend(self, amount: float) -> None:
        """Take what something has cost, known only afterwards; it may leave a debt."""
        self._left -= amount


class SeldomLog:
    """Warnings that somebody else can cause as often as he likes.

    Attributes:
        unlogged: How many were passed over since the last line; that line says it.
    """

    def __init__(
        self, log: FilteringBoundLogger, *, burst: float = 20.0, per_s: float = 0.2
    ) -> None:
        self.unlogged = 0
        self._log = log
        self._budget = Budget(burst=burst, per_s=per_s)

    def warning(self, event: str, **facts: Any) -> None:  # noqa: ANN401 - as structlog
        """Log it, if not too much has been logged lately."""
        if not self._budget.take():
            self.unlogged += 1
            return
        if self.unlogged:
            facts["unlogged_before"], self.unlogged = self.unlogged, 0
        self._log.warning(event, **facts)
