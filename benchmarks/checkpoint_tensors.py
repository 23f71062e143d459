"""The tensors of a checkpoint: names, shapes and formats, for safetensors and for GGUF.

Matrices have the standard deviation 1/sqrt(columns), so that outputs of a normed input have unit
variance; norms are 1, biases and attention sinks small, and the head's logits have LOGIT_STD.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from random_tensors import BLOCK, Encoding, RandomTensor

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
    """What a config.json says about sizes.

    Raises ValueError (in `of`) that names the key, what it holds and what was wanted.
    """

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
        """The shape of a Hugging Face config."""
        names = config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if name not in GGUF_ARCHITECTURES:
            raise ValueError(
                f"architectures: got {names!r}, wanted one of {', '.join(GGUF_ARCHITECTURES)}"
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
        """Whether sinks, MXFP4 experts and biases everywhere belong to it."""
        return self.architecture == "GptOssForCausalLM"

    def attention(self) -> dict[str, tuple[int, int]]:
        """q, k, v, o → [rows, columns]."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (q, self.hidden),
            "k": (kv, self.hidden),
            "v": (kv, self.hidden),
            "o": (self.hidden, q),
        }

    def has_bias(self, matrix: str) -> bool:
        """Whether q, k, v or o has a bias."""
        return self.output_bias if matrix == "o" else self.qkv_bias

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer, None where it is dense."""
        return self.experts if self.experts and layer in self.experts.layers else None


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"{key}: got {value!r}, wanted a positive integer")
    return value


def _experts(architecture: str, config: Mapping[str, Any]) -> Experts | None:
    every = frozenset(range(_size(config, "num_hidden_layers")))
    per_token = "num_experts_per_tok"
    if architecture in ("GptOssForCausalLM", "MixtralForCausalLM"):
        if architecture == "GptOssForCausalLM":
            for key in ("hidden_size", "intermediate_size"):
                if _size(config, key) % BLOCK:
                    raise ValueError(f"{key}: got {config[key]}, wanted a multiple of {BLOCK}")
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
    """A BF16 matrix (std from its columns) or vector."""
    return RandomTensor(name, shape, Encoding.BF16, shape[-1] ** -0.5 if std is None else std)


def _ones(name: str, length: int, *, encoding: Encoding = Encoding.BF16) -> RandomTensor:
    return RandomTensor(name, (length,), encoding, std=0.0, mean=1.0)


def hf_tensors(shape: Shape) -> list[RandomTensor]:
    """All tensors of a Hugging Face folder, in the order of the file.

    The shape of `_blocks` is given in values: two of them lie in a byte.
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
    """All tensors of a GGUF file: experts of GPT-OSS in MXFP4, other matrices in `encoding`."""
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
    """Of a tied embedding the head's: the first norm makes up for the size of its rows."""
    return LOGIT_STD * shape.hidden**-0.5 if shape.tied else 1.0


def _matrix(
    name: str, *shape: int, std: float | None = None, encoding: Encoding = Encoding.Q8_0
) -> RandomTensor:
    """Quantised where whole blocks fit into a row. Q8_0 stands for the file's encoding."""
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
