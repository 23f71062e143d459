"""Tests of the Python package on a GPU: answers as on the CPU, and what needs a running engine.

`scripts/gpu_check.sh python` runs them, together with tests of other folders that use any device.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from serving import post, serving
from tiny_latents import V2
from tiny_models import TinyModel, make_model, save_model
from tiny_moe import GPT_OSS

from lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.response import Response, join_pieces

pytestmark = pytest.mark.skipif(
    not os.environ.get("LMDEPLOY_TEST_CUDA"), reason="LMDEPLOY_TEST_CUDA names no CUDA library"
)
POSITIONS = {"max_position_embeddings": 2048}
LLAMA = TinyModel("llama", "Llama", POSITIONS)
QWEN2 = TinyModel("qwen2", "Qwen2", POSITIONS)
LATENTS = dataclasses.replace(V2, settings={**V2.settings, **POSITIONS})
CONTEXT = 600
WORST_PPL = 0.01  # nats between BF16 on a GPU and on a CPU


def random_ids(seed: int, count: int = CONTEXT) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 300, count).tolist()
    return ids


def save_biased(folder: Path, pairs: slice) -> Path:
    """Write a Qwen2 model whose keys have a bias of 40 on some pairs of every head."""
    import torch

    model = make_model(QWEN2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(2, 2, 32)[:, :, pairs] += 40
    return save_model(model, folder)


MODELS = {
    "llama": lambda folder: save_model(make_model(LLAMA), folder),
    "slow-bias": partial(save_biased, pairs=slice(29, 32)),
    "fast-bias": partial(save_biased, pairs=slice(0, 3)),
    "gpt-oss": lambda folder: save_model(make_model(GPT_OSS), folder),
    "latents": lambda folder: save_model(make_model(LATENTS), folder),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(make(tmp_path_factory.mktemp(name))) for name, make in MODELS.items()}


def config(**options: Any) -> TurbomindEngineConfig:
    return TurbomindEngineConfig(
        **{"session_len": 1024, "max_batch_size": 16, "cache_max_entry_count": 400, **options}
    )


@pytest.mark.parametrize("quant_policy", [0, 4, 8, "fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_equal_those_of_the_cpu(
    folders: dict[str, str], name: str, quant_policy: int | str
) -> None:
    batch = [random_ids(seed) for seed in range(4)]
    found = {}
    for device in ("cpu", "cuda"):
        options = config(device_type=device, quant_policy=quant_policy)
        with Pipeline(folders[name], options) as pipe:
            found[device] = pipe.get_ppl(batch)
    gap = max(abs(a - b) for a, b in zip(found["cpu"], found["cuda"], strict=True))
    print(name, quant_policy, f"largest difference {gap:.4f}", found["cuda"])
    assert all(math.isfinite(value) for value in found["cuda"])
    assert gap < WORST_PPL


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_tuned_kernels_score_as_the_cpu(
    folders: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LMDEPLOY_TUNER", "1")
    batch = [random_ids(seed) for seed in range(4)]
    with Pipeline(folders[name], config(device_type="cpu")) as pipe:
        wanted = pipe.get_ppl(batch)
    for source in ("measured in", f"from {tmp_path}"):
        with Pipeline(folders[name], config(device_type="cuda")) as pipe:
            found = pipe.get_ppl(batch)
            line = pipe.engine.running.tuner_line
        print(line)
        assert line.startswith("tuner: ") and source in line
        assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < WORST_PPL


@pytest.mark.parametrize("bias", [0.0, 50.0])  # with 50, one token follows again and again
def test_drafts_change_no_token(folders: dict[str, str], bias: float) -> None:
    prompt = [9, 3, 27, 41, 5] * 8
    options = GenerationConfig(max_new_tokens=100, ignore_eos=True, logit_bias={9: bias})
    answers = {}
    for algorithm in ("none", "ngram"):
        settings = config(deterministic=True, quant_policy=16, speculative_algorithm=algorithm)
        with Pipeline(folders["llama"], settings) as pipe:
            pieces = pipe.engine.generate(prompt, options)
            answers[algorithm] = asyncio.run(join(pieces)).token_ids
            accepted = pipe.engine.stats().accepted_tokens
    assert answers["ngram"] == answers["none"]
    assert accepted > 0 or not bias


async def join(pieces: AsyncIterator[Response]) -> Response:
    return join_pieces([piece async for piece in pieces])


def test_pooled_states_equal_those_of_the_cpu(folders: dict[str, str]) -> None:
    states = {}
    for device in ("cpu", "cuda"):
        engine = AsyncEngine.load(folders["llama"], config(device_type=device), progress=False)
        with serving(engine) as url:
            reply = post(url, "/v1/embeddings", {"model": "m", "input": ["one text", "another"]})
        assert reply.status_code == 200, reply.text
        states[device] = np.array([item["embedding"] for item in reply.json()["data"]])
    assert (np.sum(states["cpu"] * states["cuda"], axis=1) > 0.999).all()


def test_sleep_gives_memory_back_and_waking_restores_the_answer(folders: dict[str, str]) -> None:
    settings = config(quant_policy=16, deterministic=True)
    engine = AsyncEngine.load(folders["llama"], settings, progress=False)
    body = {"model": "m", "prompt": random_ids(3), "max_tokens": 16, "temperature": 0}
    with serving(engine) as url:
        before = post(url, "/v1/completions", body).json()["choices"]
        assert post(url, "/sleep", {}).status_code == 200
        assert post(url, "/v1/completions", body).status_code == 503
        assert post(url, "/wakeup", {}).status_code == 200
        assert post(url, "/v1/completions", body).json()["choices"] == before


def test_streams_with_aborts_leave_no_block_and_equal_single_answers(
    folders: dict[str, str],
) -> None:
    settings = config(quant_policy=16, deterministic=True)
    engine = AsyncEngine.load(folders["llama"], settings, progress=False)
    bodies = [
        {
            "model": "m",
            "prompt": random_ids(seed, 100 + 5 * seed),
            "max_tokens": 100,
            "temperature": 0,
            "ignore_eos": True,
        }
        for seed in range(64)
    ]

    def stream(url: str, i: int) -> str | None:
        """Read a whole stream, or leave every fifth one after a few events."""
        text = ""
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**bodies[i], "stream": True}, timeout=60
        ) as reply:
            for events, line in enumerate(reply.iter_lines()):
                if i % 5 == 0 and events > 10:
                    return None
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    with serving(engine) as url:
        alone = [post(url, "/v1/completions", body).json() for body in bodies[1:4]]
        with ThreadPoolExecutor(32) as pool:
            texts = list(pool.map(partial(stream, url), range(len(bodies))))
        assert texts[1:4] == [reply["choices"][0]["text"] for reply in alone]
        assert sum(text is None for text in texts) == 13
        assert post(url, "/v1/completions", bodies[0]).status_code == 200
        engine.running.core.check_integrity()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
