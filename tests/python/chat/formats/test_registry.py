"""Tests of the parser registry: a new parser needs one file and one registry line.

This file adds a reasoning parser and a tool-call parser and serves answers with them.
"""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from fake_engine import FakeTokenizer, make_engine
from serving import serving

from lmdeploy.chat.formats import registry
from lmdeploy.chat.formats.base import (
    AnswerStart,
    Delta,
    ModelInfo,
    ReasoningParser,
    Splitter,
    ToolCallParser,
)
from lmdeploy.chat.grammar import AnswerGrammar
from lmdeploy.chat.stop_words import StopMatcher
from lmdeploy.chat.tool_calls import FunctionCall, ToolCall, ToolUse

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ANSWER = 'Well.</think>I add.<call>add {"a": 1}</call>'


class ThinkSplitter:
    """Treats text before `</think>` as reasoning if `is_open`."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open
        self._end = StopMatcher(["</think>"])
        self._held = ""

    def push(self, text: str) -> Delta:
        if not self._is_open:
            return Delta(content=text)
        match = self._end.find(text)
        self._held += text
        if match is None:
            keep = len(self._held) - self._end.held
            shown, self._held = self._held[:keep], self._held[keep:]
            return Delta(reasoning=shown)
        self._is_open = False
        reasoning, _, content = self._held.partition("</think>")
        self._held = ""
        return Delta(content, reasoning)

    def finish(self) -> Delta:
        return Delta(reasoning=self._held)


class Think(ReasoningParser):
    names = ("think",)

    def matches(self, model: ModelInfo) -> bool:
        return model.model_type == "thinker"

    @property
    def marks(self) -> tuple[str, ...]:
        return ("</think>",)

    def grammar(self, start: AnswerStart, grammar: AnswerGrammar) -> str:
        return grammar.until("</think>")

    def splitter(self, start: AnswerStart) -> Splitter:
        return ThinkSplitter(is_open=start.prompt_end.endswith("<assistant>"))


class CallSplitter:
    """Holds back everything from `<` until the answer ends."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> Delta:
        self._held += text
        if "<" in self._held:
            content, mark, rest = self._held.partition("<")
            self._held = mark + rest
            return Delta(content)
        content, self._held = self._held, ""
        return Delta(content)

    def finish(self) -> Delta:
        call = self._held.removeprefix("<call>").removesuffix("</call>")
        if call == self._held:
            return Delta(self._held)
        name, _, arguments = call.partition(" ")
        return Delta(tool_calls=[ToolCall("call_1", FunctionCall(name, arguments))])


class Calls(ToolCallParser):
    names = ("calls",)

    def matches(self, model: ModelInfo) -> bool:
        return "<call>" in model.template

    @property
    def marks(self) -> tuple[str, ...]:
        return ("<call>", "</call>")

    def splitter(self, tool_use: ToolUse) -> Splitter:
        return CallSplitter()

    def grammar(self, tool_use: ToolUse, grammar: AnswerGrammar) -> str:
        return grammar.literal("<call>add {}</call>")


@pytest.fixture(autouse=True)
def parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REASONING_PARSERS", (Think(), *registry.REASONING_PARSERS))
    monkeypatch.setattr(registry, "TOOL_CALL_PARSERS", (Calls(), *registry.TOOL_CALL_PARSERS))


def choose(model: ModelInfo, **flags: str) -> str:
    return registry.choose_format(model, **flags).name


def test_choose_format_combines_independently_chosen_parsers() -> None:
    tokenizer: Any = FakeTokenizer()
    assert choose(ModelInfo("llama", tokenizer)) == "plain"
    assert choose(ModelInfo("thinker", tokenizer)) == "think"
    assert choose(ModelInfo("llama", tokenizer, "<call>")) == "calls"
    assert choose(ModelInfo("thinker", tokenizer, "<call>")) == "think and calls"
    assert choose(ModelInfo("llama", tokenizer), reasoning_parser="think") == "think"


def test_choose_format_rejects_unknown_names_and_excluded_parsers() -> None:
    from fake_engine import HarmonyTokenizer

    model = ModelInfo("llama", HarmonyTokenizer())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no parser 'x', only think, .*none.*--reasoning-parser"):
        choose(model, reasoning_parser="x")
    with pytest.raises(ValueError, match=r"gpt-oss cannot be combined.*calls.*--tool-call-parser"):
        choose(model, reasoning_parser="gpt-oss", tool_call_parser="calls")


@pytest.mark.parametrize("stream", [False, True])
def test_server_splits_answers_with_added_parsers(stream: bool) -> None:
    engine = make_engine(lambda _: ANSWER)
    model = ModelInfo("thinker", engine.text.tokenizer, "<call>")
    engine.text.chat_format = registry.choose_format(model)
    with serving(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "1 + 0?"}],
            tools=TOOLS,  # type: ignore[call-overload]
            stream=stream,
        )
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            reason = chunks[-1].finish_reason
            deltas = [chunk.delta for chunk in chunks]
            content = "".join(delta.content or "" for delta in deltas)
            reasoning = "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas)
            calls = [call for delta in deltas for call in delta.tool_calls or []]
        else:
            choice = answer.choices[0]
            reason, message = choice.finish_reason, choice.message
            content, reasoning = message.content, message.reasoning_content
            calls = message.tool_calls
    assert (content, reasoning, reason) == ("I add.", "Well.", "tool_calls")
    assert [call.function.name for call in calls] == ["add"]
    assert json.loads(calls[0].function.arguments) == {"a": 1}


def test_server_required_tool_choice_uses_grammar_of_the_format() -> None:
    masks: list[Any] = []
    engine = make_engine(lambda _: ANSWER)
    model = ModelInfo("llama", engine.text.tokenizer, "<call>")
    engine.text.chat_format = registry.choose_format(model)
    grammars = type("Grammars", (), {"token_mask": lambda _, text, field: masks.append(text)})
    engine.new_grammars = grammars  # type: ignore[method-assign,assignment]
    with serving(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for choice in ("auto", "required"):
            client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "?"}],
                tools=TOOLS,  # type: ignore[arg-type]
                tool_choice=choice,  # type: ignore[arg-type]
            )
    (text,) = masks
    assert json.loads(text)["grammars"][0]["lark_grammar"] == 'start:  "<call>add {}</call>"'


def test_server_tools_and_response_format_share_a_grammar() -> None:
    rules: list[str] = []
    engine = make_engine(lambda _: ANSWER)
    model = ModelInfo("llama", engine.text.tokenizer, "<call>")
    engine.text.chat_format = registry.choose_format(model)

    def token_mask(_: Any, text: str, field: str = "response_format") -> None:
        if field == "tools":
            rules.append(json.loads(text)["grammars"][0]["lark_grammar"])

    engine.new_grammars = type("Grammars", (), {"token_mask": token_mask})  # type: ignore
    with serving(engine) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for choice in ("auto", "required"):
            answer = client.chat.completions.create(
                model="m",
                messages=[{"role": "user", "content": "1 + 0?"}],
                tools=TOOLS,  # type: ignore[arg-type]
                tool_choice=choice,  # type: ignore[arg-type]
                response_format={"type": "json_object"},
            )
            assert answer.choices[0].finish_reason == "tool_calls"
    call = '"<call>add {}</call>"'
    assert rules == [f"start:  rule_0\nrule_0: @grammar_0 | {call}", f"start:  {call}"]
