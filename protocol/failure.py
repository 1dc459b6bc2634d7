"""`Failure`: an error of kvferry as the ranks of an instance tell it to each other."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.protocol import errors
from kvferry.protocol.errors import FerryError, TransferError
from kvferry.protocol.identity import Rank

__all__ = ("Detail", "Failure", "as_detail", "failure_of")

LONGEST_DETAIL = 1024
Detail = Annotated[str, msgspec.Meta(max_length=LONGEST_DETAIL)]

_KINDS: dict[str, type[FerryError]] = {
    name: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, FerryError)
}
"""The classes that a name from the wire may lead to; nothing else is ever looked up."""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is told of an error; which bytes it leaves untrusted is each rank's own.

    Attributes:
        kind: Name of its class.
        origin: The rank where it began.
    """

    kind: Annotated[str, msgspec.Meta(max_length=64)]
    origin: Rank
    detail: Detail
    peer: Detail | None = None
    phase: Detail | None = None
    request_id: Detail | None = None

    def error(self) -> FerryError:
        """The error again: of its own class, or of `TransferError` if we have no such."""
        error = _KINDS.get(self.kind, TransferError)(self.detail)
        error.peer, error.phase = self.peer, self.phase
        error.request_id, error.origin = self.request_id, str(self.origin)
        return error


def failure_of(error: BaseException, origin: Rank) -> Failure:
    """What there is to tell of any exception that work has raised."""
    error = _first_of(error)
    if not isinstance(error, FerryError):
        told = as_detail(f"{type(error).__name__}: {error}")
        return Failure(TransferError.__name__, origin, told)
    peer, phase, request_id = (
        None if fact is None else as_detail(fact)
        for fact in (error.peer, error.phase, error.request_id)
    )
    detail = as_detail(error.detail)
    # A caller may have made a class of its own below one of ours.
    kinds = (kind.__name__ for kind in type(error).__mro__ if kind in _KINDS.values())
    return Failure(next(kinds), origin, detail, peer, phase, request_id)


def _first_of(error: BaseException) -> BaseException:
    """What a group is about, as a nursery raises it: the first error of ours in it."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_first_of(inner) for inner in error.exceptions]
    ours = (inner for inner in found if isinstance(inner, FerryError))
    return next(ours, found[0])


def as_detail(text: str) -> str:
    """Any text as a message can carry it: it may be an exception's of the caller's."""
    return (
        text[:LONGEST_DETAIL]
        .encode(errors="backslashreplace")
        .decode()[:LONGEST_DETAIL]
    )
