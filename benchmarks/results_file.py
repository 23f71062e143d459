"""The JSON file of a suite: what was measured where, written after every row."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ceilings import cache_bytes
from targets import Target, TargetRow

ROOT = Path(__file__).resolve().parents[1]
# Results and pages change with every row that is measured.
SOURCES = (".", ":!benchmarks/results", ":!docs", ":!tests", ":!*.md")
SAME_MACHINE = ("cpu", "cores", "threads", "caches", "isa", "llama_cpp")


def describe_machine(threads: int) -> dict[str, Any]:
    """CPU, caches, compilers and versions that the figures depend on."""
    from lmdeploy import __version__, _turbomind

    about: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "caches": {f"l{level}": size for level, size in cache_bytes().items()},
        "isa": _turbomind.available_cpu_isas()[-1],
        "kernel": platform.release().split("-")[0],
        "lmdeploy": __version__,
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }
    if importlib.util.find_spec("llama_cpp"):
        from llama_cpp_peer import build_of_llama_cpp

        about["llama_cpp"] = build_of_llama_cpp()
    return about


def check_same_machine(
    known: dict[str, Any], machine: dict[str, Any], *, path: Path | None
) -> None:
    """ValueError when a file's figures (`known`, of describe_machine) come from another machine."""
    for key in SAME_MACHINE:
        if known.get(key) != machine.get(key):
            raise ValueError(
                f"{path}: its rows were measured with {key} {known.get(key)}, here it is "
                f"{machine.get(key)}; give --json another file"
            )


def cpu_name() -> str:
    """As /proc/cpuinfo has it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit_here(root: Path = ROOT) -> str:
    """Short hash of the last change of what figures depend on, + where not all is committed."""
    try:
        commit = _git(root, "log", "-1", "--format=%h", "--", *SOURCES).strip()
        changes = _git(root, "status", "--porcelain", "--", *SOURCES)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + "+" * bool(changes)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def today() -> str:
    """In UTC."""
    return datetime.now(UTC).date().isoformat()


class ResultsFile:
    """Rows by (model, name); `save` writes a whole file beside and renames it.

    `path` None: nothing is written. Raises ValueError for a file that is not one of ours.
    `commit` None: that of the sources here.
    """

    def __init__(self, path: Path | None, *, commit: str | None = None) -> None:
        self._path, self._commit = path, commit
        self.about: dict[str, Any] = {}
        self.searches: dict[str, Any] = {}
        self._rows: dict[tuple[str, str], TargetRow] = {}
        if path and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            self.about, self.searches = dict(document["about"]), dict(document["searches"])
            for fields in document["rows"]:
                self._put(TargetRow.from_json(fields))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not results of this suite: {error!r}") from error

    def measured_on(self, machine: dict[str, Any]) -> None:
        """Notes the machine. ValueError when the file's rows come from another one."""
        self.about = self.about or machine
        check_same_machine(self.about, machine, path=self._path)

    def _put(self, row: TargetRow) -> None:
        self._rows[row.model, row.name] = row

    @property
    def rows(self) -> Sequence[TargetRow]:
        """In the order of the first measurement."""
        return list(self._rows.values())

    @property
    def commit(self) -> str:
        """That new rows get."""
        if self._commit is None:
            self._commit = commit_here()
        return self._commit

    def measured(
        self, model: str, target: Target, *, repeats: int, keep: bool = False
    ) -> TargetRow | None:
        """A row of the target's whole work with at least that many runs.

        One of another commit is named, and counts only with `keep`.
        """
        row = self._rows.get((model, target.name))
        if not row or row.repeats < repeats or row.trial:
            return None
        if row.commit != self.commit:
            print(
                f"{target.name}: the file's row is of another commit ({row.origin}; here "
                f"{self.commit}): " + ("kept" if keep else "measured again, unless --keep"),
                flush=True,
            )
            return row if keep else None
        return row

    def forget(self, targets: Sequence[Target], model: str) -> None:
        """Rows of these targets are measured again."""
        for target in targets:
            self._rows.pop((model, target.name), None)

    def add(self, row: TargetRow) -> None:
        """Replaces the row of the same model and name, with commit and date, and saves.

        A trial or a row without figures never replaces one of the whole work.
        """
        known = self._rows.get((row.model, row.name))
        if known and known.repeats and not known.trial and (row.trial or not row.repeats):
            return
        self._put(dataclasses.replace(row, commit=self.commit, date=today()))
        self.save()

    def search(self, key: str, measure: Callable[[], Any]) -> Any:
        """What `measure` returned the first time."""
        if key not in self.searches:
            self.searches[key] = measure()
            self.save()
        return self.searches[key]

    def save(self) -> None:
        """All that is known so far."""
        if not self._path:
            return
        rows = [dataclasses.asdict(row) for row in self.rows]
        document = {"about": self.about, "searches": self.searches, "rows": rows}
        unfinished = self._path.with_name(self._path.name + ".part")
        unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._path)
