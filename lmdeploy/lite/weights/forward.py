"""Compute a dense decoder layer by layer in NumPy, in FP32, and show the inputs of its matrices.

This is for offline tools: one layer's weights are in memory at a time. Only families whose layers
are those of Llama are supported (`check_model` in quantize.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmdeploy.checkpoint.convert import vector_for_engine
from lmdeploy.checkpoint.files.values import values_of_rows
from lmdeploy.checkpoint.tensor_plan import Checkpoint, PlannedTensor
from lmdeploy.lite.rope_speed import inverse_frequencies
from lmdeploy.models.decoder_config import DecoderConfig

Floats = npt.NDArray[np.float32]
# Receives the name of an input and its values [tokens, inputs].
Watch = Callable[[str, Floats], None]

# Each input of a layer, and the matrices that read it.
READERS: Mapping[str, tuple[str, ...]] = {
    "attention": ("q", "k", "v"),
    "heads": ("o",),
    "ffn": ("gate", "up"),
    "hidden": ("down",),
}
_QUERY_ROWS = 256  # positions whose scores are in memory at a time


class LayerReader:
    """Reads the tensors of a checkpoint as FP32, by the names of the engine."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.planned: dict[str, PlannedTensor] = {p.name: p for p in checkpoint.tensors}

    def layer(self, index: int) -> dict[str, Floats]:
        """Return all tensors of a layer, without the prefix of their names."""
        prefix = f"layers.{index}."
        names = [name for name in self.planned if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensor(name) for name in names}

    def tensor(self, name: str) -> Floats:
        """Return a matrix [outputs, inputs] or a vector."""
        tensor = self.planned[name].tensor
        if len(tensor.shape) == 1:
            return vector_for_engine(tensor)
        return values_of_rows(tensor.format, tensor.raw.reshape(tensor.rows, -1))

    def embed(self, ids: Sequence[int]) -> Floats:
        """Return the embeddings of tokens [n, hidden]."""
        tensor = self.planned["embedding"].tensor
        return values_of_rows(tensor.format, tensor.raw.reshape(tensor.rows, -1)[list(ids)])


@dataclass(frozen=True)
class Forward:
    """The arithmetic of one layer for sequences of at most `cos.shape[0]` tokens."""

    config: DecoderConfig
    cos: Floats  # [tokens, head_dim / 2]
    sin: Floats

    @staticmethod
    def of(config: DecoderConfig, context: int) -> Forward:
        """Return the arithmetic for sequences of `context` tokens."""
        rope = config.rope.to_engine(config.head_dim)
        angles = np.arange(context)[:, None] * inverse_frequencies(rope)
        size = 1.0
        if rope.kind == "yarn":
            size = rope.attention_factor or 0.1 * np.log(max(1.0, rope.factor)) + 1.0
        cos, sin = (np.asarray(size * f(angles), np.float32) for f in (np.cos, np.sin))
        return Forward(config, cos, sin)

    def run(
        self, x: Floats, weights: Mapping[str, Floats], *, layer: int, watch: Watch | None = None
    ) -> Floats:
        """Return the output [tokens, hidden] of a layer for its input."""
        show = watch or (lambda name, values: None)
        normed = rms_norm(x, weights["attention_norm"], eps=self.config.norm_eps)
        show("attention", normed)
        heads = self._attention(normed, weights, window=self.config.windows[layer])
        show("heads", heads)
        x = x + _linear(heads, weights, name="o")
        normed = rms_norm(x, weights["ffn_norm"], eps=self.config.norm_eps)
        show("ffn", normed)
        hidden = self._activate(_linear(normed, weights, name="gate"))
        hidden *= _linear(normed, weights, name="up")
        show("hidden", hidden)
        return x + _linear(hidden, weights, name="down")

    def _attention(self, x: Floats, weights: Mapping[str, Floats], *, window: int) -> Floats:
        q, k = (self._rotate(self._heads(x, weights, name=name)) for name in ("q", "k"))
        v = self._heads(x, weights, name="v")
        tokens, groups = len(x), q.shape[1] // k.shape[1]
        scale = np.float32(self.config.head_dim**-0.5)
        out = np.empty_like(q)
        for head in range(k.shape[1]):
            queries = slice(head * groups, (head + 1) * groups)
            for begin in range(0, tokens, _QUERY_ROWS):
                rows = slice(begin, min(begin + _QUERY_ROWS, tokens))
                first = 0 if window == 0 else max(0, begin - window + 1)
                keys = slice(first, rows.stop)
                scores = q[rows, queries].swapaxes(0, 1) @ k[keys, head].T * scale
                distance = np.arange(begin, rows.stop)[:, None] - np.arange(first, rows.stop)
                hidden = distance < 0 if window == 0 else (distance < 0) | (distance >= window)
                scores[:, hidden] = -np.inf
                scores -= scores.max(axis=-1, keepdims=True)
                np.exp(scores, out=scores)
                scores /= scores.sum(axis=-1, keepdims=True)
                out[rows, queries] = (scores @ v[keys, head]).swapaxes(0, 1)
        return out.reshape(tokens, -1)

    def _heads(self, x: Floats, weights: Mapping[str, Floats], *, name: str) -> Floats:
        out = _linear(x, weights, name=name).reshape(len(x), -1, self.config.head_dim)
        norm = weights.get(f"{name}_norm")
        return out if norm is None else rms_norm(out, norm, eps=self.config.norm_eps)

    def _rotate(self, x: Floats) -> Floats:
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _activate(self, x: Floats) -> Floats:
        if self.config.activation == "gelu_tanh":
            inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x**3)
            return np.asarray(0.5 * x * (1 + np.tanh(inner)), np.float32)
        with np.errstate(over="ignore"):
            return np.asarray(x / (1 + np.exp(-x)), np.float32)


def rms_norm(x: Floats, weight: Floats, *, eps: float) -> Floats:
    """Return x / sqrt(mean(x²) + eps) · weight, along the last axis."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def _linear(x: Floats, weights: Mapping[str, Floats], *, name: str) -> Floats:
    out: Floats = x @ weights[name].T
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias
