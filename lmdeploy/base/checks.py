"""Check values from users. An error names the field, its value, the requirement and the flag.

Every check raises OptionError, a ValueError that names the field.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MAX_SHOWN = 60


def show(value: Any) -> str:
    """Return `value` in at most 60 characters, for error messages."""
    if isinstance(value, (list, tuple, dict, set)) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def flag_of(name: str) -> str:
    """Return the command-line flag of a field: `max_batch_size` → `--max-batch-size`."""
    return "--" + name.rstrip("_").replace("_", "-")


class OptionError(ValueError):
    """A value that cannot be used. Its text is `field`, a space and `reason`.

    `reason` begins with a verb and ends with a period: `is 0. It must be at least 1.` The text also
    names `flag`, with which the user may have set the field.
    """

    def __init__(self, field: str, reason: str, *, flag: str | None = None) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason
        self.flag = flag

    def __str__(self) -> str:
        reason = self.reason if self.flag is None else f"{self.reason[:-1]} ({self.flag})."
        return f"{self.field} {reason}"

    def renamed(self, field: str) -> OptionError:
        """Return the same error for a field that the user knows by another name. It has no flag."""
        flag = self.flag if field == self.field else None
        return OptionError(field, self.reason, flag=flag)


class ContextLengthError(OptionError):
    """A prompt that is longer than the context.

    `limit` is the largest prompt plus answer in tokens.
    """

    def __init__(self, field: str, reason: str, *, limit: int) -> None:
        super().__init__(field, reason)
        self.limit = limit

    def renamed(self, field: str) -> ContextLengthError:
        """Return the same error for a field that the user knows by another name."""
        return ContextLengthError(field, self.reason, limit=self.limit)


def refuse(name: str, value: Any, *, wanted: str, flag: str | None = None) -> OptionError:
    """Return the error for a bad value. `wanted` completes the sentence "It must be …"."""
    return OptionError(name, f"is {show(value)}. It must be {wanted}.", flag=flag)


def refuse_item(name: str, item: Any, *, wanted: str, flag: str | None = None) -> OptionError:
    """Return the error for a bad item of a list. `wanted` completes "Every item must be …"."""
    return OptionError(name, f"contains {show(item)}. Every item must be {wanted}.", flag=flag)


def user_path(name: str, path: str | os.PathLike[str], *, flag: str | None = None) -> Path:
    """Return `path` with `~` expanded. Raise OptionError if it names an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise refuse(name, str(path), wanted="the path of an existing user", flag=flag) from None


def check_instance(name: str, value: Any, *, kind: type) -> None:
    """Raise OptionError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise refuse(name, value, wanted=f"a {kind.__name__}")


def is_int(value: Any, *, low: int, high: int = 2**31 - 1) -> bool:
    """Return whether `value` is an integer (no bool) in [low, high]."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_int(
    name: str, value: Any, *, low: int, high: int = 2**31 - 1, flag: str | None = None
) -> int:
    """Return `value` if it is an integer (no bool) in [low, high]; raise OptionError otherwise."""
    if not is_int(value, low=low, high=high):
        limits = f"of at least {low}" if high >= 2**31 - 1 else f"from {low} to {high}"
        raise refuse(name, value, wanted=f"an integer {limits}", flag=flag)
    return int(value)


def check_number(
    name: str, value: Any, *, wanted: tuple[float, float], flag: str | None = None
) -> float:
    """Return `value` as a finite number (no bool) in the closed range `wanted`."""
    low, high = wanted
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or not math.isfinite(value):
        limits = f"of at least {low:g}" if high >= 2**31 - 1 else f"from {low:g} to {high:g}"
        raise refuse(name, value, wanted=f"a finite number {limits}", flag=flag)
    return float(value)


def check_bool(name: str, value: Any, *, flag: str | None = None) -> bool:
    """Return `value` if it is True or False; raise OptionError otherwise."""
    if not isinstance(value, bool):
        raise refuse(name, value, wanted="True or False", flag=flag)
    return value


def check_choice(
    name: str,
    value: Any,
    *,
    choices: Sequence[Any],
    wanted: str | None = None,
    flag: str | None = None,
) -> Any:
    """Return `value` if it equals one of `choices` and has the same type.

    `wanted` is as in `refuse`. None lists the choices.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        wanted = wanted or "one of " + ", ".join(str(c) for c in choices)
        raise refuse(name, value, wanted=wanted, flag=flag)
    return value


def check_strings(
    name: str, value: Any, *, max_items: int, max_chars: int, flag: str | None = None
) -> list[str]:
    """Return `value` as a list of non-empty strings within the limits."""
    if not isinstance(value, (list, tuple)) or len(value) > max_items:
        raise refuse(name, value, wanted=f"a list of at most {max_items} strings", flag=flag)
    wanted = f"a non-empty string of at most {max_chars} characters"
    for item in value:
        if not isinstance(item, str) or not item or len(item) > max_chars:
            raise refuse_item(name, item, wanted=wanted, flag=flag)
    return list(value)


def check_ids(name: str, value: Any, *, max_items: int) -> list[int]:
    """Return `value` as a list of token ids. Their upper bound is checked with the model."""
    if not isinstance(value, (list, tuple)) or len(value) > max_items:
        raise refuse(name, value, wanted=f"a list of at most {max_items} token ids")
    for item in value:
        if not is_int(item, low=0):
            raise refuse_item(name, item, wanted="an integer of at least 0")
    return list(value)
