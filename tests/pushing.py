"""Pushes and landings as tests begin them: in tasks, each with its one outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from kvferry.engine import FerryError
from kvferry.protocol.ticket import Contact
from tests.kit import GROUP

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvferry.engine import TransferEngine
    from tests.kit import Pool

THEIRS = [3, 7, 9]
"""Blocks of a producer."""
OURS = [5, 6, 1]
"""Blocks of a consumer."""
TOKENS = 10


class Outcome:
    """How one call ended, once it has.

    Attributes:
        report: What it returned.
        error: What it raised.
        at: When it ended, in `trio.current_time`.
        scope: Around it.
        over: Set when it has ended.
    """

    def __init__(self) -> None:
        self.report: Any = None
        self.error: FerryError | None = None
        self.at = 0.0
        self.scope = trio.CancelScope()
        self.over = trio.Event()

    @property
    def is_cancelled(self) -> bool:
        """It let a cancellation through."""
        return self.scope.cancelled_caught

    async def follow(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Make the call."""
        try:
            with self.scope:
                self.report = await call()
        except FerryError as error:
            self.error = error
        finally:
            self.at = trio.current_time()
            self.over.set()


def begin(nursery: trio.Nursery, call: Callable[[], Awaitable[Any]]) -> Outcome:
    """Make a call in a task of its own."""
    outcome = Outcome()
    nursery.start_soon(outcome.follow, call)
    return outcome


def begin_push(
    nursery: trio.Nursery,
    engine: TransferEngine,
    pool: Pool,
    request_id: str = "r",
    *,
    blocks: Sequence[int] = THEIRS,
    num_tokens: int = TOKENS,
    salt: int = 0,
    **options: Any,
) -> Outcome:
    """Push a request of ten tokens, stamped."""
    spans = pool.stamp(blocks, num_tokens=num_tokens, salt=salt)
    return begin(
        nursery,
        lambda: engine.push(request_id, spans, num_tokens=num_tokens, **options),
    )


def begin_landing(
    nursery: trio.Nursery,
    engine: TransferEngine,
    source: TransferEngine | Contact,
    request_id: str = "r",
    *,
    blocks: Any = None,
    **options: Any,
) -> Outcome:
    """Expect it."""
    contact = source if isinstance(source, Contact) else source.contact
    spans = {GROUP: OURS} if blocks is None else blocks
    return begin(
        nursery,
        lambda: engine.expect(contact, spans, request_id=request_id, **options),
    )


def contact_of(engines: Sequence[TransferEngine]) -> Contact:
    """The contact of a whole instance."""
    return Contact.merge(engine.contact for engine in engines)
