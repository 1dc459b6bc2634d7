"""What a configuration may say, and which address may be advertised (case c3)."""

from __future__ import annotations

import math

import pytest
import trio

from kvferry.engine import ConfigError, EngineConfig, Rank
from kvferry.engine.streams import BoundListener, Streams, TcpStreams
from tests.kit import IDENTITY, Pool, World, address

BASE = {"engine_id": "e", "identity": IDENTITY}


@pytest.mark.parametrize(
    "listen",
    [
        ("0.0.0.0", 0),  # noqa: S104 - must be refused
        ("::", 0),
        ("", 0),
        ("::ffff:0.0.0.0", 0),
        ("0:0:0:0:0:0:0:0", 0),
        ("0", 0),
        ("*", 0),
    ],
)
def test_c3_a_wildcard_cannot_be_advertised(listen) -> None:
    """Refused at start, unless a host is named that consumers can reach."""
    with pytest.raises(ConfigError, match="advertise"):
        EngineConfig(**BASE, listen=listen, secret=b"s")
    EngineConfig(**BASE, listen=listen, secret=b"s", advertise="10.0.0.1")
    for advertise in ("0.0.0.0", "0", "::", "*"):  # noqa: S104
        with pytest.raises(ConfigError, match="wildcard"):
            EngineConfig(**BASE, listen=listen, secret=b"s", advertise=advertise)


@pytest.mark.parametrize(
    "advertise",
    ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST", "127.1", "localhost."],
)
def test_c3_loopback_cannot_be_advertised_to_others(advertise) -> None:
    """Consumers on other hosts would dial themselves."""
    for listen in ("0.0.0.0", "10.0.0.1", "example.org"):  # noqa: S104
        with pytest.raises(ConfigError, match="loopback"):
            EngineConfig(**BASE, listen=(listen, 0), secret=b"s", advertise=advertise)
    EngineConfig(**BASE, listen=("127.0.0.1", 0), advertise=advertise)


@pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "192.0.2.7", "fe80::1"])
def test_an_address_for_others_needs_a_secret(host) -> None:
    """Whoever connects can read and write the cache."""
    with pytest.raises(ConfigError, match="secret"):
        EngineConfig(**BASE, listen=(host, 0))
    EngineConfig(**BASE, listen=(host, 0), secret=b"s")
    EngineConfig(**BASE, listen=(host, 0), insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_none(host) -> None:
    """Nobody else can connect."""
    EngineConfig(**BASE, listen=(host, 0))


class Resolves(Streams):
    """Names lead to one address, as a hosts file would have it."""

    def __init__(self, host, inner) -> None:
        self.host = host
        self.inner = inner
        self.bound: list[BoundListener] = []

    async def dial(self, host, port):
        """Not here."""
        raise OSError(f"no dialling of {host}:{port}")

    async def listen(self, _host, port):
        """Bind where the name leads to."""
        self.bound.append(await self.inner.listen(self.host, port))
        return self.bound[-1]


@pytest.mark.parametrize(
    ("host", "named"),
    [("127.0.1.1", "myhost"), ("0.0.0.0", "all"), ("::", "anywhere")],  # noqa: S104
)
async def test_c3_a_name_that_leads_to_no_address_for_tickets(
    autojump_clock, host, named
) -> None:
    """Refused at start, as itself, and nothing listens any more."""
    world = World()
    inner = world.streams
    world.streams = Resolves(host, inner)
    with pytest.raises(ConfigError):
        async with world.engine("p", Pool(), listen=(named, 7000), secret=b"s"):
            pytest.fail("it opened")
    with pytest.raises(trio.ClosedResourceError):
        await world.streams.bound[0].accept()
    # An address that others can use is named instead.
    async with world.engine(
        "p", Pool(), listen=(named, 7000), secret=b"s", advertise="10.0.0.1"
    ) as engine:
        assert engine.address == ("10.0.0.1", 7000)


async def test_a_port_that_is_taken_is_a_config_error(autojump_clock) -> None:
    """As itself, not in a group."""
    world = World()
    async with world.engine("p", Pool()) as engine:
        with pytest.raises(ConfigError, match="cannot listen"):
            async with world.engine("q", Pool(), listen=address(engine)):
                pytest.fail("it opened")


async def test_an_engine_without_a_listener_cannot_offer(autojump_clock) -> None:
    """It can pull, though."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        world.engine("p", producer) as prefill,
        world.engine("c", consumer, listen=None) as decode,
    ):
        assert decode.address is None
        with pytest.raises(ConfigError):
            decode.offer("r", {"full": [1]}, num_tokens=4)
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        await decode.pull(offer.ticket, {"full": [2]})
    consumer.check([2], num_tokens=4)


@pytest.mark.parametrize(
    "name",
    [
        "lease_s",
        "pull_deadline_s",
        "connect_timeout_s",
        "handshake_timeout_s",
        "keepalive_s",
        "silence_s",
        "redial_s",
        "peer_idle_s",
        "drain_grace_s",
        "wave_bytes",
        "window",
        "poll_s",
        "offered_poll_s",
        "idle_poll_s",
        "max_links",
        "max_diallers",
        "max_dials",
        "max_peers",
        "max_offers",
    ],
)
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_numbers_are_positive(name, value) -> None:
    """Nothing works with none of it."""
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**BASE, **{name: value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine_id": ""},
        {"engine_id": "x" * 257},
        {"rank": Rank(tp=2, tp_size=2)},
        {"rank": Rank(pp=1, pp_size=1)},
        {"rank": Rank(tp_size=2048)},
        {"lease_s": 86_401},
        {"lease_s": math.inf},
        {"keepalive_s": 20.0},
        {"keepalive_s": 1.0, "silence_s": 1.0},
        {"listen": ("127.0.0.1", 65_536)},
        {"listen": ("127.0.0.1", -1)},
    ],
)
def test_what_contradicts_itself_is_refused(wrong) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError):
        EngineConfig(**{**BASE, **wrong})


@pytest.mark.parametrize("host", ["", "a" * 100, "\u00e9" * 80, "x\0y", "a..b"])
async def test_a_ticket_may_name_anything_as_its_host(host) -> None:
    """What is no host is an OSError like any other that does not answer."""
    if host:
        with pytest.raises(OSError, match=r".+"):
            await TcpStreams().dial(host, 1)


@pytest.mark.parametrize("join", [("", 1), ("h", 0), ("h", 2**16)])
def test_a_rank_joins_at_an_address(join) -> None:
    """Which somebody can listen at."""
    with pytest.raises(ConfigError, match="join"):
        EngineConfig(**BASE, rank=Rank(1, 2), join=join)
    EngineConfig(**BASE, rank=Rank(1, 2), join=("h", 1))


def test_one_rank_joins_nobody() -> None:
    """An instance of one is complete by itself."""
    with pytest.raises(ConfigError, match="join"):
        EngineConfig(**BASE, join=("h", 1))
