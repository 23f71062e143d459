"""Parses Markdown into a tree of elements.

The tree is data and not HTML, so a response of a model can never become a script.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.token import Token
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.texmath.index import RuleDictType, make_block_func, make_inline_func

from lmdeploy.serve.rendering.formulas import formula
from lmdeploy.serve.rendering.highlighting import highlighted

MAX_MARKDOWN_NODES = 20_000  # rows of a table without cells are filled up, so a text can grow
_MAX_DEPTH = 32
_SAFE_LINK = re.compile(r"(https?://|mailto:)", re.IGNORECASE)
_ALIGNED = re.compile(r"text-align:(left|center|right)")
# Rule, begin, and what a formula is. It has no empty line, and nothing follows a block in its line.
_INLINE_FORMULAS = (
    ("math_$", "$", r"^\$((?![\s$])[^$]*?[^\s$\\])\$(?!\d)"),
    ("math_$$", "$$", r"^\$\$([^$]+)\$\$"),
    ("math_(", "\\(", r"^\\\(((?:(?!\\\)).)+)\\\)"),
    ("math_[", "\\[", r"^\\\[((?:(?!\\\]).)+)\\\]"),
)
_BLOCK_FORMULAS = (
    ("math_$$", "$$", r"^\$\$((?:(?!\n\s*\n)[^$])+)\$\$[ \t]*$"),
    ("math_[", "\\[", r"^\\\[((?:(?!\\\]|\n\s*\n).)+)\\\][ \t]*$"),
)
_INTERRUPTS: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list"]}

Node = str | list[Any]  # text, or [tag, attributes, *nodes]


class TooManyNodesError(ValueError):
    """A text has more than MAX_MARKDOWN_NODES elements."""


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.validateLink = lambda url: _SAFE_LINK.match(url) is not None  # type: ignore[method-assign]
    _add_formulas(parser)
    return parser


def _add_formulas(parser: MarkdownIt) -> None:
    r"""Read formulas in $…$, $$…$$, \(…\), \[…\] and in the environments of amsmath.

    A dollar before a space or a digit ends no formula: "$5 and $10".
    """
    for name, tag, pattern in _INLINE_FORMULAS:
        rule = make_inline_func(_formula_rule(tag, pattern))
        parser.inline.ruler.before("escape", name, rule)
    for name, tag, pattern in _BLOCK_FORMULAS:
        parser.block.ruler.before(
            "fence", name, make_block_func(_formula_rule(tag, pattern)), _INTERRUPTS
        )
    parser.use(amsmath_plugin)


def _formula_rule(tag: str, pattern: str) -> RuleDictType:
    expression = re.compile(pattern, re.DOTALL | re.MULTILINE)
    return {"name": "math", "tag": tag, "rex": expression, "tmpl": ""}


def markdown_nodes(text: str) -> list[Node]:
    """Parse CommonMark with tables, strikethrough, highlighted code and formulas.

    HTML stays text. Links with another scheme than http, https and mailto stay text. Images become
    links, so that showing a response sends no request.

    Raises TooManyNodesError if the text has more than MAX_MARKDOWN_NODES elements.
    """
    nodes: list[Node] = []
    stack: list[list[Any]] = [nodes]
    count = 0
    for token in _tokens(_parser().parse(text)):
        count += 1
        if token.nesting < 0:
            stack.pop()
        elif token.nesting == 0:
            leaf = _leaf(token)
            count += _size(leaf) - 1
            stack[-1].append(leaf)
        elif token.hidden or len(stack) > _MAX_DEPTH:  # its content joins the parent
            stack.append(stack[-1])
        else:
            node: list[Any] = [token.tag, _attributes(token)]
            stack[-1].append(node)
            stack.append(node)
        if count > MAX_MARKDOWN_NODES:
            raise TooManyNodesError
    return nodes


def _size(node: Node) -> int:
    return 1 if isinstance(node, str) else 1 + sum(map(_size, node[2:]))


def _tokens(blocks: list[Token]) -> Iterator[Token]:
    for block in blocks:
        if block.type == "inline":
            yield from block.children or ()
        else:
            yield block


def _leaf(token: Token) -> Node:
    """Return the node of a token without an end: text, code, a formula, an image or a rule."""
    if token.type in ("fence", "code_block"):
        words = token.info.split()
        language = words[0] if words else ""
        return [
            "pre",
            {"language": language} if words else {},
            *highlighted(token.content, language),
        ]
    if token.type == "code_inline":
        return ["code", {}, token.content]
    if token.tag == "math":
        return formula(token.content, is_block=token.block or token.markup in ("$$", "\\["))
    if token.type == "image":
        link = str(token.attrs.get("src", ""))
        return ["a", {"href": link} if link else {}, token.content or link]
    if token.type == "softbreak":
        return "\n"
    return [token.tag, {}] if token.tag else token.content


def _attributes(token: Token) -> dict[str, str]:
    names = ("href", "title", "start")
    found = {k: str(v) for k, v in token.attrs.items() if k in names and v != ""}
    aligned = _ALIGNED.match(str(token.attrs.get("style", "")))
    if aligned is not None:
        found["align"] = aligned[1]
    return found
