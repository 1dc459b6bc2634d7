"""`Assembly`: the services of one engine, put together; how they begin, and end in order.

Not here: what callers ask of them (`kvferry.engine.engine`), and the nurseries and scopes
that they run in (`kvferry.engine.opening`).
"""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvferry.engine.agents import Agents
from kvferry.engine.asking import Asks
from kvferry.engine.destinations import Destinations
from kvferry.engine.finish import FinishStage
from kvferry.engine.handshake import Credentials
from kvferry.engine.instance import Instance
from kvferry.engine.landings import Landings
from kvferry.engine.link import GOODBYE_S
from kvferry.engine.links import Links
from kvferry.engine.listener import Listener
from kvferry.engine.offer import Offers
from kvferry.engine.peers import Peers
from kvferry.engine.pulls import Pulls
from kvferry.engine.pump import Pump
from kvferry.engine.pushes import Pushes
from kvferry.engine.quarantine import Quarantine
from kvferry.engine.rearrange import Rearranger
from kvferry.engine.routes import Routes
from kvferry.engine.services import Services
from kvferry.engine.sizes import Sizes
from kvferry.engine.staging import Staging
from kvferry.engine.traffic import Traffic
from kvferry.engine.trust import Trust
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.handshake import Card

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from kvferry.engine.cache import KVCache
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.fabric.base import Fabric, Notice
    from kvferry.engine.streams import BoundListener, Streams
    from kvferry.protocol.identity import EngineKey

__all__ = ("Assembly",)


class Assembly:
    """All services of one engine, for a `TransferEngine` to call on.

    Args:
        nursery: For what must go on after its request; it ends with the engine.
        wall_clock: Unix seconds: by it tickets expire, and nothing else.

    Attributes:
        is_closing: Nothing new is taken any more.
    """

    def __init__(  # noqa: PLR0913 - built in one place, from its parts
        self,
        config: EngineConfig,
        key: EngineKey,
        cache: KVCache,
        fabric: Fabric,
        streams: Streams,
        nursery: trio.Nursery,
        *,
        wall_clock: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self.is_closing = False
        self.fabric = fabric
        self.quarantine = Quarantine()
        self.pump = Pump(
            fabric,
            config,
            on_notice=self._take_notice,
            hand_over=self._hand_over_notices,
            log=log,
        )
        self.traffic = Traffic(config, on_large=self.pump.count_large)
        sizes = Sizes(cache.layout)
        self.trust = Trust(config, wall_clock=wall_clock)
        ours = Credentials(
            key,
            Card(config.identity, cache.layout, fabric.metadata()),
            config.secret,
            config.skip_groups,
        )
        self.staging = Staging(config, fabric)
        agents = Agents(fabric, log=log)
        self.peers = Peers(
            config,
            ours,
            fabric,
            streams,
            nursery,
            trust=self.trust,
            agents=agents,
            staging=self.staging,
            log=log,
        )
        rng = random.Random(fabric.name)  # noqa: S311 - no secret
        self.instance = Instance(config, ours, streams, rng=rng, log=log)
        self.asks = Asks(
            config,
            ours,
            streams,
            nursery,
            trust=self.trust,
            turns=self.peers.dials.turns,
            rng=rng,
            log=log,
        )
        self.offers = Offers(
            key,
            config,
            self.pump,
            nursery,
            instance=self.instance,
            sizes=sizes,
            trust=self.trust,
            log=log,
        )
        self.routes = Routes(
            config, cache.layout, instance=self.instance, asks=self.asks
        )
        self.peers.on_forgotten = self.routes.forget
        services = Services(
            config,
            key,
            cache.layout,
            fabric,
            pump=self.pump,
            traffic=self.traffic,
            peers=self.peers,
            routes=self.routes,
            staging=self.staging,
            rearranger=Rearranger(cache.storages(), nursery),
            finish=FinishStage(cache),
            quarantine=self.quarantine,
            destinations=Destinations(cache.layout),
            sizes=sizes,
            nursery=nursery,
            attempts=itertools.count(),
            log=log,
        )
        self.pulls = Pulls(services)
        self.pushes = Pushes(services, agents)
        self.landings = Landings(services)
        links = Links(self.offers, self.pushes, self.instance, log=log)
        self.instance.on_relayed = links.on_relayed
        self.listener = Listener(
            config, ours, service=links, instance=self.instance, log=log
        )
        self._config = config
        self._log = log

    def _take_notice(self, notice: Notice) -> None:
        self.landings.intake.take(notice)

    def _hand_over_notices(self) -> bool:
        return self.landings.intake.hand_over()

    async def run_pump(self, scope: trio.CancelScope) -> None:
        """See transfers settle, until the scope is cancelled: the last thing to end."""
        with scope:
            await self.pump.run()

    async def begin(
        self, streams: Streams, nursery: trio.Nursery
    ) -> tuple[str, int] | None:
        """Start the services, and listen; the pump runs already.

        Returns:
            Where we listen; None without a listener.

        Raises:
            ConfigError: We cannot listen where we should.
        """
        for service in (
            partial(self.fabric.attend, self.pump.wake),
            self.traffic.run,
            self.offers.sweep,
            self.peers.sweep,
        ):
            nursery.start_soon(service)
        address = await self._listen(streams, nursery)
        nursery.start_soon(self._run_instance)
        return address

    async def _listen(
        self, streams: Streams, nursery: trio.Nursery
    ) -> tuple[str, int] | None:
        config = self._config
        if config.listen is None:
            self.instance.begin(None)
            return None
        try:
            bound: BoundListener = await streams.listen(*config.listen)
        except OSError as exc:
            raise ConfigError(f"cannot listen on {config.listen}: {exc}") from exc
        try:
            config.check_bound(bound.host)
        except ConfigError:
            await bound.aclose()
            raise
        address = (config.advertise or bound.host, bound.port)
        self.instance.begin(address)
        nursery.start_soon(self.listener.run, bound)
        return address

    async def _run_instance(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.asks.sweep)
            await self.instance.run()

    async def end(self) -> None:
        """Take nothing new, tell everybody, wait for what is under way.

        Shielded, with a deadline: also after a cancellation the pulls drain.
        """
        self.is_closing = True
        self.instance.end()
        self.offers.withdraw_all()
        limit_s = self._config.drain_grace_s + 5 * GOODBYE_S
        with trio.move_on_after(limit_s, shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.pulls.close)
                nursery.start_soon(self.pushes.close)
                nursery.start_soon(self.landings.close)
            await self.instance.close(within_s=GOODBYE_S)
            await self.listener.close(within_s=GOODBYE_S)
            await self.peers.close(within_s=GOODBYE_S)
        for entry in self.quarantine:
            self._log.error(
                "closed_undrained",
                request=entry.request_id,
                peer=entry.peer,
                blocks={name: list(ids) for name, ids in entry.blocks.items()},
            )
