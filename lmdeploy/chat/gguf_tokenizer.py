"""③ The tokenizer inside a GGUF file, rebuilt for the library tokenizers with llama.cpp's ids.

`tokenizer.ggml.model` is the kind (gpt2: byte-level BPE, llama: SentencePiece BPE) and
`tokenizer.ggml.pre` says how text is cut before BPE. A name that is not listed here is refused: a
wrong cut gives wrong ids without any other sign. scripts/dev/check_tokenizers.py compares ids with
llama.cpp's test vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.tokenizer import Tokenizer, end_of_turn_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAX_TOKENS = 1 << 22
_MAX_TOKEN_LENGTH = 4096
# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_MODERN_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _MODERN_TAIL
_QWEN2 = _ENGLISH_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _MODERN_TAIL
_QWEN35 = (
    _ENGLISH_SUFFIX
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    + r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
# Letters with case, as DeepSeek LLM lists them.
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


@dataclass(frozen=True)
class _Cut:
    """How text is cut before BPE: each pattern cuts the pieces of the one before."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # where the file does not say


_DIGITS_GPT2 = _Cut((r"\p{N}", _GPT2))
_PLAIN_GPT2 = _Cut((_GPT2,))
_CUTS: Mapping[str, _Cut] = {
    "llama-bpe": _Cut((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama3": _Cut((_LLAMA3,), ignore_merges=True, add_bos=True),
    "llama-v3": _Cut((_LLAMA3,), ignore_merges=True, add_bos=True),
    "falcon3": _Cut((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx": _Cut((_LLAMA3,)),
    "smaug-bpe": _Cut((_LLAMA3,)),
    "qwen2": _Cut((_QWEN2,)),
    "deepseek-r1-qwen": _Cut((_QWEN2,)),
    "megrez": _Cut((_QWEN2,)),
    "stablelm2": _Cut((_QWEN2,)),
    "qwen35": _Cut((_QWEN35,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "jais": _PLAIN_GPT2,
    "exaone4": _PLAIN_GPT2,
    "falcon": _Cut((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": _Cut(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": _Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3": _Cut(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3_WORDS)
    ),
    "tekken": _Cut((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _Cut((_GPT4O,)),
    "llama4": _Cut((_GPT4O,)),
}


@dataclass(frozen=True)
class _Vocabulary:
    """The checked lists of `tokenizer.ggml.*`."""

    source: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]

    def items(self, name: str, kind: type) -> list[Any]:
        """A list under tokenizer.ggml.<name> of that type of items."""
        values = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ModelFormatError(
                f"{self.source}: tokenizer.ggml.{name} is missing or not a list of {kind.__name__}"
            )
        return values

    def token_id(self, name: str) -> int | None:
        """An id under tokenizer.ggml.<name>_token_id; None when it is missing."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise ModelFormatError(
                f"{self.source}: tokenizer.ggml.{name}_token_id is {value!r}; wanted "
                f"0..{len(self.tokens) - 1}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A flag under tokenizer.ggml.<name>."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ModelFormatError(
                f"{self.source}: tokenizer.ggml.{name} is {value!r}; wanted true or false"
            )
        return value


def supported_cuts() -> list[str]:
    """The values of `tokenizer.ggml.pre` that are known."""
    return sorted(_CUTS)


def cut_patterns(name: str) -> tuple[str, ...]:
    """The regular expressions of one `tokenizer.ggml.pre`. KeyError when it is not known."""
    return _CUTS[name].patterns


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer described by GGUF metadata. ModelFormatError when its kind is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = _read_vocabulary(metadata, source)
    if kind == "gpt2":
        backend, add_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, add_bos = _sentence_piece(vocabulary), True
    else:
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.model is {str(kind)[:40]!r}; supported: gpt2, llama"
        )
    _add_special_tokens(backend, vocabulary)
    bos_id = vocabulary.token_id("bos")
    _add_template(
        backend, vocabulary, bos_id=bos_id if vocabulary.flag("add_bos_token", add_bos) else None
    )
    ends = [vocabulary.token_id(name) for name in ("eos", "eot", "eom")]
    return Tokenizer(
        backend,
        eos_ids=[*(end for end in ends if end is not None), *end_of_turn_ids(backend)],
        bos_id=bos_id,
        strip_first_space=kind == "llama" and vocabulary.flag("add_space_prefix", True),
    )


def _read_vocabulary(metadata: Mapping[str, Any], source: str) -> _Vocabulary:
    vocabulary = _Vocabulary(source, metadata, [], [])
    tokens = vocabulary.items("tokens", str)
    if not 1 <= len(tokens) <= _MAX_TOKENS:
        raise ModelFormatError(
            f"{source}: {len(tokens)} tokens; wanted 1..{_MAX_TOKENS} in tokenizer.ggml.tokens"
        )
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN_LENGTH:  # merges are found by trying every cut of every token
        raise ModelFormatError(
            f"{source}: a token of {longest} characters in tokenizer.ggml.tokens; wanted at most "
            f"{_MAX_TOKEN_LENGTH}"
        )
    kinds = [1] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = vocabulary.items("token_type", int)
        if len(kinds) != len(tokens):
            raise ModelFormatError(
                f"{source}: {len(kinds)} entries in tokenizer.ggml.token_type for {len(tokens)} "
                "tokens"
            )
    return _Vocabulary(source, metadata, tokens, kinds)


def _byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """Byte-level BPE (gpt2), and whether BOS is added by default."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as BackendClass

    name = vocabulary.metadata.get("tokenizer.ggml.pre")
    cut = _CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise ModelFormatError(
            f"{vocabulary.source}: tokenizer.ggml.pre is {str(name)[:40]!r}; supported: "
            f"{', '.join(supported_cuts())}"
        )
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = _read_merges(vocabulary)
    try:
        model = models.BPE(ids, merges, ignore_merges=cut.ignore_merges)
    except Exception as error:  # the library raises plain Exception
        raise ModelFormatError(
            f"{vocabulary.source}: tokenizer.ggml.merges do not fit the tokens: {str(error)[:120]}"
        ) from error
    backend: Backend = BackendClass(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _read_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    # Their parts are tokens: as strings of their own they would take as much memory again.
    tokens = dict(zip(vocabulary.tokens, vocabulary.tokens, strict=True))
    merges = []
    for text in vocabulary.items("merges", str):
        middle = text.find(" ", 1)  # a part may begin with a space
        left, right = text[:middle], text[middle + 1 :]
        merges.append((tokens.get(left, left), tokens.get(right, right)))
    return merges


def _sentence_piece(vocabulary: _Vocabulary) -> Backend:
    """SentencePiece BPE (llama): merges follow from the scores, unknown text becomes bytes."""
    from tokenizers import Tokenizer as BackendClass
    from tokenizers import decoders, models, normalizers

    scores = vocabulary.items("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise ModelFormatError(
            f"{vocabulary.source}: {len(scores)} scores for {len(vocabulary.tokens)} tokens"
        )
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.token_id("unknown")
    model = models.BPE(
        ids,
        _merges_from_scores(vocabulary, ids, scores=scores),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend: Backend = BackendClass(model)
    space = normalizers.Replace(" ", "▁")
    prefixed = vocabulary.flag("add_space_prefix", True)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefixed else space
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        parts.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges_from_scores(
    vocabulary: _Vocabulary, ids: Mapping[str, int], *, scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two pieces, best score first."""
    plain = {
        token
        for token, token_id in ids.items()
        if vocabulary.kinds[token_id] not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    ranked: list[tuple[float, int, str, str]] = []
    for token in plain:
        token_id = ids[token]
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in plain and right in plain:
                ranked.append((-scores[token_id], token_id, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _add_special_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def _add_template(backend: Backend, vocabulary: _Vocabulary, *, bos_id: int | None) -> None:
    """What `encode` puts around a text."""
    from tokenizers import processors

    eos_id = vocabulary.token_id("eos") if vocabulary.flag("add_eos_token", False) else None
    if bos_id is None and eos_id is None:
        return
    names = {
        name: token_id
        for name, token_id in (("bos", bos_id), ("eos", eos_id))
        if token_id is not None
    }
    single = [part for part in ("bos", "$A", "eos") if part == "$A" or part in names]
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=list(names.items())
    )
