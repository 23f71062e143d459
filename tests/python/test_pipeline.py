"""Tests of offline use: all forms of prompts, streams, conversations."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_engine import make_engine

from lmdeploy import GenerationConfig, Pipeline
from lmdeploy.base import loop_thread
from lmdeploy.base.errors import EngineFailure
from lmdeploy.chat.grammar import Grammar


@pytest.fixture
def pipe():
    with Pipeline("fake", engine=make_engine()) as pipe:
        yield pipe


def test_pipeline_all_forms_of_prompts_are_answered(pipe):
    assert pipe("hi").text == "You said: HI"
    answers = pipe(["a", "b", "c"])
    assert [(a.text, a.index) for a in answers] == [
        ("You said: A", 0),
        ("You said: B", 1),
        ("You said: C", 2),
    ]
    conversation = [{"role": "user", "content": "one"}]
    assert pipe(conversation).text == "You said: ONE"
    assert [a.text for a in pipe([conversation, conversation])] == ["You said: ONE"] * 2
    assert pipe([]) == []
    assert pipe("raw", do_preprocess=False).input_token_len == 3
    assert len(pipe.batch_infer(["a"] * 300, use_tqdm=True)) == 300


@pytest.mark.parametrize(
    "prompts",
    [("What is this?", object()), ("a", "https://x/y.png"), ["a", ("b", object())], [("a", ["b"])]],
)
def test_pipeline_text_with_pictures_is_refused(pipe, prompts):
    for call in (pipe, lambda given: list(pipe.stream_infer(given))):
        with pytest.raises(ValueError, match=r"^prompts.* is a tuple, .* reads text alone"):
            call(prompts)


def test_pipeline_one_config_per_prompt_is_used(pipe):
    configs = [GenerationConfig(max_new_tokens=n) for n in (1, 2)]
    assert [a.text for a in pipe(["a", "b"], configs)] == ["Y", "Yo"]
    with pytest.raises(ValueError, match="has 2 items for 3 prompts"):
        pipe(["a", "b", "c"], configs)
    assert len(pipe("a", GenerationConfig(n=3))) == 3


def test_stream_infer_chunks_join_to_the_whole_response(pipe):
    config = GenerationConfig(stop_words=["said"], logprobs=1)
    whole = pipe(["a", "b"], config)
    texts = {0: "", 1: ""}
    for piece in pipe.stream_infer(["a", "b"], config):
        texts[piece.index] += piece.text
    assert texts == {0: whole[0].text, 1: whole[1].text}


def test_stream_infer_closed_stream_cancels_the_request(pipe):
    stream = pipe.stream_infer("a" * 300)
    next(stream)
    stream.close()
    assert pipe("b").text == "You said: B"


def test_chat_keeps_the_history_of_the_session(pipe):
    session = pipe.chat("hello")
    assert session.response.text == "You said: HELLO"
    session = pipe.chat("again", session)
    assert [question for question, _ in session.history] == ["hello", "again"]
    pieces = list(pipe.chat("third", session, stream_response=True))
    assert "".join(p.text for p in pieces) == "You said: THIRD"
    assert len(session.history) == 3


def end_with(pipe, monkeypatch, reason):
    """Make requests end at once with `reason`."""
    core = pipe.engine.running.core

    def step(running):
        del core._running[running.request.id]
        return core._output(running.request.id, reason, error="out of luck")

    monkeypatch.setattr(core, "_step", step)


@pytest.mark.parametrize("reason", ["error", "cancelled"])
def test_chat_failed_turn_is_not_added_to_the_history(pipe, monkeypatch, reason):
    session = pipe.chat("hello")
    with monkeypatch.context() as context:
        end_with(pipe, context, reason)
        pipe.chat("lost", session)
    assert session.response.finish_reason in ("error", "abort")
    assert [question for question, _ in session.history] == ["hello"]
    pipe.chat("cut", session, GenerationConfig(max_new_tokens=3))
    assert session.history[1:] == [("cut", "You")]


def test_stream_infer_choices_of_one_prompt_have_their_index(pipe):
    config = GenerationConfig(n=2)
    texts = {}
    for piece in pipe.stream_infer(["a", "b"], config):
        key = (piece.index, piece.choice)
        texts[key] = texts.get(key, "") + piece.text
    answers = {(0, 0): "A", (0, 1): "A", (1, 0): "B", (1, 1): "B"}
    assert texts == {key: f"You said: {name}" for key, name in answers.items()}
    assert [(r.index, r.choice) for r in pipe(["a", "b"], config)] == list(answers)
    with pytest.raises(ValueError, match=r"n is 2\. It must be 1"):
        pipe.chat("hello", gen_config=config)


def test_get_ppl_returns_one_value_per_prompt(pipe):
    assert pipe.get_ppl([[1, 2, 3], [4, 5]]) == [pytest.approx(0.5)] * 2
    assert len(pipe.get_ppl([1, 2, 3])) == 1
    with pytest.raises(ValueError, match="at least 2"):
        pipe.get_ppl([[1]])
    assert len(pipe.get_ppl([1] * 512)) == 1
    with pytest.raises(ValueError, match=r"input_ids is 'The capital'\. It must be token ids"):
        pipe.get_ppl("The capital")
    ids = pipe.tokenizer.encode("The capital")
    assert pipe.tokenizer.decode(ids) == "The capital" and len(pipe.get_ppl(ids)) == 1


def test_get_ppl_checks_all_prompts_before_running_any(pipe):
    for wrong in ([1] * 513, [1, 999], [1, -1]):
        with pytest.raises(ValueError, match=r"^input_ids\[1\] (has|contains)"):
            pipe.get_ppl([[1, 2], wrong])
    with pytest.raises(ValueError, match=r"input_ids is .* token ids"):
        pipe.get_ppl([[1, 2], [1, "a"]])
    assert not pipe.engine.running.core.requests


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe(["a"] * 20),
        lambda pipe: list(pipe.stream_infer(["a"] * 20)),
        lambda pipe: pipe.get_ppl([[1, 2]] * 20),
    ],
    ids=["infer", "stream_infer", "get_ppl"],
)
def test_pipeline_requests_in_flight_are_limited(pipe, monkeypatch, call):
    monkeypatch.setattr(loop_thread, "_MAX_IN_FLIGHT", 3)
    core, in_flight = pipe.engine.running.core, []
    submit = core.submit

    def watched(request):
        submit(request)
        in_flight.append(len(pipe.engine._streams))

    monkeypatch.setattr(core, "submit", watched)
    call(pipe)
    assert len(in_flight) == 20 and max(in_flight) <= 3


def test_get_ppl_failed_request_cancels_the_rest(pipe, monkeypatch):
    core = pipe.engine.running.core
    step = core._step

    def second_fails(running):
        request_id = running.request.id
        if request_id == 2:
            del core._running[request_id]
            return core._output(request_id, "error", error="out of luck")
        return step(running) if request_id < 2 else core._output(request_id, "none")

    monkeypatch.setattr(core, "_step", second_fails)
    with pytest.raises(EngineFailure, match=r"input_ids\[1\] failed: .*out of luck"):
        pipe.get_ppl([[1, 2]] * 4)
    deadline = time.monotonic() + 5
    while pipe.engine._streams and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not pipe.engine._streams


def test_pipeline_grammar_is_compiled_once_per_call(pipe, monkeypatch):
    compiled = []
    make = Grammar.__init__
    monkeypatch.setattr(
        Grammar, "__init__", lambda *args, **more: compiled.append(1) or make(*args, **more)
    )
    config = GenerationConfig(response_format={"type": "json_object"}, n=2)
    assert len(pipe(["a", "b", "c"], config)) == 6
    assert len(compiled) == 1


def test_get_ppl_failed_request_error_gives_the_reason(pipe, monkeypatch):
    end_with(pipe, monkeypatch, "error")
    with pytest.raises(EngineFailure, match=r"input_ids\[0\] failed: .*out of luck"):
        pipe.get_ppl([1, 2, 3])


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("x" * 600, "tokens"),
        (3, "prompts is 3"),
        ([3], r"prompts\[0\] is 3"),
        (["x", 5], r"^prompts\[1\] is 5"),
        ("x" * 600, r"^prompt has \d+ tokens"),
        ([{"role": "nobody", "content": "x"}], "role is 'nobody'"),
        ([{"role": "user", "content": 3}], "content is 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "tool_calls needs tool calls"),
    ],
)
def test_pipeline_invalid_prompt_is_named_in_the_error(pipe, bad, text):
    with pytest.raises(ValueError, match=text):
        pipe(bad)
    assert pipe("still here").text == "You said: STILL HERE"


def test_pipeline_closed_rejects_calls(pipe):
    pipe.close()
    with pytest.raises(ValueError, match="closed"):
        pipe("a")


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe("a"),
        lambda pipe: list(pipe.stream_infer(["a", "b"])),
        lambda pipe: pipe.get_ppl([1, 2]),
    ],
    ids=["infer", "stream_infer", "get_ppl"],
)
def test_close_ends_calls_of_other_threads(call):
    engine = make_engine()
    entered, released = threading.Event(), threading.Event()
    make_request = engine._make_request

    def slow(*args, **options):
        entered.set()
        released.wait(30)
        return make_request(*args, **options)

    engine._make_request = slow
    pipe = Pipeline("fake", engine=engine)
    errors = []

    def run():
        try:
            call(pipe)
        except Exception as error:
            errors.append(error)

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    assert entered.wait(10)
    pipe.close()
    caller.join(5)
    released.set()
    (error,) = errors
    assert isinstance(error, EngineFailure) and "closed" in str(error)


@pytest.mark.parametrize(("answer", "begins_text"), [(None, True), ("", True), ("ab", False)])
def test_pipeline_continued_answer_does_not_begin_a_text(answer, begins_text):
    engine = make_engine()
    tokenizer, seen = engine.text.tokenizer, []
    stream = tokenizer.stream

    def watched(*args, **options):
        seen.append(options.get("begins_text"))
        return stream(*args, **options)

    tokenizer.stream = watched
    messages = [{"role": "user", "content": "a"}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    with Pipeline("fake", engine=engine) as pipe:
        pipe(messages)
    assert seen == [begins_text]


def test_pipeline_call_during_close_raises_engine_failure(pipe):
    pipe._loop.close()
    for call in (lambda: pipe("a"), lambda: list(pipe.stream_infer("a"))):
        with pytest.raises(EngineFailure, match="closed"):
            call()


def test_close_interrupted_can_be_repeated(monkeypatch):
    pipe = Pipeline("fake", engine=make_engine())
    join, calls = pipe._loop._thread.join, []

    def interrupted():
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        join()

    monkeypatch.setattr(pipe._loop._thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipe.close()
    with pytest.raises(ValueError, match="closed"):
        pipe("a")
    pipe.close()
    pipe.close()
    assert len(calls) == 2 and not pipe._loop._thread.is_alive()


FORK = """
import asyncio, os, signal, sys
from {module} import {name} as make
from lmdeploy import GenerationConfig, Pipeline
pipe = Pipeline({arguments})
begun = pipe.stream_infer("a", GenerationConfig(max_new_tokens=64, ignore_eos=True))
next(begun)
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends it where it hangs
    calls = [
        lambda: pipe("b"),
        lambda: next(pipe.stream_infer("b")),
        lambda: next(begun),
        lambda: pipe.get_ppl([1, 2]),
        lambda: asyncio.run(pipe.engine.submit([1])),
    ]
    for call in calls:
        try:
            call()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    print(pipe.engine.healthy, flush=True)
    pipe.close()
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), child != os.getpid())
rest = sum(1 for _ in begun)
answer = pipe("c", GenerationConfig(max_new_tokens=8, ignore_eos=True))
print(rest > 0, os.getpid(), answer.finish_reason, answer.generate_token_len)
"""


@pytest.mark.parametrize(
    "names",
    [
        {"module": "fake_engine", "name": "make_engine", "arguments": "'fake', engine=make()"},
        {"module": "lmdeploy", "name": "Pipeline", "arguments": "'smollm2'"},
    ],
    ids=["fake", "smollm2"],
)
def test_pipeline_forked_child_rejects_calls(names):
    support = str(Path(__file__).parent / "support")
    done = subprocess.run(
        [sys.executable, "-c", FORK.format(**names)],
        capture_output=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*sys.path, support]),
        },
    )
    *refused, healthy, child, last = done.stdout.decode().splitlines()
    continued, process, *ending = last.split()
    assert (continued, child, healthy) == ("True", "3 True", "False"), done.stderr
    assert ending == ["length", "8"]
    expected = (
        f"EngineFailure The engine was created before a fork and works only in process {process}."
    )
    assert len(refused) == 5
    assert all(line.startswith(expected) for line in refused)


def test_package_exports_pipeline_function():
    import lmdeploy
    import lmdeploy.pipeline  # importing the submodule must not replace the function

    assert callable(lmdeploy.pipeline)
    with pytest.raises(ValueError, match="no/such/model"):
        lmdeploy.pipeline("no/such/model/at/all")


def test_pipeline_script_without_close_exits_cleanly():
    script = (
        "from lmdeploy import GenerationConfig, pipeline\n"
        "config = GenerationConfig(max_new_tokens=8, ignore_eos=True)\n"
        "print(pipeline('smollm2')('Hi', config).finish_reason)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"length\n")
    assert b"terminate" not in done.stderr


def test_pipeline_too_long_prompt_of_a_batch_gets_an_error_and_others_are_answered(pipe):
    prompts = ["a", "x" * 600, "x" * 5000, "b"]
    answers = pipe(prompts, GenerationConfig(n=2))
    assert [a.text for a in answers] == ["You said: A"] * 2 + [""] * 4 + ["You said: B"] * 2
    for i, answer in enumerate(answers[2:6]):
        assert (answer.index, answer.choice) == (1 + i // 2, i % 2)
        assert (answer.finish_reason, answer.error_code) == ("error", "context_length_exceeded")
        assert "session_len" in answer.error_message
    ends = {c.index: c for c in pipe.stream_infer(prompts) if c.finish_reason is not None}
    assert [ends[i].finish_reason for i in range(4)] == ["stop", "error", "error", "stop"]
    with pytest.raises(ValueError, match="session_len is 512"):
        pipe("x" * 600)
    with pytest.raises(ValueError, match=r"^prompts\[1\] is 7"):
        pipe(["x" * 600, 7])


@pytest.mark.parametrize("max_tokens", [3, 100])
def test_stream_infer_last_chunk_has_only_the_finish_reason(pipe, max_tokens):
    config = GenerationConfig(max_new_tokens=max_tokens, logprobs=1)
    *chunks, last = pipe.stream_infer("a", config)
    assert all(chunk.finish_reason is None for chunk in chunks)
    text = "You said: A"[:max_tokens]
    assert last.finish_reason == ("length" if max_tokens == 3 else "stop")
    assert (last.text, last.token_ids, last.logprobs) == ("", [], None)
    assert last.generate_token_len == len(text) == sum(len(c.token_ids) for c in chunks)
    assert "".join(chunk.text for chunk in chunks) == text
