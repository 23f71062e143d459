"""Hugging Face folder or GGUF file → ModelConfig, packed weights, tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.chat_template import ChatTemplate, template_from_folder, template_from_gguf
from lmdeploy.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.hub import resolve_model
from lmdeploy.tokenizer import Tokenizer, tokenizer_from_folder
from lmdeploy.turbomind.checkpoint import Checkpoint, open_checkpoint
from lmdeploy.turbomind.conversion import (
    MAPPED_FORMATS,
    engine_bytes,
    matrix_for_engine,
    vector_for_engine,
)
from lmdeploy.turbomind.model_errors import ModelFormatError
from lmdeploy.turbomind.safetensors_file import read_json_object
from lmdeploy.turbomind.tensor_file import release_pages
from lmdeploy.turbomind.tensor_plan import PlannedTensor

if TYPE_CHECKING:
    from lmdeploy._turbomind import Device, ModelConfig, Weights, WeightsBuilder

__all__ = ["LoadedModel", "ModelFormatError", "ModelInfo", "load_model", "read_model_info"]

_MAX_JSON_BYTES = 1 << 20
# `dtype` as users write it → the cache dtype of the engine.
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}


@dataclass(frozen=True)
class ModelInfo:
    """A model without its weights: enough to plan memory and to refuse a bad checkpoint."""

    path: Path
    model_type: str  # the family: llama, mistral, gpt_oss, ...
    config: ModelConfig
    weight_bytes: int  # that the engine will keep, before padding
    mapped_bytes: int  # of these, experts that are read where they lie in the file
    file_bytes: int  # that are read from the checkpoint
    stored_dtype: str  # float32, float16, bfloat16 or quantized


@dataclass
class LoadedModel:
    """A model ready for the engine."""

    path: Path
    model_type: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None: the checkpoint has none
    mapped_bytes: int = 0  # of weights in the mapped file, resident once they have been used
    generation_config: dict[str, Any] = field(default_factory=dict)


def read_model_info(path: str, *, dtype: str = "auto", exact: bool = False) -> ModelInfo:
    """Checks config and tensors of `path` (a name, folder, file or hub id) and sums their sizes.

    Raises ModelFormatError (a ValueError) for everything that could not be loaded.
    """
    return _info(open_checkpoint(resolve_model(path)), dtype=dtype, exact=exact)


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    exact: bool = False,
    device: Device,
    progress: bool = True,
) -> LoadedModel:
    """Loads everything, tensor by tensor. Of the mapped files only experts in MXFP4 stay, as long
    as the weights live; the pages of every other tensor are given back once it is packed.

    Args:
        path: `smollm2`, a Hugging Face folder, a .gguf file or a hub id.
        dtype: cache dtype, or "auto" for the rule of the format (docs/kv_cache.md).
        exact: FP32 compute, without BF16 weights or int8 activations.
        device: the engine's device, which packs the weights.
        progress: whether to show a bar.
    """
    checkpoint = open_checkpoint(resolve_model(path))
    info = _info(checkpoint, dtype=dtype, exact=exact)
    # The small parts first: they fail fast.
    tokenizer = _tokenizer(checkpoint)
    if tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise ModelFormatError(
            f"{checkpoint.path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model "
            f"only {checkpoint.config.vocab_size} rows of embedding"
        )
    return LoadedModel(
        path=checkpoint.path,
        model_type=checkpoint.family.name,
        config=info.config,
        mapped_bytes=info.mapped_bytes,
        chat_template=_chat_template(checkpoint, tokenizer),
        generation_config=_generation_config(checkpoint),
        tokenizer=tokenizer,
        weights=_load_weights(checkpoint, info, exact=exact, device=device, progress=progress),
    )


def cache_dtype(stored_dtype: str, dtype: str, *, exact: bool) -> str:
    """BF16 for BF16 models, else FP16; `dtype` overrides it, exact compute means FP32."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype!r}; wanted auto, {', '.join(DTYPES)}; --dtype")
        return DTYPES[dtype]
    if exact:
        return "float32"
    return "bfloat16" if stored_dtype == "bfloat16" else "float16"


def _info(checkpoint: Checkpoint, *, dtype: str, exact: bool) -> ModelInfo:
    mapped = [planned for planned in checkpoint.tensors if planned.mapped and not exact]
    return ModelInfo(
        path=checkpoint.path,
        model_type=checkpoint.family.name,
        config=checkpoint.config.to_engine(
            cache_dtype(checkpoint.stored_dtype, dtype, exact=exact)
        ),
        weight_bytes=sum(engine_bytes(planned, exact) for planned in checkpoint.tensors),
        mapped_bytes=sum(planned.tensor.num_bytes for planned in mapped),
        file_bytes=sum(planned.tensor.num_bytes for planned in checkpoint.tensors),
        stored_dtype=checkpoint.stored_dtype,
    )


def _load_weights(
    checkpoint: Checkpoint, info: ModelInfo, *, exact: bool, device: Device, progress: bool
) -> Weights:
    from tqdm import tqdm

    from lmdeploy._turbomind import WeightsBuilder

    builder = WeightsBuilder(info.config, device, exact)
    bar = tqdm(
        total=info.file_bytes,
        desc=f"Loading {checkpoint.path.name}",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar:
        for planned in checkpoint.tensors:
            _add(builder, planned, exact=exact)
            bar.update(planned.tensor.num_bytes)
    return builder.build()


def _add(builder: WeightsBuilder, planned: PlannedTensor, *, exact: bool) -> None:
    tensor = planned.tensor
    if planned.mapped:
        builder.add_matrix(
            planned.name,
            MAPPED_FORMATS[tensor.format],
            tensor.raw,
            planned.rows,
            planned.cols,
            tensor.scales,
        )
        if not exact:
            return
    elif len(tensor.shape) == 1:
        values = vector_for_engine(tensor, interleaved_heads=planned.interleaved_heads)
        builder.add_vector(planned.name, values)
    else:
        kind, data = matrix_for_engine(
            tensor,
            exact=exact,
            interleaved_heads=planned.interleaved_heads,
            transposed=planned.transposed,
        )
        builder.add_matrix(planned.name, kind, data, planned.rows, planned.cols)
    release_pages(tensor.raw)
    if tensor.scales is not None:
        release_pages(tensor.scales)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.is_gguf:
        return tokenizer_from_gguf(checkpoint.metadata, str(checkpoint.path))
    return tokenizer_from_folder(checkpoint.path)


def _chat_template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    if checkpoint.is_gguf:
        return template_from_gguf(checkpoint.metadata, tokenizer)
    return template_from_folder(checkpoint.path, tokenizer)


def _generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    path = checkpoint.path / "generation_config.json"
    if checkpoint.is_gguf or not path.is_file():
        return {}
    return read_json_object(path, _MAX_JSON_BYTES)
