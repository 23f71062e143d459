"""What a store of KV blocks must do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_MAX_REASON = 200  # characters


class StoreError(Exception):
    """A store that is down, slow, full, or answers nonsense."""


@contextmanager
def store_errors() -> Iterator[None]:
    """Raise StoreError for any exception, because the peer decides what a client package raises."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(f"{type(error).__name__}: {error}"[:_MAX_REASON]) from None


@dataclass(frozen=True)
class Entry:
    """A block in a store. `age` is the time since its last use in seconds, if known."""

    name: str
    num_bytes: int
    age: float | None = None


class BlockStore(Protocol):
    """Keeps values under names. Every method may raise StoreError. Thread-safe."""

    @property
    def folder(self) -> Path | None:
        """Return the folder of a store on this machine, or None."""
        ...

    def get(self, name: str, *, max_bytes: int) -> bytes | None:
        """Return a value of at most `max_bytes`, or None if there is none."""
        ...

    def put(self, name: str, value: bytes) -> None:
        """Store a value. It may be evicted at any time."""
        ...

    def remove(self, name: str) -> bool:
        """Remove a value. Return whether there was one."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Yield all values, in no particular order."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...
