"""Every state of a pull on whole engines: what it waits for never comes (case o5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from kvferry.engine import DeadlineExceeded, FerryError, OfferOutcome
from kvferry.engine.fabric.faults import CallFault
from kvferry.protocol.lifecycle.pull import OVER, PullState
from tests.kit import GROUP, Pool, World, address, agent, at_base

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.engine import TransferEngine

S = PullState
WAITING = [state for state in S if state not in OVER | {S.NEW}]
"""NEW waits for nothing: the pull's first event is fed where the pull is made."""

DEADLINE_S, GRACE_S = 3.0, 1.0
OURS = [5, 6]
REUSED = 7.0
BULK = {"landing": "bulk", "wave_bytes": 800, "window": 1, "staging_bytes": 800}


async def forever(*_args: object) -> None:
    """An event, a buffer or a finish stage that never comes."""
    await trio.sleep_forever()


class Starved:
    """A producer and a consumer, one of whose pulls gets stuck in one state."""

    def __init__(
        self, world: World, prefill: TransferEngine, decode: TransferEngine
    ) -> None:
        self.world, self.prefill, self.decode = world, prefill, decode
        self.options: dict[str, object] = {}

    def connecting(self) -> None:
        """The producer takes no connection."""
        self.world.streams.freeze(*address(self.prefill))

    def planned(self) -> None:
        """The caller's event never comes."""
        self.options["after"] = forever

    def queued(self) -> None:
        """Others keep all room to land in."""
        self.decode._staging.take_now = lambda: None  # type: ignore[method-assign]
        self.decode._staging.take = forever  # type: ignore[method-assign]

    def reading(self) -> None:
        """The bytes do not move."""
        self._on_post(lambda: self.world.network.freeze(agent(self.prefill)))

    def confirming(self) -> None:
        """The bytes move, and the producer says nothing."""
        self._on_post(lambda: self.world.streams.freeze(*address(self.prefill)))

    def finishing(self) -> None:
        """The device never gets through."""
        self.decode._pulls._services.finish.run = forever  # type: ignore[method-assign]

    def draining(self) -> None:
        """As in reading, which leads here by its deadline."""
        self.reading()

    def _on_post(self, action: Callable[[], object]) -> None:
        rule = CallFault(fabric="c-*", method="post", action=action)
        self.world.network.faults.add(rule)

    def relieve(self) -> None:
        """Let the rest of the world go on, so that it can be seen to be harmless."""
        self.world.network.thaw("*")
        self.world.streams.thaw(*address(self.prefill))


@pytest.mark.parametrize("is_cancelled", [False, True])
@pytest.mark.parametrize("state", WAITING, ids=lambda s: s.value)
async def test_o5_every_state_is_ended_by_time_alone(
    autojump_clock, state, is_cancelled
) -> None:
    """By its deadline and the grace of a drain; with no new work, and all given back."""
    world, producer, consumer = World(), Pool(), Pool()
    config = {
        "lease_s": 6.0,
        "pull_deadline_s": DEADLINE_S,
        "connect_timeout_s": 2.0,
        "drain_grace_s": GRACE_S,
        **(BULK if state is S.QUEUED else {}),
    }
    async with world.engine("p", producer, **config) as prefill:
        offer = prefill.offer("r", producer.stamp([1, 2], num_tokens=7), num_tokens=7)
        async with world.engine("c", consumer, **config) as decode:
            stuck = Starved(world, prefill, decode)
            getattr(stuck, state.value)()
            started = trio.current_time()
            seen: list[PullState] = []

            async def watch() -> None:
                await trio.sleep(0.5 + (DEADLINE_S if state is S.DRAINING else 0))
                seen.append(decode._pulls._active["r", 0]._machine.state)
                if is_cancelled:
                    scope.cancel()

            error: FerryError | None = None
            async with trio.open_nursery() as nursery:
                with trio.CancelScope() as scope:
                    nursery.start_soon(watch)
                    try:
                        await decode.pull(offer.ticket, {GROUP: OURS}, **stuck.options)
                    except FerryError as failure:
                        error = failure
                took_s = trio.current_time() - started
                posts = world.network.faults.calls[agent(decode), "post"]
            assert seen == [state]
            assert took_s <= DEADLINE_S + GRACE_S + 0.01
            if not scope.cancelled_caught:
                assert isinstance(error, FerryError)
                if state is not S.CONNECTING:
                    assert isinstance(error, DeadlineExceeded)
                    expected = S.READING if state is S.DRAINING else state
                    assert error.phase == expected.value
            held = decode.quarantine.blocks(GROUP)
            assert held == (
                set(OURS) if state in {S.READING, S.DRAINING, S.FINISHING} else set()
            )
            assert world.may_touch(consumer, OURS) <= bool(held)
            if not held:
                consumer.fill(OURS, REUSED)
            # The producer is free by time alone.
            await trio.sleep(7)
            assert offer.outcome is not None
            stuck.relieve()
            await trio.sleep(7)
            assert world.network.faults.calls[agent(decode), "post"] == posts
            if state is not S.FINISHING:
                assert not decode.quarantine
                at_base(decode)
            if not held:
                assert consumer.is_filled(OURS, REUSED)
        # A finish stage that hangs is ended with its engine.
        assert not decode.quarantine
        at_base(prefill)


@pytest.mark.parametrize("is_accepted", [False, True])
@pytest.mark.parametrize("is_ready", [False, True])
async def test_o5_an_open_offer_is_ended_by_time_alone(
    autojump_clock, is_ready, is_accepted
) -> None:
    """Computed or not, accepted or not: one lease after the last word of its reader."""
    world, producer, consumer = World(), Pool(), Pool()
    async with (
        world.engine("p", producer, lease_s=3.0) as prefill,
        world.engine("c", consumer, drain_grace_s=0.5) as decode,
    ):
        blocks = producer.stamp([1, 2], num_tokens=7)
        after = None if is_ready else forever
        offer = prefill.offer("r", blocks, num_tokens=7, after=after)
        if is_accepted:
            world.network.freeze(agent(prefill))
            async with trio.open_nursery() as nursery:

                async def pull() -> None:
                    with trio.CancelScope() as scope:
                        nursery.start_soon(fall_silent, scope)
                        await decode.pull(offer.ticket, {GROUP: OURS})

                async def fall_silent(scope: trio.CancelScope) -> None:
                    await trio.sleep(0.5)
                    world.streams.freeze(*address(prefill))
                    scope.cancel()

                nursery.start_soon(pull)
        started = trio.current_time()
        assert await offer.wait() is OfferOutcome.EXPIRED
        assert trio.current_time() - started <= 3.0
        world.network.thaw(agent(prefill))
        world.streams.thaw(*address(prefill))
        await decode.quarantine.wait_empty()
        await trio.sleep(1)
        at_base(prefill)
