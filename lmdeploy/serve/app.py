"""① The HTTP application: routes, keys, limits. Every error is JSON in OpenAI's shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.prompts import encode_chat, encode_text
from lmdeploy.engine.async_engine import AsyncEngine, EngineFailure
from lmdeploy.response import Response as Answer
from lmdeploy.serve.admission import Admission, Place
from lmdeploy.serve.auth import Edge
from lmdeploy.serve.errors import ApiError, JsonResponse, error_response, to_api_error
from lmdeploy.serve.jobs import (
    MAX_ENCODED_TOKENS,
    Job,
    Prepared,
    check_size,
    close_all,
    collect_all,
    encode_texts,
    submit_all,
)
from lmdeploy.serve.metrics import ServerMetrics
from lmdeploy.serve.openapi import describe_bodies
from lmdeploy.serve.routes.chat import ChatReply, prepare_chat
from lmdeploy.serve.routes.completions import CompletionReply, prepare_completion
from lmdeploy.serve.routes.generate import GenerateReply, prepare_generate
from lmdeploy.serve.schema import (
    MAX_BODY_BYTES,
    AbortRequest,
    ApiRequest,
    ChatCompletionRequest,
    CompletionFields,
    CompletionRequest,
    EncodeRequest,
    GenerateRequest,
    SamplingFields,
    parse_request,
)
from lmdeploy.serve.state import ServerOptions, ServerState
from lmdeploy.serve.streaming import SseResponse
from lmdeploy.version import __version__

R = TypeVar("R", bound=ApiRequest)
T = TypeVar("T")


def make_app(
    engine: AsyncEngine, options: ServerOptions | None = None, *, enable_metrics: bool = True
) -> FastAPI:
    """The application for a running engine, which is closed with the application."""
    options = options or ServerOptions()
    name = options.model_name or engine.parts.model_path or "model"
    state = ServerState(
        engine,
        name,
        ServerMetrics(engine, name),
        Admission(options.max_concurrent_requests),
        enable_metrics=enable_metrics,
        enable_abort_handling=options.enable_abort_handling,
        created=int(time.time()),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    docs = None if options.disable_fastapi_docs else "/docs"
    app = FastAPI(
        title="lmdeploy-fp4",
        version=__version__,
        lifespan=lifespan,
        docs_url=docs,
        redoc_url=None,
        openapi_url=None if docs is None else "/openapi.json",
    )
    _add_errors(app)
    app.add_middleware(Edge, api_keys=options.api_keys)
    if options.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allow_origins,
            allow_credentials=options.allow_credentials,
            allow_methods=options.allow_methods,
            allow_headers=options.allow_headers,
        )
    _add_status_routes(app, state)
    _add_generation_routes(app, state)
    _add_abort_route(app, state)
    describe_bodies(
        app,
        {
            "/v1/chat/completions": ChatCompletionRequest,
            "/v1/completions": CompletionRequest,
            "/generate": GenerateRequest,
            "/v1/encode": EncodeRequest,
            "/abort_request": AbortRequest,
        },
    )
    return app


def _add_errors(app: FastAPI) -> None:
    # What comes past these, the Edge answers.
    @app.exception_handler(ApiError)
    @app.exception_handler(OptionError)
    @app.exception_handler(EngineFailure)
    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 404:
            paths = sorted({route.path for route in app.routes if isinstance(route, APIRoute)})
            message += f"; wanted one of {', '.join(paths)}; change the path"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message += f"; wanted {allowed}; change the method"
        response = error_response(ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response


def _add_status_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine works."""
        if not state.engine.healthy:
            message = f"the engine has failed: {state.engine.failure}"
            return error_response(ApiError(503, message))
        return JSONResponse({"status": "ok"})

    card = {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "lmdeploy",
        "root": state.model_name,
        "parent": None,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        data = [{**card, "max_model_len": state.engine.max_request_tokens}]
        return {"object": "list", "data": data}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The one model, by its name, which may hold slashes."""
        _check_model(state, name)
        return {**card, "max_model_len": state.engine.max_request_tokens}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        if not state.enable_metrics:
            raise ApiError(404, "/metrics: switched off by --disable-metrics")
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


class Reply(Protocol):
    """Builds the JSON of one response."""

    def __init__(self, state: ServerState, request: Any) -> None: ...

    def whole(self, jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        ...

    def events(self, jobs: Sequence[Job]) -> AsyncIterator[bytes]:
        """The answer to a request with `stream`."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """What one generating route has of its own."""

    body: type[SamplingFields]
    prepare: Callable[[ServerState, Any], Coroutine[Any, Any, Prepared]]
    reply: type[Reply]
    is_chat: bool = False
    # Fields of errors that have another name in this route's body.
    fields: Mapping[str, str] = field(default_factory=dict)


_CHAT = Endpoint(
    ChatCompletionRequest, prepare_chat, ChatReply, is_chat=True, fields={"prompt": "messages"}
)
_COMPLETION = Endpoint(CompletionRequest, prepare_completion, CompletionReply)
_GENERATE = Endpoint(
    GenerateRequest, prepare_generate, GenerateReply, fields={"logprobs": "top_logprobs_num"}
)


async def _generate(request: Request, state: ServerState, *, endpoint: Endpoint) -> Response:
    """Answers a request if there is a place for it, which is left when the answer has ended."""
    body = await _read(request, endpoint.body)
    if isinstance(body, CompletionFields):
        _check_model(state, body.model)
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
    place: Place,
) -> Response:
    """The answer, whole or as events. A client that leaves at any time cancels it."""
    jobs: list[Job] = []

    async def start() -> None:
        prepared = await endpoint.prepare(state, body)
        prompts, config = prepared.prompts, prepared.config
        check_size(prompts, config, max_tokens=state.engine.max_request_tokens)
        place.hold(sum(map(len, prompts)) * config.n)
        jobs.extend(await submit_all(state.engine, prepared, chat=endpoint.is_chat))

    async def answer() -> list[Answer]:
        await start()
        return await collect_all(jobs, state.metrics)

    reply = endpoint.reply(state, body)
    try:
        if body.stream:
            await _until_disconnect(request, start())
            return SseResponse(reply.events(jobs), jobs)
        answers = await _until_disconnect(request, answer())
        echoes = bool(getattr(body, "echo", False))
        return await _render(lambda: reply.whole(jobs, answers), answers, echoes=echoes)
    except OptionError as error:
        raise error.renamed(endpoint.fields.get(error.field, error.field)) from error
    except asyncio.CancelledError:
        close_all(jobs)
        raise


def _add_generation_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions."""
        return await _generate(request, state, endpoint=_CHAT)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """OpenAI's completions."""
        return await _generate(request, state, endpoint=_COMPLETION)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        """LMDeploy's plain generation."""
        return await _generate(request, state, endpoint=_GENERATE)

    @app.post("/v1/encode")
    async def encode(request: Request) -> Response:
        """Token ids of texts."""
        body = await _read(request, EncodeRequest)
        texts = [body.input] if isinstance(body.input, str) else body.input
        with state.admission.enter():
            work = encode_texts(texts, lambda text: _encode_one(state.engine, body, text=text))
            try:
                ids = await _until_disconnect(request, work)
            except OptionError as error:
                raise error.renamed("input") from error
            reply: dict[str, Any] = {"input_ids": ids, "length": [len(item) for item in ids]}
            if isinstance(body.input, str):
                reply = {"input_ids": ids[0], "length": len(ids[0])}
            return await asyncio.to_thread(JsonResponse, reply)


def _add_abort_route(app: FastAPI, state: ServerState) -> None:
    @app.post("/abort_request")
    async def abort_request(request: Request) -> dict[str, Any]:
        """LMDeploy's: ends all running answers, which keep what they have."""
        if not state.enable_abort_handling:
            raise ApiError(501, "/abort_request: switched on by --enable-abort-handling")
        body = await _read(request, AbortRequest)
        if not body.abort_all:
            raise ApiError(
                400,
                "abort_all: got false, wanted true, as requests have no session_id here; set "
                "abort_all, or close the connection of the request",
                param="abort_all",
            )
        return {"aborted": state.engine.abort_all()}


def _encode_one(engine: AsyncEngine, body: EncodeRequest, *, text: str) -> list[int]:
    parts, most = engine.parts, MAX_ENCODED_TOKENS
    if body.do_preprocess:
        message = {"role": "user", "content": text}
        return encode_chat(parts, [message], max_tokens=most).ids
    return encode_text(parts, text, add_special=body.add_bos is not False, max_tokens=most)


def _check_model(state: ServerState, name: str) -> None:
    if name != state.model_name:
        message = f"model: got {name[:100]!r}, wanted {state.model_name!r}; change model"
        raise ApiError(404, message, param="model")


async def _render(
    build: Callable[[], dict[str, Any]], answers: Sequence[Answer], *, echoes: bool
) -> Response:
    """The body of a whole reply; in a worker thread when prompts or log probabilities are in it."""
    if echoes or any(answer.logprobs or answer.prompt_logprobs for answer in answers):
        return await asyncio.to_thread(lambda: JsonResponse(build()))
    return JsonResponse(build())


async def _read(request: Request, model: type[R]) -> R:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                message = f"body: got more than {MAX_BODY_BYTES} bytes, wanted fewer; shorten it"
                raise ApiError(413, message)
    except ClientDisconnect:
        raise _gone() from None
    return parse_request(model, bytes(body))


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away."""

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
    return ApiError(400, "the client went away")
