"""An engine that only reads prompts, for logits of all positions and statistics of K and V."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmdeploy.base.resources import free_memory_bytes, usable_cores

if TYPE_CHECKING:
    from lmdeploy import _turbomind
    from lmdeploy.config.engine import TurbomindEngineConfig
    from lmdeploy.engine.model_files import LoadedModel, ModelChanges

Floats = npt.NDArray[np.float32]
Configure = Callable[["_turbomind.EngineConfig"], None]

PIECE_TOKENS = 128  # positions per chunk of logits: 25 MB with a vocabulary of 49,152
STALL_MS = 600_000


@dataclass(frozen=True)
class OpenModel:
    """A loaded model, its path, and the options of the device that computes it."""

    path: str
    loaded: LoadedModel
    threads: int
    int8_activations: bool = False
    deterministic: bool = True

    def make_device(self) -> _turbomind.Device:
        """Return a new device that computes the model."""
        from lmdeploy import _turbomind

        return _turbomind.make_cpu_device(
            self.threads,
            int8_activations=self.int8_activations,
            deterministic=self.deterministic,
        )

    @property
    def config(self) -> _turbomind.ModelConfig:
        """Return the engine's config of the model."""
        return self.loaded.config

    @property
    def has_statistics(self) -> bool:
        """Return whether K and V can be measured: not latents, nor heads that differ by layer."""
        return not self.config.latent.rope_dim and self.config.has_one_kv_shape()

    @functools.cached_property
    def hash(self) -> str:
        """Return the fingerprint of the model that its calibration files contain."""
        from lmdeploy.checkpoint.fingerprint import hash_model

        return hash_model(str(self.loaded.path))

    def configure(self, config: TurbomindEngineConfig) -> Configure:
        """Check the cache options in `config` and return a function that applies them.

        Raise ValueError if an option or the calibration file does not fit the model.
        """
        from lmdeploy import _turbomind
        from lmdeploy.engine.kv_quality import apply_kv_options, resolve_kv_options, with_kv_scales

        options = resolve_kv_options(
            config,
            self.config.windows,
            k_bias=self.config.k_bias,
            latents=self.config.latent.rope_dim > 0,
        )
        options = with_kv_scales(options, self.loaded.kv_scales)
        model_hash = self.hash if options.calibration is not None else None

        def apply(engine_config: _turbomind.EngineConfig) -> None:
            apply_kv_options(options, engine_config, model=self.config, model_hash=model_hash)

        apply(_turbomind.EngineConfig())
        return apply


def open_model(
    path: str,
    *,
    exact: bool = False,
    threads: int | None = None,
    changes: ModelChanges | None = None,
) -> OpenModel:
    """Load a model on the CPU with the cache dtype that a server would use.

    Without this, exact compute would store 16-bit K and V, scales and zeros in FP32. None for
    `threads` uses all cores, and None for `changes` changes nothing.
    """
    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model, open_files

    threads = threads or usable_cores()
    device = _turbomind.make_cpu_device(threads)
    dtype = open_files(path).info.config.dtype
    loaded = load_model(path, dtype=dtype, exact=exact, device=device, changes=changes)
    return OpenModel(path, loaded, threads)


class PromptEngine:
    """An engine that reads prompts of at most `context` tokens, one at a time.

    `configure` sets the cache options. Use the engine as a context manager, or close it.
    """

    def __init__(self, model: OpenModel, configure: Configure, *, context: int) -> None:
        from lmdeploy import _turbomind

        self._request_type = _turbomind.Request
        self._engine = _turbomind.Engine(
            model.config,
            prompt_config(configure, context),
            model.loaded.weights,
            model.make_device(),
            free_memory_bytes(),
        )
        self._next_id = 1

    def __enter__(self) -> PromptEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pieces(self, prompt: Sequence[int]) -> Iterator[Floats]:
        """Yield the logits of all positions of the prompt, in chunks [n, vocab]."""
        wanted = len(prompt)
        for output in self._run(prompt, logits="all"):
            if output.logits is not None and wanted > 0:
                yield output.logits[:wanted]
                wanted -= len(output.logits)
        if wanted > 0:
            raise RuntimeError(f"The engine returned no logits for the last {wanted} positions.")

    def read(self, prompt: Sequence[int]) -> None:
        """Run the model over the prompt without logits."""
        for _ in self._run(prompt, logits="none"):
            pass

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of K and V since the start.

        REQUIRES: `configure` has set collect_kv_statistics.
        """
        return self._engine.kv_statistics()

    def close(self) -> None:
        self._engine.close()

    def _run(self, prompt: Sequence[int], *, logits: str) -> Iterator[_turbomind.RequestOutput]:
        request = self._request_type()
        request.id, request.prompt, request.max_new_tokens = self._next_id, list(prompt), 1
        request.ignore_eos, request.logits_output = True, logits
        self._next_id += 1
        self._engine.submit(request)
        while True:
            outputs = self._engine.wait_outputs(STALL_MS)
            if not outputs:
                raise RuntimeError(
                    f"The engine returned no output within {STALL_MS} ms. {self._engine.failure}"
                )
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
                yield output
                if output.finish_reason != "none":
                    return


def prompt_config(configure: Configure, context: int) -> _turbomind.EngineConfig:
    """Return the engine's options for single prompts of `context` tokens."""
    from lmdeploy import _turbomind

    engine_config = _turbomind.EngineConfig()
    engine_config.max_batch_size, engine_config.session_len = 1, context + 1
    engine_config.max_prefill_token_num = PIECE_TOKENS
    engine_config.cache_max_entry_count = 0.5
    engine_config.enable_prefix_caching = False
    configure(engine_config)
    return engine_config
