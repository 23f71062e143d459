"""Streaming clients against one server, and what they saw.

The client reads lines from a socket and looks at a clock: parsing waits until the last answer is
complete, because client and server share the machine's cores.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

REQUEST_TIMEOUT_S = 1800.0
FIRST_WORD_ID = 300  # above the special tokens and single bytes of the families that are measured
LAST_WORD_ID = 40_000
MAX_EVENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Load:
    """`clients` clients send `requests` requests each, one after the other."""

    clients: int
    requests: int
    prompt_tokens: int
    answer_tokens: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random ids; no two prompts of any seed begin alike, so that no cache of prompts helps."""
        rng = np.random.default_rng(seed)
        shape = (self.clients * self.requests, self.prompt_tokens)
        ids: list[list[int]] = rng.integers(
            FIRST_WORD_ID, min(vocab_size, LAST_WORD_ID), shape
        ).tolist()
        return ids

    def body(self, prompt: list[int], model: str) -> bytes:
        """A greedy request to /v1/completions that runs to its length limit."""
        return json.dumps(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": self.answer_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


@dataclass(frozen=True)
class Answer:
    """When a request was sent and when each piece of its text came, by time.perf_counter."""

    sent: float
    pieces: list[float]
    tokens: int

    @property
    def time_to_first(self) -> float:
        """Seconds."""
        return self.pieces[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def time_per_token(self) -> float:
        """Mean seconds per token after the first piece."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


@dataclass(frozen=True)
class LoadResult:
    """Figures of one run; times in seconds.

    A piece is what one event brings: a token, or several where their bytes make a character only
    together. `p99_token`: 99 % of the pieces came within that time after the one before.
    """

    requests_per_s: float
    tokens_per_s: float
    p50_token: float
    p99_token: float
    p99_request_mean: float
    p50_first: float
    p99_first: float
    pieces_per_token: float


def summarise(answers: Sequence[Answer], seconds: float) -> LoadResult:
    """ValueError when an answer has no pieces to time."""
    gaps = [gap for answer in answers for gap in answer.gaps]
    if not gaps:
        raise ValueError(f"{len(answers)} answers without two pieces: nothing to time")
    tokens = sum(answer.tokens for answer in answers)
    firsts = [answer.time_to_first for answer in answers]
    return LoadResult(
        requests_per_s=len(answers) / seconds,
        tokens_per_s=tokens / seconds,
        p50_token=statistics.median(gaps),
        p99_token=float(np.percentile(gaps, 99)),
        p99_request_mean=float(np.percentile([a.time_per_token for a in answers], 99)),
        p50_first=statistics.median(firsts),
        p99_first=float(np.percentile(firsts, 99)),
        pieces_per_token=sum(len(answer.pieces) for answer in answers) / tokens,
    )


async def send(port: int, body: bytes, *, load: Load) -> Answer:
    """One request. RuntimeError for anything but a whole answer of the wanted lengths."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_EVENT_BYTES)
    try:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sent = time.perf_counter()
        writer.write(head.encode() + body)
        await writer.drain()
        lines: list[tuple[float, bytes]] = []
        status = await reader.readline()
        while line := await reader.readline():
            if line.startswith(b"data:"):
                lines.append((time.perf_counter(), line))
            elif not status.startswith(b"HTTP/1.1 200"):
                status += line
    finally:
        writer.close()
    if not status.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the server answered {status[:1000].decode(errors='replace')}")
    return read_answer(sent, lines, load=load)


def read_answer(sent: float, lines: Sequence[tuple[float, bytes]], *, load: Load) -> Answer:
    """The events of a stream. RuntimeError for errors and for other lengths than were asked for."""
    pieces: list[float] = []
    usage: dict[str, Any] = {}
    for at, line in lines:
        text = line[len(b"data:") :].strip()
        if text == b"[DONE]":
            break
        event = json.loads(text)
        if "error" in event:
            raise RuntimeError(f"the server answered {event['error']}")
        if any(choice.get("text") for choice in event.get("choices", ())):
            pieces.append(at)
        usage = event.get("usage") or usage
    else:
        raise RuntimeError(f"the stream ended after {len(lines)} events without [DONE]")
    got = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if got != (load.prompt_tokens, load.answer_tokens) or len(pieces) < 2:
        raise RuntimeError(
            f"answer: got {got[0]} prompt tokens, {got[1]} tokens in {len(pieces)} pieces; wanted "
            f"{load.prompt_tokens} and {load.answer_tokens}"
        )
    return Answer(sent, pieces, load.answer_tokens)


async def _client(port: int, bodies: Sequence[bytes], *, load: Load) -> list[Answer]:
    return [await asyncio.wait_for(send(port, b, load=load), REQUEST_TIMEOUT_S) for b in bodies]


async def _clients(port: int, bodies: Sequence[bytes], *, load: Load) -> list[Answer]:
    tasks = [_client(port, bodies[i :: load.clients], load=load) for i in range(load.clients)]
    return [answer for answers in await asyncio.gather(*tasks) for answer in answers]


def run_load(port: int, load: Load, *, model: str, vocab_size: int, seed: int) -> LoadResult:
    """All requests; the clock runs from the first that is sent to the last that is complete."""
    bodies = [load.body(prompt, model) for prompt in load.prompts(vocab_size, seed)]
    begun = time.perf_counter()
    answers = asyncio.run(_clients(port, bodies, load=load))
    return summarise(answers, time.perf_counter() - begun)
