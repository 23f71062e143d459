"""Name and reorder the tensors of recurrent layers as llama.cpp's converter does."""

from __future__ import annotations

from typing import Any

import numpy as np

_MARK = ".linear_attn."
_MAMBA2_MARKS = (".mamba.", ".mixer.")
_MAMBA2 = {
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "in_proj.bias": "ssm_in.bias",
    "in_proj.weight": "ssm_in.weight",
    "out_proj.bias": "ssm_out.bias",
    "out_proj.weight": "ssm_out.weight",
}


def recurrent_tensors(
    arch: str, name: str, values: np.ndarray, config: Any
) -> list[tuple[str, np.ndarray]]:
    """Return names and values in GGUF of a tensor in transformers; none for other tensors."""
    if mark := next((mark for mark in _MAMBA2_MARKS if mark in name), ""):
        before, part = name.split(mark)
        found = _mamba2(part, values, config)
        return [(f"blk.{before.split('.')[2]}.{stored}", array) for stored, array in found]
    if ".conv.conv." in name:
        return [(f"blk.{name.split('.')[2]}.shortconv.conv.weight", values.squeeze(1))]
    if _MARK not in name:
        return []
    before, part = name.split(_MARK)
    found = _next(part, values, config) if arch == "qwen3next" else _tiled(part, values, config)
    return [(f"blk.{before.split('.')[2]}.{stored}", array) for stored, array in found]


def _mamba2(part: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    if part == "A_log":
        return [("ssm_a", -np.exp(values)[:, None])]
    if part == "D":
        return [("ssm_d", values[:, None])]
    if part == "conv1d.weight":
        return [("ssm_conv1d.weight", values.squeeze(1))]
    if part == "norm.weight":
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        return [("ssm_norm.weight", values.reshape(groups, -1))]
    return [(_MAMBA2[part], values)] if part in _MAMBA2 else []


def with_falcon_factors(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Return the values of a tensor of Falcon-H1 times the factors in its config."""
    attention, (gate, down) = config.attention_in_multiplier, config.mlp_multipliers
    factors = {
        "q_proj": attention,
        "k_proj": attention * config.key_multiplier,
        "v_proj": attention,
        "o_proj": config.attention_out_multiplier,
        "gate_proj": gate,
        "down_proj": down,
        "out_proj": config.ssm_out_multiplier,
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
    }
    part = name.split(".")[-2]
    if part == "in_proj":
        states = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, states, states, config.mamba_n_heads)
        factor = np.repeat(config.ssm_multipliers, sizes)[:, None] * config.ssm_in_multiplier
    else:
        factor = factors.get(part, 1.0)
    return (values * factor).astype(np.float32)


def _next(part: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    if part != "in_proj_qkvz.weight":
        return [_renamed(part, values)]
    heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    keys = config.linear_key_head_dim
    of_values = value_heads // heads * config.linear_value_head_dim
    grouped = values.reshape(heads, -1, values.shape[1])
    ends = np.cumsum([keys, keys, of_values])
    q, k, v, z = (array.reshape(-1, values.shape[1]) for array in np.split(grouped, ends, axis=1))
    return [("attn_qkv.weight", np.concatenate([q, k, v])), ("attn_gate.weight", z)]


def _tiled(part: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """Move the value heads of a key head apart: they follow each other for all key heads."""
    heads = config.linear_num_key_heads
    keys = 2 * heads * config.linear_key_head_dim

    def moved(array: np.ndarray) -> np.ndarray:
        shape = (heads, config.linear_num_value_heads // heads, -1, *array.shape[1:])
        return array.reshape(shape).swapaxes(0, 1).reshape(array.shape)

    if part == "norm.weight":
        return [_renamed(part, values)]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        values = np.concatenate([values[:keys], moved(values[keys:])])
    else:
        values = moved(values.T).T if part == "out_proj.weight" else moved(values)
    return [_renamed(part, values)]


def _renamed(part: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    if part == "A_log":
        return "ssm_a", -np.exp(values)
    stored = {
        "conv1d.weight": "ssm_conv1d.weight",
        "dt_bias": "ssm_dt.bias",
        "in_proj_a.weight": "ssm_alpha.weight",
        "in_proj_b.weight": "ssm_beta.weight",
        "in_proj_ba.weight": "ssm_ba.weight",
        "in_proj_qkv.weight": "attn_qkv.weight",
        "in_proj_z.weight": "attn_gate.weight",
        "norm.weight": "ssm_norm.weight",
        "out_proj.weight": "ssm_out.weight",
    }[part]
    return stored, np.ascontiguousarray(values.squeeze())
