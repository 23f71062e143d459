"""The pre-tokenizers of GGUF files, which split text before byte-level BPE.

`tokenizer.ggml.pre` is the name. The expressions are those of llama.cpp, src/llama-vocab.cpp, class
llm_tokenizer_bpe. The comment of a row has its `case LLAMA_VOCAB_PRE_TYPE_…` there, and the models
that use it. The table omits names that only unsupported architectures use. A wrong split silently
gives wrong ids: tests/python/chat/test_gguf_vectors.py compares ids with those of llama.cpp, and
test_gguf_pretokenizers.py with the pre-tokenizers of tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
# The same rule in the tokenizer.json of these models.
_ANY_CASE_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MODERN_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _MODERN_TAIL
_MINICPM5 = _ENGLISH_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+" + _MODERN_TAIL
_SEED = (
    _ENGLISH_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _ENGLISH_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _MODERN_TAIL
_QWEN35 = (
    _ENGLISH_SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    + _CASED_TAIL
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH_SUFFIX}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH_SUFFIX}?|\p{{N}}{{1,3}}"
) + _CASED_TAIL
# The letters with case in the expression of DeepSeek LLM.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-"
    "\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-"
    "\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-"
    "\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-"
    "\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-"
    "\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-"
    "\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-"
    "\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-"
    "\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns that split text. Each one splits the pieces of the one before it."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is not split
    add_bos: bool = False  # default if the file does not specify it
    is_linear: bool = True  # in the length of the text. Others look ahead over all digits.


_BPE_LLAMA3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_BPE_GPT2 = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_BPE_DEEPSEEK3 = PreTokenizer(
    (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "llama-bpe": _BPE_LLAMA3,  # LLAMA3: Llama 3
    "llama3": _BPE_LLAMA3,  # LLAMA3, another name
    "llama-v3": _BPE_LLAMA3,  # LLAMA3, another name
    "falcon3": _BPE_LLAMA3,  # LLAMA3: Falcon 3, of architecture llama
    "falcon-h1": _BPE_LLAMA3,  # LLAMA3: Falcon-H1
    "lfm2": _BPE_LLAMA3,  # LLAMA3: LFM2
    "pixtral": _BPE_LLAMA3,  # LLAMA3: the text part of Pixtral, of architecture llama
    "midm-2.0": _BPE_LLAMA3,  # LLAMA3: Midm 2, of architecture llama
    "minicpm5": PreTokenizer(  # MINICPM5: MiniCPM5, of architecture llama
        (r"\p{N}{1,3}", _MINICPM5), ignore_merges=True
    ),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),  # CHATGLM4: GLM-4 (-hf) to 4.6
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),  # CHATGLM4: GLM-4 9B in its first format
    "dbrx": PreTokenizer((_LLAMA3,)),  # DBRX: Phi-4, OLMo 2
    "smaug-bpe": PreTokenizer((_LLAMA3,)),  # SMAUG: Smaug Llama 3, SmolLM3
    "qwen2": PreTokenizer((_QWEN2,)),  # QWEN2: Qwen 2 and 3
    "qwen35": PreTokenizer((_QWEN35,)),  # QWEN35: Qwen 3.5
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),  # QWEN2: DeepSeek R1 distilled to Qwen
    "megrez": PreTokenizer((_QWEN2,)),  # QWEN2: Megrez, of architecture llama
    "kormo": PreTokenizer((_QWEN2,)),  # QWEN2: KORMo, of architecture qwen2
    "f2llmv2": PreTokenizer((_QWEN2,)),  # QWEN2: F2LLM v2, of architecture qwen3
    "hunyuan": PreTokenizer((_QWEN2,)),  # HUNYUAN: Hunyuan 7B
    "solar-open": PreTokenizer((_QWEN2,)),  # SOLAR_OPEN: Solar Open, of architecture glm4moe
    "seed-coder": PreTokenizer((_SEED,)),  # SEED_CODER: Seed-OSS, Seed-Coder
    "command-r": _DIGITS_GPT2,  # COMMAND_R: Command R to Command A
    "smollm": _DIGITS_GPT2,  # SMOLLM: SmolLM and SmolLM2
    "starcoder": _DIGITS_GPT2,  # STARCODER: tokenizers of StarCoder
    "refact": _DIGITS_GPT2,  # REFACT: Granite 3
    "minerva-7b": _DIGITS_GPT2,  # MINERVA: Minerva, of architecture llama
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),  # VIKING: Viking, of architecture llama
    "gpt-2": _BPE_GPT2,  # GPT2
    "phi-2": _BPE_GPT2,  # GPT2: Phi-2
    "exaone4": _BPE_GPT2,  # GPT2: EXAONE 4
    "a.x-4.0": _BPE_GPT2,  # GPT2: A.X 4, of architecture qwen2
    "mellum": _BPE_GPT2,  # GPT2: Mellum, of architecture llama
    "olmo": _BPE_GPT2,  # OLMO: OLMo
    "trillion": _BPE_GPT2,  # TRILLION: Trillion, of architecture llama
    "granite-docling": _BPE_GPT2,  # GRANITE_DOCLING: its text part, of architecture llama
    "deepseek-llm": PreTokenizer(  # DEEPSEEK_LLM: DeepSeek LLM, of architecture llama
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(  # DEEPSEEK_CODER: DeepSeek Coder, of architecture llama
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
    ),
    "deepseek-v3": _BPE_DEEPSEEK3,  # DEEPSEEK3_LLM: models distilled from DeepSeek V3
    "hunyuan-dense": _BPE_DEEPSEEK3,  # HUNYUAN_DENSE: Hunyuan 0.5B to 4B
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),  # TEKKEN: Mistral Nemo
    "gpt-4o": PreTokenizer((_GPT4O,)),  # GPT4O: GPT-OSS, Phi-4-mini
    "minimax-m2": PreTokenizer((_GPT4O,)),  # MINIMAX_M2: MiniMax-M2
    # GPT4O, but tokenizer.json of Llama 4 comes from tiktoken, which does not split tokens.
    "llama4": PreTokenizer((_GPT4O,), ignore_merges=True),
    "tiny_aya": PreTokenizer(  # TINY_AYA: Tiny Aya, of architecture cohere2
        (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O), is_linear=False
    ),
    "superbpe": PreTokenizer(  # SUPERBPE: OLMo 2 with SuperBPE
        (r"\p{N}+", r"(?=(\d{3})+(?!\d))"), is_linear=False
    ),
}


@cache
def known_expressions() -> frozenset[str]:
    """Return the fast expressions of the table, as GGUF files and tokenizer.json spell them."""
    fast = [each for each in PRE_TOKENIZERS.values() if each.is_linear]
    patterns = [pattern for each in fast for pattern in each.patterns]
    spelled = [pattern.replace(_ENGLISH_SUFFIX, _ANY_CASE_SUFFIX) for pattern in patterns]
    return frozenset([*patterns, *spelled])
