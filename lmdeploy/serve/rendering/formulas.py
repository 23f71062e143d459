"""Converts formulas from LaTeX to nodes of MathML."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element

from lmdeploy.serve.rendering.limits import part_limit

MAX_FORMULA_CHARS = 4_000
MAX_FORMULA_DEPTH = 64
# Of MathML Core, without colors and without what moves a formula out of its place.
MATH_TAGS = frozenset(
    (
        *("math", "mrow", "mi", "mn", "mo", "ms", "mtext", "mspace", "mstyle", "mpadded"),
        *("msup", "msub", "msubsup", "mover", "munder", "munderover", "mmultiscripts"),
        *("mprescripts", "none", "mfrac", "msqrt", "mroot", "mtable", "mtr", "mtd"),
        *("mphantom", "menclose"),
    )
)
MATH_ATTRIBUTES = frozenset(
    (
        *("display", "displaystyle", "scriptlevel", "mathvariant", "linethickness", "notation"),
        *("stretchy", "fence", "form", "separator", "symmetric", "largeop", "movablelimits"),
        *("accent", "accentunder", "lspace", "rspace", "width", "minsize", "maxsize"),
        *("columnalign", "columnlines", "rowlines"),
    )
)
MATH_VALUE = re.compile(r"[a-z -]{1,64}|[+-]?\d{0,2}(\.\d{1,4})?(em|ex|px|pt|mu|in|cm|mm|pc|%)?")


def formula(latex: str, *, is_block: bool) -> list[Any]:
    """Return the node of a formula, or its source as code if it has a fault or is too large."""
    source = latex.strip()
    failed: list[Any] = ["code", {}, source]
    if len(source) > MAX_FORMULA_CHARS:
        return failed
    try:
        with part_limit():
            element = convert_to_element(source, display="block" if is_block else "inline")
            return _node(element, depth=0)
    except Exception:  # the library raises IndexError, StopIteration and others for wrong source
        return failed


def _node(element: Element, *, depth: int) -> list[Any]:
    if depth > MAX_FORMULA_DEPTH:
        raise ValueError("The formula is too deep.")
    tag = element.tag if element.tag in MATH_TAGS else "mrow"
    found = {k: v for k, v in element.attrib.items() if k in MATH_ATTRIBUTES}
    attributes = {k: v for k, v in found.items() if MATH_VALUE.fullmatch(v)}
    text = [unescape(element.text)] if element.text else []
    return [tag, attributes, *text, *(_node(child, depth=depth + 1) for child in element)]
