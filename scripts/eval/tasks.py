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
    try:
        settings = yaml.safe_load(text)
        task, needs = settings["task"], settings["metadata"]
        file, source, fields = needs["file"], needs["source"], needs["fields"]
        described = ", ".join(f"{key} ({kind})" for key, kind in fields.items())
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TaskError(
            f"task file {path} is not plain YAML with task and metadata: {reason}"
        ) from error
    folders = [path.parent] if data_folder is None else [data_folder, path.parent]
    data = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if data is None:
        raise TaskError(
            f"task {task}: {folders[0] / file} does not exist. Nothing is downloaded: get it from "
            f"{source} as one JSON object per line with {described}, and put it there or change "
            "--data (see docs/evaluation.md)."
        )
    content = data.read_bytes()
    lines = [(n, line) for n, line in enumerate(content.splitlines(), 1) if line.strip()]
    for number, line in lines:
        try:
            if any(json.loads(line)[key] in (None, "") for key in fields):
                raise ValueError("a field is empty")
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise TaskError(
                f"{data}:{number} is not a JSON object with {described}: {error!r}"
            ) from error
    if not lines:
        raise TaskError(f"task {task}: {data} has no lines; get {source}.")
    digest = hashlib.sha256(text + b"\0" + content).hexdigest()
    return Task(task, settings, data, len(lines), digest)
