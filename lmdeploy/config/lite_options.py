"""The options of the `lmdeploy lite` commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from lmdeploy.base.checks import check_int, refuse
from lmdeploy.config.engine import TurbomindEngineConfig
from lmdeploy.config.kv_format_options import (
    KV_QUALITIES,
    UNCALIBRATED_QUALITIES,
    FormatPair,
    parse_pair,
    reported_formats,
)
from lmdeploy.config.option import Option, check

WEIGHT_BLOCK = 32  # inputs of a block in the engine
_BY_HAND = Option(flags=None)  # lite.py adds the flag


@dataclass(frozen=True)
class CalibrationOptions:
    """The options of a calibration.

    Args:
        tokens: most tokens of the text, or of all prompts, to use.
        context: tokens of one prompt, at most the model's context length. Longer ones are cut.
        exact: compute in FP32, which takes four bytes per weight (default: as a server computes).
        mean: channels of K whose mean is subtracted; slow means those that RoPE turns by less than
            a quarter turn over the context.
        percentile: percentage of the values |x| that the ranges cover. 99.9 clips outliers.

    Raises:
        ValueError: if a value is out of range.
    """

    tokens: Annotated[int, Option(low=1)] = 16384
    context: Annotated[int, Option(low=1)] = 2048
    exact: bool = False
    mean: Literal["all", "slow", "none"] = "all"
    percentile: Annotated[float, Option(low=50, high=100)] = 100.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search.

    Args:
        budget: most bits per value of a sequence of `at_tokens` tokens, metadata and the window
            included.
        tokens: most tokens of the text to use.
        context: tokens of one prompt, at most the model's context length.
        exact: compute in FP32, which takes four bytes per weight (default: as a server computes).
        at_tokens: length of the sequence to which the budget applies.
        formats: candidate KV formats. 16 bit is always a candidate.
        cache: fields of TurbomindEngineConfig for every candidate, such as kv_quality.

    Raises:
        ValueError: if a value is out of range or a format is unknown.
    """

    budget: Annotated[float, Option(low=1, high=32)]
    tokens: Annotated[int, Option(low=2)] = 2048
    context: Annotated[int, Option(low=2)] = 2048
    exact: bool = False
    at_tokens: Annotated[int, Option(low=64)] = 8192
    formats: Annotated[tuple[str, ...], _BY_HAND] = (
        *("nvfp4", "k=fp8,v=nvfp4", "k=none,v=nvfp4", "fp8", "int8"),
    )
    cache: Annotated[Mapping[str, Any], _BY_HAND] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        for name in self.formats:
            parse_pair(name, "formats", flag="--formats")

    def config(self, table: FormatPair | dict[Any, str]) -> TurbomindEngineConfig:
        """Return the engine options with this format or this table of formats."""
        given = str(table) if isinstance(table, FormatPair) else table
        config = TurbomindEngineConfig(kv_cache_format=given)
        return config if config.kv_format == "none" else replace(config, **self.cache)


@dataclass(frozen=True)
class ReportOptions:
    """The options of a report.

    Args:
        model_path: a Hugging Face folder, a GGUF file, a hub id, or `smollm2`.
        texts: UTF-8 files. The first is used for all measurements, the others only for the scores
            at the first context.
        formats: KV formats to measure.
        qualities: presets to measure with each format.
        contexts: prompt lengths in tokens, at most the model's context length. If empty, those of
            DEFAULT_CONTEXTS that the model supports, or else its context length.
        max_tokens: most tokens of each text to measure (default: all).
        calibration: file from `lmdeploy lite calibrate`, for the preset best.
        calibration_text: UTF-8 text from which to create the calibration file.
        retrieval_prompts: prompts with planted values per context.
        output: folder for the files.
        name: name of the files without the suffix.

    Raises:
        ValueError: if a value is unknown, out of range or missing.
    """

    model_path: Annotated[str, _BY_HAND]
    texts: Annotated[tuple[Path, ...], _BY_HAND]
    formats: Annotated[tuple[str, ...], _BY_HAND] = field(default_factory=reported_formats)
    qualities: Annotated[tuple[str, ...], _BY_HAND] = UNCALIBRATED_QUALITIES
    contexts: Annotated[tuple[int, ...], _BY_HAND] = ()
    max_tokens: Annotated[int, Option(low=1)] = 1 << 30
    calibration: Annotated[
        Path | None, Option(flags=("--kv-calibration", "--calibration"), metavar="FILE")
    ] = None
    calibration_text: Path | None = None
    retrieval_prompts: Annotated[int, Option(low=1)] = 4
    output: Path = Path()
    name: str = "kv-report"

    def __post_init__(self) -> None:
        check(self)
        for flag, names, known in (
            ("--formats", self.formats, reported_formats()),
            ("--qualities", self.qualities, KV_QUALITIES),
        ):
            unknown = [name for name in names if name not in known]
            if unknown or not names:
                raise ValueError(f"{flag} is {names}. It must be some of {', '.join(known)}.")
        for context in self.contexts:
            check_int("contexts", context, low=256, flag="--contexts")
        if len({path.stem for path in self.texts}) != len(self.texts):
            raise ValueError("--text contains two files with the same name. Rename one.")
        self._check_calibration()

    def _check_calibration(self) -> None:
        if self.calibration and self.calibration_text:
            raise ValueError(
                "--calibration-text cannot be combined with --kv-calibration. Remove one of them."
            )
        if (self.calibration or self.calibration_text) and "best" not in self.qualities:
            raise ValueError(
                "--kv-calibration and --calibration-text apply only to the quality best. Add best "
                "to --qualities or remove the flag."
            )
        if "best" in self.qualities and not (self.calibration or self.calibration_text):
            raise ValueError(
                "The quality best needs a calibration file. Pass --kv-calibration, or "
                "--calibration-text to create one."
            )
        if self.calibration and not self.calibration.is_file():
            raise refuse(
                "kv_calibration",
                str(self.calibration),
                wanted="an existing file",
                flag="--kv-calibration",
            )

    @property
    def parts(self) -> Path:
        """Return the folder with the saved measurements."""
        return self.output / f"{self.name}.parts"


@dataclass(frozen=True)
class WeightOptions:
    """The options of a quantization.

    Args:
        method: gptq or awq.
        w_bits: bits of a weight; must be 4.
        w_group_size: inputs that share a scale, a multiple of 32 that divides the inputs of every
            matrix.
        w_sym: store no zero points, which takes less memory.
        tokens: most tokens of the text to use; an eighth of them, at most 4,096, measures the
            result.
        context: tokens of one prompt, at most the model's context length.

    Raises:
        ValueError: if a value is out of range.
    """

    method: Annotated[Literal["gptq", "awq"], _BY_HAND]
    w_bits: Annotated[int, Option(choices=(4,), wanted="4")] = 4
    w_group_size: Annotated[int, Option(low=WEIGHT_BLOCK)] = 128
    w_sym: bool = False
    tokens: Annotated[int, Option(low=1)] = 16384
    context: Annotated[int, Option(low=2)] = 2048

    def __post_init__(self) -> None:
        check(self)
        if self.w_group_size % WEIGHT_BLOCK:
            wanted = f"a multiple of {WEIGHT_BLOCK}"
            raise refuse("w_group_size", self.w_group_size, wanted=wanted, flag="--w-group-size")
