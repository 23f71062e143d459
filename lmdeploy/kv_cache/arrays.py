"""Read arrays of NumPy, torch and MLX as NumPy arrays, and return results in the same kind.

No library is imported here except NumPy: a caller that passes an array has imported its library.
bfloat16 travels as its bits, in uint16.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import OptionError

Array = npt.NDArray[Any]

FLOATS = ("float32", "float16", "bfloat16")
_STORAGE = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class ArrayKind(NamedTuple):
    """The library and the dtype of an array."""

    library: str  # numpy, torch, mlx
    dtype: str  # one of FLOATS

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Return an uninitialized NumPy array that `wrap` accepts."""
        return np.empty(shape, _STORAGE[self.dtype])

    def wrap(self, array: Array) -> Any:
        """Return a NumPy array of this dtype (bfloat16: its bits) as an array of this kind."""
        if self.library == "numpy":
            return array
        if self.library == "mlx":
            mx = sys.modules["mlx.core"]
            made = mx.array(array)
            return made.view(mx.bfloat16) if self.dtype == "bfloat16" else made
        torch = sys.modules["torch"]
        if self.dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def convert(self, array: npt.NDArray[np.float32]) -> Any:
        """Return an array of this kind with the values of a NumPy array, rounded to this dtype."""
        if self.dtype == "float32":
            return self.wrap(array)
        if self.dtype == "float16":
            with np.errstate(over="ignore"):
                return self.wrap(array.astype(np.float16))
        library = sys.modules["torch" if self.library == "torch" else "mlx.core"]
        made = ArrayKind(self.library, "float32").wrap(array)
        return (
            made.to(library.bfloat16) if self.library == "torch" else made.astype(library.bfloat16)
        )


NUMPY_FLOAT32 = ArrayKind("numpy", "float32")


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of NumPy, torch or MLX, or of a name; "" for anything else."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, np.dtype):
        return dtype.name
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        return np.dtype(dtype).name
    torch, mx = sys.modules.get("torch"), sys.modules.get("mlx.core")
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    if mx is not None and isinstance(dtype, mx.Dtype):
        return str(dtype).removeprefix("mlx.core.")
    return ""


def read_array(name: str, value: Any) -> tuple[Array, ArrayKind]:
    """Return the values of an array, as a view if possible, and its kind.

    Raise OptionError for anything but an array of floats in host memory.
    """
    if isinstance(value, np.ndarray):
        return _read_numpy(name, value)
    torch, mx = sys.modules.get("torch"), sys.modules.get("mlx.core")
    if torch is not None and isinstance(value, torch.Tensor):
        return _read_torch(name, value)
    if mx is not None and isinstance(value, mx.array):
        return _read_mlx(name, value)
    if hasattr(value, "__cuda_array_interface__"):
        raise _gpu_error(name)
    wanted = "an array of NumPy, torch or MLX"
    raise OptionError(name, f"is of type {type(value).__name__}. It must be {wanted}.")


def _read_numpy(name: str, value: Array) -> tuple[Array, ArrayKind]:
    if isinstance(value, np.ma.MaskedArray):
        raise OptionError(name, "is a masked array. Pass its values without the mask.")
    dtype = value.dtype
    if dtype.kind != "f" or dtype.itemsize not in (2, 4):
        raise _dtype_error(name, dtype.name, advice=f"{name}.astype(numpy.float32)")
    array = np.asarray(value, dtype.newbyteorder("="))
    return array, ArrayKind("numpy", "float32" if dtype.itemsize == 4 else "float16")


def _read_torch(name: str, value: Any) -> tuple[Array, ArrayKind]:
    torch = sys.modules["torch"]
    if value.device.type not in ("cpu", "meta"):
        raise _gpu_error(name)
    if value.requires_grad:
        raise OptionError(name, f"requires a gradient. Use torch.no_grad() or {name}.detach().")
    dtype = dtype_name(value.dtype)
    if dtype not in FLOATS:
        raise _dtype_error(name, dtype, advice=f"{name}.float()")
    try:
        bits = value.view(torch.int16) if dtype == "bfloat16" else value
        array = np.asarray(bits.numpy())
    except (TypeError, RuntimeError, NotImplementedError) as error:
        reason = str(error).split("\n", 1)[0][:160].rstrip(".")
        raise OptionError(name, f"is a tensor without plain memory: {reason}.") from error
    return array.view(np.uint16) if dtype == "bfloat16" else array, ArrayKind("torch", dtype)


def _read_mlx(name: str, value: Any) -> tuple[Array, ArrayKind]:
    mx = sys.modules["mlx.core"]
    dtype = dtype_name(value.dtype)
    if dtype not in FLOATS:
        raise _dtype_error(name, dtype, advice=f"{name}.astype(mlx.core.float32)")
    bits = value.view(mx.uint16) if dtype == "bfloat16" else value
    return np.asarray(bits), ArrayKind("mlx", dtype)


def _dtype_error(name: str, dtype: str, *, advice: str) -> OptionError:
    wanted = "float32, float16 or, in torch and MLX, bfloat16"
    return OptionError(name, f"has dtype {dtype}. It must be {wanted}: pass {advice}.")


def _gpu_error(name: str) -> OptionError:
    advice = f'Pass {name}.cpu(), or make the cache with device="cuda"'
    return OptionError(name, f"is not in host memory. {advice}.")
