"""Parse `weight_format`: the formats that matrices are quantized to when they are loaded."""

from __future__ import annotations

from typing import Any

from lmdeploy.base.checks import OptionError, flag_of, refuse

FLAG = flag_of("weight_format")
# The parts of a model. `other` are the embedding and the head.
WEIGHT_PARTS = ("attn", "mlp", "other")
# The engine's format of each name.
WEIGHT_FORMATS = {"int8": "q8_0", "int4": "q4_1"}


def parse_weight_format(value: Any) -> dict[str, str]:
    """Return the engine's format by part. Parts that are not named stay as stored.

    `value` is None, `int8`, `int4`, or by part as in `attn=int8,mlp=int4`. Raise ValueError for
    anything else.
    """
    if value is None:
        return {}
    if not isinstance(value, str):
        raise _refuse(value)
    name = value.strip().lower()
    if name in WEIGHT_FORMATS:
        return dict.fromkeys(WEIGHT_PARTS, WEIGHT_FORMATS[name])
    table: dict[str, str] = {}
    for item in name.split(","):
        part, _, kind = (piece.strip() for piece in item.partition("="))
        if part not in WEIGHT_PARTS or kind not in WEIGHT_FORMATS:
            raise _refuse(value)
        if part in table:
            raise OptionError(
                "weight_format", f"is {value[:60]!r}. It must name {part} at most once ({FLAG})."
            )
        table[part] = WEIGHT_FORMATS[kind]
    return table


def _refuse(value: Any) -> ValueError:
    wanted = (
        f"{' or '.join(WEIGHT_FORMATS)}, or formats of the parts {', '.join(WEIGHT_PARTS)}, as in "
        "attn=int8,mlp=int4"
    )
    return refuse("weight_format", value, wanted=wanted, flag=FLAG)
