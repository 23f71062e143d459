"""① The HTTP application: routes, API keys and limits. Errors are JSON in OpenAI's format."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from difflib import get_close_matches

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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
from lmdeploy.serve.routes.documentation import ApiRoute, make_document
from lmdeploy.serve.routes.web import PUBLIC_PATHS
from lmdeploy.serve.state import ServerOptions, ServerState

_MAX_THREADS = 64  # of the event loop
_NEAREST = 3  # paths in an error 404


def make_app(
    engine: AsyncEngine, options: ServerOptions | None = None, *, enable_metrics: bool = True
) -> Starlette:
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
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
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

    routes: list[Route] = [*_routes()]
    if not options.disable_fastapi_docs:
        document = make_document(_routes(), has_keys=bool(options.api_keys))
        routes.append(Route("/openapi.json", lambda _: JSONResponse(document)))
    # AuthMiddleware converts the exceptions that no handler here catches.
    own = dict.fromkeys((ApiError, OptionError, EngineFailure), _on_error)
    app = Starlette(
        routes=routes,
        exception_handlers={**own, HTTPException: _on_http_error},
        lifespan=lifespan,
    )
    app.add_middleware(
        AuthMiddleware,
        api_keys=options.api_keys,
        public_paths=("/health", *PUBLIC_PATHS),
        share_prefix_cache=options.share_prefix_cache,
    )
    _check_origins(app, options)
    app.add_middleware(ErrorCounter, metrics=state.metrics)  # runs first, as the last one added
    app.state.server = state
    return app


def _check_origins(app: Starlette, options: ServerOptions) -> None:
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


async def _on_error(_: Request, error: Exception) -> Response:
    return refusal(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    message = f"{request.method} {path}: {error.detail}."
    headers = dict(error.headers or {})
    if error.status_code == 404:
        paths = {route.path for route in _routes()}
        near = get_close_matches(path, sorted(paths), n=_NEAREST, cutoff=0)
        message += f" The nearest paths are {', '.join(near)}."
    elif error.status_code == 405:
        # Starlette names the methods of one route only.
        found = [route.methods or () for route in _routes() if route.path_regex.match(path)]
        headers["Allow"] = ", ".join(sorted({method for methods in found for method in methods}))
        message += f" Use {headers['Allow']}."
    response = error_response(ApiError(error.status_code, message))
    response.headers.update(headers)
    return response


def _routes() -> list[ApiRoute]:
    return [route for router in ROUTERS for route in router.routes]
