"""Names of KV cache formats: `quant_policy`, and `kv_cache_format` by side and by layer.

A name becomes a format here and nowhere else; `fp4` stays `fp4` until the device resolves it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdeploy.base.checks import refuse, user_path

# Accepted values of `quant_policy` and the name that the engine resolves on its device.
QUANT_POLICY_NAMES: dict[int | str, str] = {
    0: "none",
    4: "int4",
    8: "int8",
    16: "fp4",
    "none": "none",
    "int4": "int4",
    "int8": "int8",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8_e5m2",
    "fp4": "fp4",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    # Names of vLLM and SGLang.
    "fp4_e2m1": "fp4",
    "auto": "none",
    "bf16": "none",
    "bfloat16": "none",
}
FORMAT_NAMES = tuple(name for name in QUANT_POLICY_NAMES if isinstance(name, str))
# One name per format, in the order of a report.
REPORTED_FORMATS = ("none", "int8", "fp8", "fp8_e5m2", "nvfp4", "int4", "mxfp4")
KV_QUALITIES = ("raw", "balanced", "best")
UNCALIBRATED_QUALITIES = KV_QUALITIES[:-1]  # best needs a calibration
FP4_FORMATS = frozenset({"fp4", "mxfp4", "nvfp4"})
FOUR_BIT_FORMATS = FP4_FORMATS | {"int4"}

FLAG = "--kv-cache-format"
MAX_TABLE_BYTES = 1 << 16
_LAYERS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
TABLE_SUFFIXES = (".yaml", ".yml")


def parse_quant_policy(value: Any) -> str:
    """The format name of a `quant_policy` as a number (also in quotes) or a name, in any case.

    Raises ValueError for anything else. `fp4` stays `fp4`: the device chooses NVFP4 or MXFP4.
    """
    key = value
    if isinstance(value, str):
        text = value.strip().lower()
        key = int(text) if text.isascii() and text.isdigit() and len(text) < 4 else text
    if isinstance(key, bool) or not isinstance(key, (int, str)) or key not in QUANT_POLICY_NAMES:
        wanted = "0, 4, 8, 16 or one of " + ", ".join(FORMAT_NAMES)
        raise refuse("quant_policy", value, wanted=wanted, flag="--quant-policy")
    return QUANT_POLICY_NAMES[key]


@dataclass(frozen=True)
class FormatPair:
    """Formats of K and V."""

    k: str
    v: str

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"k={self.k},v={self.v}"


@dataclass(frozen=True)
class FormatTable:
    """Formats by layer, before the model is known.

    A layer takes the rule that names its number, else that of its kind (`sliding`, `full`), else
    the default.
    """

    default: FormatPair | None
    kinds: tuple[tuple[str, FormatPair], ...] = ()
    ranges: tuple[tuple[int, int, FormatPair], ...] = ()  # first layer, last layer

    @property
    def pairs(self) -> list[FormatPair]:
        """Every pair that some layer could take."""
        named = [pair for _, pair in self.kinds] + [pair for _, _, pair in self.ranges]
        return named if self.default is None else [self.default, *named]

    def by_layer(self, windows: Sequence[int]) -> list[FormatPair]:
        """The pair of each layer of a model; `windows` has a sliding window or 0 per layer.

        Raises ValueError for a rule beyond the last layer, and for a layer without a rule.
        """
        kinds = dict(self.kinds)
        pairs = [kinds.get("sliding" if window else "full", self.default) for window in windows]
        for first, last, pair in self.ranges:
            if last >= len(pairs):
                wanted = f"layers 0 to {len(pairs) - 1} of this model"
                raise refuse("kv_cache_format", f"layer {last}", wanted=wanted, flag=FLAG)
            pairs[first : last + 1] = [pair] * (last + 1 - first)
        found = [pair for pair in pairs if pair is not None]
        if len(found) < len(pairs):
            got = f"nothing for layer {pairs.index(None)}"
            raise refuse("kv_cache_format", got, wanted="an entry 'default'", flag=FLAG)
        return found


def parse_cache_format(value: Any) -> FormatTable:
    """`kv_cache_format`: a name, `k=fp8,v=nvfp4`, a YAML file, or the table itself.

    Raises ValueError in one line for everything that is wrong before the model is known.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, dict):
        return _parse_table(value, "kv_cache_format")
    if isinstance(value, str) and value.strip().lower().endswith(TABLE_SUFFIXES):
        return _parse_table(_read_table(user_path("kv_cache_format", value, flag=FLAG)), value)
    return FormatTable(default=parse_pair(value))


def parse_pair(value: Any, where: str = "kv_cache_format", *, flag: str = FLAG) -> FormatPair:
    """A format for both sides, or `k=NAME,v=NAME`."""
    wanted = f"k=NAME,v=NAME or NAME, one of {', '.join(FORMAT_NAMES)}"
    if where == "kv_cache_format":
        wanted += ", or a .yaml file"
    if not isinstance(value, str):
        shown = value if isinstance(value, (int, float, bool)) else f"a {type(value).__name__}"
        raise refuse(where, shown, wanted=wanted, flag=flag)
    text = value.strip().lower()
    if text in FORMAT_NAMES:
        return FormatPair(QUANT_POLICY_NAMES[text], QUANT_POLICY_NAMES[text])
    sides: dict[str, str] = {}
    for part in text.split(","):
        side, _, name = (piece.strip() for piece in part.partition("="))
        if side not in ("k", "v") or side in sides or name not in FORMAT_NAMES:
            raise refuse(where, value, wanted=wanted, flag=flag)
        sides[side] = QUANT_POLICY_NAMES[name]
    if len(sides) < 2:
        raise refuse(where, value, wanted=wanted, flag=flag)
    _require_listed(sides["k"], sides["v"])
    return FormatPair(sides["k"], sides["v"])


def _require_listed(k: str, v: str) -> None:
    """Raise ValueError for a pair that the engine has no layers of, whatever fp4 resolves to."""
    from lmdeploy import _turbomind

    if k == "fp4":
        k = v if v in FP4_FORMATS else "nvfp4"
    if v == "fp4":
        v = k if k in FP4_FORMATS else "nvfp4"
    if k != v:
        _turbomind.require_listed_pair(k, v)


def _parse_table(table: dict[Any, Any], where: str) -> FormatTable:
    if not table:
        raise refuse(where, table, wanted="at least the entry 'default'", flag=FLAG)
    default: FormatPair | None = None
    kinds: list[tuple[str, FormatPair]] = []
    ranges: list[tuple[int, int, FormatPair]] = []
    for key, value in table.items():
        pair = parse_pair(value, f"{where}: entry {str(key)[:40]!r}")
        if key == "default":
            default = pair
        elif key in ("sliding", "full"):
            kinds.append((key, pair))
        else:
            ranges.append((*_parse_layers(key, where), pair))
    ranges.sort(key=lambda item: item[:2])
    for before, after in itertools.pairwise(ranges):
        if after[0] <= before[1]:
            wanted = "one entry per layer"
            raise refuse(where, f"layer {after[0]} twice", wanted=wanted, flag=FLAG)
    return FormatTable(default, tuple(kinds), tuple(ranges))


def _parse_layers(key: Any, where: str) -> tuple[int, int]:
    match = None if isinstance(key, bool) else _LAYERS.fullmatch(str(key))
    if match is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last:
            return first, last
    wanted = "default, sliding, full, a layer such as 3, or layers such as 0-5"
    raise refuse(f"{where}: entry", str(key)[:40], wanted=wanted, flag=FLAG)


def _read_table(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        if not path.is_file() and path.exists():
            raise refuse("kv_cache_format", str(path), wanted="a regular file", flag=FLAG)
        with path.open("rb") as file:
            data = file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"kv_cache_format: {path}: {error.strerror}; change {FLAG}") from error
    if len(data) > MAX_TABLE_BYTES:
        wanted = f"at most {MAX_TABLE_BYTES} bytes"
        raise refuse("kv_cache_format", str(path), wanted=wanted, flag=FLAG)
    try:
        text = data.decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        # Every scalar stays the text that stands there: 010 is layer 10, not octal.
        table = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"kv_cache_format: {path}: not YAML: {reason}; change {FLAG}") from error
    if not isinstance(table, dict) or not isinstance(node, yaml.MappingNode):
        got = "an empty file" if node is None else f"a {type(table).__name__}"
        raise refuse(str(path), got, wanted="a table", flag=FLAG)
    # PyYAML keeps the last of two equal keys without a word.
    if len(table) < len(node.value):
        raise refuse(str(path), "an entry twice", wanted="one entry per selector", flag=FLAG)
    return table
