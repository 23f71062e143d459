"""The chat format of models whose answers are text, with optional reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmdeploy.chat.detokenize import TokenDetokenizer
from lmdeploy.chat.formats.base import (
    NO_PARSER,
    AnswerStart,
    CallsInside,
    Delta,
    ReasoningParser,
    RenderedPrompt,
    Splitter,
    ToolCallParser,
)
from lmdeploy.chat.grammar import AnswerGrammar
from lmdeploy.chat.messages import check_messages, is_continued
from lmdeploy.chat.tool_calls import Tool

if TYPE_CHECKING:
    from lmdeploy.chat.templates.prompt_template import PromptTemplate
    from lmdeploy.chat.tokenizer import Tokenizer


class TextDecoder:
    """An AnswerDecoder that passes the text through splitters, one after the other."""

    def __init__(self, text: TokenDetokenizer, splitters: Sequence[Splitter] = ()) -> None:
        self._text = text
        self._splitters = splitters
        self._aside = Delta()
        self.num_tool_calls = 0
        self.num_broken_calls = 0

    @property
    def splits(self) -> bool:
        """Return whether text of the answer may be reasoning or tool calls."""
        return bool(self._splitters)

    def push(self, token: int) -> str:
        """Return the content that `token` completes."""
        return self._split(self._text.push(token))

    def push_all(self, tokens: Sequence[int]) -> str:
        """Return the content that tokens complete."""
        return self._split(self._text.push_all(tokens))

    @property
    def num_open(self) -> int:
        """Return how many of the newest tokens wait for the end of a character.

        REQUIRES: all tokens came by `push_all`.
        """
        return self._text.num_open

    @property
    def pending(self) -> bool:
        """Return whether an incomplete character is held back."""
        return self._text.pending

    def finish(self) -> str:
        """Return the rest of the content."""
        return self._split(self._text.finish(), is_last=True)

    def take_aside(self) -> Delta:
        """Return reasoning and parts of tool calls since the last call."""
        aside, self._aside = self._aside, Delta()
        return aside

    def _split(self, text: str, *, is_last: bool = False) -> str:
        for splitter in self._splitters:
            delta = splitter.push(text)
            if is_last:
                delta.add(splitter.finish())
            text, delta.content = delta.content, ""
            self._aside.add(delta)
            self.num_broken_calls += delta.num_broken_calls
            for call in delta.tool_calls:
                self.num_tool_calls = max(self.num_tool_calls, call.index + 1)
        return text


@dataclass(frozen=True)
class TextFormat:
    """A ChatFormat that renders prompts by the checkpoint's template and reads answers as text."""

    tokenizer: Tokenizer
    reasoning: ReasoningParser | None = None
    tools: ToolCallParser | None = None

    @property
    def name(self) -> str:
        """Return the names of the parts, or "plain"."""
        parts = [name for name in self.parser_names if name != NO_PARSER]
        return " and ".join(dict.fromkeys(parts)) or "plain"

    @property
    def parser_names(self) -> tuple[str, str]:
        """Return the names of the parts. "none" means that there is no part."""
        reasoning = NO_PARSER if self.reasoning is None else self.reasoning.names[0]
        return reasoning, NO_PARSER if self.tools is None else self.tools.names[0]

    @property
    def splits_answers(self) -> bool:
        """Return whether there is a reasoning or a tool-call part."""
        return self.reasoning is not None or self.tools is not None

    @property
    def accepts_tools(self) -> bool:
        """Return whether there is a tool-call part."""
        return self.tools is not None

    def render(
        self,
        template: PromptTemplate,
        messages: Any,
        *,
        tools: Sequence[Tool],
        options: dict[str, Any],
    ) -> RenderedPrompt:
        """Check messages and render them by the template."""
        checked = check_messages(messages, accept_tools=self.tools is not None)
        continues = is_continued(checked) and checked[-1]["content"] != ""
        if self.tools is not None:
            checked, tools = self.tools.prepare(checked, tools)
        if tools:
            options = {**options, "tools": tools}
        text = template.render(checked, _with_effort(options))
        continues = template.continue_final_message or continues
        return RenderedPrompt([text], template.add_special, continues)

    def constrained_prefix(self) -> list[int]:
        """Return nothing: content needs no opening."""
        return []

    def grammar(self, start: AnswerStart, response: dict[str, Any] | None) -> str | None:
        """Return the grammar of the reasoning, followed by that of the response or of calls."""
        grammar = AnswerGrammar(self.tokenizer)
        tool_use = None if self.tools is None else start.tool_use
        if response is None and (tool_use is None or not tool_use.is_constrained):
            return None
        answers = []
        if response is not None and (tool_use is None or not tool_use.is_required):
            answers.append(grammar.embed(response))
        if self.tools is not None and tool_use is not None:
            if response is not None:
                tool_use = replace(tool_use, is_required=True)
            answers.append(self.tools.grammar(tool_use, grammar))
        answer = grammar.rule(" | ".join(answers)) if len(answers) > 1 else answers[0]
        before = "" if self.reasoning is None else self.reasoning.grammar(start, grammar)
        return grammar.text(f"{before} {answer}")

    def decoder(self, start: AnswerStart, *, skip_special: bool, constrained: bool) -> TextDecoder:
        """Return a decoder. Splitters see the special tokens that they look for."""
        splitters: list[Splitter] = []
        marks: tuple[str, ...] = ()
        calls = None if constrained else self._calls(start)
        if self.reasoning is not None:
            has_mark = calls is not None and calls.mark
            splitters.append(
                self.reasoning.splitter(start._replace(calls=calls if has_mark else None))
            )
            marks += self.reasoning.marks
        if self.tools is not None and calls is not None:
            splitters.append(calls.splitter())
            marks += self.tools.marks
        parts = [part for mark in marks for part in self.tokenizer.split_added(mark)]
        text = TokenDetokenizer(
            self.tokenizer,
            skip_special,
            begins_text=not start.continue_final_message,
            shown=frozenset(part for part in parts if isinstance(part, int)),
        )
        return TextDecoder(text, splitters)

    def _calls(self, start: AnswerStart) -> CallsInside | None:
        tools, tool_use = self.tools, start.tool_use
        if tools is None or tool_use is None:
            return None
        return CallsInside("".join(tools.marks[:1]), lambda: tools.splitter(tool_use))

    def with_reasoning(self, parser: ReasoningParser) -> TextFormat:
        """Return this format with another reasoning part."""
        return replace(self, reasoning=parser)

    def with_tools(self, parser: ToolCallParser) -> TextFormat:
        """Return this format with another tool-call part."""
        return replace(self, tools=parser)


def _with_effort(options: dict[str, Any]) -> dict[str, Any]:
    """Let a `reasoning_effort` of "none" turn thinking off in templates with a switch for it."""
    if options.get("reasoning_effort") == "none":
        return {"enable_thinking": False, "thinking": False, **options}
    return options
