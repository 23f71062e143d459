"""Times llama.cpp on the same file through the low-level API of llama-cpp-python."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

import llama_cpp
from our_engine import Cell, Timing

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
GGML_TYPE_BF16 = 30  # not among the names of llama-cpp-python


@dataclass(frozen=True)
class PeerSetting:
    """Type of the KV cache and whether flash attention is used."""

    name: str
    kv_type: int
    flash_attention: bool


SETTINGS = (
    PeerSetting("f16", llama_cpp.GGML_TYPE_F16, False),
    PeerSetting("f16, flash attention", llama_cpp.GGML_TYPE_F16, True),
    PeerSetting("bf16, flash attention", GGML_TYPE_BF16, True),
    PeerSetting("q8_0, flash attention", llama_cpp.GGML_TYPE_Q8_0, True),
    PeerSetting("q4_0, flash attention", llama_cpp.GGML_TYPE_Q4_0, True),
)


def discard(*arguments: object) -> None:
    """llama.cpp logs nothing."""


silent = llama_cpp.llama_log_callback(discard)


class LlamaCpp:
    """The model is loaded once; every run makes a context of the size it needs."""

    def __init__(self, path: str, *, threads: int) -> None:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"{path}: llama.cpp cannot load it")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))

    def run(self, cell: Cell, setting: PeerSetting) -> Timing:
        """As OurEngine.run. Shared prompts share the cells of a unified cache."""
        parameters = llama_cpp.llama_context_default_params()
        room = cell.context + cell.steps + 8
        parameters.n_ctx = (
            cell.context + cell.batch * (cell.steps + 8) if cell.shared else (room * cell.batch)
        )
        parameters.n_seq_max, parameters.kv_unified = cell.batch, cell.shared
        parameters.n_batch, parameters.n_ubatch = BATCH_TOKENS, MICRO_BATCH_TOKENS
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.type_k = parameters.type_v = setting.kv_type
        parameters.flash_attn_type = int(setting.flash_attention)
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp refuses {setting.name} with {parameters.n_ctx} tokens")
        batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        try:
            return self._timed(context, batch, cell=cell)
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    def _timed(self, context: ctypes.c_void_p, batch: Any, *, cell: Cell) -> Timing:
        prompts = cell.prompts(self.vocab_size)
        begun = time.perf_counter()
        pending = [
            (token, position, sequence, position == cell.context - 1)
            for sequence, prompt in enumerate(prompts[:1] if cell.shared else prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(pending), BATCH_TOKENS):
            decode(context, batch, tokens=pending[start : start + BATCH_TOKENS])
        if cell.shared:
            memory = llama_cpp.llama_get_memory(context)
            for sequence in range(1, cell.batch):
                llama_cpp.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        started = time.perf_counter()
        for step in range(cell.steps):
            position = cell.context + step
            decode(context, batch, tokens=[(17 + s, position, s, True) for s in range(cell.batch)])
        seconds = time.perf_counter() - started
        prefill = None if cell.shared else cell.context * cell.batch / (started - begun)
        return Timing(prefill, cell.steps * cell.batch / seconds)

    def close(self) -> None:
        """Free the model."""
        llama_cpp.llama_model_free(self._model)


def decode(
    context: ctypes.c_void_p,
    batch: Any,  # llama_batch; its pointers have no useful types
    *,
    tokens: list[tuple[int, int, int, bool]],
) -> None:
    """One call of llama_decode for (token, position, sequence, wants logits), to its end."""
    batch.n_tokens = len(tokens)
    for i, (token, position, sequence, logits) in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.logits[i] = logits
    status = llama_cpp.llama_decode(context, batch)
    if status:
        raise RuntimeError(f"llama_decode: {status}")
    llama_cpp.llama_synchronize(context)
