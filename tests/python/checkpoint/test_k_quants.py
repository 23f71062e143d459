"""Tests of GGUF's K-quants that the engine computes as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_runs import EngineRun
from parity import MAX_RELATIVE_ERROR, prompt, reference_logits, relative_error
from tiny_engine import model_config
from tiny_gguf import write_gguf
from tiny_models import TinyModel, make_model

from lmdeploy import _turbomind
from lmdeploy.checkpoint import fingerprint
from lmdeploy.checkpoint import load as weight_loader
from lmdeploy.checkpoint.convert import (
    K_QUANTS,
    engine_bytes,
    engine_format,
    for_device,
    matrix_for_engine,
)
from lmdeploy.checkpoint.files.tensor_file import BLOCK_FORMATS, StoredTensor
from lmdeploy.checkpoint.open import open_checkpoint
from lmdeploy.checkpoint.tensor_plan import PlannedTensor
from lmdeploy.engine.model_files import open_files

TINY = TinyModel("llama-256", "Llama", {"hidden_size": 256, "intermediate_size": 512})
# Activations of 16 bits and the FP16 cache give 0.8e-3 to 1.1e-3 and a KL divergence of 7e-7. The
# conversion of Q4_K to Q4_1 would give 6.4e-3 and 1.9e-5, that of the others to Q8_0 3e-2 and 1e-3.
MAX_SERVED_ERROR = 2e-3
MAX_SERVED_KL = 2e-6
TILE_ROWS = 16
# The places of FP16 factors in a super-block.
FACTORS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
EXTREME = np.array([0, 1, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x8000, 0x7C00, 0xFC00, 0x7E00], "<u2")


def random_rows(kind: str, rows: int, cols: int) -> np.ndarray:
    """Return rows of random bytes whose factors are realistic, extreme or not finite."""
    random = np.random.default_rng(3)
    values, size = BLOCK_FORMATS[kind]
    blocks = random.integers(0, 256, (rows * cols // values, size), dtype=np.uint8)
    for place in FACTORS[kind]:
        factors = random.normal(0, 1e-3, len(blocks)).astype("<f2").view("<u2")
        extreme = random.random(len(blocks)) < 0.3
        factors[extreme] = random.choice(EXTREME, int(extreme.sum()))
        blocks[:, place : place + 2] = factors.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def pack(kind: str, rows: np.ndarray, cols: int, *, exact: bool) -> tuple[str, np.ndarray]:
    """Return the format and the tiles of a matrix that the engine has packed."""
    config = model_config()
    config.hidden_size, config.num_heads = cols, len(rows) // config.head_dim
    builder = _turbomind.WeightsBuilder(config, _turbomind.make_cpu_device(1), exact)
    builder.add_matrix("layers.0.q", kind.lower(), rows, len(rows), cols)
    packed = builder.packed()["layers.0.q"]
    return packed[0], packed[3]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # products of infinities
@pytest.mark.parametrize("kind", K_QUANTS)
def test_add_matrix_k_quant_has_the_values_of_the_gguf_package(kind: str) -> None:
    import gguf

    rows = random_rows(kind, 64, 512)
    wanted = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert not np.isfinite(wanted).all()
    stored, tiles = pack(kind, rows, 512, exact=True)
    assert stored == "f32"
    values = tiles.view(np.float32).reshape(-1, 512, TILE_ROWS).swapaxes(1, 2).reshape(64, 512)
    np.testing.assert_array_equal(values, wanted)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_add_matrix_k_quant_takes_the_bytes_of_the_file(kind: str) -> None:
    rows = random_rows(kind, 64, 512)
    stored, tiles = pack(kind, rows, 512, exact=False)
    assert (stored, tiles.nbytes) == (kind.lower(), rows.nbytes)
    assert _turbomind.packed_bytes(kind.lower(), 2048, 2048) == 2048 * 8 * BLOCK_FORMATS[kind][1]


@pytest.mark.parametrize("kind", K_QUANTS)
def test_add_matrix_k_quant_of_part_of_a_block_is_rejected(kind: str) -> None:
    rows = np.zeros((64, 128), np.uint8)
    with pytest.raises(
        ValueError, match=rf"288 columns, but {kind.lower()} needs a multiple of 256"
    ):
        pack(kind, rows, 288, exact=False)
    with pytest.raises(ValueError, match="bytes, but needs"):
        pack(kind, rows, 256, exact=False)


def as_stored(kind: str) -> StoredTensor:
    rows = random_rows(kind, 48, 512)
    return StoredTensor("layers.0.q", kind, (48, 512), rows.reshape(-1), as_stored=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # products of infinities
@pytest.mark.parametrize("kind", K_QUANTS)
def test_matrix_for_engine_k_quant_as_stored_keeps_its_bytes(kind: str) -> None:
    tensor = as_stored(kind)
    found, data = matrix_for_engine(tensor, exact=False)
    assert found == engine_format(tensor, exact=False) == kind.lower()
    np.testing.assert_array_equal(data.reshape(-1), tensor.raw)
    assert engine_bytes(PlannedTensor("layers.0.q", tensor), exact=False) == tensor.num_bytes
    assert matrix_for_engine(tensor, exact=True)[0] == "f32"


@pytest.mark.parametrize("kind", K_QUANTS)
def test_matrix_for_engine_k_quant_rows_are_restored(kind: str) -> None:
    tensor = as_stored(kind)
    _, data = matrix_for_engine(tensor, exact=False, interleaved_heads=4)
    rows = tensor.raw.reshape(48, -1)
    order = np.arange(48).reshape(4, 6, 2).swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(data, rows[order])


@pytest.fixture(scope="module", params=K_QUANTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Return a file and the logits of transformers with its values."""
    path = tmp_path_factory.mktemp("model") / f"{kind}.gguf"
    reference = make_model(TINY)
    stored = write_gguf(reference, path, weight_format=kind)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(torch.from_numpy(stored[name]))
    return path, reference_logits(reference, prompt(80))


def test_for_device_converts_k_quants_only_if_the_device_has_no_kernels(
    kind: str, model: tuple[Path, np.ndarray]
) -> None:
    checkpoint = open_checkpoint(model[0])
    formats = {}
    for capability in (
        _turbomind.DeviceCapability(),
        _turbomind.make_cpu_device(1).capability,
        _turbomind.cuda_capability(90),
    ):
        tensors = for_device(checkpoint, capability).tensors
        found = {engine_format(planned.tensor, exact=False) for planned in tensors}
        formats[capability.has_all_formats] = found - {"bf16"}
    converted = "q4_1" if kind == "Q4_K" else "q8_0"
    assert formats == {True: {kind.lower()}, False: {converted}}


def test_k_quant_exact_logits_equal_transformers(model: tuple[Path, np.ndarray]) -> None:
    path, wanted = model
    with EngineRun(str(path), exact=True) as run:
        assert relative_error(run.logits(prompt(80)), wanted) <= MAX_RELATIVE_ERROR


def test_k_quant_logits_differ_from_fp32_only_by_activations(
    model: tuple[Path, np.ndarray],
) -> None:
    path, wanted = model
    with EngineRun(str(path), exact=False, kv_format="none") as run:
        logits = run.logits(prompt(80))
    assert 0 < relative_error(logits, wanted) <= MAX_SERVED_ERROR
    log_p, log_q = (torch.log_softmax(torch.tensor(x).double(), -1) for x in (wanted, logits))
    assert float((log_p.exp() * (log_p - log_q)).sum(-1).mean()) <= MAX_SERVED_KL


def test_open_files_k_quant_plan_has_the_bytes_of_the_file(
    kind: str, model: tuple[Path, np.ndarray]
) -> None:
    capability = _turbomind.make_cpu_device(1).capability
    info = open_files(str(model[0]), capability=capability).info
    assert info.weight_bytes == info.file_bytes
    assert info.parts["mlp"].formats == (kind.lower(),)


def test_weight_cache_k_quant_second_start_gives_equal_bits(
    model: tuple[Path, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDEPLOY_CACHE", "1")
    monkeypatch.setenv("LMDEPLOY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(weight_loader, "MIN_CACHED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "SETTLE_NS", -(10**18))
    logits = []
    for is_cached in (False, True):
        with EngineRun(str(model[0]), exact=False) as run:
            logits.append(run.logits(prompt(40)))
            writer = run.model.cache_writer
            assert (writer is None) == is_cached
            if writer is not None:
                writer.start()
                assert writer.join(60.0) and writer.stored
    np.testing.assert_array_equal(logits[0], logits[1])
