"""The interface of a baseline, as the suite uses it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from our_engine import Cell


class Setting(Protocol):
    """One configuration of a baseline."""

    @property
    def name(self) -> str:
        """Return the name in tables and on the command line."""


class Context(Protocol):
    """A baseline that is ready to run one cell with one setting."""

    def prefill(self) -> float:
        """Read all prompts and return tokens per second."""

    def fill(self) -> None:
        """Prepare for `decode`."""

    def decode(self) -> float:
        """Decode the steps of the cell with all sequences and return tokens per second."""


class Baseline(Protocol):
    """Another engine that reads the same file with the same number of threads."""

    name: str

    def about(self) -> str:
        """Return its name, its version and how it was built."""

    def settings(self, work: str) -> Sequence[Setting]:
        """Return the settings to try for a kind of work; the fastest one counts.

        `work` is "16 bit", "decode", "batch", "server" or "prefill".
        """

    def context(self, cell: Cell, setting: Any) -> AbstractContextManager[Context]:
        """Get ready for a cell. Raise RuntimeError if the engine refuses the setting."""

    def close(self) -> None:
        """Free the model."""
