"""Results of runs: one small file per run, and the table made of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from results import write_json

from eval.policies import REFERENCE, Plan
from eval.server import Timing

Z_95 = 1.959963984540054  # normal quantile of a 95 % interval
VERSION = 1


def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927). It lies inside [0, 1]."""
    share = correct / total
    middle = (share + Z_95**2 / (2 * total)) / (1 + Z_95**2 / total)
    spread = math.sqrt(share * (1 - share) / total + Z_95**2 / (4 * total**2))
    half = Z_95 * spread / (1 + Z_95**2 / total)
    return max(middle - half, 0.0), min(middle + half, 1.0)


@dataclass(frozen=True)
class RunResult:
    """One task under one policy with one seed. `truncated` answers reached their length limit."""

    correct: list[bool]
    first_token: Timing
    per_token: Timing
    truncated: int
    peak_bytes: int | None
    seconds: float


class RunFolder:
    """Results by key. The key covers everything that the result depends on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, facts: Mapping[str, Any]) -> RunResult | None:
        """Return the result of a finished run, or None."""
        try:
            stored = json.loads(self._path(facts).read_text(encoding="utf-8"))
            if stored["facts"] != dict(facts):
                return None
            result = stored["result"]
            for key in ("first_token", "per_token"):
                result[key] = Timing(**result[key])
            return RunResult(**result)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def store(self, facts: Mapping[str, Any], result: RunResult) -> None:
        """Write a result atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(facts), {"facts": dict(facts), "result": asdict(result)})

    def _path(self, facts: Mapping[str, Any]) -> Path:
        return self.folder / f"run-{key_of(facts)}.json"


def key_of(facts: Mapping[str, Any]) -> str:
    """Return a name made of everything in `facts`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Row:
    """One policy: the results of all seeds by task."""

    label: str
    plan: Plan
    runs: Mapping[str, Sequence[RunResult]]
    divergence: Mapping[str, float | int] | None
    failure: str | None = None

    def summary(self, reference: Row | None) -> dict[str, Any]:
        """Return the entry of the JSON file."""
        runs = [run for results in self.runs.values() for run in results]
        peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
        return {
            "stored": self.plan.stored,
            "tasks": {
                task: _accuracy(results, reference.runs.get(task, ()) if reference else ())
                for task, results in self.runs.items()
                if results
            },
            "divergence": None if self.divergence is None else dict(self.divergence),
            "first_token_seconds": sum((r.first_token for r in runs), Timing(0.0, 0)).mean,
            "per_token_seconds": sum((r.per_token for r in runs), Timing(0.0, 0)).mean,
            "kv_bytes_per_token": self.plan.bytes_per_token,
            "kv_hot_bytes_per_sequence": self.plan.hot_bytes,
            "peak_memory_bytes": max(peaks) if peaks else None,
            "failure": self.failure,
        }


def _accuracy(results: Sequence[RunResult], reference: Sequence[RunResult]) -> dict[str, Any]:
    answers = [right for run in results for right in run.correct]
    low, high = wilson(sum(answers), len(answers))
    values: dict[str, Any] = {
        "accuracy": sum(answers) / len(answers),
        "low": low,
        "high": high,
        "correct": sum(answers),
        "total": len(answers),
        "truncated": sum(run.truncated for run in results),
    }
    before = [right for run in reference for right in run.correct]
    if len(before) == len(answers):
        pairs = list(zip(before, answers, strict=True))
        values["lost"] = sum(was and not now for was, now in pairs)
        values["gained"] = sum(now and not was for was, now in pairs)
    return values


def summarize(rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table as a dictionary, with the facts of the measurement."""
    reference = next((row for row in rows if row.label == REFERENCE), None)
    return {**facts, "policies": {row.label: row.summary(reference) for row in rows}}


def markdown(summary: Mapping[str, Any]) -> str:
    """Return the table as Markdown, with notes on the measurement."""
    policies: Mapping[str, Any] = summary["policies"]
    tasks = list(summary["tasks"])
    heads = ["policy", "stored as", *tasks, "lost / gained", "KL mean", "KL p99", "top-1"]
    heads += ["first token", "per token", "KV bytes per token", "peak memory"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for label, row in policies.items():
        cells = [f"`{label}`", row["stored"]]
        cells += [_share(row["tasks"].get(task)) for task in tasks]
        cells += [_changes(row["tasks"]), *_divergence(row["divergence"])]
        cells += [_time(row["first_token_seconds"]), _time(row["per_token_seconds"])]
        cells += [_bytes(row), _memory(row["peak_memory_bytes"])]
        lines.append(_line(cells))
    notes = [
        f"Model `{summary['model']}`, {summary['harness']}, limit {summary['limit'] or 'none'}, "
        f"seeds {', '.join(map(str, summary['seeds']))}.",
        "Accuracy: 95 % Wilson interval, right answers of all. Lost / gained: questions that "
        "policy `0` answered otherwise. KL in nats and top-1 agreement against policy `0` on "
        f"{summary['num_prompts']} prompts. Times are the server's means per request; peak memory "
        "is the server's, weights included.",
    ]
    failures = [
        f"Failed: `{label}`: {row['failure'].splitlines()[0]}"
        for label, row in policies.items()
        if row["failure"]
    ]
    return "\n".join(["\n".join(lines), "", *notes, *failures, ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _share(task: Mapping[str, Any] | None) -> str:
    if task is None:
        return "–"
    text = f"{task['accuracy']:.3f} [{task['low']:.3f}, {task['high']:.3f}]"
    cut = f", {task['truncated']} cut off" if task["truncated"] else ""
    return f"{text} ({task['correct']}/{task['total']}{cut})"


def _changes(tasks: Mapping[str, Any]) -> str:
    known = [task for task in tasks.values() if "lost" in task]
    if not known:
        return "–"
    return f"{sum(task['lost'] for task in known)} / {sum(task['gained'] for task in known)}"


def _divergence(figures: Mapping[str, Any] | None) -> list[str]:
    if figures is None:
        return ["–"] * 3
    return [f"{figures['kl_mean']:.6f}", f"{figures['kl_p99']:.5f}", f"{figures['top1']:.4f}"]


def _time(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:.1f} ms"


def _bytes(row: Mapping[str, Any]) -> str:
    hot = row["kv_hot_bytes_per_sequence"]
    per_token = f"{row['kv_bytes_per_token']:,.3f}".rstrip("0").rstrip(".")
    return per_token + (f" + {hot:,} per sequence" if hot else "")


def _memory(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:,.0f} MiB"
