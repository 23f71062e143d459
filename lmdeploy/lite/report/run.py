"""`lmdeploy lite kv-report`: measure every KV format and write one page about them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lmdeploy.base.checks import refuse
from lmdeploy.engine.model_files import open_files
from lmdeploy.engine.plan import longest_position
from lmdeploy.lite.divergence import read_text
from lmdeploy.lite.prompt_engine import OpenModel, open_model
from lmdeploy.lite.report.cells import make_cells
from lmdeploy.lite.report.data import Measurements, Report, ReportOptions
from lmdeploy.lite.report.page import write_page
from lmdeploy.lite.report.plot import can_draw, write_plot

logger = logging.getLogger(__name__)

VERSION = 1
DEFAULT_CONTEXTS = (2048, 8192)


def check_length(name: str, tokens: int, *, longest: int, max_tokens: int) -> None:
    """ValueError for a text without one whole context."""
    usable = min(tokens, max_tokens)
    if usable < longest:
        raise ValueError(
            f"text {name}: got {usable} tokens, wanted at least the {longest} of one context; "
            "change --text, --max-tokens or --contexts"
        )


def choose_contexts(given: Sequence[int], *, longest: int) -> tuple[int, ...]:
    """`given`, or where it is empty the defaults, within the positions that the model knows.

    ValueError for a given one beyond them.
    """
    if not given:
        return tuple(c for c in DEFAULT_CONTEXTS if c <= longest) or (longest,)
    if max(given) > longest:
        wanted = f"at most the {longest} positions the model was trained for"
        raise refuse("contexts", max(given), wanted=wanted, flag="--contexts")
    return tuple(given)


def calibration_file(options: ReportOptions, model: OpenModel) -> Path | None:
    """The file for `best`: as given, or made of the calibration text once."""
    if "best" not in options.qualities or options.calibration:
        return options.calibration
    from lmdeploy.engine.kv_calibration import write_calibration
    from lmdeploy.lite.calibrate import CalibrationOptions, calibrate

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
    """Measures and writes the page, its JSON and, with matplotlib, its picture.

    Raises:
        ValueError, OSError: for what cannot be read, written or used.
    """
    if not (picture := can_draw()):
        logger.warning(
            "matplotlib is not installed, so there will be no picture; "
            "to get it: pip install matplotlib"
        )
    texts = {path.stem: read_text(path) for path in options.texts}
    longest = longest_position(open_files(options.model_path).info.config)
    options = replace(options, contexts=choose_contexts(options.contexts, longest=longest))
    model = open_model(options.model_path)
    ids = {
        name: model.loaded.tokenizer.encode(text, add_special=False) for name, text in texts.items()
    }
    for index, (name, text_ids) in enumerate(ids.items()):
        # Before hours of work, not after them.
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
    """Enough of it to tell files apart."""
    return hashlib.sha256(data).hexdigest()[:16]


def names(text: str) -> tuple[str, ...]:
    """A comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """A comma-separated list of integers, each once. ValueError when it is none."""
    parts: Sequence[str] = names(text)
    if not parts or not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"{flag}: got {text!r}; wanted numbers with commas between them")
    return tuple(dict.fromkeys(int(part) for part in parts))
