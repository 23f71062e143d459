"""The experts of a family as data: their number, and the location of their tensors in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import MoeSettings

# Limits for one layer and for all layers. The engine has the same ones.
MAX_EXPERTS = 1024
MAX_EXPERTS_OF_MODEL = 65536
MAX_EXPERT_GROUPS = 32
MAX_WIDTH = 1 << 22  # of any matrix; the limit of the engine is four times as large


@dataclass(frozen=True)
class TensorLocation:
    """The location of a tensor in a file. In `name`, `{i}` is the layer and `{e}` the expert."""

    name: str
    stacked: bool = False  # one tensor for all experts of a layer: [experts, ...]
    half: int | None = None  # 0 or 1: the first or second half of the outputs of the stored matrix
    # q, k or v: the rows of that part in a matrix with the rows of q, then k, then v.
    qkv: str = ""
    grouped: bool = False  # q, k and v follow each other for each KV head instead (InternLM2)
    transposed: bool = False  # stored as [inputs, outputs]
    # Name of the E8M0 scales [.., outputs, inputs / 32] of an MXFP4 tensor. The tensor `name` then
    # has only the codes [.., outputs, inputs / 32, 16].
    scales: str = ""


# Engine name → location, for one layer. `experts.*` exist once per expert, the others once per
# layer: router, router.bias, experts.{gate, up, gate_up, down}[.bias],
# shared.{gate, up, down, router}.
ExpertTensors = Mapping[str, TensorLocation]
MoeRule = Callable[[ConfigReader, int], MoeSettings]


@dataclass(frozen=True)
class Experts:
    """The experts of a family. The maps are alternatives: a file follows exactly one of them."""

    settings: MoeRule  # from config.json and the number of layers
    hf: tuple[ExpertTensors, ...]
    gguf: tuple[ExpertTensors, ...]
    # Defaults of llama.cpp for a file without the key: whether the weights of the chosen experts
    # sum to 1, and the function that makes scores of logits (see `_is_sigmoid_from_gguf`).
    gguf_normalize: bool = True
    gguf_gating: int = 0
    gguf_shared: int = 0  # number of shared experts
    weigh_inputs: bool = False  # MoeSettings.weigh_inputs


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
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
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


def moe_from_gguf(
    config: ConfigReader, prefix: str, *, experts: Experts, num_layers: int
) -> MoeSettings:
    """Return settings from `<architecture>.expert_*`."""
    feed_forward = config.integer(f"{prefix}.feed_forward_length", high=MAX_WIDTH)
    width = config.integer(
        f"{prefix}.expert_feed_forward_length", default=feed_forward, high=MAX_WIDTH
    )
    normalize = config.flag(f"{prefix}.expert_weights_norm", default=experts.gguf_normalize)
    is_sigmoid = _is_sigmoid_from_gguf(config, prefix, experts=experts, normalize=normalize)
    scale = config.number(f"{prefix}.expert_weights_scale", default=1.0)
    if scale != 0.0 and not (is_sigmoid or scale == 1.0):  # 0 means no scale
        raise config.refuse(f"{prefix}.expert_weights_scale is {scale:g}. It must be 1.")
    groups = max(1, config.integer(f"{prefix}.expert_group_count", default=0, low=0))
    has_gate = any("shared.router" in tensors for tensors in experts.gguf)
    shared = 0
    if any("shared.gate" in tensors for tensors in experts.gguf):
        count = config.integer(
            f"{prefix}.expert_shared_count", default=experts.gguf_shared, low=0, high=MAX_EXPERTS
        )
        shared = config.integer(
            f"{prefix}.expert_shared_feed_forward_length",
            default=feed_forward if has_gate else count * width,
            low=0,
            high=MAX_WIDTH,
        )
    step = config.integer(f"{prefix}.interleave_moe_layer_step", default=1)
    dense = config.integer(f"{prefix}.leading_dense_block_count", default=0, low=0)
    return MoeSettings(
        num_experts=config.integer(f"{prefix}.expert_count", high=MAX_EXPERTS),
        top_k=config.integer(f"{prefix}.expert_used_count"),
        intermediate_size=width,
        shared_intermediate_size=shared,
        shared_gate=has_gate or not shared,
        normalize=normalize,
        sigmoid=is_sigmoid,
        num_groups=groups,
        top_groups=config.integer(f"{prefix}.expert_group_used_count") if groups > 1 else 1,
        scale=scale or 1.0,
        weigh_inputs=experts.weigh_inputs,
        layers=tuple(i >= dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


def _is_sigmoid_from_gguf(
    config: ConfigReader, prefix: str, *, experts: Experts, normalize: bool
) -> bool:
    """Return whether scores are sigmoids.

    Values of llama.cpp: 0 unset, 1 softmax over all experts, 2 sigmoid, 3 softmax over the chosen
    experts, which equals 1 if the weights are normalized.
    """
    key = f"{prefix}.expert_gating_func"
    gating = config.integer(key, default=0, low=0) or experts.gguf_gating
    known = {0: "", 1: "softmax"}
    if experts.gguf_gating == 2:
        known[2] = "sigmoid"
    if normalize:
        known[3] = "softmax over the chosen experts"
    if gating not in known:
        wanted = " or ".join(f"{value} ({name})" for value, name in known.items() if value)
        raise config.refuse(f"{key} is {gating}. It must be {wanted}.")
    return gating == 2


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
