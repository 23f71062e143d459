"""Build a tokenizer of the library tokenizers from a GGUF file. Its ids are those of llama.cpp.

`tokenizer.ggml.model` is the kind: gpt2 (byte-level BPE) or llama (SentencePiece BPE). For gpt2,
`tokenizer.ggml.pre` names the pre-tokenizer (gguf_pretokenizers.py). Unknown names are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.chat.gguf_pretokenizers import PRE_TOKENIZERS, PreTokenizer
from lmdeploy.chat.tokenizer import Tokenizer, library_errors, pool_of
from lmdeploy.chat.vocabulary.end_tokens import end_ids

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAX_TOKENS = 1 << 22
_MAX_TOKEN_LENGTH = 4096
# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
# The ids of SentencePiece where a file has no keys for them, as in llama.cpp.
_SENTENCE_PIECE_IDS = {"unknown": (0, "<unk>"), "bos": (1, "<s>"), "eos": (2, "</s>")}


@dataclass(frozen=True)
class _Vocabulary:
    """The checked lists of `tokenizer.ggml.*`."""

    source: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    kinds: list[int]

    def items(self, name: str, kind: type) -> list[Any]:
        """Return the list under tokenizer.ggml.<name> after checking the type of its items."""
        values = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise ModelFormatError(
                f"{self.source}: tokenizer.ggml.{name} must be a list of {kind.__name__}."
            )
        return values

    def token_id(self, name: str) -> int | None:
        """Return the id under tokenizer.ggml.<name>_token_id, or None if it is missing.

        SentencePiece has default ids, which count if their tokens have the usual texts.
        """
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            usual, text = _SENTENCE_PIECE_IDS.get(name, (0, None))
            is_usual = self.metadata.get("tokenizer.ggml.model") == "llama" and (
                self.tokens[usual : usual + 1] == [text]
            )
            return usual if is_usual else None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise ModelFormatError(
                f"{self.source}: tokenizer.ggml.{name}_token_id is {value!r}. It must be "
                f"0 to {len(self.tokens) - 1}."
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return the flag under tokenizer.ggml.<name>."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise ModelFormatError(
                f"{self.source}: tokenizer.ggml.{name} is {value!r}. It must be true or false."
            )
        return value


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Return the tokenizer in GGUF metadata. Raise ModelFormatError for an unknown kind."""
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = _read_vocabulary(metadata, source)
    is_linear = True
    if kind == "gpt2":
        pre_tokenizer = _pre_tokenizer(vocabulary)
        backend = _byte_level(vocabulary, pre_tokenizer)
        add_bos, is_linear = pre_tokenizer.add_bos, pre_tokenizer.is_linear
    elif kind == "llama":
        backend, add_bos = _sentence_piece(vocabulary), True
    else:
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.model is {str(kind)[:40]!r}. It must be gpt2 or llama."
        )
    _add_special_tokens(backend, vocabulary)
    bos_id = vocabulary.token_id("bos")
    _add_template(
        backend, vocabulary, bos_id=bos_id if vocabulary.flag("add_bos_token", add_bos) else None
    )
    return Tokenizer(
        backend,
        eos_ids=end_ids(backend, [vocabulary.token_id(name) for name in ("eos", "eot", "eom")]),
        bos_id=bos_id,
        strip_first_space=kind == "llama" and vocabulary.flag("add_space_prefix", True),
        pool=None if is_linear else pool_of(json.loads(backend.to_str())),
    )


def _read_vocabulary(metadata: Mapping[str, Any], source: str) -> _Vocabulary:
    vocabulary = _Vocabulary(source, metadata, [], [])
    tokens = vocabulary.items("tokens", str)
    if not 1 <= len(tokens) <= _MAX_TOKENS:
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.tokens has {len(tokens)} items. It must have "
            f"1 to {_MAX_TOKENS}."
        )
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN_LENGTH:  # finding merges tries every split of every token
        raise ModelFormatError(
            f"{source}: tokenizer.ggml.tokens has a token of {longest} characters. The limit is "
            f"{_MAX_TOKEN_LENGTH}."
        )
    kinds = [1] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = vocabulary.items("token_type", int)
        if len(kinds) != len(tokens):
            raise ModelFormatError(
                f"{source}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} "
                "tokens."
            )
    return _Vocabulary(source, metadata, tokens, kinds)


def _pre_tokenizer(vocabulary: _Vocabulary) -> PreTokenizer:
    name = vocabulary.metadata.get("tokenizer.ggml.pre")
    pre_tokenizer = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre_tokenizer is None:
        raise ModelFormatError(
            f"{vocabulary.source}: tokenizer.ggml.pre is {str(name)[:40]!r}. It must be one of "
            f"{', '.join(sorted(PRE_TOKENIZERS))}."
        )
    return pre_tokenizer


def _byte_level(vocabulary: _Vocabulary, pre_tokenizer: PreTokenizer) -> Backend:
    """Return byte-level BPE (gpt2)."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as BackendClass

    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    merges = _read_merges(vocabulary)

    def no_match(reason: str) -> ModelFormatError:
        return ModelFormatError(
            f"{vocabulary.source}: tokenizer.ggml.merges does not match the tokens: {reason}"
        )

    with library_errors(no_match):
        model = models.BPE(ids, merges, ignore_merges=pre_tokenizer.ignore_merges)
    backend: Backend = BackendClass(model)
    splits = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    # The parts are tokens. Sharing their strings halves the memory.
    tokens = dict(zip(vocabulary.tokens, vocabulary.tokens, strict=True))
    merges = []
    for text in vocabulary.items("merges", str):
        middle = text.find(" ", 1)  # a part may begin with a space
        left, right = text[:middle], text[middle + 1 :]
        merges.append((tokens.get(left, left), tokens.get(right, right)))
    return merges


def _sentence_piece(vocabulary: _Vocabulary) -> Backend:
    """Return SentencePiece BPE (llama). Merges follow from scores; unknown text becomes bytes."""
    from tokenizers import Tokenizer as BackendClass
    from tokenizers import decoders, models, normalizers

    scores = vocabulary.items("scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise ModelFormatError(
            f"{vocabulary.source}: tokenizer.ggml.scores has {len(scores)} entries for "
            f"{len(vocabulary.tokens)} tokens."
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
    """Return every way to join two pieces to a piece, best score first."""
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
    """Set the special tokens that `encode` adds around a text."""
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
