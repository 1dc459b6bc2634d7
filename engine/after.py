"""`After`: what a caller may name that must be over before its blocks are touched.

The caller's own GPU work, mostly: a kernel that still writes the blocks to be
read, or still reads those to be written. It is the caller's code that runs here,
so whatever it raises is told as the caller's failure and ends one request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch
import trio

from kvferry.protocol.errors import MisuseError

__all__ = ("After", "check_after", "is_over", "wait_for")

After = torch.cuda.Event | Callable[[], Awaitable[object]]
"""A recorded CUDA event, or a callable whose awaitable ends when the blocks may be
touched. It is called once, in a task of the engine's that is cancelled when nobody
needs it any more; it must not shield itself against that."""

SHORTEST_LOOK_S = 0.0002
LONGEST_LOOK_S = 0.002
LOOKS_PER_WAIT = 16
"""An event that has kept us waiting for long is not looked at so often: the delay
is a sixteenth of the wait, and never more than `LONGEST_LOOK_S`."""


def check_after(after: object) -> None:
    """Refuse what cannot be waited for, before anything begins.

    Raises:
        MisuseError: Neither a recorded CUDA event nor a callable.
    """
    if isinstance(after, torch.cuda.Event):
        if after.device is None:
            raise MisuseError(
                "`after` is a CUDA event that was never recorded: nothing completes it"
            )
    elif not callable(after):
        raise MisuseError(
            "`after` takes a torch.cuda.Event or a callable that returns an awaitable,"
            f" not a {type(after).__name__}"
        )


def is_over(after: After) -> bool:
    """Whether it has completed, as far as can be told without waiting.

    Raises:
        MisuseError: The event cannot be asked.
    """
    return isinstance(after, torch.cuda.Event) and _query(after)


async def wait_for(after: After) -> None:
    """Wait until it has completed; an event is looked at, and never blocks the loop.

    Raises:
        MisuseError: It is nothing to wait for, or failed; its own exception is the
            cause.
    """
    check_after(after)
    if isinstance(after, torch.cuda.Event):
        await _look_until_over(after)
    else:
        await _call(after)


async def _look_until_over(event: torch.cuda.Event) -> None:
    started_at = trio.current_time()
    while not _query(event):
        waited_s = trio.current_time() - started_at
        look_s = min(waited_s / LOOKS_PER_WAIT, LONGEST_LOOK_S)
        await trio.sleep(max(look_s, SHORTEST_LOOK_S))


def _query(event: torch.cuda.Event) -> bool:
    try:
        # Without the guard a context would be made on whatever device is current.
        with torch.cuda.device(event.device):
            return bool(event.query())  # type: ignore[no-untyped-call]
    except Exception as exc:
        raise _failure(exc) from exc


async def _call(after: Callable[[], Awaitable[object]]) -> None:
    try:
        await after()
    except Exception as exc:
        raise _failure(exc) from exc
    except BaseExceptionGroup as group:
        # Its own tasks may fail while they are being cancelled: what is left of it
        # is the cancellation (or an interrupt), which is not ours to hold up.
        _, rest = group.split(Exception)
        if rest is None:
            raise _failure(group) from group
        raise rest from None


def _failure(exc: BaseException) -> MisuseError:
    return MisuseError(f"`after` failed: {type(exc).__name__}: {exc}")
