"""Count the instructions of a decode step under callgrind. Timing noise does not change them.

    python scripts/dev/count_instructions.py BUILD_FOLDER             compare with the record
    python scripts/dev/count_instructions.py BUILD_FOLDER --update    write the record

The record is tests/python/data/instruction_counts.json: instructions of one decode step of a small
model on one AVX2 thread, by KV format, and of a step whose ops compute nothing ("overhead").
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lmdeploy.config.kv_format_options import reported_formats

RECORD = Path(__file__).parents[2] / "tests" / "python" / "data" / "instruction_counts.json"
MODES = reported_formats()
OVERHEAD_BATCHES = (1, 32)
ISA = "avx2"  # the best that valgrind runs
TOLERANCE = 0.03
TIMEOUT_S = 120


class CountError(Exception):
    """The instructions cannot be counted."""


def run(command: list[str]) -> str:
    """Return the standard output of a command."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-500:]
        raise CountError(f"{command[0]} failed with {done.returncode}: {tail}")
    return done.stdout


def about(build: Path) -> tuple[int, str]:
    """Return the number of steps in a dump, and name and version of the compiler of the build."""
    steps, compiler = run([str(build.resolve() / "step_guard"), "about"]).split(maxsplit=1)
    return int(steps), compiler.strip()


def count_dumps(build: Path, arguments: list[str], *, parts: int) -> list[int]:
    """Return the instructions of one step in each dump that the program asked for, in order."""
    driver = str(build.resolve() / "step_guard")
    steps, _ = about(build)
    if steps == 0:
        raise CountError("step_guard was built without valgrind/callgrind.h; install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={folder}/callgrind.out.x", driver, *arguments]
        run(command)
        dumps = [path for path in Path(folder).iterdir() if path.suffix[1:].isdigit()]
        texts = [path.read_text() for path in sorted(dumps, key=lambda path: int(path.suffix[1:]))]
    totals = [
        int(found[1]) // steps
        for text in texts
        if "desc: Trigger: Client Request" in text
        and (found := re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE))
    ]
    if len(totals) != parts:
        raise CountError(f"callgrind wrote {len(totals)} dumps on request, not {parts}")
    return totals


def count_steps(build: Path) -> dict[str, int]:
    """Return the instructions of one decode step by KV format and of steps without computation."""
    totals = count_dumps(build, ["step", ISA, "1", *MODES], parts=len(MODES))
    counts = dict(zip(MODES, totals, strict=True))
    for batch in OVERHEAD_BATCHES:
        (total,) = count_dumps(build, ["overhead", ISA, str(batch), "nvfp4"], parts=1)
        counts[f"overhead of {batch}"] = total
    return counts


def compare_steps(got: dict[str, int], want: dict[str, int]) -> list[str]:
    """Return one line for each count that differs by more than TOLERANCE."""
    return [
        f"step, {name}: {got[name]}, the record has {count} ({got[name] / count - 1:+.1%})"
        for name, count in want.items()
        if abs(got[name] / count - 1) > TOLERANCE
    ]


def main(arguments: list[str] | None = None) -> int:
    """Compare or update. Return 1 for a difference and 2 for another compiler."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("build", type=Path, help="build folder, release, with tests")
    parser.add_argument("--update", action="store_true", help="write the record")
    options = parser.parse_args(arguments)
    try:
        _, here = about(options.build)
        if options.update:
            new = {"compiler": here, "decode_step_avx2": count_steps(options.build)}
            RECORD.write_text(json.dumps(new, indent=2) + "\n")
            return 0
        record = json.loads(RECORD.read_text())
        if here != record["compiler"]:
            print(f"The record is of {record['compiler']}, the build of {here}: not comparable.")
            return 2
        wrong = compare_steps(count_steps(options.build), record["decode_step_avx2"])
    except (CountError, OSError, subprocess.TimeoutExpired) as error:
        print(f"count_instructions: {error}", file=sys.stderr)
        return 1
    print("\n".join(wrong) or "all counts match the record")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
