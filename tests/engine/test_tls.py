"""Links over TLS: certificates on both sides, every way to fail, and how they end.

On virtual time over the memory network, and on real sockets where that matters.
"""

from __future__ import annotations

import datetime as dt
import ssl
from functools import partial
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing
import trustme

from kvferry.engine import (
    ConfigError,
    EngineConfig,
    FerryError,
    HandshakeRefused,
    OfferOutcome,
    PeerLost,
    PeerUnreachable,
)
from kvferry.engine.fabric import MemoryStreams
from kvferry.engine.link import FramedStream
from kvferry.engine.streams import Streams, TcpStreams
from kvferry.engine.tls import CHUNK_BYTES, TlsFailed, TlsStreams
from tests.kit import GROUP, IDENTITY, Pool, World, address, at_base

HERE = "127.0.0.1"
OLD = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)


class Side(NamedTuple):
    """What one side has: the two contexts of its configuration."""

    listen: ssl.SSLContext
    dial: ssl.SSLContext

    @property
    def config(self) -> dict[str, Any]:
        """The settings of an engine."""
        return {"tls_listen": self.listen, "tls_dial": self.dial}


def side(
    trusts: trustme.CA, shows: trustme.LeafCert | None, *, asks: bool = True
) -> Side:
    """Contexts that trust one authority and show one certificate, or none as a client."""
    listen = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    dial = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if asks:
        listen.verify_mode = ssl.CERT_REQUIRED
    for context in (listen, dial):
        trusts.configure_trust(context)
        if shows is not None:
            shows.configure_cert(context)
    return Side(listen, dial)


CA = trustme.CA()
STRANGERS = trustme.CA()
GOOD = side(CA, CA.issue_cert(HERE))
NAMELESS = side(CA, None)
STRANGER = side(CA, STRANGERS.issue_cert(HERE))
DISTRUSTS = side(STRANGERS, CA.issue_cert(HERE))
ELSEWHERE = side(CA, CA.issue_cert("elsewhere.example.org"))
EXPIRED = side(CA, CA.issue_cert(HERE, not_before=OLD, not_after=OLD))
ASKS_NOBODY = side(CA, CA.issue_cert(HERE), asks=False)


def offered(engine, pool: Pool, request_id: str = "r", block: int = 1):
    """An offer of four tokens."""
    blocks = pool.stamp([block], num_tokens=4)
    return engine.offer(request_id, blocks, num_tokens=4)


async def refusal(world: World) -> dict[str, Any]:
    """What the listener logs; it may still wait for its alert to be read."""
    with trio.fail_after(10):
        while not world.logged("handshake_failed"):  # noqa: ASYNC110 - a log, on real time
            await trio.sleep(0.01)
    (failed,) = world.logged("handshake_failed")
    return failed


# A good run.


@pytest.mark.parametrize("secret", [b"", b"s"], ids=["alone", "secret"])
async def test_pulls_both_ways_at_once_over_real_sockets(secret) -> None:
    """Each engine is producer and consumer, both links are TLS, and nothing is left."""
    world = World()
    world.streams = TcpStreams()
    pools = {name: Pool(64) for name in "pc"}
    config = {**GOOD.config, "secret": secret}
    async with world.pair(pools["p"], pools["c"], **config) as (one, two):
        offers = [
            offered(engine, pool, f"{name}{i}", i)
            for engine, (name, pool) in zip((one, two), pools.items(), strict=True)
            for i in range(20)
        ]
        async with trio.open_nursery() as nursery:
            for i, offer in enumerate(offers):
                reader = two if i < 20 else one
                block = {GROUP: [20 + i % 20]}
                nursery.start_soon(reader.pull, offer.ticket, block)
        assert {offer.outcome for offer in offers} == {OfferOutcome.RELEASED}
        assert one.statistics()["links"] == two.statistics()["links"] == 1
    for pool in pools.values():
        for i in range(20):
            assert pool.holds([20 + i], num_tokens=4)
    assert not world.logged("handshake_failed")


async def test_a_push_over_real_sockets() -> None:
    """Registration, notices and landing."""
    world = World()
    world.streams = TcpStreams()
    producer, consumer = Pool(), Pool()
    async with world.pair(producer, consumer, **GOOD.config) as (prefill, decode):
        blocks = producer.stamp([1, 2], num_tokens=7)
        async with trio.open_nursery() as nursery:
            expect = partial(decode.expect, request_id="r")
            nursery.start_soon(expect, prefill.contact, {GROUP: [3, 4]})
            await prefill.push("r", blocks, num_tokens=7)
    consumer.check([3, 4], num_tokens=7)


# Everything that can be wrong with a certificate.

REFUSALS = {
    # dialler, listener, the dialler's reason and words, the listener's words
    "no client certificate": (
        NAMELESS,
        GOOD,
        "certificate",
        "certificate required",
        "showed no certificate",
    ),
    "a stranger's client certificate": (
        STRANGER,
        GOOD,
        "certificate",
        "unknown ca",
        "not accepted here",
    ),
    "an expired client certificate": (
        EXPIRED,
        GOOD,
        "certificate",
        "certificate expired",
        "certificate has expired",
    ),
    "a listener that the dialler does not trust": (
        DISTRUSTS,
        ASKS_NOBODY,
        "certificate",
        "not accepted here",
        "unknown ca",
    ),
    "a listener of another name": (
        GOOD,
        ELSEWHERE,
        "certificate",
        "mismatch",
        "certificate",
    ),
    "an expired listener": (
        GOOD,
        EXPIRED,
        "certificate",
        "has expired",
        "certificate expired",
    ),
}


@pytest.mark.parametrize("network", [MemoryStreams, TcpStreams])
@pytest.mark.parametrize("case", REFUSALS)
async def test_a_certificate_that_is_not_accepted(case, network) -> None:
    """A typed refusal on both sides, that says why; nothing is dialled in circles."""
    dials, listens, reason, told, heard = REFUSALS[case]
    world, consumer, producer = World(), Pool(), Pool()
    world.streams = network()
    async with (
        world.engine("p", producer, **listens.config) as prefill,
        world.engine("c", consumer, **dials.config) as decode,
    ):
        offer = offered(prefill, producer)
        with pytest.raises(HandshakeRefused, match=told) as caught:
            await decode.pull(offer.ticket, {GROUP: [2]})
        assert caught.value.reason == reason
        assert caught.value.phase == "connecting"
        assert HERE in caught.value.peer
        failed = await refusal(world)
        assert heard in failed["error"]
        assert prefill.statistics()["links"] == 0
        assert decode.statistics()["peers"] == 0
        offer.withdraw()
    assert consumer.is_untouched()
    assert not world.logged("internal_error")


@pytest.mark.parametrize("network", [MemoryStreams, TcpStreams])
@pytest.mark.parametrize("plain", ["dialler", "listener"])
async def test_tls_on_one_side_alone(plain, network) -> None:
    """Fails typed, at once, and says what the other one speaks."""
    world, producer = World(), Pool()
    world.streams = network()
    configs = [{}, GOOD.config] if plain == "listener" else [GOOD.config, {}]
    async with (
        world.engine("p", producer, **configs[0]) as prefill,
        world.engine("c", Pool(), **configs[1]) as decode,
    ):
        offer = offered(prefill, producer)
        with pytest.raises(FerryError, match="TLS") as caught:
            await decode.pull(offer.ticket, {GROUP: [2]})
        assert caught.value.phase == "connecting"
        failed = await refusal(world)
        assert "TLS" in failed["error"]
        offer.withdraw()


async def test_a_certificate_is_no_secret(autojump_clock) -> None:
    """With both configured both have to be shown."""
    world, producer = World(), Pool()
    async with (
        world.engine("p", producer, secret=b"s", **GOOD.config) as prefill,
        world.engine("c", Pool(), secret=b"t", trusted=[HERE], **GOOD.config) as decode,
    ):
        offer = offered(prefill, producer)
        with pytest.raises(HandshakeRefused) as caught:
            await decode.pull(offer.ticket, {GROUP: [2]})
        assert caught.value.reason == "secret"


# Time.


async def test_h1_silent_diallers_are_dropped_within_tls_too(autojump_clock) -> None:
    """Whether they send nothing, or the beginning of a handshake, drop by drop."""
    world = World()
    config = {"handshake_timeout_s": 3.0, **GOOD.config}

    async def drip(stream) -> None:
        with trio.move_on_after(10):
            try:
                for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03":
                    await stream.send_all(bytes([byte]))
                    await trio.sleep(1)
            except trio.BrokenResourceError:
                pass

    async with world.engine("p", Pool(), **config) as prefill, trio.open_nursery() as n:
        streams = [await world.streams.dial(*address(prefill)) for _ in range(6)]
        for stream in streams[3:]:
            n.start_soon(drip, stream)
        await trio.sleep(2.9)
        assert len(prefill._listener._diallers) == 6
        await trio.sleep(0.2)
        assert len(prefill._listener._diallers) == 0
        assert prefill.statistics()["handshakes_refused"] == 6
        n.cancel_scope.cancel()


async def test_e3_a_listener_that_never_answers_tls(autojump_clock) -> None:
    """The dial ends by its timeout."""
    world, producer = World(), Pool()
    config = {"connect_timeout_s": 3.0, **GOOD.config}
    async with world.pair(producer, Pool(), **config) as (prefill, decode):
        offer = offered(prefill, producer)
        world.streams.freeze(*address(prefill))
        started_at = trio.current_time()
        with pytest.raises(PeerUnreachable, match=r"within 3\.0 s"):
            await decode.pull(offer.ticket, {GROUP: [2]})
        assert trio.current_time() - started_at == pytest.approx(3.0)
        world.streams.thaw(*address(prefill))
        offer.withdraw()


async def test_h1_an_alert_that_nobody_reads_holds_no_place_for_long(
    autojump_clock,
) -> None:
    """Garbage is answered with an alert, and a second later the place is free."""
    world = World()
    async with world.engine("p", Pool(), **GOOD.config) as prefill:
        stream = await world.streams.dial(*address(prefill))
        await stream.send_all(b"GET / HTTP/1.1\r\n\r\n")
        await trio.sleep(1.1)
        assert len(prefill._listener._diallers) == 0
        heard = b"".join([chunk async for chunk in stream])
        assert heard[:2] == b"\x15\x03"


# Streams.


async def two_ends(streams: Streams) -> tuple[trio.abc.Stream, trio.abc.Stream]:
    """A dialled stream, and the accepted other end of it."""
    ends: list[trio.abc.Stream] = []
    async with await streams.listen(HERE, 0) as bound, trio.open_nursery() as nursery:

        async def accept() -> None:
            ends.append(await bound.accept())

        nursery.start_soon(accept)
        dialled = await streams.dial(bound.host, bound.port)
    return dialled, ends[0]


def tls(inner: Streams) -> TlsStreams:
    """TLS in both directions."""
    return TlsStreams(inner, listen=GOOD.listen, dial=GOOD.dial)


async def test_the_contract_of_a_stream(autojump_clock) -> None:
    """As trio's own kit checks it: closing, cancelling, and two tasks at once."""

    async def make() -> tuple[trio.abc.Stream, trio.abc.Stream]:
        return await two_ends(tls(MemoryStreams()))

    await trio.testing.check_two_way_stream(make, None)


@pytest.mark.parametrize("network", [MemoryStreams, TcpStreams])
async def test_large_messages_cross_each_other(network) -> None:
    """Both sides send megabytes before either has read: neither waits for the other."""
    sizes = [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3_000_000]
    ends = [FramedStream(end) for end in await two_ends(tls(network()))]
    got: dict[int, list[bytes]] = {0: [], 1: []}

    async def send(side: int) -> None:
        for size in sizes:
            await ends[side].send(bytes([side + 1]) * size, limit_bytes=2**24)

    async def receive(side: int) -> None:
        for _ in sizes:
            got[side].append(await ends[side].receive(limit_bytes=2**24))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for side in (0, 1):
                nursery.start_soon(send, side)
                nursery.start_soon(receive, side)
    for side in (0, 1):
        assert got[side] == [bytes([2 - side]) * size for size in sizes]
        await ends[side].aclose()


@pytest.mark.parametrize("network", [MemoryStreams, TcpStreams])
async def test_a_stream_that_is_closed_is_an_end_for_the_other(network) -> None:
    """Without a goodbye of TLS: what was sent before is read, then the end."""
    one, two = await two_ends(tls(network()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.send_all, b"last words")
        assert await two.receive_some() == b"last words"
    await two.send_all(b"and mine")
    await trio.aclose_forcefully(two)
    assert await one.receive_some() == b"and mine"
    assert await one.receive_some() == b""
    with pytest.raises(trio.ClosedResourceError):
        await two.receive_some()
    await one.aclose()


class Meddling(MemoryStreams):
    """A network that flips a bit of what is dialled, when it is told to."""

    def __init__(self) -> None:
        super().__init__(seed=None)
        self.meddles = False

    async def dial(self, host, port):
        stream = await super().dial(host, port)
        inner = stream.receive_stream

        class Flips(trio.abc.ReceiveStream):
            async def receive_some(_self, max_bytes=None):  # noqa: N805
                data = bytearray(await inner.receive_some(max_bytes))
                if data and self.meddles:
                    data[-1] ^= 1
                return bytes(data)

            async def aclose(_self) -> None:  # noqa: N805
                await inner.aclose()

        return trio.StapledStream(stream.send_stream, Flips())


async def test_h1_a_bit_that_is_flipped_on_the_way_ends_the_link(
    autojump_clock,
) -> None:
    """And not one byte of the altered record is believed."""
    streams = Meddling()
    one, two = await two_ends(tls(streams))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.send_all, b"hello")
        assert await two.receive_some() == b"hello"
    await two.send_all(b"good")
    assert await one.receive_some() == b"good"
    streams.meddles = True
    await two.send_all(b"bad")
    with pytest.raises(TlsFailed, match="TLS"):
        await one.receive_some()
    framed = FramedStream(one)
    with pytest.raises(PeerLost):
        await framed.receive()
    await framed.aclose()
    await two.aclose()


async def test_links_over_tls_end_as_links_do(autojump_clock) -> None:
    """Cut in a read: lost on both sides at once; left in good order: a goodbye."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.engine("c", consumer, redial_s=0.01, **GOOD.config) as decode:
        async with world.engine("p", producer, **GOOD.config) as prefill:
            await decode.pull(offered(prefill, producer).ticket, {GROUP: [2]})
            world.streams.cut(*address(prefill))
            await trio.testing.wait_all_tasks_blocked()
            assert decode.statistics()["peers"] == prefill.statistics()["links"] == 0
            await decode.pull(offered(prefill, producer, "s").ticket, {GROUP: [3]})
        await trio.testing.wait_all_tasks_blocked()
        assert decode.statistics()["peers"] == 0
        at_base(decode)
    assert any("goodbye" in e["cause"] for e in world.logged("peer_forgotten"))


@pytest.mark.parametrize("host", ["", ".example.org"])
async def test_what_is_no_name_for_tls_is_no_host(autojump_clock, host) -> None:
    """A ticket may bring any: the dial fails, and its stream is closed."""
    streams = MemoryStreams()
    await streams.listen(host, 7)
    with pytest.raises(OSError, match="not a host"):
        await tls(streams).dial(host, 7)


# Configurations.

BASE = {"engine_id": "e", "identity": IDENTITY}
OUTSIDE = {**BASE, "listen": ("10.0.0.1", 0)}


def test_client_certificates_can_stand_for_a_secret() -> None:
    """If the listener demands them; an optional one keeps nobody out."""
    EngineConfig(**OUTSIDE, tls_listen=GOOD.listen)
    optional = side(CA, CA.issue_cert(HERE)).listen
    optional.verify_mode = ssl.CERT_OPTIONAL
    for context in (optional, ASKS_NOBODY.listen, None):
        with pytest.raises(ConfigError, match="CERT_REQUIRED"):
            EngineConfig(**OUTSIDE, tls_listen=context)
        EngineConfig(**OUTSIDE, tls_listen=context, secret=b"s")
        EngineConfig(**OUTSIDE, tls_listen=context, insecure=True)
    with pytest.raises(ConfigError, match="CERT_REQUIRED"):
        EngineConfig(**OUTSIDE, tls_dial=GOOD.dial)


def test_a_dialler_checks_certificates() -> None:
    """One that takes any would show its card to anybody."""
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname = False
    careless.verify_mode = ssl.CERT_NONE
    with pytest.raises(ConfigError, match="tls_dial"):
        EngineConfig(**BASE, tls_dial=careless, secret=b"s")
    EngineConfig(**BASE, tls_dial=careless, insecure=True)


def test_contexts_have_their_sides() -> None:
    """Given the wrong way round they are refused at start."""
    with pytest.raises(ConfigError, match="tls_listen"):
        EngineConfig(**BASE, tls_listen=GOOD.dial)
    with pytest.raises(ConfigError, match="tls_dial"):
        EngineConfig(**BASE, tls_dial=GOOD.listen)
