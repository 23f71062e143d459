"""The chat format of models whose answers are text, with optional reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmdeploy.chat.detokenize import TokenDetokenizer
from lmdeploy.chat.formats.base import (
    AnswerStart,
    Delta,
    ReasoningParser,
    RenderedPrompt,
    Splitter,
    Tool,
    ToolCallParser,
)
from lmdeploy.chat.messages import check_messages, is_continued
from lmdeploy.chat.tool_calls import check_tools

if TYPE_CHECKING:
    from lmdeploy.chat.template import PromptTemplate
    from lmdeploy.chat.tokenizer import Tokenizer


class TextDecoder:
    """An AnswerDecoder that passes the text through splitters, one after the other."""

    def __init__(self, text: TokenDetokenizer, splitters: Sequence[Splitter] = ()) -> None:
        self._text = text
        self._splitters = splitters
        self._aside = Delta()
        self.num_tool_calls = 0

    def push(self, token: int) -> str:
        """Return the content that `token` completes."""
        return self._split(self._text.push(token))

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
        parts = [part.names[0] for part in (self.reasoning, self.tools) if part is not None]
        return " and ".join(dict.fromkeys(parts)) or "plain"

    @property
    def splits_answers(self) -> bool:
        """Return whether there is a reasoning or a tool-call part."""
        return self.reasoning is not None or self.tools is not None

    @property
    def accepts_tools(self) -> bool:
        """Return whether there is a tool-call part."""
        return self.tools is not None

    def check_options(self, options: dict[str, Any], *, tool_choice: Any) -> dict[str, Any]:
        """Check `tools`; a `tool_choice` of "none" hides them from the template."""
        tools = check_tools(options.get("tools"))
        rest = {name: value for name, value in options.items() if name != "tools"}
        return {**rest, "tools": tools} if tools and tool_choice != "none" else rest

    def render(
        self, template: PromptTemplate, messages: Any, *, options: dict[str, Any]
    ) -> RenderedPrompt:
        """Check messages and render them by the template."""
        checked = check_messages(messages, accept_tools=self.splits_answers)
        if self.tools is not None:
            checked = self.tools.prepare(checked)
        text = template.render(checked, options)
        continues = template.continue_final_message or (
            is_continued(checked) and checked[-1]["content"] != ""
        )
        return RenderedPrompt([text], template.add_special, continues)

    def tool_grammar(self, tools: Sequence[Tool], tool_choice: Any) -> str | None:
        """Return the tool-call part's grammar."""
        return None if self.tools is None else self.tools.grammar(tools, tool_choice)

    def constrained_prefix(self) -> list[int]:
        """Return nothing: content needs no opening."""
        return []

    def decoder(self, start: AnswerStart, *, skip_special: bool, constrained: bool) -> TextDecoder:
        """Return a decoder. Splitters parse text, so their text includes special tokens."""
        text = TokenDetokenizer(
            self.tokenizer,
            skip_special and not self.splits_answers,
            begins_text=not start.continue_final_message,
        )
        splitters: list[Splitter] = []
        if self.reasoning is not None:
            splitters.append(self.reasoning.splitter(start))
        if self.tools is not None:
            splitters.append(self.tools.splitter())
        return TextDecoder(text, splitters)

    def with_reasoning(self, parser: ReasoningParser) -> TextFormat:
        """Return this format with another reasoning part."""
        return replace(self, reasoning=parser)

    def with_tools(self, parser: ToolCallParser) -> TextFormat:
        """Return this format with another tool-call part."""
        return replace(self, tools=parser)
