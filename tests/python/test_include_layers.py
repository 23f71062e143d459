"""Tests of the layers of C++: a file includes only its own layer and those below it."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# From the ground up. Ops define the interface of a device, and backends implement it. Components
# are for other programs, so the server includes none of them.
LAYERS = ("core", "kv", "ops", "backend", "profile", "model", "engine", "bindings", "components")
# The engine loads one backend or both, so neither may need the other. Components are independent.
APART = ({"backend/cpu", "backend/cuda"}, {"components/kvx", "components/kv_cache"})
INCLUDE = re.compile(r'^\s*#\s*include "((?:turbomind|kvx|kv_cache)/[^"]+)"', re.MULTILINE)

Include = tuple[str, str]  # the file and the file that it includes


def short(path: str) -> str:
    """Return a path without its root, but with that of components."""
    if path.startswith(("kvx/", "kv_cache/")):
        return f"components/{path}"
    return path.removeprefix("src/").removeprefix("turbomind/")


def read_includes(root: Path) -> list[Include]:
    files = [x for folder in ("src", "components") for x in (root / folder).rglob("*")]
    return [
        (short(file.relative_to(root).as_posix()), short(included))
        for file in files
        if file.suffix in {".h", ".cuh", ".c", ".cc", ".cu"}
        for included in INCLUDE.findall(file.read_text(encoding="utf-8"))
    ]


def level(path: str) -> int:
    return LAYERS.index(path.partition("/")[0])


def is_wrong(file: str, included: str) -> bool:
    def sides(pair: set[str]) -> set[str]:
        return {x for x in pair for path in (file, included) if path.startswith(x + "/")}

    return level(file) < level(included) or any(sides(pair) == pair for pair in APART)


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
    [
        ("src/turbomind/kv/layout.h", "turbomind/ops/params.h"),
        ("src/turbomind/backend/cpu/cpu_device.cc", "turbomind/backend/cuda/cuda_device.h"),
        ("src/turbomind/bindings/module.cc", "kv_cache/contiguous_cache.h"),
        ("src/turbomind/kv/layout.h", "kvx/kvx_abi.h"),
        ("components/kv_cache/contiguous_cache.h", "kvx/kvx_abi.h"),
    ],
)
def test_check_layers_planted_include_is_found(file: str, included: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f'#pragma once\n#include "{included}"\n', encoding="utf-8")
    with pytest.raises(AssertionError, match=f"{short(file)} includes {short(included)}"):
        check_layers(read_includes(tmp_path))


def test_check_layers_planted_cycle_of_folders_is_found() -> None:
    with pytest.raises(CycleError):
        check_layers(
            [
                ("backend/cuda/kv/a.h", "backend/cuda/b.h"),
                ("backend/cuda/b.h", "backend/cuda/kv/a.h"),
            ]
        )
