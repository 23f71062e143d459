"""What a report compares: KV formats by quality, and engines that time them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmdeploy.base.resources import free_memory_bytes
from lmdeploy.lite.divergence import cache_variants
from lmdeploy.lite.prompt_engine import STALL_MS, Configure, Floats, OpenModel, prompt_config

if TYPE_CHECKING:
    from lmdeploy import _turbomind
    from lmdeploy.config.engine import TurbomindEngineConfig

REFERENCE = "none"


@dataclass(frozen=True)
class KvVariant:
    """One row of the report: `label` is `none`, `nvfp4` (raw), `nvfp4/balanced` and so on."""

    label: str
    configure: Configure
    factors: tuple[Floats, Floats] | None = None  # of K and V, [layers, kv_heads]; None: 1

    @property
    def format(self) -> str:
        """The first part of the label."""
        return self.label.partition("/")[0]

    @property
    def quality(self) -> str:
        """The second part; raw where there is none."""
        return self.label.partition("/")[2] or "raw"

    @property
    def slug(self) -> str:
        """The label as part of a file name."""
        return self.label.replace("/", "-")

    def engine_config(self, context: int) -> _turbomind.EngineConfig:
        """The engine's options for single prompts of `context` tokens."""
        return prompt_config(self.configure, context)


def make_cells(
    model: OpenModel,
    formats: Sequence[str],
    *,
    qualities: Sequence[str],
    calibration: Path | None,
) -> list[KvVariant]:
    """`none`, then formats × qualities in the order given.

    Raises:
        ValueError: for an unknown name, or a calibration file that does not fit the model.
    """
    path = None if calibration is None else str(calibration)
    variants = cache_variants([REFERENCE, *formats], qualities, calibration=path)
    return [
        KvVariant(label, model.configure(config), _factors(model, config))
        for label, config in variants.items()
    ]


def _factors(model: OpenModel, config: TurbomindEngineConfig) -> tuple[Floats, Floats] | None:
    """Of K and V, where the cell has a calibration file."""
    from lmdeploy.engine.kv_calibration import engine_constants, read_calibration
    from lmdeploy.engine.kv_quality import resolve_kv_options

    options = resolve_kv_options(config, model.config.windows)
    if options.calibration is None:
        return None
    calibration = read_calibration(options.calibration, model.config, model_hash=model.hash)
    _, k, v = engine_constants(calibration, options.layers, rotated=options.rotation)
    return k, v


class DecodeEngine:
    """One engine with the prefix cache on: times decode steps after a prompt, again and again."""

    def __init__(self, model: OpenModel, configure: Configure, *, context: int) -> None:
        from lmdeploy import _turbomind

        options = prompt_config(configure, context)
        options.enable_prefix_caching = True
        options.max_prefill_token_num = 2048
        self._request_type = _turbomind.Request
        device = _turbomind.make_cpu_device(model.threads)
        self._engine = _turbomind.Engine(
            model.config, options, model.loaded.weights, device, free_memory_bytes()
        )
        self._next_id = 1

    def step_seconds(self, prompt: Sequence[int], steps: int) -> float:
        """Mean time of `steps` decode steps after the first token."""
        request = self._request_type()
        request.id, request.prompt = self._next_id, list(prompt)
        request.max_new_tokens, request.ignore_eos = steps + 1, True
        self._next_id += 1
        self._engine.submit(request)
        times: list[float] = []
        while len(times) <= steps:
            outputs = self._engine.wait_outputs(STALL_MS)
            if not outputs:
                raise RuntimeError(f"no output within {STALL_MS} ms: {self._engine.failure}")
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
                times += [time.perf_counter()] * len(output.tokens)
        return (times[steps] - times[0]) / steps

    def close(self) -> None:
        """Stops the engine."""
        self._engine.close()


Done = Callable[[str], None]  # hears the label of a cell of which a part is measured
