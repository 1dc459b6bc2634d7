"""Text that somebody else may have written, made fit for a log."""

from __future__ import annotations

__all__ = ("printable",)


def printable(text: str) -> str:
    """The text on one line, for a log or a terminal: what does not print is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
