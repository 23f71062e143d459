"""GPT-OSS: attention sinks, a window in every other layer, biases, MXFP4 experts."""

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings
from lmdeploy.models.experts import Experts, ExpertTensors, TensorLocation, local_experts
from lmdeploy.models.family import (
    ATTENTION_MATRICES,
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    windows_by_type,
)

_HF_EXPERTS = "model.layers.{i}.mlp.experts"
_HF_COMMON: ExpertTensors = {
    "router": TensorLocation("model.layers.{i}.mlp.router.weight"),
    "router.bias": TensorLocation("model.layers.{i}.mlp.router.bias"),
    "experts.gate_up.bias": TensorLocation(f"{_HF_EXPERTS}.gate_up_proj_bias", stacked=True),
    "experts.down.bias": TensorLocation(f"{_HF_EXPERTS}.down_proj_bias", stacked=True),
}
_HF_MXFP4: ExpertTensors = {
    **_HF_COMMON,
    **{
        f"experts.{name}": TensorLocation(
            f"{_HF_EXPERTS}.{name}_proj_blocks",
            stacked=True,
            scales=f"{_HF_EXPERTS}.{name}_proj_scales",
        )
        for name in ("gate_up", "down")
    },
}
_HF_PLAIN: ExpertTensors = {
    **_HF_COMMON,
    **{
        f"experts.{name}": TensorLocation(
            f"{_HF_EXPERTS}.{name}_proj", stacked=True, transposed=True
        )
        for name in ("gate_up", "down")
    },
}
_GGUF: ExpertTensors = {
    "router": TensorLocation("blk.{i}.ffn_gate_inp.weight"),
    "router.bias": TensorLocation("blk.{i}.ffn_gate_inp.bias"),
    **{
        f"experts.{name}{suffix}": TensorLocation(
            f"blk.{{i}}.ffn_{name}_exps{suffix or '.weight'}", stacked=True
        )
        for name in ("gate", "up", "down")
        for suffix in ("", ".bias")
    },
}


def _windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return windows by `layer_types`, or for every other layer from the first if it is missing."""
    window = config.integer("sliding_window")
    if config.has("layer_types"):
        return windows_by_type(config, num_layers, window=window)
    return tuple(0 if layer % 2 else window for layer in range(num_layers))


def _settings(config: ConfigReader, num_layers: int) -> MoeSettings:
    if (alpha := config.number("swiglu_alpha", default=1.702)) != 1.702:
        raise config.refuse(f"swiglu_alpha is {alpha:g}. It must be 1.702.")
    return local_experts(config, num_layers)


FAMILY = ModelFamily(
    name="gpt_oss",
    models="GPT-OSS 20B and 120B",
    differs="sinks, alternating windows, MXFP4 experts with biases",
    hf_architectures=("GptOssForCausalLM",),
    gguf_architectures=("gpt-oss",),
    windows=_windows,
    hf_bias=lambda config: (
        ATTENTION_MATRICES if config.flag("attention_bias", default=True) else ()
    ),
    hf_tensors={**HF_TENSORS, "sinks": "model.layers.{i}.self_attn.sinks"},
    gguf_tensors={
        **GGUF_TENSORS,
        "ffn_norm": "blk.{i}.post_attention_norm.weight",
        "sinks": "blk.{i}.attn_sinks.weight",
        **{
            f"{engine}.bias": GGUF_TENSORS[engine].replace("weight", "bias")
            for engine in ATTENTION_MATRICES
        },
    },
    hf_defaults={
        "head_dim": 64,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    hf_rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    activation="clamped_swiglu",
    experts=Experts(settings=_settings, hf=(_HF_MXFP4, _HF_PLAIN), gguf=(_GGUF,)),
    hf_quant_methods=("mxfp4",),
)
