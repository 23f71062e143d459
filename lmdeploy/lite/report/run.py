"""`lmdeploy lite kv-report`: measures KV formats and writes one page about them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lmdeploy.base.checks import refuse
from lmdeploy.base.installed import install_command
from lmdeploy.config.lite_options import CalibrationOptions, ReportOptions
from lmdeploy.engine.model_files import open_files
from lmdeploy.engine.plan import longest_position
from lmdeploy.lite.divergence import read_text
from lmdeploy.lite.prompt_engine import OpenModel, open_model
from lmdeploy.lite.report.cells import make_cells
from lmdeploy.lite.report.data import Measurements, Report
from lmdeploy.lite.report.page import write_page
from lmdeploy.lite.report.plot import can_draw, write_plot

logger = logging.getLogger(__name__)

VERSION = 1
DEFAULT_CONTEXTS = (2048, 8192)


def check_length(name: str, tokens: int, *, longest: int, max_tokens: int) -> None:
    """Raise ValueError if a text has fewer tokens than its longest context."""
    usable = min(tokens, max_tokens)
    if usable < longest:
        raise ValueError(
            f"The text {name} has {usable} usable tokens. It must have at least the {longest} of "
            "one context (--text, --max-tokens, --contexts)."
        )


def choose_contexts(given: Sequence[int], *, longest: int) -> tuple[int, ...]:
    """Return `given`, or if it is empty the defaults up to the model's context length `longest`.

    Raise ValueError if a given context is longer.
    """
    if not given:
        return tuple(c for c in DEFAULT_CONTEXTS if c <= longest) or (longest,)
    if max(given) > longest:
        wanted = f"at most the {longest} positions the model was trained for"
        raise refuse("contexts", max(given), wanted=wanted, flag="--contexts")
    return tuple(given)


def calibration_file(options: ReportOptions, model: OpenModel) -> Path | None:
    """Return the calibration file for `best`. If none is given, create it from the text once."""
    if "best" not in options.qualities or options.calibration:
        return options.calibration
    from lmdeploy.engine.kv_calibration import write_calibration
    from lmdeploy.lite.calibrate import calibrate

    assert options.calibration_text is not None
    text = read_text(options.calibration_text, flag="--calibration-text")
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = options.parts / f"calibration-{model.hash[:12]}-{digest[:12]}.safetensors"
    if not path.exists():
        ids = model.loaded.tokenizer.encode(text, add_special=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_calibration(
            path, calibrate(model, ids, text_hash=digest, options=CalibrationOptions())
        )
    return path


def make_report(options: ReportOptions) -> Report:
    """Measure, then write the page, its JSON and, if matplotlib is installed, its picture.

    Raises:
        ValueError, OSError: if an option, the model, a text or an output file cannot be used.
    """
    if not (picture := can_draw()):
        logger.warning(
            "The report has no picture because matplotlib is not installed. Run: %s",
            install_command("lite"),
        )
    texts = {path.stem: read_text(path) for path in options.texts}
    longest = longest_position(open_files(options.model_path).info.config)
    options = replace(options, contexts=choose_contexts(options.contexts, longest=longest))
    model = open_model(options.model_path)
    ids = {
        name: model.loaded.tokenizer.encode(text, add_special=False) for name, text in texts.items()
    }
    for index, (name, text_ids) in enumerate(ids.items()):
        # Check the lengths before hours of work.
        longest = max(options.contexts) if index == 0 else options.contexts[0]
        check_length(name, len(text_ids), longest=longest, max_tokens=options.max_tokens)
    options.parts.mkdir(parents=True, exist_ok=True)
    calibration = calibration_file(options, model)
    facts = {
        "version": VERSION,
        "model": model.hash,
        "max_tokens": options.max_tokens,
        "retrieval_prompts": options.retrieval_prompts,
        "first text": options.texts[0].stem,
        **{f"text {name}": hash_of(text.encode()) for name, text in texts.items()},
    }
    if calibration is not None:
        facts["calibration"] = hash_of(calibration.read_bytes())
    report = Report(
        options=options,
        model=model,
        cells=make_cells(
            model, options.formats, qualities=options.qualities, calibration=calibration
        ),
        ids=ids,
        measured=Measurements(options.parts / "measured.json", facts),
        picture=picture,
    )
    report.run()
    write_page(report, facts)
    if picture:
        write_plot(report, options.output / f"{options.name}.png")
    return report


def hash_of(data: bytes) -> str:
    """Return the first 64 bits of the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[:16]


def names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list and drop empty items."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Parse a comma-separated list of integers and drop repeated ones. Raise ValueError."""
    parts: Sequence[str] = names(text)
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{flag} is {text!r}. It must be integers separated by commas.")
    return tuple(dict.fromkeys(int(part) for part in parts))
