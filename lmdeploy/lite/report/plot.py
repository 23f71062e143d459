"""Draws the picture of a report: divergence against size, retrieval and decode speed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmdeploy.lite.report.cells import REFERENCE

if TYPE_CHECKING:
    from lmdeploy.lite.report.data import Report

MARKERS = {"raw": "o", "balanced": "s", "best": "*"}
WIDTH_INCHES, HEIGHT_INCHES = 12.0, 4.5


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plot(report: Report, path: Path) -> None:
    """Write the picture as a PNG file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(WIDTH_INCHES, HEIGHT_INCHES))
    _divergence(report, axes[0])
    _retrieval(report, axes[1])
    _decode(report, axes[2])
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _divergence(report: Report, axes: Any) -> None:
    text, context = next(iter(report.ids)), str(report.options.contexts[0])
    formats = list(dict.fromkeys(cell.format for cell in report.cells if cell.label != REFERENCE))
    for cell in report.cells:
        if cell.label == REFERENCE:
            continue
        row = report.figures[cell.label]
        axes.scatter(
            row["bits_per_value"]["8192"],
            row["texts"][text][context]["kl_mean"],
            marker=MARKERS[cell.quality],
            color=f"C{formats.index(cell.format)}",
            label=cell.format if cell.quality == report.options.qualities[0] else None,
            s=60,
        )
    axes.set_yscale("log")
    axes.set_xlabel("bits per value at 8192 tokens")
    axes.set_ylabel("KL(none || format), nats")
    axes.set_title(f"context {context}: ○ raw  □ balanced  ☆ best", fontsize=10)
    if formats:
        axes.legend(fontsize=8)


def _retrieval(report: Report, axes: Any) -> None:
    labels = [cell.label for cell in report.cells]
    for i, context in enumerate(map(str, report.options.contexts)):
        recall = [report.figures[label]["retrieval"][context]["recall"] for label in labels]
        height = 0.8 / len(report.options.contexts)
        places = [y + i * height for y in range(len(labels))]
        axes.barh(places, recall, height=height, label=f"context {context}")
    _label_rows(axes, labels)
    axes.set_xlabel("planted values found")
    axes.legend(fontsize=8)


def _decode(report: Report, axes: Any) -> None:
    labels = [cell.label for cell in report.cells]
    context = str(report.options.contexts[-1])
    speeds = [report.figures[label]["decode"].get(context, {}) for label in labels]
    axes.barh(range(len(labels)), [speed.get("tokens_per_s", 0.0) for speed in speeds])
    _label_rows(axes, labels)
    axes.set_xlabel(f"decode tokens/s at context {context}")


def _label_rows(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
