"""One rank of the consumer: gets a prompt's blocks, and rank 0 goes on from there.

Rank 0 admits a prompt: it looks up what is held already and takes blocks for the
rest. Then every rank pulls its heads, or lets them be pushed, each for itself. Rank 0 continues greedily:
alone, in the very blocks that were filled; with other ranks, in a pool of its own
that it puts together from what they left in files. It writes what the comparison
needs to a file. Blocks are kept, so that a later prompt with the same beginning
finds them. The first failure ends the process: one typed line, exit status 1.

Orders: ``admit`` and ``continue`` (rank 0 only), ``pull``, ``expect``.
Answers: ``ready``, ``admitted``, ``received``, ``continued`` and ``failed``.
"""

from __future__ import annotations

import math
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import trio
from continuing import continued
from generate import PREFILL_CHUNK
from router_line import RouterLine
from side import PUSH_S, one_line, open_side, side_arguments

from kvferry.engine import FerryError, Span, TransferReport
from kvferry.protocol import Contact, Ticket

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Iterable, Sequence

    from pools import PagedPool
    from side import Scheduler, Side


class Admitted(NamedTuple):
    """A request that has its blocks.

    Attributes:
        token_ids: The prompt.
        tables: By group its blocks from token 0 on, None where no token is needed.
    """

    token_ids: list[int]
    tables: dict[str, list[int | None]]


class Prefix(NamedTuple):
    """What an earlier request left of a prompt.

    Attributes:
        tokens: How many of the first tokens need not be pulled.
        tables: Of the earlier request.
    """

    tokens: int
    tables: dict[str, list[int | None]]


async def main(arguments: argparse.Namespace) -> int:
    """Serves the router until it closes the line, or a transfer fails.

    Returns:
        The exit status.
    """
    failure: str | None = None
    held: dict[str, Admitted] = {}
    async with open_side(RouterLine.open(), arguments) as side:
        side.say_ready()
        while (order := await side.router.next_order()) is not None:
            request = order["request"]
            try:
                match order["op"]:
                    case "admit":
                        held[request] = admitted(side, held, order)
                    case "pull":
                        await receive(side, order, pull(side, order))
                    case "expect":
                        await receive(side, order, expect(side, order))
                    case "continue":
                        await continue_prompt(side, held[request], order)
                    case unknown:
                        raise ValueError(f"no such order: {unknown!r}")
            except FerryError as error:
                failure = one_line(error)
                side.router.say("failed", request=request, error=failure)
                break
    if failure is None:
        return 0
    print(failure, file=sys.stderr)
    return 1


def admitted(side: Side, held: dict[str, Admitted], order: dict[str, Any]) -> Admitted:
    """Finds what is held of a prompt, and takes blocks for all else.

    The blocks that the continuation will fill are part of the span: a real
    scheduler has allocated them by then, and their slots come back zeroed.
    """
    scheduler = side.scheduler
    token_ids = scheduler.prompt(order["question"])
    tokens = len(token_ids)
    prefix = longest_prefix(scheduler, held.values(), token_ids)
    tables: dict[str, list[int | None]] = {}
    spans: dict[str, dict[str, Any]] = {}
    for name, pool in scheduler.whole.paged.items():
        first = pool.group.first_needed(tokens) // pool.block_size
        last = pool.blocks_for(tokens + order["steps"])
        begin = prefix.tokens // pool.block_size
        # None for what lies behind the window, whoever would have had it.
        shared: list[int | None] = [None] * min(first, begin)
        shared += prefix.tables.get(name, [])[first:begin]
        pulled: list[int | None] = [None] * max(0, first - begin)
        pulled += scheduler.free[name].take(last - max(first, begin))
        tables[name] = [*shared, *pulled]
        spans[name] = {"block_ids": pulled, "first_token": prefix.tokens}
    for name in scheduler.whole.states:
        tables[name] = [*scheduler.free[name].take(1)]
        spans[name] = {"block_ids": tables[name], "first_token": 0}
    side.router.say(
        "admitted", tables=tables, spans=spans, computed_tokens=prefix.tokens
    )
    return Admitted(token_ids, tables)


def longest_prefix(
    scheduler: Scheduler, held: Iterable[Admitted], token_ids: Sequence[int]
) -> Prefix:
    """What of a prompt need not be pulled, thanks to an earlier request.

    Rounded down to whole blocks, as everywhere, and to whole prefill chunks, so
    that their bits are the ones a fresh prefill would give. Never the whole
    prompt: that would leave nothing to show. And nothing if the model has states:
    the state of an earlier request has advanced beyond any common beginning.
    """
    if scheduler.whole.states:
        return Prefix(0, {})
    pools = scheduler.whole.paged.values()
    grain = math.lcm(PREFILL_CHUNK, *[pool.block_size for pool in pools])
    best = Prefix(0, {})
    for earlier in held:
        limit = min(len(earlier.token_ids), len(token_ids) - 1)
        same = next(
            (i for i in range(limit) if earlier.token_ids[i] != token_ids[i]), limit
        )
        tokens = same // grain * grain
        if tokens > best.tokens and all(
            holds(pool, earlier, tokens, len(token_ids)) for pool in pools
        ):
            best = Prefix(tokens, earlier.tables)
    return best


def holds(pool: PagedPool, earlier: Admitted, tokens: int, wanted: int) -> bool:
    """Are the blocks there that a prompt of ``wanted`` tokens needs of these?"""
    first = pool.group.first_needed(wanted) // pool.block_size
    last = tokens // pool.block_size
    return None not in earlier.tables[pool.group.name][first:last]


async def pull(side: Side, order: dict[str, Any]) -> TransferReport:
    """Pulls this rank's share of what is missing of a prompt."""
    return await side.engine.pull(
        Ticket.from_dict(order["ticket"]),
        destination(order),
        computed_tokens=order["computed_tokens"],
    )


async def expect(side: Side, order: dict[str, Any]) -> TransferReport:
    """Lets this rank's share be pushed, whenever the prefill comes to it."""
    return await side.engine.expect(
        Contact.from_dict(order["contact"]),
        destination(order),
        request_id=order["request"],
        computed_tokens=order["computed_tokens"],
        deadline_s=PUSH_S,
    )


def destination(order: dict[str, Any]) -> dict[str, Span]:
    """The blocks that are to be filled."""
    return {
        name: Span(span["block_ids"], first_token=span["first_token"])
        for name, span in order["spans"].items()
    }


async def receive(
    side: Side, order: dict[str, Any], transfer: Awaitable[TransferReport]
) -> None:
    """Gets this rank's share, and says so.

    Raises:
        FerryError: It failed; the blocks hold nothing to be trusted.
    """
    report = await transfer
    ready_at = perf_counter()
    side.note_used(order["tables"])
    if order["share"]:
        side.save_share(order["tables"], order["share"])
    side.router.say(
        "received",
        others_untouched=side.pools.is_untouched_outside(side.used),
        report=report_fields(report),
        ready_at=ready_at,
    )


async def continue_prompt(side: Side, request: Admitted, order: dict[str, Any]) -> None:
    """Continues a prompt that has been pulled, and writes down how it went."""
    found = await continued(
        side,
        request.tables,
        tokens=len(request.token_ids),
        first_token=order["first_token"],
        steps=order["steps"],
        shares=order["shares"],
        result=order["result"],
    )
    side.router.say("continued", steps=order["steps"], **found._asdict())


def report_fields(report: TransferReport) -> dict[str, Any]:
    """The parts of a report that the summary prints."""
    return {
        "bytes": report.bytes,
        "descriptors": report.descriptors,
        "waves": report.waves,
        "zeroed_tokens": report.zeroed_tokens,
        "phases_s": dict(report.phases_s),
    }


if __name__ == "__main__":
    parsed = side_arguments("decode", tokens=2400, seed=2).parse_args()
    sys.exit(trio.run(main, parsed))
