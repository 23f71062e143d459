"""Peak memory of one engine in a process of its own.

    python benchmarks/memory_probe.py MODEL.gguf --engine ours --setting nvfp4
    python benchmarks/memory_probe.py MODEL.gguf --engine peer --setting q4_0,on,mmap

Loads the model, reads a prompt and decodes; prints {"peak_rss_bytes": N}. Pages of a mapped file
count, in both engines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from our_engine import Cell, OurEngine, OurSetting

PROBE_TIMEOUT_S = 1800


def peak_rss_bytes(status: str = "/proc/self/status") -> int:
    """VmHWM: unlike ru_maxrss it does not begin with the peak of the parent process."""
    for line in Path(status).read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{status}: no line VmHWM")


def run_ours(path: str, cell: Cell, *, mode: str, threads: int) -> None:
    """Default quality and options but for the room of the cell."""
    from lmdeploy import _turbomind
    from lmdeploy.turbomind.loader import load_model

    device = _turbomind.make_cpu_device(threads)
    loaded = load_model(path, device=device, progress=False)
    setting = OurSetting.for_cell(cell, mode)
    with OurEngine(loaded.config, loaded.weights, setting=setting, threads=threads) as engine:
        engine.run(cell)


def run_peer(path: str, cell: Cell, *, setting: str, threads: int) -> None:
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


def probe(path: str, cell: Cell, *, engine: str, setting: str, threads: int) -> int:
    """Peak bytes of a new process. RuntimeError with what it printed when it fails."""
    command = [sys.executable, __file__, path, "--engine", engine, "--setting", setting]
    command += ["--context", str(cell.context), "--steps", str(cell.steps)]
    command += ["--num-threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{engine} {setting}: exit {done.returncode}: {done.stderr[-500:]}")
    peak = json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"]
    return int(peak)


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
        run_ours(options.model, cell, mode=options.setting, threads=options.num_threads)
    else:
        run_peer(options.model, cell, setting=options.setting, threads=options.num_threads)
    print(json.dumps({"peak_rss_bytes": peak_rss_bytes()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
