"""Time decode steps with and without the rotation of latents.

    python benchmarks/make_random_checkpoint.py deepseek-v2-lite FOLDER --layers 2
    python benchmarks/time_latent_rotation.py FOLDER --context 512

Two engines of one model take turns, with one thread each. Times are of the processor, not of the
clock, because other work may share the machine. `ratio` is the median of the ratios of adjacent
rounds, and `quartiles` are those of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from results import Row, commit_here, describe_machine, read_rows, write_rows

from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.lite.prompt_engine import open_model
from lmdeploy.lite.report.cells import DecodeEngine


def measure(model: str, *, kv_format: str, context: int, rounds: int, steps: int) -> Row:
    """Return the times of a decode step in milliseconds, and their ratio."""
    opened = open_model(model, threads=1)
    engines = []
    for rotation in (False, True):
        config = TurbomindEngineConfig(
            quant_policy=kv_format, kv_quality="balanced", kv_rotation=rotation
        )
        configure = opened.configure(config)
        engines.append(DecodeEngine(opened, configure, context=context + steps + 2))
    prompt = np.random.default_rng(0).integers(10, 1000, context).tolist()
    for engine in engines:
        engine.step_seconds(prompt, 2)  # fills the cache with the prompt
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        for engine, found in zip(engines, times, strict=True):
            begin = time.process_time()
            engine.step_seconds(prompt, steps)
            found.append((time.process_time() - begin) / (steps + 1))
    for engine in engines:
        engine.close()
    ratios = [rotated / plain for plain, rotated in zip(*times, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "format": f"{kv_format}/balanced",
        "layers": opened.config.num_layers,
        "context": context,
        "rounds": rounds,
        "step_ms": round(1e3 * statistics.median(times[0]), 2),
        "step_ms_rotated": round(1e3 * statistics.median(times[1]), 2),
        "ratio": round(quartiles[1], 4),
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row, and add it to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model with latents")
    parser.add_argument("--format", default="nvfp4", help="KV format")
    parser.add_argument("--context", type=int, default=512, help="tokens before the steps")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=16, help="of a round")
    parser.add_argument("--json", type=Path, help="file of results")
    options = parser.parse_args(arguments)
    facts: dict[str, Any] = {
        "machine": describe_machine(1),
        "commit": commit_here(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "model": Path(options.model).name,
    }
    row = measure(
        options.model,
        kv_format=options.format,
        context=options.context,
        rounds=options.rounds,
        steps=options.steps,
    )
    print(json.dumps({**facts, **row}))
    if options.json is not None:
        before = read_rows(options.json) if options.json.exists() else []
        write_rows(options.json, [*before, {**facts, **row}])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
