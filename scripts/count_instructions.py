"""Counts instructions, which noise cannot blur: of a decode step, run under callgrind, and of the
hot loops of the AVX2, AVX-512 and AMX kernels, disassembled.

    python scripts/count_instructions.py BUILD_FOLDER             compare with the record
    python scripts/count_instructions.py BUILD_FOLDER --update    write the record

The record is tests/python/data/instruction_counts.json. Its "loops" are data too: an instruction
set ("avx512" where none is named), an object file, a regular expression that finds one demangled
function, and one that finds the loop in it: the innermost loop with most matching instructions; or,
where a remainder has more or the loop holds others, by "share": the one with the largest share of
them. To follow a kernel that has changed, edit these and run --update.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "tests" / "python" / "data" / "instruction_counts.json"
MODES = ("none", "int8", "int4", "fp8", "mxfp4", "nvfp4")
OVERHEAD_BATCHES = (1, 32)
ISA = "avx2"  # the best that valgrind runs
STEP_TOLERANCE = 0.03
LOOP_TOLERANCE = 0.10
TIMEOUT_S = 120

# The first that matches names an instruction's class.
CLASSES = (
    ("dot", r"vpdp|vpmadd|vdpbf16|tdp"),
    ("tile", r"tile"),
    ("fma", r"vfn?m(add|sub)"),
    ("convert", r"vcvt"),
    ("shuffle", r"vperm|vpshuf|vpunpck|vpalign|vbroadcast|vpbroadcast|vinsert|vextract|vshuf"),
    ("move", r"v?mov|vlddqu|kmov"),
    ("vector", r"v|k[a-z]+[bwdq]$"),
    ("branch", r"j|call|ret"),
    ("scalar", r""),
)


class CountError(Exception):
    """What cannot be counted, and why."""


@dataclass(frozen=True)
class Instruction:
    """A line of a disassembly."""

    address: int
    mnemonic: str
    target: int | None = None  # of a jump within the function


@dataclass(frozen=True)
class LoopRule:
    """Where a loop is found: see the module's description."""

    name: str
    isa: str
    object: str
    symbol: str
    most: str
    by_share: bool = False


def run(command: list[str]) -> str:
    """Standard output of a command.

    Raises:
        CountError: it failed; the text has its last lines.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-500:]
        raise CountError(f"{command[0]} failed with {done.returncode}: {tail}")
    return done.stdout


def driver(build: Path) -> Path:
    """The program whose steps are counted.

    Raises:
        CountError: the build has none.
    """
    path = build.resolve() / "step_guard"  # run by its path, wherever it is
    if not path.is_file():
        raise CountError(f"{path}: not there; build with -DTM_BUILD_TESTS=ON")
    return path


def compiler(build: Path) -> str:
    """Name and version of the compiler, as the driver tells."""
    return run([str(driver(build)), "compiler"]).strip()


def steps_per_dump(build: Path) -> int:
    """Steps between two dumps; 0 where the driver cannot ask for them."""
    return int(run([str(driver(build)), "steps"]))


def read_totals(folder: Path, parts: int) -> list[int]:
    """Instructions of each dump of callgrind, in order.

    Raises:
        CountError: another number of dumps than `parts`.
    """
    dumps = sorted(
        (path for path in folder.glob("callgrind.out.*") if path.suffix[1:].isdigit()),
        key=lambda path: int(path.suffix[1:]),
    )
    totals = []
    for path in dumps:
        text = path.read_text()
        if "desc: Trigger: Client Request" in text:
            found = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            totals.append(int(found.group(1)) if found else 0)
    if len(totals) != parts:
        raise CountError(
            f"callgrind: got {len(totals)} dumps that the driver asked for, want {parts}"
        )
    return totals


def count_dumps(build: Path, arguments: list[str], *, parts: int) -> list[int]:
    """Instructions of one step in each of `parts` dumps of the driver.

    Raises:
        CountError: valgrind or what it runs failed, or cannot count.
    """
    program = str(driver(build))
    steps = steps_per_dump(build)
    if steps == 0:
        raise CountError(f"{program}: built without valgrind/callgrind.h; install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={folder}/callgrind.out.x", program, *arguments]
        run(command)
        return [total // steps for total in read_totals(Path(folder), parts)]


def count_steps(build: Path) -> dict[str, int]:
    """Instructions of one decode step by KV mode, on one thread; and, as "overhead of 1" and "of
    32" sequences, of a step whose ops compute nothing.

    Raises:
        CountError: as count_dumps.
    """
    totals = count_dumps(build, ["step", ISA, "1", *MODES], parts=len(MODES))
    counts = dict(zip(MODES, totals, strict=True))
    for batch in OVERHEAD_BATCHES:
        (total,) = count_dumps(build, ["overhead", ISA, str(batch), "nvfp4"], parts=1)
        counts[f"overhead of {batch}"] = total
    return counts


def parse_functions(listing: str) -> dict[str, list[Instruction]]:
    """Functions of an objdump listing, demangled."""
    functions: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in listing.splitlines():
        if begin := re.match(r"^[0-9a-f]+ <(.+)>:$", line):
            current = functions.setdefault(begin.group(1), [])
        elif found := re.match(
            r"^ +([0-9a-f]+):\t(?:(?:bnd|notrack|data16|cs) )*(\S+) *(.*)$", line
        ):
            address, mnemonic, operands = found.groups()
            jump = re.match(r"([0-9a-f]+) <", operands) if mnemonic.startswith("j") else None
            target = int(jump.group(1), 16) if jump else None
            current.append(Instruction(int(address, 16), mnemonic, target))
    return functions


def find_loops(function: list[Instruction], *, innermost: bool = True) -> list[list[Instruction]]:
    """Bodies of the loops, or of those that hold no other: from a backward jump's target to it."""
    ends: dict[int, int] = {}
    first = function[0].address if function else 0
    for instruction in function:
        target = instruction.target
        if target is not None and first <= target <= instruction.address:
            ends[target] = max(ends.get(target, 0), instruction.address)
    found = [
        (begin, end)
        for begin, end in ends.items()
        if not innermost
        or not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in ends.items())
    ]
    return [[i for i in function if begin <= i.address <= end] for begin, end in sorted(found)]


def classify(mnemonic: str) -> str:
    """The first of CLASSES that the mnemonic matches."""
    return next(name for name, pattern in CLASSES if re.match(pattern, mnemonic))


def count_loop(functions: dict[str, list[Instruction]], rule: LoopRule) -> dict[str, int]:
    """Instructions of a loop by class, and "all".

    Raises:
        CountError: not exactly one function, or no loop with such an instruction.
    """
    matching = [name for name in functions if re.search(rule.symbol, name)]
    if len(matching) != 1:
        raise CountError(
            f"{rule.name}: got {len(matching)} functions like '{rule.symbol}', want 1; "
            f"edit {RECORD.name}"
        )

    def weight(loop: list[Instruction]) -> float:
        count = sum(1 for instruction in loop if re.match(rule.most, instruction.mnemonic))
        return count / len(loop) if rule.by_share else count

    loops = find_loops(functions[matching[0]], innermost=not rule.by_share)
    best = max(loops, key=weight, default=[])
    if not best or weight(best) == 0:
        raise CountError(f"{rule.name}: no loop with '{rule.most}' in {matching[0]}")
    counts = Counter(classify(instruction.mnemonic) for instruction in best)
    return {"all": len(best), **dict(sorted(counts.items()))}


def disassemble(build: Path, *, isa: str, object_file: str) -> dict[str, list[Instruction]]:
    """Functions of one object of an instruction set's kernels, e.g. "linear.cc".

    Raises:
        CountError: the build has none.
    """
    found = list(build.glob(f"CMakeFiles/tm_isa_{isa}.dir/**/{object_file}.o"))
    if len(found) != 1:
        raise CountError(f"{build}: got {len(found)} objects of {object_file} for {isa}, want 1")
    return parse_functions(run(["objdump", "-d", "-C", "--no-show-raw-insn", str(found[0])]))


def rules(record: dict[str, Any]) -> list[LoopRule]:
    """The loops that the record names.

    Raises:
        CountError: an entry lacks a field.
    """
    try:
        return [
            LoopRule(
                e["name"],
                e.get("isa", "avx512"),
                e["object"],
                e["symbol"],
                e["most"],
                e.get("by") == "share",
            )
            for e in record["loops"]
        ]
    except KeyError as error:
        raise CountError(f"{RECORD.name}: 'loops' has an entry without {error}") from None


def count_loops(build: Path, record: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Counts of every loop that the record names, by its name."""
    wanted = rules(record)
    objects = {
        (isa, name): disassemble(build, isa=isa, object_file=name)
        for isa, name in dict.fromkeys((rule.isa, rule.object) for rule in wanted)
    }
    return {rule.name: count_loop(objects[rule.isa, rule.object], rule) for rule in wanted}


def compare_steps(got: dict[str, int], want: dict[str, int]) -> list[str]:
    """What is off by more than STEP_TOLERANCE, in words."""
    wrong = []
    for name, count in want.items():
        change = got[name] / count - 1
        if abs(change) > STEP_TOLERANCE:
            wrong.append(f"step, {name}: got {got[name]}, want {count} ({change:+.1%})")
    return wrong


def compare_loops(got: dict[str, dict[str, int]], record: dict[str, Any]) -> list[str]:
    """Loops whose instructions, all or of the classes that compute, are off by more than
    LOOP_TOLERANCE, in words."""
    wrong = []
    for entry in record["loops"]:
        name, want = entry["name"], entry["counts"]
        for what in ("all", "dot", "tile", "fma", "convert", "shuffle"):
            a, b = got[name].get(what, 0), want.get(what, 0)
            if abs(a - b) > LOOP_TOLERANCE * b:
                wrong.append(f"loop, {name}, {what}: got {a}, want {b}")
    return wrong


def read_record() -> dict[str, Any]:
    """What was recorded last."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def update(build: Path) -> None:
    """Writes what is counted now into the record."""
    record = read_record()
    loops = count_loops(build, record)
    for entry in record["loops"]:
        entry["counts"] = loops[entry["name"]]
    record["compiler"] = compiler(build)
    record["decode_step_avx2"] = count_steps(build)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Compares or updates; 1 where something is off or cannot be counted, 2: not comparable."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("build", type=Path, help="build folder, release, with tests")
    parser.add_argument("--update", action="store_true", help="write the record")
    options = parser.parse_args(arguments)
    try:
        if options.update:
            update(options.build)
            return 0
        record = read_record()
        if (name := compiler(options.build)) != record["compiler"]:
            print(f"compiler: got {name}, the record is of {record['compiler']}; not comparable")
            return 2
        wrong = compare_steps(count_steps(options.build), record["decode_step_avx2"])
        wrong += compare_loops(count_loops(options.build, record), record)
    except (CountError, subprocess.TimeoutExpired) as error:
        print(f"count_instructions: {error}", file=sys.stderr)
        return 1
    print("\n".join(wrong) or "all counts as recorded")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
