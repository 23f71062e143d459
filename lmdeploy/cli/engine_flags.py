"""Flags: those that are built, and a list of LMDeploy's others, refused by name."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lmdeploy.base.logs import LOG_LEVELS
from lmdeploy.config.engine import BLOCK_LENGTHS, DEVICE_TYPES, DTYPES, TurbomindEngineConfig
from lmdeploy.config.kv_formats import KV_QUALITIES
from lmdeploy.config.kv_formats import parse_quant_policy as _check_quant_policy
from lmdeploy.config.unsupported import unsupported_flags

UNSUPPORTED_FLAGS = unsupported_flags()


class OneLineParser(argparse.ArgumentParser):
    """Reports errors in one line, exit status 2, and takes no abbreviated flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """None may be unknown: here, in the parser of the command, its flags can be suggested."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        """Prints `message` and exits; a missing command is answered with those there are."""
        for action in self._actions:  # argparse has no public way to a parser's commands
            is_commands = isinstance(action, argparse._SubParsersAction)
            if is_commands and message.endswith(f"are required: {action.metavar}"):
                names = ", ".join(action.choices or ())
                fail(f"{self.prog}: got no command, wanted one of {names}; --help tells more")
        fail(message)

    def _suggestion(self, unknown: Sequence[str]) -> str:
        flags = [
            flag
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
        ]
        given = [text.partition("=")[0] for text in unknown if text.startswith("--")]
        near = [
            match
            for text in given
            for match in difflib.get_close_matches(text, flags, n=1)
            if not _are_opposed(text, match)
        ]
        return f"; did you mean {' '.join(near)}?" if near else ""


def _are_opposed(first: str, second: str) -> bool:
    words = {flag.lstrip("-").partition("-")[0] for flag in (first, second)}
    return words == {"enable", "disable"}


def fail(message: str, status: int = 2) -> NoReturn:
    """Prints one line to stderr and exits."""
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
        wanted = f"; wanted {flag} {accepted[0]}, its default, or nothing" if accepted else ""
        parser.error(f"{shown}: not supported{wanted}; remove {flag}")


def add_unsupported(parser: argparse.ArgumentParser) -> None:
    """Registers the refused flags, hidden from the help text."""
    for flag, (count, _) in UNSUPPORTED_FLAGS.items():
        parser.add_argument(
            flag, nargs=count, action=_Refuse, help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )


def quant_policy(text: str) -> int | str:
    """`--quant-policy` as a number or a name."""
    _check_quant_policy(text)
    value = text.strip().lower()
    return int(value) if value.isdigit() else value


def _strict_number(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> int | float:
        return kind(text)

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


_INT = _strict_number(int)
_FLOAT = _strict_number(float)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """How much is logged."""
    parser.add_argument(
        "--log-level",
        default="WARNING",
        choices=LOG_LEVELS,
        help="of lmdeploy's own messages; DEBUG shows tracebacks (default: %(default)s)",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of TurbomindEngineConfig."""
    default = TurbomindEngineConfig()
    group = parser.add_argument_group("engine")

    def add(flag: str, text: str, **options: Any) -> None:
        group.add_argument(flag, help=text, **options)

    add(
        "--dtype",
        "of what the cache does not quantize (default: auto, as the weights)",
        choices=DTYPES,
        default="auto",
    )
    add(
        "--model-format",
        "require this format: hf, gguf, or a method such as awq",
        default=None,
    )
    add(
        "--device", "auto (default): a GPU if one can be used", choices=DEVICE_TYPES, default="auto"
    )
    add("--devices", "the GPU's index; 0 when absent", type=_INT)
    add(
        "--num-threads",
        "worker threads; all usable cores when absent, beside a GPU at most 16",
        type=_INT,
    )
    add(
        "--session-len",
        "longest prompt plus answer in tokens; the model's own when absent",
        type=_INT,
    )
    add("--max-batch-size", "most sequences in one step; 32 on CPU, 128 on CUDA", type=_INT)
    add(
        "--cache-max-entry-count",
        "below 1: share of free memory for the KV cache; from 1 on: number of blocks, those in 16 "
        "bit not counted (default: %(default)s)",
        type=_FLOAT,
        default=default.cache_max_entry_count,
    )
    add(
        "--cache-block-seq-len",
        "tokens in a block (default: %(default)s)",
        type=_INT,
        choices=BLOCK_LENGTHS,
        default=default.cache_block_seq_len,
    )
    add(
        "--quant-policy",
        "format of the KV cache: 0 or none (16 bit, the default), 4 or int4, 8 or int8, 16 or fp4 "
        "(mxfp4 or nvfp4, as suits the device; FP8 in LMDeploy's PyTorch engine), mxfp4, nvfp4, "
        "fp8, fp8_e5m2",
    )
    add_kv_flags(group)
    add(
        "--max-prefill-token-num",
        "most new tokens of one step, and of sequences; when absent 256 on CPU, 8192 on CUDA, or "
        "--max-batch-size if that is more",
        type=_INT,
    )
    caching = group.add_mutually_exclusive_group()
    caching.add_argument(
        "--enable-prefix-caching", action="store_true", default=True, help="on by default"
    )
    caching.add_argument(
        "--disable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="never reuse the blocks of equal prompt beginnings",
    )
    add("--disable-metrics", "no /metrics", action="store_true")
    add("--deterministic", "bit-equal results whatever the batch", action="store_true")
    add("--exact", "compute in FP32, for comparisons; on CPU only", action="store_true")
    add("--strict-arch", "refuse NVFP4 without FP4 instructions (CUDA)", action="store_true")


def add_kv_flags(group: argparse._ActionsContainer) -> None:
    """Flags of the cache's formats by layer and of its quality."""

    def add(flag: str, text: str, **options: Any) -> None:
        group.add_argument(flag, help=text, **options)

    group.add_argument(
        "--kv-cache-format",
        "--kv-cache-dtype",
        help="instead: a format, k=fp8,v=nvfp4, or a YAML file with layers",
    )
    add(
        "--kv-quality",
        "raw, balanced or best; when absent, balanced for four-bit formats, else raw",
        choices=KV_QUALITIES,
    )
    add("--kv-calibration", "file of `lmdeploy lite calibrate`; best needs it")
    add_kv_ingredient_flags(group)


def add_kv_ingredient_flags(group: argparse._ActionsContainer) -> None:
    """Flags that replace one ingredient of a quality each."""

    def add(flag: str, text: str, **options: Any) -> None:
        group.add_argument(flag, help=text, **options)

    switch: Any = argparse.BooleanOptionalAction
    add("--kv-rotation", "rotate K and Q by a Hadamard matrix", action=switch)
    add("--kv-scale-search", "choose FP4 scales by the error they leave", action=switch)
    add(
        "--kv-sink-tokens",
        "first tokens kept in 16 bit, a multiple of 64 (balanced, best: 64)",
        type=_INT,
    )
    add(
        "--kv-recent-tokens",
        "tokens before the current block kept in 16 bit, a multiple of 64; -1: none at all "
        "(balanced, best: 64)",
        type=_INT,
    )


KV_INGREDIENTS = ("kv_rotation", "kv_scale_search", "kv_sink_tokens", "kv_recent_tokens")


def kv_ingredients(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of TurbomindEngineConfig from the flags of add_kv_ingredient_flags."""
    return {name: getattr(args, name) for name in KV_INGREDIENTS}


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """The model and what every command on a model takes."""
    parser.add_argument("model_path", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument(
        "--chat-template", default=None, help="a .jinja file, a JSON file or JSON text"
    )
    add_log_level(parser)
    add_engine_flags(parser)
    add_unsupported(parser)


def engine_config(args: argparse.Namespace) -> TurbomindEngineConfig:
    """The engine's options from parsed flags. ValueError for what is out of range."""
    return TurbomindEngineConfig(
        dtype=args.dtype,
        model_format=args.model_format,
        session_len=args.session_len,
        max_batch_size=args.max_batch_size,
        cache_max_entry_count=args.cache_max_entry_count,
        cache_block_seq_len=args.cache_block_seq_len,
        enable_prefix_caching=args.enable_prefix_caching,
        quant_policy=_given_quant_policy(args),
        max_prefill_token_num=args.max_prefill_token_num,
        enable_metrics=not args.disable_metrics,
        device_type=args.device,
        devices=None if args.devices is None else [args.devices],
        num_threads=args.num_threads,
        deterministic=args.deterministic,
        exact=args.exact,
        strict_arch=args.strict_arch,
        kv_cache_format=args.kv_cache_format,
        kv_quality=args.kv_quality,
        kv_calibration=args.kv_calibration,
        **kv_ingredients(args),
    )


def _given_quant_policy(args: argparse.Namespace) -> int | str:
    if args.quant_policy is None:
        return 0
    value = quant_policy(args.quant_policy)
    # The config takes 0 for "not given"; here it was.
    return "none" if value == 0 and args.kv_cache_format is not None else value
