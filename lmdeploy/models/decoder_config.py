"""The configuration of a decoder as plain data, which converts to the engine's ModelConfig."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmdeploy.models.layer_sizes import LayerSettings
from lmdeploy.models.structure import Structure

if TYPE_CHECKING:
    from lmdeploy._turbomind import (
        LatentConfig,
        ModelConfig,
        MoeConfig,
        RecurrentConfig,
        RopeConfig,
    )


@dataclass(frozen=True)
class RopeSettings:
    """Settings of the rotary embedding, with names and defaults of Hugging Face configs."""

    kind: str = "default"  # default, linear, dynamic, llama3, yarn, longrope
    theta: float = 10000.0
    dim: int = 0  # values of a head that rotate; 0 means all
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # for yarn and longrope; 0 derives it from `factor` for yarn
    truncate: bool = True
    # Divisors of the frequencies: GGUF's rope_freqs, or the short factors of longrope.
    freq_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()  # for longrope and sessions beyond the original length

    def to_engine(self, head_dim: int) -> RopeConfig:
        """Return the engine's form for heads of `head_dim` values."""
        from lmdeploy._turbomind import RopeConfig

        return RopeConfig.from_dict({**vars(self), "dim": self.dim or head_dim})


@dataclass(frozen=True)
class MoeSettings:
    """A mixture of experts: each token uses `top_k` of `num_experts` feed-forward networks."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    shared_intermediate_size: int = 0  # 0 if there is no shared expert
    latent_size: int = 0  # inputs and outputs of the routed experts; 0 for hidden_size
    normalize: bool = True  # the top_k weights of a token sum to 1
    sigmoid: bool = False  # scores are sigmoids of the logits, not a softmax
    shared_gate: bool = True  # a router weighs the shared expert
    best_of_group: bool = False  # a group counts as its best expert, not as its best two
    weigh_inputs: bool = False  # weights multiply the inputs of experts, not their outputs
    beside_dense: bool = False  # a layer with experts also has the dense feed-forward
    num_groups: int = 1  # of adjacent experts; a token's experts come from the top_groups best
    top_groups: int = 1
    scale: float = 1.0  # factor of the routed experts' output
    layers: tuple[bool, ...] = ()  # per layer; False for a dense feed-forward network

    def to_engine(self) -> MoeConfig:
        """Return the engine's form of these settings."""
        from lmdeploy._turbomind import MoeConfig

        return MoeConfig.from_dict(vars(self))


@dataclass(frozen=True)
class RecurrentSettings:
    """Layers with a recurrent state, instead of attention or beside it.

    The rule "gated_delta" is that of Qwen3-Next, and "selective_scan" that of Mamba-2, whose C, B
    and x are q, k and v. "short_convolution" (LFM2) has no heads, but `width` channels.
    """

    layers: tuple[bool, ...]  # per layer
    kernel: int  # of the convolution over q, k and v
    rule: str = "gated_delta"
    num_key_heads: int = 0
    num_value_heads: int = 0  # a multiple of num_key_heads
    key_dim: int = 0
    value_dim: int = 0
    width: int = 0
    norm_groups: int = 0  # parts of the output that are normalized; 0 if there is no norm
    gate_first: bool = False  # the gate precedes the norm
    tiled: bool = False  # the value heads of a key head are not adjacent, but num_key_heads apart

    @property
    def key_size(self) -> int:
        """Return the values of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Return the values of all value heads, or the channels of a convolution alone."""
        return self.num_value_heads * self.value_dim + self.width

    @property
    def norm_size(self) -> int:
        """Return the weights of the norm. All heads of the gated delta rule share them."""
        return self.value_dim if self.rule == "gated_delta" else self.value_size

    def to_engine(self) -> RecurrentConfig:
        """Return the engine's form of these settings."""
        from lmdeploy._turbomind import RecurrentConfig

        return RecurrentConfig.from_dict(vars(self))


@dataclass(frozen=True)
class LatentSettings:
    """Multi-head latent attention: all heads read one latent of `head_dim` values per token."""

    nope_dim: int  # values of a query head that do not rotate
    rope_dim: int  # values that rotate
    value_dim: int  # values of a head's output
    q_rank: int = 0  # of the query's latent; 0 if queries are projected at once
    interleaved: bool = False  # RoPE rotates neighbors instead of halves
    norm_eps: float = 1e-6  # of the norms of both latents

    @property
    def query_dim(self) -> int:
        """Return the values of a query head."""
        return self.nope_dim + self.rope_dim

    def to_engine(self) -> LatentConfig:
        """Return the engine's form of these settings."""
        from lmdeploy._turbomind import LatentConfig

        return LatentConfig.from_dict(vars(self))


@dataclass(frozen=True)
class BranchSettings:
    """The branches of each layer.

    Without entries, every layer that is not recurrent has attention, and every layer has a
    feed-forward.
    """

    attention: tuple[bool, ...] = ()  # per layer
    feed_forward: tuple[bool, ...] = ()  # per layer


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and settings of a model. Every field was checked when it was read."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of K and V; with latents, of the latent
    vocab_size: int
    max_position: int
    norm_eps: float
    # Per layer: 0 for full attention, a window, or -c for attention in chunks of c tokens.
    windows: tuple[int, ...]
    tied_head: bool
    activation: str = "silu"
    ropes: tuple[RopeSettings, ...] = (RopeSettings(),)
    layer_ropes: tuple[int, ...] = ()  # per layer: index in ropes, or -1; empty means 0 for all
    moe: MoeSettings | None = None  # None if every layer is dense
    recurrent: RecurrentSettings | None = None  # None if no layer is recurrent
    latent: LatentSettings | None = None  # None if heads have K and V of their own
    branches: BranchSettings = BranchSettings()
    layer_sizes: LayerSettings = field(default_factory=LayerSettings)
    swiglu_limit: float = 7.0  # of clamped_swiglu
    structure: Structure = field(default_factory=Structure)

    @property
    def rope(self) -> RopeSettings:
        """Return the first RoPE, which most families use in every layer."""
        return self.ropes[0]

    def has_experts(self, layer: int) -> bool:
        """Return whether the layer routes tokens to experts."""
        return self.moe is not None and self.moe.layers[layer]

    def has_attention(self, layer: int) -> bool:
        """Return whether the layer has attention, and thus K and V."""
        if self.branches.attention:
            return self.branches.attention[layer]
        return not self.is_recurrent(layer)

    def owns_kv(self, layer: int) -> bool:
        """Return whether the layer computes and stores K and V."""
        return self.has_attention(layer) and self.layer_sizes.owns_kv(layer)

    def is_recurrent(self, layer: int) -> bool:
        """Return whether the layer has a recurrent state."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def has_feed_forward(self, layer: int) -> bool:
        """Return whether the layer has a feed-forward, dense or of experts."""
        return not self.branches.feed_forward or self.branches.feed_forward[layer]

    def has_dense_feed_forward(self, layer: int) -> bool:
        """Return whether the layer has a dense feed-forward, alone or beside experts."""
        beside = self.moe is not None and self.moe.beside_dense
        return self.has_feed_forward(layer) and (beside or not self.has_experts(layer))

    def to_engine(self, dtype: str) -> ModelConfig:
        """Return the engine's form, with `dtype` as the cache dtype."""
        from lmdeploy._turbomind import ModelConfig

        fields = vars(self) | self.structure.to_engine()
        fields["ropes"] = [rope.to_engine(self.head_dim) for rope in self.ropes]
        del fields["tied_head"], fields["structure"], fields["moe"], fields["recurrent"]
        del fields["branches"], fields["latent"]
        fields["layer_sizes"] = self.layer_sizes.to_engine()
        fields["attention_layers"] = self.branches.attention
        fields["feed_forward_layers"] = self.branches.feed_forward
        if self.moe is not None:
            fields["moe"] = self.moe.to_engine()
        if self.recurrent is not None:
            fields["recurrent"] = self.recurrent.to_engine()
        if self.latent is not None:
            fields["latent"] = self.latent.to_engine()
        config = ModelConfig.from_dict({**fields, "dtype": dtype})
        config.validate()
        return config
