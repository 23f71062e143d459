"""MiniMax-M2: norms of q and k over all heads, partial RoPE, experts chosen by sigmoids."""

from dataclasses import replace

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings
from lmdeploy.models.experts import (
    GGUF_EXPERTS,
    GGUF_SCORE_BIAS,
    HF_MIXTRAL,
    HF_STACKED,
    Experts,
    TensorLocation,
    local_experts,
)
from lmdeploy.models.family import (
    GGUF_QK_NORM,
    GGUF_TENSORS,
    HF_QK_NORM,
    HF_TENSORS,
    ModelFamily,
)
from lmdeploy.models.structure import NormSettings, Structure


def _settings(config: ConfigReader, num_layers: int) -> MoeSettings:
    return replace(local_experts(config, num_layers), sigmoid=True)


def _bias(block: str) -> dict[str, TensorLocation]:
    return {
        "router.score_bias": TensorLocation(f"model.layers.{{i}}.{block}.e_score_correction_bias")
    }


_STRUCTURE = Structure(norm=NormSettings(qk_all_heads=True))
FAMILY = ModelFamily(
    name="minimax_m2",
    models="MiniMax-M2",
    differs="experts by sigmoids with a bias, norms of q and k over all heads, partial RoPE",
    hf_architectures=("MiniMaxM2ForCausalLM",),
    gguf_architectures=("minimax-m2",),
    hf_tensors={**HF_TENSORS, **HF_QK_NORM},
    hf_defaults={"head_dim": 128, "rope_theta": 5e6},
    gguf_tensors={**GGUF_TENSORS, **GGUF_QK_NORM},
    structure=lambda config: _STRUCTURE,
    experts=Experts(
        settings=_settings,
        hf=({**HF_MIXTRAL, **_bias("block_sparse_moe")}, {**HF_STACKED, **_bias("mlp")}),
        gguf=({**GGUF_EXPERTS, **GGUF_SCORE_BIAS},),
    ),
)
