"""Requests and outputs of the C++ engine as plain values, which can go to another process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lmdeploy import _turbomind
    from lmdeploy.chat.grammar import Grammars

# All fields of a C++ request except its id, which belongs to one engine, and its callback.
REQUEST_FIELDS = (
    "prompt",
    "priority",
    "num_resumed",
    "max_new_tokens",
    "min_new_tokens",
    "ignore_eos",
    "eos_ids",
    "stop_sequences",
    "bad_sequences",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "num_logprobs",
    "logit_bias",
    "num_prompt_logprobs",
    "logits_output",
    "pooling",
    "long_rope",
    "cache_salt",
)
REQUEST_ID = "request_id"  # in the core that sends it, for the router
CALLER = "caller"  # the Ray job of the process that receives the outputs
CORE = "core"  # the name of the core that sends it
TICKET = "ticket"  # a number that the core uses once; it marks the outputs in the mailbox
MAILBOX = "mailbox"  # of a call that reads a mailbox: its name
REPLICA = "replica"  # of a call that reads a mailbox: the id of the replica that has it
GRAMMAR = "grammar"  # instead of token_mask: the text from which an engine compiles it


@dataclass(frozen=True)
class Logprobs:
    """Has the fields of _turbomind.TokenLogprobs."""

    chosen: float
    top: list[tuple[int, float]]


@dataclass
class Output:
    """Has the fields of _turbomind.RequestOutput."""

    request_id: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    logits: npt.NDArray[np.float32] | None = None
    pooled: npt.NDArray[np.float32] | None = None
    finish_reason: str = "none"
    stop_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    is_request_fault: bool = False


Letter = tuple[int, Output]  # a ticket and an output of its request


@dataclass(frozen=True)
class First:
    """The first output of a request, and the mailbox that receives the others."""

    output: Output
    replica: str
    mailbox: str


def request_fields(request: _turbomind.Request) -> dict[str, Any]:
    """Return the fields of a request as plain values."""
    fields = {name: getattr(request, name) for name in REQUEST_FIELDS}
    mask: Any = request.token_mask
    fields[GRAMMAR] = None if mask is None else mask.grammar
    return fields


def make_request(fields: dict[str, Any], *, grammars: Grammars) -> _turbomind.Request:
    """Return the request that has these fields. Raise ValueError for a bad grammar."""
    from lmdeploy import _turbomind

    request = _turbomind.Request()
    for name in REQUEST_FIELDS:
        setattr(request, name, fields[name])
    if fields[GRAMMAR] is not None:
        request.token_mask = grammars.token_mask(fields[GRAMMAR])
    return request


def copy_output(output: Any) -> Output:
    """Return a copy of an output of the C++ engine."""
    return Output(
        request_id=output.request_id,
        tokens=output.tokens,
        logprobs=_copy_logprobs(output.logprobs),
        prompt_logprobs=_copy_logprobs(output.prompt_logprobs),
        logits=output.logits,
        pooled=output.pooled,
        finish_reason=output.finish_reason,
        stop_tokens=output.stop_tokens,
        cached_tokens=output.cached_tokens,
        error=output.error,
        is_request_fault=output.is_request_fault,
    )


def _copy_logprobs(items: Sequence[Any]) -> list[Logprobs]:
    return [Logprobs(item.chosen, item.top) for item in items]


class Progress:
    """Record of what the client of one request has received, for the engine that continues it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._tokens: list[int] = []
        self._num_prompt_logprobs = 0  # received
        self._num_repeated = 0  # of them, that the current engine still has to repeat
        self._cached_tokens = 0  # of the first engine

    @property
    def can_resume(self) -> bool:
        """Return whether another engine would produce the rest and nothing twice."""
        return not self._tokens or self._fields["logits_output"] != "all"

    def rest(self) -> dict[str, Any]:
        """Return the fields of the request that produces everything that is missing."""
        fields = dict(self._fields)
        if self._tokens:
            fields["prompt"] = [*fields["prompt"], *self._tokens]
            fields["num_resumed"] = len(self._tokens)
            fields["num_prompt_logprobs"] = -1  # all were sent before the first token
        self._num_repeated = self._num_prompt_logprobs
        return fields

    def take(self, output: Output) -> Output:
        """Count an output and return it without what the client has received already."""
        num_repeated = min(self._num_repeated, len(output.prompt_logprobs))
        self._num_repeated -= num_repeated
        output.prompt_logprobs = output.prompt_logprobs[num_repeated:]
        self._num_prompt_logprobs += len(output.prompt_logprobs)
        if not self._tokens:
            self._cached_tokens = output.cached_tokens
        output.cached_tokens = self._cached_tokens
        self._tokens += output.tokens
        return output
