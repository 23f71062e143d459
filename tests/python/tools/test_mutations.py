"""Tests that every mutation of the CUDA kernels applies. check.sh runs the mutations."""

from __future__ import annotations

import mutation_test
import pytest

MUTATIONS = mutation_test.read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_applies_to_one_place_of_its_file(mutation):
    assert mutation.new != mutation.old
    assert mutation.new in mutation.mutated_text()
    assert all((mutation_test.ROOT / path).is_file() for path in mutation.units())
