"""⑨ Streams responses as server-sent events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse

from lmdeploy.response import Response
from lmdeploy.serve.errors import ApiError, error_body, json_bytes, json_text, to_api_error
from lmdeploy.serve.jobs import Job, close_all, request_error

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from lmdeploy.serve.http.connections import PartWriter
    from lmdeploy.serve.metrics import ServerMetrics

EventJson = dict[str, Any]  # the JSON of one event
Event = EventJson | bytes  # or the event itself, of an EventTemplate


@dataclass(frozen=True)
class EventForm:
    """How an API writes the events of a stream.

    Args:
        error: returns the event of an error.
        is_named: each event has a line with its `type`, and no `[DONE]` comes at the end.
    """

    error: Callable[[ApiError], EventJson] = error_body
    is_named: bool = False

    def event(self, body: Event) -> bytes:
        """Return an event. One that was written already stays as it is."""
        if isinstance(body, bytes):
            return body
        name = f"event: {body['type']}\n".encode() if self.is_named else b""
        return name + b"data: " + json_bytes(body) + b"\n\n"


OPENAI_EVENTS = EventForm()
# Stands in the body of an EventTemplate for a value. No client can know it.
HOLE = secrets.token_hex(16)


class EventTemplate:
    """Writes events that differ only in some values, without the JSON between them.

    The events are the same bytes as those of `form.event`.
    """

    def __init__(self, body: EventJson, form: EventForm = OPENAI_EVENTS) -> None:
        """Take the body of an event with HOLE in the place of each value."""
        self._parts = form.event(body).split(f'"{HOLE}"'.encode())

    def event(self, *values: str | int | list[int] | None) -> bytes:
        """Return the event with these values in the order of their places."""
        event = self._parts[0]
        for value, part in zip(values, self._parts[1:], strict=True):
            event += (json_text(value) if isinstance(value, str) else json_bytes(value)) + part
        return event


async def answer_events(
    jobs: Sequence[Job],
    metrics: ServerMetrics,
    *,
    bodies: Callable[[Job, Response], Iterable[Event]],
    first: Iterable[EventJson] = (),
    last: Callable[[], Iterable[EventJson]] = tuple,
    form: EventForm = OPENAI_EVENTS,
) -> AsyncIterator[bytes]:
    """Yield the events of a response: `first`, `bodies` of every chunk, `last` and `[DONE]`.

    The events of one chunk are one piece.

    If a request fails or `bodies` raises, the stream ends with an error event.
    """
    for body in first:
        yield form.event(body)
    try:
        async with aclosing(_merge(jobs, metrics)) as chunks:
            async for job, chunk in chunks:
                if chunk.finish_reason == "error":
                    raise request_error(chunk)
                events = bytearray()
                try:
                    for event in bodies(job, chunk):
                        events += form.event(event)
                finally:  # an error comes after the events before it
                    if events:
                        yield bytes(events)
    except Exception as failure:
        yield form.event(form.error(to_api_error(failure)))
        return
    for body in last():
        yield form.event(body)
    if not form.is_named:
        yield b"data: [DONE]\n\n"


async def _merge(
    jobs: Sequence[Job], metrics: ServerMetrics
) -> AsyncGenerator[tuple[Job, Response], None]:
    """Yield the chunks of all jobs in the order in which they arrive."""
    if len(jobs) == 1:
        async with aclosing(metrics.observe(jobs[0].stream, jobs[0].progress)) as chunks:
            async for chunk in chunks:
                yield jobs[0], chunk
        return
    # With a limit, the outputs of a reader that is slow wait in the streams, which join them.
    queue: asyncio.Queue[tuple[Job, Response] | BaseException | None] = asyncio.Queue(len(jobs))

    async def one(job: Job) -> None:
        try:
            async with aclosing(metrics.observe(job.stream, job.progress)) as chunks:
                async for chunk in chunks:
                    await queue.put((job, chunk))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(one(job)) for job in jobs]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        close_all(jobs)


class SseResponse(StreamingResponse):
    """A stream of events. When it ends, even if it was never read, its requests are cancelled."""

    def __init__(self, events: AsyncIterator[bytes], jobs: Sequence[Job]) -> None:
        # The second header keeps nginx from buffering the events.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._jobs = jobs
        self._on_end: Callable[[], None] = lambda: None

    def on_end(self, call: Callable[[], None]) -> None:
        """Set the function to call when the stream has ended."""
        self._on_end = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Then cancel the requests that still run, even after an exception."""
        self._parts: PartWriter | None = scope.get("state", {}).get("parts")
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                close_all(self._jobs)
            finally:
                self._on_end()

    async def stream_response(self, send: Send) -> None:
        """Send the head, the events and the end of the response."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        if self._parts is None:
            await self._send_parts(send)
        else:
            async for part in self.body_iterator:
                assert isinstance(part, bytes)
                await self._parts.write(part)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_parts(self, send: Send) -> None:
        """Send the events to a server without PartWriter.

        Between two of them, the event loop can notice that the client is gone. asyncio logs a
        warning if more is written to a connection that is lost.
        """
        await asyncio.sleep(0)
        async for part in self.body_iterator:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
