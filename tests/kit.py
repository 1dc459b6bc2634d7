"""Engines on one memory network and virtual time, and pools whose every element is known.

`World` opens engines that share a `MemoryNetwork`, a `MemoryStreams` and a log;
`Pool` is a small dense cache whose elements are stamps: a function of (layer,
key/value, global head, token, element), so that a wrong byte shows wherever it is.
`Process` is an engine that can be killed, and `Impostor` a peer that follows a
script instead of the protocol.
"""

from __future__ import annotations

import io
import itertools
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import structlog
import torch
import trio
import trio.testing

from kvferry.engine import (
    AttentionGroup,
    EngineConfig,
    KVCache,
    Offer,
    PagedTensor,
    PeerLost,
    Rank,
    StateGroup,
    StatePart,
    StateTensor,
    TransferEngine,
    open_engine,
    tp_shard,
)
from kvferry.engine.fabric import MemoryNetwork, MemoryStreams
from kvferry.engine.handshake import Credentials, Welcome, receive_call
from kvferry.protocol import ModelIdentity, Ticket
from kvferry.protocol.handshake import Card, Purpose, Refusal, encode_card
from kvferry.protocol.identity import EngineKey
from kvferry.protocol.ticket import RankOffer, TicketSpan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from kvferry.engine.link import FramedStream

IDENTITY = ModelIdentity(model="org/tiny", revision="1", dtype="float64")
POISON = -1.0
GROUP = "full"
STATE = "state"
LOOKS = {"poll_s": 0.001, "offered_poll_s": 0.02, "idle_poll_s": 0.1}
"""Fewer looks of the pump than by default: virtual minutes cost real time."""


class Pool:
    """A dense cache of stamps; float64 holds each of them exactly.

    Args:
        heads: Of the whole model; ``tp`` says which of them this rank holds.
        tp: Rank and size.
        slots: Slots of a state group `STATE`, sharded like the heads; 0 has none.
        tokens_first: Tokens before heads in memory, rather than behind them.
    """

    def __init__(
        self,
        blocks: int = 16,
        *,
        layers: int = 2,
        block_size: int = 4,
        heads: int = 2,
        dim: int = 3,
        tp: tuple[int, int] = (0, 1),
        slots: int = 0,
        group: str = GROUP,
        dtype: torch.dtype = torch.float64,
        window: int | None = None,
        tokens_first: bool = False,
    ) -> None:
        self.block_size = block_size
        self.group = group
        shard = tp_shard(total=heads, rank=tp[0], size=tp[1])
        self.heads = range(shard.first, shard.last)
        inner = [shard.size, block_size]
        shape = (blocks, 2, *(reversed(inner) if tokens_first else inner), dim)
        given = [torch.full(shape, POISON, dtype=dtype) for _ in range(layers)]
        axes = "b k n h d" if tokens_first else "b k h n d"
        self.tensors = [t.transpose(2, 3) if tokens_first else t for t in given]
        self.states = torch.full((slots, shard.size, dim), POISON, dtype=dtype)
        groups: list[AttentionGroup | StateGroup] = [
            AttentionGroup(
                group,
                block_size=block_size,
                layers={
                    f"layers.{i}": PagedTensor(tensor, axes, shard)
                    for i, tensor in enumerate(given)
                },
                window=window,
            )
        ]
        if slots:
            parts = (StatePart("ssm", shard),)
            state = StateTensor("ssm", self.states, axes="b c d", parts=parts)
            groups.append(StateGroup(STATE, layers={"layers.s": (state,)}))
        self.cache = KVCache(groups)

    def stamp(
        self, block_ids: Sequence[int], *, num_tokens: int, salt: int = 0
    ) -> dict[str, list[int]]:
        """Fill a request's tokens, and garbage behind them; the ids as `offer` takes them."""
        for layer in range(len(self.tensors)):
            for token in range(len(block_ids) * self.block_size):
                block, slot = divmod(token, self.block_size)
                stale = token >= num_tokens
                self.tensors[layer][block_ids[block], :, :, slot] = (
                    1e12 + token if stale else self._stamps(layer, token, salt)
                )
        return {self.group: list(block_ids)}

    def stamp_state(self, slot: int, *, salt: int = 0) -> dict[str, list[int]]:
        """Fill a slot with a request's state; the ids as `offer` takes them."""
        self.states[slot] = self._state_stamps(salt)
        return {STATE: [slot]}

    def check(
        self,
        block_ids: Sequence[int],
        *,
        num_tokens: int,
        first_token: int = 0,
        salt: int = 0,
    ) -> None:
        """Stamps in `[first_token, num_tokens)`, zeros behind, poison everywhere else.

        The listed blocks begin at ``first_token``.
        """
        for layer, tensor in enumerate(self.tensors):
            expected = torch.full_like(tensor, POISON)
            for place, block in enumerate(block_ids):
                for slot in range(self.block_size):
                    token = first_token + place * self.block_size + slot
                    expected[block, :, :, slot] = (
                        self._stamps(layer, token, salt) if token < num_tokens else 0
                    )
            assert torch.equal(tensor, expected), f"layer {layer}"

    def holds(
        self, block_ids: Sequence[int], *, num_tokens: int, salt: int = 0
    ) -> bool:
        """Whether the blocks hold a request's tokens and zeros; others may hold anything."""
        for layer, tensor in enumerate(self.tensors):
            for token in range(len(block_ids) * self.block_size):
                place, slot = divmod(token, self.block_size)
                found = tensor[block_ids[place], :, :, slot]
                wanted = self._stamps(layer, token, salt) if token < num_tokens else 0
                if not bool((found == wanted).all()):
                    return False
        return True

    def check_state(self, slot: int, *, salt: int = 0) -> None:
        """The state in its slot, poison in all others."""
        expected = torch.full_like(self.states, POISON)
        expected[slot] = self._state_stamps(salt)
        assert torch.equal(self.states, expected)

    def is_untouched(self) -> bool:
        """Whether every element is still poison."""
        return all(
            bool((tensor == POISON).all()) for tensor in (*self.tensors, self.states)
        )

    def fill(self, block_ids: Sequence[int], value: float) -> None:
        """Reuse blocks: write over all of them."""
        for tensor in self.tensors:
            tensor[list(block_ids)] = value

    def is_filled(self, block_ids: Sequence[int], value: float) -> bool:
        """Whether nothing has been written since `fill`."""
        return all(bool((t[list(block_ids)] == value).all()) for t in self.tensors)

    def extents(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Address and size of every stretch of the blocks."""
        return [
            (tensor[block].data_ptr(), tensor[block].nbytes)
            for tensor in self.tensors
            for block in block_ids
        ]

    def _stamps(self, layer: int, token: int, salt: int) -> torch.Tensor:
        _, pair, _, _, dim = self.tensors[layer].shape
        element = torch.arange(pair * 16 * dim, dtype=torch.float64)
        place = (salt * 64 + layer) * 100_000 + token + 1
        stamps = (place * 4096 + element).reshape(pair, 16, dim)
        return stamps[:, self.heads.start : self.heads.stop]

    def _state_stamps(self, salt: int) -> torch.Tensor:
        dim = self.states.shape[2]
        element = torch.arange(16 * dim, dtype=torch.float64) + (salt + 1) * 4096
        return element.reshape(16, dim)[self.heads.start : self.heads.stop]


class Process:
    """An engine in a task of its own, which can be killed.

    Attributes:
        engine: The engine.
        scope: Around all of it, as a cancellation from outside would be.
        ended: Set when the engine's context has been left.
    """

    def __init__(
        self, world: World, engine: TransferEngine, scope: trio.CancelScope
    ) -> None:
        self.engine = engine
        self.scope = scope
        self.ended = trio.Event()
        self._world = world
        self._leave = trio.Event()

    def kill(self) -> None:
        """End it as SIGKILL does: not a byte leaves it any more."""
        self.scope.cancel()
        self.engine._peers._nursery.cancel_scope.cancel()
        self._world.network.kill(agent(self.engine))
        self._world.streams.kill(*address(self.engine))

    def freeze(self) -> None:
        """Stop it as SIGSTOP does, as far as others can tell."""
        self._world.network.freeze(agent(self.engine))
        self._world.streams.freeze(*address(self.engine))

    def thaw(self) -> None:
        """Let it go on."""
        self._world.streams.thaw(*address(self.engine))
        self._world.network.thaw(agent(self.engine))

    async def leave(self) -> None:
        """Leave the engine's context in good order."""
        self._leave.set()
        await self.ended.wait()

    async def run(self) -> None:
        """Keep the engine open until told otherwise."""
        await self._leave.wait()


class Impostor:
    """A listener that follows a script; its tickets name a producer ``p``.

    Attributes:
        key: Who it says it is.
        card: What it shows: the layout of its pool, and an agent of its own.
        dialled: How often somebody connected.
    """

    def __init__(self, world: World, pool: Pool) -> None:
        fabric = world.network.fabric(f"impostor-{next(world.numbers)}")
        fabric.register(pool.cache.layout.regions)
        self.fabric = fabric
        self.key = EngineKey("p", "impostor", Rank())
        self.card = Card(IDENTITY, pool.cache.layout, fabric.metadata())
        self.dialled = 0
        self._world = world
        self._address = ("", 0)

    def ticket(self, request_id: str, block_ids: Sequence[int], tokens: int) -> Ticket:
        """A ticket that leads here."""
        offer = RankOffer(
            self.key.rank,
            self.key.generation,
            "offer",
            *self._address,
            lease_s=30.0,
            expires_at=2**40,
        )
        spans = {GROUP: TicketSpan(tuple(block_ids))}
        return Ticket("p", request_id, tokens, (offer,), spans)

    async def answer(self, framed: FramedStream) -> None:
        """Behave well up to the end of the handshake."""
        await answer(framed, Credentials(self.key, self.card, b"", frozenset()))

    async def serve(
        self,
        script: Callable[[trio.abc.Stream], Awaitable[None]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Follow the script for whoever connects; then close the stream."""
        listener = await self._world.streams.listen("127.0.0.1", 0)
        self._address = (listener.host, listener.port)

        async def follow(stream: trio.abc.Stream) -> None:
            self.dialled += 1
            try:
                # Whoever is refused hangs up in the middle of the script.
                with suppress(trio.BrokenResourceError, PeerLost):
                    await script(stream)
            finally:
                await trio.aclose_forcefully(stream)

        task_status.started()
        await trio.serve_listeners(follow, [listener])


class World:
    """Engines that can reach each other, and everything they log."""

    def __init__(self, **network: Any) -> None:
        self.network = MemoryNetwork(**network)
        self.streams = MemoryStreams()
        self.events: list[dict[str, Any]] = []
        self.numbers = itertools.count()

    @asynccontextmanager
    async def engine(
        self, engine_id: str, pool: Pool, **config: Any
    ) -> AsyncIterator[TransferEngine]:
        """Open an engine; its fabric is called ``<engine_id>-<number>``."""
        streams = config.pop("streams", self.streams)
        settings = {**LOOKS, "engine_id": engine_id, "identity": IDENTITY, **config}
        async with open_engine(
            EngineConfig(**settings),
            pool.cache,
            fabric=self.network.fabric(f"{engine_id}-{next(self.numbers)}"),
            streams=streams,
            wall_clock=self.wall_clock,
            logger=self.logger(),
        ) as engine:
            yield engine

    @asynccontextmanager
    async def pair(
        self, producer: Pool, consumer: Pool, **config: Any
    ) -> AsyncIterator[tuple[TransferEngine, TransferEngine]]:
        """A producer ``p`` and a consumer ``c``, both back to base at the end."""
        async with (
            self.engine("p", producer, **config) as prefill,
            self.engine("c", consumer, **config) as decode,
        ):
            yield prefill, decode
            await trio.testing.wait_all_tasks_blocked()
            at_base(prefill)
            at_base(decode)

    @asynccontextmanager
    async def instance(
        self, engine_id: str, pools: Sequence[Pool], **config: Any
    ) -> AsyncIterator[list[TransferEngine]]:
        """Open one engine for each pool: the tensor-parallel ranks of an instance."""
        async with AsyncExitStack() as stack:
            ranks = [Rank(tp=i, tp_size=len(pools)) for i in range(len(pools))]
            yield [
                await stack.enter_async_context(
                    self.engine(engine_id, pool, rank=rank, **config)
                )
                for pool, rank in zip(pools, ranks, strict=True)
            ]

    @asynccontextmanager
    async def joined(
        self, engine_id: str, pools: Sequence[Pool], **config: Any
    ) -> AsyncIterator[list[TransferEngine]]:
        """As `instance`, and they have joined the first of them."""
        first, *others = Rank(tp_size=len(pools)).instance()
        async with AsyncExitStack() as stack:
            lead = await stack.enter_async_context(
                self.engine(engine_id, pools[0], rank=first, **config)
            )
            settings = {"join": address(lead), **config}
            engines = [lead]
            for pool, rank in zip(pools[1:], others, strict=True):
                member = self.engine(engine_id, pool, rank=rank, **settings)
                engines.append(await stack.enter_async_context(member))
            for engine in engines:
                await engine.instance_ready(10.0)
            yield engines

    async def start(
        self, nursery: trio.Nursery, engine_id: str, pool: Pool, **config: Any
    ) -> Process:
        """Open an engine in a task of its own."""
        process: Process = await nursery.start(self._host, engine_id, pool, config)
        return process

    async def _host(
        self,
        engine_id: str,
        pool: Pool,
        config: dict[str, Any],
        *,
        task_status: trio.TaskStatus[Process],
    ) -> None:
        process: Process | None = None
        try:
            with trio.CancelScope() as scope:
                async with self.engine(engine_id, pool, **config) as engine:
                    process = Process(self, engine, scope)
                    task_status.started(process)
                    await process.run()
        finally:
            if process is not None:
                process.ended.set()

    def wall_clock(self) -> float:
        """Unix seconds, which pass with the virtual ones."""
        return 1.8e9 + trio.current_time()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """All log entries of one name."""
        return [entry for entry in self.events if entry["event"] == event]

    def may_touch(self, pool: Pool, block_ids: Sequence[int]) -> bool:
        """Whether bytes under way could still land in a block, frozen or not."""
        return any(
            self.network.may_touch(*extent) for extent in pool.extents(block_ids)
        )

    def logger(self) -> Any:
        """A logger that keeps everything in `events`."""

        def keep(_logger: object, level: str, entry: dict[str, Any]) -> Any:
            self.events.append({"level": level, **entry})
            raise structlog.DropEvent

        return structlog.wrap_logger(
            structlog.PrintLogger(io.StringIO()),
            processors=[keep],
            wrapper_class=structlog.make_filtering_bound_logger(0),
        )


async def answer(framed: FramedStream, ours: Credentials) -> tuple[EngineKey, Card]:
    """The listener's side of a link's handshake, by hand: who dialled, and its card."""

    def welcome(
        key: EngineKey,
        _purpose: Purpose,
        body: bytes,
    ) -> Welcome[tuple[EngineKey, Card]] | Refusal:
        card = ours.read_card(body)
        if isinstance(card, Refusal):
            return card
        return Welcome(encode_card(ours.card), (key, card))

    return await receive_call(framed, ours, welcome)


def offer_all(
    engines: Sequence[TransferEngine],
    pools: Sequence[Pool],
    request_id: str,
    block_ids: Sequence[int],
    *,
    num_tokens: int,
    salt: int = 0,
) -> tuple[list[Offer], Ticket]:
    """The offers of all ranks of an instance, and the one ticket made of them."""
    offers = [
        engine.offer(
            request_id,
            pool.stamp(block_ids, num_tokens=num_tokens, salt=salt),
            num_tokens=num_tokens,
        )
        for engine, pool in zip(engines, pools, strict=True)
    ]
    return offers, Ticket.merge(offer.ticket for offer in offers)


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks, and does something right after one of them.

    A step ends at a checkpoint, so this reaches every place where something else
    can happen in the middle of a request.
    """

    def __init__(self, at: int = 0, action: Callable[[], object] | None = None) -> None:
        self.taken = 0
        self._at = at
        self._action = action

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        """Count, and act when it is time."""
        self.taken += 1
        if self.taken == self._at and self._action is not None:
            self._action()

    def __enter__(self) -> Self:
        trio.lowlevel.add_instrument(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        trio.lowlevel.remove_instrument(self)


def agent(engine: TransferEngine) -> str:
    """The name of an engine's fabric."""
    return engine._fabric.name


def address(engine: TransferEngine) -> tuple[str, int]:
    """Where an engine listens."""
    assert engine.address is not None
    return engine.address


def at_base(engine: TransferEngine, *, kept: int = 0) -> None:
    """Nothing is under way, held or left over (invariant 8).

    Args:
        kept: Most transfers that the transport would not release.
    """
    live = engine.statistics()
    for name in (
        "pulls",
        "offers",
        "pushes",
        "deliveries",
        "landings",
        "quarantine",
        "unsettled_transfers",
        "staging_berths_taken",
        "agreements",
        "ballots",
        "asks",
    ):
        assert live[name] == 0, live
    assert live["fabric_transfers"] <= kept, live
    assert not engine._landings._tokens
    assert not engine._pushes._registered
    assert not engine._pushes._waiting
    for sources in engine._peers._undiscarded:
        assert sources.users == 0, "prepared rows have a user that is gone"
        assert all(peer.users == 0 for peer in sources.peers), "a subscriber is left"


def is_bare(engine: TransferEngine) -> None:
    """At base, and nothing is known or prepared of any peer."""
    at_base(engine)
    live = engine.statistics()
    for name in ("peers", "targets", "fabric_peers", "fabric_prepared"):
        assert live[name] == 0, live
    assert not engine._peers._undiscarded
    assert not engine._peers._sources
    assert not engine._peers._dials
