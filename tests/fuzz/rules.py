"""What a refusal is: a `FerryError`, told in one printable line of bounded length."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kvferry.protocol.errors import FerryError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

LONGEST_LINE = 20_000


def refused(call: Callable[[], T]) -> T | None:
    """What the call returns; None if it refuses, as it should."""
    line = ""
    try:
        return call()
    except FerryError as error:
        line = str(error)
    assert line.isprintable(), line[:1000]
    assert len(line) < LONGEST_LINE, line[:1000]
    return None
