"""Tests that everybody can use the web page: by keyboard, with a screen reader, with weak eyes."""

from __future__ import annotations

from typing import Any

import pytest
from web_tab import Tab, answer_with, chunk

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect

TEXT = """Some **text** with `code` and a [link](https://example.org), $x^2$.

```python
def f(x):  # twice
    return 2 * x, "text", None
```

```diff
- old
+ new
```

$$
\\int_0^1 x\\,dx
$$

|a|b|
|-|-|
|1|2|

> quoted
"""
MIN_CONTRAST = 4.5  # WCAG 2.2, level AA, for text of every size
# Yields the contrast of each visible text with what is behind it, as WCAG 2.2 defines it.
CONTRASTS = """() => {
  const channels = (color) => {
    const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const color = channels(getComputedStyle(element).backgroundColor);
    return color[3] === 1 ? color.slice(0, 3) : over(color, behind(element.parentElement));
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((c) => c / 255).map((c) => {
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [light, dark] = [luminance(one), luminance(other)].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim() !== "");
    if (!hasText && !element.placeholder) continue;
    if (!element.checkVisibility()) continue;
    if (element.closest(":disabled, .hidden, .skip, option")) continue;
    const text = (element.textContent || element.placeholder).trim().slice(0, 30);
    const style = getComputedStyle(element, hasText ? null : "::placeholder");
    const below = behind(element);
    const contrast = ratio(over(channels(style.color), below), below);
    found.push([`${element.tagName} ${element.className} ${text}`, contrast]);
  }
  return found;
}"""
# Yields the controls without a name, by the rules that the page uses.
UNNAMED = """() => {
  const controls = "button, input, select, textarea, a, summary, aside, nav, [tabindex='0']";
  const isNamed = (e) => e.ariaLabel || e.labels?.length || e.textContent.trim();
  return [...document.querySelectorAll(controls)]
    .filter((e) => e.checkVisibility() && !isNamed(e))
    .map((e) => e.outerHTML);
}"""
# Returns the name of the focused element.
FOCUSED = """() => {
  const { ariaLabel, labels, textContent } = document.activeElement;
  const parts = [...(labels?.[0]?.childNodes ?? [])].filter((node) => node.nodeType === 3);
  return ariaLabel || parts.map(({ data }) => data.trim()).join("") || textContent.trim();
}"""


def fill(tab: Tab) -> None:
    """Show every kind of element."""
    name = "long" * 40 + ".txt"
    tab.page.set_input_files("#file-input", [{"name": name, "mimeType": "", "buffer": b"a"}])
    call = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}
    delta = {"content": TEXT, "reasoning_content": "Because.", "tool_calls": [call]}
    usage = {"prompt_tokens": 4000, "completion_tokens": 1, "total_tokens": 4001}
    answer_with(tab, chunk(delta), chunk({}, "tool_calls"), {"choices": [], "usage": usage})
    tab.ask("question")
    tab.page.get_by_role("button", name="Regenerate").click()
    tab.wait_for_answer()
    expect(tab.page.locator(".code-keyword").first).to_be_visible()
    tab.page.click(".reasoning summary")
    tab.page.click(".file summary")
    tab.page.set_input_files("#file-input", [{"name": f"b{name}", "mimeType": "", "buffer": b"b"}])


def walk(tab: Tab, key: str, names: list[str]) -> None:
    """Press a key for each name, and check that it focuses what has the name, visibly."""
    for name in names:
        tab.page.keyboard.press(key)
        assert tab.page.evaluate(FOCUSED) == name
        style = "getComputedStyle(document.activeElement)"
        assert "solid 2px" in tab.page.evaluate(f"{style}.outline"), name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(open_tab: Any, fake: str, scheme: str) -> None:
    tab = open_tab(fake, color_scheme=scheme, viewport={"width": 1600, "height": 900})
    seen = 0
    for step in ("welcome", "chat", "settings", "delete", "stopped"):
        if step == "chat":
            fill(tab)
        elif step == "settings":
            tab.page.click("#toggle-settings")
            tab.page.fill("[name=tools]", "{}")
        elif step == "delete":
            tab.page.click("#delete-all")
        elif step == "stopped":
            tab.page.keyboard.press("Escape")
            tab.page.route("**/health", lambda route: route.abort())
            tab.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            expect(tab.page.locator("#banner")).to_be_visible()
        found = tab.page.evaluate(CONTRASTS)
        seen += len(found)
        weak = {text: round(ratio, 2) for text, ratio in found if ratio < MIN_CONTRAST}
        assert weak == {}, step
    assert seen > 200
    tab.errors.clear()  # Chromium reports the refused requests


def test_weak_contrast_is_found(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    tab.page.evaluate("document.querySelector('.lead').style.color = 'rgb(140, 140, 140)'")
    ratios = dict(tab.page.evaluate(CONTRASTS))
    assert 3.2 < ratios["P lead What would you like to ask?"] < 3.4


def test_every_control_has_a_name(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake, viewport={"width": 1600, "height": 900})
    fill(tab)
    tab.page.click("#toggle-settings")
    assert tab.page.evaluate(UNNAMED) == []
    tab.page.evaluate("document.querySelector('main').append(document.createElement('button'))")
    assert tab.page.evaluate(UNNAMED) == ["<button></button>"]
    landmarks = [("banner", None), ("main", None), ("navigation", "Page")]
    asides = ("Conversations", "Settings", "Engine")
    for role, name in (*landmarks, *(("complementary", name) for name in asides)):
        expect(tab.page.get_by_role(role, **({"name": name} if name else {}))).to_have_count(1)


def test_live_regions_speak_an_answer_once(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake)
    assert tab.page.locator("#messages").get_attribute("aria-live") == "off"
    tab.page.evaluate(
        """() => {
          window.spoken = [];
          for (const region of document.querySelectorAll("[role=status], [role=alert]")) {
            const heard = () => region.textContent && window.spoken.push(region.textContent);
            new MutationObserver(heard).observe(region, { childList: true, characterData: true });
          }
        }"""
    )
    tab.ask("hello to the sea " * 5)
    answer = "You said: " + ("hello to the sea " * 5).upper().strip()
    spoken = [text.strip() for text in tab.page.evaluate("window.spoken")]
    assert sorted(spoken) == ["Answering", "Done", answer]


def test_keyboard_walk_through_the_page(open_tab: Any, fake: str) -> None:
    """The walk that docs/serving.md describes."""
    tab = open_tab(fake)
    keyboard = tab.page.keyboard
    expect(tab.page.locator("#prompt")).to_be_focused()
    keyboard.type("hello")
    keyboard.press("Enter")
    tab.wait_for_answer()
    expect(tab.page.locator("#chat-list .actions")).to_be_visible()
    walk(tab, "Tab", ["Attach text files", "Send"])
    walk(tab, "Shift+Tab", ["Attach text files", "Message"])
    walk(tab, "Shift+Tab", ["Regenerate", "Copy", "Edit"])
    of_chat = ["Delete hello", "Export as JSON: hello", "Export as Markdown: hello", "Rename hello"]
    walk(tab, "Shift+Tab", ["Delete all", *of_chat, "hello", "Engine", "Settings", "New", "Chats"])
    walk(tab, "Shift+Tab", ["Skip to the message"])
    keyboard.press("Enter")
    expect(tab.page.locator("#prompt")).to_be_focused()
    tab.page.locator("#toggle-settings").focus()
    keyboard.press("Enter")
    expect(tab.page.locator("#settings")).to_be_visible()
    expect(tab.page.locator("#toggle-settings")).to_have_attribute("aria-expanded", "true")
    tab.page.locator("#send").focus()
    walk(tab, "Tab", ["System", "Sampling", "Reasoning", "System prompt", "Temperature"])
    walk(tab, "Shift+Tab", ["System prompt", "Reasoning", "Sampling", "System"])
    keyboard.press("ArrowRight")
    assert tab.page.evaluate(FOCUSED) == "Light"
    assert tab.page.locator("html").get_attribute("data-theme") == "light"


def test_escape_closes_a_panel_that_covers_the_page(open_tab: Any, fake: str) -> None:
    tab = open_tab(fake, viewport={"width": 360, "height": 640})
    for name in ("chats", "settings", "engine"):
        toggle = tab.page.locator(f"#toggle-{name}")
        toggle.press("Enter")
        expect(tab.page.locator(f"#{name}")).to_be_visible()
        tab.page.keyboard.press("Tab")
        tab.page.keyboard.press("Escape")
        expect(tab.page.locator(f"#{name}")).to_be_hidden()
        expect(toggle).to_be_focused()


def test_reduced_motion_stops_animations_and_transitions(open_tab: Any, fake: str) -> None:
    moves = """() => [null, "::after"].flatMap((part) => {
      const styles = [...document.querySelectorAll("*")].map((e) => getComputedStyle(e, part));
      return styles.filter((s) => s.animationName !== "none" || s.transitionDuration !== "0s");
    }).length"""
    for motion in ("no-preference", "reduce"):
        tab = open_tab(fake, reduced_motion=motion)
        tab.send("x" * 200)
        expect(tab.page.locator(".answer .tail")).to_contain_text("You said")
        assert (tab.page.evaluate(moves) > 0) == (motion == "no-preference")
        tab.wait_for_answer()


@pytest.mark.parametrize("width", [320, 1000])
def test_narrow_page_shows_everything_without_horizontal_scrolling(
    open_tab: Any, fake: str, width: int
) -> None:
    tab = open_tab(fake, viewport={"width": width, "height": 640})
    fill(tab)
    tab.page.locator(".question").get_by_role("button", name="Edit").click()
    for name in ("", "chats", "settings", "engine"):
        if name and tab.page.locator(f"#{name}").is_hidden():
            tab.page.click(f"#toggle-{name}")
        if name == "chats":
            tab.page.get_by_role("button", name="Rename").click()
        sizes = "[...document.querySelectorAll('html, #scroller, main, aside:not([hidden])')]"
        found = tab.page.evaluate(f"{sizes}.map((e) => [e.id, e.scrollWidth, e.clientWidth])")
        assert all(scrolled <= shown for _, scrolled, shown in found), (name, found)
    right = (
        "[...document.querySelectorAll('.top button')].map((e) => e.getBoundingClientRect().right)"
    )
    assert max(tab.page.evaluate(right)) <= width
