"""A tab of a browser with the web page. Its fixtures are in tests/python/serve/conftest.py."""

from __future__ import annotations

import json
from typing import Any

CHAT = "**/v1/chat/completions"
_ALERTS = "window.alerts = 0; window.alert = () => { window.alerts += 1; };"
_ALL_CHATS = """() => new Promise((resolve) => {
  indexedDB.open("lmdeploy", 1).onsuccess = ({ target }) => {
    const request = target.result.transaction("chats").objectStore("chats").getAll();
    request.onsuccess = () => resolve(request.result);
  };
})"""


class Tab:
    """A tab of the browser that records errors and requests to other hosts."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.add_init_script(_ALERTS)
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
        from playwright.sync_api import expect

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


def stored_chats(tab: Tab) -> list[dict[str, Any]]:
    """Return the chats that the browser keeps."""
    chats: list[dict[str, Any]] = tab.page.evaluate(_ALL_CHATS)
    return chats


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
