"""What callers pass, as plain values that every message can carry.

A message that a peer must refuse ends the link, and with it everybody else's
requests: so what callers say is held against the wire's limits before anybody hears
of it. Whole numbers of any kind are welcome, numpy's and torch's, too.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from kvferry.engine.spans import Span
from kvferry.protocol.errors import MisuseError
from kvferry.protocol.ticket import MAX_SPAN_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("check_request_id", "plain_span", "whole")

LONGEST_REQUEST_ID = 256
TOO_MANY = 2**40
"""Tokens of no request: positions are smaller than that, as the messages have it."""


def check_request_id(request_id: object) -> None:
    """Refuse an id that no peer would take.

    Raises:
        MisuseError: It is no string, empty, too long, or not to be encoded.
    """
    if not isinstance(request_id, str) or not _is_sendable(request_id):
        raise MisuseError(
            f"a request id has 1 to {LONGEST_REQUEST_ID} characters of Unicode, not"
            f" {request_id!r:.80}"
        )


def _is_sendable(text: str) -> bool:
    """Some strings are no Unicode: half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return 0 < len(text) <= LONGEST_REQUEST_ID


def whole(value: object, name: str) -> int:
    """A whole number as Python has it.

    Raises:
        MisuseError: It is none, or further from zero than any position.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type] # that is the question
    except TypeError:
        raise MisuseError(f"{name} is a whole number, not {value!r:.80}") from None
    if abs(number) >= TOO_MANY:
        raise MisuseError(f"{name} must be within 2**40, not {number}")
    return number


def plain_span(given: Sequence[int | None] | Span, *, first_token: int) -> Span:
    """Blocks as a span; a plain list begins at ``first_token``.

    Raises:
        MisuseError: As `whole`, or more blocks than a message carries.
    """
    if isinstance(given, Span):
        span = Span(given.block_ids, whole(given.first_token, "first_token"))
    else:
        span = Span(given, first_token)
    if len(span.block_ids) > MAX_SPAN_BLOCKS:
        raise MisuseError(
            f"{len(span.block_ids)} blocks, no peer takes over {MAX_SPAN_BLOCKS}"
        )
    return span
