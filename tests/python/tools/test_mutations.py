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


@pytest.mark.parametrize(
    ("status", "output", "caught"),
    [
        (0, "[doctest] Status: SUCCESS!", False),
        (None, "", False),
        (127, "error while loading shared libraries", False),
        (1, "x.cc:1: ERROR: CHECK( a == b ) is NOT correct!\n  values: CHECK( 1 == 2 )", True),
        (1, "ERROR: test case THREW exception: not aligned", True),
        (-6, "", True),
    ],
)
def test_verdict_of_needs_a_failed_check_or_a_crash(status, output, caught):
    assert mutation_test.verdict_of(status, output)[0] == caught
