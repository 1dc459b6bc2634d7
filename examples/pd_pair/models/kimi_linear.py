"""Like Kimi Linear: a delta rule in three layers of four, and MLA in the fourth.

MLA caches a latent and a rotary part per token, which every rank of a
tensor-parallel instance holds whole.
"""

from __future__ import annotations

from models.groups import PagedGroup, StateGroup
from models.stand_in import StandIn

__all__ = ("MLA",)

_LATENT, _ROTARY = 48, 16
_HEADS, _HEAD_SIZE, _WIDTH = 4, 16, 4

MLA = StandIn(
    name="tiny-kimi-linear",
    family="kimi_linear",
    sizes={
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": _LATENT,
        "qk_rope_head_dim": _ROTARY,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "linear_head_dim": _HEAD_SIZE,
        "linear_num_heads": _HEADS,
        "linear_conv_kernel_dim": _WIDTH,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    cached=(
        PagedGroup("latent", (3,), heads=0, sizes=(_LATENT, _ROTARY)),
        StateGroup(
            "state",
            (0, 1, 2),
            channels=dict.fromkeys("qkv", _HEADS * _HEAD_SIZE),
            width=_WIDTH,
            heads=_HEADS,
            head_sizes=(_HEAD_SIZE, _HEAD_SIZE),
        ),
    ),
)
