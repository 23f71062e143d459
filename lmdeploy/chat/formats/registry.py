"""The registry of reasoning and tool-call parsers. A new parser needs a file and a line here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lmdeploy.chat.formats.base import ChatFormat, ModelInfo, Parser
from lmdeploy.chat.formats.harmony.format import Harmony
from lmdeploy.chat.formats.text import TextFormat

logger = logging.getLogger("lmdeploy")

# Without a flag, the first parser that matches the model is used.
_HARMONY = Harmony()
REASONING_PARSERS: tuple[Parser, ...] = (_HARMONY,)
TOOL_CALL_PARSERS: tuple[Parser, ...] = (_HARMONY,)


def parser_names(parsers: Sequence[Parser]) -> tuple[str, ...]:
    """Return the names that a flag accepts."""
    return tuple(name for parser in parsers for name in parser.names)


def choose_format(
    model: ModelInfo,
    *,
    reasoning_parser: str | None = None,
    tool_call_parser: str | None = None,
) -> ChatFormat:
    """Return the chat format of a model.

    Args:
        reasoning_parser: name of the reasoning part. None uses the default for the model.
        tool_call_parser: name of the tool-call part. None uses the default for the model.

    Raise ValueError for an unknown name, and if a named part does not support the model or the
    other part. A default part that is not supported is skipped with a warning.
    """
    chat_format: ChatFormat = TextFormat(model.tokenizer)
    found: list[Parser] = []
    for flag, name, parsers in (
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
        ("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS),
    ):
        if name is None:
            found += [parser for parser in parsers if parser.matches(model)][:1]
            continue
        try:
            chat_format = _find(parsers, name).extend(chat_format, model)
        except ValueError as error:
            raise ValueError(f"{error} Change or remove {flag}.") from None
    for parser in dict.fromkeys(found):
        try:
            chat_format = parser.extend(chat_format, model)
        except ValueError as error:
            logger.warning("%s The parser %s is not used.", error, parser.names[0])
    return chat_format


def _find(parsers: Sequence[Parser], name: str) -> Parser:
    for parser in parsers:
        if name in parser.names:
            return parser
    raise ValueError(f"There is no parser {name!r}, only {', '.join(parser_names(parsers))}.")
