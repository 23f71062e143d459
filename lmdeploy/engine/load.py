"""Loads the parts of an engine: C++ engine, tokenizer, chat template and model defaults."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lmdeploy.base.checks import show
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.formats.base import ChatFormat, ModelInfo
from lmdeploy.chat.formats.registry import choose_format
from lmdeploy.checkpoint.hub import hub_address
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.generation import sampling_defaults
from lmdeploy.engine.devices import device_line, free_bytes, open_device
from lmdeploy.engine.kv_quality import warn_of_bias
from lmdeploy.engine.plan import plan_engine, read_draft_texts
from lmdeploy.engine.prefix_store import identity_of_cache, open_publisher, open_traffic

if TYPE_CHECKING:
    from lmdeploy import _turbomind
    from lmdeploy.chat.templates.prompt_template import PromptTemplate
    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.checkpoint.fingerprint import FileIdentities
    from lmdeploy.config.chat_template import ChatTemplateConfig
    from lmdeploy.engine.kv_quality import KvOptions
    from lmdeploy.engine.model_files import LoadedModel, ModelFiles, TokenizerAndTemplate
    from lmdeploy.kv_store.events import KvEventPublisher
    from lmdeploy.kv_store.traffic import PrefixTraffic

logger = logging.getLogger("lmdeploy")


class Core(NamedTuple):
    """A running C++ engine. Call `on_close` before closing it."""

    cpp_engine: _turbomind.Engine
    on_close: Callable[[], None]


@dataclass
class LoadedEngine:
    """The parts of an engine. Tests use fakes with the same methods.

    `sampling` contains the defaults of the sampling options that a request does not set. `restart`
    loads the weights again and starts another C++ engine after the first one was closed.
    """

    cpp_engine: _turbomind.Engine
    restart: Callable[[], Core]
    new_request: Callable[[], _turbomind.Request]
    tokenizer: Tokenizer
    chat_template: PromptTemplate | None
    chat_format: ChatFormat
    vocab_size: int
    hidden_size: int
    session_len: int
    block_tokens: int
    eos_ids: list[int]
    kv: KvOptions
    sampling: dict[str, Any] = field(default_factory=lambda: sampling_defaults({}))
    short_rope_length: int = 0  # as in _turbomind.short_rope_length
    model_path: str = ""
    model_type: str = ""
    device_line: str = ""
    gemm_input_dtype: str = "int16"
    on_close: Callable[[], None] = lambda: None
    cache_identity: Callable[[], dict[str, Any]] = dict  # what determines the bytes of a KV block
    kv_traffic: PrefixTraffic | None = None  # None without a store
    kv_events: KvEventPublisher | None = None  # None if events are not published


@dataclass(frozen=True)
class TextOptions:
    """The options of prompts and answers, as in `load_engine`."""

    chat_template_config: ChatTemplateConfig | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None


def load_engine(
    model_path: str,
    config: TurbomindEngineConfig,
    *,
    chat_template_config: ChatTemplateConfig | None = None,
    reasoning_parser: str | None = None,
    tool_call_parser: str | None = None,
    progress: bool = True,
) -> LoadedEngine:
    """Load a model and start the C++ engine.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        config: options of the engine.
        chat_template_config: replaces the model's own template. None keeps it.
        reasoning_parser: name of the reasoning parser. None chooses it by the model.
        tool_call_parser: name of the tool-call parser. None chooses it by the model.
        progress: show a progress bar.

    Raises:
        ValueError: if an option is wrong or the model cannot be loaded.
        MemoryError: if the system does not give the engine its memory.
    """
    options = TextOptions(chat_template_config, reasoning_parser, tool_call_parser)
    return load_engine_with(model_path, config, options=options, progress=progress)


def load_engine_with(
    model_path: str,
    config: TurbomindEngineConfig,
    *,
    options: TextOptions,
    start_core: Callable[[], Core] | None = None,
    progress: bool = True,
) -> LoadedEngine:
    """Load a model as `load_engine` does.

    `start_core` returns an engine that has the weights already, such as replicas elsewhere. Then
    only the texts of the model are read here. None loads the weights.
    """
    from lmdeploy import _turbomind
    from lmdeploy.chat.templates.prompt_template import NO_TEMPLATE, choose_template

    device = open_device(config)
    files, engine_config, kv = plan_engine(model_path, config, device=device)
    # Check these before the weights are loaded, which takes long.
    texts = files.read_texts()
    template = choose_template(
        texts.chat_template, options.chat_template_config, tokenizer=texts.tokenizer
    )
    chat_format = choose_format(
        ModelInfo(
            files.info.model_type, texts.tokenizer, "" if template is None else template.source
        ),
        reasoning_parser=options.reasoning_parser,
        tool_call_parser=options.tool_call_parser,
    )
    if template is None and chat_format.splits_answers:
        logger.warning("messages %s", NO_TEMPLATE)
    identity = identity_of_cache(model_path, config, files=files, kv=kv)
    traffic = None
    if start_core is None:
        traffic = open_traffic(config, identity, kv=kv, model=files.info.config)
    publisher = None if start_core is not None else open_publisher(config)
    events = None if publisher is None else publisher.events
    engine_config.prefix_events = events
    try:
        if start_core is not None:
            core = start_core()
        else:
            core = _start_core(
                files, texts, kv=kv, config=engine_config, device=device, progress=progress
            )
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise
    model = files.info
    return LoadedEngine(
        cpp_engine=core.cpp_engine,
        restart=start_core
        or _restarter(model_path, config, texts=texts, identities=files.identities, events=events),
        new_request=_turbomind.Request,
        tokenizer=texts.tokenizer,
        chat_template=template,
        chat_format=chat_format,
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        session_len=engine_config.session_len,
        block_tokens=engine_config.cache_block_seq_len,
        eos_ids=_eos_ids(
            texts.tokenizer.stop_ids, texts.generation_config, vocab_size=model.config.vocab_size
        ),
        kv=kv,
        short_rope_length=_turbomind.short_rope_length(
            model.config, session_len=engine_config.session_len
        ),
        sampling=sampling_defaults(texts.generation_config),
        model_path=hub_address(model_path)[0],
        model_type=model.model_type,
        device_line=device_line(device),
        gemm_input_dtype=device.gemm_input_dtype,
        on_close=core.on_close,
        cache_identity=identity,
        kv_traffic=traffic,
        kv_events=publisher,
    )


def _start_core(
    files: ModelFiles,
    texts: TokenizerAndTemplate,
    *,
    kv: KvOptions,
    config: _turbomind.EngineConfig,
    device: _turbomind.Device,
    progress: bool,
) -> Core:
    """Load the weights and start the C++ engine, which alone refers to them afterwards."""
    models = []
    if files.draft is not None:
        draft_texts = read_draft_texts(files, texts)
        models.append(files.draft.load(draft_texts, device=device, progress=progress))
        config.set_draft_model(models[0].config, models[0].weights)
    models.append(files.load(texts, device=device, progress=progress))
    loaded = models[-1]
    warn_of_bias(
        kv,
        model=loaded.config,
        weights=loaded.weights,
        device=device,
        block_seq_len=config.cache_block_seq_len,
    )
    mapped_bytes = sum(model.mapped_bytes for model in models)
    cpp_engine = _start_engine(models[-1], config, device=device, mapped_bytes=mapped_bytes)
    writers = [model.cache_writer for model in models if model.cache_writer is not None]
    for writer in writers:
        writer.start()

    def on_close() -> None:
        for writer in writers:
            writer.stop()

    return Core(cpp_engine, on_close)


def _restarter(
    model_path: str,
    config: TurbomindEngineConfig,
    *,
    texts: TokenizerAndTemplate,
    identities: FileIdentities,
    events: _turbomind.PrefixEvents | None,
) -> Callable[[], Core]:
    """Return a function that loads the same model again. It keeps no file of the model open."""

    def restart() -> Core:
        device = open_device(config)
        files, engine_config, kv = plan_engine(model_path, config, device=device)
        if files.identities.files != identities.files:
            raise ModelFormatError(
                f"{model_path}: The files of the model have changed since the start. Start the "
                "server again."
            )
        engine_config.prefix_events = events
        return _start_core(files, texts, kv=kv, config=engine_config, device=device, progress=False)

    return restart


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
