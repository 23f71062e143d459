"""The JSON file of one GPU: rows of kernels, generation and checks, merged run by run.

A row says who ran (`by`: ours, or a peer with its setting), which op in which mode on which shape,
and microseconds of a launch with the bytes that it must move; when its `run` began, and the copy
bandwidth that the same run measured first (`copy_gb_per_s`). What follows from those is in the file
beside them: GB/s, the share of that bandwidth, and how many times faster than 16 bit and than fp8
of the same run it is.

    device_bench </dev/null | python benchmarks/gpu_results.py      # the name of the file
    … | python benchmarks/gpu_results.py --checks parts.tsv --json gpu_NAME.json

The second adds what scripts/gpu_check.sh found: part, verdict, seconds and a note in every line.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[Any, ...]

OURS = "ours"
SIXTEEN_BIT, FP8 = "none", "fp8"
# Of a shape, but of no other format: what a mode is compared with has them at 0.
OF_FORMAT = ("search", "rotate")
LISTS = ("kernels", "generation", "checks")
FIGURES = ("us", "us_low", "us_high")
VERDICTS = ("ok", "skipped", "FAILED")
ABOUT = ("device", "kind", "sm", "num_sms", "l2_bytes", "memory_bytes", "lmdeploy")


def file_name(device: str) -> str:
    """`gpu_nvidia_h200.json` of `NVIDIA H200`."""
    return "gpu_" + re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json"


def version() -> str:
    """Of this package, without importing it: a machine with a GPU may have nothing else."""
    text = (Path(__file__).resolve().parents[1] / "lmdeploy/version.py").read_text("utf-8")
    found = re.search(r'__version__ = "([^"]+)"', text)
    return found.group(1) if found else "unknown"


def begin_of_run() -> str:
    """What the rows of a run have in common: now, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def shape_key(shape: Mapping[str, Any], *, plain: bool = False) -> Key:
    """What two rows of one shape have in common. `plain`: as if nothing of a format were on."""
    left_out = OF_FORMAT if plain else ()
    return tuple(sorted((k, v) for k, v in shape.items() if k not in left_out and v not in (0, "")))


def key_of(row: Mapping[str, Any]) -> Key:
    """What a row of a list is found by: a later one takes the place of an earlier."""
    return (
        row.get("by"),
        row.get("op") or row.get("work") or row.get("name"),
        row.get("model"),
        row.get("mode"),
        shape_key(row.get("shape", {})),
    )


def new_document(about: Mapping[str, Any]) -> dict[str, Any]:
    """Without any row. ValueError for a GPU without a name."""
    if not about.get("device"):
        raise ValueError(f"about: got {dict(about)}, wanted the name of the GPU")
    return {"about": {k: about[k] for k in ABOUT if k in about}, **{name: [] for name in LISTS}}


def read_document(path: Path) -> dict[str, Any]:
    """ValueError for a file that is not one of ours."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict) or set(document) != {"about", *LISTS}:
        raise ValueError(f"{path}: wanted the keys about, {', '.join(LISTS)}")
    if not isinstance(document["about"], dict) or "device" not in document["about"]:
        raise ValueError(f"{path}: about: wanted the name of the GPU")
    for name in LISTS:
        rows = document[name]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: {name}: wanted a list of rows")
    found: dict[str, Any] = document
    return found


def write_document(document: Mapping[str, Any], path: Path) -> None:
    """Whole, or as it was. A row is a line."""
    parts = [f'"about": {json.dumps(document["about"])}']
    for name in LISTS:
        rows = ",\n".join(json.dumps(row, ensure_ascii=False) for row in document[name])
        parts.append(f'"{name}": [\n{rows}\n]' if rows else f'"{name}": []')
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    unfinished.replace(path)


def merge_rows(old: Sequence[Row], new: Iterable[Row]) -> list[Row]:
    """In the order of the first measurement; a new row takes the place of one with its key."""
    rows = {key_of(row): row for row in old}
    for row in new:
        rows[key_of(row)] = row
    return list(rows.values())


def merge_into(path: Path, about: Mapping[str, Any], *, lists: Mapping[str, Iterable[Row]]) -> None:
    """Adds rows to a file, which may not be there yet. ValueError for another GPU's or no file."""
    document = read_document(path) if path.exists() else new_document(about)
    if document["about"]["device"] != about.get("device"):
        raise ValueError(
            f"{path}: its rows come from {document['about']['device']}, not {about.get('device')}"
        )
    document["about"].update({k: about[k] for k in ABOUT if k in about})
    for name, rows in lists.items():
        document[name] = merge_rows(document[name], rows)
    document["kernels"] = with_ratios(document["kernels"])
    write_document(document, path)


def is_measured(row: Mapping[str, Any]) -> bool:
    """Whether it has a time; others say why not."""
    return isinstance(row.get("us"), int | float) and row["us"] > 0


def total_bytes(row: Mapping[str, Any]) -> int:
    """What the op must move at least."""
    return sum(int(row.get(f"{part}_bytes", 0)) for part in ("weight", "kv", "activation"))


def copy_bandwidth(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """GB/s of the largest copy on the device, bytes read and written; None: not measured."""
    copies = [row for row in rows if row.get("op") == "copy" and is_measured(row)]
    if not copies:
        return None
    largest = max(copies, key=total_bytes)
    return rounded(total_bytes(largest) / largest["us"] / 1e3)


def baseline_key(row: Mapping[str, Any], *, mode: str, plain: bool) -> Key:
    """The same op of the same engine in the same run, with the same shape, in a mode."""
    shape = shape_key(row.get("shape", {}), plain=plain)
    return (row.get("run"), row.get("by"), row.get("op"), mode, shape)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows with GB/s and TFLOP/s, and times faster than 16 bit and fp8, as of now."""
    measured = {
        baseline_key(row, mode=row.get("mode", ""), plain=False): row
        for row in rows
        if is_measured(row)
    }
    complete = []
    for row in rows:
        derived = ("gb_per_s", "of_copy", "tflops", "vs_none", "vs_fp8")
        row = {key: value for key, value in row.items() if key not in derived}
        if is_measured(row):
            row["gb_per_s"] = rounded(total_bytes(row) / row["us"] / 1e3)
            if row.get("copy_gb_per_s"):
                row["of_copy"] = rounded(row["gb_per_s"] / row["copy_gb_per_s"])
            if row.get("operations"):
                row["tflops"] = rounded(row["operations"] / row["us"] / 1e6)
            for name, mode in (("vs_none", SIXTEEN_BIT), ("vs_fp8", FP8)):
                other = measured.get(baseline_key(row, mode=mode, plain=True))
                if other and row.get("mode"):
                    row[name] = rounded(other["us"] / row["us"])
        complete.append(row)
    return complete


def rounded(value: float) -> float:
    """To four significant digits: more is noise."""
    return float(f"{value:.4g}")


def check_rows(text: str) -> list[Row]:
    """Of the lines that gpu_check.sh writes. ValueError for another line."""
    rows = []
    for line in text.splitlines():
        name, verdict, seconds, note = line.split("\t")
        if verdict not in VERDICTS:
            raise ValueError(f"{line!r}: wanted one of {', '.join(VERDICTS)}")
        rows.append({"name": name, "verdict": verdict, "seconds": int(seconds), "note": note})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Names the file of the device on standard input, or adds checks to it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--checks", type=Path, help="lines of part, verdict, seconds, note")
    parser.add_argument("--json", type=Path, help="the file that gets them")
    options = parser.parse_args(arguments)
    try:
        about = {**json.loads(sys.stdin.readline()), "lmdeploy": version()}
        if options.checks and options.json:
            rows = check_rows(options.checks.read_text(encoding="utf-8"))
            merge_into(options.json, about, lists={"checks": rows})
        else:
            print(file_name(str(about["device"])))
    except (ValueError, KeyError, OSError) as error:
        print(f"gpu_results.py: {error!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
