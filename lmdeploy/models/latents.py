"""What the families with multi-head latent attention (MLA) share: settings, scale and tensors.

DeepSeek-V2 introduced it. The cache has one row per token: a latent of `kv_lora_rank` values, from
which all heads make their keys and values, and a rotary part of `qk_rope_head_dim` values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import LatentSettings
from lmdeploy.models.experts import MAX_WIDTH
from lmdeploy.models.family import HF_TENSORS, JOINT_HEADS, QKV, TensorNames

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
    return dims**-0.5 * _magnitude(config) ** 2


def _magnitude(config: ConfigReader) -> float:
    rope = config.child("rope_parameters") or config.child("rope_scaling")
    if rope is None or rope.text("rope_type", default=rope.text("type", default="")) == "default":
        return 1.0
    share = rope.number("mscale_all_dim", default=0.0)
    factor = rope.number("factor", default=1.0)
    return 1.0 + 0.1 * share * math.log(factor) if factor > 1.0 else 1.0
