"""①② Conversations of every API in one form, and the requests that they become."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmdeploy.chat.prompts import encode_chat
from lmdeploy.chat.tool_calls import check_tool_use
from lmdeploy.serve.jobs import PreparedRequest
from lmdeploy.serve.sampling import Limits, make_config
from lmdeploy.serve.schema import SamplingFields
from lmdeploy.serve.state import ServerState


@dataclass
class Conversation:
    """A conversation with the names and forms of OpenAI's chat completions.

    Args:
        options: variables of the chat template.
        begins_answer: as in `encode_chat`.
    """

    messages: Sequence[dict[str, Any]]
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    begins_answer: bool | None = None


async def prepare_conversation(
    state: ServerState, conversation: Conversation, *, fields: SamplingFields, limits: Limits
) -> PreparedRequest:
    """Render a conversation and convert the sampling fields. Raise OptionError for a bad field."""
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
        state.engine.loaded,
        list(conversation.messages),
        tool_use=tool_use,
        template_options=options,
        begins_answer=conversation.begins_answer,
    )
    room = max(state.engine.max_request_tokens - len(ids), 1)
    config = make_config(fields, limits, model_defaults=state.engine.loaded.sampling, room=room)
    return PreparedRequest([ids], config, start=start)


async def count_prompt_tokens(state: ServerState, conversation: Conversation) -> int:
    """Return the number of tokens of a conversation as a prompt, in a slot of its own.

    Raise OptionError for a bad field.
    """
    with state.admission.enter():
        prompt = await asyncio.to_thread(
            encode_chat,
            state.engine.loaded,
            list(conversation.messages),
            tool_use=check_tool_use(conversation.tools, conversation.tool_choice),
            template_options=conversation.options,
            begins_answer=conversation.begins_answer,
        )
    return len(prompt.ids)
