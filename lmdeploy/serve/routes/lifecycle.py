"""POST /sleep and /wakeup, GET /is_sleeping, and /terminate: for the operator of the server."""

from __future__ import annotations

import asyncio
import ipaddress
import logging

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lmdeploy.base.checks import show
from lmdeploy.engine.async_engine import SLEEPING_PARTS
from lmdeploy.serve.errors import ApiError
from lmdeploy.serve.routes.base import ApiRouter, state_of
from lmdeploy.serve.routes.documentation import About

logger = logging.getLogger("lmdeploy")

router = ApiRouter()
_ERRORS = (400, 500, 503)
_SLEEP = About(_ERRORS, query={"level": {"type": "string", "default": "1"}})
_WAKEUP = About(_ERRORS, query={"tags": {"type": "array", "items": {"type": "string"}}})
_FETCH_SITES = (None, "none", "same-origin")  # values of Sec-Fetch-Site of the server's own pages


@router.on("/sleep", "POST", about=_SLEEP)
async def sleep(request: Request) -> Response:
    """Free the weights and the KV cache, and end running requests with `abort`.

    Both levels of LMDeploy do the same. Needs an API key; without keys, a client on this machine.
    """
    check_operator(request)
    level = request.query_params.get("level", "1")
    if level not in ("1", "2"):
        raise ApiError(400, f"level is {show(level)}. It must be 1 or 2.", param="level")
    await asyncio.to_thread(state_of(request).engine.sleep)
    logger.warning("The engine sleeps. POST /wakeup loads the model again.")
    return JSONResponse({"is_sleeping": True})


@router.on("/wakeup", "POST", about=_WAKEUP)
@router.on("/wake_up", "POST", about=_WAKEUP)  # vLLM's name
async def wakeup(request: Request) -> Response:
    """Load the model again. `tags` asks for one part, `weights` or `kv_cache`.

    The engine wakes when both parts have been asked for. Needs an API key; without keys, a client
    on this machine.
    """
    check_operator(request)
    parts = request.query_params.getlist("tags") or list(SLEEPING_PARTS)
    for part in parts:
        if part not in SLEEPING_PARTS:
            wanted = " or ".join(sorted(SLEEPING_PARTS))
            raise ApiError(400, f"tags is {show(part)}. It must be {wanted}.", param="tags")
    engine = state_of(request).engine
    try:
        await asyncio.to_thread(engine.wake, parts)
    except (ValueError, MemoryError) as error:
        raise ApiError(503, f"The engine still sleeps: {error}") from error
    return JSONResponse({"is_sleeping": engine.is_sleeping})


@router.on("/is_sleeping", "GET")
async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps."""
    return JSONResponse({"is_sleeping": state_of(request).engine.is_sleeping})


@router.on("/terminate", "GET", "POST", about=About((400,)))
async def terminate(request: Request) -> Response:
    """Stop the server as SIGTERM does, if --allow-terminate-by-client is set.

    Needs an API key; without keys, a client on this machine.
    """
    check_operator(request)
    state = state_of(request)
    if not state.options.allow_terminate_by_client:
        raise ApiError(
            400, "/terminate is disabled. Start the server with --allow-terminate-by-client."
        )
    state.terminate()
    return JSONResponse({"terminating": True})


def check_operator(request: Request) -> None:
    """Raise ApiError 403 for a client of another machine if the server has no API keys.

    AuthMiddleware has checked the key of a server with keys. A page of another site cannot send
    these requests either: it could send a GET without `Origin`.
    """
    if request.headers.get("sec-fetch-site") not in _FETCH_SITES:
        raise ApiError(403, "Pages of other sites cannot use this endpoint.")
    if not state_of(request).options.api_keys and not _is_local(request):
        raise ApiError(
            403,
            "This endpoint accepts only clients on the server's machine. Start the server with "
            "--api-keys to use it from elsewhere.",
        )


def _is_local(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:  # not an IP address
        return False
