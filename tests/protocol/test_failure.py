"""Errors as ranks tell them to each other: the same class again, and no other."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.protocol import errors
from kvferry.protocol.errors import (
    FerryError,
    HandshakeRefused,
    LeaseExpired,
    TransferError,
)
from kvferry.protocol.failure import Failure, failure_of
from kvferry.protocol.identity import Rank

RANK = Rank(1, 2)


def crossed(failure: Failure) -> Failure:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_comes_back_as_itself(name) -> None:
    """Class, detail and context; and it names the rank where it began."""
    error = getattr(errors, name)("what")
    error.peer, error.phase, error.request_id = "p", "reading", "r"
    again = crossed(failure_of(error, RANK)).error()
    assert type(again) is type(error)
    assert again.origin == str(RANK)
    for fact in ("detail", "peer", "phase", "request_id"):
        assert getattr(again, fact) == getattr(error, fact)
    assert "rank=tp1of2.pp0of1" in str(again)


@pytest.mark.parametrize(
    "kind",
    ["", "Exception", "SystemExit", "Mapping", "as_detail", "__doc__", "Failure"],
)
def test_h1_a_name_that_is_no_error_of_ours(kind) -> None:
    """It leads to nothing but a plain failure."""
    assert type(Failure(kind, RANK, "what").error()) is TransferError


def test_what_is_no_error_of_ours() -> None:
    """It is told by name, as long as a message may be, whatever it holds."""
    failure = crossed(failure_of(ZeroDivisionError("\ud800" + "x" * 5000), RANK))
    assert failure.kind == "TransferError"
    assert failure.detail.startswith("ZeroDivisionError: ")
    assert len(failure.detail) == 1024


def test_a_group_is_told_by_what_is_in_it() -> None:
    """Work that has a nursery raises one: the error of ours in it is the failure."""
    error = LeaseExpired("late", peer="p", request_id="r")
    inner = BaseExceptionGroup("inner", [KeyboardInterrupt(), error])
    group = BaseExceptionGroup("outer", [ZeroDivisionError(), inner])
    assert failure_of(group, RANK) == failure_of(error, RANK)
    bug = ExceptionGroup("outer", [ZeroDivisionError("x")])
    assert failure_of(bug, RANK).detail == "ZeroDivisionError: x"


def test_a_class_of_the_caller_s_below_one_of_ours() -> None:
    """The nearest that everybody has."""

    class Mine(LeaseExpired):
        pass

    assert failure_of(Mine("x"), RANK).kind == "LeaseExpired"

    class FerryErrorLike(FerryError):
        pass

    FerryErrorLike.__name__ = "HandshakeRefused"
    assert failure_of(FerryErrorLike("x"), RANK).kind == "FerryError"
    assert type(failure_of(HandshakeRefused("x"), RANK).error()) is HandshakeRefused
