"""The grammar of arguments in the notation of Gemma, made from the JSON schema of a tool."""

from __future__ import annotations

import json
import re
from typing import Any

from lmdeploy.base.checks import OptionError, show
from lmdeploy.chat.formats.argument_types import type_of
from lmdeploy.chat.formats.tagged_calls import string_rule
from lmdeploy.chat.grammar import AnswerGrammar, schema_grammar, with_valid_dates
from lmdeploy.chat.json_schemas import NOTES, Schema, merge, resolve, with_own_properties
from lmdeploy.chat.tool_calls import Tool, is_strict, parameters_of, tool_name

_MAX_ITEMS = 256  # that minItems and maxItems may say
_BARE_KEY = re.compile(r"[\w.$-]+( [\w.$-]+)*")
_TYPES = ("string", "number", "boolean", "null", "array", "object")
# Keywords that may be ignored because they only allow more, besides those that only describe.
_NOTES = {*NOTES, "additionalProperties"}
_KEYWORDS = {
    "string": {"pattern", "minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required"},
}


class ArgumentRules:
    """Adds the rules for the arguments of one tool to a grammar.

    Whatever the grammar allows fits the schema. It does not allow all that fits: properties come in
    the order of their names, as in the prompt, and those that the schema does not list are left
    out.
    """

    def __init__(self, tool: Tool, grammar: AnswerGrammar, *, quote: str) -> None:
        self._field = f"tools.{tool_name(tool)}.parameters"
        self._is_strict = is_strict(tool)
        self._root = parameters_of(tool)
        self._grammar = grammar
        self._quote = grammar.mark(quote)
        self._close = quote
        self._known: dict[str, str] = {}  # expressions by reference, or by the JSON of a schema

    def arguments(self) -> str:
        """Return the expression of all arguments, with the braces.

        Raise OptionError for a schema that cannot be enforced.
        """
        try:
            schema = self._root = with_own_properties(with_valid_dates(self._root))
            if not {"anyOf", "oneOf", "enum", "const"} & schema.keys():
                schema = {**schema, "type": "object", "properties": schema.get("properties") or {}}
            return self._value(schema)
        except RecursionError:
            raise OptionError(self._field, "is nested too deep. Use a flatter schema.") from None

    def _value(self, schema: Any) -> str:
        """Return the expression of a value that fits a schema."""
        if schema is not True and not isinstance(schema, dict):
            raise self._refusal(f"contains {show(schema)} where a schema must be")
        if schema is True or schema.keys() <= _NOTES:
            return self._once("{}", {"type": list(_TYPES)})
        return self._grammar.rule(self._body(schema))

    def _once(self, key: str, schema: Schema) -> str:
        """Return the name of the rule of a schema that may occur several times or in itself."""

        def body(name: str) -> str:
            self._known[key] = name
            return self._body(schema)

        return self._known.get(key) or self._grammar.recursive_rule(body)

    def _body(self, schema: Schema) -> str:
        if "allOf" in schema:
            schema = merge(schema, self._root)
        for key, write in (
            ("$ref", self._reference),
            ("anyOf", self._any_of),
            ("oneOf", self._any_of),
        ):
            if key in schema:
                self._check_keywords(schema, {key})
                return write(schema[key])
        if "const" in schema or "enum" in schema:
            self._check_keywords(schema, {"const", "enum", "type"})
            return self._choices(schema)
        kinds = schema.get("type", _implied_types(schema))
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds:
            raise self._refusal(f"has the type {show(kinds)}")
        return " | ".join(self._of_type(kind, schema) for kind in kinds)

    def _of_type(self, kind: Any, schema: Schema) -> str:
        if kind in ("integer", "number", "boolean", "null"):
            return self._scalar({**schema, "type": kind})
        if not isinstance(kind, str) or kind not in _KEYWORDS:
            raise self._refusal(f"has the type {show(kind)}")
        others = set().union(*_KEYWORDS.values()) - _KEYWORDS[kind]
        own = {key: value for key, value in schema.items() if key not in others}
        self._check_keywords(own, {"type", *_KEYWORDS[kind]})
        if kind == "string":
            return f"{self._quote} {string_rule(own, self._grammar, close=self._close)}"
        return self._array(own) if kind == "array" else self._object(own)

    def _scalar(self, schema: Schema) -> str:
        schema = {key: value for key, value in schema.items() if key not in _NOTES}
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            part = schema_grammar(schema, self._field, is_lenient=not self._is_strict)
            self._known[key] = self._grammar.embed(part)
        return self._known[key]

    def _array(self, schema: Schema) -> str:
        least, most = schema.get("minItems") or 0, schema.get("maxItems")
        for bound in (least, most):
            if bound is not None and not (type(bound) is int and 0 <= bound <= _MAX_ITEMS):
                raise self._refusal(f"has the bound {show(bound)} of a list")
        if most is not None and most < least:
            raise self._refusal("has a list whose minItems exceeds its maxItems")
        if most == 0:
            return '"[]"'
        item = self._value(schema.get("items", {}))
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, schema: Schema) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise self._refusal("has properties or required of a wrong type")
        properties = {**{key: {} for key in required if isinstance(key, str)}, **properties}
        if not properties:
            more = False if "properties" in schema else schema.get("additionalProperties", True)
            return '"{}"' if more is False else self._mapping(more)
        # From the last to the first: what may follow another property, and what may come first.
        after, first = '"}"', '"}"'
        for key in sorted(properties, key=str.lower, reverse=True):
            item = f"{self._key(key)} {self._value(properties[key])}"
            is_required = key in required
            first = self._grammar.rule(f"{item} {after}" + ("" if is_required else f" | {first}"))
            after = self._grammar.rule(
                f'"," {item} {after}' + ("" if is_required else f" | {after}")
            )
        return f'"{{" {first}'

    def _mapping(self, values: Any) -> str:
        item = f'/[A-Za-z_][A-Za-z_0-9]{{0,63}}/ ":" {self._value(values)}'
        return f'"{{" ({item} ("," {item})*)? "}}"'

    def _key(self, key: str) -> str:
        if _BARE_KEY.fullmatch(key):
            return self._grammar.literal(f"{key}:")
        return f'{self._text(key)} ":"'

    def _reference(self, reference: Any) -> str:
        schema = resolve(reference, self._root)
        if not isinstance(schema, dict):
            raise self._refusal(f"has the reference {show(reference)}")
        return self._once(reference, schema)

    def _any_of(self, schemas: Any) -> str:
        if not isinstance(schemas, list) or not schemas:
            raise self._refusal("has anyOf or oneOf without a list")
        return " | ".join(self._value(schema) for schema in schemas)

    def _choices(self, schema: Schema) -> str:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        kinds = schema.get("type", [*_TYPES, "integer"])
        if not isinstance(kinds, (str, list)):
            raise self._refusal(f"has the type {show(kinds)}")
        kinds = {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds}
        if "number" in kinds:
            kinds.add("integer")
        fitting = [v for v in values if type_of(v) in kinds] if isinstance(values, list) else []
        if not fitting:
            raise self._refusal("has enum or const without a value of its type")
        return " | ".join(map(self._constant, fitting))

    def _constant(self, value: Any) -> str:
        kind = type_of(value)
        if kind == "string":
            return self._text(value)
        if kind not in ("array", "object"):
            return self._grammar.literal(json.dumps(value))
        if kind == "array":
            parts = [self._constant(item) for item in value]
        else:
            parts = [f"{self._key(key)} {self._constant(value[key])}" for key in sorted(value)]
        opening, closing = ('"["', '"]"') if kind == "array" else ('"{"', '"}"')
        return " ".join([opening, ' "," '.join(parts), closing])

    def _text(self, text: str) -> str:
        if self._close in text:
            raise self._refusal(f"contains the text {show(text)}")
        return f"{self._quote} {self._grammar.literal(text)} {self._quote}"

    def _check_keywords(self, schema: Schema, allowed: set[str]) -> None:
        """Refuse other keywords in a strict schema. A lenient one ignores them."""
        unknown = schema.keys() - allowed - _NOTES
        if self._is_strict and unknown:
            raise self._refusal(f"combines {sorted(unknown)[0]} with {sorted(allowed)[0]}")

    def _refusal(self, problem: str) -> OptionError:
        return OptionError(
            self._field, f"{problem}. The call format of this model cannot enforce that."
        )


def _implied_types(schema: Schema) -> list[str]:
    """Return the types of a schema that does not name one."""
    implied = [kind for kind, words in _KEYWORDS.items() if words & schema.keys()]
    return implied or list(_TYPES)
