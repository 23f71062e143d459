"""Tests of hostile tokenizer.json files: panics of the library, growing texts, slow expressions."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_tokenizer

from lmdeploy.base.checks import OptionError
from lmdeploy.base.errors import ModelFormatError, UnavailableError
from lmdeploy.chat.bounded import child
from lmdeploy.chat.bounded import process as module
from lmdeploy.chat.bounded.settings import is_bounded
from lmdeploy.chat.gguf_pretokenizers import PRE_TOKENIZERS
from lmdeploy.chat.tokenizer import Tokenizer, library_errors, tokenizer_from_folder

TEMPLATE_WITHOUT_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


def settings(**changes: Any) -> dict[str, Any]:
    """Return the byte-level tokenizer as the object of tokenizer.json, with changes."""
    spec = json.loads(byte_tokenizer().to_str())
    spec["model"] |= changes.pop("model", {})
    return spec | changes


def load(folder: Path, **changes: Any) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(settings(**changes)))
    return tokenizer_from_folder(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"continuing_subword_prefix": "#########"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ],
    ids=["prefix longer than a merge", "character map that ends early"],
)
def test_panic_while_loading_is_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json: The file is not a tokenizer: "):
        load(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"post_processor": TEMPLATE_WITHOUT_TOKEN},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "CAAAAAAAAAAAAAAA"}},
        {
            "model": {"type": "Unigram", "unk_id": None, "vocab": [["b", 0.0]], "merges": None},
            "pre_tokenizer": None,
        },
    ],
    ids=["template", "length 0", "character map", "unknown token"],
)
def test_failure_while_tokenizing_refuses_the_request(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    tokenizer = load(tmp_path, **changes)
    for _ in range(2):
        with pytest.raises(OptionError, match="tokenizer of this model cannot process") as refusal:
            tokenizer.encode("aaa")
        assert refusal.value.field == "prompt"


def test_library_errors_pass_on_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), library_errors(ValueError):
        raise KeyboardInterrupt


def replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def split(expression: str) -> dict[str, Any]:
    pattern = {"Regex": expression}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DOUBLING = sequence("normalizers", *[replace("a", "aa")] * 26)
# Each of the 100 matches takes just fewer steps than the library's limit of 10**7.
BACKTRACKING = split("(a|a){22}c|a")
HOSTILE = {
    "doubling normalizers": {"normalizer": DOUBLING},
    "backtracking pre-tokenizer": {"pre_tokenizer": sequence("pretokenizers", BACKTRACKING, BYTES)},
    "backtracking normalizer": {
        "normalizer": {"type": "Replace", "pattern": BACKTRACKING["pattern"], "content": "b"}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_slow_settings_refuse_the_request_within_the_limits(tmp_path: Path, name: str) -> None:
    tokenizer = load(tmp_path, **HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    with pytest.raises(OptionError, match="takes more than 5 s or too much memory"):
        tokenizer.encode("aaa" if "backtracking" not in name else "a" * 1000)
    assert time.monotonic() - start < child.MAX_SECONDS + 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert tokenizer.encode("e", add_special=False) == tokenizer.encode("e", add_special=False)


def test_doubling_normalizers_of_an_added_token_are_one_error_at_load(tmp_path: Path) -> None:
    token = {"id": 3, "content": "aaa", "normalized": True, "special": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokens = [*settings()["added_tokens"], token | flags]
    with pytest.raises(ModelFormatError, match="takes too much time or memory"):
        load(tmp_path, normalizer=DOUBLING, added_tokens=tokens)


SPACE = replace(" ", "\u2581")
UNBOUNDED = [
    *HOSTILE.values(),
    {"post_processor": template(TEXT, TEXT)},
    {"normalizer": replace("", "a")},
    {"normalizer": replace("a", "a" * 65)},
    {"normalizer": {"type": "Prepend", "prepend": "a" * 64}},
    {"normalizer": sequence("normalizers", *[replace("a", "a")] * 9)},
    {"normalizer": sequence("normalizers", sequence("normalizers", DOUBLING))},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"pre_tokenizer": split("a+")},
    *(
        {"pre_tokenizer": split(PRE_TOKENIZERS[name].patterns[place])}
        for name, place in (("tiny_aya", 0), ("superbpe", 1))
    ),
    {"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 4)},
    {"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9}},
    {"added_tokens": [{"id": 1, "content": "<mask>", "lstrip": True}]},
    {"post_processor": template(*[{"SpecialToken": {"id": "x", "type_id": 0}}] * 17)},
    {"normalizer": "Replace"},
    {"normalizer": {}},
]
BOUNDED = [
    {},
    {"normalizer": None, "pre_tokenizer": None, "post_processor": None},
    {"normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "\u2581"}, SPACE)},
    {"normalizer": {"type": "NFC"}, "post_processor": template(TEXT)},
    *(
        {"pre_tokenizer": sequence("pretokenizers", *map(split, each.patterns), BYTES)}
        for each in PRE_TOKENIZERS.values()
        if each.is_linear
    ),
    # Qwen 2 and 3, and Llama 3, as in their tokenizer.json.
    *(
        {
            "pre_tokenizer": split(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
                + digits
                + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
        }
        for digits in (r"\p{N}", r"\p{N}{1,3}")
    ),
]


@pytest.mark.parametrize("changes", UNBOUNDED, ids=lambda changes: str(changes)[:60])
def test_settings_that_may_be_slow_are_not_bounded(changes: dict[str, Any]) -> None:
    assert not is_bounded(settings(**dict(changes)))


@pytest.mark.parametrize("changes", BOUNDED, ids=lambda changes: str(changes)[:60])
def test_settings_of_released_models_are_bounded(changes: dict[str, Any]) -> None:
    assert is_bounded(settings(**dict(changes)))


def test_process_gives_the_same_ids_and_grammar_as_the_library(tmp_path: Path) -> None:
    plain = load(tmp_path)
    fixed = {"type": "FixedLength", "length": 10**6}  # not known, and without effect
    pre_tokenizer = sequence("pretokenizers", fixed, settings()["pre_tokenizer"])
    other = load(tmp_path, pre_tokenizer=pre_tokenizer)
    assert plain._pool is None and other._pool is not None
    for text in ("", "the rest", "<s>x</s>é中\r\n", "the rest " * 10_000, "\ud800"):
        for add_special in (True, False):
            assert other.encode(text, add_special) == plain.encode(text, add_special)
    assert other.vocab_size == plain.vocab_size and other.eos_token == plain.eos_token
    assert other.grammar_tokenizer().vocab_size == plain.grammar_tokenizer().vocab_size


FIXED = {"type": "FixedLength", "length": 3}  # not known
SLOW = sequence("pretokenizers", BACKTRACKING, BYTES)


def processes(tokenizer: Tokenizer) -> list[subprocess.Popen[bytes]]:
    """Return the idle processes of a tokenizer, the next one last."""
    assert tokenizer._pool is not None
    found = [worker._running for worker in tokenizer._pool._idle]
    assert all(found)
    return [running.process for running in found if running is not None]


def test_process_that_was_killed_is_started_again(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, pre_tokenizer=FIXED)
    ids = tokenizer.encode("the rest")
    for process in processes(tokenizer):
        process.kill()
        process.wait()
    assert tokenizer.encode("the rest") == ids
    tokenizer.close()


def test_process_that_stops_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(tmp_path, pre_tokenizer=FIXED)
    ids = tokenizer.encode("the rest")
    monkeypatch.setattr(child, "MAX_SECONDS", 0.2)  # in this process only
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.2)
    processes(tokenizer)[-1].send_signal(signal.SIGSTOP)
    assert tokenizer.encode("the rest") == ids
    tokenizer.close()
    tokenizer = load(tmp_path, pre_tokenizer=FIXED)
    for process in processes(tokenizer):
        process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(UnavailableError, match="The process of the tokenizer ended"):
        tokenizer.encode("the rest")
    assert 0.7 < time.monotonic() - begin < 2
    monkeypatch.undo()
    assert tokenizer.encode("the rest") == ids
    tokenizer.close()


@pytest.mark.parametrize(
    "reply",
    ["", "_REPLY.pack(0, 3) + bytes(3)", "_REPLY.pack(0, 2**62)", "bytes(4)"],
    ids=["nothing", "odd size", "huge size", "half a header"],
)
def test_process_that_answers_nonsense_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reply: str
) -> None:
    program = tmp_path / "child.py"
    program.write_text(f"""
import struct, sys
_REPLY = struct.Struct("<BQ")
sys.stdout.buffer.write(_REPLY.pack(0, 0))
sys.stdout.buffer.flush()
sys.stdin.buffer.read(8)
sys.stdout.buffer.write({reply or 'b""'})
""")
    monkeypatch.setattr(child, "__file__", str(program))
    tokenizer = load(tmp_path, pre_tokenizer=FIXED)
    with pytest.raises(UnavailableError, match="The process of the tokenizer ended"):
        tokenizer.encode("the rest")


def test_slow_texts_delay_no_fast_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FAIR_SECONDS", 0.3)
    tokenizer = load(tmp_path, pre_tokenizer=SLOW)
    ids = tokenizer.encode("e")

    def outcome(_: int) -> type[BaseException] | None:
        try:
            tokenizer.encode("a" * 1000)
        except Exception as error:
            return type(error)
        return None

    with ThreadPoolExecutor(8) as threads:
        one = threads.submit(outcome, 0)
        time.sleep(0.1)
        begin = time.monotonic()
        assert tokenizer.encode("e") == ids  # another process is idle
        assert time.monotonic() - begin < 0.3
        more = [threads.submit(outcome, i) for i in range(7)]
        time.sleep(1.0)
        begin = time.monotonic()
        assert tokenizer.encode("e") == ids
        assert time.monotonic() - begin < 3  # a process that was ended is started again
        tokenizer.close()
        assert {task.result() for task in [one, *more]} <= {OptionError, UnavailableError}


def test_closing_ends_a_slow_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, pre_tokenizer=SLOW)
    children = processes(tokenizer)
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(tokenizer.encode, "a" * 1000)
        time.sleep(0.3)
        begin = time.monotonic()
        tokenizer.close()
        with pytest.raises(UnavailableError, match="closed"):
            slow.result(timeout=5)
        assert time.monotonic() - begin < 1
    assert [process.wait(1) for process in children] == [-signal.SIGKILL] * 2
    with pytest.raises(UnavailableError, match="closed"):
        tokenizer.encode("e")
    tokenizer.close()


def test_words_of_many_threads_take_little_memory() -> None:
    """The library keeps the ids of words for each thread of the server."""
    tokenizer = Tokenizer(byte_tokenizer(), eos_ids=[2])
    barrier = threading.Barrier(8)

    def encode(first: int) -> None:
        barrier.wait()
        for i in range(first, first + 9000):
            tokenizer.encode(f"{i}" + "x" * 200, add_special=False)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    with ThreadPoolExecutor(8) as pool:
        before = resident()
        list(pool.map(encode, range(0, 72_000, 9000)))
        assert resident() - before < 16 << 20  # 28 MiB with the library's own limit
