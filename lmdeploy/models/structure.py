"""Differences of a decoder from Llama, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmdeploy._turbomind import NormConfig, QueryScaling


@dataclass(frozen=True)
class NormSettings:
    """Places where a layer normalizes. A branch is attention or the feed-forward."""

    centered: bool = False  # LayerNorm instead of RMSNorm
    inputs: bool = True  # before each branch
    outputs: bool = False  # after each branch, before it is added to the residual
    qk_all_heads: bool = False  # q_norm and k_norm cover all heads together
    qk_after_rope: bool = False  # q_norm and k_norm follow RoPE
    qk_unit: bool = False  # weights of 1 replace q_norm and k_norm, in layers with RoPE
    v_unit: bool = False  # V has a norm by head, with weights of 1

    def to_engine(self) -> NormConfig:
        """Return the engine's form of these settings."""
        from lmdeploy._turbomind import NormConfig

        return NormConfig.from_dict(vars(self))


@dataclass(frozen=True)
class QueryTemperature:
    """Factor of Q at position p: 1 + beta * log(1 + n), where n = floor((p + offset) / length)."""

    beta: float = 0.0  # 0 means no temperature
    length: int = 1
    offset: int = 0
    without_rope: bool = False  # only in layers without RoPE

    def to_engine(self) -> QueryScaling:
        """Return the engine's form of the factor."""
        from lmdeploy._turbomind import QueryScaling

        return QueryScaling.from_dict(
            {"beta": self.beta, "length": self.length, "offset": self.offset}
        )


@dataclass(frozen=True)
class Structure:
    """Structural options of a decoder. The defaults are those of Llama."""

    softmax_scale: float = 0.0  # 0 means 1 / sqrt(head_dim)
    attention_cap: float = 0.0  # soft cap of attention scores; 0 means none
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of each branch
    logit_scale: float = 1.0
    logit_cap: float = 0.0  # soft cap of the scaled logits; 0 means none
    parallel: bool = False  # both branches read the same normalized values
    gated: bool = True  # the dense feed-forward has a gate
    attention_gate: bool = False  # the sigmoid of a projection multiplies attention
    per_layer_size: int = 0  # of the inputs that every layer has; 0 if there are none
    layer_scale: bool = False  # a factor of every layer multiplies its output
    norm: NormSettings = field(default_factory=NormSettings)
    temperature: QueryTemperature = field(default_factory=QueryTemperature)

    def to_engine(self) -> dict[str, Any]:
        """Return the fields of the engine's ModelConfig."""
        from lmdeploy._turbomind import PerLayerInputs

        fields = {
            **vars(self),
            "per_layer": PerLayerInputs.from_dict({"size": self.per_layer_size}),
            "norm": self.norm.to_engine(),
            "query_scaling": self.temperature.to_engine(),
            "query_scaling_without_rope": self.temperature.without_rope,
        }
        del fields["temperature"], fields["per_layer_size"]
        return fields
