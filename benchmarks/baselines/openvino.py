"""Times OpenVINO GenAI on the same GGUF file."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai
from our_engine import Cell


@dataclass(frozen=True)
class Setting:
    """Properties of the CPU plug-in. None of them means its defaults."""

    name: str
    properties: Mapping[str, Any] = field(default_factory=dict)


_DEFAULT = Setting("defaults")
_CHOICES = (
    _DEFAULT,
    Setting("16-bit activations", {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}),
    Setting("16-bit cache", {"KV_CACHE_PRECISION": openvino.Type.f16}),
)


class Context:
    """A pipeline for one cell. Every run has a prompt of its own, so that nothing is cached."""

    def __init__(
        self, pipeline: openvino_genai.LLMPipeline, cell: Cell, *, vocab_size: int
    ) -> None:
        self._pipeline, self._cell, self._vocab_size = pipeline, cell, vocab_size
        self._runs = 0

    def prefill(self) -> float:
        """Read all prompts and return tokens per second."""
        started = time.perf_counter()
        self._generate(1)
        return self._cell.context * self._cell.batch / (time.perf_counter() - started)

    def fill(self) -> None:
        """Do nothing: every run of `decode` reads its own prompts."""

    def decode(self) -> float:
        """Decode after the prompts and return tokens per second, without the prompts' time."""
        metrics = self._generate(self._cell.steps + 1)
        return 1000 * self._cell.batch / float(metrics.get_tpot().mean)

    def _generate(self, num_tokens: int) -> Any:
        """Generate greedily and return the pipeline's own timings."""
        self._runs += 1
        rng = np.random.default_rng(self._runs)
        shape = self._cell.batch, self._cell.context
        prompts = openvino.Tensor(rng.integers(100, self._vocab_size - 100, shape, dtype=np.int64))
        config = openvino_genai.GenerationConfig(
            max_new_tokens=num_tokens, min_new_tokens=num_tokens, ignore_eos=True, do_sample=False
        )
        return self._pipeline.generate(prompts, config).perf_metrics


class OpenVino:
    """OpenVINO GenAI. Every context loads the model with its own properties."""

    name = "OpenVINO GenAI"

    def __init__(self, path: str, *, threads: int, vocab_size: int) -> None:
        self._path, self._threads, self._vocab_size = path, threads, vocab_size

    def about(self) -> str:
        """Return the version."""
        return f"OpenVINO GenAI {openvino_genai.__version__}"

    def settings(self, work: str) -> Sequence[Setting]:
        """Return the settings to try."""
        return _CHOICES

    @contextmanager
    def context(self, cell: Cell, setting: Setting) -> Iterator[Context]:
        """Load the model. Raise RuntimeError if OpenVINO refuses the file or the setting."""
        pipeline = openvino_genai.LLMPipeline(
            self._path, "CPU", INFERENCE_NUM_THREADS=self._threads, **setting.properties
        )
        yield Context(pipeline, cell, vocab_size=self._vocab_size)

    def close(self) -> None:
        """Do nothing: the last pipeline is gone."""
