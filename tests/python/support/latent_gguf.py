"""Keys and tensors of latent attention in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

_ROW = {
    "attention.kv_lora_rank": 64,
    "rope.dimension_count": 16,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 48,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.7,
    "leading_dense_block_count": 1,
}
# The cache's row as key_length and value_length, and the sizes of a head beside it.
_SPLIT = {
    **_ROW,
    "attention.head_count_kv": 1,
    "attention.key_length": 80,
    "attention.value_length": 64,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 48,
}
_JOINT = {**_ROW, "attention.key_length": 48, "attention.value_length": 48}
_YARN = {
    "attention.q_lora_rank": 48,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}
LATENT_KEYS: dict[str, dict[str, Any]] = {
    "deepseek-v2-groups": {
        **_SPLIT,
        **_YARN,
        "rope.scaling.yarn_log_multiplier": 0.0707,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    },
    "deepseek-v2-lite": _JOINT,
    "deepseek-v3": {
        **_SPLIT,
        **_YARN,
        "rope.scaling.yarn_log_multiplier": 0.1,
        "expert_shared_count": 1,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
    },
}


def head_matrices(name: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Return the two parts of kv_b_proj: [heads, rank, nope] and [heads, value, rank]."""
    nope = config.qk_nope_head_dim
    heads = values.reshape(config.num_attention_heads, nope + config.v_head_dim, -1)
    layer = f"blk.{name.split('.')[2]}"
    return [
        (f"{layer}.attn_k_b.weight", np.ascontiguousarray(heads[:, :nope].swapaxes(1, 2))),
        (f"{layer}.attn_v_b.weight", np.ascontiguousarray(heads[:, nope:])),
    ]
