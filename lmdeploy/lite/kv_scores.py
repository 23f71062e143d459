"""Position by position, how the logits of one cell differ from those of `none`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmdeploy.lite.kv_cells import REFERENCE, CellEngine, Floats, KvCell

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

# A row per position: -log p(target), KL(none || cell), 1 if both have the same most likely token.
LOSS, KL, AGREED = range(3)


def cut_contexts(ids: Sequence[int], context: int, *, max_tokens: int) -> list[list[int]]:
    """Whole contexts of the first `max_tokens` ids.

    Raises:
        ValueError: when there is not one whole context.
    """
    usable = min(len(ids), max_tokens)
    if usable < context:
        raise ValueError(
            f"{usable} tokens do not fill one context of {context}: give a longer text, "
            "a larger --max-tokens or a smaller --context"
        )
    return [list(ids[i : i + context]) for i in range(0, usable - context + 1, context)]


def log_sums(logits: Floats) -> Doubles:
    """log Σ exp of each row, the sum in double precision."""
    top = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - top).sum(axis=1, dtype=np.float64)
    return np.asarray(top[:, 0] + np.log(total), np.float64)


@dataclass
class ReferenceLogits:
    """The logits of `none` for one context, and what every cell needs of them."""

    logits: Floats  # [context, vocab]
    log_sum: Doubles  # [context]

    def fill(self, start: int, piece: Floats) -> None:
        """Positions from `start` on."""
        self.logits[start : start + len(piece)] = piece
        self.log_sum[start : start + len(piece)] = log_sums(piece)

    def score(self, start: int, piece: Floats, *, targets: Ids) -> Doubles:
        """Rows [n, 3] of the positions from `start` on that have a target."""
        rows = slice(start, start + len(targets))
        ours, theirs = piece[: len(targets)], self.logits[rows]
        own_sum = log_sums(ours)
        log_sum = self.log_sum[rows]
        scores = np.empty((len(targets), 3))
        scores[:, LOSS] = own_sum - ours[np.arange(len(targets)), targets]
        # KL = Σ p (log p - log q), with log p - log q = (theirs - ours) + (own_sum - log_sum).
        weight = np.exp(theirs - log_sum[:, None].astype(np.float32))
        apart = (weight * (theirs - ours)).sum(axis=1, dtype=np.float64)
        mass = weight.sum(axis=1, dtype=np.float64)
        scores[:, KL] = apart / mass + own_sum - log_sum
        scores[:, AGREED] = ours.argmax(axis=1) == theirs.argmax(axis=1)
        return scores


@contextmanager
def reference_room(context: int, vocab_size: int) -> Iterator[ReferenceLogits]:
    """Room for one context, in a temporary file: a context of 8192 takes 1.6 GB."""
    with tempfile.TemporaryFile() as file:
        shape = (context, vocab_size)
        logits: Floats = np.memmap(file, np.float32, "w+", shape=shape)
        yield ReferenceLogits(logits, np.empty(context))


def score_prompt(engine: CellEngine, ids: Sequence[int], *, reference: ReferenceLogits) -> Doubles:
    """[len(ids) - 1, 3] for every position but the last."""
    targets = np.array(ids[1:], np.int64)
    scores, start = [], 0
    for piece in engine.pieces(ids):
        scores.append(reference.score(start, piece, targets=targets[start : start + len(piece)]))
        start += len(piece)
    return np.concatenate(scores)


def summary(scores: Doubles) -> dict[str, float | int]:
    """Perplexity, KL mean and 99th percentile in nats, top-1 agreement."""
    return {
        "ppl": float(np.exp(scores[:, LOSS].mean())),
        "kl_mean": float(scores[:, KL].mean()),
        "kl_p99": float(np.quantile(scores[:, KL], 0.99)),
        "top1": float(scores[:, AGREED].mean()),
        "tokens": len(scores),
    }


@dataclass
class ScoreFolder:
    """Scores by context, one small file each: what is there is not measured again."""

    folder: Path
    cells: Sequence[KvCell]
    contexts: Sequence[Sequence[int]]

    def path(self, index: int, cell: KvCell) -> Path:
        """The file of one cell and context."""
        return self.folder / f"{index:04d}-{cell.slug}.npy"

    def num_missing(self) -> int:
        """Prompts still to be read, those of `none` for the others included."""
        return sum(len(self._missing(i)) for i in range(len(self.contexts)))

    def _missing(self, index: int) -> list[KvCell]:
        missing = [cell for cell in self.cells if not self.path(index, cell).exists()]
        return [REFERENCE, *(c for c in missing if c != REFERENCE)] if missing else []

    def fill(
        self,
        engine_of: Callable[[KvCell], CellEngine],
        *,
        vocab_size: int,
        done: Callable[[KvCell], None],
    ) -> None:
        """Measure what is missing; `done` hears of every prompt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with reference_room(len(self.contexts[0]), vocab_size) as room:
            for index, ids in enumerate(self.contexts):
                for cell in self._missing(index):
                    if cell == REFERENCE:
                        start = 0
                        for piece in engine_of(cell).pieces(ids):
                            room.fill(start, piece)
                            start += len(piece)
                        scores = reference_scores(room, ids)
                    else:
                        scores = score_prompt(engine_of(cell), ids, reference=room)
                    save_array(self.path(index, cell), scores)
                    done(cell)

    def summary(self, cell: KvCell) -> dict[str, float | int]:
        """The figures of one cell over all contexts."""
        paths = [self.path(index, cell) for index in range(len(self.contexts))]
        return summary(np.concatenate([np.load(path) for path in paths]))


def reference_scores(room: ReferenceLogits, ids: Sequence[int]) -> Doubles:
    """`none` against itself: its loss alone is worth knowing."""
    targets = np.array(ids[1:], np.int64)
    scores = np.zeros((len(targets), 3))
    scores[:, LOSS] = room.log_sum[: len(targets)] - room.logits[np.arange(len(targets)), targets]
    scores[:, AGREED] = 1
    return scores


def save_array(path: Path, array: Doubles) -> None:
    """Whole or not at all: a run may be interrupted."""
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.save(file, array)
    unfinished.rename(path)
