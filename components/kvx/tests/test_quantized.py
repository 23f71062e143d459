"""Tests of quantized layers against the NumPy codecs, and of layers over exported blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from reference import codecs
from reference.layout import param_bytes, payload_bytes, scale_bytes
from reference.quality import rotate_rows

from lmdeploy._turbomind import KvFormat
from lmdeploy.kvx import abi, adapters, check, library

MODES = {name: abi.TmMode(KvFormat[name].value) for name in codecs.MODES}
DTYPES = {"float16": abi.Dtype.F16, "bfloat16": abi.Dtype.BF16, "float32": abi.Dtype.F32}
BLOCKS, BLOCK, HEADS, DIM = 3, 16, 2, 64
TOKENS = 20
PLACES = [(2, i) if i < BLOCK else (0, i - BLOCK) for i in range(TOKENS)]  # (block, offset)
ROTATION_ERROR = 1e-5  # FP32 sums against double precision, relative to the largest value


def make_layer(mode: str, dtype: str, **fields: object) -> tuple[abi.TmLayer, list[np.ndarray]]:
    layer = abi.TmLayer(MODES[mode], MODES[mode], DTYPES[dtype], abi.Memory.HOST)
    layer.block_size, layer.num_kv_heads = BLOCK, HEADS
    layer.head_dim, layer.num_blocks = DIM, BLOCKS
    for name, value in fields.items():
        setattr(layer, name, value)
    check(library().kvx_tm_describe(layer))
    sizes = (layer.block_bytes, layer.scale_block_bytes)
    memory = [np.full(BLOCKS * size + 16, 0xA5, np.uint8) for size in sizes]
    layer.data, layer.scales = (x.ctypes.data for x in memory)
    return layer, memory


def write_rows(layer: abi.TmLayer, key: np.ndarray, value: np.ndarray) -> None:
    slots = np.array([block * BLOCK + offset for block, offset in PLACES])
    write = adapters.write(adapters.rows(key, value), adapters.vllm_slots(slots))
    check(library().kvx_tm_write_kv(layer, write, None))


def read_rows(layer: abi.TmLayer) -> tuple[np.ndarray, np.ndarray]:
    out = np.zeros((TOKENS, HEADS, DIM), np.float32), np.zeros((TOKENS, HEADS, DIM), np.float32)
    tables = adapters.tgi_tables(np.array([[2, 0]], np.int32), np.array([TOKENS]))
    check(library().kvx_tm_gather_kv(layer, adapters.gather(adapters.rows(*out), tables), None))
    return out


def place(memory: np.ndarray, at: int, row: np.ndarray) -> None:
    memory[at : at + row.size] = row


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_bytes_and_rows_equal_the_codecs(mode: str, dtype: str, search: bool) -> None:
    factors = np.array([0.5, 3], np.float32)
    layer, (data, scales) = make_layer(
        mode,
        dtype,
        flags=abi.TmFlag.SEARCH if search else abi.TmFlag.NONE,
        k_factors=factors.ctypes.data,
        v_factors=factors.ctypes.data,
    )
    rng = np.random.default_rng(1)
    rows = [rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float32) for _ in range(2)]
    write_rows(layer, *rows)
    want_data, want_scales = np.full_like(data, 0xA5), np.full_like(scales, 0xA5)
    payload = payload_bytes(mode, DIM, dtype)
    params, per_token = param_bytes(mode, dtype), scale_bytes(mode, DIM)
    decoded = [np.zeros_like(x) for x in rows]
    for side, head in itertools.product((0, 1), range(HEADS)):
        factor = float(factors[head]) if mode in codecs.SCALED else 1.0
        stored, meta = codecs.encode(
            mode, rows[side][:, head], dtype=dtype, global_scale=factor, search=search
        )
        decoded[side][:, head] = codecs.decode(mode, stored, meta, dtype=dtype, global_scale=factor)
        for i, (block, offset) in enumerate(PLACES):
            slot = (2 * head + side) * BLOCK + offset
            base = block * layer.block_bytes
            place(want_data, base + slot * payload, stored[i])
            if params:
                begin = base + 2 * HEADS * BLOCK * payload
                place(want_data, begin + slot * params, meta[i])
            if per_token:
                token = 2 * (head * BLOCK + offset) + side
                place(want_scales, block * layer.scale_block_bytes + token * per_token, meta[i])
    np.testing.assert_array_equal(data, want_data)
    np.testing.assert_array_equal(scales, want_scales)
    for got, want in zip(read_rows(layer), decoded, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_mean_and_rotation_are_undone(mode: str) -> None:
    rng = np.random.default_rng(2)
    mean = rng.standard_normal((HEADS, DIM)).astype(np.float32)
    layer, _ = make_layer(mode, "float32", flags=abi.TmFlag.ROTATED, k_mean=mean.ctypes.data)
    key, value = (rng.standard_normal((TOKENS, HEADS, DIM)).astype(np.float32) for _ in range(2))
    write_rows(layer, key, value)
    got, _ = read_rows(layer)
    changed = rotate_rows((key - mean).astype(np.float64)).astype(np.float32)
    stored = codecs.round_trip(mode, changed.reshape(-1, DIM), dtype="float32")
    want = rotate_rows(stored.reshape(key.shape).astype(np.float64)) + mean
    error = np.abs(got - want).max(axis=-1)
    # A value next to a midpoint may have the other code, in a few rows.
    assert (error > ROTATION_ERROR).mean() < 0.05
    assert error.max() < 1
