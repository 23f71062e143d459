"""Declare an option once, as a field of a dataclass: its type, default, bounds and meaning.

The type and the default are those of the field. `Annotated[int, Option(low=1)]` adds bounds, and
the docstring of the class says what the value is and what happens if it is changed. Checks, flags,
request fields, the reference pages and the identity of a KV store read the declaration:

    class EngineOptions:
        '''Options of an engine.

        Args:
            max_batch_size: most sequences in one step. More of them need more memory.
        '''

        max_batch_size: Annotated[int | None, Option(low=1, high=4096)] = None
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lmdeploy.base.checks import (
    OptionError,
    check_bool,
    check_choice,
    check_ids,
    check_int,
    check_number,
    check_strings,
    flag_of,
    refuse,
    show,
)

MAX_INT = 2**31 - 1
MAX_CHARS = 4096  # of a string in a list
_ENTRY = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.M)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """Says what the type and the default of a field leave open.

    Args:
        low, high: smallest and largest number. `high` also limits the items of a list.
        above: a number that is too small, instead of `low`.
        choices: the accepted values, or a function that returns them. A Literal needs none.
        check: raises OptionError for a wrong value. It replaces the check of the type.
        wanted: completes "It must be …" in the error, where the type says too little.
        unsupported: why every value except the default is refused.
        affects_kv: whether stored keys and values depend on it. `value` puts every value except the
            default into the identity of a KV store. `resolved` says that the identity has what the
            value becomes for a model.
        to_core: the C++ core has the value under the same name (`copy_to_core`).
        flags: the flags, instead of that of the name. None makes no flag.
        group: the section of the flag in --help. None takes that of the class.
        num_values: the number of values of the flag of a list, as argparse's nargs.
        metavar: stands for the value in --help.
        describe_values: returns a list of the values for --help. It may ask the C++ module.
    """

    low: float = -(2**31)
    high: float = MAX_INT
    above: float | None = None
    choices: tuple[Any, ...] | Callable[[], tuple[Any, ...]] = ()
    check: Callable[[Any], object] | None = None
    wanted: str | None = None
    unsupported: str | None = None
    affects_kv: Literal["value", "resolved"] | None = None
    to_core: bool = False
    flags: tuple[str, ...] | None = ()
    group: str | None = None
    num_values: int | str = "+"
    metavar: str | None = None
    describe_values: Callable[[], str] | None = None


@dataclasses.dataclass(frozen=True)
class DeclaredOption:
    """An option with the facts that its field and the docstring of its class state.

    `kinds` are the types except None. `default` is dataclasses.MISSING if a value is required.
    """

    name: str
    kinds: tuple[Any, ...]
    is_optional: bool
    default: Any
    meaning: str
    more: Option

    @property
    def kind(self) -> Any:
        """Return the type except None, or Any if there are several."""
        return self.kinds[0] if len(self.kinds) == 1 else Any

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the flags of the option. An unsupported one has the flags that are refused."""
        return () if self.more.flags is None else self.more.flags or (flag_of(self.name),)

    @property
    def choices(self) -> tuple[Any, ...]:
        """Return the accepted values except None, or nothing if they cannot be listed."""
        if typing.get_origin(self.kind) is Literal:
            return typing.get_args(self.kind)
        return self.more.choices() if callable(self.more.choices) else self.more.choices

    def check(self, value: Any, *, flag: str | None = None) -> None:
        """Raise OptionError if `value` is wrong. `flag` is named in the error."""
        name, kind, more = self.name, self.kind, self.more
        if more.unsupported is not None:
            self._check_unsupported(value)
        elif value is None and self.is_optional:
            pass
        elif more.check is not None:
            more.check(value)
        elif self.choices:
            choices = (None, *self.choices) if self.is_optional else self.choices
            check_choice(name, value, choices=choices, wanted=more.wanted, flag=flag)
        elif kind is bool:
            check_bool(name, value, flag=flag)
        elif kind is int:
            check_int(name, value, low=int(more.low), high=int(more.high), flag=flag)
        elif kind is float:
            low = more.low if more.above is None else more.above
            if check_number(name, value, wanted=(low, more.high), flag=flag) == more.above:
                raise refuse(name, value, wanted=f"a number above {low:g}", flag=flag)
        elif kind == list[int]:
            check_ids(name, value, max_items=int(more.high))
        elif kind == list[str]:
            check_strings(name, value, max_items=int(more.high), max_chars=MAX_CHARS, flag=flag)
        elif kind is str and (not isinstance(value, str) or not value):
            raise refuse(name, value, wanted=more.wanted or "a non-empty string", flag=flag)
        elif typing.get_origin(kind) is dict and not isinstance(value, dict):
            raise refuse(name, value, wanted=more.wanted or "a dict", flag=flag)

    def _check_unsupported(self, value: Any) -> None:
        if type(value) is not type(self.default) or value != self.default:
            reason = f"is {show(value)}, which is not supported: {self.more.unsupported}."
            raise OptionError(self.name, f"{reason} Leave it at {self.default!r}.")


@functools.cache
def options_of(cls: type) -> Mapping[str, DeclaredOption]:
    """Return the options of a dataclass by name, in order.

    Every field is one. Those without an `Option` have what their type says.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    entries = dict(_ENTRY.findall(inspect.cleandoc(cls.__doc__ or "")))
    found = {}
    for field in dataclasses.fields(cls):
        hint, more = hints[field.name], Option()
        if typing.get_origin(hint) is typing.Annotated:
            hint, more = typing.get_args(hint)
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = typing.get_args(hint) if is_union else (hint,)
        named = tuple(kind for kind in kinds if kind is not type(None))
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = DeclaredOption(
            name=field.name,
            kinds=named,
            is_optional=len(named) < len(kinds),
            default=default,
            meaning=" ".join(entries.get(field.name, "").split()),
            more=more,
        )
    return found


def check(config: Any, *, names_flags: bool = True) -> None:
    """Raise OptionError if a field of `config` is wrong by itself.

    `names_flags` is False if the values come from requests.
    """
    for name, option in options_of(config.__class__).items():
        flag = option.flags[0] if names_flags and option.flags else None
        option.check(getattr(config, name), flag=flag)


def copy_to_core(config: Any, target: Any) -> None:
    """Set the attributes of an object of the C++ core that have the names of options."""
    for name, option in options_of(config.__class__).items():
        if option.more.to_core:
            setattr(target, name, getattr(config, name))


def unsupported_defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of the unsupported options."""
    options = options_of(cls).values()
    return {o.name: o.default for o in options if o.more.unsupported is not None}
