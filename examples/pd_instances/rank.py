"""What the ranks of both instances have in common: how one begins, and how it gets work.

Rank 0 leads. It serves the router, runs the model, decides which blocks a request gets,
and tells the other ranks over a line of its own: one way, one order a request. What came
of it nobody needs to tell: that is what `engine.agree` is for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import trio
from lines import Line, dial, listen
from router_line import RouterLine
from side import one_line, open_side, side_arguments

from kvferry.engine import FerryError

if TYPE_CHECKING:
    import argparse

    from side import Side

    Order = dict[str, Any]

__all__ = ("Lead", "Work", "rank_arguments", "run_rank", "say_failed")


class Work(Protocol):
    """What a rank of one side does."""

    async def serve(self, lead: Lead, message: Order) -> None:
        """Serves one message of the router, on rank 0."""

    async def take_part(self, side: Side, order: Order) -> None:
        """Does the part of a rank that does not lead."""


@dataclass
class Lead:
    """What only rank 0 has.

    Attributes:
        side: As every rank.
        router: The line to the router.
        others: The lines to the other ranks that are there.
    """

    side: Side
    router: Line
    others: list[Line] = field(default_factory=list)

    async def serve(self, line: Line) -> None:
        """Serves another rank: where to join us, and from now on its orders."""
        self.others.append(line)
        await line.say(join=self.side.engine.address)
        while await line.hear() is not None:
            pass
        self.others.remove(line)

    async def tell(self, order: Order) -> None:
        """Gives all other ranks their part of a request."""
        for line in tuple(self.others):
            await line.say(**order)

    async def end(self, request: str, tables: dict[str, list[int | None]]) -> None:
        """Frees a request's blocks, also those of one that has failed.

        A rank takes no order before it is through with the requests that were ended
        before: so no rank gets a block for the next request too early.
        """
        await self.tell({"request": request, "is_over": True})
        self.side.scheduler.give_back(tables)


def rank_arguments(engine_id: str, *, seed: int) -> argparse.ArgumentParser:
    """The options of a rank."""
    parser = side_arguments(engine_id, tokens=4096, seed=seed)
    parser.add_argument("--folder", type=Path, help="for sockets and files")
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    parser.add_argument("--steps", type=int, default=32)
    return parser


async def run_rank(arguments: argparse.Namespace, work: Work) -> None:
    """Runs a rank until the launcher closes its standard input, or is gone."""
    launcher = RouterLine.open()
    run = run_lead if arguments.tp.startswith("0/") else run_other
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, launcher, arguments, work)
        while await launcher.next_order() is not None:
            pass
        nursery.cancel_scope.cancel()


async def run_lead(
    launcher: RouterLine,
    arguments: argparse.Namespace,
    work: Work,
) -> None:
    """Leads: the others join our engine, then the router gives us work."""
    engine_id, folder = arguments.engine_id, arguments.folder
    async with (
        open_side(launcher, arguments, secret=_secret()) as side,
        trio.open_nursery() as nursery,
    ):
        lead = Lead(side, await dial(folder / "router"))
        await nursery.start(listen, folder / engine_id, lead.serve)
        await side.engine.instance_ready()
        await lead.router.say(kind=engine_id)
        launcher.say("ready")
        while (message := await lead.router.hear()) is not None:
            nursery.start_soon(work.serve, lead, message)


async def run_other(
    launcher: RouterLine,
    arguments: argparse.Namespace,
    work: Work,
) -> None:
    """Joins the lead, and takes part in what it says."""
    line = await dial(arguments.folder / arguments.engine_id)
    if (told := await line.hear()) is None:
        raise ConnectionError("the lead has gone")
    host, port = told["join"]
    ended: dict[str, trio.Event] = {}
    async with (
        open_side(launcher, arguments, secret=_secret(), join=(host, port)) as side,
        trio.open_nursery() as nursery,
    ):
        await side.engine.instance_ready()
        launcher.say("ready")
        while (order := await line.hear()) is not None:
            request = order["request"]
            if "is_over" not in order:
                ended[request] = trio.Event()
                nursery.start_soon(_part, work, side, order, ended[request])
            elif request in ended:
                await ended.pop(request).wait()


async def _part(work: Work, side: Side, order: Order, ended: trio.Event) -> None:
    """One request's part; if it fails, that is the request's end and not the rank's."""
    try:
        await work.take_part(side, order)
    except FerryError as error:
        say_failed(side, order["request"], error)
    ended.set()


def say_failed(side: Side, request: str, error: FerryError) -> None:
    """Tells the launcher, for people to read."""
    cause = f"{type(error).__name__}: {error.detail} (at {error.origin})"
    side.router.say("failed", request=request, error=one_line(error), cause=cause)


def _secret() -> bytes:
    """By the environment: a command line can be seen by everybody on the host."""
    return bytes.fromhex(os.environ["KVFERRY_SECRET"])
