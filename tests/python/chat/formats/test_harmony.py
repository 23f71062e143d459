"""Tests of the parser for GPT-OSS answers: openai-harmony, split points, random input."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import EOS, HARMONY, HarmonyTokenizer, make_engine
from harmony_cases import OWN_TEMPLATE, TEXTS, Vocabulary, load_vocabulary, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tiny_models import VOCAB_SIZE, TinyModel, byte_tokenizer, make_model, save_model

from lmdeploy import GenerationConfig, Pipeline, TurbomindEngineConfig
from lmdeploy.chat.formats.base import Delta, ModelInfo
from lmdeploy.chat.formats.harmony.parser import HarmonyParser, parse_answer
from lmdeploy.chat.formats.harmony.tokens import HarmonyTokens
from lmdeploy.chat.formats.registry import choose_format
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.chat.tokenizer import Tokenizer, tokenizer_from_folder
from lmdeploy.chat.tool_calls import FunctionCall, ToolCall, join_tool_calls
from lmdeploy.cli.chat import talk
from lmdeploy.engine.async_engine import AsyncEngine
from lmdeploy.response import Response, join_pieces

BYTES = HarmonyTokenizer()
CALL_ANSWER = (
    "<|channel|>analysis<|message|>Größe? 你好 👧<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>I look it up: é.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"place": "Zürich"}<|call|>'
)
FINAL_ANSWER = (
    "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>"
    "Ja, 你好 👧!<|return|>"
)


def tiny_harmony() -> Any:
    """Return a byte-level BPE tokenizer of `tokenizers` with Harmony's special tokens."""
    from tokenizers import AddedToken

    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in HARMONY])
    return backend


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(tiny_harmony(), eos_ids=[2], bos_id=1)


@pytest.fixture(scope="module")
def o200k() -> Iterator[Vocabulary]:
    with pytest.MonkeyPatch.context() as patch:
        yield load_vocabulary(patch)


def parse(text: str) -> tuple[str, str, list[tuple[str, str]]]:
    return plain(parse_answer(BYTES, BYTES.encode(text)))


def test_parse_answer_well_formed_separates_content_reasoning_and_calls() -> None:
    calls = [("get_weather", '{"place": "Zürich"}')]
    assert parse(CALL_ANSWER) == ("I look it up: é.", "Größe? 你好 👧", calls)
    assert parse(FINAL_ANSWER) == ("Ja, 你好 👧!", "Easy.", [])


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f",
        "<|channel|>commentary to=functions.f json",
        "<|channel|>commentary to=functions.f<|constrain|>json",
        "<|channel|>analysis to=functions.f code",
        "<|channel|>commentary to=f",
        "<|start|>assistant to=functions.f<|channel|>commentary",
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json",
    ],
)
def test_parse_answer_recipient_at_any_place_gives_call(header: str) -> None:
    assert parse(header + "<|message|>{}<|call|>") == ("", "", [("f", "{}")])


def test_parse_answer_built_in_tool_keeps_recipient_name() -> None:
    assert parse("<|channel|>analysis to=python code<|message|>1+1<|call|>")[2] == [
        ("python", "1+1")
    ]


def test_parse_answer_bodies_of_one_channel_are_joined_by_newlines() -> None:
    one = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    assert parse(one * 2 + "<|channel|>commentary<|message|>b<|end|>" + FINAL_ANSWER)[:2] == (
        "b\nJa, 你好 👧!",
        "a\na\nEasy.",
    )


def test_parse_answer_calls_have_consecutive_indices_and_unique_ids() -> None:
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant"
    calls = parse_answer(BYTES, BYTES.encode(call * 3)).tool_calls
    assert [call.index for call in calls] == [0, 1, 2]
    assert len({call.id for call in calls}) == 3
    assert all(call.id.startswith("call_") for call in calls)


MESSAGES = st.lists(
    st.tuples(
        st.sampled_from(["analysis", "commentary", "final"]),
        st.sampled_from([None, "functions.f", "functions.get_weather"]),
        st.sampled_from([None, "<|constrain|>json", "json"]),
        TEXTS,
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(messages=MESSAGES)
def test_parse_answer_random_messages_equal_openai_harmony(
    o200k: Vocabulary, messages: list[Any]
) -> None:
    from openai_harmony import Message, Role

    ids: list[int] = []
    for channel, recipient, kind, text in messages:
        message = Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
        if recipient is not None and channel != "final":
            message = message.with_recipient(recipient)
            message = message if kind is None else message.with_content_type(kind)
        ids += o200k.encoding.render(message)
    ids = ids[1 + len(o200k.encode("assistant")) :]  # the prompt already contains this header
    found = o200k.encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
    content, reasoning, calls = [], [], []
    for message in found:
        text = message.content[0].text
        if message.recipient is not None:
            calls.append((message.recipient.removeprefix("functions."), text))
        elif text:
            (reasoning if message.channel == "analysis" else content).append(text)
    assert plain(parse_answer(o200k, ids)) == ("\n".join(content), "\n".join(reasoning), calls)


@pytest.mark.parametrize("answer", [CALL_ANSWER, FINAL_ANSWER])
def test_parse_answer_other_tokenizers_give_equal_result(
    tiny: Tokenizer, o200k: Vocabulary, answer: str
) -> None:
    assert len(tiny.encode(answer, False)) < len(BYTES.encode(answer))
    for tokenizer in (tiny, o200k):
        ids = tokenizer.encode(answer, False)
        assert plain(parse_answer(tokenizer, ids)) == parse(answer)


def stream(tokenizer: Any, ids: list[int], cut: int) -> Delta:
    """Parse in two chunks, split at token `cut`, and join them as a client does."""
    parser = HarmonyParser(tokenizer)
    chunks = [Delta(), Delta()]
    for position, token in enumerate(ids):
        chunks[position >= cut].add(parser.push(token))
    chunks[1].add(parser.finish())
    return Delta(
        chunks[0].content + chunks[1].content,
        chunks[0].reasoning + chunks[1].reasoning,
        join_tool_calls(chunks[0].tool_calls + chunks[1].tool_calls),
    )


@pytest.mark.parametrize("answer", [CALL_ANSWER, FINAL_ANSWER])
def test_harmony_parser_every_split_point_gives_whole_answer(tiny: Tokenizer, answer: str) -> None:
    # BYTES has one token per byte, so this also splits inside every character.
    for tokenizer in (BYTES, tiny):
        ids = tokenizer.encode(answer, False)
        whole = plain(parse_answer(tokenizer, ids))
        for cut in range(len(ids) + 1):
            assert plain(stream(tokenizer, ids, cut)) == whole


@pytest.mark.parametrize("answer", [CALL_ANSWER, FINAL_ANSWER])
def test_parse_answer_truncated_gives_prefix_of_each_text(answer: str) -> None:
    # An incomplete last character may become a replacement character.
    ids = BYTES.encode(answer)
    content, reasoning, calls = parse(answer)
    for cut in range(len(ids)):
        parts = parse_answer(BYTES, ids[:cut])
        assert content.startswith(parts.content.removesuffix("�"))
        assert reasoning.startswith(parts.reasoning.removesuffix("�"))
        for call, (name, arguments) in zip(parts.tool_calls, calls, strict=False):
            assert call.function.name == name
            assert arguments.startswith(call.function.arguments.removesuffix("�"))
        assert len(parts.tool_calls) <= len(calls)


def test_harmony_parser_incomplete_character_is_held_back() -> None:
    parser = HarmonyParser(BYTES)
    for token in BYTES.encode("<|channel|>final<|message|>"):
        assert parser.push(token) == Delta()
    first, *rest = "👧".encode()
    assert parser.push(first).content == ""
    assert [parser.push(byte).content for byte in rest] == ["", "", "👧"]
    parser.push(first)
    assert parser.finish().content == "�"


HEAD = "<|channel|>final<|message|>"
ODD = {
    "": ("", "", []),
    "Just text.": ("Just text.", "", []),
    " to=functions.f": ("", "", []),
    "<|channel|>": ("", "", []),
    "<|channel|>analysis": ("", "", []),
    "<|channel|>analysis<|end|>" + "<|start|>assistant" + HEAD + "x": ("x", "", []),
    "<|message|>no channel": ("no channel", "", []),
    "analysis<|message|>hm": ("", "hm", []),
    "<|channel|><|message|>x": ("x", "", []),
    "<|channel|>mystery<|message|>x": ("x", "", []),
    "<|channel|>analysis<|channel|>final<|message|>x": ("x", "", []),
    HEAD + "a<|message|>b<|constrain|>c": ("abc", "", []),
    HEAD + "a<|channel|>analysis<|message|>b": ("a", "b", []),
    HEAD + "a<|start|>assistant<|channel|>analysis<|message|>b": ("a", "b", []),
    HEAD + "a<|end|>lost": ("a", "", []),
    HEAD + "a<|end|>lost<|start|>assistant" + HEAD + "b": ("a\nb", "", []),
    HEAD + "a<|end|><|start|>user<|message|>me?<|end|>": ("a", "", []),
    HEAD + "a<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>7": (
        "a",
        "",
        [],
    ),
    HEAD + "a<|end|><|start|>" + HEAD + "b": ("a\nb", "", []),
    "<|end|><|return|><|call|><|start|><|start|>assistant" + HEAD + "x": ("x", "", []),
    "<|channel|>commentary to=functions.<|message|>x": ("x", "", []),
    "<|channel|>commentary to=functions.f<|message|>{": ("", "", [("f", "{")]),
    "<|channel|>commentary to=functions.f<|message|>": ("", "", [("f", "")]),
    "<|channel|>commentary to=functions.f<|message|><|call|>": ("", "", [("f", "")]),
    "<|channel|>final to=user<|message|>x": ("x", "", []),
    "<|constrain|>json<|channel|>analysis<|message|>x": ("", "x", []),
    "<|channel|>final <|constrain|>json<|message|>{}": ("{}", "", []),
    "x" * 300 + HEAD + "y": ("x" * 300 + "\ny", "", []),
}


@pytest.mark.parametrize("answer", ODD)
def test_parse_answer_malformed_input_gives_expected_texts(answer: str) -> None:
    assert parse(answer) == ODD[answer]


def test_parse_answer_invalid_utf8_gives_replacement_characters() -> None:
    ids = [*BYTES.encode(HEAD), 0xE4, 0xFF, *BYTES.encode("<|end|>"), 0xE4]
    assert plain(parse_answer(BYTES, ids)) == ("��", "", [])
    assert parse_answer(BYTES, [0xE4]).content == "�"
    cut = [*BYTES.encode(HEAD), 0xE4, *BYTES.encode("<|end|><|start|>assistant" + HEAD), 0x41]
    assert parse_answer(BYTES, cut).content == "�\nA"


def test_parse_answer_other_special_tokens_are_skipped() -> None:
    assert parse_answer(BYTES, [EOS, *BYTES.encode(HEAD), EOS, 0x41]).content == "A"


WORDS = ["assistant", "analysis", "final", "commentary", " to=functions.f", "user", "{}", "ä", " "]
NONSENSE = st.lists(st.sampled_from([*BYTES.names, *WORDS]), max_size=40).map("".join)


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=60) | NONSENSE.map(BYTES.encode))
def test_harmony_parser_random_tokens_give_consistent_deltas(ids: list[int]) -> None:
    # The parser raises nothing, shows no special token, and names each call once.
    parser = HarmonyParser(BYTES)
    chunks = [*(parser.push(token) for token in ids), parser.finish()]
    calls = [part for chunk in chunks for part in chunk.tool_calls]
    started: set[int] = set()
    for part in calls:
        assert (part.index not in started) == bool(part.function.name)
        started.add(part.index)
    whole = parse_answer(BYTES, ids)
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert "".join(chunk.reasoning for chunk in chunks) == whole.reasoning
    assert len(whole.tool_calls) == parser.num_tool_calls == len(started)
    visible = whole.content + whole.reasoning + "".join(str(call) for call in whole.tool_calls)
    assert not any(name in visible for name in BYTES.names)


class Asker:
    """Runs a pipeline whose fake engine answers with a given text, `per_step` tokens at a time."""

    def __init__(self) -> None:
        self._answer = ""
        self._engine = make_engine(lambda _: self._answer, harmony_template=OWN_TEMPLATE)
        self.pipe = Pipeline("fake", engine=self._engine)

    def __call__(
        self, answer: str, config: GenerationConfig | None = None, *, per_step: int = 1
    ) -> list[Response]:
        self._answer = answer
        self._engine.running.core.tokens_per_step = per_step  # type: ignore[attr-defined]
        return list(self.pipe.stream_infer("Hi", config))


@pytest.fixture(scope="module")
def ask() -> Iterator[Asker]:
    asker = Asker()
    with asker.pipe:
        yield asker


def pairs(calls: list[ToolCall] | None) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls or []]


def test_pipeline_harmony_answer_fills_text_reasoning_and_tool_calls(ask: Asker) -> None:
    whole = join_pieces(ask(CALL_ANSWER))
    assert (whole.text, whole.reasoning_content) == ("I look it up: é.", "Größe? 你好 👧")
    assert pairs(whole.tool_calls) == [("get_weather", '{"place": "Zürich"}')]
    assert whole.finish_reason == "tool_calls"
    last = join_pieces(ask(FINAL_ANSWER))
    assert (last.text, last.reasoning_content, last.tool_calls) == ("Ja, 你好 👧!", "Easy.", None)
    assert last.finish_reason == "stop"


def test_pipeline_any_tokens_per_step_gives_equal_response(ask: Asker) -> None:
    wanted = join_pieces(ask(CALL_ANSWER))
    for per_step in range(2, len(BYTES.encode(CALL_ANSWER)) + 1):
        whole = join_pieces(ask(CALL_ANSWER, per_step=per_step))
        assert whole.token_ids == wanted.token_ids
        assert (whole.text, whole.reasoning_content) == (wanted.text, wanted.reasoning_content)
        assert pairs(whole.tool_calls) == pairs(wanted.tool_calls)


def test_response_extend_all_chunks_equals_join_pieces(ask: Asker) -> None:
    first, *rest = ask(CALL_ANSWER)
    for chunk in rest:
        first.extend(chunk)
    wanted = join_pieces(ask(CALL_ANSWER))
    assert (first.text, first.reasoning_content) == (wanted.text, wanted.reasoning_content)
    assert pairs(first.tool_calls) == pairs(wanted.tool_calls)


def test_pipeline_call_cut_by_token_limit_finishes_with_length(ask: Asker) -> None:
    for limit in (1, 20, len(BYTES.encode(CALL_ANSWER)) - 6):
        whole = join_pieces(ask(CALL_ANSWER, GenerationConfig(max_new_tokens=limit)))
        assert whole.finish_reason == "length"
    assert pairs(whole.tool_calls) == [("get_weather", '{"place": "Zür')]


def test_pipeline_stop_words_match_content_only(ask: Asker) -> None:
    stopped = join_pieces(ask(FINAL_ANSWER, GenerationConfig(stop_words=["你"])))
    assert (stopped.text, stopped.reasoning_content) == ("Ja, ", "Easy.")
    assert stopped.finish_reason == "stop"
    unaffected = join_pieces(ask(FINAL_ANSWER, GenerationConfig(stop_words=["Easy", "analysis"])))
    assert unaffected.text == "Ja, 你好 👧!"


def test_pipeline_grammar_constrains_final_channel(ask: Asker) -> None:
    # The prompt opens the final channel, because the grammar does not allow the channel header.
    tokenizer = ask.pipe.engine.text.tokenizer
    plain_ids = ask("x")[-1].input_token_len
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmdeploy.chat.grammar.Grammars.token_mask", lambda *_, **__: None)
        json_object = GenerationConfig(response_format={"type": "json_object"})
        whole = join_pieces(ask('{"a": 1}<|return|>', json_object))
        assert (whole.text, whole.finish_reason) == ('{"a": 1}', "stop")
        assert join_pieces(ask("to=", json_object)).text == "to="
    header = tokenizer.encode("<|channel|>final<|message|>", add_special=False)
    assert whole.input_token_len == plain_ids + len(header)
    core: Any = ask.pipe.engine.running.core
    assert core.requests[-1].prompt[-len(header) :] == header
    text = join_pieces(ask(FINAL_ANSWER, GenerationConfig(response_format={"type": "text"})))
    assert text.reasoning_content == "Easy."


def test_pipeline_logprobs_cover_all_tokens(ask: Asker) -> None:
    whole = join_pieces(ask(FINAL_ANSWER, GenerationConfig(logprobs=0)))
    assert len(whole.logprobs or []) == len(whole.token_ids) == whole.generate_token_len
    assert whole.token_ids == BYTES.encode(FINAL_ANSWER)[:-1]


def test_pipeline_without_preprocess_returns_plain_text() -> None:
    engine = make_engine(lambda _: FINAL_ANSWER, harmony_template=OWN_TEMPLATE)
    with Pipeline("fake", engine=engine) as pipe:
        answer = pipe("Hi", do_preprocess=False)
    assert isinstance(answer, Response)
    assert answer.text == "analysisEasy.assistantfinalJa, 你好 👧!"
    assert answer.reasoning_content is None


def test_pipeline_chat_template_kwargs_reach_harmony_template() -> None:
    prompts: list[str] = []
    engine = make_engine(lambda prompt: prompts.append(prompt) or "", harmony_template=OWN_TEMPLATE)
    with Pipeline("fake", engine=engine) as pipe:
        pipe("Hi", chat_template_kwargs={"reasoning_effort": "low"})
        with pytest.raises(ValueError, match="reasoning_effort is 'x'"):
            pipe("Hi", chat_template_kwargs={"reasoning_effort": "x"})
    assert len(prompts) == 1 and "Reasoning: low" in prompts[0]


@settings(max_examples=150, deadline=None)
@given(answer=NONSENSE, limit=st.integers(1, 200))
def test_pipeline_random_answer_has_finish_reason(ask: Asker, answer: str, limit: int) -> None:
    chunks = ask(answer, GenerationConfig(max_new_tokens=limit), per_step=16)
    assert chunks[-1].finish_reason in ("stop", "length", "tool_calls")


def test_async_engine_tool_call_parser_gpt_oss_parses_random_answers(tmp_path: Path) -> None:
    """Use a tiny model of another family, with the format chosen by the flag."""
    vocab_size = VOCAB_SIZE + len(HARMONY)
    folder = save_model(make_model(TinyModel("x", "Llama", {"vocab_size": vocab_size})), tmp_path)
    tiny_harmony().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(OWN_TEMPLATE)
    config = TurbomindEngineConfig(session_len=256, max_batch_size=2)
    engine = AsyncEngine.load(str(folder), config, tool_call_parser="gpt-oss", progress=False)
    special = HarmonyTokens.of(engine.text.tokenizer)
    assert special.end not in engine.text.eos_ids
    assert {special.return_, special.call} <= set(engine.text.eos_ids)
    likely = dict.fromkeys((special.start, special.channel, special.message, special.end), 4.0)
    with Pipeline("x", engine=engine) as pipe:
        for seed in range(8):
            options = GenerationConfig(
                max_new_tokens=64, do_sample=True, random_seed=seed, logit_bias=likely
            )
            whole = join_pieces(list(pipe.stream_infer("Hi", options)))
            assert whole.finish_reason in ("stop", "length", "tool_calls")
            parts = parse_answer(engine.text.tokenizer, whole.token_ids)
            assert (whole.text, whole.reasoning_content or "") == (parts.content, parts.reasoning)
            assert pairs(whole.tool_calls) == pairs(parts.tool_calls)


def test_talk_harmony_answer_prints_reasoning_content_and_calls(ask: Asker) -> None:
    ask(CALL_ANSWER)  # sets the fake model's answer
    lines = iter(["Hi", "/exit"])
    out = io.StringIO()
    talk(ask.pipe, Console(file=out, width=200), read=lambda: next(lines))
    assert out.getvalue().splitlines() == [
        "Größe? 你好 👧",
        "I look it up: é.",
        "",
        '[get_weather] {"place": "Zürich"}',
    ]


def test_choose_format_harmony_is_for_gpt_oss_or_by_flag() -> None:
    class Bare(HarmonyTokenizer):
        def token_id(self, token: str) -> int | None:
            return None if token == "<|call|>" else super().token_id(token)

    def choose(model_type: str, tokenizer: Any, **flags: str) -> str:
        return choose_format(ModelInfo(model_type, tokenizer), **flags).name

    assert choose("gpt_oss", BYTES) == "gpt-oss"
    assert choose("llama", BYTES) == "plain"
    assert choose("llama", BYTES, reasoning_parser="gpt-oss") == "gpt-oss"
    assert choose("llama", BYTES, tool_call_parser="gpt-oss") == "gpt-oss"
    assert choose("gpt_oss", Bare()) == "plain"
    with pytest.raises(ValueError, match=r"no <\|call\|>.*--reasoning-parser"):
        choose("llama", Bare(), reasoning_parser="gpt-oss")


def test_tokenizer_from_folder_stop_ids_include_return_and_call(tmp_path: Path) -> None:
    # <|end|> ends a message. <|return|>, <|call|> and the EOS ids of the file end an answer.
    backend = tiny_harmony()
    backend.save(str(tmp_path / "tokenizer.json"))
    ids = {name: backend.token_to_id(f"<|{name}|>") for name in HARMONY}
    eos = [ids["return"], EOS]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    stops = tokenizer_from_folder(tmp_path).stop_ids
    assert {ids["return"], ids["call"], EOS} <= set(stops) and ids["end"] not in stops


def test_tokenizer_from_gguf_stop_ids_include_return_and_call() -> None:
    backend = tiny_harmony()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    kinds = [3 if token.startswith("<") and len(token) > 2 else 1 for token in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-4o",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": backend.token_to_id("<|return|>"),
    }
    tokenizer = tokenizer_from_gguf(metadata, "test")
    named = {tokenizer.token_bytes(i).decode() for i in tokenizer.stop_ids}
    assert {"<|return|>", "<|call|>"} <= named and "<|end|>" not in named


def test_join_tool_calls_merges_parts_by_index() -> None:
    parts = [
        ToolCall("a", FunctionCall("f", ""), 0),
        ToolCall("b", FunctionCall("g", "{"), 1),
        ToolCall("a", FunctionCall("", "{}"), 0),
        ToolCall("b", FunctionCall("", "}"), 1),
    ]
    assert pairs(join_tool_calls(parts)) == [("f", "{}"), ("g", "{}")]
    assert pairs(parts) == [("f", ""), ("g", "{"), ("", "{}"), ("", "}")]
