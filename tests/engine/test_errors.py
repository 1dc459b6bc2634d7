"""Every way for a pull to fail says which request, peer, phase and tokens (invariant 9)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
import trio
import trio.testing

from kvferry import engine as face
from kvferry.engine import (
    DeadlineExceeded,
    FerryError,
    MisuseError,
    OfferRefused,
    Rank,
)
from kvferry.engine.fabric import Progress
from kvferry.engine.fabric.faults import TransferFault
from kvferry.protocol.lifecycle.pull import BlocksReady, PullState
from kvferry.protocol.ranges import Ranges
from tests.kit import GROUP, Pool, World, address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvferry.engine import Offer, TransferEngine
    from kvferry.protocol import Ticket

OURS = [5, 6]
WHOLE = {GROUP: Ranges.of([(0, 8)])}  # whole units
CONFIG: dict[str, Any] = {"lease_s": 3.0, "connect_timeout_s": 1.0}


class Scene:
    """A producer, a consumer, and a request of seven tokens."""

    def __init__(
        self, world: World, stack: AsyncExitStack, pool: Pool, *engines: TransferEngine
    ) -> None:
        self.world, self.stack, self.producer = world, stack, pool
        self.prefill, self.decode = engines

    def offer(self, **options: Any) -> Offer:
        """Offer it."""
        blocks = self.producer.stamp([1, 2], num_tokens=7)
        return self.prefill.offer("r", blocks, num_tokens=7, **options)

    def altered(self, offer: Offer | None = None, **facts: Any) -> Ticket:
        """A ticket that describes its rank otherwise."""
        ticket = (offer or self.offer()).ticket
        rank = msgspec.structs.replace(ticket.ranks[0], **facts)
        return msgspec.structs.replace(ticket, ranks=(rank,))

    async def error(
        self, ticket: Ticket | None = None, blocks: Any = None, **options: Any
    ) -> FerryError:
        """Pull it, and fail."""
        ticket = ticket or self.offer().ticket
        with pytest.raises(FerryError) as caught:
            await self.decode.pull(ticket, blocks or {GROUP: OURS}, **options)
        return caught.value

    async def error_after(
        self, action: Callable[[], object], ticket: Ticket | None = None
    ) -> FerryError:
        """Pull it with bytes that take two seconds; something happens after one."""
        slow = TransferFault(fabric="c-*", nth=None, delay_s=2.0)
        self.world.network.faults.add(slow)
        errors = []
        async with trio.open_nursery() as nursery:

            async def act() -> None:
                await trio.sleep(1)
                action()

            nursery.start_soon(act)
            errors.append(await self.error(ticket))
        return errors[0]


async def in_use(scene: Scene) -> FerryError:
    ticket, errors = scene.offer().ticket, []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.decode.pull, ticket, {GROUP: [7, 8]})
        await trio.testing.wait_all_tasks_blocked(0)
        errors.append(await scene.error(ticket))
    return errors[0]


async def busy(scene: Scene) -> FerryError:
    errors = []

    async def expect() -> None:
        with pytest.raises(DeadlineExceeded):
            await scene.decode.expect(
                scene.prefill.contact, {GROUP: OURS}, request_id="s", deadline_s=1
            )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect)
        await trio.testing.wait_all_tasks_blocked(0)
        errors.append(await scene.error())
    return errors[0]


async def unreachable(scene: Scene) -> FerryError:
    return await scene.error(scene.altered(port=1))


async def refused(scene: Scene) -> FerryError:
    settings = {**CONFIG, "skip_groups": frozenset({"nothing"})}
    stranger = await scene.stack.enter_async_context(
        scene.world.engine("d", Pool(heads=3), **settings)
    )
    scene.decode = stranger
    return await scene.error()


async def spent(scene: Scene) -> FerryError:
    ticket = scene.offer().ticket
    await scene.decode.pull(ticket, {GROUP: [7, 8]})
    return await scene.error(ticket)


async def withdrawn(scene: Scene) -> FerryError:
    offer = scene.offer()
    return await scene.error_after(offer.withdraw, offer.ticket)


async def differing(scene: Scene) -> FerryError:
    pools = [Pool(tp=(i, 2)) for i in range(2)]
    ranks = await scene.stack.enter_async_context(scene.world.joined("pp", pools))
    tickets = [
        engine.offer("r", {GROUP: [number, 3]}, num_tokens=7).ticket
        for number, engine in enumerate(ranks)
    ]
    return await scene.error(tickets[0])


async def expired(scene: Scene) -> FerryError:
    ticket = scene.offer().ticket
    await trio.sleep(4)
    return await scene.error(ticket)


async def lost(scene: Scene) -> FerryError:
    return await scene.error_after(
        lambda: scene.world.streams.cut(*address(scene.prefill))
    )


async def too_early(scene: Scene) -> FerryError:
    offer = scene.offer(after=trio.sleep_forever)
    return await scene.error(scene.altered(offer, ready=True))


async def failed(scene: Scene) -> FerryError:
    rule = TransferFault(fabric="c-*", progress=Progress.FAILED)
    scene.world.network.faults.add(rule)
    return await scene.error()


async def forgotten(scene: Scene) -> FerryError:
    rule = TransferFault(fabric="c-*", progress=Progress.LOST, recovers=True)
    scene.world.network.faults.add(rule)
    return await scene.error()


async def finish_failed(scene: Scene) -> FerryError:
    async def broken(_tails: object) -> None:
        raise RuntimeError("no kernel image")

    scene.decode._pulls._services.finish.run = broken  # type: ignore[method-assign]
    return await scene.error()


async def late(scene: Scene) -> FerryError:
    rule = TransferFault(fabric="c-*", nth=None, delay_s=2.0)
    scene.world.network.faults.add(rule)
    return await scene.error(deadline_s=1.0)


async def closing(scene: Scene) -> FerryError:
    slow = TransferFault(fabric="c-*", nth=None, delay_s=2.0)
    scene.world.network.faults.add(slow)
    errors = []
    async with trio.open_nursery() as nursery:

        async def close() -> None:
            await trio.sleep(1)
            await scene.decode._pulls.close()

        nursery.start_soon(close)
        errors.append(await scene.error())
    return errors[0]


async def closed(scene: Scene) -> FerryError:
    async with scene.world.engine("d", Pool()) as other:
        pass
    scene.decode = other
    return await scene.error()


async def our_bug(scene: Scene) -> FerryError:
    # An event that no table allows here.
    return await scene.error_after(
        lambda: scene.decode._pulls._active["r", 0].feed(BlocksReady())
    )


async def their_event(scene: Scene) -> FerryError:
    async def broken() -> None:
        raise ZeroDivisionError("theirs")

    return await scene.error(after=broken)


class Case(NamedTuple):
    """A way to fail, and what the error says of it."""

    error: str
    fail: Callable[[Scene], Awaitable[FerryError]]
    phase: str
    is_touched: bool = False

    def __str__(self) -> str:
        return f"{self.error}-{self.fail.__name__.strip('<>')}-{self.phase}"


CASES = [
    Case("MisuseError", lambda s: s.error(deadline_s=float("nan")), "new"),
    Case("MisuseError", lambda s: s.error(after=1), "new"),
    Case("MisuseError", their_event, "planned"),
    Case("UnknownBlock", lambda s: s.error(blocks={"other": [1]}), "new"),
    Case("UnknownBlock", lambda s: s.error(blocks={GROUP: [99, 1]}), "connecting"),
    Case("RequestInUse", in_use, "new"),
    Case("BlocksInUse", busy, "new"),
    Case(
        "ImpossiblePlan",
        lambda s: s.error(blocks={GROUP: face.Span(OURS)}, computed_tokens=2),
        "connecting",
    ),
    Case("UntrustedTicket", lambda s: s.error(s.altered(host="10.0.0.9")), "new"),
    Case("PeerUnreachable", unreachable, "connecting"),
    Case("HandshakeRefused", refused, "connecting"),
    Case("WrongPeer", lambda s: s.error(s.altered(generation="earlier")), "connecting"),
    Case("PeerLost", lost, "reading", is_touched=True),
    Case("ProtocolViolation", too_early, "confirming", is_touched=True),
    Case("UnknownOffer", lambda s: s.error(s.altered(offer_id="x")), "reading", True),
    Case("OfferSpent", spent, "reading", is_touched=True),
    Case("OfferWithdrawn", withdrawn, "reading", is_touched=True),
    Case("OfferDiffers", differing, "planned"),
    Case("TransferFailed", failed, "reading", is_touched=True),
    Case("TransferFailed", forgotten, "reading", is_touched=True),
    Case("TicketExpired", lambda s: s.error(s.altered(expires_at=0)), "new"),
    Case("LeaseExpired", expired, "reading", is_touched=True),
    Case("DeadlineExceeded", late, "reading", is_touched=True),
    Case("EngineClosed", closing, "reading", is_touched=True),
    Case("EngineClosed", closed, "new"),
    Case("FerryInternalError", our_bug, "reading", is_touched=True),
    Case("FerryInternalError", finish_failed, "finishing", is_touched=True),
]
NOT_BY_A_PULL = {
    "ConfigError": "a configuration",
    "CacheError": "a cache",
    "BadTicket": "a ticket, before there is a pull of it",
    "PushAborted": "a landing",
    "PushRevoked": "a push",
    "IncompletePush": "a push",
    "InstanceIncomplete": "an instance",
}
FAMILIES = {"FerryError", "PeerError", "TransferError", OfferRefused.__name__}
"""Only their members are raised."""


def test_every_error_of_the_tree_has_a_case() -> None:
    """So that the test below means all of them."""
    names = {
        name
        for name in face.__all__
        if isinstance(kind := getattr(face, name), type)
        and issubclass(kind, FerryError)
    }
    assert {case.error for case in CASES} == names - FAMILIES - NOT_BY_A_PULL.keys()


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_every_failure_names_its_context(autojump_clock, case) -> None:
    """Type, request, peer, phase, cause and the tokens that cannot be trusted."""
    world, pool = World(), Pool()
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(world.engine("p", pool, **CONFIG))
        decode = await stack.enter_async_context(world.engine("c", Pool(), **CONFIG))
        error = await case.fail(Scene(world, stack, pool, prefill, decode))
    assert type(error).__name__ == case.error
    assert error.detail
    assert error.request_id == "r"
    assert error.peer is not None
    assert error.peer.startswith("p")
    assert error.phase == case.phase
    assert error.phase in {state.value for state in PullState}
    assert error.untrusted == (WHOLE if case.is_touched else {})
    for fact in ("request=r", "peer=p", f"phase={case.phase}"):
        assert fact in str(error)
    if not isinstance(error, MisuseError):
        # What the caller did wrong is told to the caller alone.
        logged = [e for e in world.logged("pull_failed") if e["request"] == "r"]
        assert case.phase == "new" or len(logged) == 1


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_failure_of_one_of_two_ranks_names_that_rank(
    autojump_clock, rank
) -> None:
    """Not only the instance: whoever reads the log knows where to look."""
    world, consumer = World(), Pool()
    pools = [Pool(tp=(i, 2)) for i in range(2)]
    async with (
        world.instance("p", pools) as ranks,
        world.engine("c", consumer) as decode,
    ):
        offers = [
            engine.offer("r", pool.stamp([1, 2], num_tokens=7), num_tokens=7)
            for engine, pool in zip(ranks, pools, strict=True)
        ]
        ticket = type(offers[0].ticket).merge(offer.ticket for offer in offers)
        offers[rank].withdraw()
        with pytest.raises(FerryError) as caught:
            await decode.pull(ticket, {GROUP: OURS})
        assert caught.value.peer == str(ranks[rank].key)
        assert ranks[rank].key.rank == Rank(tp=rank, tp_size=2)
