"""Offline use: all prompt forms, streams, conversations."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_engine import make_engine

from lmdeploy import GenerationConfig, Pipeline


@pytest.fixture
def pipe():
    with Pipeline("fake", engine=make_engine()) as pipe:
        yield pipe


def test_prompt_forms(pipe):
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


def test_gen_config_per_prompt(pipe):
    configs = [GenerationConfig(max_new_tokens=n) for n in (1, 2)]
    assert [a.text for a in pipe(["a", "b"], configs)] == ["Y", "Yo"]
    with pytest.raises(ValueError, match="got 2 for 3 prompts"):
        pipe(["a", "b", "c"], configs)
    assert len(pipe("a", GenerationConfig(n=3))) == 3


def test_stream_equals_whole(pipe):
    config = GenerationConfig(stop_words=["said"], logprobs=1)
    whole = pipe(["a", "b"], config)
    texts = {0: "", 1: ""}
    for piece in pipe.stream_infer(["a", "b"], config):
        texts[piece.index] += piece.text
    assert texts == {0: whole[0].text, 1: whole[1].text}


def test_leaving_a_stream_cancels(pipe):
    stream = pipe.stream_infer("a" * 300)
    next(stream)
    stream.close()
    assert pipe("b").text == "You said: B"


def test_chat(pipe):
    session = pipe.chat("hello")
    assert session.response.text == "You said: HELLO"
    session = pipe.chat("again", session)
    assert [question for question, _ in session.history] == ["hello", "again"]
    pieces = list(pipe.chat("third", session, stream_response=True))
    assert "".join(p.text for p in pieces) == "You said: THIRD"
    assert len(session.history) == 3


def test_the_answers_of_one_prompt_are_told_apart(pipe):
    config = GenerationConfig(n=2)
    texts = {}
    for piece in pipe.stream_infer(["a", "b"], config):
        key = (piece.index, piece.choice)
        texts[key] = texts.get(key, "") + piece.text
    answers = {(0, 0): "A", (0, 1): "A", (1, 0): "B", (1, 1): "B"}
    assert texts == {key: f"You said: {name}" for key, name in answers.items()}
    assert [(r.index, r.choice) for r in pipe(["a", "b"], config)] == list(answers)
    with pytest.raises(ValueError, match="n: got 2, wanted 1"):
        pipe.chat("hello", gen_config=config)


def test_get_ppl(pipe):
    assert pipe.get_ppl([[1, 2, 3], [4, 5]]) == [pytest.approx(0.5)] * 2
    assert len(pipe.get_ppl([1, 2, 3])) == 1
    with pytest.raises(ValueError, match="at least 2"):
        pipe.get_ppl([[1]])


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("x" * 600, "tokens"),
        (3, "prompts: got 3"),
        ([3], "prompt: got 3"),
        ([{"role": "nobody", "content": "x"}], "role: got 'nobody'"),
        ([{"role": "user", "content": 3}], "content: got 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "tool_calls: not supported"),
    ],
)
def test_bad_prompts(pipe, bad, text):
    with pytest.raises(ValueError, match=text):
        pipe(bad)
    assert pipe("still here").text == "You said: STILL HERE"


def test_closed_pipeline_refuses(pipe):
    pipe.close()
    with pytest.raises(ValueError, match="closed"):
        pipe("a")


def test_the_package_exports_the_function():
    import lmdeploy
    import lmdeploy.pipeline  # the submodule of the same name must not replace it

    assert callable(lmdeploy.pipeline)
    with pytest.raises(ValueError, match="no/such/model"):
        lmdeploy.pipeline("no/such/model/at/all")


def test_a_script_that_never_closes_ends_well():
    script = "import lmdeploy; print(lmdeploy.pipeline('smollm2')('Hi').finish_reason)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"stop\n")
    assert b"terminate" not in done.stderr
