"""One rank of the producer: runs prompts, offers or pushes their blocks.

Rank 0 prefills a prompt, and leaves the cache in a file if there are other ranks.
Then every rank takes its heads and offers them, each for itself, under the same
request and in the same blocks; the router merges their tickets into one. Or it pushes
them to the consumer, which expects them. Or rank 0, if it is the only one, streams
them: each layer leaves as soon as it is computed. A rank holds its blocks until its
offer or push has ended, whichever way, and says how it did; the router knows when the
last has, and has rank 0 free them.

Orders: ``prefill``, ``stream`` and ``free`` (rank 0 only), ``offer``, ``push``.
Answers: ``ready``, ``prefilled``, ``ticket`` and ``outcome``.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import trio
from generate import prefill
from router_line import RouterLine
from safetensors.torch import save_file
from side import PUSH_S, one_line, open_side, side_arguments

from kvferry.engine import FerryError

if TYPE_CHECKING:
    import argparse

    from side import Scheduler, Side


async def main(arguments: argparse.Namespace) -> None:
    """Serves the router until it closes the line."""
    held: dict[str, dict[str, list[int | None]]] = {}
    async with (
        open_side(RouterLine.open(), arguments) as side,
        trio.open_nursery() as nursery,
    ):
        side.say_ready()
        while (order := await side.router.next_order()) is not None:
            request = order["request"]
            match order["op"]:
                case "prefill":
                    held[request] = await prefill_prompt(side, order)
                case "offer":
                    nursery.start_soon(say_how_it_ended, side, offered(side, order))
                case "push":
                    nursery.start_soon(push, side, order)
                case "stream":
                    held[request] = await stream_prompt(side, order)
                case "free":
                    side.scheduler.give_back(held.pop(request))
                case unknown:
                    raise ValueError(f"no such order: {unknown!r}")
        nursery.cancel_scope.cancel()


async def prefill_prompt(
    side: Side, order: dict[str, Any]
) -> dict[str, list[int | None]]:
    """Prefills one prompt into blocks of its own; returns them by group."""
    started_at = perf_counter()
    scheduler = side.scheduler
    token_ids = scheduler.prompt(order["question"])
    tables = scheduler.allocate(len(token_ids))
    cache = scheduler.cache(tables)
    first_token = await scheduler.run(prefill, scheduler.model, cache, token_ids)
    ended_at = perf_counter()
    scheduler.save_states(cache, tables)
    drop_behind_window(scheduler, tables, len(token_ids))
    if order["share"]:
        save_file(scheduler.whole.copied_out(tables), order["share"])
    side.router.say(
        "prefilled",
        tables=tables,
        first_token=first_token,
        prompt_tokens=len(token_ids),
        prefill_s=ended_at - started_at,
        ended_at=ended_at,
    )
    return tables


async def stream_prompt(
    side: Side, order: dict[str, Any]
) -> dict[str, list[int | None]]:
    """Prefills one prompt and pushes it at the same time; returns its blocks by group.

    `prefill_streamed` says how; the block of `push_stream` ends when decode has it all.
    """
    # Imported when needed: a rank without the model does without transformers.
    from streaming import prefill_streamed  # noqa: PLC0415

    started_at = perf_counter()
    scheduler = side.scheduler
    token_ids = scheduler.prompt(order["question"])
    tables = scheduler.allocate(len(token_ids))
    async with side.engine.push_stream(
        order["request"], tables, num_tokens=len(token_ids), deadline_s=PUSH_S
    ) as stream:
        first_token = await prefill_streamed(
            scheduler.model, scheduler.whole, tables, token_ids, stream
        )
        ended_at = perf_counter()
        written = stream.written_bytes
    drop_behind_window(scheduler, tables, len(token_ids))
    side.router.say(
        "prefilled",
        tables=tables,
        first_token=first_token,
        prompt_tokens=len(token_ids),
        prefill_s=ended_at - started_at,
        ended_at=ended_at,
        written_bytes=written,
    )
    side.router.say("outcome", outcome="pushed")
    return tables


def drop_behind_window(
    scheduler: Scheduler, tables: dict[str, list[int | None]], tokens: int
) -> None:
    """Frees the blocks that no later token looks at; what was in them is gone."""
    for name, pool in scheduler.whole.paged.items():
        count = pool.group.first_needed(tokens) // pool.block_size
        dropped = [block for block in tables[name][:count] if block is not None]
        pool.poison(dropped)
        scheduler.free[name].give_back(dropped)
        tables[name][:count] = [None] * count


def offered(side: Side, order: dict[str, Any]) -> Any:  # noqa: ANN401
    """Puts this rank's part of a prompt on offer, and sends the ticket."""
    side.take_share(order["tables"], order["share"])
    offer = side.engine.offer(
        order["request"], order["tables"], num_tokens=order["prompt_tokens"]
    )
    side.router.say("ticket", ticket=offer.ticket.to_dict())
    return offer


async def push(side: Side, order: dict[str, Any]) -> None:
    """Pushes this rank's part of a prompt, and says how that ended."""
    side.take_share(order["tables"], order["share"])
    outcome = "pushed"
    try:
        await side.engine.push(
            order["request"],
            order["tables"],
            num_tokens=order["prompt_tokens"],
            deadline_s=PUSH_S,
        )
    except FerryError as error:
        outcome = one_line(error)
    side.router.say("outcome", outcome=outcome)


async def say_how_it_ended(side: Side, offer: Any) -> None:  # noqa: ANN401
    """Waits until nobody can read the blocks any more."""
    outcome = await offer.wait()
    side.router.say("outcome", outcome=outcome.value)


if __name__ == "__main__":
    trio.run(main, side_arguments("prefill", tokens=1800, seed=1).parse_args())
