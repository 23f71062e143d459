"""A model's config and tensor names, from a Hugging Face folder or a GGUF file, all checked.

Nothing of the weights is read here: tensors are looked up and their shapes compared with the
config, so that a bad checkpoint fails before any memory is taken.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lmdeploy.turbomind.gguf_file import GgufFile
from lmdeploy.turbomind.model_errors import ModelFormatError
from lmdeploy.turbomind.models import family_of_gguf, family_of_hf
from lmdeploy.turbomind.models.config_reader import ConfigReader
from lmdeploy.turbomind.models.decoder_config import DecoderConfig
from lmdeploy.turbomind.models.family import (
    REQUIRED_MATRICES,
    REQUIRED_VECTORS,
    ModelFamily,
)
from lmdeploy.turbomind.models.rope import rope_from_gguf, rope_from_hf
from lmdeploy.turbomind.safetensors_file import SafetensorsFile, read_json_object
from lmdeploy.turbomind.tensor_file import StoredTensor, TensorFile

_MAX_CONFIG_BYTES = 16 << 20
_MAX_LAYERS = 4096
_MAX_WIDTH = 1 << 22
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Tensors that carry no weights of ours: derived tables of older checkpoints.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
_GGUF_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to load: the engine's name, the stored bytes, how its rows are laid out."""

    name: str
    tensor: StoredTensor
    interleaved_heads: int = 0  # > 0: rows of so many heads are interleaved for RoPE


@dataclass(frozen=True)
class Checkpoint:
    """A checked model: what loader.py needs to feed the engine."""

    path: Path
    family: ModelFamily
    config: DecoderConfig
    tensors: tuple[PlannedTensor, ...]
    stored_dtype: str  # bfloat16, float16, float32 or quantized: what most weights are
    metadata: Mapping[str, Any]  # config.json, or GGUF's key-value pairs
    is_gguf: bool


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder or a .gguf file; ModelFormatError for everything that does not fit."""
    if path.is_file():
        return _open_gguf(path)
    if (path / "config.json").is_file():
        return _open_folder(path)
    raise ModelFormatError(
        f"{path}: no config.json in this folder; wanted a Hugging Face model folder or a .gguf file"
    )


def _open_folder(folder: Path) -> Checkpoint:
    source = str(folder / "config.json")
    values = read_json_object(folder / "config.json", _MAX_CONFIG_BYTES)
    reader = ConfigReader(values, source)
    architectures = reader.texts("architectures")
    if not architectures:
        raise reader.refuse("architectures is missing")
    family = family_of_hf(architectures[0], source)
    quantization = reader.child("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", default="unknown")
        raise ModelFormatError(
            f"{source}: quantization_config with quant_method {method[:40]!r} is not supported; "
            "wanted F32, F16 or BF16 weights, or a GGUF file"
        )
    config = _config_from_hf(reader, values, family=family)
    file = SafetensorsFile(folder)
    names = dict(family.hf_tensors)
    for matrix in family.hf_bias(reader):
        names[f"{matrix}.bias"] = family.hf_tensors[matrix].removesuffix("weight") + "bias"
    tensors = tuple(_plan(file, config, names=names, interleaved=False, source=str(folder)))
    return Checkpoint(folder, family, config, tensors, _stored_dtype(tensors), values, False)


def _config_from_hf(
    reader: ConfigReader, values: Mapping[str, Any], *, family: ModelFamily
) -> DecoderConfig:
    hidden = reader.integer("hidden_size", high=_MAX_WIDTH)
    heads = reader.integer("num_attention_heads", high=_MAX_WIDTH)
    head_dim = family.default_head_dim or max(hidden // heads, 1)
    activation = reader.text("hidden_act", default="silu")
    if activation not in _ACTIVATIONS:
        raise reader.refuse(
            f"hidden_act {activation[:40]!r} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    max_position = reader.integer("max_position_embeddings", default=2048)
    layers = reader.integer("num_hidden_layers", high=_MAX_LAYERS)
    if family.default_sliding_window and "sliding_window" not in values:
        reader = ConfigReader(
            {**values, "sliding_window": family.default_sliding_window}, reader.source
        )
    return _checked(
        reader,
        DecoderConfig(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=reader.integer("intermediate_size", high=_MAX_WIDTH),
            num_heads=heads,
            num_kv_heads=reader.integer("num_key_value_heads", default=heads, high=_MAX_WIDTH),
            head_dim=reader.integer("head_dim", default=head_dim, high=_MAX_WIDTH),
            vocab_size=reader.integer("vocab_size", high=_MAX_WIDTH),
            max_position=max_position,
            norm_eps=reader.number("rms_norm_eps", default=1e-6, high=1.0),
            windows=family.windows(reader, layers),
            tied_head=reader.flag("tie_word_embeddings", default=False),
            activation=_ACTIVATIONS[activation],
            rope=rope_from_hf(reader, max_position),
        ),
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = GgufFile(path)
    reader = ConfigReader(file.metadata, str(path))
    family = family_of_gguf(reader.text("general.architecture"), str(path))
    prefix = reader.text("general.architecture")
    for key in ("split.count", f"{prefix}.expert_count"):
        count = reader.integer(key, default=0, low=0)
        if count > 1:
            raise reader.refuse(f"{key} is {count}: split files and experts are not supported")
    config = _config_from_gguf(reader, file, prefix=prefix)
    if _GGUF_ROPE_FACTORS in file.names:
        config = replace(config, rope=replace(config.rope, freq_factors=_factors(file, config)))
    names = dict(family.gguf_tensors)
    present = set(file.names)
    for matrix in REQUIRED_MATRICES:
        bias = family.gguf_tensors[matrix].removesuffix("weight") + "bias"
        if bias.format(i=0) in present:
            names[f"{matrix}.bias"] = bias
    tensors = tuple(
        _plan(file, config, names=names, interleaved=family.gguf_interleaved_rope, source=str(path))
    )
    return Checkpoint(path, family, config, tensors, _stored_dtype(tensors), file.metadata, True)


def _config_from_gguf(reader: ConfigReader, file: GgufFile, *, prefix: str) -> DecoderConfig:
    if "token_embd.weight" not in file.names:
        raise reader.refuse("tensor token_embd.weight is missing")
    hidden = reader.integer(f"{prefix}.embedding_length", high=_MAX_WIDTH)
    heads = reader.integer(f"{prefix}.attention.head_count", high=_MAX_WIDTH)
    head_dim = reader.integer(
        f"{prefix}.attention.key_length", default=max(hidden // heads, 1), high=_MAX_WIDTH
    )
    for key in (f"{prefix}.attention.value_length", f"{prefix}.rope.dimension_count"):
        if reader.integer(key, default=head_dim) != head_dim:
            raise reader.refuse(f"{key} is not the head_dim {head_dim}: not supported")
    max_position = reader.integer(f"{prefix}.context_length")
    layers = reader.integer(f"{prefix}.block_count", high=_MAX_LAYERS)
    window_key = f"{prefix}.attention.sliding_window"
    window = reader.integer(window_key, low=0) if reader.has(window_key) else 0
    return _checked(
        reader,
        DecoderConfig(
            num_layers=layers,
            hidden_size=hidden,
            intermediate_size=reader.integer(f"{prefix}.feed_forward_length", high=_MAX_WIDTH),
            num_heads=heads,
            num_kv_heads=reader.integer(
                f"{prefix}.attention.head_count_kv", default=heads, high=_MAX_WIDTH
            ),
            head_dim=head_dim,
            vocab_size=file.tensor("token_embd.weight").rows,
            max_position=max_position,
            norm_eps=reader.number(f"{prefix}.attention.layer_norm_rms_epsilon", high=1.0),
            windows=(window,) * layers,
            tied_head="output.weight" not in file.names,
            rope=rope_from_gguf(reader, prefix, max_position=max_position),
        ),
    )


def _checked(reader: ConfigReader, config: DecoderConfig) -> DecoderConfig:
    if config.num_heads % config.num_kv_heads:
        raise reader.refuse(
            f"{config.num_heads} query heads are not a multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 16:
        raise reader.refuse(f"head_dim {config.head_dim} is not a multiple of 16: not supported")
    return config


def _factors(file: GgufFile, config: DecoderConfig) -> tuple[float, ...]:
    tensor = file.tensor(_GGUF_ROPE_FACTORS)
    if tensor.format != "F32" or tensor.shape != (config.head_dim // 2,):
        raise ModelFormatError(
            f"{file.path}: {_GGUF_ROPE_FACTORS} is {tensor.format} {list(tensor.shape)}; wanted "
            f"F32 [{config.head_dim // 2}]"
        )
    factors = tensor.raw.view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelFormatError(f"{file.path}: {_GGUF_ROPE_FACTORS} holds values that are not > 0")
    return tuple(float(factor) for factor in factors)


def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every engine tensor, rows first; biases have the rows of their matrix."""
    hidden, inter = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "final_norm": (hidden,),
        "attention_norm": (hidden,),
        "ffn_norm": (hidden,),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "gate": (inter, hidden),
        "up": (inter, hidden),
        "down": (hidden, inter),
    }
    shapes.update({f"{name}.bias": shapes[name][:1] for name in REQUIRED_MATRICES})
    return shapes


def _plan(
    file: TensorFile,
    config: DecoderConfig,
    *,
    names: Mapping[str, str],
    interleaved: bool,
    source: str,
) -> Iterator[PlannedTensor]:
    """Every tensor to load, in order; refuses missing, misshapen and unknown ones."""
    left = {name for name in file.names if not name.endswith(_IGNORED_SUFFIXES)}
    left.discard(_GGUF_ROPE_FACTORS)
    shapes = _shapes(config)
    heads = {"q": config.num_heads, "k": config.num_kv_heads}

    def plan(kind: str, stored_name: str, *, engine_name: str) -> PlannedTensor:
        if stored_name not in left:
            raise ModelFormatError(f"{source}: tensor {stored_name} is missing")
        left.remove(stored_name)
        tensor = file.tensor(stored_name)
        if tensor.shape != shapes[kind]:
            raise ModelFormatError(
                f"{source}: tensor {stored_name} has shape {list(tensor.shape)}; the config wants "
                f"{list(shapes[kind])}"
            )
        count = heads.get(kind.removesuffix(".bias"), 0) if interleaved else 0
        return PlannedTensor(engine_name, tensor, count)

    outer = ("embedding", "final_norm", "head")
    for kind in outer:
        if kind != "head" or not config.tied_head:
            yield plan(kind, names[kind], engine_name=kind)
    if config.tied_head:
        left.discard(names["head"])
    inner = [kind for kind in names if kind not in outer]
    required = {*REQUIRED_MATRICES, *REQUIRED_VECTORS}
    if missing := required - set(inner):
        raise ModelFormatError(f"{source}: the model family names no tensor for {sorted(missing)}")
    for layer in range(config.num_layers):
        for kind in inner:
            yield plan(kind, names[kind].format(i=layer), engine_name=f"layers.{layer}.{kind}")
    if left:
        raise ModelFormatError(
            f"{source}: {len(left)} tensors that this architecture does not know, such as "
            f"{min(left)[:80]}"
        )


def _stored_dtype(tensors: tuple[PlannedTensor, ...]) -> str:
    """What most of the matrix values are stored as."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    values: dict[str, int] = {}
    for planned in tensors:
        if len(planned.tensor.shape) == 2:
            kind = names.get(planned.tensor.format, "quantized")
            values[kind] = values.get(kind, 0) + planned.tensor.rows * planned.tensor.cols
    return max(values, key=lambda kind: values[kind])
