"""A whole decoder in NumPy: the expected logits when K and V are stored in a KV format.

All arithmetic is in double precision. The cache holds exactly the values that the codecs decode.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reference.moe import Experts, feed_forward
from reference.quality import RAW, LayerStore, Quality, mixed_attention, window16_mask
from reference.rope import Rope, rotate

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """Sizes of a small decoder. If `experts` is set, every layer has experts."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope: Rope
    windows: tuple[int, ...] = ()
    norm_eps: float = 1e-5
    # any of: bias (of q, k, v), o_bias, qk_norm, sinks, head
    optional: frozenset[str] = field(default_factory=frozenset)
    experts: Experts | None = None

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of each matrix by name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"embedding": (self.vocab, self.hidden)}
        if "head" in self.optional:
            shapes["head"] = (self.vocab, self.hidden)
        for i in range(self.layers):
            shapes |= {
                f"layers.{i}.q": (q, self.hidden),
                f"layers.{i}.k": (kv, self.hidden),
                f"layers.{i}.v": (kv, self.hidden),
                f"layers.{i}.o": (self.hidden, q),
            }
            if self.experts is not None:
                parts = self.experts.matrices(self.hidden)
            else:
                wide = (self.intermediate, self.hidden)
                parts = {"gate": wide, "up": wide, "down": wide[::-1]}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in parts.items()}
        return shapes

    def vectors(self) -> dict[str, int]:
        """Return the length of each vector by name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        lengths = {"final_norm": self.hidden}
        for i in range(self.layers):
            lengths |= {
                f"layers.{i}.attention_norm": self.hidden,
                f"layers.{i}.ffn_norm": self.hidden,
            }
            if "bias" in self.optional:
                lengths |= {
                    f"layers.{i}.{n}.bias": size for n, size in zip("qkv", (q, kv, kv), strict=True)
                }
            if "o_bias" in self.optional:
                lengths[f"layers.{i}.o.bias"] = self.hidden
            if self.experts is not None:
                biases = self.experts.biases(self.hidden)
                lengths |= {f"layers.{i}.{name}": size for name, size in biases.items()}
            if "qk_norm" in self.optional:
                lengths |= {f"layers.{i}.{n}_norm": self.head_dim for n in "qk"}
            if "sinks" in self.optional:
                lengths |= {f"layers.{i}.sinks": self.heads}
        return lengths


def random_weights(shape: Shape, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return random weights that keep the size of activations and give uneven attention."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, (rows, cols) in shape.matrices().items():
        spread = 1.0 if name == "embedding" else 1.5 / np.sqrt(cols)
        weights[name] = (rng.standard_normal((rows, cols)) * spread).astype(np.float32)
    for name, size in shape.vectors().items():
        middle = 1.0 if name.endswith("norm") else 0.0
        weights[name] = (middle + 0.3 * rng.standard_normal(size)).astype(np.float32)
    return weights


def rms_norm(x: Doubles, weight: npt.NDArray[np.float32], eps: float) -> Doubles:
    """Return x / sqrt(mean(x²) + eps) * weight."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


@dataclass
class Decoder:
    """A decoder with a KV cache.

    `mode`, `dtype` and `quality` apply to the cache of every layer, unless `stores` gives one
    LayerStore per layer.
    """

    shape: Shape
    weights: dict[str, npt.NDArray[np.float32]]
    mode: str = "none"
    dtype: str = "float32"
    quality: Quality = RAW
    stores: list[LayerStore] | None = None

    def logits(self, ids: npt.NDArray[np.int64]) -> Doubles:
        """Return the logits of a whole prompt, [tokens, vocab]."""
        x = self.weights["embedding"][ids].astype(np.float64)
        for layer in range(self.shape.layers):
            x = x + self._attention(layer, x)
            x = x + self._feed_forward(layer, x)
        x = rms_norm(x, self.weights["final_norm"], self.shape.norm_eps)
        return x @ self.weights.get("head", self.weights["embedding"]).T.astype(np.float64)

    def keys_after_rope(self, ids: npt.NDArray[np.int64]) -> list[Doubles]:
        """Return K of every layer after RoPE, [tokens, kv_heads, head_dim], for calibration."""
        x = self.weights["embedding"][ids].astype(np.float64)
        keys = []
        for layer in range(self.shape.layers):
            keys.append(self._keys(layer, self._normed(layer, x)))
            x = x + self._attention(layer, x)
            x = x + self._feed_forward(layer, x)
        return keys

    def _store(self, layer: int) -> LayerStore:
        if self.stores is not None:
            return self.stores[layer]
        return LayerStore(self.mode, self.mode, self.dtype, self.quality)

    def _normed(self, layer: int, x: Doubles) -> Doubles:
        return rms_norm(x, self.weights[f"layers.{layer}.attention_norm"], self.shape.norm_eps)

    def _keys(self, layer: int, x: Doubles) -> Doubles:
        return rotate(self.shape.rope, self._project(layer, "k", x), np.arange(len(x)))

    def _project(self, layer: int, name: str, x: Doubles) -> Doubles:
        out = x @ self.weights[f"layers.{layer}.{name}"].T.astype(np.float64)
        out = out + self.weights.get(f"layers.{layer}.{name}.bias", np.float32(0))
        out = out.reshape(len(x), -1, self.shape.head_dim)
        norm = self.weights.get(f"layers.{layer}.{name}_norm")
        return out if norm is None else rms_norm(out, norm, self.shape.norm_eps)

    def _attention(self, layer: int, x: Doubles) -> Doubles:
        shape, store = self.shape, self._store(layer)
        x = self._normed(layer, x)
        sinks = self.weights.get(f"layers.{layer}.sinks")
        out = mixed_attention(
            rotate(shape.rope, self._project(layer, "q", x), np.arange(len(x))),
            store.keys(self._keys(layer, x)),
            values=store.values(self._project(layer, "v", x)),
            window16=window16_mask(store.quality, np.arange(len(x)), len(x)),
            scale=shape.head_dim**-0.5,
            window=shape.windows[layer] if shape.windows else 0,
            sinks=None if sinks is None else sinks.astype(np.float64),
        )
        out = out.reshape(len(x), -1) @ self.weights[f"layers.{layer}.o"].T.astype(np.float64)
        return np.asarray(out + self.weights.get(f"layers.{layer}.o.bias", np.float32(0)))

    def _feed_forward(self, layer: int, x: Doubles) -> Doubles:
        x = rms_norm(x, self.weights[f"layers.{layer}.ffn_norm"], self.shape.norm_eps)
        if self.shape.experts is not None:
            return feed_forward(self.shape.experts, self.weights, f"layers.{layer}", x)
        gate = x @ self.weights[f"layers.{layer}.gate"].T.astype(np.float64)
        up = x @ self.weights[f"layers.{layer}.up"].T.astype(np.float64)
        hidden = gate / (1 + np.exp(-gate)) * up
        return hidden @ self.weights[f"layers.{layer}.down"].T.astype(np.float64)
