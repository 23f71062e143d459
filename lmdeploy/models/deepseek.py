"""DeepSeek-V2, V3 and R1, Kimi K2: latent attention, experts with shared ones, dense first layers.

Folders of V3.2 and V4, whose attention selects tokens by an indexer, have other architectures.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    GGUF_SCORE_BIAS,
    GGUF_SHARED,
    HF_QWEN,
    HF_SHARED_EXPERTS,
    HF_STACKED,
    MAX_EXPERTS,
    MAX_WIDTH,
    Experts,
    TensorLocation,
)
from lmdeploy.models.family import ModelFamily
from lmdeploy.models.latents import (
    GGUF_CHOICES,
    GGUF_LATENTS,
    HF_LATENTS,
    cache_row,
    gguf_cache_row,
    hf_queries,
    interleaved_latents,
    latent_biases,
    softmax_scale,
)
from lmdeploy.models.structure import Structure

HF_SCORE_BIAS = {
    "router.score_bias": TensorLocation("model.layers.{i}.mlp.gate.e_score_correction_bias")
}
_GROUP_METHODS = ("greedy", "group_limited_greedy")


def deepseek_experts(config: ConfigReader, num_layers: int) -> MoeSettings | None:
    """Return the experts of all layers after the dense ones."""
    if not config.has("n_routed_experts"):
        return None
    dense = config.integer("first_k_dense_replace", default=0, low=0)
    width = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    shared = config.integer("n_shared_experts", default=0, low=0)
    return MoeSettings(
        num_experts=config.integer("n_routed_experts", high=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=width,
        shared_intermediate_size=shared * width,
        shared_gate=False,
        normalize=config.flag("norm_topk_prob", default=True),
        sigmoid=True,
        scale=config.number("routed_scaling_factor", default=1.0, low=1e-6),
        layers=tuple(layer >= dense for layer in range(num_layers)),
    )


def _v2_experts(config: ConfigReader, num_layers: int) -> MoeSettings | None:
    settings = deepseek_experts(config, num_layers)
    if settings is None:
        return None
    return replace(settings, normalize=False, sigmoid=False, best_of_group=True)


def _v2_derived(config: ConfigReader) -> Mapping[str, Any]:
    method = config.text("topk_method", default="greedy")
    if method not in _GROUP_METHODS:
        raise config.refuse(
            f"topk_method is {method[:40]!r}. It must be {' or '.join(_GROUP_METHODS)}."
        )
    grouped = {} if method == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
    return {**cache_row(config), **grouped}


FAMILY = ModelFamily(
    name="deepseek_v2",
    models="DeepSeek-V2, V2-Lite and V2.5",
    differs="latent attention, experts with shared ones, dense first layers",
    hf_architectures=("DeepseekV2ForCausalLM",),
    gguf_architectures=(),
    hf_tensors=HF_LATENTS,
    hf_extra_tensors=hf_queries,
    hf_bias=latent_biases,
    hf_fixed={"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    hf_derived=_v2_derived,
    structure=lambda config: Structure(softmax_scale=softmax_scale(config)),
    latent=interleaved_latents,
    experts=Experts(
        settings=_v2_experts,
        hf=(
            {**HF_QWEN, **HF_SHARED_EXPERTS},
            {**HF_STACKED, **HF_SHARED_EXPERTS},
        ),
        gguf=(),
    ),
)
_V3_EXPERTS = Experts(
    settings=deepseek_experts,
    hf=(
        {**HF_QWEN, **HF_SHARED_EXPERTS, **HF_SCORE_BIAS},
        {**HF_STACKED, **HF_SHARED_EXPERTS, **HF_SCORE_BIAS},
    ),
    gguf=(),
)
V3_FAMILY = replace(
    FAMILY,
    name="deepseek_v3",
    models="DeepSeek-V3, V3.1 and R1, Kimi K2",
    differs="latent attention, experts by sigmoids with a bias from the best groups, a shared one",
    hf_architectures=("DeepseekV3ForCausalLM",),
    hf_defaults={"norm_topk_prob": True, "first_k_dense_replace": 3, "n_shared_experts": 1},
    hf_fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    hf_derived=cache_row,
    # The layers that predict several tokens at once follow the others. They are not used.
    hf_unused=(r"model\.layers\.<layers>\..*",),
    experts=_V3_EXPERTS,
)


def _lite_experts(config: ConfigReader, num_layers: int) -> MoeSettings | None:
    settings = deepseek_experts(config, num_layers)
    kinds = config.texts("mlp_layer_types")
    if settings is None or not kinds:
        return settings
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise config.refuse(
            f"mlp_layer_types must have {num_layers} entries, each dense or sparse."
        )
    return replace(settings, layers=tuple(kind == "sparse" for kind in kinds))


GLM_FAMILY = replace(
    V3_FAMILY,
    name="glm4_moe_lite",
    models="GLM-4.7-Flash",
    hf_architectures=("Glm4MoeLiteForCausalLM",),
    hf_defaults={"norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    experts=replace(_V3_EXPERTS, settings=_lite_experts),
)


def _gguf_experts(config: ConfigReader, num_layers: int) -> MoeSettings | None:
    sigmoid = config.integer("expert_gating_func", default=1, low=0) == _GGUF_SIGMOID
    values = config.with_values({"norm_topk_prob": config.flag("norm_topk_prob", default=False)})
    settings = deepseek_experts(values, num_layers)
    if settings is None:
        return None
    return replace(settings, sigmoid=sigmoid, best_of_group=not sigmoid)


# One architecture stands for all of them in GGUF. The kind of scores tells the models apart.
_GGUF_SIGMOID = 2
GGUF_FAMILY = replace(
    FAMILY,
    name="deepseek2",
    models="DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash as GGUF",
    hf_architectures=(),
    gguf_architectures=("deepseek2",),
    gguf_tensors=GGUF_LATENTS,
    gguf_alternatives=GGUF_CHOICES,
    gguf_derived=gguf_cache_row,
    gguf_unused=(r"blk\.<layers>\..*",),
    experts=Experts(
        settings=_gguf_experts,
        hf=(),
        gguf=(
            {**GGUF_EXPERTS, **GGUF_SHARED},
            {**GGUF_EXPERTS, **GGUF_SHARED, **GGUF_SCORE_BIAS},
        ),
    ),
)
