"""Resolve the options for the KV cache's accuracy and write them into the engine's config.

`raw` adds nothing to the format. `balanced` rotates K or latents, searches FP4 scales, subtracts a
K offset from each block, and keeps the first and the newest tokens in a window of 8 or 16 bits.
`best` adds constants from a calibration file. Each single option replaces one ingredient. An
ingredient without effect is off: the scale search without FP4, the K offset without a window or a
bias of K, and every ingredient with the format none. Reports list only what is on. If K has a bias,
`raw` has the K offset, too. No preset gives latents an offset: beside the rotation it does not make
them more accurate (docs/accuracy.md).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lmdeploy.base.checks import OptionError, user_path
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.kv_format_options import FormatPair, four_bit_formats, fp4_formats
from lmdeploy.engine.kv_calibration import SCALED_FORMAT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmdeploy import _turbomind
    from lmdeploy.checkpoint.kv_scales import KvScales

DEFAULT_WINDOW16_TOKENS = 64
NO_WINDOW16 = -1
# With this amplitude in four pairs of every head, quantized keys have 5 times the KL divergence
# that they have without the bias (docs/accuracy.md).
MAX_BIAS_LEFT = 3.0

logger = logging.getLogger("lmdeploy")


@dataclass(frozen=True)
class KvOptions:
    """The cache's formats and accuracy options, resolved for one model and device."""

    layers: tuple[FormatPair, ...]  # by model layer
    quality: str  # raw if every layer stores 16 bit
    rotation: bool = False
    latents: bool = False  # the model caches them instead of K and V
    scale_search: bool = False
    k_offset: bool = False
    window: str = "16bit"
    sink_tokens: int = 0
    recent_tokens: int = NO_WINDOW16
    calibration: Path | None = None
    scales: KvScales | None = None  # of the checkpoint, for the layers with fp8
    note: str = ""  # for people: about the format that fp4 became

    @property
    def format(self) -> str:
        """Return the format of all layers, or `mixed`."""
        names = {str(pair) for pair in self.layers}
        return names.pop() if len(names) == 1 else "mixed"

    @property
    def quality_text(self) -> str:
        """Describe the quality and its ingredients."""
        rotation = "rotation of latents" if self.latents else "K rotation"
        parts = [rotation] if self.rotation else []
        if self.scale_search:
            parts.append("scale search")
        if self.k_offset:
            parts.append("offset per block" if self.latents else "K offset per block")
        if self.recent_tokens != NO_WINDOW16:
            first = f"first {self.sink_tokens} and " if self.sink_tokens else ""
            name = "16 bit" if self.window == "16bit" else self.window
            parts.append(f"{first}newest {self.recent_tokens}+ tokens in {name}")
        if self.calibration is not None:
            parts.append(f"calibration {self.calibration.name}")
        if self.scales is not None:
            parts.append("scales of the checkpoint")
        return f"{self.quality} ({', '.join(parts)})" if parts else self.quality

    def labels(self) -> dict[str, str]:
        """Return the options as labels for metrics."""
        return {
            "mode": self.format,
            "quality": self.quality,
            "rotation": str(self.rotation).lower(),
            "scale_search": str(self.scale_search).lower(),
            "k_offset": "block" if self.k_offset else "none",
            "window": self.window,
            "sink_tokens": str(self.sink_tokens),
            "recent_tokens": str(self.recent_tokens),
            "calibration": self.calibration.name if self.calibration else "",
        }


def resolve_kv_options(
    config: TurbomindEngineConfig,
    windows: Sequence[int],
    *,
    k_bias: bool = False,
    latents: bool = False,
    capability: _turbomind.DeviceCapability | None = None,
) -> KvOptions:
    """Return the options of `config` for a model and a device.

    `windows` has the sliding window of each layer (0: full attention), and `k_bias` is the field of
    ModelConfig. A model with `latents` caches them instead of K and V. None uses the CPU's
    capability.

    Raise ValueError for a format that does not fit the model's layers or the device, and for an
    option without effect.
    """
    from lmdeploy import _turbomind

    table = config.kv_table.by_layer(windows)
    target = capability or _turbomind.DeviceCapability()

    def resolve(name: str) -> str:
        return _turbomind.get_kv_cache_mode(name, target, config.strict_arch).name

    layers = tuple(FormatPair(resolve(pair.k), resolve(pair.v)) for pair in table)
    names = {name for pair in layers for name in (pair.k, pair.v)}
    if names == {"none"}:
        config.refuse_kv_quality()
        return KvOptions(layers, "raw")
    quality = config.kv_quality or ("balanced" if names & four_bit_formats() else "raw")
    by_default = quality != "raw"
    if latents and config.kv_calibration is not None:
        reason = "but the model caches latents instead of K and V. Remove it"
        raise OptionError("kv_calibration", f"is set, {reason} (--kv-calibration).")
    sink_tokens, recent_tokens = _window16_tokens(config, by_default)
    search = by_default if config.kv_scale_search is None else config.kv_scale_search
    has_window = recent_tokens != NO_WINDOW16
    # Without a window, the offset comes from a bias of K. Such a model needs it in every format.
    has_offset = (by_default and not latents) or k_bias
    offset = config.kv_k_offset or ("block" if has_offset else "none")
    has_keys = any((pair.v if latents else pair.k) != "none" for pair in layers)
    rotation = by_default if config.kv_rotation is None else config.kv_rotation
    # A window of int8 costs more than it saves if the cache has 8 bits itself.
    window = config.kv_window or ("int8" if by_default and names & four_bit_formats() else "16bit")
    path = config.kv_calibration
    return KvOptions(
        layers=layers,
        quality=quality,
        rotation=rotation,
        latents=latents,
        scale_search=search and bool(names & fp4_formats()),
        k_offset=offset == "block" and has_keys and (has_window or k_bias),
        window=window if has_window else "16bit",
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        calibration=None if path is None else user_path("kv_calibration", path),
        note=_format_note(table, layers),
    )


def _format_note(asked: Sequence[FormatPair], layers: Sequence[FormatPair]) -> str:
    """Return a note on the format that `fp4` became, or an empty string."""
    for pair, resolved in zip(asked, layers, strict=True):
        for name, format_name in ((pair.k, resolved.k), (pair.v, resolved.v)):
            if name == "fp4" and format_name == "mxfp4":
                return "fp4 is mxfp4 on this device; nvfp4 is more accurate at the same size"
    return ""


def _window16_tokens(config: TurbomindEngineConfig, by_default: bool) -> tuple[int, int]:
    """Return sink and recent tokens. Sinks alone also keep the current block in the window."""
    sink, recent = config.kv_sink_tokens, config.kv_recent_tokens
    if recent is None:
        recent = DEFAULT_WINDOW16_TOKENS if by_default else 0 if sink else NO_WINDOW16
    if recent == NO_WINDOW16:
        return 0, NO_WINDOW16
    if sink is None:
        sink = DEFAULT_WINDOW16_TOKENS if by_default else 0
    return sink, recent


def with_kv_scales(options: KvOptions, scales: KvScales | None) -> KvOptions:
    """Return the options with the scales of a checkpoint if the cache can use them.

    They fit FP8 without a rotation, which changes the range of K, and without a calibration.
    """
    has_fp8 = any(SCALED_FORMAT in (pair.k, pair.v) for pair in options.layers)
    if scales is None or not has_fp8 or options.quality != "raw" or options.rotation:
        return options
    return replace(options, scales=scales)


def apply_kv_options(
    options: KvOptions,
    engine_config: _turbomind.EngineConfig,
    *,
    model: _turbomind.ModelConfig,
    model_hash: str | None = None,
) -> None:
    """Write `options` into the engine's config.

    `model_hash` is required with a calibration file. Raise ValueError if the file cannot be read
    or belongs to another model.
    """
    engine_config.kv_format = options.layers[0].k
    uniform = len({str(pair) for pair in options.layers}) == 1
    if not uniform or options.layers[0].k != options.layers[0].v:
        engine_config.kv_layers = [(pair.k, pair.v) for pair in options.layers]
    engine_config.kv_rotate_k = options.rotation
    engine_config.kv_search_scales = options.scale_search
    engine_config.kv_k_offset = options.k_offset
    engine_config.kv_window_format = "none" if options.window == "16bit" else options.window
    engine_config.kv_sink_tokens = options.sink_tokens
    engine_config.kv_recent_tokens = options.recent_tokens
    if options.calibration is not None:
        from lmdeploy.engine.kv_calibration import engine_constants, read_calibration

        if model_hash is None:
            raise RuntimeError("a calibration file needs the hash of the model")
        calibration = read_calibration(options.calibration, model, model_hash=model_hash)
        engine_config.set_kv_calibration(
            *engine_constants(calibration, options.layers, rotated=options.rotation)
        )
    elif options.scales is not None:
        from lmdeploy.engine.kv_calibration import checkpoint_constants

        constants = checkpoint_constants(options.scales, options.layers, heads=model.num_kv_heads)
        engine_config.set_kv_calibration(None, *constants)


def warn_of_bias(
    options: KvOptions,
    *,
    model: _turbomind.ModelConfig,
    weights: _turbomind.Weights,
    device: _turbomind.Device,
    block_seq_len: int,
) -> None:
    """Log a warning if quantized keys keep a large bias."""
    from lmdeploy import _turbomind

    values = {pair.v for pair in options.layers if pair.k != "none"}
    if not model.k_bias or not values:
        return
    if not options.k_offset:
        logger.warning(
            "KV cache: K has a bias, which costs %s most of its accuracy without a K offset. Use "
            "--kv-k-offset block.",
            options.format,
        )
        return
    left = _turbomind.k_bias_left(model, weights, device, block_seq_len=block_seq_len)
    if left > MAX_BIAS_LEFT:
        logger.warning(
            "KV cache: a bias of K with an amplitude of up to %.0f stays in the keys, because it "
            "has more high frequencies than the cache can leave out, so that %s loses accuracy. "
            "Use --kv-cache-format k=none,v=%s to keep K in 16 bits.",
            left,
            options.format,
            next((value for value in sorted(values) if value.endswith("4")), "nvfp4"),
        )


def cache_line(options: KvOptions, plan: _turbomind.MemoryPlan, *, session_len: int) -> str:
    """Return one line on the cache: format, preset, bytes, capacity, comparison with 16 bit.

    The window makes the comparison depend on `session_len`, so the line names both.
    """
    note = f"; {options.note}" if options.note else ""
    window16 = (
        f" + {plan.window16_bytes_per_sequence:,} per sequence"
        if plan.window16_bytes_per_sequence
        else ""
    )
    return (
        f"KV cache: format {options.format}, quality {options.quality_text}, "
        f"{plan.bytes_per_token:,.0f} bytes per token{window16}, "
        f"{plan.max_tokens:,} tokens fit in {plan.reserved_bytes / 2**20:,.1f} MiB; "
        f"a session of {session_len:,} tokens takes {plan.session_bytes / 2**20:,.1f} MiB"
        f"{_comparison(plan)}{note}"
    )


def state_line(plan: _turbomind.MemoryPlan) -> str:
    """Return one line on the states of recurrent layers, or nothing if there are none."""
    size = plan.state_bytes_per_sequence
    if size == 0:
        return ""
    interval = (
        f", every {plan.checkpoint_interval:,} blocks of a prompt"
        if plan.checkpoint_interval
        else ""
    )
    checkpoints = f"{plan.num_checkpoints:,} checkpoints in {plan.checkpoint_format}"
    return (
        f"recurrent layers: {size / 2**20:,.1f} MiB per sequence; {checkpoints} "
        f"({plan.checkpoint_bytes / 2**20:,.1f} MiB){interval}"
    )


def _comparison(plan: _turbomind.MemoryPlan) -> str:
    """Return the comparison with a 16-bit cache, or an empty text if the cache is one."""
    own, other = plan.session_bytes, plan.session_bytes_none
    if own == other:
        return ""
    factor = f"{other / own:.2f}x less than" if own < other else f"{own / other:.2f}x as much as"
    return f", {factor} in 16 bit ({plan.bytes_per_token_none:,.0f} bytes per token)"
