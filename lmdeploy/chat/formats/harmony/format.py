"""Harmony as a chat format: the parser for the registry, and the ChatFormat of one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import refuse
from lmdeploy.chat.formats.base import (
    AnswerStart,
    ChatFormat,
    ModelInfo,
    Parser,
    ReasoningParser,
    RenderedPrompt,
    Tool,
    ToolCallParser,
)
from lmdeploy.chat.formats.harmony.conversation import read_options
from lmdeploy.chat.formats.harmony.parser import HarmonyDecoder
from lmdeploy.chat.formats.harmony.tokens import HarmonyTokens

if TYPE_CHECKING:
    from lmdeploy.chat.template import PromptTemplate
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
    splits_answers: bool = True
    accepts_tools: bool = True

    def check_options(self, options: dict[str, Any], *, tool_choice: Any) -> dict[str, Any]:
        """Check tools, reasoning effort and built-in tools."""
        if tool_choice not in (None, "none", "auto"):
            raise refuse("tool_choice", tool_choice, wanted="none or auto")
        options = read_options(options)
        if tool_choice == "none":
            options.pop("tools", None)
        return options

    def render(
        self, template: PromptTemplate, messages: Any, *, options: dict[str, Any]
    ) -> RenderedPrompt:
        """Render by the template. The assistant always begins another message."""
        from lmdeploy.chat.formats.harmony.rendering import render_prompt

        return RenderedPrompt(render_prompt(template, messages, options=options))

    def tool_grammar(self, tools: Sequence[Tool], tool_choice: Any) -> str | None:
        """Return None: the model is trained to write calls that parse."""
        return None

    def constrained_prefix(self) -> list[int]:
        """Return the tokens that open the channel `final`."""
        return self.tokens.begin_final(self.tokenizer)

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


def _excluded(name: str) -> ValueError:
    return ValueError(f"The chat format {_NAME} cannot be combined with the parser {name}.")
