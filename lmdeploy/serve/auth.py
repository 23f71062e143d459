"""① The outermost layer of the server: it checks API keys and catches every exception."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from lmdeploy.serve.errors import ApiError, error_response, to_api_error

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("lmdeploy")

PUBLIC_PATHS = ("/health",)


class AuthMiddleware:
    """ASGI middleware that checks the API key of every request except /health.

    Without `api_keys` every request passes.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._allowed(scope):
            message = "Invalid or missing API key. Send `Authorization: Bearer <key>`."
            refused = ApiError(401, message, param="authorization")
            await error_response(refused)(scope, receive, send)
            return
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except asyncio.CancelledError:  # the server stops and no caller awaits this task
            logger.info("%s: the request was cancelled because the server stops", scope["path"])
            if not started:
                stops = ApiError(503, "The server is stopping. Try again later.")
                await error_response(stops)(scope, receive, send)
        except Exception as error:
            told = to_api_error(error)
            if not started:
                await error_response(told)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in PUBLIC_PATHS or scope["method"] == "OPTIONS":
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compare with every key in constant time, so that the time reveals nothing about a key.
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)
