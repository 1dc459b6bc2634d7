"""Text for logs: one line, whatever a peer has put into it."""

from __future__ import annotations

from kvferry.protocol.text import printable


def test_what_prints_stays_as_it_is() -> None:
    """Words of any script, and spaces."""
    assert printable("prefill 0: préfixe, 前缀") == "prefill 0: préfixe, 前缀"


def test_h1_what_does_not_print_is_escaped() -> None:
    """Neither a line break nor a terminal's commands get into a log."""
    told = printable("a\nb\r\x1b[2J\u2028\ud800\u202e")
    assert told == r"a\nb\r\x1b[2J\u2028\ud800\u202e"
    assert told.isprintable()
