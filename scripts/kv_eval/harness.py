"""Running one task against a server that is up: lm-eval, in a process of its own.

It talks to the HTTP API, gets its data from a local file and is kept offline: no tokenizer and no
data set is fetched.
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
from typing import Any, Literal, Protocol

from kv_eval.server import MODEL_NAME, end_process, end_with_parent
from kv_eval.tasks import Task

WATCH_SECONDS = 0.5
REQUEST_SECONDS = 24 * 3600  # of one answer: a long chain of thought on a CPU takes hours
METRIC = "exact_match"
TAIL_LINES = 20

Api = Literal["chat", "completions"]
_MODELS = {"chat": "local-chat-completions", "completions": "local-completions"}
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class HarnessFailure(RuntimeError):
    """The harness did not give a score for every question."""


@dataclass(frozen=True)
class Job:
    """One task on one server. `generation` is what replaces the task file's own settings."""

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
        """Questions that are asked."""
        return min(self.task.num_samples, self.limit or self.task.num_samples)


class Harness(Protocol):
    """Asks all questions of a job and marks the answers."""

    @property
    def version(self) -> str:
        """Part of the key of a result."""

    def run(self, job: Job, watch: Callable[[], None]) -> list[bool]:
        """Whether each question, in the file's order, was answered rightly.

        Calls `watch` at least every few seconds; what it raises ends the run and comes through.
        Raises HarnessFailure.
        """


class LmEval:
    """EleutherAI's lm-evaluation-harness."""

    def __init__(self) -> None:
        try:
            self._version = importlib.metadata.version("lm-eval")
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(
                "the harness lm-eval is not installed; run, in the project: pip install '.[eval]'"
            ) from None

    @property
    def version(self) -> str:
        """Name and version."""
        return f"lm-eval {self._version}"

    def run(self, job: Job, watch: Callable[[], None]) -> list[bool]:
        """See Harness."""
        with tempfile.TemporaryDirectory(prefix="kv-eval-") as name:
            folder = Path(name)
            tasks = folder / "tasks"
            tasks.mkdir()
            text = job.task.rendered(job.generation)
            (tasks / f"{job.task.harness_name}.yaml").write_text(text, encoding="utf-8")
            with job.log.open("wb") as log:
                process = subprocess.Popen(
                    self._command(job, folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=offline_environment(folder),
                    preexec_fn=end_with_parent(),
                )
            try:
                while process.poll() is None:
                    watch()
                    time.sleep(WATCH_SECONDS)
            finally:
                end_process(process)
            watch()
            if process.returncode != 0:
                raise HarnessFailure(f"lm-eval ended with {process.returncode}{_tail(job.log)}")
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
        if job.api == "chat":
            command.append("--apply_chat_template")
        if job.limit is not None:
            command += ["--limit", str(job.limit)]
        return command


def offline_environment(folder: Path) -> dict[str, str]:
    """This process's environment, with every download switched off and caches in `folder`."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(folder / "cache"),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def read_scores(folder: Path, job: Job) -> list[bool]:
    """From lm-eval's file of samples. HarnessFailure when one is missing or has no score."""
    files = sorted(folder.rglob("samples_*.jsonl"))
    if len(files) != 1:
        raise HarnessFailure(
            f"lm-eval wrote {len(files)} files of samples, wanted 1{_tail(job.log)}"
        )
    scores: dict[int, bool] = {}
    for line in files[0].read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        score = sample.get(METRIC)
        if score not in (0, 1):
            raise HarnessFailure(f"{files[0].name}: {METRIC}: got {score!r}, wanted 0 or 1")
        scores[sample["doc_id"]] = bool(score)
    if sorted(scores) != list(range(job.num_samples)):
        raise HarnessFailure(f"lm-eval scored {len(scores)} questions, wanted {job.num_samples}")
    return [scores[i] for i in range(job.num_samples)]


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
    return f"; last lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)
