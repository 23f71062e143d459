"""Checks of values from outside: each error says what, got, wanted and which flag to change.

Where a docstring says ValueError it is an OptionError, which names the field.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MAX_SHOWN = 60


def show(value: Any) -> str:
    """`value` in at most 60 characters, for error messages."""
    if isinstance(value, (list, tuple, dict, set)) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def flag_of(name: str) -> str:
    """`max_batch_size` → `--max-batch-size`."""
    return "--" + name.rstrip("_").replace("_", "-")


class OptionError(ValueError):
    """A value from outside that cannot be used. The text is `field: reason`."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"

    def renamed(self, field: str) -> OptionError:
        """The same of a field that its user knows by another name."""
        advice = f"; change {self.field}"
        reason = self.reason
        if reason.endswith(advice):
            reason = f"{reason.removesuffix(advice)}; change {field}"
        return OptionError(field, reason)


def refuse(name: str, value: Any, *, wanted: str, flag: str | None = None) -> OptionError:
    """The error for one bad value; `flag` names what to change when it is not `name` itself."""
    return OptionError(name, f"got {show(value)}, wanted {wanted}; change {flag or name}")


def user_path(name: str, path: str | os.PathLike[str], *, flag: str | None = None) -> Path:
    """`path` with its `~`. OptionError where it names a user that is not there."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise refuse(name, str(path), wanted="a path of a user that exists", flag=flag) from None


def check_instance(name: str, value: Any, *, kind: type) -> None:
    """OptionError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise refuse(name, value, wanted=f"a {kind.__name__}")


def check_int(
    name: str, value: Any, *, low: int, high: int = 2**31 - 1, flag: str | None = None
) -> int:
    """`value` when it is an integer (no bool) in [low, high]; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        upper = "" if high >= 2**31 - 1 else f" and at most {high}"
        raise refuse(name, value, wanted=f"an integer of at least {low}{upper}", flag=flag)
    return value


def check_number(
    name: str, value: Any, *, wanted: tuple[float, float], flag: str | None = None
) -> float:
    """`value` as a finite number (no bool) in the closed range `wanted`; ValueError otherwise."""
    low, high = wanted
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or not math.isfinite(value):
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise refuse(name, value, wanted=f"a finite number of at least {low:g}{upper}", flag=flag)
    return float(value)


def check_bool(name: str, value: Any, *, flag: str | None = None) -> bool:
    """`value` when it is True or False; ValueError otherwise."""
    if not isinstance(value, bool):
        raise refuse(name, value, wanted="True or False", flag=flag)
    return value


def check_choice(name: str, value: Any, *, choices: Sequence[Any], flag: str | None = None) -> Any:
    """`value` when it is one of `choices` and of the same type; ValueError otherwise."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise refuse(name, value, wanted="one of " + ", ".join(str(c) for c in choices), flag=flag)
    return value


def check_strings(
    name: str, value: Any, *, max_items: int, max_chars: int, flag: str | None = None
) -> list[str]:
    """`value` as a list of non-empty strings within the limits; ValueError otherwise."""
    if not isinstance(value, (list, tuple)) or len(value) > max_items:
        raise refuse(name, value, wanted=f"a list of at most {max_items} strings", flag=flag)
    wanted = f"a non-empty string of at most {max_chars} characters"
    for item in value:
        if not isinstance(item, str) or not item or len(item) > max_chars:
            raise refuse(name, item, wanted=wanted, flag=flag)
    return list(value)


def check_ids(name: str, value: Any, *, max_items: int) -> list[int]:
    """`value` as a list of token ids (their upper bound is checked where the model is known)."""
    if not isinstance(value, (list, tuple)) or len(value) > max_items:
        raise refuse(name, value, wanted=f"a list of at most {max_items} token ids")
    return [check_int(name, item, low=0) for item in value]


def refuse_unsupported(config: Any, names: dict[str, Any]) -> None:
    """ValueError when a field of `names` has another value than the one beside it."""
    for name, default in names.items():
        value = getattr(config, name)
        if type(value) is not type(default) or value != default:
            raise OptionError(
                name,
                f"got {value!r}, which is not supported; wanted the default {default!r}; "
                f"remove {name} ({flag_of(name)})",
            )
