"""The interface of chat formats, which render prompts and parse answers.

A chat format has a reasoning part and a tool-call part, which are chosen independently. Each is a
parser in the registry (registry.py). A parser usually works on text and is combined with others by
`TextFormat` (text.py). A parser whose format has its own prompts or tokens overrides `extend` and
returns a ChatFormat of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lmdeploy.chat.detokenize import Detokenizer
from lmdeploy.chat.tool_calls import ToolCall

if TYPE_CHECKING:
    from lmdeploy.chat.template import PromptTemplate
    from lmdeploy.chat.tokenizer import Tokenizer

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass
class Delta:
    """New parts of an answer. `tool_calls` are parts of calls, in order."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, other: Delta) -> None:
        """Append later parts."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls


@dataclass(frozen=True)
class ModelInfo:
    """The facts by which a parser recognizes the models that it belongs to."""

    model_type: str  # of config.json, or the family's name for a GGUF file
    tokenizer: Tokenizer
    template: str = ""  # source of the chat template


class AnswerStart(NamedTuple):
    """The state in which the prompt of an answer ends.

    prompt_end: the last characters of the prompt, such as `<think>` where it opens the reasoning.
    continue_final_message: the answer continues the text of the last message.
    """

    prompt_end: str = ""
    continue_final_message: bool = False


class RenderedPrompt(NamedTuple):
    """A conversation before it is tokenized.

    texts: tokenized one by one and joined, so no token spans two of them.
    add_special: the tokenizer adds its BOS token, because the template does not write it.
    """

    texts: list[str]
    add_special: bool = False
    continue_final_message: bool = False


class AnswerDecoder(Detokenizer, Protocol):
    """Converts the tokens of one answer to content, and sets reasoning and tool calls aside.

    `push` and `finish` return only content, so stop words match only the content. Every sequence of
    tokens is accepted, and none loses text.
    """

    @property
    def num_tool_calls(self) -> int:
        """Return the number of tool calls begun so far."""
        ...

    def take_aside(self) -> Delta:
        """Return reasoning and parts of tool calls since the last time; `content` is empty."""
        ...


class ChatFormat(Protocol):
    """The format of conversations with one model. Immutable; any thread may use it."""

    @property
    def name(self) -> str:
        """Return the name for logs and errors."""
        ...

    @property
    def splits_answers(self) -> bool:
        """Return whether answers can have reasoning or tool calls."""
        ...

    @property
    def accepts_tools(self) -> bool:
        """Return whether requests may have `tools`."""
        ...

    def check_options(self, options: dict[str, Any], *, tool_choice: Any) -> dict[str, Any]:
        """Check the template's variables that belong to the format and return those to render.

        Raise OptionError, which names the field.
        """
        ...

    def render(
        self, template: PromptTemplate, messages: Any, *, options: dict[str, Any]
    ) -> RenderedPrompt:
        """Check and render messages as a client sends them.

        Raise OptionError for wrong messages.
        """
        ...

    def tool_grammar(self, tools: Sequence[Tool], tool_choice: Any) -> str | None:
        """Return the grammar of an answer in llguidance's notation; None leaves it free.

        Raise OptionError for a `tool_choice` that the format cannot enforce.
        """
        ...

    def constrained_prefix(self) -> list[int]:
        """Return the tokens after the prompt that open the content for a `response_format`."""
        ...

    def decoder(
        self, start: AnswerStart, *, skip_special: bool, constrained: bool
    ) -> AnswerDecoder:
        """Return a decoder for one answer.

        skip_special: leave special tokens out of the content.
        constrained: the prompt ends with `constrained_prefix`.
        """
        ...

    def with_reasoning(self, parser: ReasoningParser) -> ChatFormat:
        """Return this format with a reasoning part. Raise ValueError if it cannot have one."""
        ...

    def with_tools(self, parser: ToolCallParser) -> ChatFormat:
        """Return this format with a tool-call part. Raise ValueError if it cannot have one."""
        ...


class Splitter(Protocol):
    """Splits a text that arrives in chunks. One per answer.

    The result does not depend on where the text is cut. Text that cannot be parsed is content.
    """

    def push(self, text: str) -> Delta:
        """Return the parts that `text` completes."""
        ...

    def finish(self) -> Delta:
        """Return the parts that were held back."""
        ...


class Parser(ABC):
    """A part of a chat format. The registry contains parsers."""

    names: tuple[str, ...]  # for --reasoning-parser and --tool-call-parser

    @abstractmethod
    def matches(self, model: ModelInfo) -> bool:
        """Return whether the parser is the default for this model."""

    @abstractmethod
    def extend(self, chat_format: ChatFormat, model: ModelInfo) -> ChatFormat:
        """Return `chat_format` with this part.

        Raise ValueError if the model does not support the part or the formats exclude each other.
        """


class ReasoningParser(Parser):
    """Separates reasoning from the rest of an answer."""

    @abstractmethod
    def splitter(self, start: AnswerStart) -> Splitter:
        """Return an object that splits text into reasoning and content."""

    def extend(self, chat_format: ChatFormat, model: ModelInfo) -> ChatFormat:
        """Return `chat_format` with this reasoning part."""
        return chat_format.with_reasoning(self)


class ToolCallParser(Parser):
    """Finds tool calls in an answer."""

    @abstractmethod
    def splitter(self) -> Splitter:
        """Return an object that splits text into content and tool calls."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], tool_choice: Any) -> str | None:
        """Return the grammar of an answer; see ChatFormat.tool_grammar."""

    def prepare(self, messages: list[Message]) -> list[Message]:
        """Return checked messages in the form in which the model's template expects them."""
        return messages

    def extend(self, chat_format: ChatFormat, model: ModelInfo) -> ChatFormat:
        """Return `chat_format` with this tool-call part."""
        return chat_format.with_tools(self)
