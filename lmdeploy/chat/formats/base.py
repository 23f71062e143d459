"""The interface of chat formats, which render prompts and parse answers.

A chat format has a reasoning part and a tool-call part, which are chosen independently. Each is a
parser in the registry (registry.py). A parser usually works on text and is combined with others by
`TextFormat` (text.py). A parser whose format has its own prompts or tokens overrides `extend` and
returns a ChatFormat of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lmdeploy.chat.detokenize import Detokenizer
from lmdeploy.chat.tool_calls import JsonText, Tool, ToolCall, ToolUse

if TYPE_CHECKING:
    from lmdeploy.chat.grammar import AnswerGrammar
    from lmdeploy.chat.templates.prompt_template import PromptTemplate
    from lmdeploy.chat.tokenizer import Tokenizer

Message = dict[str, Any]
NO_PARSER = "none"


@dataclass
class Delta:
    """New parts of an answer.

    Args:
        tool_calls: parts of calls, in order.
        num_broken_calls: calls that could not be parsed. Their text becomes content. If the name
            has already been sent, only the rest of the text does.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    num_broken_calls: int = 0

    def add(self, other: Delta) -> None:
        """Append later parts."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.tool_calls += other.tool_calls
        self.num_broken_calls += other.num_broken_calls


@dataclass(frozen=True)
class ModelInfo:
    """The facts by which a parser recognizes the models that it belongs to."""

    model_type: str  # of config.json, or the family's name for a GGUF file
    tokenizer: Tokenizer
    template: str = ""  # source of the chat template

    def mentions(self, marks: Sequence[str], foreign: Sequence[str] = ()) -> bool:
        """Return whether the template contains all of `marks` and none of the foreign ones."""
        return all(mark in self.template for mark in marks) and not any(
            mark in self.template for mark in foreign
        )


class CallsInside(NamedTuple):
    """The tool calls to look for in reasoning: the mark that begins them, and their splitter."""

    mark: str
    splitter: Callable[[], Splitter]


class AnswerStart(NamedTuple):
    """The state in which an answer begins.

    prompt_end: the last characters of the prompt, such as `<think>` where it opens the reasoning.
    continue_final_message: the answer continues the text of the last message.
    tool_use: the tools that the answer may call, or None.
    calls: how calls in reasoning are found that the answer never closes, or None.
    """

    prompt_end: str = ""
    continue_final_message: bool = False
    tool_use: ToolUse | None = None
    calls: CallsInside | None = None


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
    def splits(self) -> bool:
        """Return whether text of the answer may be reasoning or tool calls."""
        ...

    @property
    def num_tool_calls(self) -> int:
        """Return the number of tool calls begun so far."""
        ...

    @property
    def num_broken_calls(self) -> int:
        """Return the number of tool calls so far that could not be parsed."""
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
    def parser_names(self) -> tuple[str, str]:
        """Return the names of the reasoning and the tool-call parser. "none" means no parser."""
        ...

    @property
    def splits_answers(self) -> bool:
        """Return whether answers can have reasoning or tool calls."""
        ...

    @property
    def accepts_tools(self) -> bool:
        """Return whether requests may have `tools`."""
        ...

    def render(
        self,
        template: PromptTemplate,
        messages: Any,
        *,
        tools: Sequence[Tool],
        options: dict[str, Any],
    ) -> RenderedPrompt:
        """Check and render messages as a client sends them.

        Args:
            tools: checked tools for the prompt to describe.
            options: further variables of the template.

        Raise OptionError for wrong messages or a wrong option of the format.
        """
        ...

    def constrained_prefix(self) -> list[int]:
        """Return the tokens after the prompt that open the content for a `response_format`."""
        ...

    def grammar(self, start: AnswerStart, response: dict[str, Any] | None) -> str | None:
        """Return the grammar of an answer in llguidance's notation; None leaves it free.

        `response` is the grammar of a `response_format` (see chat/grammar.py) or None. If there are
        tools, too, the answer is either the response or calls; required calls exclude the response.
        Raise OptionError for tools that the format cannot enforce.
        """
        ...

    def decoder(
        self, start: AnswerStart, *, skip_special: bool, constrained: bool
    ) -> AnswerDecoder:
        """Return a decoder for one answer.

        skip_special: leave special tokens out of the content.
        constrained: the answer is only content that follows a `response_format`.
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

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """Return the texts that the splitter looks for. They may be special tokens."""

    @abstractmethod
    def splitter(self, start: AnswerStart) -> Splitter:
        """Return an object that splits text into reasoning and content."""

    @abstractmethod
    def grammar(self, start: AnswerStart, grammar: AnswerGrammar) -> str:
        """Return the expression of what may come before the content, added to `grammar`."""

    def extend(self, chat_format: ChatFormat, model: ModelInfo) -> ChatFormat:
        """Return `chat_format` with this reasoning part."""
        return chat_format.with_reasoning(self)


def with_object_arguments(message: Message) -> Message:
    """Return a checked message in which the arguments of calls are objects, if they can be."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            **call,
            "function": {
                **function,
                "arguments": JsonText(function["arguments"] or "{}", is_parsed=True),
            },
        }
        for call in message["tool_calls"]
        for function in (call["function"],)
    ]
    return {**message, "tool_calls": calls}


class ToolCallParser(Parser):
    """Finds tool calls in an answer."""

    @property
    @abstractmethod
    def marks(self) -> tuple[str, ...]:
        """Return the texts that the splitter looks for. They may be special tokens."""

    @abstractmethod
    def splitter(self, tool_use: ToolUse) -> Splitter:
        """Return an object that splits text into content and tool calls."""

    @abstractmethod
    def grammar(self, tool_use: ToolUse, grammar: AnswerGrammar) -> str:
        """Return the expression of an answer that calls tools, added to `grammar`.

        If `tool_use.is_required`, the answer is calls only. Otherwise it is text that may have
        calls.
        """

    def prepare(
        self, messages: list[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], Sequence[Tool]]:
        """Return checked messages and tools in the form in which the template expects them.

        Most templates read the arguments of calls as objects.
        """
        return [with_object_arguments(message) for message in messages], tools

    def extend(self, chat_format: ChatFormat, model: ModelInfo) -> ChatFormat:
        """Return `chat_format` with this tool-call part."""
        return chat_format.with_tools(self)
