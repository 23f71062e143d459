"""Tests of the asynchronous engine: streams, cancellation, failures."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from fake_engine import EOS, FakeTextStream, FakeTokenizer, make_engine

from lmdeploy import GenerationConfig
from lmdeploy.base.errors import EngineFailure
from lmdeploy.chat.formats.base import AnswerStart
from lmdeploy.engine.kv_quality import cache_line
from lmdeploy.engine.load import _eos_ids
from lmdeploy.response import Response


def test_submit_begins_text_only_for_a_new_chat_answer(monkeypatch):
    engine = make_engine()
    begun = []

    def stream(skip_special, *, begins_text, shown):
        begun.append(begins_text)
        return FakeTextStream(skip_special)

    monkeypatch.setattr(engine.text.tokenizer, "stream", stream, raising=False)

    async def run():
        for start in (None, AnswerStart()):
            (await engine.submit([97], start=start)).close()
        (await engine.submit([97], start=AnswerStart(continue_final_message=True))).close()

    asyncio.run(run())
    engine.close()
    assert begun == [False, True, False]


async def collect(engine, prompt, config=None):
    whole = Response("", 0, 0)
    async for chunk in engine.generate(list(prompt.encode()), config):
        whole.extend(chunk)
    return whole


@pytest.fixture
def engine():
    engine = make_engine()
    yield engine
    engine.close()


async def test_generate_returns_text_and_counts(engine):
    answer = await collect(engine, "hé")
    assert (answer.text, answer.finish_reason) == ("You said: HÉ", "stop")
    assert answer.generate_token_len == len("You said: HÉ".encode()) == len(answer.token_ids)
    assert (answer.input_token_len, answer.cached_tokens) == (3, 3)


async def test_generate_clipped_values_log_one_warning(engine, caplog):
    with caplog.at_level(logging.WARNING, logger="lmdeploy"):
        await collect(engine, "a")
        assert not caplog.records
        engine.running.core.clipped = ((0, 3), (128, 4))
        await collect(engine, "a")
        await collect(engine, "a")
        engine.close()
    assert [record.getMessage()[:19] for record in caplog.records] == ["7 values of K or V "]


async def test_generate_token_limit_and_stop_ids_end_the_answer(engine):
    answer = await collect(engine, "x", GenerationConfig(max_new_tokens=3))
    assert (answer.text, answer.finish_reason) == ("You", "length")
    answer = await collect(engine, "x", GenerationConfig(stop_token_ids=[ord(" ")]))
    assert (answer.text, answer.finish_reason) == ("You", "stop")
    answer = await collect(engine, "x", GenerationConfig(ignore_eos=True, max_new_tokens=30))
    assert answer.finish_reason == "length"
    answer = await collect(engine, "x", GenerationConfig(stop_words=["<eos>"], ignore_eos=True))
    assert (answer.text, answer.finish_reason) == ("You said: X", "stop")


class PairTokenizer(FakeTokenizer):
    """A tokenizer that encodes "." and a newline as one token, 257."""

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
async def test_generate_stop_word_with_special_token_ends_the_answer(
    script, words, text, tokens, skip
):
    answer = await answer_until(script, words, skip_special_tokens=skip)
    assert (answer.text, answer.token_ids) == (text.format("" if skip else "<eos>"), tokens)
    assert answer.finish_reason == "stop"


async def test_generate_incomplete_stop_word_with_special_token_is_shown():
    answer = await answer_until("One\n", ["\n<eos><eos>"], ignore_eos=False)
    assert (answer.text, answer.token_ids) == ("One\n", [*b"One\n"])
    answer = await answer_until("One\n", ["\n<eos><eos>"], max_new_tokens=4)
    assert (answer.text, answer.finish_reason) == ("One\n", "length")


async def test_generate_eos_token_completes_a_stop_word():
    answer = await answer_until("One\n", ["\n<eos>"], ignore_eos=False)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("One", [*b"One"], "stop")


async def test_generate_include_stop_str_returns_words_with_special_tokens():
    options = {"include_stop_str_in_output": True}
    for skip, text in ((True, "One\n"), (False, "One\n<eos>")):
        answer = await answer_until("One\n<eos>x", ["\n<eos>"], skip_special_tokens=skip, **options)
        assert (answer.text, answer.token_ids) == (text, [*b"One\n", EOS])


async def test_generate_min_new_tokens_delays_words_with_special_tokens():
    answer = await answer_until("a\n<eos>b\n<eos>c", ["\n<eos>"], min_new_tokens=4)
    assert answer.text == "a\nb"


async def test_submit_stop_word_with_special_token_matches_harmony_answer(engine):
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    script = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final"
    harmony = make_engine(lambda _: f"{script}<|message|>a.b<|end|>", harmony_template=source)
    for word, text in (("a.<|end|>", "a.b"), (".b<|end|>", "a"), ("m<|end|><|start|>", "")):
        config = GenerationConfig(stop_words=[word])
        stream = await harmony.submit([97], config, start=AnswerStart())
        whole = Response("", 0, 0)
        async for chunk in stream:
            whole.extend(chunk)
        assert (whole.text, whole.reasoning_content[0]) == (text, "H")
    harmony.close()


async def test_submit_space_dropped_by_decoding_adds_no_stop_sequence(engine):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from lmdeploy.chat.tokenizer import Tokenizer as OurTokenizer

    backend = Tokenizer(models.BPE({"</s>": 0, "▁": 1, "a": 2}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    engine.text.tokenizer = OurTokenizer(backend, eos_ids=[0])
    config = GenerationConfig(stop_words=[" a", "</s>", "a</s>"])
    (await engine.submit([1], config)).close()
    assert engine.running.core.requests[-1].stop_sequences == [[0]]


async def test_generate_stop_word_cancels_the_request():
    engine = make_engine(lambda _: "one two three " * 50, step_seconds=0.001)
    answer = await collect(engine, "x", GenerationConfig(stop_words=["two"]))
    assert (answer.text, answer.finish_reason) == ("one ", "stop")
    assert engine.running.core.cancelled
    engine.close()


async def test_submit_template_stop_words_apply_to_chats_only():
    engine = make_engine(lambda _: "one two three")
    engine.text.chat_template.stop_words = ["two"]
    config = GenerationConfig(stop_words=[f"word {i}" for i in range(256)])  # the maximum number
    for start, text in ((AnswerStart(), "one "), (None, "one two three")):
        stream = await engine.submit([1], config, start=start)
        assert "".join([chunk.text async for chunk in stream]) == text
    assert len(config.stop_words) == 256
    engine.close()


async def test_generate_closed_or_cancelled_stream_cancels_the_request():
    engine = make_engine(lambda _: "a" * 400, step_seconds=0.001)
    stream = engine.generate([1])
    await anext(stream)
    await stream.aclose()
    assert engine.running.core.cancelled == [1]
    task = asyncio.create_task(collect(engine, "x"))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.running.core.cancelled == [1, 2]
    engine.close()


async def test_submit_invalid_prompt_raises_value_error(engine):
    for ids, text in [
        ([], "prompt is empty"),
        ([1] * 512, "has 512 tokens.*session_len is 512.*--session-len"),
        ([300], "token id 300. Ids must be 0 to 257"),
        ([-1], "token id -1"),
    ]:
        with pytest.raises(ValueError, match=text):
            await engine.submit(ids)
    with pytest.raises(ValueError, match="stop_token_ids contains token id 9999"):
        await engine.submit([1], GenerationConfig(stop_token_ids=[9999]))
    large = make_engine(session_len=10_000)
    with pytest.raises(ValueError, match=r"KV cache holds 640 tokens.*--cache-max-entry-count"):
        await large.submit([1] * 700)
    large.close()


async def test_submit_prompt_of_session_len_is_accepted_without_new_tokens(engine):
    config = GenerationConfig(max_new_tokens=0, prompt_logprobs=0)
    answer = await collect(engine, "x" * 512, config)
    assert (answer.finish_reason, len(answer.prompt_logprobs)) == ("length", 511)
    with pytest.raises(ValueError, match="has 513 tokens, but session_len is 512"):
        await engine.submit([1] * 513, config)
    large = make_engine(session_len=10_000)
    assert (await collect(large, "x" * 640, config)).finish_reason == "length"
    with pytest.raises(ValueError, match="has 641 tokens, but the KV cache holds 640"):
        await large.submit([1] * 641, config)
    large.close()


async def test_submit_limits_new_tokens_to_the_remaining_session(engine):
    await collect(engine, "x" * 500, GenerationConfig(max_new_tokens=5000))
    assert engine.running.core.requests[-1].max_new_tokens == 12


async def test_submit_sampling_fields_reach_the_request(engine):
    config = GenerationConfig(
        do_sample=True,
        temperature=0.5,
        top_k=7,
        random_seed=2**64 - 1,
        logit_bias={5: -1.0},
        bad_words=["q"],
        bad_token_ids=[9],
        priority=-3,
    )
    stream = await engine.submit([1], config, index=1)
    request = engine.running.core.requests[-1]
    assert (request.do_sample, request.temperature, request.top_k) == (True, 0.5, 7)
    assert request.seed == 0 and request.logit_bias == [(5, -1.0)]
    assert request.bad_sequences == [[9], [ord("q")], [ord(" "), ord("q")]]
    assert request.eos_ids == [EOS] and request.priority == -3
    stream.close()
    await collect(engine, "x", GenerationConfig(do_sample=True, temperature=0.0))
    assert engine.running.core.requests[-1].do_sample is False


async def test_generate_engine_failure_ends_all_streams():
    engine = make_engine(lambda _: "a" * 400, step_seconds=0.001)
    tasks = [asyncio.create_task(collect(engine, "x")) for _ in range(3)]
    await asyncio.sleep(0.02)
    engine.running.core.fail("out of luck")
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
async def test_async_engine_that_cannot_deliver_outputs_fails(break_core):
    engine = make_engine(lambda _: "a" * 30_000, step_seconds=0.001, session_len=40_000)
    task = asyncio.create_task(collect(engine, "x"))
    await asyncio.sleep(0.02)
    break_core(engine.running.core)
    with pytest.raises(EngineFailure, match="The engine has failed: "):
        await asyncio.wait_for(task, 5)
    assert not engine.healthy
    assert engine.failure in (
        "no room for outputs",
        "'str' object has no attribute 'finish_reason'",
    )
    engine._drain_thread.join(5)
    assert engine.running.core.cancelled == [1]
    with pytest.raises(EngineFailure, match="The engine has failed: "):
        await asyncio.wait_for(collect(engine, "x"), 5)
    engine.close()


def test_close_interrupted_can_be_repeated(monkeypatch):
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
    assert not engine.healthy and not engine.running.core.closed
    engine.close()
    engine.close()
    assert len(calls) == 2 and engine.running.core.closed
    assert engine.failure == "The engine is closed."


def test_close_second_call_waits_for_the_first():
    engine = make_engine()
    released = threading.Event()
    engine.running.on_close = released.wait
    threads = [threading.Thread(target=engine.close, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert all(thread.is_alive() for thread in threads)
    released.set()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert engine.running.core.closed


def test_eos_ids_outside_the_vocabulary_are_ignored_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="lmdeploy"):
        assert _eos_ids([2, 5], {"eos_token_id": [7, 2]}, vocab_size=8) == [2, 5, 7]
        assert _eos_ids([2], {}, vocab_size=8) == [2]
        assert _eos_ids([2], {"eos_token_id": None}, vocab_size=8) == [2]
        assert not caplog.records
        bad = [99999999999, True, 8, -1, "a", [3], 99999999999]
        assert _eos_ids([2, 99999999999], {"eos_token_id": bad}, vocab_size=8) == [2]
    (record,) = caplog.records
    assert "generation_config.json" in record.getMessage()
    assert "contains 99999999999, True, 8, -1, 'a', [3]. Ids must be 0 to 7." in record.getMessage()


async def test_generate_returns_prompt_logprobs(engine):
    config = GenerationConfig(prompt_logprobs=0, logprobs=1, max_new_tokens=0)
    answer = await collect(engine, "abc", config)
    assert [next(iter(item)) for item in answer.prompt_logprobs] == [ord("b"), ord("c")]
    assert answer.token_ids == [] and answer.finish_reason == "length"


def test_cache_line_describes_the_kv_cache(engine):
    line = engine.cache_line()
    assert line == (
        "KV cache: format nvfp4, quality balanced (K rotation, scale search, first 64 and newest "
        "64+ tokens in 16 bit), 100 bytes per token + 5,000 per sequence, 640 tokens fit in "
        "1.0 MiB; a session of 512 tokens takes 0.1 MiB, 2.50x less than in 16 bit (300 bytes per "
        "token)"
    )


def test_cache_line_compares_only_other_caches_with_16_bit(engine):
    plan = engine.running.core.memory_plan()
    plan.session_bytes = plan.session_bytes_none
    kv = engine.running.kv
    assert cache_line(kv, plan, session_len=512).endswith("a session of 512 tokens takes 0.1 MiB")
    plan.session_bytes = 2 * plan.session_bytes_none
    assert ", 2.00x as much as in 16 bit (300" in cache_line(kv, plan, session_len=512)


def test_submit_prepares_stop_words_outside_the_event_loop():
    async def run():
        engine = make_engine()
        threads = []
        encode = engine.text.tokenizer.encode

        def spy(text, add_special=True):
            threads.append(threading.current_thread())
            return encode(text, add_special)

        engine.text.tokenizer.encode = spy
        config = GenerationConfig(stop_words=["SAID", "<eos>"])
        stream = await engine.submit(list(b"x"), config)
        stream.close()
        engine.close()
        return threads

    threads = asyncio.run(run())
    assert len(threads) == 2
    assert threading.main_thread() not in threads
