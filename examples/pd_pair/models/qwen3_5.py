"""Like Qwen 3.5: three layers of a gated delta rule to one of full attention.

In bfloat16, so that the two states of a layer differ in dtype, as in real use.
"""

from __future__ import annotations

from models.groups import PagedGroup, StateGroup
from models.stand_in import StandIn

__all__ = ("HYBRID",)

_KV_HEADS, _HEAD_SIZE = 2, 32
_KEY_HEADS, _VALUE_HEADS, _KEY_SIZE, _VALUE_SIZE, _WIDTH = 2, 4, 16, 16, 4

HYBRID = StandIn(
    name="tiny-qwen3_5",
    family="qwen3_5_text",
    sizes={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "linear_num_key_heads": _KEY_HEADS,
        "linear_num_value_heads": _VALUE_HEADS,
        "linear_key_head_dim": _KEY_SIZE,
        "linear_value_head_dim": _VALUE_SIZE,
        "linear_conv_kernel_dim": _WIDTH,
    },
    cached=(
        PagedGroup("full", (3,), _KV_HEADS, (_HEAD_SIZE, _HEAD_SIZE), dtype="bfloat16"),
        StateGroup(
            "state",
            (0, 1, 2),
            channels={
                "q": _KEY_HEADS * _KEY_SIZE,
                "k": _KEY_HEADS * _KEY_SIZE,
                "v": _VALUE_HEADS * _VALUE_SIZE,
            },
            width=_WIDTH,
            heads=_VALUE_HEADS,
            head_sizes=(_KEY_SIZE, _VALUE_SIZE),
            dtype="bfloat16",
        ),
    ),
    dtype="bfloat16",
)
