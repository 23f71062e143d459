"""Other libraries on a GPU, on the cells that device_bench measured.

The timing is that of device_bench: a CUDA graph of launches that cycle through at least two copies
of 512 MB together, BF16 inputs and results, median of five rounds. A library that is not installed
or refuses a cell is named in one line. Libraries may compile kernels when they are first used,
which the timing does not include, but the budget does.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEVICE = "cuda"
ROTATE_BYTES = 512 << 20
LEAST_LAUNCHES, MOST_LAUNCHES, LEAST_LAYERS = 24, 256, 2
ROUNDS, ROUND_SECONDS = 5, 0.02

Launch = Callable[[int], object]


@dataclass(frozen=True)
class Cell:
    """A cell of device_bench. Sizes that it does not name are 0."""

    text: str
    op: str
    format: str  # of the KV cache, or of the weights
    sizes: Mapping[str, int]

    @staticmethod
    def parse(text: str) -> Cell:
        """Return the cell of a text such as "op=decode mode=fp8 batch=8"."""
        words = dict(word.split("=") for word in text.split())
        op, kind = words.pop("op"), words.pop("mode", words.pop("format", ""))
        numbers = {key: int(value) for key, value in words.items() if value.lstrip("-").isdigit()}
        return Cell(text, op, kind, numbers)

    def __getitem__(self, name: str) -> int:
        return self.sizes.get(name, 0)


@dataclass(frozen=True)
class Peer:
    """A kernel of another library.

    `refusal` returns why it does not compute a cell, or "". The launches cycle through copies of
    `rotated_bytes`. `make` returns a launch over so many layers.
    """

    name: str
    distribution: str
    ops: tuple[str, ...]
    refusal: Callable[[Cell], str]
    rotated_bytes: Callable[[Cell], int]
    make: Callable[[Cell, int], Launch]

    @property
    def by(self) -> str:
        """Return the name with the version. Raise ImportError if the library is not installed."""
        version = importlib.metadata.version(self.distribution)
        return f"{self.name}, {self.distribution} {version}"


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


def measure(peer: Peer, cell: Cell) -> dict[str, Any]:
    """Measure one cell and return its figures."""
    import torch

    wanted = -(-ROTATE_BYTES // peer.rotated_bytes(cell))
    most = cell["launches"] or MOST_LAUNCHES
    launches = min(max(wanted, LEAST_LAUNCHES), most)
    layers = max(LEAST_LAYERS, min(wanted, launches))
    try:
        launch = peer.make(cell, layers)
        times = time_launches(launch, layers=layers, launches=max(launches, layers))
    finally:
        torch.cuda.empty_cache()
    figures = {"us": statistics.median(times), "us_low": times[0], "us_high": times[-1]}
    rounded = {key: float(f"{value:.6g}") for key, value in figures.items()}
    return {**rounded, "launches": ROUNDS * max(launches, layers), "layers": layers}


def installed(peers: Sequence[Peer]) -> dict[Peer, str]:
    """Return the peers that are installed with their names, and print those that are not."""
    found: dict[Peer, str] = {}
    for peer in peers:
        try:
            found[peer] = peer.by
        except ImportError as error:  # PackageNotFoundError is one
            print(f"not measured: {peer.name}: {error}", flush=True)
    return found


def measure_all(
    texts: Sequence[str], *, save: Callable[[dict[str, Any]], None], budget_s: float
) -> list[str]:
    """Measure every cell with every peer that computes it, and return what failed.

    Raise RuntimeError if torch finds no GPU.
    """
    from baselines import flashinfer, torch_gpu

    peers = installed([*torch_gpu.PEERS, *flashinfer.PEERS])
    if not any(peer.distribution == "torch" for peer in peers):
        print("skipped: torch is not installed")
        return []
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    cells, failed, end = [Cell.parse(text) for text in texts], [], time.monotonic() + budget_s
    for peer, by in peers.items():
        refusals: dict[str, int] = {}
        for i, cell in enumerate(own := [cell for cell in cells if cell.op in peer.ops]):
            if time.monotonic() >= end:
                print(f"not measured: {by}: the time is over, {len(own) - i} cells are left")
                break
            if why := peer.refusal(cell):
                refusals[why] = refusals.get(why, 0) + 1
                continue
            try:
                save({"by": by, "cell": cell.text, **measure(peer, cell)})
            except torch.cuda.OutOfMemoryError:
                print(f"not measured: the GPU has too little memory: {by} {cell.text}")
            except Exception as error:  # a library may fail in any way; the next cell still runs
                failed.append(f"{by} {cell.text}: {str(error).strip()[-300:]}")
        for why, count in refusals.items():
            print(f"not measured: {by}: {why} ({count} cells)")
    return failed
