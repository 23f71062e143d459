"""docs/performance.md between its markers, and the plot, from files of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceilings import nearest_level
from markdown_page import put_between, table
from results_file import ResultsFile
from scaling_fit import Law, Point, fit
from targets import BY_NAME, NO_ORIGIN, TargetRow, unmeasured

BEGIN = "<!-- figures: begin. Made by benchmarks/scaling.py --from; do not edit by hand -->"
END = "<!-- figures: end -->"
NOT_MEASURED = "Not measured for this version."


@dataclass(frozen=True)
class Curve:
    """The cells of one format and number of threads with their law."""

    mode: str
    threads: int
    cells: Sequence[Mapping[str, Any]]
    law: Law

    @property
    def residuals(self) -> list[float]:
        """Of every cell, relative."""
        return [self.law.residual(point_of(cell)) for cell in self.cells]


def point_of(cell: Mapping[str, Any]) -> Point:
    """ValueError for a cell without its figures."""
    try:
        return Point(float(cell["mean_context"]), int(cell["batch"]), float(cell["seconds"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"cell: got {dict(cell)}, wanted context, batch, seconds") from error


def origin_of(cell: Mapping[str, Any]) -> str:
    """Commit and day of a cell, as TargetRow has them."""
    return f"{cell['commit']}, {cell['date']}" if cell.get("commit") else NO_ORIGIN


def curves_of(document: Mapping[str, Any]) -> list[Curve]:
    """One per format and number of threads, in the order of the file; those that can be fitted."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for cell in document["cells"]:
        groups.setdefault((cell["mode"], cell["threads"]), []).append(cell)
    curves = []
    for (mode, threads), cells in groups.items():
        try:
            law = fit([point_of(cell) for cell in cells])
        except ValueError:
            continue  # too few cells yet: the page lists what has a law
        curves.append(Curve(mode, threads, cells, law))
    return curves


def load_targets(folder: Path) -> list[ResultsFile]:
    """Every targets*.json of a folder, one per machine, in the order of their names."""
    return [ResultsFile(path) for path in sorted(folder.glob("targets*.json"))]


def figure(value: float | None, unit: str) -> str:
    """A value with a unit that fits."""
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "bytes/s":
        return f"{value / 1e9:.3g} GB/s"
    if unit == "s":
        return f"{value * 1e3:.3g} ms"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def target_lines(file: ResultsFile) -> Iterator[str]:
    """A table per model with every target, measured or not, in their order."""
    for model in dict.fromkeys(row.model for row in file.rows):
        found = {row.name: row for row in file.rows if row.model == model}
        rows = [
            found.get(name) or unmeasured(target, "no run yet", model=model)
            for name, target in BY_NAME.items()
        ]
        yield ""
        yield f"#### {model}"
        yield ""
        head = ("work", "ours with", "beside", "ours", "theirs", "ratio", "spread", "target")
        cells = [target_cells(row) for row in rows]
        yield from table((*head, "measured at"), cells, numbers=3)
        notes = [(row.work, row.note) for row in rows if row.note and row.name in found]
        if notes:
            yield ""
            yield from (f"* {work}: {note}" for work, note in notes)


def target_cells(row: TargetRow) -> tuple[str, ...]:
    """The cells of one row; a missed target is in bold."""
    sign = {">=": "≥", "<=": "≤"}[row.better]
    goal = f"{sign} {row.target:g}"
    if row.ratio is None or row.ratio_low is None or row.ratio_high is None:
        return (row.work, "", "not measured", "", "", "", "", goal, "")
    then = "" if row.commit else " then"  # by the rules of an earlier version
    verdict = {True: f"{goal}, met{then}", False: f"**{goal}, missed{then}**", None: goal}[row.met]
    return (
        row.work,
        row.ours_setting.split(" (")[0],  # what a quality consists of is in kv_cache.md
        row.peer_setting,
        figure(row.ours, row.unit),
        figure(row.peer, row.unit),
        f"{row.ratio:.2f}",
        f"{row.ratio_low:.2f}–{row.ratio_high:.2f}",
        verdict,
        row.origin,
    )


def counted(number: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} {noun}" + "s" * (number != 1)


def machine_line(about: Mapping[str, Any]) -> str:
    """One sentence on the machine."""
    caches = ", ".join(
        f"{name.upper()} {size / 2**20:g} MiB"
        if size >= 2**20
        else f"{name.upper()} {size >> 10} KiB"
        for name, size in about["caches"].items()
    )
    return (
        f"{about['cpu']}, {counted(about['cores'], 'core')} ({caches}), "
        f"{counted(about['threads'], 'thread')}; lmdeploy-fp4 {about['lmdeploy']}, instruction set "
        f"{about['isa']}."
    )


def peer_lines(about: Mapping[str, Any]) -> Iterator[str]:
    """One sentence on llama.cpp's build, where it was there."""
    peer = about.get("llama_cpp")
    if peer:
        flags = [flag.split("=")[0].strip() for flag in peer["flags"].split("|") if "= 1" in flag]
        known = peer["compiler"] != "unknown"  # a library can be stripped of it
        yield (
            f"llama.cpp of llama-cpp-python {peer['llama_cpp_python']}, built from source"
            f"{' by ' + peer['compiler'] if known else ''} with "
            f"{', '.join(flags).removeprefix('CPU : ')}."
        )


def bandwidth(
    document: Mapping[str, Any], threads: int, *, num_bytes: float
) -> tuple[str, float] | None:
    """Where a working set lies and the bytes per second read from there; None: not measured.

    Files from before `level_bytes` have the caches of the first core.
    """
    ceilings = document["ceilings"].get(str(threads)) or {}
    reads = ceilings.get("read_bytes_per_s") or {}
    caches = document["about"]["caches"]
    sizes = ceilings.get("level_bytes") or {
        "l2": threads * caches.get("l2", 0),
        "l3": caches.get("l3", 0),
    }
    level = nearest_level(num_bytes, l2=sizes["l2"], l3=sizes["l3"])
    if not reads.get(level.lower()):
        level = "memory"
    value = reads.get(level.lower())
    return (level, float(value)) if value else None


def streamed(document: Mapping[str, Any], mode: str, *, slots: float) -> float:
    """Bytes that a step reads: the weights and the cache of so many tokens of all sequences."""
    per_token = document["bytes_per_token"].get(mode) or 0.0
    return float(document["weight_bytes"] + per_token * slots)


def read_cell(num_bytes: float, read: tuple[str, float] | None, *, unit: str) -> str:
    """Time to read so many bytes from their level."""
    if not read or not num_bytes:
        return ""
    level, rate = read
    scale = {"ms": 1e3, "µs": 1e6}[unit]
    return f"{num_bytes / rate * scale:.3g} {unit}, {level}"


def law_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The coefficients of every curve, beside what reading the same bytes takes."""
    rows = []
    for curve in curves_of(document):
        weights = streamed(document, curve.mode, slots=0)
        alone = [cell["mean_context"] for cell in curve.cells if cell["batch"] == 1]
        longest = max(alone, default=0)
        whole = streamed(document, curve.mode, slots=longest)
        near = bandwidth(document, curve.threads, num_bytes=weights)
        far = bandwidth(document, curve.threads, num_bytes=whole)
        per_token = document["bytes_per_token"].get(curve.mode) or 0.0
        worst = max(curve.residuals, key=abs)
        rows.append(
            (
                f"`{curve.mode}`, {curve.threads}",
                f"{curve.law.fixed * 1e3:.3g} ms",
                read_cell(weights, near, unit="ms"),
                f"{curve.law.per_slot * 1e6:.3g} µs",
                read_cell(per_token, far, unit="µs"),
                f"{curve.law.per_sequence * 1e3:.3g} ms",
                f"{worst:+.0%}",
            )
        )
    head = ("format, threads", "a: a step", "read weights", "b: a cached token", "read it")
    yield from table((*head, "c: a sequence", "worst residual"), rows)


def cell_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Milliseconds of every cell and how far the law is from it."""
    rows = [
        (
            f"`{curve.mode}`, {curve.threads}",
            f"{cell['context']:,}",
            str(cell["batch"]),
            f"{cell['seconds'] * 1e3:.4g} ms",
            f"{cell['batch'] / cell['seconds']:,.0f}",
            f"{residual:+.0%}",
        )
        for curve in curves_of(document)
        for cell, residual in zip(curve.cells, curve.residuals, strict=True)
    ]
    head = ("format, threads", "context", "batch", "step", "tokens/s", "residual")
    yield from table(head, rows)


def scaling_lines(document: Mapping[str, Any], plot: str) -> Iterator[str]:
    """Laws, plot and cells."""
    yield f"{document['model']}, decoding. {machine_line(document['about'])}"
    yield ""
    yield f"![cost of decoding against context, batch and threads]({plot})"
    yield ""
    yield "Time of a step = a + b · context · batch + c · batch, fitted by least squares of the"
    yield "relative residuals (residual = 1 - law / measured). Beside a and b: the time to read the"
    yield "weights, or the bytes of a cached token, at the measured read bandwidth of the nearest"
    yield "level (L2, L3, memory) that holds the weights, for b with one longest cache."
    yield ""
    yield from law_lines(document)
    yield ""
    origins = "; ".join(dict.fromkeys(origin_of(cell) for cell in document["cells"]))
    yield f"Cells measured at: {origins}."
    yield ""
    yield "<details><summary>All cells</summary>"
    yield ""
    yield from cell_lines(document)
    yield ""
    yield "</details>"


def render(document: Mapping[str, Any] | None, targets: Sequence[ResultsFile], *, plot: str) -> str:
    """The generated part, markers included."""
    lines = [BEGIN, "## Beside llama.cpp", ""]
    measured = [file for file in targets if file.rows]
    for file in measured:
        lines += [f"### {file.about['cpu']}, {file.about['isa']}", ""]
        lines += [machine_line(file.about), *peer_lines(file.about), *target_lines(file), ""]
    if not measured:
        lines += [NOT_MEASURED, ""]
    lines += ["## Scaling laws", ""]
    if document and document["cells"]:
        lines += scaling_lines(document, plot)
    else:
        lines.append(NOT_MEASURED)
    return "\n".join([*lines, "", END])


def put_in(page: str, generated: str) -> str:
    """The page with its generated part replaced. ValueError when it lacks the markers."""
    return put_between(page, generated, begin=BEGIN, end=END)


def write_page(
    page: Path, document: Mapping[str, Any] | None, *, targets: Sequence[ResultsFile], plot: Path
) -> None:
    """Replaces the generated part, and draws the plot where there is something to draw."""
    generated = render(document, targets, plot=plot.name)
    page.write_text(put_in(page.read_text(encoding="utf-8"), generated), encoding="utf-8")
    if document and curves_of(document):
        draw(document, plot)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Step time against context at batch 1, and time per token against batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure_, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, curve in enumerate(curves_of(document)):
        colour = f"C{index}"
        _draw_contexts(left, document, curve=curve, colour=colour)
        _draw_batches(right, curve, colour=colour)
    left.set(xscale="log", yscale="log", xlabel="context", ylabel="ms per token, batch 1")
    right.set(xscale="log", yscale="log", xlabel="sequences", ylabel="ms per token")
    left.set_title("points: measured; lines: law; dotted: reading at full speed", fontsize=9)
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
    figure_.savefig(path, dpi=110)
    pyplot.close(figure_)


def _draw_contexts(axes: Any, document: Mapping[str, Any], *, curve: Curve, colour: str) -> None:
    cells = sorted((c for c in curve.cells if c["batch"] == 1), key=lambda c: c["mean_context"])
    contexts = [cell["mean_context"] for cell in cells]
    label = f"{curve.mode}, {counted(curve.threads, 'thread')}"
    axes.plot(contexts, [c["seconds"] * 1e3 for c in cells], "o", color=colour, label=label)
    axes.plot(contexts, [curve.law.seconds(c, 1) * 1e3 for c in contexts], "-", color=colour)
    least = []
    for context in contexts:
        num_bytes = streamed(document, curve.mode, slots=context)
        read = bandwidth(document, curve.threads, num_bytes=num_bytes)
        least.append(num_bytes / read[1] * 1e3 if read else float("nan"))
    axes.plot(contexts, least, ":", color=colour)


def _draw_batches(axes: Any, curve: Curve, *, colour: str) -> None:
    for context, style in zip(_batch_contexts(curve), ("-", "--", "-."), strict=False):
        cells = sorted(
            (c for c in curve.cells if c["context"] == context), key=lambda c: int(c["batch"])
        )
        batches = [cell["batch"] for cell in cells]
        label = f"{curve.mode}, {counted(curve.threads, 'thread')}, context {context}"
        seconds = [cell["seconds"] * 1e3 / cell["batch"] for cell in cells]
        axes.plot(batches, seconds, "o" + style, color=colour, label=label, markersize=4)


def _batch_contexts(curve: Curve) -> list[int]:
    """Contexts that have more than one batch."""
    contexts = [cell["context"] for cell in curve.cells]
    return sorted({context for context in contexts if contexts.count(context) > 1})
