"""Modules of scripts/eval_gpt_oss.py: tasks, harness, results, divergence."""

import sys
from pathlib import Path

# Modules that the benchmarks share: results.py, server_process.py.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
