"""② Rendering by openai-harmony, for checkpoints without a chat template. Nothing is downloaded."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.formats.harmony.conversation import Turn

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding, Message

VOCABULARY = "o200k_base.tiktoken"
VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
logger = logging.getLogger("lmdeploy")
_load_lock = threading.Lock()


def load_encoding() -> HarmonyEncoding:
    """The library's encoding, with the vocabulary from the folder that VARIABLE names.

    Raises ValueError that says which package, file or variable is missing.
    """
    why = "chat template: the model has none, and rendering GPT-OSS's format without it needs"
    try:
        import openai_harmony  # noqa: F401
    except ImportError:
        raise ValueError(
            f"{why} openai-harmony; install the extra `harmony`, or give --chat-template"
        ) from None
    folder = os.environ.get(VARIABLE, "")
    # Without the variable the library would look in the network.
    if not folder or not (Path(folder) / VOCABULARY).is_file():
        state = f"there is none in {folder}" if folder else f"{VARIABLE} is not set"
        raise ValueError(
            f"{why} the file {VOCABULARY}: {state}; set {VARIABLE} to the folder with that file, "
            "or give --chat-template"
        )
    with _load_lock:
        return _load(folder)


def warn_without_encoding() -> None:
    """Logs what rendering will lack, at the start of a model without a template."""
    try:
        load_encoding()
    except ValueError as error:
        logger.warning("%s", error)


@cache
def _load(folder: str) -> HarmonyEncoding:
    from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

    try:
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except HarmonyError as error:
        raise ValueError(f"{Path(folder) / VOCABULARY}: cannot be read: {error}") from error


def render_by_library(turns: Sequence[Turn], options: dict[str, Any]) -> str:
    """The prompt's text, special tokens written out, up to the beginning of the answer.

    `options` may hold `tools`, `reasoning_effort`, `builtin_tools` and `model_identity`; others
    have no meaning here.
    """
    from openai_harmony import Conversation, HarmonyError, RenderConversationConfig, Role

    try:
        encoding = load_encoding()
    except ValueError as error:
        raise OptionError("messages", str(error)) from None
    messages = [_system(options), *_developer(turns, options)]
    for turn in turns:
        messages += _messages_of(turn)
    try:
        ids = encoding.render_conversation_for_completion(
            Conversation.from_messages(messages),
            Role.ASSISTANT,
            # Which reasoning is left out is decided in conversation.py.
            RenderConversationConfig(auto_drop_analysis=False),
        )
    except (HarmonyError, ValueError) as error:
        raise OptionError("messages", f"openai-harmony cannot render them: {error}") from error
    return str(encoding.decode(ids))


def _system(options: dict[str, Any]) -> Message:
    from openai_harmony import Message, ReasoningEffort, Role, SystemContent

    content = SystemContent.new().with_conversation_start_date(datetime.now().strftime("%Y-%m-%d"))
    effort = str(options.get("reasoning_effort", "medium"))
    content = content.with_reasoning_effort(ReasoningEffort(effort.capitalize()))
    identity = options.get("model_identity")
    if isinstance(identity, str):
        content = content.with_model_identity(identity)
    if "browser" in options.get("builtin_tools", []):
        content = content.with_browser_tool()
    if "python" in options.get("builtin_tools", []):
        content = content.with_python_tool()
    return Message.from_role_and_content(Role.SYSTEM, content)


def _developer(turns: Sequence[Turn], options: dict[str, Any]) -> Iterator[Message]:
    from openai_harmony import DeveloperContent, Message, Role, ToolDescription

    instructions = [turn.content for turn in turns if turn.role == "developer"]
    functions = [tool["function"] for tool in options.get("tools", [])]
    if not instructions and not functions:
        return
    content = DeveloperContent.new()
    if instructions:
        content = content.with_instructions(instructions[0])
    if functions:
        tools = [
            ToolDescription.new(f["name"], f["description"], f["parameters"] or None)
            for f in functions
        ]
        content = content.with_function_tools(tools)
    yield Message.from_role_and_content(Role.DEVELOPER, content)


def _messages_of(turn: Turn) -> Iterator[Message]:
    from openai_harmony import Author, Message, Role

    def say(text: str, channel: str) -> Message:
        return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)

    if turn.role == "user":
        yield Message.from_role_and_content(Role.USER, turn.content)
    elif turn.role == "tool" and turn.call is not None:
        author = Author.new(Role.TOOL, _recipient(turn.call.name))
        message = Message.from_author_and_content(author, turn.content)
        yield message.with_recipient("assistant").with_channel("commentary")
    elif turn.role == "assistant" and turn.call is None:
        yield say(turn.content, "final")
    elif turn.call is not None:
        if turn.thinking and turn.keeps_thinking:
            yield say(turn.thinking, "analysis")
        if turn.content:
            yield say(turn.content, "commentary")
        message = say(turn.call.arguments, "commentary")
        message = message.with_recipient(_recipient(turn.call.name))
        yield message.with_content_type("<|constrain|>json")


def _recipient(name: str) -> str:
    is_builtin = name == "python" or name.startswith("browser.")
    return name if is_builtin else f"functions.{name}"
