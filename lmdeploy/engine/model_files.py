"""Opens a Hugging Face folder or GGUF file and loads weights, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import read_json_object
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.chat.templates.jinja_template import (
    ChatTemplate,
    template_from_folder,
    template_from_gguf,
)
from lmdeploy.chat.tokenizer import Tokenizer, tokenizer_from_folder
from lmdeploy.checkpoint.convert import (
    MAPPED_FORMATS,
    engine_bytes,
    engine_format,
    for_device,
)
from lmdeploy.checkpoint.fingerprint import FileIdentities, identify_files
from lmdeploy.checkpoint.hub import resolve_model
from lmdeploy.checkpoint.kv_scales import KvScales
from lmdeploy.checkpoint.load import cache_of, load_through_cache, load_weights
from lmdeploy.checkpoint.methods.at_load import part_of, with_weight_format
from lmdeploy.checkpoint.open import Checkpoint, open_checkpoint
from lmdeploy.checkpoint.weight_cache import WeightCacheWriter
from lmdeploy.config.weight_format_options import WEIGHT_PARTS, parse_weight_format

if TYPE_CHECKING:
    from lmdeploy._turbomind import Device, DeviceCapability, ModelConfig, Weights

__all__ = [
    "LoadedModel",
    "ModelChanges",
    "ModelFiles",
    "ModelFormatError",
    "ModelInfo",
    "TokenizerAndTemplate",
    "load_model",
    "open_files",
]

_MAX_JSON_BYTES = 1 << 20
# The option `dtype` → the cache dtype of the engine.
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
class ModelChanges:
    """Options that change a model before its weights are loaded.

    Args:
        overrides: values that replace those of config.json.
        rope_factor: factor of dynamic NTK scaling that replaces the model's RoPE. 0 keeps it.
        weight_format: formats that matrices are quantized to. None keeps them as stored.
    """

    overrides: Mapping[str, Any] | None = None
    rope_factor: float = 0.0
    weight_format: str | None = None


@dataclass(frozen=True)
class WeightPart:
    """The size of a part of the weights in the engine, before padding, and its formats."""

    num_bytes: int
    formats: tuple[str, ...]


@dataclass(frozen=True)
class ModelInfo:
    """The facts about a model that are known before its weights are read."""

    path: Path
    model_type: str  # the family: llama, mistral, gpt_oss, ...
    config: ModelConfig
    weight_bytes: int  # size of the weights in the engine, before padding
    mapped_bytes: int  # the part of weight_bytes that stays in the mapped file (MXFP4)
    file_bytes: int  # size of the tensors in the checkpoint
    stored_dtype: str  # float32, float16, bfloat16 or quantized
    kv_scales: KvScales | None = None  # of an FP8 cache, if the checkpoint has them
    parts: Mapping[str, WeightPart] = field(default_factory=dict)  # attn, mlp, other, rest


@dataclass
class LoadedModel:
    """A loaded model, ready for the engine."""

    path: Path
    model_type: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None if the checkpoint has none
    mapped_bytes: int = 0  # size of the weights in mapped files, resident after their first use
    generation_config: dict[str, Any] = field(default_factory=dict)
    cache_writer: WeightCacheWriter | None = None  # start it when the engine is ready
    kv_scales: KvScales | None = None  # of an FP8 cache, if the checkpoint has them


@dataclass(frozen=True)
class TokenizerAndTemplate:
    """The tokenizer, chat template and generation defaults of a checkpoint."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None if the checkpoint has none
    generation_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelFiles:
    """An open checkpoint. Its config and tensors are checked, but no weights are read yet."""

    info: ModelInfo
    _checkpoint: Checkpoint
    _files: FileIdentities
    _exact: bool
    _copied: bool  # no tensor stays in the mapped files
    draft: ModelFiles | None = None  # the files of the draft model

    @property
    def identities(self) -> FileIdentities:
        """Return the identities of the weight files when they were opened."""
        return self._files

    def read_texts(self) -> TokenizerAndTemplate:
        """Read the tokenizer, the chat template and the generation defaults.

        Call it once: it frees the metadata, because a vocabulary takes tens of megabytes. Raises
        ModelFormatError.
        """
        checkpoint = self._checkpoint
        self._checkpoint = replace(checkpoint, metadata={})
        tokenizer = _tokenizer(checkpoint)
        if tokenizer.vocab_size > checkpoint.config.vocab_size:
            raise ModelFormatError(
                f"{checkpoint.path}: The tokenizer has ids up to {tokenizer.vocab_size - 1}, but "
                f"the embedding has only {checkpoint.config.vocab_size} rows."
            )
        template = _chat_template(checkpoint, tokenizer)
        return TokenizerAndTemplate(tokenizer, template, _generation_config(checkpoint))

    def load(self, texts: TokenizerAndTemplate, *, device: Device, progress: bool) -> LoadedModel:
        """Load the weights tensor by tensor, or packed from the weight cache.

        If the device reads mapped files, MXFP4 experts stay in them as long as the weights live.
        The pages of every other tensor are freed once it is packed. Other devices get copies of
        all tensors and do not use the weight cache.

        Raises:
            ModelFormatError: if a tensor cannot be loaded.
            ValueError: if an environment variable of the weight cache is wrong.
        """
        from lmdeploy._turbomind import WeightsBuilder

        checkpoint, exact = self._checkpoint, self._exact
        builder = WeightsBuilder(self.info.config, device, exact)
        cache = None if self._copied else cache_of(checkpoint, self._files)
        if cache is not None:
            loaded = load_through_cache(builder, checkpoint, entry=cache, progress=progress)
        else:
            loaded = load_weights(
                builder, checkpoint, exact=exact, copied=self._copied, progress=progress
            )
        return LoadedModel(
            path=self.info.path,
            model_type=self.info.model_type,
            config=self.info.config,
            mapped_bytes=self.info.mapped_bytes + loaded.mapped_bytes,
            chat_template=texts.chat_template,
            generation_config=texts.generation_config,
            tokenizer=texts.tokenizer,
            weights=loaded.weights,
            cache_writer=loaded.cache_writer,
            kv_scales=self.info.kv_scales,
        )


def open_files(
    path: str,
    *,
    dtype: str = "auto",
    exact: bool = False,
    capability: DeviceCapability | None = None,
    changes: ModelChanges | None = None,
) -> ModelFiles:
    """Open a checkpoint, check its config and tensors, and add up their sizes.

    Args:
        path: `smollm2`, a Hugging Face folder, a .gguf file or a hub id.
        dtype: cache dtype. "auto" chooses it by the weights (docs/kv_cache.md).
        exact: compute in FP32, without BF16 weights or int8 activations.
        capability: capability of the device that loads the weights. None uses the CPU's.
        changes: options that change the model. None changes nothing.

    Raises:
        ModelFormatError: if the checkpoint cannot be loaded. It is a ValueError.
        ValueError: if the device has no FP32 for `exact`, or a change does not fit the model.
    """
    from lmdeploy import _turbomind

    capability = capability or _turbomind.DeviceCapability()
    if exact and not capability.has_fp32:
        raise ValueError(
            "exact is not supported on this device. Remove --exact or use --device cpu."
        )
    copied = exact or not capability.reads_mapped_files
    resolved = resolve_model(path)
    files = identify_files(resolved)  # before opening, so that a later change is detected
    changes = changes or ModelChanges()
    checkpoint = open_checkpoint(resolved, overrides=changes.overrides)
    if changes.rope_factor:
        checkpoint = _with_dynamic_rope(checkpoint, changes.rope_factor)
    if formats := parse_weight_format(changes.weight_format):
        checkpoint = with_weight_format(checkpoint, formats, text=str(changes.weight_format))
    checkpoint = for_device(checkpoint, capability)
    info = _info(checkpoint, dtype=dtype, exact=exact, copied=copied)
    return ModelFiles(info, checkpoint, files, exact, copied)


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    exact: bool = False,
    device: Device,
    progress: bool = True,
    changes: ModelChanges | None = None,
) -> LoadedModel:
    """Open a checkpoint and load all of it for `device`.

    The other arguments and the errors are those of `open_files` and of ModelFiles.
    """
    files = open_files(
        path, dtype=dtype, exact=exact, capability=device.capability, changes=changes
    )
    return files.load(files.read_texts(), device=device, progress=progress)


def cache_dtype(stored_dtype: str, dtype: str, *, exact: bool) -> str:
    """Return the cache dtype: `dtype` unless it is "auto", FP32 if exact, else by the weights.

    BF16 weights give BF16, all others FP16.
    """
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}. It must be auto, {', '.join(DTYPES)} (--dtype).")
        return DTYPES[dtype]
    if exact:
        return "float32"
    return "bfloat16" if stored_dtype == "bfloat16" else "float16"


def _with_dynamic_rope(checkpoint: Checkpoint, factor: float) -> Checkpoint:
    """Return the checkpoint with dynamic NTK scaling, as LMDeploy's TurboMind does."""
    config = checkpoint.config
    if len(config.ropes) > 1:
        raise OptionError(
            "rope_scaling_factor",
            f"is {factor:g}, but the layers of the model have {len(config.ropes)} kinds of RoPE. "
            "Leave it at 0 (--rope-scaling-factor).",
        )
    if config.rope.kind not in ("default", "dynamic"):
        raise OptionError(
            "rope_scaling_factor",
            f"is {factor:g}, but the model has RoPE of kind {config.rope.kind}. Leave it at 0 "
            "(--rope-scaling-factor).",
        )
    rope = replace(
        config.rope, kind="dynamic", factor=factor, original_max_position=config.max_position
    )
    return replace(checkpoint, config=replace(config, ropes=(rope,)))


def _info(checkpoint: Checkpoint, *, dtype: str, exact: bool, copied: bool) -> ModelInfo:
    mapped = [planned for planned in checkpoint.tensors if planned.mapped and not copied]
    value_type = cache_dtype(checkpoint.stored_dtype, dtype, exact=exact)
    try:
        config = checkpoint.config.to_engine(value_type)
    except ValueError as error:
        raise ModelFormatError(f"{checkpoint.path}: {error}.") from None
    kinds = {planned.name.split(".", 2)[-1] for planned in checkpoint.tensors}
    config.k_bias = "k.bias" in kinds and "k_norm" not in kinds
    return ModelInfo(
        path=checkpoint.path,
        model_type=checkpoint.family.name,
        config=config,
        weight_bytes=sum(engine_bytes(planned, exact) for planned in checkpoint.tensors),
        mapped_bytes=sum(planned.tensor.num_bytes for planned in mapped),
        file_bytes=sum(planned.tensor.num_bytes for planned in checkpoint.tensors),
        stored_dtype=checkpoint.stored_dtype,
        kv_scales=checkpoint.kv_scales,
        parts=_weight_parts(checkpoint, exact),
    )


def _weight_parts(checkpoint: Checkpoint, exact: bool) -> dict[str, WeightPart]:
    """Return the parts of `weight_format`, and the vectors and routers as `rest`."""
    sizes: dict[str, int] = {}
    formats: dict[str, set[str]] = {}
    for planned in checkpoint.tensors:
        part = part_of(planned) or "rest"
        kind = "f32" if exact or part == "rest" else engine_format(planned.tensor, exact)
        if planned.tensor.format in MAPPED_FORMATS and not exact:
            kind = "mxfp4"
        sizes[part] = sizes.get(part, 0) + engine_bytes(planned, exact)
        formats.setdefault(part, set()).add(kind)
    names = [name for name in (*WEIGHT_PARTS, "rest") if name in sizes]
    return {name: WeightPart(sizes[name], tuple(sorted(formats[name]))) for name in names}


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
