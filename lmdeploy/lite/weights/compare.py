"""Compare quantized folders with the original: perplexity, KL divergence and top-1 agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lmdeploy.lite.divergence import Score, add_pieces, fill_reference, raw_none, reference_logits
from lmdeploy.lite.prompt_engine import PIECE_TOKENS, PromptEngine, open_model

ORIGINAL = "original"


def compare_folders(
    original: Path, others: Mapping[str, Path], *, contexts: Sequence[Sequence[int]]
) -> dict[str, Score]:
    """Return the score of each folder by label, against the original as it is served.

    All contexts have the same length. One model is in memory at a time.
    """
    length = len(contexts[0])
    scores = {label: Score() for label in (ORIGINAL, *others)}
    model = open_model(str(original))
    with reference_logits(len(contexts) * length, model.config.vocab_size) as reference:
        parts = [reference[i * length : (i + 1) * length] for i in range(len(contexts))]
        for ids, part in zip(contexts, parts, strict=True):
            with PromptEngine(model, raw_none, context=length) as engine:
                fill_reference(engine, ids, reference=part)
            own = (part[i : i + PIECE_TOKENS] for i in range(0, length, PIECE_TOKENS))
            add_pieces(scores[ORIGINAL], own, ids=ids, reference=part)
        for label, folder in others.items():
            del model
            model = open_model(str(folder))
            for ids, part in zip(contexts, parts, strict=True):
                with PromptEngine(model, raw_none, context=length) as engine:
                    add_pieces(scores[label], engine.pieces(ids), ids=ids, reference=part)
    return scores


def report_lines(scores: Mapping[str, Score]) -> list[str]:
    """Return a table of the scores."""
    lines = [f"{'':<18} {'perplexity':>10} {'KL':>9} {'top-1':>7}"]
    for label, score in scores.items():
        values = score.report()
        lines.append(
            f"{label:<18} {values['ppl']:>10.3f} {values['kl_mean']:>9.5f} {values['top1']:>7.2%}"
        )
    return lines
