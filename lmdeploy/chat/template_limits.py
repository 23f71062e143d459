"""② The jinja2 environment of chat templates, which come from downloads.

jinja2's immutable sandbox keeps templates from Python; what it lacks is a bound on time and memory.
Inside `metered()` a rendering has MAX_SECONDS of its thread's time, looked at with every turn of a
loop and every call of a macro or block; no value that an expression makes is larger than MAX_SIZE,
counted as in `size_of`, and all together not than MAX_TOTAL; integers have MAX_INTEGER_BITS. More
raises TemplateLimitError. Of texts, numbers and containers only the methods of _METHODS are there.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 10.0
MAX_SIZE = 64 << 20
MAX_TOTAL = 512 << 20
MAX_INTEGER_BITS = 4096
MAX_WIDTH = 1 << 16

_ITEM = 64  # what an item of a container counts, in characters: about what it takes
# No template can spell them: names of the language do not begin with a digit.
_TICK, _JOIN, _MADE, _COUNTED = "0tick", "0join", "0made", "0counted"
_BUILT_IN = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, range)
_METHODS = frozenset(
    {
        *("split", "rsplit", "splitlines", "partition", "rpartition", "join", "replace", "format"),
        *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "swapcase", "casefold"),
        *("lower", "upper", "title", "capitalize", "center", "ljust", "rjust", "zfill"),
        *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "is_integer"),
        *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric"),
        *("isspace", "istitle", "isupper", "items", "keys", "values", "get", "copy"),
    }
)
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill"})
_LEFT_OUT = ("pprint", "urlize", "xmlattr")  # of filters: slow on long texts, of no use here
# A width of `%`: in digits, or `*` for a value. Doubled signs are taken out before.
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")
_BRACES = re.compile(r"\{([^{}]*)(\{?)")
_NUMBER = re.compile(r"\d+")


Given = Mapping[str, Any]


class TemplateLimitError(TemplateRuntimeError):
    """A template wants more time or memory than one may have."""


class _Meter(threading.local):
    """Of the rendering that this thread is at."""

    end = float("inf")
    left = MAX_TOTAL


_meter = _Meter()


@contextmanager
def metered() -> Iterator[None]:
    """One rendering, whose time and memory begin to count."""
    _meter.end, _meter.left = time.thread_time() + MAX_SECONDS, MAX_TOTAL
    try:
        yield
    finally:
        _meter.end, _meter.left = float("inf"), MAX_TOTAL


def size_of(value: Any, *, most: int = MAX_SIZE) -> int:
    """Characters of texts and _ITEM for each item of containers, those inside counted each time
    they are there; little more than `most` where it is more.
    """
    if isinstance(value, str | bytes):
        return len(value)
    size, left = 0, [value]
    while left and size <= most:
        each = left.pop()
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, dict):
            size += 2 * _ITEM * len(each)
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            size += _ITEM * len(each)
            left += each
    return size


def _concat(pieces: Iterable[str]) -> str:
    """`"".join`, for blocks and macros."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        kept.append(piece)
    return str(_counted("".join(kept)))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """As its base, with the bounds of this module."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    concat = staticmethod(_concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.globals |= {_TICK: _tick, _JOIN: _join_values, _MADE: _made, _COUNTED: _counted}
        self.globals["namespace"] = _Names
        for name in _LEFT_OUT:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _metered_filter(name, function)

    def _parse(self, source: str, *names: str | None) -> nodes.Template:
        template = super()._parse(source, *names)
        _rewrite_fields(template)
        bodies: tuple[type[nodes.Stmt], ...] = (
            nodes.For,
            nodes.Macro,
            nodes.CallBlock,
            nodes.Block,
        )
        for node in list(template.find_all(bodies)):
            body: list[nodes.Node] = node.body  # type: ignore[attr-defined]
            body.insert(0, nodes.ExprStmt(_call(_TICK, [], at=node), lineno=node.lineno))
            if isinstance(node, nodes.For) and node.test is not None:
                tick = _call(_TICK, [], at=node)
                node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return template

    def is_safe_attribute(self, obj: Any, *attribute: Any) -> bool:
        """Of built-in types the methods of _METHODS alone. `attribute`: name and value."""
        if isinstance(obj, _BUILT_IN) and attribute[0] not in _METHODS:
            return False
        return super().is_safe_attribute(obj, *attribute)

    def call_binop(self, context: Any, *operation: Any) -> Any:
        """The operator's result, unless it would be too large. `operation`: sign, left, right."""
        _check_operands(*operation)
        return _made(super().call_binop(context, *operation))

    def call(self, context: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The call's result; methods of texts that make large ones are checked before."""
        function, *given = args
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _WIDE_METHODS:
                _check_width(*given[:1])
            elif name == "replace":
                _check_replace(owner, *given[:2])
            elif name == "join":
                _check_join(owner, *given[:1])
            elif name in ("format", "format_map"):
                _check_braces(owner, *given, *kwargs.values())
        return _made(super().call(context, *args, **kwargs))


class _Names(Namespace):
    """`namespace()`, whose text does not show what it holds: that could be anything."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _call(name: str, arguments: list[Any], *, at: nodes.Node) -> nodes.Call:
    called = nodes.Name(name, "load", lineno=at.lineno)
    return nodes.Call(called, arguments, [], None, None, lineno=at.lineno)


def _rewrite_fields(node: nodes.Node) -> None:
    """Puts calls of _made and _join_values around what makes containers, slices and texts."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_rewritten(item) for item in value])
        else:
            setattr(node, field, _rewritten(value))


def _rewritten(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _rewrite_fields(value)
    if isinstance(value, nodes.Concat):
        return _call(_JOIN, value.nodes, at=value)
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
        return _call(_COUNTED, [value], at=value)  # no larger than what it is of
    is_literal = isinstance(value, nodes.List | nodes.Dict)
    is_tuple = isinstance(value, nodes.Tuple) and value.ctx == "load"
    return _call(_MADE, [value], at=value) if is_literal or is_tuple else value


def _tick() -> bool:
    if time.thread_time() > _meter.end:
        raise TemplateLimitError(f"it runs for more than {MAX_SECONDS:g} s")
    return True


def _made(value: Any) -> Any:
    """The value, whose whole size is checked; what it holds was counted when that was made."""
    _check_size(size_of(value))
    return _counted(value)


def _counted(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple | dict | set | frozenset):
        _meter.left -= len(value) * (1 if isinstance(value, str | bytes) else _ITEM)
        if _meter.left < 0:
            raise TemplateLimitError(f"it makes more than {MAX_TOTAL} characters in all")
    return value


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(
            f"got a value of {size} characters or more (an item counts {_ITEM}), wanted at most "
            f"{MAX_SIZE}"
        )


def _join_values(*values: Any) -> str:
    return _concat(str(value) for value in values)


def _check_operands(operator: str, *operands: Any) -> None:
    left, right = operands
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if operator == "*":
            bits = left.bit_length() + right.bit_length()
        elif operator == "**":
            bits = left.bit_length() * max(right, 1)
        if bits > MAX_INTEGER_BITS:
            raise TemplateLimitError(
                f"got an integer of {bits} bits, wanted at most {MAX_INTEGER_BITS}"
            )
    elif operator == "*":
        for times, value in ((left, right), (right, left)):
            if isinstance(times, int):
                _check_size(max(times, 0) * (size_of(value) + _items_of(value)))
    elif operator == "%" and isinstance(left, str):
        _check_percent(left, *(right if isinstance(right, tuple) else (right,)))
    elif operator == "+":
        _check_size(size_of(left) + size_of(right))


def _items_of(value: Any) -> int:
    return _ITEM * len(value) if isinstance(value, list | tuple) else 0


def _check_width(width: Any = 0) -> None:
    if isinstance(width, int) and width > MAX_WIDTH:
        raise TemplateLimitError(f"got a width of {width}, wanted at most {MAX_WIDTH}")


def _check_percent(pattern: str, *values: Any) -> None:
    """Bounds what `%` makes: its widths, those among the values for `*`, and the values."""
    longest = max((size_of(value) for value in values), default=0)
    widest = max((value for value in values if isinstance(value, int)), default=0)
    size = len(pattern)
    for found in _PERCENT.finditer(pattern.replace("%%", "")):
        for width in found.groups():
            if width:
                number = widest if width == "*" else int(width[:9])
                _check_width(number)
                size += max(number, 0)
        size += longest
        _check_size(size)


def _check_braces(pattern: str, *values: Any) -> None:
    """The same for str.format. Widths that are fields themselves, `{:{}}`, are refused."""
    longest = max((size_of(value) for value in values), default=0)
    size = len(pattern)
    for field, nested in _BRACES.findall(pattern.replace("{{", "").replace("}}", "")):
        if nested:
            raise TemplateLimitError("got a field inside a field of str.format, wanted none")
        for digits in _NUMBER.findall(field):
            _check_width(int(digits[:9]))
            size += int(digits[:9])
        size += longest
        _check_size(size)


def _check_replace(text: str, *arguments: Any) -> None:
    old, new, *_ = (*map(str, arguments), "", "")
    _check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_join(separator: str, values: Any) -> None:
    if isinstance(values, list | tuple):  # what comes one by one was counted when it was made
        _check_size(size_of(values) + len(values) * len(separator))


def _check_indent(given: Given) -> None:
    width = given.get("width", 4)
    _check_width(width)
    step = len(width) if isinstance(width, str) else max(int(width), 0)
    _check_size(size_of(given["s"]) + (str(given["s"]).count("\n") + 1) * step)


def _check_wordwrap(given: Given) -> None:
    _check_size(size_of(given["s"]) * max(1, size_of(given.get("wrapstring"))))


def _check_int(given: Given) -> None:
    text, most = given["value"], MAX_INTEGER_BITS // 4
    if isinstance(text, str) and len(text) > most:
        raise TemplateLimitError(f"int: got {len(text)} characters, wanted at most {most}")


def _check_sum(given: Given) -> None:
    start = given.get("start", 0)
    if not isinstance(start, int | float):
        raise TemplateLimitError(f"sum: got a start of {type(start).__name__}, wanted a number")


# Name of a filter → names of its arguments and what bounds them.
_FILTER_CHECKS: dict[str, tuple[tuple[str, ...], Callable[[Given], None]]] = {
    "center": (("value", "width"), lambda given: _check_width(given.get("width"))),
    "batch": (("value", "linecount"), lambda given: _check_width(given.get("linecount"))),
    "slice": (("value", "slices"), lambda given: _check_width(given.get("slices"))),
    "indent": (("s", "width"), _check_indent),
    "wordwrap": (("s", "width", "break_long_words", "wrapstring"), _check_wordwrap),
    "replace": (
        ("s", "old", "new"),
        lambda given: _check_replace(str(given["s"]), given.get("old"), given.get("new")),
    ),
    "join": (("value", "d"), lambda given: _check_join(str(given.get("d", "")), given["value"])),
    "int": (("value",), _check_int),
    "sum": (("iterable", "attribute", "start"), _check_sum),
}


def _check_filter(name: str, args: tuple[Any, ...], *, kwargs: Given) -> None:
    if name == "format":
        _check_percent(str(args[0]), *args[1:], *kwargs.values())
    elif name in _FILTER_CHECKS:
        names, check = _FILTER_CHECKS[name]
        check({**dict(zip(names, args, strict=False)), **kwargs})


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_more = hasattr(function, "jinja_pass_arg")  # an environment or context comes first

    @wraps(function)
    def metered_filter(*args: Any, **kwargs: Any) -> Any:
        _tick()
        _check_filter(name, args[takes_more:], kwargs=kwargs)
        return _made(function(*args, **kwargs))

    return metered_filter
