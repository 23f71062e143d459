"""Plan the C++ engine: its options and their checks, before weights are read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lmdeploy.base.checks import check_choice, flag_of
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.option import copy_to_core
from lmdeploy.engine.devices import step_sizes

if TYPE_CHECKING:
    from pathlib import Path

    from lmdeploy import _turbomind
    from lmdeploy.checkpoint.kv_scales import KvScales
    from lmdeploy.engine.kv_quality import KvOptions
    from lmdeploy.engine.model_files import ModelFiles, TokenizerAndTemplate

logger = logging.getLogger("lmdeploy")


def _state_format(config: TurbomindEngineConfig) -> str:
    """Return the format of checkpoints. That of auto is measured (docs/kv_cache.md)."""
    if config.state_checkpoint_format != "auto":
        return config.state_checkpoint_format
    return "f32" if config.deterministic or config.exact else "bf16"


def engine_config_of(
    config: TurbomindEngineConfig,
    model: _turbomind.ModelConfig,
    *,
    model_path: str,
    capability: _turbomind.DeviceCapability | None = None,
    kv_scales: KvScales | None = None,
) -> tuple[_turbomind.EngineConfig, KvOptions]:
    """Return the C++ engine's options for a model on a device, and those of its cache.

    `kv_scales` are those of the checkpoint. None uses the CPU's capability. Raise ValueError for
    cache options that do not fit the model or the device.
    """
    from lmdeploy import _turbomind
    from lmdeploy.engine.kv_quality import apply_kv_options, resolve_kv_options, with_kv_scales

    capability = capability or _turbomind.DeviceCapability()
    engine_config = _turbomind.EngineConfig()
    batch_size, step_tokens = step_sizes(config, capability)
    engine_config.max_batch_size = batch_size
    engine_config.max_prefill_token_num = step_tokens
    engine_config.session_len = config.session_len or model.max_position
    copy_to_core(config, engine_config)
    engine_config.state_checkpoint_format = _state_format(config)
    by_default = "ngram" if capability.drafts_by_default else "none"
    if config.speculative_draft_model or (config.speculative_algorithm or by_default) == "ngram":
        engine_config.num_draft_tokens = config.speculative_num_draft_tokens
    _warn_of_length(engine_config.session_len, model)
    options = resolve_kv_options(
        config,
        model.windows,
        k_bias=model.k_bias,
        latents=model.latent.rope_dim > 0,
        capability=capability,
    )
    options = with_kv_scales(options, kv_scales)
    if kv_scales is not None and options.scales is None:
        logger.warning(
            "%s: The checkpoint has scales of an FP8 KV cache, which are not used. They are used "
            "with --kv-cache-format fp8 in the quality raw.",
            model_path,
        )
    _warn_of_conversion(options, capability)
    model_hash = None
    if options.calibration is not None:
        from lmdeploy.checkpoint.fingerprint import hash_model

        model_hash = hash_model(model_path)
    apply_kv_options(options, engine_config, model=model, model_hash=model_hash)
    return engine_config, options


def longest_position(model: _turbomind.ModelConfig) -> int:
    """Return the number of positions that the model can distinguish.

    Linear and YaRN scaling reach beyond max_position_embeddings if that is the length before
    scaling.
    """
    rope = model.ropes[0]
    if rope.kind not in ("linear", "yarn"):
        return model.max_position
    return max(model.max_position, int(rope.factor * rope.original_max_position))


def _warn_of_length(session_len: int, model: _turbomind.ModelConfig) -> None:
    if session_len <= (longest := longest_position(model)):
        return
    is_dynamic = model.ropes[0].kind == "dynamic"
    why = " Dynamic RoPE uses one base for every length." if is_dynamic else ""
    logger.warning(
        "session_len is %d. It should be at most %d, the number of positions that the model was "
        "trained for (--session-len).%s",
        session_len,
        longest,
        why,
    )


def _warn_of_conversion(options: KvOptions, capability: _turbomind.DeviceCapability) -> None:
    """Warn if the device converts a requested nvfp4 in software and prefers another fp4."""
    from lmdeploy import _turbomind

    has_nvfp4 = any("nvfp4" in (pair.k, pair.v) for pair in options.layers)
    if not has_nvfp4 or _turbomind.kv_cache_conversion("nvfp4", capability) != "software":
        return
    if _turbomind.get_kv_cache_mode("fp4", capability).name != "nvfp4":
        logger.warning(
            "KV cache format nvfp4: %s has no FP4 instructions and converts it in software. "
            "SM 100 and higher convert it in hardware; --strict-arch refuses it below.",
            capability.generation,
        )


def check_model_format(path: Path, wanted: str | None, *, model_path: str) -> None:
    """Raise ValueError if `--model-format` contradicts the files. None accepts all of them."""
    from lmdeploy.checkpoint.hf import method_of
    from lmdeploy.checkpoint.methods import METHODS

    if wanted is None:
        return
    check_choice(
        "model_format", wanted, choices=("hf", "gguf", *METHODS), flag=flag_of("model_format")
    )
    container = "gguf" if path.is_file() else "hf"
    actual = container if container == "gguf" else method_of(path) or container
    if wanted not in (actual, container):
        raise ValueError(
            f"model_format is {wanted}. It must be {actual} for {model_path} (--model-format)."
        )


def plan_engine(
    model_path: str, config: TurbomindEngineConfig, *, device: _turbomind.Device
) -> tuple[ModelFiles, _turbomind.EngineConfig, KvOptions]:
    """Check the model, its files and the options, before weights are read.

    Raise ValueError for each of them that is wrong, and if the device has no kernels for them.
    """
    from lmdeploy import _turbomind
    from lmdeploy.checkpoint.hub import resolve_model
    from lmdeploy.engine.model_files import ModelChanges, open_files

    path = resolve_model(model_path, revision=config.revision, download_dir=config.download_dir)
    check_model_format(path, config.model_format, model_path=model_path)
    capability = device.capability
    files = open_files(
        str(path),
        dtype=config.dtype,
        exact=config.exact,
        capability=capability,
        changes=ModelChanges(
            overrides=config.hf_overrides,
            rope_factor=float(config.rope_scaling_factor),
            weight_format=config.weight_format,
        ),
    )
    info = files.info
    engine_config, kv = engine_config_of(
        config,
        info.config,
        model_path=str(info.path),
        capability=capability,
        kv_scales=info.kv_scales,
    )
    if config.speculative_draft_model is not None:
        files.draft = _open_draft(config.speculative_draft_model, config, capability=capability)
        engine_config.set_draft_model(files.draft.info.config, None)
    _turbomind.require_kernels(info.config, engine_config, device)
    return files, engine_config, kv


def _open_draft(
    model_path: str, config: TurbomindEngineConfig, *, capability: _turbomind.DeviceCapability
) -> ModelFiles:
    """Open the files of the draft model."""
    from lmdeploy.checkpoint.hub import resolve_model
    from lmdeploy.engine.model_files import open_files

    path = resolve_model(model_path, download_dir=config.download_dir)
    return open_files(str(path), dtype=config.dtype, exact=config.exact, capability=capability)


def read_draft_texts(files: ModelFiles, texts: TokenizerAndTemplate) -> TokenizerAndTemplate:
    """Read the texts of the draft model. REQUIRES: files.draft.

    Raise ModelFormatError if its tokens are not those of the model.
    """
    assert files.draft is not None
    draft = files.draft.read_texts()
    sizes = [tokenizer.vocab_size for tokenizer in (draft.tokenizer, texts.tokenizer)]
    differ = (
        i
        for i in range(min(sizes))
        if draft.tokenizer.token_bytes(i) != texts.tokenizer.token_bytes(i)
    )
    found = next(differ, min(sizes) if sizes[0] != sizes[1] else None)
    if found is not None:
        raise ModelFormatError(
            f"speculative_draft_model {files.draft.info.path} has another vocabulary than "
            f"{files.info.path}: {sizes[0]} and {sizes[1]} tokens, which differ at id {found}. "
            "Choose a draft model with the same tokenizer (--speculative-draft-model)."
        )
    return draft
