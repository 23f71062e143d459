"""Tests of the layers of src: a file includes only its own layer and those below it."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "src"
# From the ground up. Ops define the interface of a device, and backends implement it.
LAYERS = ("core", "kv", "ops", "backend", "kvx", "profile", "model", "engine", "bindings")
# The engine loads one backend or both, so neither may need the other.
APART = {"backend/cpu", "backend/cuda"}
INCLUDE = re.compile(r'^\s*#\s*include "((?:turbomind|kvx)/[^"]+)"', re.MULTILINE)

Include = tuple[str, str]  # the file and the file that it includes; turbomind/ is left out


def read_includes(root: Path) -> list[Include]:
    files = [x for x in root.rglob("*") if x.suffix in {".h", ".cuh", ".cc", ".cu"}]
    return [
        (
            file.relative_to(root).as_posix().removeprefix("turbomind/"),
            included.removeprefix("turbomind/"),
        )
        for file in files
        for included in INCLUDE.findall(file.read_text(encoding="utf-8"))
    ]


def level(path: str) -> int:
    return LAYERS.index(path.partition("/")[0])


def is_wrong(file: str, included: str) -> bool:
    sides = {x for x in APART for path in (file, included) if path.startswith(x + "/")}
    return level(file) < level(included) or sides == APART


def check_layers(includes: list[Include]) -> None:
    assert not [f"{a} includes {b}" for a, b in includes if is_wrong(a, b)]
    folders: dict[str, set[str]] = {}
    for pair in includes:
        a, b = (path.rpartition("/")[0] for path in pair)
        if a != b:
            folders.setdefault(a, set()).add(b)
    TopologicalSorter(folders).prepare()  # raises CycleError


def test_check_layers_of_the_sources_finds_no_fault() -> None:
    includes = read_includes(ROOT)
    assert {level(file) for file, _ in includes} == set(range(len(LAYERS)))
    check_layers(includes)


@pytest.mark.parametrize(
    ("file", "included"),
    [("kv/layout.h", "ops/params.h"), ("backend/cpu/cpu_device.cc", "backend/cuda/cuda_device.h")],
)
def test_check_layers_planted_include_is_found(file: str, included: str, tmp_path: Path) -> None:
    path = tmp_path / "turbomind" / file
    path.parent.mkdir(parents=True)
    path.write_text(f'#pragma once\n#include "turbomind/{included}"\n', encoding="utf-8")
    with pytest.raises(AssertionError, match=f"{file} includes {included}"):
        check_layers(read_includes(tmp_path))


def test_check_layers_planted_cycle_of_folders_is_found() -> None:
    with pytest.raises(CycleError):
        check_layers(
            [
                ("backend/cuda/kv/a.h", "backend/cuda/b.h"),
                ("backend/cuda/b.h", "backend/cuda/kv/a.h"),
            ]
        )
