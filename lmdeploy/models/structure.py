"""Differences of a decoder from Llama, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmdeploy._turbomind import ModelConfig, NormConfig


@dataclass(frozen=True)
class NormSettings:
    """Places where a layer normalizes. A branch is attention or the feed-forward."""

    centered: bool = False  # LayerNorm instead of RMSNorm
    inputs: bool = True  # before each branch
    outputs: bool = False  # after each branch, before it is added to the residual
    qk_all_heads: bool = False  # q_norm and k_norm cover all heads together
    qk_after_rope: bool = False  # q_norm and k_norm follow RoPE
    qk_unit: bool = False  # weights of 1 replace q_norm and k_norm, in layers with RoPE

    def to_engine(self) -> NormConfig:
        """Return the engine's form of these settings."""
        from lmdeploy._turbomind import NormConfig

        config = NormConfig()
        for name in ("centered", "inputs", "outputs", "qk_all_heads", "qk_after_rope", "qk_unit"):
            setattr(config, name, getattr(self, name))
        return config


@dataclass(frozen=True)
class QueryTemperature:
    """Factor of Q at position p: 1 + beta * log(1 + n), where n = floor((p + offset) / length)."""

    beta: float = 0.0  # 0 means no temperature
    length: int = 1
    offset: int = 0
    without_rope: bool = False  # only in layers without RoPE

    def apply(self, config: ModelConfig) -> None:
        """Set the options of the engine's config."""
        for name in ("beta", "length", "offset"):
            setattr(config.query_scaling, name, getattr(self, name))
        config.query_scaling_without_rope = self.without_rope


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
    norm: NormSettings = field(default_factory=NormSettings)
    temperature: QueryTemperature = field(default_factory=QueryTemperature)

    def apply(self, config: ModelConfig) -> None:
        """Set the options of the engine's config."""
        for name in (
            "softmax_scale",
            "attention_cap",
            "embedding_scale",
            "residual_scale",
            "logit_scale",
            "logit_cap",
            "parallel",
            "gated",
        ):
            setattr(config, name, getattr(self, name))
        config.norm = self.norm.to_engine()
        self.temperature.apply(config)
