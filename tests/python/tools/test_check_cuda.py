"""What check_cuda reads from the compiler's words and from machine code, and that it fails where it
has to. No compiler is needed: scripts stand in for it."""

from __future__ import annotations

from pathlib import Path

import check_cuda
import pytest
from check_cuda import Compiled, Count, Kernel, Unit

NAME = (
    "_ZN9turbomind4cuda12DecodeKernelINS0_12DecodeConfigILNS_11KvCacheModeE{0}ELS3_{0}E"
    "LNS_8DataTypeE2ELi{1}ELi{2}ELi3ELi4ELi{3}EEEEEvNS0_12DecodeParamsE"
)

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90a'
ptxas info    : Function properties for _Z5firstv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 95 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90a'
ptxas info    : Function properties for _Z6secondv
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 8 bytes cumulative stack size
"""

# Two paths that a branch leaves out (0x0040 to 0x0050, 0x0080 to 0x00a0), one that it does not
# leave out for good (no shuffle, no store: 0x0020), a loop without products before.
SASS = """
\t\tFunction : _Z4loopv
\t.headerflags\t@"EF_CUDA_SM90"
        /*0000*/                   IADD3 R1, R1, 0x1, RZ ;   /* 0x0000000101017810 */
                                                             /* 0x000fe20000000000 */
        /*0008*/              @P0  BRA 0x0 ;
        /*0010*/             @!P1  BRA 0x30 ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR8][R32.64] ;
        /*0030*/             @!P2  BRA P3, 0x60 ;
        /*0040*/                   STS.U8 [R5], RZ ;
        /*0050*/                   WARPSYNC.ALL ;
        /*0060*/                   HMMA.16816.F32 R32, R32, R8, RZ ;
        /*0070*/             @!P4  BRA 0xb0 ;
        /*0080*/                   SHFL.BFLY PT, R1, R1, 0x4, 0x1f ;
        /*0090*/              @P5  FMUL R2, R2, R1 ;
        /*00a0*/                   FMUL R3, R3, R1 ;
        /*00b0*/             @!P6  BRA 0xd0 ;
        /*00c0*/                   HMMA.16816.F32 R32, R32, R8, RZ ;
        /*00d0*/              @UP0 BRA 0x10 ;
        /*00e0*/                   EXIT ;
\t\tFunction : _Z5emptyv
        /*0000*/                   EXIT ;
"""


def test_what_ptxas_says():
    first, second = check_cuda.parse_ptxas(PTXAS)
    assert first == Compiled("_Z5firstv", registers=95)
    assert second == Compiled("_Z6secondv", registers=80, frame=8, spilled=16)


def test_the_loop_and_its_rare_paths():
    code = check_cuda.parse_sass(SASS)
    assert [len(body) for body in code.values()] == [16, 1]
    body = check_cuda.tile_loop(code["_Z4loopv"])
    assert (body[0].address, body[-1].address) == (0x10, 0xD0)
    assert sorted(check_cuda.rare_addresses(body)) == [0x40, 0x50, 0x80, 0x90, 0xA0]
    assert check_cuda.count_loop(code["_Z4loopv"]) == Count(loop=13, rare=5)
    with pytest.raises(ValueError, match="no loop"):
        check_cuda.count_loop(code["_Z5emptyv"])


def test_per_element():
    assert Count(loop=500, rare=116).per_element(Kernel("kFp4Nv", "kFp4Nv", 64, 32)) == 3.0


def test_kernels_by_name():
    gated, small = Kernel.of(NAME.format(6, 128, 32, 1)), Kernel.of(NAME.format(6, 128, 16, 1))
    assert gated == Kernel("kFp4Nv", "kFp4Nv", 128, 32) and gated.most_per_element == 3.1
    assert small == Kernel("kFp4Nv", "kFp4Nv", 128, 16) and small.most_per_element is None
    pair = Kernel.of(NAME.format(6, 64, 32, 2))
    assert pair == Kernel("kFp4Nv", "kFp4Nv", 64, 32, 2) and pair.most_per_element == 3.8
    mixed = Kernel.of(NAME.format(1, 64, 32, 1).replace("ELS3_1E", "ELS3_5E"))
    assert mixed == Kernel("kInt8", "kFp4Mx", 64, 32) and not mixed.is_counted
    assert Kernel.of("_Z4loopv") is None


def test_modes_are_numbered_as_in_the_header():
    header = (check_cuda.ROOT / "src/turbomind/kv/kv_cache_mode.h").read_text(encoding="utf-8")
    names = header.split("enum class KvCacheMode")[1].split("{")[1].split("}")[0]
    listed = [line.split("//")[0].strip(" ,") for line in names.splitlines()]
    assert [name.split(" ")[0] for name in listed if name] == list(check_cuda.MODES)


def test_what_is_compiled():
    quick, everything = check_cuda.chosen_units(False), check_cuda.chosen_units(True)
    assert {unit.arch for unit in quick if not unit.file} == set(check_cuda.OTHER_ARCHS)
    files = set(check_cuda.BACKEND.rglob("*.cu"))
    assert {unit.file for unit in quick if unit.file and unit.arch == "sm_90a"} == files
    built = {(unit.file, unit.arch) for unit in everything if unit.file}
    assert built == {(file, arch) for file in files for arch in check_cuda.ALL_ARCHS}
    assert {"sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"} < set(check_cuda.ALL_ARCHS)
    counted = {unit.label for unit in quick if unit.arch == "sm_90a" and unit.is_counted}
    assert {"head_dim_64.cu", "head_dim_128.cu"} < counted


def make_tool(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def sass_of(name: str, instructions: int) -> str:
    lines = [f"\t\tFunction : {name}", "        /*0000*/    HMMA.16816.F32 R0, R0, R1, RZ ;"]
    lines += [f"        /*{16 * i:04x}*/    FMUL R0, R0, R0 ;" for i in range(1, instructions - 1)]
    return "\n".join([*lines, f"        /*{16 * instructions:04x}*/ @P0 BRA 0x0 ;"])


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the check with tools that say what they are told of two kernels, on two files."""

    def go(
        instructions: int, *, frame: int = 0, spilled: int = 0, fails: bool = False, **names: str
    ):
        gated = tmp_path / "head_dim_128.cu"
        units = [Unit("sm_90a", file=gated), Unit("sm_80", file=tmp_path / "x_ops.cu")]
        said, sass = "", ""
        for mode, head_tiles in ((5, 1), (5, 2), (6, 1), (6, 2)):
            name = NAME.format(mode, 128, 32, head_tiles)
            said += f"Compiling entry function '{names.get('said', name)}' for 'sm_90a'\n"
            said += (
                f"{frame} bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads\n"
            )
            said += "Used 90 registers\n"
            sass += sass_of(names.get("sass", name), instructions) + "\n"
        (tmp_path / "said").write_text(said, encoding="utf-8")
        (tmp_path / "sass").write_text(sass, encoding="utf-8")
        tools = {
            "nvcc": make_tool(tmp_path / "nvcc", f"cat {tmp_path}/said >&2; exit {int(fails)}"),
            "cuobjdump": make_tool(tmp_path / "cuobjdump", f"cat {tmp_path}/sass"),
        }
        monkeypatch.setattr(check_cuda, "find_tool", tools.get)
        monkeypatch.setattr(check_cuda, "chosen_units", lambda everything: units)
        return check_cuda.main([]), capsys.readouterr().out

    return go


def test_the_gate(run):
    most = int(3.1 * 256)
    status, text = run(most)
    assert status == 0 and "0 faults" in text and "FAILED" not in text
    status, text = run(most + 1)
    assert status == 1 and "4 faults" in text and "at most 3.1  FAILED" in text


def test_what_is_gated_has_to_be_there(run):
    status, text = run(700, sass="_Z4loopv")
    assert status == 1 and text.count("no machine code found  FAILED") == 4
    status, text = run(700, said="_Z4loopv")
    assert status == 1 and "head_dim_128.cu: no decode kernel kFp4Mx 128, 16 heads  FAILED" in text
    assert "4 faults" in text


def test_spills_and_stack_frames_fail(run):
    status, text = run(700, spilled=4)
    assert status == 1 and "8 faults" in text
    status, text = run(700, spilled=4, said="_Z4loopv")
    assert status == 1 and "12 faults" in text and "x_ops.cu: _Z4loopv spills 4" in text
    status, text = run(700, frame=8)
    assert status == 1 and "8 faults" in text
    status, text = run(700, frame=32, said="_Z4loopv")
    assert "_Z4loopv" not in text
    status, text = run(700, frame=40, said="_Z4loopv")
    assert status == 1 and "_Z4loopv spills 0 bytes, has a stack frame of 40  FAILED" in text


def test_a_file_that_does_not_compile(run):
    status, text = run(700, fails=True)
    assert status == 1 and "x_ops.cu: does not compile" in text


def test_without_a_compiler(monkeypatch, capsys):
    monkeypatch.setattr(check_cuda, "find_tool", lambda name: None)
    assert check_cuda.main([]) == 0
    assert capsys.readouterr().out.strip() == "check_cuda: no nvcc here: nothing is checked"
