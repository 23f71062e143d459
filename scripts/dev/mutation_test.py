"""Apply mutations to the CUDA kernels, one at a time, and run the tests that need no GPU.

    python scripts/dev/mutation_test.py --build BUILD_FOLDER            all of them
    python scripts/dev/mutation_test.py --build BUILD_FOLDER --only decode-copy-wait
    python scripts/dev/mutation_test.py --build BUILD_FOLDER --turn 7   a few, others each turn

The mutations are data: mutations.yaml. The build folder contains the tests of this tree and is not
changed. The program compiles mutated files into a temporary folder and links them before the
libraries of the build folder. It exits with 1 if a test passes with its mutation, or if the text to
replace does not occur exactly once.
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

import yaml

ROOT = Path(__file__).resolve().parents[2]
MUTATIONS = Path(__file__).with_name("mutations.yaml")
CUDA = Path("src/turbomind/backend/cuda")
TESTS = Path("tests/cpp/cuda")
# In link order.
LIBRARIES = (
    "cuda_shim kvx_parts kv_cache engine doctest_main cuda_host cuda_loader model cpu ops kv core"
)
TURN_SIZE = 4
COMPILE_LIMIT_S = 600
TEST_LIMIT_S = 300


class MutationError(Exception):
    """A mutation cannot be applied or built."""


@dataclass(frozen=True)
class Mutation:
    """One change of one CUDA file, and the test that must fail with it."""

    name: str
    file: str
    test: str  # tests/cpp/cuda/<test>_test.cc
    old: str  # occurs exactly once
    new: str
    sources: tuple[str, ...] = ()

    def mutated_text(self) -> str:
        """Return the file with the mutation."""
        text = (ROOT / find_file(CUDA, self.file)).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise MutationError(
                f"{self.name}: its text occurs {count} times in {self.file}, not once"
            )
        return text.replace(self.old, self.new)

    def units(self) -> list[Path]:
        """Return the files that form the test."""
        return [
            find_file(TESTS, f"{self.test}_test.cc"),
            *(find_file(CUDA, source) for source in self.sources),
        ]


def find_file(folder: Path, name: str) -> Path:
    """Return the path of the only file of this name below a folder of the tree."""
    found = sorted((ROOT / folder).rglob(name))
    if len(found) != 1:
        raise MutationError(f"found {len(found)} files {name} in {folder}, not one")
    return found[0].relative_to(ROOT)


def read_mutations() -> list[Mutation]:
    """Read mutations.yaml."""
    entries = yaml.safe_load(MUTATIONS.read_text(encoding="utf-8"))
    return [Mutation(**{**entry, "sources": tuple(entry.get("sources", ()))}) for entry in entries]


def verdict_of(status: int | None, output: str) -> tuple[bool, str]:
    """Return whether a test caught a mutation, and how.

    A test catches a mutation if a check fails or the process crashes, not if it does not end.
    """
    if status is None:
        return False, f"the test did not end in {TEST_LIMIT_S} s"
    if status == 0:
        return False, "the test passes"
    if status < 0:
        return True, f"signal {-status}"
    error = re.search(r"ERROR: (.+(?:\n +.+)?)", output)
    return (True, " ".join(error[1].split())) if error else (False, f"status {status}, no check")


@dataclass
class Builder:
    """Compiles files with the commands of the build folder and links them before its libraries."""

    build: Path
    folder: Path
    commands: dict[Path, list[str]] = field(default_factory=dict)  # by path in the tree
    originals: dict[Path, tuple[Path, set[Path]]] = field(default_factory=dict)

    def read_commands(self) -> None:
        """Read the compiler commands of the build folder."""
        path = self.build / "compile_commands.json"
        if not path.is_file():
            raise MutationError(f"{path} does not exist; build with -DTM_BUILD_TESTS=ON")
        for entry in json.loads(path.read_text()):
            words = shlex.split(entry["command"])
            at = words.index("-o")
            kept = [*words[:at], *(word for word in words[at + 2 : -1] if word != "-c")]
            self.commands[Path(entry["file"]).relative_to(ROOT)] = kept

    def compile(self, source: Path, overlay: Path | None = None) -> tuple[Path, set[Path]]:
        """Return the object of a file and the files that it includes; `overlay` comes first."""
        if source not in self.commands:
            raise MutationError(f"the build folder does not compile {source}")
        where = overlay or self.folder
        out = where / (source.name + ".o")
        path = ROOT / source
        command = list(self.commands[source])
        if overlay is not None:
            command.insert(1, f"-I{overlay / 'src'}")
            path = overlay / source if (overlay / source).is_file() else path
        run([*command, "-w", "-MMD", "-o", str(out), "-c", str(path)])
        words = out.with_suffix(".d").read_text().replace("\\\n", " ").split()[1:]
        files = {Path(word).resolve() for word in words}
        return out, {f.relative_to(ROOT) for f in files if f.is_relative_to(ROOT)}

    def run_test(self, mutation: Mutation, overlay: Path | None) -> tuple[int | None, str]:
        """Run the test, with the mutated file in `overlay`, and return its status and output."""
        objects, num_mutated = [], 0
        units = mutation.units()
        for source in units:
            if source not in self.originals:
                self.originals[source] = self.compile(source)
            path, made_from = self.originals[source]
            if overlay is not None and find_file(CUDA, mutation.file) in made_from:
                path, _ = self.compile(source, overlay)
                num_mutated += 1
            objects.append(str(path))
        if overlay is not None and num_mutated == 0:
            raise MutationError(f"{mutation.name}: no file of the test includes {mutation.file}")
        program = (overlay or self.folder) / f"{mutation.test}_test"
        libraries = [str(self.build / f"libtm_{name}.a") for name in LIBRARIES.split()]
        compiler = self.commands[units[0]][0]
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
            return None, ""
        return done.returncode, done.stdout


def run(command: list[str]) -> None:
    """Run a compiler or linker."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
    )
    if done.returncode != 0:
        raise MutationError(f"{shlex.join(command)}\n{done.stderr.strip()[-2000:]}")


def test_all(build: Path, mutations: list[Mutation]) -> int:
    """Test the mutations, print a table and return the number that no test caught."""
    for mutation in mutations:
        mutation.mutated_text()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        builder = Builder(build.resolve(), Path(folder).resolve())
        builder.read_commands()
        for mutation in {(m.test, m.sources): m for m in mutations}.values():
            status, output = builder.run_test(mutation, None)
            if status != 0:
                raise MutationError(
                    f"{mutation.test}_test fails without mutation:\n{output[-2000:]}"
                )
        for mutation in mutations:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory(dir=builder.folder) as name:
                file = Path(name) / find_file(CUDA, mutation.file)
                file.parent.mkdir(parents=True)
                file.write_text(mutation.mutated_text(), encoding="utf-8")
                caught, how = verdict_of(*builder.run_test(mutation, Path(name)))
            missed += not caught
            verdict = "caught" if caught else "NOT CAUGHT"
            seconds = time.monotonic() - begun
            print(f"{mutation.name:30} {verdict:10} {seconds:5.1f} s  {how[:120]}", flush=True)
    print(f"{len(mutations)} mutations, {len(mutations) - missed} caught, {missed} not caught")
    return missed


def main(arguments: list[str] | None = None) -> int:
    """Test mutations. Return 1 if one is not caught or cannot be applied."""
    mutations = read_mutations()
    names = [mutation.name for mutation in mutations]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--build", type=Path, required=True, help="build folder, release, with tests"
    )
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", action="append", choices=names, metavar="NAME", help="repeatable")
    some.add_argument("--turn", type=int, help=f"test {TURN_SIZE} mutations, chosen by this number")
    options = parser.parse_args(arguments)
    if options.turn is not None:
        first = options.turn * TURN_SIZE
        mutations = [mutations[i % len(mutations)] for i in range(first, first + TURN_SIZE)]
    if options.only:
        mutations = [mutation for mutation in mutations if mutation.name in options.only]
    try:
        return 1 if test_all(options.build, mutations) else 0
    except (MutationError, subprocess.TimeoutExpired) as error:
        print(f"mutation_test: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
