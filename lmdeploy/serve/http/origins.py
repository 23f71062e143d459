"""① Refuses requests that pages of other sites send through a user's browser.

A browser adds `Origin` to every request that can change something, and a page cannot change that
header. `Host` is the name under which the browser looked up the server. A site can point its own
name at 127.0.0.1 and would then have the server's origin, so a local server also checks `Host`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from lmdeploy.base.checks import show
from lmdeploy.serve.errors import ApiError, error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_PORT = re.compile(r":\d*$")


class OriginMiddleware:
    """ASGI middleware that checks the headers `Host` and `Origin` of every request.

    Requests of a page of this server pass. So do those without `Origin`, which browsers send only
    if no other site is involved or if nothing can change.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        allow_origins: Sequence[str] | None,
        allowed_hosts: Sequence[str] | None,
    ) -> None:
        """Set the names.

        Args:
            app: the application.
            allow_origins: other origins whose pages may send requests. `*` allows all. None allows
                the pages of this computer.
            allowed_hosts: accepted values of `Host`, without ports. None accepts all.
        """
        self._app = app
        self._origins = None if allow_origins is None else frozenset(allow_origins)
        self._hosts = None if allowed_hosts is None else {name.lower() for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        if error is not None:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        # Only HTTP/1.0 requests have no Host. No browser sends them.
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_own_host(host):
            advice = "Add the name to --allowed-hosts if clients use it for this server."
            message = f"Host is {show(host)}, which is not a name of this server. {advice}"
            return ApiError(421, message, param="host")
        if origin is not None and not self._is_allowed(origin, host or ""):
            advice = "Add the origin to --allow-origins if its pages may use this server."
            message = f"Origin is {show(origin)}, which is not allowed. {advice}"
            return ApiError(403, message, param="origin")
        return None

    def _is_own_host(self, host: str) -> bool:
        return self._hosts is None or _PORT.sub("", host).lower() in self._hosts

    def _is_allowed(self, origin: str, host: str) -> bool:
        # A proxy may add TLS, so the schemes of the server's own pages can differ.
        if origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return True
        if self._origins is None:
            return re.fullmatch(LOCAL_ORIGIN, origin) is not None
        return "*" in self._origins or origin in self._origins


def accepted_hosts(server_name: str, allowed_hosts: Sequence[str]) -> list[str] | None:
    """Return the accepted values of `Host` for a server. None accepts all.

    A server that listens on a loopback address accepts the names of the local computer and
    `allowed_hosts`. The names of any other server are not known here, so it accepts all unless
    `allowed_hosts` is set.
    """
    if "*" in allowed_hosts or not (allowed_hosts or is_loopback(server_name)):
        return None
    own = f"[{server_name}]" if ":" in server_name else server_name
    return [*LOCAL_HOSTS, own, *allowed_hosts]


def is_loopback(server_name: str) -> bool:
    """Return whether only programs of this computer can reach the address."""
    try:
        address = socket.getaddrinfo(server_name, None, type=socket.SOCK_STREAM)[0][4][0]
        return ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError):
        return False
