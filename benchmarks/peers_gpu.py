"""Decode attention of other libraries on the GPU, on the shapes that ours was measured on.

    python benchmarks/peers_gpu.py --json benchmarks/results/gpu_nvidia_h200.json

torch: scaled_dot_product_attention over a dense cache in BF16. FlashInfer (`pip install
flashinfer-python==0.7.0.post1`): paged KV in BF16, fp8 (E4M3) and NVFP4. What is not installed is
said in a line. Rows go beside ours in the same file, under the same keys, as they are measured.
--budget-s is split evenly among the peers; FlashInfer compiles its kernels with nvcc when first
used, which takes minutes and is none of it: they are run once, on a tiny shape, before.

Timed as ours: a CUDA graph of launches that take turns with caches of --rotate-mb together, at
least two, queries and results in BF16; median of five rounds. Exit status: 0, 1 when a library that
is there failed, 2 for wrong arguments, 3 when there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_results import (
    OURS,
    Row,
    begin_of_run,
    is_measured,
    merge_into,
    read_document,
    shape_key,
)

PAGE_TOKENS = 64
WORKSPACE_BYTES = 256 << 20
LEAST_LAUNCHES, MOST_LAUNCHES, LEAST_LAYERS = 24, 256, 2
ROUNDS, ROUND_SECONDS = 5, 0.02
NO_GPU = 3
PEERS = ("torch", "flashinfer")  # in this order: the one that compiles nothing first
# By mode: bytes of a value of the cache.
VALUE_BYTES = {"none": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}

Shape = dict[str, Any]


class Unsupported(Exception):
    """The peer does not have this mode or shape."""


class Peer(ABC):
    """A library. `make` allocates the caches of a cell and gives one launch over layer i."""

    modes: tuple[str, ...]

    @property
    @abstractmethod
    def name(self) -> str:
        """With version and setting, as it goes to the file."""

    @abstractmethod
    def make(self, mode: str, shape: Shape, *, layers: int) -> Callable[[int], None]:
        """Raises Unsupported."""


class TorchSdpa(Peer):
    """torch's fused attention over a dense cache: no pages."""

    modes = ("none",)

    @property
    def name(self) -> str:
        """The backend is torch's choice."""
        return f"torch {importlib.metadata.version('torch')} sdpa"

    def make(self, mode: str, shape: Shape, *, layers: int) -> Callable[[int], None]:
        """[batch, heads, tokens, head_dim]."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        if shape.get("window") or shape.get("sinks"):
            raise Unsupported("windows and sinks")
        heads, dim = shape["kv_heads"], shape["head_dim"]
        size = (layers, 2, shape["batch"], heads, shape["context"], dim)
        cache = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(
            (shape["batch"], heads * shape["group"], 1, dim), device="cuda", dtype=torch.bfloat16
        )

        def launch(layer: int) -> None:
            scaled_dot_product_attention(q, cache[layer, 0], cache[layer, 1], enable_gqa=True)

        return launch


class FlashInfer(Peer):
    """Batch decode over pages, on tensor cores: the faster of its two for groups of heads."""

    modes = ("none", "fp8", "nvfp4")

    def __init__(self, backend: str) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        """With the backend."""
        version = importlib.metadata.version("flashinfer-python")
        return f"FlashInfer {version} {self._backend}"

    def make(self, mode: str, shape: Shape, *, layers: int) -> Callable[[int], None]:
        """[pages, 2, heads, tokens, head_dim]."""
        import torch
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        if shape.get("sinks"):
            raise Unsupported("sinks")
        heads, dim, batch = shape["kv_heads"], shape["head_dim"], shape["batch"]
        pages = -(-shape["context"] // PAGE_TOKENS)
        caches, scales = self._caches(mode, shape, layers=layers)
        q = torch.randn((batch, heads * shape["group"], dim), device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(q)
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
            "HND",
            use_tensor_cores=True,
            backend=self._backend,
        )
        indices = torch.randperm(batch * pages, device="cuda").to(torch.int32)
        last = (shape["context"] - 1) % PAGE_TOKENS + 1
        wrapper.plan(
            torch.arange(0, batch + 1, dtype=torch.int32, device="cuda") * pages,
            indices,
            torch.full((batch,), last, dtype=torch.int32, device="cuda"),
            heads * shape["group"],
            heads,
            dim,
            PAGE_TOKENS,
            window_left=shape.get("window", 0) - 1,
            q_data_type=torch.bfloat16,
            kv_data_type=caches.dtype,
        )

        def launch(layer: int) -> None:
            more = {} if scales is None else {"kv_cache_sf": scales[layer]}
            wrapper.run(q, caches[layer], out=out, **more)

        return launch

    def _caches(self, mode: str, shape: Shape, *, layers: int) -> tuple[Any, Any]:
        """Payload and, for NVFP4, scales."""
        import torch

        pages = shape["batch"] * -(-shape["context"] // PAGE_TOKENS)
        size = (layers, pages, 2, shape["kv_heads"], PAGE_TOKENS)
        dim = shape["head_dim"]
        if mode == "nvfp4":
            payload = torch.randint(0, 256, (*size, dim // 2), dtype=torch.uint8, device="cuda")
            scales = torch.ones((*size, dim // 16), device="cuda").to(torch.float8_e4m3fn)
            return payload, scales
        values = torch.empty((*size, dim), dtype=torch.bfloat16, device="cuda").normal_()
        return (values.to(torch.float8_e4m3fn) if mode == "fp8" else values), None


def kv_bytes(mode: str, shape: Shape) -> int:
    """Of a launch: what a query sees."""
    visible = min(shape["context"], shape.get("window") or shape["context"])
    values = shape["batch"] * visible * 2 * shape["kv_heads"] * shape["head_dim"]
    return int(values * VALUE_BYTES[mode])


def layers_for(mode: str, shape: Shape, *, rotate_bytes: int) -> tuple[int, int]:
    """Caches and launches of a graph."""
    wanted = -(-rotate_bytes // kv_bytes(mode, shape))
    launches = min(max(wanted, LEAST_LAUNCHES), MOST_LAUNCHES)
    return min(max(wanted, LEAST_LAYERS), launches), launches


def time_launches(launch: Callable[[int], None], *, layers: int, launches: int) -> list[float]:
    """Microseconds of a launch in every round, sorted."""
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


def measure(peer: Peer, mode: str, *, shape: Shape, rotate_bytes: int) -> Row:
    """One row. Raises Unsupported, and whatever the library does."""
    import torch

    layers, launches = layers_for(mode, shape, rotate_bytes=rotate_bytes)
    try:
        times = time_launches(
            peer.make(mode, shape, layers=layers), layers=layers, launches=launches
        )
    except torch.cuda.OutOfMemoryError as error:
        raise Unsupported("the GPU has too little memory") from error
    finally:
        torch.cuda.empty_cache()
    heads = shape["kv_heads"] * shape["group"]
    return {
        "by": peer.name,
        "op": "decode",
        "mode": mode,
        "shape": shape,
        "us": float(f"{statistics.median(times):.6g}"),
        "us_low": float(f"{times[0]:.6g}"),
        "us_high": float(f"{times[-1]:.6g}"),
        "launches": ROUNDS * launches,
        "layers": layers,
        "kv_bytes": kv_bytes(mode, shape),
        "activation_bytes": 2 * 2 * shape["batch"] * heads * shape["head_dim"],
    }


def shapes_of(rows: Sequence[Row]) -> Iterator[Shape]:
    """Of our decode rows, each once, in their order."""
    seen = set()
    for row in rows:
        if row.get("by") == OURS and row.get("op") == "decode" and is_measured(row):
            key = shape_key(row["shape"], plain=True)
            if key not in seen:
                seen.add(key)
                yield row["shape"]


def installed_peers(names: Sequence[str], backends: Sequence[str]) -> Iterator[Peer]:
    """Of those named, in the order of PEERS. Says which are missing."""
    packages: dict[str, tuple[str, list[Peer]]] = {
        "torch": ("torch", [TorchSdpa()]),
        "flashinfer": ("flashinfer-python", [FlashInfer(backend) for backend in backends]),
    }
    for name in PEERS:
        package, peers = packages[name]
        if name not in names:
            continue
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed: no figures of it")
            continue
        yield from peers


def tiny_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """One for each kernel that the shapes need."""
    tiny = [shape | {"batch": 1, "context": PAGE_TOKENS} for shape in shapes]
    return list({shape_key(shape, plain=True): shape for shape in tiny}.values())


@dataclass
class Runner:
    """Measures peers one after the other; `save` gets every row when it is there."""

    shapes: Sequence[Shape]
    rotate_bytes: int
    save: Callable[[Row], None]
    failed: dict[tuple[str, str], str] = field(default_factory=dict)  # modes not tried again

    def run(self, peers: Sequence[Peer], *, budget_s: float) -> None:
        """Each its part of the time."""
        for i, peer in enumerate(peers):
            self._warm_up(peer)
            begun = time.monotonic()
            self._measure_all(peer, end=begun + budget_s / (len(peers) - i))
            budget_s -= time.monotonic() - begun

    def _warm_up(self, peer: Peer) -> None:
        begun = time.monotonic()
        print(f"{peer.name}: kernels are made ready", flush=True)
        for shape in tiny_shapes(self.shapes):
            for mode in peer.modes:
                self._row(peer, mode, shape=shape, rotate_bytes=1)
        print(f"{peer.name}: ready in {time.monotonic() - begun:.0f} s", flush=True)

    def _measure_all(self, peer: Peer, *, end: float) -> None:
        for number, shape in enumerate(self.shapes):
            for mode in peer.modes:
                if time.monotonic() >= end:
                    left = len(self.shapes) - number
                    print(f"{peer.name}: {left} shapes left out: the time is over", flush=True)
                    return
                row = self._row(peer, mode, shape=shape, rotate_bytes=self.rotate_bytes)
                if row:
                    self.save(row)
                    print(f"{peer.name:<36} {mode:<6} {row['us']:>10.2f} µs  {shape}", flush=True)

    def _row(self, peer: Peer, mode: str, *, shape: Shape, rotate_bytes: int) -> Row | None:
        """None: there is none; why is said once, or in `failed`."""
        if (peer.name, mode) in self.failed:
            return None
        try:
            return measure(peer, mode, shape=shape, rotate_bytes=rotate_bytes)
        except Unsupported as error:
            if rotate_bytes > 1:
                print(f"{peer.name} {mode} {shape}: not measured: {error}")
        except Exception as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            self.failed[peer.name, mode] = f"{peer.name} {mode} {shape}: {text[-1]}"
        return None


def has_gpu() -> bool:
    """Whether torch is there and sees one."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file of bench_kernels.py")
    parser.add_argument("--peers", default=",".join(PEERS), help="default: %(default)s")
    parser.add_argument("--budget-s", type=float, default=120.0, help="default: %(default)s")
    parser.add_argument("--rotate-mb", type=int, default=512)
    parser.add_argument("--backends", default="fa2", help="of FlashInfer: fa2,fa3,auto")
    options = parser.parse_args(arguments)
    unknown = set(options.peers.split(",")) - set(PEERS)
    if unknown:
        parser.error(f"--peers: got {', '.join(sorted(unknown))}, wanted some of {PEERS}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints, writes the file."""
    options = parse_arguments(arguments)
    try:
        document = read_document(options.json)
    except (ValueError, OSError) as error:
        print(f"peers_gpu.py: {error}", file=sys.stderr)
        return 2
    peers = list(installed_peers(options.peers.split(","), options.backends.split(",")))
    if not has_gpu():
        print("peers_gpu.py: no GPU, or no torch that uses it", file=sys.stderr)
        return NO_GPU
    begun = begin_of_run()

    def save(row: Row) -> None:
        merge_into(options.json, document["about"], lists={"kernels": [row | {"run": begun}]})

    shapes = list(shapes_of(document["kernels"]))
    runner = Runner(shapes, rotate_bytes=options.rotate_mb << 20, save=save)
    runner.run(peers, budget_s=options.budget_s)
    for line in runner.failed.values():
        print(f"FAILED: {line}")
    return 1 if runner.failed else 0


if __name__ == "__main__":
    sys.exit(main())
