"""Tests of prefixes that leave one engine and enter another, alone and through a store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_families import FAMILY_MODELS
from tiny_latents import V3 as LATENTS
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig
from lmdeploy.engine.request import salt_bytes
from lmdeploy.kv_store.blocks import KvBlocks
from lmdeploy.response import Response, join_pieces
from lmdeploy.serve.metrics import ServerMetrics

NUM_TOKENS = 400
WINDOWED = next(tiny for tiny in TINY_MODELS if tiny.config_values().get("sliding_window"))
SHARED_KV = next(tiny for tiny in FAMILY_MODELS if tiny.name == "gemma4")
RECURRENT = next(tiny for tiny in FAMILY_MODELS if tiny.name == "qwen3-5")
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"quant_policy": 0},
    "int8": {"quant_policy": 8},
    "nvfp4-raw": {"quant_policy": "nvfp4", "kv_quality": "raw"},
    "nvfp4-balanced": {"quant_policy": "nvfp4", "kv_quality": "balanced"},
    "int4-offset": {"quant_policy": 4, "kv_k_offset": "block"},  # also of latents
}


def prompt(seed: int = 1) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 90, NUM_TOKENS)]


@pytest.fixture(
    scope="module",
    params=[TINY_MODELS[0], WINDOWED, RECURRENT, LATENTS, SHARED_KV],
    ids=lambda tiny: tiny.name,
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(make_model(request.param), tmp_path_factory.mktemp("model")))


def config(**options: Any) -> TurbomindEngineConfig:
    return TurbomindEngineConfig(
        session_len=1024, max_batch_size=4, cache_max_entry_count=200, deterministic=True, **options
    )


def answer(pipe: Pipeline, ids: list[int], max_new_tokens: int = 6) -> Response:
    """Return a greedy answer with the logits of its tokens."""
    options = GenerationConfig(
        max_new_tokens=max_new_tokens, ignore_eos=True, output_logits="generation"
    )

    async def run() -> Response:
        return join_pieces([chunk async for chunk in pipe.engine.generate(ids, options)])

    return asyncio.run(run())


def assert_equal(got: Response, wanted: Response) -> None:
    assert got.token_ids == wanted.token_ids
    assert got.logits is not None and wanted.logits is not None
    assert np.array_equal(got.logits, wanted.logits)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_imported_prefix_is_a_hit_with_bit_equal_logits(folder: str, name: str) -> None:
    ids = prompt()
    with Pipeline(folder, config(**OPTIONS[name])) as pipe:
        wanted = answer(pipe, ids)
        hit = answer(pipe, ids).cached_tokens
        data = pipe.export_prefix(ids).to_bytes()
    with Pipeline(folder, config(**OPTIONS[name])) as pipe:
        with pytest.raises(ValueError, match="not KV blocks"):
            KvBlocks.from_bytes(data[:-1])
        blocks = KvBlocks.from_bytes(data)
        damaged = replace(blocks, blocks=[[copy[:-1] for copy in b] for b in blocks.blocks])
        with pytest.raises(ValueError, match="A stored block has"):
            pipe.import_prefix(damaged)
        assert pipe.import_prefix(blocks) == len(blocks.tokens) == NUM_TOKENS // 64 * 64
        pipe.engine.running.core.check_integrity()
        got = answer(pipe, ids)
        assert got.cached_tokens == hit > 0
        assert_equal(got, wanted)
        assert pipe.import_prefix(blocks) == len(blocks.tokens)  # everything is known
        pipe.engine.running.core.check_integrity()


def test_longrope_shares_prefixes_only_among_sequences_of_one_choice(tmp_path: Path) -> None:
    tiny = next(tiny for tiny in FAMILY_MODELS if tiny.name == "phi3-longrope-partial")
    folder, options = str(save_model(make_model(tiny), tmp_path)), config(quant_policy=0)
    ids = prompt()[:260]  # with an answer of 6 tokens, within the original length of 300
    longer = prompt()[:320]

    def fresh(ids: list[int], max_new_tokens: int = 6) -> Response:
        with Pipeline(folder, options) as pipe:
            return answer(pipe, ids, max_new_tokens)

    wanted = {count: fresh(ids, count) for count in (6, 60)}
    short, long = (response.logits for response in wanted.values())
    assert short is not None and long is not None and not np.allclose(short[0], long[0])
    with Pipeline(folder, replace(options, kv_store=f"file://{tmp_path}/store")) as pipe:
        for count in (6, 60, 6, 60):
            pipe.engine.running.core.check_integrity()
            assert_equal(answer(pipe, ids, count), wanted[count])
        assert answer(pipe, ids).cached_tokens == answer(pipe, ids, 60).cached_tokens == 256
        assert_equal(answer(pipe, longer), fresh(longer))
        assert answer(pipe, longer).cached_tokens >= 256
        assert len(pipe.export_prefix(ids).tokens) == 256
        traffic = pipe.engine.running.traffic
        assert traffic is not None and traffic.drain(20)
    with Pipeline(folder, replace(options, kv_store=f"file://{tmp_path}/store")) as pipe:
        for count in (60, 6):
            got = answer(pipe, ids, count)
            assert got.cached_tokens == 256
            assert_equal(got, wanted[count])


@pytest.mark.parametrize(
    "other",
    [
        {"quant_policy": 8},
        {"quant_policy": "nvfp4", "kv_quality": "raw"},
        {"quant_policy": "nvfp4", "kv_quality": "balanced", "kv_rotation": False},
        {"exact": True},
    ],
    ids=["format", "quality", "rotation", "exact"],
)
def test_blocks_of_another_cache_are_refused(folder: str, other: dict[str, Any]) -> None:
    base = {} if "exact" in other else OPTIONS["nvfp4-balanced"]
    with Pipeline(folder, config(**base)) as pipe:
        answer(pipe, prompt())
        blocks = pipe.export_prefix(prompt())
    with Pipeline(folder, config(**other)) as pipe:
        with pytest.raises(ValueError, match=r"^blocks have \w+ .*, but this engine has"):
            pipe.import_prefix(blocks)
        assert answer(pipe, prompt()).cached_tokens == 0


def test_a_prefix_that_was_never_computed_has_no_blocks(folder: str) -> None:
    with Pipeline(folder, config()) as pipe:
        blocks = pipe.export_prefix(prompt())
        assert blocks.blocks == [] and pipe.import_prefix(blocks) == 0
        for wrong in ("text", [1.5], []):
            with pytest.raises(ValueError, match="input_ids"):
                pipe.export_prefix(wrong)  # type: ignore[arg-type]


@pytest.fixture(params=["file", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
    else:
        yield request.getfixturevalue("redis_url")


def key_file(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("0123456789abcdef")
    return str(file)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_prompt_survives_a_restart(folder: str, name: str, url: str, tmp_path: Path) -> None:
    options = config(**OPTIONS[name], kv_store=url, kv_store_key=key_file(tmp_path))
    ids = prompt(2)
    with Pipeline(folder, options) as pipe:
        wanted = answer(pipe, ids)
        traffic = pipe.engine.running.traffic
        assert traffic is not None and traffic.drain(20)
        assert traffic.stats.written_blocks == NUM_TOKENS // 64
    with Pipeline(folder, options) as pipe:
        got = answer(pipe, ids)
        traffic = pipe.engine.running.traffic
        assert traffic is not None and traffic.stats.hits > 0
        assert got.cached_tokens > 0
        assert_equal(got, wanted)
        pipe.engine.running.core.check_integrity()
        shown = ServerMetrics(pipe.engine, "m").text().decode()
        hits = f'lmdeploy:kv_store_hits_total{{model_name="m"}} {float(traffic.stats.hits)}'
        assert hits in shown


def test_another_salt_or_secret_shares_nothing(folder: str, tmp_path: Path) -> None:
    url, key = f"file://{tmp_path}/store", key_file(tmp_path)
    with Pipeline(folder, config(kv_store=url, kv_store_key=key)) as pipe:
        answer(pipe, prompt())
        traffic = pipe.engine.running.traffic
        assert traffic is not None and traffic.drain(20)
    with Pipeline(folder, config(kv_store=url)) as pipe:  # a new secret beside the folder
        assert answer(pipe, prompt()).cached_tokens == 0
    assert (tmp_path / "store.key").stat().st_mode & 0o777 == 0o600


def test_a_store_that_is_away_costs_only_the_hits(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = config(kv_store="redis://127.0.0.1:1/0", kv_store_key=key_file(tmp_path))
    with Pipeline(folder, options) as pipe:
        got = answer(pipe, prompt())
        assert len(got.token_ids) == 6
        assert_equal(answer(pipe, prompt()), got)
    assert "The KV store does not work" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_store_key": "f"}, "no effect without --kv-store"),
        ({"kv_store": "file:///x", "enable_prefix_caching": False}, "needs the prefix cache"),
        ({"kv_store": ""}, "a non-empty string"),
        ({"kv_store": 3}, "a non-empty string"),
    ],
)
def test_wrong_options_of_the_store_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TurbomindEngineConfig(**options)


def test_no_text_has_the_salt_of_long_factors() -> None:
    salts = [salt_bytes(salt) for salt in (None, "", "a", "long factors ", "long factors a")]
    salts += [salt_bytes(salt, long_rope=True) for salt in (None, "", "a")]
    assert len(set(salts)) == len(salts) and {len(salt) for salt in salts} == {16}
