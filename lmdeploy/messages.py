"""Public options and results: names, fields and defaults as in LMDeploy 0.18.

A field that belongs to a feature which is not built exists with its default, and any other value is
refused by name.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from lmdeploy.checks import (
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_number,
    check_strings,
    flag_of,
    refuse,
    show,
)
from lmdeploy.kv_formats import KV_QUALITIES, FormatTable, parse_cache_format, parse_quant_policy
from lmdeploy.tool_calls import ToolCall, join_tool_calls

MAX_STOP_WORDS = 256
MAX_STOP_WORD_CHARS = 4096
MAX_ALL_STOP_CHARS = 1 << 16
MAX_TOKEN_IDS = 4096
MAX_LOGIT_BIAS = 4096
MAX_LOGPROBS = 100
MAX_N = 128


def _refuse_unsupported(config: Any, names: dict[str, Any]) -> None:
    for name, default in names.items():
        value = getattr(config, name)
        if type(value) is not type(default) or value != default:
            raise ValueError(
                f"{name}: got {value!r}, which is not supported; wanted the default {default!r}; "
                f"remove {name} ({flag_of(name)})"
            )


# Features of LMDeploy 0.18 that are not built: field → the only accepted value.
UNSUPPORTED_ENGINE_FIELDS: dict[str, Any] = {
    "gemm_input_dtype": None,
    "tp": 1,
    "dp": 1,
    "cp": 1,
    "ep": 1,
    "device_num": None,
    "attn_tp_size": None,
    "attn_cp_size": None,
    "attn_dp_size": None,
    "mlp_tp_size": None,
    "mlp_dp_size": None,
    "outer_dp_size": None,
    "nnodes": 1,
    "node_rank": 0,
    "dist_init_addr": None,
    "cache_chunk_size": -1,
    "cache_checkpoint_interval": 4096,
    "cache_prompt": "auto",
    "cache_prompt_boundary_skip": 1,
    "cache_generation": "auto",
    "rope_scaling_factor": 0.0,
    "use_logn_attn": False,
    "download_dir": None,
    "revision": None,
    "num_tokens_per_iter": 0,
    "max_prefill_iters": 1,
    "async_": 1,
    "empty_init": False,
    "language_model_only": False,
    "communicator": "nccl",
    "moe_a2a_backend": "auto",
    "hf_overrides": None,
}

BLOCK_LENGTHS = (16, 32, 64, 128)
# Tokens kept in 16 bit come in tiles of attention.
HOT_TOKENS_STEP = 64
MAX_HOT_TOKENS = 4096
DTYPES = ("auto", "float16", "bfloat16", "float32")
DEVICE_TYPES = ("auto", "cpu", "cuda")


@dataclass
class TurbomindEngineConfig:
    """Options of the engine. Sizes are in tokens unless a name says otherwise.

    Args:
        dtype: of activations and of a cache with mode `none`: auto, float16, bfloat16, float32.
        model_format: None (found from the files), `hf` or `gguf`.
        session_len: longest prompt plus answer; None: what the model was trained for.
        max_batch_size: most sequences in one step; None: 32 on CPU, 128 on CUDA.
        cache_max_entry_count: below 1 the share of the memory left by the weights, from 1 on a
            number of blocks, 16-bit ones of balanced and best on top. On CPU never more than
            max_batch_size x session_len needs.
        cache_block_seq_len: tokens in a block: 16, 32, 64 or 128.
        enable_prefix_caching: reuse the blocks of equal prompt beginnings (LMDeploy: False).
        quant_policy: format of the KV cache: 0, 4, 8, 16, or a name (docs/kv_cache.md).
        max_prefill_token_num: most new tokens of one step; None: 256 on CPU (where longer steps are
            no faster and take more memory), 8192 on CUDA; never fewer than max_batch_size.
        enable_metrics: count requests and tokens for /metrics.
        device_type: auto (a GPU where one can be used), cpu or cuda.
        devices: the GPU's index, as in [0]; several at once are not supported.
        num_threads: worker threads; None: one per usable core, beside a GPU at most 16.
        deterministic: bit-equal results whatever the batch, the chunks and the threads.
        exact: compute in FP32, no int8 activations. Slower; for comparisons; on CPU only.
        strict_arch: refuse NVFP4 where the device has no FP4 instructions (no effect on CPU).
        kv_quality: raw, balanced or best (docs/kv_cache.md, "Quality"); None: balanced for
            four-bit formats, raw for the others. Each of the next four replaces one ingredient.
        kv_rotation: rotate K (and Q) by a Hadamard matrix.
        kv_scale_search: choose FP4 scales by the error that they leave. No effect without FP4.
        kv_sink_tokens: first tokens kept in 16 bit, a multiple of 64.
        kv_recent_tokens: tokens before the current block kept in 16 bit, a multiple of 64; -1: no
            token is kept in 16 bit.
        kv_calibration: file of `lmdeploy lite calibrate`; `best` needs it.
        kv_cache_format: a format name, `k=fp8,v=nvfp4`, a YAML file or a dict with a format per
            layer. Instead of quant_policy.

    Raises:
        ValueError: a value out of range, or a value of a feature that is not built.
    """

    dtype: str = "auto"
    gemm_input_dtype: str | None = None
    model_format: str | None = None
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    device_num: int | None = None
    attn_tp_size: int | None = None
    attn_cp_size: int | None = None
    attn_dp_size: int | None = None
    mlp_tp_size: int | None = None
    mlp_dp_size: int | None = None
    outer_dp_size: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    devices: list[int] | None = None
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float = 0.8
    cache_chunk_size: int = -1
    cache_block_seq_len: int = 64
    enable_prefix_caching: bool = True
    cache_checkpoint_interval: int = 4096
    cache_prompt: str = "auto"
    cache_prompt_boundary_skip: int = 1
    cache_generation: str = "auto"
    quant_policy: int | str = 0
    rope_scaling_factor: float = 0.0
    use_logn_attn: bool = False
    download_dir: str | None = None
    revision: str | None = None
    max_prefill_token_num: int | None = None
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    async_: int = 1
    empty_init: bool = False
    language_model_only: bool = False
    communicator: str = "nccl"
    moe_a2a_backend: str = "auto"
    hf_overrides: dict[str, Any] | None = None
    enable_metrics: bool = True
    # Ours.
    device_type: str = "auto"
    num_threads: int | None = None
    deterministic: bool = False
    exact: bool = False
    strict_arch: bool = False
    kv_quality: Literal["raw", "balanced", "best"] | None = None
    kv_rotation: bool | None = None
    kv_scale_search: bool | None = None
    kv_sink_tokens: int | None = None
    kv_recent_tokens: int | None = None
    kv_calibration: str | os.PathLike[str] | None = None
    kv_cache_format: str | os.PathLike[str] | dict[Any, str] | None = None

    def __post_init__(self) -> None:
        _refuse_unsupported(self, UNSUPPORTED_ENGINE_FIELDS)
        check_choice("dtype", self.dtype, choices=DTYPES, flag="--dtype")
        check_choice(
            "model_format", self.model_format, choices=(None, "hf", "gguf"), flag="--model-format"
        )
        if self.session_len is not None:
            check_int("session_len", self.session_len, low=1, flag="--session-len")
        if self.max_batch_size is not None:
            check_int(
                "max_batch_size", self.max_batch_size, low=1, high=4096, flag="--max-batch-size"
            )
        if self.num_threads is not None:
            check_int("num_threads", self.num_threads, low=1, high=1024, flag="--num-threads")
        if self.max_prefill_token_num is not None:
            check_int(
                "max_prefill_token_num",
                self.max_prefill_token_num,
                low=1,
                flag="--max-prefill-token-num",
            )
        self._check_cache()
        self._check_kv_quality()
        for name in ("enable_metrics", "deterministic", "exact", "strict_arch"):
            check_bool(name, getattr(self, name))
        self._check_device()

    def _check_device(self) -> None:
        check_choice("device_type", self.device_type, choices=DEVICE_TYPES, flag="--device")
        devices = self.devices
        if devices is not None:
            if not isinstance(devices, (list, tuple)) or len(devices) != 1:
                wanted = "one GPU, as in [0]: several at once are not supported"
                raise refuse("devices", devices, wanted=wanted, flag="--devices")
            check_int("devices", devices[0], low=0, flag="--devices")
            if self.device_type == "cpu":
                wanted = "none beside device_type cpu"
                raise refuse("devices", devices, wanted=wanted, flag="--devices or --device")
        if self.exact and self.needs_cuda:
            raise refuse("exact", True, wanted="False on CUDA", flag="--exact, or use --device cpu")

    @property
    def needs_cuda(self) -> bool:
        """Whether nothing but a GPU will do."""
        return self.device_type == "cuda" or self.devices is not None

    def _check_cache(self) -> None:
        flag = "--cache-max-entry-count"
        count = check_number(
            "cache_max_entry_count",
            self.cache_max_entry_count,
            wanted=(0.0, 2.0**31 - 1),
            flag=flag,
        )
        if count == 0 or (count >= 1 and count != int(count)):
            wanted = "a share above 0 and below 1, or a whole number of blocks"
            raise refuse(
                "cache_max_entry_count", self.cache_max_entry_count, wanted=wanted, flag=flag
            )
        check_choice(
            "cache_block_seq_len",
            self.cache_block_seq_len,
            choices=BLOCK_LENGTHS,
            flag="--cache-block-seq-len",
        )
        check_bool(
            "enable_prefix_caching", self.enable_prefix_caching, flag="--enable-prefix-caching"
        )
        name, table = parse_quant_policy(self.quant_policy), self.kv_table
        # 0 is the default: it may mean "not given".
        if self.kv_cache_format is not None and self.quant_policy != 0:
            pairs = {str(pair) for pair in table.pairs}
            if pairs != {name}:
                raise ValueError(
                    f"quant_policy: got {self.quant_policy!r} beside kv_cache_format "
                    f"{show(self.kv_cache_format)}, wanted one of the two; "
                    "remove --quant-policy or --kv-cache-format"
                )

    def _check_kv_quality(self) -> None:
        choices = (None, *KV_QUALITIES)
        check_choice("kv_quality", self.kv_quality, choices=choices, flag="--kv-quality")
        for name in ("kv_rotation", "kv_scale_search"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name), flag=flag_of(name))
        for name, least in (("kv_sink_tokens", 0), ("kv_recent_tokens", -1)):
            value = getattr(self, name)
            if value is None:
                continue
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int or not (
                value == least or (0 <= value <= MAX_HOT_TOKENS and value % HOT_TOKENS_STEP == 0)
            ):
                off = " or -1" if least < 0 else ""
                wanted = f"a multiple of {HOT_TOKENS_STEP} from 0 to {MAX_HOT_TOKENS}{off}"
                raise refuse(name, value, wanted=wanted, flag=flag_of(name))
        if self.kv_recent_tokens == -1 and self.kv_sink_tokens:
            wanted = "0 beside kv_recent_tokens -1, which keeps no token in 16 bit"
            raise refuse(
                "kv_sink_tokens", self.kv_sink_tokens, wanted=wanted, flag="--kv-sink-tokens"
            )
        self._check_kv_calibration()

    def _check_kv_calibration(self) -> None:
        path = self.kv_calibration
        if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.fspath(path)):
            wanted = "a file of lmdeploy lite calibrate"
            raise refuse("kv_calibration", path, wanted=wanted, flag="--kv-calibration")
        if path is None and self.kv_quality == "best":
            wanted = (
                "a calibration file (make one: lmdeploy lite calibrate MODEL --text FILE --output "
                "FILE.safetensors)"
            )
            raise refuse("kv_quality", "best", wanted=wanted, flag="--kv-calibration")
        if path is not None and self.kv_quality != "best":
            raise ValueError(
                f"kv_calibration: got {show(os.fspath(path))} with kv_quality "
                f"{self.kv_quality or 'not given'}, wanted kv_quality best; "
                "add --kv-quality best or remove --kv-calibration"
            )

    @property
    def kv_table(self) -> FormatTable:
        """Formats of the cache by layer. Reads the file when `kv_cache_format` is one."""
        given = self.kv_cache_format
        return parse_cache_format(parse_quant_policy(self.quant_policy) if given is None else given)

    @property
    def kv_format(self) -> str:
        """The cache's format, `mixed` where layers or sides differ; the device resolves `fp4`."""
        pairs = {str(pair) for pair in self.kv_table.pairs}
        return pairs.pop() if len(pairs) == 1 else "mixed"


# Features of LMDeploy 0.18 that are not built: field → the only accepted value.
UNSUPPORTED_GENERATION_FIELDS: dict[str, Any] = {
    "logprob_start_len": -1,
    "logits_processors": None,
    "output_last_hidden_state": None,
    "with_cache": False,
    "preserve_cache": False,
    "migration_request": None,
    "return_routed_experts": False,
    "return_ppl": False,
    "repetition_ngram_size": 0,
    "repetition_ngram_threshold": 0,
}


@dataclass
class GenerationConfig:
    """What to generate.

    Args:
        n: answers per prompt.
        max_new_tokens: longest answer; cut to what session_len and the cache leave.
        do_sample: False: always the most likely token.
        top_p, top_k, min_p, temperature: sampling filters; top_k 0: all tokens.
        repetition_penalty: above 1 makes tokens of the prompt and the answer less likely.
        presence_penalty, frequency_penalty: as in OpenAI's API, over the answer's tokens.
        ignore_eos: go on after the model's end token.
        random_seed: None: a fresh one.
        stop_words: texts that end the answer, matched across token borders, not returned.
        bad_words: texts whose tokens are never completed.
        stop_token_ids, bad_token_ids: the same for token ids.
        min_new_tokens: no end token before that many.
        logprobs: None, or the number of alternatives per token.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: token id → added to its logit.
        response_format: {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema":
            ...}} or {"type": "regex_schema", "regex_schema": "..."}.
        output_logits: None, "generation" or "all" (prompt too).
        include_stop_str_in_output: return the stop word as well.

    Raises:
        ValueError: a value out of range, or a value of a feature that is not built.
    """

    n: int = 1
    max_new_tokens: int = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    logprob_start_len: int = -1
    response_format: dict[str, Any] | None = None
    logits_processors: list[Callable[..., Any]] | None = None
    output_logits: Literal["all", "generation"] | None = None
    output_last_hidden_state: Literal["all", "generation"] | None = None
    include_stop_str_in_output: bool = False
    return_ppl: bool = False
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: Any = None
    return_routed_experts: bool = False
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0
    # Ours.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _refuse_unsupported(self, UNSUPPORTED_GENERATION_FIELDS)
        check_int("n", self.n, low=1, high=MAX_N)
        check_int("max_new_tokens", self.max_new_tokens, low=0)
        if self.min_new_tokens is not None:
            check_int("min_new_tokens", self.min_new_tokens, low=0)
        self._check_sampling()
        self._check_words()
        self._check_output()

    def _check_sampling(self) -> None:
        check_number("top_p", self.top_p, wanted=(0.0, 1.0))
        check_number("min_p", self.min_p, wanted=(0.0, 1.0))
        check_number("temperature", self.temperature, wanted=(0.0, 2.0))
        check_int("top_k", self.top_k, low=0)
        if check_number("repetition_penalty", self.repetition_penalty, wanted=(0.0, 100.0)) == 0:
            raise refuse("repetition_penalty", self.repetition_penalty, wanted="a number above 0")
        check_number("presence_penalty", self.presence_penalty, wanted=(-2.0, 2.0))
        check_number("frequency_penalty", self.frequency_penalty, wanted=(-2.0, 2.0))
        if self.random_seed is not None:
            check_int(
                "random_seed", self.random_seed, low=0, high=2**64 - 1, flag="random_seed (seed)"
            )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict) or len(self.logit_bias) > MAX_LOGIT_BIAS:
                wanted = f"a dict of at most {MAX_LOGIT_BIAS} token ids and numbers"
                raise refuse("logit_bias", self.logit_bias, wanted=wanted)
            for token, bias in self.logit_bias.items():
                check_int("logit_bias", token, low=0)
                check_number("logit_bias", bias, wanted=(-100.0, 100.0))

    def _check_words(self) -> None:
        for name in ("stop_words", "bad_words"):
            if getattr(self, name) is not None:
                words = check_strings(
                    name,
                    getattr(self, name),
                    max_items=MAX_STOP_WORDS,
                    max_chars=MAX_STOP_WORD_CHARS,
                )
                total = sum(len(word) for word in words)
                if total > MAX_ALL_STOP_CHARS:
                    raise ValueError(
                        f"{name}: got {total} characters in {len(words)} words, wanted at most "
                        f"{MAX_ALL_STOP_CHARS}; change {name}"
                    )
                setattr(self, name, words)
        for name in ("stop_token_ids", "bad_token_ids"):
            if getattr(self, name) is not None:
                setattr(self, name, check_ids(name, getattr(self, name), max_items=MAX_TOKEN_IDS))

    def _check_output(self) -> None:
        for name in (
            "do_sample",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            check_bool(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        check_choice("output_logits", self.output_logits, choices=(None, "generation", "all"))
        if self.response_format is not None and not isinstance(self.response_format, dict):
            raise refuse(
                "response_format", self.response_format, wanted="a dict with the key 'type'"
            )


# Of the server and `lmdeploy chat`, where the model's generation_config.json says nothing.
_SAMPLING_DEFAULTS: dict[str, float | int] = {
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": 40,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def sampling_defaults(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The model's own sampling options, ours where its generation_config.json has none."""
    own = {name: generation_config.get(name) for name in _SAMPLING_DEFAULTS}
    given = {name: value for name, value in own.items() if value is not None}
    return {**_SAMPLING_DEFAULTS, **given}


class ResponseType(enum.Enum):
    """How a request ended, as LMDeploy numbers it."""

    SUCCESS = 1
    FINISH = 2
    ENGINE_STOP_ERROR = 3
    SESSION_REPEAT = 4
    SESSION_NOT_EXIST = 5
    HANDLER_NOT_EXIST = 6
    INPUT_LENGTH_ERROR = 7
    INTERNAL_ENGINE_ERROR = 8
    CANCEL = 9
    PREFIX_CACHE_CONFLICT = 10
    NO_QUEUE = 11
    NOT_SUPPORTED = 12
    OUT_OF_MEMORY = 13


FinishReason = Literal["stop", "length", "tool_calls", "error", "abort"]


@dataclass
class Response:
    """An answer, or in a stream a piece of it.

    Args:
        text: without the stop word.
        generate_token_len: tokens generated so far, end and stop tokens not counted.
        input_token_len: tokens of the prompt, template included.
        finish_reason: None while the answer goes on.
        token_ids: the answer's tokens.
        logprobs: per token, token id → log probability; the chosen token is always in it.
        logits: float32 [n, vocab] when asked for.
        index: of the prompt in the call.
        choice: which of the prompt's n answers.
        cached_tokens: prompt tokens taken from the prefix cache.
        prompt_logprobs: as logprobs, of the prompt's tokens from the second on.
        reasoning_content: of a model that tells it apart from its answer (GPT-OSS), else None.
        tool_calls: calls that such a model asks for; in a stream parts of them, which
            join_tool_calls makes whole.
    """

    text: str
    generate_token_len: int
    input_token_len: int
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    logits: npt.NDArray[np.float32] | None = None
    last_hidden_state: Any = None
    index: int = 0
    routed_experts: Any = None
    cached_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None
    prompt_logprobs: list[dict[int, float]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    choice: int = 0

    def extend(self, other: Response) -> None:
        """Appends a later piece of the same answer, in place."""
        self.text += other.text
        self.token_ids += other.token_ids
        if other.reasoning_content is not None:
            self.reasoning_content = (self.reasoning_content or "") + other.reasoning_content
        if other.tool_calls is not None:
            self.tool_calls = join_tool_calls([*(self.tool_calls or []), *other.tool_calls])
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(other, name):
                setattr(self, name, (getattr(self, name) or []) + getattr(other, name))
        if other.logits is not None:
            mine = [] if self.logits is None else [self.logits]
            self.logits = cast("npt.NDArray[np.float32]", np.concatenate([*mine, other.logits]))
        for name in ("generate_token_len", "input_token_len", "finish_reason", "cached_tokens"):
            setattr(self, name, getattr(other, name))
        self.error_code, self.error_message = other.error_code, other.error_message


def join_pieces(pieces: Sequence[Response]) -> Response:
    """The whole answer; linear in its length, and the pieces stay as they are.

    REQUIRES: `pieces` is not empty.
    """

    def joined(name: str) -> list[dict[int, float]] | None:
        parts = [part for p in pieces if (part := getattr(p, name)) is not None]
        return [item for part in parts for item in part] if parts else None

    logits = [piece.logits for piece in pieces if piece.logits is not None]
    reasoning = [p.reasoning_content for p in pieces if p.reasoning_content is not None]
    calls = [call for piece in pieces for call in piece.tool_calls or []]
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        logprobs=joined("logprobs"),
        prompt_logprobs=joined("prompt_logprobs"),
        logits=np.concatenate(logits) if logits else None,
        reasoning_content="".join(reasoning) if reasoning else None,
        tool_calls=join_tool_calls(calls) or None,
    )


def public_fields(config_class: type) -> list[str]:
    """Names of a config dataclass's fields, in order. For documentation tests."""
    return [f.name for f in fields(config_class)]
