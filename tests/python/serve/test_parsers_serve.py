"""Tests of what a server reports about its parsers: the line at the start and the counter."""

from __future__ import annotations

import httpx
from fake_engine import make_engine
from serving import CHAT, post, serving

from lmdeploy.chat.formats.base import ModelInfo
from lmdeploy.chat.formats.registry import choose_format
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.serve.server import format_line
from lmdeploy.serve.state import ServerOptions

TOOLS = [{"type": "function", "function": {"name": "f"}}]
TEMPLATE = "<think></think><tool_call>"


def engine_of(answer: str, template: str = TEMPLATE) -> AsyncEngine:
    engine = make_engine(lambda _: answer)
    model = ModelInfo("", engine.text.tokenizer, template)
    engine.text.chat_format = choose_format(model)
    return engine


def test_format_line_names_the_parsers_and_flags() -> None:
    engine = engine_of("")
    assert format_line(engine, ServerOptions()) == (
        "Chat format: reasoning qwen3, tool calls qwen3 "
        "(chosen by the model; --reasoning-parser and --tool-call-parser change it)"
    )
    options = ServerOptions(reasoning_parser="qwen3")
    assert format_line(engine, options) == "Chat format: reasoning qwen3, tool calls qwen3"
    plain = engine_of("", template="")
    assert format_line(plain, options) == "Chat format: reasoning none, tool calls none"
    plain.close()
    engine.close()


def test_metrics_count_broken_calls() -> None:
    broken = "<tool_call>{}</tool_call> <tool_call>[]</tool_call>"
    call = '<tool_call>{"name": "f"}</tool_call>'
    for answer, content, number in (
        (broken, broken, 2),
        (call, None, 0),
        ("No call.", "No call.", 0),
    ):
        with serving(engine_of(answer)) as url:
            reply = post(url, "/v1/chat/completions", {**CHAT, "tools": TOOLS}).json()
            assert reply["choices"][0]["message"].get("content") == content
            line = f'lmdeploy:broken_tool_calls_total{{model_name="m"}} {number}.0'
            assert line in httpx.get(f"{url}/metrics").text
