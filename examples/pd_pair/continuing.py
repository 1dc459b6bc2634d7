"""Goes on with a prompt whose cache has come, and leaves what is compared."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from generate import continue_greedily
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pools import Tables
    from side import Side

__all__ = ("Continued", "continued")


class Continued(NamedTuple):
    """What came of it.

    Attributes:
        text: What the model has said.
        decode_s: How long that took.
    """

    text: str
    decode_s: float


async def continued(  # noqa: PLR0913 - the facts of one request
    side: Side,
    tables: Tables,
    *,
    tokens: int,
    first_token: int,
    steps: int,
    shares: Sequence[str],
    result: str,
) -> Continued:
    """Continues a prompt greedily, on rank 0.

    Args:
        side: This rank.
        tables: Blocks for the prompt and the continuation.
        tokens: Of the prompt.
        first_token: What the producer has sampled.
        steps: Tokens to continue.
        shares: The files of all ranks, if the model works in a pool of its own.
        result: The file to leave: tokens, logits, and the cache before and after.
    """
    scheduler = side.scheduler
    if shares:
        scheduler.whole.copy_in(tables, side.merged(shares))
    after_pull = scheduler.whole.copied_out(tables)
    cache = scheduler.cache(tables, tokens=tokens)
    started_at = perf_counter()
    said, logits = await scheduler.run(
        lambda: continue_greedily(
            scheduler.model, cache, first_token, position=tokens, steps=steps
        )
    )
    decode_s = perf_counter() - started_at
    scheduler.save_states(cache, tables)
    final = scheduler.whole.copied_out(tables)
    results = {
        "tokens": torch.tensor([first_token, *said]),
        "logits": logits,
        **{f"pulled/{key}": tensor for key, tensor in after_pull.items()},
        **{f"final/{key}": tensor for key, tensor in final.items()},
    }
    save_file(results, result)
    return Continued(scheduler.tokenizer.text([first_token, *said]), decode_s)
