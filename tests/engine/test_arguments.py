"""What a caller passes: no request's own mistake reaches a link that others use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import trio

from kvferry.engine import MisuseError, Span
from tests.kit import GROUP, Pool, World
from tests.pushing import OURS, THEIRS, TOKENS, begin_landing, begin_push

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from kvferry.engine import TransferEngine

IDS = ("", "x" * 257, "\ud800", 7, None)
NUMBERS = (2**40, -(2**40), 2**63, 4.0, "4", None)


def expect(engine: TransferEngine, source: TransferEngine, **told: Any) -> Awaitable:
    told = {"request_id": "r"} | told
    return engine.expect(source.contact, {GROUP: OURS}, **told)


def push(engine: TransferEngine, _: TransferEngine, **told: Any) -> Awaitable:
    told = {"request_id": "r", "num_tokens": TOKENS} | told
    return engine.push(told.pop("request_id"), {GROUP: THEIRS}, **told)


async def pull(engine: TransferEngine, source: TransferEngine, **told: Any) -> None:
    offer = source.offer("r", {GROUP: THEIRS}, num_tokens=TOKENS)
    try:
        await engine.pull(offer.ticket, {GROUP: OURS}, **told)
    finally:
        offer.withdraw()


BAD = (
    *((expect, {"request_id": id_}) for id_ in IDS if id_ is not None),
    *((push, {"request_id": id_}) for id_ in IDS),
    *((expect, {"computed_tokens": number}) for number in NUMBERS),
    *((pull, {"computed_tokens": number}) for number in NUMBERS),
    *((pull, {"priority": number}) for number in ("high", float("nan"), None)),
    *((push, {"num_tokens": number}) for number in NUMBERS),
)


@pytest.mark.parametrize(("call", "told"), BAD)
async def test_what_no_message_can_carry_is_refused_and_harms_nobody(
    autojump_clock, call, told
) -> None:
    """Before anybody hears of it: a peer would end the link, and all that is on it."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        ends = (prefill, decode) if call is push else (decode, prefill)
        async with trio.open_nursery() as nursery:
            good = begin_landing(nursery, decode, prefill, "good")
            await trio.sleep(0.5)
            with pytest.raises(MisuseError):
                await call(*ends, **told)
            begin_push(nursery, prefill, producer, "good")
        assert good.error is None
        assert not world.logged("internal_error")


async def test_whole_numbers_of_any_kind_are_welcome(autojump_clock) -> None:
    """Schedulers count with numpy and torch."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        span = Span(np.array(OURS[1:]), np.int64(4))
        blocks = producer.stamp(THEIRS, num_tokens=TOKENS)
        async with trio.open_nursery() as nursery:
            landing = begin_landing(
                nursery,
                decode,
                prefill,
                blocks={GROUP: span},
                computed_tokens=torch.tensor(4),
            )
            await prefill.push("r", blocks, num_tokens=np.int32(TOKENS))
        assert landing.report.num_tokens == TOKENS
        offer = prefill.offer("s", blocks, num_tokens=np.int64(TOKENS))
        report = await decode.pull(
            offer.ticket,
            {GROUP: span},
            computed_tokens=np.int64(4),
            priority=np.int64(1),
        )
        assert report.computed_tokens == 4
        consumer.check(OURS[1:], num_tokens=TOKENS, first_token=4)


async def test_an_error_that_is_no_unicode_is_told_to_the_consumer(
    autojump_clock,
) -> None:
    """The body's own words: names of files, for one, may be anything."""
    world, producer, consumer = World(), Pool(), Pool()
    async with world.pair(producer, consumer) as (prefill, decode):
        async with trio.open_nursery() as nursery:
            landing = begin_landing(nursery, decode, prefill)
            await trio.sleep(0.5)
            blocks = producer.stamp(THEIRS, num_tokens=TOKENS)
            with pytest.raises(OSError, match="gone"):
                async with prefill.push_stream("r", blocks, num_tokens=TOKENS):
                    raise OSError("\udcff is gone" + 2000 * "\udcff")
        assert "\\udcff is gone" in str(landing.error)
        assert not world.logged("internal_error")
