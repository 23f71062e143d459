"""GET / and /web/{name}: a page to chat with the model and to watch the KV cache.

The page needs no API key, because it contains no data. It asks the user for the key and sends it
with every request to the other endpoints.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse

from lmdeploy.serve.errors import ApiError
from lmdeploy.serve.routes.base import ApiRouter, state_of

router = ApiRouter()

_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_FILES = {
    path.name: path
    for path in Path(__file__).resolve().parents[1].joinpath("web").iterdir()
    if path.suffix in _TYPES
}
PUBLIC_PATHS = ("/", "/favicon.ico", *(f"/web/{name}" for name in _FILES))

# The page loads only its own files and sends requests only to this server. It has no inline script
# or style, and Trusted Types stop it from turning any text into HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.on("/", "GET", about=None)
async def page(request: Request) -> FileResponse:
    """Return the web page."""
    return _file(request, "index.html")


@router.on("/web/{name}", "GET", about=None)
async def page_file(request: Request) -> FileResponse:
    """Return a script, the style sheet or the icon of the web page."""
    return _file(request, request.path_params["name"])


@router.on("/favicon.ico", "GET", about=None)
async def favicon(request: Request) -> FileResponse:
    """Return the icon. Browsers ask for this name if they have not read the page's link yet."""
    return _file(request, "icon.svg")


def _file(request: Request, name: str) -> FileResponse:
    if state_of(request).options.disable_web_page:
        raise ApiError(404, "The web page is disabled by --disable-web-page.")
    path = _FILES.get(name)
    if path is None:
        raise ApiError(404, f"The web page has no file {name[:100]!r}.")
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)
