"""Resumable JSON files of results, written atomically, and facts about the machine and sources."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
# Results and pages change with every measured row, but speed does not depend on them.
SOURCES = (".", ":!benchmarks/results", ":!docs", ":!tests", ":!*.md")
BASELINES = ("llama_cpp", "ik_llama_cpp", "openvino_genai")
SAME_MACHINE = ("cpu", "cores", "threads", "isa", "gemm_input_dtype", *BASELINES)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that a killed run leaves the old or the new file."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def describe_machine(threads: int) -> dict[str, Any]:
    """Return the facts about the machine and the libraries that speed depends on."""
    from lmdeploy import __version__, _turbomind
    from lmdeploy.base.resources import cpu_name

    about: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "isa": _turbomind.available_cpu_isas()[-1],
        "kernel": platform.release().split("-")[0],
        "lmdeploy": __version__,
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }
    if importlib.util.find_spec("llama_cpp"):
        from baselines.llama_cpp import build_of_llama_cpp, kernels_in_library

        about["llama_cpp"] = build_of_llama_cpp()
        about["llama_cpp_kernels"] = kernels_in_library()
    return about


def commit_here(root: Path = ROOT) -> str:
    """Return the short hash of the last change of the sources; "+" marks uncommitted changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments, "--", *SOURCES]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        return git("log", "-1", "--format=%h").strip() + "+" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class ResultsFile:
    """Rows of one machine by (model, name). The file is written after every row.

    `path` None keeps the rows in memory only. Raise ValueError for a file that has another format.
    """

    def __init__(self, path: Path | None, *, commit: str | None = None) -> None:
        self._path = path
        self.commit = commit_here() if commit is None else commit
        self.about: dict[str, Any] = {}
        self.searches: dict[str, Any] = {}
        self._rows: dict[tuple[str, str], Row] = {}
        if path and path.exists():
            try:
                document = json.loads(path.read_text(encoding="utf-8"))
                self.about, self.searches = dict(document["about"]), dict(document["searches"])
                self._rows = {(row["model"], row["name"]): row for row in document["rows"]}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path} does not hold results of this suite: {error!r}"
                ) from error

    def measured_on(self, machine: dict[str, Any]) -> None:
        """Record the machine. Raise ValueError if the rows were measured on another machine."""
        self.about = self.about or machine
        for key in SAME_MACHINE:
            known, here = self.about.get(key), machine.get(key)
            if known != here:
                raise ValueError(
                    f"{self._path}: the rows were measured with {key} {known}, but this machine "
                    f"has {here}. Give --json another file."
                )

    def row(self, model: str, name: str, *, repeats: int) -> Row | None:
        """Return the row of this commit with at least `repeats` runs, or None."""
        row = self._rows.get((model, name))
        if not row or row["repeats"] < repeats:
            return None
        if row["commit"] == self.commit:
            return row
        print(f"{name}: the row is of {row['commit'] or 'an unknown commit'}; measured again")
        return None

    def add(self, row: Row) -> None:
        """Store a row with commit and date, and write the file.

        A row without figures never replaces a row with figures.
        """
        key = row["model"], row["name"]
        if key in self._rows and self._rows[key]["repeats"] and not row["repeats"]:
            return
        date = datetime.now(timezone.utc).date().isoformat()
        self._rows[key] = {**row, "commit": self.commit, "date": date}
        self._save()

    def search(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return the stored value of a search, or measure and store it."""
        if key not in self.searches:
            self.searches[key] = measure()
            self._save()
        return self.searches[key]

    def _save(self) -> None:
        if self._path:
            rows = list(self._rows.values())
            write_json(self._path, {"about": self.about, "searches": self.searches, "rows": rows})
