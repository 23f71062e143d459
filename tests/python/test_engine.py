"""The asynchronous engine: stop words, streams, cancel, failure."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fake_engine import EOS, FakeTextStream, make_engine
from hypothesis import given
from hypothesis import strategies as st

from lmdeploy import GenerationConfig
from lmdeploy.messages import Response
from lmdeploy.turbomind.answer_text import AnswerText, StopMatcher
from lmdeploy.turbomind.engine import EngineFailure


class Pieces:
    """A detokenizer whose tokens are indices into a list of texts."""

    def __init__(self, texts):
        self.texts = texts

    def push(self, token):
        return self.texts[token]

    def finish(self):
        return ""


def run_pieces(texts, words, **options):
    answer = AnswerText(Pieces(texts), words, **options)
    shown, tokens = [], 0
    for token in range(len(texts)):
        answer.push(token)
        text, count = answer.take()
        shown.append(text)
        tokens += count
        if answer.stopped:
            break
    else:
        answer.finish()
        text, count = answer.take()
        shown.append(text)
        tokens += count
    return shown, tokens, answer.stopped


def splits(text):
    """All ways to cut `text` into pieces."""
    for mask in range(1 << (len(text) - 1)):
        pieces, last = [], 0
        for i in range(1, len(text)):
            if mask >> (i - 1) & 1:
                pieces.append(text[last:i])
                last = i
        yield [*pieces, text[last:]]


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("abSTOPcd", ["STOP"], "ab"),
        ("aSTSTOPx", ["STOP"], "aST"),
        ("ababac!", ["abac"], "ab"),
        ("hello###", ["###", "#####"], "hello"),
        ("noSTOhere", ["STOP"], "noSTOhere"),
        ("xSTO", ["STOP"], "xSTO"),
        ("one\n\ntwo", ["\n\n"], "one"),
    ],
)
def test_stop_words_at_every_split(text, words, expected):
    for pieces in splits(text):
        shown, _, stopped = run_pieces(pieces, words)
        assert "".join(shown) == expected, pieces
        assert stopped == (expected != text)
        # Nothing of a stop word was ever shown.
        for i in range(len(shown)):
            assert expected.startswith("".join(shown[:i]))


def test_tokens_follow_the_text():
    shown, tokens, stopped = run_pieces(["ab", "cS", "TO", "Pd", "e"], ["STOP"])
    assert ("".join(shown), tokens, stopped) == ("abc", 2, True)
    shown, tokens, _ = run_pieces(["ab", "cS", "TO", "Pd"], ["STOP"], include_stop=True)
    assert ("".join(shown), tokens) == ("abcSTOP", 4)


def test_min_tokens_keep_stop_words_from_counting():
    shown, _, stopped = run_pieces(["a", "STOP", "b", "STOP", "c"], ["STOP"], min_tokens=3)
    assert ("".join(shown), stopped) == ("aSTOPb", True)


words_strategy = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.text("ab", max_size=20), words_strategy, st.data())
def test_stop_matcher_against_find(text, words, data):
    matcher = StopMatcher(words)
    ends = [(i + 1, len(w)) for i in range(len(text)) for w in words if text[: i + 1].endswith(w)]
    expected = min(ends, key=lambda e: (e[0], -e[1])) if ends else None
    cut = data.draw(st.integers(0, len(text)))
    found = matcher.find(text[:cut])
    if found is None:
        held = matcher.held
        assert not any(text[:cut].endswith(w[:k]) for w in words for k in range(held + 1, len(w)))
        found = matcher.find(text[cut:])
        found = found and (found[0] + cut, found[1])
    assert found == expected


def test_half_characters_wait():
    answer = AnswerText(FakeTextStream(True), ["é!"])
    shown = []
    for token in "né né!".encode():
        answer.push(token)
        shown.append(answer.take()[0])
    assert "".join(shown) == "né n"
    assert all("\ufffd" not in text for text in shown)


def test_an_answer_begins_a_text_in_a_chat_alone(monkeypatch):
    engine = make_engine()
    begun = []

    def stream(skip_special, *, begins_text):
        begun.append(begins_text)
        return FakeTextStream(skip_special)

    monkeypatch.setattr(engine.parts.tokenizer, "stream", stream, raising=False)

    async def run():
        for chat in (False, True):
            (await engine.submit([97], chat=chat)).close()
        engine.parts.chat_template.goes_on = True  # no template at all
        (await engine.submit([97], chat=True)).close()

    asyncio.run(run())
    engine.close()
    assert begun == [False, True, False]


async def collect(engine, prompt, config=None):
    whole = Response("", 0, 0)
    async for piece in engine.generate(list(prompt.encode()), config):
        whole.extend(piece)
    return whole


@pytest.fixture
def engine():
    engine = make_engine()
    yield engine
    engine.close()


async def test_generate(engine):
    answer = await collect(engine, "hé")
    assert (answer.text, answer.finish_reason) == ("You said: HÉ", "stop")
    assert answer.generate_token_len == len("You said: HÉ".encode()) == len(answer.token_ids)
    assert (answer.input_token_len, answer.cached_tokens) == (3, 3)


async def test_length_and_stop_ids(engine):
    answer = await collect(engine, "x", GenerationConfig(max_new_tokens=3))
    assert (answer.text, answer.finish_reason) == ("You", "length")
    answer = await collect(engine, "x", GenerationConfig(stop_token_ids=[ord(" ")]))
    assert (answer.text, answer.finish_reason) == ("You", "stop")
    answer = await collect(engine, "x", GenerationConfig(ignore_eos=True, max_new_tokens=30))
    assert answer.finish_reason == "length"
    answer = await collect(engine, "x", GenerationConfig(stop_words=["<eos>"], ignore_eos=True))
    assert (answer.text, answer.finish_reason) == ("You said: X", "stop")


async def test_stop_word_cancels_the_rest():
    engine = make_engine(lambda _: "one two three " * 50, step_seconds=0.001)
    answer = await collect(engine, "x", GenerationConfig(stop_words=["two"]))
    assert (answer.text, answer.finish_reason) == ("one ", "stop")
    assert engine.parts.core.cancelled
    engine.close()


async def test_leaving_cancels():
    engine = make_engine(lambda _: "a" * 400, step_seconds=0.001)
    stream = engine.generate([1])
    await anext(stream)
    await stream.aclose()
    assert engine.parts.core.cancelled == [1]
    task = asyncio.create_task(collect(engine, "x"))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.parts.core.cancelled == [1, 2]
    engine.close()


async def test_refused_prompts(engine):
    for ids, text in [
        ([], "no tokens"),
        ([1] * 512, "got 512 tokens.*session_len 512.*--session-len"),
        ([300], "token id 300, wanted 0 to 257"),
        ([-1], "token id -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            await engine.submit(ids)
    with pytest.raises(ValueError, match="stop_token_ids: got token id 9999"):
        await engine.submit([1], GenerationConfig(stop_token_ids=[9999]))
    large = make_engine(session_len=10_000)
    with pytest.raises(ValueError, match=r"640 that the KV cache holds.*--cache-max-entry-count"):
        await large.submit([1] * 700)
    large.close()


async def test_answer_is_cut_to_the_room_left(engine):
    await collect(engine, "x" * 500, GenerationConfig(max_new_tokens=5000))
    assert engine.parts.core.requests[-1].max_new_tokens == 12


async def test_sampling_fields_reach_the_request(engine):
    config = GenerationConfig(
        do_sample=True,
        temperature=0.5,
        top_k=7,
        random_seed=2**64 - 1,
        logit_bias={5: -1.0},
        bad_words=["q"],
        bad_token_ids=[9],
    )
    stream = await engine.submit([1], config, index=1)
    request = engine.parts.core.requests[-1]
    assert (request.do_sample, request.temperature, request.top_k) == (True, 0.5, 7)
    assert request.seed == 0 and request.logit_bias == [(5, -1.0)]
    assert request.bad_sequences == [[9], [ord("q")], [ord(" "), ord("q")]]
    assert request.eos_ids == [EOS]
    stream.close()
    await collect(engine, "x", GenerationConfig(do_sample=True, temperature=0.0))
    assert engine.parts.core.requests[-1].do_sample is False


async def test_engine_failure_ends_all_streams():
    engine = make_engine(lambda _: "a" * 400, step_seconds=0.001)
    tasks = [asyncio.create_task(collect(engine, "x")) for _ in range(3)]
    await asyncio.sleep(0.02)
    engine.parts.core.fail("out of luck")
    for task in tasks:
        with pytest.raises(EngineFailure, match="out of luck"):
            await asyncio.wait_for(task, 5)
    assert not engine.healthy
    with pytest.raises(EngineFailure):
        await engine.submit([1])
    engine.close()


async def test_prompt_logprobs(engine):
    config = GenerationConfig(prompt_logprobs=0, logprobs=1, max_new_tokens=0)
    answer = await collect(engine, "abc", config)
    assert [next(iter(item)) for item in answer.prompt_logprobs] == [ord("b"), ord("c")]
    assert answer.token_ids == [] and answer.finish_reason == "length"


def test_cache_line(engine):
    line = engine.cache_line()
    assert line == (
        "KV cache: mode nvfp4, quality balanced (K rotation, scale search, first 64 and newest 64+ "
        "tokens in 16 bit), 100 bytes per token + 5,000 per sequence, 640 tokens fit in 1.0 MiB; "
        "2.50x the tokens of 16 bit at session_len (300 bytes per token); "
        "a full session takes 0.1 MiB"
    )


def test_stop_words_are_prepared_outside_the_loop():
    async def run():
        engine = make_engine()
        threads = []
        encode = engine.parts.tokenizer.encode

        def spy(text, add_special=True):
            threads.append(threading.current_thread())
            return encode(text, add_special)

        engine.parts.tokenizer.encode = spy
        config = GenerationConfig(stop_words=["SAID", "<eos>"])
        stream = await engine.submit(list(b"x"), config)
        stream.close()
        engine.close()
        return threads

    threads = asyncio.run(run())
    assert len(threads) == 2
    assert threading.main_thread() not in threads
