"""Times the engine itself: token ids in, token ids out, no HTTP and no text."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cells import BLOCK_TOKENS, Cell, Quality, Timing

from lmdeploy import _turbomind

STALL_MS = 3_600_000  # a prompt of 32k tokens of a 1B model takes a quarter of an hour


@dataclass(frozen=True)
class OurSetting:
    """What the engine's cache is like; sizes in tokens and blocks.

    `quality` None: the default of the mode, as a user of `--quant-policy` gets it.
    """

    mode: str
    session_len: int
    num_blocks: int
    quality: Quality | None = None
    max_batch_size: int = 32
    max_prefill_token_num: int | None = None  # the default

    @classmethod
    def for_cell(cls, cell: Cell, mode: str, *, quality: Quality | None = None) -> OurSetting:
        """Room for one cell and its cached prompts; everything else as by default."""
        blocks = cell.batch * (cell.session_len // BLOCK_TOKENS + 1)
        return cls(
            mode,
            cell.session_len,
            blocks,
            quality=quality,
            max_batch_size=cell.batch,
        )


def quality_of(mode: str) -> str:
    """What a user of `--quant-policy` gets, without its details."""
    from lmdeploy import TurbomindEngineConfig
    from lmdeploy.engine.kv_quality import resolve_kv_options

    return resolve_kv_options(TurbomindEngineConfig(quant_policy=mode), [0]).quality


class OurEngine:
    """One engine with one KV format, used for all cells. `quality`: what it resolved to."""

    name = "ours"

    def __init__(
        self,
        config: _turbomind.ModelConfig,
        weights: _turbomind.Weights,
        *,
        setting: OurSetting,
        threads: int,
    ) -> None:
        from lmdeploy import TurbomindEngineConfig
        from lmdeploy.engine.plan import engine_config_of

        options, kv = engine_config_of(
            TurbomindEngineConfig(
                quant_policy=setting.mode,
                kv_quality=setting.quality,
                max_batch_size=setting.max_batch_size,
                session_len=setting.session_len,
                max_prefill_token_num=setting.max_prefill_token_num,
                cache_max_entry_count=setting.num_blocks,
            ),
            config,
            model_path="",
        )
        self.mode, self.quality, self.vocab_size = setting.mode, kv.quality_text, config.vocab_size
        device = self._make_device(threads)
        free_bytes = 1 << 36  # the pool is given as a number of blocks and reserved lazily
        self._engine = _turbomind.Engine(config, options, weights, device, free_bytes)
        self._next_id = 1

    @property
    def format(self) -> str:
        """Mode and quality, as results name them."""
        return f"{self.mode}, {self.quality}"

    def __enter__(self) -> OurEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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

    def prefill(self, cell: Cell) -> float:
        """Prompt tokens per second, to the first token of the last sequence; nothing is cached."""
        self._engine.clear_prefix_cache()
        prompts = cell.prompts(self.vocab_size)
        begun = time.perf_counter()
        self._drain({self._submit(prompt, 1) for prompt in prompts})
        return cell.context * cell.batch / (time.perf_counter() - begun)

    def decode(self, cell: Cell) -> float:
        """Tokens per second with every sequence running; prompts read before are reused."""
        return self._timed(cell).decode

    def run(self, cell: Cell) -> Timing:
        """Prefill, then decode with every sequence running."""
        self._engine.clear_prefix_cache()
        if cell.shared:
            self._drain({self._submit(cell.prompts(self.vocab_size)[0], 1)})
        return self._timed(cell)

    def _timed(self, cell: Cell) -> Timing:
        prompts = cell.prompts(self.vocab_size)
        begun = time.perf_counter()
        waiting = {self._submit(prompt, cell.room) for prompt in prompts}
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

    @property
    def bytes_per_token(self) -> float:
        """Of the cache, all layers, K and V."""
        return self._engine.memory_plan().bytes_per_token

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()
