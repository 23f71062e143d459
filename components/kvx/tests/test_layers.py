"""Tests of exported blocks as layers of libkvx."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reference import codecs
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import Pipeline, TurbomindEngineConfig
from lmdeploy.kv_store.blocks import KvBlocks
from lmdeploy.kvx import adapters, check, library
from lmdeploy.kvx.layers import layer_of

NUM_BLOCKS, BLOCK = 5, 64
WINDOWED = next(tiny for tiny in TINY_MODELS if tiny.config_values().get("sliding_window"))
IDS = [int(i) for i in np.random.default_rng(1).integers(3, 90, NUM_BLOCKS * BLOCK + 3)]
# A rotation and its inverse, rounded to 16 bits in between, relative to the largest |K|.
ROTATION_ERROR = 0.02


def export(folder: str, kv_format: str, **options: Any) -> KvBlocks:
    config = TurbomindEngineConfig(
        session_len=1024,
        cache_max_entry_count=100,
        quant_policy=kv_format,
        deterministic=True,
        **options,
    )
    with Pipeline(folder, config) as pipe:
        pipe.get_ppl(IDS)
        return KvBlocks.from_bytes(pipe.export_prefix(IDS).to_bytes())


def read(blocks: KvBlocks, index: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V of a layer's blocks, [tokens, heads, head_dim]."""
    found = layer_of(blocks, index, **options)
    layer, count = found.layer, len(found.blocks)
    shape = (count * BLOCK, layer.num_kv_heads, layer.head_dim)
    out = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    tables = adapters.tgi_tables(np.arange(count, dtype=np.int32)[None], np.array([count * BLOCK]))
    check(library().kvx_tm_gather_kv(layer, adapters.gather(adapters.rows(*out), tables), None))
    assert np.isfinite(out[0]).all() and np.isfinite(out[1]).all()
    return out


@pytest.fixture(scope="module", params=[TINY_MODELS[0], WINDOWED], ids=lambda tiny: tiny.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(make_model(request.param), tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("kv_format", ["int8", "nvfp4"])
def test_layer_holds_the_rows_of_a_16_bit_cache_as_its_format_stores_them(
    folder: str, kv_format: str
) -> None:
    plain, stored = export(folder, "none"), export(folder, kv_format, kv_quality="raw")
    assert len(plain.blocks) >= NUM_BLOCKS
    found = layer_of(plain, 0).blocks
    assert found == layer_of(stored, 0).blocks and found
    for given, got in zip(read(plain, 0), read(stored, 0), strict=True):
        rows = given.reshape(-1, given.shape[-1])
        want = codecs.round_trip(kv_format, rows, dtype=stored.identity["dtype"])
        np.testing.assert_array_equal(got, want.reshape(given.shape))
    for layer in range(len(stored.identity["layers"])):
        read(stored, layer)


def test_copies_of_the_16_bit_window_are_the_rows_of_a_16_bit_cache(folder: str) -> None:
    plain = export(folder, "none")
    stored = export(folder, "nvfp4", kv_quality="balanced", kv_window="16bit")
    copies = layer_of(stored, 0, window16=True)
    everywhere = layer_of(plain, 0).blocks
    assert copies.blocks and set(copies.blocks) <= set(everywhere)
    for side, (given, got) in enumerate(
        zip(read(plain, 0), read(stored, 0, window16=True), strict=True)
    ):
        by_block = given.reshape(len(everywhere), BLOCK, *given.shape[1:])
        want = by_block[[everywhere.index(b) for b in copies.blocks]].reshape(got.shape)
        error = np.abs(got - want).max() / np.abs(want).max()
        assert error < ROTATION_ERROR if side == 0 else error == 0


def test_copies_of_the_int8_window_are_rows_of_int8(folder: str) -> None:
    plain, stored = export(folder, "none"), export(folder, "nvfp4", kv_quality="balanced")
    copies = layer_of(stored, 0, window16=True)
    everywhere = layer_of(plain, 0).blocks
    for given, got in zip(read(plain, 0), read(stored, 0, window16=True), strict=True):
        by_block = given.reshape(len(everywhere), BLOCK, *given.shape[1:])
        want = by_block[[everywhere.index(b) for b in copies.blocks]].reshape(got.shape)
        assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.01


def test_quantized_blocks_are_read_with_their_k_offset(folder: str) -> None:
    plain, stored = export(folder, "none"), export(folder, "nvfp4", kv_quality="balanced")
    layer, everywhere = layer_of(stored, 0), layer_of(plain, 0).blocks
    if not layer.blocks:
        pytest.skip("every block of this model is in the window")
    for given, got in zip(read(plain, 0), read(stored, 0), strict=True):
        by_block = given.reshape(len(everywhere), BLOCK, *given.shape[1:])
        want = by_block[[everywhere.index(b) for b in layer.blocks]].reshape(got.shape)
        assert 0 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.12


def test_layer_rejects(folder: str) -> None:
    blocks = export(folder, "nvfp4", kv_quality="raw")
    with pytest.raises(ValueError, match="index is 99"):
        layer_of(blocks, 99)
    with pytest.raises(ValueError, match="window16 is True"):
        layer_of(blocks, 0, window16=True)
    calibrated = replace(blocks, identity={**blocks.identity, "calibration": "ab"})
    with pytest.raises(ValueError, match="calibration is 'ab'"):
        layer_of(calibrated, 0)
    biased = replace(blocks, identity={**blocks.identity, "k_bias": "without fast pairs, 1"})
    with pytest.raises(ValueError, match="k_bias is 'without fast pairs, 1'"):
        layer_of(biased, 0)
    cut = replace(blocks, blocks=[[copy[:-16] for copy in b] for b in blocks.blocks])
    with pytest.raises(ValueError, match="bytes per block"):
        layer_of(cut, 0)
