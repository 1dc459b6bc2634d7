"""A tiny llama: full attention with four KV heads, and nothing else."""

from __future__ import annotations

from models.groups import PagedGroup
from models.stand_in import StandIn

__all__ = ("TINY",)

_LAYERS, _KV_HEADS, _HEAD_SIZE = 4, 4, 16

TINY = StandIn(
    name="tiny-llama",
    family="llama",
    sizes={
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_SIZE,
    },
    cached=(
        PagedGroup("full", tuple(range(_LAYERS)), _KV_HEADS, (_HEAD_SIZE, _HEAD_SIZE)),
    ),
)
