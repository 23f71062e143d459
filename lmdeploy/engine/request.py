"""④ Converts the options of a GenerationConfig into the fields of a C++ request."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from lmdeploy.base.checks import OptionError

if TYPE_CHECKING:
    from lmdeploy.chat.tokenizer import Tokenizer
    from lmdeploy.config.generation import GenerationConfig


def check_token_ids(config: GenerationConfig, vocab_size: int) -> None:
    """Raise OptionError if an option contains a token id that the model does not have."""
    for name in ("stop_token_ids", "bad_token_ids", "logit_bias"):
        for token in getattr(config, name) or ():
            if token >= vocab_size:
                reason = f"contains token id {token}. Ids must be 0 to {vocab_size - 1}."
                raise OptionError(name, reason)


def sort_stop_words(
    words: list[str], tokenizer: Tokenizer
) -> tuple[list[int], list[str], list[str]]:
    """Sort stop words by the special tokens in them.

    Returns the ids of words that are one special token, the words without special tokens, and the
    words that contain special tokens among others.
    """
    special_ids, plain, special = [], [], []
    for word in words:
        ids = tokenizer.encode(word, add_special=False)
        if not any(map(tokenizer.is_special, ids)):
            plain.append(word)
        elif len(ids) == 1:
            special_ids += ids
        else:
            special.append(word)
    return special_ids, plain, special


def bad_sequences(config: GenerationConfig, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token sequences that bad_words and bad_token_ids forbid.

    A word is forbidden both with and without a space before it.
    """
    sequences = [[i] for i in config.bad_token_ids or []]
    for word in config.bad_words or []:
        for spelling in (word, " " + word):
            ids = tokenizer.encode(spelling, add_special=False)
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences


def is_constrained(config: GenerationConfig) -> bool:
    """Return whether response_format restricts the response by a grammar."""
    return config.response_format is not None and config.response_format.get("type") != "text"


def set_sampling(request: Any, config: GenerationConfig, *, index: int) -> None:
    """Set the sampling fields of `request`. `index` is that of `AsyncEngine.submit`."""
    request.do_sample = config.do_sample and config.temperature > 0
    request.temperature = config.temperature or 1.0
    for name in (
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        setattr(request, name, getattr(config, name))
    seed = secrets.randbits(64) if config.random_seed is None else config.random_seed
    request.seed = (seed + index) % 2**64
    request.logit_bias = list((config.logit_bias or {}).items())
