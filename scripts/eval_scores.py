"""Compare attention scores with quantized keys to those with 16-bit keys.

    python scripts/eval_scores.py MODEL TEXT --formats int8,fp8,nvfp4 --tokens 1024

transformers computes the model in FP32 with exact attention, because it shows the queries. Keys are
rounded by the engine's codec, as stored (`raw`), or rotated with a search for FP4 scales
(`rotated`, as the presets do). For each query, the cosine and the overlap of the highest scores are
those of all scores before the softmax. The figures say how much of a loss comes from keys.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from eval_ppl import positive

from lmdeploy.config.kv_format_options import reported_formats
from lmdeploy.lite.divergence import read_text

Floats = npt.NDArray[np.float32]

TOP = 8  # the highest scores of a query
FIRST_QUERY = 4 * TOP  # queries before it see too few keys to choose from
CACHE_DTYPE = "float16"


@dataclass
class Agreement:
    """The cosine and the share of common highest scores of every query, layer and head."""

    cosines: list[Floats] = field(default_factory=list)
    overlaps: list[Floats] = field(default_factory=list)

    def add(self, scores: Floats, reference: Floats) -> None:
        """Add the scores of a head, [queries, keys]. Each query sees the keys up to its own."""
        ours, theirs = np.tril(scores)[FIRST_QUERY:], np.tril(reference)[FIRST_QUERY:]
        products = (ours * theirs).sum(axis=1)
        sizes = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        self.cosines.append(products / np.maximum(sizes, np.float32(1e-30)))
        common = (highest(scores) & highest(reference)).sum(axis=1)
        self.overlaps.append(np.asarray(common / TOP, np.float32))

    def report(self) -> dict[str, float]:
        """Return the mean cosine, its 1st percentile, and the mean overlap."""
        cosines = np.concatenate(self.cosines)
        return {
            "cosine_mean": float(cosines.mean(dtype=np.float64)),
            "cosine_p1": float(np.percentile(cosines, 1)),
            "overlap": float(np.concatenate(self.overlaps).mean(dtype=np.float64)),
        }


def highest(scores: Floats) -> npt.NDArray[np.bool_]:
    """Mark the TOP highest scores among the keys that each query sees, from FIRST_QUERY on."""
    seen = np.where(np.tri(*scores.shape) > 0, scores, -np.inf)[FIRST_QUERY:]
    marks = np.zeros(seen.shape, bool)
    np.put_along_axis(marks, np.argpartition(seen, -TOP, axis=1)[:, -TOP:], True, axis=1)
    return marks


def rotate(rows: Floats) -> Floats:
    """Multiply rows by Hadamard matrices of the largest power of two that divides their size."""
    size = rows.shape[-1] & -rows.shape[-1]
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    parts = rows.reshape(*rows.shape[:-1], -1, size) @ (matrix / np.sqrt(np.float32(size)))
    return np.asarray(parts.reshape(rows.shape), np.float32)


def stored(mode: str, keys: Floats, *, search: bool) -> Floats:
    """Return rows [n, head_dim] as the cache returns them."""
    from lmdeploy import _turbomind

    payload, metadata = _turbomind.encode_rows(mode, keys, CACHE_DTYPE, search=search)
    return np.asarray(
        _turbomind.decode_rows(mode, payload, metadata, keys.shape[1], CACHE_DTYPE), np.float32
    )


class Probe:
    """Attention of transformers that compares scores on the way."""

    def __init__(self, formats: Sequence[str]) -> None:
        self.found = {
            f"{name}/{kind}": Agreement() for name in formats for kind in ("raw", "rotated")
        }

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        queries, keys = (np.asarray(x[0].detach().float().numpy()) for x in (query, key))
        group = len(queries) // len(keys)
        for head, rows in enumerate(keys):
            for label, agreement in self.found.items():
                mode, _, kind = label.partition("/")
                turned = kind == "rotated"
                ours = stored(mode, rotate(rows) if turned else rows, search=turned)
                for row in queries[head * group : (head + 1) * group]:
                    agreement.add((rotate(row) if turned else row) @ ours.T, row @ rows.T)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def compare(
    path: str, ids: Sequence[int], *, formats: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the figures by format and kind for a context of more than FIRST_QUERY tokens."""
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    probe = Probe(formats)
    AttentionInterface.register("probe", probe)
    model.set_attn_implementation("probe")
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    return {label: agreement.report() for label, agreement in probe.found.items()}


def read_ids(options: argparse.Namespace) -> list[int]:
    """Return the first tokens of the text, by the engine's tokenizer of the model."""
    from lmdeploy.engine.model_files import open_files

    text = read_text(options.text, flag="TEXT")
    texts = open_files(options.tokenizer or options.model).read_texts()
    ids = texts.tokenizer.encode(text, add_special=False)[: options.tokens]
    if len(ids) <= FIRST_QUERY:
        raise ValueError(f"{len(ids)} tokens are too few. There must be more than {FIRST_QUERY}.")
    return list(ids)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="Hugging Face folder that transformers loads")
    parser.add_argument("text", type=Path, help="UTF-8 text file")
    parser.add_argument("--tokenizer", help="folder or GGUF file of the tokenizer (default: MODEL)")
    parser.add_argument("--formats", default="int8,fp8,nvfp4,int4,mxfp4", help="with commas")
    parser.add_argument("--tokens", type=positive, default=512, help="of the text (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print a table, write the JSON file."""
    options = parse_arguments(arguments)
    formats = options.formats.split(",")
    try:
        if unknown := [name for name in formats if name not in reported_formats()]:
            known = ", ".join(reported_formats())
            raise ValueError(f"--formats has {unknown[0]!r}. It must be some of {known}.")
        ids = read_ids(options)
        figures = compare(options.model, ids, formats=formats)
    except (ValueError, OSError) as error:
        print(f"eval_scores.py: {error}", file=sys.stderr)
        return 2
    print(f"{'format':<16} {'cosine':>9} {'p1':>9} {f'top {TOP}':>8}")
    for label, row in figures.items():
        print(
            f"{label:<16} {row['cosine_mean']:>9.6f} {row['cosine_p1']:>9.6f} "
            f"{row['overlap']:>8.4f}"
        )
    if options.json:
        facts = {"model": Path(options.model).name, "text": options.text.name, "tokens": len(ids)}
        document = json.dumps({**facts, "formats": figures}, indent=1)
        options.json.write_text(document + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
