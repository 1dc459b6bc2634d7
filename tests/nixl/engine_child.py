"""The child of `test_two_processes`: one engine over real NIXL, told what to do."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import structlog
import trio

from kvferry.engine import EngineConfig, FerryError, open_engine
from kvferry.protocol import ModelIdentity, Ticket
from tests.kit import GROUP, IDENTITY, Pool
from tests.processes import Answers

if TYPE_CHECKING:
    from kvferry.engine import Offer, TransferEngine


class Told:
    """The commands; each answers with something JSON can say."""

    def __init__(self, engine: TransferEngine, pool: Pool) -> None:
        self._engine = engine
        self._pool = pool
        self._offers: dict[str, Offer] = {}

    async def offer(self, request_id: str, blocks: list[int], num_tokens: int) -> Any:
        """Stamp and offer; the ticket."""
        given = self._pool.stamp(blocks, num_tokens=num_tokens)
        offer = self._engine.offer(request_id, given, num_tokens=num_tokens)
        self._offers[request_id] = offer
        return offer.ticket.to_dict()

    async def withdraw(self, request_id: str) -> Any:
        self._offers[request_id].withdraw()

    async def outcome(self, request_id: str) -> Any:
        return (await self._offers[request_id].wait()).value

    async def pull(self, ticket: Any, blocks: list[int], settings: Any) -> Any:
        """The report's numbers, or the error's name and fields."""
        try:
            report = await self._engine.pull(
                Ticket.from_dict(ticket), {GROUP: blocks}, **settings
            )
        except FerryError as error:
            return {
                "error": type(error).__name__,
                "detail": str(error),
                "request": error.request_id,
                "phase": error.phase,
                "untrusted": {g: str(r) for g, r in error.untrusted.items()},
            }
        return {"bytes": report.bytes, "waves": report.waves}

    async def check(self, blocks: list[int], num_tokens: int, first_token: int) -> Any:
        """Every element of the pool; then all poison again."""
        self._pool.check(blocks, num_tokens=num_tokens, first_token=first_token)
        await self.wipe()

    async def wipe(self) -> Any:
        for tensor in self._pool.tensors:
            tensor.fill_(-1)

    async def is_untouched(self) -> Any:
        return self._pool.is_untouched()

    async def statistics(self) -> Any:
        return self._engine.statistics()


async def main(
    settings: dict[str, Any], pool: dict[str, int], answers: Answers
) -> None:
    """Serve until stdin ends."""
    identity = ModelIdentity(**{**_facts(), **settings.pop("identity", {})})
    secret = settings.pop("secret", "").encode()
    config = EngineConfig(identity=identity, secret=secret, **settings)
    described = Pool(**pool)
    log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
    async with open_engine(config, described.cache, logger=log) as engine:
        told = Told(engine, described)
        answers.send({"address": engine.address})
        async with trio.open_nursery() as nursery:
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                command, *args = json.loads(line)
                nursery.start_soon(_answer, answers, told, command, args)


async def _answer(answers: Answers, told: Told, command: str, args: list[Any]) -> None:
    try:
        answers.send(await getattr(told, command)(*args))
    except Exception as exc:
        answers.fail(f"{type(exc).__name__}: {exc}")


def _facts() -> dict[str, str]:
    return {
        "model": IDENTITY.model,
        "revision": IDENTITY.revision,
        "dtype": IDENTITY.dtype,
    }


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]), json.loads(sys.argv[2]), Answers())
