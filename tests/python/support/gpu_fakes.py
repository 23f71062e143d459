"""Programs in Python that stand in for those that need a GPU. Every figure of theirs is made up."""

from __future__ import annotations

import stat
import sys
import textwrap
from pathlib import Path

ABOUT = {"device": "Synthetic GPU", "sm": 90, "memory_bytes": 1 << 37}


def program(path: Path, body: str) -> Path:
    """A program in Python."""
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\n" + textwrap.dedent(body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# device_bench: experts find no memory, flatten fails.
BENCH = """
print(json.dumps({"device": "Synthetic GPU", "kind": "cuda", "sm": 90}), flush=True)
print("noise of a library", flush=True)
for line in sys.stdin:
    cell = dict(word.split("=") for word in line.split())
    if cell["op"] == "flatten":
        answer = {"error": "an illegal access"}
    elif cell["op"] == "experts":
        answer = {"skipped": "memory"}
    else:
        answer = {"us": 10.0, "us_low": 9.0, "us_high": 11.0, "launches": 1, "layers": 2,
                  "weight_bytes": 0, "kv_bytes": 1000, "activation_bytes": 10, "operations": 5}
    print(json.dumps(answer), flush=True)
"""

# device_bench that says nothing more from its third cell on.
BENCH_THAT_HANGS = """
print(json.dumps({"device": "Synthetic GPU", "kind": "cuda"}), flush=True)
for number, line in enumerate(sys.stdin):
    if number >= 2:
        time.sleep(600)
    print(json.dumps({"us": 10.0, "kv_bytes": 1000}), flush=True)
"""

# generation_bench: int8 fails.
GENERATION = """
print(json.dumps({"device": "Synthetic GPU", "kind": "cuda"}), flush=True)
print(json.dumps({"model": "x", "weight_bytes": 1, "seconds": 1.0}), flush=True)
for line in sys.stdin:
    cell = dict(word.split("=") for word in line.split())
    if cell["mode"] == "int8":
        print(json.dumps({"error": "broken"}), flush=True)
    else:
        row = {"mode": cell["mode"], "quality": cell["quality"], "context": 512,
               "tokens_per_s": 100.0, "bytes_per_token": 5.0}
        print(json.dumps({**row, "work": "prompts", "batch": 8}), flush=True)
        print(json.dumps({**row, "work": "decode", "batch": 1}), flush=True)
    print(json.dumps({"done": line.strip()}), flush=True)
"""

# gpu_ops_test of two files; one may fail, and the small suite has the first alone.
TESTS = """
if sys.argv[1] == "--list-test-cases":
    small = "--test-suite=small" in sys.argv
    for name in ("kv_ops",) if small else ("kv_ops", "step"):
        print('<TestCase name="x" filename="/src/' + name + '_test.cc" line="1"/>')
    sys.exit()
name = sys.argv[1].rsplit("/")[-1]
print("[doctest] test cases: 3 | 3 passed")
sys.exit(1 if name == "{failing}" else 0)
"""
