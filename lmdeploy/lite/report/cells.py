"""The variants that a report compares, and the engine that times them."""

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
    """One row of the report: a KV format with a quality.

    The label is `none`, `nvfp4` (quality raw), `nvfp4/balanced` and so on.
    """

    label: str
    configure: Configure
    # k_scale and v_scale, [layers, kv_heads] each. None means 1.
    scales: tuple[Floats, Floats] | None = None

    @property
    def format(self) -> str:
        return self.label.partition("/")[0]

    @property
    def quality(self) -> str:
        return self.label.partition("/")[2] or "raw"

    @property
    def slug(self) -> str:
        """Return the label as part of a file name."""
        return self.label.replace("/", "-")

    def engine_config(self, context: int) -> _turbomind.EngineConfig:
        """Return the engine's options for single prompts of `context` tokens."""
        return prompt_config(self.configure, context)


def make_cells(
    model: OpenModel,
    formats: Sequence[str],
    *,
    qualities: Sequence[str],
    calibration: Path | None,
) -> list[KvVariant]:
    """Return `none`, then formats × qualities in the given order.

    Raises:
        ValueError: if a name is unknown or the calibration file does not fit the model.
    """
    path = None if calibration is None else str(calibration)
    variants = cache_variants([REFERENCE, *formats], qualities, calibration=path)
    return [
        KvVariant(label, model.configure(config), _scales(model, config))
        for label, config in variants.items()
    ]


def _scales(model: OpenModel, config: TurbomindEngineConfig) -> tuple[Floats, Floats] | None:
    """Return k_scale and v_scale, or None without a calibration file."""
    from lmdeploy.engine.kv_calibration import engine_constants, read_calibration
    from lmdeploy.engine.kv_quality import resolve_kv_options

    options = resolve_kv_options(
        config,
        model.config.windows,
        k_bias=model.config.k_bias,
        latents=model.config.latent.rope_dim > 0,
    )
    if options.calibration is None:
        return None
    calibration = read_calibration(options.calibration, model.config, model_hash=model.hash)
    _, k, v = engine_constants(calibration, options.layers, rotated=options.rotation)
    return k, v


class DecodeEngine:
    """An engine that times decode steps. Its prefix cache lets it repeat a prompt at no cost."""

    def __init__(self, model: OpenModel, configure: Configure, *, context: int) -> None:
        from lmdeploy import _turbomind

        options = prompt_config(configure, context)
        options.enable_prefix_caching = True
        options.max_prefill_token_num = 2048
        self._request_type = _turbomind.Request
        self._engine = _turbomind.Engine(
            model.config, options, model.loaded.weights, model.make_device(), free_memory_bytes()
        )
        self._next_id = 1

    def step_seconds(self, prompt: Sequence[int], steps: int) -> float:
        """Return the mean seconds of `steps` decode steps after the first token."""
        request = self._request_type()
        request.id, request.prompt = self._next_id, list(prompt)
        request.max_new_tokens, request.ignore_eos = steps + 1, True
        self._next_id += 1
        self._engine.submit(request)
        times: list[float] = []
        while len(times) <= steps:
            outputs = self._engine.wait_outputs(STALL_MS)
            if not outputs:
                raise RuntimeError(
                    f"The engine returned no output within {STALL_MS} ms. {self._engine.failure}"
                )
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
                times += [time.perf_counter()] * len(output.tokens)
        return (times[steps] - times[0]) / steps

    def close(self) -> None:
        self._engine.close()


Done = Callable[[str], None]  # called with the label of a cell after each measurement
