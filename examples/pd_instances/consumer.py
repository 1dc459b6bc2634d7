"""A rank of the decode instance.

Rank 0 takes blocks for a request, then every rank gets its heads into them: it pulls with
the ticket, or expects a push from the instance whose one address the router has passed.
`engine.agree` makes one outcome of it: all ranks have their heads, or none goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from continuing import continued
from rank import Lead, rank_arguments, run_rank, say_failed
from side import PUSH_S

from kvferry.engine import FerryError
from kvferry.protocol import Ticket

if TYPE_CHECKING:
    import argparse

    from side import Side

    from kvferry.engine import TransferReport

    Order = dict[str, Any]


class Consumer:
    """What a rank of decode does."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments

    async def serve(self, lead: Lead, message: Order) -> None:
        """Serves one request, from what prefill says of it to the answer; rank 0."""
        request, body, side = message["request"], message["body"], lead.side
        tables = side.scheduler.allocate(body["tokens"] + self._arguments.steps)
        shares = self._shares(side, request)
        order = {**body, "request": request, "tables": tables, "shares": shares}
        await lead.tell(order)
        try:
            await self.take_part(side, order)
            answer = await self._answer(side, order)
        except FerryError as error:
            say_failed(side, request, error)
            answer = {"error": str(error)}
        await lead.end(request, tables)
        await lead.router.say(request=request, to="client", body=answer)

    async def take_part(self, side: Side, order: Order) -> None:
        """Gets this rank's heads; returns when every rank has got its own.

        Raises:
            FerryError: A rank has failed: the same one on all. No transfer touches the
                blocks any more.
        """
        rank, _ = side.tp
        side.note_used(order["tables"])

        async def part() -> None:
            await receive(side, order)
            if not side.pools.is_untouched_outside(side.used):
                raise RuntimeError(
                    f"{order['request']} was written to blocks of nobody"
                )
            if order["shares"]:
                # Within the agreement: when rank 0 goes on, all files are there.
                side.save_share(order["tables"], order["shares"][rank])

        try:
            await side.engine.agree(f"receive {order['request']}", part)
        finally:
            for group, block_ids in order["tables"].items():
                await side.engine.quarantine.wait_free(group, block_ids)

    async def _answer(self, side: Side, order: Order) -> dict[str, Any]:
        """Goes on from the first token."""
        result = str(self._arguments.folder / f"{order['request']}.result")
        found = await continued(
            side,
            order["tables"],
            tokens=order["tokens"],
            first_token=order["first_token"],
            steps=self._arguments.steps,
            shares=order["shares"],
            result=result,
        )
        return {"text": found.text, "tokens": order["tokens"], "result": result}

    def _shares(self, side: Side, request: str) -> list[str]:
        """Where the ranks leave their heads; nowhere if there is but one."""
        _, ranks = side.tp
        folder = self._arguments.folder
        return (
            [str(folder / f"{request}.{n}") for n in range(ranks)] if ranks > 1 else []
        )


async def receive(side: Side, order: Order) -> TransferReport:
    """The transfer itself, as far as it is this rank's."""
    engine, request, tables = side.engine, order["request"], order["tables"]
    if ticket := order.get("ticket"):
        return await engine.pull(Ticket.from_dict(ticket), tables)
    host, port = order["address"]
    contact = await engine.discover(order["engine_id"], (host, port))
    return await engine.expect(contact, tables, request_id=request, deadline_s=PUSH_S)


if __name__ == "__main__":
    parsed = rank_arguments("decode", seed=2).parse_args()
    trio.run(run_rank, parsed, Consumer(parsed))
