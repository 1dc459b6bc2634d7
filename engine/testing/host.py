"""`Host`: one start of an engine under a schedule, which can be frozen, cut off and killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from kvferry.engine.opening import open_engine
from kvferry.engine.testing.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvferry.engine.cache import KVCache
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.engine import TransferEngine
    from kvferry.engine.testing.schedule import Schedule

__all__ = ("Host",)


class Host:
    """One start of an engine, as a process would run it.

    Its clock is everybody's: frozen, it says and hears nothing, but it thinks on.

    Attributes:
        name: Of its fabric; each start needs a name of its own.
        engine: The engine, once it is open.
        is_killed: Whether it was.
    """

    def __init__(self, schedule: Schedule, name: str) -> None:
        self.name = name
        self.engine: TransferEngine | None = None
        self.is_killed = False
        self._schedule = schedule
        self._wire = Wire(schedule, name)
        self._scope = trio.CancelScope()

    async def run(
        self,
        config: EngineConfig,
        cache: KVCache,
        body: Callable[[TransferEngine], Awaitable[None]],
        *,
        logger: Any = None,  # noqa: ANN401 - structlog's own loggers are typed as Any
    ) -> None:
        """Open the engine and run the body in it; returns when it has ended.

        Args:
            config: Its configuration.
            cache: Its cache.
            body: All that the process does; cancelled when the host is killed.
            logger: As `open_engine` takes it.
        """
        with self._scope:
            async with open_engine(
                config,
                cache,
                fabric=self._schedule.network.fabric(self.name),
                streams=self._wire,
                wall_clock=trio.current_time,  # all clocks of a schedule are virtual
                logger=logger,
            ) as self.engine:
                await body(self.engine)

    def cancel(self) -> None:
        """Cancel it from around the engine, as the end of its caller does: it drains."""
        self._scope.cancel()

    def kill(self) -> None:
        """End it as SIGKILL does: not a byte leaves it any more."""
        self.is_killed = True
        self._scope.cancel()
        # What it still says and does while it ends reaches nobody.
        self._schedule.network.kill(self.name)
        self._wire.kill()

    def freeze(self) -> None:
        """Stop it as SIGSTOP does, as far as others can tell."""
        if not self.is_killed:
            self._schedule.network.freeze(self.name)
            self._wire.freeze()

    def thaw(self) -> None:
        """Let it go on."""
        if not self.is_killed:
            self._wire.thaw()
            self._schedule.network.thaw(self.name)

    def cut(self) -> None:
        """Break one of its links."""
        self._wire.cut()
