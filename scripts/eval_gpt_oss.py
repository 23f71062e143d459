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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval import divergence
from eval.harness import Harness, HarnessFailure, Job, LmEval
from eval.policies import Policy, make_plan, make_policies
from eval.results import VERSION, Row, RunFolder, RunResult, key_of, markdown, summarize
from eval.server import Server, ServerFailure, serving
from eval.tasks import FOLDER, Task, known_tasks, read_task
from results import write_json, write_whole

from lmdeploy.config.kv_formats import KV_QUALITIES
from lmdeploy.version import __version__

if TYPE_CHECKING:
    from tqdm import tqdm

COUNT_SECONDS = 2.0  # between updates of the progress bar


@dataclass(frozen=True)
class Settings:
    """The checked settings of a run."""

    model: str
    model_hash: str
    policies: tuple[Policy, ...]
    tasks: tuple[Task, ...]
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]  # empty for no divergence
    generation: Mapping[str, Any]
    options: argparse.Namespace

    @property
    def parts(self) -> Path:
        """The folder of finished runs and logs."""
        output: Path = self.options.output
        return output.with_name(output.name + ".parts")


class Evaluation:
    """Runs the missing measurements and writes the table."""

    def __init__(self, settings: Settings, harness: Harness) -> None:
        self._settings = settings
        self._harness = harness
        self._folder = RunFolder(settings.parts)
        self._failures: dict[str, str] = {}
        self._divergence: dict[str, divergence.Figures] = {}

    def run(self) -> bool:
        """Run everything without a result. Return False if a policy failed."""
        from tqdm import tqdm

        settings = self._settings
        settings.parts.mkdir(parents=True, exist_ok=True)
        if settings.prompts:
            self._measure_divergence()
        missing = {policy: self._missing(policy) for policy in settings.policies}
        total = sum(self._num_samples(task) for runs in missing.values() for task, _ in runs)
        with tqdm(total=total, unit="answer", disable=None) as bar:
            for policy, runs in missing.items():
                if runs:
                    self._serve(policy, runs, bar=bar)
                    self.write()
        self.write()
        return not self._failures

    def write(self) -> None:
        """Write the current table as Markdown and JSON."""
        settings, options = self._settings, self._settings.options
        rows = [
            Row(
                label=policy.label,
                plan=make_plan(settings.model, policy),
                runs={task.name: self._results(policy, task) for task in settings.tasks},
                divergence=self._divergence.get(policy.label),
                failure=self._failures.get(policy.label),
            )
            for policy in settings.policies
        ]
        facts = {
            "model": settings.model,
            "harness": self._harness.version,
            "tasks": {task.name: task.digest for task in settings.tasks},
            "limit": options.limit,
            "seeds": list(settings.seeds),
            "num_prompts": len(settings.prompts),
            "generation": dict(settings.generation),
            "api": options.api,
            "concurrency": options.concurrency,
            "server_flags": list(settings.policies[0].server_flags),
        }
        summary = summarize(rows, facts)
        write_json(options.output.with_name(options.output.name + ".json"), summary)
        write_whole(options.output.with_name(options.output.name + ".md"), markdown(summary))

    def _facts(self, policy: Policy, task: Task, *, seed: int) -> dict[str, Any]:
        """Return everything that the result of a run depends on."""
        options = self._settings.options
        return {
            "version": VERSION,
            "engine": __version__,
            "model": self._settings.model_hash,
            **policy.facts(),
            "task": task.name,
            "digest": task.digest,
            "harness": self._harness.version,
            "generation": dict(self._settings.generation),
            "api": options.api,
            "limit": options.limit,
            "concurrency": options.concurrency,
            "seed": seed,
        }

    def _missing(self, policy: Policy) -> list[tuple[Task, int]]:
        return [
            (task, seed)
            for task in self._settings.tasks
            for seed in self._settings.seeds
            if self._folder.load(self._facts(policy, task, seed=seed)) is None
        ]

    def _results(self, policy: Policy, task: Task) -> list[RunResult]:
        """Return the results of all seeds, or nothing if one is missing."""
        facts = [self._facts(policy, task, seed=seed) for seed in self._settings.seeds]
        loaded = [self._folder.load(fact) for fact in facts]
        found = [result for result in loaded if result is not None]
        return found if len(found) == len(loaded) else []

    def _num_samples(self, task: Task) -> int:
        return min(task.num_samples, self._settings.options.limit or task.num_samples)

    def _measure_divergence(self) -> None:
        settings = self._settings
        facts = {"version": VERSION, "engine": __version__, "model": settings.model_hash}
        prompts = hashlib.sha256("\0".join(settings.prompts).encode()).hexdigest()
        exact = settings.policies[0].config().exact
        key = key_of({**facts, "prompts": prompts, "exact": exact})
        self._divergence = divergence.measure(
            settings.model,
            settings.policies,
            prompts=settings.prompts,
            name_of=lambda policy: key_of(policy.facts()),
            folder=settings.parts / f"scores-{key}",
        )

    def _serve(self, policy: Policy, runs: Sequence[tuple[Task, int]], *, bar: tqdm[Any]) -> None:
        """Run the missing tasks of one policy. A failure is recorded and ends the policy."""
        settings, options = self._settings, self._settings.options
        log = settings.parts / f"server-{key_of(policy.facts())}.log"
        bar.set_postfix_str(f"{policy.label}: loading")
        try:
            with serving(
                settings.model, policy.flags, log=log, timeout=options.start_timeout
            ) as server:
                for task, seed in runs:
                    bar.set_postfix_str(f"{policy.label}: {task.name}")
                    facts = self._facts(policy, task, seed=seed)
                    log = settings.parts / f"harness-{key_of(facts)}.log"
                    job = self._job(server, task, seed=seed, log=log)
                    self._folder.store(facts, self._ask(server, job, bar=bar))
        except (ServerFailure, HarnessFailure) as error:
            self._failures[policy.label] = str(error)
            bar.write(f"policy {policy.label} failed: {error}", file=sys.stderr)

    def _job(self, server: Server, task: Task, *, seed: int, log: Path) -> Job:
        options = self._settings.options
        return Job(
            task=task,
            url=server.url,
            api=options.api,
            limit=options.limit,
            concurrency=options.concurrency,
            seed=seed,
            generation=self._settings.generation,
            log=log,
        )

    def _ask(self, server: Server, job: Job, *, bar: tqdm[Any]) -> RunResult:
        """Run one task, timed by the counters of the server."""
        before, begun = server.counters(), time.monotonic()
        counted, looked = 0, begun

        def watch() -> None:
            nonlocal counted, looked
            server.check()
            if time.monotonic() - looked >= COUNT_SECONDS:
                looked = time.monotonic()
                finished = min(server.counters().finished - before.finished, job.num_samples)
                bar.update(max(finished - counted, 0))
                counted = max(finished, counted)

        correct = self._harness.run(job, watch)
        bar.update(job.num_samples - counted)
        after = server.counters()
        return RunResult(
            correct=correct,
            first_token=after.first_token - before.first_token,
            per_token=after.per_token - before.per_token,
            truncated=after.truncated - before.truncated,
            peak_bytes=server.peak_bytes(),
            seconds=time.monotonic() - begun,
        )


def make_settings(options: argparse.Namespace, server_flags: Sequence[str]) -> Settings:
    """Checks everything that can be checked before something is loaded. Raises ValueError."""
    from lmdeploy.checkpoint.fingerprint import hash_model

    if options.reasoning_effort and options.api == "completions":
        raise ValueError("--reasoning-effort needs --api chat.")
    tasks = tuple(read_task(name, options.data) for name in dict.fromkeys(options.tasks))
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"--tasks has two tasks of the same name: {', '.join(names)}.")
    qualities = options.kv_quality or [None]
    policies = make_policies(options.policies, qualities, server_flags=server_flags)
    for policy in policies:
        make_plan(options.model, policy)
    prompts = [] if options.skip_divergence else divergence.read_prompts(options.prompts)
    chosen = {
        "max_gen_toks": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "reasoning_effort": options.reasoning_effort,
    }
    return Settings(
        model=options.model,
        model_hash=hash_model(options.model),
        policies=tuple(policies),
        tasks=tasks,
        seeds=tuple(dict.fromkeys(options.seeds)),
        prompts=tuple(prompts),
        generation={key: value for key, value in chosen.items() if value is not None},
        options=options,
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
    add(
        "--seeds",
        nargs="+",
        type=positive,
        default=[1234],
        help="each seed asks every question once",
    )
    add("--api", choices=("chat", "completions"), default="chat")
    add("--concurrency", type=positive, default=4, help="questions in parallel")
    add("--max-new-tokens", type=positive, help="default: that of the task")
    add("--temperature", type=float, help="default: that of the task, 0")
    add("--top-p", type=float)
    add("--reasoning-effort", choices=("low", "medium", "high"))
    add("--prompts", type=Path, default=FOLDER / "prompts.jsonl", help="for KL: .jsonl or .txt")
    add("--skip-divergence", action="store_true", help="do not measure KL and top-1")
    add("--start-timeout", type=positive, default=1800, help="seconds until a server is ready")
    add("--output", type=Path, default=Path("eval"), help="name of the table, without an extension")
    return parser


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before and after `--`."""
    own = list(arguments)
    if "--" not in own:
        return own, []
    middle = own.index("--")
    return own[:middle], own[middle + 1 :]


def main(arguments: Sequence[str] | None = None, *, harness: Harness | None = None) -> int:
    """Evaluate. Return 1 if a policy failed, 2 for wrong input, 130 when interrupted."""
    own, server_flags = split_arguments(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(own)
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        settings = make_settings(options, server_flags)
        complete = Evaluation(settings, harness or LmEval()).run()
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
