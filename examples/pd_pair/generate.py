"""Chunked prefill and greedy decode, alike for every process of the example.

Bits depend on the shapes of the matrix products, so whoever wants equal bits
must prefill in equal chunks: `PREFILL_CHUNK` tokens, counted from token 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers.cache_utils import Cache

__all__ = ("PREFILL_CHUNK", "continue_greedily", "prefill")

PREFILL_CHUNK = 128


def prefill(
    model: Any,  # noqa: ANN401
    cache: Cache,
    token_ids: Sequence[int],
    chunk: int = PREFILL_CHUNK,
) -> int:
    """Runs a prompt through the model and returns the first token after it.

    Afterwards the cache holds exactly the prompt; the token returned is not in it.
    """
    logits = torch.empty(0)
    for first in range(0, len(token_ids), chunk):
        logits = _last_logits(model, cache, token_ids[first : first + chunk], first)
    return int(logits.argmax())


def continue_greedily(
    model: Any,  # noqa: ANN401
    cache: Cache,
    token_id: int,
    *,
    position: int,
    steps: int,
) -> tuple[list[int], torch.Tensor]:
    """Feeds a token at its position, then each best guess, for so many steps.

    Returns:
        The tokens chosen, and the logits they were chosen from, ``[step, word]``.
    """
    token_ids: list[int] = []
    logits: list[torch.Tensor] = []
    for step in range(steps):
        logits.append(_last_logits(model, cache, [token_id], position + step))
        token_id = int(logits[-1].argmax())
        token_ids.append(token_id)
    return token_ids, torch.stack(logits)


@torch.inference_mode()
def _last_logits(
    model: Any,  # noqa: ANN401
    cache: Cache,
    token_ids: Sequence[int],
    position: int,
) -> torch.Tensor:
    """One forward pass; the logits after its last token."""
    positions = torch.arange(position, position + len(token_ids))[None]
    output = model(
        input_ids=torch.tensor([list(token_ids)]),
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: torch.Tensor = output.logits[0, -1]
    return logits.clone()
