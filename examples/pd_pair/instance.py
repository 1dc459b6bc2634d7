"""The router's view of the two sides: all ranks of each, and one request across them.

Rank 0 of a side schedules and runs the model, every rank offers, pushes or gets its own
share. What passes through here is JSON: block ids, tickets, first tokens, and the
names of the files in which the ranks of one side leave shares for each other.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from child import Child, DemoError, open_child
from prompts import QUESTIONS

from kvferry.protocol import Contact, Ticket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

__all__ = ("MODES", "Instance", "Pair", "Served", "open_instance")

MODES = ("pull", "push", "stream")

START_S = 60.0
PREFILL_S = 60.0
TRANSFER_S = 60.0
CONTINUE_S = 90.0
END_S = 30.0


@dataclass(frozen=True)
class Instance:
    """All ranks of one side.

    Attributes:
        ranks: In order; the first one schedules.
    """

    ranks: Sequence[Child]

    @property
    def first(self) -> Child:
        """Rank 0."""
        return self.ranks[0]

    def shares(self, folder: Path, name: str) -> list[str]:
        """Where each rank leaves its share; nowhere if there is but one."""
        if len(self.ranks) == 1:
            return []
        return [str(folder / f"{name}.{rank}") for rank in range(len(self.ranks))]

    async def order_all(self, **fields: object) -> None:
        """Gives every rank the same order."""
        for child in self.ranks:
            await child.order(**fields)

    async def answers(self, event: str, *, within_s: float) -> list[dict[str, Any]]:
        """Waits for the answer of every rank."""
        return [await child.answer(event, within_s=within_s) for child in self.ranks]

    async def finish(self) -> None:
        """Has every rank end, and waits for it."""
        for child in self.ranks:
            await child.finish(within_s=END_S)


@dataclass(frozen=True)
class Served:
    """One request that went through; the answers on its way.

    Attributes:
        request: Its name.
        prefilled, admitted, continued: Rank 0's answers.
        received: Every consumer rank's.
        result: Where decode left its tensors.
    """

    request: str
    prefilled: dict[str, Any]
    admitted: dict[str, Any]
    received: list[dict[str, Any]]
    continued: dict[str, Any]
    result: Path

    @property
    def others_untouched(self) -> bool:
        """Did no rank find a foreign block changed?"""
        return all(answer["others_untouched"] for answer in self.received)

    @property
    def ready_s(self) -> float:
        """From the end of the prefill to the last rank's cache, by the host's clock."""
        ready_at: float = max(answer["ready_at"] for answer in self.received)
        return ready_at - float(self.prefilled["ended_at"])


@dataclass(frozen=True)
class Pair:
    """The two sides.

    Attributes:
        prefill, decode: The instances.
        contact: Where all ranks of prefill are.
        folder: For files.
        steps: Tokens to continue.
        mode: How the cache travels; one of `MODES`.
    """

    prefill: Instance
    decode: Instance
    contact: Contact
    folder: Path
    steps: int
    mode: str

    async def serve(self, request: str) -> Served:
        """One request from prompt to last token.

        Raises:
            DemoError: A step failed, or the producer's blocks were not released.
        """
        if self.mode == "pull":
            prefilled, ticket = await self.offer(request)
            admitted = await self.order_pull(request, ticket)
        else:
            admitted = await self.order_expect(request)
            prefilled = await self.order_push(request)
        received = await self.decode.answers("received", within_s=TRANSFER_S)
        ended = await self.prefill.answers("outcome", within_s=END_S)
        outcomes = {answer["outcome"] for answer in ended}
        if outcomes != {"released" if self.mode == "pull" else "pushed"}:
            raise DemoError(f"{request}: the producer says {', '.join(outcomes)}")
        await self.prefill.first.order(op="free", request=request)
        result = self.folder / f"{request}.result"
        await self.decode.first.order(
            op="continue",
            request=request,
            first_token=prefilled["first_token"],
            steps=self.steps,
            shares=self.decode.shares(self.folder, request),
            result=str(result),
        )
        continued = await self.decode.first.answer("continued", within_s=CONTINUE_S)
        return Served(request, prefilled, admitted, received, continued, result)

    async def offer(self, request: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Has a prompt prefilled and offered.

        Returns:
            What rank 0 says of it, and one ticket for all ranks.
        """
        prefilled = await self._prefill_and("offer", request)
        answers = await self.prefill.answers("ticket", within_s=END_S)
        tickets = [Ticket.from_dict(answer["ticket"]) for answer in answers]
        return prefilled, Ticket.merge(tickets).to_dict()

    async def order_push(self, request: str) -> dict[str, Any]:
        """Has a prompt prefilled and pushed, one after the other or both at once.

        Returns:
            What rank 0 says of it.
        """
        if self.mode == "push":
            return await self._prefill_and("push", request)
        question = QUESTIONS[request]
        await self.prefill.first.order(op="stream", request=request, question=question)
        return await self.prefill.first.answer("prefilled", within_s=PREFILL_S)

    async def _prefill_and(self, op: str, request: str) -> dict[str, Any]:
        """Has rank 0 prefill a prompt, and gives every rank an order for the cache."""
        order = {"request": request, "share": None}
        if len(self.prefill.ranks) > 1:
            order["share"] = str(self.folder / f"{request}.prefill")
        await self.prefill.first.order(
            **order, op="prefill", question=QUESTIONS[request]
        )
        prefilled = await self.prefill.first.answer("prefilled", within_s=PREFILL_S)
        await self.prefill.order_all(
            **order,
            op=op,
            tables=prefilled["tables"],
            prompt_tokens=prefilled["prompt_tokens"],
        )
        return prefilled

    async def order_pull(self, request: str, ticket: dict[str, Any]) -> dict[str, Any]:
        """Has a prompt admitted, and every rank of decode begin its pull.

        Returns:
            What rank 0 says of it.
        """
        return await self._admit_and("pull", request, ticket=ticket)

    async def order_expect(self, request: str) -> dict[str, Any]:
        """Has a prompt admitted, and every rank of decode expect its push.

        Returns:
            What rank 0 says of it.
        """
        contact = self.contact.to_dict()
        return await self._admit_and("expect", request, contact=contact)

    async def _admit_and(
        self, op: str, request: str, **source: dict[str, Any]
    ) -> dict[str, Any]:
        await self.decode.first.order(
            op="admit", request=request, question=QUESTIONS[request], steps=self.steps
        )
        admitted = await self.decode.first.answer("admitted", within_s=END_S)
        shares: Sequence[str | None]
        shares = self.decode.shares(self.folder, request) or [None]
        for child, share in zip(self.decode.ranks, shares, strict=True):
            await child.order(**admitted, **source, op=op, request=request, share=share)
        return admitted

    async def finish(self) -> None:
        """Has both sides end; the consumer first, so that nobody is left reading."""
        await self.decode.finish()
        await self.prefill.finish()


@asynccontextmanager
async def open_instance(
    name: str,
    ranks: int,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    echo_logs: bool,
) -> AsyncIterator[Instance]:
    """Starts all ranks of a side, and does not wait for them; later they are gone."""
    async with AsyncExitStack() as stack:
        children = [
            await stack.enter_async_context(
                open_child(
                    name if ranks == 1 else f"{name}/{rank}",
                    [f"{name}.py", f"--tp={rank}/{ranks}", *arguments],
                    environment=environment,
                    echo_logs=echo_logs,
                )
            )
            for rank in range(ranks)
        ]
        yield Instance(children)
