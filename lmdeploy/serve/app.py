"""① The HTTP application: routes, API keys and limits. Errors are JSON in OpenAI's format."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import EngineFailure
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.serve.admission import Admission
from lmdeploy.serve.auth import AuthMiddleware
from lmdeploy.serve.errors import ApiError, error_response, refusal
from lmdeploy.serve.http.bodies import BodyReader
from lmdeploy.serve.http.origins import LOCAL_ORIGIN, OriginMiddleware, accepted_hosts
from lmdeploy.serve.http.response_store import ResponseStore
from lmdeploy.serve.http.sessions import Sessions
from lmdeploy.serve.http.tracing import RequestTracer
from lmdeploy.serve.metrics import ErrorCounter, ServerMetrics
from lmdeploy.serve.rendering.process import MarkdownProcess
from lmdeploy.serve.routes import ROUTERS
from lmdeploy.serve.routes.base import BODY_REFERENCE
from lmdeploy.serve.routes.documentation import finish_schema
from lmdeploy.serve.routes.web import PUBLIC_PATHS
from lmdeploy.serve.state import ServerOptions, ServerState
from lmdeploy.version import __version__

_MAX_THREADS = 64  # of the event loop
_NEAREST = 3  # paths in an error 404


def make_app(
    engine: AsyncEngine, options: ServerOptions | None = None, *, enable_metrics: bool = True
) -> FastAPI:
    """Make the application for a running engine. Its shutdown closes the engine."""
    options = options or ServerOptions()
    name = options.model_name or engine.text.model_path or "model"
    endpoint = options.otlp_traces_endpoint
    state = ServerState(
        engine,
        name,
        ServerMetrics(engine, name),
        Admission(options.max_concurrent_requests),
        MarkdownProcess(),
        BodyReader(),
        ResponseStore(),
        Sessions(),
        options,
        enable_metrics=enable_metrics,
        created=int(time.time()),
        tracer=None if endpoint is None else RequestTracer(endpoint, model_name=name),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # By default, a loop has as many threads as cores and four more, which slow texts and stores
        # could occupy.
        workers = ThreadPoolExecutor(_MAX_THREADS, "tm-worker")
        asyncio.get_running_loop().set_default_executor(workers)
        # A full collection waits until garbage reaches a quarter of what survived the last one.
        # Without the objects of the start, that is a few thousand objects instead of 100,000, and
        # the garbage of lost connections does not pile up.
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()
        await state.markdown.close()
        await asyncio.to_thread(engine.close)
        if state.tracer is not None:
            await asyncio.to_thread(state.tracer.close)

    app = FastAPI(
        title="lmdeploy-fp4",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page would load its program from elsewhere
        redoc_url=None,
        openapi_url=None if options.disable_fastapi_docs else "/openapi.json",
    )
    _add_errors(app)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(
        AuthMiddleware,
        api_keys=options.api_keys,
        public_paths=("/health", *PUBLIC_PATHS),
        share_prefix_cache=options.share_prefix_cache,
    )
    _check_origins(app, options)
    app.add_middleware(ErrorCounter, metrics=state.metrics)  # runs first, as the last one added
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    _describe_api(app, has_keys=bool(options.api_keys))
    return app


class HeadMiddleware:
    """Answers HEAD as GET. uvicorn leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope.get("method") == "HEAD" and "HEAD" in _methods_of(scope["path"]):
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def _check_origins(app: FastAPI, options: ServerOptions) -> None:
    """Refuse requests of foreign pages, and name the pages that may read responses."""
    is_default = options.allow_origins is None
    app.add_middleware(
        CORSMiddleware,
        allow_origins=options.allow_origins or (),
        allow_origin_regex=LOCAL_ORIGIN if is_default else None,
        allow_credentials=options.allow_credentials,
        allow_methods=options.allow_methods,
        allow_headers=options.allow_headers,
    )
    # The middleware that is added last runs first.
    app.add_middleware(
        OriginMiddleware,
        allow_origins=options.allow_origins,
        allowed_hosts=accepted_hosts(options.server_name, options.allowed_hosts),
    )


def _add_errors(app: FastAPI) -> None:
    # AuthMiddleware converts the exceptions that no handler here catches.
    @app.exception_handler(ApiError)
    @app.exception_handler(OptionError)
    @app.exception_handler(EngineFailure)
    async def on_error(_: Request, error: Exception) -> Response:
        return refusal(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        headers = dict(error.headers or {})
        if error.status_code == 404:
            paths = {route.path for route in _routes()}
            near = get_close_matches(request.url.path, sorted(paths), n=_NEAREST, cutoff=0)
            message += f" The nearest paths are {', '.join(near)}."
        elif error.status_code == 405:
            headers["Allow"] = ", ".join(_methods_of(request.url.path))
            message += f" Use {headers['Allow']}."
        response = error_response(ApiError(error.status_code, message))
        response.headers.update(headers)
        return response


def _routes() -> list[APIRoute]:
    routes = [route for router in ROUTERS for route in router.routes]
    return [route for route in routes if isinstance(route, APIRoute)]


def _methods_of(path: str) -> list[str]:
    """Return the methods that a path accepts. FastAPI names those of one route only.

    A path that accepts both GET and POST acts, so that it does not accept HEAD.
    """
    found = [route.methods or () for route in _routes() if route.path_regex.match(path)]
    methods = {method for methods in found for method in methods}
    if "GET" in methods and "POST" not in methods:
        methods.add("HEAD")
    return sorted(methods)


def _describe_api(app: FastAPI, *, has_keys: bool) -> None:
    """Add the request bodies to /openapi.json, and the API keys."""
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = make_schema()
        _, definitions = models_json_schema(
            [(body, "validation") for router in ROUTERS for body in router.bodies],
            ref_template=BODY_REFERENCE,
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        finish_schema(schema, has_keys=has_keys)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
