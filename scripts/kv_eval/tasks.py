"""Task files: lm-eval's YAML with a `metadata` section that says what data it reads.

Everything is checked before anything is served. YAML is read with the safe loader, so a task file
holds data and templates, never code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[1] / "eval_tasks"
MAX_LINE_BYTES = 64 << 20
_LETTERS = ("A", "B", "C", "D")


class TaskError(ValueError):
    """A task file or its data cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Task:
    """One task with its data.

    `settings` is the YAML; `digest` the SHA-256 of both files, so that a changed file is measured
    again.
    """

    name: str
    settings: Mapping[str, Any]
    data: Path
    num_samples: int
    digest: str

    @property
    def harness_name(self) -> str:
        """Unlike any name of the harness's own tasks."""
        return f"kv_{self.name}"

    def rendered(self, generation: Mapping[str, Any]) -> str:
        """The YAML that the harness gets: the data's place filled in, generation replaced."""
        own = self.settings.get("generation_kwargs") or {}
        return yaml.safe_dump(
            {
                **self.settings,
                "task": self.harness_name,
                "dataset_kwargs": {"data_files": {"test": str(self.data.resolve())}},
                "generation_kwargs": {**own, **generation},
            }
        )


def read_task(name: str, data_folder: Path | None) -> Task:
    """A task by name (of a file in scripts/eval_tasks) or by path of its YAML.

    Raises:
        TaskError: for an unknown task, a broken file, missing data, or data without the fields.
    """
    path = _find(name)
    text = path.read_bytes()
    settings = _parse(text, path)
    needs = settings["metadata"]
    data = _find_data(settings, path, data_folder=data_folder)
    lines = data.read_bytes().splitlines()
    count = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            _check_line(line, needs["fields"], where=f"{data}:{number}")
            count += 1
    if count == 0:
        raise TaskError(f"task {settings['task']}: {data} has no lines; source: {needs['source']}")
    digest = hashlib.sha256(text + b"\0" + data.read_bytes()).hexdigest()
    return Task(settings["task"], settings, data, count, digest)


def known_tasks() -> list[str]:
    """Names of the shipped task files."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def _find(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if path.is_file():
            return path
    elif name in known_tasks():
        return FOLDER / f"{name}.yaml"
    raise TaskError(
        f"--tasks: got {name[:120]!r}, wanted a .yaml file or one of {', '.join(known_tasks())}"
    )


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskError(f"task file {path}: not plain YAML: {reason}") from error
    if not isinstance(settings, dict):
        raise TaskError(f"task file {path}: got {type(settings).__name__}, wanted a table")
    wanted = {"task": str, "metadata": dict, "doc_to_text": str, "doc_to_target": str}
    for key, kind in wanted.items():
        if not isinstance(settings.get(key), kind):
            got = f"{settings.get(key)!r}"[:80]
            raise TaskError(f"task file {path}: {key}: got {got}, wanted a {kind.__name__}")
    for key, kind in {"file": str, "source": str, "fields": dict}.items():
        if not isinstance(settings["metadata"].get(key), kind):
            got = f"{settings['metadata'].get(key)!r}"[:80]
            raise TaskError(
                f"task file {path}: metadata.{key}: got {got}, wanted a {kind.__name__}"
            )
    for field, kind in settings["metadata"]["fields"].items():
        if kind not in _CHECKS:
            raise TaskError(
                f"task file {path}: metadata.fields.{field}: got {kind!r}, wanted one of "
                f"{', '.join(_CHECKS)}"
            )
    return settings


def _find_data(settings: Mapping[str, Any], path: Path, *, data_folder: Path | None) -> Path:
    needs = settings["metadata"]
    folders = [path.parent] if data_folder is None else [data_folder, path.parent]
    for folder in folders:
        if (folder / needs["file"]).is_file():
            return Path(folder / needs["file"])
    fields = ", ".join(f"{name} ({kind})" for name, kind in needs["fields"].items())
    raise TaskError(
        f"task {settings['task']}: {folders[0] / needs['file']} is missing, and nothing is "
        f"downloaded; source: {needs['source']}; wanted one JSON object per line with {fields}; "
        "put it there or change --data (see docs/evaluation.md)"
    )


def _check_line(line: bytes, fields: Mapping[str, str], *, where: str) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise TaskError(f"{where}: got {len(line)} bytes, wanted at most {MAX_LINE_BYTES}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{where}: not JSON ({error}), wanted one object per line") from error
    if not isinstance(value, dict):
        raise TaskError(f"{where}: got {type(value).__name__}, wanted a JSON object")
    for field, kind in fields.items():
        if field not in value:
            raise TaskError(f"{where}: {field}: missing, wanted {kind}")
        if not _CHECKS[kind](value[field]):
            raise TaskError(f"{where}: {field}: got {value[field]!r:.80}, wanted {kind}")


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, str) and value.strip().isdecimal())


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str) and bool(value),
    "string or integer": _is_integer,
    "4 strings": lambda value: (
        isinstance(value, list) and len(value) == 4 and all(isinstance(v, str) for v in value)
    ),
    "letter A-D": lambda value: value in _LETTERS,
}
