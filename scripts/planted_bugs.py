"""Plants bugs that people make in the CUDA kernels, one at a time, and runs the tests that need no
GPU: each bug must make its test fail.

    python scripts/planted_bugs.py --build BUILD_FOLDER            all of them
    python scripts/planted_bugs.py --build BUILD_FOLDER --only decode-copy-wait
    python scripts/planted_bugs.py --build BUILD_FOLDER --turn 7   a few, others each turn
    python scripts/planted_bugs.py --list

The build folder has the tests built from this tree; nothing in it is changed. What a bug changes is
compiled into a temporary folder and linked before the folder's libraries. Exits with 1 where a bug
is not caught, or where the text that it replaces does not occur exactly once.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CUDA = Path("src/turbomind/backend/cuda")
TESTS = Path("tests/cpp/cuda")
# As they need each other.
LIBRARIES = "cuda_shim engine doctest_main cuda_host model cpu ops kv core"
TURN_BUGS = 4
COMPILE_LIMIT_S = 600
TEST_LIMIT_S = 300


@dataclass(frozen=True)
class Bug:
    """One change of one file of CUDA, and the test that has to find it."""

    name: str
    file: str
    old: str  # occurs exactly once
    new: str
    test: str  # tests/cpp/cuda/<test>_test.cc
    sources: tuple[str, ...] = ()  # of CUDA: those that the test runs, beside its own


BUGS = (
    Bug(
        "decode-copy-wait",  # one stage too few is waited for
        "decode/decode_attention.cuh",
        "WaitForCopies<C::kStages - 2>();",
        "WaitForCopies<C::kStages - 1>();",
        "decode_attention",
    ),
    Bug(
        "decode-rings-still-read",  # results overwrite stages of warps that are not finished
        "decode/decode_attention.cuh",
        "SyncBlock();  // the rings make room for the results",
        "",
        "decode_attention",
    ),
    Bug(
        "decode-merge-sync",
        "decode/decode_attention.cuh",
        "  SyncBlock();\n  const DecodeParams& p = task.params;\n",
        "  const DecodeParams& p = task.params;\n",
        "decode_attention",
    ),
    Bug(
        "decode-mask-one-more",
        "decode/decode_attention.cuh",
        "if (row < begin || row >= end) {\n#pragma unroll",
        "if (row < begin || row > end) {\n#pragma unroll",
        "decode_attention",
    ),
    Bug(
        "decode-second-head-tile",  # has the queries of the first
        "decode/decode_attention.cuh",
        "LoadQuery<C>(task, n * kHeadTile, &query[n]);",
        "LoadQuery<C>(task, 0, &query[n]);",
        "decode_attention",
    ),
    Bug(
        "decode-stale-values",  # the keys' scales of hidden rows are cleared, the values' stay
        "decode/decode_load.cuh",
        "row * C::kScaleStride + C::KeyShape::kScaleBytes;",
        "row * C::kScaleStride;",
        "decode_attention",
    ),
    Bug(
        "decode-scales-of-other-side",
        "decode/decode_load.cuh",
        "KeyShape::kScaleBytes + ValueShape::ValueWordDim(at.g, 0) / 16",
        "ValueShape::ValueWordDim(at.g, 0) / 16",
        "decode_attention",
    ),
    Bug(
        "decode-head-of-group",  # results of a KV head go to the first one's query heads
        "decode/decode_attention.cuh",
        "static_cast<int64_t>(task.item.partial) * p.q_heads + task.first_head + head;",
        "static_cast<int64_t>(task.item.partial) * p.q_heads + head;",
        "decode_attention",
    ),
    Bug(
        "decode-table-stride",
        "decode/decode_attention.cuh",
        "p.block_tables + task.item.sequence * p.block_table_stride",
        "p.block_tables + task.item.sequence",
        "decode_attention",
    ),
    Bug(
        "decode-factor-of-other-side",
        "decode/decode_attention.cuh",
        "HeadFactor(p.kv.g[1], task.kv_head)",
        "HeadFactor(p.kv.g[0], task.kv_head)",
        "decode_attention",
    ),
    Bug(
        "decode-sink-of-every-warp",
        "decode/decode_combine.cuh",
        "sum.l += Exp2Approx(sink - sum.m);",
        "sum.l += static_cast<float>(p.warps_per_row) * Exp2Approx(sink - sum.m);",
        "decode_attention",
    ),
    Bug(
        "decode-partials-cold-and-hot",  # cold partials of a sequence count as its hot ones
        "decode/decode_plan.cc",
        "cold.first_partial[static_cast<size_t>(item.sequence) + 1];",
        "cold.first_partial[static_cast<size_t>(item.sequence)];",
        "decode_plan",
        ("decode/decode_plan.cc",),
    ),
    Bug(
        "fp4-nibble-order",
        "kv/fragments.cuh",
        "out[0] = SelectBytes(even, 0, 0x2404);\n  out[1] = SelectBytes(odd, 0, 0x2404);",
        "out[0] = SelectBytes(odd, 0, 0x2404);\n  out[1] = SelectBytes(even, 0, 0x2404);",
        "fragments",
    ),
    Bug(
        "rope-half-of-head",  # pairs are half a head apart, not half of what turns
        "kv/kv_write.cuh",
        "const int distance = half / kLaneValues;",
        "const int distance = op().kv.head_dim / 2 / kLaneValues;",
        "kv_ops",
        ("kv/kv_ops.cu",),
    ),
    Bug(
        "fp4-amax-lanes",  # of two groups' halves
        "kv/kv_encode.cuh",
        "amax = fmaxf(amax, ShuffleXor(amax, 1));",
        "amax = fmaxf(amax, ShuffleXor(amax, 2));",
        "kv_ops",
        ("kv/kv_ops.cu",),
    ),
    Bug(
        "int-range-of-half-the-row",
        "kv/kv_encode.cuh",
        "for (int mask = 1; mask < kRowLanes; mask *= 2) {",
        "for (int mask = 1; mask < kRowLanes / 2; mask *= 2) {",
        "kv_ops",
        ("kv/kv_ops.cu",),
    ),
    Bug(
        "kv-rows-behind-the-last",
        "kv/kv_write.cuh",
        ".at = {ThreadIndexX() % kRowLanes, valid ? op.kv.head_dim : 0},",
        ".at = {ThreadIndexX() % kRowLanes, valid ? op.kv.head_dim : op.kv.head_dim},",
        "kv_ops",
        ("kv/kv_ops.cu",),
    ),
    Bug(
        "flatten-hot-boundary",  # one block of the hot range is read from the cold pool
        "kv/kv_flatten.cuh",
        "p.rule.IsHot(index, context - 1)",
        "p.rule.IsHot(index, context)",
        "kv_flatten",
        ("kv/kv_ops.cu",),
    ),
    Bug(
        "prefill-hot-boundary",  # hot from a block earlier
        "prefill/prefill_shape.cuh",
        "const int recent = rule.RecentBegin(position);",
        "const int recent = rule.RecentBegin(position) - rule.block_seq_len;",
        "prefill_ops",
        ("prefill/prefill_ops.cu",),
    ),
    Bug(
        "prefill-sees-the-next",
        "prefill/prefill_attention.cuh",
        "8 * n + i >= end",
        "8 * n + i > end",
        "prefill_ops",
        ("prefill/prefill_ops.cu",),
    ),
    Bug(
        "prefill-window-one-more",
        "prefill/prefill_shape.cuh",
        "FirstVisible(window, position)",
        "FirstVisible(window > 0 ? window + 1 : 0, position)",
        "prefill_ops",
        ("prefill/prefill_ops.cu",),
    ),
    Bug(
        "prefill-stage-reuse",
        "prefill/prefill_attention.cuh",
        "SyncBlock();  // all threads' copies are there, and nobody reads the other stage",
        "",
        "prefill_ops",
        ("prefill/prefill_ops.cu",),
    ),
    Bug(
        "prefill-rows-outside",  # are copied instead of cleared
        "prefill/prefill_attention.cuh",
        "first + row >= rows.begin && first + row < rows.end ? 16 : 0;",
        "first + row >= rows.begin && first + row < rows.end ? 16 : 16;",
        "prefill_ops",
        ("prefill/prefill_ops.cu",),
    ),
    Bug(
        "prefill-partial-index",  # rows before splits
        "prefill/prefill_combine.cuh",
        "(split * p.num_rows + row) * D + dim",
        "(row * p.num_splits + split) * D + dim",
        "prefill_ops",
        ("prefill/prefill_ops.cu",),
    ),
    Bug(
        "prefill-sink-lost-in-splits",
        "prefill/prefill_combine.cuh",
        "FinalFactor(SinkLogit(p, token, q_head), most, l)",
        "FinalFactor(q_head < 0 ? 0.f : -INFINITY, most, l)",
        "prefill_ops",
        ("prefill/prefill_ops.cu",),
    ),
    Bug(
        "linear-slices-sync",
        "linear/linear_stream.cuh",
        "  SyncBlock();\n  for (int i = thread;",
        "  for (int i = thread;",
        "linear_ops",
        ("linear/linear_ops.cu",),
    ),
    Bug(
        "linear-bias-of-first-tile",
        "linear/linear_shape.cuh",
        "LoadGlobal(block.bias + output);",
        "LoadGlobal(block.bias + output % kTileOutputs);",
        "linear_ops",
        ("linear/linear_ops.cu",),
    ),
    Bug(
        "linear-scale-of-other-half",
        "linear/weight_fragments.cuh",
        "HalfAt(unit, 2 * block + half)",
        "HalfAt(unit, block + 2 * half)",
        "linear_ops",
        ("linear/linear_ops.cu",),
    ),
    Bug(
        "mxfp4-exponent-bias",  # half of every value
        "linear/weight_fragments.cuh",
        "k2To126 = 0x7e807e80u;",
        "k2To126 = 0x7e007e00u;",
        "linear_ops",
        ("linear/linear_ops.cu",),
    ),
    Bug(
        "norm-sum-sync",
        "dense/elementwise.cuh",
        "  SyncBlock();\n  return AddInWarp(",
        "  return AddInWarp(",
        "dense_ops",
        ("dense/dense_ops.cu",),
    ),
    Bug(
        "group-rows-unstable",  # falling tokens where an expert's rows must rise
        "dense/routing_kernels.cuh",
        "slot + CountOnes(all & ((1u << lane) - 1));",
        "slot + CountOnes(all >> lane) - 1;",
        "dense_ops",
        ("dense/dense_ops.cu",),
    ),
    Bug(
        "argmax-last-of-equals",
        "dense/dense_kernels.cuh",
        "at_most = x > most ? at + j : at_most;",
        "at_most = x >= most ? at + j : at_most;",
        "dense_ops",
        ("dense/dense_ops.cu",),
    ),
    Bug(
        "draw-list-not-whole",  # a token that is not listed would have been drawn
        "sampling/sampling_kernels.cuh",
        "weight(count - 1) <= unlisted",
        "weight(count - 1) < 0.f",
        "sampling_ops",
        ("sampling/sampling_ops.cu",),
    ),
    Bug(
        "draw-other-row",  # of the draw's index, not of its row
        "sampling/sampling_kernels.cuh",
        "int64_t>(draw.row) * task.op.vocab_size",
        "int64_t>(BlockIndexY()) * task.op.vocab_size",
        "sampling_ops",
        ("sampling/sampling_ops.cu",),
    ),
    Bug(
        "draw-sums-unfiltered",  # by min_p
        "sampling/sampling_kernels.cuh",
        "vocab_size) ? draw.min_p : 0.f;",
        "vocab_size) ? 0.f : 0.f;",
        "sampling_ops",
        ("sampling/sampling_ops.cu",),
    ),
    Bug(
        "draw-shuffle-in-branch",  # one lane meets its warp, the others go on to the barrier
        "sampling/sampling_kernels.cuh",
        "StoreShared(of_warp, most);",
        "StoreShared(SharedMemory() + 4 * WarpIndex(), most);",
        "sampling_ops",
        ("sampling/sampling_ops.cu",),
    ),
)


class PlantError(Exception):
    """What cannot be planted or built, and why."""


@dataclass(frozen=True)
class Outcome:
    """How a test ended: exit status, None where it did not end in time, and what it printed."""

    status: int | None
    output: str


@dataclass(frozen=True)
class Verdict:
    """Whether a bug was caught, and by what."""

    caught: bool
    by: str


def judge(outcome: Outcome) -> Verdict:
    """A bug is caught by a test that fails by itself: not by one that does not end."""
    if outcome.status is None:
        return Verdict(False, f"no end in {TEST_LIMIT_S} s")
    if outcome.status == 0:
        return Verdict(False, "the test passes")
    case = re.search(r"^TEST CASE: +(.+)$", outcome.output, re.MULTILINE)
    where = f" in: {case.group(1)}" if case else ""
    thrown = re.search(r"THREW exception: *\n? *(.+)", outcome.output)
    if thrown:
        return Verdict(True, f"detector: {thrown.group(1)}{where}")
    wrong = re.search(r"ERROR: (.+)(?:\n +values: (.+))?", outcome.output)
    if wrong:
        message, values = wrong.groups()
        readable = values is not None and re.search(r"\d", values)
        return Verdict(True, f"value: {values if readable else message}{where}")
    if outcome.status < 0:
        return Verdict(True, f"ended by signal {-outcome.status}")
    return Verdict(False, f"status {outcome.status}, but no test of it failed")


def planted_text(bug: Bug) -> str:
    """The bug's file with the bug.

    Raises:
        PlantError: the text to replace does not occur exactly once.
    """
    text = (ROOT / CUDA / bug.file).read_text(encoding="utf-8")
    if (count := text.count(bug.old)) != 1:
        raise PlantError(f"{bug.name}: got its text {count} times in {bug.file}, want once")
    return text.replace(bug.old, bug.new)


@dataclass(frozen=True)
class Compiled:
    """An object file, and the files of this tree that it was made from."""

    path: Path
    made_from: frozenset[Path]


@dataclass
class Builder:
    """Compiles files of this tree as the build folder does and links them before its libraries."""

    build: Path
    folder: Path
    commands: dict[Path, list[str]] = field(default_factory=dict)  # by path in the tree
    sound: dict[Path, Compiled] = field(default_factory=dict)  # without bugs

    def read_commands(self) -> None:
        """How the build folder compiles each file.

        Raises:
            PlantError: it does not say.
        """
        path = self.build / "compile_commands.json"
        cache = self.build / "CMakeCache.txt"
        if not path.is_file() or not cache.is_file():
            raise PlantError(f"{path}: not there; want a build with -DTM_BUILD_TESTS=ON")
        home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.+)$", cache.read_text(), re.MULTILINE)
        if home is None:
            raise PlantError(f"{cache}: does not name its source tree")
        for entry in json.loads(path.read_text()):
            if not Path(entry["file"]).is_relative_to(home.group(1)):
                continue
            arguments = [
                word.replace(home.group(1), str(ROOT)) if word.startswith(("-I/", "/")) else word
                for word in shlex.split(entry["command"])
            ]
            at = arguments.index("-o")
            self.commands[Path(entry["file"]).relative_to(home.group(1))] = [
                *arguments[:at],
                *(word for word in arguments[at + 2 : -1] if word != "-c"),
            ]

    def compile(self, source: Path, overlay: Path | None = None) -> Compiled:
        """The object of a file of the tree; files of `overlay` are read before those of src.

        Raises:
            PlantError: it does not compile.
        """
        where = overlay or self.folder
        out = where / (source.name + ".o")
        path = ROOT / source
        if source not in self.commands:
            raise PlantError(f"{source}: the build folder has no such file")
        command = self.commands[source]
        before = []
        if overlay is not None:
            before = [f"-I{overlay / 'src'}"]
            path = overlay / source if (overlay / source).is_file() else path
        run([command[0], *before, *command[1:], "-w", "-MMD", "-o", str(out), "-c", str(path)])
        words = out.with_suffix(".d").read_text().replace("\\\n", " ").split()[1:]
        files = {Path(word).resolve() for word in words}
        return Compiled(
            out, frozenset(f.relative_to(ROOT) for f in files if f.is_relative_to(ROOT))
        )

    def sound_object(self, source: Path) -> Compiled:
        """The object of a file without bugs."""
        if source not in self.sound:
            self.sound[source] = self.compile(source)
        return self.sound[source]

    def run_test(self, bug: Bug, overlay: Path | None) -> Outcome:
        """The bug's test, with the bug where there is an overlay.

        Raises:
            PlantError: it does not compile, or nothing that the test is made of has the bug.
        """
        objects = []
        with_bug = 0
        sources = [TESTS / f"{bug.test}_test.cc", *(CUDA / name for name in bug.sources)]
        for source in sources:
            compiled = self.sound_object(source)
            if overlay is not None and CUDA / bug.file in compiled.made_from:
                compiled = self.compile(source, overlay)
                with_bug += 1
            objects.append(str(compiled.path))
        if overlay is not None and with_bug == 0:
            raise PlantError(f"{bug.name}: none of {[str(s) for s in sources]} has {bug.file}")
        program = (overlay or self.folder) / f"{bug.test}_test"
        libraries = [str(self.build / f"libtm_{name}.a") for name in LIBRARIES.split()]
        compiler = self.commands[sources[0]][0]
        run([compiler, "-o", str(program), *objects, *libraries, "-pthread", "-ldl"])
        try:
            done = subprocess.run(
                [str(program), "--abort-after=1", "--no-colors"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TEST_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(None, "")
        return Outcome(done.returncode, done.stdout)


def run(command: list[str]) -> None:
    """Runs a compiler or linker.

    Raises:
        PlantError: it failed; the text has the end of what it says.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise PlantError(f"{shlex.join(command)}\n{done.stderr.strip()[-2000:]}")


def check_sound(builder: Builder, bugs: list[Bug]) -> None:
    """Every test passes without a bug, with all that is compiled anew for any bug.

    Raises:
        PlantError: one does not.
    """
    for test in dict.fromkeys(bug.test for bug in bugs):
        sources = {source: None for bug in bugs if bug.test == test for source in bug.sources}
        outcome = builder.run_test(Bug("none", "", "", "", test, tuple(sources)), None)
        if outcome.status != 0:
            raise PlantError(f"{test}_test fails without a bug:\n{outcome.output[-2000:]}")


def plant(builder: Builder, bug: Bug) -> Verdict:
    """What the bug's test says to the bug.

    Raises:
        PlantError: it cannot be planted or compiled.
    """
    with tempfile.TemporaryDirectory(dir=builder.folder) as folder:
        overlay = Path(folder)
        file = overlay / CUDA / bug.file
        file.parent.mkdir(parents=True)
        file.write_text(planted_text(bug), encoding="utf-8")
        return judge(builder.run_test(bug, overlay))


def show(columns: tuple[str, str, str, str, str]) -> None:
    """One line of the table."""
    name, test, caught, seconds, by = columns
    print(f"{name:30} {test:17} {caught:10} {seconds:>5}  {by[:120]}", flush=True)


def plant_all(build: Path, bugs: list[Bug]) -> int:
    """Plants the bugs and prints the table; the number of those that are not caught.

    Raises:
        PlantError: one cannot be planted or compiled, or a test fails without any.
    """
    for bug in bugs:
        planted_text(bug)
    missed = 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        builder = Builder(build.resolve(), Path(folder).resolve())
        builder.read_commands()
        check_sound(builder, bugs)
        show(("bug", "test", "", "s", "by"))
        for bug in bugs:
            start = time.monotonic()
            verdict = plant(builder, bug)
            missed += not verdict.caught
            caught = "caught" if verdict.caught else "NOT CAUGHT"
            show((bug.name, bug.test, caught, f"{time.monotonic() - start:.1f}", verdict.by))
    seconds = time.monotonic() - begin
    print(f"{len(bugs)} bugs, {len(bugs) - missed} caught, {missed} not; {seconds:.0f} s")
    return missed


def of_turn(turn: int) -> list[str]:
    """Names of TURN_BUGS bugs; as many turns as it takes have all of them."""
    first = turn * TURN_BUGS
    return [BUGS[i % len(BUGS)].name for i in range(first, first + TURN_BUGS)]


def main(arguments: list[str] | None = None) -> int:
    """Plants bugs or lists them; 1 where one is not caught or cannot be planted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--build", type=Path, help="build folder, release, with tests")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", action="append", metavar="NAME", help="may be given repeatedly")
    some.add_argument("--turn", type=int, help=f"{TURN_BUGS} of the bugs, by this number")
    parser.add_argument("--list", action="store_true", help="print the bugs")
    options = parser.parse_args(arguments)
    names = options.only or [bug.name for bug in BUGS]
    if options.turn is not None:
        names = of_turn(options.turn)
    if unknown := set(names) - {bug.name for bug in BUGS}:
        parser.error(f"--only: got {', '.join(sorted(unknown))}; --list prints the bugs")
    bugs = [bug for bug in BUGS if bug.name in names]
    if options.list:
        print("\n".join(f"{bug.name:30} {bug.file:32} {bug.test}_test" for bug in bugs))
        return 0
    if options.build is None:
        parser.error("--build: got none, want a build folder with tests")
    try:
        return 1 if plant_all(options.build, bugs) else 0
    except (PlantError, subprocess.TimeoutExpired) as error:
        print(f"planted_bugs: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
