"""Times the engine: token ids in, token ids out, without HTTP and text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from lmdeploy import _turbomind

BLOCK_TOKENS = 64
STALL_MS = 3_600_000  # a 32k-token prompt of a 1B model takes 15 minutes


@dataclass(frozen=True)
class Cell:
    """The work to time: `batch` sequences of `context` tokens, then `steps` decode steps."""

    context: int
    batch: int
    steps: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return random ids, the same for every engine."""
        rng = np.random.default_rng(self.context * 1000 + self.batch)
        rows: list[list[int]] = rng.integers(
            100, vocab_size - 100, (self.batch, self.context)
        ).tolist()
        return rows

    @property
    def room(self) -> int:
        """Return the tokens of a response. Early sequences decode while late prompts are read."""
        return self.steps + 4 * self.batch + self.batch * self.context // 1024

    @property
    def session_len(self) -> int:
        """Return the slots of one sequence, rounded up to whole blocks."""
        return -(-(self.context + self.room + 1) // BLOCK_TOKENS) * BLOCK_TOKENS


def quality_of(mode: str) -> str:
    """Return the quality that a user of `--quant-policy` gets by default."""
    from lmdeploy import TurbomindEngineConfig
    from lmdeploy.engine.kv_quality import resolve_kv_options

    return resolve_kv_options(TurbomindEngineConfig(quant_policy=mode), [0]).quality


class OurEngine:
    """One engine with one KV format and room for one cell and its cached prompts.

    `quality` None selects the default of the format. With `profiled`, a profiling device times the
    ops.
    """

    def __init__(
        self,
        loaded: Any,
        device: _turbomind.Device,
        *,
        cell: Cell,
        mode: str,
        quality: Literal["raw", "balanced"] | None = None,
        profiled: bool = False,
    ) -> None:
        from lmdeploy import TurbomindEngineConfig, _turbomind
        from lmdeploy.config.kv_format_options import parse_quant_policy
        from lmdeploy.engine.plan import engine_config_of

        config = loaded.config
        # A batch that starts over must find all its prompts in the cache, 16-bit windows included.
        sequences = cell.batch if cell.batch == 1 else 2 * cell.batch
        options, kv = engine_config_of(
            TurbomindEngineConfig(
                quant_policy=mode,
                kv_quality=quality if parse_quant_policy(mode) != "none" else None,
                max_batch_size=sequences,
                session_len=cell.session_len,
                cache_max_entry_count=sequences * (cell.session_len // BLOCK_TOKENS + 1),
                speculative_algorithm="none",
            ),
            config,
            model_path="",
            capability=device.capability,
        )
        self.quality, self.vocab_size = kv.quality_text, config.vocab_size
        self.format = f"{mode}, {self.quality}"
        self.profiling: _turbomind.ProfilingDevice | None = None
        if profiled:
            self.profiling = device = _turbomind.make_profiling_device(device)
        free_bytes = 1 << 36  # the pool has a fixed number of blocks and is reserved lazily
        self._engine = _turbomind.Engine(config, options, loaded.weights, device, free_bytes)
        self._next_id = 1

    def __enter__(self) -> OurEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()

    def submit(self, prompt: list[int], max_new_tokens: int) -> int:
        """Submit a request and return its id."""
        from lmdeploy import _turbomind

        request = _turbomind.Request()
        request.id = self._next_id
        request.prompt = prompt
        request.max_new_tokens, request.ignore_eos = max_new_tokens, True
        self._next_id += 1
        self._engine.submit(request)
        return request.id

    def outputs(self) -> list[_turbomind.RequestOutput]:
        """Wait for outputs. RuntimeError is raised for a request that failed."""
        outputs = self._engine.wait_outputs(STALL_MS)
        if not outputs:
            raise RuntimeError(f"the engine returned no outputs: {self._engine.failure}")
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
        return outputs

    def drain(self, ids: set[int]) -> None:
        """Wait until these requests have ended."""
        while ids:
            ids -= {o.request_id for o in self.outputs() if o.finish_reason != "none"}

    def cancel(self, ids: set[int]) -> None:
        """Cancel these requests and wait until they have ended."""
        for request_id in ids:
            self._engine.cancel(request_id)
        self.drain(set(ids))

    def _clear(self) -> None:
        self._engine.clear_prefix_cache()
        if self.profiling:
            self.profiling.clear()

    def prefill(self, cell: Cell) -> float:
        """Return prompt tokens per second until the first token of the last sequence."""
        self._clear()
        begun = time.perf_counter()
        self.fill(cell)
        return cell.context * cell.batch / (time.perf_counter() - begun)

    def fill(self, cell: Cell) -> None:
        """Read the prompts. They stay in the prefix cache."""
        self.drain({self.submit(prompt, 1) for prompt in cell.prompts(self.vocab_size)})

    def decode(self, cell: Cell) -> float:
        """Return tokens per second with every sequence running; cached prompts are reused.

        Raise RuntimeError if the first response ends before the last prompt has been read.
        """
        prompts = cell.prompts(self.vocab_size)
        waiting = {self.submit(prompt, cell.room) for prompt in prompts}
        running = set(waiting)
        while waiting:
            for output in self.outputs():
                if output.tokens:
                    waiting.discard(output.request_id)
                if output.finish_reason != "none":
                    running.discard(output.request_id)
        if len(running) < cell.batch:
            raise RuntimeError(f"only {len(running)} of {cell.batch} sequences run; call fill().")
        started = time.perf_counter()
        tokens = 0
        while running and tokens < cell.steps * cell.batch:
            for output in self.outputs():
                tokens += len(output.tokens)
                if output.finish_reason != "none":
                    running.discard(output.request_id)
        seconds = time.perf_counter() - started
        self.cancel(running)
        return tokens / seconds

    def profile_table(self) -> str:
        """Return a table of time and bytes per op since the last clear."""
        assert self.profiling, "the engine was made without profiled=True"
        return "\n".join(format_phase(phase) for phase in self.profiling.profile())


def format_phase(phase: _turbomind.PhaseProfile) -> str:
    """Return the table of one phase: ops sorted by time, with the bytes that each must move."""
    total = max(sum(record.nanoseconds for record in phase.records), 1)
    lines = [
        f"{phase.phase}: {phase.num_steps} steps, {phase.num_tokens / phase.num_steps:.1f} tokens "
        f"and {total / phase.num_steps / 1e6:.3f} ms per step",
        f"  {'op':<42} {'calls':>6} {'ms':>9} {'share':>6} {'MB':>9} {'GB/s':>7}",
    ]
    for record in sorted(phase.records, key=lambda record: -record.nanoseconds):
        share = record.nanoseconds / total
        moved = record.weight_bytes + record.kv_bytes + record.activation_bytes
        shape = f" {record.rows} x {record.cols} {record.format}" if record.rows else ""
        formats = "/".join(dict.fromkeys(kv_format.name for kv_format in record.kv_formats))
        name = " ".join(filter(None, (record.kind + shape, formats)))
        lines.append(
            f"  {name:<42} {record.calls / phase.num_steps:>6.1f} "
            f"{record.nanoseconds / phase.num_steps / 1e6:>9.4f} {share:>6.1%} "
            f"{moved / phase.num_steps / 1e6:>9.3f} {moved / max(record.nanoseconds, 1):>7.1f}"
        )
    return "\n".join(lines)
