"""Describe a KV cache: sizes, formats and options, and the memory that it takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError, check_bool, check_int, refuse
from lmdeploy.config.kv_format_options import (
    KV_QUALITIES,
    FormatPair,
    parse_cache_format,
    reported_formats,
)
from lmdeploy.kv_cache.arrays import FLOATS, dtype_name

if TYPE_CHECKING:
    from lmdeploy import _turbomind

MAX_LAYERS = 4096
MAX_HEADS = 65536
MAX_HEAD_DIM = 256
MAX_SEQ_LEN = 1 << 20  # the longest block
MAX_POSITION = 1 << 30
MAX_BATCH = 65536
MAX_THREADS = 1024
DEFAULT_FORMAT = "nvfp4"  # of quantize=True


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and options of a KVCache.

    Attributes:
        num_heads: query heads, a multiple of num_kv_heads.
        head_dim: a multiple of 16, at most 256.
        max_seq_len: the largest number of tokens of a sequence. Memory is that of the next power of
            two, at least 64. With a window it limits positions, not memory.
        dtype: of stored 16-bit values, scales and zeros: float16, bfloat16 or float32, as a name
            or as a dtype of NumPy, torch or MLX.
        quantize: False stores `dtype`, True nvfp4. Also the name of a KV format, `k=fp8,v=nvfp4`,
            or a table of formats by layer, as `kv_cache_format` takes it.
        window: each token sees this many tokens, itself included. 0 means all.
        rotate_k: rotate quantized K, and Q with it, so that outliers spread over a head.
        search_scales: choose FP4 scales by the squared error instead of the largest value.
        exact: compute in FP32 instead of integers. Slower; the error falls from 2e-4 to 1e-5.
        num_threads: None uses every core.
        device: "cpu", or "cuda" or "cuda:1" for a cache in the memory of a GPU, which only attends.
        quantize_mode: another name of quantize.
        formats: the formats of each layer, from quantize.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    dtype: Any = "float16"
    quantize: Any = field(default=False, hash=False)
    _: KW_ONLY
    window: int = 0
    rotate_k: bool = False
    search_scales: bool = True
    exact: bool = False
    num_threads: int | None = None
    device: str = "cpu"
    quantize_mode: InitVar[Any] = None
    formats: tuple[FormatPair, ...] = field(init=False, repr=False)

    def __post_init__(self, quantize_mode: Any) -> None:
        check_int("num_layers", self.num_layers, low=1, high=MAX_LAYERS)
        check_int("num_heads", self.num_heads, low=1, high=MAX_HEADS)
        check_int("num_kv_heads", self.num_kv_heads, low=1, high=MAX_HEADS)
        if self.num_heads % self.num_kv_heads:
            wanted = f"a multiple of num_kv_heads, {self.num_kv_heads}"
            raise refuse("num_heads", self.num_heads, wanted=wanted)
        check_int("head_dim", self.head_dim, low=16, high=MAX_HEAD_DIM)
        if self.head_dim % 16:
            raise refuse("head_dim", self.head_dim, wanted="a multiple of 16")
        check_int("window", self.window, low=0, high=MAX_POSITION)
        longest = MAX_POSITION if self.window else MAX_SEQ_LEN
        check_int("max_seq_len", self.max_seq_len, low=1, high=longest)
        for name in ("rotate_k", "search_scales", "exact"):
            check_bool(name, getattr(self, name))
        if self.num_threads is not None:
            check_int("num_threads", self.num_threads, low=1, high=MAX_THREADS)
        self._set("dtype", _checked_dtype(self.dtype))
        if self.gpu is not None and self.exact:
            raise refuse("exact", True, wanted="False, because a GPU computes in 16 bits")
        if self.gpu is not None and self.dtype == "float32":
            raise refuse("dtype", self.dtype, wanted="float16 or bfloat16 on a GPU")
        self._set("quantize", _chosen_format(self.quantize, quantize_mode))
        self._set("formats", self._resolved_formats())
        if len(set(self.formats)) == 1:
            self._set("quantize", str(self.formats[0]))

    @property
    def gpu(self) -> int | None:
        """Return the number of the GPU, or None on the CPU."""
        found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", str(self.device))
        if found is None:
            raise refuse("device", self.device, wanted='"cpu", "cuda" or "cuda:N"')
        return None if self.device == "cpu" else int(found[1] or 0)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _resolved_formats(self) -> tuple[FormatPair, ...]:
        from lmdeploy import _turbomind

        cpu = _turbomind.DeviceCapability()

        def resolve(name: str) -> str:
            return _turbomind.get_kv_cache_mode(name, cpu).name

        try:
            table = parse_cache_format(self.quantize).by_layer([self.window] * self.num_layers)
        except OptionError as error:
            raise error.renamed(error.field.replace("kv_cache_format", "quantize")) from error
        return tuple(FormatPair(resolve(pair.k), resolve(pair.v)) for pair in table)

    def native(self, batch_size: int) -> _turbomind.ContiguousCacheConfig:
        """Return the configuration in C++."""
        from lmdeploy import _turbomind

        config = _turbomind.ContiguousCacheConfig([(pair.k, pair.v) for pair in self.formats])
        config.num_heads = self.num_heads
        config.num_kv_heads = self.num_kv_heads
        config.head_dim = self.head_dim
        config.max_seq_len = self.max_seq_len
        config.batch_size = batch_size
        config.dtype = self.dtype
        config.window = self.window
        config.rotate_k = self.rotate_k
        config.search_scales = self.search_scales
        config.exact = self.exact
        config.paged = self.gpu is not None
        return config


def _checked_dtype(dtype: Any) -> str:
    name = dtype_name(dtype)
    if name not in FLOATS:
        raise refuse("dtype", dtype, wanted="float16, bfloat16 or float32")
    return name


def _chosen_format(quantize: Any, quantize_mode: Any) -> Any:
    """Return what to parse as formats."""
    if quantize_mode is not None:
        if quantize is not False and quantize != quantize_mode:
            raise refuse("quantize_mode", quantize_mode, wanted="absent if quantize is given")
        quantize = quantize_mode
    if isinstance(quantize, str) and quantize.strip().lower() in KV_QUALITIES:
        wanted = f"the name of a KV format, because only the engine has qualities {KV_QUALITIES}"
        raise refuse("quantize", quantize, wanted=wanted)
    if isinstance(quantize, bool):
        return DEFAULT_FORMAT if quantize else "none"
    return quantize


def memory_table(
    config: CacheConfig, contexts: Sequence[int] = (4096, 32768)
) -> dict[str, dict[int, int]]:
    """Return the bytes of a cache for one sequence, by format and context."""

    def num_bytes(name: str, context: int) -> int:
        cache = dataclasses.replace(config, quantize=name, max_seq_len=context)
        return cache.native(1).num_bytes

    return {
        name: {context: num_bytes(name, context) for context in contexts}
        for name in reported_formats()
    }
