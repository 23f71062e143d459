"""Compare the resident memory of an engine whose cache is full with the plan of --dry-run.

    python benchmarks/measure_memory.py MODEL [--quant-policy nvfp4] [--tokens 8192] [--json FILE]

The cache has room for one session of --tokens tokens, and a prompt fills it. Row: bytes that the
plan says (weights, cache, scratch), bytes that the process gained, and their ratio; sessions of
that length that a cache of 10^9 bytes holds. The interpreter and the libraries do not count.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from results import Row, commit_here, describe_machine, read_rows, write_rows

from lmdeploy import TurbomindEngineConfig, _turbomind, pipeline
from lmdeploy.base.resources import usable_cores
from lmdeploy.engine.devices import open_device
from lmdeploy.engine.plan import plan_engine

GB = 10**9
BLOCK_TOKENS = 64


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^VmRSS:\s*(\d+) kB", status, re.M)
    assert found is not None
    return int(found[1]) * 1024


def measure(model: str, *, quant_policy: str, tokens: int) -> Row:
    """Load a model, fill its cache with one prompt and return the row."""
    blocks = -(-(tokens + 1) // BLOCK_TOKENS)
    config = TurbomindEngineConfig(
        quant_policy=quant_policy,
        session_len=tokens + 1,
        max_batch_size=1,
        cache_max_entry_count=blocks,
        enable_prefix_caching=False,
    )
    files, engine_config, _ = plan_engine(model, config, device=(device := open_device(config)))
    info = files.info
    plan: Any = _turbomind.plan_memory(info.config, engine_config, GB, device.capability)
    planned = info.weight_bytes + plan.reserved_bytes + plan.scratch_bytes
    rng = np.random.default_rng(1)
    files.read_texts()  # the tokenizer's memory is no weight
    del files
    gc.collect()
    before = resident_bytes()
    with pipeline(model, backend_config=config) as pipe:
        gc.collect()
        loaded = resident_bytes() - before
        pipe.get_ppl([rng.integers(3, info.config.vocab_size - 100, tokens).tolist()])
        full = resident_bytes() - before
    return {
        "model": Path(model).name,
        "layers": info.config.num_layers,
        "format": quant_policy,
        "tokens": tokens,
        "bytes_per_token": plan.bytes_per_token,
        "session_bytes": plan.session_bytes,
        "sessions_per_gb": round(GB / plan.session_bytes, 1),
        "weight_bytes": info.weight_bytes,
        "loaded_bytes": loaded,
        "planned_bytes": planned,
        "resident_bytes": full,
        "ratio": round(full / planned, 4),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row, and add it to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--quant-policy", default="nvfp4")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="add the row to this file")
    options = parser.parse_args(arguments)
    row = measure(options.model, quant_policy=options.quant_policy, tokens=options.tokens)
    row |= {
        "machine": describe_machine(usable_cores()),
        "commit": commit_here(),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
    }
    print(json.dumps(row))
    if options.json:
        rows = read_rows(options.json) if options.json.exists() else []
        write_rows(options.json, [*rows, row])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
