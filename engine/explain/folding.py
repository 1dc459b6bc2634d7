"""Equal things told once, and numbers as people read them."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ("bytes_of", "fold_names", "folded", "plural", "ranks", "tokens")

_NAME_PIECES = 6

ItemT = TypeVar("ItemT")


def folded(
    items: Iterable[ItemT], shape: Callable[[ItemT], object]
) -> Iterator[list[ItemT]]:
    """Items of equal shape together, in the order of the first of each."""
    folds: dict[object, list[ItemT]] = {}
    for item in items:
        folds.setdefault(shape(item), []).append(item)
    yield from folds.values()


def ranks(keys: Sequence[object]) -> str:
    """``producer 0``, ``producers 0-7 (8)``."""
    return f"{plural('producer', len(keys))} {fold_names([str(key) for key in keys])}"


def fold_names(names: Sequence[str]) -> str:
    """Names that count on as ranges: ``layers.0-60``, ``layers.3-59 by 4``."""
    pieces: list[str] = []
    for frame, members in groupby(map(_split, names), key=lambda split: split[::2]):
        before, after = frame
        numbers = [int(number) for _, number, _ in members if number]
        if numbers:
            pieces += [f"{before}{text}{after}" for text in _stretches(numbers)]
        else:
            pieces.append(before)
    if len(pieces) > _NAME_PIECES:
        pieces = [*pieces[: _NAME_PIECES - 2], "...", pieces[-1]]
    count = f" ({len(names)})" if len(names) > 1 else ""
    return ", ".join(pieces) + count


def _split(name: str) -> tuple[str, str, str]:
    """Before, in and after the last number of a name."""
    found = re.fullmatch(r"(.*?)(\d+)(\D*)", name, re.DOTALL)
    before, number, after = found.groups() if found else (name, "", "")
    # "007" would not come back from a number.
    return (
        (before, number, after) if number == str(int(number or 0)) else (name, "", "")
    )


def _stretches(numbers: Sequence[int]) -> Iterator[str]:
    """Arithmetic progressions, one text each."""
    first = 0
    while first < len(numbers):
        last = first + 1
        step = numbers[last] - numbers[first] if last < len(numbers) else 0
        while last < len(numbers) and numbers[last] - numbers[last - 1] == step:
            last += 1
        if last - first < 3 and step != 1:
            last = first + 1
        by = f" by {step}" if step != 1 else ""
        run = f"-{numbers[last - 1]}{by}" if last - first > 1 else ""
        yield f"{numbers[first]}{run}"
        first = last


def plural(noun: str, count: int) -> str:
    """The noun as it goes with the count."""
    return noun if count == 1 else f"{noun}s"


def tokens(count: int) -> str:
    """``16 tokens``, ``1 token``."""
    return f"{count:,} {plural('token', count)}"


def bytes_of(count: int) -> str:
    """``2,048 bytes``, and from a mebibyte on ``12.5 MiB``."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):,.1f} {unit}"
    return f"{count:,} bytes"
