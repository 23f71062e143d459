"""Times llama.cpp on the same file through the low-level API of llama-cpp-python."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from cells import Cell, Timing

BATCH_TOKENS = 2048
MICRO_BATCH_TOKENS = 512
WARM_TOKENS = 16
# ggml_type; some are not among the names of llama-cpp-python.
KV_TYPES = {
    "f16": 1,
    "bf16": 30,
    "f32": 0,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "iq4_nl": 20,
    "q4_1": 3,
    "q4_0": 2,
    "mxfp4": 39,
    "nvfp4": 40,
}
FLOAT_TYPES = ("f16", "bf16", "f32")


@dataclass(frozen=True)
class PeerSetting:
    """Types of the KV cache, whether flash attention is used, and rows of one graph."""

    k: str
    v: str
    flash_attention: bool
    micro_batch: int = MICRO_BATCH_TOKENS

    @property
    def name(self) -> str:
        """As the tables say it."""
        types = self.k if self.k == self.v else f"{self.k} keys, {self.v} values"
        attention = ", flash attention" if self.flash_attention else ""
        rows = "" if self.micro_batch == MICRO_BATCH_TOKENS else f", ubatch {self.micro_batch}"
        return types + attention + rows


SETTINGS = (
    PeerSetting("f16", "f16", False),
    PeerSetting("f16", "f16", True),
    PeerSetting("bf16", "bf16", True),
    PeerSetting("q8_0", "q8_0", True),
    PeerSetting("q4_0", "q4_0", True),
)
# Quantised values need flash attention, quantised keys do not.
EVERY_SETTING = tuple(
    [PeerSetting(kind, kind, True) for kind in KV_TYPES]
    + [PeerSetting(kind, kind if kind in FLOAT_TYPES else "f16", False) for kind in KV_TYPES]
)
SIXTEEN_BIT = tuple(s for s in EVERY_SETTING if s.k in ("f16", "bf16") and s.v == s.k)


def discard(*arguments: object) -> None:
    """llama.cpp logs nothing."""


silent = llama_cpp.llama_log_callback(discard)


def build_of_llama_cpp() -> dict[str, str]:
    """Version, compiler and instruction sets of the library that is loaded."""
    library = Path(llama_cpp.__file__).parent / "lib/libggml-cpu.so"
    found = None
    if library.is_file():
        found = re.search(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", library.read_bytes())
    system = llama_cpp.llama_print_system_info()
    return {
        "llama_cpp_python": llama_cpp.__version__,
        "compiler": found.group().decode() if found else "unknown",
        "flags": (system.decode() if isinstance(system, bytes) else str(system)).strip(" |"),
    }


class PeerContext:
    """A context with one setting: `prefill` and `decode` may be called again and again."""

    def __init__(self, context: ctypes.c_void_p, batch: Any, *, cell: Cell, vocab: int) -> None:
        self._context, self._batch, self._cell = context, batch, cell
        self._prompts = cell.prompts(vocab)
        self._memory = llama_cpp.llama_get_memory(context)

    def prefill(self) -> float:
        """Prompt tokens per second, all sequences; the cache then holds them."""
        llama_cpp.llama_memory_clear(self._memory, False)
        pending = self._pending(self._prompts)
        begun = time.perf_counter()
        self._read(pending)
        return self._cell.context * self._cell.batch / (time.perf_counter() - begun)

    def warm_up(self) -> None:
        """Reads the beginning of a prompt: threads run and pages are there."""
        llama_cpp.llama_memory_clear(self._memory, False)
        self._read(self._pending(self._prompts[:1])[:WARM_TOKENS])

    def fill(self) -> None:
        """One prompt in every sequence; each has its own copy unless the cell shares it."""
        llama_cpp.llama_memory_clear(self._memory, False)
        self._read(self._pending(self._prompts[:1]))
        for sequence in range(1, self._cell.batch):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _pending(self, prompts: list[list[int]]) -> list[tuple[int, int, int, bool]]:
        last = self._cell.context - 1
        return [
            (token, position, sequence, position == last)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]

    def _read(self, pending: list[tuple[int, int, int, bool]]) -> None:
        for start in range(0, len(pending), BATCH_TOKENS):
            decode(self._context, self._batch, tokens=pending[start : start + BATCH_TOKENS])

    def decode(self, steps: int | None = None) -> float:
        """Tokens per second, all sequences together; what was added is taken off again.

        `steps` None: those of the cell.
        """
        context, batch = self._cell.context, self._cell.batch
        steps = steps or self._cell.steps
        started = time.perf_counter()
        for position in range(context, context + steps):
            tokens = [(17 + s, position, s, True) for s in range(batch)]
            decode(self._context, self._batch, tokens=tokens)
        seconds = time.perf_counter() - started
        for sequence in range(batch):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, context, -1)
        return steps * batch / seconds


class LlamaCpp:
    """The model is loaded once; every run makes a context of the size it needs."""

    def __init__(
        self, path: str, *, threads: int, use_mmap: bool = True, repack: bool = True
    ) -> None:
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._threads = threads
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_mmap, parameters.use_extra_bufts = use_mmap, repack
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise ValueError(f"{path}: llama.cpp cannot load it")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))

    @contextmanager
    def context(self, cell: Cell, setting: PeerSetting) -> Iterator[PeerContext]:
        """Room for the cell: a cache of its own for every sequence, one for shared prompts.

        Raises RuntimeError where llama.cpp refuses the setting.
        """
        parameters = llama_cpp.llama_context_default_params()
        room = cell.context + cell.steps + 8
        parameters.n_ctx = (
            cell.context + cell.batch * (cell.steps + 8) if cell.shared else (room * cell.batch)
        )
        parameters.n_seq_max, parameters.kv_unified = cell.batch, cell.shared
        parameters.n_batch = max(BATCH_TOKENS, setting.micro_batch)
        parameters.n_ubatch = setting.micro_batch
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.type_k, parameters.type_v = KV_TYPES[setting.k], KV_TYPES[setting.v]
        parameters.flash_attn_type = int(setting.flash_attention)
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp refuses {setting.name} with {parameters.n_ctx} tokens")
        batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        try:
            yield PeerContext(context, batch, cell=cell, vocab=self.vocab_size)
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    def run(self, cell: Cell, setting: PeerSetting) -> Timing:
        """As OurEngine.run. Shared prompts share the cells of a unified cache."""
        with self.context(cell, setting) as context:
            if not cell.shared:
                return Timing(context.prefill(), context.decode())
            context.fill()
            return Timing(None, context.decode())

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
