"""① The HTTP application: routes, keys, limits. Every error is JSON in OpenAI's shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from lmdeploy.messages import Response as Answer
from lmdeploy.serve.chat import ChatReply, prepare_chat
from lmdeploy.serve.completions import CompletionReply, prepare_completion
from lmdeploy.serve.edge import Edge
from lmdeploy.serve.errors import ApiError, error_response
from lmdeploy.serve.events import SseResponse
from lmdeploy.serve.generate import GenerateReply, prepare_generate
from lmdeploy.serve.generation import collect_all, submit_all
from lmdeploy.serve.metrics import ServerMetrics
from lmdeploy.serve.openapi import describe_bodies
from lmdeploy.serve.protocol import (
    MAX_BODY_BYTES,
    MAX_PROMPTS,
    AbortRequest,
    ApiRequest,
    ChatCompletionRequest,
    CompletionRequest,
    EncodeRequest,
    GenerateRequest,
    parse_request,
)
from lmdeploy.serve.state import ServerOptions, ServerState
from lmdeploy.turbomind.engine import AsyncEngine, EngineFailure
from lmdeploy.turbomind.prompts import encode_chat, encode_text
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
    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error.status, error.message, param=error.param)

    @app.exception_handler(ValueError)
    async def on_value_error(_: Request, error: ValueError) -> JSONResponse:
        return error_response(400, str(error), param=str(error).split(":")[0])

    @app.exception_handler(EngineFailure)
    async def on_engine_failure(_: Request, error: EngineFailure) -> JSONResponse:
        return error_response(503, str(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(error.status_code, message)


def _add_status_routes(app: FastAPI, state: ServerState) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine works."""
        if not state.engine.healthy:
            return error_response(503, f"the engine has failed: {state.engine.failure}")
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


def _add_generation_routes(app: FastAPI, state: ServerState) -> None:
    engine = state.engine

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions."""
        body = await _read(request, ChatCompletionRequest)
        _check_model(state, body.model)
        ids, config = await prepare_chat(state, body)
        jobs = await submit_all(engine, [ids], config=config, chat=True)
        reply = ChatReply(state, body)
        if body.stream:
            return SseResponse(reply.events(jobs), jobs)
        answers = await _until_disconnect(request, collect_all(jobs, state.metrics))
        return await _render(lambda: reply.whole(jobs, answers), answers)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """OpenAI's completions."""
        body = await _read(request, CompletionRequest)
        _check_model(state, body.model)
        prompts, config = await prepare_completion(state, body)
        jobs = await submit_all(engine, prompts, config=config)
        reply = CompletionReply(state, body)
        if body.stream:
            return SseResponse(reply.events(jobs), jobs)
        answers = await _until_disconnect(request, collect_all(jobs, state.metrics))
        return await _render(lambda: reply.whole(jobs, answers), answers)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        """LMDeploy's plain generation."""
        body = await _read(request, GenerateRequest)
        ids, config = await prepare_generate(state, body)
        jobs = await submit_all(engine, [ids], config=config)
        reply = GenerateReply(state, body)
        if body.stream:
            return SseResponse(reply.events(jobs), jobs)
        answers = await _until_disconnect(request, collect_all(jobs, state.metrics))
        return await _render(lambda: reply.whole(answers[0]), answers)

    @app.post("/v1/encode")
    async def encode(request: Request) -> dict[str, Any]:
        """Token ids of texts."""
        body = await _read(request, EncodeRequest)
        texts = [body.input] if isinstance(body.input, str) else body.input
        if len(texts) > MAX_PROMPTS:
            raise ApiError(400, f"input: got {len(texts)} texts, wanted at most {MAX_PROMPTS}")
        ids = [await asyncio.to_thread(_encode_one, engine, body, text=text) for text in texts]
        if isinstance(body.input, str):
            return {"input_ids": ids[0], "length": len(ids[0])}
        return {"input_ids": ids, "length": [len(item) for item in ids]}


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
    if body.do_preprocess:
        return encode_chat(engine.parts, [{"role": "user", "content": text}])
    return encode_text(engine.parts, text, add_special=body.add_bos is not False)


def _check_model(state: ServerState, name: str) -> None:
    if name != state.model_name:
        message = f"model: got {name[:100]!r}, wanted {state.model_name!r}; change model"
        raise ApiError(404, message, param="model")


async def _render(build: Callable[[], dict[str, Any]], answers: Sequence[Answer]) -> Response:
    """The body of a whole reply; in a worker thread when log probabilities make it large."""
    if any(answer.logprobs or answer.prompt_logprobs for answer in answers):
        return await asyncio.to_thread(lambda: JSONResponse(build()))
    return JSONResponse(build())


async def _read(request: Request, model: type[R]) -> R:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            message = f"body: got more than {MAX_BODY_BYTES} bytes, wanted fewer; shorten it"
            raise ApiError(413, message)
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
            raise ApiError(400, "the client went away")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
