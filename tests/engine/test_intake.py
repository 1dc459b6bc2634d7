"""Notices: what shows a token is let in, once; a flood of others costs nobody his own."""

from __future__ import annotations

import pytest
import trio

from kvferry.engine.fabric import Notice
from kvferry.engine.intake import MAX_PARTS, MOST_AT_ONCE, Intake
from kvferry.protocol.lifecycle.landing import LandingMachine
from kvferry.protocol.notices import AHEAD, TOKEN_BYTES, Written, encode_notice
from tests.kit import Pool, World, agent
from tests.pushing import OURS, begin_landing, begin_push

TOKEN, OTHER = b"t" * TOKEN_BYTES, b"o" * TOKEN_BYTES


def notice(token: bytes, part: int, sender: str = "p") -> Notice:
    return Notice(sender, encode_notice(Written(token, part)))


async def test_parts_are_handed_over_in_order_and_once() -> None:
    """To whoever has chosen the token; doubled ones are strays."""
    intake, heard = Intake(log=World().logger()), []
    intake.expect(TOKEN, heard.append)
    for part in (AHEAD, 3, 0, 3, AHEAD, 2**31 - 1, MAX_PARTS, MAX_PARTS - 1, 0):
        intake.take(notice(TOKEN, part))
    assert heard == []
    assert not intake.hand_over()
    assert heard == [AHEAD, 3, 0, MAX_PARTS - 1]
    assert intake.strays == 5


async def test_what_waits_when_its_token_is_forgotten_is_a_stray() -> None:
    """Also if the very same token were chosen again."""
    intake, heard = Intake(log=World().logger()), []
    intake.expect(TOKEN, heard.append)
    intake.take(notice(TOKEN, 0))
    intake.forget(TOKEN)
    intake.forget(TOKEN)
    intake.expect(TOKEN, heard.append)
    assert not intake.hand_over()
    assert (heard, intake.strays, intake.tokens) == ([], 1, (TOKEN,))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"garbage",
        TOKEN,
        encode_notice(Written(TOKEN, 0)) + b"x",
        encode_notice(Written(TOKEN, 0))[:-1],
        encode_notice(Written(TOKEN, 0)).replace(b"written", b"wrotten"),
        encode_notice(Written(OTHER, 0)),
        encode_notice(Written(TOKEN, 0)).replace(b"\x00", b"\xfe"),
        bytes(4096),
    ],
)
async def test_h1_garbage_is_dropped_and_counted(payload) -> None:
    """Nothing of it reaches anybody."""
    world = World()
    intake = Intake(log=world.logger())
    intake.expect(TOKEN, lambda _part: pytest.fail("handed over"))
    intake.take(Notice("\x1b[2J\nevil", payload))
    assert not intake.hand_over()
    assert intake.strays == 1
    (line,) = world.logged("stray_notice")
    assert line["sender"] == r"\x1b[2J\nevil"


async def test_h1_a_flood_is_logged_once_and_drops_no_others_notice(
    autojump_clock,
) -> None:
    """Not even one that comes under the name of the peer whose notices are awaited."""
    world = World()
    intake, heard = Intake(log=world.logger()), []
    intake.expect(TOKEN, heard.append)
    for number in range(20_000):
        intake.take(notice(OTHER, number, sender="p"))
        if number % 100 == 0:
            intake.take(notice(TOKEN, number, sender="p"))
    assert len(world.logged("stray_notice")) == 1
    while intake.hand_over():
        pass
    assert heard == list(range(0, 20_000, 100))
    assert intake.strays == 20_000


async def test_h1_one_round_tells_of_a_bounded_number() -> None:
    """A producer that sends all its parts at once holds up nobody else's."""
    intake, heard = Intake(log=World().logger()), []
    intake.expect(TOKEN, heard.append)
    for part in range(3 * MOST_AT_ONCE - 1):
        intake.take(notice(TOKEN, part))
    for round_ in (1, 2, 3):
        assert intake.hand_over() == (round_ < 3)
        assert len(heard) == min(round_ * MOST_AT_ONCE, 3 * MOST_AT_ONCE - 1)


def test_the_bound_of_parts_is_the_lifecycles() -> None:
    """What the machine would count is let in."""
    assert LandingMachine.__init__.__kwdefaults__["max_parts"] == MAX_PARTS


async def test_h1_a_push_lands_in_the_middle_of_a_flood(autojump_clock) -> None:
    """Thousands of forged notices between its own, and it is as fast as ever."""
    world, source, target = World(), Pool(), Pool()
    async with (
        world.pair(source, target) as (prefill, decode),
        trio.open_nursery() as nursery,
    ):
        stranger = world.network.fabric("stranger")
        name = stranger.connect(decode._fabric.metadata())

        async def flood() -> None:
            while True:
                for part in range(500):
                    stranger.notify(name, encode_notice(Written(OTHER, part)))
                    stranger.notify(name, b"\xc1" * 48)
                await trio.sleep(0.01)

        nursery.start_soon(flood)
        landing = begin_landing(nursery, decode, prefill, deadline_s=5)
        push = begin_push(nursery, prefill, source, deadline_s=5)
        await landing.over.wait()
        await push.over.wait()
        assert (landing.error, push.error) == (None, None)
        target.check(OURS, num_tokens=10)
        assert decode.statistics()["stray_notices"] >= 1000
        assert len(world.logged("stray_notice")) <= 2
        assert agent(prefill) not in {e["sender"] for e in world.logged("stray_notice")}
        nursery.cancel_scope.cancel()
