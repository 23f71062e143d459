"""Tests of the ctypes structs against the C headers, of the exports, and of what is installed."""

from __future__ import annotations

import ctypes
import enum
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmdeploy._turbomind import KvFormat
from lmdeploy.kvx import KvxError, abi, check, include_folder, library, library_path

MAX_LIBRARY_BYTES = 1 << 20
STRUCTS = {
    "kvx_version_t": abi.Version,
    "kvx_tensor_desc_t": abi.TensorDesc,
    "kvx_pool_desc_t": abi.PoolDesc,
    "kvx_cache_desc_t": abi.CacheDesc,
    "kvx_block_table_t": abi.BlockTable,
    "kvx_slot_mapping_t": abi.SlotMapping,
    "kvx_seq_lens_t": abi.SeqLens,
    "kvx_kv_io_desc_t": abi.KvIoDesc,
    "kvx_scale_desc_t": abi.ScaleDesc,
    "kvx_write_desc_t": abi.WriteDesc,
    "kvx_gather_desc_t": abi.GatherDesc,
    "kvx_tm_layer_t": abi.TmLayer,
}
ENUMS: dict[str, type[enum.IntEnum] | type[enum.IntFlag]] = {
    "KVX_STATUS": abi.Status,
    "KVX_DTYPE": abi.Dtype,
    "KVX_MEMORY": abi.Memory,
    "KVX_LAYOUT": abi.Layout,
    "KVX_BLOCK_TABLE": abi.BlockTableFormat,
    "KVX_BLOCK_TABLE_FLAG": abi.BlockTableFlag,
    "KVX_SCALE": abi.Scale,
    "KVX_TM_MODE": abi.TmMode,
    "KVX_TM_FLAG": abi.TmFlag,
}


def headers() -> str:
    return "".join(path.read_text() for path in sorted((include_folder() / "kvx").glob("*.h")))


def test_structs_equal_the_headers(tmp_path: Path) -> None:
    places = [
        f'  printf("{struct}.{field} %zu\\n", offsetof({struct}, {field}));'
        for struct, mirror in STRUCTS.items()
        for field, _ in mirror._fields_
    ]
    sizes = [f'  printf("{struct} %zu\\n", sizeof({struct}));' for struct in STRUCTS]
    source = tmp_path / "facts.c"
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "kvx/kvx_turbomind.h"']
    source.write_text("\n".join([*lines, "int main(void) {", *places, *sizes, "}"]))
    program = tmp_path / "facts"
    command = ["cc", "-std=c11", f"-I{include_folder()}", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in map(str.split, text.splitlines())}
    for struct, mirror in STRUCTS.items():
        assert found[struct] == ctypes.sizeof(mirror), struct
        for field, _ in mirror._fields_:
            assert found[f"{struct}.{field}"] == getattr(mirror, field).offset, (struct, field)


def test_enumerators_equal_the_headers() -> None:
    defined = dict(re.findall(r"^  (KVX_\w+) = (\d+)", headers(), re.M))
    defined.pop("KVX_MAX_TENSOR_DIMS", None)
    mirrored = {
        f"{prefix}_{member.name}": str(member.value)
        for prefix, kind in ENUMS.items()
        for member in kind.__members__.values()
    }
    assert mirrored == defined
    assert f"KVX_MAX_TENSOR_DIMS = {abi.MAX_TENSOR_DIMS}" in headers()


def test_modes_are_the_formats_of_the_engine() -> None:
    names = {abi.TmMode.FP8_E4M3: "fp8"}
    modes = {names.get(mode, mode.name.lower()): int(mode) for mode in abi.TmMode}
    assert modes == {format.name: format.value for format in KvFormat}


def test_functions_are_those_of_the_headers_and_the_only_exports() -> None:
    declared = set(re.findall(r"KVX_API kvx_status_t\s+(\w+)\(", headers()))
    assert set(abi.FUNCTIONS) == declared
    command = ["nm", "-D", "--defined-only", str(library_path())]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1].split("@")[0] for line in listed.splitlines()} == declared


def test_library_is_small_and_links_no_framework() -> None:
    assert library_path().stat().st_size <= MAX_LIBRARY_BYTES
    command = ["readelf", "-d", str(library_path())]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "Library soname: [libkvx.so.1]" in text
    needed = re.findall(r"NEEDED.*\[(\S+)\]", text)
    assert {name.split(".so")[0] for name in needed} <= {
        *("libstdc++", "libm", "libgcc_s", "libc", "libpthread", "ld-linux-x86-64")
    }


def test_module_prints_where_both_are() -> None:
    command = [sys.executable, "-m", "lmdeploy.kvx"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert text == f"library: {library_path()}\ninclude: {include_folder()}\n"
    assert (include_folder() / "kvx/kvx_abi.h").is_file()


def test_library_of_another_major_version_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"KVX_ABI_VERSION_MAJOR {abi.VERSION_MAJOR}\n" in headers()
    library.cache_clear()
    monkeypatch.setattr(abi, "VERSION_MAJOR", abi.VERSION_MAJOR + 1)
    with pytest.raises(KvxError, match="INCOMPATIBLE"):
        library()
    monkeypatch.undo()
    assert library().kvx_get_version(abi.Version()) == abi.Status.OK


def test_status_becomes_an_error() -> None:
    version = abi.Version()
    check(library().kvx_get_version(version))
    assert (version.abi_major, version.abi_minor) == (1, 1)
    with pytest.raises(KvxError, match="libkvx returned INVALID_ARGUMENT") as error:
        check(library().kvx_get_version(None))
    assert error.value.status == abi.Status.INVALID_ARGUMENT
