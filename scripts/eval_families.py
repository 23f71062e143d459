"""Measure the KL divergence of every KV format in a tiny random model of every family.

    PYTHONPATH=benchmarks:tests/python/support python scripts/eval_families.py

The models are those that the tests compare with transformers, so no download is needed. Formats
are stored as they are: without a 16-bit window, rotation or calibration. The divergence is that of
the next token, in nats, from a cache of 16 bits, over all positions of a prompt. docs/models.md has
the table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import numpy.typing as npt
from engine_runs import EngineRun
from results import ROOT, Row, commit_here, describe_machine, read_rows, write_rows
from tiny_families import FAMILY_MODELS
from tiny_latents import TINY_LATENTS
from tiny_models import TINY_MODELS, VOCAB_SIZE, TinyModel, make_model, save_model
from tiny_moe import TINY_MOE_MODELS

from lmdeploy.models import FAMILIES

FORMATS = ("int8", "fp8", "int4", "mxfp4", "nvfp4")
INT8_ROTARY = "k=int8,v=nvfp4"  # latents in NVFP4 beside a rotary part of 8 instead of 16 bits
RESULTS = ROOT / "benchmarks" / "results" / "families_kl.jsonl"
TOKENS = 256
SEEDS = (0, 1, 2)  # of weights and prompts


def models() -> Iterator[tuple[str, TinyModel]]:
    """Yield the name of each family and its first tiny model."""
    every = (*TINY_MODELS, *FAMILY_MODELS, *TINY_MOE_MODELS, *TINY_LATENTS)
    for family in FAMILIES:
        for tiny in every:
            if f"{tiny.architecture}ForCausalLM" in family.hf_architectures:
                yield family.name, tiny
                break


def divergence(
    wanted: npt.NDArray[np.float32], got: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Return the KL divergence of each row of logits, [tokens]."""

    def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))

    p, q = log_softmax(wanted), log_softmax(got)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=-1))


def measure(tiny: TinyModel) -> dict[str, float]:
    """Return the mean KL divergence of each format."""
    formats = (*FORMATS, INT8_ROTARY) if tiny in TINY_LATENTS else FORMATS
    sums = dict.fromkeys(formats, 0.0)
    for seed in SEEDS:
        ids = [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB_SIZE, TOKENS)]
        with tempfile.TemporaryDirectory() as folder:
            path = str(save_model(make_model(tiny, seed), Path(folder)))
            logits = {}
            for kv_format in ("none", *formats):
                with EngineRun(path, exact=False, kv_format=kv_format, session_len=512) as run:
                    logits[kv_format] = run.logits(ids)
        for kv_format in formats:
            sums[kv_format] += float(divergence(logits["none"], logits[kv_format]).mean())
    return {kv_format: total / len(SEEDS) for kv_format, total in sums.items()}


def main() -> None:
    """Measure every family, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="families to measure")
    arguments = parser.parse_args()
    facts = {
        "machine": describe_machine(2),
        "commit": commit_here(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "tokens": TOKENS,
    }
    rows: dict[str, Row] = {}
    if arguments.only and arguments.output.exists():
        rows = {row["family"]: row for row in read_rows(arguments.output)}
    for family, tiny in models():
        if arguments.only and family not in arguments.only:
            continue
        figures = measure(tiny)
        print(family, {name: f"{value:.1e}" for name, value in figures.items()}, flush=True)
        rows[family] = {"family": family, "model": tiny.name, "kl": figures, **facts}
    write_rows(arguments.output, rows.values())


if __name__ == "__main__":
    main()
