"""What the pair is measured against: one process, one model, no transfer.

It uses transformers' own cache instead of the paged pool, so an error in the
pool cannot hide by being made on both sides.

Usage: ``reference.py PROMPTS FOLDER STEPS MODEL...``, PROMPTS a name in `prompts`, writes
``FOLDER/MODEL/REQUEST.safetensors`` with the tokens, the logits, and the cache twice:
after the prompt, and at the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prompts
import torch
from generate import continue_greedily, prefill
from models import MODELS
from models.groups import StateGroup
from paged import states_of
from safetensors.torch import save_file
from transformers.cache_utils import Cache, DynamicCache

if TYPE_CHECKING:
    from models.groups import CacheGroup


def main(questions: dict[str, str], folder: Path, steps: int, names: list[str]) -> None:
    """Runs each request of each model from its first token to its last."""
    for name in names:
        draft = folder / f".{name}"
        draft.mkdir(parents=True)
        known = MODELS[name]
        model, tokenizer, groups = known.load(), known.tokenizer(), known.groups()
        for request, question in questions.items():
            token_ids = tokenizer.prompt(prompts.NOTICE, question)
            found = reference(model, groups, token_ids, steps)
            save_file(found, draft / f"{request}.safetensors")
        # Whole or absent: nobody compares with half of it.
        draft.rename(folder / name)


def reference(
    model: Any,  # noqa: ANN401 - transformers gives no useful type
    groups: tuple[CacheGroup, ...],
    token_ids: list[int],
    steps: int,
) -> dict[str, torch.Tensor]:
    """One request's tokens, logits and cache, named as the pair's."""
    cache = DynamicCache(config=model.config)
    first_token = prefill(model, cache, token_ids)
    after_prompt = cached(cache, groups)
    tokens, logits = continue_greedily(
        model, cache, first_token, position=len(token_ids), steps=steps
    )
    return {
        "tokens": torch.tensor([first_token, *tokens]),
        "logits": logits,
        **{f"pulled/{key}": tensor for key, tensor in after_prompt.items()},
        **{f"final/{key}": tensor for key, tensor in cached(cache, groups).items()},
    }


def cached(cache: Cache, groups: tuple[CacheGroup, ...]) -> dict[str, torch.Tensor]:
    """Copies what a cache holds, by the names that the pools use."""
    found: dict[str, torch.Tensor] = {}
    for group in groups:
        if isinstance(group, StateGroup):
            found |= states_of(cache, group)
            continue
        for layer in group.layers:
            held: Any = cache.layers[layer]
            found[f"{group.name}/{layer}/key"] = held.keys[0]
            found[f"{group.name}/{layer}/value"] = held.values[0]
    return {key: tensor.clone() for key, tensor in found.items()}


if __name__ == "__main__":
    _, asked, at, count, *models = sys.argv
    main(getattr(prompts, asked), Path(at), int(count), models)
