"""Instruction counts against the record: of a decode step per KV mode on the AVX2 build, and of the
hot loops of the AVX-512 kernels. A change that is meant is recorded with
`python scripts/count_instructions.py BUILD --update`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import count_instructions as counting  # noqa: E402

LISTING = """
file format elf64-x86-64

0000000000000000 <a::Kernel<3>(int)>:
   0:\tvmovups (%rdi),%zmm0
   4:\tvpermb %zmm1,%zmm2,%zmm3
   8:\tvfmadd231ps %zmm0,%zmm1,%zmm2
   c:\tjne    4 <a::Kernel<3>(int)+0x4>
  10:\tvfmadd231ps %zmm0,%zmm1,%zmm2
  14:\tvcvtdq2ps %zmm0,%zmm1
  18:\tvfmadd231ps %zmm0,%zmm1,%zmm2
  1c:\tadd    $0x40,%rax
  20:\tjb     10 <a::Kernel<3>(int)+0x10>
  24:\tjmp    0 <a::Kernel<3>(int)>
  28:\tret

0000000000000030 <a::Other()>:
  30:\tret
"""


@pytest.fixture(scope="module")
def build():
    """The build folder, or a skip that says what is missing."""
    folder = Path(os.environ.get("TM_BUILD_FOLDER", ROOT / "build" / "release"))
    if platform.machine() != "x86_64":
        pytest.skip("the counts are of x86-64 code")
    if not (folder / "step_guard").is_file():
        pytest.skip(f"no {folder / 'step_guard'}: build there, or set TM_BUILD_FOLDER")
    got, want = counting.compiler(folder), counting.read_record()["compiler"]
    if got != want:
        pytest.skip(f"built by {got}, the record is of {want}: the counts do not compare")
    return folder


def test_a_decode_step_takes_the_recorded_instructions(build):
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed: scripts/test.sh installs it")
    if counting.steps_per_dump(build) == 0:
        pytest.skip("step_guard was built without valgrind/callgrind.h: build again")
    record = counting.read_record()["decode_step_avx2"]
    assert counting.compare_steps(counting.count_steps(build), record) == []


def test_hot_loops_take_the_recorded_instructions(build):
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed: it is part of binutils")
    record = counting.read_record()
    assert counting.compare_loops(counting.count_loops(build, record), record) == []


def test_a_step_that_costs_more_or_less_is_reported():
    want = dict.fromkeys(counting.MODES, 1000)
    assert counting.compare_steps(want, want) == []
    assert counting.compare_steps({**want, "int4": 1029}, want) == []
    for got in (1031, 969):
        (text,) = counting.compare_steps({**want, "int4": got}, want)
        assert f"int4: got {got}, want 1000" in text


def test_a_loop_that_has_changed_is_reported():
    record = {"loops": [{"name": "x", "counts": {"all": 100, "fma": 10}}]}
    assert counting.compare_loops({"x": {"all": 110, "fma": 11}}, record) == []
    assert counting.compare_loops({"x": {"all": 111, "fma": 10}}, record) == [
        "loop, x, all: got 111, want 100"
    ]
    wrong = counting.compare_loops({"x": {"all": 100, "fma": 12, "convert": 1}}, record)
    assert wrong == ["loop, x, fma: got 12, want 10", "loop, x, convert: got 1, want 0"]


def test_the_innermost_loop_with_most_of_an_instruction_is_found():
    functions = counting.parse_functions(LISTING)
    assert set(functions) == {"a::Kernel<3>(int)", "a::Other()"}
    loops = counting.find_loops(functions["a::Kernel<3>(int)"])
    assert [loop[0].address for loop in loops] == [0x4, 0x10]
    rule = counting.LoopRule("k", "avx512", "k.cc", r"Kernel<3>", "vfmadd")
    assert counting.count_loop(functions, rule) == {
        "all": 5,
        "branch": 1,
        "convert": 1,
        "fma": 2,
        "scalar": 1,
    }


def test_a_loop_around_others_is_found_by_its_share():
    functions = counting.parse_functions(LISTING)
    for most, count in (("vmov", 10), ("vfmadd", 5)):  # the outer loop has 3 of 10, the last 2 of 5
        rule = counting.LoopRule("k", "avx512", "k.cc", r"Kernel<3>", most, by_share=True)
        assert counting.count_loop(functions, rule)["all"] == count


@pytest.mark.parametrize(
    ("symbol", "most", "message"),
    [
        ("Missing", "vfmadd", "got 0 functions like 'Missing'"),
        ("a::", "vfmadd", "got 2 functions"),
        ("Other", "vfmadd", "no loop with 'vfmadd'"),
        ("Kernel", "vpdp", "no loop with 'vpdp'"),
    ],
)
def test_a_loop_that_is_not_there_is_an_error(symbol, most, message):
    rule = counting.LoopRule("k", "avx512", "k.cc", symbol, most)
    with pytest.raises(counting.CountError, match=message):
        counting.count_loop(counting.parse_functions(LISTING), rule)


def test_dumps_are_read_in_their_order(tmp_path):
    for name, total, trigger in ((10, 30, "Client Request: none"), (9, 20, "Client Request: none")):
        (tmp_path / f"callgrind.out.x.{name}").write_text(
            f"desc: Trigger: {trigger}\nsummary: {total}\n\ntotals: {total}\n"
        )
    (tmp_path / "callgrind.out.x").write_text("desc: Trigger: Program termination\ntotals: 7\n")
    assert counting.read_totals(tmp_path, 2) == [20, 30]
    with pytest.raises(counting.CountError, match="got 2 dumps"):
        counting.read_totals(tmp_path, 3)
