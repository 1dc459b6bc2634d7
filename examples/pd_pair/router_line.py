"""A child's side of the conversation with the router: JSON lines in and out.

Orders come on standard input, answers go to standard output. Only answers may go
there, so `RouterLine.open` takes the descriptor away from everybody else: what
a native library prints ends up on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Self, TextIO

import structlog
import trio

__all__ = ("RouterLine", "json_logger")

_READ_BYTES = 65536


class RouterLine:
    """Reads orders and says answers, one JSON object a line."""

    def __init__(self, orders: trio.abc.ReceiveStream, answers: TextIO) -> None:
        self._orders = orders
        self._received = bytearray()
        self._answers = answers

    @classmethod
    def open(cls) -> Self:
        """Claims standard output for answers, and for nothing else."""
        sys.stdout.flush()
        answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        return cls(trio.lowlevel.FdStream(os.dup(0)), answers)

    def say(self, event: str, **fields: object) -> None:
        """Sends one answer; it is short, so the pipe takes it at once."""
        self._answers.write(json.dumps({"event": event, **fields}) + "\n")
        self._answers.flush()

    async def next_order(self) -> dict[str, Any] | None:
        """Waits for an order; None once the router closes the pipe, or is gone."""
        while b"\n" not in self._received:
            more = await self._orders.receive_some(_READ_BYTES)
            if not more:
                return None
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        order: dict[str, Any] = json.loads(line)
        return order


def json_logger() -> Any:  # noqa: ANN401 - structlog's loggers are lazy proxies
    """A structlog logger that writes JSON lines to standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=repr),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return structlog.get_logger()
