"""Tests of the log probabilities of completions: text offsets and token names."""

from __future__ import annotations

from vocabularies import sentence_piece_metadata

from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.chat.tokenizer import Tokenizer
from lmdeploy.serve.logprobs import CompletionLogprobs

SKIP = {"skip_special": True}


def sentence_piece() -> Tokenizer:
    return tokenizer_from_gguf(sentence_piece_metadata(), "spm")


def values(tokens: list[int]) -> list[dict[int, float]]:
    return [{token: -1.0} for token in tokens]


def test_completion_logprobs_offsets_point_into_the_text() -> None:
    tokenizer = sentence_piece()
    prompt = tokenizer.encode("ab c")
    answer = tokenizer.encode("ab", add_special=False)
    assert tokenizer.is_special(prompt[0]), "BOS has no text"
    maker = CompletionLogprobs(tokenizer, 1, **SKIP)
    maker.add_prompt(prompt, [None, *values(prompt[1:])], text="ab c")
    maker.add_answer(answer, values(answer))
    body = maker.take()
    text = "ab c" + " ab"
    begins = body["text_offset"]
    shown = [text[a:b] for a, b in zip(begins, [*begins[1:], len(text)], strict=True)]
    assert shown == ["", "ab", " ", "c", " ab"]
    assert body["tokens"] == ["<s>", " ab", " ", "c", " ab"]
    assert body["token_logprobs"][0] is None and body["top_logprobs"][0] is None


def test_completion_logprobs_bos_spelled_in_the_prompt_has_text() -> None:
    tokenizer = sentence_piece()
    prompt = tokenizer.encode("<s>ab", add_special=False)
    maker = CompletionLogprobs(tokenizer, 0, **SKIP)
    maker.add_prompt(prompt, [None, *values(prompt[1:])], text=tokenizer.decode(prompt, False))
    assert maker.take()["text_offset"][:2] == [0, 3]
    twice = tokenizer.encode("<s>ab")
    assert twice[:2] == [tokenizer.bos_id] * 2
    maker = CompletionLogprobs(tokenizer, 0, **SKIP)
    maker.add_prompt(twice, [None, *values(twice[1:])], text="<s>ab")
    assert maker.take()["text_offset"][:3] == [0, 0, 3]


def test_completion_logprobs_offsets_skip_incomplete_characters() -> None:
    tokenizer = sentence_piece()
    answer = tokenizer.encode("a\u00f1b", add_special=False)
    maker = CompletionLogprobs(tokenizer, 0, **SKIP)
    offsets = []
    for token in answer:
        maker.add_answer([token], values([token]))
        offsets += maker.take()["text_offset"]
    assert offsets == [0, 2, 2, 3]  # " a", the two bytes of "ñ", "b"


def test_completion_logprobs_sampled_token_is_always_listed() -> None:
    tokenizer = sentence_piece()
    a, b, c = (tokenizer.token_id(letter) or 0 for letter in "abc")
    maker = CompletionLogprobs(tokenizer, 1, **SKIP)
    maker.add_answer([a], [{a: -3.0, b: -0.5, c: -1.0}])
    assert maker.take()["top_logprobs"] == [{"b": -0.5, "a": -3.0}]


def test_completion_logprobs_bytes_of_characters_have_distinct_names() -> None:
    tokenizer = sentence_piece()
    first, second = tokenizer.encode("a\u00f1", add_special=False)[1:]
    maker = CompletionLogprobs(tokenizer, 2, **SKIP)
    maker.add_answer([first], [{first: -0.1, second: -3.0}])
    body = maker.take()
    assert body["tokens"] == ["bytes:\\xc3"]
    assert body["top_logprobs"] == [{"bytes:\\xc3": -0.1, "bytes:\\xb1": -3.0}]


def test_completion_logprobs_tokens_of_equal_text_show_the_sampled_one() -> None:
    tokenizer = sentence_piece()
    a, byte = tokenizer.token_id("a") or 0, tokenizer.token_id("<0x61>") or 0
    assert a and byte and tokenizer.token_bytes(a) == tokenizer.token_bytes(byte)
    maker = CompletionLogprobs(tokenizer, 2, **SKIP)
    maker.add_answer([byte], [{a: -0.5, byte: -2.0}])
    body = maker.take()
    assert (body["top_logprobs"], body["token_logprobs"]) == ([{"a": -2.0}], [-2.0])


def test_completion_logprobs_aborted_prompt_is_padded_with_null() -> None:
    tokenizer = sentence_piece()
    prompt = tokenizer.encode("ab c")
    maker = CompletionLogprobs(tokenizer, 1, **SKIP)
    maker.add_prompt(prompt, [None, *values(prompt[1:2])], text="ab c")
    body = maker.take()
    assert body["token_logprobs"] == [None, -1.0, *[None] * (len(prompt) - 2)]
    assert len(body["tokens"]) == len(body["text_offset"]) == len(prompt)
