"""Read RoPE settings from config.json, in both spellings.

The kinds are those of Hugging Face configs. `dynamic` uses one base for all positions: the one that
transformers computes for a call with session_len tokens (ResolveRope in ops/rope.h).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmdeploy.models.config_reader import MAX_POSITION, ConfigReader
from lmdeploy.models.decoder_config import RopeSettings

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}  # mrope equals default for text
LEAST_THETA = 1.01  # the engine needs more than 1 in FP32
_DEFAULT_THETA = 10000.0
_HF_KEYS = ("rope_parameters", "rope_scaling")  # of transformers 5, and of earlier versions


def rope_from_hf(
    config: ConfigReader, max_position: int, *, default: Mapping[str, Any] | None = None
) -> RopeSettings:
    """Return the settings in `rope_parameters`, or in `rope_theta` and `rope_scaling`.

    Raise ModelFormatError if both exist and disagree. `default` is used if neither exists.
    """
    stated = [rope for key in _HF_KEYS if (rope := config.child(key)) is not None]
    if not stated and default is not None:
        stated = [ConfigReader(default, f"{config.source}: the default of rope_parameters")]
    found = [settings_from_hf(config, rope, max_position=max_position) for rope in stated]
    if not found:
        return RopeSettings(theta=_theta(config, None), dim=_rotated(config, config))
    if found[0] != found[-1]:
        raise config.refuse(
            "rope_parameters and rope_scaling disagree. Remove the one that the model was not "
            "trained with."
        )
    return found[0]


def settings_from_hf(
    config: ConfigReader, rope: ConfigReader, *, max_position: int
) -> RopeSettings:
    """Return the settings in `rope`, which is one of the two objects in `config`."""
    if rope.has_objects():
        raise rope.refuse(
            "The architecture has one RoPE for all layers, but these are settings per layer type."
        )
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    kind = _OTHER_NAMES.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise rope.refuse(f"rope_type is {kind[:40]!r}. It must be one of {', '.join(ROPE_KINDS)}.")
    dim = _rotated(config, rope)
    theta = _theta(config, rope)
    if kind == "default":
        return RopeSettings(theta=theta, dim=dim)
    original = _original_position(config, rope, kind=kind, max_position=max_position)
    if kind in ("yarn", "longrope") and not rope.has("factor"):
        factor = max_position / original
    else:
        factor = rope.number("factor", low=1e-3, high=1e6)
    settings: dict[str, Any] = {}
    if kind == "llama3":
        settings = {
            "low_freq_factor": rope.number("low_freq_factor", default=1.0, low=1e-6),
            "high_freq_factor": rope.number("high_freq_factor", default=4.0, low=1e-6),
        }
        high, low = settings["high_freq_factor"], settings["low_freq_factor"]
        if high <= low:
            raise rope.refuse(
                f"high_freq_factor is {high:g}. It must be more than low_freq_factor ({low:g})."
            )
    elif kind == "yarn":
        settings = {
            "beta_fast": rope.number("beta_fast", default=0.0) or 32.0,
            "beta_slow": rope.number("beta_slow", default=0.0) or 1.0,
            "attention_factor": _yarn_attention_factor(rope, factor),
            "truncate": rope.flag("truncate", default=True),
        }
    elif kind == "longrope":
        settings = _longrope(rope, factor, original=original)
    return RopeSettings(
        kind=kind, theta=theta, dim=dim, factor=factor, original_max_position=original, **settings
    )


def _longrope(rope: ConfigReader, factor: float, *, original: int) -> dict[str, Any]:
    """Return the two lists of divisors and the magnitude of longrope."""
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "freq_factors": rope.numbers("short_factor"),
        "long_factors": rope.numbers("long_factor"),
        "attention_factor": rope.number("attention_factor", default=magnitude, low=1e-3),
    }


def _original_position(
    config: ConfigReader, rope: ConfigReader, *, kind: str, max_position: int
) -> int:
    """Return the original context length by the rule of transformers.

    The outer key has priority over the inner one. Without a key, and for `dynamic`, it is
    max_position_embeddings.
    """
    if kind == "dynamic":
        return max_position
    key, low = "original_max_position_embeddings", 2  # a logarithm of it divides
    inner = rope.integer(key, default=max(max_position, low), low=low, high=MAX_POSITION)
    return config.integer(key, default=inner, low=low, high=MAX_POSITION)


def _rotated(config: ConfigReader, rope: ConfigReader) -> int:
    """Return the number of values of a head that rotate, or 0 for all.

    The key `rotary_dim` has the number itself.
    """
    outer = config.number("partial_rotary_factor", default=1.0)
    factor = rope.number("partial_rotary_factor", default=outer, low=1e-3, high=1.0)
    if factor == 1.0 and not config.has("rotary_dim"):
        return 0
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default=max(config.integer("hidden_size") // heads, 1))
    if config.has("rotary_dim"):
        if (dim := config.integer("rotary_dim", high=head_dim)) % 2:
            raise config.refuse(f"{config.name('rotary_dim')} is {dim}. It must be even.")
        return 0 if dim == head_dim else dim
    if (dim := int(head_dim * factor)) < 2 or dim % 2:
        raise rope.refuse(
            f"partial_rotary_factor is {factor:g} and rotates {dim} of {head_dim} values. Their "
            "number must be even and positive."
        )
    return dim


def ropes_by_layer_type(
    config: ConfigReader, max_position: int, *, kinds: Sequence[str], local_theta: str
) -> tuple[tuple[RopeSettings, ...], tuple[int, ...]]:
    """Return the settings of full_attention and sliding_attention, and each layer's index.

    `kinds` are the layer types. Older configs have rope_theta and rope_scaling for full attention,
    and the key `local_theta` for sliding attention.
    """
    stated = config.child("rope_parameters")
    if stated is not None and stated.has_objects():
        ropes = []
        for kind in ("full_attention", "sliding_attention"):
            if (rope := stated.child(kind)) is None:
                raise stated.refuse(f"{kind} is missing.")
            ropes.append(settings_from_hf(config, rope, max_position=max_position))
    else:
        local = config.number(local_theta, default=_DEFAULT_THETA, low=LEAST_THETA)
        full = rope_from_hf(config, max_position)
        ropes = [full, RopeSettings(theta=local, dim=full.dim)]
    return tuple(ropes), tuple(int(kind == "sliding_attention") for kind in kinds)


def _theta(config: ConfigReader, rope: ConfigReader | None) -> float:
    outer = config.number("rope_theta", default=_DEFAULT_THETA, low=LEAST_THETA)
    return outer if rope is None else rope.number("rope_theta", default=outer, low=LEAST_THETA)


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
