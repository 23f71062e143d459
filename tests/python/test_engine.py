"""The asynchronous engine: stop words, streams, cancel, failure."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest
from fake_engine import EOS, FakeTextStream, FakeTokenizer, make_engine
from hypothesis import assume, given
from hypothesis import strategies as st

from lmdeploy import GenerationConfig
from lmdeploy.messages import Response
from lmdeploy.turbomind import prompts
from lmdeploy.turbomind.answer_text import AnswerText, GatedAnswer, StopMatcher
from lmdeploy.turbomind.engine import EngineFailure
from lmdeploy.turbomind.engine_parts import _eos_ids


class Pieces:
    """A detokenizer whose tokens are indices into a list of texts."""

    def __init__(self, texts):
        self.texts = texts

    pending = False

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


def test_a_stop_word_may_begin_before_min_tokens():
    shown, tokens, stopped = run_pieces(["a", "ST", "OP", "c"], ["STOP"], min_tokens=3)
    assert ("".join(shown), tokens, stopped) == ("a", 1, True)
    shown, _, stopped = run_pieces(["STOPST", "OP", "c"], ["STOP"], min_tokens=2)
    assert ("".join(shown), stopped) == ("STOP", True)


def test_a_huge_text_is_refused_before_all_of_it_is_tokenised(monkeypatch):
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
        ValueError, match="got more than 400 tokens, wanted at most session_len 400"
    ):
        prompts.encode_text(parts, "a" * 1900, add_special=True)
    assert asked == [50] * 9  # of 48 tokens at least
    asked.clear()
    assert len(prompts.encode_text(parts, "a" * 390, add_special=True)) == 390
    assert asked == [*[50] * 7, 40, 390]
    with pytest.raises(ValueError, match="got 2001 characters"):
        prompts.encode_text(parts, "a" * 2001, add_special=True)


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


def test_halves_of_a_stop_word_are_no_tokens_of_the_answer():
    answer = AnswerText(FakeTextStream(True), ["\N{SLIGHTLY SMILING FACE}"])
    tokens = []
    for token in "é\N{SLIGHTLY SMILING FACE}".encode():
        answer.push(token)
        tokens.append(answer.take()[1])
    assert answer.stopped
    assert tokens == [0, 2, 0, 0, 0, 0]
    cut = AnswerText(FakeTextStream(True))
    for token in "é".encode()[:1]:
        cut.push(token)
    assert cut.take() == ("", 0)
    cut.finish()
    assert cut.take() == ("\ufffd", 1)


# Tokens as they are shown and as they are with special tokens.
SHOWN = ("a", "b", "ab", "ba", "")
WHOLE = (*SHOWN[:4], "<S>")


@given(
    st.lists(st.integers(0, 4), max_size=12),
    st.lists(st.lists(st.sampled_from(["a", "b", "<S>"]), min_size=1, max_size=4), max_size=3),
    st.booleans(),
)
def test_words_with_special_tokens_against_find(tokens, words, include_stop):
    words = ["".join(word) for word in words]
    plain = [word for word in words if "<S>" not in word]
    whole = "".join(WHOLE[token] for token in tokens)
    for word in plain:  # what spans a special token is found in the text without it
        place = whole.find(word)
        alone = place if place < 0 else len(whole[:place].replace("<S>", ""))
        assume(whole.replace("<S>", "").find(word) == alone)
    gate = AnswerText(Pieces(WHOLE), words, include_stop=include_stop)
    answer = GatedAnswer(Pieces(SHOWN), plain, gate=gate, include_stop=include_stop)
    shown, count = "", 0
    for token in tokens:
        answer.push(token)
        text, more = answer.take()
        shown, count = shown + text, count + more
        if answer.stopped:
            break
    else:
        answer.finish()
        text, more = answer.take()
        shown, count = shown + text, count + more
    ends = [(whole.find(word) + len(word), -len(word)) for word in words if word in whole]
    end, length = min(ends, default=(len(whole), 0))
    limit = end if include_stop else end + length
    begins = [len("".join(WHOLE[t] for t in tokens[:i])) for i in range(len(tokens))]
    assert shown == whole[:limit].replace("<S>", "")
    assert count == sum(begin < limit for begin in begins)
    assert answer.stopped == bool(ends)


class LatePieces(Pieces):
    """All text comes at the end, as that of GPT-OSS does without its format."""

    def __init__(self, texts):
        super().__init__(texts)
        self.late = ""

    pending = False

    def push(self, token):
        self.late += super().push(token)
        return ""

    def finish(self):
        return self.late


@pytest.mark.parametrize("shown", [Pieces, LatePieces])
def test_a_token_that_a_word_cuts_is_shown_to_the_cut(shown):
    answer = GatedAnswer(shown(SHOWN), gate=AnswerText(Pieces(WHOLE), ["b<S>"]))
    for token in (0, 2, 4):  # a, ab, <S>
        answer.push(token)
    assert answer.stopped and answer.take() == ("aa", 2)


def test_half_a_character_of_a_dropped_word_is_not_shown():
    gate = AnswerText(FakeTextStream(False), ["é<eos>"])
    answer = GatedAnswer(FakeTextStream(True), gate=gate)
    for token in [*"né".encode(), EOS]:
        answer.push(token)
    assert answer.stopped and answer.take()[0] == "n"


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
        (await engine.submit([97], chat=True, goes_on=True)).close()

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


class PairTokenizer(FakeTokenizer):
    """With `.` and a line break as one token, 257."""

    vocab_size = 258

    def encode(self, text, add_special=True):
        ids = []
        for token in super().encode(text):
            if token == ord("\n") and ids[-1:] == [ord(".")]:
                ids[-1] = 257
            else:
                ids.append(token)
        return ids

    def token_bytes(self, token):
        return b".\n" if token == 257 else super().token_bytes(token)

    def is_special(self, token):
        return token == EOS


async def answer_until(script, words, **options):
    engine = make_engine(lambda _: script, tokenizer=PairTokenizer())
    options = {"ignore_eos": True, "logprobs": 0, **options}
    answer = await collect(engine, "x", GenerationConfig(stop_words=words, **options))
    engine.close()
    assert len(answer.logprobs) == len(answer.token_ids) == answer.generate_token_len
    return answer


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(
    ("script", "words", "text", "tokens"),
    [
        ("One.\n<eos>x", ["\n<eos>"], "One.", [*b"One", 257]),
        ("One\n<eos>x", ["\n<eos>"], "One", [*b"One"]),
        ("One\nt<eos>\nwo", ["zz<eos>", "\nw"], "One\nt{}", [*b"One\nt", EOS]),
        ("a<eos>b<eos><eos>c", ["<eos><eos>"], "a{}b", [ord("a"), EOS, ord("b")]),
        ("a<eos>b<eos>us", ["b<eos>u"], "a{}", [ord("a"), EOS]),
        ("One.\nTwo", ["<eos>"], "One.\nTwo", [*b"One", 257, *b"Two"]),
    ],
)
async def test_words_with_special_tokens(script, words, text, tokens, skip):
    answer = await answer_until(script, words, skip_special_tokens=skip)
    assert (answer.text, answer.token_ids) == (text.format("" if skip else "<eos>"), tokens)
    assert answer.finish_reason == "stop"


async def test_a_word_with_special_tokens_that_is_not_completed():
    answer = await answer_until("One\n", ["\n<eos><eos>"], ignore_eos=False)
    assert (answer.text, answer.token_ids) == ("One\n", [*b"One\n"])
    answer = await answer_until("One\n", ["\n<eos><eos>"], max_new_tokens=4)
    assert (answer.text, answer.finish_reason) == ("One\n", "length")


async def test_the_end_token_completes_a_word():
    answer = await answer_until("One\n", ["\n<eos>"], ignore_eos=False)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("One", [*b"One"], "stop")


async def test_words_with_special_tokens_are_returned_when_asked_for():
    options = {"include_stop_str_in_output": True}
    for skip, text in ((True, "One\n"), (False, "One\n<eos>")):
        answer = await answer_until("One\n<eos>x", ["\n<eos>"], skip_special_tokens=skip, **options)
        assert (answer.text, answer.token_ids) == (text, [*b"One\n", EOS])


async def test_min_tokens_hold_for_words_with_special_tokens():
    answer = await answer_until("a\n<eos>b\n<eos>c", ["\n<eos>"], min_new_tokens=4)
    assert answer.text == "a\nb"


async def test_a_word_in_the_format_of_gpt_oss(engine):
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    script = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final"
    harmony = make_engine(lambda _: f"{script}<|message|>a.b<|end|>", harmony_template=source)
    for word, text in (("a.<|end|>", "a.b"), (".b<|end|>", "a"), ("m<|end|><|start|>", "")):
        stream = await harmony.submit([97], GenerationConfig(stop_words=[word]), chat=True)
        whole = Response("", 0, 0)
        async for piece in stream:
            whole.extend(piece)
        assert (whole.text, whole.reasoning_content[0]) == (text, "H")
    harmony.close()


async def test_a_space_that_decoding_drops_makes_no_special_word(engine):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from lmdeploy.tokenizer import Tokenizer as OurTokenizer

    backend = Tokenizer(models.BPE({"</s>": 0, "▁": 1, "a": 2}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    engine.parts.tokenizer = OurTokenizer(backend, eos_ids=[0])
    config = GenerationConfig(stop_words=[" a", "</s>", "a</s>"])
    (await engine.submit([1], config)).close()
    assert engine.parts.core.requests[-1].stop_sequences == [[0]]


async def test_stop_word_cancels_the_rest():
    engine = make_engine(lambda _: "one two three " * 50, step_seconds=0.001)
    answer = await collect(engine, "x", GenerationConfig(stop_words=["two"]))
    assert (answer.text, answer.finish_reason) == ("one ", "stop")
    assert engine.parts.core.cancelled
    engine.close()


async def test_stop_words_of_a_template_are_none_of_the_requests():
    engine = make_engine(lambda _: "one two three")
    engine.parts.chat_template.stop_words = ["two"]
    config = GenerationConfig(stop_words=[f"word {i}" for i in range(256)])  # as many as may be
    for chat, text in ((True, "one "), (False, "one two three")):
        stream = await engine.submit([1], config, chat=chat)
        assert "".join([piece.text async for piece in stream]) == text
    assert len(config.stop_words) == 256
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


async def test_a_prompt_without_an_answer_may_be_as_long_as_the_session(engine):
    config = GenerationConfig(max_new_tokens=0, prompt_logprobs=0)
    answer = await collect(engine, "x" * 512, config)
    assert (answer.finish_reason, len(answer.prompt_logprobs)) == ("length", 511)
    with pytest.raises(ValueError, match="got 513 tokens, wanted at most session_len 512"):
        await engine.submit([1] * 513, config)
    large = make_engine(session_len=10_000)
    assert (await collect(large, "x" * 640, config)).finish_reason == "length"
    with pytest.raises(ValueError, match="got 641 tokens, wanted at most the 640 that the KV"):
        await large.submit([1] * 641, config)
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


def wait_fails(core):
    def wait_outputs(timeout_ms):
        raise MemoryError("no room for outputs")

    core.wait_outputs = wait_outputs


def output_is_wrong(core):
    core.wait_outputs = lambda timeout_ms: ["no room for outputs"]


@pytest.mark.parametrize("break_core", [wait_fails, output_is_wrong])
async def test_an_engine_that_cannot_deliver_has_failed(break_core):
    engine = make_engine(lambda _: "a" * 30_000, step_seconds=0.001, session_len=40_000)
    task = asyncio.create_task(collect(engine, "x"))
    await asyncio.sleep(0.02)
    break_core(engine.parts.core)
    with pytest.raises(EngineFailure, match="the engine has failed: "):
        await asyncio.wait_for(task, 5)
    assert not engine.healthy
    assert engine.failure in (
        "no room for outputs",
        "'str' object has no attribute 'finish_reason'",
    )
    engine._drain_thread.join(5)
    assert engine.parts.core.cancelled == [1]
    with pytest.raises(EngineFailure, match="the engine has failed: "):
        await asyncio.wait_for(collect(engine, "x"), 5)
    engine.close()


def test_an_interrupted_close_can_be_finished(monkeypatch):
    engine = make_engine()
    join, calls = engine._drain_thread.join, []

    def interrupted():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        join()

    monkeypatch.setattr(engine._drain_thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not engine.healthy and engine.parts.core.healthy
    engine.close()
    engine.close()
    assert len(calls) == 2 and not engine.parts.core.healthy
    assert engine.failure == "the engine is closed"


def test_a_second_close_waits_for_the_first():
    engine = make_engine()
    goes_on = threading.Event()
    engine.parts.on_close = goes_on.wait
    threads = [threading.Thread(target=engine.close, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert all(thread.is_alive() for thread in threads)
    goes_on.set()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert not engine.parts.core.healthy


def test_end_tokens_that_are_none_are_ignored(caplog):
    with caplog.at_level(logging.WARNING, logger="lmdeploy"):
        assert _eos_ids([2, 5], {"eos_token_id": [7, 2]}, vocab_size=8) == [2, 5, 7]
        assert _eos_ids([2], {}, vocab_size=8) == [2]
        assert _eos_ids([2], {"eos_token_id": None}, vocab_size=8) == [2]
        assert not caplog.records
        bad = [99999999999, True, 8, -1, "a", [3], 99999999999]
        assert _eos_ids([2, 99999999999], {"eos_token_id": bad}, vocab_size=8) == [2]
    (record,) = caplog.records
    assert "generation_config.json" in record.getMessage()
    assert "got 99999999999, True, 8, -1, 'a', [3], wanted ids of 0 to 7" in record.getMessage()


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
