"""Types of the C++ engine. Import the module inside functions: it takes a few milliseconds."""

import enum
from collections.abc import Callable, Mapping, Sequence
from mmap import mmap
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

class InvalidArgument(ValueError):
    field: str  # the option that is wrong, with which the text begins; "" if it is no single one
    reason: str  # the rest of the text

class InternalError(RuntimeError): ...

class _Fields:
    """A plain struct, of which every property is a field."""

    def __init__(self) -> None: ...
    def to_dict(self) -> dict[str, Any]: ...
    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return an object with these fields, and the defaults of the others."""

class KvFormat(enum.Enum):
    """The formats that a layer can store. Members have the canonical names."""

    none = ...
    int8 = ...
    fp8 = ...
    fp8_e5m2 = ...
    nvfp4 = ...
    int4 = ...
    mxfp4 = ...

class KvFormatInfo:
    """A row of the table of KV formats in src/turbomind/kv/kv_format.h."""

    format: Final[KvFormat | None]  # None: the device chooses the format
    name: Final[str]
    aliases: Final[tuple[str, ...]]
    quant_policy: Final[int | None]  # None: the format has names only
    bits: Final[int]  # payload bits per value
    group: Final[int]  # values per scale byte; 0 without scale bytes
    is_fp4: Final[bool]  # codes are E2M1 with a scale byte per group
    has_global_scale: Final[bool]
    max_value: Final[float]  # at a global scale of 1; 0 without a fixed limit
    description: Final[str]

def kv_formats() -> tuple[KvFormatInfo, ...]:
    """Return the table, in the order of reports."""

def parse_kv_format(value: object) -> str:
    """Return the canonical name for a quant_policy: a number or a name, in any case.

    `fp4` stays `fp4`, because the device chooses the format. Raises InvalidArgument.
    """

class RopeConfig(_Fields):
    kind: str  # none, default, linear, dynamic, llama3, yarn
    theta: float
    dim: int
    factor: float
    original_max_position: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    freq_factors: list[float]
    long_factors: list[float]

class MoeConfig(_Fields):
    num_experts: int  # 0: a dense model
    top_k: int
    intermediate_size: int  # of one expert
    latent_size: int  # inputs and outputs of routed experts; 0: hidden_size
    shared_intermediate_size: int  # 0: no shared expert
    normalize: bool  # normalize a token's weights to a sum of 1
    sigmoid: bool  # scores are sigmoids, not a softmax
    shared_gate: bool  # a router weighs the shared expert
    best_of_group: bool  # a group counts as its best expert
    beside_dense: bool
    weigh_inputs: bool  # weights multiply the inputs of experts, not their outputs
    num_groups: int  # of adjacent experts
    top_groups: int
    scale: float  # factor of the routed experts' output
    layers: list[int]  # per layer; 1: experts, 0: dense feed-forward

class LatentConfig(_Fields):
    q_rank: int  # of the query's latent; 0: queries are projected at once
    nope_dim: int  # values of a query head that do not rotate
    rope_dim: int  # values that rotate; 0: the model has no latents
    value_dim: int  # values of a head's output
    interleaved: bool  # RoPE rotates neighbors instead of halves
    norm_eps: float

class NormConfig(_Fields):
    centered: bool  # LayerNorm instead of RMSNorm
    inputs: bool  # before each branch
    outputs: bool  # after each branch
    qk_all_heads: bool
    qk_after_rope: bool
    qk_unit: bool
    v_unit: bool

class LayerSizes(_Fields):
    """What differs between layers; an empty list: nothing."""

    head_dims: list[int]
    kv_heads: list[int]
    intermediate_sizes: list[int]
    kv_sources: list[int]  # the layer whose K and V a layer reads

class PerLayerInputs(_Fields):
    size: int  # 0: none

class RecurrentConfig(_Fields):
    rule: str  # gated_delta, selective_scan, short_convolution
    layers: list[int]  # per layer; 1: recurrent; empty: no recurrent layer
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int  # channels of short_convolution, which has no heads
    kernel: int  # of the convolution
    norm_groups: int  # parts of the output that are normalized; 0: there is no norm
    gate_first: bool  # the gate precedes the norm
    tiled: bool  # value head h reads key head h % num_key_heads

class QueryScaling(_Fields):
    beta: float  # 0: none
    length: int
    offset: int

class ModelConfig(_Fields):
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    softmax_scale: float
    attention_cap: float  # 0: none
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    logit_cap: float  # 0: none
    parallel: bool
    gated: bool
    attention_gate: bool  # attention is multiplied by the sigmoid of a projection of its input
    recurrent: RecurrentConfig
    latent: LatentConfig
    attention_layers: list[int]  # per layer, 1: it has attention; empty: if it is not recurrent
    feed_forward_layers: list[int]  # per layer, 1: it has a feed-forward; empty: all
    norm: NormConfig
    query_scaling: QueryScaling
    query_scaling_without_rope: bool
    activation: str  # silu, gelu_tanh, clamped_swiglu, gelu, relu2
    swiglu_limit: float  # for clamped_swiglu
    moe: MoeConfig
    ropes: list[RopeConfig]
    layer_ropes: list[int]  # per layer: index in ropes, or -1; empty: 0 for all
    k_bias: bool  # K has a bias, which RoPE follows without a norm
    windows: list[int]  # per layer; 0: full attention, -c: chunks of c tokens
    layer_sizes: LayerSizes
    per_layer: PerLayerInputs
    layer_scale: bool  # a factor of every layer multiplies its output
    dtype: str  # float32, float16, bfloat16
    def validate(self) -> None: ...
    def num_attention_layers(self) -> int: ...
    def has_one_kv_shape(self) -> bool: ...
    def kv_size(self, layer: int) -> int:
        """Return the values of a token's K in a layer, or 0 if it has no K of its own."""

    def state_bytes(self) -> int:
        """Return the bytes of the states of one sequence in all recurrent layers."""

class PrefixGroup:
    """The layers that an event concerns."""

    index: Final[int]
    is_state: Final[bool]
    window: Final[int]  # 0: full attention, -c: chunks of c tokens

class PrefixEvent:
    """A change of the prefix cache. src/turbomind/kv/prefix_events.h explains the fields."""

    kind: Final[str]  # stored, removed, cleared
    blocks: Final[list[int]]
    parent: Final[int | None]
    tokens: Final[list[int]]
    salt: Final[bytes]  # 16 bytes
    group: Final[PrefixGroup | None]

class PrefixEvents:
    def __init__(self) -> None: ...
    def take(self, timeout_ms: int) -> list[PrefixEvent]:
        """Return the events in order. Wait up to `timeout_ms` if there are none."""

class EngineConfig:
    @property
    def kv_format(self) -> KvFormat: ...
    @kv_format.setter
    def kv_format(self, value: KvFormat | str) -> None: ...  # or its canonical name
    @property
    def kv_layers(self) -> list[tuple[KvFormat, KvFormat]]:
        """Return (K, V) of each layer. An empty list uses kv_format for all."""
    @kv_layers.setter
    def kv_layers(self, value: Sequence[tuple[KvFormat | str, KvFormat | str]]) -> None: ...
    kv_rotate_k: bool
    kv_search_scales: bool
    @property
    def kv_window_format(self) -> KvFormat: ...
    @kv_window_format.setter
    def kv_window_format(self, value: KvFormat | str) -> None: ...
    kv_k_offset: bool
    kv_sink_tokens: int
    kv_recent_tokens: int  # -1: no window
    collect_kv_statistics: bool
    max_batch_size: int
    session_len: int
    max_prefill_token_num: int
    cache_block_seq_len: int
    cache_max_entry_count: float
    enable_prefix_caching: bool
    state_checkpoint_share: float
    state_checkpoint_interval: int
    state_checkpoint_format: str  # f32, bf16, int8
    num_draft_tokens: int  # 0: no speculation
    prefix_events: PrefixEvents | None  # receives the changes of the prefix cache
    check_integrity: bool
    def __init__(self) -> None: ...
    def set_draft_model(self, model: ModelConfig, weights: Weights | None) -> None:
        """Set the model that computes drafts. A memory plan needs no weights."""

    def set_kv_calibration(
        self,
        k_mean: npt.NDArray[np.float32] | None,  # [layers, kv_heads, head_dim]
        k_scales: npt.NDArray[np.float32] | None,  # [layers, kv_heads]
        v_scales: npt.NDArray[np.float32] | None,  # [layers, kv_heads]
    ) -> None: ...

class MemoryPlan(_Fields):
    num_blocks: int
    reserved_bytes: int
    draft_cache_bytes: int  # of the draft model; 0 without one
    draft_scratch_bytes: int
    touched_bytes: int
    scratch_bytes: int
    bytes_per_token: float
    bytes_per_token_none: float
    window16_bytes_per_sequence: int
    session_bytes: int
    session_bytes_none: int
    max_tokens: int
    max_sequence_tokens: int
    state_bytes_per_sequence: int  # of recurrent layers; 0 without them
    num_checkpoints: int
    checkpoint_bytes: int
    checkpoint_format: str  # f32, bf16, int8
    checkpoint_interval: int  # blocks; 0: none divide a prompt

class DeviceCapability:
    """The description of a device. src/turbomind/core/device_capability.h explains the fields.

    The constructor describes the CPU.
    """

    def __init__(self) -> None: ...
    generation: Final[str]  # for messages: CPU, SM 90
    default_batch_size: Final[int]
    default_step_tokens: Final[int]
    reserves_lazily: Final[bool]
    reads_mapped_files: Final[bool]
    has_fp32: Final[bool]
    drafts_by_default: Final[bool]
    has_all_formats: Final[bool]
    has_fp8_weights: Final[bool]

class TunedChoice:
    """The kernel that a device uses for one question, and what it takes."""

    def __init__(
        self, *, question: str, kernel: str, table_kernel: str, us: float, table_us: float
    ) -> None: ...
    question: Final[str]
    kernel: Final[str]
    table_kernel: Final[str]  # the choice of the table in the source
    us: Final[float]  # microseconds of a call
    table_us: Final[float]

class AttentionToTune: ...

def attention_to_tune(model: ModelConfig, engine: EngineConfig) -> list[AttentionToTune]:
    """Return the attention of the engine's steps, for Device.tune."""

class TuningResult:
    machine: Final[str]  # what the choices depend on; empty: the device has nothing to choose
    choices: Final[list[TunedChoice]]
    num_measured: Final[int]
    num_left: Final[int]  # without an answer: no time, no memory, or wrong results
    wrong: Final[list[str]]  # "KERNEL for QUESTION": its results differ from the table's kernel

class Device:
    name: Final[str]
    gemm_backend: Final[str]  # library of matrix multiplication; empty on the CPU
    gemm_input_dtype: Final[str]  # int8, int12, int16, bfloat16 or fp8
    free_bytes: Final[int | None]  # of its own memory; None: it uses the host's
    capability: Final[DeviceCapability]
    def tune(
        self,
        models: list[Weights],
        *,
        saved: list[TunedChoice],
        max_rows: int,
        max_seconds: float,
        attention: Sequence[AttentionToTune] = (),
    ) -> TuningResult:
        """Choose kernels for the layers of the models by their times. The GIL is released.

        Call it before an engine uses the device. Without models, it only returns the machine.
        """

class Weights:
    num_bytes: Final[int]

class MappedFile:
    """Protects the readers of a mapped file until the object is destroyed.

    Without it, the process ends with SIGBUS if the file is truncated. With it, readers get zeros.
    `name` is for messages. Destroy the object before the memory is unmapped.
    """

    def __init__(self, bytes: mmap | npt.NDArray[Any], name: str) -> None: ...

def check_mapped_file(bytes: mmap | npt.NDArray[Any]) -> None:
    """Raise RuntimeError that names the file if `bytes` is in a file that was truncated."""

class WeightsBuilder:
    def __init__(self, config: ModelConfig, device: Device, exact: bool) -> None: ...
    def add_matrix(
        self,
        name: str,
        format: str,
        data: npt.NDArray[Any],
        rows: int,
        cols: int,
        scales: npt.NDArray[Any] | None = None,
    ) -> None:
        """Add a matrix in `format`: f32, bf16 (as uint16), or raw uint8.

        q4_0, q4_1, q8_0, mxfp4, nvfp4 and the K-quants use GGUF's byte layout. mxfp4_split uses
        Hugging Face's codes [rows, cols / 2] with `scales` [rows, cols / 32] of uint8. The `scales`
        [1] of nvfp4 are the FP32 factor of the matrix. fp8 and fp8_block are E4M3 codes with FP32
        `scales` [rows, 1] and [rows, cols / 128].

        `data` must be C-contiguous with exactly the bytes of rows x cols values. MXFP4 arrays are
        read in place: the weights hold them, and they must not change. The GIL is released.
        """
    def add_packed(
        self,
        name: str,
        format: str,
        data: npt.NDArray[np.uint8],
        rows: int,
        cols: int,
        *,
        in_place: bool,
    ) -> None:
        """Add a matrix that `packed` returned.

        With `in_place`, `data` (aligned to 64 bytes) is held by the weights and must not change;
        otherwise it is copied. The GIL is released.
        """
    def packed(self) -> dict[str, tuple[str, int, int, npt.NDArray[np.uint8]]]:
        """Return name → (format, rows, cols, tiles) of every packed matrix. Call before `build`.

        The read-only arrays keep the weights alive. MXFP4 that is used as stored is left out.
        """
    def add_vector(self, name: str, data: npt.NDArray[np.float32]) -> None: ...
    def build(self) -> Weights: ...

class Request(_Fields):
    id: int
    prompt: list[int]
    num_resumed: int  # trailing tokens of `prompt` that are the beginning of the response
    max_new_tokens: int  # num_resumed included
    long_rope: bool  # must be true for sequences that may exceed short_rope_length
    min_new_tokens: int
    ignore_eos: bool
    eos_ids: list[int]
    stop_sequences: list[list[int]]
    bad_sequences: list[list[int]]
    # Fields that have the values of options are not listed: copy_to_core sets them by name.
    do_sample: bool
    temperature: float
    seed: int
    num_logprobs: int
    logit_bias: list[tuple[int, float]]
    num_prompt_logprobs: int
    logits_output: str  # none, generation, all
    pooling: str  # none, last, mean
    cache_salt: bytes  # 16 bytes; only requests with the same salt share cached prefixes
    # fn(new_tokens, mask) -> bool writes the bitmask to `mask` (int32) in place.
    token_mask: Callable[[Sequence[int], npt.NDArray[np.int32]], bool] | None

TokenLogprobs: TypeAlias = tuple[float, list[tuple[int, float]]]  # of the token, and the largest

class RequestOutput(_Fields):
    request_id: int
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    logits: npt.NDArray[np.float32] | None  # [n, vocab]
    pooled: npt.NDArray[np.float32] | None  # [hidden]
    finish_reason: str  # none, stop, length, cancelled, error
    stop_tokens: int
    cached_tokens: int
    error: str
    is_request_fault: bool
    error_field: str  # the field of the request that is wrong, if is_request_fault; else ""

class EngineStats(_Fields):
    """The counters of src/turbomind/engine/engine_stats.h, which explains them."""

    clipped: list[tuple[int, int]]  # sliding window (0: full), values, by layer group
    def __getattr__(self, name: str) -> int: ...
    def __setattr__(self, name: str, value: int) -> None: ...

class Engine:
    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        weights: Weights,
        device: Device,
        free_bytes: int,
    ) -> None: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: int) -> None: ...
    def wait_outputs(self, timeout_ms: int) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...
    def memory_plan(self) -> MemoryPlan: ...
    @property
    def healthy(self) -> bool: ...
    @property
    def failure(self) -> str: ...
    def clear_prefix_cache(self) -> None: ...
    def cached_tokens(self, prompt: Sequence[int], salt: bytes) -> int: ...
    # By block from `first` on, then by pool; b"" if the pool has no copy.
    def export_prefix(
        self, tokens: Sequence[int], first: int, salt: bytes
    ) -> list[list[bytes]]: ...
    def import_prefix(
        self, tokens: Sequence[int], first: int, blocks: list[list[bytes]], salt: bytes
    ) -> int: ...
    def check_integrity(self) -> None: ...
    def kv_statistics(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

packed_layout_id: int  # of the tiles that `packed` returns

def k_bias_left(
    model: ModelConfig, weights: Weights, device: Device, *, block_seq_len: int
) -> float:
    """Return the largest amplitude of a bias of K that stays in quantized keys."""

def packed_bytes(format: str, rows: int, cols: int) -> int:
    """Return the bytes of the tiles of one matrix; 0 for MXFP4."""

def make_device(
    name: str,
    num_threads: int,
    *,
    int8_activations: bool = False,
    deterministic: bool = True,
) -> Device:
    """Make a device that needs no other option, by its name in `--device`."""

def make_cpu_device(
    num_threads: int,
    isa: str = "",
    *,
    int8_activations: bool = False,
    deterministic: bool = True,
) -> Device: ...
def available_cpu_isas() -> list[str]: ...

class CudaDeviceInfo:
    name: str
    capability: DeviceCapability
    memory_bytes: int

def cuda_capability(compute_capability: int) -> DeviceCapability:
    """Return the capability of a GPU with this CUDA compute capability, e.g. 90."""

cuda_stamp: str  # libturbomind_cuda.so must have the same stamp

def cuda_devices() -> tuple[list[CudaDeviceInfo], str]:
    """Return the GPUs in the driver's order. If there are none, also return the reason."""

def make_cuda_device(
    ordinal: int,
    deterministic: bool = False,
    num_threads: int = 1,
    cublas_lt: Sequence[str] = (),
    fp8_activations: bool = False,
) -> Device:
    """Make a device. `cublas_lt` files are tried before those that the library finds itself.

    Raises InvalidArgument, in one line, if the GPU cannot be used.
    """

def short_rope_length(model: ModelConfig, session_len: int) -> int:
    """Return the greatest length of a sequence with the short factors of longrope.

    0 means that all sequences have the same frequencies. Raise InvalidArgument for a wrong model.
    """

def plan_memory(
    model: ModelConfig,
    config: EngineConfig,
    free_bytes: int,
    capability: DeviceCapability = ...,  # the CPU's
) -> MemoryPlan: ...
def require_kernels(model: ModelConfig, config: EngineConfig, device: Device) -> None:
    """Raise InvalidArgument if the device has no kernels for the model's cache."""

def sequence_bytes(model: ModelConfig, config: EngineConfig, num_tokens: int) -> int:
    """Return the bytes of one sequence between steps, in whole blocks of every pool."""

def require_listed_pair(k: KvFormat | str, v: KvFormat | str) -> None:
    """Raise InvalidArgument unless a layer may have these canonical formats for K and V."""

def get_kv_cache_mode(
    quant_policy: int | str,
    capability: DeviceCapability = ...,  # the CPU's
    strict_arch: bool = False,
) -> KvFormat:
    """Resolve a quant_policy on a device."""

def kv_cache_conversion(format: KvFormat | str, capability: DeviceCapability = ...) -> str:
    """Return how a device converts a format: not needed, hardware, software or unsupported."""

# The cache of other model loops (components/kv_cache). lmdeploy.kv_cache is its interface. Arrays
# hold float32, float16, or the bits of bfloat16 as uint16; [batch, heads, tokens, head_dim].
_Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]

class ContiguousCacheConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    batch_size: int  # 1
    window: int  # 0: full attention
    rotate_k: bool
    search_scales: bool
    exact: bool
    paged: bool  # blocks of 64 tokens, as a cache on a GPU has them
    dtype: str  # float32, float16, bfloat16
    def __init__(self, formats: Sequence[tuple[KvFormat | str, KvFormat | str]]) -> None:
        """Set the formats of K and V by layer."""
    @property
    def num_bytes(self) -> int: ...  # what the pools would take

class AttendOptions:
    def __init__(
        self, softmax_scale: float, sinks: npt.NDArray[np.float32] | None = None
    ) -> None: ...

class HeadArray:
    """An array [batch, heads, tokens, head_dim] in the memory of a device."""

    shape: list[int]
    def __init__(
        self,
        address: int,
        dtype: str,
        *,
        shape: Sequence[int],
        strides: Sequence[int],  # bytes
    ) -> None: ...

class DeviceAttendOptions:
    def __init__(self, softmax_scale: float, *, sinks: int = 0, stream: int = 0) -> None:
        """Set the scale, the address of [num_heads] FP32 sinks or 0, and a cudaStream_t."""

class ContiguousCache:
    def __init__(self, device: Device, config: ContiguousCacheConfig) -> None: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def bytes_per_token(self) -> float: ...
    @property
    def bytes_per_step(self) -> int: ...  # that a decode step reads at seq_len
    @property
    def num_nonfinite(self) -> int: ...
    def append(self, layer: int, kv: _Pair) -> None: ...
    def update(
        self, layer: int, kv: _Pair
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Store K and V, and return the decoded rows that the new tokens see."""
    def attend(self, layer: int, q_and_out: _Pair, kv: _Pair, options: AttendOptions) -> None:
        """Store K and V, and write causal attention of q to a contiguous array."""
    def attend_on_device(
        self,
        layer: int,
        q_and_out: tuple[HeadArray, HeadArray],
        kv: tuple[HeadArray, HeadArray],
        options: DeviceAttendOptions,
    ) -> None:
        """Do the same with arrays in the device's memory, in the order of a stream."""
    def read(self, layer: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]: ...
    def stored(
        self, layer: int, is_value: bool
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Return the codes, and the scales or the pairs (scale, zero), without copying them."""
    def advance(self, num_tokens: int) -> None: ...
    def truncate(self, seq_len: int) -> None: ...
    def reset(self) -> None: ...

# Profiles, for benchmarks.
class OpRecord:
    """The totals of one op in one phase. Bytes are the minimum that the op must move."""

    kind: str  # embed, norm, linear, ..., decode_attention, copy, engine, between_steps
    rows: int  # outputs of the matrix; 0 for an op without a matrix
    cols: int
    format: str  # of the matrix: f32, bf16, q4_0, ...; empty without one
    kv_formats: list[KvFormat]  # of K and V if the op touches the cache, else empty
    calls: int
    nanoseconds: int
    weight_bytes: int  # as packed
    kv_bytes: int  # payload, (scale, zero) and scales
    activation_bytes: int  # everything else

class PhaseProfile:
    phase: str  # prefill, decode, mixed (both in each step), other (no attention)
    num_steps: int
    num_tokens: int
    nanoseconds: int  # from the first op of each step to its last op
    records: list[OpRecord]  # all except between_steps sum to `nanoseconds`

class ProfilingDevice(Device):
    def profile(self) -> list[PhaseProfile]:
        """Return the phases since clear(). A running step counts with the ops that have ended."""
    def clear(self) -> None: ...

def make_profiling_device(device: Device) -> ProfilingDevice:
    """Make a device that forwards to `device` and times every op."""

# Codecs and ops, for tests and reports.
def encode_rows(
    format: KvFormat | str,
    rows: npt.NDArray[np.float32],
    dtype: str,
    global_scale: float = 1.0,
    isa: str = "",
    *,
    search: bool = False,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Encode rows [n, head_dim] to (payload [n, row bytes], metadata [n, meta bytes])."""

def decode_rows(
    format: KvFormat | str,
    payload: npt.NDArray[np.uint8],
    metadata: npt.NDArray[np.uint8],
    head_dim: int,
    dtype: str,
    global_scale: float = 1.0,
    isa: str = "",
) -> npt.NDArray[np.float32]: ...
