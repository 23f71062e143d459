"""Modules of scripts/eval_gpt_oss.py: tasks, server, harness, results, divergence."""

import sys
from pathlib import Path

# benchmarks/results.py writes the files of both folders.
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
