"""`Intake`: which of the notices that arrive are for somebody here.

Anyone may send notices, in any number and under any name (nixl-facts rows 17 and 26).
One that does not show a token that a landing has chosen is dropped unread, at the cost
of a look into a table; so a flood keeps no transfer's own notices from it. Who was told
a token has a budget of its own: each part counts once, and there are only so many. What
is left is handed over a bounded number at a time, so that the loop is held up by nobody.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.engine.budget import SeldomLog
from kvferry.protocol.errors import ProtocolViolation
from kvferry.protocol.notices import AHEAD, decode_notice, shown_token
from kvferry.protocol.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.fabric.base import Notice

__all__ = ("MAX_PARTS", "MOST_AT_ONCE", "Intake")

MAX_PARTS = 2**20
"""Parts of one source of one landing, as many as its lifecycle takes."""

MOST_AT_ONCE = 256
"""Notices handed over in one round of the pump: some milliseconds of work."""


@dataclass(slots=True)
class _Expected:
    """One token: who hears of its parts, and which have come, a bit for each."""

    on_part: Callable[[int], None]
    seen: bytearray = field(default_factory=bytearray)

    def note(self, part: int) -> bool:
        """Whether the part is new, and none that nobody would take."""
        if part >= MAX_PARTS:
            return False
        byte, bit = (part - AHEAD) >> 3, 1 << ((part - AHEAD) & 7)
        if byte >= len(self.seen):
            self.seen.extend(bytes(byte + 1 - len(self.seen)))
        is_new = not self.seen[byte] & bit
        self.seen[byte] |= bit
        return is_new


class Intake:
    """The tokens that are out, and the notices that have shown one.

    Attributes:
        strays: Notices that nobody has asked for, or that had come before.
    """

    def __init__(self, *, log: FilteringBoundLogger) -> None:
        self.strays = 0
        self._log = SeldomLog(log, burst=1.0)
        self._expected: dict[bytes, _Expected] = {}
        self._arrived: deque[tuple[_Expected, bytes, int]] = deque()

    @property
    def tokens(self) -> tuple[bytes, ...]:
        """Those that are out."""
        return tuple(self._expected)

    def expect(self, token: bytes, on_part: Callable[[int], None]) -> None:
        """Let the notices in that show this token; the call must not raise or block."""
        self._expected[token] = _Expected(on_part)

    def forget(self, token: bytes) -> None:
        """No notice is expected any more; those that wait are strays."""
        self._expected.pop(token, None)

    def take(self, notice: Notice) -> None:
        """Sort one that has arrived; constant work, whatever it is."""
        token = shown_token(notice.payload)
        expected = None if token is None else self._expected.get(token)
        if token is None or expected is None:
            self._drop(notice, "no token that is out")
            return
        try:
            part = decode_notice(notice.payload).part
        except ProtocolViolation as error:
            self._drop(notice, str(error))
            return
        if expected.note(part):
            self._arrived.append((expected, token, part))
        else:
            self._drop(notice, "a part that has come, or that there is not")

    def hand_over(self) -> bool:
        """Tell of what has arrived, in order.

        Returns:
            Whether there is more than was told at once.
        """
        for _ in range(min(MOST_AT_ONCE, len(self._arrived))):
            expected, token, part = self._arrived.popleft()
            if self._expected.get(token) is expected:
                expected.on_part(part)
            else:
                self.strays += 1  # it ended while this one waited
        return bool(self._arrived)

    def _drop(self, notice: Notice, why: str) -> None:
        self.strays += 1
        self._log.warning("stray_notice", sender=printable(notice.sender), notice=why)
