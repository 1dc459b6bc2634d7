"""The protocol version."""

from __future__ import annotations

from kvferry.protocol import version


def test_the_version_is_a_whole_number_that_its_history_ends_with() -> None:
    """Each version says why it was made."""
    assert isinstance(version.PROTOCOL_VERSION, int)
    with open(version.__file__, encoding="utf-8") as file:
        numbers = [line.split(".")[0] for line in file if line[:1].isdigit()]
    assert numbers == [str(n) for n in range(1, version.PROTOCOL_VERSION + 1)]
