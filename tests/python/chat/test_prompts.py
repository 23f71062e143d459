"""Tests of prompts: the choice of the template, BOS, and the token limit."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeTokenizer
from rendering import chat_template
from vocabularies import sentence_piece_metadata

from lmdeploy.base.checks import OptionError
from lmdeploy.chat import prompts
from lmdeploy.chat.formats.text import TextFormat
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.chat.messages import check_messages
from lmdeploy.chat.prompts import check_template_options, encode_chat
from lmdeploy.chat.templates.prompt_template import PromptTemplate, choose_template
from lmdeploy.config.chat_template import ChatTemplateConfig

QUESTION = [{"role": "user", "content": "abc"}]
BOS = 1


def encode(config: ChatTemplateConfig | None, *, adds_bos: bool) -> tuple[list[int], Any]:
    metadata = sentence_piece_metadata(add_bos_token=adds_bos)
    tokenizer = tokenizer_from_gguf(metadata, "spm")
    own = chat_template(
        "{{ bos_token }}{{ messages[0].content }}", origin="own", bos_token="<s>", eos_token=""
    )
    template = choose_template(own, config, tokenizer=tokenizer)
    parts: Any = SimpleNamespace(
        tokenizer=tokenizer,
        chat_template=template,
        session_len=64,
        chat_format=TextFormat(tokenizer),
    )
    return encode_chat(parts, QUESTION).ids, tokenizer


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    ("options", "text"),
    [({"capability": "completion"}, "abc"), ({"user": "a", "eoh": "b"}, "aabcb")],
)
def test_encode_chat_config_template_takes_bos_from_the_tokenizer(
    options: dict[str, Any], text: str, adds_bos: bool
) -> None:
    ids, tokenizer = encode(ChatTemplateConfig("custom", **options), adds_bos=adds_bos)
    assert ids == [BOS] * adds_bos + tokenizer.encode(text, add_special=False)


def test_choose_template_completion_sets_continue_final_message() -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece_metadata(), "spm")
    for options, continue_final_message in (
        ({"capability": "completion"}, True),
        ({"user": "a"}, False),
    ):
        config = ChatTemplateConfig("custom", **options)
        template = choose_template(None, config, tokenizer=tokenizer)
        assert template is not None and template.continue_final_message is continue_final_message


@pytest.mark.parametrize("adds_bos", [True, False])
def test_encode_chat_model_template_writes_its_own_bos(adds_bos: bool) -> None:
    ids, tokenizer = encode(None, adds_bos=adds_bos)
    assert ids == tokenizer.encode("<s>abc", add_special=False)
    assert ids.count(BOS) == 1


def test_choose_template_name_without_effect_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="lmdeploy"):
        for quiet in (ChatTemplateConfig("custom"), ChatTemplateConfig("vicuna", user="a")):
            encode(quiet, adds_bos=True)
        assert not caplog.records
        encode(ChatTemplateConfig("vicuna"), adds_bos=True)
    assert "'vicuna' of ChatTemplateConfig has no effect" in caplog.text


def test_prompt_template_meta_instruction_is_default_system_message() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    template = PromptTemplate(chat_template(source), meta_instruction="Be kind")
    assert template.render([], {}) == "system: Be kind;"
    assert template.render([{"role": "system", "content": "No"}], {}) == "system: No;"


CHATML = """\
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.mark.parametrize("beginning", ["", "im_end", "{", " Well, ", "a\ue000b"])
def test_prompt_template_final_assistant_message_is_continued(beginning: str) -> None:
    template = PromptTemplate(chat_template(CHATML))
    messages = [*QUESTION, {"role": "assistant", "content": beginning}]
    new_turn = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(QUESTION, {}) == new_turn
    assert template.render(messages, {}) == new_turn + beginning


@pytest.mark.parametrize("trim", ["trim", "trim | upper | lower"])
@pytest.mark.parametrize("beginning", ["  well,  ", "\n    x = 1\n\t", "   ", "", "well"])
def test_prompt_template_that_trims_keeps_the_continued_text(trim: str, beginning: str) -> None:
    source = CHATML.replace("m.content", f"(m.content | {trim})")
    template = PromptTemplate(chat_template(source))
    question = {"role": "user", "content": " abc "}
    prompt = template.render([question, {"role": "assistant", "content": beginning}], {})
    new_turn = "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == new_turn + beginning


def test_prompt_template_that_moves_reasoning_keeps_its_own_spaces() -> None:
    source = (
        "{% for m in messages %}{% set parts = m.content.split('</think>') %}"
        "<think>{{ parts[0].replace('<think>', '').strip() }}</think> {{ parts[-1].lstrip() }}"
        "{% endfor %}"
    )
    template = PromptTemplate(chat_template(source))
    answer = {"role": "assistant", "content": "<think> a </think>\n\nHello "}
    assert template.render([answer], {}) == "<think>a</think> Hello "


def test_choose_template_config_texts_continue_final_message() -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece_metadata(), "spm")
    config = ChatTemplateConfig("custom", user="U:", eoh="|", assistant="A:", eoa="#")
    template = choose_template(None, config, tokenizer=tokenizer)
    assert template is not None
    answer = {"role": "assistant", "content": "ab"}
    assert template.render([*QUESTION, answer], {}) == "U:abc|A:ab"
    assert template.render([*QUESTION, answer, *QUESTION], {}) == "U:abc|A:ab#U:abc|A:"


def test_encode_chat_final_assistant_message_sets_continue_final_message() -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece_metadata(), "spm")
    parts: Any = SimpleNamespace(
        tokenizer=tokenizer,
        chat_template=PromptTemplate(chat_template(CHATML)),
        session_len=64,
        chat_format=TextFormat(tokenizer),
    )

    def continues(messages: list[dict[str, str]]) -> bool:
        return encode_chat(parts, messages).start.continue_final_message

    assert not continues(QUESTION)
    assert continues([{"role": "assistant", "content": "a"}])
    assert not continues([{"role": "assistant", "content": ""}])


def test_prompt_template_that_omits_the_final_answer_is_rejected() -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    template = PromptTemplate(chat_template(source))
    with pytest.raises(OptionError, match="chat template leaves out"):
        question = {"role": "user", "content": "a\ue000b"}
        template.render([question, {"role": "assistant", "content": "a"}], {})


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "texts"])
def test_check_template_options_rejects_reserved_names(name: str) -> None:
    with pytest.raises(OptionError, match=f"chat_template_kwargs.{name} is set by the server"):
        check_template_options({name: "x"})


def test_check_messages_name_reaches_the_template() -> None:
    messages = [{"role": "user", "name": "Ann", "content": "a"}, {"role": "user", "content": "b"}]
    checked = check_messages(messages)
    source = "{% for m in messages %}{{ m.name or 'nobody' }}: {{ m.content }};{% endfor %}"
    template = PromptTemplate(chat_template(source))
    assert template.render(checked, {}) == "Ann: a;nobody: b;"
    with pytest.raises(OptionError, match=r"messages\[0\].name is 3. It must be a string"):
        check_messages([{"role": "user", "name": 3, "content": "a"}])


def test_encode_text_huge_text_is_rejected_before_it_is_fully_tokenized(monkeypatch):
    monkeypatch.setattr(prompts, "_HUGE_TEXT", 100)
    monkeypatch.setattr(prompts, "_PIECE_CHARS", 50)
    monkeypatch.setattr(prompts, "_MORE_OF_A_PIECE", 2)
    asked = []

    class Counting(FakeTokenizer):
        def encode(self, text, add_special=True):
            asked.append(len(text))
            return super().encode(text, add_special)

    parts = SimpleNamespace(tokenizer=Counting(), session_len=400)
    with pytest.raises(
        ValueError, match=r"^prompt has more than 400 tokens, but session_len is 400"
    ):
        prompts.encode_text(parts, "a" * 1900, add_special=True)
    assert asked == [50] * 9  # each piece has at least 48 tokens
    asked.clear()
    assert len(prompts.encode_text(parts, "a" * 390, add_special=True)) == 390
    assert asked == [*[50] * 7, 40, 390]
    assert len(prompts.encode_text(parts, "a" * 1900, add_special=True, max_tokens=1900)) == 1900
    with pytest.raises(ValueError, match=r"^prompt has more than 1000 tokens. Shorten it"):
        prompts.encode_text(parts, "a" * 1900, add_special=True, max_tokens=1000)
    with pytest.raises(ValueError, match="has 2001 characters"):
        prompts.encode_text(parts, "a" * 2001, add_special=True)


def test_encode_chat_without_a_template_error_names_the_flag() -> None:
    parts: Any = SimpleNamespace(
        chat_template=None,
        session_len=64,
        chat_format=TextFormat(None),  # type: ignore[arg-type]
    )
    with pytest.raises(OptionError, match=r"no chat template. Use .* or --chat-template"):
        encode_chat(parts, QUESTION)
