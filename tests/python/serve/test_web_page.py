"""Tests of the web page in a real browser: chat, keyboard, keys, hostile text, narrow screens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import make_engine
from serving import serving
from web_tab import CHAT, answer_with, chunk, stored_chats

from lmdeploy import TurbomindEngineConfig
from lmdeploy.engine.async_engine import AsyncEngine

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
expect.set_options(timeout=20_000)

HOSTILE = """<script>alert(1)</script>

<img src=x onerror=alert(2)> [a](javascript:alert(3)) [b](data:text/html,<script>alert(4)</script>)
[c](https://example.org/?q=1 "title") ![picture](https://example.org/p.png) <https://example.com/>

```html
<svg onload=alert(5)>
```
"""


@pytest.fixture(scope="module")
def smollm2() -> Iterator[str]:
    config = TurbomindEngineConfig(
        quant_policy=16, session_len=2048, max_batch_size=8, cache_max_entry_count=64
    )
    with serving(AsyncEngine.load("smollm2", config, progress=False)) as url:
        yield url


def test_smollm2_answer_streams_and_blocks_appear(open_tab: Any, smollm2: str) -> None:
    tab = open_tab(smollm2)
    tab.page.click("#toggle-settings")
    tab.page.fill("[name=temperature]", "0")
    tab.ask("What is the capital of France?")
    expect(tab.page.locator(".answer .rendered")).to_contain_text("Paris")
    stats = tab.texts(".answer .stats")[0]
    assert re.search(r"\d+ tokens · .*first token after \d+\.\d\d s", stats)
    tab.send("Tell me a long story about the sea.")
    expect(tab.page.locator("#send")).to_have_text("Stop")
    expect(tab.page.locator("#pool-window16 rect.active").first).to_be_visible()
    expect(tab.page.locator("#requests dd").first).to_have_text("1")
    tab.page.click("#send")
    tab.wait_for_answer()
    stats = tab.texts(".answer .stats")[-1]
    assert re.search(r"stopped · \d+ tokens? · [\d.]+ tokens/s · first token", stats)
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


def test_edit_replaces_what_follows_and_cancel_keeps_it(open_tab: Any, fake: str) -> None:
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
    tab.page.unroute("**/v1/models")  # a request that has not arrived yet is not held
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
        stored = "[sessionStorage.getItem('api_key'), document.cookie]"
        assert tab.page.evaluate(stored) == ["secret", ""]
        assert "secret" not in tab.page.evaluate("JSON.stringify(localStorage)")
        assert "secret" not in json.dumps(stored_chats(tab))
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


def test_code_is_highlighted_and_copied_by_its_button(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake, permissions=["clipboard-read", "clipboard-write"])
    code = 'def f(x):  # twice\n    return 2 * x, "<b>"\n'
    answer_with(tab, chunk({"content": f"```python\n{code}```\n"}, "stop"))
    tab.ask("code")
    block = tab.page.get_by_role("region", name="Code in python")
    expect(block).to_have_text(code)
    assert tab.texts(".code-keyword") == ["def", "return"]
    assert tab.texts(".code-comment") == ["# twice"] and tab.texts(".code-string") == ['"<b>"']
    colors = "e => [e, e.parentElement].map((each) => getComputedStyle(each).color)"
    own, plain = tab.page.locator(".code-keyword").first.evaluate(colors)
    assert own != plain
    tab.page.locator(".code").get_by_role("button", name="Copy").click()
    expect(tab.page.locator(".code-head button")).to_have_text("Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == code


def test_code_is_copied_without_a_clipboard(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake, permissions=["clipboard-read", "clipboard-write"])
    tab.page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    tab.page.reload()
    tab.ask("hello")
    copies = tab.page.locator(".answer footer").get_by_role("button", name="Copy")
    copies.press("Enter")
    expect(tab.page.locator(".answer footer")).to_contain_text("Copied")
    expect(tab.page.get_by_role("button", name="Copied")).to_be_focused()
    tab.page.locator("#prompt").press("Control+V")
    expect(tab.page.locator("#prompt")).to_have_value("You said: HELLO")


def test_formulas_are_drawn_as_mathml(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake, viewport={"width": 360, "height": 640})
    wide = "x + " * 200 + "1"
    link = r"$\href{javascript:alert(1)}{a}$"
    text = f"The root $\\sqrt{{2}}$ of\n\n$$\n{wide}\n$$\n\nand {link}, $5."
    answer_with(tab, chunk({"content": text}, "stop"))
    tab.ask("math")
    expect(tab.page.locator(".answer math")).to_have_count(3)
    assert tab.page.locator("msqrt").evaluate("e => e.namespaceURI").endswith("/MathML")
    width, inner = tab.page.locator("msqrt").evaluate(
        "e => [e, e.firstElementChild].map(x => x.getBoundingClientRect().width)"
    )
    assert width > inner + 3  # the sign of the root is drawn
    formula = tab.page.locator(".formula")
    scrolled, shown = formula.evaluate("e => [e.scrollWidth, e.clientWidth]")
    assert scrolled > shown and shown <= 360
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.page.locator(".answer [href]").count() == 0


def test_settings_show_the_defaults_of_the_server(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.page.click("#toggle-settings")
    shown = {
        name: tab.page.locator(f"[name={name}]").get_attribute("placeholder")
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    }
    assert list(shown.values()) == ["0.7", "1", "40", "0", "1", "up to 4,096"]


def test_presets_fill_fields_and_follow_them(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    bodies = answer_with(tab, chunk({"content": "Hi."}, "stop"))
    tab.page.click("#toggle-settings")
    tab.page.fill("[name=seed]", "3")
    tab.page.select_option("#sampling-preset", "Creative")
    tab.page.select_option("#reasoning-preset", "Short")
    tab.ask("hello")
    sent = {"temperature": 1.1, "min_p": 0.05, "enable_thinking": True, "reasoning_effort": "low"}
    assert bodies[0].items() >= {**sent, "seed": 3}.items()
    tab.page.reload()
    expect(tab.page.locator("#sampling-preset")).to_have_value("Creative")
    tab.page.click("#toggle-settings")
    tab.page.fill("[name=temperature]", "1.2")
    expect(tab.page.locator("#sampling-preset")).to_have_value("Custom")
    tab.page.select_option("#sampling-preset", "Default")
    tab.page.select_option("#reasoning-preset", "Off")
    tab.ask("hello")
    assert bodies[1]["enable_thinking"] is False and bodies[1]["seed"] == 3
    assert not {"temperature", "top_p", "min_p", "reasoning_effort"} & set(bodies[1])


def test_theme_is_chosen_and_remembered(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake, color_scheme="light")
    is_dark = "getComputedStyle(document.body).backgroundColor === 'rgb(21, 23, 22)'"
    assert not tab.page.evaluate(is_dark)
    tab.page.click("#toggle-settings")
    tab.page.get_by_role("radio", name="Dark").check()
    assert tab.page.evaluate(is_dark)
    tab.page.reload()
    assert tab.page.evaluate(is_dark)
    tab.page.click("#toggle-settings")
    expect(tab.page.get_by_role("radio", name="Dark")).to_be_checked()
    tab.page.get_by_role("radio", name="System").check()
    assert not tab.page.evaluate(is_dark)
    tab.page.emulate_media(color_scheme="dark")
    assert tab.page.evaluate(is_dark)


def test_context_is_shown_in_tokens_of_its_maximum(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    context = tab.page.locator("#context")
    expect(context).to_have_text("0 of 4,096 tokens")
    for total, is_full in ((1234, False), (4000, True)):
        usage = {"prompt_tokens": total - 1, "completion_tokens": 1, "total_tokens": total}
        answer_with(tab, chunk({"content": "Hi."}, "stop"), {"choices": [], "usage": usage})
        tab.ask("hello")
        expect(context).to_have_text(f"{total:,} of 4,096 tokens")
        assert ("full" in (context.get_attribute("class") or "")) == is_full


def test_stopped_server_disables_sending_until_it_is_back(open_tab: Any) -> None:
    engine = make_engine(step_seconds=0.01, session_len=4096)
    engine.running.core.cache_tokens = 4096
    with serving(engine, grace_seconds=1) as url:
        tab = open_tab(url)
        tab.send("x" * 400)
        expect(tab.page.locator(".answer")).to_contain_text("You said: XX")
    banner = tab.page.get_by_role("alert").filter(has_text="does not answer")
    expect(banner).to_be_visible()
    expect(tab.page.locator("#send")).to_be_disabled()
    expect(tab.page.locator(".answer .error")).to_be_visible()
    expect(tab.page.get_by_role("button", name="Regenerate")).to_be_disabled()
    tab.send("hello")
    assert tab.page.input_value("#prompt") == "hello"  # it is kept
    with serving(make_engine(), model_name="n") as new:  # in the place of the old one
        tab.page.route(
            f"{url}/**", lambda route: route.continue_(url=route.request.url.replace(url, new))
        )
        expect(banner).to_be_hidden()
        expect(tab.page.locator("#model")).to_have_text("n")
        expect(tab.page.locator("#status")).to_have_text("The server answers again.")
        expect(tab.page.locator(".answer .rendered")).to_contain_text("You said: XX")
        tab.page.keyboard.press("Enter")
        expect(tab.page.locator(".answer .rendered").last).to_have_text("You said: HELLO")
        tab.page.goto("about:blank")
    tab.errors.clear()  # Chromium reports each request that failed


def test_failed_engine_is_named(open_tab: Any) -> None:
    engine = make_engine()
    with serving(engine) as url:
        tab = open_tab(url)
        engine.running.core.fail("no memory")
        tab.send("hello")
        banner = tab.page.locator("#banner")
        expect(banner).to_contain_text("The engine has failed: ")
        expect(banner).to_contain_text("no memory")
        expect(tab.page.locator("#send")).to_be_disabled()
        tab.errors.clear()
