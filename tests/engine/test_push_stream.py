"""Layer by layer: bytes leave as ranges get final, and nothing is done before the commit."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
import trio
import trio.testing

from kvferry.engine import (
    EngineClosed,
    FerryError,
    IncompletePush,
    MisuseError,
    PeerLost,
    PushAborted,
    PushRevoked,
    Span,
)
from tests.kit import GROUP, STATE, Pool, World, address, agent, at_base
from tests.pushing import OURS, THEIRS, begin, begin_landing, contact_of

L0, L1 = "layers.0", "layers.1"


def posts(world: World, engine) -> int:
    """How many waves have been posted."""
    return world.network.faults.calls[agent(engine), "post"]


def fail(error: Exception, *, is_group: bool = False) -> None:
    """Raise it."""
    raise ExceptionGroup("mine", [error]) if is_group else error


async def broken() -> None:
    """An event that fails."""
    raise OSError("no such event")


async def settle() -> None:
    """Long enough for a post, not for anything that waits."""
    await trio.sleep(0.1)


@pytest.mark.parametrize(
    "edges",
    [
        [0, 10],
        [0, 4, 8, 10],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        [0, 3, 7, 10],
        [0, 5, 10],
    ],
)
@pytest.mark.parametrize("order", ["forward", "backward", "inside out"])
async def test_chunks_of_tokens_in_any_order(autojump_clock, edges, order) -> None:
    """Aligned to blocks or not: each byte leaves once, at the step that completes it."""
    world, source, target = World(), Pool(), Pool(block_size=8)
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        landing = begin_landing(nursery, decode, prefill, blocks={GROUP: [5, 6]})
        chunks = list(pairwise(edges))
        if order == "backward":
            chunks.reverse()
        elif order == "inside out":
            chunks = chunks[1::2] + chunks[::2]
        spans = source.stamp(THEIRS, num_tokens=10)
        ready: set[int] = set()
        units = 0
        async with prefill.push_stream("r", spans, num_tokens=10) as stream:
            await settle()
            for first, last in chunks:
                before = posts(world, prefill)
                await stream.ready(tokens=(first, last))
                await settle()
                ready |= set(range(first, last))
                whole = sum(
                    {*range(unit, min(unit + 4, 10))} <= ready for unit in (0, 4, 8)
                )
                assert (posts(world, prefill) > before) == (whole > units)
                units = whole
                assert not landing.over.is_set()
        await landing.over.wait()
        assert landing.error is None
        target.check([5, 6], num_tokens=10)
        assert stream.report is not None
        assert stream.report.bytes == landing.report.bytes == 3 * 2 * 2 * 2 * 4 * 3 * 8


async def test_layer_by_layer_bytes_leave_at_once(autojump_clock) -> None:
    """Each layer's step posts its own bytes; nothing else is touched."""
    world, source, target = World(), Pool(layers=3), Pool(layers=3)
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        landing = begin_landing(nursery, decode, prefill)
        spans = source.stamp(THEIRS, num_tokens=10)
        async with prefill.push_stream("r", spans, num_tokens=10) as stream:
            await settle()
            for number, layer in enumerate((2, 0, 1), start=1):
                await stream.ready(layers=[f"layers.{layer}"])
                await settle()
                assert posts(world, prefill) == number
                written = [bool((tensor[5] != -1.0).all()) for tensor in target.tensors]
                assert sum(written) == number
                assert written[layer]
                assert not landing.over.is_set()
        await landing.over.wait()
        assert landing.error is None
        target.check(OURS, num_tokens=10)
        assert (stream.report.waves, landing.report.waves) == (3, 3)


async def test_layers_and_chunks_mixed(autojump_clock) -> None:
    """All layers together first, then each by itself, a state among them."""
    world, source, target = World(), Pool(slots=2), Pool(slots=2)
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        landing = begin_landing(
            nursery, decode, prefill, blocks={GROUP: OURS, STATE: [1]}
        )
        spans = source.stamp(THEIRS, num_tokens=10) | source.stamp_state(0)
        async with prefill.push_stream("r", spans, num_tokens=10) as stream:
            await stream.ready(tokens=(0, 3))
            await stream.ready(tokens=(7, 9))
            await stream.ready(layers=[L1], tokens=(3, 7))
            await stream.ready(layers=[L0, L1], tokens=(9, 10))
            await settle()
            assert bool((target.states == -1.0).all())
            await stream.ready(layers=["layers.s"], tokens=(9, 10))
            await settle()
            target.check_state(1)
            await stream.ready(layers=[L0], tokens=(3, 7))
        await landing.over.wait()
        assert landing.error is None
        target.check(OURS, num_tokens=10)
        target.check_state(1)


@pytest.mark.parametrize("joined_after", range(6))
async def test_a_consumer_that_registers_late_gets_what_is_ready(
    autojump_clock, joined_after
) -> None:
    """Before the first step, between any two, and after the commit."""
    world, source, target = World(), Pool(slots=2), Pool(slots=2)
    steps = [
        (None, (0, 3)),
        ([L0], (3, 10)),
        ([L1], (5, 10)),
        (["layers.s"], (9, 10)),
        ([L1], (3, 5)),
    ]
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        spans = source.stamp(THEIRS, num_tokens=10) | source.stamp_state(0)

        async def stream_all() -> None:
            async with prefill.push_stream("r", spans, num_tokens=10) as stream:
                for layers, tokens in steps:
                    await trio.sleep(1)
                    await stream.ready(layers=layers, tokens=tokens)
                await trio.sleep(0.2)

        push = begin(nursery, stream_all)
        await trio.sleep(joined_after + 0.5)
        landing = begin_landing(
            nursery, decode, prefill, blocks={GROUP: OURS, STATE: [1]}
        )
        await landing.over.wait()
        await push.over.wait()
        assert (push.error, landing.error) == (None, None)
        target.check(OURS, num_tokens=10)
        target.check_state(1)


async def test_two_ranks_of_a_consumer_one_early_one_late(autojump_clock) -> None:
    """Each gets each step; the commit waits for both."""
    world, source = World(), Pool(heads=4)
    targets = [Pool(heads=4, tp=(i, 2)) for i in range(2)]
    async with (
        world.engine("p", source) as prefill,
        world.instance("c", targets) as consumers,
        trio.open_nursery() as nursery,
    ):
        contact = contact_of([prefill])
        landings = [begin_landing(nursery, consumers[0], contact)]
        spans = source.stamp(THEIRS, num_tokens=10)
        async with prefill.push_stream("r", spans, num_tokens=10) as stream:
            await stream.ready(tokens=(0, 4))
            await settle()
            assert posts(world, prefill) == 1
            landings.append(begin_landing(nursery, consumers[1], contact))
            await settle()
            assert posts(world, prefill) == 2
            await stream.ready(tokens=(4, 10))
            await settle()
            assert posts(world, prefill) == 4
        assert len(stream.report.peers) == 2
        for landing, target in zip(landings, targets, strict=True):
            await landing.over.wait()
            assert landing.error is None
            target.check(OURS, num_tokens=10)
        for engine in (prefill, *consumers):
            at_base(engine)


async def test_nothing_is_posted_before_its_event(autojump_clock) -> None:
    """Each step waits for its own, and the blocks may be filled until then (case l8)."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        landing = begin_landing(nursery, decode, prefill)
        computed = trio.Event()
        async with prefill.push_stream("r", {GROUP: THEIRS}, num_tokens=10) as stream:

            async def compute() -> None:
                await trio.sleep(5)
                assert not posts(world, prefill)
                source.stamp(THEIRS, num_tokens=10)
                computed.set()

            nursery.start_soon(compute)
            await stream.ready(layers=[L0], after=computed.wait)
            await settle()
            assert posts(world, prefill) == 1
            await stream.ready(layers=[L1])
        await landing.over.wait()
        assert landing.error is None
        target.check(OURS, num_tokens=10)


async def test_nothing_is_written_before_the_consumer_s_event(autojump_clock) -> None:
    """Its own work on the blocks comes first."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        over = trio.Event()
        landing = begin_landing(nursery, decode, prefill, after=over.wait)
        spans = source.stamp(THEIRS, num_tokens=10)
        push = begin(nursery, lambda: prefill.push("r", spans, num_tokens=10))
        await trio.sleep(5)
        assert not posts(world, prefill)
        over.set()
        await landing.over.wait()
        await push.over.wait()
        assert (push.error, landing.error) == (None, None)
        target.check(OURS, num_tokens=10)


@pytest.mark.parametrize("joins", ["early", "late"])
async def test_a_commit_with_something_missing_fails_on_both_sides(
    autojump_clock, joins
) -> None:
    """And names what is missing."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        spans = source.stamp(THEIRS, num_tokens=10)
        if joins == "early":
            landing = begin_landing(nursery, decode, prefill)

        async def incomplete() -> None:
            async with prefill.push_stream("r", spans, num_tokens=10) as stream:
                await stream.ready(layers=[L0])
                await stream.ready(layers=[L1], tokens=(0, 4))
                await stream.ready(layers=[L1], tokens=(7, 10))
                await settle()

        with pytest.raises(IncompletePush, match=r"layers\.1 tokens .*4.*7") as caught:
            await incomplete()
        assert caught.value.request_id == "r"
        assert L0 not in str(caught.value)
        if joins == "early":
            await landing.over.wait()
            assert isinstance(landing.error, IncompletePush)
            assert L1 in str(landing.error)
            assert landing.error.untrusted
            assert landing.at == pytest.approx(trio.current_time(), abs=0.1)


@pytest.mark.parametrize("how", ["raises", "cancelled", "raises a group"])
async def test_a_body_that_is_left_early_ends_both_sides(autojump_clock, how) -> None:
    """The consumer's blocks come back once the last wave has landed."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target, wave_bytes=200, window=2) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        spans = source.stamp(THEIRS, num_tokens=10)
        landing = begin_landing(nursery, decode, prefill)
        errors = []
        with trio.CancelScope() as scope:
            try:
                async with prefill.push_stream("r", spans, num_tokens=10) as stream:
                    await stream.ready(tokens=(0, 8))
                    await trio.sleep(0.001)
                    if how == "cancelled":
                        scope.cancel()
                        await trio.sleep_forever()
                    fail(KeyError("1"), is_group=how != "raises")
            except (KeyError, ExceptionGroup) as error:
                errors.append(error)
        assert scope.cancelled_caught == (how == "cancelled")
        assert len(errors) == (how != "cancelled")
        await landing.over.wait()
        assert isinstance(landing.error, PushAborted)
        assert not decode.quarantine
        assert not world.may_touch(target, OURS)
        target.fill(OURS, 7.0)
        await trio.sleep(5)
        assert target.is_filled(OURS, 7.0)


async def test_the_error_of_the_body_comes_out_as_itself(autojump_clock) -> None:
    """Nobody had registered; the producer's own exception is not wrapped."""
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, _):
        spans = source.stamp(THEIRS, num_tokens=10)
        with pytest.raises(KeyError, match="mine"):
            async with prefill.push_stream("r", spans, num_tokens=10):
                raise KeyError("mine")


async def test_ready_twice_and_other_misuse_leave_the_push_alone(
    autojump_clock,
) -> None:
    """Refused by name; the push goes on."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        landing = begin_landing(nursery, decode, prefill)
        spans = source.stamp(THEIRS, num_tokens=10)
        async with prefill.push_stream("r", spans, num_tokens=10) as stream:
            await stream.ready(tokens=(0, 6))
            with pytest.raises(MisuseError, match="ready before"):
                await stream.ready(tokens=(5, 7))
            with pytest.raises(MisuseError, match="ready before"):
                await stream.ready(layers=[L1])
            with pytest.raises(MisuseError, match="not in the request"):
                await stream.ready(tokens=(6, 11))
            with pytest.raises(MisuseError, match="not in the request"):
                await stream.ready(tokens=(8, 7))
            with pytest.raises(MisuseError, match="no layer"):
                await stream.ready(layers=["layers.9"], tokens=(6, 10))
            with pytest.raises(MisuseError, match="failed"):
                await stream.ready(tokens=(6, 10), after=broken)
            await stream.ready(tokens=(7, 7))
            await stream.ready(tokens=(6, 10))
        await landing.over.wait()
        assert landing.error is None
        target.check(OURS, num_tokens=10)


async def test_ready_after_the_commit_is_a_misuse(autojump_clock) -> None:
    """While it waits for its consumer, and when it is done; it lands all the same."""
    world, source, target = World(), Pool(window=5), Pool(window=5)
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        spans = source.stamp(THEIRS, num_tokens=10)
        streams = []

        async def stream_it() -> None:
            async with prefill.push_stream("r", spans, num_tokens=10) as stream:
                streams.append(stream)
                await stream.ready(tokens=(4, 10))  # all that the window reaches

        push = begin(nursery, stream_it)
        await settle()
        landing = begin_landing(nursery, decode, prefill, after=settle)
        with pytest.raises(MisuseError, match="committed"):
            await streams[0].ready(tokens=(0, 4))
        await landing.over.wait()
        await push.over.wait()
        assert (push.error, landing.error) == (None, None)
        with pytest.raises(MisuseError, match="committed"):
            await streams[0].ready(tokens=(0, 4))


@pytest.mark.parametrize("window", [2, 4, 5, 7])
@pytest.mark.parametrize("split", [0, 1, 2])
async def test_a_window_needs_no_more_ready_than_it_reaches(
    autojump_clock, window, split
) -> None:
    """From the beginning of the block that its first token is in: that is its grain."""
    world, source, target = World(), Pool(window=window), Pool(window=window)
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        landing = begin_landing(nursery, decode, prefill)
        spans = source.stamp(THEIRS, num_tokens=10)
        reach = 10 - window + 1
        first = reach // 4 * 4
        async with prefill.push_stream("r", spans, num_tokens=10) as stream:
            if split == 1:  # more than it needs, and after what it needs
                await stream.ready(tokens=(first, 10))
                await stream.ready(tokens=(0, first))
            elif split == 2:
                await stream.ready(tokens=(0, first))
                await stream.ready(tokens=(first, 10))
            else:
                await stream.ready(tokens=(first, 10))
        await landing.over.wait()
        assert landing.error is None
        for token in range(reach, 12):
            place, slot = divmod(token, 4)
            for layer, tensor in enumerate(target.tensors):
                found = tensor[OURS[place], :, :, slot]
                wanted = source.tensors[layer][THEIRS[place], :, :, slot]
                assert bool((found == (wanted if token < 10 else 0)).all())


@pytest.mark.parametrize("how", ["revoked", "lost", "deadline", "closing"])
async def test_ready_after_the_push_has_failed_raises_why(autojump_clock, how) -> None:
    """Also in the middle of a wait for an event; and the block raises the same."""
    kinds = {
        "revoked": PushRevoked,
        "lost": PeerLost,
        "deadline": FerryError,
        "closing": EngineClosed,
    }
    world, source, target = World(), Pool(), Pool()
    async with trio.open_nursery() as nursery:
        process = await world.start(nursery, "p", source)
        decode = (await world.start(nursery, "c", target)).engine
        prefill = process.engine
        landing = begin_landing(nursery, decode, prefill)
        spans = source.stamp(THEIRS, num_tokens=10)

        async def fail() -> None:
            await settle()
            if how == "revoked":
                landing.scope.cancel()
            elif how == "lost":
                world.streams.cut(*address(prefill))
            elif how == "closing":
                await process.leave()

        async def stream_it() -> None:
            async with prefill.push_stream(
                "r", spans, num_tokens=10, deadline_s=3
            ) as stream:
                await stream.ready(tokens=(0, 5))
                await settle()
                nursery.start_soon(fail)
                with pytest.raises(kinds[how]):
                    await stream.ready(tokens=(5, 7), after=trio.sleep_forever)
                with pytest.raises(kinds[how]):
                    await stream.ready(tokens=(5, 7))

        with pytest.raises(kinds[how]) as caught:
            await stream_it()
        assert caught.value.request_id == "r"
        assert not process.ended.is_set() or how == "closing"
        await landing.over.wait()
        await trio.sleep(5)
        at_base(prefill)
        at_base(decode)
        nursery.cancel_scope.cancel()


async def test_a_prefix_hit_on_the_consumer_and_chunks_across_it(
    autojump_clock,
) -> None:
    """Tokens before it leave with no chunk, whatever the chunks."""
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        for number, edges in enumerate(([0, 4, 8, 10], [0, 5, 10], [0, 3, 6, 9, 10])):
            async with trio.open_nursery() as nursery:
                landing = begin_landing(
                    nursery,
                    decode,
                    prefill,
                    f"r{number}",
                    blocks={GROUP: Span([6, 1], 4)},
                    computed_tokens=4,
                )
                spans = source.stamp(THEIRS, num_tokens=10)
                async with prefill.push_stream(
                    f"r{number}", spans, num_tokens=10
                ) as stream:
                    for chunk in pairwise(edges):
                        await stream.ready(tokens=chunk)
            assert landing.error is None
            target.check([6, 1], num_tokens=10, first_token=4)


async def test_a_step_that_nobody_needs_any_more_prepares_nothing(
    autojump_clock,
) -> None:
    """The consumer is gone, and the producer has not heard yet that its push is over."""
    world, source, target = World(), Pool(), Pool()
    async with (
        trio.open_nursery() as nursery,
        world.engine("p", source) as prefill,
    ):
        process = await world.start(nursery, "c", target)
        landing = begin_landing(nursery, process.engine, prefill)
        spans = source.stamp(THEIRS, num_tokens=10)

        async def stream_it() -> None:
            async with prefill.push_stream("r", spans, num_tokens=10) as stream:
                await stream.ready(layers=[L0])
                await settle()
                (delivery,) = prefill._pushes._deliveries.values()
                world.streams.cut(*address(prefill))
                while delivery.cause is None:
                    await trio.lowlevel.checkpoint()
                # It may be that the push has not been told yet.
                for _ in range(3):
                    with suppress(MisuseError):
                        await stream.ready(layers=[L1], tokens=(0, 10))

        with pytest.raises(PeerLost):
            await stream_it()
        await landing.over.wait()
        await trio.sleep(5)
        await process.leave()
        await trio.sleep(1)
        assert prefill.statistics()["fabric_prepared"] == 0
        assert prefill.statistics()["fabric_peers"] == 0


async def test_a_consumer_does_not_look_for_bytes_while_nothing_is_ready(
    autojump_clock,
) -> None:
    """A stream lasts as long as the prefill: its pauses cost what waiting costs."""
    world, source, target = World(), Pool(), Pool()
    async with world.pair(source, target) as (prefill, decode):
        spans = source.stamp(THEIRS, num_tokens=10)
        async with trio.open_nursery() as nursery:
            landing = begin_landing(nursery, decode, prefill)
            async with prefill.push_stream("r", spans, num_tokens=10) as stream:
                await stream.ready(layers=[L0])
                await settle()
                before = decode._pump.rounds
                await trio.sleep(10)
                looks = decode._pump.rounds - before
                await stream.ready(layers=[L1])
        assert landing.error is None
        target.check(OURS, num_tokens=10)
        assert looks == pytest.approx(10 / decode.config.offered_poll_s, rel=0.02)
