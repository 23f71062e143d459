"""Read where arrays lie: those of NumPy and torch, and all with DLPack or the CUDA array interface.

Nothing is copied, and no library is imported but NumPy. Arrays on a GPU are used on a stream.
DLPack tells it to the library that made the array. The CUDA array interface names a stream of that
library, for which ours waits. A torch tensor is taken as it is: pass the handle of the stream that
fills it, `torch.cuda.current_stream().cuda_stream`.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

import numpy as np

from lmdeploy.base.checks import OptionError
from lmdeploy.kvx import abi, check, library

DTYPES = {
    "float16": abi.Dtype.F16,
    "bfloat16": abi.Dtype.BF16,
    "float32": abi.Dtype.F32,
    "float8_e4m3fn": abi.Dtype.F8_E4M3,
    "float8_e5m2": abi.Dtype.F8_E5M2,
    "int32": abi.Dtype.S32,
    "int64": abi.Dtype.S64,
}
ITEM_BYTES = {
    abi.Dtype.F16: 2,
    abi.Dtype.BF16: 2,
    abi.Dtype.F32: 4,
    abi.Dtype.F8_E4M3: 1,
    abi.Dtype.F8_E5M2: 1,
    abi.Dtype.S32: 4,
    abi.Dtype.S64: 8,
    abi.Dtype.U32: 4,
    abi.Dtype.U64: 8,
    abi.Dtype.U8: 1,
}
DEFAULT_STREAM = 1  # the legacy default stream, as both protocols name it


class ArrayView(NamedTuple):
    """Facts about an array that a descriptor states. Strides are in elements."""

    dtype: abi.Dtype
    memory: abi.Memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: int


class _Found(NamedTuple):
    """An array as its library describes it."""

    dtype: str
    item_bytes: int
    memory: abi.Memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: int


def read_array(
    name: str, value: Any, *, dtype: abi.Dtype | None = None, stream: int | None = None
) -> ArrayView:
    """Return where an array lies. `dtype` replaces its own, for bits in another dtype.

    `stream` is the handle of the stream that will use it, and None the default stream. Raise
    OptionError for anything but an array of a dtype of KVX in memory of the host or of a GPU.
    """
    if isinstance(value, np.ndarray):
        found = _from_numpy(value)
    elif hasattr(value, "data_ptr"):
        found = _from_torch(name, value)
    elif hasattr(value, "__dlpack__"):
        found = _from_dlpack(name, value, stream=stream)
    elif hasattr(value, "__cuda_array_interface__"):
        found = _from_cuda_interface(name, value, stream=stream)
    else:
        raise OptionError(name, f"is of type {type(value).__name__}. Pass an array.")
    if dtype is None:
        if found.dtype not in DTYPES:
            wanted = ", ".join(DTYPES)
            raise OptionError(name, f"has dtype {found.dtype}. It must be one of {wanted}.")
        dtype = DTYPES[found.dtype]
    elif ITEM_BYTES.get(dtype) != found.item_bytes:
        wanted = f"{dtype.name} has {ITEM_BYTES.get(dtype, 0)}"
        raise OptionError(name, f"has elements of {found.item_bytes} bytes, but {wanted}.")
    return ArrayView(dtype, found.memory, found.shape, found.stride, found.data)


def _from_numpy(value: np.ndarray[Any, Any]) -> _Found:
    stride = tuple(step // value.itemsize for step in value.strides)
    shape, data = value.shape, value.ctypes.data
    return _Found(value.dtype.name, value.itemsize, abi.Memory.HOST, shape, stride, data)


def _from_torch(name: str, value: Any) -> _Found:
    kinds = {"cpu": abi.Memory.HOST, "cuda": abi.Memory.DEVICE}
    if value.device.type not in kinds:
        raise OptionError(name, f"is on the device {value.device}. It must be on the CPU or CUDA.")
    return _Found(
        str(value.dtype).removeprefix("torch."),
        value.element_size(),
        kinds[value.device.type],
        tuple(value.shape),
        tuple(value.stride()),
        value.data_ptr(),
    )


class _DlTensor(ctypes.Structure):
    """A DLTensor of DLPack, with which a DLManagedTensor begins."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_MEMORY = {  # kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged
    1: abi.Memory.HOST,
    2: abi.Memory.DEVICE,
    3: abi.Memory.HOST,
    13: abi.Memory.UNIFIED,
}
_DL_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 10: "float8_e4m3fn", 12: "float8_e5m2"}
_DL_NAME = b"dltensor"


def _from_dlpack(name: str, value: Any, *, stream: int | None) -> _Found:
    device_type = int(value.__dlpack_device__()[0])
    if device_type not in _DL_MEMORY:
        wanted = "memory of the host or of CUDA"
        raise OptionError(name, f"is in memory of the DLPack type {device_type}, not in {wanted}.")
    memory = _DL_MEMORY[device_type]
    if memory == abi.Memory.HOST:
        capsule = value.__dlpack__()
    else:
        capsule = value.__dlpack__(stream=stream or DEFAULT_STREAM)
    # The capsule keeps its name, so that it releases the tensor. The caller keeps the memory.
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    if not api.PyCapsule_IsValid(capsule, _DL_NAME):
        raise OptionError(name, "has a __dlpack__ that returns no capsule named dltensor.")
    tensor = _DlTensor.from_address(api.PyCapsule_GetPointer(capsule, _DL_NAME))
    if tensor.lanes != 1 or tensor.bits % 8 != 0 or tensor.ndim < 0:
        raise OptionError(name, "is a DLPack tensor of vectors or of parts of bytes.")
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    stride = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    dtype = _DL_CODES.get(tensor.code, f"of the DLPack code {tensor.code}")
    return _Found(
        dtype if dtype.startswith("float8") else f"{dtype}{tensor.bits}",
        tensor.bits // 8,
        memory,
        shape,
        _row_major(shape) if stride is None else stride,
        (tensor.data or 0) + tensor.byte_offset,
    )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _from_cuda_interface(name: str, value: Any, *, stream: int | None) -> _Found:
    interface = value.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise OptionError(name, "has a mask. Pass its values without the mask.")
    try:
        dtype = np.dtype(interface["typestr"])
    except TypeError as error:
        raise OptionError(name, f"has the unknown type {interface['typestr']!r}.") from error
    if not dtype.isnative:
        raise OptionError(name, f"has the bytes of {dtype.str!r} in the order of another machine.")
    shape = tuple(int(size) for size in interface["shape"])
    steps = interface.get("strides")
    if steps is not None and any(step % dtype.itemsize for step in steps):
        raise OptionError(name, f"has strides {steps}. They must be whole elements.")
    _wait_for(name, interface.get("stream"), stream=stream)
    return _Found(
        dtype.name,
        dtype.itemsize,
        abi.Memory.DEVICE,
        shape,
        _row_major(shape) if steps is None else tuple(step // dtype.itemsize for step in steps),
        int(interface["data"][0]),
    )


def _wait_for(name: str, other: int | None, *, stream: int | None) -> None:
    """Let `stream` wait for the stream of an array's library, if it has named one."""
    if other is None:
        return
    if isinstance(other, bool) or not isinstance(other, int) or other == 0:
        raise OptionError(name, f"names the stream {other!r}. The interface does not allow it.")
    if other != (stream or DEFAULT_STREAM):
        check(library().kvx_tm_wait_stream(stream, other))
