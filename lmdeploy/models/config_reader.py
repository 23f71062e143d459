"""Read and check the values of a config.json or of GGUF metadata."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lmdeploy.base.errors import ModelFormatError

# The largest integer that a config may contain. It keeps products of sizes far from overflow.
_MAX_INTEGER = (1 << 31) - 1
MAX_POSITION = 1 << 30  # the largest position of the engine


class ConfigReader:
    """Values by key. A missing or malformed value raises ModelFormatError with file and key.

    `names` replaces keys in errors, for values that the source has under other keys.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        *,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._values = values
        self._names = names
        self.source = source

    def name(self, key: str) -> str:
        """Return the key under which the source has a value."""
        return self._names.get(key, key)

    def has(self, key: str) -> bool:
        """Return whether the key exists and is not null."""
        return self._values.get(key) is not None

    def keys(self) -> list[str]:
        """Return all keys."""
        return list(self._values)

    def integer(
        self, key: str, *, default: int | None = None, low: int = 1, high: int = _MAX_INTEGER
    ) -> int:
        """Return an integer in [low, high]."""
        value = self._single(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(key, value, wanted=f"an integer from {low} to {high}")
        return int(value)

    def number(
        self, key: str, *, default: float | None = None, low: float = 0.0, high: float = 1e12
    ) -> float:
        """Return a number in [low, high]."""
        value = self._single(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(key, value, wanted="a number")
        if not low <= value <= high:  # rejects NaN too
            self._refuse(key, value, wanted=f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a Boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, wanted="true or false")
        return bool(value)

    def require(self, fixed: Mapping[str, object]) -> None:
        """Raise ModelFormatError if a key has another value than the given one."""
        for key, wanted in fixed.items():
            if self.has(key) and self._values[key] != wanted:
                self._refuse(key, self._values[key], wanted=str(wanted).lower())

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            self._refuse(key, value, wanted="a string")
        return str(value)

    def any_text(self, key: str) -> str:
        """Return the value of any type as text, empty if the key is missing."""
        return str(self._values[key])[:80] if self.has(key) else ""

    def texts(self, key: str) -> list[str]:
        """Return a list of strings, empty if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(key, value, wanted="a list of strings")
        return list(value)

    def integers(self, key: str) -> list[int]:
        """Return a list of integers in [0, 2^31), empty if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(
            type(i) is int and 0 <= i <= _MAX_INTEGER for i in value
        ):
            self._refuse(key, value, wanted=f"a list of integers from 0 to {_MAX_INTEGER}")
        return list(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0. Raise ModelFormatError if it is missing."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(
            isinstance(i, int | float) and not isinstance(i, bool) and 0.0 < i < 1e6 for i in value
        ):
            self._refuse(key, value, wanted="a list of numbers above 0")
        return tuple(float(i) for i in value)

    def flags(self, key: str) -> list[bool]:
        """Return a list of Booleans, stored as such or as 1 and 0; empty if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(i in (0, 1) for i in value):
            self._refuse(key, value, wanted="a list of true and false")
        return [bool(i) for i in value]

    def is_list(self, key: str) -> bool:
        """Return whether the value is a list."""
        return isinstance(self._values.get(key), list)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """Return a reader that uses `defaults` for missing keys, but not for null values."""
        return ConfigReader({**defaults, **self._values}, self.source, names=self._names)

    def with_values(self, values: Mapping[str, Any]) -> "ConfigReader":
        """Return a reader with `values`, also in place of others."""
        return ConfigReader({**self._values, **values}, self.source, names=self._names)

    def child(self, key: str) -> "ConfigReader | None":
        """Return the object under the key, or None if it is missing, null or empty."""
        value = self._values.get(key)
        if not value and not isinstance(value, int | float | str):
            return None
        if not isinstance(value, dict):
            self._refuse(key, value, wanted="an object")
        source = self.source if self._names else f"{self.source}: {key}"
        return ConfigReader(value, source, names=self._names)

    def has_objects(self) -> bool:
        """Return whether any value is itself an object."""
        return any(isinstance(value, dict) for value in self._values.values())

    def refuse(self, text: str) -> ModelFormatError:
        """Return an error about this source, for the caller to raise."""
        return ModelFormatError(f"{self.source}: {text}")

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(f"{self.name(key)} is missing.")
        return value

    def _single(self, key: str, default: Any) -> Any:
        return self._get(key, default)

    def _refuse(self, key: str, value: Any, *, wanted: str) -> None:
        raise self.refuse(f"{self.name(key)} is {str(value)[:80]!r}. It must be {wanted}.")


class MetadataReader(ConfigReader):
    """GGUF metadata, where a number may be an array with one value for each layer.

    Such an array counts as its value if all layers have the same one.
    """

    def single(self, key: str) -> Any:
        """Return the value of any type, or None if the key is missing."""
        return self._single(key, None) if self.has(key) else None

    def of_branches(self, key: str) -> tuple[Any, list[bool]]:
        """Return the value of the layers that have a branch, and which layers do.

        REQUIRES: the value is a list. It has 0 for layers without the branch.
        """
        value = self._per_layer(key)
        found = [item for item in value if item != 0]
        if any(item != found[0] for item in found):
            self._refuse(key, value, wanted="the same in all layers, or 0")
        return found[0] if found else 0, [item != 0 for item in value]

    def by_layer(self, key: str) -> list[Any]:
        """Return a list with the value of each layer."""
        return self._per_layer(key)

    def _per_layer(self, key: str) -> list[Any]:
        value = list(self._values[key])
        count = f"{self._values.get('general.architecture')}.block_count"
        layers = self._get(count, None)
        if not value or len(value) != layers:
            raise self.refuse(f"{key} has {len(value)} values, but {count} is {str(layers)[:80]}.")
        return value

    def _single(self, key: str, default: Any) -> Any:
        value = self._get(key, default)
        if not isinstance(value, list):
            return value
        value = self._per_layer(key)
        if any(item != value[0] for item in value):
            self._refuse(key, value, wanted="the same in all layers")
        return value[0]
