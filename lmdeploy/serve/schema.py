"""① Request schemas with the names and defaults of LMDeploy 0.18, checked strictly.

A field that changes the answer and is not supported is accepted only with a value that means "not
used". Other values are rejected by name. Fields that change nothing and unknown fields are ignored.
"""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from lmdeploy.base.checks import show
from lmdeploy.chat.messages import MAX_MESSAGES
from lmdeploy.chat.tool_calls import MAX_TOOLS
from lmdeploy.config.generation import (
    MAX_LOGIT_BIAS,
    MAX_NGRAM,
    MAX_STOP_WORD_CHARS,
    MAX_STOP_WORDS,
    GenerationConfig,
)
from lmdeploy.config.option import MAX_INT, options_of
from lmdeploy.config.unsupported import ANY
from lmdeploy.serve.errors import ApiError

logger = logging.getLogger("lmdeploy")

# Limit of the JSON values of a body: 32 MiB of `[],` would become eleven million lists.
MAX_BODY_VALUES = 1 << 21
_MANY_VALUES = 10_000
MAX_PROMPTS = 1024
_MAX_NAMED = 8  # unknown fields in a log message
_TEXT = re.compile(rb'"[^"]*"')  # a string, once escaped quotes are removed

# fail_fast reports only the first wrong item. An error takes hundreds of bytes.
Ids = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]

# These describe limits that other code checks, with errors that say more.
Messages = Annotated[Objects, Field(json_schema_extra={"minItems": 1, "maxItems": MAX_MESSAGES})]
Items = Annotated[Objects, Field(json_schema_extra={"minItems": 1})]
Tools = Annotated[Objects, Field(json_schema_extra={"maxItems": MAX_TOOLS})]
PromptIds = Annotated[Ids, Field(json_schema_extra={"minItems": 1})]
Prompts = Annotated[list[Any], Field(json_schema_extra={"minItems": 1})]
ManyTexts = Annotated[Texts, Field(json_schema_extra={"maxItems": MAX_PROMPTS})]
_WORD: dict[str, Any] = {"minLength": 1, "maxLength": MAX_STOP_WORD_CHARS}
Word = Annotated[str, Field(json_schema_extra=_WORD)]
Words = Annotated[list[Word], Field(fail_fast=True, json_schema_extra={"maxItems": MAX_STOP_WORDS})]
# Some clients send Booleans as texts.
Flag = Annotated[
    bool,
    BeforeValidator(
        lambda value: (
            {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
        )
    ),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["true", "false"]}]}),
]
# -1 means "no limit", as in LMDeploy and SGLang.
TokenLimit = Annotated[int, Field(ge=1, lt=2**31)] | Literal[-1]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]  # -1 and 0 allow all tokens
# Field that is not supported → the values that mean "not used".
Unsupported = dict[str, tuple[Any, ...]]
R = TypeVar("R", bound="ApiRequest")


def of_option(name: str, *, default: Any = None) -> Any:
    """Return the field of a request that has the bounds of an option of GenerationConfig."""
    option = options_of(GenerationConfig)[name]
    low, high, above = option.more.low, option.more.high, option.more.above
    if option.kind not in (int, float):
        return Field(default=default, max_length=int(high))
    if high == MAX_INT:
        return Field(default=default, ge=low, lt=high + 1)
    return Field(default=default, ge=low if above is None else None, gt=above, le=high)


class ApiRequest(BaseModel):
    """Base of all requests: strict types and no NaN. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    unsupported: ClassVar[Unsupported] = {}
    _num_unknown: int = PrivateAttr(default=0)

    @property
    def num_unknown(self) -> int:
        """Return the number of unknown fields in the body."""
        return self._num_unknown


class StreamOptions(ApiRequest):
    """The field `stream_options`. `include_obfuscation` (random padding) has no effect."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = None


class SamplingFields(ApiRequest):
    """The fields of all generating endpoints."""

    temperature: float | None = of_option("temperature")
    top_p: float | None = of_option("top_p")
    top_k: TopK | None = None
    min_p: float | None = of_option("min_p")
    repetition_penalty: float | None = of_option("repetition_penalty")
    presence_penalty: float | None = of_option("presence_penalty", default=0.0)
    frequency_penalty: float | None = of_option("frequency_penalty", default=0.0)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Word | Words | None = None
    stop_token_ids: Ids | None = of_option("stop_token_ids")
    ignore_eos: bool | None = False
    bad_words: Words | None = None
    do_sample: bool | None = None
    min_new_tokens: int | None = of_option("min_new_tokens")
    min_tokens: int | None = of_option("min_new_tokens")
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    stream: Flag | None = False
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_LOGIT_BIAS)
    response_format: dict[str, Any] | None = None
    # As in vLLM: requests share cached prefixes only if their salts are equal.
    cache_salt: str | None = Field(default=None, min_length=1)
    priority: int | None = of_option("priority", default=0)
    repetition_ngram_size: int | None = Field(default=0, ge=0, le=MAX_NGRAM)
    repetition_ngram_threshold: int | None = Field(default=0, ge=0, le=MAX_NGRAM)
    session_id: int | str | None = None  # names the request for /abort_request; -1 is no name


class CompletionFields(SamplingFields):
    """The fields of both OpenAI endpoints."""

    model: str
    n: int | None = of_option("n", default=1)
    stream_options: StreamOptions | None = None
    max_completion_tokens: TokenLimit | None = None

    @property
    def streams_usage(self) -> bool:
        """Return whether the last event of a stream contains the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)


def check_value(name: str, value: Any, *, accepted: tuple[Any, ...]) -> None:
    """Raise ApiError 400 unless `value` is one of `accepted`, which mean "not used"."""
    if not any(type(value) is type(a) and value == a for a in accepted):
        message = f"{name} is not supported with the value {show(value)}. Remove it."
        raise ApiError(400, message, param=name)


def parse_json(body: bytes | bytearray) -> Any:
    """Parse JSON without NaN and infinities.

    Raises ApiError 400 if it is not valid, and 413 if it has more than MAX_BODY_VALUES values.
    """
    values = _count_values(body)
    if values > MAX_BODY_VALUES:
        raise ApiError(
            413, f"The body has about {values} values. It must have at most {MAX_BODY_VALUES}."
        )

    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not allowed")

    # The parser holds the GIL except while it calls Python code. Such a call for each object lets
    # other threads run.
    hook = _new_dict if values > _MANY_VALUES else None
    try:
        return json.loads(body, parse_constant=refuse_constant, object_pairs_hook=hook)
    except RecursionError:
        raise ApiError(400, "The JSON of the body is nested too deep.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None


def _new_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(pairs)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the collector: with a million new objects, it takes five times as long as the parser.

    JSON has no cycles. Several threads may do this, because the first one ends the pause.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _count_values(body: bytes | bytearray) -> int:
    """Estimate the number of values by counting commas and brackets.

    If the estimate exceeds the limit, count again without those inside strings.
    """

    def count(text: bytes | bytearray) -> int:
        return sum(text.count(mark) for mark in (b",", b"[", b"{"))

    values = count(body)
    if values > MAX_BODY_VALUES:
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        if plain.count(b'"') <= 2 * MAX_BODY_VALUES:
            values = count(_TEXT.sub(b"", plain))
    return values


def parse_request(model: type[R], body: bytes | bytearray) -> R:
    """Parse and check a request. Raises ApiError 400 that names the first wrong field."""
    with _without_garbage_collection():
        return _parse(model, body)


def _parse(model: type[R], body: bytes | bytearray) -> R:
    values = parse_json(body)
    if not isinstance(values, dict):
        raise ApiError(400, f"The body is {show(values)}. It must be a JSON object.")
    for name, accepted in model.unsupported.items():
        value = values.pop(name, None)
        if accepted is not ANY:
            check_value(name, value, accepted=accepted)
    unknown = _unknown_fields(model, values)
    if unknown:
        names = ", ".join(map(show, unknown[:_MAX_NAMED]))
        logger.debug("The request has %d unknown fields, among them %s.", len(unknown), names)
    _check_sizes(values)
    _accept_whole_floats(model, values)
    try:
        request = model.model_validate(values)
    except ValidationError as error:
        raise _first_error(error, values) from None
    request._num_unknown = len(unknown)
    return request


def _unknown_fields(model: type[ApiRequest], values: dict[str, Any]) -> list[str]:
    """Return the names of the unknown fields, also of those inside `stream_options`."""
    unknown = [name for name in values if name not in model.model_fields]
    options = values.get("stream_options")
    if isinstance(options, dict) and "stream_options" in model.model_fields:
        inner = (name for name in options if name not in StreamOptions.model_fields)
        unknown += [f"stream_options.{name}" for name in inner]
    return unknown


def _accept_whole_floats(model: type[ApiRequest], values: dict[str, Any]) -> None:
    """Replace numbers such as 5.0 in integer fields. JSON does not tell them from 5."""
    for name, value in values.items():
        if type(value) is float and value.is_integer() and name in _integer_fields(model):
            values[name] = int(value)


@lru_cache(maxsize=64)
def _integer_fields(model: type[ApiRequest]) -> frozenset[str]:
    return frozenset(
        name
        for name, field in model.model_fields.items()
        if field.annotation is not None
        and {"integer"} == _numbers_of(TypeAdapter(field.annotation).json_schema())
    )


def _numbers_of(schema: dict[str, Any]) -> set[str]:
    """Return which of integer and number the alternatives of a schema are."""
    parts = schema.get("anyOf", [schema])
    return {part["type"] for part in parts if part.get("type") in ("integer", "number")}


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
    if len(same) == 1:  # the field has one type, so the error can name the item inside it
        inner = first["loc"][1:]
        path += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
        got = show(first["input"])
        if first["type"] == "too_long":
            length, limit = first["ctx"]["actual_length"], first["ctx"]["max_length"]
            message = f"{path} has {length} items. It must have at most {limit}."
            return ApiError(400, message, param=name)
    return ApiError(400, f"{path} is {got}. It must be {wanted}.", param=name)
