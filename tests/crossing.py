"""A `planning.Case` through real engines: every rank opened, offered, merged, pulled.

Or pushed: whole, or in pieces by layer and by tokens. The stamp oracle of `tests.oracle` looks at the result; which fabric the bytes
crossed is its caller's choice.
"""

from __future__ import annotations

import itertools
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from kvferry.engine import EngineConfig, Rank, open_engine
from kvferry.protocol import Contact, ModelIdentity, Ticket
from tests.oracle import expect, fill_producer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvferry.engine import Span, TransferEngine, TransferReport
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

    async def pull(engine: TransferEngine) -> TransferReport:
        return await engine.pull(
            ticket,
            case.request.local,
            computed_tokens=case.request.computed_tokens,
        )

    rank = Rank(case.consumer_rank, case.consumer_tp)
    return await _received(case, pull, fabric, streams, rank=rank, **settings)


async def expected(
    case: Case, contact: Contact, fabric: Fabric, streams: Streams | None
) -> tuple[list[str], TransferReport]:
    """The consumer's half of a push.

    The case has one consumer rank, and a push waits for all that there are: it is
    the only one of its instance, whatever part of the heads it holds.
    """

    async def expect_push(engine: TransferEngine) -> TransferReport:
        return await engine.expect(
            contact,
            case.request.local,
            request_id=REQUEST,
            computed_tokens=case.request.computed_tokens,
        )

    return await _received(case, expect_push, fabric, streams)


async def _received(
    case: Case,
    receive: Callable[[TransferEngine], Awaitable[TransferReport]],
    fabric: Fabric,
    streams: Streams | None,
    **settings: Any,
) -> tuple[list[str], TransferReport]:
    consumer = case.consumer_pool()
    config = EngineConfig(engine_id="consumer", identity=IDENTITY, **settings)
    async with open_engine(
        config, consumer.cache, fabric=fabric, streams=streams
    ) as engine:
        report = await receive(engine)
    slack = {name: unit - 1 for name, unit in case.units().items()}
    return expect(consumer, case.request, slack_tokens=slack), report


async def offered(
    case: Case,
    stack: AsyncExitStack,
    fabric: Callable[[str], Fabric],
    streams: Streams | None,
) -> Ticket:
    """The producer's half: engines that stay open as long as the stack."""
    producers = await _producers(case, stack, fabric, streams)
    return Ticket.merge(
        [_offer(case, *producer, number) for number, producer in enumerate(producers)]
    )


class Pushing(NamedTuple):
    """The producer's half of a push, ready to go.

    Attributes:
        contact: Of all ranks.
        run: Pushes from each.
    """

    contact: Contact
    run: Callable[[], Awaitable[None]]


async def pushing(
    case: Case,
    stack: AsyncExitStack,
    fabric: Callable[[str], Fabric],
    streams: Streams | None,
) -> Pushing:
    """The producer's half of a push: engines that stay open as long as the stack."""
    producers = await _producers(case, stack, fabric, streams)
    for number, (_, pool) in enumerate(producers):
        fill_producer(pool, case.request, seed=number)

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            for engine, pool in producers:
                nursery.start_soon(_push, case, engine, pool)

    return Pushing(Contact.merge([engine.contact for engine, _ in producers]), run)


async def _push(case: Case, engine: TransferEngine, pool: RankPool) -> None:
    """Whole; by layers; or both by layers and by tokens, in a random order."""
    spans = _held(case, pool)
    tokens = case.request.num_tokens
    async with engine.push_stream(REQUEST, spans, num_tokens=tokens) as stream:
        if case.seed % 3 == 0:
            await stream.ready()
            return
        rng = random.Random(case.seed)
        layers = {f.layer: None for g in pool.cache.layout.groups for f in g.fields}
        cuts = sorted(rng.sample(range(1, tokens), min(3, tokens - 1)))
        if case.seed % 3 == 1:
            cuts = []
        pieces = [
            (layer, (first, last))
            for layer in layers
            for first, last in itertools.pairwise((0, *cuts, tokens))
        ]
        rng.shuffle(pieces)
        for layer, piece in pieces:
            await stream.ready(layers=[layer], tokens=piece)


async def _producers(
    case: Case,
    stack: AsyncExitStack,
    fabric: Callable[[str], Fabric],
    streams: Streams | None,
) -> list[tuple[TransferEngine, RankPool]]:
    pools = case.producer_pools()
    found = []
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
        found.append((engine, pool))
    return found


def _offer(case: Case, engine: TransferEngine, pool: RankPool, number: int) -> Ticket:
    spans = _held(case, pool)
    offer = engine.offer(REQUEST, spans, num_tokens=case.request.num_tokens)
    # Only now: a request that must be refused may name blocks that are not there.
    fill_producer(pool, case.request, seed=number)
    return offer.ticket


def _held(case: Case, pool: RankPool) -> dict[str, Span]:
    held = {group.name for group in pool.cache.layout.groups}
    return {n: span for n, span in case.request.remote.items() if n in held}
