"""Options of the engine, with the names, fields and defaults of LMDeploy 0.18.

Fields of unsupported features exist too. They reject every value except their default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from lmdeploy.base.checks import (
    OptionError,
    check_bool,
    check_choice,
    check_int,
    check_number,
    flag_of,
    refuse,
    refuse_unsupported,
    show,
)
from lmdeploy.config.kv_events import KvEventsConfig, parse_kv_events
from lmdeploy.config.kv_format_options import (
    KV_K_OFFSETS,
    KV_QUALITIES,
    KV_WINDOWS,
    FormatPair,
    FormatTable,
    parse_cache_format,
    parse_quant_policy,
)
from lmdeploy.config.unsupported import ENGINE, unsupported_fields
from lmdeploy.config.weight_format_options import parse_weight_format

BLOCK_LENGTHS = (16, 32, 64, 128)
# The window consists of whole attention tiles.
WINDOW16_TOKENS_STEP = 64
MAX_WINDOW16_TOKENS = 4096
DTYPES = ("auto", "float16", "bfloat16", "float32")
DEVICE_TYPES = ("auto", "cpu", "cuda")
SPECULATIVE_ALGORITHMS = ("none", "ngram", "draft_model")
MAX_DRAFT_TOKENS = 32


@dataclass
class TurbomindEngineConfig:
    """Options of the engine. Sizes are in tokens unless a name says otherwise.

    Args:
        dtype: type of everything that the cache does not quantize: auto (that of the weights),
            float16, bfloat16 or float32.
        model_format: `hf`, `gguf` or a quantization method such as `awq`. Models in another format
            are rejected. None accepts all formats.
        gemm_input_dtype: int8 rounds the activations that are multiplied with quantized matrices
            to 8 bits, which is faster and less accurate (docs/performance.md). CPU only. None
            keeps 16 bits, and less on AVX-512 and AMX without deterministic.
        session_len: maximum length of prompt plus answer. None uses the length that the model was
            trained for.
        max_batch_size: maximum number of sequences in one step. None uses 32 on CPU and 128 on
            CUDA.
        cache_max_entry_count: a value below 1 is a share of the memory that the weights leave. A
            value from 1 is a number of blocks; the window of balanced and best adds to it.
            On CPU the cache never exceeds max_batch_size x session_len.
        cache_block_seq_len: tokens in a block: 16, 32, 64 or 128.
        enable_prefix_caching: reuse the blocks of equal prompt prefixes (LMDeploy: False).
        speculative_algorithm: `ngram` copies drafts of the next tokens from earlier places of the
            text and computes several tokens in one step; the answer does not change. `none` turns
            this off. None uses `draft_model` with speculative_draft_model, else `ngram` on CPU and
            `none` on CUDA.
        speculative_draft_model: a smaller model with the same vocabulary that computes the drafts.
        speculative_num_draft_tokens: maximum length of a draft, 1 to 32. The engine chooses shorter
            ones, or none, if they do not pay.
        quant_policy: format of the KV cache: 0, 4, 8, 16, or a name (docs/kv_cache.md).
        rope_scaling_factor: replaces the model's RoPE by dynamic NTK scaling with this factor. 0
            keeps the model's own.
        download_dir: folder for downloads from the hub. None uses that of huggingface_hub.
        revision: branch, tag or commit of a hub id. None uses the main branch.
        max_prefill_token_num: maximum number of new tokens in one step. None uses max_batch_size,
            but at least 256 on CPU (longer steps are no faster and take more memory) and 8192 on
            CUDA. A value below max_batch_size also limits the sequences in a step.
        hf_overrides: values that replace those of config.json, as a dict. Objects are merged.
        enable_metrics: serve /metrics.
        device_type: auto (a GPU if one is usable), cpu or cuda.
        devices: the index of the GPU, as in [0]. Several GPUs are not supported.
        num_threads: number of worker threads. None uses one per usable core, and at most 16 with a
            GPU.
        deterministic: make results bit-equal for any batch, chunks, number of threads and CPU.
            Prompts are then slower on CPUs with AVX-512 or AMX, and on a GPU, decode attention uses
            the prefill kernels.
        exact: compute in FP32 without int8 activations. Slower, for comparisons, CPU only.
        strict_arch: reject NVFP4 if the device lacks FP4 instructions. No effect on CPU.
        weight_format: formats that F32, F16 and BF16 matrices are quantized to when they are
            loaded: int8, int4, or by part as in attn=int8,mlp=int4,other=int8 (docs/serving.md).
            None keeps them as stored.
        kv_quality: raw, balanced or best (docs/kv_cache.md, "Presets"). None uses balanced for
            four-bit formats and raw for the others. Each of the next six options replaces one
            ingredient.
        kv_rotation: rotate K (and Q) by a Hadamard matrix.
        kv_scale_search: choose the FP4 scales with the smallest error. No effect without FP4.
        kv_k_offset: `block` subtracts the mean of a block's keys before they are quantized, and
            `none` does not.
        kv_window: the format of the first and newest tokens, `int8` or `16bit`.
        kv_sink_tokens: number of first tokens kept in the window, a multiple of 64.
        kv_recent_tokens: number of tokens before the current block kept in the window, a multiple
            of 64. -1 keeps no window.
        kv_calibration: file written by `lmdeploy lite calibrate`. `best` needs it.
        kv_store: address of a store of KV blocks, which outlives the engine and can be shared:
            file:///folder?size=10GiB, redis://host:6379/0 or valkey://… (docs/kv_cache.md).
        kv_store_key: file with the secret of the store. None takes LMDEPLOY_KV_STORE_KEY, or
            creates a file beside a folder.
        kv_events_config: publish the changes of the prefix cache as vLLM does: a dict or JSON text
            with `endpoint`, `replay_endpoint` and others (docs/scaling.md). Needs the extra
            `events`. Events contain the tokens of prompts.
        kv_cache_format: replaces quant_policy with a format name, `k=fp8,v=nvfp4`, a YAML file, or
            a dict with a format per layer.

    Raises:
        ValueError: a value is out of range or belongs to an unsupported feature.
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
    speculative_algorithm: str | None = None
    speculative_draft_model: str | None = None
    speculative_num_draft_tokens: int = 8
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
    # Not in LMDeploy.
    device_type: str = "auto"
    num_threads: int | None = None
    deterministic: bool = False
    exact: bool = False
    strict_arch: bool = False
    weight_format: str | None = None
    kv_quality: Literal["raw", "balanced", "best"] | None = None
    kv_rotation: bool | None = None
    kv_scale_search: bool | None = None
    kv_k_offset: Literal["block", "none"] | None = None
    kv_window: Literal["int8", "16bit"] | None = None
    kv_sink_tokens: int | None = None
    kv_recent_tokens: int | None = None
    kv_calibration: str | os.PathLike[str] | None = None
    kv_cache_format: str | os.PathLike[str] | dict[Any, str] | None = None
    kv_store: str | None = None
    kv_store_key: str | None = None
    kv_events_config: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        refuse_unsupported(self, unsupported_fields(ENGINE))
        check_bool("language_model_only", self.language_model_only)
        check_choice("dtype", self.dtype, choices=DTYPES, flag="--dtype")
        parse_weight_format(self.weight_format)
        if self.gemm_input_dtype is not None and (
            not isinstance(self.gemm_input_dtype, str) or self.gemm_input_dtype != "int8"
        ):
            flag = "--gemm-input-dtype"
            raise refuse(
                "gemm_input_dtype", self.gemm_input_dtype, wanted="int8 or None", flag=flag
            )
        if self.session_len is not None:
            check_int("session_len", self.session_len, low=1, flag="--session-len")
        self._check_model_files()
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
        self._check_speculation()
        table = self.kv_table
        self._check_one_format_option(table)
        self._check_kv_quality(table)
        self._check_kv_store()
        self._check_kv_events()
        for name in ("enable_metrics", "deterministic", "exact", "strict_arch"):
            check_bool(name, getattr(self, name))
        self._check_device()

    def _check_device(self) -> None:
        check_choice("device_type", self.device_type, choices=DEVICE_TYPES, flag="--device")
        devices = self.devices
        if devices is not None:
            if not isinstance(devices, (list, tuple)) or len(devices) != 1:
                wanted = "a list of one GPU index, because several GPUs are not supported"
                raise refuse("devices", devices, wanted=wanted, flag="--devices")
            check_int("devices", devices[0], low=0, flag="--devices")
            if self.device_type not in ("auto", "cuda"):
                reason = (
                    f"cannot be used with device_type {self.device_type} (--devices, --device)."
                )
                raise OptionError("devices", reason)
        if self.exact and self.needs_cuda:
            reason = "is not supported on CUDA. Remove --exact or use --device cpu."
            raise OptionError("exact", reason)
        if self.int8_activations and self.needs_cuda:
            reason = "is not supported on CUDA. Remove --gemm-input-dtype or use --device cpu."
            raise OptionError("gemm_input_dtype", reason)
        if self.int8_activations and self.exact:
            reason = "cannot be used with exact. Remove --gemm-input-dtype or --exact."
            raise OptionError("gemm_input_dtype", reason)

    def _check_model_files(self) -> None:
        for name in ("revision", "download_dir"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise refuse(name, value, wanted="a non-empty string", flag=flag_of(name))
        flag = "--rope-scaling-factor"
        factor = self.rope_scaling_factor
        check_number("rope_scaling_factor", factor, wanted=(0.0, 1e6), flag=flag)
        overrides = self.hf_overrides
        if overrides is not None and (
            not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides)
        ):
            wanted = "a JSON object with values of config.json"
            raise refuse("hf_overrides", overrides, wanted=wanted, flag="--hf-overrides")

    @property
    def int8_activations(self) -> bool:
        """Return whether activations are rounded to 8 bits."""
        return self.gemm_input_dtype == "int8"

    @property
    def needs_cuda(self) -> bool:
        """Return whether the options require a GPU."""
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

    def _check_speculation(self) -> None:
        check_choice(
            "speculative_algorithm",
            self.speculative_algorithm,
            choices=(None, *SPECULATIVE_ALGORITHMS),
            flag="--speculative-algorithm",
        )
        model = self.speculative_draft_model
        if model is not None and (not isinstance(model, str) or not model):
            flag = "--speculative-draft-model"
            raise refuse("speculative_draft_model", model, wanted="a non-empty string", flag=flag)
        algorithms = (None, "draft_model") if model is not None else (None, "none", "ngram")
        if self.speculative_algorithm not in algorithms:
            verb = "needs" if model is None else "excludes"
            raise ValueError(
                f"speculative_algorithm {self.speculative_algorithm} {verb} "
                "speculative_draft_model (--speculative-draft-model)."
            )
        check_int(
            "speculative_num_draft_tokens",
            self.speculative_num_draft_tokens,
            low=1,
            high=MAX_DRAFT_TOKENS,
            flag="--speculative-num-draft-tokens",
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
        choices = (None, *KV_QUALITIES)
        check_choice("kv_quality", self.kv_quality, choices=choices, flag="--kv-quality")
        for name in ("kv_rotation", "kv_scale_search"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name), flag=flag_of(name))
        for name, names in (("kv_k_offset", KV_K_OFFSETS), ("kv_window", KV_WINDOWS)):
            value = getattr(self, name)
            check_choice(name, value, choices=(None, *names), flag=flag_of(name))
        for name, min_value in (("kv_sink_tokens", 0), ("kv_recent_tokens", -1)):
            value = getattr(self, name)
            if value is None:
                continue
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int or not (
                value == min_value
                or (0 <= value <= MAX_WINDOW16_TOKENS and value % WINDOW16_TOKENS_STEP == 0)
            ):
                wanted = f"a multiple of {WINDOW16_TOKENS_STEP} from 0 to {MAX_WINDOW16_TOKENS}"
                wanted += " or -1" if min_value < 0 else ""
                raise refuse(name, value, wanted=wanted, flag=flag_of(name))
        if self.kv_recent_tokens == -1 and self.kv_sink_tokens:
            wanted = "0 because kv_recent_tokens -1 keeps no window"
            raise refuse(
                "kv_sink_tokens", self.kv_sink_tokens, wanted=wanted, flag="--kv-sink-tokens"
            )
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
        if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.fspath(path)):
            wanted = "a file written by lmdeploy lite calibrate"
            raise refuse("kv_calibration", path, wanted=wanted, flag="--kv-calibration")
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

    def _check_kv_store(self) -> None:
        for name in ("kv_store", "kv_store_key"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise refuse(name, value, wanted="a non-empty string", flag=flag_of(name))
        if self.kv_store_key is not None and self.kv_store is None:
            raise OptionError("kv_store_key", "has no effect without --kv-store. Remove it.")
        if self.kv_store is not None and not self.enable_prefix_caching:
            raise OptionError(
                "kv_store", "needs the prefix cache. Remove --disable-prefix-caching."
            )

    def _check_kv_events(self) -> None:
        if self.kv_events is not None and not self.enable_prefix_caching:
            reason = "needs the prefix cache. Remove --disable-prefix-caching."
            raise OptionError("kv_events_config", reason)

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """Return where KV events are published, or None."""
        return parse_kv_events(self.kv_events_config)

    @property
    def kv_table(self) -> FormatTable:
        """Return the KV formats by layer. Read the file if `kv_cache_format` is a path.

        Every call parses anew because every field can be changed.
        """
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
