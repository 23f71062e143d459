"""Which template a conversation goes through, and where BOS comes from."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from test_tokenizer import sentence_piece_metadata

from lmdeploy.chat_template import ChatTemplate
from lmdeploy.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.model import ChatTemplateConfig
from lmdeploy.turbomind.prompts import PromptTemplate, choose_template, encode_chat

QUESTION = [{"role": "user", "content": "abc"}]
BOS = 1


def encode(config: ChatTemplateConfig | None, *, adds_bos: bool) -> tuple[list[int], Any]:
    metadata = sentence_piece_metadata(add_bos_token=adds_bos)
    tokenizer = tokenizer_from_gguf(metadata, "spm")
    own = ChatTemplate(
        "{{ bos_token }}{{ messages[0].content }}", origin="own", bos_token="<s>", eos_token=""
    )
    template = choose_template(own, config, tokenizer=tokenizer)
    parts: Any = SimpleNamespace(
        tokenizer=tokenizer, chat_template=template, session_len=64, harmony=None
    )
    return encode_chat(parts, QUESTION), tokenizer


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    ("options", "text"),
    [({"capability": "completion"}, "abc"), ({"user": "a", "eoh": "b"}, "aabcb")],
)
def test_bos_is_the_tokenizers_matter(options: dict[str, Any], text: str, adds_bos: bool) -> None:
    ids, tokenizer = encode(ChatTemplateConfig("custom", **options), adds_bos=adds_bos)
    assert ids == [BOS] * adds_bos + tokenizer.encode(text, add_special=False)


def test_without_a_template_the_answer_goes_on() -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece_metadata(), "spm")
    for options, goes_on in (({"capability": "completion"}, True), ({"user": "a"}, False)):
        config = ChatTemplateConfig("custom", **options)
        template = choose_template(None, config, tokenizer=tokenizer)
        assert template is not None and template.goes_on is goes_on


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_models_template_writes_bos_itself(adds_bos: bool) -> None:
    ids, tokenizer = encode(None, adds_bos=adds_bos)
    assert ids == tokenizer.encode("<s>abc", add_special=False)
    assert ids.count(BOS) == 1


def test_a_name_that_chooses_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lmdeploy"):
        for quiet in (ChatTemplateConfig("custom"), ChatTemplateConfig("vicuna", user="a")):
            encode(quiet, adds_bos=True)
        assert not caplog.records
        encode(ChatTemplateConfig("vicuna"), adds_bos=True)
    assert "'vicuna' has no effect" in caplog.text


def test_a_meta_instruction_alone() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    template = PromptTemplate(ChatTemplate(source, origin="test"), meta_instruction="Be kind")
    assert template.render([], {}) == "system: Be kind;"
    assert template.render([{"role": "system", "content": "No"}], {}) == "system: No;"
