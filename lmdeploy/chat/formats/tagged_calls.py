"""Tool calls in which every argument is enclosed in tags of its own."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, replace

from lmdeploy.base.checks import OptionError, show
from lmdeploy.chat.formats.argument_types import (
    PYTHON_NAMES,
    argument_types,
    property_schema,
    type_of,
)
from lmdeploy.chat.formats.base import ModelInfo, Splitter, ToolCallParser
from lmdeploy.chat.formats.json_calls import call_sequence
from lmdeploy.chat.formats.reader import AnswerReader, ReadingSplitter, Step, escaped
from lmdeploy.chat.grammar import ANY_TEXT, AnswerGrammar, schema_grammar, with_valid_dates
from lmdeploy.chat.json_schemas import (
    DEFINITIONS,
    NOTES,
    UNIONS,
    Schema,
    properties_of,
    required_of,
    with_all_properties,
    with_own_properties,
)
from lmdeploy.chat.tool_calls import Tool, ToolUse, is_strict, parameters_of, tool_name

# A call that is cut into its tags. Every tag but the ends of names begins with `<`.
_EXAMPLE = re.compile(
    r"""(?P<begin> < [^<\n]* >) \n? (?P<open> (?: < [^<\n]* )?) \{name\}
    (?P<named> [^<\n]*) (?P<line> \n?) (?P<key> < [^<\n]*) \{key\}
    (?P<key_end> . [^<\n{]*) (?: \{is_string\} (?P<kind> [^<\n{]*) )?
    (?: (?P=line) (?P<value> < [^<\n{]* >) )? (?P<value_line> \n?) \{value\} (?P=value_line)
    (?P<close> < [^<\n]* >) \n? (?: (?P<shut> < [^<\n]* >) \n? )? (?P<end> < [^<\n]* >)""",
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True)
class TaggedCalls(ToolCallParser):
    """Calls whose parts are enclosed in tags, which `from_example` cuts from an example.

    A call is `begin` `open` name `named` (`key` key `key_end` text `close`)* `shut` `end`.

    Args:
        is_block: one `begin` and `end` enclose several calls. Otherwise each has its own.
        value: tag between a key and its text.
        line: line break that the model writes after tags.
        value_line: line break that it writes around values.
        kinds: ends of `key_end` that say whether the text is a string. Without them, the schema
            decides.
    """

    names: tuple[str, ...]
    begin: str
    open: str
    named: str
    line: str
    key: str
    key_end: str
    kinds: tuple[str, str] | None  # string, other
    value: str
    value_line: str
    close: str
    shut: str
    end: str
    is_block: bool
    template_marks: tuple[str, ...]

    @classmethod
    def from_example(
        cls,
        names: tuple[str, ...],
        example: str,
        *,
        is_block: bool = False,
        template_marks: tuple[str, ...],
    ) -> TaggedCalls:
        """Return the parser of calls like the example. Raise ValueError if it is not a call.

        The example calls the tool {name} with one argument, {key} and {value}. {is_string} stands
        for true or false.
        """
        if (match := _EXAMPLE.fullmatch(example)) is None:
            raise ValueError(f"{example!r} is not an example of a call.")
        tags = match.groupdict(default="")
        kind = tags.pop("kind")
        kinds = (f"true{kind}", f"false{kind}") if kind else None
        return cls(
            names=names, kinds=kinds, is_block=is_block, template_marks=template_marks, **tags
        )

    def matches(self, model: ModelInfo) -> bool:
        """Return whether the template is one of this format."""
        return model.mentions(self.template_marks)

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the tags of a call."""
        tags = (
            self.begin,
            self.end,
            self.open,
            self.key,
            self.key_end,
            self.value,
            self.close,
            self.shut,
        )
        return tuple(filter(None, tags))

    def splitter(self, tool_use: ToolUse) -> Splitter:
        """Return an object that splits text into content and tool calls."""
        schemas = {tool_name(tool): _object_schema(tool) for tool in tool_use.tools}
        return ReadingSplitter(lambda reader: self._read(reader, schemas))

    # Reading.

    def _read(self, reader: AnswerReader, schemas: dict[str, Schema]) -> Step[None]:
        while (yield from reader.content_until((self.begin,))):
            is_whole = yield from self._read_call(reader, schemas)
            while is_whole and self.is_block:
                yield from reader.skip_space()
                if (yield from reader.next_char()) != self.open[0]:
                    break
                if (yield from reader.accept(self.end)):
                    break
                is_whole = yield from self._read_call(reader, schemas)
            reader.finish_attempt(is_whole)
            if is_whole:
                yield from reader.opens_with(self.end)

    def _read_call(self, reader: AnswerReader, schemas: dict[str, Schema]) -> Step[bool]:
        yield from reader.skip_space()
        if not (yield from reader.accept(self.open)):
            return False
        pieces: list[str] = []
        if self.named:
            if not (yield from reader.text_until(self.named, pieces.append)):
                return False
        else:
            pieces.append((yield from reader.word(_TEXT_WITHOUT_TAGS)))
        name = "".join(pieces).strip()
        if not name or len(name) > _MAX_NAME_CHARS:
            return False
        reader.begin_call(name)
        schema = schemas.get(name, {})
        num_arguments = 0
        while True:
            yield from reader.skip_space()
            if not (yield from reader.accept(self.key)):
                break
            reader.add_arguments(", " if num_arguments else "{")
            num_arguments += 1
            if not (yield from self._read_argument(reader, schema)):
                return False
        reader.add_arguments("}" if num_arguments else "{}")
        if self.shut:
            return (yield from reader.accept(self.shut))
        return True

    def _read_argument(self, reader: AnswerReader, schema: Schema) -> Step[bool]:
        pieces: list[str] = []
        if not (yield from reader.text_until(self.key_end, pieces.append)):
            reader.add_arguments("".join(pieces))
            return False
        key = "".join(pieces).strip()
        reader.add_arguments(json.dumps(key, ensure_ascii=False) + ": ")
        types = argument_types(schema, key)
        if self.kinds is not None:
            is_string = yield from reader.accept(self.kinds[0])
            if not is_string and not (yield from reader.accept(self.kinds[1])):
                return False
            types = {"string"} if is_string else {"object"}
        elif self.value and not (yield from reader.opens_with(self.value)):
            return False
        if types == {"string"}:
            return (yield from self._read_string(reader))
        text: list[str] = []
        is_whole = yield from reader.text_until(self.close, text.append)
        reader.add_arguments(json_of("".join(text).strip(), types))
        return is_whole

    def _read_string(self, reader: AnswerReader) -> Step[bool]:
        """Pass a string on as JSON while it arrives, without the line breaks around it."""
        if self.value_line:
            yield from reader.accept(self.value_line)
        held = ""

        def emit(text: str) -> None:
            nonlocal held
            text = held + text
            held = self.value_line if self.value_line and text.endswith(self.value_line) else ""
            reader.add_arguments(escaped(text[: len(text) - len(held)]))

        reader.add_arguments('"')
        is_whole = yield from reader.text_until(self.close, emit)
        if not is_whole:
            reader.add_arguments(escaped(held))
        reader.add_arguments('"')
        return is_whole

    # Grammar.

    def grammar(self, tool_use: ToolUse, grammar: AnswerGrammar) -> str:
        """Return the expression of calls, or of text with calls."""
        line, end = grammar.literal(self.line), grammar.mark(self.end)
        first = line if self.open else ""
        calls = [self._call_rule(tool, grammar) for tool in tool_use.callable]
        if not self.is_block:
            bodies = [f"{call} {line} {end}" if self.shut else f"{call} {end}" for call in calls]
            bodies = [f"{first} {body}" for body in bodies]
            return call_sequence(
                tool_use, grammar, begin=self.begin, bodies=bodies, separator=self.line
            )
        call = grammar.rule(" | ".join(f"{call} {line}" for call in calls))
        repeat = "{1,16}" if tool_use.is_parallel else ""
        body = f"{first} {call}{repeat} {end}"
        alone = replace(tool_use, is_parallel=False)
        return call_sequence(alone, grammar, begin=self.begin, bodies=[body], separator="")

    def _call_rule(self, tool: Tool, grammar: AnswerGrammar) -> str:
        schema = _object_schema(tool)
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        parts = [grammar.mark(self.open + tool_name(tool) + self.named), grammar.literal(self.line)]
        properties = schema.get("properties")
        for key in properties if isinstance(properties, dict) else ():
            part = f"{self._argument_rule(tool, key, grammar=grammar)} {grammar.literal(self.line)}"
            parts.append(part if key in required else f"({part})?")
        return grammar.rule(" ".join([*parts, grammar.mark(self.shut)]))

    def _argument_rule(self, tool: Tool, key: str, *, grammar: AnswerGrammar) -> str:
        parameters = _object_schema(tool)
        schema = property_schema(parameters, key)
        is_string = argument_types(parameters, key) == {"string"}
        kind = "" if self.kinds is None else self.kinds[0 if is_string else 1]
        gap = self.line if self.value else ""
        head = grammar.mark(
            self.key + key + self.key_end + gap + self.value + kind + self.value_line
        )
        close = self.value_line + self.close
        field = f"tools.{tool_name(tool)}.parameters"
        if is_string:
            name = f"{field}.{key}" if is_strict(tool) else None
            return f"{head} {any_string_rule(schema, grammar, close=close, strict_field=name)}"
        value = grammar.embed(schema_grammar(schema, field, is_lenient=not is_strict(tool)))
        return f"{head} {value} {grammar.mark(close)}"


def _object_schema(tool: Tool) -> Schema:
    """Return the arguments of a tool as properties of one object.

    Raise OptionError for a strict schema that says more than which properties there are.
    """
    schema = with_own_properties(parameters_of(tool))
    if is_strict(tool):
        field = f"tools.{tool_name(tool)}.parameters"
        _check_keywords(schema, _OF_OBJECTS, field=field)
        for key in required_of(schema):
            if key not in properties_of(schema):
                raise _refusal(field, f"requires {show(key)}, which is not among its properties")
    return with_all_properties(schema)


# Keywords of strict schemas that the grammar of a call enforces. What it leaves out, such as
# properties without a schema, never occurs.
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "patternProperties"}
_OF_STRINGS = ({"enum"}, {"const"}, {"pattern"}, {"minLength", "maxLength"})  # one of these
_MAX_NAME_CHARS = 256
_MAX_LITERAL_CHARS = 1 << 14
_TEXT_WITHOUT_TAGS = re.compile(r"[^<\n]*")


def json_of(text: str, types: set[str]) -> str:
    """Return the JSON of an argument that the model wrote as text.

    Some templates write objects and arrays as Python does. Text that is not JSON of one of the
    types becomes a string.
    """
    candidate = PYTHON_NAMES.get(text, text)
    try:
        value = json.loads(candidate)
    except (ValueError, RecursionError):
        candidate = _json_of_python(text)
        if not candidate:
            return json.dumps(text, ensure_ascii=False)
        value = json.loads(candidate)
    if "string" in types and type_of(value) not in types:
        return json.dumps(text, ensure_ascii=False)
    return candidate


def _json_of_python(text: str) -> str:
    """Return the JSON of a Python literal of an object or array, or "" for other text."""
    if not text.startswith(("{", "[")) or len(text) > _MAX_LITERAL_CHARS:
        return ""
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False)
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return ""


def any_string_rule(
    schema: Schema, grammar: AnswerGrammar, *, close: str, strict_field: str | None = None
) -> str:
    """Return the expression of a string that fits a schema, up to and including `close`.

    References and combined schemas are followed. With `strict_field`, raise OptionError, which
    names this field, for a keyword that cannot be enforced. Otherwise it is ignored.
    """
    schema = with_own_properties(with_valid_dates(schema))
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    for word in UNIONS:
        parts = schema.get(word)
        if isinstance(parts, list) and parts:
            rules = [
                any_string_rule(
                    {**definitions, **part}, grammar, close=close, strict_field=strict_field
                )
                for part in parts
                if isinstance(part, dict)
            ]
            return f"({' | '.join(rules)})"
    if strict_field is not None:
        chosen = next((words for words in _OF_STRINGS if words & schema.keys()), set())
        _check_keywords(schema, {"type", *chosen}, field=strict_field)
    return string_rule(schema, grammar, close=close)


def string_rule(schema: Schema, grammar: AnswerGrammar, *, close: str) -> str:
    """Return the expression of a string that fits a plain schema, with `close`."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        texts = " | ".join(grammar.literal(str(choice)) or '""' for choice in choices)
        return f"({texts}) {grammar.mark(close)}"
    return grammar.until(close, _pattern(schema))


def _check_keywords(schema: Schema, allowed: set[str], *, field: str) -> None:
    unknown = sorted(schema.keys() - allowed - NOTES)
    if unknown:
        raise _refusal(field, f"has {unknown[0]}")


def _refusal(field: str, problem: str) -> OptionError:
    return OptionError(
        field,
        f"{problem}. The call format of this model cannot enforce that. Remove it, or send the "
        "tool without strict.",
    )


def _pattern(schema: Schema) -> str:
    """Return the regular expression of a string that fits `pattern`, or the limits of length."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        head = "" if pattern.startswith("^") else "(?s:.*)"
        tail = "" if pattern.endswith("$") else "(?s:.*)"
        body = pattern.removeprefix("^").removesuffix("$").replace("/", r"\/")
        return f"/{head}({body}){tail}/"
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    if type(shortest) is int and type(longest) in (int, type(None)) and (shortest or longest):
        return f"/(?s:.{{{shortest},{'' if longest is None else longest}}})/"
    return ANY_TEXT
