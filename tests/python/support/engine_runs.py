"""Run the C++ engine in tests: logits of every position, and greedy tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

TIMEOUT_MS = 2000


@dataclass(frozen=True)
class Answer:
    """Generated tokens, their logits [tokens, vocab], and the number of cached prompt tokens."""

    tokens: list[int]
    logits: np.ndarray
    cached_tokens: int


class EngineRun:
    """An engine for one loaded model. Use it as a context manager, which closes it."""

    def __init__(
        self,
        path: str,
        *,
        exact: bool,
        kv_format: str = "none",
        max_prefill: int = 64,
        session_len: int = 1024,
        rotated: bool = False,
        windowed: bool = False,
        k_offset: bool = False,
        weight_format: str | None = None,
        int8_activations: bool = False,
        prefix_caching: bool = False,
        num_draft_tokens: int = 0,
        state_format: str = "f32",
    ) -> None:
        from lmdeploy import _turbomind
        from lmdeploy.engine.model_files import ModelChanges, load_model

        self._native = _turbomind
        device = _turbomind.make_cpu_device(2, int8_activations=int8_activations)
        changes = ModelChanges(weight_format=weight_format)
        self.model = load_model(path, exact=exact, device=device, progress=False, changes=changes)
        config = _turbomind.EngineConfig()
        if kv_format.startswith("k="):  # as --kv-cache-format
            sides = [side.split("=")[1] for side in kv_format.split(",")]
            config.kv_layers = [(sides[0], sides[1])] * self.model.config.num_layers
        else:
            config.kv_format = kv_format
        config.kv_rotate_k = rotated
        config.kv_k_offset = k_offset
        if windowed:
            config.kv_sink_tokens = config.kv_recent_tokens = 64
            config.kv_window_format = "none" if kv_format == "none" else "int8"
        config.max_batch_size = 4
        config.session_len = session_len
        config.max_prefill_token_num = max_prefill
        config.cache_block_seq_len = 16
        config.cache_max_entry_count = 0.5
        config.enable_prefix_caching = prefix_caching
        config.num_draft_tokens = num_draft_tokens
        config.state_checkpoint_format = state_format
        config.check_integrity = True
        self._engine = _turbomind.Engine(
            self.model.config, config, self.model.weights, device, 2 << 30
        )
        self._short_rope_length = _turbomind.short_rope_length(
            self.model.config, session_len=session_len
        )
        self._next_id = 1

    def __enter__(self) -> EngineRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def logits(self, ids: list[int]) -> np.ndarray:
        """Return the logits after every token of the prompt, [len(ids), vocab]."""
        outputs = self._run(ids, 1, "all")
        pieces = [output.logits for output in outputs if output.logits is not None]
        return np.concatenate(pieces)[: len(ids)]

    def greedy(self, ids: list[int], num_tokens: int) -> list[int]:
        """Return the next tokens, sampled greedily."""
        return [token for output in self._run(ids, num_tokens, "none") for token in output.tokens]

    def answer(self, ids: list[int], num_tokens: int) -> Answer:
        """Return the next tokens, sampled greedily, with their logits."""
        outputs = self._run(ids, num_tokens, "generation")
        pieces = [output.logits for output in outputs if output.logits is not None]
        return Answer(
            [token for output in outputs for token in output.tokens],
            np.concatenate(pieces),
            max(output.cached_tokens for output in outputs),
        )

    def drafts(self) -> tuple[int, int]:
        """Return the numbers of tokens that were drafted and accepted so far."""
        stats = self._engine.stats()
        return stats.draft_tokens, stats.accepted_tokens

    def pooled(self, ids: list[int], pooling: str) -> np.ndarray:
        """Return the pooled hidden state of the prompt, [hidden]."""
        result: np.ndarray = self._run(ids, 0, "none", pooling=pooling)[-1].pooled
        return result

    def _run(
        self, ids: list[int], num_tokens: int, logits_output: str, *, pooling: str = "none"
    ) -> list[Any]:
        request = self._native.Request()
        request.id = self._next_id
        self._next_id += 1
        request.prompt = ids
        request.max_new_tokens = num_tokens
        request.long_rope = 0 < self._short_rope_length < len(ids) + num_tokens
        request.ignore_eos = True
        request.do_sample = False
        request.logits_output = logits_output
        request.pooling = pooling
        self._engine.submit(request)
        outputs: list[Any] = []
        while not outputs or outputs[-1].finish_reason == "none":
            outputs += self._engine.wait_outputs(TIMEOUT_MS)
            assert self._engine.healthy, self._engine.failure
        assert not outputs[-1].error, outputs[-1].error
        return outputs
