"""Decode attention of FlashInfer on a GPU, on the cells that device_bench measured.

FlashInfer (`pip install flashinfer-python==0.7.0.post1`) runs over pages in BF16, fp8 (E4M3) and
NVFP4. The timing is that of device_bench: a CUDA graph of launches that cycle through at least two
caches of 512 MB together, BF16 queries and results, median of five rounds. FlashInfer compiles its
kernels when they are first used; one run on a tiny shape before the clock starts does that.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

PAGE_TOKENS = 64
WORKSPACE_BYTES = 256 << 20
ROTATE_BYTES = 512 << 20
LEAST_LAUNCHES, MOST_LAUNCHES, LEAST_LAYERS = 24, 256, 2
ROUNDS, ROUND_SECONDS = 5, 0.02
VALUE_BYTES = {"none": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}

Shape = dict[str, int]
Launch = Callable[[int], object]


def shape_of(cell: str) -> tuple[str, Shape]:
    """Return the KV format and the sizes of a cell such as "op=decode mode=fp8 batch=8"."""
    words = dict(word.split("=") for word in cell.split())
    words.pop("op")
    defaults = {"window": 0, "sinks": 0}
    return words.pop("mode"), defaults | {key: int(value) for key, value in words.items()}


def make_flashinfer(mode: str, shape: Shape, *, layers: int) -> Launch:
    """Return a launch of batch decode over pages, on tensor cores."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    heads, dim, batch = shape["kv_heads"], shape["head_dim"], shape["batch"]
    pages = -(-shape["context"] // PAGE_TOKENS)
    size = (layers, batch * pages, 2, heads, PAGE_TOKENS)
    scales: Any = None
    if mode == "nvfp4":
        cache = torch.randint(0, 256, (*size, dim // 2), dtype=torch.uint8, device="cuda")
        scales = torch.ones((*size, dim // 16), device="cuda").to(torch.float8_e4m3fn)
    else:
        cache = torch.empty((*size, dim), dtype=torch.bfloat16, device="cuda").normal_()
        cache = cache.to(torch.float8_e4m3fn) if mode == "fp8" else cache
    q = torch.randn((batch, heads * shape["group"], dim), device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=True, backend="fa2"
    )
    wrapper.plan(
        torch.arange(0, batch + 1, dtype=torch.int32, device="cuda") * pages,
        torch.randperm(batch * pages, device="cuda").to(torch.int32),
        torch.full((batch,), (shape["context"] - 1) % PAGE_TOKENS + 1, dtype=torch.int32).cuda(),
        heads * shape["group"],
        heads,
        dim,
        PAGE_TOKENS,
        window_left=shape["window"] - 1,
        q_data_type=torch.bfloat16,
        kv_data_type=cache.dtype,
    )

    def launch(layer: int) -> None:
        more = {} if scales is None else {"kv_cache_sf": scales[layer]}
        wrapper.run(q, cache[layer], out=out, **more)

    return launch


def time_launches(launch: Launch, *, layers: int, launches: int) -> list[float]:
    """Return the microseconds of a launch in every round, sorted."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(layers):
            launch(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i % layers)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(times: int) -> float:
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    replay(2)
    times = max(1, int(ROUND_SECONDS / max(replay(1), 1e-6)))
    return sorted(replay(times) * 1e6 / (times * launches) for _ in range(ROUNDS))


def measure(mode: str, *, shape: Shape, rotate_bytes: int) -> dict[str, Any]:
    """Measure one cell and return its figures."""
    import torch

    visible = min(shape["context"], shape["window"] or shape["context"])
    values = shape["batch"] * visible * 2 * shape["kv_heads"] * shape["head_dim"]
    kv_bytes = int(values * VALUE_BYTES[mode])
    wanted = -(-rotate_bytes // kv_bytes)
    launches = min(max(wanted, LEAST_LAUNCHES), MOST_LAUNCHES)
    layers = min(max(wanted, LEAST_LAYERS), launches)
    try:
        launch = make_flashinfer(mode, shape, layers=layers)
        times = time_launches(launch, layers=layers, launches=launches)
    finally:
        torch.cuda.empty_cache()
    figures = {"us": statistics.median(times), "us_low": times[0], "us_high": times[-1]}
    rounded = {key: float(f"{value:.6g}") for key, value in figures.items()}
    return {**rounded, "launches": ROUNDS * launches, "layers": layers, "kv_bytes": kv_bytes}


def measure_all(
    cells: Sequence[str], *, save: Callable[[dict[str, Any]], None], budget_s: float
) -> list[str]:
    """Measure every cell with FlashInfer and return what failed.

    Raise RuntimeError if torch finds no GPU.
    """
    try:
        import torch

        by = f"flashinfer-python {importlib.metadata.version('flashinfer-python')}"
    except ImportError as error:  # PackageNotFoundError is one
        print(f"skipped: {error}")
        return []
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    failed: dict[str, str] = {}
    end: float | None = None
    for cell in cells:
        mode, shape = shape_of(cell)
        if mode not in VALUE_BYTES or shape["sinks"] or mode in failed:
            continue
        if end is not None and time.monotonic() >= end:
            print(f"{by}: the time is over")
            break
        try:
            measure(mode, shape=shape | {"batch": 1, "context": PAGE_TOKENS}, rotate_bytes=1)
            end = end or time.monotonic() + budget_s
            save({"by": by, "cell": cell, **measure(mode, shape=shape, rotate_bytes=ROTATE_BYTES)})
        except torch.cuda.OutOfMemoryError:
            print(f"skipped, the GPU has too little memory: {by} {cell}")
        except Exception as error:  # a library may fail in any way; the next cell still runs
            failed[mode] = f"{by} {cell}: {str(error).strip()[-300:]}"
    return list(failed.values())
