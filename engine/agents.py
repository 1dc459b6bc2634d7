"""`Agents`: which remote agents the transport knows, and for whom.

A rank that we both read from and push to is one agent; it is forgotten when the
last of its holders has let go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.protocol.errors import FerryError, ProtocolViolation

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.fabric.base import Fabric

__all__ = ("Agents",)


class Agents:
    """Holders of each agent that the fabric is connected to."""

    def __init__(self, fabric: Fabric, *, log: FilteringBoundLogger) -> None:
        self._fabric = fabric
        self._log = log
        self._holders: dict[str, set[object]] = {}
        self._connecting = 0

    async def connect(self, metadata: bytes, holder: object) -> str:
        """Make an agent known, and hold it; its name.

        Raises:
            PeerUnreachable: The peer's transport does not answer.
            ProtocolViolation: The metadata is not metadata, or our own.
        """
        self._connecting += 1
        try:
            name = await self._fabric.connect_aside(metadata)
            if name == self._fabric.name:
                # What it has us write to would be places in our own memory.
                self._fabric.disconnect(name)
                raise ProtocolViolation("the peer shows our own agent as its own")
            self._holders.setdefault(name, set()).add(holder)
        finally:
            self._connecting -= 1
            self._disconnect_unheld()
        return name

    def let_go(self, name: str, holder: object) -> None:
        """The holder has nothing prepared and nothing in flight there any more."""
        self._holders.get(name, set()).discard(holder)
        self._disconnect_unheld()

    def _disconnect_unheld(self) -> None:
        """Not while one is being connected, whose name is not known before."""
        unheld = [name for name, holders in self._holders.items() if not holders]
        for name in unheld if not self._connecting else ():
            del self._holders[name]
            try:
                self._fabric.disconnect(name)
            except FerryError as error:
                self._log.warning("let_go_failed", error=str(error))
