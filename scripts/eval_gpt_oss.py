"""What every KV policy costs on real tasks: accuracy, divergence, times and memory in one table.

    python scripts/eval_gpt_oss.py MODEL --tasks tiny --policies 0 8 4 16 nvfp4 --output eval
    python scripts/eval_gpt_oss.py MODEL --tasks aime25 gsm8k --data FOLDER -- --session-len 40960

Serves the model once per policy and asks through lm-eval over HTTP. Flags after -- go to the
server. An interrupted run goes on when the same command is given again. Nothing is downloaded; see
docs/evaluation.md for the data.
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

from kv_eval import divergence
from kv_eval.harness import Harness, HarnessFailure, Job, LmEval
from kv_eval.policies import Policy, make_plan, make_policies
from kv_eval.results import (
    VERSION,
    Row,
    RunFolder,
    RunResult,
    key_of,
    markdown,
    summarise,
    write_json,
    write_whole,
)
from kv_eval.server import Server, ServerFailure, serving
from kv_eval.tasks import FOLDER, Task, known_tasks, read_task

from lmdeploy.config.kv_formats import KV_QUALITIES
from lmdeploy.version import __version__

if TYPE_CHECKING:
    from tqdm import tqdm

COUNT_SECONDS = 2.0  # between looks at the server's counters, for the bar


@dataclass(frozen=True)
class Settings:
    """Everything that is measured; checked."""

    model: str
    model_hash: str
    policies: tuple[Policy, ...]
    tasks: tuple[Task, ...]
    seeds: tuple[int, ...]
    prompts: tuple[str, ...]  # empty: no divergence
    generation: Mapping[str, Any]
    options: argparse.Namespace

    @property
    def parts(self) -> Path:
        """The folder of what has been measured, and of logs."""
        output: Path = self.options.output
        return output.with_name(output.name + ".parts")


class Evaluation:
    """Runs what is missing and writes the table."""

    def __init__(self, settings: Settings, harness: Harness) -> None:
        self._settings = settings
        self._harness = harness
        self._folder = RunFolder(settings.parts)
        self._failures: dict[str, str] = {}
        self._divergence: dict[str, divergence.Figures] = {}

    def run(self) -> bool:
        """Everything that has no result yet. False when a policy failed."""
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
        """The table as it stands, as Markdown and JSON."""
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
        summary = summarise(rows, facts)
        write_json(options.output.with_name(options.output.name + ".json"), summary)
        write_whole(options.output.with_name(options.output.name + ".md"), markdown(summary))

    def _facts(self, policy: Policy, task: Task, *, seed: int) -> dict[str, Any]:
        """Everything that a run's result depends on."""
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
        """Of all seeds, or none."""
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
        """All missing runs of one policy. A failure is kept and told; it ends the policy."""
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
        """One run, timed by the server's own counters."""
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
        raise ValueError("--reasoning-effort: a field of chats; wanted --api chat")
    tasks = tuple(read_task(name, options.data) for name in dict.fromkeys(options.tasks))
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"--tasks: got two tasks of one name ({', '.join(names)})")
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
    """An argument that must be a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """The command line without what is meant for the server."""
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
    add("--concurrency", type=positive, default=4, help="questions at a time")
    add("--max-new-tokens", type=positive, help="instead of the task's own number")
    add("--temperature", type=float, help="instead of the task's own, 0")
    add("--top-p", type=float)
    add("--reasoning-effort", choices=("low", "medium", "high"))
    add("--prompts", type=Path, default=FOLDER / "prompts.jsonl", help="for KL: .jsonl or .txt")
    add("--skip-divergence", action="store_true", help="no KL and top-1")
    add("--start-timeout", type=positive, default=1800, help="seconds until a server is ready")
    add("--output", type=Path, default=Path("eval"), help="name of the table, without an ending")
    return parser


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after `--`."""
    own = list(arguments)
    if "--" not in own:
        return own, []
    middle = own.index("--")
    return own[:middle], own[middle + 1 :]


def main(arguments: Sequence[str] | None = None, *, harness: Harness | None = None) -> int:
    """Evaluate. 1 when a policy failed, 2 for wrong input, 130 when interrupted."""
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
        print("interrupted; the same command goes on where this one was", file=sys.stderr)
        return 130
    print(options.output.with_name(options.output.name + ".md").read_text(encoding="utf-8"))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
