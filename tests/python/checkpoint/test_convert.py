"""Tests of the conversion of stored matrices into the formats of the engine."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_engine import model_config
from tiny_gguf import interleave

from lmdeploy import _turbomind
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.checkpoint.convert import (
    bf16_bits,
    engine_bytes,
    engine_format,
    matrix_for_engine,
    scales_for_engine,
)
from lmdeploy.checkpoint.files.tensor_file import (
    BLOCK_FORMATS,
    SUPPORTED_FORMATS,
    StoredTensor,
    row_bytes,
)
from lmdeploy.checkpoint.gguf_blocks import values_to_q8_0
from lmdeploy.checkpoint.methods.awq import awq_matrix
from lmdeploy.checkpoint.tensor_plan import PlannedTensor, turned_matrix


def block_tensor(weight_format: str, *, rows: int = 48, cols: int = 512) -> StoredTensor:
    """Return a tensor with random codes and with scales of a realistic size."""
    random = np.random.default_rng(7)
    values, size = BLOCK_FORMATS[weight_format]
    blocks = random.integers(0, 256, (rows * cols // values, size), dtype=np.uint8)
    if weight_format == "NVFP4":
        blocks[:, :4] %= 0x7F  # the scales, without NaN
        return StoredTensor("x", weight_format, (rows, cols), blocks.reshape(-1))
    one = {"Q5_0": 0, "IQ4_NL": 0, "IQ4_XS": 0, "Q3_K": 108, "Q6_K": 208}
    two = 80 if weight_format == "Q2_K" else 0
    places = (one[weight_format],) if weight_format in one else (two, two + 2)
    for place in places:
        scales = random.uniform(1e-5, 1e-3, len(blocks)).astype("<f2")
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return StoredTensor("x", weight_format, (rows, cols), blocks.reshape(-1))


def engine_values(tensor: StoredTensor, *, exact: bool = False) -> tuple[str, np.ndarray]:
    """Return the engine's format and the values that it computes with."""
    import gguf

    kind, data = matrix_for_engine(tensor, exact=exact)
    if kind == "f32":
        return kind, data
    return kind, gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.upper()])


@pytest.mark.parametrize(("weight_format", "wanted_kind"), [("Q4_K", "q4_1"), ("IQ4_XS", "q8_0")])
def test_matrix_for_engine_q4_k_and_iq4_xs_are_more_precise_than_bf16(
    weight_format: str, wanted_kind: str
) -> None:
    tensor = block_tensor(weight_format)
    _, wanted = engine_values(tensor, exact=True)
    kind, got = engine_values(tensor)
    assert kind == wanted_kind
    in_bf16 = (bf16_bits(wanted).astype(np.uint32) << 16).view(np.float32)
    error, bf16_error = (np.square(x - wanted).mean() for x in (got, in_bf16))
    assert 0 < error < bf16_error / 16


@pytest.mark.parametrize("weight_format", ["Q5_0", "IQ4_NL"])
def test_matrix_for_engine_formats_within_q8_0_are_exact(weight_format: str) -> None:
    tensor = block_tensor(weight_format)
    kind, got = engine_values(tensor)
    assert kind == "q8_0"
    np.testing.assert_array_equal(got, engine_values(tensor, exact=True)[1])


@pytest.mark.parametrize("weight_format", ["Q2_K", "Q3_K", "Q5_1", "Q5_K", "Q6_K"])
def test_matrix_for_engine_wider_formats_are_rounded_to_q8_0(weight_format: str) -> None:
    tensor = block_tensor(weight_format)
    _, wanted = engine_values(tensor, exact=True)
    kind, got = engine_values(tensor)
    assert kind == "q8_0"
    largest = np.abs(wanted).reshape(-1, 32).max(axis=1, keepdims=True)
    step = largest / 127 * (1 + 2**-10) + 2**-24  # FP16 has 11 bits; the smallest number is 2^-24
    assert (np.abs(got - wanted).reshape(-1, 32) <= step / 2 * (1 + 1e-5)).all()


def test_values_to_q8_0_zero_and_nonfinite_blocks_keep_their_kind() -> None:
    rows = np.zeros((3, 32), np.float32)
    rows[1, 3] = np.inf
    rows[2, 4] = np.nan
    stored = values_to_q8_0(rows)
    assert not stored[0].any()
    scales = stored[:, :2].copy().view("<f2").reshape(-1)
    assert np.isinf(scales[1]) and np.isnan(scales[2])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("weight_format", ["Q4_K", "Q6_K"])
def test_matrix_for_engine_scale_beyond_fp16_is_rejected(weight_format: str) -> None:
    tensor = block_tensor(weight_format)
    blocks = tensor.raw.reshape(-1, BLOCK_FORMATS[weight_format][1])
    place = 208 if weight_format == "Q6_K" else 0
    blocks[5, place : place + 2] = np.array([60000], "<f2").view(np.uint8)
    with pytest.raises(ModelFormatError, match=r"tensor x: .*beyond 65504, the limit of FP16"):
        matrix_for_engine(tensor, exact=False)
    assert matrix_for_engine(tensor, exact=True)[0] == "f32"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales of MXFP4 are huge
@pytest.mark.parametrize("weight_format", sorted(BLOCK_FORMATS))
def test_engine_bytes_equal_size_of_converted_data(weight_format: str) -> None:
    tensor = block_tensor(weight_format)
    kind, data = matrix_for_engine(tensor, exact=False)
    assert data.nbytes == engine_bytes(PlannedTensor("layers.0.q", tensor), exact=False)
    assert kind == engine_format(tensor, exact=False)


@pytest.mark.parametrize("weight_format", sorted(BLOCK_FORMATS))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bits often give huge scales
def test_matrix_for_engine_chunks_do_not_change_values(weight_format: str) -> None:
    import gguf

    # More values than one chunk of the conversion, so the data has chunk borders.
    rows, cols = 1500, 1024
    raw = np.random.default_rng(1).integers(
        0, 255, (rows, row_bytes(weight_format, cols)), dtype=np.uint8
    )
    if weight_format == "NVFP4":
        raw.reshape(-1, 36)[:, :4] %= 0x7F
    tensor = StoredTensor("x", weight_format, (rows, cols), raw.reshape(-1))
    kind, data = matrix_for_engine(tensor, exact=True)
    if kind != "f32":
        np.testing.assert_array_equal(data, raw)
        return
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[weight_format])
    np.testing.assert_array_equal(data.view(np.uint32), wanted.view(np.uint32))


def test_matrix_for_engine_interleaved_rows_are_restored() -> None:
    rows = np.arange(16, dtype=np.float32).reshape(16, 1)
    stored = interleave(rows, 2)
    assert stored[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
    _, data = matrix_for_engine(
        StoredTensor("q", "F32", (16, 1), raw), exact=True, interleaved_heads=2
    )
    np.testing.assert_array_equal(data, rows)


# CRC-32 of the converted and of the packed matrix, or 0 for MXFP4, which is not packed. Raise
# WEIGHT_CACHE_VERSION when one changes.
GOLDEN: dict[str, tuple[int, int]] = {
    "F32": (698311730, 4065240744),
    "F16": (1877402449, 2507365091),
    "BF16": (2776079538, 1770722073),
    "Q4_0": (3584774730, 1818072828),
    "Q4_1": (3326253983, 881459149),
    "Q5_0": (3947022919, 1004713081),
    "Q5_1": (3895479883, 3675305020),
    "Q8_0": (305436726, 1386735304),
    "Q2_K": (367874909, 2276724308),
    "Q3_K": (1181143553, 2231820855),
    "Q4_K": (4069841018, 3227886392),
    "Q5_K": (1350711780, 1649609422),
    "Q6_K": (1600624074, 872480263),
    "IQ4_NL": (3235394438, 3744319746),
    "IQ4_XS": (953798743, 2885455526),
    "MXFP4": (1036926603, 0),
    "NVFP4": (2212880056, 3439023965),
    "NVFP4 kept": (3584774730, 3464843249),
    "AWQ": (263923974, 266103228),
    "F16 router": (1870270527, 3177651638),
    "BF16 transposed": (3781247468, 35175856),
    "F16 transposed": (560682644, 1889835711),
    "Q4_0 interleaved": (3340689477, 3062509387),
    "Q4_K interleaved": (2622113496, 3484431201),
}


SIZE = 256


def stored(stored_format: str) -> StoredTensor:
    """Return a 256 x 256 matrix of fixed bytes below 64, which are finite in every format."""

    def pattern(count: int) -> np.ndarray:
        return (np.arange(count, dtype=np.uint64) * 2654435761 % 4093 % 64).astype(np.uint8)

    if stored_format == "AWQ":
        codes, scales, zeros = (pattern(count) for count in (SIZE * SIZE // 2, 4 * SIZE, SIZE))
        matrix = awq_matrix(SIZE, codes=codes, scales=scales, zeros=zeros)
        return StoredTensor("layers.0.q", "AWQ", (SIZE, SIZE), codes, matrix=matrix)
    raw = pattern(SIZE * row_bytes(stored_format, SIZE))
    return StoredTensor("layers.0.q", stored_format, (SIZE, SIZE), raw)


def convert_and_pack(case: str) -> tuple[int, int]:
    stored_format, _, option = case.partition(" ")
    options: dict[str, Any] = {"exact": option == "router"}
    options |= {"interleaved_heads": 4} if option == "interleaved" else {}
    options |= {"transposed": True} if option == "transposed" else {}
    tensor = replace(stored(stored_format), as_stored=option == "kept")
    kind, values = matrix_for_engine(tensor, **options)
    config = model_config()
    config.hidden_size, config.num_heads = SIZE, SIZE // config.head_dim
    builder = _turbomind.WeightsBuilder(config, _turbomind.make_cpu_device(1), False)
    builder.add_matrix("layers.0.q", kind, values, SIZE, SIZE, scales_for_engine(tensor, kind))
    packed = builder.packed()
    return zlib.crc32(values.tobytes()), zlib.crc32(packed["layers.0.q"][3]) if packed else 0


@pytest.mark.parametrize("case", GOLDEN)
def test_convert_and_pack_equals_golden_checksums(case: str) -> None:
    assert convert_and_pack(case) == GOLDEN[case], (
        "raise WEIGHT_CACHE_VERSION in checkpoint/convert.py"
    )


def test_golden_checksums_cover_every_stored_format() -> None:
    assert {case.split()[0] for case in GOLDEN} == {*SUPPORTED_FORMATS, "AWQ"}


@pytest.mark.parametrize("weight_format", ["Q8_0", "Q4_K", "MXFP4"])
def test_turned_blocks_have_the_values_of_the_transpose(weight_format: str) -> None:
    # The keys of a head in GGUF's joint matrix of latents.
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    whole = block_tensor(weight_format)
    raw = whole.bytes_by_row()
    values = dequantize(raw, GGMLQuantizationType[weight_format]).reshape(48, -1)[16:32].T
    turned = turned_matrix("layers.0.latent.k_b.0", whole.take(16, 16))
    assert (turned.rows, turned.cols) == values.shape == (512, 16)
    kind, exact = matrix_for_engine(turned.tensor, exact=True)
    assert kind == "f32"
    np.testing.assert_array_equal(exact, values)
    kind, rounded = matrix_for_engine(turned.tensor, exact=False)
    assert kind == engine_format(turned.tensor, False) == "bf16"
    np.testing.assert_array_equal(rounded, bf16_bits(values))
    assert engine_bytes(turned, False) == 2 * values.size
