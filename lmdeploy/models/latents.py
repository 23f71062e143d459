"""Settings, scale and tensors that families with multi-head latent attention (MLA) share.

DeepSeek-V2 introduced it. The cache has one row per token: a latent of `kv_lora_rank` values, from
which all heads make their keys and values, and a rotary part of `qk_rope_head_dim` values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import LatentSettings
from lmdeploy.models.experts import MAX_WIDTH, TensorLocation
from lmdeploy.models.family import GGUF_TENSORS, HF_TENSORS, JOINT_HEADS, QKV, TensorNames

_ATTENTION = "model.layers.{i}.self_attn"
HF_LATENTS: Mapping[str, str] = {
    **{kind: name for kind, name in HF_TENSORS.items() if kind not in QKV},
    "latent.kv_a": f"{_ATTENTION}.kv_a_proj_with_mqa.weight",
    "latent.kv_a_norm": f"{_ATTENTION}.kv_a_layernorm.weight",
    JOINT_HEADS: f"{_ATTENTION}.kv_b_proj.weight",
}
_HF_Q = {"latent.q": f"{_ATTENTION}.q_proj.weight"}
_HF_Q_LATENTS = {
    "latent.q_a": f"{_ATTENTION}.q_a_proj.weight",
    "latent.q_a_norm": f"{_ATTENTION}.q_a_layernorm.weight",
    "latent.q": f"{_ATTENTION}.q_b_proj.weight",
}
GGUF_LATENTS: TensorNames = {
    **{kind: name for kind, name in GGUF_TENSORS.items() if kind not in QKV},
    "latent.kv_a": "blk.{i}.attn_kv_a_mqa.weight",
    "latent.kv_a_norm": "blk.{i}.attn_kv_a_norm.weight",
}
# A file has the matrix of keys and values as Hugging Face has it, or, since April 2025, in the two
# forms that the engine multiplies.
GGUF_CHOICES: tuple[tuple[TensorNames, ...], ...] = (
    (
        {
            "latent.q_a": "blk.{i}.attn_q_a.weight",
            "latent.q_a_norm": "blk.{i}.attn_q_a_norm.weight",
            "latent.q": "blk.{i}.attn_q_b.weight",
        },
        {"latent.q": "blk.{i}.attn_q.weight"},
    ),
    (
        {
            "latent.k_b": TensorLocation("blk.{i}.attn_k_b.weight", stacked=True),
            "latent.v_b": TensorLocation("blk.{i}.attn_v_b.weight", stacked=True),
        },
        {JOINT_HEADS: "blk.{i}.attn_kv_b.weight"},
    ),
)
# Original code and transformers build the norms of latents with this, whatever rms_norm_eps is.
_NORM_EPS = 1e-6


def hf_queries(config: ConfigReader) -> TensorNames:
    """Return the matrices of the queries, which may have a latent of their own."""
    return _HF_Q_LATENTS if config.has("q_lora_rank") else _HF_Q


def latent_biases(config: ConfigReader) -> tuple[str, ...]:
    """Return the matrices that `attention_bias` gives a bias."""
    if not config.flag("attention_bias", default=False):
        return ()
    queries = ("latent.q_a",) if config.has("q_lora_rank") else ()
    return (*queries, "latent.kv_a", "o")


def cache_row(config: ConfigReader) -> Mapping[str, Any]:
    """Return the row of the cache under the keys of models with K and V."""
    rank = config.integer("kv_lora_rank", high=MAX_WIDTH)
    rope = config.integer("qk_rope_head_dim", high=rank)
    return {"head_dim": rank, "rotary_dim": rope, "num_key_value_heads": 1}


def gguf_cache_row(config: ConfigReader) -> Mapping[str, Any]:
    """Return the same for GGUF metadata, and the sizes of a head.

    Without the keys of MLA, key_length and value_length are those of a head.
    """
    row = cache_row(config)
    dims = config.integer("qk_head_dim", default=config.integer("head_dim"))
    if (nope := dims - row["rotary_dim"]) < 1:
        raise config.refuse(
            f"{config.name('qk_head_dim')} is {dims}. It must exceed the {row['rotary_dim']} "
            "values that RoPE rotates."
        )
    value = config.integer("v_head_dim", default=config.integer("value_length"))
    # llama.cpp builds the norms of latents with the epsilon of all norms.
    eps = config.number("rms_norm_eps", high=1.0)
    return {**row, "qk_nope_head_dim": nope, "v_head_dim": value, "latent_norm_eps": eps}


def latents(config: ConfigReader, *, interleaved: bool) -> LatentSettings:
    """Return the settings of config.json."""
    return LatentSettings(
        nope_dim=config.integer("qk_nope_head_dim", high=MAX_WIDTH),
        rope_dim=config.integer("qk_rope_head_dim", high=MAX_WIDTH),
        value_dim=config.integer("v_head_dim", high=MAX_WIDTH),
        q_rank=config.integer("q_lora_rank", default=0, low=0, high=MAX_WIDTH),
        interleaved=interleaved,
        norm_eps=config.number("latent_norm_eps", default=_NORM_EPS, high=1.0),
    )


def interleaved_latents(config: ConfigReader) -> LatentSettings:
    """Return the settings of a model whose RoPE rotates neighbors, unless config.json says no."""
    return latents(config, interleaved=config.flag("rope_interleave", default=True))


def softmax_scale(config: ConfigReader) -> float:
    """Return the factor of scores. YaRN raises it where it does not raise cos and sin."""
    dims = config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
    return _magnitude(config) ** 2 / math.sqrt(dims)


def _magnitude(config: ConfigReader) -> float:
    rope = config.child("rope_parameters") or config.child("rope_scaling")
    if rope is None or rope.text("rope_type", default=rope.text("type", default="")) == "default":
        return 1.0
    share = rope.number("mscale_all_dim", default=0.0)
    factor = rope.number("factor", default=1.0)
    return 1.0 + 0.1 * share * math.log(factor) if factor > 1.0 else 1.0
