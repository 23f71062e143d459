"""Tests of the endpoints of the web page, without a browser."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import make_engine
from hypothesis import given
from hypothesis import strategies as st
from serving import post, serving

from lmdeploy.serve.errors import ApiError
from lmdeploy.serve.routes.markdown import (
    MAX_MARKDOWN_CHARS,
    MAX_MARKDOWN_NODES,
    markdown_nodes,
)

WEB = Path(__file__).resolve().parents[3] / "lmdeploy/serve/web"
TAGS = {
    *("p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br"),
    *("em", "strong", "s", "code", "pre", "a", "table", "thead", "tbody", "tr", "th", "td"),
}
ATTRIBUTES = {"href", "title", "start", "align", "language"}
MAX_DEPTH = 33  # 32 elements around a code span
PIECES = st.sampled_from(
    (
        *"ab<>[]()!*_~`|#-\\\"' \n\t&:;/é\x00",
        *("**", "```", "> ", "- ", "1. ", "|-|-|\n", "](", "<a href=", "&#106;"),
        *("javascript:alert(1)", "data:text/html,x", "http://x", "mailto:a"),
    )
)


@pytest.fixture(scope="module")
def url():
    with serving(make_engine()) as url:
        yield url


def depth(node: Any) -> int:
    """Return the nested elements of a node, and check its tags and attributes."""
    if isinstance(node, str):
        return 0
    tag, attributes, *children = node
    assert tag in TAGS and set(attributes) <= ATTRIBUTES
    assert attributes.get("href", "http://").lower().startswith(("http://", "https://", "mailto:"))
    return 1 + max(map(depth, children), default=0)


@given(st.lists(PIECES, max_size=60).map("".join))
def test_markdown_nodes_have_only_known_tags_and_safe_links(text):
    assert all(depth(node) <= MAX_DEPTH for node in markdown_nodes(text))


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("a *b* **c** ~~d~~ `e`", ["p", "em", "strong", "s", "code"]),
        ("- x\n- y", ["ul", "li", "li"]),
        ("|a|\n|-|\n|b|", ["table", "thead", "tr", "th", "tbody", "tr", "td"]),
        ("# a\n\n> b\n\n---", ["h1", "blockquote", "p", "hr"]),
    ],
)
def test_markdown_nodes_have_the_tags_of_the_text(text, nodes):
    def tags(node):
        return [] if isinstance(node, str) else [node[0], *(t for n in node[2:] for t in tags(n))]

    assert [tag for node in markdown_nodes(text) for tag in tags(node)] == nodes


def test_markdown_keeps_html_and_unsafe_links_as_text():
    for text in ("<b>x</b>", "[x](javascript:y)", "[x](/v1/models)", "<javascript:x>"):
        assert "".join(markdown_nodes(text)[0][2:]) == text


def test_markdown_shows_images_as_links():
    link = ["a", {"href": "http://x/y.png"}, "z"]
    assert [n for n in markdown_nodes("![z](http://x/y.png)")[0] if isinstance(n, list)] == [link]


def test_markdown_keeps_start_alignment_and_language():
    assert markdown_nodes("3. x") == [["ol", {"start": "3"}, ["li", {}, "x"]]]
    assert markdown_nodes("|a|\n|-:|")[0][2][2][2] == ["th", {"align": "right"}, "a"]
    assert markdown_nodes("```py x\n<\n```") == [["pre", {"language": "py"}, "<\n"]]


@pytest.mark.parametrize("text", ["*a " * 2000 + "b* " * 2000, "> " * 20000, "[" * 65536])
def test_hostile_markdown_ends_soon_and_is_not_deep(text):
    begin = time.monotonic()
    try:
        nodes = markdown_nodes(text[:MAX_MARKDOWN_CHARS])
    except ApiError as error:
        assert error.status == 413
    else:
        assert all(depth(node) <= MAX_DEPTH for node in nodes)
    assert time.monotonic() - begin < 30


def test_render_markdown_refuses_long_texts_and_huge_tables(url):
    table = "|a" * 400 + "\n" + "|-" * 400 + "\n" + "|\n" * 5000
    long = "a" * (MAX_MARKDOWN_CHARS + 1)
    for text, limit in ((long, MAX_MARKDOWN_CHARS), (table, MAX_MARKDOWN_NODES)):
        reply = post(url, "/render_markdown", {"text": text})
        assert reply.status_code == 413
        assert str(limit) in reply.json()["error"]["message"]
    reply = post(url, "/render_markdown", {"text": "*a*"})
    assert reply.json() == {"nodes": [["p", {}, ["em", {}, "a"]]]}


def test_page_allows_only_its_own_files(url):
    for name in ("", "favicon.ico", *(f"web/{path.name}" for path in WEB.iterdir())):
        reply = httpx.get(f"{url}/{name}")
        assert reply.status_code == 200
        assert reply.headers["x-content-type-options"] == "nosniff"
        policy = dict(
            part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; ")
        )
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self' data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }


@pytest.mark.parametrize("name", ["..%2fapp.py", "%2e%2e/app.py", "no.js", "", "a" * 9000])
def test_page_serves_no_other_file(url, name):
    assert httpx.get(f"{url}/web/{name}").status_code == 404


def test_page_files_name_no_other_host():
    for path in WEB.iterdir():
        text = path.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text and "innerHTML" not in text and "style=" not in text, path


def test_only_the_page_is_public():
    with serving(make_engine(), api_keys=["secret"]) as url:
        for path in ("/", "/web/main.js", "/favicon.ico"):
            assert httpx.get(url + path).status_code == 200
        for path in ("/v1/engine/stats", "/web/no.js", "/web/", "//", "/web/main.js/"):
            assert httpx.get(url + path).status_code == 401
        assert post(url, "/render_markdown", {"text": "a"}).status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/engine/stats", headers=key).status_code == 200
        assert post(url, "/render_markdown", {"text": "a"}, headers=key).status_code == 200


def test_disable_web_page_removes_the_page(url):
    with serving(make_engine(), disable_web_page=True) as without:
        for reply in (
            httpx.get(without),
            httpx.get(f"{without}/web/main.js"),
            post(without, "/render_markdown", {"text": "a"}),
        ):
            assert reply.status_code == 404
            assert "is disabled by --disable-web-page." in reply.json()["error"]["message"]
        assert httpx.get(f"{without}/v1/engine/stats").status_code == 200
    assert httpx.get(url).status_code == 200


def test_engine_stats_describe_cache_and_requests(url):
    stats = httpx.get(f"{url}/v1/engine/stats").json()
    assert stats["requests"] == {"running": 0, "waiting": 0, "preemptions": 0}
    assert stats["prefix_cache"] == {"queried_tokens": 8, "hit_tokens": 4, "cut_tokens": 7}
    cache = stats["kv_cache"]
    assert cache["blocks"] == {"total": 10, "active": 0, "cached": 0, "free": 10}
    assert cache["window16"] == {
        "format": "16bit",
        "sink_tokens": 64,
        "recent_tokens": 64,
        "blocks": {"total": 6, "active": 2, "cached": 1, "free": 3},
    }
    assert (cache["format"], cache["block_tokens"]) == ("nvfp4", 64)
    assert (cache["bytes_per_token"], cache["bytes_per_token_none"]) == (100, 300)


def test_disable_metrics_removes_engine_stats():
    with serving(make_engine(), enable_metrics=False) as url:
        reply = httpx.get(f"{url}/v1/engine/stats")
        assert reply.status_code == 404
        assert "--disable-metrics" in reply.json()["error"]["message"]
