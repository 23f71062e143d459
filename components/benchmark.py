"""Measure the components: `KVCache` beside torch and the engine, libkvx beside memcpy.

    ninja -C build/release device_bench attention_alone_bench
    python components/benchmark.py --build build/release

Each row compares two things that run in turns. The figure is the median ratio of the pairs, with
the smallest and the largest one, beside its target. Rows of `KVCache` use two threads and have 32
query heads, 8 KV heads of 128 and 8,192 tokens; those of libkvx use one thread and buffers beyond
the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig, _turbomind
from lmdeploy.kv_cache import CacheConfig, KVCache
from lmdeploy.kvx import abi, adapters, check, library

HEADS, KV_HEADS, DIM, CONTEXT = 32, 8, 128, 8192
BLOCK, BLOCKS = 64, 512
MIN_SECONDS = 0.05  # of a timing
Seconds = Callable[[], float]  # returns the time of one call


class Row(NamedTuple):
    """`ratio` is the time of `first` by the time of `second`, or its inverse for speeds."""

    name: str
    target: str
    first: Seconds
    second: Seconds
    is_speed: bool = False


def timer(call: Callable[[], object]) -> Seconds:
    """Return a function that repeats a call for MIN_SECONDS and returns its mean time."""

    def seconds() -> float:
        start, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - start) < MIN_SECONDS or not count:
            call()
            count += 1
        return passed / count

    call()
    return seconds


def rows_of(tokens: int, heads: int, *, seed: int = 0) -> Any:
    """Return random K, V or Q [1, heads, tokens, DIM]."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, heads, tokens, DIM)).astype(np.float32)


def filled(quantize: str, *, context: int = CONTEXT, max_seq_len: int = 2 * CONTEXT) -> KVCache:
    """Return a cache of one layer with `context` tokens."""
    config = CacheConfig(1, HEADS, KV_HEADS, DIM, max_seq_len, "float32", quantize, num_threads=2)
    cache = KVCache(config)
    for _ in range(context // 64):
        cache.update(0, k_new=rows_of(64, KV_HEADS), v_new=rows_of(64, KV_HEADS, seed=1))
        cache.advance(64)
    return cache


def attend(cache: KVCache, tokens: int = 1) -> Callable[[], object]:
    """Return a call that attends to new tokens and does not accept them."""
    q, k, v = rows_of(tokens, HEADS), rows_of(tokens, KV_HEADS), rows_of(tokens, KV_HEADS, seed=1)
    return lambda: cache.attend(0, q=q, k_new=k, v_new=v)


class OpBench:
    """The engine's ops alone, measured by the programs in benchmarks/cpp."""

    def __init__(self, build: Path) -> None:
        self._build = build
        command = [str(build / "device_bench"), "device=cpu", "threads=2", "rotate_mb=1"]
        command += ["round_ms=20", "launches=1"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process: Any = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        self._process.stdout.readline()

    def cell(self, cell: str) -> float:
        """Return the seconds of a cell of device_bench."""
        self._process.stdin.write(f"{cell} kv_heads={KV_HEADS} head_dim={DIM}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return float(answer["us"]) * 1e-6

    def attention(self, context: int) -> float:
        """Return the seconds of decode attention over an NVFP4 cache."""
        command = [str(self._build / "attention_alone_bench"), f"context={context}", "threads=2"]
        command += ["batch=1", "rounds=1", f"kv_heads={KV_HEADS}", f"head_dim={DIM}"]
        found = subprocess.run(
            [*command, f"group={HEADS // KV_HEADS}"], capture_output=True, check=True
        )
        return float(json.loads(found.stdout)["seconds"][0])


def torch_attention(cache: KVCache, dtype: str) -> Seconds:
    """Return the time of torch's attention over a dense copy of the cache."""
    import torch

    torch.set_num_threads(2)
    k, v = (
        torch.from_numpy(np.array(x)).to(getattr(torch, dtype))
        for x in (cache.keys(0), cache.values(0))
    )
    q = torch.from_numpy(rows_of(1, HEADS)).to(k.dtype)
    function = torch.nn.functional.scaled_dot_product_attention
    return timer(lambda: function(q, k, v, enable_gqa=True))


def cache_rows(build: Path) -> Iterator[Row]:
    """Yield the rows of `KVCache`."""
    ops = OpBench(build)
    cache = filled("nvfp4")
    decode = timer(attend(cache))
    yield Row(
        "attend 1 / decode attention alone", "<= 1.05", decode, lambda: ops.attention(CONTEXT)
    )
    for dtype, target in (("float32", ">= 2"), ("bfloat16", ">= 1.2"), ("float16", ">= 1.2")):
        yield Row(
            f"attend 1 against torch {dtype}", target, decode, torch_attention(cache, dtype), True
        )
    prompt = timer(attend(filled("nvfp4", context=0), 2048))
    cell = f"mode=nvfp4 batch=1 context=2048 new_tokens=2048 group={HEADS // KV_HEADS} search=1"
    yield Row(
        "attend 2048 / ProcessKV and prefill attention",
        "<= 1.1",
        prompt,
        lambda: ops.cell(f"op=write {cell}") + ops.cell(f"op=prefill {cell}"),
    )
    k = rows_of(1, KV_HEADS)
    caches = [filled("none", context=context) for context in (CONTEXT, 128)]
    long, short = (timer(lambda c=c: c.update(0, k_new=k, v_new=k)) for c in caches)  # type: ignore[misc]
    yield Row("update 1 at 8192 / at 128, 16 bit", "<= 1.3", long, short)
    call = timer(attend(filled("nvfp4", context=64)))
    yield Row("attend 1 at 64 / decode attention alone", "<= 3", call, lambda: ops.attention(64))


def copy_of(num_bytes: int) -> Callable[[], object]:
    """Return a call of memcpy."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return lambda: ctypes.memmove(target.ctypes.data, source.ctypes.data, num_bytes)


def kvx_cache(layout: str) -> tuple[abi.CacheDesc, Any]:
    """Return a BF16 cache with a layout, and its memory."""
    shapes = {
        "NHD": (BLOCKS, BLOCK, KV_HEADS, DIM),
        "HND": (BLOCKS, KV_HEADS, BLOCK, DIM),
        "HND_PACKED": (BLOCKS, KV_HEADS, DIM // 8, BLOCK, 8),
    }
    memory = [np.zeros(shapes[layout], np.uint16) for _ in range(2)]
    kind = abi.Layout[f"BLOCK_{layout}"]
    k, v = (adapters.tensor(x, kind, dtype=abi.Dtype.BF16) for x in memory)
    cache = abi.CacheDesc(BLOCKS, BLOCK, KV_HEADS, DIM, k, v)
    cache.pool.size = 0
    return cache, memory


def kvx_rows() -> Iterator[Row]:
    """Yield the rows of libkvx."""
    tokens = BLOCK * BLOCKS
    lib = library()
    blocks = np.random.default_rng(0).permutation(BLOCKS)
    slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    tables = adapters.tgi_tables(blocks[None], np.array([tokens]))
    bf16 = [np.ones((tokens, KV_HEADS, DIM), np.uint16) for _ in range(2)]
    f32 = [np.ones((tokens, KV_HEADS, DIM), np.float32) for _ in range(2)]
    io = adapters.rows(*bf16, dtype=abi.Dtype.BF16)
    same = timer(copy_of(2 * bf16[0].nbytes))
    for layout, target in (("NHD", ">= 0.8"), ("HND", ">= 0.7"), ("HND_PACKED", ">= 0.3")):
        cache, memory = kvx_cache(layout)
        write = adapters.write(io, adapters.vllm_slots(slots))
        gather = adapters.gather(io, tables)
        for name, desc in (("write", write), ("gather", gather)):
            call = getattr(lib, f"kvx_{name}_kv")
            run = timer(lambda c=cache, d=desc, call=call, _=memory: check(call(c, d, None)))  # type: ignore[misc]
            yield Row(f"kvx {name} {layout} against memcpy", target, run, same, True)
    cache, _memory = kvx_cache("NHD")
    write = adapters.write(adapters.rows(*f32), adapters.vllm_slots(slots))
    convert = timer(lambda: check(lib.kvx_write_kv(cache, write, None)))
    moved = timer(copy_of(f32[0].nbytes + bf16[0].nbytes))  # reads and writes as many bytes
    yield Row("kvx write F32 to BF16 against memcpy", ">= 0.5", convert, moved, True)
    few = slots[:1]
    one = adapters.write(
        adapters.rows(bf16[0][:1], bf16[1][:1], dtype=abi.Dtype.BF16), adapters.vllm_slots(few)
    )
    token = timer(lambda: check(lib.kvx_write_kv(cache, one, None)))
    empty = timer(lambda: check(lib.kvx_get_version(None) and 0))
    small = timer(copy_of(4 * KV_HEADS * DIM))
    yield Row(
        "kvx write of 1 token / memcpy, both without ctypes",
        "<= 20",
        lambda: max(token() - empty(), 1e-9),
        lambda: max(small() - timer(copy_of(0))(), 1e-8),
    )


def quantized_rows() -> Iterator[Row]:
    """Yield the rows of quantized layers beside the codecs alone, on one thread."""
    tokens = 64 * 64
    layer = abi.TmLayer(abi.TmMode.NVFP4, abi.TmMode.NVFP4, abi.Dtype.BF16, abi.Memory.HOST)
    layer.block_size, layer.num_kv_heads, layer.head_dim, layer.num_blocks = (
        BLOCK,
        KV_HEADS,
        DIM,
        64,
    )
    check(library().kvx_tm_describe(layer))
    data, scales = (
        np.zeros(layer.num_blocks * n, np.uint8)
        for n in (layer.block_bytes, layer.scale_block_bytes)
    )
    layer.data, layer.scales = data.ctypes.data, scales.ctypes.data
    kv = np.random.default_rng(0).standard_normal((2, tokens, KV_HEADS, DIM), np.float32)
    io = adapters.rows(*kv)
    slots = np.arange(tokens)
    write = adapters.write(io, adapters.vllm_slots(slots))
    tables = adapters.tgi_tables(np.arange(64)[None], np.array([tokens]))
    gather = adapters.gather(io, tables)
    flat = kv.reshape(-1, DIM)
    payload, meta = _turbomind.encode_rows("nvfp4", flat, "bfloat16")
    yield Row(
        "kvx quantized write against EncodeRows",
        ">= 0.9",
        timer(lambda: check(library().kvx_tm_write_kv(layer, write, None))),
        timer(lambda: _turbomind.encode_rows("nvfp4", flat, "bfloat16")),
        True,
    )
    yield Row(
        "kvx quantized gather against DecodeRows",
        ">= 0.9",
        timer(lambda: check(library().kvx_tm_gather_kv(layer, gather, None))),
        timer(lambda: _turbomind.decode_rows("nvfp4", payload, meta, DIM, "bfloat16")),
        True,
    )


async def read_prompt(pipe: Pipeline, prompt: list[int]) -> None:
    """Put a prompt into the prefix cache."""
    async for _ in pipe.engine.generate(prompt, GenerationConfig(max_new_tokens=1)):
        pass


def longest_step(pipe: Pipeline, prompt: list[int], *, is_exporting: bool) -> float:
    """Return the longest time between two tokens of a stream."""
    engine = pipe.engine.loaded.cpp_engine
    has_ended = threading.Event()

    def export() -> None:
        while is_exporting and not has_ended.is_set():
            engine.export_prefix(prompt, 0, bytes(16))

    async def stream() -> float:
        times = []
        config = GenerationConfig(max_new_tokens=150, ignore_eos=True)
        async for _ in pipe.engine.generate(prompt[:2000], config):
            times.append(time.perf_counter())
        return float(np.diff(times).max())

    thread = threading.Thread(target=export)
    thread.start()
    try:
        return asyncio.run(stream())
    finally:
        has_ended.set()
        thread.join()


def transfer_rows(model: str) -> Iterator[Row]:
    """Yield the rows of exported and imported prefixes of a model."""
    config = TurbomindEngineConfig(
        quant_policy="nvfp4", session_len=8192, num_threads=1, speculative_algorithm="none"
    )
    with Pipeline(model, config) as pipe:
        prompt = [int(x) for x in np.random.default_rng(0).integers(100, 40000, 6000)]
        asyncio.run(read_prompt(pipe, prompt))
        engine = pipe.engine.loaded.cpp_engine
        blocks = engine.export_prefix(prompt, 0, bytes(16))
        size = sum(len(pool) for block in blocks for pool in block)
        views = [memoryview(pool) for block in blocks for pool in block]
        yield Row(
            "export against memcpy into new memory",
            ">= 0.5",
            timer(lambda: engine.export_prefix(prompt, 0, bytes(16))),
            timer(lambda: [bytes(view) for view in views]),
            True,
        )
        copy = timer(copy_of(size))

        def enter() -> float:
            engine.clear_prefix_cache()
            start = time.perf_counter()
            engine.import_prefix(prompt, 0, blocks, bytes(16))
            return time.perf_counter() - start

        yield Row("import against memcpy", ">= 0.5", enter, copy, True)
        asyncio.run(read_prompt(pipe, prompt))
        yield Row(
            "longest step with exports / without",
            "<= 1.2",
            lambda: longest_step(pipe, prompt, is_exporting=True),
            lambda: longest_step(pipe, prompt, is_exporting=False),
        )


def measure(row: Row, rounds: int) -> None:
    """Print the median ratio of the pairs of a row."""
    ratios = []
    for i in range(rounds):
        order = (row.first, row.second) if i % 2 == 0 else (row.second, row.first)
        times = [call() for call in order]
        first, second = times if i % 2 == 0 else times[::-1]
        ratios.append(second / first if row.is_speed else first / second)
    middle = statistics.median(ratios)
    sign, limit = row.target.split()
    met = middle >= float(limit) if sign == ">=" else middle <= float(limit)
    spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
    print(
        f"{row.name:55} {middle:7.2f} {spread:20} {row.target:8} {'' if met else 'MISSED'}",
        flush=True,
    )


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, required=True, help="folder with the C++ programs")
    parser.add_argument("--model", help="for exported prefixes; without it they are skipped")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for rows in (cache_rows(args.build), kvx_rows(), quantized_rows()):
        for row in rows:
            measure(row, args.rounds)
    if args.model:
        for row in transfer_rows(args.model):
            measure(row, args.rounds)


if __name__ == "__main__":
    main()
