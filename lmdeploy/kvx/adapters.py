"""Describe arrays, and caches of vLLM, TGI and TensorRT-LLM, as structs of KVX.

Arrays are those of lmdeploy.kvx.arrays. Every function reads shapes, strides and addresses, and
copies nothing but the offsets of a ragged table in host memory. The caller keeps the arrays alive
while a descriptor is used, and on a GPU until the stream has done the work.

`stream` is the handle of the stream on which the descriptor will be used, and None is the default
stream. All arrays of a call are in host memory, or all on one GPU, tables included.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import OptionError
from lmdeploy.kvx import abi
from lmdeploy.kvx.arrays import ITEM_BYTES, ArrayView, read_array


class Tables(NamedTuple):
    """A block table and lengths for a gather. `owner` keeps their memory alive."""

    table: abi.BlockTable
    lengths: abi.SeqLens
    owner: Any


def _indices(
    name: str, value: Any, *, ndim: int | tuple[int, ...], stream: int | None
) -> ArrayView:
    """Return an array of integers that is contiguous and has one of some numbers of dimensions."""
    ndims = (ndim,) if isinstance(ndim, int) else ndim
    read = read_array(name, value, stream=stream)
    if read.dtype not in (abi.Dtype.S32, abi.Dtype.S64) or len(read.shape) not in ndims:
        wanted = " or ".join(str(n) for n in ndims)
        raise OptionError(name, f"must be an array of integers with {wanted} dimensions.")
    for i, (size, stride) in enumerate(zip(read.shape, read.stride, strict=True)):
        if size > 1 and stride != np.prod(read.shape[i + 1 :]):
            raise OptionError(name, "must be contiguous.")
    return read


def tensor(
    value: Any,
    layout: abi.Layout = abi.Layout.BLOCK_CUSTOM,
    *,
    dtype: abi.Dtype | None = None,
    stream: int | None = None,
) -> abi.TensorDesc:
    """Describe an array as it lies. `dtype` replaces its own, for bits in another dtype."""
    return _tensor("tensor", value, layout=layout, dtype=dtype, stream=stream)


def _tensor(
    name: str,
    value: Any,
    *,
    layout: abi.Layout = abi.Layout.BLOCK_CUSTOM,
    dtype: abi.Dtype | None,
    stream: int | None,
) -> abi.TensorDesc:
    read = read_array(name, value, dtype=dtype, stream=stream)
    if len(read.shape) > abi.MAX_TENSOR_DIMS:
        wanted = f"It must have at most {abi.MAX_TENSOR_DIMS} dimensions"
        raise OptionError(name, f"has shape {read.shape}. {wanted}.")
    desc = abi.TensorDesc(read.dtype, layout, read.memory, len(read.shape))
    desc.shape[: len(read.shape)] = read.shape
    desc.stride[: len(read.stride)] = read.stride
    desc.data = read.data
    return desc


def rows(
    key: Any, value: Any, *, dtype: abi.Dtype | None = None, stream: int | None = None
) -> abi.KvIoDesc:
    """Describe rows outside a cache, [tokens, heads, head_dim] or, to gather, [seqs, tokens, …]."""
    k, v = (
        _tensor(name, x, dtype=dtype, stream=stream) for name, x in (("key", key), ("value", value))
    )
    if k.ndim < 3:
        raise OptionError("key", f"has {k.ndim} dimensions. It must have 3 or 4.")
    shape = k.shape[: k.ndim]
    return abi.KvIoDesc(k, v, int(np.prod(shape[:-2])), shape[-2], shape[-1])


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


def vllm_cache(
    key: Any, value: Any, *, dtype: abi.Dtype | None = None, stream: int | None = None
) -> abi.CacheDesc:
    """Describe the cache of a layer of vLLM or TGI.

    `key` and `value` are [blocks, block_size, heads, head_dim] in any order of strides, as
    FlashAttention and FlashInfer have them, or [blocks, heads, head_dim / x, block_size, x] and
    [blocks, heads, head_dim, block_size], as paged attention has them. A block size other than
    that of the block table is that of a view: pass `key.view(blocks, block_size, …)`. `dtype` is
    that of codes in uint8.
    """
    k = _tensor("key", key, dtype=dtype, stream=stream)
    if k.ndim not in (4, 5):
        shape = tuple(k.shape[: k.ndim])
        raise OptionError("key", f"has shape {shape}. It must have 4 or 5 dimensions.")
    v = _tensor("value", value, dtype=dtype, stream=stream)
    if k.ndim == 5:
        blocks, heads, _, block_size, _ = k.shape
        k.layout = v.layout = abi.Layout.BLOCK_HND_PACKED
        v.ndim, v.shape[4], v.stride[4] = 5, 1, 1
        return _cache(k, v, block_size=block_size, shape=(blocks, heads, v.shape[2]))
    blocks, block_size, heads, head_dim = k.shape[:4]
    for desc in (k, v):
        _order_by_strides(desc)
    return _cache(k, v, block_size=block_size, shape=(blocks, heads, head_dim))


def _order_by_strides(desc: abi.TensorDesc) -> None:
    """Turn [blocks, block_size, heads, head_dim] into NHD, or HND if heads come first."""
    desc.layout = abi.Layout.BLOCK_NHD
    if desc.stride[1] < desc.stride[2]:
        desc.layout = abi.Layout.BLOCK_HND
        for part in (desc.shape, desc.stride):
            part[1], part[2] = part[2], part[1]


def vllm_slots(mapping: Any, *, stream: int | None = None) -> abi.SlotMapping:
    """Describe vLLM's slot mapping: a slot per token, and -1 for padding."""
    read = _indices("mapping", mapping, ndim=1, stream=stream)
    return abi.SlotMapping(read.dtype, read.shape[0], -1, read.data)


def _lengths(read: ArrayView) -> abi.SeqLens:
    return abi.SeqLens(read.dtype, read.shape[0], read.data)


def tgi_tables(
    tables: Any, lengths: Any, *, indptr: Any = None, stream: int | None = None
) -> Tables:
    """Describe TGI's block tables and lengths, which vLLM's have the form of too.

    `tables` is [seqs, blocks], or for blocks of one token the blocks of all sequences after each
    other, as FlashInfer has them. Those have `indptr` [seqs + 1], the prefix sums of the lengths.
    In host memory, None computes them.
    """
    lens = _indices("lengths", lengths, ndim=1, stream=stream)
    read = _indices("tables", tables, ndim=(1, 2), stream=stream)
    owner = [tables, lengths, indptr]
    if len(read.shape) == 2:
        seqs, blocks = read.shape
        table = abi.BlockTable(abi.BlockTableFormat.PACKED, read.dtype, 0, seqs, 1, blocks)
        table.indices, table.indices_count = read.data, seqs * blocks
        return Tables(table, _lengths(lens), owner)
    if indptr is None:
        indptr = _prefix_sums(lengths, memory=lens.memory)
        owner.append(indptr)
    sums = _indices("indptr", indptr, ndim=1, stream=stream)
    table = abi.BlockTable(abi.BlockTableFormat.RAGGED, read.dtype, sums.dtype, lens.shape[0], 1)
    table.max_blocks_per_seq = max(read.shape[0], 1)  # of no meaning here, but positive
    table.indices, table.indices_count = read.data, read.shape[0]
    table.indptr, table.indptr_count = sums.data, sums.shape[0]
    return Tables(table, _lengths(lens), owner)


def _prefix_sums(lengths: Any, *, memory: abi.Memory) -> npt.NDArray[np.int64]:
    if memory != abi.Memory.HOST or not hasattr(lengths, "tolist"):
        raise OptionError("indptr", "is None. Pass the prefix sums of the lengths.")
    counts = np.asarray(lengths.tolist(), np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


class TrtllmSizes(NamedTuple):
    """The sizes of a layer of TensorRT-LLM. tokens_per_block must be a power of two."""

    tokens_per_block: int
    num_kv_heads: int
    head_dim: int


def trtllm_cache(
    primary: Any,
    secondary: Any = None,
    *,
    sizes: TrtllmSizes,
    dtype: abi.Dtype | None = None,
    stream: int | None = None,
) -> abi.CacheDesc:
    """Describe a pool of TensorRT-LLM, from the layer's first K block on, to gather from it.

    K and V blocks of a layer, [heads, tokens_per_block, head_dim] each, lie in one pool. Offsets of
    `trtllm_tables` count them. KVX has one slot per token for K and V, so it cannot write there.
    The secondary pool is in memory of the same kind.
    """
    tokens, heads, head_dim = sizes
    if tokens & (tokens - 1) or tokens < 1:
        raise OptionError("tokens_per_block", f"is {tokens}. It must be a power of two.")
    read = read_array("primary", primary, dtype=dtype, stream=stream)
    values = heads * tokens * head_dim
    num_blocks = int(np.prod(read.shape)) // values
    desc = abi.TensorDesc(read.dtype, abi.Layout.BLOCK_HND, read.memory, 4)
    desc.shape[:4] = (num_blocks, heads, tokens, head_dim)
    desc.stride[:4] = (values, tokens * head_dim, head_dim, 1)
    desc.data = read.data
    cache = _cache(desc, desc, block_size=tokens, shape=(num_blocks, heads, head_dim))
    cache.pool = abi.PoolDesc(read.memory, values * ITEM_BYTES[read.dtype], read.data)
    if secondary is not None:
        other = read_array("secondary", secondary, dtype=dtype, stream=stream)
        if other.memory != read.memory:
            wanted = f"{read.memory.name}, as primary is"
            raise OptionError("secondary", f"is {other.memory.name} memory. It must be {wanted}.")
        cache.pool.secondary = other.data
    return cache


def trtllm_tables(offsets: Any, lengths: Any, *, stream: int | None = None) -> Tables:
    """Describe TensorRT-LLM's block offsets, int32 [seqs, beams, 2, blocks], and lengths."""
    read = _indices("offsets", offsets, ndim=4, stream=stream)
    lens = _indices("lengths", lengths, ndim=1, stream=stream)
    seqs, beams, _, blocks = read.shape
    kind = abi.BlockTableFormat.KV_OFFSETS
    table = abi.BlockTable(kind, read.dtype, 0, seqs, beams, blocks)
    table.indices, table.indices_count = read.data, seqs * beams * 2 * blocks
    table.flags = abi.BlockTableFlag.KVCACHEINDEX
    return Tables(table, _lengths(lens), (offsets, lengths))
