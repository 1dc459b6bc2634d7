"""Nobody's word is taken: registrations outside a pool, and sources that say too much."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.testing

from kvferry.engine import (
    FerryError,
    IncompletePush,
    LeaseExpired,
    MisuseError,
    OfferSpent,
    PeerLost,
    PushAborted,
    PushRevoked,
    TransferFailed,
)
from kvferry.engine.handshake import Credentials, greet
from kvferry.engine.link import FramedStream
from kvferry.engine.pushes import MAX_REGISTERED_BLOCKS
from kvferry.engine.sections import MAX_ROWS
from kvferry.engine.targets import ROWS_PER_PLAN
from kvferry.protocol.handshake import Card
from kvferry.protocol.identity import EngineKey, Rank
from kvferry.protocol.layout import CacheLayout
from kvferry.protocol.link import (
    Aborted,
    AbortedReason,
    Claim,
    Extend,
    Finished,
    Landed,
    Register,
    Registered,
    Revoke,
    Revoked,
    decode_message,
    encode_message,
)
from kvferry.protocol.notices import TOKEN_BYTES, Written, encode_notice
from kvferry.protocol.ticket import MAX_SPAN_BLOCKS, Contact, RankAddress, TicketSpan
from tests.kit import GROUP, IDENTITY, Pool, World, address, agent, answer, at_base
from tests.pushing import OURS, begin_landing, begin_push

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvferry.engine import TransferEngine

LINK_BYTES = 1 << 20


class Consumer:
    """A consumer that says what a test tells it to."""

    def __init__(self, world: World, pool: Pool) -> None:
        self.fabric = world.network.fabric(f"impostor-{next(world.numbers)}")
        self.fabric.register(pool.cache.layout.regions)
        self.key = EngineKey("c", str(next(world.numbers)), Rank())
        self.card = Card(IDENTITY, pool.cache.layout, self.fabric.metadata())
        self.sheet = CacheLayout((), pool.cache.layout.groups)
        self._world = world
        self._framed: FramedStream | None = None

    async def connect(self, engine: TransferEngine) -> None:
        """Up to the end of the handshake."""
        self._framed = FramedStream(await self._world.streams.dial(*address(engine)))
        ours = Credentials(self.key, self.card, b"", frozenset())
        await greet(self._framed, ours, engine.key)

    async def say(self, *messages: Any) -> None:
        """Send them."""
        assert self._framed is not None
        for message in messages:
            await self._framed.send(encode_message(message), limit_bytes=LINK_BYTES)

    async def leave(self) -> None:
        """Hang up."""
        assert self._framed is not None
        await self._framed.aclose()

    async def hear(self) -> Any:
        """The next message."""
        assert self._framed is not None
        payload = await self._framed.receive(limit_bytes=LINK_BYTES)
        return decode_message(payload)


def register(**changes: Any) -> Register:
    """A good registration of the usual request, but for the changes."""
    good = Register(
        "r",
        0,
        30.0,
        0,
        b"t" * TOKEN_BYTES,
        0,
        {GROUP: TicketSpan(tuple(OURS))},
        (Rank(),),
    )
    return msgspec.structs.replace(good, **changes)


async def offending(
    *messages: Callable[[Consumer], Any],
) -> tuple[list[Any], World, Pool, Any]:
    """A consumer that says all this to a producer that pushes; its answers for a second."""
    world, source, target = World(), Pool(), Pool()
    heard: list[Any] = []
    async with world.engine("p", source, max_registrations=4) as prefill:
        async with trio.open_nursery() as nursery:
            consumer = Consumer(world, target)
            await consumer.connect(prefill)
            push = begin_push(nursery, prefill, source, deadline_s=2.0)
            with trio.move_on_after(1), suppress(PeerLost):
                await consumer.say(*(make(consumer) for make in messages))
                while True:
                    heard.append(await consumer.hear())
            assert not world.logged("internal_error"), world.logged("internal_error")
            await push.over.wait()
            await consumer.leave()
        await trio.testing.wait_all_tasks_blocked()
        if not any(isinstance(message, Registered) for message in heard):
            assert not world.network.faults.calls[agent(prefill), "post"]
            assert target.is_untouched()
        # A good one is served as ever.
        async with world.engine("d", Pool()) as decode, trio.open_nursery() as nursery:
            landing = begin_landing(nursery, decode, prefill, "good")
            begin_push(nursery, prefill, source, "good")
        assert landing.error is None
        await trio.sleep(1)
        at_base(prefill)
    return heard, world, target, push


def claim() -> Callable[[Consumer], Claim]:
    """All of the consumer's layout."""
    return lambda consumer: Claim(0, (consumer.sheet,))


def moved(consumer: Consumer, change: Callable[[Any], Any]) -> Claim:
    """A claim with each part changed."""
    groups = tuple(
        msgspec.structs.replace(
            group,
            fields=tuple(
                msgspec.structs.replace(
                    field, parts=tuple(change(part) for part in field.parts)
                )
                for field in group.fields
            ),
        )
        for group in consumer.sheet.groups
    )
    return Claim(0, (CacheLayout((), groups),))


async def test_a_good_registration_by_hand_is_written(autojump_clock) -> None:
    """What the others are measured against."""
    heard, _, _, push = await offending(claim(), lambda _: register())
    kinds = [type(message) for message in heard]
    assert kinds[0] is Registered
    assert Finished in kinds
    finished = heard[kinds.index(Finished)]
    assert finished.bytes == 3 * 2 * 2 * 2 * 4 * 3 * 8
    assert finished.num_tokens == 10
    # It never said that it landed.
    assert isinstance(push.error, FerryError)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"spans": {GROUP: TicketSpan((5, 6, 16))}}, "16"),
        ({"spans": {GROUP: TicketSpan((5, 6, 2**31 - 1))}}, "outside the pool"),
        ({"spans": {GROUP: TicketSpan((5, 6, 5))}}, "twice"),
        ({"spans": {GROUP: TicketSpan((5, 6, 1), 3)}}, "begins at token 3"),
        ({"spans": {}}, "no consumer blocks"),
        ({"spans": {"other": TicketSpan((5, 6, 1))}}, "no consumer blocks"),
        ({"claim": 7}, "claim 7"),
        ({"computed_tokens": 2**40 - 1}, None),
    ],
)
async def test_a_registration_outside_the_pool_is_refused_by_name(
    autojump_clock, changes, match
) -> None:
    """Before anything is written; the consumer hears why."""
    heard, _, target, push = await offending(claim(), lambda _: register(**changes))
    if match is None:  # legal: everything is there already
        assert isinstance(heard[0], Registered)
        assert target.is_untouched()
        return
    (refusal,) = heard
    assert isinstance(refusal, Aborted)
    assert refusal.reason is AbortedReason.MISFIT
    assert match in refusal.detail
    assert push.report is None


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        ((5, 6), "token"),
        ((5, None, 1), "None"),
        ((5,), "token"),
        ((), "token"),
    ],
)
async def test_blocks_that_cannot_take_the_push_end_it_on_both_sides(
    autojump_clock, spans, match
) -> None:
    """They are the consumer's own, but too few for what comes."""
    heard, _, target, push = await offending(
        claim(), lambda _: register(spans={GROUP: TicketSpan(spans)})
    )
    (refusal,) = [message for message in heard if isinstance(message, Aborted)]
    assert refusal.reason is AbortedReason.MISFIT
    assert match in refusal.detail
    assert isinstance(push.error, MisuseError)
    assert target.is_untouched()


FAR = 1 << 20


@pytest.mark.parametrize(
    "change",
    [
        lambda part: msgspec.structs.replace(part, address=part.address + FAR),
        lambda part: msgspec.structs.replace(part, address=part.address - 8),
        lambda part: msgspec.structs.replace(part, address=0),
        lambda part: msgspec.structs.replace(part, address=2**61),
        lambda part: msgspec.structs.replace(
            part,
            axes=tuple(
                msgspec.structs.replace(axis, stride=axis.stride * 1000)
                for axis in part.axes
            ),
        ),
        lambda part: msgspec.structs.replace(
            part,
            axes=tuple(
                msgspec.structs.replace(axis, stride=-axis.stride) for axis in part.axes
            ),
        ),
        lambda part: msgspec.structs.replace(
            part,
            axes=tuple(msgspec.structs.replace(axis, stride=0) for axis in part.axes),
        ),
        lambda part: msgspec.structs.replace(part, axes=part.axes[1:]),
    ],
)
async def test_a_claim_beyond_what_was_registered_is_refused(
    autojump_clock, change
) -> None:
    """Its regions are those of the handshake, whatever the claim says."""
    heard, *_ = await offending(
        lambda consumer: moved(consumer, change), lambda _: register()
    )
    (refusal,) = heard
    assert isinstance(refusal, Aborted)
    assert refusal.reason in {AbortedReason.MISFIT, AbortedReason.FAILED}
    assert refusal.detail


async def test_regions_in_a_claim_do_not_count(autojump_clock) -> None:
    """A claim that brings regions of its own gains nothing by it."""

    def lie(consumer: Consumer) -> Claim:
        regions = tuple(
            msgspec.structs.replace(region, address=region.address + FAR)
            for region in consumer.card.layout.regions
        )
        far = moved(
            consumer,
            lambda part: msgspec.structs.replace(part, address=part.address + FAR),
        )
        return Claim(0, (msgspec.structs.replace(far.sheets[0], regions=regions),))

    (refusal,), *_ = await offending(lie, lambda _: register())
    assert isinstance(refusal, Aborted)


async def test_more_blocks_than_the_pool_has_are_refused(autojump_clock) -> None:
    """A claim whose pool is larger than the registered memory."""

    def larger(consumer: Consumer) -> Claim:
        (group,) = consumer.sheet.groups
        fields = tuple(
            msgspec.structs.replace(field, blocks=1000) for field in group.fields
        )
        group = msgspec.structs.replace(group, blocks=1000, fields=fields)
        return Claim(0, (CacheLayout((), (group,)),))

    (refusal,), *_ = await offending(
        larger, lambda _: register(spans={GROUP: TicketSpan((5, 6, 999))})
    )
    assert isinstance(refusal, Aborted)
    assert "registered" in refusal.detail


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_consumer_that_is_met_slowly_is_heard_behind_that_or_forgotten(
    autojump_clock, is_replaced
) -> None:
    """Its agent is connected with its first claim; a new link of it ends the old one."""
    world, source, target = World(), Pool(), Pool()
    may_connect = trio.Event()
    async with world.engine("p", source) as prefill:
        connect = prefill._fabric.connect

        async def connect_slowly(metadata: bytes) -> str:
            with trio.CancelScope(shield=True):
                await may_connect.wait()
            return connect(metadata)

        prefill._fabric.connect_aside = connect_slowly
        consumer = Consumer(world, target)
        await consumer.connect(prefill)
        await consumer.say(claim()(consumer), register())
        await trio.testing.wait_all_tasks_blocked()
        assert not prefill._pushes._deliveries
        if is_replaced:
            await consumer.connect(prefill)
            await trio.testing.wait_all_tasks_blocked()
        may_connect.set()
        await trio.testing.wait_all_tasks_blocked()
        assert prefill._fabric.counts()["peers"] == (not is_replaced)
        assert len(prefill._pushes._deliveries) == (not is_replaced)
        await consumer.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert prefill._fabric.counts()["peers"] == 0
        assert not world.logged("internal_error")


async def test_a_claim_number_used_twice_ends_the_link(autojump_clock) -> None:
    """It would change under the feet of whoever was registered with it."""
    heard, world, target, _ = await offending(claim(), claim(), lambda _: register())
    assert heard == []
    assert any(
        "is there already" in entry["cause"] for entry in world.logged("link_ended")
    )
    assert target.is_untouched()


async def test_too_many_claims_and_registrations_are_refused(autojump_clock) -> None:
    """Bounds, of one consumer and of all (invariant 6)."""
    heard, *_ = await offending(
        claim(),
        *(
            lambda _, n=n: register(
                request_id=f"other{n}", attempt=n, token=bytes([n]) * TOKEN_BYTES
            )
            for n in range(6)
        ),
    )
    kinds = [type(message) for message in heard]
    assert kinds.count(Registered) == 4
    refused = [message for message in heard if isinstance(message, Aborted)]
    assert [message.request_id for message in refused] == ["other4", "other5"]
    assert all("registrations" in message.detail for message in refused)
    # Old claims that nobody uses make room.
    heard, *_ = await offending(
        *(lambda consumer, n=n: Claim(n, (consumer.sheet,)) for n in range(200)),
        lambda _: register(claim=199),
    )
    assert isinstance(heard[0], Registered)


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_registration_behind_its_own_revocation_is_refused(
    autojump_clock, is_known
) -> None:
    """The blocks have been given back: a word that comes late, or twice, counts for nothing."""
    first = [lambda _: register(request_id="q")] if is_known else []
    heard, _, target, _ = await offending(
        claim(),
        *first,
        lambda _: Revoke("q", 0),
        lambda _: register(request_id="q"),
    )
    kinds = [type(message) for message in heard]
    assert kinds == [*[Registered] * len(first), Revoked, Aborted]
    assert heard[-1].reason is AbortedReason.SPENT
    assert target.is_untouched()


@pytest.mark.parametrize("second", [{"attempt": 0}, {"attempt": 1}])
async def test_registering_twice_is_refused_and_the_first_goes_on(
    autojump_clock, second
) -> None:
    """The same attempt, or another one for the same request (case h3)."""
    heard, *_ = await offending(
        claim(), lambda _: register(), lambda _: register(**second)
    )
    kinds = [type(message) for message in heard]
    assert kinds.count(Registered) == 1
    (refusal,) = [message for message in heard if isinstance(message, Aborted)][:1]
    assert refusal.reason is AbortedReason.SPENT
    assert (Finished in kinds) == (second["attempt"] == 1) or Finished in kinds


async def test_words_about_registrations_that_nobody_knows_change_nothing(
    autojump_clock,
) -> None:
    """Counted; a revocation is answered, for what is not known is not in flight."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        stranger = Consumer(world, Pool())
        await stranger.connect(prefill)
        landing = begin_landing(nursery, decode, prefill)
        await trio.sleep(0.5)
        before = prefill.statistics()["stray_messages"]
        await stranger.say(
            Extend("r", 0), Landed("r", 0), Landed("x", 9), Revoke("x", 9)
        )
        assert await stranger.hear() == Revoked("x", 9)
        assert prefill.statistics()["stray_messages"] == before + 3
        assert not landing.over.is_set()
        push = begin_push(nursery, prefill, source)
        await landing.over.wait()
        await push.over.wait()
        assert (push.error, landing.error) == (None, None)


async def test_a_landing_that_is_told_before_all_is_written_is_none(
    autojump_clock,
) -> None:
    """`Landed` in front of `Finished` does not make a push done."""
    heard, _, _, push = await offending(
        claim(), lambda _: register(), lambda _: Landed("r", 0)
    )
    assert Finished in [type(message) for message in heard]
    assert isinstance(push.error, FerryError)


# A producer that says too much.


class Producer:
    """A producer that follows a script after the handshake.

    Attributes:
        registers: What it was told.
    """

    def __init__(self, world: World, pool: Pool) -> None:
        self.fabric = world.network.fabric(f"impostor-{next(world.numbers)}")
        self.fabric.register(pool.cache.layout.regions)
        self.key = EngineKey("p", "impostor", Rank())
        self.card = Card(IDENTITY, pool.cache.layout, self.fabric.metadata())
        self.registers: list[Register] = []
        self._world = world
        self._address = ("", 0)

    @property
    def contact(self) -> Contact:
        return Contact(
            "p", (RankAddress(self.key.rank, self.key.generation, *self._address),)
        )

    async def serve(
        self,
        script: Callable[[Producer, Register], AsyncIterator[Any]],
        *,
        revokes: bool = True,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answer registrations with the script, and revocations as one should."""
        listener = await self._world.streams.listen("127.0.0.1", 0)
        self._address = (listener.host, listener.port)

        async def follow(stream: trio.abc.Stream) -> None:
            framed = FramedStream(stream)

            async def say(message: Any) -> None:
                await framed.send(encode_message(message), limit_bytes=LINK_BYTES)

            with suppress(PeerLost):
                ours = Credentials(self.key, self.card, b"", frozenset())
                _, card = await answer(framed, ours)
                self.reader = self.fabric.connect(card.metadata)
                while True:
                    payload = await framed.receive(limit_bytes=LINK_BYTES)
                    message = decode_message(payload)
                    if isinstance(message, Register):
                        self.registers.append(message)
                        async for said in script(self, message):
                            await say(said)
                    elif isinstance(message, Revoke) and revokes:
                        await say(Revoked(message.request_id, message.attempt))

        task_status.started()
        await trio.serve_listeners(follow, [listener])

    def notify(self, register: Register, parts: int) -> None:
        """Notices, and no bytes."""
        for part in range(parts):
            self.fabric.notify(
                self.reader, encode_notice(Written(register.token, part))
            )


BYTES = 3 * 2 * 2 * 2 * 4 * 3 * 8


def saying(*, tokens: int = 10, parts: int = 6, size: int = BYTES, notices: int = 6):
    """It says that it has finished, and sends notices."""

    async def script(producer: Producer, told: Register) -> AsyncIterator[Any]:
        producer.notify(told, notices)
        yield Finished(told.request_id, told.attempt, tokens, parts, size)

    return script


async def expecting(script: Any, **options: Any) -> tuple[Any, Pool]:
    """A landing from such a producer."""
    world, target = World(), Pool()
    async with (
        world.engine("c", target) as decode,
        trio.open_nursery() as nursery,
    ):
        producer = Producer(world, Pool())
        await nursery.start(producer.serve, script)
        landing = begin_landing(
            nursery, decode, producer.contact, deadline_s=3, **options
        )
        await landing.over.wait()
        await trio.sleep(0.5)
        at_base(decode)
        assert not world.logged("internal_error"), world.logged("internal_error")
        nursery.cancel_scope.cancel()
    return landing, target


@pytest.mark.parametrize(
    ("lie", "error"),
    [
        ({"size": BYTES - 8}, TransferFailed),
        ({"size": BYTES + 8}, TransferFailed),
        ({"size": 0, "parts": 0, "notices": 0}, TransferFailed),
        ({"parts": 0, "notices": 0}, TransferFailed),
        ({"parts": 7}, FerryError),
        ({"notices": 0}, FerryError),
        ({"notices": 5}, FerryError),
        ({"tokens": 9, "size": BYTES // 3}, TransferFailed),
        ({"tokens": 13}, FerryError),
        ({"tokens": 2**40 - 1}, FerryError),
        ({"tokens": 2**40 - 1, "size": 2**61}, FerryError),
    ],
)
async def test_a_source_whose_numbers_are_wrong_is_never_done(
    autojump_clock, lie, error
) -> None:
    """Bytes, parts, tokens: each is held against what was asked, or never complete."""
    landing, target = await expecting(saying(**lie))
    assert landing.report is None
    assert isinstance(landing.error, error)
    assert landing.error.untrusted
    assert target.is_untouched()


async def test_notices_alone_are_no_end(autojump_clock) -> None:
    """All parts may have come: without the word it is not done (invariant 1)."""

    async def script(producer: Producer, told: Register) -> AsyncIterator[Any]:
        yield Registered(told.request_id, told.attempt)
        producer.notify(told, 100)

    landing, _ = await expecting(script)
    assert landing.report is None


async def test_a_word_about_another_attempt_is_not_ours(autojump_clock) -> None:
    """Counted by the peer, and nothing changes (invariant 5)."""

    async def script(producer: Producer, told: Register) -> AsyncIterator[Any]:
        producer.notify(told, 6)
        yield Finished(told.request_id, told.attempt + 1, 10, 6, BYTES)
        yield Revoked(told.request_id, told.attempt + 1)

    landing, _ = await expecting(script)
    assert landing.report is None


@pytest.mark.parametrize("reason", list(AbortedReason))
async def test_each_reason_is_its_own_error(autojump_clock, reason) -> None:
    """What the producer says becomes what the consumer raises."""
    kinds = {
        AbortedReason.EXPIRED: LeaseExpired,
        AbortedReason.SPENT: OfferSpent,
        AbortedReason.MISFIT: MisuseError,
        AbortedReason.INCOMPLETE: IncompletePush,
        AbortedReason.FAILED: PushAborted,
    }

    async def script(producer: Producer, told: Register) -> AsyncIterator[Any]:
        del producer
        yield Aborted(told.request_id, told.attempt, reason, "because")

    landing, _ = await expecting(script)
    assert type(landing.error) is kinds[reason] or isinstance(
        landing.error, kinds[reason]
    )
    assert "because" in str(landing.error)


async def test_a_source_that_gives_up_unasked(autojump_clock) -> None:
    """`Revoked` without a word: failed, and the blocks are safe."""

    async def script(producer: Producer, told: Register) -> AsyncIterator[Any]:
        del producer
        yield Revoked(told.request_id, told.attempt)

    landing, _ = await expecting(script)
    assert isinstance(landing.error, PushAborted)


async def test_finished_twice_and_differently(autojump_clock) -> None:
    """The first word counts."""

    async def script(producer: Producer, told: Register) -> AsyncIterator[Any]:
        yield Finished(told.request_id, told.attempt, 10, 6, BYTES)
        yield Finished(told.request_id, told.attempt, 10, 1, BYTES)
        producer.notify(told, 1)

    landing, _ = await expecting(script)
    assert landing.report is None


async def test_a_ticket_says_how_many_tokens_there_are(autojump_clock) -> None:
    """A producer that pushes less of it is not done."""
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        offer = prefill.offer(
            "r", source.stamp([3, 7, 9], num_tokens=10), num_tokens=10
        )
        for pushed in (10, 9):
            async with trio.open_nursery() as nursery:
                errors: list[FerryError] = []

                async def land(errors=errors) -> None:
                    try:
                        await decode.expect(offer.ticket, {GROUP: OURS})
                    except FerryError as error:
                        errors.append(error)

                nursery.start_soon(land)
                push = begin_push(nursery, prefill, source, num_tokens=pushed)
            if pushed == 10:
                assert (push.error, errors) == (None, [])
            else:
                assert isinstance(errors[0], TransferFailed)
                assert "10" in str(errors[0])
                assert isinstance(push.error, PushRevoked)
        offer.withdraw()


async def test_h1_a_peer_that_shows_our_own_agent_is_none(autojump_clock) -> None:
    """Its blocks would be places in our own memory, of its choice."""
    world, source, target = World(), Pool(), Pool()
    async with world.engine("p", source) as prefill:
        consumer = Consumer(world, target)
        mirrored = consumer.card = prefill._listener._ours.card
        await consumer.connect(prefill)
        with suppress(PeerLost):
            await consumer.say(Claim(0, (CacheLayout((), mirrored.layout.groups),)))
        with pytest.raises(PeerLost):
            await consumer.hear()
        await trio.testing.wait_all_tasks_blocked()
        assert any("our own agent" in e["cause"] for e in world.logged("link_ended"))
        assert source.is_untouched()


# What one consumer may cost.


def spread(consumer: Consumer, number: int) -> Claim:
    """A claim whose last axis has gaps: a row for each element."""
    (made,) = moved(
        consumer,
        lambda part: msgspec.structs.replace(
            part,
            axes=(*part.axes[:-1], msgspec.structs.replace(part.axes[-1], stride=16)),
        ),
    ).sheets
    return Claim(number, (made,))


async def linked(
    world: World, prefill: TransferEngine, target: Pool
) -> tuple[Consumer, Callable[[Any], None]]:
    """A consumer, and a way to say something to the producer without waiting."""
    consumer = Consumer(world, target)
    await consumer.connect(prefill)
    await trio.testing.wait_all_tasks_blocked()
    (link,) = prefill._listener._links

    def say(message: Any) -> None:
        rest = prefill._listener._service.on_message(link, message)
        if rest is not None:
            with pytest.raises(StopIteration):  # it has nothing to wait for
                rest.__await__().send(None)

    return consumer, say


async def test_h1_a_claim_that_fits_nothing_is_planned_for_once(autojump_clock) -> None:
    """However many registrations name it, and each hears why."""
    world, source, target = World(), Pool(), Pool()
    async with world.engine("p", source) as prefill:
        consumer, say = await linked(world, prefill, target)
        say(spread(consumer, 0))
        (prefilled,) = prefill._pushes._targets.values()
        for attempt in range(50):
            say(register(attempt=attempt, request_id=f"r{attempt}"))
        answers = [await consumer.hear() for _ in range(50)]
        assert {answer.reason for answer in answers} == {AbortedReason.MISFIT}
        assert len(world.logged("registration_refused")) <= 20
        left = prefilled.planning._budget._left
        assert left > 2 * MAX_ROWS - 2 * ROWS_PER_PLAN
        await consumer.leave()


async def test_h1_claims_without_end_are_planned_for_in_turns_of_a_budget(
    autojump_clock,
) -> None:
    """Who has us plan all the time is refused, and heard again later."""
    world, source, target = World(), Pool(), Pool()
    async with world.engine("p", source) as prefill:
        consumer, say = await linked(world, prefill, target)
        answers = []
        for attempt in range(3000):
            say(Claim(attempt, (consumer.sheet,)))
            say(register(attempt=attempt, claim=attempt, request_id=f"r{attempt}"))
            say(Revoke(f"r{attempt}", attempt))
            answers.append(await consumer.hear())
            if isinstance(answers[-1], Aborted):
                break
            assert isinstance(await consumer.hear(), Revoked)
            await trio.testing.wait_all_tasks_blocked()
        assert 1000 < len(answers) < 2500
        assert "time for" in answers[-1].detail
        await trio.sleep(1)
        say(Claim(9000, (consumer.sheet,)))
        say(register(attempt=9000, claim=9000, request_id="later"))
        while not isinstance(heard := await consumer.hear(), Registered):
            assert not isinstance(heard, Aborted)
        await consumer.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert prefill.statistics()["fabric_prepared"] == 0


async def test_h1_a_rank_may_hold_a_bounded_number_of_blocks(autojump_clock) -> None:
    """In all its registrations together; one that ends makes room."""
    world, source, target = World(), Pool(), Pool()
    async with world.engine("p", source) as prefill:
        consumer, say = await linked(world, prefill, target)
        (known,) = prefill._pushes._targets.values()
        say(Claim(0, (consumer.sheet,)))
        large = {GROUP: TicketSpan((None,) * MAX_SPAN_BLOCKS)}

        async def answer(attempt: int) -> Any:
            say(register(attempt=attempt, request_id=f"r{attempt}", spans=large))
            return await consumer.hear()

        for attempt in range(4):
            assert isinstance(await answer(attempt), Registered)
        assert known.blocks == MAX_REGISTERED_BLOCKS
        refusal = await answer(4)
        assert str(MAX_REGISTERED_BLOCKS) in refusal.detail
        say(Revoke("r0", 0))
        assert isinstance(await consumer.hear(), Revoked)
        assert isinstance(await answer(5), Registered)
        await consumer.leave()
        await trio.testing.wait_all_tasks_blocked()
        assert known.blocks == 0


async def test_h1_the_largest_registrations_take_a_share_of_our_time(
    autojump_clock,
) -> None:
    """A megabyte of blocks that are none, over and over: refused unread in the end."""
    world, source, target = World(), Pool(), Pool()
    async with world.engine("p", source) as prefill:
        consumer, say = await linked(world, prefill, target)
        say(Claim(0, (consumer.sheet,) * 16))
        large = {GROUP: TicketSpan((None,) * MAX_SPAN_BLOCKS)}
        answers = []
        for attempt in range(12):
            say(register(attempt=attempt, request_id=f"r{attempt}", spans=large))
            answers.append(await consumer.hear())
        refused = [a.detail for a in answers if isinstance(a, Aborted)]
        assert any("time for" in detail for detail in refused)
        await consumer.leave()
