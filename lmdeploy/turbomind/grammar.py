"""④ `response_format` → a mask over the vocabulary before every token, by llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmdeploy.checks import refuse

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 1 << 17
_MAX_LEXER_STATES = 50_000  # about 1 to 2 kB each
_MAX_REASON_CHARS = 300
# Bounded: small models like to go on with blank lines until max_tokens.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \n\t]{0,16}"}

TokenMask = Callable[[Sequence[int], npt.NDArray[np.int32]], bool]


def grammar_text(response_format: dict[str, Any]) -> str | None:
    """The grammar in llguidance's notation; None for {"type": "text"}.

    Raises ValueError for an unknown type, a missing part or a schema that is not an object.
    """
    import llguidance

    _from_schema = llguidance.LLMatcher.grammar_from_json_schema
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return str(_from_schema('{"type": "object"}', overrides=_JSON_OPTIONS))
    if kind == "json_schema":
        holder = response_format.get("json_schema")
        schema = holder.get("schema", holder) if isinstance(holder, dict) else None
        if not isinstance(schema, dict):
            wanted = '{"name": ..., "schema": {...}}'
            raise refuse(
                "response_format.json_schema", holder, wanted=wanted, flag="response_format"
            )
        text = json.dumps(schema)
        _check_size("response_format.json_schema", text)
        return str(_from_schema(text, overrides=_JSON_OPTIONS))
    if kind in ("regex_schema", "regex"):
        pattern = response_format.get(kind)
        if not isinstance(pattern, str) or not pattern:
            raise refuse(f"response_format.{kind}", pattern, wanted="a regular expression")
        _check_size(f"response_format.{kind}", pattern)
        return str(llguidance.LLMatcher.grammar_from_regex(pattern))
    wanted = "text, json_object, json_schema or regex_schema"
    raise refuse("response_format.type", kind, wanted=wanted, flag="response_format")


def _check_size(name: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ValueError(
            f"{name}: got {len(text)} characters, wanted at most {MAX_GRAMMAR_CHARS}; "
            f"change response_format"
        )


def make_token_mask(
    get_tokenizer: Callable[[], Any], response_format: dict[str, Any]
) -> TokenMask | None:
    """The callback for one request, None for plain text. ValueError for a bad grammar.

    `get_tokenizer` gives llguidance's tokenizer and is called only when it is needed.
    """
    import llguidance

    grammar = grammar_text(response_format)
    if grammar is None:
        return None
    limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
    matcher = llguidance.LLMatcher(get_tokenizer(), grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # a grammar that explodes shows here or at its first tokens
    if matcher.is_error():
        raise ValueError(f"response_format: {_reason(matcher)}; change response_format")

    def token_mask(new_tokens: Sequence[int], mask: npt.NDArray[np.int32]) -> bool:
        if new_tokens and not matcher.consume_tokens(list(new_tokens)):
            raise ValueError(f"response_format: {_reason(matcher)}")
        if matcher.is_stopped():
            return False
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.size * mask.itemsize)
        if matcher.is_error():
            raise ValueError(f"response_format: {_reason(matcher)}")
        return True

    return token_mask


def _reason(matcher: Any) -> str:
    text = str(matcher.get_error() or "a token outside the grammar")
    return " ".join(text.split("<state>")[0].split())[:_MAX_REASON_CHARS]
