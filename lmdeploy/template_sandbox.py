"""② The jinja2 environment of chat templates, which come from downloads.

jinja2's immutable sandbox keeps templates from Python; what it lacks is a bound on time and memory.
Here one rendering has MAX_SECONDS of its thread's time, looked at with every turn of a loop and
every call of a macro. What operators, blocks and the filters and methods that multiply make has at
most MAX_CHARS characters, MAX_ITEMS items or MAX_INTEGER_BITS; more raises TemplateLimitError.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 10.0
MAX_CHARS = 64 << 20
MAX_ITEMS = 1 << 20
MAX_INTEGER_BITS = 4096
MAX_WIDTH = 1 << 16

# No template can spell them: names of the language do not begin with a digit.
_TICK, _JOIN = "0tick", "0join"
# Widths and precisions of six digits, in the formats of `%` and of str.format.
_LONG_PERCENT = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*\d{6,}")
_LONG_BRACES = re.compile(r"\{[^{}]*\d{6,}")
_NESTED_BRACES = re.compile(r"\{[^{}]*\{")
_LONG_NUMBER = re.compile(r"\d{6,}")
_WIDE_FILTERS = ("center", "indent", "wordwrap", "batch", "slice")
_WIDE_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})


class TemplateLimitError(TemplateRuntimeError):
    """A template wants more time or memory than one may have."""


def clock() -> Mapping[str, Any]:
    """Names for the context of one rendering, whose time begins now."""
    end = time.thread_time() + MAX_SECONDS

    def tick() -> None:
        if time.thread_time() > end:
            raise TemplateLimitError(f"it runs for more than {MAX_SECONDS:g} s")

    return {_TICK: tick, _JOIN: _join_values}


def bounded_concat(pieces: Iterable[str]) -> str:
    """`"".join`, of at most MAX_CHARS characters."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_CHARS:
            raise _too_many_chars()
        kept.append(piece)
    return "".join(kept)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """As its base, with the bounds of this module. Contexts need what clock() gives."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(bounded_concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_checked_value, **options)
        del self.globals["lipsum"], self.filters["pprint"]
        self.filters["string"] = _checked_string(self.filters["string"])
        for name in _WIDE_FILTERS:
            self.filters[name] = _narrow(self.filters[name])
        self.filters["format"] = _checked_format(self.filters["format"])
        self.filters["replace"] = _checked_replace(self.filters["replace"])
        self.filters["join"] = _checked_join(self.filters["join"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        bodies: tuple[type[nodes.Stmt], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
        for node in list(template.find_all(bodies)):
            body: list[nodes.Node] = node.body  # type: ignore[attr-defined]
            body.insert(0, _tick_at(node))
        _replace_joins(template)
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operator's result, unless it would be too large."""
        if operator == "+":
            _check_sum(left, right)
        elif operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            _check_percent(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The call's result; methods of texts that make large ones are checked before."""
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _WIDE_METHODS:
                _check_widths(args, kwargs)
            elif name == "replace":
                _check_replace(owner, *args[:2])
            elif name == "join" and args:
                args = (_checked_pieces(args[0], owner), *args[1:])
            elif name in ("format", "format_map"):
                _check_braces(owner, (*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)


def _call(name: str, arguments: list[nodes.Expr], *, at: nodes.Node) -> nodes.Call:
    called = nodes.Name(name, "load").set_lineno(at.lineno)
    call = nodes.Call(called, arguments, [], None, None)
    call.set_lineno(at.lineno)
    return call


def _tick_at(node: nodes.Node) -> nodes.Stmt:
    return nodes.ExprStmt(_call(_TICK, [], at=node), lineno=node.lineno)


def _replace_joins(node: nodes.Node) -> None:
    """`a ~ b` becomes a call of _join_values, whatever holds it."""
    for field, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, field, [_without_join(item) for item in value])
        else:
            setattr(node, field, _without_join(value))


def _without_join(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_joins(value)
    if not isinstance(value, nodes.Concat):
        return value
    return _call(_JOIN, value.nodes, at=value)


def _join_values(*values: Any) -> str:
    return bounded_concat(str(_checked_value(value)) for value in values)


def _checked_value(value: Any) -> Any:
    """The value, if its text is not too long: a list may hold one text a million times."""
    if not isinstance(value, list | tuple | dict):
        return value
    count = size = 0
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            left += each
        count += 1
        _check_size(str, size)
        _check_size(list, count + len(left))
    return value


def _too_many_chars() -> TemplateLimitError:
    return TemplateLimitError(f"it makes a text of more than {MAX_CHARS} characters")


def _check_size(kind: type, size: int) -> None:
    if kind is str:
        if size > MAX_CHARS:
            raise _too_many_chars()
    elif size > MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of more than {MAX_ITEMS} items")


def _check_sum(left: Any, right: Any) -> None:
    for kind in (str, list, tuple):
        if isinstance(left, kind) and isinstance(right, kind):
            _check_size(kind, len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    if not isinstance(right, int):
        return
    if isinstance(left, int):
        if left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
            raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")
        return
    for kind in (str, list, tuple):
        if isinstance(left, kind):
            _check_size(kind, len(left) * max(right, 0))


def _check_power(base: Any, exponent: Any) -> None:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and base.bit_length() * max(exponent, 0) > MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_INTEGER_BITS} bits")


def _check_percent(pattern: str, values: tuple[Any, ...]) -> None:
    """Refuses widths of six digits and more, in the pattern or, for `%*d`, among the values."""
    wide = "*" in pattern and any(isinstance(v, int) and _is_wide(v) for v in values)
    if wide or _LONG_PERCENT.search(pattern):
        raise _too_wide()
    _check_filled(pattern, values, fields=pattern.count("%"))


def _check_braces(pattern: str, values: tuple[Any, ...]) -> None:
    """The same for str.format, whose widths may be fields themselves: `{:{}}`."""
    nested = _NESTED_BRACES.search(pattern.replace("{{", ""))
    wide = nested and any(isinstance(v, int | str) and _is_wide(v) for v in values)
    if wide or _LONG_BRACES.search(pattern):
        raise _too_wide()
    _check_filled(pattern, values, fields=pattern.count("{"))


def _check_filled(pattern: str, values: tuple[Any, ...], *, fields: int) -> None:
    longest = max((len(v) for v in values if isinstance(v, str)), default=0)
    _check_size(str, len(pattern) + fields * longest)


def _too_wide() -> TemplateLimitError:
    return TemplateLimitError(f"format: wanted widths of at most {MAX_WIDTH}")


def _is_wide(value: int | str) -> bool:
    return abs(value) > MAX_WIDTH if isinstance(value, int) else bool(_LONG_NUMBER.search(value))


def _check_widths(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        size = len(value) if isinstance(value, str) else value
        if isinstance(size, int) and size > MAX_WIDTH:
            raise TemplateLimitError(f"got a width of {size}, wanted at most {MAX_WIDTH}")


def _check_replace(text: Any, old: Any = "", new: Any = "") -> None:
    text, old, new = str(text), str(old), str(new)
    _check_size(str, len(text) + text.count(old) * max(0, len(new) - len(old)))


def _checked_pieces(values: Any, separator: str) -> list[Any]:
    pieces, size = [], 0
    for value in values:
        size += len(value) if isinstance(value, str) else 1
        size += len(separator)
        pieces.append(_checked_value(value))
        _check_size(str, size)
        _check_size(list, len(pieces))
    return pieces


def _narrow(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes widths or counts: the value comes first, an environment before it."""

    @wraps(function)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        numbers = [value for value in args if isinstance(value, int)]
        _check_widths(numbers, kwargs)
        return function(*args, **kwargs)

    return narrow


def _checked_format(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_percent(str(value), (*args, *kwargs.values()))
        return function(value, *args, **kwargs)

    return checked


def _checked_string(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(value: Any) -> Any:
        return function(_checked_value(value))

    return checked


def _checked_replace(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(context: Any, text: Any, old: Any, new: Any, count: Any = None) -> Any:
        _check_replace(text, old, new)
        return function(context, text, old, new, count)

    return checked


def _checked_join(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        return function(context, _checked_pieces(value, str(d)), d, attribute)

    return checked
