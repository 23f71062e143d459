"""Times the engine itself: token ids in, token ids out, no HTTP and no text."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from lmdeploy import _turbomind

STALL_MS = 600_000


@dataclass(frozen=True)
class Cell:
    """What is timed: `batch` sequences with `context` tokens each, then `steps` decode steps.

    `shared`: all sequences have the same prompt and share its blocks.
    """

    context: int
    batch: int
    steps: int
    shared: bool = False

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ids, the same for every engine."""
        rng = np.random.default_rng(self.context * 1000 + self.batch)
        ids = rng.integers(100, vocab_size - 100, (1 if self.shared else self.batch, self.context))
        rows: list[list[int]] = ids.tolist()
        return rows * self.batch if self.shared else rows


@dataclass(frozen=True)
class Timing:
    """Tokens per second; `prefill` is None where prompts were shared."""

    prefill: float | None
    decode: float


class OurEngine:
    """One engine with one KV format, used for all cells."""

    name = "ours"

    def __init__(
        self,
        config: _turbomind.ModelConfig,
        weights: _turbomind.Weights,
        *,
        mode: str,
        threads: int,
        session_len: int,
        num_blocks: int,
    ) -> None:
        options = _turbomind.EngineConfig()
        options.kv_mode = _turbomind.get_kv_cache_mode(mode)
        options.max_batch_size, options.session_len = 32, session_len
        options.max_prefill_token_num = 2048
        options.cache_max_entry_count = float(num_blocks)
        self.mode, self.vocab_size = mode, config.vocab_size
        device = self._make_device(threads)
        free_bytes = 1 << 36  # the pool is given as a number of blocks and reserved lazily
        self._engine = _turbomind.Engine(config, options, weights, device, free_bytes)
        self._next_id = 1

    def _make_device(self, threads: int) -> _turbomind.Device:
        return _turbomind.make_cpu_device(threads)

    def _submit(self, prompt: list[int], max_new_tokens: int) -> int:
        request = _turbomind.Request()
        request.id, request.prompt = self._next_id, prompt
        request.max_new_tokens, request.ignore_eos = max_new_tokens, True
        self._next_id += 1
        self._engine.submit(request)
        return request.id

    def _outputs(self) -> list[_turbomind.RequestOutput]:
        outputs = self._engine.wait_outputs(STALL_MS)
        if not outputs:
            raise RuntimeError(f"the engine gave nothing: {self._engine.failure}")
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
        return outputs

    def _drain(self, ids: set[int]) -> None:
        while ids:
            ids -= {o.request_id for o in self._outputs() if o.finish_reason != "none"}

    def run(self, cell: Cell) -> Timing:
        """Prefill, then decode with every sequence running."""
        self._engine.clear_prefix_cache()
        prompts = cell.prompts(self.vocab_size)
        if cell.shared:
            self._drain({self._submit(prompts[0], 1)})
        begun = time.perf_counter()
        # Early sequences decode while late ones are still read: room for that.
        room = cell.steps + 2 * cell.batch + cell.batch * cell.context // 1024
        waiting = {self._submit(prompt, room) for prompt in prompts}
        running = set(waiting)
        while waiting:
            for output in self._outputs():
                if output.tokens:
                    waiting.discard(output.request_id)
                if output.finish_reason != "none":  # a tiny model may be done by now
                    running.discard(output.request_id)
        started = time.perf_counter()
        tokens = 0
        while running and tokens < cell.steps * cell.batch:
            for output in self._outputs():
                tokens += len(output.tokens)
                if output.finish_reason != "none":
                    running.discard(output.request_id)
        seconds = time.perf_counter() - started
        for request_id in running:
            self._engine.cancel(request_id)
        self._drain(running)
        prefill = None if cell.shared else cell.context * cell.batch / (started - begun)
        return Timing(prefill, tokens / seconds)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()
