"""Quantize the layers of a dense model one after the other, by the inputs of their matrices.

GPTQ works on the scaled inputs of AWQ, too, so that it depends less on its text. A layer is
measured with the outputs of the quantized layers before it, so that it corrects a part of their
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lmdeploy.checkpoint.tensor_plan import Checkpoint
from lmdeploy.lite.weights.awq import search_scales
from lmdeploy.lite.weights.folder import QuantizedLayer, rounded_to_stored
from lmdeploy.lite.weights.forward import READERS, Floats, Forward, LayerReader
from lmdeploy.lite.weights.gptq import solve_gptq
from lmdeploy.lite.weights.rounding import Grid, GroupCodes

MATRICES = tuple(name for names in READERS.values() for name in names)
Moments = dict[str, Floats]


def quantize_layers(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], *, method: str, grid: Grid
) -> Iterator[QuantizedLayer]:
    """Yield the layers of the checkpoint after `method` ("gptq" or "awq") over token ids."""
    from tqdm import tqdm

    reader = LayerReader(checkpoint)
    forward = Forward.of(checkpoint.config, max(map(len, prompts)))
    states = [reader.embed(ids) for ids in prompts]
    count = checkpoint.config.num_layers
    for layer in tqdm(range(count), desc=f"auto_{method}", unit="layer", disable=None):
        weights = reader.layer(layer)
        moments = input_moments(forward, states, weights=weights, layer=layer)
        scale_inputs(weights, moments, formats=_formats(reader, layer), grid=grid)
        if method == "awq":
            codes = {name: grid.round(weights[name]) for name in MATRICES}
        else:
            codes = _gptq_codes(weights, moments, grid=grid)
        vectors = {n: values for n, values in weights.items() if values.ndim == 1}
        if layer + 1 < count:
            decoded = {name: matrix.values() for name, matrix in codes.items()}
            states = [forward.run(x, {**vectors, **decoded}, layer=layer) for x in states]
        prefix = f"layers.{layer}."
        yield QuantizedLayer(
            {prefix + name: matrix for name, matrix in codes.items()},
            {prefix + n: values for n, values in vectors.items()},
        )


def round_layers(checkpoint: Checkpoint, *, grid: Grid) -> Iterator[QuantizedLayer]:
    """Yield the layers with every weight rounded to nearest."""
    reader = LayerReader(checkpoint)
    for layer in range(checkpoint.config.num_layers):
        names = [f"layers.{layer}.{name}" for name in MATRICES]
        yield QuantizedLayer({name: grid.round(reader.tensor(name)) for name in names}, {})


def input_moments(
    forward: Forward, states: Sequence[Floats], *, weights: dict[str, Floats], layer: int
) -> Moments:
    """Return XᵀX of each input of a layer, [inputs, inputs], over all positions."""
    sums: Moments = {}

    def add(name: str, values: Floats) -> None:
        square = values.T @ values
        sums[name] = sums[name] + square if name in sums else square

    for x in states:
        forward.run(x, weights, layer=layer, watch=add)
    return sums


def _gptq_codes(
    weights: dict[str, Floats], moments: Moments, *, grid: Grid
) -> dict[str, GroupCodes]:
    codes = {}
    for name, readers in READERS.items():
        stacked = np.concatenate([weights[reader] for reader in readers])
        solved = solve_gptq(stacked, moments[name], grid=grid)
        begin = 0
        for reader in readers:
            end = begin + len(weights[reader])
            codes[reader] = solved.rows(begin, end)
            begin = end
    return codes


def scale_inputs(
    weights: dict[str, Floats], moments: Moments, *, formats: dict[str, str], grid: Grid
) -> None:
    """Scale the inputs of the matrices by AWQ's search; the layer computes the same.

    `weights` and `moments` are changed in place. A norm undoes the scales of q, k, v, gate and up.
    Rows of `up` undo those of `down`, and rows of `v` those of `o`, if every query head has its
    own V.
    """
    undoing = {"attention": "attention_norm", "ffn": "ffn_norm", "hidden": "up"}
    if weights["v"].shape[0] == weights["o"].shape[1]:
        undoing["heads"] = "v"
    for name, before in undoing.items():
        allowed: Callable[[Floats], Floats] = _as_they_are
        if weights[before].ndim == 1:
            allowed = _undone_by(weights[before], formats[before])
        stacked = np.concatenate([weights[reader] for reader in READERS[name]])
        scales = search_scales(stacked, moments[name], grid=grid, allowed=allowed)
        for reader in READERS[name]:
            weights[reader] = weights[reader] * scales
        moments[name] = moments[name] / np.outer(scales, scales)
        is_norm = weights[before].ndim == 1
        weights[before] = weights[before] / (scales if is_norm else scales[:, None])
        if f"{before}.bias" in weights:
            weights[f"{before}.bias"] = weights[f"{before}.bias"] / scales


def _as_they_are(scales: Floats) -> Floats:
    return scales


def _undone_by(norm: Floats, stored_format: str) -> Callable[[Floats], Floats]:
    """Return a function that changes scales so that the norm as stored undoes them exactly."""

    def allowed(scales: Floats) -> Floats:
        stored = rounded_to_stored(norm / scales, stored_format)
        good = (stored != 0) & np.isfinite(stored)
        return np.where(good, np.divide(norm, stored, where=good, out=np.ones_like(norm)), 1)

    return allowed


def _formats(reader: LayerReader, layer: int) -> dict[str, str]:
    prefix = f"layers.{layer}."
    return {
        name.removeprefix(prefix): planned.tensor.format
        for name, planned in reader.planned.items()
        if name.startswith(prefix)
    }
