"""Task files: YAML of lm-eval with a `metadata` section that describes the data.

All files are checked before a server starts. YAML is read with the safe loader, so a task file
holds data and templates, never code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent


# Settings that a task file need not repeat.
COMMON: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


class TaskError(ValueError):
    """A task file or its data cannot be used."""


@dataclass(frozen=True)
class Task:
    """One task with its data. `digest` covers both files: a changed file is measured again."""

    name: str
    settings: Mapping[str, Any]
    data: Path
    num_samples: int
    digest: str

    @property
    def harness_name(self) -> str:
        """Return a name that none of the harness's own tasks has."""
        return f"kv_{self.name}"

    def rendered(self, generation: Mapping[str, Any]) -> str:
        """Return the YAML for the harness, with the path of the data and `generation`."""
        own = self.settings.get("generation_kwargs") or {}
        return yaml.safe_dump(
            {
                **COMMON,
                **self.settings,
                "task": self.harness_name,
                "dataset_kwargs": {"data_files": {"test": str(self.data.resolve())}},
                "generation_kwargs": {**own, **generation},
            }
        )


def known_tasks() -> list[str]:
    """Return the names of the shipped task files."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_task(name: str, data_folder: Path | None) -> Task:
    """Read a task by the name of a shipped file or by the path of its YAML."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(known_tasks())
        raise TaskError(f"--tasks {name[:120]!r} is unknown; give a .yaml file or one of {known}.")
    text = path.read_bytes()
    settings = _parse(text, path)
    needs = settings["metadata"]
    folders = [path.parent] if data_folder is None else [data_folder, path.parent]
    data = next((f / needs["file"] for f in folders if (f / needs["file"]).is_file()), None)
    fields = ", ".join(f"{key} ({kind})" for key, kind in needs["fields"].items())
    if data is None:
        raise TaskError(
            f"task {settings['task']}: {folders[0] / needs['file']} does not exist. Nothing is "
            f"downloaded: get it from {needs['source']} as one JSON object per line with {fields}, "
            "and put it there or change --data (see docs/evaluation.md)."
        )
    content = data.read_bytes()
    lines = [(n, line) for n, line in enumerate(content.splitlines(), 1) if line.strip()]
    for number, line in lines:
        try:
            missing = [key for key in needs["fields"] if json.loads(line)[key] in (None, "")]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise TaskError(
                f"{data}:{number} is not a JSON object with {fields}: {error!r}"
            ) from error
        if missing:
            raise TaskError(f"{data}:{number} has an empty field {missing[0]}; it needs {fields}.")
    if not lines:
        raise TaskError(f"task {settings['task']}: {data} has no lines; get {needs['source']}.")
    digest = hashlib.sha256(text + b"\0" + content).hexdigest()
    return Task(settings["task"], settings, data, len(lines), digest)


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskError(f"task file {path} is not plain YAML: {reason}") from error
    kinds = {"task": str, "metadata": dict, "doc_to_text": str, "doc_to_target": str}
    _check(settings, kinds, where=f"task file {path}")
    kinds = {"file": str, "source": str, "fields": dict}
    _check(settings["metadata"], kinds, where=f"task file {path}: metadata")
    return dict(settings)


def _check(settings: Any, kinds: Mapping[str, type], *, where: str) -> None:
    if not isinstance(settings, dict):
        raise TaskError(f"{where} holds {type(settings).__name__}; it must be a table.")
    for key, kind in kinds.items():
        if not isinstance(settings.get(key), kind):
            raise TaskError(f"{where}: {key} must be a {kind.__name__}.")
