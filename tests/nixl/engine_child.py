"""The child of the tests of two engines: one engine over real NIXL, told what to do."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import structlog
import trio

from kvferry.engine import EngineConfig, FerryError, open_engine
from kvferry.protocol import Contact, ModelIdentity, Ticket
from tests.kit import GROUP, IDENTITY, POISON, Pool
from tests.processes import Answers

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvferry.engine import Offer, PushReport, TransferEngine, TransferReport


class Told:
    """The commands; each answers with something JSON can say."""

    def __init__(self, engine: TransferEngine, pool: Pool) -> None:
        self._engine = engine
        self._pool = pool
        self._offers: dict[str, Offer] = {}
        self._scopes: dict[str, trio.CancelScope] = {}

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
        return await _told(
            self._engine.pull(Ticket.from_dict(ticket), {GROUP: blocks}, **settings)
        )

    async def contact(self) -> Any:
        return self._engine.contact.to_dict()

    async def expect(
        self, request_id: str, contact: Any, blocks: list[int], settings: Any
    ) -> Any:
        """As `pull`. Cancelled, it refills what it was given back, with `FILLED`."""
        with trio.CancelScope() as self._scopes[request_id]:
            return await _told(
                self._engine.expect(
                    Contact.from_dict(contact),
                    {GROUP: blocks},
                    request_id=request_id,
                    **settings,
                )
            )
        held = self._engine.quarantine.blocks(GROUP)
        free = [block for block in blocks if block not in held]
        self._pool.fill(free, FILLED)
        return {"given_back": free, "held": sorted(held)}

    async def cancel(self, request_id: str) -> None:
        """No answer of its own: `expect` answers."""
        self._scopes[request_id].cancel()

    async def push(self, request_id: str, blocks: list[int], num_tokens: int) -> Any:
        """Push whatever is in the blocks; see `stamp`."""
        return await _told(
            self._engine.push(request_id, {GROUP: blocks}, num_tokens=num_tokens)
        )

    async def stream(
        self, request_id: str, blocks: list[int], num_tokens: int, chunk: int
    ) -> Any:
        """Push chunk by chunk, layer by layer; a layer is stamped when it is its turn."""
        self._pool.stamp(blocks, num_tokens=num_tokens)
        stamped = [tensor.clone() for tensor in self._pool.tensors]
        await self.wipe()
        return await _told(self._stream(request_id, blocks, num_tokens, chunk, stamped))

    async def _stream(
        self,
        request_id: str,
        blocks: list[int],
        num_tokens: int,
        chunk: int,
        stamped: list[Any],
    ) -> PushReport:
        async with self._engine.push_stream(
            request_id, {GROUP: blocks}, num_tokens=num_tokens
        ) as stream:
            for first in range(0, num_tokens, chunk):
                last = min(first + chunk, num_tokens)
                for number, whole in enumerate(stamped):
                    for token in range(first, last):
                        block, slot = divmod(token, self._pool.block_size)
                        place = (blocks[block], slice(None), slice(None), slot)
                        self._pool.tensors[number][place] = whole[place]
                    await stream.ready(
                        layers=[f"layers.{number}"], tokens=(first, last)
                    )
        if stream.report is None:
            raise ValueError("no report")
        return stream.report

    async def stamp(self, blocks: list[int], num_tokens: int) -> Any:
        self._pool.stamp(blocks, num_tokens=num_tokens)

    async def fill(self, blocks: list[int], value: float) -> Any:
        self._pool.fill(blocks, value)

    async def begun(self, blocks: list[int]) -> Any:
        """How many of the blocks, each layer's counted, have begun to arrive."""
        return sum(
            int((tensor[blocks, 0, 0, 0, 0] != POISON).sum())
            for tensor in self._pool.tensors
        )

    async def reclaimed(self, blocks: list[int]) -> Any:
        """Wait until no block is in quarantine, and refill them at once."""
        await self._engine.quarantine.wait_empty()
        self._pool.fill(blocks, FILLED)

    async def changed(self, blocks: list[int]) -> Any:
        """How many of the blocks no longer hold `FILLED` everywhere."""
        return sum(not self._pool.is_filled([block], FILLED) for block in blocks)

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


FILLED = 7.0


async def _told(call: Awaitable[TransferReport | PushReport]) -> Any:
    try:
        report = await call
    except FerryError as error:
        return {
            "error": type(error).__name__,
            "detail": str(error),
            "request": error.request_id,
            "phase": error.phase,
            "untrusted": {g: str(r) for g, r in error.untrusted.items()},
        }
    return {"bytes": report.bytes, "waves": report.waves}


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
        answer = await getattr(told, command)(*args)
        if command not in SILENT:
            answers.send(answer)
    except Exception as exc:
        answers.fail(f"{type(exc).__name__}: {exc}")


SILENT = frozenset({"cancel"})


def _facts() -> dict[str, str]:
    return {
        "model": IDENTITY.model,
        "revision": IDENTITY.revision,
        "dtype": IDENTITY.dtype,
    }


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]), json.loads(sys.argv[2]), Answers())
