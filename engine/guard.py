"""The guard around one request's or one peer's work: its failure ends it alone.

The only place above the fabric that catches every exception (invariant 7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.protocol.errors import FerryError, FerryInternalError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from structlog.typing import FilteringBoundLogger

__all__ = ("contained", "guarded")


async def guarded(
    call: Callable[[], Awaitable[None]],
    *,
    on_failure: Callable[[FerryError], None],
    log: FilteringBoundLogger,
) -> None:
    """Run the call; tell a failure instead of letting it out.

    A FerryError is told as it is. Anything else is a bug of ours: it is logged
    with its traceback, and told as a FerryInternalError. Cancellation goes on.
    """
    try:
        await call()
    except FerryError as error:
        on_failure(error)
    except Exception as exc:
        log.exception("internal_error")
        on_failure(_bug(exc))


def contained(
    call: Callable[[], None],
    *,
    on_failure: Callable[[FerryError], None],
    log: FilteringBoundLogger,
) -> None:
    """`guarded` for a call that does not wait."""
    try:
        call()
    except FerryError as error:
        on_failure(error)
    except Exception as exc:
        log.exception("internal_error")
        on_failure(_bug(exc))


def _bug(exc: Exception) -> FerryInternalError:
    bug = FerryInternalError(f"{type(exc).__name__}: {exc}")
    bug.__cause__ = exc
    return bug
