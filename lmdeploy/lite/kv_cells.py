"""What a report compares: KV formats by quality, and engines that run them over a prompt."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lmdeploy import _turbomind
    from lmdeploy.turbomind.loader import LoadedModel

Floats = npt.NDArray[np.float32]

FORMATS = ("none", "int8", "fp8", "fp8_e5m2", "nvfp4", "int4", "mxfp4")
QUALITIES = ("raw", "balanced", "best")
PIECE_TOKENS = 128  # positions per piece of logits: 25 MB with a vocabulary of 49 152
STALL_MS = 600_000


@dataclass(frozen=True)
class KvCell:
    """One row of the report."""

    format: str
    quality: str = "raw"

    @property
    def name(self) -> str:
        """`nvfp4/balanced`; the quality of `none` is nothing."""
        return self.format if self.format == "none" else f"{self.format}/{self.quality}"

    @property
    def slug(self) -> str:
        """The name as part of a file name."""
        return self.name.replace("/", "-")


REFERENCE = KvCell("none")


def make_cells(formats: Sequence[str], qualities: Sequence[str]) -> list[KvCell]:
    """Formats × qualities in the order given, `none` once and first.

    Raises:
        ValueError: for a name that is neither.
    """
    for what, names, known in (
        ("--formats", formats, FORMATS),
        ("--qualities", qualities, QUALITIES),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{what}: got {name!r}; wanted some of {', '.join(known)}")
    pairs = [KvCell(f, q) for f in dict.fromkeys(formats) if f != "none" for q in qualities]
    return [REFERENCE, *dict.fromkeys(pairs)]


def free_memory() -> int:
    """Bytes that the system would still hand out."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo names no MemAvailable")


def num_threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class CellEngine:
    """One engine that runs one cell, a prompt at a time."""

    def __init__(
        self, loaded: LoadedModel, options: _turbomind.EngineConfig, *, context: int
    ) -> None:
        from lmdeploy import _turbomind

        options.max_batch_size, options.session_len = 1, context
        options.cache_max_entry_count = 0.5
        device = _turbomind.make_cpu_device(num_threads())
        self._request_type = _turbomind.Request
        self._engine = _turbomind.Engine(
            loaded.config, options, loaded.weights, device, free_memory()
        )
        self._next_id = 1

    def pieces(self, prompt: Sequence[int]) -> Iterator[Floats]:
        """Logits [n, vocab] that cover the prompt in order."""
        self._submit(prompt, 1, logits_output="all")
        wanted = len(prompt)
        for output in self._outputs():
            if output.logits is not None and wanted > 0:
                yield output.logits[:wanted]
                wanted -= len(output.logits)
        if wanted > 0:
            raise RuntimeError(f"logits of {wanted} positions did not come")

    def decode_times(self, prompt: Sequence[int], num_tokens: int) -> list[float]:
        """When each of `num_tokens` generated tokens came, in seconds."""
        import time

        self._submit(prompt, num_tokens)
        times: list[float] = []
        for output in self._outputs():
            times += [time.perf_counter()] * len(output.tokens)
        return times

    def stats(self) -> _turbomind.EngineStats:
        """Counters since the start."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def _submit(
        self, prompt: Sequence[int], num_tokens: int, *, logits_output: str = "none"
    ) -> None:
        request = self._request_type()
        request.id, request.prompt = self._next_id, list(prompt)
        request.max_new_tokens, request.ignore_eos = num_tokens, True
        request.logits_output = logits_output
        self._next_id += 1
        self._engine.submit(request)

    def _outputs(self) -> Iterator[_turbomind.RequestOutput]:
        while True:
            outputs = self._engine.wait_outputs(STALL_MS)
            if not outputs:
                raise RuntimeError(f"no output within {STALL_MS} ms: {self._engine.failure}")
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
                yield output
                if output.finish_reason != "none":
                    return
