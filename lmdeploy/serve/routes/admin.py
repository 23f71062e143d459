"""Health, the model's card, metrics, and the end of all running requests."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from lmdeploy.config.unsupported import ABORT, unsupported_body_fields
from lmdeploy.serve.errors import ApiError, error_response
from lmdeploy.serve.routes.base import check_model, post, state_of
from lmdeploy.serve.schema import ApiRequest, Unsupported
from lmdeploy.serve.state import ServerState

router = APIRouter()


class AbortRequest(ApiRequest):
    """Body of POST /abort_request."""

    unsupported: ClassVar[Unsupported] = unsupported_body_fields(ABORT)

    abort_all: bool | None = False


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine works."""
    engine = state_of(request).engine
    if not engine.healthy:
        return error_response(ApiError(503, f"the engine has failed: {engine.failure}"))
    return JSONResponse({"status": "ok"})


def _card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "lmdeploy",
        "root": state.model_name,
        "parent": None,
        "max_model_len": state.engine.max_request_tokens,
    }


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model."""
    return {"object": "list", "data": [_card(state_of(request))]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """The one model, by its name, which may hold slashes."""
    state = state_of(request)
    check_model(state, name)
    return _card(state)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    state = state_of(request)
    if not state.enable_metrics:
        raise ApiError(404, "/metrics: switched off by --disable-metrics")
    return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@post(router, "/abort_request", body=AbortRequest)
async def abort_request(request: Request, body: AbortRequest) -> Response:
    """LMDeploy's: ends all running answers, which keep what they have."""
    state = state_of(request)
    if not state.enable_abort_handling:
        raise ApiError(501, "/abort_request: switched on by --enable-abort-handling")
    if not body.abort_all:
        raise ApiError(
            400,
            "abort_all: got false, wanted true, as requests have no session_id here; set "
            "abort_all, or close the connection of the request",
            param="abort_all",
        )
    return JSONResponse({"aborted": state.engine.abort_all()})
