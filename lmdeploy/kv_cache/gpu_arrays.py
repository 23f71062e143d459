"""Read arrays of torch and CuPy on a GPU, and make results beside them. Nothing is copied.

Work is done in the order of the library's current stream, so that it looks like an operation of
that library.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.kv_cache.arrays import FLOATS
from lmdeploy.kvx import abi
from lmdeploy.kvx.arrays import DTYPES, ITEM_BYTES, read_array

if TYPE_CHECKING:
    from lmdeploy import _turbomind

_NAMES = {DTYPES[name]: name for name in FLOATS}


def current_stream(name: str, value: Any) -> int:
    """Return the handle of the stream that the array's library now uses on the array's GPU.

    Raise OptionError for anything but an array of torch or CuPy on a GPU.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type == "cuda":
        return int(torch.cuda.current_stream(value.device).cuda_stream)
    if cupy is not None and isinstance(value, cupy.ndarray):
        with value.device:
            return int(cupy.cuda.get_current_stream().ptr)
    kind = type(value).__name__
    raise OptionError(name, f"is of type {kind}. It must be a tensor of torch or CuPy on the GPU.")


def describe(name: str, value: Any, *, stream: int) -> _turbomind.HeadArray:
    """Return where an array of floats with four dimensions lies on a GPU."""
    from lmdeploy import _turbomind

    if getattr(value, "requires_grad", False):
        raise OptionError(name, f"requires a gradient. Use torch.no_grad() or {name}.detach().")
    found = read_array(name, value, stream=stream)
    if found.dtype not in _NAMES or found.memory == abi.Memory.HOST:
        wanted = "float32, float16 or bfloat16 in the memory of the GPU"
        raise OptionError(name, f"has dtype {found.dtype.name}. It must be {wanted}.")
    item = ITEM_BYTES[found.dtype]
    if found.data % item:
        raise OptionError(name, f"lies at {found.data:#x}, which is no address of its elements.")
    strides = tuple(item * step for step in found.stride)
    return _turbomind.HeadArray(
        found.data, _NAMES[found.dtype], shape=list(found.shape), strides=strides
    )


def sinks_address(value: Any, *, num_heads: int, stream: int) -> int:
    """Return the address of contiguous float32 logits [num_heads]."""
    found = read_array("sinks", value, stream=stream)
    is_dense = (num_heads == 1 or found.stride == (1,)) and found.data % 4 == 0
    if found.shape != (num_heads,) or found.dtype != abi.Dtype.F32 or not is_dense:
        wanted = f"contiguous float32 logits ({num_heads},)"
        raise OptionError("sinks", f"has shape {found.shape}. It must be {wanted}.")
    return found.data


def empty_like(value: Any) -> Any:
    """Return a contiguous array of the same library, GPU, shape and dtype."""
    if hasattr(value, "new_empty"):
        return value.new_empty(tuple(value.shape))
    with value.device:
        return sys.modules["cupy"].empty(value.shape, value.dtype)
