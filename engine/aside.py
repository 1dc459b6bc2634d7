"""`Aside`: what a request does beside its machine, in tasks that end with it.

In the engine's nursery, because most requests need none of it and a nursery for each
would cost more than all the rest: connecting, waiting for the caller's event, waiting
for room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kvferry.engine.guard import guarded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from structlog.typing import FilteringBoundLogger

    from kvferry.protocol.errors import FerryError

__all__ = ("Aside",)


class Aside:
    """The tasks of one request."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        on_failure: Callable[[FerryError], None],
        log: FilteringBoundLogger,
    ) -> None:
        """No task yet.

        Args:
            nursery: The engine's.
            on_failure: Told when a task fails.
            log: Bound to the request.
        """
        self._nursery = nursery
        self._on_failure = on_failure
        self._log = log
        self._scopes: dict[trio.CancelScope, None] = {}
        self._idle: trio.Event | None = None  # while its end is waited for

    def start(self, call: Callable[[], Awaitable[None]]) -> None:
        """Run a task beside the request."""
        scope = trio.CancelScope()
        self._scopes[scope] = None
        self._nursery.start_soon(self._run, call, scope)

    async def end(self) -> None:
        """Cancel what is left, and wait until it has ended."""
        for scope in self._scopes:
            scope.cancel()
        while self._scopes:
            self._idle = trio.Event()
            with trio.CancelScope(shield=True):
                await self._idle.wait()

    async def _run(
        self, call: Callable[[], Awaitable[None]], scope: trio.CancelScope
    ) -> None:
        try:
            with scope:
                await guarded(call, on_failure=self._on_failure, log=self._log)
        finally:
            self._scopes.pop(scope, None)
            if self._idle is not None:
                self._idle.set()
