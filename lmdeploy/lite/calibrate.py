"""`lmdeploy lite calibrate`: constants of the cache from a text, for `kv_quality` best.

Two passes with a 16-bit cache: the first finds the mean of K per layer, head and channel, the
second, with that mean subtracted and K rotated, how large the values are that will be stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import check_choice, check_int, check_number
from lmdeploy.engine.kv_calibration import Calibration, CalibrationMetadata, write_calibration
from lmdeploy.engine.plan import longest_position
from lmdeploy.lite.divergence import read_text
from lmdeploy.lite.prompt_engine import OpenModel, PromptEngine, open_model
from lmdeploy.lite.rope_speed import slow_channels

if TYPE_CHECKING:
    from lmdeploy import _turbomind

Floats = npt.NDArray[np.float32]
Statistics = dict[str, Any]

MEANS = ("all", "slow", "none")
# Edges of the engine's histograms: 16 bins per octave from 2^-20 on.
_BINS_PER_OCTAVE = 16
_FIRST_OCTAVE = -20


@dataclass(frozen=True)
class CalibrationOptions:
    """How to calibrate.

    Args:
        tokens: at most so many of the text.
        context: tokens of one prompt; cut to what the model was trained for.
        mean: channels whose mean is subtracted: all, those that RoPE turns slowly, or none.
        percentile: of |x| that the ranges cover; 100: all values.
        exact: compute in FP32, with four bytes per weight, and not as a server does.
    """

    tokens: int = 16384
    context: int = 2048
    mean: Literal["all", "slow", "none"] = "all"
    percentile: float = 100.0
    exact: bool = False

    def __post_init__(self) -> None:
        check_int("tokens", self.tokens, low=1, flag="--tokens")
        check_int("context", self.context, low=1, flag="--context")
        check_choice("mean", self.mean, choices=MEANS, flag="--mean")
        check_number("percentile", self.percentile, wanted=(50.0, 100.0), flag="--percentile")


def calibrate_file(
    model_path: str, text_path: Path, *, output: Path, options: CalibrationOptions
) -> Calibration:
    """Calibrates a model on a UTF-8 text and writes the file.

    Raises ValueError or OSError for a text, model or path that cannot be used.
    """
    text = read_text(text_path)
    model = open_model(model_path, exact=options.exact)
    calibration = calibrate(
        model,
        model.loaded.tokenizer.encode(text, add_special=False),
        text_hash=hashlib.sha256(text.encode()).hexdigest(),
        options=options,
    )
    write_calibration(output, calibration)
    return calibration


def calibrate(
    model: OpenModel, ids: Sequence[int], *, text_hash: str, options: CalibrationOptions
) -> Calibration:
    """Constants of `model` from the first tokens of a text."""
    context = min(options.context, longest_position(model.config))
    ids = ids[: options.tokens]
    if not ids:
        raise ValueError("text: got no tokens, wanted at least 1; change --text")
    prompts = [ids[i : i + context] for i in range(0, len(ids), context)]
    first = _collect(model, prompts, mean=None, context=context)
    mean = k_mean(first, model.config, which=options.mean, context=context)
    second = _collect(model, prompts, mean=mean, context=context)
    facts = CalibrationMetadata(
        model_hash=model.hash,
        text_hash=text_hash,
        tokens=len(ids),
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
    """Statistics of one pass; with `mean`, of K as it is stored then."""
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
    """The mean to subtract, [layers, kv_heads, head_dim]; 0 in channels that keep theirs."""
    mean = statistics["k_sum"] / max(statistics["tokens"], 1)
    if which == "none":
        mean = np.zeros_like(mean)
    elif which == "slow":
        mean = np.where(slow_channels(model, context), mean, 0.0)
    return np.asarray(mean, np.float32)


def clipped_amax(statistics: Statistics, side: str, *, percentile: float) -> Floats:
    """|x| that `percentile` percent of the values do not exceed, [layers, kv_heads].

    The upper edge of a bin (at most 1/16 too large), never above the largest value.
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
