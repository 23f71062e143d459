"""Requests and outputs of the C++ engine as plain values, which travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lmdeploy._turbomind import Request

if TYPE_CHECKING:
    from lmdeploy._turbomind import RequestOutput
    from lmdeploy.chat.grammar import Grammars

Fields: TypeAlias = dict[str, Any]  # of a message, as its to_dict() returns them


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
    fields: Fields


@dataclass(frozen=True)
class StreamAddress:
    """The output stream of one client on one replica."""

    replica: str
    stream: str


def request_fields(request: Request) -> Fields:
    """Return the fields of a request as plain values.

    The id belongs to one engine, and a mask cannot travel: its grammar does.
    """
    fields = request.to_dict()
    del fields["id"]
    mask = fields.pop("token_mask")
    return {**fields, "grammar": None if mask is None else mask.grammar}


def make_request(fields: Fields, *, grammars: Grammars) -> Request:
    """Return the request that has these fields. Raise ValueError for a bad grammar."""
    fields = dict(fields)
    grammar = fields.pop("grammar")
    request = Request.from_dict(fields)
    if grammar is not None:
        request.token_mask = grammars.token_mask(grammar)
    return request


class Progress:
    """Record of what the client of one request has received, for the engine that continues it."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._tokens: list[int] = []
        self._num_prompt_logprobs = 0  # received
        self._num_repeated = 0  # of them, that the current engine still has to repeat
        self._cached_tokens = 0  # of the first engine

    @property
    def can_resume(self) -> bool:
        """Return whether another engine would produce the rest and nothing twice."""
        return not self._tokens or self._fields["logits_output"] != "all"

    def rest(self) -> Fields:
        """Return the fields of the request that produces everything that is missing."""
        fields = dict(self._fields)
        if self._tokens:
            fields["prompt"] = [*fields["prompt"], *self._tokens]
            fields["num_resumed"] = len(self._tokens)
            fields["num_prompt_logprobs"] = -1  # all were sent before the first token
        self._num_repeated = self._num_prompt_logprobs
        return fields

    def take(self, output: RequestOutput) -> RequestOutput:
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
