"""Load an engine: its core, and the texts of its model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import show
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.tuner_file import tuner_is_on
from lmdeploy.chat.formats.base import ChatFormat, ModelInfo
from lmdeploy.chat.formats.registry import choose_format
from lmdeploy.checkpoint.hub import hub_address
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import sampling_defaults
from lmdeploy.engine.core import GPU_STEP_LIMIT_S, RunningCore, StartedCore
from lmdeploy.engine.devices import (
    device_line,
    free_bytes,
    open_device,
    step_sizes,
    tune_device,
)
from lmdeploy.engine.kv_quality import warn_of_bias
from lmdeploy.engine.plan import plan_engine, read_draft_texts
from lmdeploy.engine.prefix_store import identity_of_cache, open_publisher, open_traffic

if TYPE_CHECKING:
    from lmdeploy import _turbomind
    from lmdeploy.chat.templates.prompt_template import PromptTemplate
    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.config.chat_template import ChatTemplateConfig
    from lmdeploy.engine.kv_quality import KvOptions
    from lmdeploy.engine.model_files import LoadedModel, ModelFiles, TokenizerAndTemplate

logger = logging.getLogger("lmdeploy")


@dataclass
class TextModel:
    """The texts of a model: it turns prompts into token ids, and token ids into answers.

    `sampling` contains the defaults of the sampling options that a request does not set.
    """

    tokenizer: Tokenizer
    chat_template: PromptTemplate | None
    chat_format: ChatFormat
    vocab_size: int
    hidden_size: int
    session_len: int
    eos_ids: list[int]
    sampling: dict[str, Any] = field(default_factory=lambda: sampling_defaults({}))
    short_rope_length: int = 0  # as in _turbomind.short_rope_length
    model_path: str = ""


@dataclass(frozen=True)
class TextOptions:
    """The options of prompts and answers.

    Args:
        chat_template_config: replaces the model's own template. None keeps it.
        reasoning_parser: name of the reasoning parser. None chooses it by the model.
        tool_call_parser: name of the tool-call parser. None chooses it by the model.
    """

    chat_template_config: ChatTemplateConfig | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None


@dataclass(frozen=True)
class _Plan:
    """A model whose files are open, and the device and options that it is loaded with."""

    model_path: str
    config: TurbomindEngineConfig
    device: _turbomind.Device
    files: ModelFiles
    engine_config: _turbomind.EngineConfig
    kv: KvOptions
    cache_identity: Callable[[], dict[str, Any]]


def load_engine(
    model_path: str,
    config: TurbomindEngineConfig,
    *,
    options: TextOptions | None = None,
    start_core: Callable[[], StartedCore] | None = None,
    progress: bool = True,
) -> tuple[TextModel, RunningCore]:
    """Load a model and start its core.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        config: options of the engine.
        options: options of prompts and answers. None takes the defaults.
        start_core: returns a core that has the weights already, such as replicas elsewhere. Then
            only the texts of the model are read here. None loads the weights.
        progress: show a progress bar.

    Raises:
        ValueError: if an option is wrong or the model cannot be loaded.
        MemoryError: if the system does not give the engine its memory.
    """
    plan = _plan(model_path, config)
    texts = plan.files.read_texts()
    # Check these before the weights are loaded, which takes long.
    model = _text_model(plan, texts, options=options or TextOptions())
    if start_core is None:
        return model, _load_core(plan, texts, progress=progress)
    return model, _running_core(plan, start_core(), restart=start_core)


def _plan(model_path: str, config: TurbomindEngineConfig) -> _Plan:
    """Open the device and the files of a model."""
    tuner_is_on()  # raises for a wrong value before the weights are loaded
    device = open_device(config)
    files, engine_config, kv = plan_engine(model_path, config, device=device)
    identity = identity_of_cache(model_path, config, files=files, kv=kv)
    return _Plan(model_path, config, device, files, engine_config, kv, identity)


def _text_model(plan: _Plan, texts: TokenizerAndTemplate, *, options: TextOptions) -> TextModel:
    """Return the texts of a model with the options applied. Raise ValueError if one is wrong."""
    from lmdeploy import _turbomind
    from lmdeploy.chat.templates.prompt_template import NO_TEMPLATE, choose_template

    template = choose_template(
        texts.chat_template, options.chat_template_config, tokenizer=texts.tokenizer
    )
    source = "" if template is None else template.source
    chat_format = choose_format(
        ModelInfo(plan.files.info.model_type, texts.tokenizer, source),
        reasoning_parser=options.reasoning_parser,
        tool_call_parser=options.tool_call_parser,
    )
    if template is None and chat_format.splits_answers:
        logger.warning("messages %s", NO_TEMPLATE)
    model, session_len = plan.files.info.config, plan.engine_config.session_len
    return TextModel(
        tokenizer=texts.tokenizer,
        chat_template=template,
        chat_format=chat_format,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        session_len=session_len,
        eos_ids=_eos_ids(
            texts.tokenizer.stop_ids, texts.generation_config, vocab_size=model.vocab_size
        ),
        sampling=sampling_defaults(texts.generation_config),
        short_rope_length=_turbomind.short_rope_length(model, session_len=session_len),
        model_path=hub_address(plan.model_path)[0],
    )


def _load_core(plan: _Plan, texts: TokenizerAndTemplate, *, progress: bool) -> RunningCore:
    """Load the weights and start the C++ engine with its store and its events."""
    config = plan.config
    traffic = open_traffic(config, plan.cache_identity, kv=plan.kv, model=plan.files.info.config)
    publisher = open_publisher(config)
    events = None if publisher is None else publisher.events
    plan.engine_config.prefix_events = events
    try:
        started = _start_core(plan, texts, progress=progress)
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise
    identities, model_path = plan.files.identities, plan.model_path

    def restart() -> StartedCore:
        plan = _plan(model_path, config)
        if plan.files.identities.files != identities.files:
            raise ModelFormatError(
                f"{model_path}: The files of the model have changed since the start. Start the "
                "server again."
            )
        plan.engine_config.prefix_events = events
        return _start_core(plan, texts, progress=False)

    running = _running_core(plan, started, restart=restart)
    running.traffic, running.events = traffic, publisher
    return running


def _running_core(
    plan: _Plan, started: StartedCore, *, restart: Callable[[], StartedCore]
) -> RunningCore:
    return RunningCore(
        core=started.core,
        on_close=started.on_close,
        restart=restart,
        kv=plan.kv,
        block_tokens=plan.engine_config.cache_block_seq_len,
        device_line=device_line(plan.device),
        tuner_line=started.tuner_line,
        gemm_input_dtype=plan.device.gemm_input_dtype,
        step_limit_s=math.inf if plan.device.free_bytes is None else GPU_STEP_LIMIT_S,
        cache_identity=plan.cache_identity,
    )


def _start_core(plan: _Plan, texts: TokenizerAndTemplate, *, progress: bool) -> StartedCore:
    """Load the weights and start the C++ engine, which alone refers to them afterwards."""
    from lmdeploy import _turbomind

    files, config, device = plan.files, plan.engine_config, plan.device
    models = []
    if files.draft is not None:
        draft_texts = read_draft_texts(files, texts)
        models.append(_load_weights(files.draft, draft_texts, device=device, progress=progress))
        config.set_draft_model(models[0].config, models[0].weights)
    models.append(_load_weights(files, texts, device=device, progress=progress))
    loaded = models[-1]
    warn_of_bias(
        plan.kv,
        model=loaded.config,
        weights=loaded.weights,
        device=device,
        block_seq_len=config.cache_block_seq_len,
    )
    line = tune_device(
        device,
        [model.weights for model in models],
        max_rows=step_sizes(plan.config, device.capability)[1],
        attention=_turbomind.attention_to_tune(loaded.config, config),
    )
    mapped_bytes = sum(model.mapped_bytes for model in models)
    core = _start_engine(loaded, config, device=device, mapped_bytes=mapped_bytes)
    writers = [model.cache_writer for model in models if model.cache_writer is not None]
    for writer in writers:
        writer.start()

    def on_close() -> None:
        for writer in writers:
            writer.stop()

    return StartedCore(core, on_close, line)


def _load_weights(
    files: ModelFiles, texts: TokenizerAndTemplate, *, device: _turbomind.Device, progress: bool
) -> LoadedModel:
    """Load the weights of a model. Raise MemoryError with the sizes if a GPU is too small."""
    free = device.free_bytes
    try:
        return files.load(texts, device=device, progress=progress)
    except MemoryError:
        if free is None:
            raise
        raise MemoryError(
            f"The weights take {files.info.weight_bytes:,} bytes, but the GPU has only {free:,} "
            "free. Load a model with fewer or smaller weights, or choose another GPU (--devices)."
        ) from None


def _start_engine(
    model: LoadedModel,
    config: _turbomind.EngineConfig,
    *,
    device: _turbomind.Device,
    mapped_bytes: int,
) -> _turbomind.Engine:
    """Start the C++ engine. `mapped_bytes` of the weights are not resident yet.

    Raise MemoryError that names the options on which its size depends.
    """
    from lmdeploy import _turbomind

    free = max(free_bytes(device) - mapped_bytes, 0)
    try:
        return _turbomind.Engine(model.config, config, model.weights, device, free)
    except MemoryError:
        plan = _turbomind.plan_memory(model.config, config, free, device.capability)
        raise MemoryError(
            f"The KV cache takes {plan.reserved_bytes:,} bytes and a step takes "
            f"{plan.scratch_bytes:,}, which the system does not provide. Lower "
            "--cache-max-entry-count, --session-len, --max-batch-size or "
            "--max-prefill-token-num, or raise the limit of the process (ulimit -v)."
        ) from None


def _eos_ids(
    stop_ids: list[int], generation_config: dict[str, Any], *, vocab_size: int
) -> list[int]:
    more = generation_config.get("eos_token_id")
    given = [*stop_ids, *(more if isinstance(more, list) else [] if more is None else [more])]
    good = {i for i in given if type(i) is int and 0 <= i < vocab_size}
    bad = {show(i): i for i in given if type(i) is not int or i not in good}
    if bad:
        logger.warning(
            "eos_token_id in generation_config.json or config.json contains %s. Ids must be 0 to "
            "%d. These entries are ignored.",
            ", ".join(bad),
            vocab_size - 1,
        )
    return sorted(good)
