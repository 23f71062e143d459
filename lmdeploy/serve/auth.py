"""① Checks API keys and catches every exception."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from lmdeploy.serve.errors import ApiError, error_response, refusal

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("lmdeploy")


class AuthMiddleware:
    """ASGI middleware that checks the API key of every request except those to `public_paths`.

    Without `api_keys` every request passes. Unless `share_prefix_cache` is set, the state of a
    request gets a salt of its key. Otherwise the time and `cached_tokens` of a response would
    reveal the prompts of other clients.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str] = (),
        public_paths: Sequence[str] = (),
        share_prefix_cache: bool = False,
    ) -> None:
        self._app = app
        self._public_paths = frozenset(public_paths)
        self._keys = [key.encode() for key in api_keys]
        self._shares = share_prefix_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = self._matching_key(scope)
        if key is None and not self._is_public(scope):
            message = "Invalid or missing API key. Send `Authorization: Bearer <key>`."
            refused = ApiError(401, message, param="authorization")
            await error_response(refused, scope["path"])(scope, receive, send)
            return
        if key is not None and not self._shares:
            scope.setdefault("state", {})["key_salt"] = hashlib.sha256(key).hexdigest()
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
                await error_response(stops, scope["path"])(scope, receive, send)
        except Exception as error:
            response = refusal(error, scope["path"])
            if not started:
                await response(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        return not self._keys or scope["path"] in self._public_paths or scope["method"] == "OPTIONS"

    def _matching_key(self, scope: Scope) -> bytes | None:
        given = _given_key(Headers(scope=scope))
        if given is None:
            return None
        # Compare with every key in constant time, so that the time reveals nothing about a key.
        matches = [key for key in self._keys if hmac.compare_digest(given.encode(), key)]
        return matches[0] if matches else None


def _given_key(headers: Headers) -> str | None:
    """Return the key that a request sends in any of its forms, or None for another scheme."""
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key", "").strip()  # as Anthropic's clients send it
    scheme, _, given = authorization.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else None


def owner_of(request: Request) -> str:
    """Return a hash of the key that a request sends, which names the owner of what it makes."""
    given = _given_key(request.headers)
    if given is None:  # accepted only by a server without keys
        given = request.headers["authorization"]
    return hashlib.sha256(given.encode()).hexdigest()


def with_key_salt(request: Request, cache_salt: str | None) -> str | None:
    """Return the salt of a request's own `cache_salt` and of its API key."""
    key_salt: str | None = getattr(request.state, "key_salt", None)
    return cache_salt if key_salt is None else f"{key_salt} {cache_salt or ''}"
