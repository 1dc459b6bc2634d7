"""`Services`: the parts of an engine that its requests work with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trio
    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.config import EngineConfig
    from kvferry.engine.destinations import Destinations
    from kvferry.engine.fabric.base import Fabric
    from kvferry.engine.finish import FinishStage
    from kvferry.engine.peers import Peers
    from kvferry.engine.pump import Pump
    from kvferry.engine.quarantine import Quarantine
    from kvferry.engine.rearrange import Rearranger
    from kvferry.engine.routes import Routes
    from kvferry.engine.sizes import Sizes
    from kvferry.engine.staging import Staging
    from kvferry.engine.traffic import Traffic
    from kvferry.protocol.identity import EngineKey
    from kvferry.protocol.layout import CacheLayout

__all__ = ("Services",)


@dataclass(frozen=True)
class Services:
    """What every request of an engine works with.

    Attributes:
        nursery: For what must go on after its request; it ends with the engine.
        attempts: Numbers for pulls and landings, each given once.
    """

    config: EngineConfig
    key: EngineKey
    layout: CacheLayout
    fabric: Fabric
    pump: Pump
    traffic: Traffic
    peers: Peers
    routes: Routes
    staging: Staging
    rearranger: Rearranger
    finish: FinishStage
    quarantine: Quarantine
    destinations: Destinations
    sizes: Sizes
    nursery: trio.Nursery
    attempts: Iterator[int]
    log: FilteringBoundLogger
