"""Arrays in the memory of the stand-in for a GPU, with the protocols of libraries like CuPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

DL_CUDA, DL_CUDA_MANAGED = 2, 13
_DL_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}


class Gpu:
    """The stand-in's memory."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.lib.kvx_test_allocate.restype = ctypes.c_void_p
        self.lib.kvx_test_allocate.argtypes = [ctypes.c_size_t]
        self.lib.kvx_test_free.argtypes = [ctypes.c_void_p]
        self.lib.kvx_test_copy.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_void_p]
        self.lib.kvx_test_copy.restype = None

    def copy(self, to: int, begin: int, *, size: int) -> None:
        self.lib.kvx_test_copy(to, begin, size, None)


class GpuArray:
    """The storage of a torch tensor on a GPU. `streams` are those that DLPack has named.

    Subclasses have the protocols.
    """

    def __init__(self, gpu: Gpu, tensor: torch.Tensor) -> None:
        self.gpu, self.host = gpu, tensor
        storage = tensor.untyped_storage()
        self.size = storage.nbytes()
        self.memory = gpu.lib.kvx_test_allocate(self.size)
        gpu.copy(self.memory, storage.data_ptr(), size=self.size)
        self.item = tensor.element_size()
        self.streams: list[Any] = []

    def __del__(self) -> None:
        self.gpu.lib.kvx_test_free(self.memory)

    def cpu(self) -> torch.Tensor:
        """Return the tensor with the values of the GPU."""
        out = self.host.clone(memory_format=torch.preserve_format)
        storage = out.untyped_storage()
        if storage.nbytes() != self.size:  # a view of more
            out = self.host
            storage = out.untyped_storage()
        self.gpu.copy(storage.data_ptr(), self.memory, size=self.size)
        return out


class CudaInterfaceArray(GpuArray):
    """An array with `__cuda_array_interface__`."""

    typestr: str | None = None
    stream: Any = None
    mask: Any = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        is_bfloat = self.host.dtype == torch.bfloat16
        typestr = "|V2" if is_bfloat else np.dtype(str(self.host.dtype)[6:]).str
        is_dense = self.host.is_contiguous()
        strides = None if is_dense else tuple(self.item * step for step in self.host.stride())
        interface = {
            "shape": tuple(self.host.shape),
            "typestr": self.typestr or typestr,
            "data": (self.memory + self.item * self.host.storage_offset(), False),
            "version": 3,
            "strides": strides,
            "stream": self.stream,
        }
        return interface if self.mask is None else {**interface, "mask": self.mask}


class _DlTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class DlpackArray(GpuArray):
    """An array with `__dlpack__`."""

    device_type = DL_CUDA
    lanes = 1
    capsule_name = b"dltensor"

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_type, 0

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        shape, stride = self.host.shape, self.host.stride()
        kind = str(self.host.dtype).removeprefix("torch.").rstrip("0123456789")
        numbers = ctypes.c_int64 * len(shape)
        self.parts = numbers(*shape), numbers(*stride)
        pointers = [ctypes.cast(part, ctypes.POINTER(ctypes.c_int64)) for part in self.parts]
        if self.host.is_contiguous():
            pointers[1] = ctypes.POINTER(ctypes.c_int64)()
        self.tensor = _DlTensor(
            self.memory,
            (self.device_type, 0),
            len(shape),
            _DL_CODES[kind],
            8 * self.item,
            self.lanes,
            pointers[0],
            pointers[1],
            self.item * self.host.storage_offset(),
        )
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), self.capsule_name, None)
