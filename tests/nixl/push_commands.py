"""What `engine_child` is told about pushes, on either side of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from kvferry.engine import FerryError
from kvferry.protocol import Contact
from tests.kit import GROUP, POISON

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import torch

    from kvferry.engine import PushReport, TransferEngine, TransferReport
    from tests.kit import Pool

FILLED = 7.0
"""What blocks are refilled with at the very moment they are given back."""


class PushCommands:
    """Each answers with something JSON can say."""

    def __init__(self, engine: TransferEngine, pool: Pool) -> None:
        self._engine = engine
        self._pool = pool
        self._expecting: dict[str, trio.CancelScope] = {}

    # The consumer's side.

    async def expect(
        self, request_id: str, contact: Any, blocks: list[int], settings: Any
    ) -> Any:
        """As `pull`. Revoked, it refills what it was given back, with `FILLED`."""
        with trio.CancelScope() as self._expecting[request_id]:
            return await told(
                self._engine.expect(
                    Contact.from_dict(contact),
                    {GROUP: blocks},
                    request_id=request_id,
                    **settings,
                )
            )
        held = self._engine.quarantine.blocks(GROUP)
        free = [block for block in blocks if block not in held]
        self._pool.fill(free, FILLED)
        return {"given_back": free, "held": sorted(held)}

    async def revoke(self, request_id: str) -> Any:
        """Cancel an `expect`."""
        self._expecting[request_id].cancel()

    async def arrived(self, blocks: list[int]) -> Any:
        """How many of the blocks, each layer's counted, have begun to arrive."""
        return sum(
            int((tensor[blocks, 0, 0, 0, 0] != POISON).sum())
            for tensor in self._pool.tensors
        )

    # The producer's side.

    async def contact(self) -> Any:
        return self._engine.contact.to_dict()

    async def stamp(self, blocks: list[int], num_tokens: int) -> Any:
        self._pool.stamp(blocks, num_tokens=num_tokens)

    async def push(self, request_id: str, blocks: list[int], num_tokens: int) -> Any:
        """Push whatever the blocks hold."""
        return await told(
            self._engine.push(request_id, {GROUP: blocks}, num_tokens=num_tokens)
        )

    async def stream(
        self, request_id: str, blocks: list[int], num_tokens: int, chunk: int
    ) -> Any:
        """Push chunk by chunk, layer by layer; each is stamped when it is its turn."""
        self._pool.stamp(blocks, num_tokens=num_tokens)
        stamped = [tensor.clone() for tensor in self._pool.tensors]
        for tensor in self._pool.tensors:
            tensor.fill_(POISON)
        return await told(self._stream(request_id, blocks, num_tokens, chunk, stamped))

    async def _stream(
        self,
        request_id: str,
        blocks: list[int],
        num_tokens: int,
        chunk: int,
        stamped: list[torch.Tensor],
    ) -> PushReport:
        async with self._engine.push_stream(
            request_id, {GROUP: blocks}, num_tokens=num_tokens
        ) as stream:
            for first in range(0, num_tokens, chunk):
                last = min(first + chunk, num_tokens)
                for number, whole in enumerate(stamped):
                    for token in range(first, last):
                        block, slot = divmod(token, self._pool.block_size)
                        place = (blocks[block], slice(None), slice(None), slot)
                        self._pool.tensors[number][place] = whole[place]
                    layers = [f"layers.{number}"]
                    await stream.ready(layers=layers, tokens=(first, last))
        if stream.report is None:
            raise ValueError("a push without a report")
        return stream.report


async def told(call: Awaitable[TransferReport | PushReport]) -> Any:
    """The report's numbers, or the error's name and fields."""
    try:
        report = await call
    except FerryError as error:
        return {
            "error": type(error).__name__,
            "detail": str(error),
            "request": error.request_id,
            "phase": error.phase,
            "untrusted": {g: str(r) for g, r in error.untrusted.items()},
        }
    return {"bytes": report.bytes, "waves": report.waves}
