"""Requests and outputs of the C++ engine as plain values, which travel between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lmdeploy import _turbomind
    from lmdeploy.chat.grammar import Grammars

# `id` belongs to one engine, and a mask cannot travel: the fields have its grammar instead.
_NOT_SENT = {"id", "token_mask"}


@dataclass(frozen=True)
class Submission:
    """One attempt to run a request on a replica.

    Args:
        client: name of the ReplicatedCore that receives the outputs.
        request_id: id of the request in the client, the same in all attempts.
        attempt: number that the client uses once. It becomes the request id of the outputs.
        fields: as `request_fields` returns them.
    """

    client: str
    request_id: int
    attempt: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class StreamAddress:
    """The output stream of one client on one replica."""

    replica: str
    stream: str


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


def request_fields(request: _turbomind.Request) -> dict[str, Any]:
    """Return the fields of a request as plain values."""
    names = [name for name in dir(request) if not name.startswith("_") and name not in _NOT_SENT]
    mask: Any = request.token_mask
    fields = {name: getattr(request, name) for name in names}
    return {**fields, "grammar": None if mask is None else mask.grammar}


def make_request(fields: dict[str, Any], *, grammars: Grammars) -> _turbomind.Request:
    """Return the request that has these fields. Raise ValueError for a bad grammar."""
    from lmdeploy import _turbomind

    request = _turbomind.Request()
    for name in fields.keys() - {"grammar"}:
        setattr(request, name, fields[name])
    if fields["grammar"] is not None:
        request.token_mask = grammars.token_mask(fields["grammar"])
    return request


def copy_output(output: Any, *, request_id: int) -> Output:
    """Return a copy of an output of the C++ engine with another request id."""
    values = {name: getattr(output, name) for name in Output.__dataclass_fields__}
    for name in ("logprobs", "prompt_logprobs"):
        values[name] = _copy_logprobs(values[name])
    return Output(**{**values, "request_id": request_id})


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
