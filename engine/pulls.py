"""The pull service: requests of this engine that read what others offer.

Every pull runs in its caller's task, and its failure ends it alone. What becomes of
one is in `kvferry.engine.pull`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from kvferry.engine.pull import Pull
from kvferry.protocol.errors import EngineClosed, RequestInUse
from kvferry.protocol.lifecycle.pull import PullFailed

if TYPE_CHECKING:
    from kvferry.engine.pull import PullRequest
    from kvferry.engine.report import TransferReport
    from kvferry.engine.services import Services

__all__ = ("Pulls",)


class Pulls:
    """All pulls of one engine."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._active: dict[tuple[str, int], Pull] = {}  # by request and share
        self._idle = trio.Event()

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._active)

    async def run(self, request: PullRequest) -> TransferReport:
        """Run one pull to its outcome; see `TransferEngine.pull`."""
        ticket = request.ticket
        name = ticket.request_id, ticket.share
        if name in self._active:
            raise RequestInUse(
                "a pull of it is under way", request_id=ticket.request_id
            )
        pull = Pull(self._services, request, next(self._services.attempts))
        with self._services.destinations.held(
            request.spans, computed_tokens=request.computed_tokens
        ):
            self._active[name] = pull
            try:
                return await pull.run()
            finally:
                del self._active[name]
                if not self._active:
                    self._idle.set()

    async def close(self) -> None:
        """End all pulls, and wait until each has drained or given up."""
        for pull in tuple(self._active.values()):
            pull.feed(PullFailed(EngineClosed("the engine is closing")))
        while self._active:
            self._idle = trio.Event()
            await self._idle.wait()
