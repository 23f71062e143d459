"""Random tensors of a checkpoint: names, shapes and formats, for safetensors and for GGUF.

Matrices have the standard deviation 1/sqrt(columns), so that outputs of a normed input have unit
variance. Norms are 1, biases and attention sinks are small, and the logits have LOGIT_STD.

A value is `mean + std * z`, where z is one of 256 quantiles of the normal distribution, or a random
code of a quantized format with scales that give the same standard deviation. The bytes of a tensor
depend only on the seed and its name, so that a shorter model has the first layers of a longer one.
"""

from __future__ import annotations

import enum
import math
import statistics
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PIECE_VALUES = 1 << 22  # values of one piece: no array of ours passes 16 MiB
BLOCK = 32  # values of a block of Q8_0, Q4_0 and MXFP4
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_STD = math.sqrt(sum(value * value for value in E2M1_MAGNITUDES) / 8)
INT8_STD = math.sqrt((127 * 128 * 255 / 3 + 127 * 127) / 256)  # -127..127, -127 twice
INT4_STD = math.sqrt(sum((code - 8) ** 2 for code in range(16)) / 16)
EXPONENT_BIAS = 127


class Encoding(enum.Enum):
    """The format of the bytes of a tensor."""

    F32 = "F32"
    BF16 = "BF16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    MXFP4 = "MXFP4"  # blocks of 17 bytes: exponent, then codes
    E2M1_PAIRS = "E2M1_PAIRS"  # the codes alone: two values in a byte
    E8M0 = "E8M0"  # the exponents alone: one value in a byte

    def num_bytes(self, num_values: int) -> int:
        """Return the bytes of that many values."""
        per_block = {"F32": 128, "BF16": 64, "Q8_0": 34, "Q4_0": 18, "MXFP4": 17}
        per_block |= {"E2M1_PAIRS": 16, "E8M0": 32}
        return num_values * per_block[self.value] // BLOCK


@dataclass(frozen=True)
class RandomTensor:
    """Name, shape in values (outermost first) and distribution of one tensor.

    E8M0 scales have the `std` of the matrix that they scale. `values` are those of an F32 vector
    that is not random.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    std: float
    mean: float = 0.0
    values: tuple[float, ...] | None = None

    @property
    def num_values(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes in the file."""
        return self.encoding.num_bytes(self.num_values)

    def pieces(self, seed: int) -> Iterator[Bytes]:
        """Yield the bytes in order, PIECE_VALUES values at a time."""
        if self.values is not None:
            yield np.array(self.values, np.float32).view(np.uint8)
            return
        rng = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        make = {
            Encoding.F32: self._floats,
            Encoding.BF16: self._bfloats,
            Encoding.Q8_0: self._q8_0,
            Encoding.Q4_0: self._q4_0,
            Encoding.MXFP4: self._mxfp4,
            Encoding.E2M1_PAIRS: self._code_pairs,
            Encoding.E8M0: self._exponents,
        }[self.encoding]
        for start in range(0, self.num_values, PIECE_VALUES):
            yield make(rng, min(PIECE_VALUES, self.num_values - start))

    def _levels(self) -> npt.NDArray[np.float32]:
        normal = statistics.NormalDist()
        quantiles = [normal.inv_cdf((i + 0.5) / 256) for i in range(256)]
        return np.array([self.mean + self.std * z for z in quantiles], np.float32)

    def _floats(self, rng: np.random.Generator, count: int) -> Bytes:
        return self._levels()[random_bytes(rng, count)].view(np.uint8)

    def _bfloats(self, rng: np.random.Generator, count: int) -> Bytes:
        bits = self._levels().view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return rounded[random_bytes(rng, count)].view(np.uint8)

    def _q8_0(self, rng: np.random.Generator, count: int) -> Bytes:
        blocks = np.empty((count // BLOCK, 34), np.uint8)
        blocks[:, :2] = np.array([self.std / INT8_STD], np.float16).view(np.uint8)
        codes = random_bytes(rng, count).view(np.int8)
        blocks[:, 2:] = np.maximum(codes, -127).view(np.uint8).reshape(-1, BLOCK)
        return blocks.reshape(-1)

    def _q4_0(self, rng: np.random.Generator, count: int) -> Bytes:
        """Return codes -8 to 7. Every second scale is negative, so that the mean is zero."""
        blocks = np.empty((count // BLOCK, 18), np.uint8)
        scales = np.array([self.std / INT4_STD, -self.std / INT4_STD], np.float16)
        blocks[:, :2] = scales.view(np.uint8).reshape(2, 2)[np.arange(count // BLOCK) % 2]
        blocks[:, 2:] = random_bytes(rng, count // 2).reshape(-1, 16)
        return blocks.reshape(-1)

    def _mxfp4(self, rng: np.random.Generator, count: int) -> Bytes:
        blocks = np.empty((count // BLOCK, 17), np.uint8)
        blocks[:, 0] = self._exponents(rng, count // BLOCK)
        blocks[:, 1:] = random_bytes(rng, count // 2).reshape(-1, 16)
        return blocks.reshape(-1)

    def _code_pairs(self, rng: np.random.Generator, count: int) -> Bytes:
        return random_bytes(rng, count // 2)

    def _exponents(self, rng: np.random.Generator, count: int) -> Bytes:
        """Return two consecutive exponents, mixed so that the mean square is std²."""
        unit = math.log2(self.std / E2M1_STD)
        low = math.floor(unit)
        share_of_high = (4 ** (unit - low) - 1) / 3
        high = random_bytes(rng, count) < round(256 * share_of_high)
        return (low + EXPONENT_BIAS + high).astype(np.uint8)


def random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    """Return `count` uniform bytes."""
    words = rng.integers(0, 1 << 64, -(-count // 8), np.uint64)
    return words.view(np.uint8)[:count]


LOGIT_STD = 2.0
SMALL_STD = 0.1

GGUF_ARCHITECTURES = {
    "GptOssForCausalLM": "gpt-oss",
    "MixtralForCausalLM": "llama",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class Experts:
    """Feed-forward layers made of experts; `layers` lists which layers have them."""

    count: int
    per_token: int
    width: int
    shared_width: int
    layers: frozenset[int] = field(repr=False)


@dataclass(frozen=True)
class Shape:
    """The sizes in a config.json. `of` raises ValueError for a wrong value."""

    architecture: str
    hidden: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied: bool
    experts: Experts | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Read the shape from a Hugging Face config."""
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if name not in GGUF_ARCHITECTURES:
            raise ValueError(
                f"architectures {names!r} is unknown; use one of {', '.join(GGUF_ARCHITECTURES)}."
            )
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        given_dim = config.get("head_dim") is not None
        bias = bool(config.get("attention_bias"))
        return cls(
            architecture=name,
            hidden=hidden,
            width=_size(config, "intermediate_size"),
            layers=_size(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads"),
            head_dim=_size(config, "head_dim") if given_dim else hidden // heads,
            vocab=_size(config, "vocab_size"),
            qkv_bias=bias or name.startswith("Qwen2"),
            output_bias=bias,
            qk_norm=name.startswith("Qwen3"),
            tied=bool(config.get("tie_word_embeddings")),
            experts=_experts(name, config),
        )

    @property
    def is_gpt_oss(self) -> bool:
        """Whether the model has sinks, MXFP4 experts and biases."""
        return self.architecture == "GptOssForCausalLM"

    def attention(self) -> dict[str, tuple[int, int]]:
        """Return [rows, columns] of q, k, v and o."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (q, self.hidden),
            "k": (kv, self.hidden),
            "v": (kv, self.hidden),
            "o": (self.hidden, q),
        }

    def has_bias(self, matrix: str) -> bool:
        """Return whether q, k, v or o has a bias."""
        return self.output_bias if matrix == "o" else self.qkv_bias

    def experts_of(self, layer: int) -> Experts | None:
        """Return the experts of a layer, or None for a dense layer."""
        return self.experts if self.experts and layer in self.experts.layers else None


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{key} {value!r} is wrong; it must be a positive integer.")
    return value


def _experts(architecture: str, config: Mapping[str, Any]) -> Experts | None:
    every = frozenset(range(_size(config, "num_hidden_layers")))
    per_token = "num_experts_per_tok"
    if architecture in ("GptOssForCausalLM", "MixtralForCausalLM"):
        if architecture == "GptOssForCausalLM":
            for key in ("hidden_size", "intermediate_size"):
                if _size(config, key) % BLOCK:
                    raise ValueError(
                        f"{key} {config[key]} is wrong; it must be a multiple of {BLOCK}."
                    )
        count, width = _size(config, "num_local_experts"), _size(config, "intermediate_size")
        return Experts(count, _size(config, per_token), width, 0, every)
    if architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        shared = "shared_expert_intermediate_size"
        return Experts(
            _size(config, "num_experts"),
            _size(config, per_token),
            _size(config, "moe_intermediate_size"),
            _size(config, shared) if architecture == "Qwen2MoeForCausalLM" else 0,
            frozenset(i for i in every if i not in dense and (i + 1) % step == 0),
        )
    return None


def _plain(name: str, *shape: int, std: float | None = None) -> RandomTensor:
    """Return a BF16 matrix (std from its columns) or vector."""
    return RandomTensor(name, shape, Encoding.BF16, shape[-1] ** -0.5 if std is None else std)


def _ones(name: str, length: int, *, encoding: Encoding = Encoding.BF16) -> RandomTensor:
    return RandomTensor(name, (length,), encoding, std=0.0, mean=1.0)


def hf_tensors(shape: Shape) -> list[RandomTensor]:
    """Return all tensors of a Hugging Face folder, in the order of the file.

    The shape of `_blocks` counts values, and a byte holds two values.
    """
    std = _embedding_std(shape)
    tensors = [_plain("model.embed_tokens.weight", shape.vocab, shape.hidden, std=std)]
    for layer in range(shape.layers):
        tensors += _hf_layer(shape, layer)
    tensors.append(_ones("model.norm.weight", shape.hidden))
    if not shape.tied:
        std = LOGIT_STD * shape.hidden**-0.5
        tensors.append(_plain("lm_head.weight", shape.vocab, shape.hidden, std=std))
    return tensors


def _hf_layer(shape: Shape, layer: int) -> Iterator[RandomTensor]:
    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    yield _ones(f"{prefix}.input_layernorm.weight", shape.hidden)
    for matrix, (rows, columns) in shape.attention().items():
        yield _plain(f"{attention}.{matrix}_proj.weight", rows, columns)
        if shape.has_bias(matrix):
            yield _plain(f"{attention}.{matrix}_proj.bias", rows, std=SMALL_STD)
    if shape.qk_norm:
        yield _ones(f"{attention}.q_norm.weight", shape.head_dim)
        yield _ones(f"{attention}.k_norm.weight", shape.head_dim)
    if shape.is_gpt_oss:
        yield _plain(f"{attention}.sinks", shape.heads, std=SMALL_STD)
    yield _ones(f"{prefix}.post_attention_layernorm.weight", shape.hidden)
    experts = shape.experts_of(layer)
    if experts is None:
        yield from _hf_gated(f"{prefix}.mlp", shape.hidden, width=shape.width)
    elif shape.is_gpt_oss:
        yield from _gpt_oss_experts(f"{prefix}.mlp", shape.hidden, experts=experts)
    elif shape.architecture == "MixtralForCausalLM":
        moe = f"{prefix}.block_sparse_moe"
        yield _plain(f"{moe}.gate.weight", experts.count, shape.hidden)
        for expert in range(experts.count):
            yield _plain(f"{moe}.experts.{expert}.w1.weight", experts.width, shape.hidden)
            yield _plain(f"{moe}.experts.{expert}.w2.weight", shape.hidden, experts.width)
            yield _plain(f"{moe}.experts.{expert}.w3.weight", experts.width, shape.hidden)
    else:
        moe = f"{prefix}.mlp"
        yield _plain(f"{moe}.gate.weight", experts.count, shape.hidden)
        for expert in range(experts.count):
            yield from _hf_gated(f"{moe}.experts.{expert}", shape.hidden, width=experts.width)
        if experts.shared_width:
            yield from _hf_gated(f"{moe}.shared_expert", shape.hidden, width=experts.shared_width)
            yield _plain(f"{moe}.shared_expert_gate.weight", 1, shape.hidden)


def _hf_gated(prefix: str, hidden: int, *, width: int) -> Iterator[RandomTensor]:
    yield _plain(f"{prefix}.gate_proj.weight", width, hidden)
    yield _plain(f"{prefix}.up_proj.weight", width, hidden)
    yield _plain(f"{prefix}.down_proj.weight", hidden, width)


def _gpt_oss_experts(prefix: str, hidden: int, *, experts: Experts) -> Iterator[RandomTensor]:
    yield _plain(f"{prefix}.router.weight", experts.count, hidden)
    yield _plain(f"{prefix}.router.bias", experts.count, std=SMALL_STD)
    for name, rows, columns in (
        ("gate_up_proj", 2 * experts.width, hidden),
        ("down_proj", hidden, experts.width),
    ):
        start, std = f"{prefix}.experts.{name}", columns**-0.5
        blocks = (experts.count, rows, columns // BLOCK)
        yield _plain(f"{start}_bias", experts.count, rows, std=SMALL_STD)
        yield RandomTensor(f"{start}_blocks", (*blocks, BLOCK), Encoding.E2M1_PAIRS, std)
        yield RandomTensor(f"{start}_scales", blocks, Encoding.E8M0, std)


def gguf_tensors(shape: Shape, encoding: Encoding = Encoding.Q8_0) -> list[RandomTensor]:
    """Return all tensors of a GGUF file. GPT-OSS experts have MXFP4, other matrices `encoding`."""
    tensors = [_matrix("token_embd.weight", shape.vocab, shape.hidden, std=_embedding_std(shape))]
    for layer in range(shape.layers):
        tensors += _gguf_layer(shape, layer)
    tensors.append(_ones("output_norm.weight", shape.hidden, encoding=Encoding.F32))
    if not shape.tied:
        std = LOGIT_STD * shape.hidden**-0.5
        tensors.append(_matrix("output.weight", shape.vocab, shape.hidden, std=std))
    return [
        replace(tensor, encoding=encoding) if tensor.encoding is Encoding.Q8_0 else tensor
        for tensor in tensors
    ]


def _embedding_std(shape: Shape) -> float:
    """Return the std of the embedding. A tied embedding has the std of the head."""
    return LOGIT_STD * shape.hidden**-0.5 if shape.tied else 1.0


def _matrix(
    name: str, *shape: int, std: float | None = None, encoding: Encoding = Encoding.Q8_0
) -> RandomTensor:
    """Return a matrix, quantized if rows have whole blocks. Q8_0 stands for that of the file."""
    if shape[-1] % BLOCK:
        encoding = Encoding.F32
    return RandomTensor(name, shape, encoding, shape[-1] ** -0.5 if std is None else std)


def _vector(name: str, *shape: int, std: float = SMALL_STD) -> RandomTensor:
    return RandomTensor(name, shape, Encoding.F32, std)


def _gguf_layer(shape: Shape, layer: int) -> Iterator[RandomTensor]:
    prefix = f"blk.{layer}"
    yield _ones(f"{prefix}.attn_norm.weight", shape.hidden, encoding=Encoding.F32)
    for matrix, (rows, columns) in shape.attention().items():
        name = f"{prefix}.attn_{'output' if matrix == 'o' else matrix}"
        yield _matrix(f"{name}.weight", rows, columns)
        if shape.has_bias(matrix):
            yield _vector(f"{name}.bias", rows)
    if shape.qk_norm:
        yield _ones(f"{prefix}.attn_q_norm.weight", shape.head_dim, encoding=Encoding.F32)
        yield _ones(f"{prefix}.attn_k_norm.weight", shape.head_dim, encoding=Encoding.F32)
    if shape.is_gpt_oss:
        yield _vector(f"{prefix}.attn_sinks.weight", shape.heads)
    norm = "post_attention_norm" if shape.is_gpt_oss else "ffn_norm"
    yield _ones(f"{prefix}.{norm}.weight", shape.hidden, encoding=Encoding.F32)
    experts = shape.experts_of(layer)
    if experts is None:
        for name, rows, columns in _gated("ffn_{}", shape.hidden, width=shape.width):
            yield _matrix(f"{prefix}.{name}.weight", rows, columns)
        return
    encoding = Encoding.MXFP4 if shape.is_gpt_oss else Encoding.Q8_0
    std = shape.hidden**-0.5
    yield _vector(f"{prefix}.ffn_gate_inp.weight", experts.count, shape.hidden, std=std)
    if shape.is_gpt_oss:
        yield _vector(f"{prefix}.ffn_gate_inp.bias", experts.count)
    for name, rows, columns in _gated("ffn_{}_exps", shape.hidden, width=experts.width):
        yield _matrix(f"{prefix}.{name}.weight", experts.count, rows, columns, encoding=encoding)
        if shape.is_gpt_oss:
            yield _vector(f"{prefix}.{name}.bias", experts.count, rows)
    if experts.shared_width:
        yield _vector(f"{prefix}.ffn_gate_inp_shexp.weight", shape.hidden, std=std)
        for name, rows, columns in _gated("ffn_{}_shexp", shape.hidden, width=experts.shared_width):
            yield _matrix(f"{prefix}.{name}.weight", rows, columns)


def _gated(pattern: str, hidden: int, *, width: int) -> Iterator[tuple[str, int, int]]:
    yield pattern.format("gate"), width, hidden
    yield pattern.format("down"), hidden, width
    yield pattern.format("up"), width, hidden
