"""② Render messages to prompt text with the checkpoint's Jinja template.

Templates are downloaded and not trusted. They run in a sandbox with bounds on time and memory
(chat/templates/template_limits.py). The sizes of the template and of the prompt are limited too.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import read_json_object
from lmdeploy.chat.templates.message_form import Message, MessageForm, find_form
from lmdeploy.chat.tool_calls import JsonObject

if TYPE_CHECKING:
    from jinja2 import Template

    from lmdeploy.chat.tokenizer import Tokenizer

_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_OUTPUT_CHARS = 64 << 20
_MAX_INDENT = 16
_MAX_CONFIG_BYTES = 16 << 20
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # names that transformers gives to templates
_MORE_TEMPLATES = "additional_chat_templates"  # folder of the named ones beside chat_template.jinja
_FILE_NAMES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


class PreRenderedJson(str):
    """A text that the filter `tojson` inserts unchanged, for example because it is JSON."""


class _TemplateError(Exception):
    """An error that a template raises by raise_exception()."""


class ChatTemplate:
    """A compiled template. Immutable; any thread may use it.

    Raise ModelFormatError if the source does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str,
        bos_token: str = "",
        eos_token: str = "",
        with_tools: ChatTemplate | None = None,
    ) -> None:
        """Compile a template. `with_tools` renders the conversations that have tools."""
        self.source = source
        self.origin = origin
        self.with_tools = with_tools
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._template = _compile(source, origin)

    @cached_property
    def form(self) -> MessageForm:
        """The messages that the template accepts."""

        def try_render(messages: list[Message]) -> str:
            try:
                return self._render(messages, {"add_generation_prompt": True})
            except OptionError:
                return ""

        return find_form(try_render)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation. Encode it without special tokens.

        Args:
            messages: mappings with `role` and `content`.
            add_generation_prompt: begin the turn of the assistant at the end.
            variables: further variables of the template (enable_thinking, ...).

        Raise OptionError with the template's message if it rejects the messages.
        """
        given = dict(variables or {})
        template = self.with_tools if self.with_tools is not None and given.get("tools") else self
        given["add_generation_prompt"] = add_generation_prompt
        return template._render(template.form.adapt(messages), given)

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        from lmdeploy.chat.templates.template_limits import TemplateLimitError, limits

        context = {
            "tools": None,
            "documents": None,
            **variables,
            "messages": messages,
            **self._tokens,
        }
        pieces: list[str] = []
        size = 0
        try:
            with limits():
                for piece in self._template.generate(context):
                    pieces.append(piece)
                    size += len(piece)
                    if size > _MAX_OUTPUT_CHARS:
                        raise _too_long()
        except TemplateLimitError as error:
            advice = "Shorten it or change --chat-template."
            reason = f"exceeds a limit of the chat template: {error}. {advice}"
            raise OptionError("messages", reason) from error
        except (_TemplateError, TemplateError) as error:
            raise OptionError("messages", f"is rejected by the chat template: {error}") from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = f"makes the chat template fail: {type(error).__name__}: {error}"
            raise OptionError("messages", reason) from error
        return "".join(pieces)


def template_from_file(path: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Read a Jinja file, or a JSON file with `chat_template` (for --chat-template)."""
    file = Path(path)
    if file.suffix == ".json":
        sources = _sources_from_json(file)
        if not sources:
            raise ModelFormatError(f"{file}: chat_template is missing.")
    else:
        sources = {_DEFAULT: _read_text(file)}
    return _make(sources, str(file), tokenizer=tokenizer)


def template_from_folder(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template of a Hugging Face folder, or None if it has none."""
    for name in _FILE_NAMES:
        file = folder / name
        if not file.is_file():
            continue
        if file.suffix == ".jinja":
            sources = {_DEFAULT: _read_text(file)}
            more = folder / _MORE_TEMPLATES / f"{_WITH_TOOLS}.jinja"
            if more.is_file():
                sources[_WITH_TOOLS] = _read_text(more)
        else:
            sources = _sources_from_json(file)
        if sources:
            return _make(sources, str(file), tokenizer=tokenizer)
    return None


def template_from_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the template in GGUF metadata, or None if it has none."""
    key = "tokenizer.chat_template"
    named = {_DEFAULT: metadata.get(key), _WITH_TOOLS: metadata.get(f"{key}.{_WITH_TOOLS}")}
    sources = {name: source for name, source in named.items() if isinstance(source, str)}
    return _make(sources, key, tokenizer=tokenizer) if sources else None


def _make(sources: Mapping[str, str], origin: str, *, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the default template, which has that for tools, or the only one."""
    made: ChatTemplate | None = None
    for name in (_WITH_TOOLS, _DEFAULT):
        if name in sources:
            made = ChatTemplate(
                sources[name],
                origin=origin if name == _DEFAULT else f"{origin}, {name}",
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                with_tools=made,
            )
    assert made is not None, "a file without a template"
    return made


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > 4 * _MAX_TEMPLATE_CHARS:
            raise ModelFormatError(
                f"{file}: A chat template must have at most {_MAX_TEMPLATE_CHARS} characters."
            )
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{file}: The file cannot be read: {error}") from error


def _sources_from_json(file: Path) -> dict[str, str]:
    """Return the templates `default` and `tool_use`, as far as the file has them."""
    value = read_json_object(file, _MAX_CONFIG_BYTES).get("chat_template")
    named: dict[str, Any] = {} if value is None else {_DEFAULT: value}
    if isinstance(value, list):
        items = [item for item in value if isinstance(item, dict)]
        named = {str(item.get("name")): item.get("template") for item in items}
    sources = {}
    for name in (_DEFAULT, _WITH_TOOLS):
        if name in named:
            if not isinstance(named[name], str):
                raise ModelFormatError(f"{file}: chat_template must be a string.")
            sources[name] = named[name]
    return sources


def _compile(source: str, origin: str) -> Template:
    from jinja2 import TemplateError

    from lmdeploy.chat.templates.template_limits import BoundedEnvironment, bounded, limits

    if len(source) > _MAX_TEMPLATE_CHARS:
        raise ModelFormatError(
            f"{origin}: The chat template has {len(source)} characters. It must have at most "
            f"{_MAX_TEMPLATE_CHARS}."
        )
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = bounded(_to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        with limits():  # compiling runs filters on constants
            return environment.from_string(_without_generation_marks(source))
    except (TemplateError, RecursionError, ValueError, SyntaxError) as error:
        raise ModelFormatError(f"{origin}: The chat template does not compile: {error}") from error


def _without_generation_marks(source: str) -> str:
    """Remove `{% generation %}`, which only marks text for training."""
    return re.sub(
        r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", r"{%\1 if true %}{% endif \2%}", source
    )


def _raise_exception(message: object) -> None:
    raise _TemplateError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    *,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, PreRenderedJson):
        return str(value)
    if isinstance(value, JsonObject) and indent is None and separators is None and not sort_keys:
        return value.text
    width = len(indent) if isinstance(indent, str) else indent or 0
    if width > _MAX_INDENT:
        raise _TemplateError(f"tojson has indent={width}. It must be at most {_MAX_INDENT}.")
    # Unlike Jinja's own filter, this one does not escape for HTML.
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    text, size = io.StringIO(), 0
    for piece in encoder.iterencode(value):
        size += text.write(piece)
        if size > _MAX_OUTPUT_CHARS:
            raise _too_long()
    return text.getvalue()


def _too_long() -> _TemplateError:
    return _TemplateError(f"The prompt has more than {_MAX_OUTPUT_CHARS} characters.")
