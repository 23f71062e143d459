"""Tests of the endpoints of the web page, without a browser."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import make_engine
from hypothesis import given
from hypothesis import strategies as st
from serving import post, serving

from lmdeploy.serve.rendering import child
from lmdeploy.serve.rendering.formulas import MATH_ATTRIBUTES, MATH_TAGS, MAX_FORMULA_CHARS, formula
from lmdeploy.serve.rendering.highlighting import CODE_KINDS, MAX_HIGHLIGHTED_CHARS, highlighted
from lmdeploy.serve.rendering.process import MarkdownProcess, RenderingError
from lmdeploy.serve.rendering.tree import MAX_MARKDOWN_NODES, TooManyNodesError, markdown_nodes
from lmdeploy.serve.routes.markdown import MAX_MARKDOWN_CHARS

WEB = Path(__file__).resolve().parents[3] / "lmdeploy/serve/web"
TAGS = {
    *("p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br"),
    *("em", "strong", "s", "code", "pre", "a", "table", "thead", "tbody", "tr", "th", "td"),
    *("span", *MATH_TAGS),
}
ATTRIBUTES = {"href", "title", "start", "align", "language", "kind", *MATH_ATTRIBUTES}
MAX_DEPTH = 33  # 32 elements around a code span
MAX_MATH_DEPTH = 32 + 65  # 32 elements around a formula
# The timer can interrupt a callback of hypothesis, which swallows the error. It fires again.
SWALLOWED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SLOW = "\\(" * (MAX_MARKDOWN_CHARS // 2)  # takes about 20 s without a limit
PIECES = st.sampled_from(
    (
        *"ab<>[]()!*_~`|#-\\\"' \n\t&:;/é\x00",
        *("**", "```", "> ", "- ", "1. ", "|-|-|\n", "](", "<a href=", "&#106;"),
        *("javascript:alert(1)", "data:text/html,x", "http://x", "mailto:a"),
        *("$", "$$", "\\(", "\\)", "\\[", "\\]", "^{", "}", "\\frac{a}", "\\href{javascript:x}{y}"),
        *("```py\n", "\n```\n", "\\begin{align}", "\\end{align}", "\\style{color:red}{x}"),
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
    assert attributes.get("kind", "name") in CODE_KINDS
    return 1 + max(map(depth, children), default=0)


def texts(node: Any) -> str:
    return node if isinstance(node, str) else "".join(map(texts, node[2:]))


@given(st.lists(PIECES, max_size=60).map("".join))
def test_markdown_nodes_have_only_known_tags_and_safe_links(text):
    assert all(depth(node) <= MAX_MATH_DEPTH for node in markdown_nodes(text))


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


@pytest.mark.parametrize("text", ["*a " * 2000 + "b* " * 2000, "> " * 20000])
def test_hostile_markdown_is_not_deep(text):
    assert all(depth(node) <= MAX_DEPTH for node in markdown_nodes(text[:MAX_MARKDOWN_CHARS]))


@pytest.mark.parametrize(
    ("code", "language", "kinds"),
    [
        ("def f(): # x\n", "py", {"def": "keyword", "f": "name", "# x": "comment"}),
        ('let x = "a" + 1;', "js", {"let": "keyword", '"a"': "string", "1": "number"}),
        ("- a\n+ b\n", "diff", {"- a": "deleted", "+ b": "inserted"}),
        ("<b>&amp;", "html", {"b": "keyword"}),
    ],
)
def test_code_has_kinds_and_keeps_its_text(code, language, kinds):
    found = highlighted(code, language)
    assert "".join(map(texts, found)) == code
    spans = {texts(node): node[1]["kind"] for node in found if isinstance(node, list)}
    assert spans.items() >= kinds.items()


@given(st.text(max_size=200), st.sampled_from(["py", "c++", "html", "json", "sh", "no such"]))
def test_highlighting_never_changes_code(code, language):
    assert "".join(map(texts, highlighted(code, language))) == code


def test_code_without_a_known_language_or_too_long_is_plain():
    long = "x = 1\n" * MAX_HIGHLIGHTED_CHARS
    for code, language in (("if x:", ""), ("if x:", "no such"), (long, "py")):
        assert highlighted(code, language) == [code]


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("a $x^2$ b $y$", ["x2", "y"]),
        ("a \\(x_1\\), \\[y\\] z", ["x1", "y"]),
        ("text:\n\\[\na\n+ b\n\\]\nmore", ["a+b"]),
        ("$$\nx\n$$", ["x"]),
        ("$$x$$ is $$y$$", ["x", "y"]),
        ("\\begin{align*}a&=b\\end{align*}", ["a=b"]),
        ("$5 and $10 or $ 4 $, \\$x\\$, `$x$`", []),
        ("$$\n\nx$$", []),
    ],
)
def test_markdown_finds_formulas_but_no_prices(text, sources):
    def formulas(node):
        if isinstance(node, str):
            return []
        own = [texts(node)] if node[0] == "math" else []
        return own or [found for inner in node[2:] for found in formulas(inner)]

    nodes = markdown_nodes(text)
    assert [found for node in nodes for found in formulas(node)] == sources


def test_text_after_a_formula_is_kept():
    assert texts(markdown_nodes("$$\nx\n$$ tail")[0]) == "x tail"


def test_formula_is_mathml():
    fraction = ["mfrac", {}, ["mrow", {}, ["mn", {}, "1"]], ["mrow", {}, ["mi", {}, "x"]]]
    expected = ["math", {"display": "inline"}, ["mrow", {}, fraction]]
    assert formula(r"\frac{1}{x}", is_block=False) == expected


@pytest.mark.parametrize("source", [r"\left(x", "a^b^c", "{" * 3000, "x" * (MAX_FORMULA_CHARS + 1)])
def test_faulty_and_huge_formulas_stay_code(source):
    assert formula(source, is_block=True) == ["code", {}, source]


@pytest.mark.parametrize(
    "source",
    [
        *(r"\style{position:fixed}{x}", r"\href{javascript:alert(1)}{x}", r"\class{a}{x}"),
        *(r"\color{white}{x}", r"\rule{9999em}{9999em}", r"\raise999em{x}", r"\hspace{9999em}x"),
    ],
)
def test_hostile_formula_has_no_style_link_or_huge_size(source):
    node = formula(source, is_block=True)
    assert depth(node) < 10
    assert not {"style", "href", "class", "mathcolor"} & set(re.findall(r"'(\w+)':", str(node)))
    assert not re.search(r"'width': '[+-]?\d{3}", str(node))


@SWALLOWED
def test_slow_code_stays_plain_and_the_rest_is_rendered():
    slow = "\n" * MAX_HIGHLIGHTED_CHARS  # the lexer of C takes quadratic time
    begin = time.monotonic()
    code, after = markdown_nodes(f"```c\n{slow}```\n*a*")
    assert time.monotonic() - begin < 4
    assert code == ["pre", {"language": "c"}, slow]
    assert after == ["p", {}, ["em", {}, "a"]]


@SWALLOWED
def test_formula_whose_macro_repeats_a_long_text_stays_code():
    source = rf"\newcommand{{\a}}[1]{{{'#1' * 900}}}\a{{{'x' * 1800}}}"  # 14 s without a limit
    begin = time.monotonic()
    assert formula(source, is_block=False) == ["code", {}, source]
    assert time.monotonic() - begin < 4


@pytest.mark.parametrize(
    "text", ["`a` " * MAX_MARKDOWN_NODES, ("$$\n" + "x " * 1900 + "$$\n") * 12]
)
def test_markdown_with_too_many_elements_is_refused(text):
    with pytest.raises(TooManyNodesError):
        markdown_nodes(text)


def test_render_markdown_refuses_long_texts_and_huge_tables(url):
    table = "|a" * 400 + "\n" + "|-" * 400 + "\n" + "|\n" * 5000
    long = "a" * (MAX_MARKDOWN_CHARS + 1)
    for text, limit in ((long, MAX_MARKDOWN_CHARS), (table, MAX_MARKDOWN_NODES)):
        reply = post(url, "/render_markdown", {"text": text})
        assert reply.status_code == 413
        assert str(limit) in reply.json()["error"]["message"]
    reply = post(url, "/render_markdown", {"text": "*a*"})
    assert reply.json() == {"nodes": [["p", {}, ["em", {}, "a"]]]}


def test_slow_markdown_is_refused_and_delays_no_other_request(url):
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(post, url, "/render_markdown", {"text": SLOW})
        with httpx.Client() as client:
            begin = time.monotonic()
            for _ in range(20):
                assert client.get(f"{url}/health").status_code == 200
        assert time.monotonic() - begin < child.MAX_SECONDS / 2
        assert not slow.done()
    assert slow.result().status_code == 413
    assert f"more than {child.MAX_SECONDS} s" in slow.result().json()["error"]["message"]
    assert post(url, "/render_markdown", {"text": "a"}).json() == {"nodes": [["p", {}, "a"]]}


async def test_markdown_process_starts_again_and_ends():
    process = MarkdownProcess()
    assert await process.nodes("a\u2028c\n\nb") == [["p", {}, "a\u2028c"], ["p", {}, "b"]]
    first = process._process
    first.kill()
    await first.wait()
    with pytest.raises(RenderingError):
        await process.nodes("a")
    assert await process.nodes("c") == [["p", {}, "c"]]
    second = process._process
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(process.nodes(SLOW), 0.2)  # a client that disconnects
    assert second.returncode == -signal.SIGKILL
    await process.nodes("d")
    last = process._process
    await process.close()
    assert last.returncode == -signal.SIGKILL


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
        text = re.sub(
            r"http://www\.w3\.org/(2000/svg|1998/Math/MathML)", "", path.read_text("utf-8")
        )
        assert "://" not in text and "innerHTML" not in text and "style=" not in text, path


def test_page_knows_the_elements_that_the_server_sends():
    source = (WEB / "markdown.js").read_text("utf-8")
    for name, known in (
        ("CODE_KINDS", CODE_KINDS),
        ("MATH_TAGS", MATH_TAGS),
        ("MATH_ATTRIBUTES", MATH_ATTRIBUTES),
    ):
        listed = re.search(rf"const {name} = new Set\((.*?)\.split", source, re.DOTALL)[1]
        assert set(" ".join(re.findall('"(.*?)"', listed)).split()) == known


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
    assert cache["states"] == {
        "bytes_per_sequence": 4096,
        "checkpoints_total": 12,
        "checkpoints_kept": 5,
        "checkpoint_interval": 8,
    }
    assert (cache["format"], cache["block_tokens"]) == ("nvfp4", 64)
    assert (cache["bytes_per_token"], cache["bytes_per_token_none"]) == (100, 300)


def test_disable_metrics_removes_engine_stats():
    with serving(make_engine(), enable_metrics=False) as url:
        reply = httpx.get(f"{url}/v1/engine/stats")
        assert reply.status_code == 404
        assert "--disable-metrics" in reply.json()["error"]["message"]


def test_models_tell_the_default_generation_settings(url):
    card = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert card["default_generation_settings"] == {
        **{"do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": 40, "min_p": 0.0},
        "repetition_penalty": 1.0,
    }
    assert httpx.get(f"{url}/v1/models/m").json() == card
