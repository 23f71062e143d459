"""A KV cache that is allocated once: `attend` or `update` in every layer, then `advance`."""

from __future__ import annotations

import math
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lmdeploy.base.checks import OptionError, check_choice, check_instance, check_int, check_number
from lmdeploy.base.resources import usable_cores
from lmdeploy.kv_cache.arrays import NUMPY_FLOAT32, Array, ArrayKind, read_array
from lmdeploy.kv_cache.config import MAX_BATCH, CacheConfig

if TYPE_CHECKING:
    from lmdeploy import _turbomind

MIB = 2**20
_LARGEST_SCALE = 1e30


class StoredRows(NamedTuple):
    """What a layer stores of K or V: read-only NumPy views of the cache's memory.

    The views keep the memory alive and show later writes. S is `seq_len` when they were made. BF16
    values are their bits, in uint16.
    """

    codes: Array  # 4 bit: uint32 [b, H, S, D/8]; 8 bit: uint8 [b, H, S, D]; else the values
    scale: Array | None  # FP4: bytes [b, H, S, D/16]; int8, int4: [b, H, S, 1]; else None
    zero: Array | None  # int8, int4: [b, H, S, 1]; else None


class _Exclusive:
    """Lets one thread into a cache at a time, and refuses a second one instead of waiting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("Another thread uses this cache. Give every thread its own cache.")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class KVCache:
    """A contiguous KV cache for `batch_size` sequences of one length.

    In every layer, `attend` or `update` stores K and V of the next tokens. `advance` accepts them
    after the last layer; until then a repeated call overwrites them. K is stored as given, so RoPE
    comes before. Results are arrays of the library and dtype of `q` or `k_new`.

    Bits of results of a CPU do not depend on how tokens are split into calls or on the number of
    threads. With `CacheConfig.device="cuda"`, arrays are tensors of torch or CuPy on that GPU and
    are not copied to the host. `attend` then queues its work in the order of the library's current
    stream and returns. Dense reads need a CPU.

    One thread may use a cache at a time. Errors are ValueErrors that change nothing.
    """

    def __init__(self, config: CacheConfig, batch_size: int = 1) -> None:
        from lmdeploy import _turbomind

        check_instance("config", config, kind=CacheConfig)
        check_int("batch_size", batch_size, low=1, high=MAX_BATCH)
        self.config = config
        self.batch_size = batch_size
        if config.gpu is not None:
            device = _turbomind.make_cuda_device(config.gpu)
        else:
            device = _turbomind.make_device("cpu", config.num_threads or usable_cores())
        self._cache = _turbomind.ContiguousCache(device, config.native(batch_size))
        self._options = _turbomind.AttendOptions
        self._plain = self._options(1 / math.sqrt(config.head_dim))
        self._exclusive = _Exclusive()
        self._kind = NUMPY_FLOAT32  # of the newest k_new

    @property
    def seq_len(self) -> int:
        """Return the number of accepted tokens of each sequence."""
        return self._cache.seq_len

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the pools take."""
        return self._cache.num_bytes

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of one token over all layers, metadata included."""
        return self._cache.bytes_per_token

    @property
    def bytes_per_step(self) -> int:
        """Return the bytes of the cache that the next decode step reads in all layers."""
        with self._exclusive:
            return self._cache.bytes_per_step

    @property
    def num_nonfinite(self) -> int:
        """Return how many NaN and infinite values of K and V were stored in all calls."""
        with self._exclusive:
            return self._cache.num_nonfinite

    def memory_usage_mb(self) -> float:
        """Return `num_bytes` in units of 2^20 bytes."""
        return self.num_bytes / MIB

    def attend(
        self,
        layer_idx: int,
        *,
        q: Any,
        k_new: Any,
        v_new: Any,
        scale: float | None = None,
        sinks: Any = None,
    ) -> Any:
        """Store K and V of n new tokens, and return causal attention of their queries.

        `q` is [b, num_heads, n, D]; `k_new` and `v_new` are [b, num_kv_heads, n, D]. The result is
        shaped like `q`. Query i sees positions up to seq_len + i, within the window. `scale` None
        means 1/√D. `sinks` [num_heads] are logits that enter the softmax without a value.
        """
        with self._exclusive:
            layer = self._layer(layer_idx)
            if self.config.gpu is not None:
                return self._attend_on_gpu(layer, q=q, kv=(k_new, v_new), scale=scale, sinks=sinks)
            k, v = self._new_rows(k_new, v_new)
            queries, kind = self._rows("q", q, heads=self.config.num_heads)
            if queries.shape[2] != k.shape[2]:
                wanted = f"{k.shape[2]}, as k_new has"
                raise OptionError("q", f"has {queries.shape[2]} tokens. It must have {wanted}.")
            options = self._plain
            if scale is not None or sinks is not None:
                options = self._options(self._scale(scale), self._sinks(sinks))
            out = kind.empty(queries.shape)
            self._cache.attend(layer, (queries, out), (k, v), options)
            return kind.wrap(out)

    def update(self, layer_idx: int, *, k_new: Any, v_new: Any) -> tuple[Any, Any]:
        """Store K and V of n new tokens, and return K and V that they see.

        `k_new` and `v_new` are [b, num_kv_heads, n, D]. The results are [b, num_kv_heads,
        seq_len + n, D]; with a window they begin with the oldest token that the first new one sees.
        They are views of the cache if it stores the dtype of `k_new`, else decoded copies.
        """
        with self._exclusive:
            layer = self._layer(layer_idx)
            self._require_cpu("update")
            kv = self._new_rows(k_new, v_new)
            if self._is_viewable(layer, "k") and self._is_viewable(layer, "v"):
                self._cache.append(layer, kv)
                length = self._cache.seq_len + kv[0].shape[2]
                return self._view(layer, "k", length=length), self._view(layer, "v", length=length)
            k, v = self._cache.update(layer, kv)
            return self._kind.convert(k), self._kind.convert(v)

    def keys(self, layer_idx: int) -> Any:
        """Return K of the accepted tokens, or of those in the window, [b, num_kv_heads, S, D].

        The array has the kind of the newest `k_new`. It is a view of the cache if `update` would
        return one, else a decoded copy.
        """
        return self._dense(layer_idx, "k")

    def values(self, layer_idx: int) -> Any:
        """Return V like `keys`."""
        return self._dense(layer_idx, "v")

    def codes(self, layer_idx: int, side: str) -> StoredRows:
        """Return the stored codes of K or V (`side` "k" or "v"), with their scales and zeros."""
        check_choice("side", side, choices=("k", "v"))
        with self._exclusive:
            layer = self._layer(layer_idx)
            self._require_cpu("codes")
            codes, metadata = self._cache.stored(layer, side == "v")
            length = self._cache.seq_len
            codes = _read_only(codes[:, :, :length])
            if metadata is None:
                return StoredRows(codes, None, None)
            metadata = _read_only(metadata[:, :, :length])
            if metadata.dtype == np.uint8:
                return StoredRows(codes, metadata, None)
            return StoredRows(codes, metadata[..., :1], metadata[..., 1:])

    def advance(self, num_tokens: int) -> None:
        """Accept the first `num_tokens` new tokens of every layer and drop the others."""
        check_int("num_tokens", num_tokens, low=0)
        with self._exclusive:
            self._cache.advance(num_tokens)

    def truncate(self, seq_len: int) -> None:
        """Drop the tokens from position `seq_len` on, for rejected drafts and edited prompts."""
        check_int("seq_len", seq_len, low=0)
        with self._exclusive:
            self._cache.truncate(seq_len)

    def reset(self) -> None:
        """Drop all tokens."""
        with self._exclusive:
            self._cache.reset()

    def _attend_on_gpu(
        self, layer: int, *, q: Any, kv: tuple[Any, Any], scale: float | None, sinks: Any
    ) -> Any:
        from lmdeploy import _turbomind
        from lmdeploy.kv_cache.gpu_arrays import current_stream, describe, empty_like, sinks_address

        num_heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        stream = current_stream("q", q)
        k, v, queries = (
            self._on_gpu(name, array, heads=heads, stream=stream)
            for name, array, heads in (
                ("k_new", kv[0], kv_heads),
                ("v_new", kv[1], kv_heads),
                ("q", q, num_heads),
            )
        )
        for name, array in (("v_new", v), ("q", queries)):
            if array.shape[2] != k.shape[2]:
                wanted = f"{k.shape[2]}, as k_new has"
                raise OptionError(name, f"has {array.shape[2]} tokens. It must have {wanted}.")
        at = 0 if sinks is None else sinks_address(sinks, num_heads=num_heads, stream=stream)
        options = _turbomind.DeviceAttendOptions(self._scale(scale), sinks=at, stream=stream)
        out = empty_like(q)
        described = queries, describe("q", out, stream=stream)
        self._cache.attend_on_device(layer, described, (k, v), options)
        return out

    def _on_gpu(self, name: str, value: Any, *, heads: int, stream: int) -> _turbomind.HeadArray:
        from lmdeploy.kv_cache.gpu_arrays import describe

        array = describe(name, value, stream=stream)
        self._check_shape(name, tuple(array.shape), heads=heads)
        return array

    def _require_cpu(self, call: str) -> None:
        if self.config.gpu is not None:
            raise OptionError(
                call, f"needs a cache on the CPU. This one is on {self.config.device}."
            )

    def _layer(self, layer_idx: Any) -> int:
        return check_int("layer_idx", layer_idx, low=0, high=self.config.num_layers - 1)

    def _rows(self, name: str, value: Any, *, heads: int) -> tuple[Array, ArrayKind]:
        """Return an array of the caller if it is [batch, heads, n, head_dim] with n > 0."""
        array, kind = read_array(name, value)
        self._check_shape(name, array.shape, heads=heads)
        return array, kind

    def _check_shape(self, name: str, shape: tuple[int, ...], *, heads: int) -> None:
        dim = self.config.head_dim
        if len(shape) != 4 or shape[:2] != (self.batch_size, heads) or shape[3] != dim:
            wanted = f"({self.batch_size}, {heads}, n, {dim}): batch, heads, tokens, head_dim"
            raise OptionError(name, f"has shape {shape}. It must have {wanted}.")
        if shape[2] == 0:
            raise OptionError(name, "has no tokens. It must have at least 1.")

    def _new_rows(self, k_new: Any, v_new: Any) -> tuple[Array, Array]:
        heads = self.config.num_kv_heads
        k, kind = self._rows("k_new", k_new, heads=heads)
        v, _ = self._rows("v_new", v_new, heads=heads)
        if v.shape[2] != k.shape[2]:
            wanted = f"{k.shape[2]}, as k_new has"
            raise OptionError("v_new", f"has {v.shape[2]} tokens. It must have {wanted}.")
        self._kind = kind
        return k, v

    def _scale(self, scale: float | None) -> float:
        if scale is None:
            return 1 / math.sqrt(self.config.head_dim)
        return check_number("scale", scale, wanted=(-_LARGEST_SCALE, _LARGEST_SCALE))

    def _sinks(self, sinks: Any) -> np.typing.NDArray[np.float32] | None:
        if sinks is None:
            return None
        array, kind = read_array("sinks", sinks)
        if array.shape != (self.config.num_heads,):
            wanted = f"({self.config.num_heads},): one logit per query head"
            raise OptionError("sinks", f"has shape {array.shape}. It must have {wanted}.")
        if kind.dtype == "bfloat16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(array, np.float32)

    def _is_viewable(self, layer: int, side: str) -> bool:
        """Return whether the layer stores rows exactly as the caller's arrays do."""
        stored = getattr(self.config.formats[layer], side)
        return (
            stored == "none"
            and self.config.window == 0
            and self._kind.dtype == self.config.dtype
            and self._kind.library != "mlx"
        )

    def _view(self, layer: int, side: str, *, length: int) -> Any:
        rows, _ = self._cache.stored(layer, side == "v")
        return self._kind.wrap(rows[:, :, :length])

    def _dense(self, layer_idx: int, side: str) -> Any:
        with self._exclusive:
            layer = self._layer(layer_idx)
            self._require_cpu("keys" if side == "k" else "values")
            if self._is_viewable(layer, side):
                return self._view(layer, side, length=self._cache.seq_len)
            k, v = self._cache.read(layer)
            return self._kind.convert(k if side == "k" else v)


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array
