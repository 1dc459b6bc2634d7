"""`Asks`: learns the manifest of another instance from any one of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from kvferry.engine.dials import Dials
from kvferry.engine.handshake import call
from kvferry.protocol.errors import (
    HandshakeRefused,
    InstanceIncomplete,
    ProtocolViolation,
)
from kvferry.protocol.handshake import Purpose, RefusalReason
from kvferry.protocol.manifest import Manifest, decode_manifest

if TYPE_CHECKING:
    import random

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.handshake import Credentials
    from kvferry.engine.link import FramedStream
    from kvferry.engine.streams import Streams
    from kvferry.engine.trust import Trust

__all__ = ("Asks",)

SWEEP_S = 60.0


class _Place(NamedTuple):
    engine_id: str
    host: str
    port: int

    def __str__(self) -> str:
        return self.engine_id


class Asks:
    """The questions that one engine asks.

    Args:
        turns: Of the engine's other dials, which these count among.
    """

    def __init__(  # noqa: PLR0913 - built in one place, from its parts
        self,
        config: EngineConfig,
        ours: Credentials,
        streams: Streams,
        nursery: trio.Nursery,
        *,
        trust: Trust,
        turns: trio.Semaphore,
        rng: random.Random,
        log: FilteringBoundLogger,
    ) -> None:
        self._ours = ours
        self._dials = Dials(
            config,
            streams,
            nursery,
            trust=trust,
            talk=self._ask,
            turns=turns,
            rng=rng,
            log=log,
        )

    def __len__(self) -> int:
        """How many are being asked."""
        return len(self._dials)

    async def fetch(self, engine_id: str, host: str, port: int) -> Manifest:
        """The complete manifest of the instance that a rank at the address is of.

        However many tasks ask the same, it is asked once at a time; an address that
        did not answer is left alone for a while, as any peer is. Nothing is kept of an
        answer.

        Raises:
            UntrustedTicket: There is no secret, and the address is not trusted.
            InstanceIncomplete: Ranks of it are missing; the detail names them.
            PeerError: Nobody answers, or not the right one, or it refuses.
            EngineClosed: The engine closed meanwhile.
        """
        place = _Place(engine_id, host, port)
        if place not in self._dials:
            self._dials.check(place, place)
        answer = await self._dials.reach(place, place)
        if isinstance(answer, InstanceIncomplete):
            raise answer.about(peer=f"{engine_id}@{host}:{port}", phase="connecting")
        return answer

    async def sweep(self) -> None:
        """Let go of back-offs that nobody cares for any more, for ever."""
        while True:
            self._dials.forget_old()
            await trio.sleep(SWEEP_S)

    async def _ask(
        self, place: _Place, framed: FramedStream
    ) -> Manifest | InstanceIncomplete:
        """What it answers; that ranks are missing is no reason to leave it alone."""
        try:
            key, manifest = await call(
                framed,
                self._ours,
                place.engine_id,
                Purpose.ASK,
                b"",
                decode=decode_manifest,
            )
        except HandshakeRefused as error:
            if error.reason != RefusalReason.INCOMPLETE.value:
                raise
            await framed.aclose()
            return InstanceIncomplete(error.detail)
        answered = manifest.member(key.rank)
        if (
            manifest.engine_id != key.engine_id
            or not manifest.is_complete
            or answered is None
            or answered.generation != key.generation
        ):
            raise ProtocolViolation(
                f"{key} tells of an instance that cannot be its own"
            )
        await framed.aclose()
        return manifest
