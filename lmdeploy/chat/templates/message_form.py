"""② Find out which messages a chat template accepts, and bring a conversation into that form.

Templates differ in what they read: contents as strings or as lists of parts, system messages
anywhere, only at the beginning, or never. Small conversations are rendered once per template, and
what appears in their prompts decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

# Digits survive filters such as upper and trim.
_FIRST, _SECOND, _OTHER = "7351829460", "8260194735", "1"
_BETWEEN = "\n\n"  # of texts that are joined


@dataclass(frozen=True)
class MessageForm:
    """The messages that a template accepts.

    `parts`: the roles whose content it reads as a list of parts.
    `late_system`: it shows system messages after the first message.
    `system`: it shows a system message at the beginning.
    """

    parts: frozenset[str] = frozenset()
    late_system: bool = True
    system: bool = True

    def adapt(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in this form, with every text.

        System messages that the template does not show where they are become part of the first
        one. If it shows none at all, they become part of the first message of the user.
        """
        adapted = [dict(message) for message in messages]
        is_late = any(message.get("role") == "system" for message in adapted[1:])
        if not self.system or (is_late and not self.late_system):
            adapted = self._with_texts_first(adapted)
        for message in adapted:
            if message.get("role") in self.parts:
                message["content"] = _parts(message["content"])
        return adapted

    def _with_texts_first(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        texts = [message["content"] for message in messages if message["role"] == "system"]
        others = [message for message in messages if message["role"] != "system"]
        if not texts:
            return others
        if self.system:
            return [{"role": "system", "content": _BETWEEN.join(texts)}, *others]
        for message in others:
            if message["role"] == "user":
                message["content"] = _BETWEEN.join([*texts, message["content"]])
                return others
        return [{"role": "user", "content": _BETWEEN.join(texts)}, *others]


def find_form(render: Callable[[list[Message]], str]) -> MessageForm:
    """Return the form of the messages that a template shows.

    `render` returns the prompt of a conversation, or "" if the template rejects it.
    """
    parts: set[str] = set()

    def of(role: str, text: str, **more: Any) -> Message:
        return {"role": role, "content": _parts(text) if role in parts else text, **more}

    def shows(*messages: Message) -> bool:
        text, sent = render(list(messages)), str(messages)
        return all(mark in text for mark in (_FIRST, _SECOND) if mark in sent)

    def learn(role: str, *, before: Sequence[Message] = (), after: Sequence[Message] = ()) -> bool:
        """Return whether the template shows this role, and remember the form of its content."""
        if shows(*before, of(role, _FIRST), *after):
            return True
        parts.add(role)
        if shows(*before, of(role, _FIRST), *after):
            return True
        parts.remove(role)
        return False

    if not learn("user"):
        return MessageForm()  # it rejects everything, and its errors say why
    user = of("user", _OTHER)
    system = learn("system", after=[user])
    learn("assistant", before=[user], after=[user])
    call = {"id": "123456789", "function": {"name": "f", "arguments": {}}}
    learn("tool", before=[user, of("assistant", "", tool_calls=[call])])
    first, answer, second = of("system", _FIRST), of("assistant", _OTHER), of("system", _SECOND)
    late = shows(first, user, second) and shows(first, user, answer, second, user)
    return MessageForm(parts=frozenset(parts), late_system=late, system=system)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
