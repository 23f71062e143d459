"""Code that all endpoints share: read a body, and send a response whole or as events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.base.checks import OptionError
from lmdeploy.response import Response as Answer
from lmdeploy.serve.admission import AdmissionSlot
from lmdeploy.serve.auth import owner_of, with_key_salt
from lmdeploy.serve.errors import ApiError, JsonResponse, client_gone, refusal
from lmdeploy.serve.http.bodies import check_content_type
from lmdeploy.serve.http.sessions import SessionId
from lmdeploy.serve.http.tracing import RequestSpan
from lmdeploy.serve.jobs import Job, PreparedRequest, check_size, close_all, collect_all, submit_all
from lmdeploy.serve.routes.documentation import OF_POST, About, ApiRoute
from lmdeploy.serve.schema import ApiRequest, parse_request
from lmdeploy.serve.state import ServerState
from lmdeploy.serve.streaming import SseResponse

logger = logging.getLogger("lmdeploy")

R = TypeVar("R", bound=ApiRequest)
T = TypeVar("T")
Handler = Callable[[Request, R], Awaitable[Response]]
_Function = TypeVar("_Function", bound=Callable[[Request], Awaitable[Response]])
_PLAIN = About()


class ApiRouter:
    """The routes of one module."""

    def __init__(self) -> None:
        self.routes: list[ApiRoute] = []

    def on(
        self, path: str, *methods: str, about: About | None = _PLAIN
    ) -> Callable[[_Function], _Function]:
        """Register the decorated function for requests with these methods.

        As in Starlette, HEAD comes with GET. A path that accepts both GET and POST acts, so that it
        does not accept HEAD.
        """

        def register(endpoint: _Function) -> _Function:
            route = ApiRoute(path, endpoint, methods=methods)
            if route.methods is not None and "POST" in methods:
                route.methods.discard("HEAD")
            route.about = about
            self.routes.append(route)
            return endpoint

        return register


def state_of(request: Request) -> ServerState:
    """Return the state of the server that received `request`."""
    state: ServerState = request.app.state.server
    return state


def post(
    router: ApiRouter,
    path: str,
    *,
    body: type[R],
    errors: Sequence[int] = (),
    needs_slot: bool = False,
    events: bool = False,
) -> Callable[[Handler[R]], Handler[R]]:
    """Register the decorated function for POST requests and describe it in /openapi.json.

    Args:
        router: the router of the endpoint's module.
        path: the endpoint's path.
        body: the schema of the body.
        errors: statuses that it sends besides those of every POST endpoint.
        needs_slot: refuse a request while the server is full, before its body is received. The
            handler reserves the slot.
        events: it can send server-sent events.
    """
    about = About((*OF_POST, *errors), body, events=events)

    def register(handler: Handler[R]) -> Handler[R]:
        @router.on(path, "POST", about=about)
        @wraps(handler)
        async def endpoint(request: Request) -> Response:
            state = state_of(request)
            try:
                check_content_type(request.headers.get("content-type"))
                if needs_slot:
                    state.admission.check()
                parsed = await state.bodies.read(request, partial(parse_request, body))
                state.metrics.count_unknown_fields(parsed.num_unknown)
                return await handler(request, parsed)
            except Exception as error:
                return refusal(error, path)

        return handler

    return register


class GeneratingBody(Protocol):
    """The part of a body that all generating routes have."""

    @property
    def stream(self) -> bool | None:
        """Return whether the response is sent as events."""
        ...

    @property
    def session_id(self) -> SessionId:
        """Return the name under which /abort_request finds the request."""
        ...


class Reply(Protocol):
    """Builds the JSON of one response."""

    def __init__(self, state: ServerState, request: Any) -> None: ...

    @property
    def response_id(self) -> str | None:
        """Return the id of the response. None if it has none."""
        ...

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
    # Returns the model that a body names. None if bodies do not name one.
    model: Callable[[Any], str] | None = None
    # Returns whether the response to a body repeats its prompts.
    echoes: Callable[[Any], bool] = lambda body: False


async def respond(request: Request, *, endpoint: Endpoint, body: GeneratingBody) -> Response:
    """Serve a request if the server has a free slot. Free the slot when the response has ended."""
    state = state_of(request)
    if endpoint.model is not None:
        check_model(state, endpoint.model(body))
    with ExitStack() as ends:
        slot = ends.enter_context(state.admission.enter())
        span = None
        if state.tracer is not None:
            span = ends.enter_context(state.tracer.span(request))
        parts = _Parts(endpoint, endpoint.reply(state, body), slot, span)
        owner = owner_of(request) if state.options.api_keys else ""
        ends.enter_context(state.sessions.run(body.session_id, parts.jobs, owner=owner))
        response = await _answer(request, state, parts=parts, body=body)
        if isinstance(response, SseResponse):
            response.on_end(ends.pop_all().close)
        return response


@dataclass(frozen=True)
class _Parts:
    """What serves one request. `span` is None without a tracer."""

    endpoint: Endpoint
    reply: Reply
    slot: AdmissionSlot
    span: RequestSpan | None
    jobs: list[Job] = field(default_factory=list)


async def _answer(
    request: Request, state: ServerState, *, parts: _Parts, body: GeneratingBody
) -> Response:
    """Return the response, whole or as events. If the client disconnects, cancel the jobs."""
    endpoint, reply, jobs = parts.endpoint, parts.reply, parts.jobs

    def follow(prepared: PreparedRequest) -> None:
        if parts.span is not None:
            parts.span.follow(prepared, jobs, response_id=reply.response_id)

    async def start() -> None:
        prepare = endpoint.prepare(state, body)
        jobs.extend(await _start(request, prepare, slot=parts.slot, follow=follow))

    async def answer() -> list[Answer]:
        await start()
        return await collect_all(jobs, state.metrics)

    try:
        if body.stream:
            await until_disconnect(request, start())
            return SseResponse(reply.events(jobs), jobs)
        answers = await until_disconnect(request, answer())
        echoes = endpoint.echoes(body)
        return await _render(lambda: reply.whole(jobs, answers), answers, echoes=echoes)
    except OptionError as error:
        raise error.renamed(endpoint.fields.get(error.field, error.field)) from error
    except asyncio.CancelledError:
        close_all(jobs)
        raise


async def run_prompts(
    request: Request, prepare: Coroutine[Any, Any, PreparedRequest], *, slot: AdmissionSlot
) -> tuple[list[Job], list[Answer]]:
    """Wait for the whole responses to prompts. If the client disconnects, cancel them.

    Raise OptionError or ApiError for a request that is wrong or fails.
    """

    async def run() -> tuple[list[Job], list[Answer]]:
        jobs = await _start(request, prepare, slot=slot)
        return jobs, await collect_all(jobs, state_of(request).metrics)

    return await until_disconnect(request, run())


async def _start(
    request: Request,
    prepare: Coroutine[Any, Any, PreparedRequest],
    *,
    slot: AdmissionSlot,
    follow: Callable[[PreparedRequest], None] = lambda prepared: None,
) -> list[Job]:
    """Check a request and submit it to the engine. `follow` is called between the two."""
    state = state_of(request)
    prepared = await prepare
    prompts, config = prepared.prompts, prepared.config
    config.cache_salt = with_key_salt(request, config.cache_salt)
    check_size(prepared, max_tokens=state.engine.max_request_tokens)
    follow(prepared)
    slot.hold(sum(map(len, prompts)) * config.n)
    if state.options.max_log_len and logger.isEnabledFor(logging.INFO):
        await asyncio.to_thread(_log_prompts, state, prompts, path=request.url.path)
    return await submit_all(state.engine, prepared)


def _log_prompts(state: ServerState, prompts: Sequence[list[int]], *, path: str) -> None:
    """Log the beginning of each prompt, in one line each."""
    tokenizer, limit = state.engine.text.tokenizer, state.options.max_log_len
    for ids in prompts:
        known = [token for token in ids[:limit] if token < tokenizer.vocab_size]
        text = tokenizer.decode(known, skip_special=False)[:limit]
        logger.info("POST %s: a prompt of %d tokens: %r", path, len(ids), text)


def check_model(state: ServerState, name: str) -> None:
    """Raise ApiError 404 if `name` is not the served model."""
    if name != state.model_name:
        message = f"The model {name[:100]!r} does not exist. Use {state.model_name!r}."
        raise ApiError(404, message, param="model", code="model_not_found")


async def _render(
    build: Callable[[], dict[str, Any]], answers: Sequence[Answer], *, echoes: bool
) -> Response:
    """Build a whole response, in a worker thread if it has echoed prompts or log probabilities."""
    if echoes or any(answer.logprobs or answer.prompt_logprobs for answer in answers):
        return await asyncio.to_thread(lambda: JsonResponse(build()))
    return JsonResponse(build())


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
            raise client_gone()
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
