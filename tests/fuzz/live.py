"""A whole engine, and at the other end of its links whatever a fuzzer says.

In one process, on virtual time. In the end everything must be back to base, nothing of
ours may have gone wrong on the way, and a good peer must still be served.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio
import trio.testing

from kvferry.engine.handshake import Credentials, greet
from kvferry.engine.link import FramedStream
from kvferry.protocol.errors import FerryError
from kvferry.protocol.framing import MAX_LINK_BYTES, encode_frame
from kvferry.protocol.handshake import Card
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.link import (
    Aborted,
    Claim,
    Confirmed,
    Decline,
    Extend,
    Finished,
    Landed,
    OfferReady,
    ReadFinished,
    Refused,
    Register,
    Registered,
    Renew,
    Revoke,
    Revoked,
)
from tests.fuzz.reader import Reader
from tests.kit import GROUP, IDENTITY, Impostor, Pool, World, address, answer, at_base
from tests.protocol.test_hostile_input import MESSAGES
from tests.pushing import OURS, begin, begin_landing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

POOLS = tuple(Pool() for _ in range(3))
REQUEST_BYTES = 3 * 2 * 2 * 2 * 4 * 3 * 8
HURRY = {
    "handshake_timeout_s": 3.0,
    "lease_s": 5.0,
    "keepalive_s": 1.0,
    "silence_s": 4.0,
    "max_links": 8,
    "poll_s": 0.05,
    "offered_poll_s": 0.2,
    "idle_poll_s": 1.0,
}
BLOCKS = POOLS[0].stamp([3, 7, 9], num_tokens=10)
GOOD = POOLS[0].stamp([1], num_tokens=4)
GONE = (trio.BrokenResourceError, trio.ClosedResourceError, FerryError)


def said(reader: Reader, offer_id: str = "o") -> bytes:
    """A message, as its bytes: a good one, a damaged one, or noise."""
    kind = reader.below(6)
    if kind == 0:
        return reader.take(reader.below(64))
    message: Any = reader.choose(MESSAGES)
    if isinstance(message, Claim):
        sheet = CacheLayout((), POOLS[1].cache.layout.groups)
        message = Claim(reader.below(4), (sheet,) * reader.below(3))
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    if "attempt" in plain:
        plain["attempt"] = reader.below(4)
    if "offer_id" in plain:
        plain["offer_id"] = reader.choose((offer_id, "o"))
    if isinstance(message, Register):
        blocks = [reader.below(18) for _ in range(reader.below(5))]
        plain["spans"] = {GROUP: {"block_ids": blocks, "first_token": 0}}
        plain["claim"] = reader.below(4)
        plain["lease_s"] = 5.0
    if isinstance(message, Finished):
        plain["num_tokens"] = reader.choose((10, 37, 2**40 - 1))
        plain["bytes"] = reader.choose((REQUEST_BYTES, 0, 65_536))
        plain["parts"] = reader.below(8)
    if isinstance(message, Confirmed):
        plain["engine"]["engine_id"] = reader.choose(("p", "x"))
        plain["engine"]["generation"] = reader.choose(("impostor", "x"))
        plain["engine"]["rank"] = {"tp": 0, "tp_size": 1, "pp": 0, "pp_size": 1}
    if isinstance(message, Register | Renew):
        plain["readers"] = [{"tp": 0, "tp_size": 1, "pp": 0, "pp_size": 1}]
    if kind == 1 and plain:
        name = reader.choose(sorted(plain))
        plain[name] = reader.choose((0, -1, 2**63, "", "r", b"x" * 16, [], {}, None))
    payload = bytearray(msgspec.msgpack.encode(plain))
    if kind == 2:
        payload[reader.below(min(len(payload), 256))] ^= 1 << reader.below(8)
    return bytes(payload)


async def speak(stream: trio.abc.Stream, reader: Reader, offer_id: str) -> None:
    """Say things until the bytes are used up: whole frames mostly, and pauses."""
    for _ in range(24):
        if reader.is_over:
            return
        payload = said(reader, offer_id)
        frame = encode_frame(payload, limit_bytes=MAX_LINK_BYTES)
        if reader.below(8) == 7:
            frame = frame[: reader.below(12)] + reader.take(3)
        await stream.send_all(frame)
        if reader.below(4) == 3:
            await trio.sleep(reader.choose((0.01, 1.0, 4.0)))


async def _listener(data: bytes) -> None:
    reader, world = Reader(data), World()
    producer, target, consumer = POOLS
    fabric = world.network.fabric("stranger")
    fabric.register(target.cache.layout.regions)
    card = Card(IDENTITY, target.cache.layout, fabric.metadata())
    async with (
        world.engine("p", producer, **HURRY) as prefill,
        trio.open_nursery() as nursery,
    ):
        offer = prefill.offer("r", BLOCKS, num_tokens=10)
        push = None
        if reader.below(2):
            call = partial(prefill.push, "r", BLOCKS, num_tokens=10, deadline_s=6)
            push = begin(nursery, call)
        for number in range(1 + reader.below(3)):
            stream = await world.streams.dial(*address(prefill))
            ours = Credentials(
                EngineKey("c", str(number), Rank()), card, b"", frozenset()
            )
            with suppress(*GONE):
                # Skipped, everything is said to the handshake.
                if reader.below(8):
                    await greet(FramedStream(stream), ours, prefill.key)
                await speak(stream, reader, offer.ticket.ranks[0].offer_id)
            if reader.below(4):
                await trio.aclose_forcefully(stream)
        await trio.sleep(12)
        if push is not None:
            await push.over.wait()
        await offer.wait()
        await _serves(world, prefill, consumer)
        nursery.cancel_scope.cancel()
    _check(world)


async def _serves(world: World, prefill: Any, consumer: Pool) -> None:
    """A good peer is served as if nothing had been."""
    async with world.engine("good", consumer, **HURRY) as decode:
        consumer.fill([2], 0.0)
        offer = prefill.offer("good", GOOD, num_tokens=4)
        await decode.pull(offer.ticket, {GROUP: [2]})
        assert consumer.holds([2], num_tokens=4)
        at_base(decode)
    await trio.testing.wait_all_tasks_blocked()
    at_base(prefill)


async def _dialler(data: bytes) -> None:
    """A consumer that pulls and expects from somebody who says anything."""
    reader, world = Reader(data), World()
    producer, target, _ = POOLS

    async def script(stream: trio.abc.Stream) -> None:
        framed = FramedStream(stream)
        with suppress(*GONE):
            if reader.below(8):
                ours = Credentials(impostor.key, impostor.card, b"", frozenset())
                await answer(framed, ours)
            await speak(stream, reader, "offer")

    async with (
        world.engine("c", target, drain_grace_s=2.0, **HURRY) as decode,
        trio.open_nursery() as nursery,
    ):
        impostor = Impostor(world, producer)
        await nursery.start(impostor.serve, script)
        ticket = impostor.ticket("r", [3, 7, 9], 10)
        pull = begin(
            nursery, lambda: decode.pull(ticket, {GROUP: [2, 4, 8]}, deadline_s=5)
        )
        landing = begin_landing(
            nursery, decode, ticket.contact, deadline_s=5, blocks={GROUP: OURS}
        )
        await pull.over.wait()
        await landing.over.wait()
        for outcome in (pull, landing):
            assert (outcome.report is None) != (outcome.error is None)
        # No notice has come: whatever was said, the bytes of a push have not.
        assert landing.report is None
        live = decode.statistics()
        assert (live["pulls"], live["landings"], live["unsettled_transfers"]) == (
            0,
            0,
            0,
        )
        nursery.cancel_scope.cancel()
    _check(world)


def _check(world: World) -> None:
    assert not world.logged("internal_error"), world.logged("internal_error")


def _run(case: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    trio.run(case, data, clock=clock, strict_exception_groups=True)


def listener(data: bytes) -> None:
    """What strangers and peers may say to a listener."""
    _run(_listener, data)


def dialler(data: bytes) -> None:
    """What a producer may say to somebody who dials it."""
    _run(_dialler, data)


# Seeds: conversations that get somewhere, in the words of `said`.


def say(kind: type, *fields: int, pause: int | None = None) -> bytes:
    """One message: its fields as `said` reads them; a pause of one of three lengths."""
    number = next(n for n, m in enumerate(MESSAGES) if type(m) is kind)
    tail = (0,) if pause is None else (3, pause)
    return bytes([3, number, *fields, 0, *tail])


CLAIM = say(Claim, 0, 1)
REGISTER = say(Register, 0, 3, 5, 6, 1, 0, pause=0)
CONVERSATIONS = (
    (CLAIM, REGISTER, say(Extend, 0, pause=1), say(Landed, 0)),
    (CLAIM, REGISTER, say(Revoke, 0, pause=2), REGISTER, say(Revoke, 0)),
    (REGISTER, CLAIM, REGISTER, say(Register, 1, 3, 2, 3, 4, 0), say(Extend, 1)),
    (CLAIM, CLAIM, REGISTER),
    (say(Revoke, 0), CLAIM, REGISTER, say(Register, 1, 3, 2, 3, 17, 0)),
    (say(Renew, 0, 0, pause=1), say(ReadFinished, 0, 0)),
    (say(Renew, 0, 0, pause=2), say(Renew, 0, 0, pause=2), say(Decline, 0)),
    (say(Renew, 0, 1), say(ReadFinished, 0, 1), say(Decline, 1)),
    (say(Registered, 1), say(Finished, 1, 0, 0, 6), say(Revoked, 1, pause=1)),
    (say(Finished, 1, 0, 1, 6), say(Finished, 1, 2, 0, 1), say(Finished, 1, 1, 2, 0)),
    (say(Aborted, 1, pause=0), say(Revoked, 1)),
    (say(OfferReady, 0), say(Confirmed, 0, 0, 0), say(Confirmed, 0, 0, 0)),
    (say(Confirmed, 0, 1, 0),),
    (say(Refused, 0), say(OfferReady, 3), say(Revoked, 1)),
    *((say(type(message), 0, 0, 0, 0, 0),) for message in MESSAGES),
)
SEEDS = tuple(
    bytes([has_push, 0, 1]) + b"".join(words)
    for words in CONVERSATIONS
    for has_push in (0, 1)
)
DIALLER_SEEDS = tuple(bytes([1]) + b"".join(words) for words in CONVERSATIONS)
