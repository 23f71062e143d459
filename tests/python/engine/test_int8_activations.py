"""Tests of `gemm_input_dtype`: the option, and where it shows."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engine_runs import EngineRun
from fake_engine import make_engine
from serving import serving
from tiny_models import TINY_MODELS, make_model, save_model

from lmdeploy import TurbomindEngineConfig, _turbomind
from lmdeploy.cli.engine_flags import engine_config
from lmdeploy.cli.main import make_parser
from lmdeploy.cli.serve import dry_run_lines
from lmdeploy.engine import devices
from lmdeploy.engine.load import load_engine
from lmdeploy.engine.plan import plan_engine
from lmdeploy.engine.prefix_store import identity_of_cache

INT8 = TurbomindEngineConfig(gemm_input_dtype="int8", num_threads=1, session_len=64)
IDS = [1, 5, 40, 7, 300, 12, 9, 9, 77, 130, 2, 8]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model(TINY_MODELS[0]), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("value", ["fp4", "", "INT8", 8, True, ["int8"], np.array(["int8"])])
def test_other_values_are_rejected(value: Any) -> None:
    message = (
        r"gemm_input_dtype is .*\. It must be int8, bfloat16, fp8 or None \(--gemm-input-dtype\)"
    )
    with pytest.raises(ValueError, match=message):
        TurbomindEngineConfig(gemm_input_dtype=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact": True}, "gemm_input_dtype cannot be used with exact"),
        ({"device_type": "cuda"}, "gemm_input_dtype must be fp8 on CUDA"),
        ({"devices": [0]}, "gemm_input_dtype must be fp8 on CUDA"),
    ],
)
def test_exact_compute_and_gpus_exclude_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurbomindEngineConfig(gemm_input_dtype="int8", **options)
    TurbomindEngineConfig(gemm_input_dtype=None, **options)


def test_flag_reaches_the_options() -> None:
    def parse(*flags: str) -> TurbomindEngineConfig:
        return engine_config(make_parser().parse_args(["serve", "api_server", "smollm2", *flags]))

    assert parse().gemm_input_dtype is None
    assert parse("--gemm-input-dtype", "int8").gemm_input_dtype == "int8"
    with pytest.raises(ValueError, match="gemm_input_dtype is 'int4'"):
        parse("--gemm-input-dtype", "int4")


def test_device_auto_uses_the_cpu_and_logs_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lmdeploy"):
        opened = devices.open_device(INT8)
    assert opened.name.endswith(", 1 thread, int8 activations)")
    (record,) = caplog.records
    assert "gemm_input_dtype is supported only on the CPU" in record.getMessage()


def test_start_lines_and_dry_run_say_so(llama: Path) -> None:
    assert any("int8 activations)" in line for line in dry_run_lines(str(llama), INT8))
    _, running = load_engine(str(llama), INT8, progress=False)
    try:
        assert running.gemm_input_dtype == "int8"
        assert running.device_line.endswith(", 1 thread, int8 activations)")
    finally:
        running.core.close()


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_metrics_say_so(dtype: str) -> None:
    engine = make_engine()
    engine.running.gemm_input_dtype = dtype
    with serving(engine) as url:
        text = httpx.get(f"{url}/metrics").text
    assert f'lmdeploy:gemm_info{{gemm_input_dtype="{dtype}",model_name="m"}} 1.0' in text


@pytest.mark.parametrize("option", ["deterministic", "exact"])
def test_deterministic_and_exact_engines_keep_16_bits(option: str) -> None:
    config = TurbomindEngineConfig(device_type="cpu", num_threads=1)
    kept = devices.open_device(dataclasses.replace(config, **{option: True}))
    assert kept.gemm_input_dtype == "int16"
    default = devices.open_device(config)
    isa = os.environ.get("LMDEPLOY_CPU_ISA") or _turbomind.available_cpu_isas()[-1]
    fastest = {"avx512": "int12", "amx": "bfloat16"}
    assert default.gemm_input_dtype == fastest.get(isa, "int16")


def test_bf16_needs_amx_and_no_determinism() -> None:
    config = TurbomindEngineConfig(device_type="cpu", num_threads=1, gemm_input_dtype="bfloat16")
    isa = os.environ.get("LMDEPLOY_CPU_ISA") or _turbomind.available_cpu_isas()[-1]
    if isa == "amx":
        assert devices.open_device(config).gemm_input_dtype == "bfloat16"
    else:
        with pytest.raises(ValueError, match=f"needs a CPU with AMX, and this is cpu .{isa}"):
            devices.open_device(config)
    for other in ("deterministic", "exact"):
        with pytest.raises(ValueError, match="gemm_input_dtype cannot be"):
            dataclasses.replace(config, **{other: True})


def test_fp8_needs_a_gpu_and_no_determinism() -> None:
    config = TurbomindEngineConfig(gemm_input_dtype="fp8", device_type="cpu", num_threads=1)
    with pytest.raises(ValueError, match=r"fp8 needs a GPU, and this is cpu .* Remove --gemm-inp"):
        devices.open_device(config)
    for other in ("deterministic", "exact"):
        with pytest.raises(ValueError, match="gemm_input_dtype cannot be"):
            dataclasses.replace(config, **{other: True})


def test_a_store_of_blocks_separates_them(llama: Path) -> None:
    def identity(config: TurbomindEngineConfig) -> dict[str, Any]:
        files, _, kv = plan_engine(str(llama), config, device=devices.open_device(config))
        return identity_of_cache(str(llama), config, files=files, kv=kv)()

    plain = identity(TurbomindEngineConfig(num_threads=1, session_len=64))
    assert identity(INT8) == {**plain, "gemm_input_dtype": "int8"}
    config = TurbomindEngineConfig(num_threads=1, session_len=64, deterministic=True)
    assert identity(config) == {**plain, "deterministic": True}


def test_only_quantized_matrices_are_affected(llama: Path) -> None:
    def logits(weight_format: str | None, *, int8: bool) -> np.ndarray:
        options: dict[str, Any] = {"weight_format": weight_format, "int8_activations": int8}
        with EngineRun(str(llama), exact=False, **options) as run:
            return run.logits(IDS)

    unquantized = logits(None, int8=False)
    np.testing.assert_array_equal(logits(None, int8=True), unquantized)
    plain, rounded = logits("int8", int8=False), logits("int8", int8=True)
    # Rounding activations to 8 bits costs about as much as rounding weights to 8 bits.
    assert 0 < np.std(rounded - plain) < 1.5 * np.std(plain - unquantized)
