"""A model family as data: names of tensors and rules. A new model needs one small file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmdeploy.models.config_reader import ConfigReader
from lmdeploy.models.decoder_config import (
    BranchSettings,
    LatentSettings,
    RecurrentSettings,
    RopeSettings,
)
from lmdeploy.models.experts import Experts, TensorLocation
from lmdeploy.models.layer_sizes import LayerSettings
from lmdeploy.models.structure import Structure

# Maps from the engine's tensor names to those in files; `{i}` is the layer. A name is text, or a
# location if the tensor is a part of a stored one. A file must have every
# tensor of its family's map, except a tied head and the matrices that experts replace. The maps
# omit most biases: `hf_bias` names them for Hugging Face, and layer 0 shows them for GGUF.
REQUIRED_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")

TensorNames = Mapping[str, str | TensorLocation]

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
# Families with fused matrices replace the single ones.
HF_FUSED_GATE_UP = {
    name: TensorLocation("model.layers.{i}.mlp.gate_up_proj.weight", half=half)
    for half, name in enumerate(("gate", "up"))
}
QKV = ("q", "k", "v")
HF_FUSED_QKV = {
    name: TensorLocation("model.layers.{i}.self_attn.qkv_proj.weight", part=name, fused=QKV)
    for name in QKV
}
GGUF_FUSED_GATE_UP = {
    name: TensorLocation("blk.{i}.ffn_up.weight", half=half)
    for half, name in enumerate(("gate", "up"))
}
GGUF_FUSED_QKV = {
    name: TensorLocation("blk.{i}.attn_qkv.weight", part=name, fused=QKV) for name in QKV
}
# Families that also normalize the output of each branch. GGUF's names are the same for all.
GGUF_OUTPUT_NORMS = {
    "attention_output_norm": "blk.{i}.post_attention_norm.weight",
    "ffn_output_norm": "blk.{i}.post_ffw_norm.weight",
}
ATTENTION_MATRICES = ("q", "k", "v", "o")
ATTENTION_TENSORS = (*ATTENTION_MATRICES, "attention_gate", "q_norm", "k_norm", "sinks")
FFN_MATRICES = ("gate", "up", "down")
# Attention over latents: matrices with a part for each head, and the stored form of both at once.
JOINT_HEADS = "latent.kv_b"
HEAD_MATRICES = (JOINT_HEADS, "latent.k_b", "latent.v_b")
RECURRENT_GATES = ("recurrent.a", "recurrent.b")

StructureRule = Callable[[ConfigReader], Structure]
# All RoPE settings of a model, and the index of each layer's: none for index 0 in every layer.
Ropes = tuple[tuple[RopeSettings, ...], tuple[int, ...]]
WindowRule = Callable[[ConfigReader, int], tuple[int, ...]]
TensorRule = Callable[[ConfigReader], TensorNames]
BiasRule = Callable[[ConfigReader], tuple[str, ...]]
DefaultRule = Callable[[ConfigReader], Mapping[str, Any]]
BranchRule = Callable[[ConfigReader, int], BranchSettings]
SizeRule = Callable[[ConfigReader, int], LayerSettings]
ScaleRule = Callable[[ConfigReader], Mapping[str, float]]  # from the engine's names of tensors


class RopeRule(Protocol):
    """Returns the RoPE of every layer from a config.json."""

    def __call__(self, config: ConfigReader, *, num_layers: int, max_position: int) -> Ropes: ...


def no_defaults(config: ConfigReader) -> Mapping[str, Any]:
    """Return no values."""
    return {}


def all_branches(config: ConfigReader, num_layers: int) -> BranchSettings:
    """Return attention, unless a layer is recurrent, and a feed-forward for every layer."""
    return BranchSettings()


def same_sizes(config: ConfigReader, num_layers: int) -> LayerSettings:
    """Return the same sizes, and its own K and V, for every layer."""
    return LayerSettings()


def no_scales(config: ConfigReader) -> Mapping[str, float]:
    """Return no factors: the stored values are the weights."""
    return {}


def no_tensors(config: ConfigReader) -> TensorNames:
    """Return no tensors."""
    return {}


def with_norm_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names with a bias for every norm over hidden values."""
    biases = {
        f"{kind}.bias": name.removesuffix("weight") + "bias"
        for kind, name in names.items()
        if kind in ("attention_norm", "ffn_norm", "final_norm")
    }
    return {**names, **biases}


def without_gate(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a feed-forward without a gate."""
    return {kind: name for kind, name in names.items() if kind != "gate"}


def without_input_norms(names: Mapping[str, str]) -> dict[str, str]:
    """Return the names without the norms before each branch."""
    inputs = ("attention_norm", "ffn_norm")
    return {kind: name for kind, name in names.items() if kind not in inputs}


def no_windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return full attention for every layer."""
    return (0,) * num_layers


def one_window(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return `sliding_window` for every layer; null means full attention."""
    window = config.integer("sliding_window", low=0) if config.has("sliding_window") else 0
    return (window,) * num_layers


def optional_window(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return `sliding_window` for every layer if `use_sliding_window` is set."""
    used = config.flag("use_sliding_window", default=False)
    return (one_window if used else no_windows)(config, num_layers)


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


def llama_structure(config: ConfigReader) -> Structure:
    """Return the structure of Llama."""
    return Structure()


def layer_types(config: ConfigReader, num_layers: int, *, period: int) -> list[str]:
    """Return `layer_types`. Without it, the last layer of each period has full attention.

    A period of 0 means full attention in every layer.
    """
    if kinds := config.texts("layer_types"):
        return kinds
    return [
        "sliding_attention" if period and (layer + 1) % period else "full_attention"
        for layer in range(num_layers)
    ]


def patterned_types(config: ConfigReader, num_layers: int, *, period: int) -> list[str]:
    """Return `layer_types`, where the key `sliding_window_pattern` replaces the period."""
    period = config.integer("sliding_window_pattern", default=period)
    return layer_types(config, num_layers, period=period)


def patterned_windows(period: int) -> WindowRule:
    """Return the rule of one `sliding_window` in the layers of `patterned_types`."""

    def windows(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
        kinds = patterned_types(config, num_layers, period=period)
        window = config.integer("sliding_window")
        return windows_by_type(config, num_layers, window=window, kinds=kinds)

    return windows


def rope_in_windows(rope: RopeSettings, windows: tuple[int, ...]) -> Ropes:
    """Return one RoPE for layers with a window, and none for the others."""
    return (rope,), tuple(0 if window else -1 for window in windows)


def windows_by_type(
    config: ConfigReader, num_layers: int, *, window: int, kinds: list[str] | None = None
) -> tuple[int, ...]:
    """Return the windows by layer type: full_attention or sliding_attention per layer.

    `kinds` are the types, and the default is `layer_types`.
    """
    kinds = config.texts("layer_types") if kinds is None else kinds
    if len(kinds) != num_layers:
        raise config.refuse(f"layer_types has {len(kinds)} entries. It must have {num_layers}.")
    known = {"full_attention": 0, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise config.refuse(
                f"layer_types contains {kind[:40]!r}. It must be {' or '.join(known)}."
            )
    return tuple(known[kind] for kind in kinds)


def layers_of_types(
    config: ConfigReader, num_layers: int, *, kinds: Mapping[str, bool]
) -> tuple[bool, ...]:
    """Return which layers are recurrent. `kinds` has the known values of `layer_types`.

    A GGUF file shows them by their number of KV heads, which is 0.
    """
    if config.has("attention_layers"):
        return tuple(not attends for attends in config.flags("attention_layers"))
    key = "num_key_value_heads"
    if config.name(key) != key:  # a GGUF file
        raise config.refuse(f"{config.name(key)} is one number. It must be one for each layer.")
    named = config.texts("layer_types")
    if len(named) != num_layers:
        raise config.refuse(f"layer_types has {len(named)} entries. It must have {num_layers}.")
    for kind in named:
        if kind not in kinds:
            raise config.refuse(
                f"layer_types contains {kind[:40]!r}. It must be {' or '.join(kinds)}."
            )
    return tuple(kinds[kind] for kind in named)


def stored_parts(name: str, parts: tuple[str, ...], *, heads: str = "") -> TensorNames:
    """Return the tensors of a stored matrix with the rows of `parts`.

    `heads` is as in TensorLocation.
    """
    return {part: TensorLocation(name, part=part, fused=parts, heads=heads) for part in parts}


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
class Recurrent:
    """The recurrent layers of a family: their settings and tensors."""

    # From the number of layers. None if none of them is recurrent.
    settings: Callable[[ConfigReader, int], RecurrentSettings | None]
    hf_tensors: TensorNames
    gguf_tensors: TensorNames
    gguf_tiled: bool = False  # a GGUF file has another order of heads (RecurrentSettings.tiled)


@dataclass(frozen=True)
class ModelFamily:
    """One model family. Tensor maps go from engine names to names in files."""

    name: str
    models: str  # what its users call it
    hf_architectures: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    differs: str = ""  # how it differs from Llama
    windows: WindowRule = no_windows
    hf_bias: BiasRule = no_bias
    hf_tensors: TensorNames = field(default_factory=lambda: HF_TENSORS)
    hf_extra_tensors: TensorRule = no_tensors  # that depend on config.json
    gguf_tensors: TensorNames = field(default_factory=lambda: GGUF_TENSORS)
    gguf_optional_tensors: TensorNames = field(default_factory=dict)  # that some models have
    # Groups of tensors of which a file has one or none: the first whose tensors layer 0 has.
    gguf_alternatives: tuple[tuple[TensorNames, ...], ...] = ()
    # The rows of each head of q and k that rotate are stored as pairs: i, i + dim / 2.
    hf_interleaved_rope: bool = False
    gguf_interleaved_rope: bool = False
    structure: StructureRule = llama_structure
    ropes: RopeRule | None = None  # None uses one RoPE for all layers
    # Values of config.json that GGUF lacks or may lack, given the translated metadata.
    gguf_defaults: DefaultRule = no_defaults
    gguf_by_layer: bool = False  # keys of GGUF may be lists of different values for each layer
    hf_norm_offset: float = 0.0  # added to every norm weight
    hf_norm_eps: str = "rms_norm_eps"
    hf_dense_size: str = "intermediate_size"  # of the layers without experts
    # Keys that change the computation, and the only value that is built.
    hf_fixed: Mapping[str, object] = field(default_factory=dict)
    # Regular expressions of tensors that are not loaded; the family's file says why.
    hf_unused: tuple[str, ...] = ()
    gguf_unused: tuple[str, ...] = ()
    # Defaults of transformers for keys that config.json lacks.
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    # Values that follow from others. They replace those of config.json.
    hf_derived: DefaultRule = no_defaults
    gguf_derived: DefaultRule = no_defaults
    # The default if config.json has neither rope_parameters nor rope_scaling.
    hf_rope: Mapping[str, Any] | None = None
    activation: str = ""  # the engine's name; empty to use hidden_act
    experts: Experts | None = None
    recurrent: Recurrent | None = None
    # The latents of a family with multi-head latent attention. `hf_derived` and `gguf_derived` then
    # state the cache's row as head_dim, rotary_dim and one KV head.
    latent: Callable[[ConfigReader], LatentSettings] | None = None
    branches: BranchRule = all_branches
    layer_sizes: SizeRule = same_sizes
    hf_scales: ScaleRule = no_scales  # of stored values
    hf_quant_methods: tuple[str, ...] = ()  # accepted in quantization_config

    def completed(self, config: ConfigReader) -> ConfigReader:
        """Return a config.json with its defaults and derived values."""
        config = config.with_defaults(self.hf_defaults)
        return config.with_values(self.hf_derived(config))
