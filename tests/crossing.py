"""A `planning.Case` through real engines: every rank opened, offered, merged, pulled.

Or pushed, at once or in steps, into blocks that were registered before or after.

The stamp oracle of `tests.oracle` looks at the result; which fabric the bytes
crossed is its caller's choice.
"""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from kvferry.engine import EngineConfig, FerryError, Rank, open_engine
from kvferry.protocol import ModelIdentity, Ticket
from kvferry.protocol.ticket import Contact
from tests.oracle import expect, fill_producer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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
    tickets = [
        _offer(case, engine, pool, number)
        for number, (engine, pool) in enumerate(
            await _opened(case, stack, fabric, streams)
        )
    ]
    return Ticket.merge(tickets)


def _offer(case: Case, engine: TransferEngine, pool: RankPool, number: int) -> Ticket:
    held = {group.name for group in pool.cache.layout.groups}
    spans = {n: span for n, span in case.request.remote.items() if n in held}
    offer = engine.offer(REQUEST, spans, num_tokens=case.request.num_tokens)
    # Only now: a request that must be refused may name blocks that are not there.
    fill_producer(pool, case.request, seed=number)
    return offer.ticket


async def cross_pushed(
    case: Case,
    *,
    fabric: Callable[[str], Fabric],
    streams: Streams | None = None,
    **consumer: Any,
) -> tuple[list[str], list[FerryError]]:
    """Push the case's request; what the oracle finds wrong, and every error of either side.

    The case's seed says who comes first, and whether the producers push all at once
    or in steps of layers and tokens in any order.

    Args:
        case, fabric, streams, consumer: As in `cross`.
    """
    rng = random.Random(case.seed)
    errors: list[FerryError] = []
    async with AsyncExitStack() as stack:
        producers = await _opened(case, stack, fabric, streams)
        target = case.consumer_pool()
        rank = Rank(case.consumer_rank, case.consumer_tp)
        config = EngineConfig(
            engine_id="consumer", identity=IDENTITY, rank=rank, **consumer
        )
        decode = await stack.enter_async_context(
            open_engine(
                config, target.cache, fabric=fabric("consumer"), streams=streams
            )
        )
        contact = Contact.merge(engine.contact for engine, _ in producers)
        late_s = rng.choice((0.0, 0.02))  # of the landing; the pushes begin at 0.01

        async def push(engine: TransferEngine, pool: RankPool, seed: int) -> None:
            await trio.sleep(0.01)
            try:
                await _push(case, engine, pool, random.Random(seed))
            except FerryError as error:
                errors.append(error)
                await trio.sleep(0.1)  # until the consumer knows, if it ever will
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for number, (engine, pool) in enumerate(producers):
                if case.refusal is None:
                    fill_producer(pool, case.request, seed=number)
                nursery.start_soon(push, engine, pool, rng.random())
            try:
                await trio.sleep(late_s)
                await decode.expect(
                    contact,
                    case.request.local,
                    request_id=REQUEST,
                    computed_tokens=case.request.computed_tokens,
                )
            except FerryError as error:
                errors.append(error)
                await trio.sleep(0.1)
            # The other ranks of the consumer never come: the pushes would wait.
            nursery.cancel_scope.cancel()
    if errors:  # the request may name blocks that are not there
        return [], errors
    slack = {name: unit - 1 for name, unit in case.units().items()}
    return expect(target, case.request, slack_tokens=slack), errors


class Pushing(NamedTuple):
    """The producer's half of a push between two processes.

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
    """Engines that stay open as long as the stack, ready to push."""
    producers = await _opened(case, stack, fabric, streams)
    for number, (_, pool) in enumerate(producers):
        fill_producer(pool, case.request, seed=number)

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            for engine, pool in producers:
                nursery.start_soon(_push, case, engine, pool, random.Random(case.seed))

    return Pushing(Contact.merge(engine.contact for engine, _ in producers), run)


async def expected(
    case: Case, contact: Contact, fabric: Fabric, streams: Streams | None
) -> list[str]:
    """The consumer's half; what the oracle finds wrong.

    A push waits for all ranks of the consumer, and the case has one: here it is the
    only one of its instance, whatever part of the heads it holds.
    """
    target = case.consumer_pool()
    config = EngineConfig(engine_id="consumer", identity=IDENTITY)
    async with open_engine(
        config, target.cache, fabric=fabric, streams=streams
    ) as engine:
        await engine.expect(
            contact,
            case.request.local,
            request_id=REQUEST,
            computed_tokens=case.request.computed_tokens,
        )
    slack = {name: unit - 1 for name, unit in case.units().items()}
    return expect(target, case.request, slack_tokens=slack)


async def _push(
    case: Case, engine: TransferEngine, pool: RankPool, rng: random.Random
) -> None:
    held = {group.name for group in pool.cache.layout.groups}
    spans = {n: span for n, span in case.request.remote.items() if n in held}
    last = case.request.num_tokens
    how = rng.choice(("whole", "tokens", "layers", "both"))
    async with engine.push_stream(REQUEST, spans, num_tokens=last) as stream:
        for layers, tokens in _steps(rng, how, pool, last):
            await stream.ready(layers=layers, tokens=tokens)
            if rng.random() < 0.3:
                await trio.sleep(0.003)


def _steps(
    rng: random.Random, how: str, pool: RankPool, last: int
) -> list[tuple[list[str] | None, tuple[int, int] | None]]:
    """Every layer's tokens, each once: in one step or in many, in any order."""
    if how == "whole":
        return [(None, None)]
    edges = [0, *sorted(rng.sample(range(1, last), min(rng.randint(0, 3), last - 1)))]
    chunks = list(pairwise([*edges, last])) if how != "layers" else [None]
    names = {f.layer for g in pool.cache.layout.groups for f in g.fields}
    layers = [[name] for name in sorted(names)] if how != "tokens" else [None]
    steps = [(layer, chunk) for layer in layers for chunk in chunks]
    rng.shuffle(steps)
    return steps


async def _opened(
    case: Case,
    stack: AsyncExitStack,
    fabric: Callable[[str], Fabric],
    streams: Streams | None,
) -> list[tuple[TransferEngine, RankPool]]:
    """All ranks of the producer, open as long as the stack."""
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
