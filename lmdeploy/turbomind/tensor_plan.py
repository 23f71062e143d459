"""Which tensors of a file the engine wants: each looked up, its shape compared with the config."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdeploy.turbomind.model_errors import ModelFormatError
from lmdeploy.turbomind.models.config_reader import ConfigReader
from lmdeploy.turbomind.models.decoder_config import DecoderConfig
from lmdeploy.turbomind.models.family import (
    REQUIRED_MATRICES,
    REQUIRED_VECTORS,
    ModelFamily,
)
from lmdeploy.turbomind.tensor_file import StoredTensor, TensorFile

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 22
GGUF_ROPE_FACTORS = "rope_freqs.weight"
# Tensors that carry no weights of ours: derived tables of older checkpoints.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


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


def check_heads(reader: ConfigReader, config: DecoderConfig) -> DecoderConfig:
    """The config, if the engine can compute its heads."""
    if config.num_heads % config.num_kv_heads:
        raise reader.refuse(
            f"{config.num_heads} query heads are not a multiple of {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 16:
        raise reader.refuse(f"head_dim {config.head_dim} is not a multiple of 16: not supported")
    return config


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


def plan_tensors(
    file: TensorFile,
    config: DecoderConfig,
    *,
    names: Mapping[str, str],
    interleaved: bool,
    source: str,
) -> Iterator[PlannedTensor]:
    """Every tensor to load, in order; refuses missing, misshapen and unknown ones."""
    left = {name for name in file.names if not name.endswith(_IGNORED_SUFFIXES)}
    left.discard(GGUF_ROPE_FACTORS)
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


def stored_dtype(tensors: tuple[PlannedTensor, ...]) -> str:
    """What most of the matrix values are stored as."""
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    values: dict[str, int] = {}
    for planned in tensors:
        if len(planned.tensor.shape) == 2:
            kind = names.get(planned.tensor.format, "quantized")
            values[kind] = values.get(kind, 0) + planned.tensor.rows * planned.tensor.cols
    return max(values, key=lambda kind: values[kind])
