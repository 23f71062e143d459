"""① The HTTP application: routes, API keys and limits. Errors are JSON in OpenAI's format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from lmdeploy.base.checks import OptionError
from lmdeploy.engine.async_engine import AsyncEngine, EngineFailure
from lmdeploy.serve.admission import Admission
from lmdeploy.serve.auth import AuthMiddleware
from lmdeploy.serve.errors import ApiError, error_response, to_api_error
from lmdeploy.serve.metrics import ServerMetrics
from lmdeploy.serve.routes import ROUTERS
from lmdeploy.serve.routes.base import BODIES, BODY_REFERENCE
from lmdeploy.serve.state import ServerOptions, ServerState
from lmdeploy.version import __version__


def make_app(
    engine: AsyncEngine, options: ServerOptions | None = None, *, enable_metrics: bool = True
) -> FastAPI:
    """Make the application for a running engine. Its shutdown closes the engine."""
    options = options or ServerOptions()
    name = options.model_name or engine.loaded.model_path or "model"
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
    app.add_middleware(AuthMiddleware, api_keys=options.api_keys)
    if options.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allow_origins,
            allow_credentials=options.allow_credentials,
            allow_methods=options.allow_methods,
            allow_headers=options.allow_headers,
        )
    app.state.server = state
    for router in ROUTERS:
        app.include_router(router)
    _describe_bodies(app)
    return app


def _add_errors(app: FastAPI) -> None:
    # AuthMiddleware converts the exceptions that no handler here catches.
    @app.exception_handler(ApiError)
    @app.exception_handler(OptionError)
    @app.exception_handler(EngineFailure)
    async def on_error(_: Request, error: Exception) -> Response:
        return error_response(to_api_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        if error.status_code == 404:
            routes = [route for router in ROUTERS for route in router.routes]
            paths = sorted({route.path for route in routes if isinstance(route, APIRoute)})
            message += f" The paths are {', '.join(paths)}."
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message += f" Use {allowed}."
        response = error_response(ApiError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response


def _describe_bodies(app: FastAPI) -> None:
    """Add the schemas of all request bodies to /openapi.json, so that /docs can send them."""
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = make_schema()
        _, definitions = models_json_schema(
            [(body, "validation") for body in BODIES], ref_template=BODY_REFERENCE
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
