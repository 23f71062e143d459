"""POST /render_markdown: parses Markdown into a tree of elements, for the web page.

The tree is data and not HTML, so a response of a model can never become a script.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from fastapi import APIRouter, Request, Response
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lmdeploy.serve.errors import ApiError, JsonResponse
from lmdeploy.serve.routes.base import post, state_of, until_disconnect
from lmdeploy.serve.schema import ApiRequest

# Brackets without an end are the slowest text: 2 s for this many characters.
MAX_MARKDOWN_CHARS = 1 << 16
MAX_MARKDOWN_NODES = 20_000  # rows of a table without cells are filled up, so a text can grow
_MAX_DEPTH = 32
_SAFE_LINK = re.compile(r"(https?://|mailto:)", re.IGNORECASE)
_ALIGNED = re.compile(r"text-align:(left|center|right)")

router = APIRouter()
Node = str | list[Any]  # text, or [tag, attributes, *nodes]


class MarkdownRequest(ApiRequest):
    """Body of POST /render_markdown."""

    text: str


@post(router, "/render_markdown", body=MarkdownRequest, errors=(404,))
async def render_markdown(request: Request, body: MarkdownRequest) -> Response:
    """Return the nodes of a Markdown text: strings, and lists of a tag, attributes and nodes."""
    state = state_of(request)
    if not state.enable_web_page:
        raise ApiError(404, "/render_markdown is disabled by --disable-web-page.")
    if len(body.text) > MAX_MARKDOWN_CHARS:
        raise ApiError(
            413,
            f"text has {len(body.text)} characters. It must have at most {MAX_MARKDOWN_CHARS}.",
            param="text",
        )
    async with state.markdown_lock:  # one at a time, because parsing holds the GIL
        nodes = await until_disconnect(request, asyncio.to_thread(markdown_nodes, body.text))
    return JsonResponse({"nodes": nodes})


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.validateLink = lambda url: _SAFE_LINK.match(url) is not None  # type: ignore[method-assign]
    return parser


def markdown_nodes(text: str) -> list[Node]:
    """Parse CommonMark with tables and strikethrough.

    HTML stays text. Links with another scheme than http, https and mailto stay text. Images become
    links, so that showing a response sends no request.

    Raises ApiError 413 if the text has more than MAX_MARKDOWN_NODES elements.
    """
    nodes: list[Node] = []
    stack: list[list[Any]] = [nodes]
    for count, token in enumerate(_tokens(_parser().parse(text))):
        if count >= MAX_MARKDOWN_NODES:
            message = f"text has more than {MAX_MARKDOWN_NODES} Markdown elements. Shorten it."
            raise ApiError(413, message, param="text")
        if token.nesting < 0:
            stack.pop()
        elif token.nesting == 0:
            stack[-1].append(_leaf(token))
        elif token.hidden or len(stack) > _MAX_DEPTH:  # its content joins the parent
            stack.append(stack[-1])
        else:
            node: list[Any] = [token.tag, _attributes(token)]
            stack[-1].append(node)
            stack.append(node)
    return nodes


def _tokens(blocks: list[Token]) -> Iterator[Token]:
    for block in blocks:
        if block.type == "inline":
            yield from block.children or ()
        else:
            yield block


def _leaf(token: Token) -> Node:
    """Return the node of a token without an end: text, code, an image, a break or a rule."""
    if token.type in ("fence", "code_block"):
        words = token.info.split()
        return ["pre", {"language": words[0]} if words else {}, token.content]
    if token.type == "code_inline":
        return ["code", {}, token.content]
    if token.type == "image":
        link = str(token.attrs.get("src", ""))
        return ["a", {"href": link} if link else {}, token.content or link]
    if token.type == "softbreak":
        return "\n"
    return [token.tag, {}] if token.tag else token.content


def _attributes(token: Token) -> dict[str, str]:
    names = ("href", "title", "start")
    found = {k: str(v) for k, v in token.attrs.items() if k in names and v != ""}
    aligned = _ALIGNED.match(str(token.attrs.get("style", "")))
    if aligned is not None:
        found["align"] = aligned[1]
    return found
