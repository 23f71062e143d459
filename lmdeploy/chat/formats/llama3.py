"""The tool calls of Llama 3: the whole answer is one JSON object, or several."""

from __future__ import annotations

from lmdeploy.chat.formats.base import ModelInfo, Splitter, ToolCallParser
from lmdeploy.chat.formats.json_calls import json_call_rules, read_json_call
from lmdeploy.chat.formats.reader import AnswerReader, ReadingSplitter, Step
from lmdeploy.chat.grammar import AnswerGrammar
from lmdeploy.chat.tool_calls import ToolUse, tool_name

_PYTHON_TAG = "<|python_tag|>"


class Llama3Calls(ToolCallParser):
    """Calls of the form {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>.

    An answer that begins with an object is content unless the object names a tool.
    """

    names = ("llama3", "llama3_json")
    marks = (_PYTHON_TAG,)

    def matches(self, model: ModelInfo) -> bool:
        """Return whether the template is that of Llama 3.1 or later."""
        return model.mentions(("<|start_header_id|>", "ipython", '"parameters": '))

    def splitter(self, tool_use: ToolUse) -> Splitter:
        """Return an object that splits text into content and tool calls."""
        known = {tool_name(tool) for tool in tool_use.tools}
        return ReadingSplitter(lambda reader: self._read(reader, known))

    def grammar(self, tool_use: ToolUse, grammar: AnswerGrammar) -> str:
        """Return the expression of one call, or of text that does not begin like a call."""
        rules = json_call_rules(tool_use, grammar, arguments_key="parameters")
        call = grammar.rule(" | ".join(rules))
        if tool_use.is_required:
            return call
        other = grammar.rule(r"/[^{](?s:.*)/")
        return f"({call} | {other})?"

    @staticmethod
    def _read(reader: AnswerReader, known: set[str]) -> Step[None]:
        named: list[str] = []

        def accepts(name: str) -> bool:
            named.extend(known & {name})
            return name in known

        is_first = True
        while True:
            named.clear()
            reader.begin_attempt()
            yield from reader.skip_space()
            if not is_first and (yield from reader.accept(";")):
                yield from reader.skip_space()
            has_tag = yield from reader.accept(_PYTHON_TAG)
            if not has_tag and (yield from reader.next_char()) != "{":
                reader.give_up()
                break
            is_whole = yield from read_json_call(reader, accepts=accepts)
            if not (is_whole or has_tag or named):
                reader.give_up()  # the object is the content
                break
            reader.finish_attempt(is_whole)
            if not is_whole:
                break
            is_first = False
        yield from reader.pass_on()
