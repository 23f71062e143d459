"""`lmdeploy lite …`: tools for the KV cache and the weights of a model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lmdeploy.base.checks import flag_of, refuse
from lmdeploy.cli.engine_flags import add_log_level
from lmdeploy.cli.lite_weights import add_weight_commands
from lmdeploy.cli.option_flags import add_flags, flag_values, names_of
from lmdeploy.config.engine import KV_INGREDIENTS, TurbomindEngineConfig
from lmdeploy.config.kv_format_options import (
    KV_QUALITIES,
    TABLE_SUFFIXES,
    UNCALIBRATED_QUALITIES,
    reported_formats,
)
from lmdeploy.config.lite_options import CalibrationOptions, ReportOptions, SearchOptions

_INGREDIENTS = names_of(TurbomindEngineConfig, KV_INGREDIENTS)


def add_lite_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `lite`."""
    commands = parser.add_subparsers(dest="lite", required=True, metavar="COMMAND")
    _add_calibrate(commands)
    _add_kv_search(commands)
    _add_kv_report(commands)
    add_weight_commands(commands)


def add_text_flags(
    parser: argparse.ArgumentParser, options: type, *, text: str = "UTF-8 text file"
) -> None:
    """Add the model path, --text and the flags of options. `text` is the help of --text."""
    parser.add_argument("model_path", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument("--text", required=True, type=Path, help=text)
    add_flags(parser, options, title="measuring")
    add_log_level(parser)


def check_output(path: Path) -> None:
    """Raise ValueError if `path` cannot be written. Call it before minutes of work."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise refuse(
            "output",
            str(path),
            wanted="a writable file in an existing folder",
            flag=flag_of("output"),
        )


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("calibrate", help="create the file for --kv-quality best")
    add_text_flags(
        parser,
        CalibrationOptions,
        text="UTF-8 text file, or a .jsonl file with one prompt per line: a string, or an object "
        "with text, prompt or messages",
    )
    parser.add_argument("--output", required=True, type=Path, help="file to write")
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    from lmdeploy.lite.calibrate import calibrate_file

    check_output(args.output)
    options = CalibrationOptions(**flag_values(CalibrationOptions, args))
    calibration = calibrate_file(args.model_path, args.text, output=args.output, options=options)
    facts = calibration.facts
    print(
        f"{args.output}: {facts.tokens:,} tokens in contexts of {facts.context:,}, mean of "
        f"{facts.mean} channels, percentile {facts.percentile:g}, model {facts.model_hash[:12]}"
    )
    return 0


def _add_kv_search(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("kv-search", help="find the best format per layer for a budget")
    add_text_flags(parser, SearchOptions)
    parser.add_argument(
        "--formats",
        default=";".join(SearchOptions.formats),
        help="candidate KV formats, separated by semicolons (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-quality",
        choices=KV_QUALITIES,
        default="balanced",
        help="preset of the server that will use the table (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-calibration",
        default=None,
        help="file from `lmdeploy lite calibrate`, required for --kv-quality best",
    )
    add_flags(parser, TurbomindEngineConfig, title=KV_INGREDIENTS, names=_INGREDIENTS)
    parser.add_argument(
        "--output", type=Path, default=None, help="YAML file to write (default: print the table)"
    )
    parser.set_defaults(run=_kv_search)


def _kv_search(args: argparse.Namespace) -> int:
    from lmdeploy.lite.search import report_lines, search_file

    if args.output is not None:
        check_output(args.output)
        if args.output.suffix.lower() not in TABLE_SUFFIXES:
            wanted = f"a name that ends in {' or '.join(TABLE_SUFFIXES)}"
            raise refuse("output", str(args.output), wanted=wanted, flag=flag_of("output"))
    options = SearchOptions(
        **flag_values(SearchOptions, args),
        formats=tuple(text.strip() for text in args.formats.split(";") if text.strip()),
        cache={
            "kv_quality": args.kv_quality,
            "kv_calibration": args.kv_calibration,
            **flag_values(TurbomindEngineConfig, args, _INGREDIENTS),
        },
    )
    result = search_file(args.model_path, args.text, options=options)
    for line in report_lines(result):
        print(line)
    if args.output is not None:
        args.output.write_text(result.yaml, encoding="utf-8")
    else:
        print(result.yaml, end="")
    return 0


def _add_kv_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("kv-report", help="measure accuracy and cost of KV formats")
    parser.add_argument("model_path", help="smollm2, a folder, a .gguf file or a hub id")
    parser.add_argument(
        "--text",
        required=True,
        type=Path,
        nargs="+",
        help="UTF-8 text files; all after the first are measured only at the first context",
    )
    parser.add_argument(
        "--formats",
        default=None,
        help=f"KV formats, separated by commas: {','.join(reported_formats())} (default: all)",
    )
    parser.add_argument(
        "--qualities",
        default=None,
        help=f"presets, separated by commas: {','.join(KV_QUALITIES)} (default: "
        f"{','.join(UNCALIBRATED_QUALITIES)}; also best with --kv-calibration or "
        "--calibration-text)",
    )
    parser.add_argument(
        "--contexts",
        default=None,
        help="prompt lengths in tokens, separated by commas, at most the model's context length "
        "(default: 2048,8192, without those above it)",
    )
    add_flags(parser, ReportOptions, title="measuring")
    add_log_level(parser)
    parser.set_defaults(run=_kv_report)


def _kv_report(args: argparse.Namespace) -> int:
    from lmdeploy.lite.divergence import read_text
    from lmdeploy.lite.report.run import make_report, names, numbers

    for path in args.text:
        read_text(path)  # report errors of the texts before those of other flags
    if args.calibration_text is not None:
        read_text(args.calibration_text, flag=flag_of("calibration_text"))
    calibrated = args.calibration is not None or args.calibration_text is not None
    qualities = KV_QUALITIES if calibrated else UNCALIBRATED_QUALITIES
    options = ReportOptions(
        model_path=args.model_path,
        texts=tuple(args.text),
        formats=reported_formats() if args.formats is None else names(args.formats),
        qualities=qualities if args.qualities is None else names(args.qualities),
        contexts=() if args.contexts is None else numbers(args.contexts, "--contexts"),
        **flag_values(ReportOptions, args),
    )
    report = make_report(options)
    print(
        f"{args.output / args.name}.md" + (", .json and .png" if report.picture else " and .json")
    )
    return 0
