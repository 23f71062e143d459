"""④ Build grammars of answers and compile them to masks over the vocabulary, by llguidance."""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from lmdeploy.base.checks import OptionError, refuse
from lmdeploy.chat.json_schemas import with_own_properties
from lmdeploy.chat.tokenizer import without_surrogates
from lmdeploy.chat.tool_calls import Tool, is_strict, parameters_of, tool_name

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARS = 1 << 17
_MAX_LEXER_STATES = 50_000  # of 1 to 2 kB each
_MAX_REASON_CHARS = 300
_MAX_KEPT = 4  # compiled grammars of a call
MAX_ANSWER_GRAMMAR_CHARS = 1 << 20
# Bounded, because small models tend to write blank lines until max_tokens.
_WHITESPACE = r"[ \n\t]{0,16}"
ANY_TEXT = "/(?s:.*)/"
# JSON bounds no number, and small models tend to write digits until max_tokens. An integer of 256
# bits has 78 digits.
_MAX_DIGITS = 80
# llguidance accepts 31 days in every month, so that dates have a regular expression of their own
# (RFC 3339, section 5.6; years from 1, as in Python's datetime).
_DATE = (
    r"((000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
    r"-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|02-(0[1-9]|1\d|2[0-8]))"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_CLOCK = r"([01]\d|2[0-3]):[0-5]\d"
_FORMATS = {
    "date": f"^{_DATE}$",
    "date-time": rf"^{_DATE}[Tt]{_CLOCK}:[0-5]\d(\.\d{{1,9}})?([Zz]|[+-]{_CLOCK})$",
}
# Keywords of a schema whose value is data, and keywords whose values are schemas by name.
_DATA = {"const", "default", "enum", "examples"}
_NAMED_SCHEMAS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
# Keywords by which a schema may allow properties that `properties` does not list.
_MORE_PROPERTIES = {
    "additionalProperties",
    "allOf",
    "anyOf",
    "if",
    "oneOf",
    "patternProperties",
    "unevaluatedProperties",
}

# Some clients send the schema where the object with its name must be.
_SCHEMA_WORDS = {"type", "properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}

TokenMask = Callable[[Sequence[int], npt.NDArray[np.int32]], bool]


def response_grammar(response_format: dict[str, Any]) -> dict[str, Any] | None:
    """Return llguidance's grammar of a `response_format`, or None for {"type": "text"}.

    Raise OptionError for an unknown type, a missing part or a schema that is not an object.
    """
    import llguidance

    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return schema_grammar({"type": "object"}, "response_format")
    if kind == "json_schema":
        holder = response_format.get("json_schema")
        if not isinstance(holder, dict):
            wanted = '{"name": ..., "schema": {...}}'
            raise refuse("response_format.json_schema", holder, wanted=wanted)
        is_schema = "schema" not in holder and not _SCHEMA_WORDS.isdisjoint(holder)
        schema = holder if is_schema else holder.get("schema")
        if not isinstance(schema, dict):
            raise refuse("response_format.json_schema.schema", schema, wanted="a JSON schema")
        return schema_grammar(schema, "response_format.json_schema")
    if kind in ("regex_schema", "regex"):
        pattern = response_format.get(kind)
        if not isinstance(pattern, str) or not pattern:
            raise refuse(f"response_format.{kind}", pattern, wanted="a regular expression")
        _check_size(f"response_format.{kind}", pattern)
        text = llguidance.LLMatcher.grammar_from_regex(without_surrogates(pattern))
        grammar: dict[str, Any] = json.loads(text)["grammars"][0]
        return grammar
    wanted = "text, json_object, json_schema or regex_schema"
    raise refuse("response_format.type", kind, wanted=wanted)


def grammar_text(response_format: dict[str, Any]) -> str | None:
    """Return the grammar of an answer that is only a `response_format`, or None for any text."""
    grammar = response_grammar(response_format)
    return None if grammar is None else json.dumps({"grammars": [grammar]})


def schema_grammar(
    schema: dict[str, Any], field: str, *, is_lenient: bool = False
) -> dict[str, Any]:
    """Return llguidance's grammar of the JSON texts that fit a schema.

    Args:
        field: the field that errors name.
        is_lenient: ignore keywords that the library does not support. Otherwise they are errors.

    Raise OptionError if the schema is too large, nested too deep or not JSON.
    """
    try:
        text = json.dumps(with_valid_dates(schema))
    except RecursionError:
        raise OptionError(field, "is nested too deep. Use a flatter schema.") from None
    _check_size(field, text)
    import llguidance

    options: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE, "lenient": is_lenient}
    try:
        whole = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)
    except ValueError as error:  # JSON that Python accepts, but the library does not
        raise OptionError(field, f"is not a valid schema: {_one_line(error)}.") from None
    grammar: dict[str, Any] = json.loads(whole)["grammars"][0]
    return grammar


def with_valid_dates(schema: Any) -> Any:
    """Return a schema in which dates have a pattern that excludes days that do not exist."""
    if isinstance(schema, list):
        return [with_valid_dates(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            result[key] = {name: with_valid_dates(part) for name, part in value.items()}
        else:
            result[key] = value if key in _DATA else with_valid_dates(value)
    name = schema.get("format")
    if (
        isinstance(name, str)
        and name in _FORMATS
        and not {"const", "enum", "pattern"} & schema.keys()
    ):
        del result["format"]
        result["pattern"] = _FORMATS[name]
    return result


def arguments_grammar(tool: Tool) -> dict[str, Any]:
    """Return the grammar of a tool's arguments.

    If the schema says nothing about further properties, they are left out, so that a weak model
    comes to an end.
    """
    schema = {"type": "object", **with_own_properties(parameters_of(tool))}
    if not _MORE_PROPERTIES & schema.keys():
        schema = {"properties": {}, **schema, "additionalProperties": False}
    return schema_grammar(
        schema, f"tools.{tool_name(tool)}.parameters", is_lenient=not is_strict(tool)
    )


def _check_size(name: str, text: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise OptionError(
            name,
            f"has {len(text)} characters. It must have at most {MAX_GRAMMAR_CHARS}.",
        )


class MarkTokenizer(Protocol):
    """The part of a tokenizer that grammars need."""

    def split_added(self, text: str) -> list[int | str]:
        """Return the ids of added tokens in a text, and the texts between them."""
        ...


class AnswerGrammar:
    """Builds the grammar of one answer from rules in llguidance's notation of Lark.

    Methods return the expression that stands for a part in other rules.
    """

    def __init__(self, tokenizer: MarkTokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []

    def literal(self, text: str) -> str:
        """Return the expression of a text without special tokens."""
        return json.dumps(text, ensure_ascii=False) if text else ""

    def mark(self, text: str) -> str:
        """Return the expression of a text in which added tokens of the model are tokens."""
        parts = self._tokenizer.split_added(text)
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else self.literal(part) for part in parts
        )

    def rule(self, body: str, *, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def recursive_rule(self, body: Callable[[str], str]) -> str:
        """Add a rule whose body may contain its name, and return this name."""
        index = len(self._rules)
        self._rules.append("")
        name = f"rule_{index}"
        self._rules[index] = f"{name}: {body(name)}"
        return name

    def free_text(self, *, without: str = "") -> str:
        """Return the expression of any text without special tokens and without a mark."""
        if not without:
            return self.rule(ANY_TEXT)
        name = f"TEXT_{len(self._rules)}"
        mark = re.escape(without).replace("/", r"\/")
        self._rules.append(f"{name}: {ANY_TEXT} & ~/(?s:.*){mark}(?s:.*)/")
        return name

    def until(self, mark: str, pattern: str = ANY_TEXT) -> str:
        """Return the expression of text up to and including the first `mark`.

        `pattern` is a regular expression for the text before the mark.
        """
        parts = self._tokenizer.split_added(mark)
        if isinstance(parts[0], int):  # free text has no added tokens, so it ends before the mark
            return f"{self.rule(pattern)} {self.mark(mark)}"
        first, rest = parts[0], mark[len(parts[0]) :]
        lazy = self.rule(pattern, attributes=f"[suffix={self.literal(first)}]")
        return f"{lazy} {self.mark(rest)}" if rest else lazy

    def embed(self, grammar: dict[str, Any]) -> str:
        """Return the expression of a grammar from `response_grammar` or `schema_grammar`."""
        name = f"grammar_{len(self._grammars)}"
        self._grammars.append({**grammar, "name": name})
        return f"@{name}"

    def text(self, start: str) -> str:
        """Return the whole grammar, in which `start` is the expression of the answer.

        Raise OptionError if it is too large.
        """
        lark = "\n".join([f"start: {start}", *self._rules])
        main = {"name": "answer", "lark_grammar": lark}
        text = json.dumps({"grammars": [main, *self._grammars]})
        if len(text) > MAX_ANSWER_GRAMMAR_CHARS:
            raise OptionError(
                "tools",
                f"make a grammar of {len(text)} characters. It must have at most "
                f"{MAX_ANSWER_GRAMMAR_CHARS}. Send fewer or smaller tools.",
            )
        return text


class Grammar:
    """A compiled grammar. Every answer uses its own copy of the matcher."""

    def __init__(self, text: str, tokenizer: Any, *, field: str = "response_format") -> None:
        """Compile llguidance's notation. Raise OptionError for a bad grammar, at `field`."""
        import llguidance

        self._field = field
        self.text = text
        self.tokenizer = tokenizer
        self.has_json = '"json_schema": {' in text  # in a string, the quotes would be escaped
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self.matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if not self.matcher.is_error():
            # A grammar with too many states fails here or at its first tokens.
            self.matcher.compute_bitmask()
        if self.matcher.is_error():
            raise self.failure("cannot be compiled", self.matcher)

    def token_mask(self) -> AnswerMask:
        """Return the callback for one answer."""
        return AnswerMask(self)

    def failure(self, what: str, matcher: Any) -> OptionError:
        """Return the error of a matcher of this grammar."""
        reason = _one_line(matcher.get_error() or "The token is outside the grammar")
        return OptionError(self._field, f"{what}: {reason}.")


class AnswerMask:
    """The callback of one answer (Request.token_mask). It copies the matcher at its first call."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher: Any = None
        self._digits = 0  # with which the answer ends

    @property
    def grammar(self) -> str:
        """Return the text of the grammar, from which another process can compile it."""
        return self._grammar.text

    def __call__(self, new_tokens: Sequence[int], mask: npt.NDArray[np.int32]) -> bool:
        """Take the new tokens and write the mask. Return False if the answer is complete."""
        if self._matcher is None:
            self._matcher = self._grammar.matcher.deep_copy()
        matcher = self._matcher
        if new_tokens and not matcher.consume_tokens(list(new_tokens)):
            raise self._grammar.failure("rejected a token", matcher)
        if matcher.is_stopped():
            return False
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.size * mask.itemsize)
        if matcher.is_error():
            raise self._grammar.failure("failed", matcher)
        if self._grammar.has_json:
            self._end_long_number(new_tokens, mask)
        return True

    def _end_long_number(self, new_tokens: Sequence[int], mask: npt.NDArray[np.int32]) -> None:
        """Allow no further digit after `_MAX_DIGITS` of them in a JSON number."""
        tokenizer = self._grammar.tokenizer
        text: bytes = tokenizer.decode_bytes(list(new_tokens))
        digits = len(text) - len(text.rstrip(b"0123456789"))
        self._digits = self._digits + digits if digits == len(text) else digits
        if self._digits < _MAX_DIGITS:
            return
        digit_tokens, quotation_marks = _digits_and_quotation_marks(tokenizer, mask.size)
        others = mask & ~digit_tokens
        # A quotation mark can follow digits in a string, but not in a number.
        if others.any() and not (mask & quotation_marks).any():
            mask[:] = others


@lru_cache(maxsize=1)
def _digits_and_quotation_marks(
    tokenizer: Any, num_words: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return masks of the tokens that are only digits, and that begin with a quotation mark.

    Every token is read, so they are only asked for when a number has become very long.
    """
    bits = np.zeros((2, num_words * 32), dtype=bool)
    for token in range(min(tokenizer.vocab_size, num_words * 32)):
        text = tokenizer.decode_bytes([token])
        bits[:, token] = text.isdigit(), text.startswith(b'"')
    digits, quotation_marks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return digits, quotation_marks


class Grammars:
    """The grammars of one call. Each is compiled once, and the last few are kept. Thread-safe.

    `get_tokenizer` returns llguidance's tokenizer. It is called only if it is needed.
    """

    def __init__(self, get_tokenizer: Callable[[], Any]) -> None:
        self._get_tokenizer = get_tokenizer
        self._lock = threading.Lock()
        self._kept: deque[tuple[str, Grammar]] = deque(maxlen=_MAX_KEPT)

    def token_mask(self, text: str, *, field: str = "response_format") -> TokenMask:
        """Return the callback for one answer. `text` is a grammar in llguidance's notation.

        Raise OptionError for a bad one, at `field`.
        """
        with self._lock:
            for known, grammar in self._kept:
                if known == text:
                    return grammar.token_mask()
            grammar = Grammar(text, self._get_tokenizer(), field=field)
            self._kept.append((text, grammar))
            return grammar.token_mask()


def _one_line(error: object) -> str:
    text = " ".join(str(error).split("<state>")[0].split())
    return text[:_MAX_REASON_CHARS].removesuffix(".")
