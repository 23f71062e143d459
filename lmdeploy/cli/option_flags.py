"""Make the command-line flags of declared options (lmdeploy/config/option.py)."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import re
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lmdeploy.base.checks import flag_of
from lmdeploy.config.option import DeclaredOption, options_of

_UNSAID: tuple[Any, ...] = (None, [], dataclasses.MISSING)  # defaults that --help leaves out


def add_flags(
    parser: argparse._ActionsContainer,
    cls: type,
    *,
    title: str,
    names: Collection[str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> None:
    """Add the flags of the options of a dataclass. An argument's `dest` is the option's name.

    Args:
        title: the section of --help for options that name none.
        names: the options. None takes all.
        defaults: texts about the defaults by name. Flags that are not given are then None.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in _with_flags(cls, names):
        section = option.more.group or title
        group = groups.get(section) or groups.setdefault(
            section, parser.add_argument_group(section)
        )
        text = _help(option, cls, default=None if defaults is None else defaults[option.name])
        is_required = option.default is dataclasses.MISSING
        default = option.default if defaults is None and not is_required else None
        if option.kind is not bool:
            group.add_argument(
                *option.flags,
                dest=option.name,
                default=default,
                required=is_required,
                help=text,
                **_reader(option),
            )
        elif option.is_optional:
            action = argparse.BooleanOptionalAction
            group.add_argument(*option.flags, dest=option.name, action=action, help=text)
        else:
            _add_switches(group, option, text=text)


def flag_values(
    cls: type, args: argparse.Namespace, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the values of the flags that `add_flags` added, by the names of the options."""
    values = {option.name: getattr(args, option.name) for option in _with_flags(cls, names)}
    return {name: copy.copy(value) for name, value in values.items()}  # not the default itself


def names_of(cls: type, *groups: str) -> tuple[str, ...]:
    """Return the names of the options in sections of --help."""
    return tuple(o.name for o in options_of(cls).values() if o.more.group in groups)


def refused_flags(cls: type) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return the flags of unsupported options, with their number of values and accepted values."""
    found: dict[str, tuple[int, tuple[str, ...]]] = {}
    for option in options_of(cls).values():
        if option.more.unsupported is not None:
            is_switch = option.kind is bool
            accepted = () if is_switch or option.default is None else (str(option.default),)
            found.update(dict.fromkeys(option.flags, (0 if is_switch else 1, accepted)))
    return found


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object, as argparse's `type`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not a JSON object")
    return value


def _with_flags(cls: type, names: Collection[str] | None) -> list[DeclaredOption]:
    return [
        option
        for option in options_of(cls).values()
        if option.flags and not option.more.unsupported and (names is None or option.name in names)
    ]


def _add_switches(group: argparse._ArgumentGroup, option: DeclaredOption, *, text: str) -> None:
    """Add a flag that changes a Boolean option, or two that exclude each other."""
    target = group.add_mutually_exclusive_group() if len(option.flags) > 1 else group
    for flag in option.flags:
        turns_off = flag != flag_of(option.name)  # such as --disable-metrics of enable_metrics
        target.add_argument(
            flag,
            dest=option.name,
            action="store_false" if turns_off else "store_true",
            default=option.default,
            help=f"do not {text.partition('. ')[0]}" if turns_off else text,
        )


def _number(kind: type[int] | type[float], text: str) -> int | float:
    return kind(text)


def _named(kind: type[int] | type[float], name: str) -> Any:
    """Return a parser of numbers whose name argparse shows in errors."""
    parse = functools.partial(_number, kind)
    parse.__name__ = name  # type: ignore[attr-defined]
    return parse


WHOLE_NUMBER, NUMBER = _named(int, "whole number"), _named(float, "number")


def _reader(option: DeclaredOption) -> dict[str, Any]:
    """Return the arguments of add_argument that say how the values of a flag are read."""
    # The check of an option with `wanted` says more than argparse.
    kind, choices = option.kind, () if option.more.wanted else option.choices
    metavar = option.more.metavar or option.flags[0].strip("-").replace("-", "_").upper()
    found: dict[str, Any] = {"choices": choices} if choices else {"metavar": metavar}
    if typing.get_origin(kind) is list:
        found["nargs"] = option.more.num_values
        (kind,) = typing.get_args(kind)
    if typing.get_origin(kind) is dict:
        found["type"] = json_object
    elif kind in (int, float):
        found["type"] = WHOLE_NUMBER if kind is int else NUMBER
    elif kind is Path:
        found["type"] = Path
    return found


def _help(option: DeclaredOption, cls: type, *, default: str | None) -> str:
    """Return the text of --help: what the option is, its default, and what a change does."""
    if default is None and option.kind is not bool and option.default not in _UNSAID:
        default = str(option.default)
    what, _, more = option.meaning.partition(". ")
    what = what.removesuffix(".")
    if default is not None and "(default: " not in what:
        what += f" (default: {default})"
    if option.more.describe_values is not None:
        what += f": {option.more.describe_values()}"
    flags = {o.name: o.flags[0] for o in _with_flags(cls, None) if "_" in o.name}
    text = f"{what}. {more}" if more else what
    text = re.sub(r"\b\w+\b(?!\.\w)", lambda word: flags.get(word[0], word[0]), text)
    return text.replace("%", "%%")
