"""What a model family is: names and rules as data. A new model is one small file of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.experts import Experts

# The engine's names, and what files call them; `{i}` is the layer. A file must have every tensor of
# its family's map but a tied head and what experts replace. Biases that are not in the map: those
# that `hf_bias` names, and in GGUF those that layer 0 has.
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
# Added to both maps by the families that have them.
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
    """Full attention in every layer."""
    return (0,) * num_layers


def one_window(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`sliding_window` in every layer; null means full attention."""
    window = config.integer("sliding_window", low=0) if config.has("sliding_window") else 0
    return (window,) * num_layers


def layered_windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`use_sliding_window` with `layer_types`, or from layer `max_window_layers` on (Qwen)."""
    if not config.flag("use_sliding_window", default=False) or not config.has("sliding_window"):
        return no_windows(config, num_layers)
    window = config.integer("sliding_window")
    if config.texts("layer_types"):
        return windows_by_type(config, num_layers, window=window)
    first = config.integer("max_window_layers", default=28, low=0)
    return tuple(window if layer >= first else 0 for layer in range(num_layers))


def windows_by_type(config: ConfigReader, num_layers: int, *, window: int) -> tuple[int, ...]:
    """`layer_types`: full_attention or sliding_attention for every layer."""
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise config.refuse(f"layer_types has {len(kinds)} entries; wanted {num_layers}")
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise config.refuse(f"layer_types has {kind[:40]!r}; supported: {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


def gguf_one_window(config: ConfigReader, prefix: str) -> tuple[int, ...]:
    """`<architecture>.attention.sliding_window` in every layer; none when the key is missing."""
    key = f"{prefix}.attention.sliding_window"
    window = config.integer(key, low=0) if config.has(key) else 0
    return (window,) * config.integer(f"{prefix}.block_count")


def no_bias(config: ConfigReader) -> tuple[str, ...]:
    """No linear layer has a bias."""
    return ()


def configured_bias(config: ConfigReader) -> tuple[str, ...]:
    """`attention_bias` for q, k, v, o and `mlp_bias` for gate, up, down (Llama)."""
    names: tuple[str, ...] = ()
    if config.flag("attention_bias", default=False):
        names += ATTENTION_MATRICES
    if config.flag("mlp_bias", default=False):
        names += FFN_MATRICES
    return names


def qkv_bias(config: ConfigReader) -> tuple[str, ...]:
    """q, k and v always have one (Qwen2)."""
    return ("q", "k", "v")


@dataclass(frozen=True)
class ModelFamily:
    """One model family. Tensor maps give, for an engine name, the file's name of it."""

    name: str
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    windows: WindowRule = no_windows
    gguf_windows: GgufWindowRule = gguf_one_window
    hf_bias: BiasRule = no_bias
    hf_tensors: Mapping[str, str] = field(default_factory=lambda: HF_TENSORS)
    gguf_tensors: Mapping[str, str] = field(default_factory=lambda: GGUF_TENSORS)
    # GGUF stores q and k of these families with the rows of a head interleaved (i, i + dim / 2).
    gguf_interleaved_rope: bool = False
    # What transformers takes where config.json has no such key.
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    # The same for rope_parameters and rope_scaling, where it has neither.
    hf_rope: Mapping[str, Any] | None = None
    activation: str = ""  # the engine's name, where hidden_act does not tell
    experts: Experts | None = None
    hf_quant_methods: tuple[str, ...] = ()  # of quantization_config, beside none
    gguf_yarn_truncate: bool = True
