"""Measures the accuracy of a KV cache: perplexity, KL divergence and top-1 agreement.

The baseline is the 16-bit cache (format `none`). The text is split into independent contexts. All
positions of a context except the last are scored, with logits from the prefill. The divergence is
KL(none || format) in nats. One chunk of logits is in memory at a time. A temporary file holds the
baseline's logits of the current context.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import refuse
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.lite.prompt_engine import (
    PIECE_TOKENS,
    Configure,
    Floats,
    OpenModel,
    PromptEngine,
)

if TYPE_CHECKING:
    from lmdeploy import _turbomind

Doubles = npt.NDArray[np.float64]

REFERENCE = "none"


@dataclass
class Score:
    """Sums over the positions seen so far."""

    log_loss: float = 0.0
    agreed: int = 0
    tokens: int = 0
    divergences: list[Doubles] = field(default_factory=list)

    def add(self, logits: Floats, reference: Floats, *, targets: npt.NDArray[np.int64]) -> None:
        """Add n positions. `logits` and `reference`, both [n, vocab], predict `targets`, [n]."""
        ours, theirs = log_softmax(logits), log_softmax(reference)
        self.log_loss -= float(ours[np.arange(len(targets)), targets].sum())
        self.agreed += int((logits.argmax(axis=1) == reference.argmax(axis=1)).sum())
        self.divergences.append((np.exp(theirs) * (theirs - ours)).sum(axis=1))
        self.tokens += len(targets)

    def report(self) -> dict[str, float | int]:
        """Return perplexity, mean and 99th percentile of KL, top-1 agreement and token count."""
        divergence = np.concatenate(self.divergences)
        return {
            "ppl": float(np.exp(self.log_loss / self.tokens)),
            "kl_mean": float(divergence.mean()),
            "kl_p99": float(np.quantile(divergence, 0.99)),
            "top1": self.agreed / self.tokens,
            "tokens": self.tokens,
        }


def log_sums(logits: Floats) -> Doubles:
    """Return log Σ exp of each row, [n], with the sum in double precision."""
    top = logits.max(axis=1)
    total = np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64)
    return np.asarray(top + np.log(total), np.float64)


def log_softmax(logits: Floats) -> Doubles:
    """Return the log probabilities of rows of logits, in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def read_text(path: Path, *, flag: str = "--text") -> str:
    """Read a UTF-8 text file. `flag` is the flag that errors name.

    Raise ValueError if the file does not exist or is not UTF-8.
    """
    if not path.exists() or path.is_dir():
        raise refuse("text", str(path), wanted="an existing file", flag=flag)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The text {path} is not UTF-8: {error.reason}. It must be UTF-8 ({flag})."
        ) from error


def cut_contexts(ids: Sequence[int], context: int, *, max_tokens: int) -> list[list[int]]:
    """Split the first `max_tokens` ids into contexts of `context` tokens. Drop the remainder.

    Raises:
        ValueError: if there are fewer ids than one context.
    """
    usable = min(len(ids), max_tokens)
    if usable < context:
        raise ValueError(
            f"{usable} tokens do not fill one context of {context}. Use a longer text, more of its "
            "tokens, or a smaller --context."
        )
    return [list(ids[i : i + context]) for i in range(0, usable - context + 1, context)]


def cache_variants(
    formats: Iterable[str],
    qualities: Sequence[str],
    *,
    calibration: str | None = None,
    ingredients: Mapping[str, Any] | None = None,
) -> dict[str, TurbomindEngineConfig]:
    """Return the engine options of each combination of format and quality, by label.

    The label is `nvfp4` for the quality raw, `nvfp4/balanced` for balanced and so on. `none` occurs
    once. Raise ValueError for an unknown format or quality, or for `best` without a calibration
    file.
    """
    variants: dict[str, TurbomindEngineConfig] = {}
    for name in formats:
        if TurbomindEngineConfig(kv_cache_format=name).kv_format == "none":
            variants.setdefault(REFERENCE, TurbomindEngineConfig())
            continue
        for quality in qualities:
            fields: dict[str, Any] = dict(ingredients or {})
            config = TurbomindEngineConfig(
                kv_cache_format=name,
                kv_quality=quality,  # type: ignore[arg-type]  # checked there
                kv_calibration=calibration if quality == "best" else None,
                **fields,
            )
            variants[name if quality == "raw" else f"{name}/{quality}"] = config
    return variants


def raw_none(engine_config: _turbomind.EngineConfig) -> None:
    """Configure the baseline, which stores all of K and V in 16 bit."""
    engine_config.kv_format = REFERENCE


def evaluate(
    model: OpenModel,
    contexts: Sequence[Sequence[int]],
    *,
    variants: Mapping[str, Configure],
) -> dict[str, Score]:
    """Score each variant against the 16-bit cache and return the scores by label.

    Only one engine exists at a time. The variant `none` reuses the logits of the baseline.
    """
    from tqdm import tqdm

    scores = {label: Score() for label in variants}
    length = max(map(len, contexts))
    with (
        reference_logits(length, model.config.vocab_size) as reference,
        tqdm(total=len(contexts) * (len(variants) + 1), unit="run", disable=None) as bar,
    ):
        for ids in contexts:
            bar.set_postfix_str(REFERENCE)
            with PromptEngine(model, raw_none, context=length) as engine:
                fill_reference(engine, ids, reference=reference)
            bar.update()
            for label, configure in variants.items():
                bar.set_postfix_str(label)
                if label == REFERENCE:
                    rows = range(0, len(ids), PIECE_TOKENS)
                    own = (reference[i : min(i + PIECE_TOKENS, len(ids))] for i in rows)
                    add_pieces(scores[label], own, ids=ids, reference=reference)
                else:
                    with PromptEngine(model, configure, context=length) as engine:
                        pieces = engine.pieces(ids)
                        add_pieces(scores[label], pieces, ids=ids, reference=reference)
                bar.update()
    return scores


@contextlib.contextmanager
def reference_logits(context: int, vocab_size: int) -> Iterator[Floats]:
    """Map a temporary file as an array for the logits of one context, [context, vocab]."""
    with tempfile.TemporaryFile() as file:
        yield np.memmap(file, np.float32, "w+", shape=(context, vocab_size))


def fill_reference(engine: PromptEngine, ids: Sequence[int], *, reference: Floats) -> None:
    """Write the logits of `ids` into the first rows of `reference`."""
    start = 0
    for piece in engine.pieces(ids):
        reference[start : start + len(piece)] = piece
        start += len(piece)


def add_pieces(
    score: Score, pieces: Iterable[Floats], *, ids: Sequence[int], reference: Floats
) -> None:
    """Add the positions of one context to `score`. `pieces` are chunks of its logits in order."""
    targets = np.array(ids[1:], np.int64)
    start = 0
    for piece in pieces:
        count = min(len(piece), len(targets) - start)
        if count > 0:
            rows = slice(start, start + count)
            score.add(piece[:count], reference[rows], targets=targets[rows])
        start += len(piece)
