"""The structs, enumerators and functions of libkvx, for ctypes. Its headers describe them."""

from __future__ import annotations

import ctypes
import enum
from ctypes import POINTER, Structure, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p

MAX_TENSOR_DIMS = 5
VERSION_MAJOR = 1


class Status(enum.IntEnum):
    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    OUT_OF_RANGE = 3
    INCOMPATIBLE = 4
    INTERNAL_ERROR = 5


class Dtype(enum.IntEnum):
    INVALID = 0
    F16 = 1
    BF16 = 2
    F32 = 3
    F8_E4M3 = 4
    F8_E5M2 = 5
    S32 = 6
    S64 = 7
    U32 = 8
    U64 = 9
    U8 = 10


class Memory(enum.IntEnum):
    UNKNOWN = 0
    HOST = 1
    DEVICE = 2
    UNIFIED = 3


class Layout(enum.IntEnum):
    INVALID = 0
    BLOCK_NHD = 1
    BLOCK_HND = 2
    BLOCK_HND_PACKED = 3
    BLOCK_CUSTOM = 15


class BlockTableFormat(enum.IntEnum):
    INVALID = 0
    PACKED = 1
    RAGGED = 2
    KV_OFFSETS = 3


class BlockTableFlag(enum.IntEnum):
    NONE = 0
    KVCACHEINDEX = 1


class Scale(enum.IntEnum):
    NONE = 0
    PER_TENSOR = 1
    PER_BLOCK = 2
    PER_HEAD = 3
    PER_BLOCK_HEAD = 4


class TmMode(enum.IntEnum):
    NONE = 0
    INT8 = 1
    INT4 = 2
    FP8_E4M3 = 3
    FP8_E5M2 = 4
    MXFP4 = 5
    NVFP4 = 6


class TmFlag(enum.IntFlag):
    NONE = 0
    ROTATED = 1
    SEARCH = 2
    K_OFFSET = 4


class _Sized(Structure):
    """A struct whose first field is its size, which is set when it is made."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(ctypes.sizeof(type(self)), *args, **kwargs)


class Version(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("abi_major", c_uint32),
        ("abi_minor", c_uint32),
        ("abi_patch", c_uint32),
    ]


class TensorDesc(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("dtype", c_int),
        ("layout", c_int),
        ("memory", c_int),
        ("ndim", c_uint32),
        ("shape", c_int64 * MAX_TENSOR_DIMS),
        ("stride", c_int64 * MAX_TENSOR_DIMS),
        ("data", c_void_p),
    ]


class PoolDesc(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("memory", c_int),
        ("bytes_per_block", c_uint32),
        ("primary", c_void_p),
        ("secondary", c_void_p),
    ]


class CacheDesc(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("num_blocks", c_uint32),
        ("block_size", c_uint32),
        ("num_kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("k", TensorDesc),
        ("v", TensorDesc),
        ("pool", PoolDesc),
    ]


class BlockTable(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("format", c_int),
        ("index_dtype", c_int),
        ("indptr_dtype", c_int),
        ("seq_count", c_uint32),
        ("beam_width", c_uint32),
        ("max_blocks_per_seq", c_uint32),
        ("indices", c_void_p),
        ("indptr", c_void_p),
        ("indices_count", c_uint32),
        ("indptr_count", c_uint32),
        ("flags", c_uint32),
    ]


class SlotMapping(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("dtype", c_int),
        ("token_count", c_uint32),
        ("invalid_slot", c_int64),
        ("slots", c_void_p),
    ]


class SeqLens(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("dtype", c_int),
        ("seq_count", c_uint32),
        ("lengths", c_void_p),
    ]


class KvIoDesc(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("key", TensorDesc),
        ("value", TensorDesc),
        ("num_tokens", c_uint32),
        ("num_kv_heads", c_uint32),
        ("head_dim", c_uint32),
    ]


class ScaleDesc(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("dtype", c_int),
        ("granularity", c_int),
        ("ndim", c_uint32),
        ("shape", c_int64 * MAX_TENSOR_DIMS),
        ("stride", c_int64 * MAX_TENSOR_DIMS),
        ("data", c_void_p),
    ]


class WriteDesc(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("io", KvIoDesc),
        ("slots", SlotMapping),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("k_scale_desc", ScaleDesc),
        ("v_scale_desc", ScaleDesc),
    ]


class GatherDesc(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("io", KvIoDesc),
        ("block_table", BlockTable),
        ("seq_lens", SeqLens),
        ("max_seq_len", c_uint32),
    ]


class TmLayer(_Sized):
    _fields_ = [
        ("size", c_uint32),
        ("k_mode", c_int),
        ("v_mode", c_int),
        ("dtype", c_int),
        ("memory", c_int),
        ("block_size", c_uint32),
        ("num_kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("num_blocks", c_uint32),
        ("data", c_void_p),
        ("block_bytes", c_uint64),
        ("scales", c_void_p),
        ("scale_block_bytes", c_uint64),
        ("k_factors", c_void_p),
        ("v_factors", c_void_p),
        ("k_mean", c_void_p),
        ("flags", c_uint32),
    ]


_WRITE = [POINTER(CacheDesc), POINTER(WriteDesc), c_void_p]
_GATHER = [POINTER(CacheDesc), POINTER(GatherDesc), c_void_p]
FUNCTIONS = {
    "kvx_get_version": [POINTER(Version)],
    "kvx_validate_cache_desc": [POINTER(CacheDesc)],
    "kvx_write_kv": _WRITE,
    "kvx_gather_kv": _GATHER,
    "kvx_launch_write_kv": _WRITE,
    "kvx_launch_write_kv_prefill": [*_WRITE[:2], c_int32, c_void_p],
    "kvx_launch_gather_kv": _GATHER,
    "kvx_tm_negotiate": [c_uint32, c_uint32],
    "kvx_tm_wait_stream": [c_void_p, c_void_p],
    "kvx_tm_describe": [POINTER(TmLayer)],
    "kvx_tm_as_cache": [POINTER(TmLayer), POINTER(CacheDesc)],
    "kvx_tm_write_kv": [POINTER(TmLayer), POINTER(WriteDesc), c_void_p],
    "kvx_tm_gather_kv": [POINTER(TmLayer), POINTER(GatherDesc), c_void_p],
}
