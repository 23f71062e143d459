"""Measures the cost of a cell: bits per value, KV write time, decode speed, saturated values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmdeploy.lite.prompt_engine import OpenModel, PromptEngine
from lmdeploy.lite.report.cells import REFERENCE, DecodeEngine, Done, KvVariant

if TYPE_CHECKING:
    from lmdeploy import _turbomind

SIZES = (2048, 8192, 32768)  # sequence lengths for which the report has bits per value
WRITE_ROWS = 1 << 13
WRITE_ROUNDS = 7
DECODE_ROUNDS = 5
DECODE_STEPS = 32
_FIRST_BIN = (127 - 20) << 4  # a histogram's bin is the upper float bits: 16 bins per octave


def bits_per_value(model: OpenModel, cell: KvVariant) -> dict[str, float]:
    """Return the bits per value of one sequence between steps, by its length in tokens.

    They include whole blocks, metadata, scales and the window.
    """
    from lmdeploy import _turbomind

    config = model.config
    if rotary := config.latent.rope_dim:  # a latent is K and V
        values = config.num_attention_layers() * (config.head_dim + rotary)
    else:
        values = 2 * sum(config.kv_size(layer) for layer in range(config.num_layers))
    return {
        str(tokens): _turbomind.sequence_bytes(config, cell.engine_config(tokens), tokens)
        * 8
        / (values * tokens)
        for tokens in SIZES
    }


def write_ns_per_token(model: OpenModel, cell: KvVariant) -> float:
    """Return the nanoseconds to encode K and V of one token in all layers on one core.

    This is the fastest of WRITE_ROUNDS rounds, without the rotation and the K offset. With a
    window, a row is first stored there and encoded when its block leaves the window. Both count.
    """
    options = cell.engine_config(SIZES[0])
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((WRITE_ROWS, model.config.head_dim)).astype(np.float32)
    modes = [cell.format]
    if options.kv_recent_tokens >= 0 and cell.format != REFERENCE:
        modes.append(options.kv_window_format.name)
    dtype, search = model.config.dtype, options.kv_search_scales
    per_row = sum(_encode_ns(mode, rows, dtype=dtype, search=search) for mode in modes)
    if model.config.latent.rope_dim:  # the rotary part keeps 16 bits
        return per_row * model.config.num_attention_layers()
    return per_row * 2 * model.config.num_attention_layers() * model.config.num_kv_heads


def _encode_ns(mode: str, rows: npt.NDArray[np.float32], *, dtype: str, search: bool) -> float:
    from lmdeploy import _turbomind

    best = float("inf")
    for _ in range(WRITE_ROUNDS):
        begun = time.perf_counter()
        _turbomind.encode_rows(mode, rows, dtype, search=search)
        best = min(best, time.perf_counter() - begun)
    return best / len(rows) * 1e9


def decode_speeds(
    model: OpenModel, cells: Sequence[KvVariant], *, prompt: Sequence[int], done: Done
) -> dict[str, float]:
    """Return the decode tokens per second of one sequence after `prompt`, by label.

    These are medians of rounds that alternate between the cells. The first round fills the prefix
    caches and does not count.
    """
    context = len(prompt) + DECODE_STEPS + 1
    seconds: dict[str, list[float]] = {cell.label: [] for cell in cells}
    engines: dict[str, DecodeEngine] = {}
    try:
        for cell in cells:
            engines[cell.label] = DecodeEngine(model, cell.configure, context=context)
        for turn in range(DECODE_ROUNDS + 1):
            for label in list(engines) if turn % 2 else reversed(engines):
                step = engines[label].step_seconds(prompt, DECODE_STEPS)
                if turn > 0:
                    seconds[label].append(step)
                done(label)
    finally:
        for engine in engines.values():
            engine.close()
    return {label: 1 / statistics.median(values) for label, values in seconds.items()}


def families(cells: Sequence[KvVariant]) -> list[list[KvVariant]]:
    """Return the groups of cells that are timed together: all qualities of a format, and `none`."""
    none = [cell for cell in cells if cell.label == REFERENCE]
    formats = dict.fromkeys(cell.format for cell in cells if cell.label != REFERENCE)
    return [[*none, *(c for c in cells if c.format == name)] for name in formats]


def stored_histograms(
    model: OpenModel, cell: KvVariant, *, prompt: Sequence[int]
) -> dict[str, Any]:
    """Return the histograms of |K| and |V| as this cell stores them (shifted and rotated)."""

    def configure(engine_config: _turbomind.EngineConfig) -> None:
        cell.configure(engine_config)
        engine_config.kv_format, engine_config.kv_layers, engine_config.collect_kv_statistics = (
            REFERENCE,
            [],
            True,
        )
        engine_config.kv_sink_tokens, engine_config.kv_recent_tokens = 0, -1

    with PromptEngine(model, configure, context=len(prompt)) as engine:
        engine.read(prompt)
        return engine.statistics()


def saturated_heads(
    statistics: dict[str, Any], cell: KvVariant
) -> dict[str, list[list[int]]] | None:
    """Return the values beyond the range of the format, by side (k, v), layer and KV head.

    None means that each row has a range of its own. The limit is exact to 1/16 octave: a bin counts
    if its lower edge is at or above the limit.
    """
    from lmdeploy import _turbomind

    (largest,) = [row.max_value for row in _turbomind.kv_formats() if row.name == cell.format]
    if largest == 0:
        return None
    counts = {}
    for i, side in enumerate("kv"):
        histogram = statistics[f"{side}_histogram"]
        scale = np.float32(1) if cell.scales is None else cell.scales[i]
        limit = np.asarray(np.full(histogram.shape[:2], largest) * scale, np.float32)
        first = (limit.view(np.int32).astype(np.int64) >> 19) - _FIRST_BIN
        exact = (limit.view(np.int32) & ((1 << 19) - 1)) == 0
        first = np.clip(first + ~exact, 0, histogram.shape[-1])
        beyond = np.arange(histogram.shape[-1]) >= first[..., None]
        counts[side] = (histogram * beyond).sum(axis=-1).tolist()
    return counts


def worst_head(counts: dict[str, list[list[int]]]) -> tuple[str, int, int, int]:
    """Return side, layer, KV head and count of the head with the most saturated values."""
    every = [
        (count, side, layer, head)
        for side, layers in counts.items()
        for layer, heads in enumerate(layers)
        for head, count in enumerate(heads)
    ]
    count, side, layer, head = max(every, key=lambda entry: entry[0])
    return side, layer, head, count
