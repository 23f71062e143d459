"""Measure KV formats on long contexts: divergence by position, and recall of needles by depth.

    python scripts/eval_long.py MODEL TEXT --contexts 4096,32768 --rope-scaling-factor 1 \\
        --formats none,nvfp4 --kv-quality raw,balanced --json FILE

For each context, the first tokens of TEXT are read once per format. The table is that of
llama.cpp's perplexity --kl-divergence, per range of positions: the ratio of perplexities,
KL(none || format) in nats with its percentiles, the change of the target's probability Δp, and the
share of positions with the same most likely token. Needles are those of `lmdeploy lite kv-report`.
With a factor of RoPE, a model reads more positions than it was trained for. The base follows the
length of the context, and `none` shows what that alone costs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from eval_ppl import positive

from lmdeploy.engine.model_files import ModelChanges
from lmdeploy.engine.plan import longest_position
from lmdeploy.lite.divergence import (
    REFERENCE,
    Doubles,
    cache_variants,
    fill_reference,
    raw_none,
    read_text,
    reference_logits,
)
from lmdeploy.lite.prompt_engine import Configure, OpenModel, PromptEngine, open_model
from lmdeploy.lite.report.data import TOKENS_PER_PAIR
from lmdeploy.lite.report.scores import AGREED, KL, LOSS, reference_scores, score_prompt
from lmdeploy.lite.retrieval import DEPTHS, KEYS, ask, make_prompt, recall_summary

FIRST_RANGE = 1024  # positions of the first range; each of the others is twice as long
Figures = dict[str, float | int]


def ranges(context: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions that double: 0 to 1,024, to 2,048, to 4,096, up to the context."""
    start, end = 0, FIRST_RANGE
    while start < context:
        yield start, min(end, context)
        start, end = end, 2 * end


def table_of(scores: Doubles, reference: Doubles) -> Figures:
    """Return the figures of positions from their scores and those of `none`, [n, 3] each."""
    divergence = scores[:, KL]
    change = np.exp(-scores[:, LOSS]) - np.exp(-reference[:, LOSS])
    return {
        "tokens": len(scores),
        "ppl": float(np.exp(scores[:, LOSS].mean())),
        "ppl_ratio": float(np.exp((scores[:, LOSS] - reference[:, LOSS]).mean())),
        "kl_mean": float(divergence.mean()),
        "kl_error": float(divergence.std() / np.sqrt(len(divergence))),
        "kl_max": float(divergence.max()),
        **{
            f"kl_p{percent:g}": float(np.percentile(divergence, percent))
            for percent in (99.9, 99, 90, 50)
        },
        "dp_mean": float(change.mean()),
        "dp_rms": float(np.sqrt((change**2).mean())),
        "top1": float(scores[:, AGREED].mean()),
    }


def divergences(
    model: OpenModel, ids: Sequence[int], *, variants: Mapping[str, Configure]
) -> dict[str, dict[str, Figures]]:
    """Return the figures by label and range of positions of one context."""
    found: dict[str, Doubles] = {}
    with reference_logits(len(ids), model.config.vocab_size) as logits:
        with PromptEngine(model, raw_none, context=len(ids)) as engine:
            fill_reference(engine, ids, reference=logits)
        baseline = reference_scores(logits, ids)
        for label, configure in variants.items():
            if label == REFERENCE:
                found[label] = baseline
                continue
            with PromptEngine(model, configure, context=len(ids)) as engine:
                found[label] = score_prompt(engine, ids, reference=logits)
    return {
        label: {
            f"{start}-{end}": table_of(scores[start:end], baseline[start:end])
            for start, end in ranges(len(ids) - 1)
        }
        for label, scores in found.items()
    }


def needles(
    model: OpenModel,
    filler: Sequence[int],
    *,
    variants: Mapping[str, Configure],
    context: int,
    prompts: int,
) -> dict[str, dict[str, Any]]:
    """Return the recall of planted pairs by label, as `lmdeploy lite kv-report` measures it."""
    encode = model.loaded.tokenizer.encode
    made = [
        make_prompt(
            lambda text: encode(text, add_special=False),
            [*filler[start:], *filler[:start]],
            context=context,
            pairs=min(context // TOKENS_PER_PAIR, len(KEYS)),
            seed=seed,
        )
        for seed in range(prompts)
        for start in [seed * len(filler) // prompts]
    ]
    found = {}
    for label, configure in variants.items():
        answers = []
        for prompt in made:
            with PromptEngine(model, configure, context=len(prompt.ids)) as engine:
                answers.append(ask(engine, prompt))
        found[label] = recall_summary(np.concatenate(answers))
    return found


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def lines_of(context: int, results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the tables of one context as Markdown."""
    head = ["format", "positions", "PPL", "ratio", "KLD mean", "max", "99.9 %", "99 %", "90 %"]
    head += ["median", "Δp mean", "Δp RMS", "same top"]
    yield f"## Context {context:,}"
    yield ""
    yield table_row(head)
    yield table_row(["---"] + ["---:"] * (len(head) - 1))
    for label, by_range in results["divergence"].items():
        for positions, row in by_range.items():
            shares = [row["dp_mean"], row["dp_rms"], row["top1"]]
            cells = [f"`{label}`", positions, f"{row['ppl']:.3f}", f"{row['ppl_ratio']:.4f}"]
            cells += [f"{row['kl_mean']:.5f} ± {row['kl_error']:.5f}"]
            cells += [f"{row[f'kl_{name}']:.4f}" for name in ("max", "p99.9", "p99", "p90", "p50")]
            yield table_row([*cells, *(f"{100 * share:.3f} %" for share in shares)])
    if not results["needles"]:
        return
    yield ""
    tenths = [f"{i}–{i + 1}" for i in range(DEPTHS)]
    yield table_row(["format", "recall", "log prob", *tenths])
    yield table_row(["---"] + ["---:"] * (DEPTHS + 2))
    for label, row in results["needles"].items():
        shares = ["–" if share is None else f"{share:.2f}" for share in row["by_depth"]]
        yield table_row(
            [f"`{label}`", f"{100 * row['recall']:.1f} %", f"{row['log_prob']:.2f}", *shares]
        )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every context and return the results by its length. Print each when it is done."""
    variants = cache_variants(
        options.formats.split(","), options.kv_quality.split(","), calibration=options.calibration
    )
    contexts = [positive(text) for text in options.contexts.split(",")]
    text = read_text(options.text)
    changes = ModelChanges(rope_factor=options.rope_scaling_factor)
    model = open_model(options.model, exact=options.exact, changes=changes)
    longest = longest_position(model.config)
    if max(contexts) > longest and not options.rope_scaling_factor:
        raise ValueError(
            f"--contexts has {max(contexts)}, but the model supports {longest} positions. Extend "
            "them with --rope-scaling-factor."
        )
    ids = model.loaded.tokenizer.encode(text, add_special=False)
    if len(ids) < max(contexts):
        raise ValueError(f"The text has {len(ids)} tokens. It must have those of a context.")
    configures = {label: model.configure(config) for label, config in variants.items()}
    results: dict[str, Any] = {}
    for context in contexts:
        found: dict[str, Any] = {
            "divergence": divergences(model, ids[:context], variants=configures)
        }
        found["needles"] = (
            needles(
                model, ids, variants=configures, context=context, prompts=options.needle_prompts
            )
            if options.needle_prompts
            else {}
        )
        results[str(context)] = found
        print("\n".join(lines_of(context, found)), flush=True)
        if options.json:
            facts = {
                "model": Path(options.model).name,
                "text": options.text.name,
                "exact": options.exact,
            }
            facts["rope_scaling_factor"] = options.rope_scaling_factor
            document = json.dumps({**facts, "contexts": results}, indent=1)
            options.json.write_text(document + "\n", encoding="utf-8")
    return results


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder, GGUF file, hub id or smollm2")
    parser.add_argument("text", type=Path, help="UTF-8 text file with a context of tokens")
    parser.add_argument("--contexts", default="4096", help="with commas; default: %(default)s")
    parser.add_argument("--formats", default="none,int8,fp8,nvfp4", help="default: %(default)s")
    parser.add_argument("--kv-quality", default="balanced", help="with commas; default: balanced")
    parser.add_argument("--kv-calibration", dest="calibration", metavar="FILE", help="for best")
    parser.add_argument(
        "--rope-scaling-factor",
        type=float,
        default=0.0,
        help="dynamic NTK scaling of RoPE by the length of each context, for contexts beyond the "
        "model's positions (default: 0, the model's own RoPE)",
    )
    parser.add_argument(
        "--needle-prompts",
        type=int,
        default=1,
        help="prompts with planted pairs per context; 0 measures none (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--exact", action="store_true", help="compute in FP32")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the JSON file."""
    options = parse_arguments(arguments)
    try:
        run(options)
    except (ValueError, OSError, argparse.ArgumentTypeError) as error:
        print(f"eval_long.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
