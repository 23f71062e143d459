"""How long a server takes from its command to its first 200 on /health, first and later starts.

    python benchmarks/bench_start.py --model smollm2

The first start finds an empty cache of packed weights; the later ones what it wrote. Seconds, of
--repeats later starts the median; a start is seen within POLL_SECONDS of server_processes.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from our_engine import quality_of
from server_processes import POLL_SECONDS, ServerShape, our_command, running
from targets import FP4

WRITTEN_SECONDS = 300.0
SESSION_LEN, SLOTS = 2048, 16


def start_seconds(command: Sequence[str], *, until: Callable[[], bool] = lambda: True) -> float:
    """Of one start; the server is stopped once `until` holds. RuntimeError when it never does."""
    begun = time.perf_counter()
    with running(command):
        seconds = time.perf_counter() - begun
        deadline = time.monotonic() + WRITTEN_SECONDS
        while not until():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no packed weights after {WRITTEN_SECONDS:.0f} s")
            time.sleep(POLL_SECONDS)
    return seconds


def measure(model: str, *, threads: int, repeats: int) -> tuple[float, list[float]]:
    """Seconds of the first start and of the later ones."""
    shape = ServerShape(SLOTS, SESSION_LEN, threads)
    command = our_command(model, FP4, shape=shape)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LMDEPLOY_CACHE": "1", "LMDEPLOY_CACHE_DIR": folder}
        first = start_seconds(command, until=lambda: any(Path(folder).glob("*.packed")))
        return first, [start_seconds(command) for _ in range(repeats)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="what lmdeploy serves (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="later starts (%(default)s)")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.num_threads < 1:
        parser.error("--repeats and --num-threads: wanted at least 1")
    try:
        first, later = measure(options.model, threads=options.num_threads, repeats=options.repeats)
    except RuntimeError as error:
        print(f"bench_start.py: {error}", file=sys.stderr)
        return 2
    print(f"{options.model}, {FP4}, {quality_of(FP4)}, {options.num_threads} threads")
    print(f"first start  {first:6.2f} s")
    shown = ", ".join(f"{seconds:.2f}" for seconds in later)
    print(f"later starts {statistics.median(later):6.2f} s (median of {shown})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
