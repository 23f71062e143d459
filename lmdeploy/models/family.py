"""A model family as data: names of tensors and rules. A new model needs one small file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.experts import Experts

# Maps from the engine's tensor names to those in files; `{i}` is the layer. A file must have every
# tensor of its family's map, except a tied head and the matrices that experts replace. The maps
# omit most biases: `hf_bias` names them for Hugging Face, and layer 0 shows them for GGUF.
REQUIRED_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
REQUIRED_VECTORS = ("attention_norm", "ffn_norm")

HF_TENSORS: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{i}.input_layernorm.weight",
    "ffn_norm": "model.layers.{i}.post_attention_layernorm.weight",
    "q": "model.layers.{i}.self_attn.q_proj.weight",
    "k": "model.layers.{i}.self_attn.k_proj.weight",
    "v": "model.layers.{i}.self_attn.v_proj.weight",
    "o": "model.layers.{i}.self_attn.o_proj.weight",
    "gate": "model.layers.{i}.mlp.gate_proj.weight",
    "up": "model.layers.{i}.mlp.up_proj.weight",
    "down": "model.layers.{i}.mlp.down_proj.weight",
}
GGUF_TENSORS: Mapping[str, str] = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "blk.{i}.attn_norm.weight",
    "ffn_norm": "blk.{i}.ffn_norm.weight",
    "q": "blk.{i}.attn_q.weight",
    "k": "blk.{i}.attn_k.weight",
    "v": "blk.{i}.attn_v.weight",
    "o": "blk.{i}.attn_output.weight",
    "gate": "blk.{i}.ffn_gate.weight",
    "up": "blk.{i}.ffn_up.weight",
    "down": "blk.{i}.ffn_down.weight",
}
# Families with these norms add them to both maps.
HF_QK_NORM = {
    "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
}
GGUF_QK_NORM = {
    "q_norm": "blk.{i}.attn_q_norm.weight",
    "k_norm": "blk.{i}.attn_k_norm.weight",
}
ATTENTION_MATRICES = ("q", "k", "v", "o")
FFN_MATRICES = ("gate", "up", "down")

WindowRule = Callable[[ConfigReader, int], tuple[int, ...]]
GgufWindowRule = Callable[[ConfigReader, str], tuple[int, ...]]
BiasRule = Callable[[ConfigReader], tuple[str, ...]]


def no_windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return full attention for every layer."""
    return (0,) * num_layers


def one_window(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return `sliding_window` for every layer; null means full attention."""
    window = config.integer("sliding_window", low=0) if config.has("sliding_window") else 0
    return (window,) * num_layers


def layered_windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the windows of Qwen if `use_sliding_window` is set.

    `layer_types` selects the layers; without it, `max_window_layers` is the first one.
    """
    if not config.flag("use_sliding_window", default=False) or not config.has("sliding_window"):
        return no_windows(config, num_layers)
    window = config.integer("sliding_window")
    if config.texts("layer_types"):
        return windows_by_type(config, num_layers, window=window)
    first = config.integer("max_window_layers", default=28, low=0)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def windows_by_type(config: ConfigReader, num_layers: int, *, window: int) -> tuple[int, ...]:
    """Return the windows by `layer_types`: full_attention or sliding_attention per layer."""
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise config.refuse(f"layer_types has {len(kinds)} entries. It must have {num_layers}.")
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise config.refuse(
                f"layer_types contains {kind[:40]!r}. It must be {' or '.join(known)}."
            )
    return tuple(known[kind] for kind in kinds)


def gguf_one_window(config: ConfigReader, prefix: str) -> tuple[int, ...]:
    """Return `<architecture>.attention.sliding_window` for every layer, or 0 if it is missing."""
    key = f"{prefix}.attention.sliding_window"
    window = config.integer(key, low=0) if config.has(key) else 0
    return (window,) * config.integer(f"{prefix}.block_count")


def no_bias(config: ConfigReader) -> tuple[str, ...]:
    """Return no names: no linear layer has a bias."""
    return ()


def configured_bias(config: ConfigReader) -> tuple[str, ...]:
    """Return q, k, v, o for `attention_bias` and gate, up, down for `mlp_bias` (Llama)."""
    names: tuple[str, ...] = ()
    if config.flag("attention_bias", default=False):
        names += ATTENTION_MATRICES
    if config.flag("mlp_bias", default=False):
        names += FFN_MATRICES
    return names


def qkv_bias(config: ConfigReader) -> tuple[str, ...]:
    """Return q, k and v, which always have a bias in Qwen2."""
    return ("q", "k", "v")


@dataclass(frozen=True)
class ModelFamily:
    """One model family. Tensor maps go from engine names to names in files."""

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    windows: WindowRule = no_windows
    gguf_windows: GgufWindowRule = gguf_one_window
    hf_bias: BiasRule = no_bias
    hf_tensors: Mapping[str, str] = field(default_factory=lambda: HF_TENSORS)
    gguf_tensors: Mapping[str, str] = field(default_factory=lambda: GGUF_TENSORS)
    # GGUF stores q and k with the rows of each head interleaved: i, i + dim / 2.
    gguf_interleaved_rope: bool = False
    # Defaults of transformers for keys that config.json lacks.
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    # The default if config.json has neither rope_parameters nor rope_scaling.
    hf_rope: Mapping[str, Any] | None = None
    activation: str = ""  # the engine's name; empty to use hidden_act
    experts: Experts | None = None
    hf_quant_methods: tuple[str, ...] = ()  # accepted in quantization_config
    gguf_yarn_truncate: bool = True
