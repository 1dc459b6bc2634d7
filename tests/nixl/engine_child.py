"""The child of the tests with processes: one engine over real NIXL, told what to do.

It is given an engine's settings and a pool's on its command line; without them it
loads everything and opens one engine after another (`tests.processes.Restartable`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog
import trio

import kvferry.engine.fabric.nixl  # noqa: F401 - seconds, before anything is timed
from kvferry.engine import (
    EngineConfig,
    FerryError,
    Rank,
    Span,
    TransferFailed,
    open_engine,
)
from kvferry.engine.fabric.base import Operation
from kvferry.engine.fabric.looks import HOME_S
from kvferry.engine.waves import Waves
from kvferry.protocol import ModelIdentity, Ticket
from tests.kit import GROUP, IDENTITY, Pool
from tests.nixl.push_commands import PushCommands, told
from tests.processes import Answers, live_again

if TYPE_CHECKING:
    from kvferry.engine import Offer, TransferEngine
    from kvferry.engine.fabric.custody import Custody


@dataclass
class Begun:
    """A pull that runs while other commands are answered."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)
    result: Any = None


class Told(PushCommands):
    """The commands; each answers with something JSON can say."""

    def __init__(
        self, engine: TransferEngine, pool: Pool, nursery: trio.Nursery
    ) -> None:
        super().__init__(engine, pool)
        self._nursery = nursery
        self._offers: dict[str, Offer] = {}
        self._begun: dict[str, Begun] = {}

    # The producer's side.

    async def offer(
        self, request_id: str, blocks: list[int], num_tokens: int, salt: int = 0
    ) -> Any:
        """Stamp and offer; the ticket."""
        self._pool.stamp(blocks, num_tokens=num_tokens, salt=salt)
        return await self.offer_as_is(request_id, blocks, num_tokens)

    async def offer_as_is(
        self, request_id: str, blocks: list[int], num_tokens: int
    ) -> Any:
        """Offer whatever the blocks hold; the ticket."""
        offer = self._engine.offer(request_id, {GROUP: blocks}, num_tokens=num_tokens)
        self._offers[request_id] = offer
        return offer.ticket.to_dict()

    async def withdraw(self, request_id: str) -> Any:
        self._offers[request_id].withdraw()

    async def outcome(self, request_id: str) -> Any:
        return (await self._offers.pop(request_id).wait()).value

    async def reuse(self, request_id: str, blocks: list[int], value: float) -> Any:
        """From now on: fill the blocks as soon as the offer has ended."""
        offer = self._offers[request_id]

        async def wait_and_fill() -> None:
            await offer.wait()
            self._pool.fill(blocks, value)

        self._nursery.start_soon(wait_and_fill)

    # The consumer's side.

    async def pull(self, ticket: Any, blocks: list[int], settings: Any) -> Any:
        """The report's numbers, or the error's name and fields."""
        return await told(
            self._engine.pull(Ticket.from_dict(ticket), {GROUP: blocks}, **settings)
        )

    async def begin(
        self,
        ticket: Any,
        blocks: list[int],
        refill: float | None = None,
        cancel_after: int | None = None,
    ) -> Any:
        """Start a pull; `result` waits for it.

        Args:
            refill: What to fill the blocks with at the very moment they are given
                back, as the caller of a cancelled or failed pull may.
            cancel_after: Cancel it after so many checkpoints.
        """
        request_id = ticket["request_id"]
        begun = self._begun[request_id] = Begun()
        self._nursery.start_soon(self._run, begun, ticket, blocks, refill)
        if cancel_after is not None:
            self._nursery.start_soon(self._cancel_later, request_id, cancel_after)

    async def _run(
        self, begun: Begun, ticket: Any, blocks: list[int], refill: float | None
    ) -> None:
        with begun.scope:
            try:
                begun.result = await self.pull(ticket, blocks, {})
            finally:
                if refill is not None:
                    held = self._engine.quarantine.blocks(GROUP)
                    self._pool.fill([b for b in blocks if b not in held], refill)
        begun.ended.set()

    async def _cancel_later(self, request_id: str, checkpoints: int) -> None:
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        await self.cancel(request_id)

    async def cancel(self, request_id: str) -> Any:
        """Cancel a pull; its result names the phase that this found it in."""
        begun = self._begun.get(request_id)
        if begun is None or begun.ended.is_set():
            return
        pull = self._engine._pulls._active.get((request_id, 0))
        phase = pull._machine.state.value if pull else "not begun"
        begun.result = {"cancelled": phase}
        begun.scope.cancel()

    async def result(self, request_id: str) -> Any:
        begun = self._begun[request_id]
        await begun.ended.wait()
        del self._begun[request_id]
        return begun.result

    async def in_flight(self) -> Any:
        """The pulls whose transfers may touch memory at this moment."""
        active = self._engine._pulls._active
        return sorted(n for (n, _), pull in active.items() if pull._machine.unsettled)

    async def quarantined(self) -> Any:
        return sorted(self._engine.quarantine.blocks(GROUP))

    async def refill_reclaimed(self, blocks: list[int], old: float, new: float) -> Any:
        """Wait until the quarantine is empty, and fill the blocks that moment.

        Returns:
            How many elements had another value than the old one.
        """
        await self._engine.quarantine.wait_empty()
        changed = await self.others(blocks, old)
        self._pool.fill(blocks, new)
        return changed

    async def read_and_release(self, ticket: Any, blocks: list[int]) -> Any:
        """What no engine may do: read the same bytes by NIXL alone, and release the
        handles while they are in flight.

        Returns:
            How many were.
        """
        engine, offered = self._engine, Ticket.from_dict(ticket)
        (sources,) = engine._peers._sources.values()
        selection = sources.plan.select(
            num_tokens=offered.num_tokens,
            computed_tokens=0,
            local={GROUP: Span(blocks, 0)},
            remote={GROUP: Span(offered.spans[GROUP].block_ids, 0)},
        )
        transfers = []
        for wave in Waves(
            selection, [sources.peers[0].key], max_bytes=engine.config.wave_bytes
        ):
            ours, theirs = sources.prepared[0][wave.selected.index]
            ids = wave.selected.local_ids[wave.slice]
            remote_ids = wave.selected.remote_ids[wave.slice]
            transfers.append(
                engine._fabric.post(Operation.READ, ours, ids, theirs, remote_ids)
            )
        in_flight = [t for t in transfers if not engine._fabric.poll(t).is_settled]
        aside = engine._fabric._first

        def release() -> None:
            for transfer in transfers:
                transfer.inner.handle.release()
                aside._inner._transfers.discard(transfer.inner)
                del aside._moves[transfer]

        aside._custody.wait_for(release)
        return len(in_flight)

    # One rank of an instance.

    async def ready(self) -> Any:
        """The instance's contact, once all of it is there; or the error."""
        try:
            await self._engine.instance_ready(30.0)
        except FerryError as error:
            return {"error": type(error).__name__, "detail": error.detail}
        return self._engine.contact.to_dict()

    async def discover(self, engine_id: str, address: list[Any]) -> Any:
        host, port = address
        return (await self._engine.discover(engine_id, (host, port))).to_dict()

    async def agree(self, key: str, work_s: float, fails: bool) -> Any:
        """What becomes of an agreement whose work takes so long here."""

        async def work() -> str:
            await trio.sleep(work_s)
            if fails:
                raise TransferFailed("told to fail")
            return "done"

        try:
            return await self._engine.agree(key, work)
        except FerryError as error:
            return {"error": type(error).__name__, "origin": error.origin}

    # Either side.

    async def check(
        self, blocks: list[int], num_tokens: int, first_token: int, salt: int = 0
    ) -> Any:
        """Every element of the pool; then all poison again."""
        self._pool.check(
            blocks, num_tokens=num_tokens, first_token=first_token, salt=salt
        )
        await self.wipe()

    async def holds(self, blocks: list[int], num_tokens: int, salt: int) -> Any:
        return self._pool.holds(blocks, num_tokens=num_tokens, salt=salt)

    async def wipe(self) -> Any:
        for tensor in self._pool.tensors:
            tensor.fill_(-1)

    async def is_untouched(self) -> Any:
        return self._pool.is_untouched()

    async def fill(self, blocks: list[int], value: float) -> Any:
        self._pool.fill(blocks, value)

    async def others(self, blocks: list[int], value: float) -> Any:
        """How many elements of the blocks have another value."""
        return sum(
            int((tensor[block] != value).sum())
            for tensor in self._pool.tensors
            for block in blocks
        )

    async def statistics(self) -> Any:
        return self._engine.statistics()

    async def copies(self) -> Any:
        """How many posts were copied by threads beside the loop."""
        return self._engine._fabric.copies

    async def is_aside(self) -> Any:
        """Whether a thread has the agent."""
        return self._custody.is_aside

    async def be_aside(self) -> Any:
        """Give the agent to a thread, and leave it there until `come_home`."""
        self._custody._looks.home_s = 1e9
        self._custody._looks.are_long = True
        self._custody._go_aside()
        while not self._custody._has_it.done():
            await trio.lowlevel.checkpoint()

    async def stay_home(self) -> Any:
        """Give it to no thread: it is looked at as often as the settings say."""
        self._custody._is_attended = False

    async def come_home(self) -> Any:
        self._custody._looks.home_s = HOME_S
        self._custody._looks.are_long = None
        self._custody.leave()
        while self._custody.is_aside:
            await trio.lowlevel.checkpoint()

    @property
    def _custody(self) -> Custody:
        return self._engine._fabric._first._custody

    async def let_pass(self, seconds: float) -> Any:
        """Answer after a while."""
        await trio.sleep(seconds)


async def main(settings: str, pool: str, answers: Answers) -> None:
    """Serve until stdin ends."""
    config, described = _config(json.loads(settings)), Pool(**json.loads(pool))
    log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
    async with (
        open_engine(config, described.cache, logger=log) as engine,
        trio.open_nursery() as nursery,
    ):
        commands = Told(engine, described, nursery)
        answers.send({"address": engine.address})
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            command, *args = json.loads(line)
            nursery.start_soon(_answer, answers, commands, command, args)
        nursery.cancel_scope.cancel()


async def _answer(
    answers: Answers, commands: Told, command: str, args: list[Any]
) -> None:
    try:
        answers.send(await getattr(commands, command)(*args))
    except Exception as exc:
        answers.fail(f"{type(exc).__name__}: {exc}")


def _config(settings: dict[str, Any]) -> EngineConfig:
    facts = {
        "model": IDENTITY.model,
        "revision": IDENTITY.revision,
        "dtype": IDENTITY.dtype,
    }
    identity = ModelIdentity(**{**facts, **settings.pop("identity", {})})
    secret = settings.pop("secret", "").encode()
    settings["rank"] = Rank(**settings.get("rank", {}))
    return EngineConfig(identity=identity, secret=secret, **settings)


if __name__ == "__main__":
    way_back = Answers()
    if sys.argv[1:]:
        trio.run(main, *sys.argv[1:], way_back)
    else:
        live_again(way_back, lambda *args: trio.run(main, *args, way_back))
