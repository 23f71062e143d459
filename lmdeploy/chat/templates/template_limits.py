"""A Jinja environment for untrusted chat templates, with bounds on time and memory.

Jinja's immutable sandbox prevents access to Python. Inside `limits()`, one rendering has
MAX_SECONDS of thread time. The time is checked in every iteration of a loop, and in every call,
comparison, item lookup, filter and test. A value has at most the size MAX_SIZE (see `size_of`). All
values together have at most MAX_TOTAL. Integers have at most MAX_INTEGER_BITS. Exceeding a limit
raises TemplateLimitError.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_environment
from jinja2.exceptions import TemplateRuntimeError
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 10.0
MAX_SIZE = 64 << 20
MAX_TOTAL = 512 << 20
MAX_INTEGER_BITS = 64  # larger integers can have equal hashes, which make sets and dicts slow
MAX_SEARCH = 1 << 30  # characters of a text times those of a needle that str searches naively
MAX_WIDTH = 1 << 16
MAX_PRECISION = 300

_ITEM = 64  # an item of a container counts as this many characters
# A template cannot spell these names, since identifiers do not begin with a digit.
_TICK, _JOIN, _CHECK, _COUNT = "0tick", "0join", "0check", "0count"
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
# Arguments that compiled templates pass to Environment.call in loops and blocks.
_OF_JINJA = ("_loop_vars", "_block_vars")
# Filters that are slow on long texts or have unbounded results. No chat template uses them.
_REMOVED_FILTERS = ("batch", "pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr")
# Widths in `%` formats, as digits or `*`, and the fields of str.format.
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")
_BRACES = re.compile(r"\{([^{}]*)(\{?)")


class TemplateLimitError(TemplateRuntimeError):
    """A template exceeds a limit."""


class _Budget(threading.local):
    """The remaining time and memory of the rendering in this thread."""

    end = float("inf")
    left = MAX_TOTAL


_budget = _Budget()


@contextmanager
def limits() -> Iterator[None]:
    """Limit the rendering inside the block."""
    _budget.end, _budget.left = time.thread_time() + MAX_SECONDS, MAX_TOTAL
    try:
        yield
    finally:
        _budget.end, _budget.left = float("inf"), MAX_TOTAL


def size_of(value: Any) -> int:
    """Return the characters of texts plus _ITEM per item of containers, each time they occur.

    The walk ends soon after MAX_SIZE is passed.
    """
    size, rest = 0, [value]
    while rest and size <= MAX_SIZE:
        each = rest.pop()
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, dict):
            size += 2 * _ITEM * len(each)
            rest += [*each, *each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            size += _ITEM * len(each)
            rest += each
    return size


def bounded(function: Any, name: str = "") -> Callable[..., Any]:
    """Wrap a filter or test so that it checks time, arguments and result."""
    skipped = int(hasattr(function, "jinja_pass_arg"))  # an environment or context comes first
    check = _FILTERS.get(name)

    @wraps(function)
    def bounded_function(*args: Any, **kwargs: Any) -> Any:
        _tick()
        if check is not None:
            check(*args[skipped:], **kwargs)
        return _check(function(*args, **kwargs))

    return bounded_function


def _concat(pieces: Iterable[str]) -> str:
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        _check_size(size)
        kept.append(piece)
    return str(_count("".join(kept)))


def _separated(separator: str, values: Iterable[Any]) -> Iterator[Any]:
    for index, value in enumerate(values):
        _tick()
        if index:
            yield separator
        yield value


@pass_environment
def _join_filter(environment: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    """Join like Jinja's filter, with a check of the size after each item."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return _concat(_separated(str(d), map(str, value)))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An immutable sandbox with the limits of this module."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    concat = staticmethod(_concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.globals |= {_TICK: _tick, _JOIN: _join, _CHECK: _check, _COUNT: _count}
        self.globals["namespace"] = _Names
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters["join"] = _join_filter
        self.filters |= {name: bounded(each, name) for name, each in self.filters.items()}
        self.tests |= {name: bounded(each) for name, each in self.tests.items()}

    def _parse(self, source: str, *names: str | None) -> nodes.Template:
        template = super()._parse(source, *names)
        _AddChecks().visit(template)
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow only _METHODS of built-in types."""
        if isinstance(obj, _BUILT_IN) and attr not in _METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up an item. Filters call this method for each part of `attribute`."""
        _tick()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator unless its result would be too large."""
        _check_operands(operator, left=left, right=right)
        return _check(super().call_binop(context, operator, left, right))

    def call(self, context: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function unless its result would be too large."""
        _tick()
        method = getattr(args[0], "__wrapped__", args[0])  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "join":
                return _concat(_separated(owner, *args[1:]))
            if name in _METHOD_CHECKS:
                given = {key: kwargs[key] for key in kwargs if key not in _OF_JINJA}
                _METHOD_CHECKS[name](owner, *args[1:], **given)
        return _check(super().call(context, *args, **kwargs))


class _Names(Namespace):
    """`namespace()`. Its string form hides the contents, whose size is not bounded."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _AddChecks(NodeTransformer):
    """Adds a tick to every repeated body, and checks to expressions that make large values."""

    def _add_tick(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call(_TICK, [], node=node), lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_call(_TICK, [], node=node), node.test, lineno=node.lineno)
        return node

    def _add_check(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _call(_CHECK, [node], node=node)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        _count(node.value)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)  # `in` and == may walk the whole value
        return nodes.And(_call(_TICK, [], node=node), node, lineno=node.lineno)

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _add_tick
    visit_List = visit_Dict = visit_Tuple = _add_check

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(_JOIN, node.nodes, node=node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        # A slice is no larger than its source, so that only the total grows.
        return _call(_COUNT, [node], node=node) if isinstance(node.arg, nodes.Slice) else node


def _call(name: str, arguments: list[Any], *, node: nodes.Node) -> nodes.Call:
    function = nodes.Name(name, "load", lineno=node.lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=node.lineno)


def _tick() -> bool:
    if time.thread_time() > _budget.end:
        raise TemplateLimitError(f"it runs for more than {MAX_SECONDS:g} s")
    return True


def _check(value: Any) -> Any:
    """Check the size of a new value. Its items were counted when they were made."""
    if isinstance(value, str | bytes | list | tuple | dict | set | frozenset):
        _check_size(size_of(value))
    return _count(value)


def _count(value: Any) -> Any:
    if isinstance(value, int):
        _check_bits(value.bit_length())
    if isinstance(value, str | bytes | list | tuple | dict | set | frozenset):
        _budget.left -= len(value) * (1 if isinstance(value, str | bytes) else _ITEM)
        if _budget.left < 0:
            raise TemplateLimitError(f"it creates more than {MAX_TOTAL} characters in all")
    return value


def _join(*values: Any) -> str:
    return _concat(str(value) for value in values)


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(
            f"it creates a value of {size} characters (an item counts {_ITEM}), but the limit is "
            f"{MAX_SIZE}"
        )


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise TemplateLimitError(
            f"it creates an integer of {bits} bits, but the limit is {MAX_INTEGER_BITS}"
        )


def _check_operands(operator: str, *, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = max(left.bit_length(), right.bit_length())
        if operator in ("*", "**"):
            power = left.bit_length() * max(right, 1)
            bits = power if operator == "**" else left.bit_length() + right.bit_length()
        _check_bits(bits)
    elif operator == "*":
        for times, value in ((left, right), (right, left)):
            if isinstance(times, int):
                items = _ITEM * len(value) if isinstance(value, list | tuple) else 0
                _check_size(max(times, 0) * (size_of(value) + items))
    elif operator == "%" and isinstance(left, str):
        _check_percent(left, *(right if isinstance(right, tuple) else (right,)))
    elif operator == "+":
        _check_size(size_of(left) + size_of(right))


# --- checks of arguments, with the parameters of the filter or method ----------------------------


def _check_width(_: Any, width: Any = 0, *__: Any) -> None:
    if isinstance(width, int) and width > MAX_WIDTH:
        raise TemplateLimitError(f"it uses a width of {width}, but the limit is {MAX_WIDTH}")


def _check_percent(pattern: Any, *values: Any, **named: Any) -> None:
    values = (*values, *named.values())
    widest = max((value for value in values if isinstance(value, int)), default=0)
    found = _PERCENT.findall(str(pattern).replace("%%", ""))
    widths = [[widest if w == "*" else int(w[:9]) for w in each if w] for each in found]
    _check_format(pattern, values, widths=widths)


def _check_braces(pattern: Any, *values: Any, **named: Any) -> None:
    found = _BRACES.findall(str(pattern).replace("{{", "").replace("}}", ""))
    if any(nested for _, nested in found):
        raise TemplateLimitError("it has a field inside a field of str.format")
    widths = [[int(digits[:9]) for digits in re.findall(r"\d+", field)] for field, _ in found]
    _check_format(pattern, (*values, *named.values()), widths=widths)


def _check_format(pattern: Any, values: tuple[Any, ...], *, widths: list[list[int]]) -> None:
    """Check a result in which each field has these widths and may show the longest value."""
    for each in widths:
        for width in each:
            _check_width(None, width)
    longest = max(map(size_of, values), default=0)
    _check_size(len(str(pattern)) + sum(max(sum(each), 0) + longest for each in widths))


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_indent(s: Any, width: Any = 4, first: Any = False, blank: Any = False) -> None:
    _check_width(s, width)
    step = len(width) if isinstance(width, str) else max(int(width), 0)
    _check_size(size_of(s) + (str(s).count("\n") + 1) * step)


def _check_search(text: Any, needle: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(needle, str) and len(str(text)) * len(needle) > MAX_SEARCH:
        raise TemplateLimitError(
            f"it searches {len(str(text))} characters for {len(needle)}, but the product must be "
            f"at most {MAX_SEARCH}"
        )


def _check_int(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_INTEGER_BITS // 3:
        limit = MAX_INTEGER_BITS // 3
        raise TemplateLimitError(
            f"it converts {len(value)} characters by int, but the limit is {limit}"
        )


def _check_round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    if isinstance(precision, int) and abs(precision) > MAX_PRECISION:  # it computes 10**precision
        raise TemplateLimitError(
            f"it rounds to {precision} digits, but the limit is {MAX_PRECISION}"
        )


def _check_sum(iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):
        raise TemplateLimitError(
            f"it uses sum with a start of type {type(start).__name__}, which must be a number"
        )


_FILTERS: dict[str, Callable[..., None]] = {
    "center": _check_width,
    "format": _check_percent,
    "indent": _check_indent,
    "int": _check_int,
    "replace": _check_replace,
    "round": _check_round,
    "sum": _check_sum,
    "trim": _check_search,
}
_METHOD_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_width),
    **dict.fromkeys(("format", "format_map"), _check_braces),
    "replace": _check_replace,
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _check_search),
    **dict.fromkeys(("rfind", "rindex", "rsplit", "rpartition"), _check_search),
}
