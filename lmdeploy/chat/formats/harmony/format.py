"""Harmony as a chat format: the parser for the registry, and the ChatFormat of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmdeploy.chat.formats.base import (
    AnswerStart,
    ChatFormat,
    ModelInfo,
    Parser,
    ReasoningParser,
    RenderedPrompt,
    ToolCallParser,
)
from lmdeploy.chat.formats.harmony.parser import HarmonyDecoder
from lmdeploy.chat.formats.harmony.tokens import HarmonyTokens
from lmdeploy.chat.grammar import AnswerGrammar, arguments_grammar
from lmdeploy.chat.tool_calls import Tool, ToolUse, tool_name

if TYPE_CHECKING:
    from lmdeploy.chat.templates.prompt_template import PromptTemplate
    from lmdeploy.chat.tokenizer import Tokenizer

_NAME = "gpt-oss"  # as in LMDeploy
_MODEL_TYPE = "gpt_oss"


class Harmony(Parser):
    """Both parts of GPT-OSS's chat format."""

    names = (_NAME,)

    def matches(self, model: ModelInfo) -> bool:
        """Return whether the model is GPT-OSS."""
        return model.model_type == _MODEL_TYPE

    def extend(self, chat_format: ChatFormat, model: ModelInfo) -> ChatFormat:
        """Return Harmony, which has both parts. Raise ValueError if another format has a part."""
        if chat_format.name == _NAME:
            return chat_format
        if chat_format.splits_answers:
            raise _excluded(chat_format.name)
        return HarmonyFormat(model.tokenizer, HarmonyTokens.of(model.tokenizer))


@dataclass(frozen=True)
class HarmonyFormat:
    """A ChatFormat for a tokenizer that has Harmony's special tokens."""

    tokenizer: Tokenizer
    tokens: HarmonyTokens
    name: str = _NAME
    parser_names: tuple[str, str] = (_NAME, _NAME)
    splits_answers: bool = True
    accepts_tools: bool = True

    def render(
        self,
        template: PromptTemplate,
        messages: Any,
        *,
        tools: Sequence[Tool],
        options: dict[str, Any],
    ) -> RenderedPrompt:
        """Render by the template. The assistant always begins another message."""
        from lmdeploy.chat.formats.harmony.rendering import render_prompt

        return RenderedPrompt(render_prompt(template, messages, tools=tools, options=options))

    def constrained_prefix(self) -> list[int]:
        """Return the tokens that open the channel `final`."""
        return self.tokens.begin_final(self.tokenizer)

    def grammar(self, start: AnswerStart, response: dict[str, Any] | None) -> str | None:
        """Return the grammar of the response, or of messages with calls that fit their schemas."""
        grammar, tool_use = AnswerGrammar(self.tokenizer), start.tool_use
        if tool_use is None:
            return None if response is None else grammar.text(grammar.embed(response))
        if response is None and not tool_use.is_constrained:
            return None
        content = None if response is None else grammar.embed(response)
        return grammar.text(_call_messages(tool_use, grammar, content=content))

    def decoder(
        self, start: AnswerStart, *, skip_special: bool, constrained: bool
    ) -> HarmonyDecoder:
        """Return a decoder. Special tokens are never content."""
        return HarmonyDecoder(self.tokenizer, self.tokens, in_final=constrained)

    def with_reasoning(self, parser: ReasoningParser) -> ChatFormat:
        """Raise ValueError: Harmony has a reasoning part."""
        raise _excluded(parser.names[0])

    def with_tools(self, parser: ToolCallParser) -> ChatFormat:
        """Raise ValueError: Harmony has a tool-call part."""
        raise _excluded(parser.names[0])


def _call_messages(tool_use: ToolUse, grammar: AnswerGrammar, *, content: str | None) -> str:
    """Return the expression of messages that end with a call.

    A message without a recipient may come before it. Without a required call, one may also be last.
    `content` is the expression of a message in the channel `final`, which is then last. None allows
    any text there.
    """

    def message(channels: str) -> str:
        channel, body = grammar.mark("<|channel|>"), grammar.mark("<|message|>")
        return f"{channel} {channels} {body} {grammar.free_text()}"

    calls = " | ".join(
        f"{grammar.literal(f' to=functions.{tool_name(tool)} ')} "
        f"{grammar.mark('<|constrain|>json<|message|>')} {grammar.embed(arguments_grammar(tool))}"
        for tool in tool_use.callable
    )
    call = grammar.rule(f"{grammar.mark('<|channel|>commentary')} ({calls})")
    again = grammar.mark("<|end|><|start|>assistant")
    if tool_use.is_required:
        thoughts = message('("analysis" | "commentary")')
        return f"({thoughts} {again}){{0,2}} {call}"
    if content is not None:
        thoughts = message('"analysis"')  # text in the channel `commentary` would be content
        final = f"{grammar.mark('<|channel|>final<|message|>')} {content}"
        return f"({thoughts} {again}){{0,2}} ({final} | {call})"
    thoughts = message('("analysis" | "commentary" | "final")')
    return f"({thoughts} {again})* ({thoughts} | {call})"


def _excluded(name: str) -> ValueError:
    return ValueError(f"The chat format {_NAME} cannot be combined with the parser {name}.")
