"""Options of the engine, with the names, fields and defaults of LMDeploy 0.18.

Fields of unsupported features exist too. They reject every value except their default.
"""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from lmdeploy.base.checks import (
    OptionError,
    check_int,
    check_number,
    flag_of,
    is_int,
    refuse,
    show,
)
from lmdeploy.config.kv_events import KvEventsConfig, parse_kv_events
from lmdeploy.config.kv_format_options import (
    FormatPair,
    FormatTable,
    describe_policies,
    parse_cache_format,
    parse_quant_policy,
)
from lmdeploy.config.option import MAX_INT, Option, check
from lmdeploy.config.weight_format_options import parse_weight_format

BLOCK_LENGTHS = (16, 32, 64, 128)
# The window consists of whole attention tiles.
WINDOW16_TOKENS_STEP = 64
MAX_WINDOW16_TOKENS = 4096
DTYPES = ("auto", "float16", "bfloat16", "float32")
DEVICE_TYPES = ("auto", "cpu", "cuda")
SPECULATIVE_ALGORITHMS = ("none", "ngram", "draft_model")
STATE_FORMATS = ("auto", "f32", "bf16", "int8")
MAX_DRAFT_TOKENS = 32
KV_CACHE = "KV cache"  # a section of --help
KV_INGREDIENTS = "ingredients of --kv-quality"

_ONE_DEVICE = Option(unsupported="an engine computes on one device")
_ONE_DEVICE_NO_FLAG = Option(unsupported="an engine computes on one device", flags=None)
_ONE_MACHINE = Option(unsupported="an engine computes on one machine")
_WHOLE_BLOCKS = Option(
    unsupported="the state_checkpoint options decide which states the prefix cache keeps",
    flags=None,
)
_CHUNKS = Option(unsupported="max_prefill_token_num alone divides prompts")


def _check_devices(devices: Any) -> None:
    flag = flag_of("devices")
    if not isinstance(devices, (list, tuple)) or len(devices) != 1:
        wanted = "a list of one GPU index, because several GPUs are not supported"
        raise refuse("devices", devices, wanted=wanted, flag=flag)
    check_int("devices", devices[0], low=0, flag=flag)


def _check_overrides(overrides: Any) -> None:
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
        wanted = "a JSON object with values of config.json"
        raise refuse("hf_overrides", overrides, wanted=wanted, flag=flag_of("hf_overrides"))


def _check_cache_size(count: Any) -> None:
    name = "cache_max_entry_count"
    flag = flag_of(name)
    value = check_number(name, count, wanted=(0.0, MAX_INT), flag=flag)
    if value == 0 or (value >= 1 and value != int(value)):
        wanted = "a share above 0 and below 1, or a whole number of blocks"
        raise refuse(name, count, wanted=wanted, flag=flag)


def _check_window_tokens(name: str, tokens: Any) -> None:
    low = -1 if name == "kv_recent_tokens" else 0
    if tokens == low and is_int(tokens, low=low):
        return
    if not is_int(tokens, low=0, high=MAX_WINDOW16_TOKENS) or tokens % WINDOW16_TOKENS_STEP:
        wanted = f"a multiple of {WINDOW16_TOKENS_STEP} from 0 to {MAX_WINDOW16_TOKENS}"
        raise refuse(name, tokens, wanted=wanted + " or -1" * (low < 0), flag=flag_of(name))


def _check_calibration(path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        wanted = "a file written by lmdeploy lite calibrate"
        raise refuse("kv_calibration", path, wanted=wanted, flag=flag_of("kv_calibration"))


_INGREDIENT = Option(group=KV_INGREDIENTS, affects_kv="resolved")
_SINK_TOKENS, _RECENT_TOKENS = (
    replace(_INGREDIENT, check=functools.partial(_check_window_tokens, name))
    for name in ("kv_sink_tokens", "kv_recent_tokens")
)


@dataclass
class TurbomindEngineConfig:
    """Options of the engine. Sizes are in tokens unless a name says otherwise.

    Args:
        dtype: type of everything that the cache does not quantize (default: auto, that of the
            weights). float32 doubles the memory of K and V without quantization.
        gemm_input_dtype: int8 rounds the activations that are multiplied with quantized matrices
            to 8 bits, which is less accurate (default: 16 bits; unless deterministic, 12 on
            AVX-512, and bfloat16 for many rows on AMX; docs/performance.md). bfloat16 is refused
            on a CPU without AMX. fp8 multiplies FP8 weights with activations of 8 bits on CUDA
            instead of bfloat16; no GPU has run that yet.
        model_format: format that a checkpoint must have: hf, gguf, or a method such as awq
            (default: any). Checkpoints of other formats are rejected.
        devices: the index of the GPU (default: 0).
        session_len: most tokens of a prompt plus its response (default: the model's own limit).
            With a smaller value, the cache can be smaller, and longer prompts are rejected.
        max_batch_size: most sequences in one step (default: 32 on CPU, 128 on CUDA). More of them
            raise the throughput, the memory of a step and the time until each next token.
        cache_max_entry_count: size of the KV cache: below 1, its share of the memory that the
            weights leave; otherwise, the number of blocks without those of the window. A larger
            cache holds more sequences and prefixes; on the CPU it never exceeds max_batch_size x
            session_len.
        cache_block_seq_len: tokens in a block. Small blocks waste less at the end of a sequence and
            share shorter prefixes; large ones need less metadata and fewer look-ups.
        enable_prefix_caching: reuse the blocks of equal prompt beginnings. They are then computed
            once (LMDeploy's default is off).
        state_checkpoint_share: part of the cache that holds checkpoints of recurrent layers, 0 to
            0.9. A prefix is reused up to a checkpoint. Other models have none.
        state_checkpoint_interval: blocks between the checkpoints that divide a prompt (default: 0,
            at least 8, and few enough for a quarter of the checkpoints); -1 makes none. Close ones
            help prompts that change an early turn, and take the place of others.
        state_checkpoint_format: format of these checkpoints: f32, bf16 or int8 (default: auto, f32
            if deterministic or exact, else bf16). f32 is an exact copy; in the same memory, the
            others hold about two and three times as many checkpoints, which are rounded.
        speculative_algorithm: how to draft the next tokens, of which one step checks several
            (default: draft_model with a draft model, else ngram on CPU and none on CUDA). ngram
            copies earlier text; the answer does not change, whichever is used.
        speculative_draft_model: a smaller model with the same vocabulary that computes the drafts.
            It takes memory and time of its own, and pays where text does not repeat.
        speculative_num_draft_tokens: maximum length of a draft, 1 to 32. Long drafts save more
            steps where text is predictable; elsewhere the engine shortens them.
        quant_policy: format of the KV cache, by number or name. Fewer bits hold more tokens and
            round K and V more (docs/kv_cache.md).
        rope_scaling_factor: replace the model's RoPE by dynamic NTK scaling with this factor
            (default: 0, the model's own RoPE). A larger factor reaches further beyond the length
            of the training.
        download_dir: folder for downloads from the hub (default: that of huggingface_hub). Models
            that it lacks are downloaded again.
        revision: branch, tag or commit of a hub id (default: its main branch). A commit makes sure
            that the files never change.
        max_prefill_token_num: most new tokens in one step (default: 256 on CPU, 8192 on CUDA, or
            max_batch_size if that is more). Larger steps take more memory and delay the tokens of
            other responses; a value below max_batch_size also limits the sequences in a step.
        language_model_only: has no effect. Of a vision checkpoint, only the text part is loaded.
        hf_overrides: values that replace those of config.json, as a JSON object. Objects are
            merged; a value that does not fit the weights makes answers wrong.
        enable_metrics: serve the endpoint /metrics. Without it, Prometheus cannot observe the
            server.
        device_type: where to compute; auto takes a GPU if one is usable.
        num_threads: worker threads (default: one per usable core; with a GPU, at most 16). Fewer
            leave cores to other programs and make steps longer.
        deterministic: compute bit-equal results for every batch, number of threads and CPU. Prompts
            are then slower with AVX-512 and AMX, and decoding is slower on a GPU.
        exact: compute in FP32 without int8 activations, for comparisons (CPU only). That is slower.
        strict_arch: reject NVFP4 on GPUs without FP4 instructions (CUDA only). Otherwise they
            convert it in software.
        weight_format: formats that F32, F16 and BF16 matrices are quantized to when they are
            loaded: int8, int4, or by part, as in attn=int8,mlp=int4,other=int8 (default: none).
            Fewer bits are faster, take less memory and are less accurate (docs/weights.md).
        kv_quality: preset of the KV cache (default: balanced for four-bit formats, else raw). Each
            ingredient of balanced and best costs some time or memory and makes K and V more
            accurate; best needs kv_calibration.
        kv_rotation: rotate K and Q, or latents, by a Hadamard matrix. Outliers then spread over a
            head, at the cost of a rotation per token (balanced, best: on).
        kv_scale_search: choose the FP4 scales with the smallest quantization error. Writing a block
            takes longer (balanced, best: on).
        kv_k_offset: block subtracts the mean of a block's keys, or latents, before they are
            quantized (balanced, best: block for keys). The block stores the mean.
        kv_window: format of the first and newest tokens (balanced, best: int8 with 4-bit formats).
            16bit is more accurate and takes more memory.
        kv_sink_tokens: number of first tokens kept in the window, a multiple of 64 (balanced, best:
            64). More of them are more accurate and take more memory.
        kv_recent_tokens: number of tokens before the current block kept in the window, a multiple
            of 64; -1 disables the window (balanced, best: 64). More of them are more accurate and
            take more memory.
        kv_calibration: file from `lmdeploy lite calibrate`. kv_quality best needs it; it belongs to
            one model.
        kv_cache_format: KV formats, instead of quant_policy: one format, formats of K and V such as
            k=fp8,v=nvfp4, or a YAML file with formats by layer (in Python, also a dict). Sensitive
            layers can then keep more bits.
        kv_store: store of KV blocks: file:///folder?size=10GiB, redis://host:6379/0 or
            valkey://host:6379/0. Prompts then survive a restart and servers share them.
        kv_store_key: file with the secret of the store (default: LMDEPLOY_KV_STORE_KEY, or a new
            file beside the folder). Servers share blocks only with the same secret.
        kv_events_config: publish the changes of the prefix cache for routers, as vLLM does; a JSON
            object such as {"endpoint": "tcp://127.0.0.1:5557"} (default: off). Events contain the
            tokens of prompts; the extra `events` is needed (docs/scaling.md).

    Raises:
        ValueError: a value is out of range or belongs to an unsupported feature.
    """

    dtype: Annotated[str, Option(choices=DTYPES, affects_kv="resolved")] = "auto"
    gemm_input_dtype: Annotated[
        str | None,
        Option(
            choices=("int8", "bfloat16", "fp8"),
            wanted="int8, bfloat16, fp8 or None",
            metavar="TYPE",
            affects_kv="value",
        ),
    ] = None
    model_format: str | None = None
    tp: Annotated[int, _ONE_DEVICE] = 1
    dp: Annotated[int, _ONE_DEVICE] = 1
    cp: Annotated[int, _ONE_DEVICE] = 1
    ep: Annotated[int, _ONE_DEVICE] = 1
    device_num: Annotated[int | None, _ONE_DEVICE_NO_FLAG] = None
    attn_tp_size: Annotated[int | None, _ONE_DEVICE_NO_FLAG] = None
    attn_cp_size: Annotated[int | None, _ONE_DEVICE_NO_FLAG] = None
    attn_dp_size: Annotated[int | None, _ONE_DEVICE_NO_FLAG] = None
    mlp_tp_size: Annotated[int | None, _ONE_DEVICE_NO_FLAG] = None
    mlp_dp_size: Annotated[int | None, _ONE_DEVICE_NO_FLAG] = None
    outer_dp_size: Annotated[int | None, _ONE_DEVICE_NO_FLAG] = None
    nnodes: Annotated[int, _ONE_MACHINE] = 1
    node_rank: Annotated[int, _ONE_MACHINE] = 0
    dist_init_addr: Annotated[str | None, _ONE_MACHINE] = None
    devices: Annotated[list[int] | None, Option(check=_check_devices, num_values=1)] = None
    session_len: Annotated[int | None, Option(low=1, affects_kv="resolved")] = None
    max_batch_size: Annotated[int | None, Option(low=1, high=4096)] = None
    cache_max_entry_count: Annotated[float, Option(check=_check_cache_size, to_core=True)] = 0.8
    cache_chunk_size: Annotated[int, _WHOLE_BLOCKS] = -1
    cache_block_seq_len: Annotated[
        int, Option(choices=BLOCK_LENGTHS, affects_kv="resolved", to_core=True)
    ] = 64
    enable_prefix_caching: Annotated[
        bool,
        Option(flags=("--enable-prefix-caching", "--disable-prefix-caching"), to_core=True),
    ] = True
    state_checkpoint_share: Annotated[float, Option(low=0, high=0.9, to_core=True)] = 0.5
    state_checkpoint_interval: Annotated[int, Option(low=-1, high=100_000, to_core=True)] = 0
    state_checkpoint_format: Annotated[str, Option(choices=STATE_FORMATS, affects_kv="value")] = (
        "auto"
    )
    speculative_algorithm: Annotated[str | None, Option(choices=SPECULATIVE_ALGORITHMS)] = None
    speculative_draft_model: Annotated[str | None, Option(metavar="MODEL")] = None
    speculative_num_draft_tokens: Annotated[
        int, Option(low=1, high=MAX_DRAFT_TOKENS, metavar="N")
    ] = 8
    cache_checkpoint_interval: Annotated[int, _WHOLE_BLOCKS] = 4096
    cache_prompt: Annotated[str, _WHOLE_BLOCKS] = "auto"
    cache_prompt_boundary_skip: Annotated[int, _WHOLE_BLOCKS] = 1
    cache_generation: Annotated[str, _WHOLE_BLOCKS] = "auto"
    quant_policy: Annotated[
        int | str,
        Option(check=parse_quant_policy, describe_values=describe_policies, affects_kv="resolved"),
    ] = 0
    rope_scaling_factor: Annotated[float, Option(low=0, high=1e6, affects_kv="resolved")] = 0.0
    use_logn_attn: Annotated[
        bool, Option(unsupported="no model here scales attention by the length")
    ] = False
    download_dir: Annotated[str | None, Option(metavar="FOLDER")] = None
    revision: str | None = None
    max_prefill_token_num: Annotated[int | None, Option(low=1)] = None
    num_tokens_per_iter: Annotated[int, _CHUNKS] = 0
    max_prefill_iters: Annotated[int, _CHUNKS] = 1
    async_: Annotated[int, Option(unsupported="the engine always runs in a thread of its own")] = 1
    empty_init: Annotated[bool, Option(unsupported="weights are always loaded")] = False
    language_model_only: Annotated[bool, Option(flags=None)] = False
    communicator: Annotated[str, _ONE_DEVICE] = "nccl"
    moe_a2a_backend: Annotated[str, _ONE_DEVICE] = "auto"
    hf_overrides: Annotated[
        dict[str, Any] | None,
        Option(check=_check_overrides, metavar="JSON", affects_kv="resolved"),
    ] = None
    enable_metrics: Annotated[bool, Option(flags=("--disable-metrics",))] = True
    # Not in LMDeploy.
    device_type: Annotated[str, Option(choices=DEVICE_TYPES, flags=("--device",))] = "auto"
    num_threads: Annotated[int | None, Option(low=1, high=1024)] = None
    deterministic: Annotated[bool, Option(affects_kv="value")] = False
    exact: Annotated[bool, Option(affects_kv="resolved")] = False
    strict_arch: bool = False
    weight_format: Annotated[
        str | None,
        Option(check=parse_weight_format, metavar="FORMAT", affects_kv="resolved"),
    ] = None
    kv_quality: Annotated[
        Literal["raw", "balanced", "best"] | None, Option(group=KV_CACHE, affects_kv="resolved")
    ] = None
    kv_rotation: Annotated[bool | None, _INGREDIENT] = None
    kv_scale_search: Annotated[bool | None, _INGREDIENT] = None
    kv_k_offset: Annotated[Literal["block", "none"] | None, _INGREDIENT] = None
    kv_window: Annotated[Literal["int8", "16bit"] | None, _INGREDIENT] = None
    kv_sink_tokens: Annotated[int | None, _SINK_TOKENS] = None
    kv_recent_tokens: Annotated[int | None, _RECENT_TOKENS] = None
    kv_calibration: Annotated[
        str | os.PathLike[str] | None,
        Option(group=KV_CACHE, check=_check_calibration, affects_kv="resolved"),
    ] = None
    kv_cache_format: Annotated[
        str | os.PathLike[str] | dict[Any, str] | None,
        Option(
            group=KV_CACHE,
            flags=("--kv-cache-format", "--kv-cache-dtype"),
            affects_kv="resolved",
        ),
    ] = None
    kv_store: Annotated[str | None, Option(group=KV_CACHE, metavar="URL")] = None
    kv_store_key: Annotated[str | None, Option(group=KV_CACHE, metavar="FILE")] = None
    kv_events_config: Annotated[
        str | dict[str, Any] | None,
        Option(group=KV_CACHE, check=parse_kv_events, metavar="JSON"),
    ] = None

    def __post_init__(self) -> None:
        self._parsed: tuple[Any, FormatTable] | None = None  # by the options that gave it
        check(self)
        self._check_device()
        self._check_speculation()
        table = self.kv_table
        self._check_one_format_option(table)
        self._check_kv_quality(table)
        self._check_prefix_cache()

    def _check_device(self) -> None:
        if self.devices is not None and self.device_type not in ("auto", "cuda"):
            reason = f"cannot be used with device_type {self.device_type} (--devices, --device)."
            raise OptionError("devices", reason)
        if self.exact and self.needs_cuda:
            reason = "is not supported on CUDA. Remove --exact or use --device cpu."
            raise OptionError("exact", reason)
        if self.gemm_input_dtype not in (None, "fp8") and self.needs_cuda:
            reason = "must be fp8 on CUDA. Remove --gemm-input-dtype or use --device cpu."
            raise OptionError("gemm_input_dtype", reason)
        if self.gemm_input_dtype is not None and self.exact:
            reason = "cannot be used with exact. Remove --gemm-input-dtype or --exact."
            raise OptionError("gemm_input_dtype", reason)
        if self.gemm_input_dtype in ("bfloat16", "fp8") and self.deterministic:
            reason = f"cannot be {self.gemm_input_dtype} with deterministic. Remove one of them."
            raise OptionError("gemm_input_dtype", reason)

    @property
    def int8_activations(self) -> bool:
        """Return whether activations are rounded to 8 bits."""
        return self.gemm_input_dtype == "int8"

    @property
    def needs_cuda(self) -> bool:
        """Return whether the options require a GPU."""
        return self.device_type == "cuda" or self.devices is not None

    def _check_speculation(self) -> None:
        model = self.speculative_draft_model
        algorithms = (None, "draft_model") if model is not None else (None, "none", "ngram")
        if self.speculative_algorithm not in algorithms:
            verb = "needs" if model is None else "excludes"
            raise ValueError(
                f"speculative_algorithm {self.speculative_algorithm} {verb} "
                "speculative_draft_model (--speculative-draft-model)."
            )

    def _check_one_format_option(self, table: FormatTable) -> None:
        if self.kv_cache_format is None:
            return
        name = parse_quant_policy(self.quant_policy)
        # The default is the number 0. The command line passes text.
        if self.quant_policy != 0 and name != table.name:
            raise ValueError(
                f"quant_policy {self.quant_policy!r} contradicts kv_cache_format "
                f"{show(self.kv_cache_format)}. Remove --quant-policy or --kv-cache-format."
            )

    def _check_kv_quality(self, table: FormatTable) -> None:
        if self.kv_recent_tokens == -1 and self.kv_sink_tokens:
            wanted = "0 because kv_recent_tokens -1 keeps no window"
            flag = flag_of("kv_sink_tokens")
            raise refuse("kv_sink_tokens", self.kv_sink_tokens, wanted=wanted, flag=flag)
        if table.name == "none":
            self.refuse_kv_quality()
        self._check_kv_calibration()

    def refuse_kv_quality(self) -> None:
        """Raise ValueError if an option asks for more accuracy than a 16-bit cache has."""
        nothing: dict[str, Any] = {
            "kv_quality": "raw",
            "kv_rotation": False,
            "kv_scale_search": False,
            "kv_k_offset": "none",
            "kv_window": "16bit",
            "kv_sink_tokens": 0,
            "kv_recent_tokens": -1,
            "kv_calibration": None,
        }
        for name, off in nothing.items():
            value = getattr(self, name)
            if value not in (None, off):
                raise ValueError(
                    f"{name} {show(value)} has no effect with the KV format none, which keeps 16 "
                    f"bits. Remove {flag_of(name)} or choose another --quant-policy."
                )

    def _check_kv_calibration(self) -> None:
        path = self.kv_calibration
        if path is None and self.kv_quality == "best":
            raise OptionError(
                "kv_quality",
                "best needs a calibration file (--kv-calibration). Write one with "
                "`lmdeploy lite calibrate MODEL --text FILE --output FILE.safetensors`.",
            )
        if path is not None and self.kv_quality != "best":
            raise ValueError(
                f"kv_calibration {show(os.fspath(path))} needs kv_quality best, but kv_quality is "
                f"{self.kv_quality or 'not given'}. "
                "Add --kv-quality best or remove --kv-calibration."
            )

    def _check_prefix_cache(self) -> None:
        if self.kv_store_key is not None and self.kv_store is None:
            raise OptionError("kv_store_key", "has no effect without --kv-store. Remove it.")
        users = {"kv_store": self.kv_store, "kv_events_config": self.kv_events}
        for name, value in users.items():
            if value is not None and not self.enable_prefix_caching:
                reason = "needs the prefix cache. Remove --disable-prefix-caching."
                raise OptionError(name, reason)

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Return where KV events are published, or None."""
        return parse_kv_events(self.kv_events_config)

    @property
    def kv_table(self) -> FormatTable:
        """Return the KV formats by layer.

        It is parsed again only if the options have changed, so that the engine that loads a file
        uses what was checked.
        """
        given = self.quant_policy, copy.copy(self.kv_cache_format)
        if self._parsed is None or self._parsed[0] != given:
            self._parsed = given, self._parse_kv_table()
        return self._parsed[1]

    def _parse_kv_table(self) -> FormatTable:
        if self.kv_cache_format is not None:
            return parse_cache_format(self.kv_cache_format)
        name = parse_quant_policy(self.quant_policy)
        return FormatTable(default=FormatPair(name, name))

    @property
    def kv_format(self) -> str:
        """Return the KV format, or `mixed` if layers or K and V differ.

        The device resolves `fp4`.
        """
        return self.kv_table.name
