"""Tests of tokenizers: llama.cpp's ids, streaming, and invalid vocabularies."""

import gc
import json
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import TINY_MODELS, VOCAB_SIZE, byte_tokenizer, make_model, save_model
from vocabularies import sentence_piece_metadata

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.gguf_pretokenizers import PRE_TOKENIZERS
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.chat.tokenizer import Tokenizer, tokenizer_from_folder
from lmdeploy.checkpoint.files.gguf_file import GgufFile
from lmdeploy.checkpoint.hub import resolve_model

DATA = Path(__file__).parents[1] / "data"
# List of (text, ids) from llama-cpp-python 0.3.36 on the same file: tokenize(special=True).
SMOLLM2_IDS = json.loads((DATA / "smollm2_ids.json").read_text())


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(resolve_model("smollm2")).metadata, "smollm2")


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), eos_ids=[2], bos_id=1)


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    backend = byte_tokenizer()
    tokens = [backend.id_to_token(i) for i in range(VOCAB_SIZE)]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3, 3] + [1] * (VOCAB_SIZE - 3),
        "merges": [f"{token[0]} {token[1]}" for token in tokens[259:]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.mark.parametrize("row", SMOLLM2_IDS, ids=lambda row: repr(row["text"])[:24])
def test_encode_smollm2_equals_llama_cpp(smollm2: Tokenizer, row: dict[str, Any]) -> None:
    assert smollm2.encode(row["text"]) == row["ids"]
    assert smollm2.decode(row["ids"], skip_special=False) == row["text"]


def test_encode_other_pre_tokenizer_gives_other_ids(smollm2: Tokenizer) -> None:
    # Without SmolLM's rule for single digits, the ids differ: the reference ids above test it.
    metadata = dict(GgufFile(resolve_model("smollm2")).metadata)
    metadata["tokenizer.ggml.pre"] = "gpt-2"
    usual = tokenizer_from_gguf(metadata, "usual")
    assert usual.encode("x =  2024") != smollm2.encode("x =  2024")
    assert any(usual.encode(row["text"]) != row["ids"] for row in SMOLLM2_IDS)


def test_encode_sentence_piece_merges_by_score() -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece_metadata(), "spm")
    piece = {token: i for i, token in enumerate(sentence_piece_metadata()["tokenizer.ggml.tokens"])}
    assert tokenizer.encode("abc") == [1, piece["▁abc"]]
    assert tokenizer.encode("abc", add_special=False) == [piece["▁abc"]]
    # "▁a" (rank 6) merges before "bc" (rank 9), and "ab" (rank 5) before both.
    assert tokenizer.encode("ab bc", False) == [piece["▁ab"], piece["▁"], piece["bc"]]
    # Characters that no piece covers become bytes.
    assert tokenizer.encode("ñ", False) == [piece["▁"], piece["<0xC3>"], piece["<0xB1>"]]
    assert tokenizer.decode(tokenizer.encode("ab ñé c", False)) == "ab ñé c"
    unprefixed = tokenizer_from_gguf(sentence_piece_metadata(add_space_prefix=False), "spm")
    assert unprefixed.encode("abc", False) == [piece["abc"]]
    assert unprefixed.decode(unprefixed.encode(" abc", False)) == " abc"


def test_stream_that_does_not_begin_the_text_keeps_first_space() -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece_metadata(), "spm")
    ids = tokenizer.encode("ab c", add_special=False)
    going_on = tokenizer.stream(begins_text=False)
    assert "".join(map(going_on.push, ids)) + going_on.finish() == " ab c"
    beginning = tokenizer.stream()
    assert "".join(map(beginning.push, ids)) + beginning.finish() == "ab c"


def test_encode_sentence_piece_without_keys_has_the_usual_special_tokens() -> None:
    without = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id"))
    tokenizer = tokenizer_from_gguf(sentence_piece_metadata(**without), "spm")
    usual = tokenizer_from_gguf(sentence_piece_metadata(), "spm")
    assert tokenizer.bos_id == 1 and tokenizer.eos_ids == [2]
    assert tokenizer.encode("abc ñ") == usual.encode("abc ñ") and usual.encode("abc ñ")[0] == 1
    # Gemma has <bos> as 2 and states it. Other texts are not the usual tokens.
    metadata = sentence_piece_metadata(**without)
    metadata["tokenizer.ggml.tokens"][:3] = ["<pad>", "<eos>", "<bos>"]
    other = tokenizer_from_gguf(metadata, "spm")
    assert other.bos_id is None and other.eos_ids == [1]  # by its text
    assert other.encode("abc") == tokenizer.encode("abc", add_special=False)
    byte_level = tokenizer_from_gguf(
        byte_level_metadata(bos_token_id=None, eos_token_id=None), "bpe"
    )
    assert byte_level.bos_id is None


def test_encode_bos_follows_metadata_of_the_file() -> None:
    assert tokenizer_from_gguf(byte_level_metadata(), "x").encode("e")[0] != 1
    with_bos = tokenizer_from_gguf(byte_level_metadata(add_bos_token=True), "x")
    assert with_bos.encode("e")[0] == 1
    assert with_bos.encode("e", add_special=False)[0] != 1
    assert tokenizer_from_gguf(byte_level_metadata(pre="llama-bpe"), "x").encode("e")[0] == 1
    assert tokenizer_from_gguf(sentence_piece_metadata(add_bos_token=False), "x").encode("a") != 1


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_stream_equals_decoding_at_once(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text, add_special=False)
    stream = tiny.stream(skip_special=False)
    pieces = [stream.push(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == text == tiny.decode(ids, skip_special=False)
    # An incomplete character would show as U+FFFD.
    assert "�" in text or all("�" not in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_decode_random_ids_equals_tokenizers(tiny: Tokenizer, ids: list[int]) -> None:
    assert tiny.decode(ids) == byte_tokenizer().decode(ids, skip_special_tokens=True)


def test_stream_incomplete_character_is_held_back(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("👨‍👩‍👧", add_special=False)
    stream = smollm2.stream()
    assert stream.push(ids[0]) in ("", "👨")
    partial = smollm2.stream()
    byte = next(i for i in range(smollm2.vocab_size) if smollm2.token_bytes(i) == b"\xf0")
    assert partial.push(byte) == ""
    assert partial.finish() == "�"


def test_decode_skips_special_tokens_on_request(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>a<|im_end|>", add_special=False)
    assert smollm2.decode(ids) == "a"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>a<|im_end|>"
    assert smollm2.eos_ids[0] == 2 and smollm2.bos_token == "<|im_start|>"
    assert smollm2.eos_token == "<|im_end|>"


def test_encode_lone_surrogate_becomes_replacement_character(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\ud800b", add_special=False)) == "a�b"
    assert tiny.decode(tiny.encode("a\ud800b" * 2000, add_special=False)) == "a�b" * 2000


def test_encode_long_text_equals_encoding_of_its_words(smollm2: Tokenizer) -> None:
    words = [f"It was {year}, café \u2014\n" for year in range(1000, 3000)]
    ids = smollm2.encode("".join(words))
    assert ids == [i for word in words for i in smollm2.encode(word)]


def test_encode_long_text_lets_other_threads_run(smollm2: Tokenizer) -> None:
    running = threading.Thread(target=smollm2.encode, args=("It was 1984. " * 40_000,))
    running.start()
    turns = 0
    while running.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 1 << 40])
def test_decode_unknown_id_raises_value_error(tiny: Tokenizer, token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token id is {token_id}"):
        tiny.decode([token_id])


def test_tokenizer_token_bytes_take_little_memory() -> None:
    # The library's own vocabulary is not counted. 49,152 Python objects would take 2.5 MB.
    metadata = GgufFile(resolve_model("smollm2")).metadata
    tokenizer_from_gguf(metadata, "what modules keep")
    gc.collect()
    tracemalloc.start()
    try:
        tokenizer = tokenizer_from_gguf(metadata, "smollm2")
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    contents = sum(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    assert contents + 4 * tokenizer.vocab_size < kept < contents + 5 * tokenizer.vocab_size


def test_grammar_tokenizer_mask_allows_matching_tokens_only(smollm2: Tokenizer) -> None:
    import llguidance
    import numpy as np

    ll_tokenizer = smollm2.grammar_tokenizer(49152)
    assert ll_tokenizer is smollm2.grammar_tokenizer(49152)
    matcher = llguidance.LLMatcher(ll_tokenizer, llguidance.LLMatcher.grammar_from_regex("[0-9]+x"))
    mask = np.zeros(49152 // 32, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert len(allowed) >= 10
    assert all(smollm2.token_bytes(int(i))[:1].isdigit() for i in allowed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(make_model(TINY_MODELS[0]), tmp_path)


def test_tokenizer_from_folder_equals_its_source(folder: Path, tiny: Tokenizer) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("the rest") == tiny.encode("the rest")
    assert tokenizer.eos_ids == [2] and tokenizer.bos_id == 1
    assert tokenizer.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("has_processor", [True, False], ids=["processor", "none"])
@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", None], ids=str)
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
    ],
    ids=str,
)
def test_encode_special_tokens_around_a_text_follow_tokenizer_json(
    folder: Path, keys: dict[str, bool], name: str | None, has_processor: bool
) -> None:
    # transformers 5 ignores add_bos_token and add_eos_token if there is a tokenizer.json.
    from tokenizers import processors
    from transformers import AutoTokenizer

    backend = byte_tokenizer()
    if has_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    backend.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": "</s>", **keys}
    values |= {"tokenizer_class": name} if name else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    ids = tokenizer_from_folder(folder).encode("the rest")
    assert ids == AutoTokenizer.from_pretrained(folder).encode("the rest")
    assert (ids[0] == 1) == has_processor


def test_tokenizer_from_folder_null_bos_token_disables_bos(folder: Path) -> None:
    (folder / "config.json").write_text('{"bos_token_id": 1}')
    assert tokenizer_from_folder(folder).bos_id == 1
    path = folder / "tokenizer_config.json"
    given = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**given, "bos_token": None}))
    tokenizer = tokenizer_from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.bos_token) == (None, "")


def test_tokenizer_from_folder_ignores_eos_ids_outside_the_vocabulary(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [99999999999, true, -1, 5]}')
    tokenizer = tokenizer_from_folder(folder)
    assert sorted(tokenizer.eos_ids) == [2, 5] and tokenizer.eos_token


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "BPE"}}', "null"])
def test_tokenizer_from_folder_malformed_tokenizer_json_is_rejected(
    folder: Path, text: str
) -> None:
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        tokenizer_from_folder(folder)


def test_tokenizer_from_folder_unsupported_decoder_is_rejected(folder: Path) -> None:
    state = json.loads((folder / "tokenizer.json").read_text())
    state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelFormatError, match="WordPiece"):
        tokenizer_from_folder(folder)


def test_tokenizer_from_folder_missing_tokenizer_json_is_rejected(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json is missing"):
        tokenizer_from_folder(folder)


BAD_VOCABULARIES: list[tuple[dict[str, Any], str]] = [
    (byte_level_metadata(model="rwkv"), "'rwkv'. It must be gpt2 or llama"),
    (byte_level_metadata(model=None), "must be gpt2 or llama"),
    (byte_level_metadata(pre="somebody-elses"), "'somebody-elses'.*smollm"),
    (byte_level_metadata(pre=None), "tokenizer.ggml.pre is 'None'"),
    (byte_level_metadata(tokens=[]), "has 0 items"),
    (byte_level_metadata(tokens=[1, 2]), "must be a list of str"),
    (byte_level_metadata(tokens=["a", "b" * 100_000]), "a token of 100000 characters"),
    (byte_level_metadata(merges=None), "tokenizer.ggml.merges must be a list"),
    (byte_level_metadata(merges=["q zz"]), "does not match the tokens"),
    (byte_level_metadata(merges=["qz"]), "does not match the tokens"),
    (byte_level_metadata(token_type=[1]), "token_type has 1 entries"),
    (byte_level_metadata(bos_token_id=1 << 31), "bos_token_id is 2147483648"),
    (byte_level_metadata(eos_token_id="2"), "eos_token_id is '2'"),
    (byte_level_metadata(add_bos_token=1), "add_bos_token is 1"),
    (sentence_piece_metadata(scores=[0.0]), "scores has 1 entries"),
    (sentence_piece_metadata(scores=None), "scores must be a list"),
]


@pytest.mark.parametrize(("metadata", "message"), BAD_VOCABULARIES, ids=lambda v: str(v)[:30])
def test_tokenizer_from_gguf_malformed_vocabulary_is_rejected(
    metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFormatError, match=message):
        tokenizer_from_gguf(metadata, "file")


def test_tokenizer_from_gguf_every_pre_tokenizer_round_trips() -> None:
    for name in PRE_TOKENIZERS:
        tokenizer = tokenizer_from_gguf(byte_level_metadata(pre=name), name)
        text = "The 1234 rest's\r\n  <x> é 中文\t!?  "
        assert tokenizer.decode(tokenizer.encode(text, False)) == text
