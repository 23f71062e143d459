"""② The option that selects a chat template. Rendering is in lmdeploy/chat/."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from lmdeploy.base.checks import check_strings, flag_of, refuse
from lmdeploy.config.generation import MAX_STOP_WORD_CHARS, MAX_STOP_WORDS

_MAX_JSON_BYTES = 1 << 20
_FLAG = flag_of("chat_template")


@dataclass
class ChatTemplateConfig:
    """Options of the chat template, with the fields and defaults of LMDeploy.

    Args:
        model_name: has no effect. A warning is logged if no other field selects a template.
        model_path: a Jinja file to use instead of the model's own template.
        meta_instruction: the system prompt of conversations that have none.
        system, eosys, user, eoh, assistant, eoa: texts around the parts of a conversation. If any
            is given, these texts replace the model's template.
        capability: None, `chat` or `completion`, which applies no template.
        stop_words: additional stop words of every request.
    """

    model_name: str
    model_path: str | None = None
    system: str | None = None
    meta_instruction: str | None = None
    eosys: str | None = None
    user: str | None = None
    eoh: str | None = None
    assistant: str | None = None
    eoa: str | None = None
    tool: str | None = None
    eotool: str | None = None
    separator: str | None = None
    capability: Literal["completion", "infilling", "chat", "python"] | None = None
    stop_words: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("tool", "eotool"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not supported because tool calls are not. Remove it.")
        if self.capability not in (None, "chat", "completion"):
            raise refuse("capability", self.capability, wanted="chat or completion")
        for item in fields(self):
            value = getattr(self, item.name)
            is_text = isinstance(value, str) or (value is None and item.name != "model_name")
            if item.name != "stop_words" and not is_text:
                raise refuse(item.name, value, wanted="a string", flag=_FLAG)
        if self.stop_words is not None:
            check_strings(
                "stop_words",
                self.stop_words,
                max_items=MAX_STOP_WORDS,
                max_chars=MAX_STOP_WORD_CHARS,
                flag=_FLAG,
            )

    def to_json(self, file_path: str | None = None) -> str:
        """Return the options as JSON, and write it to `file_path` if given."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=2)
        if file_path:
            Path(file_path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, file_or_string: str) -> ChatTemplateConfig:
        """Read options from a JSON file or JSON text. Raise ValueError if they are wrong."""
        text = file_or_string
        if not text.lstrip().startswith("{"):
            path = Path(text)
            if not path.is_file():
                wanted = "a .jinja file, a JSON file or JSON text"
                raise refuse("chat_template", text, wanted=wanted, flag=_FLAG)
            if path.stat().st_size > _MAX_JSON_BYTES:
                raise refuse("chat_template", text, wanted="a file of at most 1 MiB", flag=_FLAG)
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                wanted = "a file in UTF-8"
                raise refuse("chat_template", text, wanted=wanted, flag=_FLAG) from None
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"chat_template is not JSON (--chat-template): {error}.") from None
        if not isinstance(values, dict):
            raise refuse("chat_template", values, wanted="a JSON object", flag=_FLAG)
        known = [item.name for item in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(
                f"chat_template has unknown fields: {', '.join(unknown)[:200]}. The fields are "
                f"{', '.join(known)} (--chat-template)."
            )
        return cls(**{"model_name": "custom", **values})


def parse_chat_template(argument: str | None) -> ChatTemplateConfig | None:
    """Parse `--chat-template`: a Jinja file, a JSON file or JSON text. None returns None."""
    if argument is None:
        return None
    if not argument.lstrip().startswith("{") and Path(argument).suffix in (".jinja", ".j2"):
        if not Path(argument).is_file():
            raise refuse("chat_template", argument, wanted="an existing file", flag=_FLAG)
        return ChatTemplateConfig(model_name="custom", model_path=argument)
    if _is_hub_json(argument):
        return ChatTemplateConfig(model_name="custom", model_path=argument)
    return ChatTemplateConfig.from_json(argument)


def _is_hub_json(argument: str) -> bool:
    """Return whether this is a JSON file of the hub, with a Jinja text in `chat_template`."""
    path = Path(argument) if not argument.lstrip().startswith("{") else None
    if path is None or not path.is_file() or path.stat().st_size > _MAX_JSON_BYTES:
        return False
    try:
        return "chat_template" in json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, TypeError):
        return False
