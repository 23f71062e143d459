"""Falcon-H1: attention and Mamba-2 side by side in every layer, with factors of many tensors.

llama.cpp's converter multiplies the factors into the weights. For a Hugging Face folder this is
done while it is loaded.
"""

from collections.abc import Mapping
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import BranchSettings, RecurrentSettings
from lmdeploy.models.experts import MAX_WIDTH
from lmdeploy.models.family import (
    GGUF_TENSORS,
    HF_TENSORS,
    ModelFamily,
    Recurrent,
    TensorNames,
    configured_bias,
)
from lmdeploy.models.mamba2 import (
    GGUF_MAMBA2,
    gguf_mamba2_head_dim,
    hf_mamba2,
    mamba2_bias,
    mamba2_head_dim,
    mamba2_settings,
)
from lmdeploy.models.structure import Structure

_MIXER = "model.layers.{i}.mamba"


def _recurrent(config: ConfigReader, num_layers: int) -> RecurrentSettings:
    return mamba2_settings(
        config,
        (True,) * num_layers,
        has_norm=config.flag("mamba_rms_norm", default=False),
        gate_first=not config.flag("mamba_norm_before_gate", default=True),
    )


def _branches(config: ConfigReader, num_layers: int) -> BranchSettings:
    return BranchSettings(attention=(True,) * num_layers)


def _factor(config: ConfigReader, key: str) -> float:
    return config.number(key, default=1.0, low=1e-9, high=1e6)


def _factors(config: ConfigReader, key: str, *, count: int) -> tuple[float, ...]:
    factors = config.numbers(key) if config.has(key) else (1.0,) * count
    if len(factors) != count:
        raise config.refuse(f"{key} has {len(factors)} values. It must have {count}.")
    return factors


def _structure(config: ConfigReader) -> Structure:
    return Structure(
        embedding_scale=_factor(config, "embedding_multiplier"),
        logit_scale=_factor(config, "lm_head_multiplier"),
    )


def _scales(config: ConfigReader) -> Mapping[str, float]:
    """Return the factors of matrices and biases. Those of a matrix's input are not its bias's."""
    attention, mixer = (_factor(config, f"{name}_in_multiplier") for name in ("attention", "ssm"))
    gate, down = _factors(config, "mlp_multipliers", count=2)
    outputs = {
        "k": _factor(config, "key_multiplier"),
        "o": _factor(config, "attention_out_multiplier"),
        "gate": gate,
        "down": down,
        "recurrent.o": _factor(config, "ssm_out_multiplier"),
    }
    for part, factor in zip("zvkqa", _factors(config, "ssm_multipliers", count=5), strict=True):
        outputs[f"recurrent.{part}"] = factor
    inputs = dict.fromkeys(("q", "k", "v"), attention)
    inputs |= {f"recurrent.{part}": mixer for part in "zvkqa"}
    matrices = {
        name: inputs.get(name, 1.0) * outputs.get(name, 1.0) for name in inputs.keys() | outputs
    }
    return {**matrices, **{f"{name}.bias": factor for name, factor in outputs.items()}}


def _bias(config: ConfigReader) -> tuple[str, ...]:
    return configured_bias(config) + mamba2_bias(
        config,
        convolution="mamba_conv_bias",
        inputs="mamba_proj_bias",
        outputs="projectors_bias",
    )


def _derived(config: ConfigReader) -> Mapping[str, Any]:
    """Return the head_dim of Mamba-2 if config.json says "auto"."""
    if config.any_text("mamba_d_head") not in ("", "auto"):
        return {}
    expand = config.integer("mamba_expand", default=2, high=64)
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    size = config.integer("mamba_d_ssm", default=expand * hidden, high=MAX_WIDTH)
    return mamba2_head_dim(config, size=size)


def _norm(config: ConfigReader) -> TensorNames:
    """Return the norm of Mamba-2, which most models do not have."""
    if not config.flag("mamba_rms_norm", default=False):
        return {}
    return {"recurrent.norm": f"{_MIXER}.norm.weight"}


FAMILY = ModelFamily(
    name="falcon_h1",
    models="Falcon-H1",
    differs="attention and Mamba-2 side by side in every layer, factors of tensors",
    hf_architectures=("FalconH1ForCausalLM",),
    gguf_architectures=("falcon-h1",),
    hf_bias=_bias,
    hf_tensors={
        **HF_TENSORS,
        "final_norm": "model.final_layernorm.weight",
        "ffn_norm": "model.layers.{i}.pre_ff_layernorm.weight",
        "gate": "model.layers.{i}.feed_forward.gate_proj.weight",
        "up": "model.layers.{i}.feed_forward.up_proj.weight",
        "down": "model.layers.{i}.feed_forward.down_proj.weight",
    },
    hf_extra_tensors=_norm,
    gguf_tensors={**GGUF_TENSORS, "ffn_norm": "blk.{i}.ffn_norm"},
    gguf_optional_tensors={"recurrent.norm": GGUF_MAMBA2["recurrent.norm"]},
    structure=_structure,
    # llama.cpp computes the gate first.
    gguf_defaults=lambda config: {
        **gguf_mamba2_head_dim(config),
        "mamba_norm_before_gate": False,
    },
    hf_defaults={
        "hidden_act": "silu",
        "mamba_n_heads": 128,
        "mamba_d_state": 256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    hf_fixed={"hidden_act": "silu"},
    hf_derived=_derived,
    hf_scales=_scales,
    recurrent=Recurrent(
        _recurrent,
        hf_tensors=hf_mamba2(_MIXER, has_norm=False),
        gguf_tensors={kind: name for kind, name in GGUF_MAMBA2.items() if kind != "recurrent.norm"},
    ),
    branches=_branches,
)
