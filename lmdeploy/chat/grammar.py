"""④ Convert `response_format` to a mask over the vocabulary for every token, by llguidance."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import OptionError, refuse
from lmdeploy.chat.tokenizer import without_surrogates

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 1 << 17
_MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each
_MAX_REASON_CHARS = 300
_MAX_KEPT = 4  # compiled grammars of a call
# Bounded, because small models tend to write blank lines until max_tokens.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"[ \n\t]{0,16}"}

TokenMask = Callable[[Sequence[int], npt.NDArray[np.int32]], bool]


def grammar_text(response_format: dict[str, Any]) -> str | None:
    """Return the grammar in llguidance's notation, or None for {"type": "text"}.

    Raise OptionError for an unknown type, a missing part or a schema that is not an object.
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
            raise refuse("response_format.json_schema", holder, wanted=wanted)
        try:
            text = json.dumps(schema)
        except RecursionError:
            raise OptionError(
                "response_format.json_schema",
                "is nested too deep. Use a flatter schema.",
            ) from None
        _check_size("response_format.json_schema", text)
        try:
            return str(_from_schema(text, overrides=_JSON_OPTIONS))
        except ValueError as error:  # JSON that Python accepts, but the library does not
            reason = f"is not a valid schema: {_one_line(error)}."
            raise OptionError("response_format.json_schema", reason) from None
    if kind in ("regex_schema", "regex"):
        pattern = response_format.get(kind)
        if not isinstance(pattern, str) or not pattern:
            raise refuse(f"response_format.{kind}", pattern, wanted="a regular expression")
        _check_size(f"response_format.{kind}", pattern)
        return str(llguidance.LLMatcher.grammar_from_regex(without_surrogates(pattern)))
    wanted = "text, json_object, json_schema or regex_schema"
    raise refuse("response_format.type", kind, wanted=wanted)


def _check_size(name: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise OptionError(
            name,
            f"has {len(text)} characters. It must have at most {MAX_GRAMMAR_CHARS}.",
        )


class Grammar:
    """A compiled response_format. Every answer uses its own copy of the matcher."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        """Compile llguidance's notation. Raise OptionError for a bad grammar."""
        import llguidance

        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self._matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not self._matcher.is_error():
            # A grammar with too many states fails here or at its first tokens.
            self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise _failure("cannot be compiled", self._matcher)

    def token_mask(self) -> TokenMask:
        """Return the callback for one answer. It copies the matcher at its first call."""
        matcher: Any = None

        def token_mask(new_tokens: Sequence[int], mask: npt.NDArray[np.int32]) -> bool:
            nonlocal matcher
            if matcher is None:
                matcher = self._matcher.deep_copy()
            if new_tokens and not matcher.consume_tokens(list(new_tokens)):
                raise _failure("rejected a token", matcher)
            if matcher.is_stopped():
                return False
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.size * mask.itemsize)
            if matcher.is_error():
                raise _failure("failed", matcher)
            return True

        return token_mask


class Grammars:
    """The grammars of one call. Each is compiled once, and the last few are kept. Thread-safe.

    `get_tokenizer` returns llguidance's tokenizer. It is called only if it is needed.
    """

    def __init__(self, get_tokenizer: Callable[[], Any]) -> None:
        self._get_tokenizer = get_tokenizer
        self._lock = threading.Lock()
        self._kept: deque[tuple[dict[str, Any] | str, Grammar]] = deque(maxlen=_MAX_KEPT)

    def token_mask(self, wanted: dict[str, Any] | str) -> TokenMask | None:
        """Return the callback for one answer, or None for plain text.

        `wanted` is a `response_format`, or a grammar in llguidance's notation. Raise OptionError
        for a bad one.
        """
        with self._lock:
            for known, grammar in self._kept:
                if known is wanted:
                    return grammar.token_mask()
            text = wanted if isinstance(wanted, str) else grammar_text(wanted)
            if text is None:
                return None
            grammar = Grammar(text, self._get_tokenizer())
            self._kept.append((wanted, grammar))
            return grammar.token_mask()


def _failure(what: str, matcher: Any) -> OptionError:
    reason = _one_line(matcher.get_error() or "The token is outside the grammar")
    return OptionError("response_format", f"{what}: {reason}.")


def _one_line(error: object) -> str:
    text = " ".join(str(error).split("<state>")[0].split())
    return text[:_MAX_REASON_CHARS].removesuffix(".")
