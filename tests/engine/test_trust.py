"""Case h2: which tickets and contacts are believed, before any socket is opened."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
import trio

from kvferry.engine import (
    EngineConfig,
    HandshakeRefused,
    PeerUnreachable,
    Rank,
    TicketExpired,
    UntrustedTicket,
)
from kvferry.engine.fabric import MemoryStreams
from kvferry.engine.trust import Trust
from kvferry.protocol.signing import Signer
from kvferry.protocol.ticket import Contact, Ticket
from tests.kit import GROUP, IDENTITY, Pool, World, offer_all

SECRET = b"the shared secret"
NOW = 1.8e9

replace = msgspec.structs.replace


class Counting(MemoryStreams):
    """A network that writes down what is dialled."""

    def __init__(self) -> None:
        super().__init__()
        self.dialled: list[tuple[str, int]] = []

    async def dial(self, host, port):
        self.dialled.append((host, port))
        return await super().dial(host, port)


def counted() -> tuple[World, Counting]:
    """A world, and its network."""
    world, streams = World(), Counting()
    world.streams = streams
    return world, streams


def altered(source: Any, **changes: Any) -> Any:
    """The same with its first entry altered."""
    first = replace(source.ranks[0], **changes)
    return replace(source, ranks=(first, *source.ranks[1:]))


def uses(decode) -> dict[str, Any]:
    """Every call that takes a ticket; a contact is taken from it where one is due."""
    blocks = {GROUP: [2]}

    def contact(ticket):
        return Signer(b"").sign(ticket.contact)

    return {
        "pull": lambda ticket: decode.pull(ticket, blocks, deadline_s=1),
        "expect": lambda ticket: decode.expect(ticket, blocks, deadline_s=1),
        "contact": lambda ticket: decode.expect(
            contact(ticket), blocks, request_id="r", deadline_s=1
        ),
        "decline": decode.decline,
    }


@pytest.mark.parametrize("use", ["pull", "expect", "contact", "decline"])
@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "none"])
async def test_h2_an_address_that_we_do_not_trust_is_not_dialled(
    autojump_clock, use, secret
) -> None:
    """A ticket of somebody else's address: refused, named, and no socket is opened."""
    world, streams = counted()
    producer, consumer = Pool(), Pool()
    async with (
        world.engine("p", producer, secret=secret) as prefill,
        world.engine("c", consumer, secret=secret) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        ticket = altered(offer.ticket, host="10.66.0.1", port=4444)
        with pytest.raises(UntrustedTicket, match=r"10\.66\.0\.1:4444") as caught:
            await uses(decode)[use](ticket)
        assert caught.value.request_id == "r"
        assert caught.value.peer.endswith("@10.66.0.1:4444")
        assert not caught.value.untrusted
        assert streams.dialled == []
        assert decode.statistics()["dials"] == 0
        offer.withdraw()
    assert consumer.is_untouched()


FORGERIES: dict[str, Any] = {
    "host": partial(altered, host="127.0.0.2"),
    "port": partial(altered, port=4444),
    "generation": partial(altered, generation="another"),
    "offer": partial(altered, offer_id="another"),
    "lease": partial(altered, lease_s=86_400.0),
    "expiry": partial(altered, expires_at=2**50),
    "ready": partial(altered, ready=False),
    "signature": partial(altered, signature=""),
    "cut": lambda t: altered(t, signature=t.ranks[0].signature[:-2]),
    "request": lambda t: replace(t, request_id="s"),
    "engine": lambda t: replace(t, engine_id="q"),
    "tokens": lambda t: replace(t, num_tokens=8),
    "blocks": lambda t: replace(
        t, spans={GROUP: replace(t.spans[GROUP], block_ids=(9,))}
    ),
    "nobody": lambda t: Signer(b"").sign(t),
    "zeros": lambda t: Signer(SECRET + b"\x00").sign(t),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_h2_a_ticket_that_was_altered_on_its_way(autojump_clock, forgery) -> None:
    """By a router, in any fact: it opens no socket, and the true one still works."""
    world, streams = counted()
    producer, consumer = Pool(), Pool()
    async with (
        world.engine("p", producer, secret=SECRET) as prefill,
        world.engine("c", consumer, secret=SECRET) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        forged = FORGERIES[forgery](offer.ticket)
        with pytest.raises(UntrustedTicket):
            await decode.pull(forged, {GROUP: [2]})
        assert streams.dialled == []
        plain = offer.ticket.to_dict()
        await decode.pull(Ticket.from_dict(plain), {GROUP: [2]})
        assert len(streams.dialled) == 1
    consumer.check([2], num_tokens=4)


async def test_h2_one_bad_entry_among_good_ones(autojump_clock) -> None:
    """None of the ranks is dialled, and the error names the bad one."""
    world, streams = counted()
    pools = [Pool(tp=(rank, 2)) for rank in range(2)]
    async with (
        world.instance("p", pools, secret=SECRET) as prefill,
        world.engine("c", Pool(), secret=SECRET) as decode,
    ):
        offers, ticket = offer_all(prefill, pools, "r", [1], num_tokens=4)
        one, two = ticket.ranks
        swapped = (replace(one, port=two.port), replace(two, port=one.port))
        with pytest.raises(UntrustedTicket, match=f":{two.port}"):
            await decode.pull(replace(ticket, ranks=swapped), {GROUP: [2]})
        bad = replace(ticket, ranks=(one, replace(two, host="10.0.0.9")))
        with pytest.raises(UntrustedTicket, match=r"10\.0\.0\.9") as caught:
            await decode.pull(bad, {GROUP: [2]})
        assert "tp1of2" in str(caught.value)
        assert streams.dialled == []
        await decode.pull(ticket, {GROUP: [2]})
        assert all([await offer.wait() for offer in offers])


async def test_h2_an_old_ticket_is_refused(autojump_clock) -> None:
    """Played back after its time: typed, with what would help; nothing is dialled."""
    world, streams = counted()
    producer = Pool()
    times = {"ticket_s": 100.0, "clock_tolerance_s": 10.0, "lease_s": 1000.0}
    async with (
        world.engine("p", producer, secret=SECRET, **times) as prefill,
        world.engine("c", Pool(), secret=SECRET, **times) as decode,
    ):
        offers = [
            prefill.offer(name, producer.stamp([i], num_tokens=4), num_tokens=4)
            for i, name in enumerate("rst")
        ]
        await trio.sleep(109)
        await decode.pull(offers[0].ticket, {GROUP: [2]})
        await trio.sleep(3)
        before = list(streams.dialled)
        for use in ("pull", "expect"):
            with pytest.raises(TicketExpired, match="ticket_s") as caught:
                await uses(decode)[use](offers[1].ticket)
        assert caught.value.request_id == "s"
        assert caught.value.peer == "p"
        assert streams.dialled == before
        # Giving back is right at any time.
        await decode.decline(offers[1].ticket)
        assert (await offers[1].wait()).value == "released"
        offers[2].withdraw()


async def test_the_clock_may_be_off_by_the_tolerance(autojump_clock) -> None:
    """A consumer whose clock is ahead of the producer's."""
    world, producer = World(), Pool()
    config = {"secret": SECRET, "ticket_s": 50.0, "clock_tolerance_s": 20.0}
    async with world.engine("p", producer, **config) as prefill:
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        truth = world.wall_clock
        world.wall_clock = lambda: truth() + 71.5
        async with world.engine("c", Pool(), **config) as decode:
            with pytest.raises(TicketExpired):
                await decode.pull(offer.ticket, {GROUP: [2]})
        world.wall_clock = lambda: truth() + 69.5
        async with world.engine("d", Pool(), **config) as decode:
            await decode.pull(offer.ticket, {GROUP: [2]})


async def test_h2_contacts_are_signed_and_merged(autojump_clock) -> None:
    """A signed contact is dialled; one with an altered host is not."""
    world, streams = counted()
    pools = [Pool(tp=(rank, 2)) for rank in range(2)]
    consumer = Pool()
    async with (
        world.instance("p", pools, secret=SECRET) as prefill,
        world.engine("c", consumer, secret=SECRET) as decode,
    ):
        plain = Contact.merge(engine.contact for engine in prefill).to_dict()
        contact = Contact.from_dict(plain)
        expect = partial(decode.expect, blocks={GROUP: [2]}, request_id="r")
        with pytest.raises(UntrustedTicket, match="contact") as caught:
            await expect(altered(contact, host="10.0.0.9"))
        assert caught.value.request_id == "r"
        with pytest.raises(UntrustedTicket, match="nobody has signed"):
            await expect(altered(contact, signature=""))
        assert streams.dialled == []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect, contact)
            for engine, pool in zip(prefill, pools, strict=True):
                blocks = pool.stamp([1], num_tokens=4)
                nursery.start_soon(partial(engine.push, "r", blocks, num_tokens=4))
    consumer.check([2], num_tokens=4)


def test_h2_a_merged_ticket_is_as_old_as_its_oldest_entry() -> None:
    """One that is too old is enough."""
    ours, ticket = trust(secret=SECRET, clock_tolerance_s=0), at("10.0.0.1")
    young = replace(ticket.ranks[0], rank=Rank(1, 2), expires_at=int(NOW) + 60)
    ours.check_fresh(replace(ticket, ranks=(ticket.ranks[0], young)))
    old = replace(ticket.ranks[0], expires_at=int(NOW) - 1)
    for ranks in ((old, young), (young, old)):
        with pytest.raises(TicketExpired):
            ours.check_fresh(replace(ticket, ranks=ranks))


# What the configuration lists.


def trust(**config: Any) -> Trust:
    """What an engine with this configuration trusts."""
    settings = {"engine_id": "c", "identity": IDENTITY, **config}
    return Trust(EngineConfig(**settings), wall_clock=lambda: NOW)


def at(host: str, port: int = 7000, *, secret: bytes = b"") -> Ticket:
    """A ticket of one rank at this address, signed if there is a secret."""
    plain = {
        "engine_id": "p",
        "request_id": "r",
        "num_tokens": 4,
        "spans": {},
        "ranks": [
            {
                "rank": {},
                "generation": "g",
                "offer_id": "o",
                "host": host,
                "port": port,
                "lease_s": 30,
                "expires_at": int(NOW),
            }
        ],
    }
    ticket = Ticket.from_dict(plain)
    return Signer(secret).sign(ticket) if secret else ticket


BELIEVED = [
    ({}, at("127.0.0.1")),
    ({}, at("localhost")),
    ({"insecure": True}, at("10.0.0.1")),
    ({"insecure": True}, at("anything.example.org")),
    ({"trusted": ["10.0.0.0/8"]}, at("10.0.0.1")),
    ({"trusted": [("10.0.0.1", 7000)]}, at("10.0.0.1")),
    ({"secret": SECRET}, at("10.0.0.1", secret=SECRET)),
    ({"secret": SECRET, "trusted": []}, at("10.0.0.1", secret=SECRET)),
    ({"secret": SECRET, "trusted": ["10.0.0.1"]}, at("10.0.0.1")),
    ({"secret": SECRET, "trusted": ["10.0.0.1"]}, at("10.0.0.1", secret=b"theirs")),
]
DOUBTED = [
    ({}, at("10.0.0.1"), "set secret="),
    ({}, at("127.1"), "loopback"),
    ({}, at("10.0.0.1", secret=SECRET), "set secret="),
    ({"trusted": []}, at("127.0.0.1"), "not in trusted"),
    ({"trusted": ["10.0.0.0/8"]}, at("127.0.0.1"), "not in trusted"),
    ({"trusted": ["10.0.0.1"], "insecure": True}, at("10.0.0.2"), "not in trusted"),
    ({"trusted": [("10.0.0.1", 1)]}, at("10.0.0.1"), "not in trusted"),
    ({"secret": SECRET}, at("127.0.0.1"), "nobody has signed"),
    ({"secret": SECRET, "insecure": True}, at("127.0.0.1"), "nobody has signed"),
    ({"secret": SECRET}, at("10.0.0.1", secret=b"theirs"), "another secret"),
    ({"secret": SECRET, "trusted": ["10.0.0.2"]}, at("10.0.0.1"), "nobody has signed"),
]


@pytest.mark.parametrize(("config", "ticket"), BELIEVED)
def test_h2_what_is_believed(config, ticket) -> None:
    """By its signature, or by the list; without either only what is on this host."""
    trust(**config).check(ticket)


@pytest.mark.parametrize(("config", "ticket", "why"), DOUBTED)
def test_h2_what_is_not_believed(config, ticket, why) -> None:
    """And why, in words that say what would help."""
    with pytest.raises(UntrustedTicket, match=why):
        trust(**config).check(ticket)


def test_h2_without_a_secret_what_peers_say_is_held_against_the_list() -> None:
    """A peer that proved nothing could otherwise send us anywhere."""
    trust(secret=SECRET).check_address("10.0.0.1", 1)
    trust(insecure=True).check_address("10.0.0.1", 1)
    trust().check_address("127.0.0.1", 1)
    with pytest.raises(UntrustedTicket, match=r"10\.0\.0\.1:1"):
        trust().check_address("10.0.0.1", 1)


async def test_h2_the_dial_itself_asks_again(autojump_clock) -> None:
    """Whoever comes by an address some other way cannot dial it, either."""
    world, streams = counted()
    async with world.engine("c", Pool()) as decode:
        ticket = at("10.0.0.1")
        with pytest.raises(UntrustedTicket):
            party = decode._routes.everybody(ticket.contact)
            await decode._peers.connected(party)
        assert streams.dialled == []


async def test_h2_a_listed_address_is_dialled_without_a_signature(
    autojump_clock,
) -> None:
    """The secret is still proved in the handshake."""
    world, streams = counted()
    producer = Pool()
    mixed = {"trusted": ["127.0.0.0/8"], "redial_s": 0.01}
    async with (
        world.engine("p", producer, secret=SECRET) as prefill,
        world.engine("c", Pool(), secret=SECRET, **mixed) as decode,
        world.engine("d", Pool(), secret=b"another", **mixed) as stranger,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        bare = altered(offer.ticket, signature="")
        with pytest.raises(HandshakeRefused, match="secret"):
            await stranger.pull(bare, {GROUP: [2]})
        # Of another request: a pull that fails declines what it was for.
        other = prefill.offer("other", producer.stamp([3], num_tokens=4), num_tokens=4)
        away = altered(other.ticket, signature="", port=9)
        with pytest.raises(PeerUnreachable):
            await decode.pull(away, {GROUP: [2]})
        await decode.pull(bare, {GROUP: [2]})
        assert len(streams.dialled) == 3


async def test_a_secret_is_in_no_repr(autojump_clock) -> None:
    """Configurations and credentials end up in logs."""
    world = World()
    async with world.engine("p", Pool(), secret=SECRET) as prefill:
        for shown in (prefill.config, prefill._listener._ours):
            assert SECRET.decode() not in repr(shown)
    assert SECRET.decode() not in str(world.events)
