"""Like Gemma 3: layers with a sliding window, and one that sees everything."""

from __future__ import annotations

from models.groups import PagedGroup
from models.stand_in import StandIn

__all__ = ("WINDOW",)

_KV_HEADS, _HEAD_SIZE, _WINDOW = 2, 16, 100
_KINDS = ("sliding_attention", "sliding_attention", "full_attention")
_LAYER_TYPES = (*_KINDS, *_KINDS)


def _layers(kind: str) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(_LAYER_TYPES) if name == kind)


WINDOW = StandIn(
    name="tiny-gemma3",
    family="gemma3_text",
    sizes={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": len(_LAYER_TYPES),
        "num_attention_heads": 4,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "query_pre_attn_scalar": _HEAD_SIZE,
        "sliding_window": _WINDOW,
        "layer_types": list(_LAYER_TYPES),
    },
    cached=(
        PagedGroup(
            "full", _layers("full_attention"), _KV_HEADS, (_HEAD_SIZE, _HEAD_SIZE)
        ),
        PagedGroup(
            "sliding",
            _layers("sliding_attention"),
            _KV_HEADS,
            (_HEAD_SIZE, _HEAD_SIZE),
            window=_WINDOW,
        ),
    ),
)
