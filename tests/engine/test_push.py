"""Push: the producer writes into blocks that the consumer has registered."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.testing

from kvferry.engine import (
    DeadlineExceeded,
    EngineClosed,
    MisuseError,
    OfferSpent,
    PeerUnreachable,
    PushRevoked,
    RequestInUse,
    UnknownBlock,
    delivery,
)
from kvferry.engine.link import Link
from kvferry.protocol import Contact
from kvferry.protocol.link import decode_message
from kvferry.protocol.notices import AHEAD
from tests.kit import GROUP, Pool, World, agent, at_base
from tests.pushing import (
    OURS,
    THEIRS,
    Outcome,
    begin,
    begin_landing,
    begin_push,
    contact_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("first", ["push", "expect"])
async def test_a_push_lands_whoever_comes_first(autojump_clock, first) -> None:
    """One report on either side, of the same bytes; the tail is zero."""
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        async with trio.open_nursery() as nursery:
            if first == "push":
                push = begin_push(nursery, prefill, source)
                await trio.sleep(1)
                landing = begin_landing(nursery, decode, prefill)
            else:
                landing = begin_landing(nursery, decode, prefill)
                await trio.sleep(1)
                push = begin_push(nursery, prefill, source)
        target.check(OURS, num_tokens=10)
        assert push.report.bytes == landing.report.bytes == 3 * 2 * 2 * 2 * 4 * 3 * 8
        assert landing.report.zeroed_tokens == 2
        assert landing.report.peers == (str(prefill.key),)
        assert push.report.peers == (str(decode.key),)
        assert push.report.waves == landing.report.waves > 0


@pytest.mark.parametrize(("size", "is_told"), [(1, True), (1 << 20, False)])
async def test_a_large_push_is_announced(
    autojump_clock, monkeypatch, size, is_told
) -> None:
    """The consumer looks often before the first bytes are there; what is small needs no
    such word, and nothing depends on it."""
    monkeypatch.setattr(delivery, "ANNOUNCED_BYTES", size)
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        heard, intake = [], decode._landings.intake
        expect = intake.expect

        def listen(token: bytes, on_part: Callable[[int], None]) -> None:
            def note(part: int) -> None:
                on_part(part)
                heard.append(part)

            expect(token, note)

        monkeypatch.setattr(intake, "expect", listen)
        async with trio.open_nursery() as nursery:
            landing = begin_landing(nursery, decode, prefill)
            await trio.sleep(1)
            begin_push(nursery, prefill, source)
            await landing.over.wait()
        target.check(OURS, num_tokens=10)
    assert (AHEAD in heard) is is_told
    assert sorted(heard)[-landing.report.waves :] == list(range(landing.report.waves))


# Either order costs at most one message more than a pull.


class Frames:
    """Counts the messages that links queue, by type."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: Counter[str] = Counter()
        queue = Link.queue

        def count(link: Link, message: Any) -> None:
            self.sent[type(message).__name__] += 1
            queue(link, message)

        monkeypatch.setattr(Link, "queue", count)


async def messages(monkeypatch: pytest.MonkeyPatch, how: str) -> Counter[str]:
    """Of the second request between two engines."""
    frames = Frames(monkeypatch)
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        for request_id in ("first", "second"):
            frames.sent.clear()
            async with trio.open_nursery() as nursery:
                if how == "pull":
                    spans = source.stamp(THEIRS, num_tokens=10)
                    offer = prefill.offer(request_id, spans, num_tokens=10)
                    await decode.pull(offer.ticket, {GROUP: OURS})
                    continue
                if how == "push":
                    begin_push(nursery, prefill, source, request_id)
                    await trio.sleep(0.5)
                landing = begin_landing(nursery, decode, prefill, request_id)
                await trio.sleep(0.5)
                if how == "expect":
                    begin_push(nursery, prefill, source, request_id)
                await landing.over.wait()
                assert landing.error is None
    return +frames.sent


async def test_either_order_costs_at_most_one_message_more(
    autojump_clock, monkeypatch
) -> None:
    """A pull needs three: renew, read finished, confirmed."""
    with monkeypatch.context() as patch:
        pull = await messages(patch, "pull")
    assert pull.total() == 3, pull
    for how in ("push", "expect"):
        with monkeypatch.context() as patch:
            sent = await messages(patch, how)
        assert sent.total() <= pull.total() + 1, sent
    assert decode_message  # the names counted above are those of the wire


# h3: an id in use.


async def test_h3_a_request_id_in_use_is_refused_and_the_first_unaffected(
    autojump_clock,
) -> None:
    """On both sides."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        landing = begin_landing(nursery, decode, prefill)
        await trio.sleep(0.1)
        second = begin_landing(nursery, decode, prefill, blocks={GROUP: [8, 9, 10]})
        await second.over.wait()
        assert isinstance(second.error, RequestInUse)
        assert second.error.request_id == "r"
        other = begin(
            nursery,
            lambda: prefill.push("r", {GROUP: [1, 2, 4]}, num_tokens=10, after=wait),
        )

        async def wait() -> None:
            await trio.sleep(1)

        await trio.sleep(0.1)
        third = begin_push(nursery, prefill, source)
        await third.over.wait()
        assert isinstance(third.error, RequestInUse)
        other.scope.cancel()
        await other.over.wait()
        await landing.over.wait()
        assert landing.error is not None


async def test_an_id_may_be_used_again_once_its_push_is_over(autojump_clock) -> None:
    """Ten times the same name, whoever comes first."""
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        for salt in range(10):
            async with trio.open_nursery() as nursery:
                begin_push(nursery, prefill, source, salt=salt)
                await trio.sleep(0.1)
                landing = begin_landing(nursery, decode, prefill)
            assert landing.error is None
            target.check(OURS, num_tokens=10, salt=salt)


# What a caller gets wrong.


@pytest.mark.parametrize(
    ("blocks", "match"),
    [
        ({GROUP: [5, 6, 16]}, "16"),
        ({GROUP: [5, 6, 5]}, "twice"),
        ({}, "no blocks were given"),
        ({GROUP: OURS, "more": [1]}, "there is no"),
        ({GROUP: [5, "x", 1]}, "integers"),
    ],
)
async def test_blocks_that_are_not_ours_are_refused_before_anybody_hears_of_them(
    autojump_clock, blocks, match
) -> None:
    """UnknownBlock, with the request's name."""
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        with pytest.raises(UnknownBlock, match=match) as caught:
            await decode.expect(prefill.contact, blocks, request_id="r")
        assert caught.value.request_id == "r"
        assert decode._peers.dials.handshakes == 0
    assert target.is_untouched()


async def test_a_producer_s_own_mistakes(autojump_clock) -> None:
    """Blocks that it does not have, no tokens, a deadline that is no number."""
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        with pytest.raises(UnknownBlock):
            await prefill.push("r", {GROUP: [99]}, num_tokens=4)
        with pytest.raises(MisuseError):
            await prefill.push("r", {GROUP: [1]}, num_tokens=0)
        with pytest.raises(MisuseError):
            await prefill.push("r", {GROUP: [1]}, num_tokens=4, deadline_s=float("nan"))
        with pytest.raises(MisuseError, match="request_id"):
            await decode.expect(prefill.contact, {GROUP: OURS})


async def test_nobody_registers_and_nobody_pushes(autojump_clock) -> None:
    """Either ends by its own deadline, and says what it waited for."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        push = begin_push(nursery, prefill, source, "a", deadline_s=3)
        landing = begin_landing(nursery, decode, prefill, "b", deadline_s=3)
        await push.over.wait()
        await landing.over.wait()
        assert isinstance(push.error, DeadlineExceeded)
        assert "nobody had registered" in str(push.error)
        assert isinstance(landing.error, DeadlineExceeded)
        assert landing.error.untrusted
        assert target.is_untouched()


async def test_a_consumer_that_does_not_want_it_frees_the_producer_at_once(
    autojump_clock,
) -> None:
    """It had registered; it was about to, and its own event never came (case n3)."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        push = begin_push(nursery, prefill, source)
        landing = begin_landing(nursery, decode, prefill, after=trio.sleep_forever)
        await trio.sleep(1)
        landing.scope.cancel()
        await landing.over.wait()
        assert landing.is_cancelled
        await trio.sleep(0.1)
        assert isinstance(push.error, PushRevoked)
        assert target.is_untouched()


async def test_a_push_that_was_not_wanted_before_it_began_ends_at_once(
    autojump_clock,
) -> None:
    """The word is remembered for a lease, unless the consumer has come again since."""
    for is_wanted_again in (False, True):
        world, source, target = World(), Pool(), Pool()
        async with (
            world.pair(source, target) as (prefill, decode),
            trio.open_nursery() as nursery,
        ):
            landing = begin_landing(nursery, decode, prefill)
            await trio.sleep(1)
            landing.scope.cancel()
            await trio.sleep(1)
            if is_wanted_again:
                landing = begin_landing(nursery, decode, prefill)
                await trio.sleep(1)
            push = begin_push(nursery, prefill, source)
            await trio.sleep(0.5)
            assert push.over.is_set()
            if is_wanted_again:
                assert push.error is landing.error is None
            else:
                assert isinstance(push.error, PushRevoked)


async def test_a_consumer_of_which_one_rank_cannot_be_reached_tells_the_others(
    autojump_clock,
) -> None:
    """A rank that was reached hears that nothing will be expected."""
    world, sources = World(), [Pool(tp=(i, 2)) for i in range(2)]
    target = Pool()
    async with (
        world.instance("p", sources) as ranks,
        world.engine("c", target) as decode,
        trio.open_nursery() as nursery,
    ):
        contact = contact_of(ranks)
        dead = msgspec.structs.replace(contact.ranks[1], port=1)
        contact = Contact("p", (contact.ranks[0], dead))
        pushes = [
            begin_push(nursery, rank, pool)
            for rank, pool in zip(ranks, sources, strict=True)
        ]
        with pytest.raises(PeerUnreachable):
            await decode.expect(contact, {GROUP: OURS}, request_id="r")
        await trio.sleep(0.5)
        assert isinstance(pushes[0].error, PushRevoked)
        pushes[1].scope.cancel()


# Several at once.


async def test_a_failure_of_one_push_leaves_the_others(autojump_clock) -> None:
    """Twenty between two engines, every third revoked (invariant 7)."""
    world, source, target = World(), Pool(64), Pool(64)
    async with (
        world.pair(source, target, wave_bytes=200) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        pairs: list[tuple[Outcome, Outcome]] = []
        for n in range(20):
            blocks = [3 * n, 3 * n + 1, 3 * n + 2]
            pairs.append(
                (
                    begin_push(
                        nursery, prefill, source, f"r{n}", blocks=blocks, salt=n
                    ),
                    begin_landing(
                        nursery, decode, prefill, f"r{n}", blocks={GROUP: blocks}
                    ),
                )
            )
        await trio.sleep(0.002)
        for _, landing in pairs[::3]:
            landing.scope.cancel()
        for n, (push, landing) in enumerate(pairs):
            await push.over.wait()
            await landing.over.wait()
            if n % 3:
                assert (push.error, landing.error) == (None, None)
                assert target.holds(
                    [3 * n, 3 * n + 1, 3 * n + 2], num_tokens=10, salt=n
                )
            else:
                assert landing.is_cancelled or landing.error is None


@pytest.mark.parametrize("ends", ["alone", "together"])
async def test_pushes_and_pulls_between_the_same_two_at_once(
    autojump_clock, ends
) -> None:
    """In both directions; an agent is forgotten when the last who holds it lets go."""
    world, pools = World(), [Pool(64), Pool(64)]
    async with world.pair(pools[0], pools[1], wave_bytes=200) as engines:
        async with trio.open_nursery() as nursery:
            outcomes = []
            for n in range(6):
                for side in (0, 1):
                    here, there = engines[side], engines[1 - side]
                    pool = pools[side]
                    outcomes.append(
                        begin_push(
                            nursery,
                            here,
                            pool,
                            f"push{n}",
                            blocks=[n, n + 8, n + 16],
                            salt=n,
                        )
                    )
                    outcomes.append(
                        begin_landing(
                            nursery,
                            there,
                            here,
                            f"push{n}",
                            blocks={GROUP: [n + 24, n + 32, n + 40]},
                        )
                    )
                    spans = pool.stamp([48 + n], num_tokens=4, salt=n)
                    ticket = here.offer(f"pull{n}", spans, num_tokens=4).ticket
                    outcomes.append(
                        begin(
                            nursery,
                            lambda there=there, ticket=ticket, n=n: there.pull(
                                ticket, {GROUP: [56 + n]}
                            ),
                        )
                    )
                    if ends == "alone":
                        await outcomes[-1].over.wait()
        assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
        for pool in pools:
            for n in range(6):
                assert pool.holds([n + 24, n + 32, n + 40], num_tokens=10, salt=n)
                assert pool.holds([56 + n], num_tokens=4, salt=n)
        for engine in engines:
            assert engine.statistics()["fabric_peers"] == 1


async def test_a_pull_s_link_ends_under_a_push_of_the_same_two(autojump_clock) -> None:
    """The agent of the one that pulls and is pushed to stays as long as it is used."""
    world, left, right = World(), Pool(), Pool()
    async with world.pair(left, right) as (a, b):
        # b dials a: for its pull, and for what a pushes to it.
        offer = a.offer("pull", left.stamp([0], num_tokens=4), num_tokens=4)
        await b.pull(offer.ticket, {GROUP: [0]})
        # a dials b, for what b pushes.
        async with trio.open_nursery() as nursery:
            begin_push(nursery, b, right, "one", blocks=[1, 2, 3])
            landing = begin_landing(nursery, a, b, "one", blocks={GROUP: [4, 5, 6]})
        assert landing.error is None
        assert a.address is not None
        world.streams.cut(*a.address)  # b's link to a
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            begin_push(nursery, b, right, "two", blocks=[1, 2, 3], salt=2)
            landing = begin_landing(nursery, a, b, "two", blocks={GROUP: [4, 5, 6]})
        assert landing.error is None
        assert left.holds([4, 5, 6], num_tokens=10, salt=2)


async def test_a_stranger_cannot_join_a_push_that_has_its_consumer(
    autojump_clock,
) -> None:
    """It is refused, the other lands, and the report names nobody else."""
    world, source, target, strange = World(), Pool(), Pool(), Pool()
    async with (
        world.pair(source, target, wave_bytes=200) as (prefill, decode),
        world.engine("d", strange) as other,
        trio.open_nursery() as nursery,
    ):
        release = trio.Event()
        push = begin_push(nursery, prefill, source, after=release.wait)
        landing = begin_landing(nursery, decode, prefill)
        await trio.sleep(0.5)
        late = begin_landing(nursery, other, prefill)
        await late.over.wait()
        assert isinstance(late.error, OfferSpent)
        release.set()
        await landing.over.wait()
        await push.over.wait()
        assert (push.error, landing.error) == (None, None)
        assert push.report.peers == (str(decode.key),)
        assert strange.is_untouched()
        target.check(OURS, num_tokens=10)
        await trio.testing.wait_all_tasks_blocked()
        at_base(other)


async def test_a_rank_that_comes_twice_or_too_late_is_told_so(autojump_clock) -> None:
    """The push is over: spent, for a lease's time."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        push = begin_push(nursery, prefill, source)
        landing = begin_landing(nursery, decode, prefill)
        await push.over.wait()
        await landing.over.wait()
        late = begin_landing(nursery, decode, prefill)
        await late.over.wait()
        assert isinstance(late.error, OfferSpent)
        assert trio.current_time() - landing.at < 0.1


async def test_a_push_that_follows_a_failed_one_is_not_revoked_with_it(
    autojump_clock,
) -> None:
    """The consumer's late word about the first attempt changes nothing (invariant 5)."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        first = begin_push(nursery, prefill, source, after=trio.sleep_forever)
        landing = begin_landing(nursery, decode, prefill)
        await trio.sleep(0.5)
        first.scope.cancel()
        await first.over.wait()
        second = begin_push(nursery, prefill, source, salt=2)
        await landing.over.wait()
        assert landing.error is not None
        await trio.sleep(0.1)
        assert not second.over.is_set(), second.error
        again = begin_landing(nursery, decode, prefill)
        await second.over.wait()
        await again.over.wait()
        assert (second.error, again.error) == (None, None)
        target.check(OURS, num_tokens=10, salt=2)


async def test_three_ranks_of_a_consumer_and_one_of_them_fails(autojump_clock) -> None:
    """Then the request fails, on every rank that has not landed."""
    world = World()
    source = Pool(heads=6)
    targets = [Pool(heads=6, tp=(i, 3)) for i in range(3)]
    async with (
        world.engine("p", source) as prefill,
        world.instance("c", targets) as consumers,
        trio.open_nursery() as nursery,
    ):
        release = trio.Event()
        push = begin_push(nursery, prefill, source, after=release.wait)
        landings = [
            begin_landing(nursery, engine, contact_of([prefill]))
            for engine in consumers
        ]
        await trio.sleep(0.5)
        landings[1].scope.cancel()
        await push.over.wait()
        assert isinstance(push.error, PushRevoked)
        for landing in landings:
            await landing.over.wait()
            assert landing.is_cancelled or landing.error is not None
        release.set()
        await trio.testing.wait_all_tasks_blocked()
        for engine in (prefill, *consumers):
            at_base(engine)
        assert all(target.is_untouched() for target in targets)


async def test_a_closing_engine_takes_no_push(autojump_clock) -> None:
    """Neither side, while and after it closes."""
    world, source = World(), Pool()
    async with world.engine("p", source) as prefill:
        async with world.engine("c", Pool()) as decode:
            pass
        with pytest.raises(EngineClosed):
            await decode.expect(prefill.contact, {GROUP: OURS}, request_id="r")
        with pytest.raises(EngineClosed):
            await decode.push("r", {GROUP: OURS}, num_tokens=10)
        assert agent(prefill)
