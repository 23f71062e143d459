"""Runs one task against a running server with lm-eval, in a process of its own.

lm-eval talks to the HTTP API and reads a local file. It is kept offline, so that it downloads
neither tokenizers nor data sets.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from server_process import end_process, last_lines

from eval.tasks import Task

MODEL_NAME = "evaluated"

WATCH_SECONDS = 0.5
REQUEST_SECONDS = 24 * 3600  # a long chain of thought on a CPU takes hours
METRIC = "exact_match"
Api = Literal["chat", "completions"]
_MODELS = {"chat": "local-chat-completions", "completions": "local-completions"}
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE", "TRANSFORMERS_OFFLINE")


class HarnessFailure(RuntimeError):
    """The harness did not score every question."""


@dataclass(frozen=True)
class Job:
    """One task on one server. `generation` replaces settings of the task file."""

    task: Task
    url: str
    api: Api
    limit: int | None
    concurrency: int
    seed: int
    generation: Mapping[str, Any]
    log: Path

    @property
    def num_samples(self) -> int:
        """Return the number of questions to ask."""
        return min(self.task.num_samples, self.limit or self.task.num_samples)


class LmEval:
    """EleutherAI's lm-evaluation-harness. `version` is part of the key of a result."""

    def __init__(self) -> None:
        try:
            self.version = f"lm-eval {importlib.metadata.version('lm-eval')}"
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(
                "lm-eval is not installed; run pip install '.[eval]' in the project."
            ) from None

    def run(self, job: Job, watch: Callable[[], None]) -> list[bool]:
        """Return whether each question, in file order, was answered correctly.

        `watch` is called every few seconds; its exceptions end the run and reach the caller.
        """
        with tempfile.TemporaryDirectory(prefix="kv-eval-") as name:
            folder = Path(name)
            (folder / "tasks").mkdir()
            text = job.task.rendered(job.generation)
            (folder / f"tasks/{job.task.harness_name}.yaml").write_text(text, encoding="utf-8")
            environment = {**os.environ, **dict.fromkeys(_OFFLINE, "1")}
            environment |= {"HF_HOME": str(folder / "cache"), "NO_PROXY": "127.0.0.1"}
            with job.log.open("wb") as log:
                process = subprocess.Popen(
                    self._command(job, folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | {"no_proxy": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1"},
                )
            try:
                while process.poll() is None:
                    watch()
                    time.sleep(WATCH_SECONDS)
            finally:
                end_process(process)
            watch()
            if process.returncode != 0:
                end = last_lines(job.log)
                raise HarnessFailure(f"lm-eval ended with {process.returncode}{end}")
            return read_scores(folder / "output", job)

    def _command(self, job: Job, folder: Path) -> list[str]:
        arguments = {
            "model": MODEL_NAME,
            "base_url": job.url + _PATHS[job.api],
            "num_concurrent": job.concurrency,
            "timeout": REQUEST_SECONDS,
            "seed": job.seed,
            "tokenizer_backend": "none",
        }
        command = [sys.executable, "-m", "lm_eval", "run", "--model", _MODELS[job.api]]
        command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
        command += ["--include_path", str(folder / "tasks"), "--tasks", job.task.harness_name]
        command += ["--output_path", str(folder / "output"), "--log_samples"]
        command += ["--apply_chat_template"] if job.api == "chat" else []
        return command + (["--limit", str(job.limit)] if job.limit is not None else [])


def read_scores(folder: Path, job: Job) -> list[bool]:
    """Read lm-eval's file of samples. Raise HarnessFailure if a score is missing."""
    files = sorted(folder.rglob("samples_*.jsonl"))
    if len(files) != 1:
        raise HarnessFailure(f"lm-eval wrote {len(files)} sample files, not 1{last_lines(job.log)}")
    scores: dict[int, bool] = {}
    for line in files[0].read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        score = sample.get(METRIC)
        if score not in (0, 1):
            raise HarnessFailure(f"{files[0].name}: {METRIC} is {score!r}, not 0 or 1")
        scores[sample["doc_id"]] = bool(score)
    if sorted(scores) != list(range(job.num_samples)):
        raise HarnessFailure(f"lm-eval scored {len(scores)} of {job.num_samples} questions")
    return [scores[i] for i in range(job.num_samples)]
