"""Results of runs: one small file per run, and the table made of them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from results import write_json
from server_process import Server, ServerFailure, last_lines

from eval.policies import REFERENCE, Plan

Z_95 = 1.959963984540054  # normal quantile of a 95 % interval
VERSION = 2
NONE = "–"


@dataclass(frozen=True)
class RunResult:
    """One task under one policy with one seed. `counters` are those of read_counters."""

    correct: list[bool]
    counters: Mapping[str, float]
    peak_bytes: int | None
    seconds: float


def load_run(folder: Path, facts: Mapping[str, Any]) -> RunResult | None:
    """Return the result of a finished run, or None. Its facts must be equal."""
    try:
        stored = json.loads((folder / f"run-{key_of(facts)}.json").read_text(encoding="utf-8"))
        return RunResult(**stored["result"]) if stored["facts"] == dict(facts) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_run(folder: Path, facts: Mapping[str, Any], *, result: RunResult) -> None:
    """Write a result atomically."""
    path = folder / f"run-{key_of(facts)}.json"
    write_json(path, {"facts": dict(facts), "result": asdict(result)})


def key_of(facts: Mapping[str, Any]) -> str:
    """Return a name made of everything in `facts`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927). It lies inside [0, 1]."""
    share, z = correct / total, Z_95 / math.sqrt(total)
    middle, half = share + z**2 / 2, z * math.sqrt(share * (1 - share) + z**2 / 4)
    return max((middle - half) / (1 + z**2), 0.0), min((middle + half) / (1 + z**2), 1.0)


def row_of(
    plan: Plan,
    runs: Mapping[str, Sequence[RunResult]],
    *,
    divergence: Mapping[str, float | int] | None = None,
    failure: str | None = None,
) -> dict[str, Any]:
    """Return the entry of one policy; `runs` has the results of all seeds by task."""
    every = [run for results in runs.values() for run in results]
    tasks = {}
    for name, results in runs.items():
        answers = [right for run in results for right in run.correct]
        if answers:
            low, high = wilson(sum(answers), len(answers))
            tasks[name] = {
                "accuracy": sum(answers) / len(answers),
                "low": low,
                "high": high,
                "correct": sum(answers),
                "total": len(answers),
                "truncated": round(sum(run.counters["truncated"] for run in results)),
                "answers": answers,
            }
    return {
        **plan,
        "tasks": tasks,
        "divergence": None if divergence is None else dict(divergence),
        "first_token_seconds": _mean(every, "first_token"),
        "per_token_seconds": _mean(every, "per_token"),
        "peak_memory_bytes": max((r.peak_bytes for r in every if r.peak_bytes), default=None),
        "failure": failure,
    }


def _mean(runs: Sequence[RunResult], name: str) -> float | None:
    """Return the mean seconds of a request, or None without requests."""
    seconds, count = (sum(run.counters[f"{name}{x}"] for run in runs) for x in ("_seconds", "s"))
    return seconds / count if count else None


def summary_of(rows: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON file: facts of the measurement, and rows compared with the reference."""
    reference = rows.get(REFERENCE, {}).get("tasks", {})
    before = {name: task["answers"] for name, task in reference.items()}
    for row in rows.values():
        for name, task in row["tasks"].items():
            if len(before.get(name, ())) == len(task["answers"]):
                pairs = list(zip(before[name], task["answers"], strict=True))
                task["lost"] = sum(was and not now for was, now in pairs)
                task["gained"] = sum(now and not was for was, now in pairs)
    for row in rows.values():
        for task in row["tasks"].values():
            del task["answers"]
    return {**facts, "policies": dict(rows)}


def markdown(summary: Mapping[str, Any]) -> str:
    """Return the tables of accuracy and of cost as Markdown, with notes on the measurement."""
    tasks = list(summary["tasks"])
    answers = [["policy", "stored as", *tasks, "lost / gained", "KL mean", "KL p99", "top-1"]]
    costs = [["policy", "first token", "per token", "KV bytes per token", "peak memory"]]
    failures = []
    for label, row in summary["policies"].items():
        known = [task for task in row["tasks"].values() if "lost" in task]
        lost, gained = (sum(task[key] for task in known) for key in ("lost", "gained"))
        kl = row["divergence"]
        figures = [f"{kl['kl_mean']:.6f}", f"{kl['kl_p99']:.5f}", f"{kl['top1']:.4f}"] if kl else []
        window16, peak = row["kv_window16_bytes_per_sequence"], row["peak_memory_bytes"]
        per_token = f"{row['kv_bytes_per_token']:,.3f}".rstrip("0").rstrip(".")
        answers.append(
            [
                *(f"`{label}`", row["stored"], *(_share(row["tasks"].get(t)) for t in tasks)),
                *(f"{lost} / {gained}" if known else NONE, *(figures or [NONE] * 3)),
            ]
        )
        costs.append(
            [
                *(f"`{label}`", _time(row["first_token_seconds"]), _time(row["per_token_seconds"])),
                per_token + (f" + {window16:,} per sequence" if window16 else ""),
                NONE if peak is None else f"{peak / 2**20:,.0f} MiB",
            ]
        )
        if row["failure"]:
            failures.append(f"Failed: `{label}`: {row['failure'].splitlines()[0]}")
    notes = [
        f"Model `{summary['model']}`, {summary['harness']}, limit {summary['limit'] or 'none'}, "
        f"seeds {', '.join(map(str, summary['seeds']))}.",
        "Accuracy: 95 % Wilson interval, right answers of all. Lost / gained: questions that "
        "policy `0` answered otherwise. KL in nats and top-1 agreement against policy `0` on "
        f"{summary['num_prompts']} prompts. Times are the server's means per request; peak memory "
        "is the server's, weights included.",
    ]
    return "\n".join([_table(answers), _table(costs), *notes, *failures, ""])


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _share(task: Mapping[str, Any] | None) -> str:
    if task is None:
        return NONE
    cut = f", {task['truncated']} cut off" if task["truncated"] else ""
    interval = f"{task['accuracy']:.3f} [{task['low']:.3f}, {task['high']:.3f}]"
    return f"{interval} ({task['correct']}/{task['total']}{cut})"


def _time(seconds: float | None) -> str:
    return NONE if seconds is None else f"{seconds * 1000:.1f} ms"


# Sums of seconds and numbers of requests since the start of the server, and the answers that were
# cut off at their length limit.
_METRICS = {
    "first_token_seconds": r"lmdeploy:time_to_first_token_seconds_sum",
    "first_tokens": r"lmdeploy:time_to_first_token_seconds_count",
    "per_token_seconds": r"lmdeploy:time_per_output_token_seconds_sum",
    "per_tokens": r"lmdeploy:time_per_output_token_seconds_count",
    "truncated": r'\S+_total\{[^}]*finished_reason="length"',
}


def read_counters(server: Server) -> dict[str, float]:
    """Return the sums of _METRICS. Raise ServerFailure if the server does not answer."""
    try:
        text = server.get("/metrics")
    except OSError as error:
        server.check()
        end = last_lines(server.log)
        raise ServerFailure(f"the server does not answer: {error}{end}") from error
    return {
        key: sum(map(float, re.findall(rf"^{name}\S* (\S+)", text, re.M)))
        for key, name in _METRICS.items()
    }
