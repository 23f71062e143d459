"""POST /render_markdown: parses Markdown into a tree of elements, for the web page."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from lmdeploy.serve.errors import ApiError, JsonResponse
from lmdeploy.serve.rendering.child import MAX_SECONDS
from lmdeploy.serve.rendering.process import RenderingError
from lmdeploy.serve.rendering.tree import MAX_MARKDOWN_NODES
from lmdeploy.serve.routes.base import ApiRouter, post, state_of, until_disconnect
from lmdeploy.serve.schema import ApiRequest

MAX_MARKDOWN_CHARS = 1 << 16

router = ApiRouter()


class MarkdownRequest(ApiRequest):
    """Body of POST /render_markdown."""

    text: str


@post(router, "/render_markdown", body=MarkdownRequest, errors=(404,))
async def render_markdown(request: Request, body: MarkdownRequest) -> Response:
    """Return the nodes of a Markdown text: strings, and lists of a tag, attributes and nodes."""
    state = state_of(request)
    if state.options.disable_web_page:
        raise ApiError(404, "/render_markdown is disabled by --disable-web-page.")
    if len(body.text) > MAX_MARKDOWN_CHARS:
        raise _too_large(
            f"text has {len(body.text)} characters. It must have at most {MAX_MARKDOWN_CHARS}."
        )
    try:
        nodes = await until_disconnect(request, state.markdown.nodes(body.text))
    except RenderingError:
        raise _too_large(
            f"text takes more than {MAX_SECONDS} s or too much memory. Shorten it."
        ) from None
    if nodes is None:
        raise _too_large(f"text has more than {MAX_MARKDOWN_NODES} Markdown elements. Shorten it.")
    return JsonResponse({"nodes": nodes})


def _too_large(message: str) -> ApiError:
    return ApiError(413, message, param="text")
