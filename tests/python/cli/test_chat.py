"""Tests of `lmdeploy chat` on a fake engine: commands, sampling flags, Markdown, history."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from fake_engine import make_engine
from prompt_toolkit.application import application, create_app_session
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from lmdeploy import Pipeline
from lmdeploy.cli import line_reader
from lmdeploy.cli.chat import sampling_options, talk, visible
from lmdeploy.cli.chat_markdown import MarkdownPrinter, split_blocks
from lmdeploy.cli.main import main, make_parser

MARKDOWN = """\
Title
=====

A *paragraph* of
two lines.
- one
- two

  still two
- three

1. first

2. second
```python
x = 1

# not a heading
```
| a | b |
| --- | --- |
| 1 | 2 |

> quote

    code
***
end"""


def test_talk_answers_and_runs_commands():
    lines = iter(["/help", "hello", "", "/clear", "again", "/exit"])
    out = io.StringIO()
    console = Console(file=out, width=200)
    with Pipeline("fake", engine=make_engine()) as pipeline:
        talk(pipeline, console, read=lambda: next(lines))
    text = out.getvalue()
    assert "You said: HELLO" in text and "You said: AGAIN" in text and "/clear" in text


def test_talk_reports_an_answer_cut_by_session_len():
    lines = iter(["hello", "/exit"])
    out = io.StringIO()
    engine = make_engine(lambda _: "a" * 2000, session_len=64)
    engine.text.sampling["top_k"] = 7
    with Pipeline("fake", engine=engine) as pipeline:
        talk(pipeline, Console(file=out, width=200), read=lambda: next(lines))
        assert engine.running.core.requests[0].top_k == 7  # the model's own sampling
    assert (
        "[incomplete: " in out.getvalue()
        and "start a new conversation with /clear" in out.getvalue()
    )


def test_talk_full_conversation_suggests_clear():
    lines = iter(["a" * 20, "b" * 40, "/exit"])
    out = io.StringIO()
    engine = make_engine(session_len=96)
    with Pipeline("fake", engine=engine) as pipeline:
        talk(pipeline, Console(file=out, width=200), read=lambda: next(lines))
    assert (
        "Shorten it or raise" in out.getvalue()
        and "Start a new conversation with /clear." in out.getvalue()
    )


def test_talk_end_of_input_ends_the_loop():
    def read():
        raise EOFError

    with Pipeline("fake", engine=make_engine()) as pipeline:
        talk(pipeline, Console(file=io.StringIO()), read=read)


@pytest.mark.parametrize("word", ["exit", "quit", "/exit", "/quit", "QUIT"])
def test_talk_ends_at_words_that_leave(word):
    lines = iter([word, "never read"])
    engine = make_engine()
    with Pipeline("fake", engine=engine) as pipeline:
        talk(pipeline, Console(file=io.StringIO()), read=lambda: next(lines))
    assert next(lines) == "never read" and not engine.running.core.requests


def test_talk_answers_wrong_commands_and_sends_paths_to_the_model():
    lines = iter(["/claer", "/nothing-like-it", "/zzz", "/etc/hosts", "exit now", "/exit"])
    out = io.StringIO()
    with Pipeline("fake", engine=make_engine()) as pipeline:
        talk(pipeline, Console(file=out, width=200), read=lambda: next(lines))
    text = out.getvalue()
    assert "/claer is not a command; did you mean /clear?" in text
    assert "/zzz is not a command. The commands are:\n  /help" in text
    assert "You said: /ETC/HOSTS" in text and "You said: EXIT NOW" in text
    assert "You said: /NOTHING-LIKE-IT" in text


def step_by_step(pipeline: Pipeline) -> None:
    """Let the engine take a step only when the last chunk was read, so that a token is a chunk."""
    permits = pipeline.engine.running.core.permits = threading.Semaphore(0)
    infer = pipeline.stream_infer

    def stream_infer(*args, **kwargs):
        permits.release()
        for chunk in infer(*args, **kwargs):
            yield chunk
            permits.release()

    pipeline.stream_infer = stream_infer


def test_talk_continues_a_conversation_after_ctrl_c():
    class Interrupting(io.StringIO):
        after = "O"

        def write(self, text: str) -> int:
            if self.after and self.after in text:
                self.after = ""
                raise KeyboardInterrupt
            return super().write(text)

    lines = iter(["stop this", "go on", "/exit"])
    out = Interrupting()
    prompts = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "YYOU" if len(prompts) == 1 else "continued"

    with Pipeline("fake", engine=make_engine(answer)) as pipeline:
        step_by_step(pipeline)
        talk(pipeline, Console(file=out, width=200), read=lambda: next(lines))
    assert "YYO\n[stopped]\n" in out.getvalue() and "continued" in out.getvalue()
    assert prompts[1] == "<user>stop this\n<assistant>YYO\n<user>go on\n<assistant>"


def test_ctrl_c_stops_a_response_wherever_it_arrives():
    class Losing(io.StringIO):
        """Presses Ctrl-C and loses its exception, as a callback of a library does."""

        def write(self, text: str) -> int:
            if "O" in text:
                with suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            return super().write(text)

    lines = iter(["stop this", "and this", "/exit"])
    out = Losing()
    handler = signal.getsignal(signal.SIGINT)
    engine = make_engine(lambda prompt: "YO" + "x" * 500 if "and" not in prompt else "z" * 9)
    with Pipeline("fake", engine=engine) as pipeline:
        step_by_step(pipeline)
        infer = pipeline.stream_infer

        def stream_infer(*args, **kwargs):
            for chunk in infer(*args, **kwargs):
                if chunk.text.startswith("z"):  # as while the next chunk is awaited
                    signal.raise_signal(signal.SIGINT)
                yield chunk

        pipeline.stream_infer = stream_infer
        talk(pipeline, Console(file=out, width=200), read=lambda: next(lines))
    assert out.getvalue() == "YO\n[stopped]\n[stopped]\n"
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("when", ["begins", "ends"])
def test_ctrl_c_while_a_prompt_begins_or_ends_is_kept(when, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = {"begins": "attach_winch_signal_handler", "ends": "store_typeahead"}[when]
    original = getattr(application, name)
    presses = []

    def press(*args):
        if not presses:
            presses.append(when)
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(application, name, press)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        reader = line_reader.LineReader([])
        if when == "ends":
            keys.send_text("one\r")
        threading.Timer(0.5, keys.send_text, ["two\r"]).start()
        assert reader() == "two"
    assert presses and ("Press Ctrl-C again" in capsys.readouterr().out) == (when == "begins")


def test_sampling_flags_reach_the_engine_over_the_models_defaults():
    flags = ["--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1"]
    flags += ["--repetition-penalty", "1.2", "--max-new-tokens", "5", "--seed", "7"]
    options = sampling_options(make_parser().parse_args(["chat", "smollm2", *flags]))
    lines = iter(["hello", "/exit"])
    out = io.StringIO()
    engine = make_engine()
    engine.text.sampling |= {"do_sample": False, "top_k": 40}
    with Pipeline("fake", engine=engine) as pipeline:
        console = Console(file=out, width=200)
        talk(pipeline, console, read=lambda: next(lines), options=options)
        sent = engine.running.core.requests[0]
    values = (sent.temperature, sent.top_p, sent.top_k, sent.min_p, sent.repetition_penalty)
    assert values == pytest.approx((0.5, 0.9, 3, 0.1, 1.2))
    assert (sent.max_new_tokens, sent.seed) == (5, 7)
    assert "You s\n[incomplete: --max-new-tokens is reached]" in out.getvalue()
    assert sampling_options(make_parser().parse_args(["chat", "smollm2"])) == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "3"], "temperature is 3.0. It must be a finite number from 0 to 2."),
        (["--seed", "-1"], "random_seed is -1"),
        (["--top-k", "many"], "--top-k"),
        (["--temp", "0.5"], "arguments: --temp 0.5; did you mean --temperature?"),
        (["--max-tokens", "5"], "did you mean --max-new-tokens?"),
    ],
)
def test_wrong_sampling_flag_is_named_before_the_model_is_loaded(capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["chat", "/no/such/model", *flags])
    assert message in capsys.readouterr().err


def test_split_blocks_never_changes_a_block_that_another_one_follows():
    whole = split_blocks(MARKDOWN)
    assert "\n".join(whole) == MARKDOWN and len(whole) == 10
    assert whole[2].startswith("- one") and "- three" in whole[2]
    for end, char in enumerate(MARKDOWN):
        if char == "\n":
            done = split_blocks(MARKDOWN[: end + 1])[:-1]
            assert done == whole[: len(done)]


def shown(answer: str, *, size: tuple[int, int] = (40, 12), step: int = 1) -> str:
    """Return all output of a terminal for an answer that arrives in pieces."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=size[0], height=size[1], color_system="standard"
    )
    with MarkdownPrinter(console) as printer:
        for i in range(0, len(answer), step):
            printer.write(answer[i : i + step])
    return out.getvalue()


def plain(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def test_markdown_is_formatted_and_wrapped_at_words():
    output = shown("# Title\n\n" + "wonderful words " * 6 + "\n\n```\na = `b`\n```\nA <br> tag.")
    lines = [line.strip() for line in plain(output).splitlines()]
    assert "\x1b[1;4mTitle" in output
    assert "wonderful words wonderful words" in lines and "# Title" not in lines
    assert "a = `b`" in lines and "A <br> tag." in lines


def test_long_block_shows_its_end_while_it_arrives_and_all_of_it_afterwards():
    lines = [f"line{i}" for i in range(40)]
    output = plain(shown("```\n" + "\n".join(lines) + "\n```", step=20))
    assert re.findall(r"line\d+", output)[-40:] == lines
    assert output.count("line0\n") + output.count("line0 ") <= 3


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_control_characters_of_a_model_do_not_reach_the_terminal(term):
    answer = "a\x1b]0;title\x07b\x9b2Jc\td\r\ne"
    assert visible(answer) == "a␛]0;title␇b\ufffd2Jc\td\ne"
    lines = iter(["hello", "/exit"])
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, _environ={"TERM": term})
    with Pipeline("fake", engine=make_engine(lambda _: answer)) as pipeline:
        talk(pipeline, console, read=lambda: next(lines))
    assert "␛]0;title␇" in out.getvalue() and "\x1b]0;" not in out.getvalue()


def test_history_is_private_bounded_and_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "lmdeploy" / line_reader.HISTORY_FILE
    history = line_reader.open_history()
    assert isinstance(history, FileHistory)
    history.append_string("first\nsecond")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert list(line_reader.open_history().load_history_strings()) == ["first\nsecond"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(line_reader, "MAX_HISTORY_BYTES", 1000)
    for i in range(40):
        history.append_string(f"message {i}")
    kept = list(line_reader.open_history().load_history_strings())
    assert path.stat().st_size <= 1000
    assert kept == [f"message {i}" for i in range(39, 39 - len(kept), -1)] and len(kept) > 5
    path.unlink()
    os.mkfifo(path)
    assert isinstance(line_reader.open_history(), InMemoryHistory)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    assert isinstance(line_reader.open_history(), InMemoryHistory)
    assert not (tmp_path / "elsewhere").exists()
    path.unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert isinstance(line_reader.open_history(), InMemoryHistory)
