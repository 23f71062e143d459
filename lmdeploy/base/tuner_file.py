"""Keep the kernels that a GPU was tuned to in a file. Reading does not trust the file.

Each kind of GPU has a JSON file in a folder of the user's cache. `machine` names the driver, the
libraries and the kernels that the choices were measured with. Other ones need new measurements.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import read_json_object, user_cache_folder

if TYPE_CHECKING:
    from lmdeploy._turbomind import TunedChoice

SWITCH = "LMDEPLOY_TUNER"
_TEXTS = ("question", "kernel", "table_kernel")
_TIMES = ("us", "table_us")
_MAX_TEXT = 200
_MAX_CHOICES = 10_000  # of about 150 bytes, for some dozens of models
_MAX_BYTES = 4 << 20
_MAX_US = 10**9


class TunerFileError(ValueError):
    """The file is damaged, or it is of another machine."""


def tuner_is_on() -> bool:
    """Return whether GPUs are tuned. Raise ValueError if the variable has an unknown value."""
    switch = os.environ.get(SWITCH, "") or "1"
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} is {switch[:40]!r}. It must be 0 or 1.")
    return switch == "1"


def tuner_file(machine: str) -> Path | None:
    """Return the file of a machine's GPU, or None if the user has no home folder."""
    base = user_cache_folder()
    gpu = machine.partition(",")[0]
    name = re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")[:60] or "gpu"
    return None if base is None else base / "tuner" / f"{name}.json"


def read_choices(path: Path, machine: str) -> list[TunedChoice]:
    """Return the choices in a file.

    Raises:
        FileNotFoundError: there is no file.
        TunerFileError: the file is damaged, or of another machine.
    """
    if not os.path.lexists(path):
        raise FileNotFoundError(path)
    try:
        content = read_json_object(path, _MAX_BYTES)
    except ModelFormatError as error:
        raise TunerFileError(str(error).removeprefix(f"{path}: ")) from error
    if content.get("machine") != machine:
        raise TunerFileError("The file is of another driver, library, version or GPU.")
    rows = content.get("choices")
    if not isinstance(rows, list) or len(rows) > _MAX_CHOICES:
        raise TunerFileError(f"choices must be a list of at most {_MAX_CHOICES} objects.")
    return [_to_choice(row) for row in rows]


def write_choices(path: Path, machine: str, *, choices: Iterable[TunedChoice]) -> None:
    """Replace the file. Its readers see the old or the new content. Raise OSError."""
    rows = [_to_row(choice) for choice in choices][-_MAX_CHOICES:]
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = f'{{"machine": {json.dumps(machine)}, "choices": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def describe_file(machine: str) -> str:
    """Return one line about the file of a machine, for people."""
    if not tuner_is_on():
        return f"off ({SWITCH}=0)"
    path = tuner_file(machine)
    if path is None:
        return "measures at every start, because the user has no home folder"
    try:
        choices = read_choices(path, machine)
        days = (time.time() - path.stat().st_mtime) / 86400
    except FileNotFoundError:
        return f"no {path} yet; the first start of a model writes it"
    except (TunerFileError, OSError) as error:
        return f"{path} will be measured again. {error}"
    return f"{path}, {len(choices)} choices, {days:.1f} days old"


def _to_row(choice: TunedChoice) -> dict[str, Any]:
    texts = {name: getattr(choice, name) for name in _TEXTS}
    return texts | {name: round(getattr(choice, name), 3) for name in _TIMES}


def _to_choice(row: object) -> TunedChoice:
    from lmdeploy._turbomind import TunedChoice

    if not isinstance(row, dict) or set(row) != {*_TEXTS, *_TIMES}:
        raise TunerFileError(f"A choice must have exactly {', '.join((*_TEXTS, *_TIMES))}.")
    texts = [row[name] for name in _TEXTS]
    if not all(isinstance(x, str) and x.isascii() and len(x) <= _MAX_TEXT for x in texts):
        raise TunerFileError(f"The names of a choice must be ASCII of at most {_MAX_TEXT} letters.")
    times = [row[name] for name in _TIMES]
    if not all(type(us) in (int, float) and 0 <= us <= _MAX_US for us in times):
        raise TunerFileError(f"The times of a choice must be 0 to {_MAX_US} microseconds.")
    return TunedChoice(
        question=row["question"],
        kernel=row["kernel"],
        table_kernel=row["table_kernel"],
        us=float(row["us"]),
        table_us=float(row["table_us"]),
    )
