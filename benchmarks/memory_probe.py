"""Peak memory of one engine in a process of its own.

    python benchmarks/memory_probe.py MODEL.gguf --engine ours --setting nvfp4
    python benchmarks/memory_probe.py MODEL.gguf --engine peer --setting q4_0,on,mmap

Loads the model, reads a prompt and decodes; prints its peak and setting as JSON. Pages of a
mapped file count, in both engines; neither process imports the other's library.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cells import Cell

PROBE_TIMEOUT_S = 1800
OTHERS_LIBRARY = {"ours": "llama_cpp", "peer": "lmdeploy"}


@dataclass(frozen=True)
class Peak:
    """Of one process; `setting` as results name it."""

    peak_rss_bytes: int
    setting: str


def peak_rss_bytes(status: str = "/proc/self/status") -> int:
    """VmHWM: unlike ru_maxrss it does not begin with the peak of the parent process."""
    for line in Path(status).read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{status}: no line VmHWM")


def run_ours(path: str, cell: Cell, *, mode: str, threads: int) -> str:
    """Default quality and options but for the room of the cell."""
    from our_engine import OurEngine, OurSetting

    from lmdeploy import _turbomind
    from lmdeploy.engine.model_files import load_model

    device = _turbomind.make_cpu_device(threads)
    loaded = load_model(path, device=device, progress=False)
    setting = OurSetting.for_cell(cell, mode)
    with OurEngine(loaded.config, loaded.weights, setting=setting, threads=threads) as engine:
        engine.run(cell)
        return engine.format


def run_peer(path: str, cell: Cell, *, setting: str, threads: int) -> str:
    """`setting`: KV type, `on` or `off` for flash attention, `mmap`, `read` or `as-stored`.

    `as-stored`: mapped, and no matrix repacked, which costs llama.cpp speed.
    """
    from llama_cpp_peer import FLOAT_TYPES, LlamaCpp, PeerSetting

    kind, attention, reading = setting.split(",")
    value_kind = kind if attention == "on" or kind in FLOAT_TYPES else "f16"
    peer = LlamaCpp(
        path, threads=threads, use_mmap=reading != "read", repack=reading != "as-stored"
    )
    peer.run(cell, PeerSetting(kind, value_kind, attention == "on"))
    peer.close()
    return f"{kind}, flash attention {attention}, {reading}"


def check_alone(engine: str) -> None:
    """RuntimeError when the library of the other engine is in this process, too."""
    other = OTHERS_LIBRARY[engine]
    if other in sys.modules:
        raise RuntimeError(f"memory of {engine}: {other} is loaded in the same process")


def probe(path: str, cell: Cell, *, engine: str, setting: str, threads: int) -> Peak:
    """Of a new process. RuntimeError with what it printed when it fails."""
    command = [sys.executable, __file__, path, "--engine", engine, "--setting", setting]
    command += ["--context", str(cell.context), "--steps", str(cell.steps)]
    command += ["--num-threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{engine} {setting}: exit {done.returncode}: {done.stderr[-500:]}")
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one engine here."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--engine", choices=("ours", "peer"), required=True)
    parser.add_argument(
        "--setting", required=True, help="KV mode; KV type,on|off,mmap|read|as-stored"
    )
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--num-threads", type=int, default=2)
    options = parser.parse_args(arguments)
    cell = Cell(options.context, 1, options.steps)
    if options.engine == "ours":
        setting = run_ours(options.model, cell, mode=options.setting, threads=options.num_threads)
    else:
        setting = run_peer(
            options.model, cell, setting=options.setting, threads=options.num_threads
        )
    check_alone(options.engine)
    print(json.dumps(asdict(Peak(peak_rss_bytes(), setting))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
