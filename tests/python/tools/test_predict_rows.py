"""Tests of benchmarks/predict_rows.py: its counts, and its errors against measurements."""

from __future__ import annotations

import random
import re
import struct

import predict_rows
import pytest
from compiled_kernel import ROOT, sizes_of
from predict_rows import OLD, WORKS, Work, form_of, loop_of_copies, predict

NOTES = ROOT / "benchmarks/NOTES.md"
SASS = """
.L_x_1:
        /*0000*/                   DEPBAR.LE SB0, 0x2 ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
.L_x_2:
        /*0030*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0040*/               @P0 BRA `(.L_x_3) ;
        /*0050*/                   FADD R8, R8, R12 ;
        /*0060*/                   STS.128 [R3], R8 ;
.L_x_3:
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""


def test_loop_has_copies_and_products_but_no_sums_of_slices() -> None:
    names = [re.sub(r"^@!?P\d ", "", line).split()[0] for line in loop_of_copies(SASS)]
    assert names == ["DEPBAR.LE", "BRA", "LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16", "BRA", "BRA"]
    with pytest.raises(ValueError, match="no loop"):
        loop_of_copies(SASS.replace("DEPBAR.LE", "NOP"))


def test_sizes_are_read_from_the_disassembly() -> None:
    raw = ", ".join(f"0x{byte:02x}" for byte in struct.pack("<3i", 51200, 4, 64))
    assert sizes_of(f"sizes:\n        /*0000*/ \t.byte\t{raw}\n.L_0:\n") == [51200, 4, 64]


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (32, 16), (128, 16), (128, 64)])
def test_blocks_of_experts_are_those_of_random_tokens(tokens: int, rows: int) -> None:
    work = Work("mxfp4", 5760, 2880, tokens, experts=True)
    generator, total, rounds = random.Random(1), 0, 400
    for _ in range(rounds):
        counts = [0] * predict_rows.EXPERTS
        for _ in range(tokens):
            for expert in generator.sample(range(predict_rows.EXPERTS), predict_rows.TOP):
                counts[expert] += 1
        total += sum(-(-count // rows) for count in counts)
    assert work.row_blocks(rows) == pytest.approx(total / rounds, rel=0.01)


def test_errors_are_those_that_the_notes_state() -> None:
    text = NOTES.read_text("utf-8").partition("## Linear layers with many rows")[2]
    stated = [
        (float(us), float(measured), int(error.replace("−", "-")))
        for us, measured, error in re.findall(
            r"^\|.* KiB \| ([\d.]+) \| ([\d.]+) \| ([+−]\d+) % \|$", text, re.M
        )
    ]
    found = []
    for work in WORKS:
        us = predict(work, OLD[form_of(work)]).us
        error = round((us / work.measured_us - 1) * 100)
        found.append((round(us, 1), round(work.measured_us, 1), error))
    assert stated == found
    assert max(abs(error) for *_, error in found) <= 30


def test_more_work_never_takes_less_time() -> None:
    for kind in ("q4_0", "bf16"):
        times = [
            predict(work, OLD[form_of(work)]).us
            for work in (Work(kind, outputs, 4096, 32) for outputs in (8192, 16384, 28672, 57344))
        ]
        assert times == sorted(times) and times[0] > 0
