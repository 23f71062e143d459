"""Ids of GGUF pre-tokenizers equal those of the pre-tokenizers in the families' tokenizer.json.

The vocabulary is trained without a pre-tokenizer, so that its tokens cross every boundary that a
pre-tokenizer sets. A text split elsewhere has other ids.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.gguf_pretokenizers import PRE_TOKENIZERS, known_expressions
from lmdeploy.chat.gguf_tokenizer import tokenizer_from_gguf
from lmdeploy.chat.tokenizer import Tokenizer
from lmdeploy.models import FAMILIES

TEXTS = [
    "for (int i = 0; i < 1024; ++i) {\n\t\tx[i] += 3.14159e-10f;  // i'th\n}\r\n\r\n",
    "I'm sure they've said it's HE'LL, WE'RE, don't and O'Neill's 'til 1999's end",
    "Numbers: 1 22 333 4444 1234567890 v2.0.1 0x1F ½ ٣٤٥ Ⅷ 第12章",
    "中文分词，测试。日本語のテキスト、カタカナ！ 한국어 문장입니다…",
    "naïve café São Ünïcödé Ελληνικά кириллица हिन्दी में e\u0301a\u0300 العربية،",
    "🙂🙂 👩‍👩‍👧 ok 🚀\n\n\n   indented    text \t\t tabs  \n \n  end   ",
    "camelCaseWords HTTPServer snake_case http://a.b/c?d=e&f=g#h //// path/to/File.TXT\n/x",
    "!!!???...---===<<<>>>((([[[{{{ $%^&*~`|\\ \"quoted\" 'single' «guillemets» ! a !b",
    "   leading\n\ntwo\r\nwindows\r\r\n trailing \u3000wide\u00a0hard\u200bzero",
]

_ANY = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _ANY
    + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _ANY
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
_LLAMA3 = [_ANY + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL]
_QWEN2 = [_ANY + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL]
_QWEN35 = [
    _ANY + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
]
_SEED = [
    _ANY + "|[^\r\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1}| ?[^\\s\\p{L}\\p{N}\r\n]+|\\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
]
_MINICPM5 = [r"\p{N}{1,3}", _ANY + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + _TAIL]
_BLOOM = [r" ?[^(\s|[.,!?…。，、।۔،])]+"]
_DIGITS = "Digits"  # Digits(individual_digits=True), then ByteLevel with its own expression
_BYTES = "ByteLevel"  # ByteLevel with its own expression

# tokenizer.ggml.pre → the splits of tokenizer.json before ByteLevel
FAMILY_SPLITS: dict[str, list[str]] = {
    "command-r": [_DIGITS, _BYTES],
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "llama4": [_CASED],
    "minimax-m2": [_CASED],
    "gpt-4o": [_CASED],
    "hunyuan-dense": _DEEPSEEK3,
    "hunyuan": _QWEN2,
    "solar-open": _QWEN2,
    "seed-coder": _SEED,
    "exaone4": [_BYTES],
    "minicpm5": _MINICPM5,
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", _CASED],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "viking": [*_BLOOM, _DIGITS],
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "smollm": [_DIGITS, _BYTES],
    "gpt-2": [_BYTES],
}


@cache
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the tokens and merges of byte-level BPE that was trained on whole texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text * 2 for text in TEXTS], trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


@cache
def gguf_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a GGUF file with this pre-tokenizer."""
    vocab, merges = trained()
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": sorted(vocab, key=lambda token: vocab[token]),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }
    return tokenizer_from_gguf(metadata, name)


def family_ids(splits: list[str], text: str, *, ignore_merges: bool) -> list[int]:
    """Return the ids of a tokenizer.json with these splits."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocab, merges = trained()
    backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
    steps = [
        pre_tokenizers.Digits(individual_digits=True)
        if split == _DIGITS
        else pre_tokenizers.Split(Regex(split), "isolated")
        for split in splits
        if split != _BYTES
    ]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_BYTES in splits)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    ids: list[int] = backend.encode(text).ids
    return ids


@pytest.mark.parametrize("name", FAMILY_SPLITS)
def test_ids_equal_those_of_tokenizer_json(name: str) -> None:
    ignores = PRE_TOKENIZERS[name].ignore_merges
    for text in TEXTS:
        wanted = family_ids(FAMILY_SPLITS[name], text, ignore_merges=ignores)
        assert gguf_tokenizer(name).encode(text, add_special=False) == wanted, text


def test_other_splits_have_other_ids() -> None:
    ids = {
        str(splits): [family_ids(splits, text, ignore_merges=False) for text in TEXTS]
        for splits in FAMILY_SPLITS.values()
    }
    # MiniCPM5 splits numbers before the rest, which changes nothing.
    assert ids[str(_MINICPM5)] == ids[str(_LLAMA3)]
    assert len({str(value) for value in ids.values()}) == len(ids) - 1 == 11


def test_tokens_are_whole_where_tokenizer_json_ignores_merges() -> None:
    backend = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama4",
            "tokenizer.ggml.tokens": ["a", "b", "c", "abc"],
            "tokenizer.ggml.merges": [],
        },
        "x",
    )
    assert backend.encode("abc", add_special=False) == [3]


def test_expressions_that_are_not_linear_run_in_a_process() -> None:
    for name, pre_tokenizer in PRE_TOKENIZERS.items():
        assert (name in ("tiny_aya", "superbpe")) != pre_tokenizer.is_linear
    assert gguf_tokenizer("tiny_aya")._pool is not None
    assert gguf_tokenizer("llama4")._pool is None
    assert PRE_TOKENIZERS["superbpe"].patterns[1] not in known_expressions()
    assert gguf_tokenizer("superbpe").decode(gguf_tokenizer("superbpe").encode("12 34")) == "12 34"


def test_names_of_listed_families_are_known() -> None:
    listed = {name for family in FAMILIES for name in family.gguf_architectures}
    # Families whose files have byte-level BPE, and the name that their converter writes.
    names = {
        "llama": "llama-bpe",
        "llama4": "llama4",
        "qwen2": "qwen2",
        "qwen3": "qwen2",
        "qwen2moe": "qwen2",
        "qwen3moe": "qwen2",
        "qwen3next": "qwen2",
        "qwen35": "qwen35",
        "qwen35moe": "qwen35",
        "gpt-oss": "gpt-4o",
        "smollm3": "smaug-bpe",
        "granite": "refact",
        "granitemoe": "refact",
        "granitehybrid": "dbrx",
        "falcon-h1": "falcon-h1",
        "nemotron_h": "tekken",
        "nemotron_h_moe": "pixtral",
        "lfm2": "lfm2",
        "lfm2moe": "lfm2",
        "phi3": "dbrx",
        "chatglm": "chatglm-bpe",
        "glm4": "glm4",
        "glm4moe": "glm4",
        "deepseek2": "deepseek-v3",
        "minimax-m2": "minimax-m2",
        "olmo2": "dbrx",
        "exaone4": "exaone4",
        "seed_oss": "seed-coder",
        "hunyuan-dense": "hunyuan-dense",
        "command-r": "command-r",
        "cohere2": "command-r",
        "starcoder2": "starcoder",
        "arcee": "llama-bpe",
    }
    sentence_piece = {"gemma2", "gemma3", "gemma4", "internlm2", "nemotron"}
    sentence_piece |= {"ernie4_5", "ernie4_5-moe"}
    assert set(names) | sentence_piece == listed
    assert set(names.values()) <= set(PRE_TOKENIZERS)


def test_names_without_a_listed_family_are_refused() -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.pre is 'kimi-k2'"):
        gguf_tokenizer("kimi-k2")
