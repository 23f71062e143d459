"""`lmdeploy lite auto_gptq` and `auto_awq`: quantize the weights of a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmdeploy.cli.engine_flags import add_flags_without_effect, add_log_level
from lmdeploy.cli.option_flags import add_flags, flag_values
from lmdeploy.config.lite_options import WeightOptions

# Flags of LMDeploy that describe a calibration data set, which would be downloaded.
_CALIBRATION_FLAGS = ("--calib-dataset", "--calib-samples", "--calib-seqlen")


def add_weight_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands."""
    for method in ("gptq", "awq"):
        parser = commands.add_parser(
            f"auto_{method}", help=f"quantize a folder to 4 bits with {method.upper()}"
        )
        parser.add_argument(
            "model_path",
            help="Hugging Face folder or hub id with F32, F16 or BF16 weights, without experts",
        )
        parser.add_argument(
            "--work-dir", required=True, type=Path, help="folder to write, new or empty"
        )
        parser.add_argument("--text", required=True, type=Path, help="UTF-8 text file")
        add_flags(parser, WeightOptions, title="quantization")
        for flag in _CALIBRATION_FLAGS:
            parser.add_argument(
                flag, action=_UseText, help=argparse.SUPPRESS, default=argparse.SUPPRESS
            )
        add_log_level(parser)
        add_flags_without_effect(parser, ["--trust-remote-code"])
        parser.set_defaults(run=_quantize, method=method)


class _UseText(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is not supported. Give a text file with --text.")


def _quantize(args: argparse.Namespace) -> int:
    from lmdeploy.lite.weights.compare import report_lines
    from lmdeploy.lite.weights.quantize import quantize_folder

    options = WeightOptions(args.method, **flag_values(WeightOptions, args))
    scores = quantize_folder(args.model_path, args.text, output=args.work_dir, options=options)
    tokens = next(iter(scores.values())).tokens
    print(f"{args.work_dir}: measured on {tokens:,} tokens that the quantization did not use")
    for line in report_lines(scores):
        print(line)
    return 0
