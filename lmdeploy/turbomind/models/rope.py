"""RoPE settings from config.json (both spellings) and from GGUF metadata."""

import math
from typing import Any

from lmdeploy.turbomind.models.config_reader import ConfigReader
from lmdeploy.turbomind.models.decoder_config import RopeSettings

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_DEFAULT_THETA = 10000.0


def rope_from_hf(config: ConfigReader, max_position: int) -> RopeSettings:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before)."""
    rope = config.child("rope_parameters") or config.child("rope_scaling")
    if rope is None:
        return RopeSettings(theta=_theta(config, None))
    if rope.has_objects():
        raise rope.refuse("one setting per layer type is not supported; wanted one for all layers")
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind not in ROPE_KINDS:
        raise rope.refuse(f"rope_type {kind[:40]!r} is not supported; {', '.join(ROPE_KINDS)} are")
    if rope.number("partial_rotary_factor", default=1.0) != 1.0:
        raise rope.refuse("partial_rotary_factor other than 1 is not supported")
    theta = _theta(config, rope)
    if kind == "default":
        return RopeSettings(theta=theta)
    # transformers takes max_position_embeddings where the original length is not given, and
    # always does for dynamic scaling.
    original = config.integer("original_max_position_embeddings", default=max_position)
    if kind != "dynamic":
        original = rope.integer("original_max_position_embeddings", default=original)
    else:
        original = max_position
    if kind == "yarn" and not rope.has("factor"):
        factor = max_position / original
    else:
        factor = rope.number("factor", low=1e-3, high=1e6)
    settings: dict[str, Any] = {}
    if kind == "llama3":
        settings = {
            "low_freq_factor": rope.number("low_freq_factor", default=1.0, low=1e-6),
            "high_freq_factor": rope.number("high_freq_factor", default=4.0, low=1e-6),
        }
        if settings["high_freq_factor"] <= settings["low_freq_factor"]:
            raise rope.refuse("high_freq_factor must be above low_freq_factor")
    elif kind == "yarn":
        settings = {
            "beta_fast": rope.number("beta_fast", default=0.0) or 32.0,
            "beta_slow": rope.number("beta_slow", default=0.0) or 1.0,
            "attention_factor": _yarn_attention_factor(rope, factor),
            "truncate": rope.flag("truncate", default=True),
        }
    return RopeSettings(
        kind=kind, theta=theta, factor=factor, original_max_position=original, **settings
    )


def rope_from_gguf(config: ConfigReader, prefix: str, *, max_position: int) -> RopeSettings:
    """`<architecture>.rope.*`; the divisors of llama3 are a tensor, added by the caller."""
    theta = config.number(f"{prefix}.rope.freq_base", default=_DEFAULT_THETA, low=1.0)
    kind = config.text(f"{prefix}.rope.scaling.type", default="none")
    if kind == "none":
        return RopeSettings(theta=theta)
    if kind not in ("linear", "yarn"):
        raise config.refuse(
            f"{prefix}.rope.scaling.type {kind[:40]!r} is not supported; none, linear, yarn are"
        )
    factor = config.number(f"{prefix}.rope.scaling.factor", default=1.0, low=1e-3, high=1e6)
    original = config.integer(
        f"{prefix}.rope.scaling.original_context_length", default=max_position
    )
    if kind == "linear":
        return RopeSettings(kind=kind, theta=theta, factor=factor, original_max_position=original)
    attention_factor = config.number(f"{prefix}.rope.scaling.attn_factor", default=1.0, low=1e-3)
    return RopeSettings(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        beta_fast=config.number(f"{prefix}.rope.scaling.yarn_beta_fast", default=32.0, low=1e-3),
        beta_slow=config.number(f"{prefix}.rope.scaling.yarn_beta_slow", default=1.0, low=1e-3),
        attention_factor=attention_factor * _mscale(factor, 1.0),
    )


def _theta(config: ConfigReader, rope: ConfigReader | None) -> float:
    outer = config.number("rope_theta", default=_DEFAULT_THETA, low=1.0)
    return outer if rope is None else rope.number("rope_theta", default=outer, low=1.0)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor", low=1e-3)
    scale = rope.number("mscale", default=0.0)
    scale_all = rope.number("mscale_all_dim", default=0.0)
    if scale and scale_all:
        return _mscale(factor, scale) / _mscale(factor, scale_all)
    return _mscale(factor, 1.0)
