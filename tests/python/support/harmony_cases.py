"""Conversations, answers and tokenizers for tests of the Harmony format."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_engine import HarmonyTokenizer
from hypothesis import strategies as st
from rendering import chat_template

from lmdeploy.chat.formats.base import Delta
from lmdeploy.chat.formats.harmony.parser import parse_answer
from lmdeploy.chat.templates.prompt_template import PromptTemplate

VOCABULARY = "o200k_base.tiktoken"
VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
OWN_TEMPLATE = (Path(__file__).parents[1] / "data/harmony.jinja").read_text(encoding="utf-8")
# The template of a GPT-OSS checkpoint, if the variable names one.
REAL_TEMPLATE = os.environ.get("GPT_OSS_CHAT_TEMPLATE")
TEMPLATES = {
    "own": OWN_TEMPLATE,
    **({"real": Path(REAL_TEMPLATE).read_text(encoding="utf-8")} if REAL_TEMPLATE else {}),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town."},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["place"],
        },
    },
}


def prompt_template(source: str) -> PromptTemplate:
    return PromptTemplate(chat_template(source))


class Vocabulary:
    """openai-harmony's o200k vocabulary with the interface of our tokenizers."""

    def __init__(self, encoding: Any) -> None:
        self.encoding = encoding

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(self.encoding.encode(text, allowed_special="all"))

    def close(self) -> None:
        pass

    def token_id(self, token: str) -> int | None:
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    def token_bytes(self, token_id: int) -> bytes:
        return bytes(self.encoding._inner.decode_bytes([token_id]))

    def is_special(self, token_id: int) -> bool:
        return bool(self.encoding.is_special_token(token_id))


def load_vocabulary(monkeypatch: pytest.MonkeyPatch) -> Vocabulary:
    """Return the vocabulary. Skip the test if the library or its file is missing."""
    harmony = pytest.importorskip("openai_harmony")
    for folder in (os.environ.get(VARIABLE), f"{sys.prefix}/share/lmdeploy"):
        if folder and (Path(folder) / VOCABULARY).is_file():
            monkeypatch.setenv(VARIABLE, folder)
            name = harmony.HarmonyEncodingName.HARMONY_GPT_OSS
            return Vocabulary(harmony.load_harmony_encoding(name))
    pytest.skip(f"{VOCABULARY} is missing: scripts/setup.sh test brings it")


TEXTS = st.text(
    st.characters(exclude_categories=("Cs",)) | st.sampled_from(["ä", "你", "👧", '"', "\\"]),
    max_size=12,
)
# Texts that spell special tokens must remain text.
SPELLED = TEXTS | st.tuples(TEXTS, st.sampled_from(HarmonyTokenizer.names), TEXTS).map("".join)
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
ARGUMENTS = st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2).map(json.dumps) | SPELLED


@dataclass
class Step:
    """A call with the text before it, and its result."""

    thinking: str
    preamble: str
    name: str
    arguments: str
    result: str


@dataclass
class Round:
    """A question, calls, and an answer unless the conversation ends with a result."""

    question: str
    steps: list[Step]
    thinking: str
    answer: str


STEPS = st.builds(Step, SPELLED, SPELLED, NAMES, ARGUMENTS, SPELLED)
ROUNDS = st.builds(Round, SPELLED, st.lists(STEPS, max_size=3), SPELLED, SPELLED)


@dataclass
class Conversation:
    """Rounds of a conversation. If `is_open`, the last round ends with a result."""

    system: str
    rounds: list[Round]
    is_open: bool
    joins_calls: bool  # put all calls of a round into one message, as OpenAI's API allows
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[tuple[str, str, list[tuple[str, str]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Fill the messages, and for each turn the answer that a parser must find."""
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        for number, item in enumerate(self.rounds):
            is_open = self.is_open and number == len(self.rounds) - 1
            self.messages.append({"role": "user", "content": item.question})
            self._add_steps(item.steps, keeps_thinking=is_open)
            if not is_open:
                answer = {"content": item.answer, "reasoning_content": item.thinking}
                self.messages.append({"role": "assistant", **answer})
                self.answers.append((item.answer, "", []))

    def _add_steps(self, steps: list[Step], *, keeps_thinking: bool) -> None:
        calls = [
            {
                "id": f"c{i}",
                "type": "function",
                "function": {"name": s.name, "arguments": s.arguments},
            }
            for i, s in enumerate(steps)
        ]
        results = [
            {"role": "tool", "tool_call_id": f"c{i}", "content": s.result}
            for i, s in enumerate(steps)
        ]
        if self.joins_calls and steps:
            self._add_calls(steps[0], calls)
            self.messages += reversed(results)
            steps = [steps[0], *(Step("", "", s.name, s.arguments, s.result) for s in steps[1:])]
        else:
            for step, call, result in zip(steps, calls, results, strict=True):
                self._add_calls(step, [call])
                self.messages.append(result)
        self.answers += [
            (s.preamble, s.thinking if keeps_thinking else "", [(s.name, s.arguments)])
            for s in steps
        ]

    def _add_calls(self, step: Step, calls: list[dict[str, Any]]) -> None:
        said = {"content": step.preamble or None, "reasoning_content": step.thinking or None}
        self.messages.append({"role": "assistant", **said, "tool_calls": calls})


CONVERSATIONS = st.builds(
    Conversation,
    SPELLED,
    st.lists(ROUNDS, min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)


def plain(parts: Delta) -> tuple[str, str, list[tuple[str, str]]]:
    """Return content, reasoning and calls without the ids of the calls."""
    calls = [(call.function.name, call.function.arguments) for call in parts.tool_calls]
    return parts.content, parts.reasoning, calls


def assistant_turns(tokenizer: Any, ids: Sequence[int]) -> Iterator[list[int]]:
    """Yield the tokens that the model generated in a prompt, without the header of each turn."""
    start = tokenizer.token_id("<|start|>")
    author = tokenizer.encode("assistant")
    messages: list[list[int]] = []
    for token in ids:
        if token == start:
            messages.append([])
        messages[-1].append(token)
    run: list[int] = []
    for message in messages[:-1]:  # the last one is the header of the next answer
        if message[1 : 1 + len(author)] == author:
            run += message
        elif run:
            yield run[1 + len(author) :]
            run = []
    if run:
        yield run[1 + len(author) :]
    assert messages[-1] == [start, *author]


def parsed_turns(tokenizer: Any, ids: Sequence[int]) -> list[tuple[str, str, list[Any]]]:
    return [plain(parse_answer(tokenizer, turn)) for turn in assistant_turns(tokenizer, ids)]
