"""Describe tensors of NumPy or torch, and of vLLM, TGI and TensorRT-LLM, as structs of KVX.

Every function is pure: it reads shapes, strides and addresses, and copies nothing but the offsets
of a ragged table. The caller keeps the tensors alive while a descriptor is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import OptionError
from lmdeploy.kvx import abi

DTYPES = {
    "float16": abi.Dtype.F16,
    "bfloat16": abi.Dtype.BF16,
    "float32": abi.Dtype.F32,
    "float8_e4m3fn": abi.Dtype.F8_E4M3,
    "float8_e5m2": abi.Dtype.F8_E5M2,
    "int32": abi.Dtype.S32,
    "int64": abi.Dtype.S64,
}


class Tables(NamedTuple):
    """A block table and lengths for a gather. `owner` keeps their memory alive."""

    table: abi.BlockTable
    lengths: abi.SeqLens
    owner: Any


class _Tensor(NamedTuple):
    """What a descriptor needs to know. Strides are in elements."""

    dtype: abi.Dtype
    memory: abi.Memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: int


def _read(name: str, value: Any, *, dtype: abi.Dtype | None = None) -> _Tensor:
    if isinstance(value, np.ndarray):
        strides = tuple(stride // value.itemsize for stride in value.strides)
        found, data, memory = value.dtype.name, value.ctypes.data, abi.Memory.HOST
    elif hasattr(value, "data_ptr"):
        strides, data = tuple(value.stride()), value.data_ptr()
        found = str(value.dtype).removeprefix("torch.")
        memory = abi.Memory.HOST if value.device.type == "cpu" else abi.Memory.DEVICE
    else:
        raise OptionError(name, f"is of type {type(value).__name__}. Pass an array.")
    if dtype is None:
        if found not in DTYPES:
            wanted = ", ".join(DTYPES)
            raise OptionError(name, f"has dtype {found}. It must be one of {wanted}.")
        dtype = DTYPES[found]
    return _Tensor(dtype, memory, tuple(value.shape), strides, data)


def _indices(name: str, value: Any, *, ndim: int) -> _Tensor:
    """Return an array of integers that is contiguous."""
    read = _read(name, value)
    if read.dtype not in (abi.Dtype.S32, abi.Dtype.S64) or len(read.shape) != ndim:
        raise OptionError(name, f"must be an array of integers with {ndim} dimensions.")
    for i, (size, stride) in enumerate(zip(read.shape, read.stride, strict=True)):
        if size > 1 and stride != np.prod(read.shape[i + 1 :]):
            raise OptionError(name, "must be contiguous.")
    return read


def tensor(
    value: Any, layout: abi.Layout = abi.Layout.BLOCK_CUSTOM, *, dtype: abi.Dtype | None = None
) -> abi.TensorDesc:
    """Describe an array as it lies. `dtype` replaces its own, for bits in another dtype."""
    read = _read("tensor", value, dtype=dtype)
    desc = abi.TensorDesc(read.dtype, layout, read.memory, len(read.shape))
    desc.shape[: len(read.shape)] = read.shape
    desc.stride[: len(read.stride)] = read.stride
    desc.data = read.data
    return desc


def rows(key: Any, value: Any, *, dtype: abi.Dtype | None = None) -> abi.KvIoDesc:
    """Describe rows outside a cache, [tokens, heads, head_dim] or, to gather, [seqs, tokens, …]."""
    shape = key.shape
    num_tokens = int(np.prod(shape[:-2]))
    return abi.KvIoDesc(
        tensor(key, dtype=dtype), tensor(value, dtype=dtype), num_tokens, shape[-2], shape[-1]
    )


def write(io: abi.KvIoDesc, slots: abi.SlotMapping) -> abi.WriteDesc:
    """Describe a write without scales."""
    desc = abi.WriteDesc(io, slots)
    desc.k_scale_desc.size = desc.v_scale_desc.size = 0
    return desc


def gather(io: abi.KvIoDesc, tables: Tables) -> abi.GatherDesc:
    """Describe a gather into rows that have room for the same number of tokens per sequence."""
    max_seq_len = io.num_tokens // tables.lengths.seq_count
    return abi.GatherDesc(io, tables.table, tables.lengths, max_seq_len)


def _cache(k: abi.TensorDesc, v: abi.TensorDesc, *, block_size: int, shape: Any) -> abi.CacheDesc:
    blocks, heads, head_dim = shape
    cache = abi.CacheDesc(blocks, block_size, heads, head_dim, k, v)
    cache.pool.size = 0
    return cache


def vllm_cache(key: Any, value: Any, *, dtype: abi.Dtype | None = None) -> abi.CacheDesc:
    """Describe the cache of a layer of vLLM or TGI.

    `key` and `value` are [blocks, block_size, heads, head_dim] in any order of strides, as
    FlashAttention and FlashInfer have them, or [blocks, heads, head_dim / x, block_size, x] and
    [blocks, heads, head_dim, block_size], as paged attention has them. A block size other than
    that of the block table is that of a view: pass `key.view(blocks, block_size, …)`. `dtype` is
    that of codes in uint8.
    """
    if len(key.shape) == 5:
        blocks, heads, _, block_size, _ = key.shape
        k = tensor(key, abi.Layout.BLOCK_HND_PACKED, dtype=dtype)
        v = tensor(value, abi.Layout.BLOCK_HND_PACKED, dtype=dtype)
        v.ndim, v.shape[4], v.stride[4] = 5, 1, 1
        return _cache(k, v, block_size=block_size, shape=(blocks, heads, value.shape[2]))
    if len(key.shape) != 4:
        raise OptionError("key", f"has shape {tuple(key.shape)}. It must have 4 or 5 dimensions.")
    blocks, block_size, heads, head_dim = key.shape
    k, v = (_by_strides(x, dtype=dtype) for x in (key, value))
    return _cache(k, v, block_size=block_size, shape=(blocks, heads, head_dim))


def _by_strides(value: Any, *, dtype: abi.Dtype | None) -> abi.TensorDesc:
    """Describe [blocks, block_size, heads, head_dim] as NHD, or as HND if heads come first."""
    desc = tensor(value, abi.Layout.BLOCK_NHD, dtype=dtype)
    if desc.stride[1] < desc.stride[2]:
        desc.layout = abi.Layout.BLOCK_HND
        for part in (desc.shape, desc.stride):
            part[1], part[2] = part[2], part[1]
    return desc


def vllm_slots(mapping: Any) -> abi.SlotMapping:
    """Describe vLLM's slot mapping: a slot per token, and -1 for padding."""
    read = _indices("mapping", mapping, ndim=1)
    return abi.SlotMapping(read.dtype, read.shape[0], -1, read.data)


def _lengths(lengths: Any) -> abi.SeqLens:
    read = _indices("lengths", lengths, ndim=1)
    return abi.SeqLens(read.dtype, read.shape[0], read.data)


def tgi_tables(tables: Any, lengths: Any) -> Tables:
    """Describe TGI's block tables and lengths, which vLLM's have the form of too.

    `tables` is [seqs, blocks], or for blocks of one token the blocks of all sequences after each
    other, as FlashInfer has them.
    """
    lens = _lengths(lengths)
    if len(tables.shape) == 2:
        read = _indices("tables", tables, ndim=2)
        seqs, blocks = read.shape
        table = abi.BlockTable(abi.BlockTableFormat.PACKED, read.dtype, 0, seqs, 1, blocks)
        table.indices, table.indices_count = read.data, seqs * blocks
        return Tables(table, lens, (tables, lengths))
    read = _indices("tables", tables, ndim=1)
    counts = np.asarray(lengths.tolist(), np.int64)
    indptr: npt.NDArray[np.int64] = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    most = max(int(counts.max(initial=0)), 1)
    table = abi.BlockTable(
        abi.BlockTableFormat.RAGGED, read.dtype, abi.Dtype.S64, len(counts), 1, most
    )
    table.indices, table.indices_count = read.data, read.shape[0]
    table.indptr, table.indptr_count = indptr.ctypes.data, len(indptr)
    return Tables(table, lens, (tables, lengths, indptr))


class TrtllmSizes(NamedTuple):
    """The sizes of a layer of TensorRT-LLM. tokens_per_block must be a power of two."""

    tokens_per_block: int
    num_kv_heads: int
    head_dim: int


def trtllm_cache(
    primary: Any, secondary: Any = None, *, sizes: TrtllmSizes, dtype: abi.Dtype | None = None
) -> abi.CacheDesc:
    """Describe a pool of TensorRT-LLM, from the layer's first K block on, to gather from it.

    K and V blocks of a layer, [heads, tokens_per_block, head_dim] each, lie in one pool. Offsets of
    `trtllm_tables` count them. KVX has one slot per token for K and V, so it cannot write there.
    """
    tokens, heads, head_dim = sizes
    if tokens & (tokens - 1) or tokens < 1:
        raise OptionError("tokens_per_block", f"is {tokens}. It must be a power of two.")
    read = _read("primary", primary, dtype=dtype)
    values = heads * tokens * head_dim
    num_blocks = int(np.prod(read.shape)) // values
    desc = abi.TensorDesc(read.dtype, abi.Layout.BLOCK_HND, read.memory, 4)
    desc.shape[:4] = (num_blocks, heads, tokens, head_dim)
    desc.stride[:4] = (values, tokens * head_dim, head_dim, 1)
    desc.data = read.data
    cache = _cache(desc, desc, block_size=tokens, shape=(num_blocks, heads, head_dim))
    element = {abi.Dtype.F32: 4, abi.Dtype.F16: 2, abi.Dtype.BF16: 2}.get(read.dtype, 1)
    cache.pool = abi.PoolDesc(read.memory, values * element, read.data)
    if secondary is not None:
        cache.pool.secondary = _read("secondary", secondary, dtype=dtype).data
    return cache


def trtllm_tables(offsets: Any, lengths: Any) -> Tables:
    """Describe TensorRT-LLM's block offsets, int32 [seqs, beams, 2, blocks], and lengths."""
    read = _indices("offsets", offsets, ndim=4)
    seqs, beams, _, blocks = read.shape
    kind = abi.BlockTableFormat.KV_OFFSETS
    table = abi.BlockTable(kind, read.dtype, 0, seqs, beams, blocks)
    table.indices, table.indices_count = read.data, seqs * beams * 2 * blocks
    table.flags = abi.BlockTableFlag.KVCACHEINDEX
    return Tables(table, _lengths(lengths), (offsets, lengths))
