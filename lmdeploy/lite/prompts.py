"""Reads the prompts of a calibration: a text, or a JSONL file with one prompt per line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmdeploy.lite.divergence import read_text
from lmdeploy.lite.prompt_engine import OpenModel

JSONL_SUFFIX = ".jsonl"
_FIELDS = ("text", "prompt", "messages")

# A text, or the messages of a chat.
Prompt = str | list[dict[str, Any]]


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a UTF-8 file: one per line of a .jsonl file, else the whole text.

    A line is an object with `text`, `prompt` or `messages`, or a string. Empty lines are skipped.

    Raises:
        ValueError: if the file cannot be read or a line is something else. The error has its
            number.
    """
    text = read_text(path)
    if path.suffix.lower() != JSONL_SUFFIX:
        return [text]
    lines = text.split("\n")  # JSON may contain the other line separators of str.splitlines
    return [
        _prompt(line, where=f"{path.name}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _prompt(line: str, *, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: it is not JSON. Write one JSON object per line.") from error
    if isinstance(value, dict):
        found = [value[name] for name in _FIELDS if name in value]
        value = found[0] if len(found) == 1 else None
    if isinstance(value, str):
        return value
    if isinstance(value, list) and _are_messages(value):
        return value
    raise ValueError(
        f"{where}: it has no prompt. It must be a string, or an object with one of "
        f"{', '.join(_FIELDS)}."
    )


def _are_messages(values: list[Any]) -> bool:
    return len(values) > 0 and all(
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
        for value in values
    )


def encode_prompts(model: OpenModel, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the token ids of each prompt. The model's chat template renders messages.

    Raises:
        ValueError: if the model has no chat template, or if the template rejects messages.
    """
    tokenizer, template = model.loaded.tokenizer, model.loaded.chat_template
    encoded = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            if template is None:
                raise ValueError(
                    "The model has no chat template for messages. Write prompts as text (--text)."
                )
            prompt = template.render(prompt, add_generation_prompt=False)
        encoded.append(list(tokenizer.encode(prompt, add_special=False)))
    return encoded


def cut_prompts(
    prompts: Sequence[Sequence[int]], *, context: int, max_tokens: int
) -> list[list[int]]:
    """Cut prompts into pieces of at most `context` tokens, and stop after `max_tokens`."""
    pieces: list[list[int]] = []
    left = max_tokens
    for ids in prompts:
        kept = ids[:left]
        left -= len(kept)
        pieces += [list(kept[i : i + context]) for i in range(0, len(kept), context)]
    return pieces
