"""② Render messages to prompt text with the checkpoint's Jinja template.

Templates are downloaded and not trusted. They run in Jinja's sandbox, in a process with limits of
time and memory (chat/bounded). The sizes of the template and of the prompt are limited too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import ModelFormatError, UnavailableError
from lmdeploy.base.files import read_json_object
from lmdeploy.chat.bounded.child import MARK_BYTES
from lmdeploy.chat.bounded.process import BoundedPool, LimitError, ReportedError
from lmdeploy.chat.templates.message_form import Message, MessageForm, find_form
from lmdeploy.chat.tool_calls import JsonText

if TYPE_CHECKING:
    from lmdeploy.chat.tokenizer import Tokenizer

_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_CONFIG_BYTES = 16 << 20
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # names that transformers gives to templates
_MORE_TEMPLATES = "additional_chat_templates"  # folder of the named ones beside chat_template.jinja
_FILE_NAMES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


def start_renderer() -> BoundedPool:
    """Start the process that renders templates. A second one starts while that is busy for long."""
    return BoundedPool("template", name="chat template", least=1, most=2)


class ChatTemplate:
    """A template. Immutable; any thread may use it. Messages and variables must be JSON values.

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
        renderer: BoundedPool | None = None,
    ) -> None:
        """Check a template.

        Args:
            source: the text of the template.
            origin: names its file in errors.
            bos_token, eos_token: variables of the template.
            with_tools: renders the conversations that have tools.
            renderer: the process of `start_renderer`. None starts one.
        """
        self.source = source
        self.origin = origin
        self.with_tools = with_tools
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if len(source) > _MAX_TEMPLATE_CHARS:
            raise ModelFormatError(
                f"{origin}: The chat template has {len(source)} characters. It must have at most "
                f"{_MAX_TEMPLATE_CHARS}."
            )
        self._mark = secrets.token_hex(MARK_BYTES // 2)
        try:
            self._renderer = renderer or start_renderer()
            self._run(None)
        except ReportedError as error:
            raise ModelFormatError(f"{origin}: The chat template {error}") from error
        except (LimitError, UnavailableError) as error:
            raise ModelFormatError(
                f"{origin}: The chat template does not compile: {error}"
            ) from error

    @cached_property
    def form(self) -> MessageForm:
        """The messages that the template accepts."""

        def try_render(messages: list[Message]) -> str:
            try:
                return self._run(self._context(messages, {"add_generation_prompt": True}))
            except ReportedError:
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
        return template._render(messages, given)

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        try:
            return self._run(self._context(self.form.adapt(messages), variables))
        except ReportedError as error:
            raise OptionError("messages", str(error)) from error
        except LimitError as error:
            advice = "Shorten it or change --chat-template."
            reason = f"exceeds a limit of the chat template: {error}. {advice}"
            raise OptionError("messages", reason) from error
        except (RecursionError, TypeError, ValueError) as error:
            reason = f"cannot be given to the chat template: {error}"
            raise OptionError("messages", reason) from error

    def _context(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> dict[str, Any]:
        nothing = {"tools": None, "documents": None}
        return {**nothing, **variables, "messages": messages, **self._tokens}

    def _run(self, context: dict[str, Any] | None) -> str:
        """Render the template, or only compile it without a context. Raise as BoundedPool."""

        def marked(value: Any) -> Any:
            if isinstance(value, JsonText):
                return {self._mark: (value.text, value.is_parsed)}
            raise TypeError(f"a value has the type {type(value).__name__}, which JSON lacks")

        request = {"source": self.source, "context": context}
        text = self._mark + json.dumps(request, ensure_ascii=False, default=marked)
        reply = self._renderer.run(text.encode(errors="surrogatepass"))
        return reply.decode(errors="surrogatepass")


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
    renderer = start_renderer()
    made: ChatTemplate | None = None
    for name in (_WITH_TOOLS, _DEFAULT):
        if name in sources:
            made = ChatTemplate(
                sources[name],
                origin=origin if name == _DEFAULT else f"{origin}, {name}",
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                with_tools=made,
                renderer=renderer,
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
