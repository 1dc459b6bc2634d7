"""A prefill whose cache leaves while it is being computed, layer by layer.

The model runs in a thread, so that the engine's loop goes on beside it. Each time
that a layer has written the keys and values of a chunk into its blocks, they are
final, and the thread tells the engine's loop so.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio
from generate import PREFILL_CHUNK, prefill
from paged import paged_cache, save_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pools import Pools, Tables

    from kvferry.engine import PushStream

__all__ = ("prefill_streamed",)


async def prefill_streamed(
    model: Any,  # noqa: ANN401 - transformers gives no useful type
    pools: Pools,
    tables: Tables,
    token_ids: Sequence[int],
    stream: PushStream,
    *,
    chunk: int = PREFILL_CHUNK,
) -> int:
    """Prefills a prompt into its blocks, and lets each layer go as it is written.

    Returns:
        The first token after the prompt.

    Raises:
        FerryError: The push has failed, so there is no sense in going on.
    """

    def written(layer: int, first: int, last: int) -> None:
        ready = partial(stream.ready, layers=[f"layers.{layer}"], tokens=(first, last))
        trio.from_thread.run(ready)

    cache = paged_cache(pools, tables, on_written=written)
    first_token = await trio.to_thread.run_sync(prefill, model, cache, token_ids, chunk)
    # States are final with the prompt's last token only.
    save_states(cache, pools, tables)
    states = [layer for pool in pools.states.values() for layer in pool.group.layers]
    if states:
        await stream.ready(layers=[f"layers.{layer}" for layer in states])
    return first_token
