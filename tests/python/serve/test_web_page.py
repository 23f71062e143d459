"""Tests of the web page in a real browser: chat, keyboard, keys, hostile text, narrow screens."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import make_engine
from serving import serving

from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine.async_engine import AsyncEngine

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
expect.set_options(timeout=20_000)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHAT = "**/v1/chat/completions"
ALERTS = "window.alerts = 0; window.alert = () => { window.alerts += 1; };"
HOSTILE = """<script>alert(1)</script>

<img src=x onerror=alert(2)> [a](javascript:alert(3)) [b](data:text/html,<script>alert(4)</script>)
[c](https://example.org/?q=1 "title") ![picture](https://example.org/p.png) <https://example.com/>

```html
<svg onload=alert(5)>
```
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("chromium is not installed (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox needs privileges that containers lack.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def smollm2() -> Iterator[str]:
    config = TurbomindEngineConfig(
        quant_policy=16, session_len=2048, max_batch_size=8, cache_max_entry_count=64
    )
    with serving(AsyncEngine.load("smollm2", config, progress=False)) as url:
        yield url


@pytest.fixture(scope="module")
def fake() -> Iterator[str]:
    engine = make_engine(step_seconds=0.01, session_len=4096)
    engine.loaded.cpp_engine.cache_tokens = 4096
    with serving(engine) as url:
        yield url


class Tab:
    """A tab of the browser that records errors and requests to other hosts."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.add_init_script(ALERTS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._on_request)
        self.page.goto(url)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} {message.location['url']}")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:")):
            self.elsewhere.append(request.url)

    def send(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")

    def wait_for_answer(self) -> None:
        expect(self.page.locator("#send")).to_have_text("Send", timeout=60_000)
        expect(self.page.locator(".answer").last).to_have_attribute("aria-busy", "false")

    def ask(self, text: str) -> None:
        self.send(text)
        self.wait_for_answer()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def close(self) -> None:
        alerts = self.page.evaluate("window.alerts")
        self.context.close()
        assert (self.errors, self.elsewhere, alerts) == ([], [], 0)


@pytest.fixture
def open_tab(browser: Any) -> Iterator[Any]:
    tabs: list[Tab] = []

    def open_one(url: str, **options: Any) -> Tab:
        tabs.append(Tab(browser, url, **options))
        return tabs[-1]

    yield open_one
    for tab in tabs:
        tab.close()


def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def answer_with(tab: Tab, *events: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer with a stream in the server's place. Return the bodies that the page sends."""
    bodies: list[dict[str, Any]] = []
    parts = [": a comment", *(f"data: {json.dumps(event)}" for event in events), "data: [DONE]"]
    stream = "".join(f"{part}\n\n" for part in parts)

    def fulfill(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(status=200, content_type="text/event-stream", body=stream)

    tab.page.route(CHAT, fulfill)
    return bodies


def test_smollm2_answer_streams_and_blocks_appear(open_tab: Any, smollm2: str) -> None:
    tab = open_tab(smollm2)
    tab.page.click("#toggle-settings")
    tab.page.fill("[name=temperature]", "0")
    tab.ask("What is the capital of France?")
    expect(tab.page.locator(".answer .rendered")).to_contain_text("Paris")
    stats = tab.texts(".answer .stats")[0]
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first token after \d+\.\d\d s", stats)
    tab.send("Tell me a long story about the sea.")
    expect(tab.page.locator("#send")).to_have_text("Stop")
    expect(tab.page.locator("#pool-window16 rect.active").first).to_be_visible()
    expect(tab.page.locator("#requests dd").first).to_have_text("1")
    tab.page.click("#send")
    tab.wait_for_answer()
    assert "stopped" in tab.texts(".answer .stats")[-1]
    expect(tab.page.locator("#pool-window16 rect.active")).to_have_count(0)
    expect(tab.page.locator("#conversation-blocks rect.window16").first).to_be_visible()
    assert tab.texts("#bytes b") == ["6,600", "23,040"]


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(64, "w"), (65, "ww"), (192, "www"), (193, "waww"), (321, "waaaww")]
)
def test_conversation_map_shows_which_blocks_are_in_16_bits(
    open_tab: Any, fake: str, tokens: int, blocks: str
) -> None:
    # docs/kv_cache.md, "The window", has the table of the blocks that are read from the window.
    tab = open_tab(fake)
    usage = {"prompt_tokens": tokens - 1, "completion_tokens": 1, "total_tokens": tokens}
    answer_with(tab, chunk({"content": "Hi."}, "stop"), {"choices": [], "usage": usage})
    tab.ask("hello")
    squares = tab.page.locator("#conversation-blocks rect")
    expect(squares).to_have_count(len(blocks))
    assert "".join(square.get_attribute("class")[0] for square in squares.all()) == blocks


def test_smollm2_second_question_hits_the_prefix_cache(open_tab: Any, smollm2: str) -> None:
    tab = open_tab(smollm2)
    tab.page.click("#toggle-settings")
    tab.page.fill("[name=max_tokens]", "16")
    tab.ask("Repeat this. " + "The sea is wide and blue. " * 30)
    tab.ask("Again.")
    assert "prompt tokens from the cache" in tab.texts(".answer .stats")[-1]
    expect(tab.page.locator("#prefix b")).not_to_have_text("0 %")
    expect(tab.page.locator("#pool-main rect.cached").first).to_be_visible()


def test_keyboard_alone_sends_stops_and_edits(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    keyboard = tab.page.keyboard
    expect(tab.page.locator("#prompt")).to_be_focused()
    keyboard.type("first line")
    keyboard.press("Shift+Enter")
    keyboard.type("second line")
    assert tab.page.input_value("#prompt") == "first line\nsecond line"
    keyboard.press("Enter")
    tab.wait_for_answer()
    assert tab.texts(".question .text") == ["first line\nsecond line"]
    tab.page.fill("#prompt", "x" * 600)  # the answer takes 6 s
    keyboard.press("Enter")
    expect(tab.page.locator(".answer").last).to_contain_text("You said: XX")
    keyboard.press("Escape")
    tab.wait_for_answer()
    assert len(tab.texts(".answer .body")[-1]) < 350
    names = []
    for _ in range(12):
        keyboard.press("Shift+Tab")
        names.append(tab.page.evaluate("document.activeElement.textContent"))
        if names[-1] == "Edit":
            break
        outline = tab.page.evaluate("getComputedStyle(document.activeElement).outline")
        assert "solid 2px" in outline, names[-1]
    assert names[:2] == ["Regenerate", "Copy"] and names[-1] == "Edit"
    keyboard.press("Enter")
    keyboard.press("Control+A")
    keyboard.type("short")
    keyboard.press("Enter")
    tab.wait_for_answer()
    assert tab.texts(".question .text")[-1] == "short"
    expect(tab.page.locator(".answer .rendered").last).to_have_text("You said: SHORT")


def test_edit_removes_what_follows_and_cancel_keeps_it(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    for question in ("one", "two", "three"):
        tab.ask(question)
    edit = tab.page.locator(".question").nth(1).get_by_role("button", name="Edit")
    edit.click()
    tab.page.keyboard.press("Escape")
    assert tab.texts(".question .text") == ["one", "two", "three"]
    edit.click()
    tab.page.fill(".edit textarea", "2")
    tab.page.click(".edit .primary")
    tab.wait_for_answer()
    assert tab.texts(".question .text") == ["one", "2"]
    expect(tab.page.locator(".answer .rendered")).to_have_text(["You said: ONE", "You said: 2"])


def test_regenerate_sends_the_same_messages_and_all_settings(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.page.click("#toggle-settings")
    given = {"temperature": "0.5", "top_p": "0.9", "top_k": "7", "min_p": "0.1", "seed": "3"}
    given |= {"max_tokens": "50", "repetition_penalty": "1.1", "stop": "END\nFIN"}
    for name, text in {**given, "system": "Be brief."}.items():
        tab.page.fill(f"#settings [name={name}]", text)
    bodies = answer_with(tab, chunk({"content": "Hi."}), chunk({}, "stop"))
    tab.ask("hello")
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.page.locator(".answer .rendered")).to_have_text("Hi.")
    assert len(bodies) == 2 and bodies[0] == bodies[1]
    body = bodies[0]
    sampling = {name: json.loads(text) for name, text in given.items() if name != "stop"}
    assert {name: body[name] for name in sampling} == sampling
    assert body["stop"] == ["END", "FIN"]
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "hello"}


def test_wrong_setting_is_named_and_nothing_is_sent(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    bodies = answer_with(tab)
    tab.page.click("#toggle-settings")
    tab.page.fill("[name=tools]", "{}")
    tab.send("hello")
    expect(tab.page.locator("#status")).to_contain_text("Tools, a JSON list: This is not a JSON")
    assert bodies == [] and tab.page.input_value("#prompt") == "hello"


def test_reasoning_is_folded_and_tool_calls_take_results(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    call = {"name": "get_<b>weather</b>", "arguments": '{"city":"Oslo",'}
    bodies = answer_with(
        tab,
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "They ask about the weather."}),
        chunk({"tool_calls": [{"index": 0, "id": "call_1", "function": call}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": '"days":2}'}}]}),
        chunk({}, "tool_calls"),
    )
    tab.ask("How is the weather?")
    reasoning = tab.page.locator(".reasoning .text")
    expect(reasoning).to_be_hidden()
    tab.page.get_by_text("Reasoning", exact=True).click()
    expect(reasoning).to_have_text("They ask about the weather.")
    assert tab.texts(".tool-call .label") == ["Tool call get_<b>weather</b>"]
    assert tab.texts(".tool-call pre") == ['{\n  "city": "Oslo",\n  "days": 2\n}']
    tab.page.fill(".results textarea", "4 degrees")
    tab.page.get_by_role("button", name="Send result").click()
    tab.wait_for_answer()
    call["arguments"] += '"days":2}'
    assert bodies[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "4 degrees"},
    ]


def test_question_before_the_model_is_known_waits_for_its_name(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    bodies = answer_with(tab, chunk({"content": "Hi."}, "stop"))
    held: list[Any] = []
    tab.page.route("**/v1/models", lambda route: held.append(route))
    tab.page.reload()
    tab.send("hello")
    expect(tab.page.locator(".answer")).to_have_attribute("aria-busy", "true")
    assert bodies == []
    for route in held:
        route.continue_()
    tab.wait_for_answer()
    assert [body["model"] for body in bodies] == ["m"]


def test_hostile_answer_shows_as_text_and_loads_nothing(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    answer_with(tab, chunk({"reasoning_content": HOSTILE, "content": HOSTILE}), chunk({}, "stop"))
    tab.ask(HOSTILE)
    answer = tab.page.locator(".answer .body")
    expect(answer.locator("pre")).to_have_text("<svg onload=alert(5)>\n")
    expect(answer).to_contain_text("<script>alert(1)</script>")
    expect(answer).to_contain_text("[a](javascript:alert(3))")
    inside = "#messages :is(script, img, svg, iframe, style, link, object)"
    assert tab.page.locator(inside).count() == 0
    links = answer.locator("a")
    found = [(link.get_attribute("href"), link.get_attribute("rel")) for link in links.all()]
    rel = "noopener noreferrer"
    wanted = ("https://example.org/?q=1", "https://example.org/p.png", "https://example.com/")
    assert found == [(href, rel) for href in wanted]


def test_hostile_render_response_makes_no_script_and_no_link(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    nodes = [
        ["script", {}, "alert(1)"],
        ["img", {"src": "x", "onerror": "alert(2)"}],
        ["a", {"href": "javascript:alert(3)", "onclick": "alert(4)"}, "link"],
        ["p", {"onclick": "alert(5)", "style": "position:fixed"}, "text"],
    ]
    body = json.dumps({"nodes": nodes})
    tab.page.route("**/render_markdown", lambda route: route.fulfill(body=body))
    tab.ask("hello")
    rendered = tab.page.locator(".answer .rendered")
    expect(rendered.locator("p")).to_have_text("text")
    assert rendered.evaluate("element => element.innerHTML") == (
        "<span>alert(1)</span><span></span><span>link</span><p>text</p>"
    )


def test_huge_table_stays_plain_text(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    table = "|a" * 400 + "\n" + "|-" * 400 + "\n" + "|\n" * 5000
    answer_with(tab, chunk({"content": table}), chunk({}, "stop"))
    with tab.page.expect_response("**/render_markdown") as refused:
        tab.send("hello")
    assert refused.value.status == 413
    tab.wait_for_answer()
    expect(tab.page.locator(".answer .tail")).to_contain_text("|a|a|a")
    assert tab.page.locator("table").count() == 0
    assert all("413" in error for error in tab.errors)  # Chromium reports the refused request
    tab.errors.clear()


def test_error_of_the_server_is_shown_and_can_be_repeated(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    answer_with(tab, chunk({"content": "Half"}), {"error": {"code": 500, "message": "Broken <i>."}})
    tab.ask("hello")
    assert tab.texts(".answer .error") == ["Broken <i>."]
    tab.page.unroute(CHAT)
    tab.page.get_by_role("button", name="Regenerate").click()
    expect(tab.page.locator(".answer .rendered")).to_have_text("You said: HELLO")
    assert tab.texts(".answer .error") == []


def test_key_is_asked_for_once_and_kept_in_the_tab(open_tab: Any, browser: Any) -> None:
    with serving(make_engine(), api_keys=["secret"]) as url:
        tab = open_tab(url)
        dialog = tab.page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        tab.page.keyboard.type("wrong")
        tab.page.keyboard.press("Enter")
        expect(tab.page.locator("#key-error")).to_have_text("The server does not accept this key.")
        tab.page.keyboard.type("secret")
        tab.page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(tab.page.locator("#model")).to_have_text("m")
        tab.ask("hello")
        expect(tab.page.locator(".answer .rendered")).to_have_text(["You said: HELLO"])
        tab.page.reload()
        expect(tab.page.locator("#model")).to_have_text("m")
        expect(dialog).to_be_hidden()
        expect(tab.page.locator(".answer .rendered")).to_have_text("You said: HELLO")
        stored = "[localStorage.length, sessionStorage.getItem('api_key'), document.cookie]"
        assert tab.page.evaluate(stored) == [0, "secret", ""]
        assert all("401" in error for error in tab.errors)  # Chromium reports the refused requests
        tab.errors.clear()


def test_view_follows_the_answer_until_the_user_scrolls_up(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake, viewport={"width": 360, "height": 400})
    position = "e => [e.scrollTop, e.scrollHeight - e.clientHeight - e.scrollTop]"
    scroller = tab.page.locator("#scroller")
    tab.ask("word " * 80)
    top, rest = scroller.evaluate(position)
    assert top > 100 and rest < 2
    tab.send("word " * 80)
    expect(tab.page.locator(".answer .tail").last).to_contain_text("WORD " * 5)
    assert scroller.evaluate(position)[1] < 40
    scroller.hover()
    tab.page.mouse.wheel(0, -200)
    tab.wait_for_answer()
    assert scroller.evaluate(position)[1] > 100
    tab.ask("word")
    assert scroller.evaluate(position)[1] < 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screen_has_no_horizontal_overflow(open_tab: Any, fake: str, scheme: str) -> None:
    tab = open_tab(fake, viewport={"width": 360, "height": 640}, color_scheme=scheme)
    text = (
        "word" * 200 + "\n\n```\n" + "code " * 100 + "\n```\n\n" + "|cell" * 30 + "\n" + "|-" * 30
    )
    call = {"index": 0, "id": "1", "function": {"name": "n" * 200, "arguments": "9" * 400}}
    delta = {"content": text, "reasoning_content": "r" * 400, "tool_calls": [call]}
    answer_with(tab, chunk(delta), chunk({}, "stop"))
    tab.ask("question" * 50)
    tab.page.click(".reasoning summary")
    expect(tab.page.locator("table")).to_be_visible()
    views = (None, "#toggle-engine", "#toggle-settings")
    for toggle in views:
        if toggle:
            tab.page.click(toggle)
        scrolled = "[document.documentElement, document.querySelector('#scroller')]"
        sizes = tab.page.evaluate(f"{scrolled}.map(e => [e.scrollWidth, e.clientWidth])")
        assert all(scroll <= client for scroll, client in sizes), (toggle, sizes)
    paper = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 150) == (scheme == "dark")


def test_page_says_why_it_shows_no_cache(open_tab: Any, browser: Any) -> None:
    with serving(make_engine(), enable_metrics=False) as url:
        tab = open_tab(url)
        reason = "/v1/engine/stats is disabled by --disable-metrics."
        expect(tab.page.locator("#engine-error")).to_have_text(reason)
        expect(tab.page.locator("#engine-view")).to_be_hidden()
        assert all("404" in error for error in tab.errors)
        tab.errors.clear()
