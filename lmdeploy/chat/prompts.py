"""②③ A conversation → text by the chat template → token ids."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lmdeploy.base.checks import OptionError, flag_of, refuse, show

if TYPE_CHECKING:
    from lmdeploy.chat.jinja_template import ChatTemplate
    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.config.chat_template import ChatTemplateConfig
    from lmdeploy.engine.load import EngineParts

logger = logging.getLogger("lmdeploy")

MAX_MESSAGES = 4096
# Characters from which on a text is tokenised in pieces first, to be refused early.
_HUGE_TEXT = 1 << 20
_PIECE_CHARS = 1 << 16
_MORE_OF_A_PIECE = 64  # tokens that the cuts of a piece may add
MAX_OPTIONS_SIZE = 1 << 22  # characters and values of chat_template_kwargs
MAX_OPTIONS_DEPTH = 64
# What return_token_ids adds to a message, which clients send back as it came: ignored.
OUR_OWN_KEY = "gen_tokens"
_NO_NAMES = ("custom", "hf")  # a ChatTemplateConfig needs a name
_PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
_FROM_TEXTS = """\
{%- for m in messages %}
{%- if m.role == 'system' %}{{ texts.system }}{{ m.content }}{{ texts.eosys }}
{%- elif m.role == 'user' %}{{ texts.user }}{{ m.content }}{{ texts.eoh }}
{%- else %}{{ texts.assistant }}{{ m.content }}{{ texts.eoa }}{{ texts.separator }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ texts.assistant }}{% endif -%}
"""
# What a template is given besides chat_template_kwargs.
_OWN_VARIABLES = ("messages", "add_generation_prompt", "bos_token", "eos_token", "texts")
_TEXTS = ("system", "eosys", "user", "eoh", "assistant", "eoa", "separator")
ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: Any) -> list[dict[str, str]]:
    """A conversation with plain text contents. OptionError names the message that is wrong.

    A content may be a text or a list of `{"type": "text", "text": ...}` parts. What a `name` is
    for, the chat template knows.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise refuse("messages", messages, wanted=f"a list of 1 to {MAX_MESSAGES} messages")
    return [_check_message(i, message) for i, message in enumerate(messages)]


def _check_message(index: int, message: Any) -> dict[str, str]:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise refuse(name, message, wanted="an object with role and content")
    role = message.get("role")
    known = ("role", "content", "name", *([OUR_OWN_KEY] if role == "assistant" else []))
    for key, value in message.items():
        if key not in known and value not in (None, []):
            raise OptionError(f"{name}.{key}", "not supported, wanted role and content; remove it")
    if not isinstance(role, str) or role not in ROLES:
        raise refuse(f"{name}.role", role, wanted="one of " + ", ".join(ROLES))
    if role == "tool":
        raise OptionError(f"{name}.role", "tool calls are not supported; remove the message")
    content = text_of(name, message.get("content"))
    checked = {"role": "system" if role == "developer" else role, "content": content}
    speaker = message.get("name")
    if speaker is None:
        return checked
    if not isinstance(speaker, str):
        raise refuse(f"{name}.name", speaker, wanted="a text")
    return {**checked, "name": speaker}


def text_of(name: str, content: Any) -> str:
    """The text of a message's content, joined when it comes in parts. OptionError for others."""
    if isinstance(content, list):
        content = "".join(_check_part(name, part) for part in content)
    if not isinstance(content, str):
        raise refuse(f"{name}.content", content, wanted="a text or a list of text parts")
    return content


def _check_part(name: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise OptionError(
            f"{name}.content", f"got a part of type {show(kind)}, wanted text; remove the part"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse(f"{name}.content.text", text, wanted="a text")
    return text


def encode_text(
    parts: EngineParts, text: str, *, add_special: bool, max_tokens: int | None = None
) -> list[int]:
    """Token ids of a prompt. OptionError, before much work, for one that can never fit.

    `max_tokens`: that are wanted; session_len when None.

    The library takes hundreds of bytes of memory per token, so this bounds what a client can cost.
    """
    _check_length(parts, len(text))
    if len(text) > _HUGE_TEXT:
        _check_pieces(parts, text, max_tokens=max_tokens or parts.session_len)
    return list(parts.tokenizer.encode(text, add_special=add_special))


def _check_pieces(parts: EngineParts, text: str, *, max_tokens: int) -> None:
    """OptionError as soon as the pieces of a text have more tokens than are wanted."""
    num_tokens = 0
    for start in range(0, len(text), _PIECE_CHARS):
        piece = parts.tokenizer.encode(text[start : start + _PIECE_CHARS], add_special=False)
        num_tokens += max(len(piece) - _MORE_OF_A_PIECE, 0)
        if num_tokens > max_tokens:
            raise _too_long(parts, max_tokens)


def _too_long(parts: EngineParts, max_tokens: int) -> OptionError:
    if max_tokens != parts.session_len:
        return OptionError(
            "prompt", f"got more than {max_tokens} tokens, wanted fewer; shorten the text"
        )
    return OptionError(
        "prompt",
        f"got more than {max_tokens} tokens, wanted at most session_len {max_tokens}; shorten the "
        f"prompt or raise {flag_of('session_len')}",
    )


def _check_length(parts: EngineParts, num_chars: int) -> None:
    limit = parts.session_len * parts.tokenizer.max_token_bytes
    if num_chars > limit:
        raise OptionError(
            "prompt",
            f"got {num_chars} characters, wanted at most {limit}, which is more than "
            f"session_len {parts.session_len} tokens hold; shorten the prompt or raise "
            f"{flag_of('session_len')}",
        )


class ChatPrompt(NamedTuple):
    """A conversation as token ids. `goes_on`: the answer continues its last text."""

    ids: list[int]
    goes_on: bool


def encode_chat(
    parts: EngineParts,
    messages: Any,
    *,
    template_options: dict[str, Any] | None = None,
    max_tokens: int | None = None,
) -> ChatPrompt:
    """Token ids of a conversation with the answer's beginning appended.

    `max_tokens`: that are wanted; session_len when None.

    A conversation that ends with an answer is continued within it, as in LMDeploy; with GPT-OSS,
    whose answers are messages of several channels, the assistant begins another message.

    Raises OptionError for a wrong conversation, too large options, a model without a chat template,
    or what the template itself refuses.
    """
    options = template_options or {}
    # The tools of GPT-OSS have checks of their own.
    check_template_options(
        {name: value for name, value in options.items() if not parts.harmony or name != "tools"}
    )
    if parts.harmony is not None:
        from lmdeploy.chat.formats.harmony.rendering import render_prompt

        texts = render_prompt(parts.chat_template, messages, options=options)
        num_chars = sum(map(len, texts))
        _check_length(parts, num_chars)
        if len(texts) > parts.session_len:  # each has a token of its own
            raise OptionError(
                "prompt",
                f"got {len(texts)} texts that spell special tokens, wanted fewer than "
                f"session_len {parts.session_len}; shorten the prompt",
            )
        most = max_tokens or parts.session_len
        ids: list[int] = []
        for text in texts:
            ids += encode_text(parts, text, add_special=False, max_tokens=max_tokens)
            if len(ids) > most and num_chars > _HUGE_TEXT:
                raise _too_long(parts, most)
        return ChatPrompt(ids, goes_on=False)
    if parts.chat_template is None:
        raise OptionError(
            "messages",
            "the model has no chat template; use /v1/completions (do_preprocess=False) "
            "or give one with --chat-template",
        )
    template, checked = parts.chat_template, check_messages(messages)
    text = template.render(checked, options)
    ids = encode_text(parts, text, add_special=template.add_special, max_tokens=max_tokens)
    goes_on = _is_continued(checked) and checked[-1]["content"] != ""
    return ChatPrompt(ids, goes_on=template.goes_on or goes_on)


def check_template_options(options: dict[str, Any]) -> None:
    """OptionError for variables of a chat template.

    They may not be too large, nested too deep, or named like what the template is given anyway.
    """
    for name in _OWN_VARIABLES:
        if name in options:
            raise OptionError(
                f"chat_template_kwargs.{name}",
                "got a value, wanted none: it is set for every conversation; remove it",
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
        got, wanted = "characters and values", MAX_OPTIONS_SIZE
    elif level:
        got, wanted = "levels", MAX_OPTIONS_DEPTH
    else:
        return
    raise OptionError(
        "chat_template_kwargs",
        f"got more than {wanted} {got}, wanted fewer; change chat_template_kwargs",
    )


class PromptTemplate:
    """The model's template, or the one that a ChatTemplateConfig asks for. Immutable.

    `add_special`: whether the tokenizer puts BOS before the prompt; a Jinja template writes it.
    `goes_on`: whether the answer goes on with the prompt's text instead of beginning its own.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        meta_instruction: str | None = None,
        texts: dict[str, str] | None = None,
        stop_words: list[str] | None = None,
        add_special: bool = False,
        goes_on: bool = False,
    ) -> None:
        self.add_special = add_special
        self.goes_on = goes_on
        self._template = template
        self._meta_instruction = meta_instruction
        self._texts = texts or {}
        self.stop_words = list(stop_words or [])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: dict[str, Any],
        *,
        continues: bool = True,
    ) -> str:
        """The prompt. `options` are further names the template may use.

        `continues`: whether an answer at the end is continued; else another one begins.
        """
        if self._meta_instruction and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self._meta_instruction}, *messages]
        variables = {**options, "texts": self._texts}
        if not (continues and _is_continued(messages)):
            return self._template.render(messages, variables=variables)
        mark = secrets.token_hex(16)  # in no text of the client's
        last = {**messages[-1], "content": messages[-1]["content"] + mark}
        text = self._template.render(
            [*messages[:-1], last], add_generation_prompt=False, variables=variables
        )
        end = text.rfind(mark)
        if end < 0:
            raise OptionError(
                "messages",
                "got an answer at the end, to be continued, which the chat template leaves out; "
                "wanted a message of the user there; change messages or --chat-template",
            )
        return text[:end]


def _is_continued(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is an answer that the model goes on with."""
    return bool(messages) and messages[-1]["role"] == "assistant"


def choose_template(
    own: ChatTemplate | None, config: ChatTemplateConfig | None, *, tokenizer: Tokenizer
) -> PromptTemplate | None:
    """The template to use; None when neither the model nor `config` has one."""
    from lmdeploy.chat.jinja_template import ChatTemplate, template_from_file

    if config is None:
        return None if own is None else PromptTemplate(own)
    texts = {name: getattr(config, name) or "" for name in _TEXTS}
    tokens = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    template, add_special = own, False
    if config.model_path is not None:
        template = template_from_file(config.model_path, tokenizer)
    elif config.capability == "completion":
        template, add_special = ChatTemplate(_PLAIN, origin="capability", **tokens), True
    elif any(texts.values()):
        template = ChatTemplate(_FROM_TEXTS, origin="ChatTemplateConfig", **tokens)
        add_special = True
    elif config.model_name not in _NO_NAMES:
        logger.warning(
            "ChatTemplateConfig: templates are not looked up by name, so %r has no effect and the "
            "model's own is used; give model_path or the texts",
            config.model_name[:80],
        )
    if template is None:
        return None
    return PromptTemplate(
        template,
        meta_instruction=config.meta_instruction,
        texts=texts,
        stop_words=config.stop_words,
        add_special=add_special,
        goes_on=config.model_path is None and config.capability == "completion",
    )
