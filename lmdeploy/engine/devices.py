"""Open the device that computes: the CPU, or a GPU through libturbomind_cuda.so."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmdeploy.base.resources import free_memory_bytes, usable_cores
from lmdeploy.base.tuner_file import (
    TunerFileError,
    read_choices,
    tuner_file,
    tuner_is_on,
    write_choices,
)
from lmdeploy.config.engine import TurbomindEngineConfig

if TYPE_CHECKING:
    from lmdeploy._turbomind import (
        AttentionToTune,
        Device,
        DeviceCapability,
        TunedChoice,
        TuningResult,
        Weights,
    )

logger = logging.getLogger("lmdeploy")

_DRIVER_FILE = "/dev/nvidiactl"
# The default with a GPU. More threads make packing and sampling hardly faster.
_MOST_GPU_THREADS = 16
_MAX_TUNING_SECONDS = 2.0

# The files of the wheels nvidia-cublas and nvidia-cublas-cu12 in the package `nvidia`.
_CUBLAS_LT = ("cu13/lib/libcublasLt.so.13", "cublas/lib/libcublasLt.so.12")


def cublas_lt_files() -> list[str]:
    """Return the cuBLASLt files of installed wheels, without importing them."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec and spec.submodule_search_locations) or []
    files = [Path(folder, name) for folder in folders for name in _CUBLAS_LT]
    return [str(file) for file in files if file.is_file()]


def step_sizes(config: TurbomindEngineConfig, capability: DeviceCapability) -> tuple[int, int]:
    """Return the maximum numbers of sequences and new tokens in a step on a device."""
    batch_size = config.max_batch_size or capability.default_batch_size
    default_tokens = max(capability.default_step_tokens, batch_size)
    return batch_size, config.max_prefill_token_num or default_tokens


def free_bytes(device: Device) -> int:
    """Return the free memory of a device."""
    own = device.free_bytes
    return free_memory_bytes() if own is None else own


def device_line(device: Device) -> str:
    """Return the line that a server prints at start."""
    backend = device.gemm_backend
    gemm = f"; matrix multiplication: {backend}" if backend else ""
    return f"device: {device.name}{gemm}"


def open_device(config: TurbomindEngineConfig) -> Device:
    """Open the device that `config` requests.

    If `auto` falls back to the CPU, the reason is logged, as a warning on machines with a GPU
    driver. Raise ValueError if a GPU is requested and cannot be used.
    """
    from lmdeploy import _turbomind

    if config.device_type in ("auto", "cuda"):
        gpu = config.devices[0] if config.devices else 0
        try:
            if config.exact:
                raise ValueError("CUDA is not used: exact is supported only on the CPU.")
            if config.gemm_input_dtype not in (None, "fp8"):
                raise ValueError("CUDA is not used: gemm_input_dtype is supported only on the CPU.")
            threads = config.num_threads or min(usable_cores(), _MOST_GPU_THREADS)
            return _turbomind.make_cuda_device(
                gpu,
                deterministic=config.deterministic,
                num_threads=threads,
                cublas_lt=cublas_lt_files(),
                fp8_activations=config.gemm_input_dtype == "fp8",
            )
        except ValueError as error:
            if config.needs_cuda:
                reason = str(error).rstrip(".")
                raise ValueError(f"{reason}. Change --device or --devices.") from None
            level = logging.WARNING if os.path.exists(_DRIVER_FILE) else logging.INFO
            logger.log(level, "%s", error)
    name = "cpu" if config.device_type == "auto" else config.device_type
    device = _turbomind.make_device(
        name,
        config.num_threads or usable_cores(),
        int8_activations=config.int8_activations,
        deterministic=config.deterministic or config.exact,
    )
    wanted = config.gemm_input_dtype
    if wanted is not None and wanted != device.gemm_input_dtype:
        raise ValueError(
            f"gemm_input_dtype {wanted} needs {'a GPU' if wanted == 'fp8' else 'a CPU with AMX'}, "
            f"and this is {device.name}. Remove --gemm-input-dtype."
        )
    return device


def tuning_machine(device: Device) -> str:
    """Return what the choices of a device's kernels depend on, or "" if it has no choices."""
    return device.tune([], saved=[], max_rows=0, max_seconds=0.0).machine


def tune_device(
    device: Device,
    models: list[Weights],
    *,
    max_rows: int,
    attention: Sequence[AttentionToTune] = (),
) -> str:
    """Choose the device's kernels for the layers of the models, before an engine uses it.

    The choices come from the machine's file. Those that it lacks are measured and stored.

    Args:
        max_rows: maximum number of tokens in a step.
        attention: what the engine's steps attend to.

    Returns:
        the line that a server prints at start, or "" if there is nothing to choose.
    """
    machine = tuning_machine(device) if tuner_is_on() else ""
    if not machine:
        return ""
    path = tuner_file(machine)
    saved = [] if path is None else _saved_choices(path, machine, warns=True)
    begin = time.monotonic()
    result = device.tune(
        models,
        saved=saved,
        max_rows=max_rows,
        max_seconds=_MAX_TUNING_SECONDS,
        attention=attention,
    )
    seconds = time.monotonic() - begin
    if path is not None and result.num_measured:
        _store_choices(path, machine, choices=result.choices)
    return tuner_line(result, path, seconds=seconds)


def tuner_line(result: TuningResult, path: Path | None, *, seconds: float) -> str:
    """Return one line about the choices: where they come from, and what they gain."""
    total, measured = len(result.choices), result.num_measured
    if total == 0:
        return ""
    source = f"measured in {seconds:.1f} s" if measured else f"from {path}"
    count = f"{measured} of {total}" if 0 < measured < total else f"{total}"
    other = [choice for choice in result.choices if choice.kernel != choice.table_kernel]
    line = f"tuner: {count} choices {source}; {len(other)} differ from the table"
    if other:
        best = max(other, key=_gain)
        line += f", at most {_gain(best):.2f} times as fast ({best.question}: {best.kernel})"
    if result.wrong:
        line += f"; {len(result.wrong)} left out for wrong results ({result.wrong[0]})"
    return line + (f"; {result.num_left} not measured" if result.num_left else "")


def _gain(choice: TunedChoice) -> float:
    return choice.table_us / choice.us if choice.us > 0 else 1.0


def _saved_choices(path: Path, machine: str, *, warns: bool) -> list[TunedChoice]:
    try:
        return read_choices(path, machine)
    except FileNotFoundError:
        return []
    except TunerFileError as error:
        if warns:
            logger.warning("The GPU is tuned again: %s: %s", path, error)
        return []


def _store_choices(path: Path, machine: str, *, choices: list[TunedChoice]) -> None:
    """Add choices to the file, in which another process may have put some in the meantime."""
    saved = _saved_choices(path, machine, warns=False)
    by_question = {choice.question: choice for choice in saved}
    for choice in choices:
        by_question.pop(choice.question, None)  # the newest ones come last
        by_question[choice.question] = choice
    try:
        write_choices(path, machine, choices=by_question.values())
    except OSError as error:
        reason = error.strerror or error
        logger.warning("The tuner's choices are not stored in %s: %s", path.parent, reason)
