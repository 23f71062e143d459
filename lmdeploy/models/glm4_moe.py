"""GLM-4.5 and 4.6: experts chosen by sigmoids and a bias, a shared expert, dense first layers."""

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
from lmdeploy.models.family import (
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    ModelFamily,
    TensorNames,
)

_BIAS = {"router.score_bias": TensorLocation("model.layers.{i}.mlp.gate.e_score_correction_bias")}


def _settings(config: ConfigReader, num_layers: int) -> MoeSettings:
    dense = config.integer("first_k_dense_replace", default=1, low=0)
    width = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    shared = config.integer("n_shared_experts", default=1, low=0)
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


def _tensors(config: ConfigReader) -> TensorNames:
    return HF_QK_NORM if config.flag("use_qk_norm", default=False) else {}


FAMILY = ModelFamily(
    name="glm4_moe",
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6",
    differs="experts by sigmoids with a bias from the best groups, a shared one, dense first "
    "layers, partial RoPE",
    hf_architectures=("Glm4MoeForCausalLM",),
    gguf_architectures=("glm4moe",),
    hf_bias=lambda config: ("q", "k", "v") if config.flag("attention_bias", default=False) else (),
    hf_extra_tensors=_tensors,
    gguf_tensors={**GGUF_TENSORS, "ffn_norm": "blk.{i}.post_attention_norm.weight"},
    gguf_optional_tensors=GGUF_QK_NORM,
    hf_defaults={"partial_rotary_factor": 0.5, "max_position_embeddings": 131072},
    gguf_defaults=lambda config: {"first_k_dense_replace": 0, "n_shared_experts": 0},
    # The layers that predict several tokens at once follow the others. They are not used.
    hf_unused=(r"model\.layers\.<layers>\..*",),
    gguf_unused=(r"blk\.<layers>\..*",),
    experts=Experts(
        settings=_settings,
        hf=(
            {**HF_QWEN, **HF_SHARED_EXPERTS, **_BIAS},
            {**HF_STACKED, **HF_SHARED_EXPERTS, **_BIAS},
        ),
        gguf=({**GGUF_EXPERTS, **GGUF_SHARED, **GGUF_SCORE_BIAS},),
    ),
)
