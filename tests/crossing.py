"""A `planning.Case` through real engines: every rank opened, offered, merged, pulled.

The stamp oracle of `tests.oracle` looks at the result; which fabric the bytes
crossed is its caller's choice.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from kvferry.engine import EngineConfig, Rank, open_engine
from kvferry.protocol import ModelIdentity, Ticket
from tests.oracle import expect, fill_producer

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.engine import TransferEngine, TransferReport
    from kvferry.engine.fabric import Fabric
    from kvferry.engine.streams import Streams
    from tests.oracle import RankPool
    from tests.planning import Case

IDENTITY = ModelIdentity(model="org/random", revision="1", dtype="mixed")
REQUEST = "crossing"


async def cross(
    case: Case,
    *,
    fabric: Callable[[str], Fabric],
    streams: Streams | None = None,
    **consumer: Any,
) -> tuple[list[str], TransferReport]:
    """Pull the case's request; what the oracle finds wrong, and the report.

    Args:
        case: One consumer rank, all ranks of a producer.
        fabric: Makes a transport for an engine, by a name of ours.
        streams: Where the links come from; TCP by default.
        consumer: More of the consumer's configuration.

    Raises:
        FerryError: As `offer` and `pull` do.
    """
    async with AsyncExitStack() as stack:
        ticket = await offered(case, stack, fabric, streams)
        return await pulled(case, ticket, fabric("consumer"), streams, **consumer)


async def pulled(
    case: Case,
    ticket: Ticket,
    fabric: Fabric,
    streams: Streams | None,
    **settings: Any,
) -> tuple[list[str], TransferReport]:
    """The consumer's half."""
    consumer = case.consumer_pool()
    rank = Rank(case.consumer_rank, case.consumer_tp)
    config = EngineConfig(
        engine_id="consumer", identity=IDENTITY, rank=rank, **settings
    )
    async with open_engine(
        config, consumer.cache, fabric=fabric, streams=streams
    ) as engine:
        report = await engine.pull(
            ticket,
            case.request.local,
            computed_tokens=case.request.computed_tokens,
        )
    slack = {name: unit - 1 for name, unit in case.units().items()}
    return expect(consumer, case.request, slack_tokens=slack), report


async def offered(
    case: Case,
    stack: AsyncExitStack,
    fabric: Callable[[str], Fabric],
    streams: Streams | None,
) -> Ticket:
    """The producer's half: engines that stay open as long as the stack."""
    pools = case.producer_pools()
    tickets = []
    for number, pool in enumerate(pools.values()):
        rank = Rank(number, len(pools))
        engine = await stack.enter_async_context(
            open_engine(
                EngineConfig(engine_id="producer", identity=IDENTITY, rank=rank),
                pool.cache,
                fabric=fabric(f"producer-{number}"),
                streams=streams,
            )
        )
        tickets.append(_offer(case, engine, pool, number))
    return Ticket.merge(tickets)


def _offer(case: Case, engine: TransferEngine, pool: RankPool, number: int) -> Ticket:
    held = {group.name for group in pool.cache.layout.groups}
    spans = {n: span for n, span in case.request.remote.items() if n in held}
    offer = engine.offer(REQUEST, spans, num_tokens=case.request.num_tokens)
    # Only now: a request that must be refused may name blocks that are not there.
    fill_producer(pool, case.request, seed=number)
    return offer.ticket
