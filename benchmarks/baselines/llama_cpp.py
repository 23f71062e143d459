"""Times llama.cpp on the same file through the low-level API of llama-cpp-python."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
from our_engine import Cell

from baselines.settings import SETTINGS, Setting

BATCH_TOKENS = 2048
# ggml_type; llama-cpp-python does not name all of them.
KV_TYPES = {"f16": 1, "bf16": 30, "f32": 0, "q8_0": 8, "q5_1": 7, "q4_0": 2}
# Symbols in libggml-cpu.so that show which kernels were compiled. The flags that llama.cpp reports
# are not enough: a build may report AMX_INT8 = 1 and lack the AMX matrix product.
KERNEL_SYMBOLS = {
    "amx": b"ggml_backend_amx_mul_mat",
    "repack": b"ggml_gemm_q4_0_8x8_q8_0",
    "llamafile": b"llamafile_sgemm",
    "openmp": b"GOMP_parallel",
}


def library_bytes() -> bytes:
    """Return the CPU library of llama-cpp-python, or nothing if it has another layout.

    LLAMA_CPP_LIB_PATH is the folder from which llama-cpp-python loads its libraries, if it is set.
    """
    folder = os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib"
    library = Path(folder) / "libggml-cpu.so"
    return library.read_bytes() if library.is_file() else b""


def build_of_llama_cpp() -> dict[str, str]:
    """Return version, compiler and reported flags of the loaded library.

    A library built by clang also names GCC, from the startup code of the C library.
    """
    data = library_bytes()
    found = re.search(rb"clang version [\d.]+", data) or re.search(rb"GCC: \([^)]*\) [\d.]+", data)
    system = llama_cpp.llama_print_system_info()
    return {
        "llama_cpp_python": llama_cpp.__version__,
        "compiler": found.group().decode() if found else "unknown",
        "flags": (system.decode() if isinstance(system, bytes) else str(system)).strip(" |"),
    }


def kernels_in_library() -> dict[str, bool]:
    """Return which kernels the library contains, from the symbols in its file."""
    data = library_bytes()
    return {name: symbol in data for name, symbol in KERNEL_SYMBOLS.items()}


class Context:
    """A context with one setting. `prefill` and `decode` may be called repeatedly."""

    def __init__(self, context: ctypes.c_void_p, batch: Any, *, cell: Cell, vocab: int) -> None:
        self._context, self._batch, self._cell = context, batch, cell
        self._prompts = cell.prompts(vocab)
        self._memory = llama_cpp.llama_get_memory(context)

    def prefill(self) -> float:
        """Read all prompts and return tokens per second."""
        llama_cpp.llama_memory_clear(self._memory, False)
        pending = self._pending(self._prompts)
        begun = time.perf_counter()
        self._read(pending)
        return self._cell.context * self._cell.batch / (time.perf_counter() - begun)

    def fill(self) -> None:
        """Put a copy of one prompt into every sequence."""
        llama_cpp.llama_memory_clear(self._memory, False)
        self._read(self._pending(self._prompts[:1]))
        for sequence in range(1, self._cell.batch):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def decode(self) -> float:
        """Decode with all sequences, remove the new tokens and return tokens per second."""
        context, batch, steps = self._cell.context, self._cell.batch, self._cell.steps
        started = time.perf_counter()
        for position in range(context, context + steps):
            self._step([(17 + s, position, s, True) for s in range(batch)])
        seconds = time.perf_counter() - started
        removed = [
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, context, -1)
            for sequence in range(batch)
        ]
        if not all(removed):  # the states of recurrent layers cannot go back
            self.fill()
        return steps * batch / seconds

    def _pending(self, prompts: list[list[int]]) -> list[tuple[int, int, int, bool]]:
        last = self._cell.context - 1
        return [
            (token, position, sequence, position == last)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]

    def _read(self, pending: list[tuple[int, int, int, bool]]) -> None:
        for start in range(0, len(pending), BATCH_TOKENS):
            self._step(pending[start : start + BATCH_TOKENS])

    def _step(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Call llama_decode for (token, position, sequence, with logits) and wait for it."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = logits
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        llama_cpp.llama_synchronize(self._context)


class LlamaCpp:
    """The loaded model. Every run makes a context of the size that it needs."""

    name = "llama.cpp"

    def __init__(
        self, path: str, *, threads: int, use_mmap: bool = True, repack: bool = True
    ) -> None:
        self._log = llama_cpp.llama_log_callback(lambda *_: None)  # keeps the callback alive
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._threads = threads
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_mmap, parameters.use_extra_bufts = use_mmap, repack
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {path}.")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))

    def about(self) -> str:
        """Return the version and the compiler of the loaded library."""
        build = build_of_llama_cpp()
        return f"llama-cpp-python {build['llama_cpp_python']}, {build['compiler']}"

    def settings(self, work: str) -> Sequence[Setting]:
        """Return the settings to try for a kind of work."""
        return SETTINGS[work]

    @contextmanager
    def context(self, cell: Cell, setting: Setting) -> Iterator[Context]:
        """Make a context for the cell. Raises RuntimeError if llama.cpp refuses the setting."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = (cell.context + cell.steps + 8) * cell.batch
        parameters.n_seq_max, parameters.kv_unified = cell.batch, False
        parameters.n_batch, parameters.n_ubatch = BATCH_TOKENS, setting.micro_batch
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.type_k, parameters.type_v = KV_TYPES[setting.k], KV_TYPES[setting.v]
        parameters.flash_attn_type = int(setting.flash_attention)
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise RuntimeError(f"llama.cpp refuses {setting.name} with {parameters.n_ctx} tokens")
        batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        try:
            yield Context(context, batch, cell=cell, vocab=self.vocab_size)
        finally:
            llama_cpp.llama_batch_free(batch)
            llama_cpp.llama_free(context)

    def close(self) -> None:
        """Free the model."""
        llama_cpp.llama_model_free(self._model)
