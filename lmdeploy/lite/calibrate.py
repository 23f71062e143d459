"""`lmdeploy lite calibrate`: creates the calibration file that `kv_quality` best needs.

The model reads a text or many prompts twice with a 16-bit cache. The first pass computes the mean
of K per layer, head and channel. The second pass subtracts that mean, rotates K and measures the
ranges of K and V.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmdeploy.config.lite_options import CalibrationOptions
from lmdeploy.engine.kv_calibration import Calibration, CalibrationMetadata, write_calibration
from lmdeploy.engine.plan import longest_position
from lmdeploy.lite.prompt_engine import OpenModel, PromptEngine, open_model
from lmdeploy.lite.prompts import cut_prompts, encode_prompts, read_prompts
from lmdeploy.lite.rope_speed import slow_channels

if TYPE_CHECKING:
    from lmdeploy import _turbomind

Floats = npt.NDArray[np.float32]
Statistics = dict[str, Any]

# The engine's histograms have 16 bins per octave, starting at 2^-20.
_BINS_PER_OCTAVE = 16
_FIRST_OCTAVE = -20


def calibrate_file(
    model_path: str, text_path: Path, *, output: Path, options: CalibrationOptions
) -> Calibration:
    """Calibrate a model on a UTF-8 text or JSONL file and write the file `output`.

    Raises:
        ValueError, OSError: if the text, the model or a path cannot be used.
    """
    prompts = read_prompts(text_path)
    model = open_model(model_path, exact=options.exact)
    calibration = calibrate_prompts(
        model,
        encode_prompts(model, prompts),
        text_hash=hashlib.sha256(text_path.read_bytes()).hexdigest(),
        options=options,
    )
    write_calibration(output, calibration)
    return calibration


def calibrate(
    model: OpenModel, ids: Sequence[int], *, text_hash: str, options: CalibrationOptions
) -> Calibration:
    """Compute the calibration of `model` from the first `options.tokens` ids of a text.

    `text_hash` is the SHA-256 of the text in hexadecimal.
    """
    return calibrate_prompts(model, [ids], text_hash=text_hash, options=options)


def calibrate_prompts(
    model: OpenModel,
    prompts: Sequence[Sequence[int]],
    *,
    text_hash: str,
    options: CalibrationOptions,
) -> Calibration:
    """Compute the calibration of `model` from the ids of prompts, which do not see each other.

    Raise ValueError if there are no tokens, and for a model that cannot have a calibration.
    """
    if not model.has_statistics:
        raise ValueError(
            "This model has no calibration, because it caches latents or its layers differ in "
            "head_dim or KV heads. Use kv_quality balanced, which needs none."
        )
    context = min(options.context, longest_position(model.config))
    pieces = cut_prompts(prompts, context=context, max_tokens=options.tokens)
    if not pieces:
        raise ValueError("The text has no tokens (--text).")
    first = _collect(model, pieces, mean=None, context=context)
    mean = k_mean(first, model.config, which=options.mean, context=context)
    second = _collect(model, pieces, mean=mean, context=context)
    facts = CalibrationMetadata(
        model_hash=model.hash,
        text_hash=text_hash,
        tokens=sum(map(len, pieces)),
        context=context,
        mean=options.mean,
        percentile=float(options.percentile),
    )
    plain = clipped_amax(first, "k", percentile=options.percentile) + np.abs(mean).max(axis=-1)
    return Calibration(
        facts=facts,
        k_mean=mean,
        k_amax=np.asarray(plain, np.float32),
        k_amax_rotated=clipped_amax(second, "k", percentile=options.percentile),
        v_amax=clipped_amax(second, "v", percentile=options.percentile),
    )


def _collect(
    model: OpenModel, prompts: Sequence[Sequence[int]], *, mean: Floats | None, context: int
) -> Statistics:
    """Run one pass and return its statistics. With `mean`, K is shifted and rotated first."""
    from tqdm import tqdm

    def configure(engine_config: _turbomind.EngineConfig) -> None:
        engine_config.kv_format, engine_config.collect_kv_statistics = "none", True
        if mean is not None:
            engine_config.kv_rotate_k = True
            engine_config.set_kv_calibration(mean if mean.any() else None, None, None)

    what = "mean of K" if mean is None else "ranges of K and V"
    with (
        PromptEngine(model, configure, context=context) as engine,
        tqdm(total=sum(map(len, prompts)), desc=what, unit="token", disable=None) as bar,
    ):
        for prompt in prompts:
            engine.read(prompt)
            bar.update(len(prompt))
        return engine.statistics()


def k_mean(
    statistics: Statistics, model: _turbomind.ModelConfig, *, which: str, context: int
) -> Floats:
    """Return the mean to subtract, [layers, kv_heads, head_dim]. It is 0 in other channels.

    It is 0 everywhere for a model that caps its scores, because the mean would shift them.
    """
    mean = statistics["k_sum"] / max(statistics["tokens"], 1)
    if which == "none" or model.attention_cap:
        mean = np.zeros_like(mean)
    elif which == "slow":
        mean = np.where(slow_channels(model, context)[:, None], mean, 0.0)
    return np.asarray(mean, np.float32)


def clipped_amax(statistics: Statistics, side: str, *, percentile: float) -> Floats:
    """Return the |x| that `percentile` percent of the values do not exceed, [layers, kv_heads].

    The result is the upper edge of a bin, at most 1/16 too large and never above the largest |x|.
    """
    amax: Floats = statistics[f"{side}_amax"]
    if percentile >= 100.0:
        return amax
    histogram: npt.NDArray[np.int64] = statistics[f"{side}_histogram"]
    counts = histogram.cumsum(axis=-1)
    wanted = counts[..., -1:] * (percentile / 100.0)
    upper = (counts >= wanted).argmax(axis=-1) + 1
    octave = 2.0 ** (_FIRST_OCTAVE + upper // _BINS_PER_OCTAVE)
    edges = octave * (1 + (upper % _BINS_PER_OCTAVE) / _BINS_PER_OCTAVE)
    return np.asarray(np.minimum(edges, amax), np.float32)
