"""The public response types, and the function that joins chunks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from lmdeploy.chat.tool_calls import ToolCall, join_tool_calls


class ResponseType(enum.Enum):
    """The states of a request with LMDeploy's numbers."""

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
    """A response, or a chunk of it in a stream.

    Args:
        text: the generated text without the stop word.
        generate_token_len: number of tokens generated so far, without end and stop tokens.
        input_token_len: number of tokens of the prompt, chat template included.
        finish_reason: why the response ended. None in all chunks except the last.
        token_ids: ids of the generated tokens.
        logprobs: per generated token, token id → natural log probability. The generated token is
            always included. None if not requested.
        logits: float32 [n, vocab]. None if not requested.
        last_hidden_state: always None; kept for LMDeploy's signature.
        index: number of the prompt in the call, from 0.
        routed_experts: always None; kept for LMDeploy's signature.
        cached_tokens: number of prompt tokens taken from the prefix cache.
        error_code: `bad_request`, `engine_error` or `context_length_exceeded` if finish_reason is
            `error`.
        error_message: why the request failed, if finish_reason is `error`.
        error_field: the option that is wrong, if error_code is `bad_request` and it is one option.
        prompt_logprobs: as logprobs, for the tokens of the prompt from the second on.
        reasoning_content: the reasoning before the content, if the chat format separates it.
        tool_calls: the tool calls of the response, if the chat format has them. A chunk contains
            parts of calls; join_tool_calls joins them.
        choice: number of the response among the n of its prompt, from 0.
        stop_word: the stop word that ended the response, if one did.
        embedding: float32 [hidden_size], only in the last chunk. None without `pooling`.
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
    stop_word: str | None = None
    embedding: npt.NDArray[np.float32] | None = None
    error_field: str | None = None

    @property
    def has_content(self) -> bool:
        """Return whether there is anything besides counts and the end of the response."""
        parts = (self.text, self.token_ids, self.reasoning_content, self.tool_calls)
        return any(parts) or bool(self.prompt_logprobs) or self.logits is not None

    def without_content(self) -> Response:
        """Return the counts and the end of the response."""
        return replace(
            self,
            text="",
            token_ids=[],
            logprobs=None,
            logits=None,
            prompt_logprobs=None,
            reasoning_content=None,
            tool_calls=None,
        )

    def extend(self, other: Response) -> None:
        """Append a later chunk of the same response in place."""
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
        self.stop_word, self.embedding = other.stop_word, other.embedding
        self.error_code, self.error_message = other.error_code, other.error_message
        self.error_field = other.error_field


def join_pieces(chunks: Sequence[Response]) -> Response:
    """Join the chunks of a response into a new Response, in linear time.

    REQUIRES: `chunks` is not empty.
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
