"""The child of `test_instances`: all ranks of one instance over real NIXL, told what to do.

One instance after another, each with an agent for every rank: a process for each rank
would spend its time importing.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import trio

import kvferry.engine.fabric.nixl  # noqa: F401 - seconds, before anything is timed
from kvferry.engine import EngineConfig, Rank, open_engine
from kvferry.protocol import Contact, Ticket
from tests.kit import GROUP, IDENTITY, Pool
from tests.nixl.push_commands import told
from tests.processes import Answers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvferry.engine import Offer, TransferEngine


class Instance:
    """The commands; each answers with something JSON can say."""

    def __init__(self, engines: list[TransferEngine], pools: list[Pool]) -> None:
        self._engines = engines
        self._pools = pools
        self._offers: dict[str, list[Offer]] = {}

    # The producer's side.

    async def offer(
        self, request_id: str, blocks: list[int], num_tokens: int, maker: int
    ) -> Any:
        """Every rank stamps and offers; the ticket of one of them."""
        offers = self._offers[request_id] = []
        for engine, pool in zip(self._engines, self._pools, strict=True):
            stamped = pool.stamp(blocks, num_tokens=num_tokens)
            offers.append(engine.offer(request_id, stamped, num_tokens=num_tokens))
        return offers[maker].ticket.to_dict()

    async def outcomes(self, request_id: str) -> Any:
        """How each rank's offer ended, once it has."""
        return [(await offer.wait()).value for offer in self._offers.pop(request_id)]

    async def contact(self) -> Any:
        return self._engines[-1].contact.to_dict()

    async def push(self, request_id: str, blocks: list[int], num_tokens: int) -> Any:
        """Every rank pushes; how many ranks each of them has written to."""
        peers: dict[int, int] = {}

        async def one(number: int) -> None:
            stamped = self._pools[number].stamp(blocks, num_tokens=num_tokens)
            report = await self._engines[number].push(
                request_id, stamped, num_tokens=num_tokens
            )
            peers[number] = len(report.peers)

        async with trio.open_nursery() as nursery:
            for number in range(len(self._engines)):
                nursery.start_soon(one, number)
        return [peers[number] for number in sorted(peers)]

    # The consumer's side.

    async def pull(self, ticket: Any, blocks: list[int]) -> Any:
        """What each rank is told, when they have agreed."""
        offered = Ticket.from_dict(ticket)
        return await self._agree(
            offered.request_id,
            lambda engine: engine.pull(offered, {GROUP: blocks}),
        )

    async def expect(self, contact: Any, request_id: str, blocks: list[int]) -> Any:
        pushing = Contact.from_dict(contact)
        return await self._agree(
            request_id,
            lambda engine: engine.expect(
                pushing, {GROUP: blocks}, request_id=request_id
            ),
        )

    async def _agree(
        self, key: str, call: Callable[[TransferEngine], Awaitable[Any]]
    ) -> list[Any]:
        answers: dict[int, Any] = {}

        async def one(number: int) -> None:
            engine = self._engines[number]
            answers[number] = await told(engine.agree(key, partial(call, engine)))

        async with trio.open_nursery() as nursery:
            for number in range(len(self._engines)):
                nursery.start_soon(one, number)
        return [answers[number] for number in sorted(answers)]

    async def check(self, blocks: list[int], num_tokens: int) -> Any:
        """Every element of every rank's pool; then all poison again."""
        for pool in self._pools:
            pool.check(blocks, num_tokens=num_tokens)
            for tensor in pool.tensors:
                tensor.fill_(-1)

    async def connected(self) -> Any:
        """Of each rank, which producer ranks it has a link to; and its handshakes."""
        return [
            [
                sorted(key.rank.tp for key in engine._peers._peers),
                engine._peers.dials.handshakes,
            ]
            for engine in self._engines
        ]

    async def in_flight(self) -> Any:
        """How many ranks have transfers that may touch memory at this moment."""
        return sum(
            any(pull._machine.unsettled for pull in engine._pulls._active.values())
            for engine in self._engines
        )


async def main(answers: Answers) -> None:
    """Per line a command; ``open`` begins an instance, ``close`` ends it."""
    answers.send("loaded")
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        _, engine_id, size, described, settings = json.loads(line)
        pools = [Pool(tp=(tp, size), **described) for tp in range(size)]
        async with AsyncExitStack() as stack:
            engines: list[TransferEngine] = []
            for rank, pool in zip(Rank(tp_size=size).instance(), pools, strict=True):
                config = EngineConfig(
                    engine_id=engine_id,
                    identity=IDENTITY,
                    rank=rank,
                    join=engines[0].address if engines else None,
                    **settings,
                )
                log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
                opened = open_engine(config, pool.cache, logger=log)
                engines.append(await stack.enter_async_context(opened))
            for engine in engines:
                await engine.instance_ready(10.0)
            answers.send("ready")
            async with trio.open_nursery() as nursery:
                await _serve(answers, Instance(engines, pools), nursery)
        answers.send("closed")


async def _serve(answers: Answers, instance: Instance, nursery: trio.Nursery) -> None:
    while line := await trio.to_thread.run_sync(sys.stdin.readline):
        command, *args = json.loads(line)
        if command == "close":
            return
        nursery.start_soon(_answer, answers, instance, command, args)


async def _answer(
    answers: Answers, instance: Instance, command: str, args: list[Any]
) -> None:
    try:
        answers.send(await getattr(instance, command)(*args))
    except Exception as exc:
        answers.fail(f"{type(exc).__name__}: {exc}")


if __name__ == "__main__":
    trio.run(main, Answers())
