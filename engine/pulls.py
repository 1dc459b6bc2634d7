"""The pull service: requests of this engine that read what others offer.

Every pull runs in its caller's task, and its failure ends it alone. What becomes of
one is in `kvferry.engine.pull`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.engine.active import Active
from kvferry.engine.pull import Pull
from kvferry.protocol.errors import EngineClosed
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
        self._active = Active[tuple[str, int], Pull]("pull")  # by request and share

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._active)

    async def run(self, request: PullRequest) -> TransferReport:
        """Run one pull to its outcome; see `TransferEngine.pull`."""
        ticket = request.ticket
        name = ticket.request_id, ticket.share
        pull = Pull(self._services, request, next(self._services.attempts))
        with (
            self._active.entered(name, pull, request_id=ticket.request_id),
            self._services.destinations.held(
                request.spans, computed_tokens=request.computed_tokens
            ),
        ):
            return await pull.run()

    async def close(self) -> None:
        """End all pulls, and wait until each has drained or given up."""
        for pull in tuple(self._active.values()):
            pull.feed(PullFailed(EngineClosed("the engine is closing")))
        await self._active.wait_idle()
