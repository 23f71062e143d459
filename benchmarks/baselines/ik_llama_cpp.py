"""Times ik_llama.cpp, a fork of llama.cpp, on the same file through its llama-bench program."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from our_engine import Cell

TIMEOUT_S = 1800


@dataclass(frozen=True)
class Setting:
    """Types of the KV cache, flash attention, and whether weights are repacked when loaded."""

    cache: str
    flash_attention: bool
    repack: bool

    @property
    def name(self) -> str:
        """Return the name in tables."""
        flash = ", flash attention" if self.flash_attention else ""
        return f"{self.cache}{flash}" + (", repacked" if self.repack else "")


_REPACKED = Setting("f16", True, True)
_CHOICES = (_REPACKED, Setting("f16", True, False), Setting("q8_0", True, True))


class Context:
    """One cell with one setting. Every run is a process that warms up before it measures."""

    def __init__(self, command: Sequence[str], cell: Cell) -> None:
        self._command, self._cell = command, cell

    def prefill(self) -> float:
        """Read the prompt and return tokens per second."""
        return self._run("-p", str(self._cell.context), "-n", "0")

    def fill(self) -> None:
        """Do nothing: every process of `decode` reads its own prompt."""

    def decode(self) -> float:
        """Decode after a prompt and return tokens per second, without the prompt's time."""
        return self._run("-p", "0", "-n", "0", "-gp", f"{self._cell.context},{self._cell.steps}")

    def _run(self, *arguments: str) -> float:
        """Run llama-bench and return its tokens per second."""
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if done.returncode:
            raise RuntimeError(f"llama-bench: exit {done.returncode}: {done.stderr[-300:]}")
        rows = json.loads(done.stdout)
        return float(rows[-1]["avg_ts"])


class IkLlamaCpp:
    """llama-bench of ik_llama.cpp. Raise ValueError if the program does not exist."""

    name = "ik_llama.cpp"

    def __init__(self, path: str, *, threads: int, program: Path | None) -> None:
        if program is None or not program.is_file():
            raise ValueError("pass --ik-llama-bench PATH, the llama-bench of ik_llama.cpp")
        self._program = program
        self._command = [str(program), "-m", path, "-t", str(threads), "-r", "1", "-o", "json"]

    def about(self) -> str:
        """Return the name of the program, which reports no version."""
        return f"ik_llama.cpp, {self._program.name}"

    def settings(self, work: str) -> Sequence[Setting]:
        """Return the settings to try. Repacking at run time makes prompts faster."""
        if work in ("batch", "server"):
            return ()
        return _CHOICES[:2] if work == "16 bit" else _CHOICES

    @contextmanager
    def context(self, cell: Cell, setting: Setting) -> Iterator[Context]:
        """Return the cell. Raise RuntimeError for several sequences, which it cannot time."""
        if cell.batch > 1:
            raise RuntimeError("llama-bench times one sequence")
        flash, repack = str(int(setting.flash_attention)), str(int(setting.repack))
        options = ["-ctk", setting.cache, "-ctv", setting.cache, "-fa", flash, "-rtr", repack]
        yield Context([*self._command, *options], cell)

    def close(self) -> None:
        """Do nothing: every process has ended."""
