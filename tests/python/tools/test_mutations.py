"""Tests that every mutation of the CUDA kernels applies. check.sh runs the mutations."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import mutation_test
import pytest

MUTATIONS = mutation_test.read_mutations()
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@functools.cache
def files_of(path: Path) -> frozenset[Path]:
    """Return a file of the tree and all that it includes, directly or not."""
    found = {path}
    for name in INCLUDE.findall((mutation_test.ROOT / path).read_text(encoding="utf-8")):
        for folder in (Path("src"), Path("tests/cpp")):
            if (mutation_test.ROOT / folder / name).is_file():
                found |= files_of(folder / name)
    return frozenset(found)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_applies_to_one_place_of_its_file(mutation):
    assert mutation.new != mutation.old
    assert mutation.new in mutation.mutated_text()
    file = mutation_test.find_file(mutation_test.CUDA, mutation.file)
    assert any(file in files_of(unit) for unit in mutation.units()), "no unit compiles the mutation"
