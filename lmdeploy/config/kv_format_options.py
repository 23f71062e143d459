"""Parse the KV cache options: `quant_policy`, and `kv_cache_format` by side and by layer.

This module splits `k=…,v=…` and YAML files. The C++ table of formats (`_turbomind.kv_formats`)
decides which names exist. `fp4` stays `fp4` until the device resolves it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdeploy.base.checks import OptionError, flag_of, refuse, user_path

KV_QUALITIES = ("raw", "balanced", "best")
UNCALIBRATED_QUALITIES = KV_QUALITIES[:-1]  # best needs a calibration
KV_K_OFFSETS = ("block", "none")
KV_WINDOWS = ("int8", "16bit")

FLAG = flag_of("kv_cache_format")
MAX_TABLE_BYTES = 1 << 16
_LAYERS = re.compile(r"(-?\d{1,5})(?:-(-?\d{1,5}))?")
TABLE_SUFFIXES = (".yaml", ".yml")


def reported_formats() -> tuple[str, ...]:
    """Return the name of every format that a layer can store, in the order of reports."""
    from lmdeploy import _turbomind

    return tuple(row.name for row in _turbomind.kv_formats() if row.format is not None)


def four_bit_formats() -> frozenset[str]:
    """Return the names of the formats with 4 bits per value; `fp4` is one of them."""
    from lmdeploy import _turbomind

    return frozenset(row.name for row in _turbomind.kv_formats() if row.bits == 4)


def fp4_formats() -> frozenset[str]:
    """Return the names of the formats that `fp4` can stand for, and `fp4` itself."""
    from lmdeploy import _turbomind

    return frozenset(row.name for row in _turbomind.kv_formats() if row.is_fp4)


def describe_policies() -> str:
    """Return the values of `quant_policy`, for help texts."""
    from lmdeploy import _turbomind

    return ", ".join(
        (row.name if row.quant_policy is None else f"{row.quant_policy} or {row.name}")
        + (f" ({row.description})" if row.format is None else "")
        for row in _turbomind.kv_formats()
    )


def accepted_names() -> str:
    """Return every name and alias, for error messages."""
    from lmdeploy import _turbomind

    return ", ".join(name for row in _turbomind.kv_formats() for name in (row.name, *row.aliases))


def parse_quant_policy(value: Any) -> str:
    """Return the format name for a `quant_policy`: a number (also as text) or a name, in any case.

    Raise ValueError for anything else.
    """
    from lmdeploy import _turbomind

    try:
        return _turbomind.parse_kv_format(value)
    except _turbomind.InvalidArgument:
        numbers = sorted(
            row.quant_policy for row in _turbomind.kv_formats() if row.quant_policy is not None
        )
        wanted = f"{', '.join(map(str, numbers))} or one of {accepted_names()}"
        raise refuse("quant_policy", value, wanted=wanted, flag=flag_of("quant_policy")) from None


def _parse_name(text: str) -> str | None:
    """Return the format with this name; None for a number and for an unknown name."""
    from lmdeploy import _turbomind

    if text.strip().isdigit():
        return None
    try:
        return _turbomind.parse_kv_format(text)
    except _turbomind.InvalidArgument:
        return None


@dataclass(frozen=True)
class FormatPair:
    """The names of the formats of K and V."""

    k: str
    v: str

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"


LayerRange = tuple[int, int, FormatPair]  # first layer, last layer, and their formats


@dataclass(frozen=True)
class FormatTable:
    """Formats by layer, before the model is known.

    A layer uses the rule for its number. Without one it uses the rule for its kind (`sliding` or
    `full`), and without that the default. Layer -1 is the last one.
    """

    default: FormatPair | None
    kinds: tuple[tuple[str, FormatPair], ...] = ()
    ranges: tuple[LayerRange, ...] = ()  # layers below 0 count from the end

    @property
    def pairs(self) -> list[FormatPair]:
        """Return every pair that a layer could use."""
        named = [pair for _, pair in self.kinds] + [pair for _, _, pair in self.ranges]
        return named if self.default is None else [self.default, *named]

    @property
    def name(self) -> str:
        """Return the format of all layers, or `mixed`."""
        pairs = {str(pair) for pair in self.pairs}
        return pairs.pop() if len(pairs) == 1 else "mixed"

    def by_layer(self, windows: Sequence[int]) -> list[FormatPair]:
        """Return the pair of each layer. `windows` has each layer's sliding window, 0 for none.

        Raise ValueError for a rule beyond the model's layers, for two rules of one layer, and for
        a layer without a rule.
        """
        kinds = dict(self.kinds)
        pairs = [kinds.get("sliding" if window else "full", self.default) for window in windows]
        for first, last, pair in _resolved(self.ranges, len(pairs)):
            pairs[first : last + 1] = [pair] * (last + 1 - first)
        found = [pair for pair in pairs if pair is not None]
        if len(found) < len(pairs):
            got = f"nothing for layer {pairs.index(None)}"
            raise refuse("kv_cache_format", got, wanted="an entry 'default'", flag=FLAG)
        return found


def _resolved(ranges: Sequence[LayerRange], num_layers: int) -> list[LayerRange]:
    """Return the ranges with layers counted from the first one, in order.

    Raise ValueError for a layer that the model does not have, or that has two rules.
    """
    found: list[LayerRange] = []
    for first, last, pair in ranges:
        for layer in (first, last):
            if not -num_layers <= layer < num_layers:
                wanted = f"layers 0 to {num_layers - 1} of this model, or -{num_layers} to -1"
                raise refuse("kv_cache_format", f"layer {layer}", wanted=wanted, flag=FLAG)
        begin, end = first % num_layers, last % num_layers
        if begin > end:
            wanted = "a first layer that is not behind the last one"
            raise refuse("kv_cache_format", f"layers {first}-{last}", wanted=wanted, flag=FLAG)
        found.append((begin, end, pair))
    return _without_overlap(found, "kv_cache_format")


def _without_overlap(ranges: Sequence[LayerRange], where: str) -> list[LayerRange]:
    """Return the ranges in order. Raise ValueError if two of them have a common layer."""
    ordered = sorted(ranges, key=lambda item: item[:2])
    for before, after in itertools.pairwise(ordered):
        if after[0] <= before[1]:
            raise refuse(where, f"layer {after[0]} twice", wanted="one entry per layer", flag=FLAG)
    return ordered


def parse_cache_format(value: Any) -> FormatTable:
    """Parse `kv_cache_format`: a name, `k=fp8,v=nvfp4`, a YAML file, or the table itself.

    Raise ValueError, in one line, for every mistake that shows before the model is known.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, dict):
        return _parse_table(value, "kv_cache_format")
    if isinstance(value, str) and value.strip().lower().endswith(TABLE_SUFFIXES):
        return _parse_table(_read_table(user_path("kv_cache_format", value, flag=FLAG)), value)
    return FormatTable(default=parse_pair(value))


def parse_pair(value: Any, where: str = "kv_cache_format", *, flag: str = FLAG) -> FormatPair:
    """Parse one format for both sides, or `k=NAME,v=NAME`. Raise ValueError."""
    if not isinstance(value, str):
        shown = value if isinstance(value, (int, float, bool)) else f"a {type(value).__name__}"
        raise _refuse_pair(where, shown, flag=flag)
    name = _parse_name(value)
    if name is not None:
        return FormatPair(name, name)
    sides: dict[str, str] = {}
    for part in value.lower().split(","):
        side, _, text = (piece.strip() for piece in part.partition("="))
        name = _parse_name(text)
        if side not in ("k", "v") or side in sides or name is None:
            raise _refuse_pair(where, value, flag=flag)
        sides[side] = name
    if len(sides) < 2:
        raise _refuse_pair(where, value, flag=flag)
    _require_listed(sides["k"], sides["v"])
    return FormatPair(sides["k"], sides["v"])


def _refuse_pair(where: str, value: Any, *, flag: str) -> ValueError:
    wanted = f"k=NAME,v=NAME or NAME, one of {accepted_names()}"
    if where == "kv_cache_format":
        wanted += ", or a .yaml file"
    return refuse(where, value, wanted=wanted, flag=flag)


def _require_listed(k: str, v: str) -> None:
    """Raise ValueError for a pair that no engine supports, whatever fp4 resolves to."""
    from lmdeploy import _turbomind

    fp4 = fp4_formats()
    if k == "fp4":
        k = v if v in fp4 else "nvfp4"
    if v == "fp4":
        v = k if k in fp4 else "nvfp4"
    if k == v:
        return
    try:
        _turbomind.require_listed_pair(k, v)
    except _turbomind.InvalidArgument as error:
        raise OptionError(error.field, error.reason, flag=FLAG) from None


def _parse_table(table: dict[Any, Any], where: str) -> FormatTable:
    if not table:
        raise refuse(where, table, wanted="at least the entry 'default'", flag=FLAG)
    default: FormatPair | None = None
    kinds: list[tuple[str, FormatPair]] = []
    ranges: list[LayerRange] = []
    for key, value in table.items():
        pair = parse_pair(value, f"{where}: entry {str(key)[:40]!r}")
        if key == "default":
            default = pair
        elif key in ("sliding", "full"):
            kinds.append((key, pair))
        else:
            ranges.append((*_parse_layers(key, where), pair))
    # Where a range from the end begins is known with the model only.
    counted = _without_overlap([item for item in ranges if min(item[:2]) >= 0], where)
    from_end = [item for item in ranges if min(item[:2]) < 0]
    return FormatTable(default, tuple(kinds), (*counted, *from_end))


def _parse_layers(key: Any, where: str) -> tuple[int, int]:
    match = None if isinstance(key, bool) else _LAYERS.fullmatch(str(key))
    if match is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last or last < 0 <= first:
            return first, last
    wanted = (
        "default, sliding, full, a layer such as 3 or -1 (the last), or layers such as 0-5 or -2--1"
    )
    raise refuse(f"{where}: entry", str(key)[:40], wanted=wanted, flag=FLAG)


def _read_table(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        if not path.is_file() and path.exists():
            raise refuse("kv_cache_format", str(path), wanted="a regular file", flag=FLAG)
        with path.open("rb") as file:
            data = file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        told = f"names {path}: {error.strerror}."
        raise OptionError("kv_cache_format", told, flag=FLAG) from error
    if len(data) > MAX_TABLE_BYTES:
        wanted = f"at most {MAX_TABLE_BYTES} bytes"
        raise refuse("kv_cache_format", str(path), wanted=wanted, flag=FLAG)
    try:
        text = data.decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        # Every scalar stays text: 010 is layer 10, not an octal number.
        table = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        told = f"names {path}, which is not YAML: {reason}."
        raise OptionError("kv_cache_format", told, flag=FLAG) from error
    if not isinstance(table, dict) or not isinstance(node, yaml.MappingNode):
        got = "an empty file" if node is None else f"a {type(table).__name__}"
        raise refuse(str(path), got, wanted="a table", flag=FLAG)
    # PyYAML silently keeps the last of two equal keys.
    if len(table) < len(node.value):
        raise refuse(str(path), "an entry twice", wanted="one entry per selector", flag=FLAG)
    return table
