"""The landing service: requests of this engine that producers push.

Owned here: which are under way, where their notices come in, and how our layout is
shared out among producers. What becomes of one request is in `kvferry.engine.landing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.engine.active import Active
from kvferry.engine.intake import Intake
from kvferry.engine.landing import Landing
from kvferry.engine.shares import share_among
from kvferry.protocol.errors import EngineClosed
from kvferry.protocol.lifecycle.landing import LandingFailed

if TYPE_CHECKING:
    from kvferry.engine.landing import LandingRequest
    from kvferry.engine.party import Layouts
    from kvferry.engine.peer import Peer
    from kvferry.engine.report import TransferReport
    from kvferry.engine.services import Services
    from kvferry.engine.shares import Shares
    from kvferry.protocol.identity import EngineKey

__all__ = ("Landings",)


class Landings:
    """All landings of one engine.

    Attributes:
        intake: Where notices come in; one without a landing that has chosen its token
            is dropped (case n5).
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._active = Active[str, Landing]("landing")
        self.intake = Intake(log=services.log)
        self._shares: dict[tuple[EngineKey, ...], Shares] = {}

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._active)

    async def run(self, request: LandingRequest) -> TransferReport:
        """Run one landing to its outcome; see `TransferEngine.expect`."""
        request_id = request.request_id
        landing = Landing(
            self._services, request, intake=self.intake, share=self._share
        )
        with (
            self._active.entered(request_id, landing, request_id=request_id),
            self._services.destinations.held(
                request.spans, computed_tokens=request.computed_tokens
            ),
        ):
            return await landing.run()

    async def close(self) -> None:
        """End all landings, and wait until each is over."""
        for landing in tuple(self._active.values()):
            landing.feed(LandingFailed(EngineClosed("the engine is closing")))
        await self._active.wait_idle()

    def _share(self, peers: tuple[Peer, ...], told: Layouts | None) -> Shares:
        """Our layout shared out among these peers; each of them knows its claim."""
        keys = tuple(peer.key for peer in peers)
        shares = self._shares.get(keys)
        if shares is None or shares.peers != peers:
            for old in [k for k, s in self._shares.items() if s.is_stale]:
                del self._shares[old]
            shares = share_among(peers, self._services, told)
            self._shares[keys] = shares
        return shares
