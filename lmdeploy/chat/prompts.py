"""②③ Render a conversation by the chat template and tokenize it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lmdeploy.base.checks import ContextLengthError, OptionError, flag_of
from lmdeploy.chat.formats.base import AnswerStart
from lmdeploy.chat.templates.prompt_template import NO_TEMPLATE

if TYPE_CHECKING:
    from lmdeploy.chat.formats.base import ChatFormat
    from lmdeploy.chat.templates.prompt_template import PromptTemplate
    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.chat.tool_calls import ToolUse

# A text of more characters is first tokenized in pieces, so that it can be rejected early.
_HUGE_TEXT = 1 << 20
_PIECE_CHARS = 1 << 16
_MORE_OF_A_PIECE = 64  # tokens that cutting a piece out may add
_MAX_PROMPT_END = 256  # characters
MAX_OPTIONS_SIZE = 1 << 22  # characters and values of chat_template_kwargs
MAX_OPTIONS_DEPTH = 64
# Variables that a template gets besides chat_template_kwargs.
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "texts")


class PromptSource(Protocol):
    """The parts of a loaded model that make a prompt."""

    tokenizer: Tokenizer
    chat_template: PromptTemplate | None
    chat_format: ChatFormat
    session_len: int


def encode_text(
    source: PromptSource, text: str, *, add_special: bool, max_tokens: int | None = None
) -> list[int]:
    """Return the token ids of a prompt. Raise OptionError early if the prompt can never fit.

    `max_tokens` rejects longer prompts. None uses session_len. The library needs hundreds of bytes
    of memory per token, so this limit bounds the cost of a request.
    """
    _check_length(source, len(text))
    if len(text) > _HUGE_TEXT:
        _check_pieces(source, text, max_tokens=max_tokens or source.session_len)
    return list(source.tokenizer.encode(text, add_special=add_special))


def _check_pieces(source: PromptSource, text: str, *, max_tokens: int) -> None:
    """Raise OptionError as soon as the pieces of a text have more than `max_tokens` tokens."""
    num_tokens = 0
    for start in range(0, len(text), _PIECE_CHARS):
        piece = source.tokenizer.encode(text[start : start + _PIECE_CHARS], add_special=False)
        num_tokens += max(len(piece) - _MORE_OF_A_PIECE, 0)
        if num_tokens > max_tokens:
            raise _too_long(source, max_tokens)


def _too_long(source: PromptSource, max_tokens: int) -> OptionError:
    if max_tokens != source.session_len:
        return OptionError("prompt", f"has more than {max_tokens} tokens. Shorten it.")
    return ContextLengthError(
        "prompt",
        f"has more than {max_tokens} tokens, but session_len is {max_tokens} (the context length). "
        f"Shorten it or raise {flag_of('session_len')}.",
        limit=source.session_len,
    )


def _check_length(source: PromptSource, num_chars: int) -> None:
    limit = source.session_len * source.tokenizer.max_token_bytes
    if num_chars > limit:
        raise ContextLengthError(
            "prompt",
            f"has {num_chars} characters, but session_len {source.session_len} (the context "
            f"length) holds at most {limit}. Shorten it or raise {flag_of('session_len')}.",
            limit=source.session_len,
        )


class ChatPrompt(NamedTuple):
    """A conversation as token ids, and the state in which its answer begins."""

    ids: list[int]
    start: AnswerStart


def encode_chat(
    source: PromptSource,
    messages: Any,
    *,
    tool_use: ToolUse | None = None,
    template_options: dict[str, Any] | None = None,
    max_tokens: int | None = None,
    begins_answer: bool | None = None,
) -> ChatPrompt:
    """Return the token ids of a conversation, up to where the answer begins.

    A conversation that ends with an answer is continued within it, as in LMDeploy, unless the chat
    format begins another message.

    Args:
        tool_use: the tools that the prompt describes and that the answer may call.
        template_options: further variables of the template.
        max_tokens: reject longer prompts. None uses session_len.
        begins_answer: begin another answer (True) or end the prompt with the last message (False).
            None begins one unless the conversation ends with an answer.

    Raise OptionError for a wrong conversation, too large options, or a model without a chat
    template, and if the template rejects the messages.
    """
    options = template_options or {}
    chat_format = source.chat_format
    check_template_options(options)
    if tool_use is not None and not chat_format.accepts_tools:
        reason = "needs a tool-call parser. Start the server with --tool-call-parser."
        raise OptionError("tools", reason)
    template = source.chat_template
    if template is None:
        raise OptionError("messages", NO_TEMPLATE)
    if begins_answer is not None:
        template = template.ending(begins_answer=begins_answer)
    tools = () if tool_use is None else tool_use.tools
    rendered = chat_format.render(template, messages, tools=tools, options=options)
    texts = rendered.texts
    num_chars = sum(map(len, texts))
    _check_length(source, num_chars)
    if len(texts) > source.session_len:  # each text needs at least one token
        raise ContextLengthError(
            "prompt",
            f"spells {len(texts) - 1} special tokens, but session_len is {source.session_len} "
            "(the context length). Shorten it.",
            limit=source.session_len,
        )
    limit = max_tokens or source.session_len
    ids: list[int] = []
    for i, text in enumerate(texts):
        add_special = rendered.add_special and i == 0
        ids += encode_text(source, text, add_special=add_special, max_tokens=max_tokens)
        if len(ids) > limit and num_chars > _HUGE_TEXT:
            raise _too_long(source, limit)
    continues = rendered.continue_final_message and begins_answer is None
    start = AnswerStart(texts[-1][-_MAX_PROMPT_END:], continues, tool_use)
    return ChatPrompt(ids, start)


def start_of_ids(source: PromptSource, ids: Sequence[int]) -> AnswerStart:
    """Return the state in which the answer to a conversation given as token ids begins."""
    template = source.chat_template
    continues = template is not None and template.continue_final_message
    end = source.tokenizer.decode(ids[-_MAX_PROMPT_END:], skip_special=False)
    return AnswerStart(end[-_MAX_PROMPT_END:], continues)


def check_template_options(options: dict[str, Any]) -> None:
    """Raise OptionError for bad variables of a chat template.

    Variables must not be too large or nested too deep. They must not have the names of the
    variables that every template gets.
    """
    for name in _OWN_VARIABLES:
        if name in options:
            raise OptionError(
                f"chat_template_kwargs.{name}",
                "is set by the server for every conversation. Remove it.",
            )
    size, depth = 0, 0
    level: list[Any] = [options]
    while level and size <= MAX_OPTIONS_SIZE and depth <= MAX_OPTIONS_DEPTH:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, dict):
                inner += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple)):
                inner += value
        size += len(level)
        depth += 1
        level = inner
    if size > MAX_OPTIONS_SIZE:
        limit, unit = MAX_OPTIONS_SIZE, "characters and values"
    elif level:
        limit, unit = MAX_OPTIONS_DEPTH, "levels"
    else:
        return
    raise OptionError("chat_template_kwargs", f"has more than {limit} {unit}. Shorten it.")
