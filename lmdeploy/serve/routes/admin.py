"""GET /health, /v1/models and /metrics, and POST /abort_request."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lmdeploy.base.checks import show
from lmdeploy.serve.auth import owner_of
from lmdeploy.serve.errors import ApiError, error_response
from lmdeploy.serve.http.sessions import NO_SESSION
from lmdeploy.serve.routes.base import ApiRouter, check_model, post, state_of
from lmdeploy.serve.routes.documentation import About
from lmdeploy.serve.schema import ApiRequest
from lmdeploy.serve.state import ServerState

router = ApiRouter()


class AbortRequest(ApiRequest):
    """Body of POST /abort_request."""

    abort_all: bool | None = False
    session_id: int | str | None = None


@router.on("/health", "GET", about=About((503,)))
async def health(request: Request) -> Response:
    """Return 200 if the engine is healthy or sleeps, else 503."""
    engine = state_of(request).engine
    if not engine.healthy:
        return error_response(ApiError(503, f"The engine has failed: {engine.failure}"))
    return JSONResponse({"status": "sleeping" if engine.is_sleeping else "ok"})


def _card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "lmdeploy",
        "root": state.model_name,
        "parent": None,
        "max_model_len": state.engine.max_request_tokens,
        "default_generation_settings": dict(state.engine.text.sampling),
    }


def _anthropic_card(state: ServerState) -> dict[str, Any]:
    return {
        "type": "model",
        "id": state.model_name,
        "display_name": state.model_name,
        "created_at": "1970-01-01T00:00:00Z",
        "max_input_tokens": state.engine.max_request_tokens,
        "max_tokens": state.engine.max_request_tokens,
    }


def _is_anthropic(request: Request) -> bool:
    """Return whether a request comes from a client of Anthropic's API, whose paths are the same."""
    return "anthropic-version" in request.headers


@router.on("/v1/models", "GET")
async def models(request: Request) -> Response:
    """List the served model, in Anthropic's form for requests with `anthropic-version`."""
    if _is_anthropic(request):
        return await anthropic_models(request)
    return JSONResponse({"object": "list", "data": [_card(state_of(request))]})


@router.on("/anthropic/v1/models", "GET")
async def anthropic_models(request: Request) -> Response:
    """Return the served model in Anthropic's form."""
    card = _anthropic_card(state_of(request))
    return JSONResponse(
        {"data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
    )


@router.on("/v1/models/{name:path}", "GET", about=About((404,)))
async def model(request: Request) -> Response:
    """Return the served model. `name` may contain slashes."""
    state = state_of(request)
    check_model(state, request.path_params["name"])
    return JSONResponse((_anthropic_card if _is_anthropic(request) else _card)(state))


@router.on("/metrics", "GET", about=About((404,), content="text/plain"))
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus text format."""
    state = state_of(request)
    if not state.enable_metrics:
        raise ApiError(404, "/metrics is disabled by --disable-metrics.")
    return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@post(router, "/abort_request", body=AbortRequest, errors=(501,))
async def abort_request(request: Request, body: AbortRequest) -> Response:
    """End the requests of a session, or all. Their responses keep the tokens generated so far.

    On a server with API keys, only requests of the same key are ended.
    """
    state = state_of(request)
    if not state.options.enable_abort_handling:
        raise ApiError(
            501, "/abort_request is disabled. Start the server with --enable-abort-handling."
        )
    owner = owner_of(request) if state.options.api_keys else ""
    if body.abort_all and state.options.api_keys:
        own = state.sessions.all_request_ids(owner=owner)
        return JSONResponse({"aborted": state.engine.abort(own)})
    if body.abort_all:
        return JSONResponse({"aborted": state.engine.abort_all()})
    if body.session_id in NO_SESSION:
        message = "session_id is missing. Send that of a running request, or set abort_all to true."
        raise ApiError(400, message, param="session_id")
    ids = state.sessions.request_ids(body.session_id, owner=owner)
    if ids is None:
        message = f"session_id is {show(body.session_id)}, but no running request has it."
        raise ApiError(400, message, param="session_id")
    return JSONResponse({"aborted": state.engine.abort(ids)})
