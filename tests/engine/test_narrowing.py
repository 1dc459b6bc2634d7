"""Whole instances on both sides: each rank talks only to those that it needs.

Eight producer ranks and four consumer ranks, with every head held twice and with
every head held once, and other pairs of sizes.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    FerryError,
    OfferOutcome,
    OfferWithdrawn,
    PeerLost,
    PeerUnreachable,
    Rank,
    Span,
    TransferFailed,
    UntrustedTicket,
    WrongPeer,
)
from kvferry.engine.fabric import CallFault, TransferFault
from kvferry.engine.readers import reader_table
from kvferry.protocol import BadTicket, Contact, Ticket
from kvferry.protocol.link import Confirmed
from tests.kit import GROUP, STATE, Pool, World, address, agent, at_base

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.engine import Offer, TransferEngine

TOKENS = 7
OURS = [5, 6]
SHAPES = [(8, 4, 4), (8, 4, 8), (4, 8, 4), (3, 1, 3), (1, 3, 3), (4, 2, 2), (2, 4, 4)]
"""Producer ranks, consumer ranks, heads."""


def sharded(size: int, **pool) -> list[Pool]:
    """One pool for each tensor-parallel rank."""
    return [Pool(tp=(i, size), **pool) for i in range(size)]


def offered(
    engines: Sequence[TransferEngine], pools: Sequence[Pool], **kwargs
) -> list[Offer]:
    """The offer of every rank."""
    return [
        engine.offer(
            "r",
            _stamped(pool),
            num_tokens=TOKENS,
            **kwargs,
        )
        for engine, pool in zip(engines, pools, strict=True)
    ]


def _stamped(pool: Pool) -> dict[str, list[int]]:
    """The blocks of the request, and its state if there is one."""
    blocks = pool.stamp([1, 2], num_tokens=TOKENS)
    return blocks | (pool.stamp_state(2) if len(pool.states) else {})


def needs(
    prefill: Sequence[TransferEngine], decode: Sequence[TransferEngine]
) -> list[set[int]]:
    """By consumer rank, the producer ranks that the planner reads from."""
    layouts = [
        {engine.key.rank: engine._cache.layout for engine in engines}
        for engines in (decode, prefill)
    ]
    table = reader_table(*layouts)
    return [{rank.tp for rank in read} for _, read in table]


def connected(engine: TransferEngine) -> set[int]:
    """The producer ranks that an engine has a link to."""
    return {key.rank.tp for key in engine._peers._peers}


async def pull_all(decode: Sequence[TransferEngine], ticket: Ticket) -> None:
    """Every rank of the consumer at once."""
    async with trio.open_nursery() as nursery:
        for engine in decode:
            nursery.start_soon(engine.pull, ticket, {GROUP: OURS, STATE: [0]})


async def settled(*engines: TransferEngine) -> None:
    """Every engine is back to base."""
    await trio.testing.wait_all_tasks_blocked()
    for engine in engines:
        at_base(engine)


@pytest.mark.parametrize(("theirs", "ours", "heads"), SHAPES)
async def test_each_rank_greets_those_that_it_reads_from(
    autojump_clock, theirs, ours, heads
) -> None:
    """One ticket for all; released by exactly the readers; spare ranks at once; exact."""
    world = World()
    producers = sharded(theirs, heads=heads, slots=3)
    consumers = sharded(ours, heads=heads, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers) as decode,
    ):
        offers = offered(prefill, producers)
        ticket = Ticket.from_dict(offers[-1].ticket.to_dict())
        needed = needs(prefill, decode)
        read = set().union(*needed)
        for number, engine in enumerate(decode):
            await engine.pull(ticket, {GROUP: OURS, STATE: [0]})
            await trio.testing.wait_all_tasks_blocked()
            assert connected(engine) == needed[number]
            assert engine._peers.dials.handshakes == len(needed[number])
            still = set().union(*needed[number + 1 :])
            for tp, offer in enumerate(offers):
                # The first reader has told those whom nobody reads from.
                is_open = tp in still
                assert (offer.outcome is None) == is_open, f"{tp} after {number}"
        assert all(offer.outcome is OfferOutcome.RELEASED for offer in offers)
        for tp, engine in enumerate(prefill):
            assert (len(engine._listener) > 0) == (tp in read)
        await settled(*prefill, *decode)
    for pool in consumers:
        pool.check(OURS, num_tokens=TOKENS)
        pool.check_state(0)


async def test_e4_many_pulls_at_once_ask_and_greet_once(autojump_clock) -> None:
    """Eight requests to an instance that nobody knows: one question, one link a rank."""
    world, producers = World(), sharded(4, heads=4)
    consumers = sharded(2, heads=4)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers) as decode,
        trio.open_nursery() as nursery,
    ):
        for number in range(8):
            tickets = [
                engine.offer(
                    str(number),
                    pool.stamp([number], num_tokens=4),
                    num_tokens=4,
                ).ticket
                for engine, pool in zip(prefill, producers, strict=True)
            ]
            for engine in decode:
                nursery.start_soon(engine.pull, tickets[number % 4], {GROUP: [number]})
        await trio.testing.wait_all_tasks_blocked()
        for engine in decode:
            assert engine._asks._dials.handshakes == 1
            assert engine._peers.dials.handshakes == 2
    for pool in consumers:
        assert pool.holds([7], num_tokens=4)


class Spawned(trio.abc.Instrument):
    """Counts tasks."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        """One more."""
        self.names.append(task.name)


@pytest.mark.parametrize("landing", ["direct", "bulk"])
async def test_a_warm_pull_costs_no_task_and_three_messages_a_rank(
    autojump_clock, landing
) -> None:
    """Whom it needs is looked up, and room is there: the read begins in the call that
    asks for it."""
    world, producers = World(), sharded(4, heads=4)
    consumers = sharded(2, heads=4)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers, landing=landing) as decode,
    ):

        async def pull(name: str) -> None:
            offers = [
                engine.offer(name, pool.stamp([1], num_tokens=4), num_tokens=4)
                for engine, pool in zip(prefill, producers, strict=True)
            ]
            # Merged, so that no id is to be learnt.
            ticket = Ticket.merge(offer.ticket for offer in offers)
            for engine in decode:
                await engine.pull(ticket, {GROUP: [2]})

        await pull("cold")
        asked = decode[0]._asks._dials.handshakes
        spawned, said = Spawned(), []
        for engine in (*prefill, *decode):
            links = [*engine._listener._links]
            links += [peer.link for peer in engine._peers._peers.values()]
            for link in links:
                link.queue = partial(_noted, said, link.queue)
        trio.lowlevel.add_instrument(spawned)
        await pull("warm")
        trio.lowlevel.remove_instrument(spawned)
        assert spawned.names == []
        assert decode[0]._asks._dials.handshakes == asked
        kinds = Counter(type(message).__name__ for message in said)
        assert kinds == {"Renew": 4, "ReadFinished": 4, "Confirmed": 4}


def _noted(said: list, queue, message) -> None:
    said.append(message)
    queue(message)


@pytest.mark.parametrize(("theirs", "ours", "heads"), SHAPES)
async def test_n3_a_declined_ticket_frees_every_rank_at_once(
    autojump_clock, theirs, ours, heads
) -> None:
    """A word to each rank that would have been read, and one for all spare ones."""
    world = World()
    producers = sharded(theirs, heads=heads, slots=3)
    consumers = sharded(ours, heads=heads, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers) as decode,
    ):
        offers = offered(prefill, producers)
        needed = needs(prefill, decode)
        for number, engine in enumerate(decode):
            await engine.decline(offers[0].ticket)
            assert connected(engine) == needed[number]
        with trio.fail_after(0.1):
            for offer in offers:
                assert await offer.wait() is OfferOutcome.RELEASED
        await settled(*prefill, *decode)


async def test_n3_a_failed_pull_frees_every_rank_at_once(autojump_clock) -> None:
    """One of the ranks has withdrawn; its siblings, spare ones included, are free."""
    world, producers, consumers = World(), sharded(8, heads=4, slots=3), None
    consumers = sharded(4, heads=4, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers) as decode,
    ):
        offers = offered(prefill, producers)
        offers[0].withdraw()
        failed: list[FerryError] = []

        async def pull(engine: TransferEngine) -> None:
            try:
                await engine.pull(offers[0].ticket, {GROUP: OURS, STATE: [0]})
            except OfferWithdrawn as error:
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for engine in decode:
                nursery.start_soon(pull, engine)
        assert len(failed) == 1
        with trio.fail_after(0.1):
            for offer in offers[1:]:
                assert await offer.wait() is OfferOutcome.RELEASED


async def test_n5_spare_ranks_that_offer_late_are_free_when_they_do(
    autojump_clock,
) -> None:
    """The word that nobody reads from them waits for the offer."""
    world = World()
    producers = sharded(8, heads=4, slots=3)
    consumers = sharded(4, heads=4, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers) as decode,
    ):
        read = set().union(*needs(prefill, decode))
        spare = [tp for tp in range(8) if tp not in read]
        early = [prefill[tp] for tp in sorted(read)]
        offers = offered(early, [producers[tp] for tp in sorted(read)])
        await pull_all(decode, offers[0].ticket)
        await trio.testing.wait_all_tasks_blocked()
        for tp in spare:
            assert prefill[tp].statistics()["parked_messages"] == 1
            (late,) = offered([prefill[tp]], [producers[tp]])
            assert late.outcome is OfferOutcome.RELEASED
        await settled(*prefill, *decode)


async def test_each_share_has_its_own_spare_ranks_freed(autojump_clock) -> None:
    """Two consumers of different sizes need different ranks of one hold."""
    world, producers = World(), sharded(8, heads=4, slots=3)
    small, large = sharded(1, heads=4, slots=3), sharded(4, heads=4, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", small) as first,
        world.joined("d", large) as second,
    ):
        offers = offered(prefill, producers, consumers=2)
        await pull_all(first, offers[0].tickets[0])
        await trio.testing.wait_all_tasks_blocked()
        assert all(o.outcomes == (OfferOutcome.RELEASED, None) for o in offers)
        await pull_all(second, offers[3].tickets[1])
        with trio.fail_after(0.1):
            for offer in offers:
                assert await offer.wait() is OfferOutcome.RELEASED
    for pool in (*small, *large):
        pool.check(OURS, num_tokens=TOKENS)


async def test_a_consumer_that_does_not_know_itself_greets_all(autojump_clock) -> None:
    """Its ranks have not joined: each tells each, as without a manifest."""
    world = World()
    producers = sharded(4, heads=2, slots=3)
    consumers = sharded(2, heads=2, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.instance("c", consumers) as decode,
    ):
        offers = offered(prefill, producers)
        await pull_all(decode, offers[0].ticket)
        for engine in decode:
            assert connected(engine) == {0, 1, 2, 3}
        with trio.fail_after(0.1):
            for offer in offers:
                assert await offer.wait() is OfferOutcome.RELEASED
    for pool in consumers:
        pool.check(OURS, num_tokens=TOKENS)


async def test_a_rank_that_is_not_needed_may_be_out_of_reach(autojump_clock) -> None:
    """Nobody dials it, also not for the manifest, as long as another one answers."""
    world, producers = World(), sharded(4, heads=4, slots=3)
    consumer = Pool(heads=4, tp=(1, 2), slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", [Pool(heads=4, tp=(0, 2), slots=3), consumer]) as decode,
    ):
        offers = offered(prefill, producers)
        broken = msgspec.structs.replace(offers[0].ticket.ranks[0], port=9)
        ranks = (broken, *offers[0].ticket.ranks[1:])
        ticket = msgspec.structs.replace(offers[0].ticket, ranks=ranks)
        await decode[1].pull(ticket, {GROUP: OURS, STATE: [0]})
        assert connected(decode[1]) == {2, 3}
    consumer.check(OURS, num_tokens=TOKENS)


async def test_a_rank_that_hangs_does_not_keep_the_manifest(autojump_clock) -> None:
    """It accepts and never answers: another one is asked, long before it is given up."""
    world, producers = World(), sharded(4, heads=4, slots=3)
    consumers = sharded(2, heads=4, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers, connect_timeout_s=10.0) as decode,
    ):
        offers = offered(prefill, producers)
        world.streams.freeze(*address(prefill[1]))  # whom rank 1 asks first
        began_at = trio.current_time()
        await decode[1].pull(offers[0].ticket, {GROUP: OURS, STATE: [0]})
        assert trio.current_time() - began_at < 1.0
        world.streams.thaw(*address(prefill[1]))
        await decode[0].pull(offers[0].ticket, {GROUP: OURS, STATE: [0]})
        await settled(*prefill, *decode)
    for pool in consumers:
        pool.check(OURS, num_tokens=TOKENS)


async def test_nobody_answers_for_an_instance(autojump_clock) -> None:
    """All of its ranks are out of reach: the pull fails with what the first one did."""
    world, producers, consumer = World(), sharded(2, slots=3), Pool(slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offers = offered(prefill, producers)
        away = [
            msgspec.structs.replace(rank, port=number + 8)
            for number, rank in enumerate(offers[0].ticket.ranks)
        ]
        ticket = msgspec.structs.replace(offers[0].ticket, ranks=tuple(away))
        with pytest.raises(PeerUnreachable) as caught:
            await decode.pull(ticket, {GROUP: OURS, STATE: [0]})
        assert caught.value.phase == "connecting"
        for offer in offers:
            offer.withdraw()
        await settled(decode)
    assert consumer.is_untouched()


@pytest.mark.parametrize(("theirs", "ours", "heads"), SHAPES)
async def test_p4_a_full_hit_frees_every_rank(
    autojump_clock, theirs, ours, heads
) -> None:
    """Nothing is read: those who would have been, and the spare ones, are told."""
    world = World()
    producers = sharded(theirs, heads=heads, slots=3)
    consumers = sharded(ours, heads=heads, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers) as decode,
    ):
        offers = offered(prefill, producers)
        for engine in decode:
            blocks = {GROUP: [], STATE: Span([], 0)}
            await engine.pull(offers[0].ticket, blocks, computed_tokens=8)
        with trio.fail_after(1.0):
            for offer in offers:
                assert await offer.wait() is OfferOutcome.RELEASED
        await settled(*prefill, *decode)


async def test_one_rank_signs_for_all(autojump_clock) -> None:
    """With a secret: the ticket, the contact, the question and the links are proved."""
    world, secret = World(), {"secret": b"between us"}
    producers = sharded(4, heads=2, slots=3)
    consumers = sharded(2, heads=2, slots=3)
    async with (
        world.joined("p", producers, **secret) as prefill,
        world.joined("c", consumers, **secret) as decode,
    ):
        offers = offered(prefill, producers)
        ticket = Ticket.from_dict(offers[2].ticket.to_dict())
        altered = msgspec.structs.replace(ticket.ranks[0], host="10.0.0.1")
        strange = msgspec.structs.replace(ticket, ranks=(altered, *ticket.ranks[1:]))
        with pytest.raises(UntrustedTicket):
            await decode[0].pull(strange, {GROUP: OURS, STATE: [0]})
        await pull_all(decode, ticket)
        with trio.fail_after(0.1):
            for offer in offers:
                assert await offer.wait() is OfferOutcome.RELEASED
    for pool in consumers:
        pool.check(OURS, num_tokens=TOKENS)


async def test_o1_a_ticket_of_an_earlier_start_of_the_instance(autojump_clock) -> None:
    """One rank was restarted: the manifest is another one, and nothing is read."""
    world, producers, consumer = World(), sharded(2, slots=3), Pool(slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offers = offered(prefill, producers)
        stale = msgspec.structs.replace(offers[0].ticket, instance="f" * 64)
        with pytest.raises(WrongPeer, match="restarted"):
            await decode.pull(stale, {GROUP: OURS, STATE: [0]})
        fewer = msgspec.structs.replace(
            offers[0].ticket, ranks=offers[0].ticket.ranks[:1]
        )
        with pytest.raises(BadTicket, match="whole instance"):
            await decode.pull(fewer, {GROUP: OURS, STATE: [0]})
    assert consumer.is_untouched()


async def test_ranks_in_another_order_are_found(autojump_clock) -> None:
    """A router may sort what it likes."""
    world, producers, consumer = World(), sharded(3, heads=3, slots=3), None
    consumer = Pool(heads=3, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offers = offered(prefill, producers)
        ranks = tuple(reversed(offers[0].ticket.ranks))
        ticket = msgspec.structs.replace(offers[0].ticket, ranks=ranks)
        await decode.pull(ticket, {GROUP: OURS, STATE: [0]})
    consumer.check(OURS, num_tokens=TOKENS)


async def test_routes_are_forgotten_with_their_peers(autojump_clock) -> None:
    """Nothing is remembered of an instance that is not connected (case e5)."""
    world, producers, consumer = World(), sharded(2, slots=3), Pool(slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.engine("c", consumer) as decode,
    ):
        offers = offered(prefill, producers)
        await decode.pull(offers[0].ticket, {GROUP: OURS, STATE: [0]})
        assert len(decode._routes) == 1
        decode.forget("p")
        assert len(decode._routes) == 0
        await trio.testing.wait_all_tasks_blocked()


# Outcomes across instances.


async def test_o6_one_rank_is_told_thrice_and_its_sibling_never(autojump_clock) -> None:
    """Three words to one rank are not one to each: the request is done on neither."""
    world, producers, consumers = World(), sharded(2), sharded(2)
    late_s = {"pull_deadline_s": 8.0, "drain_grace_s": 20.0}
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers, **late_s) as decode,
    ):
        offers = offered(prefill, producers)
        delay = TransferFault(fabric=agent(decode[1]), nth=1, delay_s=12.0)
        world.network.faults.add(delay)

        async def doubles() -> None:
            (peer,) = decode[0]._peers._peers.values()
            for _ in range(3):
                peer.deliver(Confirmed(peer.key, "r", 0, 1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_later, 4.0, doubles)
            outcomes = await agreed(decode, offers[0].ticket, {GROUP: OURS})
        assert {type(outcome) for outcome in outcomes} == {DeadlineExceeded}
        assert all("tp1of2" in outcome.detail for outcome in outcomes)
        await settled(*decode)


async def _later(delay_s: float, call) -> None:
    await trio.sleep(delay_s)
    await call()


@pytest.mark.parametrize("part", range(4))
async def test_o7_all_parts_but_one_are_not_done(autojump_clock, part) -> None:
    """Four producer ranks, two consumer ranks: whichever part fails, the request does."""
    world, producers = World(), sharded(4, heads=4)
    consumers = sharded(2, heads=4)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers) as decode,
    ):
        tickets = [
            engine.offer("r", pool.stamp([1, 2], num_tokens=TOKENS), num_tokens=TOKENS)
            for engine, pool in zip(prefill, producers, strict=True)
        ]
        fabric = agent(decode[part // 2])
        error = TransferFailed("injected")
        world.network.faults.add(
            CallFault(fabric=fabric, method="post", nth=part % 2 + 1, error=error)
        )
        outcomes = await agreed(decode, tickets[0].ticket, {GROUP: OURS})
        assert {type(outcome) for outcome in outcomes} == {TransferFailed}
        again = [
            engine.offer("s", pool.stamp([1, 2], num_tokens=TOKENS), num_tokens=TOKENS)
            for engine, pool in zip(prefill, producers, strict=True)
        ]
        outcomes = await agreed(decode, again[0].ticket, {GROUP: [7, 8]})
        assert not any(isinstance(outcome, FerryError) for outcome in outcomes)


@pytest.mark.parametrize("dead", [0, 5])
async def test_a_killed_rank_fails_the_request_on_all_ranks(
    autojump_clock, dead
) -> None:
    """Eight to four: one producer rank dies, and every consumer rank names the same."""
    world = World()
    producers, consumers = sharded(8, heads=8), sharded(4, heads=8)
    async with (
        trio.open_nursery() as nursery,
        world.joined("c", consumers, wave_bytes=100) as decode,
    ):
        ranks = []
        for pool, rank in zip(producers, Rank(tp_size=8).instance(), strict=True):
            join = {"join": ranks[0].engine.address} if ranks else {}
            ranks.append(await world.start(nursery, "p", pool, rank=rank, **join))
        prefill = [rank.engine for rank in ranks]
        for engine in prefill:
            await engine.instance_ready(10.0)
        offers = [
            engine.offer("r", pool.stamp([1, 2], num_tokens=TOKENS), num_tokens=TOKENS)
            for engine, pool in zip(prefill, producers, strict=True)
        ]
        world.network.faults.add(TransferFault(fabric="c-*", nth=None, delay_s=1.0))
        world.network.faults.add(
            CallFault(fabric="c-*", method="post", nth=12, action=ranks[dead].kill)
        )
        ticket = offers[3].ticket
        outcomes = await agreed(decode, ticket, {GROUP: OURS})
        assert {type(outcome) for outcome in outcomes} == {PeerLost}
        assert len({(o.detail, o.peer) for o in outcomes}) == 1
        living = [offers[tp] for tp in range(8) if tp != dead]
        with trio.fail_after(1.0):
            for offer in living:
                await offer.wait()
        await settled(*decode)
        for rank in ranks:
            if rank is not ranks[dead]:
                await rank.leave()


async def agreed(
    decode: Sequence[TransferEngine], ticket: Ticket, blocks: dict | None = None
) -> list[object]:
    """What every rank of the consumer is told of one request."""
    outcomes: list[object] = [None] * len(decode)
    wanted = blocks or {GROUP: OURS, STATE: [0]}

    async def one(number: int, engine: TransferEngine) -> None:
        try:
            pull = partial(engine.pull, ticket, wanted)
            outcomes[number] = await engine.agree(f"{ticket.request_id} 1", pull)
        except FerryError as error:
            outcomes[number] = error

    async with trio.open_nursery() as nursery:
        for number, engine in enumerate(decode):
            nursery.start_soon(one, number, engine)
    return outcomes


# Pushes.


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize(("theirs", "ours", "heads"), SHAPES)
async def test_pushes_go_to_those_who_need_them(
    autojump_clock, theirs, ours, heads, *, is_early
) -> None:
    """Each rank writes to its readers alone; one that nobody needs is done at once."""
    world = World()
    producers = sharded(theirs, heads=heads, slots=3)
    consumers = sharded(ours, heads=heads, slots=3)
    async with (
        world.joined("p", producers) as prefill,
        world.joined("c", consumers) as decode,
    ):
        contact = Contact.from_dict(prefill[0].contact.to_dict())
        needed = needs(prefill, decode)
        reports = {}

        async def push(tp: int) -> None:
            blocks = _stamped(producers[tp])
            reports[tp] = await prefill[tp].push("r", blocks, num_tokens=TOKENS)

        async def expect(engine: TransferEngine) -> None:
            await engine.expect(contact, {GROUP: OURS, STATE: [0]}, request_id="r")

        with trio.fail_after(5.0):
            async with trio.open_nursery() as nursery:
                calls = [partial(push, tp) for tp in range(theirs)]
                others = [partial(expect, engine) for engine in decode]
                for call in (calls + others) if is_early else (others + calls):
                    nursery.start_soon(call)
                    await trio.testing.wait_all_tasks_blocked()
        for tp in range(theirs):
            written_to = [n for n, read in enumerate(needed) if tp in read]
            assert len(reports[tp].peers) == len(written_to)
        for number, engine in enumerate(decode):
            assert connected(engine) == needed[number]
        await settled(*prefill, *decode)
    for pool in consumers:
        pool.check(OURS, num_tokens=TOKENS)
        pool.check_state(0)
