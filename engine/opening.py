"""`open_engine`: how an engine begins, and in which order it ends.

The pump ends last, in a shielded scope, so that a drain always sees its transfers
land, also when a cancellation comes from around the engine; the links end just
before it, so that peers are told.
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import structlog
import trio

from kvferry.engine.assembly import Assembly
from kvferry.engine.engine import TransferEngine
from kvferry.engine.streams import Streams, TcpStreams
from kvferry.engine.tls import TlsStreams
from kvferry.protocol.identity import EngineKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.cache import KVCache
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric

__all__ = ("open_engine",)

_KEPT: list[TransferEngine] = []
"""Engines that were left while transfers of theirs had not settled. Their agents are
never destroyed, which could end the peer's process (nixl-facts row 7), and neither is
the memory that may still be written to: both stay for the life of the process."""


@asynccontextmanager
async def open_engine(
    config: EngineConfig,
    cache: KVCache,
    *,
    fabric: Fabric | None = None,
    streams: Streams | None = None,
    wall_clock: Callable[[], float] = time.time,  # noqa: TID251 - tickets expire by it
    logger: Any = None,  # noqa: ANN401 - structlog's own loggers are typed as Any
) -> AsyncIterator[TransferEngine]:
    """Open an engine around a cache; a trio async context manager.

    Leaving it withdraws all offers, fails the pulls under way, drains their
    transfers and says goodbye. If transfers have not settled after the grace, it
    says so, and keeps the agent and the cache's memory for as long as the process
    lives: ``engine.quarantine`` still tells which blocks. Leave it before the process
    ends: an agent that is destroyed under a transfer can take down the peer's process
    (nixl-facts rows 7 and 23).

    Args:
        config: The configuration.
        cache: The cache, which keeps its tensors alive; they must stay in place
            until the engine is closed.
        fabric: The transport; NIXL over UCX by default, for which a cache in
            device memory makes its device this thread's current one. The engine
            closes it.
        streams: Where links come from; TCP by default. What the configuration says of
            TLS holds for any.
        wall_clock: Unix seconds: by it tickets expire, and nothing else.
        logger: A structlog logger; by default one that writes to the standard
            library's logger ``kvferry``, so that nothing is printed unasked.

    Raises:
        ConfigError: The engine cannot listen where it should.
        MisuseError: The transport cannot register the cache's memory.
    """
    key = EngineKey(config.engine_id, secrets.token_hex(16), config.rank)
    log = (logger or _standard_logger()).bind(engine=str(key))
    streams = TlsStreams(
        streams or TcpStreams(), listen=config.tls_listen, dial=config.tls_dial
    )
    fabric = fabric or _nixl(key, config, cache, log)
    engine: TransferEngine | None = None
    try:
        fabric.register(cache.layout.regions)
        with _ungrouped(nurseries=2):
            pump_scope = trio.CancelScope(shield=True)
            services = _Services()
            async with trio.open_nursery() as pump_nursery:
                try:
                    async with trio.open_nursery() as outer:
                        outer.start_soon(services.run)
                        try:
                            await services.opened.wait()
                            assembly = Assembly(
                                config,
                                key,
                                cache,
                                fabric,
                                streams,
                                services.nursery,
                                wall_clock=wall_clock,
                                log=log,
                            )
                            engine = TransferEngine(config, key, cache, assembly)
                            # Not with `start`: were it cancelled, it would wait for
                            # the shielded task, and for ever.
                            pump_nursery.start_soon(assembly.run_pump, pump_scope)
                            engine.address = await assembly.begin(
                                streams, services.nursery
                            )
                            log.info("engine_opened", address=engine.address)
                            try:
                                yield engine
                            finally:
                                await assembly.end()
                        finally:
                            services.scope.cancel()
                finally:
                    pump_scope.cancel()
    finally:
        _part_with(fabric, engine, log)
        log.info("engine_closed")


def _part_with(
    fabric: Fabric, engine: TransferEngine | None, log: FilteringBoundLogger
) -> None:
    """Destroy the agent, unless bytes may still be moving though the grace is over."""
    if engine is None or not engine._pump.unsettled:
        fabric.close()
        return
    _KEPT.append(engine)
    log.error(
        "agent_kept",
        agent=fabric.name,
        unsettled_transfers=engine._pump.unsettled,
        requests=[entry.request_id for entry in engine.quarantine],
        peers=sorted({entry.peer for entry in engine.quarantine}),
    )


class _Services:
    """A nursery for links, dials and what pulls leave to do.

    In a task of its own and shielded, like the pump: a cancellation from around
    the engine must take the links away neither from a pull that drains nor from
    the words that tell a peer about it.
    """

    nursery: trio.Nursery

    def __init__(self) -> None:
        self.scope = trio.CancelScope(shield=True)
        self.opened = trio.Event()

    async def run(self) -> None:
        """Keep the nursery open until the scope is cancelled."""
        with self.scope:
            async with trio.open_nursery() as self.nursery:
                self.opened.set()
                await trio.sleep_forever()


@contextmanager
def _ungrouped(*, nurseries: int) -> Iterator[None]:
    """Let one error out as itself: the nurseries around it are our own business.

    Without this an error that `pull` raises could not be caught by its type
    around the engine. Several errors at once stay a group.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        error = group
    if error is None:
        return
    for _ in range(nurseries):
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context  # and not the group that it was in


def _standard_logger() -> Any:  # noqa: ANN401 - structlog's own loggers are typed as Any
    return structlog.wrap_logger(
        logging.getLogger("kvferry"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _nixl(
    key: EngineKey, config: EngineConfig, cache: KVCache, log: FilteringBoundLogger
) -> Fabric:
    # Imported when needed: the bindings take seconds to load, and tests that
    # bring a fabric of their own can do without.
    from kvferry.engine.fabric.copying import over_nixl  # noqa: PLC0415

    return over_nixl(
        str(key),
        copy_threads=config.copy_threads,
        enter_device=cache.enter_device,
        log=log,
    )
