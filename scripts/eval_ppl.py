"""Measure perplexity, KL divergence and top-1 agreement of KV formats with the format `none`.

    python scripts/eval_ppl.py MODEL TEXT --modes none,int8,nvfp4 --context 2048 --max-tokens 20000
    python scripts/eval_ppl.py MODEL TEXT --modes nvfp4 --kv-quality raw,best --kv-calibration FILE

Int8 activations add noise of about 0.004 to the KL divergence, so the default computes in FP32.
lmdeploy/lite/divergence.py defines the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmdeploy.cli.option_flags import add_flags, flag_values, names_of
from lmdeploy.config.engine import KV_INGREDIENTS, TurbomindEngineConfig
from lmdeploy.config.kv_format_options import reported_formats
from lmdeploy.engine.kv_quality import resolve_kv_options
from lmdeploy.lite.divergence import cache_variants, cut_contexts, evaluate, read_text
from lmdeploy.lite.prompt_engine import OpenModel, open_model

MODES = reported_formats()
INGREDIENTS = names_of(TurbomindEngineConfig, KV_INGREDIENTS)

Figures = dict[str, dict[str, float | int]]


def run(options: argparse.Namespace) -> tuple[Figures, dict[str, dict[str, str]]]:
    """Return the figures by label, and the settings of the labels that are not raw formats."""
    modes = options.modes or (() if options.kv_cache_format else MODES)
    variants = cache_variants(
        [*modes, *options.kv_cache_format],
        options.kv_quality.split(","),
        calibration=options.calibration,
        ingredients=flag_values(TurbomindEngineConfig, options, INGREDIENTS),
    )
    text = read_text(options.text)
    model = open_model(options.model, exact=options.exact)
    configures = {label: model.configure(config) for label, config in variants.items()}
    ids = model.loaded.tokenizer.encode(text, add_special=False)
    contexts = cut_contexts(ids, options.context, max_tokens=options.max_tokens)
    scores = evaluate(model, contexts, variants=configures)
    return {label: score.report() for label, score in scores.items()}, setups(model, variants)


def setups(
    model: OpenModel, variants: Mapping[str, TurbomindEngineConfig]
) -> dict[str, dict[str, str]]:
    """Return formats and ingredients by label, except for raw formats."""
    resolved = {
        label: resolve_kv_options(config, model.config.windows, k_bias=model.config.k_bias)
        for label, config in variants.items()
    }
    return {
        label: options.labels()
        for label, options in resolved.items()
        if options.quality_text != "raw" or options.format != label
    }


def print_table(figures: Figures) -> None:
    """Print one line per label."""
    width = max(10, *map(len, figures))
    head = f"{'ppl':>9} {'KL mean':>10} {'KL p99':>10} {'top-1':>8} {'tokens':>8}"
    print(f"{'mode':<{width}} {head}")
    for label, row in figures.items():
        print(
            f"{label:<{width}} {row['ppl']:>9.4f} {row['kl_mean']:>10.6f} {row['kl_p99']:>10.5f} "
            f"{row['top1']:>8.4f} {row['tokens']:>8}"
        )


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="folder, GGUF file, hub id or smollm2")
    parser.add_argument("text", type=Path, help="UTF-8 text file")
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        help=f"default: {','.join(MODES)}, or none of them with --kv-cache-format",
    )
    parser.add_argument(
        "--kv-cache-format",
        action="append",
        default=[],
        help="a pair (k=fp8,v=nvfp4) or a YAML file, in addition to the modes; may be repeated",
    )
    parser.add_argument("--kv-quality", default="raw", help="with commas; default: %(default)s")
    parser.add_argument(
        "--kv-calibration",
        "--calibration",
        dest="calibration",
        metavar="FILE",
        help="file of `lmdeploy lite calibrate`, for best",
    )
    add_flags(parser, TurbomindEngineConfig, title=KV_INGREDIENTS, names=INGREDIENTS)
    parser.add_argument("--context", type=positive, default=2048)
    parser.add_argument("--max-tokens", type=positive, default=1 << 30, help="of the text")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="FP32 compute, so that only the format matters; --no-exact computes as a server",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print a table, write the JSON file."""
    options = parse_arguments(arguments)
    try:
        figures, meanings = run(options)
    except (ValueError, OSError) as error:
        print(f"eval_ppl.py: {error}", file=sys.stderr)
        return 2
    print_table(figures)
    if options.json:
        facts = {
            "model": options.model,
            "text": options.text.name,
            "context": options.context,
            "exact": options.exact,
            "modes": figures,
        }
        if meanings:
            facts["setups"] = meanings
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
