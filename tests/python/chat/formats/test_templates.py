"""Tests that answers are read as the chat templates of models write them.

A conversation that ends with an answer is rendered. What follows the prompt is the text that the
model is trained to write, and its parts must be those of the message. The templates come with
llama.cpp: scripts/dev/fetch_test_files.sh brings them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_engine import FakeTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering import chat_template

from lmdeploy.base.checks import OptionError
from lmdeploy.chat.formats.base import AnswerStart, ChatFormat, ModelInfo
from lmdeploy.chat.formats.registry import choose_format
from lmdeploy.chat.formats.text import TextFormat
from lmdeploy.chat.templates.prompt_template import PromptTemplate
from lmdeploy.chat.tool_calls import check_tool_use, join_tool_calls

FOLDER = Path(sys.prefix) / "share/lmdeploy/templates"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "ratio": {"type": "number"},
        "ok": {"type": "boolean"},
        "where": {"type": "object"},
        "tags": {"type": "array"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("get_weather", "f")
]


class Facts(NamedTuple):
    """What is expected of a template.

    Args:
        reasoning, tools: the names of the chosen parsers.
        end: the text after an answer, a token at which the model stops. It is None where the
            template writes earlier answers in another way than the prompt begins one.
        drops: parts of an answer that the template leaves out, moves or rejects.
        thinks: the prompt that fits answers without reasoning has thinking on.
        end_of_calls: the text after an answer with calls, if it is not `end`.
    """

    reasoning: str | None
    tools: str | None
    end: str | None
    drops: tuple[str, ...] = ()
    thinks: bool = False
    end_of_calls: str | None = None


REASONING = "reasoning of an answer without calls"
BESIDE_CALLS = "reasoning of an answer with calls"
CONTENT = "content of an answer with calls"
SECOND = "a second call"
NO_REASONING = (REASONING, BESIDE_CALLS)
FACTS = {
    "Apertus-8B-Instruct": Facts(None, "prompted", "<|assistant_end|>", NO_REASONING),
    "Apriel-1.6-15b-Thinker-fixed": Facts(None, "prompted", None),
    "Bielik-11B-v3.0-Instruct": Facts("qwen3", "qwen3", "<|im_end|>"),
    "ByteDance-Seed-OSS": Facts("seed_oss", "seed_oss", "<seed:eos>"),
    "Cohere2MoE": Facts(None, "prompted", None),
    "CohereForAI-c4ai-command-r-plus-tool_use": Facts(None, "prompted", None),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": Facts(None, "prompted", None),
    "GLM-4.6": Facts("qwen3", "glm45", "<|observation|>"),
    "GLM-4.7-Flash": Facts("qwen3", "glm47", "<|observation|>"),
    "GigaChat3-10B-A1.8B": Facts(None, "prompted", "<|message_sep|>", NO_REASONING),
    "GigaChat3.1-10B-A1.8B": Facts(None, "prompted", "<|message_sep|>", NO_REASONING),
    "HuggingFaceTB-SmolLM3-3B": Facts("qwen3", "prompted", "<|im_end|>", NO_REASONING),
    "Kimi-K2-Instruct": Facts(None, "prompted", "<|im_end|>", NO_REASONING),
    "Kimi-K2-Thinking": Facts("qwen3", "prompted", "<|im_end|>", NO_REASONING),
    "Kimi-K3": Facts(None, "prompted", None),
    "LFM2-8B-A1B": Facts(None, "prompted", "<|im_end|>", NO_REASONING),
    "LFM2.5-8B-A1B": Facts("qwen3", "prompted", "<|im_end|>", NO_REASONING),
    "LFM2.5-Instruct": Facts("qwen3", "prompted", "<|im_end|>", NO_REASONING),
    "MiMo-VL": Facts(None, "qwen3", "<|im_end|>", NO_REASONING),
    "MiniMax-M1": Facts(None, "prompted", None),
    "MiniMax-M2": Facts("qwen3", "minimax_m2", None),
    "MiniMax-M3": Facts(None, "prompted", None),
    "Mistral-Small-3.2-24B-Instruct-2506": Facts(None, "mistral", "</s>", (*NO_REASONING, CONTENT)),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Facts("qwen3", "qwen3coder", "<|im_end|>"),
    "NVIDIA-Nemotron-Nano-v2": Facts("qwen3", "prompted", None),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": Facts(
        None, "qwen3", "<|im_end|>", (*NO_REASONING, CONTENT)
    ),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": Facts(
        None, "qwen3", "<|im_end|>", (*NO_REASONING, CONTENT)
    ),
    "Qwen-QwQ-32B": Facts("qwen3", "qwen3", None),
    "Qwen-Qwen2.5-7B-Instruct": Facts(None, "qwen3", "<|im_end|>", NO_REASONING),
    "Qwen-Qwen3-0.6B": Facts("qwen3", "qwen3", "<|im_end|>", thinks=True),
    "Qwen3-Coder": Facts(None, "qwen3coder", "<|im_end|>", NO_REASONING),
    "Qwen3.5-4B": Facts("qwen3", "qwen3coder", "<|im_end|>"),
    "Reka-Edge": Facts("qwen3", "qwen3", "<sep>"),
    "Spark2.5": Facts("qwen3", "glm47", "<｜end▁of▁sentence｜>"),
    "StepFun3.5-Flash": Facts("qwen3", "qwen3coder", "<|im_end|>"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": Facts("qwen3", "prompted", None),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": Facts("qwen3", "prompted", None),
    "deepseek-ai-DeepSeek-V3.1": Facts("qwen3", "prompted", "<｜end▁of▁sentence｜>", NO_REASONING),
    "deepseek-ai-DeepSeek-V3.2": Facts(
        "qwen3", "deepseek-v32", "<｜end▁of▁sentence｜>", thinks=True
    ),
    "deepseek-ai-DeepSeek-V4-Flash-0731": Facts("qwen3", "deepseek-v4", "<｜end▁of▁sentence｜>"),
    "deepseek-ai-DeepSeek-V4": Facts("qwen3", "deepseek-v4", "<｜end▁of▁sentence｜>"),
    "fireworks-ai-llama-3-firefunction-v2": Facts(None, "prompted", None),
    "google-gemma-2-2b-it": Facts(None, "prompted", "<end_of_turn>", NO_REASONING),
    "google-gemma-4-31B-it-interleaved": Facts(
        "gemma", "gemma", "<turn|>", (REASONING,), thinks=True
    ),
    "google-gemma-4-31B-it": Facts(
        "gemma",
        "gemma",
        "<turn|>",
        (REASONING, CONTENT),
        thinks=True,
        end_of_calls="<|tool_response>",
    ),
    "ibm-granite-granite-3.3-2B-Instruct": Facts(
        "qwen3", "prompted", "<|end_of_text|>", NO_REASONING
    ),
    "ibm-granite-granite-4.0": Facts(None, "qwen3", "<|end_of_text|>", NO_REASONING),
    "ibm-granite-granite-4.1": Facts(None, "qwen3", "<|end_of_text|>", NO_REASONING),
    "inclusionai-ling-3.0-flash": Facts("qwen3", "prompted", "<|role_end|>", (BESIDE_CALLS,)),
    "llama-cpp-deepseek-r1": Facts("qwen3", "prompted", None),
    "llama-cpp-rwkv-world": Facts("qwen3", "prompted", None),
    "meetkai-functionary-medium-v3.1": Facts(None, "prompted", "<|eot_id|>", NO_REASONING),
    "meetkai-functionary-medium-v3.2": Facts(None, "prompted", None),
    "meta-llama-Llama-3.1-8B-Instruct": Facts(
        None, "llama3", "<|eot_id|>", (*NO_REASONING, CONTENT, SECOND)
    ),
    "meta-llama-Llama-3.2-3B-Instruct": Facts(
        None, "llama3", "<|eot_id|>", (*NO_REASONING, CONTENT, SECOND)
    ),
    "meta-llama-Llama-3.3-70B-Instruct": Facts(
        None, "llama3", "<|eot_id|>", (*NO_REASONING, CONTENT, SECOND)
    ),
    "microsoft-Phi-3.5-mini-instruct": Facts(None, "prompted", "<|end|>", NO_REASONING),
    "mistralai-Ministral-3-14B-Reasoning-2512": Facts(None, "mistral", "</s>", NO_REASONING),
    "mistralai-Mistral-Nemo-Instruct-2407": Facts(
        None, "mistral", "</s>", (*NO_REASONING, CONTENT)
    ),
    "moonshotai-Kimi-K2": Facts(None, "prompted", "<|im_end|>", NO_REASONING),
    "muse-glimmer": Facts(None, "prompted", None),
    "openai-gpt-oss-120b": Facts(None, "prompted", None),
    "openbmb-MiniCPM5-1B": Facts("qwen3", "prompted", None),
    "poolside-Laguna-S-2.1": Facts("qwen3", "prompted", "</assistant>", (BESIDE_CALLS,)),
    "poolside-Laguna-XS-2.1": Facts("qwen3", "prompted", "</assistant>", (BESIDE_CALLS,)),
    "poolside-Laguna-XS.2": Facts("qwen3", "prompted", "</assistant>", (BESIDE_CALLS,)),
    "tencent-Hy3": Facts(None, "prompted", "<｜hy_eos:opensource｜>", NO_REASONING),
    "unsloth-Apriel-1.5": Facts(None, "prompted", "<|end|>", NO_REASONING),
    "unsloth-mistral-Devstral-Small-2507": Facts(None, "mistral", "</s>", NO_REASONING),
    "upstage-Solar-Open-100B": Facts(None, "prompted", None),
}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text("aé中😀\"'\\\n{}<>[],: ", max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b_c", "Z"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": st.text("aé中😀\"'\\\n{}<>[],: ", max_size=12),
        "days": st.integers(-(2**53), 2**53),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "ok": st.booleans(),
        "where": st.dictionaries(st.sampled_from(["a", "b_c", "Z"]), JSON, max_size=3),
        "tags": st.lists(JSON, max_size=3),
        "note": st.sampled_from([None, "five o'clock", 'ü\n"x" y']),
    },
)
WORDS = st.text("aZé中😀\"'.,!\n ", min_size=1, max_size=20).map(str.strip).filter(bool)


class Answer(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, Any]]


@st.composite
def answers(draw: st.DrawFn, drops: tuple[str, ...]) -> Answer:
    """Return an answer whose parts the template keeps."""
    most = 1 if SECOND in drops else 2
    names = st.sampled_from(["get_weather", "f"])
    calls = draw(st.lists(st.tuples(names, ARGUMENTS), max_size=most))
    content = draw(WORDS)
    if calls:
        content = "" if CONTENT in drops else draw(st.just("") | st.just(content))
    can_reason = (BESIDE_CALLS if calls else REASONING) not in drops
    return Answer(content, draw(st.just("") | WORDS) if can_reason else "", calls)


def load(name: str) -> tuple[ChatFormat, PromptTemplate]:
    path = FOLDER / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is missing: scripts/setup.sh test brings it")
    source = path.read_text()
    tokenizer: Any = FakeTokenizer()
    template = PromptTemplate(chat_template(source, origin=name, bos_token="<s>", eos_token="</s>"))
    return choose_format(ModelInfo("", tokenizer, source)), template


def messages_of(answer: Answer) -> list[dict[str, Any]]:
    """Return a conversation that ends with the answer and the results of its calls."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    calls = [
        {
            "id": f"abcdefgh{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for index, (name, arguments) in enumerate(answer.calls)
    ]
    if calls:
        message["tool_calls"] = calls
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in calls]
    return [{"role": "user", "content": "Hi"}, message, *results]


def read(chat: ChatFormat, template: PromptTemplate, answer: Answer, facts: Facts) -> Answer:
    """Render the answer after its prompt and parse what the model would write."""
    messages = messages_of(answer)
    options = dict.fromkeys(("enable_thinking", "thinking"), facts.thinks or answer.reasoning != "")
    (prompt,) = chat.render(template, messages[:1], tools=TOOLS, options=options).texts
    whole = template.ending(begins_answer=False)
    (text,) = chat.render(whole, messages, tools=TOOLS, options=options).texts
    assert text.startswith(prompt)
    end = (answer.calls and facts.end_of_calls) or facts.end
    written = text[len(prompt) :].split(end)[0]
    start = AnswerStart(prompt[-200:], tool_use=check_tool_use(TOOLS))
    decoder = chat.decoder(start, skip_special=True, constrained=False)
    content = "".join(map(decoder.push, written.encode())) + decoder.finish()
    aside = decoder.take_aside()
    assert decoder.num_broken_calls == 0
    calls = [
        (call.function.name, json.loads(call.function.arguments))
        for call in join_tool_calls(aside.tool_calls)
    ]
    return Answer(content.strip(), aside.reasoning.strip(), calls)


ROUND_TRIPS = [name for name, facts in FACTS.items() if facts.end is not None]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_answers_are_read_as_templates_write_them(name: str) -> None:
    chat, template = load(name)
    facts = FACTS[name]

    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(answers(facts.drops))
    def check(answer: Answer) -> None:
        assert read(chat, template, answer, facts) == answer

    check()


@pytest.mark.parametrize("name", FACTS)
def test_parsers_are_chosen_by_template(name: str) -> None:
    chat, _ = load(name)
    assert isinstance(chat, TextFormat)
    chosen = [part and part.names[0] for part in (chat.reasoning, chat.tools)]
    assert chosen == [FACTS[name].reasoning, FACTS[name].tools]


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_templates_drop_the_parts_in_the_table(name: str) -> None:
    chat, template = load(name)
    call = ("f", {"city": "Ulm"})
    samples = {
        REASONING: Answer("Yes.", "Hm.", []),
        BESIDE_CALLS: Answer("", "Hm.", [call]),
        CONTENT: Answer("Yes.", "", [call]),
        SECOND: Answer("", "", [call, call]),
    }
    for part in FACTS[name].drops:
        try:
            got = read(chat, template, samples[part], FACTS[name])
        except (AssertionError, OptionError):
            continue
        assert got != samples[part], part
