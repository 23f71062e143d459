"""Use caches on the stand-in for a GPU: a program, because a process loads one CUDA library.

LMDEPLOY_CUDA_LIBRARY=SHIM python gpu_program.py SHIM
"""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any

import pytest
import torch
from device_arrays import CudaInterfaceArray, DlpackArray, Gpu, GpuArray

from lmdeploy.kv_cache import CacheConfig, KVCache, arrays, gpu_arrays

STREAM = 0  # the default stream of the stand-in
SIZES = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "max_seq_len": 200}
# Relative to the largest output: the GPU rounds queries and softmax weights to 16 bits.
TOLERANCE = 4e-3


def make_cupy(gpu: Gpu, base: type[GpuArray]) -> tuple[types.ModuleType, list[Any]]:
    """Return a module like CuPy whose arrays have a protocol, and the results that it made."""
    made: list[Any] = []

    class NdArray(base):  # type: ignore[valid-type, misc]
        device = contextlib.nullcontext()

        @property
        def shape(self) -> tuple[int, ...]:
            return tuple(self.host.shape)

        @property
        def dtype(self) -> torch.dtype:
            return self.host.dtype

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        made.append(NdArray(gpu, torch.full(shape, torch.nan, dtype=dtype)))
        return made[-1]

    cupy = types.ModuleType("cupy")
    stream = types.SimpleNamespace(ptr=STREAM)
    cupy.__dict__.update(
        ndarray=NdArray, empty=empty, cuda=types.SimpleNamespace(get_current_stream=lambda: stream)
    )
    return cupy, made


def rows(generator: torch.Generator, heads: int, *, tokens: int) -> torch.Tensor:
    """Return random heads in FP16, [2, heads, tokens, 64], stored with tokens before heads."""
    stored = torch.randn(2, tokens, heads, 64, generator=generator).half()
    return stored.transpose(1, 2)


def check_attention(gpu: Gpu, base: type[GpuArray], *, quantize: str, window: int) -> None:
    """Attend in a prompt and in steps, and compare with a cache on the CPU."""
    cupy, made = make_cupy(gpu, base)
    sys.modules["cupy"] = cupy
    options = {**SIZES, "quantize": quantize, "window": window}
    on_gpu = KVCache(CacheConfig(**options, device="cuda"), 2)
    on_cpu = KVCache(CacheConfig(**options, exact=True), 2)
    assert on_gpu.num_bytes > 0 and on_gpu.bytes_per_token == on_cpu.bytes_per_token
    generator = torch.Generator().manual_seed(1)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    gpu_sinks = cupy.ndarray(gpu, sinks)
    for tokens in (70, 1, 3):
        for layer in range(2):
            heads = (("q", 4), ("k_new", 2), ("v_new", 2))
            given = {name: rows(generator, count, tokens=tokens) for name, count in heads}
            wanted = on_cpu.attend(layer, **given, scale=0.1, sinks=sinks).float()
            moved = {name: cupy.ndarray(gpu, array) for name, array in given.items()}
            out = on_gpu.attend(layer, **moved, scale=0.1, sinks=gpu_sinks)
            assert out is made[-1]
            error = (out.cpu().float() - wanted).abs().max() / wanted.abs().max()
            assert error < TOLERANCE, (tokens, layer, error)
        on_gpu.advance(tokens)
        on_cpu.advance(tokens)
    assert on_gpu.seq_len == 74
    on_gpu.truncate(10)
    on_gpu.reset()
    assert on_gpu.seq_len == 0 and on_gpu.num_nonfinite == 0
    del sys.modules["cupy"]


def check_refusals(gpu: Gpu) -> None:
    cupy, _ = make_cupy(gpu, CudaInterfaceArray)
    sys.modules["cupy"] = cupy
    cache = KVCache(CacheConfig(**SIZES, device="cuda:0"), 2)
    generator = torch.Generator()
    q, k = (cupy.ndarray(gpu, rows(generator, heads, tokens=3)) for heads in (4, 2))
    on_host = rows(generator, 2, tokens=3)
    with pytest.raises(ValueError, match=r"q is of type Tensor. It must be a tensor of"):
        cache.attend(0, q=on_host, k_new=k, v_new=k)
    with pytest.raises(ValueError, match=r"v_new has dtype F16. It must be float32, float16"):
        cache.attend(0, q=q, k_new=k, v_new=on_host)
    with pytest.raises(ValueError, match="has shape"):
        cache.attend(0, q=k, k_new=k, v_new=k)
    short = cupy.ndarray(gpu, rows(generator, 2, tokens=2))
    with pytest.raises(ValueError, match=r"v_new has 2 tokens. It must have 3"):
        cache.attend(0, q=q, k_new=k, v_new=short)
    with pytest.raises(ValueError, match="sinks has shape"):
        cache.attend(0, q=q, k_new=k, v_new=k, sinks=cupy.ndarray(gpu, torch.zeros(3)))
    with pytest.raises(ValueError, match=r"num_tokens is 1. Layer 0 has 0 new tokens"):
        cache.advance(1)  # nothing was stored
    calls = {
        "update": lambda: cache.update(0, k_new=k, v_new=k),
        "keys": lambda: cache.keys(0),
        "values": lambda: cache.values(0),
        "codes": lambda: cache.codes(0, "k"),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} needs a cache on the CPU"):
            call()
    for options, message in (
        ({"exact": True}, "exact"),
        ({"dtype": "float32"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheConfig(**{**SIZES, "device": "cuda", **options})
    with pytest.raises(ValueError, match="GPU 7 does not exist"):
        KVCache(CacheConfig(**SIZES, device="cuda:7"))


class CudaTensor(torch.Tensor):
    """A tensor of torch whose memory is the stand-in's."""

    at: GpuArray

    @property
    def device(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(type="cuda", index=0)

    def data_ptr(self) -> int:
        return self.at.memory

    def new_empty(self, shape: Any, **_: Any) -> Any:
        return cuda_tensor(self.at.gpu, torch.full(shape, torch.nan, dtype=self.dtype))


def cuda_tensor(gpu: Gpu, values: torch.Tensor) -> CudaTensor:
    tensor = values.as_subclass(CudaTensor)
    tensor.at = GpuArray(gpu, values)
    return tensor


def check_torch(gpu: Gpu) -> None:
    """Attend to tensors of torch in BF16."""
    torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=STREAM)  # type: ignore[assignment, misc, return-value]
    on_gpu = KVCache(CacheConfig(**SIZES, dtype="bfloat16", quantize="nvfp4", device="cuda"), 2)
    on_cpu = KVCache(CacheConfig(**SIZES, dtype="bfloat16", quantize="nvfp4", exact=True), 2)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (rows(generator, heads, tokens=5).bfloat16() for heads in (4, 2, 2))
    wanted = on_cpu.attend(0, q=q, k_new=k, v_new=v).float()
    moved = [cuda_tensor(gpu, x) for x in (q, k, v)]
    out = on_gpu.attend(0, q=moved[0], k_new=moved[1], v_new=moved[2])
    got = out.at.cpu().float()
    assert (got - wanted).abs().max() / wanted.abs().max() < 2 * TOLERANCE  # BF16 has 8 bits
    with pytest.raises(ValueError, match="q requires a gradient"):
        gpu_arrays.describe("q", cuda_tensor(gpu, q).requires_grad_(), stream=STREAM)
    with pytest.raises(ValueError, match="is not in host memory"):
        arrays.read_array("q", moved[0])


def main(shim: str) -> None:
    gpu = Gpu(shim)
    check_attention(gpu, CudaInterfaceArray, quantize="none", window=0)
    check_attention(gpu, DlpackArray, quantize="nvfp4", window=0)
    check_attention(gpu, CudaInterfaceArray, quantize="int8", window=40)
    check_refusals(gpu)
    check_torch(gpu)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
