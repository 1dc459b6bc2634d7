"""The finish stage: what is done to the destination after its bytes are proved.

Zeroes every token slot behind a request's last token: the tail of the last unit
holds the producer's stale bytes, blocks beyond it hold anyone's. On a GPU the
work runs on a stream of its own and is never waited for on the loop: an event
is polled. States have no tail and are never touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import trio

from kvferry.engine.spans import kernel_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.engine.cache import KVCache, TokenView
    from kvferry.engine.selection import Tail

    Work = tuple[torch.Tensor, TokenView, Tail]

__all__ = ("FinishStage",)

FIELDS_AT_ONCE = 16
"""Zeroed on the host before others have their turn: some microseconds each."""

EVENT_POLL_S = 0.0002
"""How often a GPU event is looked at; zeroing takes some tens of microseconds."""


class FinishStage:
    """Applies tails to a cache's tensors.

    The tensors are the caller's; during a pull its destination blocks are ours.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    async def run(self, tails: Sequence[Tail]) -> None:
        """Zero the tails; returns when every byte of it is in place.

        Because it is seen to be complete, work that is launched afterwards on any
        stream comes after it. The bytes of the transfer itself had arrived before
        this is called, and no stream orders them.
        """
        work = [
            (tensor, view, tail)
            for tail in tails
            for view in self._cache.token_views(tail.group)
            for tensor in view.tensors
        ]
        for device in sorted({tensor.device for tensor, _, _ in work}, key=str):
            here = [item for item in work if item[0].device == device]
            if device.type == "cuda":
                await self._run_cuda(device, here)
            else:
                for number, (tensor, view, tail) in enumerate(here, start=1):
                    _zero(tensor, _slots(view, tail, device))
                    # Zeroing many layers takes milliseconds.
                    if number % FIELDS_AT_ONCE == 0:
                        await trio.lowlevel.checkpoint()

    async def _run_cuda(self, device: torch.device, work: Sequence[Work]) -> None:
        with torch.cuda.device(device):
            callers = torch.cuda.current_stream(device)
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                # Uploaded before the wait: a copy from pageable memory blocks the
                # host until its stream gets to it.
                slots = [_slots(view, tail, device) for _, view, tail in work]
                # What the caller had queued on its blocks before it called `pull`
                # must not land after our zeros.
                stream.wait_stream(callers)
                for (tensor, _, _), where in zip(work, slots, strict=True):
                    _zero(tensor, where)
                done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                done.record(stream)
            # And what the caller queues from now on must not overtake them.
            callers.wait_event(done)
        while not done.query():  # type: ignore[no-untyped-call]  # noqa: ASYNC110 - an event can only be polled
            await trio.sleep(EVENT_POLL_S)


class _Slots(NamedTuple):
    """Token slots of one field: a block's end, and whole kernel blocks."""

    block: int
    first_slot: int
    whole: torch.Tensor


def _slots(view: TokenView, tail: Tail, device: torch.device) -> _Slots:
    skipped, first_slot = divmod(tail.first_slot, view.block_tokens)
    ids = kernel_ids(tail.block_ids, ratio=view.ratio)[skipped:]
    whole = ids[1:] if first_slot else ids
    return _Slots(int(ids[0]), first_slot, torch.as_tensor(whole, device=device))


def _zero(tensor: torch.Tensor, where: _Slots) -> None:
    if where.first_slot:
        tensor[where.block, where.first_slot :].zero_()
    if where.whole.numel():
        tensor.index_fill_(0, where.whole, 0)
