"""`Asks`: learns the manifest of another instance from any one of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.protocol.manifest import Manifest

__all__ = ("Asks",)


class Asks:
    """The questions that one engine asks."""

    async def fetch(self, engine_id: str, host: str, port: int) -> Manifest:
        """The complete manifest of the instance that a rank at the address is of.

        However many tasks ask the same, it is asked once at a time; an address that
        did not answer is left alone for a while, as any peer is. Nothing is kept of an
        answer. Whether the address may be dialled at all is the caller's business.

        Raises:
            InstanceIncomplete: Ranks of it are missing; the detail names them.
            PeerError: Nobody answers, or not the right one, or it refuses.
            EngineClosed: The engine closed meanwhile.
        """
        raise NotImplementedError
