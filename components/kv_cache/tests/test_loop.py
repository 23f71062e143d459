"""Tests of the loops and the table in README.md: they run, and they equal the engine."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import EngineRun
from reference.smollm2 import gguf_path, load_model

from lmdeploy import Tokenizer
from lmdeploy.kv_cache import CacheConfig, memory_table

PAGE = Path(__file__).resolve().parents[1] / "README.md"
NUM_TOKENS = {"none": 16, "nvfp4": 64}
NUM_TOKENS_TORCH = 16
# The model goes on counting. Every token is far from a tie, so that codes next to a midpoint, which
# depend on the order of sums, do not change the text.
PROMPT = Tokenizer("smollm2").encode(", ".join(map(str, range(1, 13))) + ",")
MAX_LOOP_LINES = 40
MAX_CACHE_LINES = 20
# As the engine stores rows with kv_quality raw and exact.
OPTIONS = {
    "none": {"dtype": "float32"},
    "nvfp4": {"dtype": "float32", "quantize": "nvfp4", "search_scales": False},
}


def blocks() -> tuple[str, str, str]:
    """Return the code of the page: the loop, greedy decoding, and the cache of transformers."""
    loop, decoding, cache = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S
    )
    return loop, decoding, cache


def num_lines(code: str) -> int:
    return sum(1 for line in code.splitlines() if line.strip())


def run_loop(library: str) -> Any:
    """Return the function `greedy` of the page, with arrays of `library`."""
    loop, decoding, _ = blocks()
    names: dict[str, Any] = {"PATH": gguf_path()}
    exec(loop.replace("import numpy as xp", f"import {library} as xp") + decoding, names)
    return names["greedy"]


@functools.cache
def engine_tokens(kv_format: str) -> list[int]:
    with EngineRun("smollm2", exact=True, kv_format=kv_format) as run:
        return run.greedy(PROMPT, NUM_TOKENS[kv_format])


def test_code_of_the_page_is_short() -> None:
    loop, decoding, cache = blocks()
    assert num_lines(loop) + num_lines(decoding) <= MAX_LOOP_LINES
    assert num_lines(cache) <= MAX_CACHE_LINES


@pytest.mark.parametrize("kv_format", OPTIONS)
def test_numpy_loop_gives_the_tokens_of_the_engine(kv_format: str) -> None:
    got = run_loop("numpy")(PROMPT, NUM_TOKENS[kv_format], exact=True, **OPTIONS[kv_format])
    assert got == engine_tokens(kv_format)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("library", ["torch", "mlx.core"])
def test_loop_of_another_library_gives_the_tokens_of_the_engine(library: str) -> None:
    pytest.importorskip(library)
    got = run_loop(library)(PROMPT, NUM_TOKENS_TORCH, exact=True, **OPTIONS["nvfp4"])
    assert got == engine_tokens("nvfp4")[:NUM_TOKENS_TORCH]


def test_transformers_cache_gives_the_tokens_of_the_engine() -> None:
    names: dict[str, Any] = {}
    exec(blocks()[2], names)
    model = load_model()
    cache = names["QuantizedCache"](model.config, 2048, **OPTIONS["nvfp4"])
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=NUM_TOKENS_TORCH,
        min_new_tokens=NUM_TOKENS_TORCH,
        do_sample=False,
        pad_token_id=0,
    )
    assert out[0, len(PROMPT) :].tolist() == engine_tokens("nvfp4")[:NUM_TOKENS_TORCH]
    assert cache.kv.seq_len == len(PROMPT) + NUM_TOKENS_TORCH - 1


def test_memory_table_of_the_page() -> None:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shown = {
        name.strip("`"): [int(cell.replace(",", "")) for cell in cells] for name, *cells in rows
    }
    table = memory_table(CacheConfig(32, 32, 8, 128, 4096))
    assert list(shown) == list(table)
    for name, sizes in shown.items():
        assert [size * 2**20 for size in sizes] == list(table[name].values())
