"""① Request schemas: names and defaults as in LMDeploy 0.18, checked strictly.

A field of LMDeploy's or OpenAI's API that is not built is accepted with the value that means "not
used" and refused by name otherwise. A field that nobody knows is refused as well.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmdeploy.base.checks import show
from lmdeploy.config.generation import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_TOKEN_IDS,
)
from lmdeploy.serve.errors import ApiError

MAX_BODY_BYTES = 32 << 20
# Values and names, about: 32 MiB of `[],` would be eleven million lists. A token id is one.
MAX_BODY_VALUES = 1 << 21
MAX_PROMPTS = 1024
_MAX_SHOWN = 100
_TEXT = re.compile(rb'"[^"]*"')  # where no quote is escaped

# Of wrong items the first alone is reported: an error for each would take hundreds of bytes.
Ids = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# Fields that are not built, and the values that mean "not used".
Unsupported = dict[str, tuple[Any, ...]]
R = TypeVar("R", bound="ApiRequest")


class ApiRequest(BaseModel):
    """Base of all requests: strict types, no NaN, unknown fields refused by name."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    unsupported: ClassVar[Unsupported] = {}


class StreamOptions(ApiRequest):
    """`stream_options`. Pieces carry no padding, so there is no obfuscation to include."""

    include_usage: bool | None = False
    include_obfuscation: Literal[False] | None = None


class SamplingFields(ApiRequest):
    """What all generating endpoints share."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=0.0, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = Field(default=None, max_length=MAX_TOKEN_IDS)
    ignore_eos: bool | None = False
    min_new_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    stream: bool | None = False
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_LOGIT_BIAS)
    response_format: dict[str, Any] | None = None
    # Whose request it is, and hints to a cache that finds prefixes by itself: no effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionFields(SamplingFields):
    """What the two OpenAI endpoints share."""

    model: str
    n: int | None = Field(default=1, ge=1, le=MAX_N)
    stream_options: StreamOptions | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


def check_value(name: str, value: Any, *, accepted: tuple[Any, ...]) -> None:
    """ApiError 400 for a field that is not built, unless its value means "not used"."""
    if not any(type(value) is type(a) and value == a for a in accepted):
        message = f"{name} is not supported with the value {show(value)}. Remove it."
        raise ApiError(400, message, param=name)


def parse_json(body: bytes) -> Any:
    """JSON without NaN and infinities. ApiError 400 for anything else, 413 for too many values."""
    values = _count_values(body)
    if values > MAX_BODY_VALUES:
        raise ApiError(
            413, f"The body has about {values} values. It must have at most {MAX_BODY_VALUES}."
        )

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not allowed")

    try:
        return json.loads(body, parse_constant=refuse_constant)
    except RecursionError:
        raise ApiError(400, "The JSON of the body is nested too deep.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None


def _count_values(body: bytes) -> int:
    """About how many there are; where they seem too many, without the marks inside texts."""

    def count(text: bytes) -> int:
        return sum(text.count(mark) for mark in (b",", b"[", b"{"))

    values = count(body)
    if values > MAX_BODY_VALUES:
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if plain.count(b'"') <= 2 * MAX_BODY_VALUES:
            values = count(_TEXT.sub(b"", plain))
    return values


def parse_request(model: type[R], body: bytes) -> R:
    """A checked request. ApiError 400 names the first field that is wrong."""
    values = parse_json(body)
    if not isinstance(values, dict):
        raise ApiError(400, f"The body is {show(values)}. It must be a JSON object.")
    for name, accepted in model.unsupported.items():
        if name in values:
            check_value(name, values.pop(name), accepted=accepted)
    _refuse_unknown(model, values)
    _check_sizes(values)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _first_error(error, values) from None


def _refuse_unknown(model: type[ApiRequest], values: dict[str, Any]) -> None:
    """ApiError 400 for the first field that nobody knows, in `stream_options` too."""
    options = values.get("stream_options")
    places = [("", model, values)]
    if isinstance(options, dict):
        places.append(("stream_options.", StreamOptions, options))
    for prefix, known, given in places:
        for name in given:
            if name not in known.model_fields:
                path = (prefix + name)[:_MAX_SHOWN]
                raise ApiError(400, f"{path} is an unknown field. Remove it.", param=path)


def _check_sizes(values: dict[str, Any]) -> None:
    bias = values.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > MAX_LOGIT_BIAS:
        message = f"logit_bias has {len(bias)} token ids. It must have at most {MAX_LOGIT_BIAS}."
        raise ApiError(400, message, param="logit_bias")


def _first_error(error: ValidationError, values: dict[str, Any]) -> ApiError:
    details = error.errors(include_url=False)
    first = details[0]
    if not first["loc"]:
        return ApiError(400, f"The body is not a request. It has {show(sorted(values))}.")
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing. Add it.", param=name)
    same = [d for d in details if d["loc"] and d["loc"][0] == name]
    texts = [d["msg"].removeprefix("Input should be ") for d in same[:4]]
    wanted, got, path = " or ".join(dict.fromkeys(texts)), show(values.get(name)), name
    if len(same) == 1:  # of one type alone: what is wrong within it
        inner = first["loc"][1:]
        path += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
        got = show(first["input"])
        if first["type"] == "too_long":
            length, limit = first["ctx"]["actual_length"], first["ctx"]["max_length"]
            message = f"{path} has {length} items. It must have at most {limit}."
            return ApiError(400, message, param=name)
    return ApiError(400, f"{path} is {got}. It must be {wanted}.", param=name)
