"""The router: passes requests on, and cannot read what it passes.

It holds no secret, and of a message it looks at nothing but the request id and whom it
is for: ``prefill``, ``decode``, or the ``client`` that has asked. Several instances of
one kind take messages from one queue in turn; what comes before any is there waits.

Usage: ``router.py SOCKET``; it ends when its standard input does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from lines import listen
from router_line import RouterLine

if TYPE_CHECKING:
    from lines import Line

_QUEUED = 256


class Router:
    """Queues by kind of instance, and who has asked for what."""

    def __init__(self) -> None:
        self._queues = {
            kind: trio.open_memory_channel[dict[str, Any]](_QUEUED)
            for kind in ("prefill", "decode")
        }
        self._asked: dict[str, Line] = {}

    async def serve(self, line: Line) -> None:
        """Serves one connection; it first says what it is."""
        if (hello := await line.hear()) is None:
            return
        async with trio.open_nursery() as nursery:
            if hello["kind"] != "client":
                nursery.start_soon(self._feed, hello["kind"], line)
            while (message := await line.hear()) is not None:
                if hello["kind"] == "client":
                    self._asked[message["request"]] = line
                await self._pass_on(message)
            nursery.cancel_scope.cancel()

    async def _pass_on(self, message: dict[str, Any]) -> None:
        if message["to"] != "client":
            queue, _ = self._queues[message["to"]]
            await queue.send(message)
        elif client := self._asked.pop(message["request"], None):
            await client.say(**message)

    async def _feed(self, kind: str, line: Line) -> None:
        _, queue = self._queues[kind]
        while True:
            await line.say(**await queue.receive())


async def main(path: Path) -> None:
    """Routes until the launcher is done with us, or gone."""
    launcher = RouterLine.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen, path, Router().serve)
        while await launcher.next_order() is not None:
            pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))
