"""`Looks`: what is known of them after so many."""

from __future__ import annotations

import pytest

from kvferry.engine.fabric.looks import TELLING_LOOKS, Looks

SHORT_S, LONG_S = 0.0, 1.0
NEVER = 1e9
"""Seconds in which one long look is forgotten: no clock decides here."""


@pytest.fixture
def looks() -> Looks:
    """Of a thread."""
    looks = Looks(long_s=0.5, home_s=NEVER)
    looks.begin_aside()
    return looks


def see(looks: Looks, took_s: float, *, times: int = 1, has_news: bool = True) -> bool:
    """Whether the loop may have it behind the last of them."""
    return [looks.thread_took(took_s, has_news=has_news) for _ in range(times)][-1]


def test_many_long_ones_tell_whatever_is_between_them(looks) -> None:
    """For good: no number of short ones says otherwise."""
    for number in range(TELLING_LOOKS):
        assert looks.are_long is None
        assert not see(looks, SHORT_S, times=TELLING_LOOKS - 1)
        assert not see(looks, LONG_S), number
    assert looks.are_long
    assert not see(looks, SHORT_S, times=3 * TELLING_LOOKS)
    assert looks.are_long


def test_short_ones_tell_that_come_in_a_row_and_with_news(looks) -> None:
    """The loop has them at once then, though one has just been long."""
    see(looks, LONG_S)
    see(looks, SHORT_S, times=3 * TELLING_LOOKS, has_news=False)
    assert not see(looks, SHORT_S, times=TELLING_LOOKS - 1)
    assert looks.are_long is None
    assert see(looks, SHORT_S)
    assert looks.are_long is False
    see(looks, LONG_S, times=TELLING_LOOKS)
    assert looks.are_long


def test_each_thread_begins_anew(looks) -> None:
    """A few long ones each time say nothing of the transport."""
    for _ in range(3):
        see(looks, LONG_S, times=TELLING_LOOKS - 1)
        looks.begin_aside()
        see(looks, SHORT_S, times=TELLING_LOOKS - 1)
        looks.begin_aside()
    assert looks.are_long is None


@pytest.mark.parametrize("home_s", [0.0, NEVER])
def test_the_loop_s_second_long_one_wants_a_thread_if_the_first_is_not_long_ago(
    home_s,
) -> None:
    """Or its first, where they are known to be long; short ones never do."""
    looks = Looks(long_s=0.5, home_s=home_s)
    took = [looks.loop_took(took_s) for took_s in (SHORT_S, LONG_S, SHORT_S, LONG_S)]
    assert took == [False, False, False, home_s == NEVER]
    looks = Looks(long_s=0.5, home_s=home_s)
    looks.are_long = True
    assert [looks.loop_took(took_s) for took_s in (SHORT_S, LONG_S)] == [False, True]


def test_a_thread_may_leave_when_none_was_long_for_a_while(looks) -> None:
    """Not right behind a long one, however short the while is."""
    assert not see(looks, SHORT_S)
    looks.home_s = 0.0
    assert see(looks, SHORT_S)
    assert not see(looks, LONG_S)
    assert see(looks, SHORT_S)
