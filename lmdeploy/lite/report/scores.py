"""Scores the logits of a cell against those of `none`, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmdeploy.lite.divergence import Doubles, fill_reference, log_sums, reference_logits
from lmdeploy.lite.prompt_engine import Floats, OpenModel, PromptEngine
from lmdeploy.lite.report.cells import REFERENCE, Done, KvVariant

Ids = npt.NDArray[np.int64]

# Columns of the scores of a position: -log p(target), KL(none || cell), 1 if the argmax is equal.
LOSS, KL, AGREED = range(3)


def score_rows(logits: Floats, reference: Floats, *, targets: Ids) -> Doubles:
    """Return the scores, [n, 3], of logits [n, vocab] that predict `targets` [n].

    KL = Σ p (log p - log q). The difference log p - log q is that of the logits minus that of the
    log sums. FP32 suffices because the subtraction of nearly equal logits is exact.
    """
    own_sums, sums = log_sums(logits), log_sums(reference)
    weight = np.exp(reference - sums[:, None].astype(np.float32))
    apart = (weight * (reference - logits)).sum(axis=1, dtype=np.float64)
    scores = np.empty((len(targets), 3))
    scores[:, LOSS] = own_sums - logits[np.arange(len(targets)), targets]
    scores[:, KL] = apart / weight.sum(axis=1, dtype=np.float64) + own_sums - sums
    scores[:, AGREED] = logits.argmax(axis=1) == reference.argmax(axis=1)
    return scores


def score_prompt(engine: PromptEngine, ids: Sequence[int], *, reference: Floats) -> Doubles:
    """Run a prompt and return the scores, [len(ids) - 1, 3], of all positions except the last."""
    targets = np.array(ids[1:], np.int64)
    scores, start = [], 0
    for piece in engine.pieces(ids):
        wanted = targets[start : start + len(piece)]
        rows = slice(start, start + len(wanted))
        scores.append(score_rows(piece[: len(wanted)], reference[rows], targets=wanted))
        start += len(piece)
    return np.concatenate(scores)


def reference_scores(reference: Floats, ids: Sequence[int]) -> Doubles:
    """Return the scores of `none`, [len(ids) - 1, 3]. Its KL is 0 and its agreement is 1."""
    targets = np.array(ids[1:], np.int64)
    scores = np.zeros((len(targets), 3))
    sums = np.concatenate([log_sums(reference[i : i + 1]) for i in range(len(targets))])
    scores[:, LOSS] = sums - reference[np.arange(len(targets)), targets]
    scores[:, AGREED] = 1
    return scores


def summary(scores: Doubles) -> dict[str, float | int]:
    """Return perplexity, mean and 99th percentile of KL in nats, top-1 agreement and tokens."""
    return {
        "ppl": float(np.exp(scores[:, LOSS].mean())),
        "kl_mean": float(scores[:, KL].mean()),
        "kl_p99": float(np.quantile(scores[:, KL], 0.99)),
        "top1": float(scores[:, AGREED].mean()),
        "tokens": len(scores),
    }


@dataclass
class ScoreFolder:
    """A folder with one file of scores per cell and context. Saved scores are reused."""

    folder: Path
    cells: Sequence[KvVariant]
    contexts: Sequence[Sequence[int]]

    def path(self, index: int, cell: KvVariant) -> Path:
        """Return the file of one cell and context."""
        return self.folder / f"{index:04d}-{cell.slug}.npy"

    def num_missing(self) -> int:
        """Return the number of prompts to run, including those of `none` for other cells."""
        return sum(len(self._missing(i)) for i in range(len(self.contexts)))

    def fill(self, model: OpenModel, done: Done) -> None:
        """Measure the missing scores. Call `done` with the cell's label after every prompt."""
        if self.num_missing() == 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        longest = max(map(len, self.contexts))
        with reference_logits(longest, model.config.vocab_size) as reference:
            for index, ids in enumerate(self.contexts):
                for cell in self._missing(index):
                    with PromptEngine(model, cell.configure, context=len(ids)) as engine:
                        if cell.label == REFERENCE:
                            fill_reference(engine, ids, reference=reference)
                            scores = reference_scores(reference, ids)
                        else:
                            scores = score_prompt(engine, ids, reference=reference)
                    save_array(self.path(index, cell), scores)
                    done(cell.label)

    def summary(self, cell: KvVariant) -> dict[str, float | int]:
        """Return the figures of one cell over all contexts."""
        paths = [self.path(index, cell) for index in range(len(self.contexts))]
        return summary(np.concatenate([np.load(path) for path in paths]))

    def _missing(self, index: int) -> list[KvVariant]:
        """Return the missing cells of a context, after `none`, which provides the baseline."""
        missing = [cell for cell in self.cells if not self.path(index, cell).exists()]
        reference = [cell for cell in self.cells if cell.label == REFERENCE]
        return [*reference, *(c for c in missing if c.label != REFERENCE)] if missing else []


def save_array(path: Path, array: Doubles) -> None:
    """Write an array atomically, because a run may be interrupted."""
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.save(file, array)
    unfinished.rename(path)
