"""The flags of the engine. Other flags of LMDeploy are rejected by name."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from lmdeploy.base.logs import LOG_LEVELS
from lmdeploy.cli.option_flags import add_flags, flag_values, json_object, refused_flags
from lmdeploy.config.engine import SPECULATIVE_ALGORITHMS, TurbomindEngineConfig
from lmdeploy.config.unsupported import unsupported_flags

UNSUPPORTED_FLAGS = unsupported_flags() | refused_flags(TurbomindEngineConfig)
FLAGS_WITHOUT_EFFECT = {
    "--eager-mode": "results with CUDA graphs and without are the same",
    "--language-model-only": "of a vision checkpoint, only the text part is loaded",
    "--disable-vision-encoder": "of a vision checkpoint, only the text part is loaded",
    "--trust-remote-code": "code of a checkpoint is never run",
}
_MIN_BEGINNING = 5  # characters, dashes included
_MAX_SUGGESTIONS = 3


class OneLineParser(argparse.ArgumentParser):
    """Reports errors in one line with exit status 2, and accepts no abbreviated flags."""

    model_commands: Sequence[str] = ()  # those that a user may forget before a model

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse `args` and reject unknown ones here, where the command's flags are known."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Print `message` and exit. If a command is missing, print the list of commands."""
        for action in self._actions:  # argparse has no public API for a parser's commands
            is_commands = isinstance(action, argparse._SubParsersAction)
            if is_commands and message.endswith(f"are required: {action.metavar}"):
                names = ", ".join(action.choices or ())
                fail(f"{self.prog} needs a command: {names}. --help describes them.")
        fail(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a choice. argparse has no public hook for the message about a wrong command."""
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        name = " ".join(str(value).split())[:80]
        near = difflib.get_close_matches(name, action.choices, n=1)
        nested = [
            f"{self.prog} {command} {name}"
            for command, parser in action.choices.items()
            for child in parser._actions
            if isinstance(child, argparse._SubParsersAction) and name in child.choices
        ]
        models = [f"{self.prog} {command} {name}" for command in self.model_commands]
        hints = nested or [f"{self.prog} {match}" for match in near] or models
        hint = f" Did you mean {' or '.join(hints)}?" if hints else ""
        commands = ", ".join(action.choices)
        self.error(f"{self.prog} has no command {name!r}. The commands are {commands}.{hint}")

    def _suggestion(self, unknown: Sequence[str]) -> str:
        flags = [
            flag
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
        ]
        given = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        near = [" or ".join(found) for text in given if (found := similar_flags(text, flags))]
        return f"; did you mean {', '.join(near)}?" if near else ""


def similar_flags(text: str, flags: Sequence[str]) -> list[str]:
    """Return the flags that begin with the text, contain its words, or are spelled like it."""
    given = "--" + text.strip("-").lower().replace("_", "-")
    words = set(given.split("-"))
    found: list[str] = []
    if len(given) >= _MIN_BEGINNING:
        found = [flag for flag in flags if flag.startswith(given)]
        found = found or [flag for flag in flags if words <= set(flag.split("-"))]
    if not 0 < len(found) <= _MAX_SUGGESTIONS:
        found = difflib.get_close_matches(given, flags, n=1)
    return [flag for flag in found if not _are_opposed(given, flag)]


def _are_opposed(first: str, second: str) -> bool:
    words = {flag.lstrip("-").partition("-")[0] for flag in (first, second)}
    return words == {"enable", "disable"}


def fail(message: str, status: int = 2) -> NoReturn:
    """Print `message` as one line to stderr and exit."""
    print("lmdeploy: error: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(status)


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.dest
        accepted = UNSUPPORTED_FLAGS[flag][1]
        given = [str(value) for value in values] if values else []
        if len(given) == 1 and given[0] in accepted:
            return
        shown = " ".join([flag, *given])[:120]
        wanted = f" or set it to its default, {accepted[0]}" if accepted else ""
        parser.error(f"{shown} is not supported. Remove it{wanted}.")


def add_flags_without_effect(
    parser: argparse.ArgumentParser, flags: Iterable[str] = FLAGS_WITHOUT_EFFECT
) -> None:
    """Add switches of LMDeploy that describe what this package does anyway."""
    group = parser.add_argument_group("without effect")
    for flag in flags:
        reason = FLAGS_WITHOUT_EFFECT[flag]
        group.add_argument(
            flag, action="store_true", default=argparse.SUPPRESS, help=f"no effect: {reason}"
        )


def add_unsupported(parser: argparse.ArgumentParser) -> None:
    """Add the flags of LMDeploy that are not supported, hidden from the help text."""
    for flag, (count, _) in UNSUPPORTED_FLAGS.items():
        parser.add_argument(
            flag, nargs=count, action=_Refuse, help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the flag --log-level."""
    parser.add_argument(
        "--log-level",
        default="WARNING",
        choices=LOG_LEVELS,
        help="lowest level of the messages of lmdeploy; DEBUG also shows tracebacks (default: "
        "%(default)s)",
    )


class _SpeculativeConfig(argparse.Action):
    """Sets the flags of speculative decoding from vLLM's JSON."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the flags. The method may be missing with a model, and the length always."""
        method = values.get("method", "draft_model" if "model" in values else None)
        if method not in SPECULATIVE_ALGORITHMS:
            raise argparse.ArgumentError(
                self, f"its method is {method!r}. It must be {' or '.join(SPECULATIVE_ALGORITHMS)}."
            )
        # vLLM searches for the last 2 to 5 tokens by default. Here the longest match wins.
        ignored = {"method", "prompt_lookup_max", "prompt_lookup_min"}
        unknown = sorted(values.keys() - ignored - {"num_speculative_tokens", "model"})
        if unknown:
            raise argparse.ArgumentError(self, f"it has no field {unknown[0]!r}.")
        namespace.speculative_algorithm = method
        if "model" in values:
            namespace.speculative_draft_model = values["model"]
        if "num_speculative_tokens" in values:
            namespace.speculative_num_draft_tokens = values["num_speculative_tokens"]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of TurbomindEngineConfig."""
    add_flags(parser, TurbomindEngineConfig, title="engine")
    parser.add_argument(
        "--speculative-config",
        action=_SpeculativeConfig,
        type=json_object,
        default=argparse.SUPPRESS,
        metavar="JSON",
        help='options of drafts as vLLM writes them, such as {"method": "ngram", '
        '"num_speculative_tokens": 8} or {"model": "MODEL"}',
    )


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add the model path and the flags of every command that runs a model."""
    parser.add_argument("model_path", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument(
        "--chat-template",
        default=None,
        help="chat template: a .jinja file, a JSON file or JSON text (default: the model's own)",
    )
    add_log_level(parser)
    add_engine_flags(parser)
    add_flags_without_effect(parser)
    add_unsupported(parser)


def engine_config(args: argparse.Namespace) -> TurbomindEngineConfig:
    """Return the engine's options from parsed flags. Raise ValueError for a wrong value."""
    return TurbomindEngineConfig(**flag_values(TurbomindEngineConfig, args))
