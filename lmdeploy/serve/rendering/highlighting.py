"""Splits code into spans: keywords, strings, comments and others that the page colors."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token, _TokenType
from pygments.util import ClassNotFound

from lmdeploy.serve.rendering.limits import part_limit

MAX_HIGHLIGHTED_CHARS = 20_000
# The first parent of a token's type that is here names its kind. Other tokens are plain text.
_KINDS: dict[_TokenType, str] = {
    Token.Keyword: "keyword",
    Token.Operator.Word: "keyword",
    Token.Name.Tag: "keyword",
    Token.Name.Builtin: "name",
    Token.Name.Function: "name",
    Token.Name.Class: "name",
    Token.Name.Decorator: "name",
    Token.Name.Attribute: "name",
    Token.Literal.String: "string",
    Token.Literal.Number: "number",
    Token.Name.Constant: "number",
    Token.Comment: "comment",
    Token.Generic.Inserted: "inserted",
    Token.Generic.Deleted: "deleted",
    Token.Generic.Heading: "keyword",
    Token.Generic.Subheading: "keyword",
}
CODE_KINDS = frozenset(_KINDS.values())


def highlighted(code: str, language: str) -> list[Any]:
    """Return strings and nodes ["span", {"kind": one of CODE_KINDS}, text]; their texts are `code`.

    The code stays one string if the language is unknown, or the code is long or slow.
    """
    lexer = _lexer(language) if len(code) <= MAX_HIGHLIGHTED_CHARS else None
    if lexer is None:
        return [code]
    try:
        with part_limit():
            tokens = [(_kind(kind), text) for _, kind, text in lexer.get_tokens_unprocessed(code)]
    except Exception:  # it takes too long, or the lexer has a fault
        return [code]
    parts = [
        (kind, "".join(text for _, text in run)) for kind, run in groupby(tokens, itemgetter(0))
    ]
    if "".join(text for _, text in parts) != code:  # a faulty lexer must not change the code
        return [code]
    return [["span", {"kind": kind}, text] if kind else text for kind, text in parts]


def _kind(token: _TokenType) -> str:
    while token is not None and token not in _KINDS:
        token = token.parent
    return "" if token is None else _KINDS[token]


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language) if language else None
    except ClassNotFound:
        return None
