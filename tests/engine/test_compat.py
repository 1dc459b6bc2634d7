"""Peers that differ are refused by name before any data; skipping is said (cases c1, c2)."""

from __future__ import annotations

import msgspec
import pytest
import torch
import trio
import trio.testing

from kvferry.engine import (
    AttentionGroup,
    HandshakeRefused,
    KVCache,
    OfferOutcome,
    PagedTensor,
    UnknownBlock,
    tp_shard,
)
from kvferry.engine.link import FramedStream
from kvferry.protocol.framing import MAX_CARD_BYTES
from kvferry.protocol.handshake import Hello, Purpose, Refusal, decode_hello, encode
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.version import PROTOCOL_VERSION
from tests.kit import (
    GROUP,
    IDENTITY,
    Impostor,
    Pool,
    World,
    address,
    agent,
    at_base,
)


def two_groups(names, *, blocks: int = 8) -> KVCache:
    """A cache of small groups with these names."""
    shard = tp_shard(total=1, rank=0, size=1)
    return KVCache(
        AttentionGroup(
            name,
            block_size=4,
            layers={
                f"{name}.0": PagedTensor(torch.zeros(blocks, 1, 4, 2), "b h n d", shard)
            },
        )
        for name in names
    )


class Cache:
    """What `World.engine` needs of a pool."""

    def __init__(self, *names: str) -> None:
        self.cache = two_groups(names)


def changed(**facts: str):
    """Another identity, with the same cache."""
    return lambda: (Pool(), msgspec.structs.replace(IDENTITY, **facts))


# Per fact: the consumer's side, and what must be named, seen from the consumer.
FACTS = {
    "model": (changed(model="org/other"), "model: org/other here, org/tiny there"),
    "revision": (changed(revision="2"), "revision: 2 here, 1 there"),
    "dtype": (changed(dtype="bfloat16"), "dtype: bfloat16 here, float64 there"),
    "quantization": (changed(quantization="fp8"), "quantization: fp8 here, none there"),
    "extra": (changed(extra={"rope": "4"}), "extra.rope: 4 here, absent there"),
    "heads": (
        lambda: (Pool(heads=4), IDENTITY),
        "group full layers.0.kv.kv total units: 4 here, 2 there",
    ),
    "width": (
        lambda: (Pool(dim=5), IDENTITY),
        "group full layers.0.kv.kv axis d: 5 here, 3 there",
    ),
    "element": (
        lambda: (Pool(dtype=torch.float32), IDENTITY),
        "group full layers.0.kv dtype: float32 here, float64 there",
    ),
    "window": (
        lambda: (Pool(window=8), IDENTITY),
        "group full window: 8 here, None there",
    ),
    "group": (
        lambda: (Pool(group="other"), IDENTITY),
        "group other: present here, absent there",
    ),
    "state": (
        lambda: (Pool(slots=3), IDENTITY),
        "group state: present here, absent there",
    ),
}


@pytest.mark.parametrize("fact", FACTS)
async def test_c1_one_fact_differs(autojump_clock, fact) -> None:
    """Refused before any data, by name and with both values, as either side sees it."""
    make, named = FACTS[fact]
    world, producer = World(), Pool()
    consumer, identity = make()
    groups = [group.name for group in consumer.cache.layout.groups]
    async with (
        world.engine("p", producer) as prefill,
        world.engine("c", consumer, identity=identity) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        with pytest.raises(HandshakeRefused) as caught:
            await decode.pull(offer.ticket, {name: [2] for name in groups})
        await trio.sleep(1)
        for engine in (prefill, decode):
            for method in ("connect", "prepare", "post"):
                assert world.network.faults.calls[agent(engine), method] == 0
        assert decode.statistics()["peers"] == 0
        assert prefill.statistics()["links"] == 0
        assert offer.outcome is None
        at_base(decode)
    assert named in caught.value.differences
    assert named in str(caught.value)
    subject, values = named.rsplit(": ", 1)
    here, there = (value.rsplit(" ", 1)[0] for value in values.split(", "))
    producers = [entry["error"] for entry in world.logged("handshake_failed")]
    assert producers
    assert all(f"{subject}: {there} here, {here} there" in line for line in producers)
    assert consumer.is_untouched()


async def test_c1_every_fact_at_once(autojump_clock) -> None:
    """All factors are named, not just the first."""
    world, producer, consumer = World(), Pool(), Pool(heads=4)
    identity = msgspec.structs.replace(IDENTITY, model="m", revision="9")
    async with (
        world.engine("p", producer) as prefill,
        world.engine("c", consumer, identity=identity) as decode,
    ):
        offer = prefill.offer("r", producer.stamp([1], num_tokens=4), num_tokens=4)
        with pytest.raises(HandshakeRefused) as caught:
            await decode.pull(offer.ticket, {GROUP: [2]})
    factors = {line.split(":")[0] for line in caught.value.differences}
    assert factors >= {"model", "revision", "group full layers.1.kv.kv total units"}


async def test_c1_a_dialler_of_another_protocol_version(autojump_clock) -> None:
    """The listener says which version it speaks and which it heard, and no more."""
    world, producer = World(), Pool()
    async with world.engine("p", producer) as prefill:
        stream = await world.streams.dial(*address(prefill))
        framed = FramedStream(stream)
        key = EngineKey("c", "1", Rank())
        await framed.send(
            encode(Hello(PROTOCOL_VERSION + 1, key, "p", Purpose.LINK, bytes(32)))
        )
        with pytest.raises(HandshakeRefused) as caught:
            decode_hello(await framed.receive(limit_bytes=MAX_CARD_BYTES))
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["handshakes_refused"] == 1
        assert prefill.statistics()["links"] == 0
    named = f"protocol: {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} there"
    assert named in str(caught.value)
    assert named in world.logged("handshake_failed")[0]["error"]


async def test_c1_a_listener_of_another_protocol_version(autojump_clock) -> None:
    """The dialler names both versions, and shows nothing of itself."""
    world, consumer = World(), Pool()
    impostor = Impostor(world, Pool())
    heard: list[bytes] = []

    async def other_version(stream) -> None:
        framed = FramedStream(stream)
        heard.append(await framed.receive())
        await framed.send(
            encode(
                Hello(PROTOCOL_VERSION + 7, impostor.key, "", Purpose.LINK, bytes(32))
            )
        )
        heard.append(await stream.receive_some())

    async with trio.open_nursery() as nursery:
        await nursery.start(impostor.serve, other_version)
        async with world.engine("c", consumer) as decode:
            with pytest.raises(HandshakeRefused) as caught:
                await decode.pull(impostor.ticket("r", [1], 4), {GROUP: [2]})
            await trio.sleep(1)
            at_base(decode)
        nursery.cancel_scope.cancel()
    named = f"protocol: {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 7} there"
    assert caught.value.differences == (named,)
    assert heard[1::2] == [b""] * (len(heard) // 2)
    assert consumer.is_untouched()


@pytest.mark.parametrize("side", ["p", "c"])
async def test_c2_a_group_on_one_side_only(autojump_clock, side) -> None:
    """Refused by the group's name."""
    world = World()
    names = {"p": ["full"], "c": ["full"]}
    names[side].append("draft")
    async with (
        world.engine("p", Cache(*names["p"])) as prefill,
        world.engine("c", Cache(*names["c"])) as decode,
    ):
        offer = prefill.offer("r", {n: [1] for n in names["p"]}, num_tokens=4)
        with pytest.raises(HandshakeRefused, match="group draft") as caught:
            await decode.pull(offer.ticket, {n: [2] for n in names["c"]})
    here, there = ("present", "absent") if side == "c" else ("absent", "present")
    assert caught.value.differences == (f"group draft: {here} here, {there} there",)


@pytest.mark.parametrize("side", ["p", "c"])
async def test_c2_a_skipped_group_is_named_in_the_report(autojump_clock, side) -> None:
    """Both sides opt to skip it: done, and the report says what is missing."""
    world = World()
    names = {"p": ["full"], "c": ["full"]}
    names[side].append("draft")
    skip = {"skip_groups": frozenset({"draft"})}
    async with (
        world.engine("p", Cache(*names["p"]), **skip) as prefill,
        world.engine("c", Cache(*names["c"]), **skip) as decode,
    ):
        offer = prefill.offer("r", {"full": [1]}, num_tokens=4)
        report = await decode.pull(offer.ticket, {"full": [2]})
        assert await offer.wait() is OfferOutcome.RELEASED
    assert report.skipped_groups == ("draft",)


@pytest.mark.parametrize("side", ["p", "c"])
async def test_c2_the_side_that_did_not_opt_refuses(autojump_clock, side) -> None:
    """One side's choice does not bind the other, who may miss the group."""
    world = World()
    skip = {"p": {}, "c": {}}
    skip[side] = {"skip_groups": frozenset({"draft"})}
    other = "c" if side == "p" else "p"
    names = {side: ["full"], other: ["full", "draft"]}
    async with (
        world.engine("p", Cache(*names["p"]), **skip["p"]) as prefill,
        world.engine("c", Cache(*names["c"]), **skip["c"]) as decode,
    ):
        offer = prefill.offer("r", {n: [1] for n in names["p"]}, num_tokens=4)
        with pytest.raises(HandshakeRefused, match="group draft"):
            await decode.pull(offer.ticket, {n: [2] for n in names["c"]})


async def test_c2_both_have_the_group_and_one_leaves_it_out(autojump_clock) -> None:
    """The producer's ticket lacks a group that the consumer wants: named, not ignored."""
    world = World()
    async with (
        world.engine(
            "p", Cache("full", "draft"), skip_groups=frozenset({"draft"})
        ) as prefill,
        world.engine("c", Cache("full", "draft")) as decode,
    ):
        offer = prefill.offer("r", {"full": [1]}, num_tokens=4)
        with pytest.raises(UnknownBlock, match="draft"):
            await decode.pull(offer.ticket, {"full": [2], "draft": [2]})
        assert await offer.wait() is OfferOutcome.RELEASED


async def test_c2_blocks_for_a_skipped_or_unknown_group(autojump_clock) -> None:
    """Blocks are due for exactly the groups that are transferred."""
    world = World()
    skip = {"skip_groups": frozenset({"draft"})}
    async with world.engine("p", Cache("full", "draft"), **skip) as prefill:
        with pytest.raises(UnknownBlock, match="draft"):
            prefill.offer("r", {"full": [1], "draft": [1]}, num_tokens=4)
        with pytest.raises(UnknownBlock, match="full"):
            prefill.offer("r", {}, num_tokens=4)
        with pytest.raises(UnknownBlock, match="nonsense"):
            prefill.offer("r", {"full": [1], "nonsense": [1]}, num_tokens=4)


async def test_a_refusal_is_one_small_message(autojump_clock) -> None:
    """A dialler that differs is told so, and never sees the listener's card."""
    world, producer = World(), Pool()
    async with world.engine("p", producer) as prefill:
        framed = FramedStream(await world.streams.dial(*address(prefill)))
        await framed.send(
            encode(
                Hello(
                    PROTOCOL_VERSION,
                    EngineKey("c", "1", Rank()),
                    "other",
                    Purpose.LINK,
                    bytes(32),
                )
            )
        )
        payload = await framed.receive(limit_bytes=MAX_CARD_BYTES)
        refusal = msgspec.msgpack.decode(payload, type=Refusal)
        assert refusal.reason.value == "wrong_engine"
        assert agent(prefill).encode() not in payload
        await framed.aclose()
