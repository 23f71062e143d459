"""Merge the tokens that only files beside tokenizer.json name into its `added_tokens`.

As in transformers, the flags in `added_tokens_decoder` of tokenizer_config.json have priority, then
those of tokenizer.json. Tokens that a file names by a role (eos_token, ...) are special.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmdeploy.base.errors import ModelFormatError
from lmdeploy.base.files import read_json_object

logger = logging.getLogger("lmdeploy")

_MAX_CONFIG_BYTES = 16 << 20
_MAX_IDS = 1 << 31  # for any vocabulary
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Roles whose tokens become special even if tokenizer.json has them as plain ones. A padding token
# may be an ordinary word.
_SPECIAL_ROLES = ("bos", "eos")
_LISTS = ("additional_special_tokens", "extra_special_tokens")

AddedTokens = list[dict[str, Any]]  # as `added_tokens` of tokenizer.json


@dataclass(frozen=True)
class StatedTokens:
    """The tokens that files beside tokenizer.json state."""

    config: Mapping[str, Any]  # tokenizer_config.json, and special_tokens_map.json
    decoder: AddedTokens  # added_tokens_decoder
    added: AddedTokens  # added_tokens.json
    special: frozenset[str]  # texts that are special if they are in the vocabulary


def read_stated_tokens(folder: Path) -> StatedTokens:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json, if they exist.

    Raise ModelFormatError for a malformed token.
    """
    config, roles, added = (
        read_json_object(folder / name, _MAX_CONFIG_BYTES) if (folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    )
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise ModelFormatError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must be an object."
        )
    if not decoder:
        config = {**config, **roles}
    named = _texts_of_roles(config, _ROLES)
    return StatedTokens(
        config,
        [_checked(number, token, named=named, folder=folder) for number, token in decoder.items()],
        [_checked(number, text, named=named, folder=folder) for text, number in added.items()],
        _texts_of_roles(config, _SPECIAL_ROLES),
    )


def token_text(value: Any) -> str | None:
    """Return the text of a token that is written as text or as an object, or None."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def merged_tokens(settings: Mapping[str, Any], stated: StatedTokens) -> AddedTokens:
    """Return `added_tokens` of tokenizer.json with the stated ones, ordered by id.

    The library numbers a new token after all others. A token that states another id is left out
    with a warning, because its embedding would be a wrong one.
    """
    vocab = _vocabulary(settings)
    known = {token["content"]: dict(token) for token in settings.get("added_tokens") or ()}
    next_id = max([len(vocab) - 1, *(token["id"] for token in known.values())]) + 1
    for token in stated.decoder:
        if (old := known.get(token["content"])) is not None:
            special = token["special"] or bool(old.get("special"))
            known[token["content"]] = {**token, "id": old["id"], "special": special}
    new = {token["content"]: token for token in (*stated.added, *stated.decoder)}
    left_out = []
    for token in sorted(new.values(), key=lambda token: int(token["id"])):
        text = token["content"]
        if text in known:
            continue
        if vocab.get(text, next_id) != token["id"]:
            left_out.append(text)
            continue
        known[text] = token
        next_id = max(next_id, token["id"] + 1)
    if left_out:
        logger.warning(
            "Tokens of tokenizer_config.json or added_tokens.json are left out (%d, such as %r), "
            "because their ids do not follow those of tokenizer.json.",
            len(left_out),
            left_out[0][:80],
        )
    for text in stated.special & (known.keys() | vocab.keys()):
        known.setdefault(text, _entry(text, vocab.get(text, 0), is_special=True))["special"] = True
    return sorted(known.values(), key=lambda token: int(token["id"]))


def _vocabulary(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the model, empty if it is malformed, which the library will report."""
    model = settings.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list):  # Unigram: pairs of text and score
        return {piece[0]: index for index, piece in enumerate(vocab) if isinstance(piece, list)}
    return vocab if isinstance(vocab, dict) else {}


def _texts_of_roles(config: Mapping[str, Any], roles: tuple[str, ...]) -> frozenset[str]:
    values = [config.get(f"{role}_token") for role in roles]
    for name in _LISTS:
        value = config.get(name)
        values += value if isinstance(value, list) else []
    return frozenset(text for value in values if (text := token_text(value)) is not None)


def _entry(text: str, token_id: int, *, is_special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(_FLAGS, False)
    return {
        "id": token_id,
        "content": text,
        **flags,
        "normalized": not is_special,
        "special": is_special,
    }


def _checked(number: Any, token: Any, *, named: frozenset[str], folder: Path) -> dict[str, Any]:
    """Return a token as an item of `added_tokens`. Raise ModelFormatError if it is malformed."""
    text = token_text(token)
    is_number = type(number) is int or (isinstance(number, str) and number.isdecimal())
    if text is None or not is_number or len(str(number)) > 10 or not 0 <= int(number) < _MAX_IDS:
        raise ModelFormatError(
            f"{folder}: The added token {str(token)[:80]!r} has the id {str(number)[:20]!r}. It "
            f"must have a text, and an id of 0 to {_MAX_IDS - 1}."
        )
    entry = _entry(text, int(number), is_special=text in named)
    if isinstance(token, dict):
        given = {flag: token[flag] for flag in _FLAGS if flag in token}
        if not all(isinstance(value, bool) for value in given.values()):
            raise ModelFormatError(
                f"{folder}: A flag of the added token {text[:80]!r} is no Boolean."
            )
        entry = {**entry, **given, "special": given.get("special", False) or text in named}
    return entry
