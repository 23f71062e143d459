"""Checked access to the numbers of a config.json or of GGUF metadata."""

from collections.abc import Mapping
from typing import Any

from lmdeploy.base.errors import ModelFormatError

# Nothing in a config may be larger: it keeps products of sizes far from overflow.
_MAX_INTEGER = (1 << 31) - 1


class ConfigReader:
    """Values by key; what is missing or malformed is a ModelFormatError naming file and key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def integer(
        self, key: str, *, default: int | None = None, low: int = 1, high: int = _MAX_INTEGER
    ) -> int:
        """A whole number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(key, value, wanted=f"a whole number in {low}..{high}")
        return int(value)

    def number(
        self, key: str, *, default: float | None = None, low: float = 0.0, high: float = 1e12
    ) -> float:
        """A number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(key, value, wanted="a number")
        if not low <= value <= high:  # nor is NaN
            self._refuse(key, value, wanted=f"a number in {low:g}..{high:g}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, wanted="true or false")
        return bool(value)

    def text(self, key: str, *, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, wanted="a string")
        return str(value)

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty when the key is missing."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(key, value, wanted="a list of strings")
        return list(value)

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers, none negative; empty when the key is missing."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
            self._refuse(key, value, wanted="a list of whole numbers")
        return list(value)

    def flags(self, key: str) -> list[bool]:
        """A list of true and false, or of 1 and 0; empty when the key is missing."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(i in (0, 1) for i in value):
            self._refuse(key, value, wanted="a list of true and false")
        return [bool(i) for i in value]

    def is_list(self, key: str) -> bool:
        """Whether the value is a list."""
        return isinstance(self._values.get(key), list)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """The same values, and these where a key is missing (not where it is null)."""
        return ConfigReader({**defaults, **self._values}, self.source)

    def child(self, key: str) -> "ConfigReader | None":
        """The object under the key; None when it is missing, null or empty."""
        value = self._values.get(key)
        if not value and not isinstance(value, int | float | str):
            return None
        if not isinstance(value, dict):
            self._refuse(key, value, wanted="an object")
        return ConfigReader(value, f"{self.source}: {key}")

    def has_objects(self) -> bool:
        """Whether any value is itself an object."""
        return any(isinstance(value, dict) for value in self._values.values())

    def refuse(self, text: str) -> ModelFormatError:
        """An error about this source, for the caller to raise."""
        return ModelFormatError(f"{self.source}: {text}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(f"{key} is missing")
        return value

    def _refuse(self, key: str, value: Any, *, wanted: str) -> None:
        raise self.refuse(f"{key} is {str(value)[:80]!r}; wanted {wanted}")
