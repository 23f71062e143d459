"""Code that all endpoints share: read a body, and send a response whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from lmdeploy.base.checks import OptionError
from lmdeploy.response import Response as Answer
from lmdeploy.serve.admission import AdmissionSlot
from lmdeploy.serve.errors import ApiError, JsonResponse
from lmdeploy.serve.jobs import Job, PreparedRequest, check_size, close_all, collect_all, submit_all
from lmdeploy.serve.schema import (
    MAX_BODY_BYTES,
    ApiRequest,
    CompletionFields,
    SamplingFields,
    parse_request,
)
from lmdeploy.serve.state import ServerState
from lmdeploy.serve.streaming import SseResponse

BODIES: list[type[ApiRequest]] = []  # the body classes of all POST routes
BODY_REFERENCE = "#/components/schemas/{model}"
R = TypeVar("R", bound=ApiRequest)
T = TypeVar("T")
Handler = Callable[[Request, R], Awaitable[Response]]


def state_of(request: Request) -> ServerState:
    """Return the state of the server that received `request`."""
    state: ServerState = request.app.state.server
    return state


def post(router: APIRouter, path: str, *, body: type[R]) -> Callable[[Handler[R]], Handler[R]]:
    """Register the decorated function for POST requests and describe its body in /openapi.json.

    FastAPI does not parse the bodies, because its errors do not have OpenAI's format.
    """
    schema = {"$ref": BODY_REFERENCE.format(model=body.__name__)}
    described = {"required": True, "content": {"application/json": {"schema": schema}}}

    def register(handler: Handler[R]) -> Handler[R]:
        async def endpoint(request: Request) -> Response:
            return await handler(request, await read_body(request, body))

        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            name=handler.__name__,
            description=handler.__doc__,
            openapi_extra={"requestBody": described},
        )
        BODIES.append(body)
        return handler

    return register


class Reply(Protocol):
    """Builds the JSON of one response."""

    def __init__(self, state: ServerState, request: Any) -> None: ...

    def whole(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of a response without `stream`."""
        ...

    def events(self, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """Yield the events of a response with `stream`."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """The parts in which the generating routes differ."""

    prepare: Callable[[ServerState, Any], Coroutine[Any, Any, PreparedRequest]]
    reply: type[Reply]
    # Field of an error → its name in this route's body.
    fields: Mapping[str, str] = field(default_factory=dict)


async def respond(request: Request, *, endpoint: Endpoint, body: SamplingFields) -> Response:
    """Serve a request if the server has a free slot. Free the slot when the response has ended."""
    state = state_of(request)
    if isinstance(body, CompletionFields):
        check_model(state, body.model)
    with ExitStack() as ends:
        place = ends.enter_context(state.admission.enter())
        response = await _answer(request, state, endpoint=endpoint, body=body, place=place)
        if isinstance(response, SseResponse):
            response.on_end(ends.pop_all().close)
        return response


async def _answer(
    request: Request,
    state: ServerState,
    *,
    endpoint: Endpoint,
    body: SamplingFields,
    place: AdmissionSlot,
) -> Response:
    """Return the response, whole or as events. If the client disconnects, cancel the jobs."""
    jobs: list[Job] = []

    async def start() -> None:
        prepared = await endpoint.prepare(state, body)
        prompts, config = prepared.prompts, prepared.config
        check_size(prompts, config, max_tokens=state.engine.max_request_tokens)
        place.hold(sum(map(len, prompts)) * config.n)
        jobs.extend(await submit_all(state.engine, prepared))

    async def answer() -> list[Answer]:
        await start()
        return await collect_all(jobs, state.metrics)

    reply = endpoint.reply(state, body)
    try:
        if body.stream:
            await until_disconnect(request, start())
            return SseResponse(reply.events(jobs), jobs)
        answers = await until_disconnect(request, answer())
        echoes = bool(getattr(body, "echo", False))
        return await _render(lambda: reply.whole(jobs, answers), answers, echoes=echoes)
    except OptionError as error:
        raise error.renamed(endpoint.fields.get(error.field, error.field)) from error
    except asyncio.CancelledError:
        close_all(jobs)
        raise


def check_model(state: ServerState, name: str) -> None:
    """Raise ApiError 404 if `name` is not the served model."""
    if name != state.model_name:
        message = f"model is {name[:100]!r}. It must be {state.model_name!r}."
        raise ApiError(404, message, param="model")


async def _render(
    build: Callable[[], dict[str, Any]], answers: Sequence[Answer], *, echoes: bool
) -> Response:
    """Build a whole response, in a worker thread if it has echoed prompts or log probabilities."""
    if echoes or any(answer.logprobs or answer.prompt_logprobs for answer in answers):
        return await asyncio.to_thread(lambda: JsonResponse(build()))
    return JsonResponse(build())


async def read_body(request: Request, model: type[R]) -> R:
    """Read and check a body. Raises ApiError 413 if it exceeds MAX_BODY_BYTES, else 400."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                message = f"The body is too long. It must have at most {MAX_BODY_BYTES} bytes."
                raise ApiError(413, message)
    except ClientDisconnect:
        raise _gone() from None
    return parse_request(model, bytes(body))


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, cancel it and raise ApiError 400."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _gone()
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _gone() -> ApiError:
    return ApiError(400, "The client disconnected.")
