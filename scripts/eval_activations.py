"""Measure what the rounding of activations costs, beside FP32 arithmetic with the same weights.

    python scripts/eval_activations.py MODEL TEXT... --context 512 --max-tokens 2048

For each text, it prints perplexity, KL divergence and top-1 agreement (lmdeploy/lite/divergence.py)
with `deterministic`, with the default, which differs on AVX-512 and AMX, and with activations of 8
bits (`gemm_input_dtype`). K and V are stored in 16 bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from eval_ppl import positive

from lmdeploy.lite.divergence import Score, add_pieces, cut_contexts, raw_none, read_text
from lmdeploy.lite.prompt_engine import Floats, OpenModel, PromptEngine, open_model

OPTIONS_OF_LABEL: dict[str, dict[str, Any]] = {
    "deterministic": {},
    "default": {"deterministic": False},
    "int8": {"int8_activations": True},
}


def logits(model: OpenModel, ids: Sequence[int]) -> Floats:
    """Return the logits of all positions of a context, [n, vocab]."""
    with PromptEngine(model, raw_none, context=len(ids)) as engine:
        return np.concatenate(list(engine.pieces(ids)))


def compare(path: str, contexts: Sequence[Sequence[int]]) -> dict[str, Score]:
    """Return the scores of a text by label."""
    scores = {label: Score() for label in OPTIONS_OF_LABEL}
    exact = open_model(path, exact=True)
    references = [logits(exact, ids) for ids in contexts]
    del exact
    served = open_model(path)
    for label, options in OPTIONS_OF_LABEL.items():
        model = dataclasses.replace(served, **options)
        for ids, reference in zip(contexts, references, strict=True):
            add_pieces(scores[label], [logits(model, ids)], ids=ids, reference=reference)
    return scores


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder, GGUF file, hub id or smollm2")
    parser.add_argument("texts", type=Path, nargs="+", metavar="TEXT", help="UTF-8 text files")
    parser.add_argument("--context", type=positive, default=512)
    parser.add_argument("--max-tokens", type=positive, default=2048, help="of each text")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    options = parse_arguments(arguments)
    print(f"{'text':<24} {'arithmetic':<14} {'ppl':>9} {'KL':>10} {'top-1':>8} {'tokens':>7}")
    try:
        tokenizer = open_model(options.model).loaded.tokenizer
        for path in options.texts:
            ids = tokenizer.encode(read_text(path, flag="TEXT"), add_special=False)
            contexts = cut_contexts(ids, options.context, max_tokens=options.max_tokens)
            for label, score in compare(options.model, contexts).items():
                row = score.report()
                print(
                    f"{path.name:<24} {label:<14} {row['ppl']:>9.4f} {row['kl_mean']:>10.2e} "
                    f"{row['top1']:>8.4f} {row['tokens']:>7}"
                )
    except (ValueError, OSError) as error:
        print(f"eval_activations.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
