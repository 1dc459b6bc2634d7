"""A rank of the prefill instance.

Rank 0 prefills a prompt and hands the other ranks their heads in a file (see pd_pair's
README: the arithmetic is not tensor-parallel). Then every rank offers its heads under the
same request id. Rank 0 does not wait for the others: its ticket is good for the whole
instance, and goes to decode by the router at once.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from generate import prefill
from rank import Lead, rank_arguments, run_rank, say_failed
from safetensors.torch import save_file
from side import PUSH_S

from kvferry.engine import FerryError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable

    from side import Side

    Order = dict[str, Any]
    Say = Callable[[dict[str, Any]], Awaitable[None]]

HOLD_S = 120.0


class Producer:
    """What a rank of prefill does."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    async def serve(self, lead: Lead, message: Order) -> None:
        """Serves one question, until its blocks are free again; rank 0."""
        request, side = message["request"], lead.side
        scheduler = side.scheduler
        token_ids = scheduler.prompt(message["body"]["question"])
        tokens = len(token_ids)
        tables = scheduler.allocate(tokens)
        cache = scheduler.cache(tables)
        first_token = await scheduler.run(prefill, scheduler.model, cache, token_ids)
        share = self._saved_share(side, request, tables)
        order = {
            "request": request,
            "tables": tables,
            "tokens": tokens,
            "share": share,
        }

        async def say(where: dict[str, Any]) -> None:
            body = {"tokens": tokens, "first_token": first_token, **where}
            await lead.router.say(request=request, to="decode", body=body)

        # If a rank has been lost: until another has taken its place.
        await side.engine.instance_ready()
        await lead.tell(order)
        try:
            await self._hand_over(side, order, say)
        except FerryError as error:
            say_failed(side, request, error)
            body = {"error": str(error)}
            await lead.router.say(request=request, to="client", body=body)
        await lead.end(request, tables)

    async def take_part(self, side: Side, order: Order) -> None:
        """Hands this rank's heads over; nobody waits for its ticket."""
        await self._hand_over(side, order, _say_nothing)

    async def _hand_over(self, side: Side, order: Order, say: Say) -> None:
        """Offers or pushes this rank's heads; waits until all ranks' have gone.

        Args:
            side: This rank.
            order: The request.
            say: Called with what decode must know.

        Raises:
            FerryError: A rank has failed: the same one on all.
        """
        side.take_share(order["tables"], order["share"])
        if self._arguments.mode == "push":
            outcome = await self._push(side, order, say)
        else:
            outcome = await self._offer(side, order, say)
        side.router.say("outcome", request=order["request"], outcome=outcome)

    async def _offer(self, side: Side, order: Order, say: Say) -> str:
        engine, request = side.engine, order["request"]
        offer = engine.offer(request, order["tables"], num_tokens=order["tokens"])
        await say({"ticket": offer.ticket.to_dict()})
        try:
            key = f"hold {request}"
            await engine.agree(key, offer.released, deadline_s=HOLD_S)
        finally:
            offer.withdraw()
        return "released"

    async def _push(self, side: Side, order: Order, say: Say) -> str:
        engine, request = side.engine, order["request"]
        await say({"engine_id": engine.config.engine_id, "address": engine.address})
        push = partial(
            engine.push,
            request,
            order["tables"],
            num_tokens=order["tokens"],
            deadline_s=PUSH_S,
        )
        await engine.agree(f"push {request}", push, deadline_s=PUSH_S)
        return "pushed"

    def _saved_share(self, side: Side, request: str, tables: Order) -> str | None:
        """Leaves all heads in a file, if there are other ranks to take theirs."""
        _, ranks = side.tp
        if ranks == 1:
            return None
        path = str(self._arguments.folder / f"{request}.prefill")
        save_file(side.scheduler.whole.copied_out(tables), path)
        return path


async def _say_nothing(where: dict[str, Any]) -> None:
    """Rank 0 says it."""


if __name__ == "__main__":
    parsed = rank_arguments("prefill", seed=1).parse_args()
    trio.run(run_rank, parsed, Producer(parsed))
