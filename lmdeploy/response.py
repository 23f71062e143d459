"""Responses: the text, tokens and facts of one answer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from lmdeploy.chat.tool_calls import ToolCall, join_tool_calls


class ResponseType(enum.Enum):
    """How a request ended, as LMDeploy numbers it."""

    SUCCESS = 1
    FINISH = 2
    ENGINE_STOP_ERROR = 3
    SESSION_REPEAT = 4
    SESSION_NOT_EXIST = 5
    HANDLER_NOT_EXIST = 6
    INPUT_LENGTH_ERROR = 7
    INTERNAL_ENGINE_ERROR = 8
    CANCEL = 9
    PREFIX_CACHE_CONFLICT = 10
    NO_QUEUE = 11
    NOT_SUPPORTED = 12
    OUT_OF_MEMORY = 13


FinishReason = Literal["stop", "length", "tool_calls", "error", "abort"]


@dataclass
class Response:
    """An answer, or in a stream a piece of it.

    Args:
        text: without the stop word.
        generate_token_len: tokens generated so far, end and stop tokens not counted.
        input_token_len: tokens of the prompt, template included.
        finish_reason: None while the answer goes on.
        token_ids: the answer's tokens.
        logprobs: per token, token id → log probability; the chosen token is always in it.
        logits: float32 [n, vocab] when asked for.
        index: of the prompt in the call.
        choice: which of the prompt's n answers.
        cached_tokens: prompt tokens taken from the prefix cache.
        prompt_logprobs: as logprobs, of the prompt's tokens from the second on.
        reasoning_content: the part of the answer before its content, if the chat format has one.
        tool_calls: calls that such a model asks for; in a stream parts of them, which
            join_tool_calls makes whole.
    """

    text: str
    generate_token_len: int
    input_token_len: int
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    logits: npt.NDArray[np.float32] | None = None
    last_hidden_state: Any = None
    index: int = 0
    routed_experts: Any = None
    cached_tokens: int = 0
    error_code: str | None = None
    error_message: str | None = None
    prompt_logprobs: list[dict[int, float]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    choice: int = 0

    def extend(self, other: Response) -> None:
        """Appends a later piece of the same answer, in place."""
        self.text += other.text
        self.token_ids += other.token_ids
        if other.reasoning_content is not None:
            self.reasoning_content = (self.reasoning_content or "") + other.reasoning_content
        if other.tool_calls is not None:
            self.tool_calls = join_tool_calls([*(self.tool_calls or []), *other.tool_calls])
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(other, name):
                setattr(self, name, (getattr(self, name) or []) + getattr(other, name))
        if other.logits is not None:
            mine = [] if self.logits is None else [self.logits]
            self.logits = cast("npt.NDArray[np.float32]", np.concatenate([*mine, other.logits]))
        for name in ("generate_token_len", "input_token_len", "finish_reason", "cached_tokens"):
            setattr(self, name, getattr(other, name))
        self.error_code, self.error_message = other.error_code, other.error_message


def join_pieces(chunks: Sequence[Response]) -> Response:
    """The whole answer; linear in its length, and the pieces stay as they are.

    REQUIRES: `pieces` is not empty.
    """

    def joined(name: str) -> list[dict[int, float]] | None:
        parts = [part for p in chunks if (part := getattr(p, name)) is not None]
        return [item for part in parts for item in part] if parts else None

    logits = [chunk.logits for chunk in chunks if chunk.logits is not None]
    reasoning = [p.reasoning_content for p in chunks if p.reasoning_content is not None]
    calls = [call for chunk in chunks for call in chunk.tool_calls or []]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=joined("logprobs"),
        prompt_logprobs=joined("prompt_logprobs"),
        logits=np.concatenate(logits) if logits else None,
        reasoning_content="".join(reasoning) if reasoning else None,
        tool_calls=join_tool_calls(calls) or None,
    )
