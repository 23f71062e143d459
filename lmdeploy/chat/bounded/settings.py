"""Decide from tokenizer.json whether tokenizing takes time and memory in proportion to the text.

Only settings that are known to be fast count as bounded: normalizers that lengthen a text little,
and regular expressions of released models. The library's engine for regular expressions backtracks,
so that other expressions may take exponential time.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

from lmdeploy.chat.gguf_pretokenizers import known_expressions

MAX_GROWTH = 64  # bytes of the normalized text per byte of the text
_MAX_STEPS = 8  # normalizers or pre-tokenizers
_MAX_TEMPLATE = 16  # special tokens around a text
# The most bytes that a byte of text becomes. NFKC maps U+FDFA to 18 characters.
_GROWTH = {
    **dict.fromkeys(("NFC", "NFD", "Lowercase", "ByteLevel"), 3),
    **dict.fromkeys(("NFKC", "NFKD"), 18),
    **dict.fromkeys(("StripAccents", "Strip"), 1),
    "Metaspace": 6,
    **dict.fromkeys(("Digits", "Punctuation", "Whitespace", "WhitespaceSplit"), 1),
}


def is_bounded(settings: dict[str, Any]) -> bool:
    """Return whether the settings of tokenizer.json are known to be fast."""
    try:
        return (
            settings["model"].get("type", "BPE") in ("BPE", "Unigram")
            and not any(token.get("lstrip") for token in settings.get("added_tokens") or ())
            and _growth(settings.get("normalizer")) * _growth(settings.get("pre_tokenizer"))
            <= MAX_GROWTH
            and _is_short(settings.get("post_processor"))
        )
    except (AttributeError, KeyError, RecursionError, TypeError):
        return False  # the library will name the error


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or post-processor, without sequences."""
    if part is None:
        return []
    for name in ("normalizers", "pretokenizers", "processors"):
        if part.get("type") == "Sequence" and name in part:
            return [step for inner in part[name] for step in _steps(inner)]
    return [part]


def _growth(part: dict[str, Any] | None) -> float:
    steps = _steps(part)
    return inf if len(steps) > _MAX_STEPS else prod(map(_growth_of_step, steps))


def _growth_of_step(step: dict[str, Any]) -> float:
    kind = step["type"]
    if kind == "Prepend":
        return 1 + len(step["prepend"].encode())
    if kind not in ("Replace", "Split"):
        return _GROWTH.get(kind, inf)
    pattern = step["pattern"]
    if kind == "Split" and pattern.get("Regex") in known_expressions():
        return 1
    old = pattern.get("String", "").encode()
    new = step["content"].encode() if kind == "Replace" else b""
    return max(1, len(new) / len(old)) if old else inf


def _is_short(part: dict[str, Any] | None) -> bool:
    """Return whether the post-processor adds few tokens. Templates can repeat the text."""
    steps = _steps(part)
    for step in steps:
        if step["type"] == "TemplateProcessing":
            pieces = step["single"]
            added = sum(len(token["ids"]) for token in step["special_tokens"].values())
            if max(len(pieces), added) > _MAX_TEMPLATE:
                return False
            if sum("Sequence" in piece for piece in pieces) > 1:
                return False
        elif step["type"] not in ("ByteLevel", "BertProcessing", "RobertaProcessing"):
            return False
    return len(steps) <= _MAX_STEPS
