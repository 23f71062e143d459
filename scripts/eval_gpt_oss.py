"""Measure accuracy, divergence, times and memory of KV policies on tasks, in one table.

    python scripts/eval_gpt_oss.py MODEL --tasks tiny --policies 0 8 4 16 nvfp4 --output eval
    python scripts/eval_gpt_oss.py MODEL --tasks aime25 gsm8k --data FOLDER -- --session-len 40960

The script serves the model once per policy and runs lm-eval over HTTP. Flags after -- go to the
server. The same command resumes an interrupted run. Nothing is downloaded; docs/evaluation.md
describes the data.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval import divergence
from eval.harness import MODEL_NAME, HarnessFailure, Job, LmEval
from eval.policies import Policy, make_plan, make_policies
from eval.results import (
    VERSION,
    RunResult,
    key_of,
    load_run,
    markdown,
    read_counters,
    row_of,
    store_run,
    summary_of,
)
from eval.tasks import FOLDER, known_tasks, read_task
from results import write_json, write_whole
from server_process import Server, ServerFailure, peak_bytes, serving
from tqdm import tqdm

from lmdeploy.config.kv_format_options import KV_QUALITIES
from lmdeploy.version import __version__


class Evaluation:
    """Runs the missing measurements and writes the table. Wrong options raise ValueError."""

    def __init__(
        self, options: argparse.Namespace, server_flags: Sequence[str], *, harness: Any
    ) -> None:
        from lmdeploy.checkpoint.fingerprint import hash_model

        if options.reasoning_effort and options.api == "completions":
            raise ValueError("--reasoning-effort needs --api chat.")
        self._options, self._harness = options, harness
        self._tasks = [read_task(name, options.data) for name in dict.fromkeys(options.tasks)]
        names = [task.name for task in self._tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"--tasks has two tasks of the same name: {', '.join(names)}.")
        qualities = options.kv_quality or [None]
        self._policies = make_policies(options.policies, qualities, server_flags=server_flags)
        self._plans = {p.label: make_plan(options.model, p) for p in self._policies}
        self._prompts = [] if options.skip_divergence else divergence.read_prompts(options.prompts)
        generation = {
            "max_gen_toks": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "reasoning_effort": options.reasoning_effort,
        }
        self._generation = {key: value for key, value in generation.items() if value is not None}
        self._model_hash = hash_model(options.model)
        self._parts = options.output.with_name(options.output.name + ".parts")
        self._parts.mkdir(parents=True, exist_ok=True)
        self._failures: dict[str, str] = {}
        self._divergence: dict[str, divergence.Figures] = {}

    def run(self) -> bool:
        """Run everything without a result. Return False if a policy failed."""
        if self._prompts:
            self._measure_divergence()
        for policy in tqdm(self._policies, unit="policy", disable=None):
            jobs = [(task, seed) for task in self._tasks for seed in self._options.seeds]
            facts = [self._facts(policy, task, seed=seed) for task, seed in jobs]
            missing = [i for i, fact in enumerate(facts) if load_run(self._parts, fact) is None]
            if missing:
                self._serve(policy, [(*jobs[i], facts[i]) for i in missing])
                self.write()
        self.write()
        return not self._failures

    def write(self) -> None:
        """Write the current table as Markdown and JSON."""
        options, rows = self._options, {}
        for policy in self._policies:
            runs: dict[str, list[RunResult]] = {}
            for task in self._tasks:
                facts = [self._facts(policy, task, seed=seed) for seed in options.seeds]
                found = [
                    result for fact in facts if (result := load_run(self._parts, fact)) is not None
                ]
                runs[task.name] = found if len(found) == len(facts) else []
            rows[policy.label] = row_of(
                self._plans[policy.label],
                runs,
                divergence=self._divergence.get(policy.label),
                failure=self._failures.get(policy.label),
            )
        facts_of_all = {
            "model": options.model,
            "harness": self._harness.version,
            "tasks": {task.name: task.digest for task in self._tasks},
            "limit": options.limit,
            "seeds": list(options.seeds),
            "num_prompts": len(self._prompts),
            "generation": self._generation,
            "api": options.api,
            "concurrency": options.concurrency,
            "server_flags": list(self._policies[0].server_flags),
        }
        summary = summary_of(rows, facts_of_all)
        write_json(options.output.with_name(options.output.name + ".json"), summary)
        write_whole(options.output.with_name(options.output.name + ".md"), markdown(summary))

    def _facts(self, policy: Policy, task: Any, *, seed: int) -> dict[str, Any]:
        """Return everything that the result of a run depends on."""
        options = self._options
        return {
            "version": VERSION,
            "engine": __version__,
            "model": self._model_hash,
            **policy.facts(),
            "task": task.name,
            "digest": task.digest,
            "harness": self._harness.version,
            "generation": self._generation,
            "api": options.api,
            "limit": options.limit,
            "concurrency": options.concurrency,
            "seed": seed,
        }

    def _measure_divergence(self) -> None:
        prompts = hashlib.sha256("\0".join(self._prompts).encode()).hexdigest()
        exact = self._policies[0].config().exact
        facts = {"version": VERSION, "engine": __version__, "model": self._model_hash}
        self._divergence = divergence.measure(
            self._options.model,
            self._policies,
            prompts=self._prompts,
            name_of=lambda policy: key_of(policy.facts()),
            folder=self._parts / f"scores-{key_of({**facts, 'prompts': prompts, 'exact': exact})}",
        )

    def _serve(self, policy: Policy, missing: Sequence[tuple[Any, int, dict[str, Any]]]) -> None:
        """Run the missing tasks of one policy. A failure is recorded and ends the policy."""
        options = self._options
        log = self._parts / f"server-{key_of(policy.facts())}.log"
        timeout = options.start_timeout
        command = [sys.executable, "-m", "lmdeploy", "serve", "api_server", options.model]
        command += ["--server-name", "127.0.0.1", "--model-name", MODEL_NAME, *policy.flags]
        command.append("--server-port")
        try:
            with serving(command, log=log, timeout=timeout) as server:
                for task, seed, facts in missing:
                    job = Job(
                        task=task,
                        url=server.url,
                        api=options.api,
                        limit=options.limit,
                        concurrency=options.concurrency,
                        seed=seed,
                        generation=self._generation,
                        log=self._parts / f"harness-{key_of(facts)}.log",
                    )
                    store_run(self._parts, facts, result=self._timed(server, job))
        except (ServerFailure, HarnessFailure) as error:
            self._failures[policy.label] = str(error)
            print(f"policy {policy.label} failed: {error}", file=sys.stderr)

    def _timed(self, server: Server, job: Job) -> RunResult:
        """Run one task, timed by the counters of the server."""
        before, begun = read_counters(server), time.monotonic()
        correct = self._harness.run(job, server.check)
        after = read_counters(server)
        return RunResult(
            correct=correct,
            counters={key: after[key] - before[key] for key in after},
            peak_bytes=peak_bytes(server.process.pid),
            seconds=time.monotonic() - begun,
        )


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the options before `--`."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], epilog="Flags after -- go to the server."
    )
    add = parser.add_argument
    add("model", help="folder, GGUF file, hub id or smollm2")
    add("--policies", nargs="+", default=["0", "8", "4", "16"], help="default: 0 8 4 16")
    add("--kv-quality", nargs="+", choices=KV_QUALITIES, help="each with each policy")
    add("--tasks", nargs="+", default=["tiny"], help=f"a .yaml file or {', '.join(known_tasks())}")
    add("--data", type=Path, help="folder of the JSONL files")
    add("--limit", type=positive, help="only the first questions of each task")
    add("--seeds", nargs="+", type=positive, default=[1234], help="each asks every question once")
    add("--api", choices=("chat", "completions"), default="chat")
    add("--concurrency", type=positive, default=4, help="questions in parallel")
    add("--max-new-tokens", type=positive, help="default: that of the task")
    add("--temperature", type=float, help="default: that of the task, 0")
    add("--top-p", type=float)
    add("--reasoning-effort", choices=("low", "medium", "high"))
    add("--prompts", type=Path, default=FOLDER / "prompts.jsonl", help="for KL: .jsonl or .txt")
    add("--skip-divergence", action="store_true", help="do not measure KL and top-1")
    add("--start-timeout", type=positive, default=1800, help="seconds until a server is ready")
    add("--output", type=Path, default=Path("eval"), help="name of the table without extension")
    return parser


def main(arguments: Sequence[str] | None = None, *, harness: Any = None) -> int:
    """Evaluate. Return 1 if a policy failed, 2 for wrong input, 130 when interrupted."""
    own = list(sys.argv[1:] if arguments is None else arguments)
    middle = own.index("--") if "--" in own else len(own)
    options = make_parser().parse_args(own[:middle])
    options.seeds = list(dict.fromkeys(options.seeds))
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        evaluation = Evaluation(options, own[middle + 1 :], harness=harness or LmEval())
        complete = evaluation.run()
    except (ValueError, OSError) as error:
        print(f"eval_gpt_oss.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command resumes this run", file=sys.stderr)
        return 130
    print(options.output.with_name(options.output.name + ".md").read_text(encoding="utf-8"))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
