"""Tests of how streams are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from lmdeploy.serve.errors import json_bytes
from lmdeploy.serve.streaming import SseResponse


def test_sse_response_sends_once_per_turn_of_the_event_loop() -> None:
    """A client that is gone is then noticed before the next event is written."""
    sent: list[bytes] = []
    has_turned = True

    def turn() -> None:
        nonlocal has_turned
        has_turned = True

    async def events() -> AsyncIterator[bytes]:
        for i in range(20):
            yield b"data: %d\n\n" % i

    async def send(message: dict[str, Any]) -> None:
        nonlocal has_turned
        assert has_turned
        has_turned = False
        asyncio.get_running_loop().call_soon(turn)
        sent.append(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    scope = {"type": "http", "asgi": {"spec_version": "2.0"}}
    asyncio.run(SseResponse(events(), [])(scope, receive, send))
    assert b"".join(sent) == b"".join(b"data: %d\n\n" % i for i in range(20))


def test_an_event_is_one_line_for_clients_that_split_at_every_unicode_line_end() -> None:
    text = "a\x85b\u2028c\u2029d"
    assert json_bytes({"text": text}).decode().splitlines() == [
        '{"text":"a\\u0085b\\u2028c\\u2029d"}'
    ]
