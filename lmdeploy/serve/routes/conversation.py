"""①② Conversations of every API in one form, and the requests that they become."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmdeploy.base.checks import refuse
from lmdeploy.chat.prompts import encode_chat
from lmdeploy.chat.tool_calls import check_tool_use
from lmdeploy.serve.jobs import PreparedRequest
from lmdeploy.serve.sampling import Limits, make_config
from lmdeploy.serve.schema import SamplingFields
from lmdeploy.serve.state import ServerState

logger = logging.getLogger("lmdeploy")

_MAX_TYPE_CHARS = 40  # in messages


@dataclass
class Conversation:
    """A conversation with the names and forms of OpenAI's chat completions.

    Args:
        skipped: types of tools and items that the server cannot run, and leaves out.
        options: variables of the chat template.
        begins_answer: as in `encode_chat`.
    """

    messages: Sequence[dict[str, Any]]
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    skipped: Sequence[str] = ()
    options: dict[str, Any] = field(default_factory=dict)
    begins_answer: bool | None = None


def runnable_tools(
    tools: Sequence[dict[str, Any]], is_runnable: Callable[[Any], bool], *, skipped: list[str]
) -> list[dict[str, Any]]:
    """Return the tools whose type is runnable, and add the other types to `skipped`.

    Agents send tools that only their own provider runs beside those that they run themselves.

    Raise OptionError if all are of other types, because the answer would not be what was asked for.
    """
    kept = []
    for tool in tools:
        if is_runnable(tool.get("type")):
            kept.append(tool)
        else:
            skipped.append(str(tool.get("type"))[:_MAX_TYPE_CHARS])
    if tools and not kept:
        wanted = "a function of the client, because the server runs no tools itself"
        raise refuse("tools[0].type", tools[0].get("type"), wanted=wanted)
    return kept


async def prepare_conversation(
    state: ServerState, conversation: Conversation, *, fields: SamplingFields, limits: Limits
) -> PreparedRequest:
    """Render a conversation and convert the sampling fields. Raise OptionError for a bad field."""
    if conversation.skipped:
        state.metrics.skipped_tools.inc(len(conversation.skipped))
        logger.debug("Tools that the server cannot run: %s", ", ".join(conversation.skipped[:20]))
    tool_use = check_tool_use(
        conversation.tools,
        conversation.tool_choice,
        parallel_tool_calls=conversation.parallel_tool_calls,
    )
    options = dict(conversation.options)
    if options.get("tools") in (None, []):
        options.pop("tools", None)
    ids, start = await asyncio.to_thread(
        encode_chat,
        state.engine.text,
        list(conversation.messages),
        tool_use=tool_use,
        template_options=options,
        begins_answer=conversation.begins_answer,
    )
    room = max(state.engine.max_request_tokens - len(ids), 1)
    config = make_config(fields, limits, model_defaults=state.engine.text.sampling, room=room)
    return PreparedRequest([ids], config, start=start)


async def count_prompt_tokens(state: ServerState, conversation: Conversation) -> int:
    """Return the number of tokens of a conversation as a prompt, in a slot of its own.

    Raise OptionError for a bad field.
    """
    with state.admission.enter():
        prompt = await asyncio.to_thread(
            encode_chat,
            state.engine.text,
            list(conversation.messages),
            tool_use=check_tool_use(conversation.tools, conversation.tool_choice),
            template_options=conversation.options,
            begins_answer=conversation.begins_answer,
        )
    return len(prompt.ids)
