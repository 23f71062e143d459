"""Files of results: JSON Lines, one measured row a line, with machine, commit and date."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
# Results and pages change with every measured row, but speed does not depend on them.
SOURCES = (".", ":!benchmarks/results", ":!docs", ":!tests", ":!*.md")


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that a killed run leaves the old or the new file."""
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file. Raise ValueError if a line is not a row of results."""
    rows = []
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{i} is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("machine"), str):
            raise ValueError(f"{path}:{i} is not a row of results: it names no machine.")
        rows.append(row)
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, one a line, atomically."""
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def describe_machine(threads: int, *, gemm_input_dtype: str | None = None) -> str:
    """Return the facts about the machine that the speed of a CPU depends on."""
    from lmdeploy import _turbomind
    from lmdeploy.base.resources import cpu_name

    cores, isa = len(os.sched_getaffinity(0)), _turbomind.available_cpu_isas()[-1]
    text = f"{cpu_name()}, {cores} cores, {threads} threads, {isa}"
    return text + (f", {gemm_input_dtype} activations" if gemm_input_dtype else "")


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
    """The rows of one machine. The file is written after every row.

    `key` names the fields by which a new row replaces an old one. `path` None keeps the rows in
    memory only. Raise ValueError for a file that has no results, or rows of another machine.
    """

    def __init__(
        self, path: Path | None, *, machine: str, key: tuple[str, ...], commit: str | None = None
    ) -> None:
        self._path, self._machine, self._key = path, machine, key
        self.commit = commit_here() if commit is None else commit
        self.rows = read_rows(path) if path and path.exists() else []
        for row in self.rows:
            if row["machine"] != machine:
                raise ValueError(
                    f"{path} has rows of {row['machine']}, but this machine is {machine}. Give "
                    "--json another file."
                )

    def find(self, row: Row) -> Row | None:
        """Return the stored row with the same key and of this commit, or None."""
        for old in self.rows:
            if self._same(old, row) and old.get("commit") == self.commit:
                return old
        return None

    def add(self, row: Row, *, is_of_commit: bool = True) -> None:
        """Store a row with machine, commit and date, and write the file.

        Rows of programs that do not depend on this tree have no commit.
        """
        commit = {"commit": self.commit} if is_of_commit else {}
        date = datetime.now(timezone.utc).date().isoformat()
        row = {**row, "machine": self._machine, **commit, "date": date}
        self.rows = [old for old in self.rows if not self._same(old, row)] + [row]
        if self._path:
            write_rows(self._path, self.rows)

    def _same(self, one: Row, other: Row) -> bool:
        return all(one.get(name) == other.get(name) for name in self._key)
