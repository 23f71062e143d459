"""The experts of a family as data: their number, and the location of their tensors in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings

# Limits for one layer and for all layers. The engine has the same ones.
MAX_EXPERTS = 1024
MAX_EXPERTS_OF_MODEL = 65536
MAX_EXPERT_GROUPS = 32
MAX_WIDTH = 1 << 22  # of any matrix; the limit of the engine is four times as large


VectorRule = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor in a file. In `name`, `{i}` is the layer and `{e}` the expert."""

    name: str
    stacked: bool = False  # one tensor for all experts of a layer: [experts, ...]
    half: int | None = None  # 0 or 1: the first or second half of the outputs of the stored matrix
    # The tensor is `part` of a stored one that has the rows of the tensors `fused`, in that order:
    # all rows of each, or those of one head after the other. Heads are those of `heads`.
    part: str = ""
    fused: tuple[str, ...] = ()
    heads: str = ""  # "heads", "kv_heads" or "key_heads"; empty: all rows of each
    grouped: bool = False  # a norm's weights, stored as [groups, ...]; needs `convert`
    transposed: bool = False  # stored as [inputs, outputs]
    # Name of the E8M0 scales [.., outputs, inputs / 32] of an MXFP4 tensor. The tensor `name` then
    # has only the codes [.., outputs, inputs / 32, 16].
    scales: str = ""
    # Makes the engine's FP32 vector of the stored values, whatever their shape.
    convert: VectorRule | None = None


# Engine name → location, for one layer. `experts.*` exist once per expert, the others once per
# layer: router, router.bias, latent_{down,up}, experts.{gate, up, gate_up, down}[.bias],
# shared.{gate, up, down, router}.
ExpertTensors = Mapping[str, TensorLocation]
MoeRule = Callable[[ConfigReader, int], MoeSettings | None]


@dataclass(frozen=True)
class Experts:
    """The experts of a family. The maps are alternatives: a file follows exactly one of them."""

    settings: MoeRule  # from config.json and the number of layers; None for a dense model
    hf: tuple[ExpertTensors, ...]
    gguf: tuple[ExpertTensors, ...]
    optional: bool = False  # some models of the family have none


def _hf(block: str, parts: Mapping[str, str]) -> ExpertTensors:
    """Return the Hugging Face names with one tensor per expert and matrix."""
    base = f"model.layers.{{i}}.{block}"
    places = {"router": TensorLocation(f"{base}.gate.weight")}
    for engine, name in parts.items():
        places[f"experts.{engine}"] = TensorLocation(f"{base}.experts.{{e}}.{name}.weight")
    return places


# Published checkpoints have one tensor per expert (HF_MIXTRAL, HF_QWEN). Transformers 5 holds all
# experts of a layer in one tensor (HF_STACKED).
HF_MIXTRAL = _hf("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})
HF_QWEN = _hf("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})
HF_STACKED: ExpertTensors = {
    "router": TensorLocation("model.layers.{i}.mlp.gate.weight"),
    "experts.gate": TensorLocation(
        "model.layers.{i}.mlp.experts.gate_up_proj", stacked=True, half=0
    ),
    "experts.up": TensorLocation("model.layers.{i}.mlp.experts.gate_up_proj", stacked=True, half=1),
    "experts.down": TensorLocation("model.layers.{i}.mlp.experts.down_proj", stacked=True),
}
HF_SHARED: ExpertTensors = {
    "shared.gate": TensorLocation("model.layers.{i}.mlp.shared_expert.gate_proj.weight"),
    "shared.up": TensorLocation("model.layers.{i}.mlp.shared_expert.up_proj.weight"),
    "shared.down": TensorLocation("model.layers.{i}.mlp.shared_expert.down_proj.weight"),
    "shared.router": TensorLocation("model.layers.{i}.mlp.shared_expert_gate.weight"),
}
HF_SHARED_EXPERTS: ExpertTensors = {
    f"shared.{name}": TensorLocation(f"model.layers.{{i}}.mlp.shared_experts.{name}_proj.weight")
    for name in ("gate", "up", "down")
}
GGUF_EXPERTS: ExpertTensors = {
    "router": TensorLocation("blk.{i}.ffn_gate_inp.weight"),
    "experts.gate": TensorLocation("blk.{i}.ffn_gate_exps.weight", stacked=True),
    "experts.up": TensorLocation("blk.{i}.ffn_up_exps.weight", stacked=True),
    "experts.down": TensorLocation("blk.{i}.ffn_down_exps.weight", stacked=True),
}
GGUF_SHARED: ExpertTensors = {
    "shared.gate": TensorLocation("blk.{i}.ffn_gate_shexp.weight"),
    "shared.up": TensorLocation("blk.{i}.ffn_up_shexp.weight"),
    "shared.down": TensorLocation("blk.{i}.ffn_down_shexp.weight"),
}
GGUF_SHARED_GATE: ExpertTensors = {
    "shared.router": TensorLocation("blk.{i}.ffn_gate_inp_shexp.weight")
}
GGUF_SCORE_BIAS: ExpertTensors = {"router.score_bias": TensorLocation("blk.{i}.exp_probs_b.bias")}


def local_experts(config: ConfigReader, num_layers: int) -> MoeSettings:
    """Return settings with experts of `intermediate_size` in every layer, as in Mixtral.

    The weights of the chosen experts sum to 1.
    """
    return MoeSettings(
        num_experts=_num_experts(config),
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=expert_width(config),
        layers=(True,) * num_layers,
    )


def sparse_experts(config: ConfigReader, num_layers: int) -> MoeSettings:
    """Return settings from `moe_intermediate_size` and `norm_topk_prob`, as in Qwen.

    Some layers may have no experts.
    """
    return MoeSettings(
        num_experts=_num_experts(config),
        top_k=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
        normalize=config.flag("norm_topk_prob", default=False),
        layers=_sparse_layers(config, num_layers),
    )


def expert_width(config: ConfigReader) -> int:
    """Return `intermediate_size`, or the width that a GGUF file gives its experts alone.

    transformers ignores `moe_intermediate_size` in these families.
    """
    key = "moe_intermediate_size"
    is_gguf = config.name(key) != key
    return config.integer(key if is_gguf else "intermediate_size", high=MAX_WIDTH)


def _num_experts(config: ConfigReader) -> int:
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    return config.integer(key, high=MAX_EXPERTS)


def _sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    step = config.integer("decoder_sparse_step", default=1)
    dense = set(config.integers("mlp_only_layers"))
    if dense - set(range(num_layers)):
        raise config.refuse(
            f"mlp_only_layers contains {max(dense)}. Layers must be 0 to {num_layers - 1}."
        )
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))
